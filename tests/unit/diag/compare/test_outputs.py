"""Greedy outputs: asked of a server, read again, and judged beside what one arm does to itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atom.bench.load import Api, Endpoint
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.diag.compare.outputs import OUTPUTS_FILE, Output, divergence, probe_outputs, prompt, read_outputs

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**body, "key": self.headers.get("Authorization")})
            status, value = answer(body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}", asked
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def completion(body: dict[str, Any]) -> tuple[int, Any]:
    choice: dict[str, Any] = {"text": f"<{body['prompt']}>", "finish_reason": "length"}
    if "logprobs" in body:
        choice["logprobs"] = {"tokens": ["<", body["prompt"], ">"]}
    return 200, {"choices": [choice]}


def test_prompts_are_fixed_and_different() -> None:
    assert len({prompt(index) for index in range(256)}) == 256


def test_answers_are_asked_one_by_one_and_kept(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    with server(completion) as (url, asked):
        probe_outputs(Endpoint(base_url=url, model="m", api_key="secret"), run_dir, 20)
    assert [one["prompt"] for one in asked] == [prompt(index) for index in range(20)]
    assert {(one["temperature"], one["stream"], one["model"], one["key"]) for one in asked} == {
        (0, False, "m", "Bearer secret")
    }
    outputs = read_outputs(run_dir.path)
    assert outputs[19] == Output(f"<{prompt(19)}>", ("<", prompt(19), ">"))


def test_chat_and_servers_without_log_probabilities(tmp_path: Path) -> None:
    def chat(body: dict[str, Any]) -> tuple[int, Any]:
        if "logprobs" in body:
            return 400, {"error": {"message": "logprobs are not implemented"}}
        return 200, {"choices": [{"message": {"content": body["messages"][0]["content"][:5]}}]}

    run_dir = RunDirectory(tmp_path / "run")
    with server(chat) as (url, asked):
        probe_outputs(Endpoint(base_url=url, path="/v1/chat/completions", api=Api.CHAT, model="m"), run_dir, 3)
    assert len(asked) == 4  # refused once
    assert read_outputs(run_dir.path) == {index: Output(prompt(index)[:5], None) for index in range(3)}


@pytest.mark.parametrize("answer", [(500, {}), (200, {"choices": []}), (200, []), (200, {"choices": [{"text": 5}]})])
def test_a_server_that_fails_is_not_asked_for_ever(tmp_path: Path, answer: tuple[int, Any]) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    with server(lambda _: answer) as (url, asked):
        probe_outputs(Endpoint(base_url=url, model="m"), run_dir, 16)
    assert len(asked) == 3
    assert read_outputs(run_dir.path) == {}
    assert all(line["error"] for line in read_jsonl(run_dir.path / OUTPUTS_FILE))


def test_nobody_there_is_no_error_of_the_run(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    probe_outputs(Endpoint(base_url="http://127.0.0.1:9", model="m"), run_dir, 2)
    assert read_outputs(run_dir.path) == {}


def test_foreign_lines_are_skipped(tmp_path: Path) -> None:
    lines = ['{"index":-1,"text":"a"}', '{"index":true,"text":"a"}', '{"index":1,"text":5}', "garbage", "[]"]
    lines += ['{"index":2,"text":"b","tokens":["b",3]}', '{"index":1e99,"text":"a"}']
    (tmp_path / OUTPUTS_FILE).write_text("\n".join(lines))
    assert read_outputs(tmp_path) == {2: Output("b", None)}
    assert read_outputs(tmp_path / "nowhere") == {}


# ---- divergence


def answers(*texts: str) -> dict[int, Output]:
    return {index: Output(text, tuple(text)) for index, text in enumerate(texts)}


def test_identical() -> None:
    found = divergence([answers("ab", "cd")] * 2, [answers("ab", "cd")] * 2)
    assert found is not None
    assert (found.word, found.between, found.within, found.first) == ("identical", 0, 0, None)
    assert found.text == "greedy outputs are identical on 2 prompts"


def test_arms_that_are_each_reproducible_differ_consistently() -> None:
    found = divergence([answers("abcd", "xy")] * 2, [answers("abXd", "xy")] * 2)
    assert found is not None
    assert (found.word, found.between, found.within, found.consistent) == ("differs consistently", 1, 0, (0,))
    assert found.text == (
        "greedy outputs differ between arms on 1 of 2 prompts, at the earliest from token 3 on; the same arm against "
        "itself on fresh servers: 0 of 2: differs consistently"
    )


def test_one_run_of_each_has_nothing_to_be_judged_by() -> None:
    found = divergence([answers("ab")], [answers("ac")])
    assert found is not None
    assert (found.word, found.within, found.p) == ("differs", None, None)
    assert found.text.endswith("; no arm ran twice, so there is nothing to judge that by")


def test_positions_are_characters_where_tokens_are_not_known() -> None:
    found = divergence([{0: Output("hello", None)}], [{0: Output("help", None)}])
    assert found is not None
    assert (found.first, found.unit) == (3, "character")


def test_only_what_all_runs_answered_is_compared() -> None:
    found = divergence([answers("a", "b"), {}], [answers("a")])
    assert found is not None
    assert found.prompts == 1
    assert divergence([answers("a")], []) is None
    assert divergence([{0: Output("a", None)}], [{1: Output("a", None)}]) is None


def noisy(rng: np.random.Generator, flips: float, shift: Mapping[int, str] | None = None) -> dict[int, Output]:
    """Sixteen answers, some of which turn out one way or the other by chance."""
    return answers(*(((shift or {}).get(i, "same")) + ("'" if rng.random() < flips else "") for i in range(16)))


def test_engines_that_are_not_batch_invariant_are_within_a_a() -> None:
    """Of 200 comparisons without a difference, at most one in twenty is called one."""
    rng = np.random.default_rng(5)
    words = []
    for _ in range(200):
        found = divergence([noisy(rng, 0.3) for _ in range(6)], [noisy(rng, 0.3) for _ in range(6)])
        assert found is not None
        words.append(found.word)
    assert words.count("differs consistently") <= 10 + 6  # 5% and two standard errors of 200 draws
    assert words.count("within A/A") + words.count("differs consistently") == 200


def test_what_so_few_runs_cannot_show_is_not_within_anything() -> None:
    """Of the six ways to divide four runs, two are always as extreme as the most extreme one."""
    base, head = [answers("a", "b"), answers("a", "c")], [answers("X", "b"), answers("X", "d")]
    found = divergence(base, head)
    assert found is not None
    assert found.word == "not decided"
    assert found.p == pytest.approx(1 / 3)
    assert found.text.endswith("on fresh servers: 1 of 2: not decided: too few runs")
    for runs in (1, 2, 3):
        alike = divergence([answers("a", str(n)) for n in range(runs)], [answers("a", str(n)) for n in range(2)])
        assert alike is not None
        assert alike.word == "not decided"


@pytest.mark.parametrize(("base", "head", "decides"), [(2, 2, False), (3, 3, False), (4, 4, True), (6, 2, True)])
def test_how_many_runs_can_tell(base: int, head: int, decides: bool) -> None:
    """Two pairs, or one with a control of one pair. The arms are as far apart as can be, beside noise of their own."""
    sides = [[answers(f"{arm}", f"noise {arm} {n}") for n in range(count)] for arm, count in (("a", base), ("b", head))]
    found = divergence(*sides)
    assert found is not None
    assert found.word == ("differs consistently" if decides else "not decided")


def test_a_real_difference_is_found_in_noise() -> None:
    rng = np.random.default_rng(6)
    head = dict.fromkeys(range(5), "other")
    found = divergence([noisy(rng, 0.3) for _ in range(6)], [noisy(rng, 0.3, head) for _ in range(6)])
    assert found is not None
    assert found.word == "differs consistently"
    assert found.p is not None
    assert found.p < 0.01
    assert found.within is not None
    assert 0 < found.within < found.between
    assert json.loads(json.dumps(found.as_dict()))["word"] == "differs consistently"
