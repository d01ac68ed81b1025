"""`atom bench gsm8k` as a whole, against a server whose answers are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
LM_EVAL = os.environ.get("ATOM_TEST_LM_EVAL_PYTHON")
"""An interpreter that has lm_eval, for the one test that needs it."""

ANSWERS = {
    "Q0?": " It is 5+5=10.\n#### 10",
    "Q1?": " The answer is $11.",
    "Q2?": " #### 99 or rather 12",
    "Q3?": " no idea",
    "Q4?": " #### 14",
    "Q5?": " #### 1,500",
}
GOLDS = {"Q0?": "10", "Q1?": "11", "Q2?": "12", "Q3?": "13", "Q4?": "14", "Q5?": "1,500"}
# Right by flexible-extract: Q0 Q1 Q2 Q4 Q5; by strict-match: Q0 Q4 Q5.


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = dict(ANSWERS)
        self.failing: set[str] = set()
        self.held: set[str] = set()
        self.info: dict[str, Any] | None = None
        self.release = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is what a test wants."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        pages: dict[str, Any] = {"/v1/models": {"data": [{"id": "known"}]}, "/server_info": self.server.info}
        page = pages.get(self.path)
        self._answer(404 if page is None else 200, json.dumps(page).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = asked["prompt"].rpartition("Question: ")[2].partition("\n")[0]
        if question in self.server.held:
            self.server.release.wait(60)
        if question in self.server.failing:
            self._answer(500, b'{"error": {"message": "out of luck"}}')
            return
        text = self.server.answers.get(question, " #### 1")
        choice = {"index": 0, "text": text, "finish_reason": "length" if question == "Q3?" else "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        body = {"id": "x", "object": "text_completion", "model": "known", "choices": [choice], "usage": usage}
        if not asked.get("stream"):
            self._answer(200, json.dumps(body).encode())
            return
        self._answer(200, b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n", "text/event-stream")


@pytest.fixture(scope="module")
def known_server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(known_server: Server) -> Iterator[Server]:
    yield known_server
    known_server.answers = dict(ANSWERS)
    known_server.failing, known_server.held, known_server.info = set(), set(), None
    known_server.release.set()
    known_server.release = threading.Event()


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        "".join(
            f"{json.dumps({'question': question, 'answer': f'Think. #### {gold}'})}\n"
            for question, gold in GOLDS.items()
        )
    )
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "atom.cli.main", *arguments]


def atom(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "COLUMNS": "140"}
    env.pop("GITHUB_STEP_SUMMARY", None)
    return subprocess.run(command(*arguments), cwd=folder, env=env, capture_output=True, text=True, timeout=150)


def questions_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "accuracy" / "questions.jsonl").read_text().splitlines()]


def test_values_per_question_and_another_run_beside(tmp_path: Path, server: Server, problems: Path) -> None:
    base = ("bench", "gsm8k", "--base-url", server.url, "--dataset-path", str(problems), "--num-fewshot", "2")
    done = atom(tmp_path, *base, "--output-dir", "a", "--json", "a.json", "--junit", "a.xml")
    assert done.returncode == 0, done.stderr
    assert "accuracy on questions.jsonl (gsm8k format) · 6 questions · 2-shot · temperature 0" in done.stdout
    assert "gsm8k format, questions.jsonl · C64 · 6 requests" in done.stdout
    assert "0.8333 ± 0.1667" in done.stdout
    assert "0.5000 ± 0.2236" in done.stdout
    assert "speculative decoding: not reported by the server" in done.stdout
    assert "1 of 6 texts were cut off" in done.stdout
    rows = questions_of(tmp_path / "a")
    assert [row["flexible_extract_hit"] for row in rows] == [True, True, True, False, True, True]
    assert [row["strict_match_hit"] for row in rows] == [True, False, False, False, True, True]
    assert rows[2] | {"question": ""} == {
        "index": 2,
        "question": "",
        "gold": "12",
        "outcome": "completed",
        "strict_match": "99",
        "strict_match_hit": False,
        "flexible_extract": "12",
        "flexible_extract_hit": True,
        "finish_reason": "stop",
        "output_tokens": 3,
        "error": None,
    }
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["atom"]["accuracy"]["problems"] == "questions.jsonl"
    assert result["atom"]["figures"]["gsm8k_flexible_extract"]["value"] == pytest.approx(5 / 6)
    assert atom(tmp_path, "get", "a", "gsm8k_strict_match").stdout == "0.5\n"

    server.answers |= {"Q3?": " #### 13", "Q0?": " #### 11"}
    other = atom(tmp_path, *base, "--output-dir", "b", "--compare", "a", "--markdown", "-")
    assert other.returncode == 0, other.stderr
    assert "| flexible-extract | 4 | 1 | 1 | 0 | +0.0000 ± 0.2582 | 1 |" in other.stdout
    assert "| strict-match | 2 | 1 | 1 | 2 |" in other.stdout
    assert "not asked the same way" not in other.stdout
    server.info = {"args": {"speculative_algorithm": "EAGLE"}}
    differing = atom(tmp_path, *base, "--limit", "3", "--output-dir", "c", "--compare", "a", "--fewshot-seed", "1")
    assert "the two were not asked the same way: --fewshot-seed 1234 in A, 1 in B" in differing.stdout
    assert "speculative decoding: on by the server's settings; no counters say" in differing.stdout
    assert "3 questions are in one of the runs alone" in differing.stdout


def test_two_runs_without_a_question_in_common(tmp_path: Path, server: Server, problems: Path) -> None:
    base = ("bench", "gsm8k", "--base-url", server.url, "--limit", "2", "--num-fewshot", "0")
    assert atom(tmp_path, *base, "--output-dir", "a").returncode == 0
    done = atom(
        tmp_path, *base, "--dataset-path", str(problems), "--compare", "a", "--output-dir", "b", "--markdown", "-"
    )
    assert done.returncode == 0, done.stderr
    assert "nothing to compare: other problems: synthetic-arithmetic (not GSM8K) in A, questions.jsonl" in done.stdout
    assert "| strict-match | – | – | – | – | – | – |" in done.stdout


def test_a_run_whose_texts_are_gone_says_so(tmp_path: Path, server: Server, problems: Path) -> None:
    base = ("bench", "gsm8k", "--base-url", server.url, "--dataset-path", str(problems))
    assert atom(tmp_path, *base, "--output-dir", "a").returncode == 0
    path = tmp_path / "a" / "requests" / "0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "text": None}) + "\n" for line in lines))
    again = atom(tmp_path, "report", "a")
    assert again.returncode == 4
    assert again.stdout.count("6 records cannot be scored: they lack their text or the right answer") == 2
    assert "NOT VALID: 6 records" in again.stdout


def test_failed_requests_are_wrong_and_named(tmp_path: Path, server: Server, problems: Path) -> None:
    server.failing = {"Q0?", "Q3?"}
    base = ("bench", "gsm8k", "--base-url", server.url, "--dataset-path", str(problems), "--output-dir")
    strict = atom(tmp_path, *base, "a")
    assert strict.returncode == 4
    assert "NOT VALID: 2 of 6 requests failed" in strict.stdout
    assert "failed requests count as wrong: 2 × " in strict.stdout
    assert "0.6667 ± 0.2108" in strict.stdout
    assert [row["outcome"] for row in questions_of(tmp_path / "a")].count("failed") == 2
    lenient = atom(tmp_path, *base, "b", "--failed-request-threshold", "0.5")
    assert lenient.returncode == 0
    server.failing = set(GOLDS)
    assert atom(tmp_path, *base, "c").returncode == 1


def test_forced_acceptance_is_no_evidence_of_accuracy(tmp_path: Path, server: Server, problems: Path) -> None:
    server.info = {"vllm_config": "a=1, speculative_config=C(method='mtp', rejection_sample_method='synthetic'), b=2"}
    done = atom(tmp_path, *("bench", "gsm8k", "-u", server.url, "--dataset-path", str(problems), "--output-dir", "a"))
    assert done.returncode == 4
    assert "NOT VALID: speculative decoding: acceptance is FORCED" in done.stdout


def test_a_killed_run_can_be_scored(tmp_path: Path, server: Server, problems: Path) -> None:
    server.held = {"Q4?"}
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src")}
    arguments = ("bench", "gsm8k", "--base-url", server.url, "--dataset-path", str(problems), "--output-dir", "a")
    with subprocess.Popen(
        command(*arguments, "--quiet"), cwd=tmp_path, env=env, start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        records = tmp_path / "a" / "requests" / "0.jsonl"
        until(lambda: records.exists() and records.read_text().count("\n") == 5)
        os.killpg(process.pid, signal.SIGKILL)
    done = atom(tmp_path, "report", "a")
    assert "INTERRUPTED" in done.stdout, done.stderr
    server.release.set()
    beside = atom(tmp_path, *arguments[:-1], "b", "--compare", "a", "--max-concurrency", "2")
    assert beside.returncode == 0
    assert "A is no valid evidence: it did not come to its end" in beside.stdout
    rows = questions_of(tmp_path / "a")
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 5]
    assert atom(tmp_path, "get", "a", "gsm8k_flexible_extract").stdout == "0.8\n"


def test_generated_problems_never_claim_to_be_gsm8k(tmp_path: Path, server: Server) -> None:
    done = atom(
        tmp_path,
        *("bench", "gsm8k", "--base-url", server.url, "--limit", "4", "--output-dir", "run"),
        *("--json", "a.json", "--junit", "a.xml"),
    )
    assert done.returncode == 0, done.stderr
    texts = [done.stdout, (tmp_path / "a.json").read_text(), (tmp_path / "a.xml").read_text()]
    assert all("synthetic" in text for text in texts)
    for text in [*texts, (tmp_path / "run" / "summary.json").read_text()]:
        claims = text.lower().replace("not gsm8k", "").replace("not gsm8k's", "")
        assert "gsm8k" not in claims, claims[max(0, claims.find("gsm8k") - 80) :][:160]
    assert json.loads(texts[1])["atom"]["figures"]["synthetic_arithmetic_strict_match"]["n"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dataset-path", "none.jsonl"), "--dataset-path none.jsonl: No such file"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--max-concurrency", "0"), "--max-concurrency must be at least 1"),
        (("--generator", "magic"), "--generator must be templates or reasoning-gym"),
        (("--harness-python", "python"), "--harness-python is for --harness"),
        (("--extra-body", '{"stop": []}'), "--extra-body must not have 'stop'"),
        (("--compare", "nowhere"), "nowhere is no run directory"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = atom(tmp_path, "bench", "gsm8k", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "atom-runs").exists()


@pytest.mark.skipif(LM_EVAL is None, reason="ATOM_TEST_LM_EVAL_PYTHON names no interpreter with lm_eval")
@pytest.mark.timeout(240)
def test_the_harness_itself_says_the_same(tmp_path: Path, server: Server, problems: Path) -> None:
    assert LM_EVAL is not None
    done = atom(
        tmp_path,
        *("bench", "gsm8k", "--base-url", server.url, "--dataset-path", str(problems), "--output-dir", "run"),
        *("--harness", "--harness-python", LM_EVAL),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "run" / "accuracy" / "lm_eval.json").read_text())
    assert (found["n"], found["same_prompt"], found["same_text"], found["agrees"]) == (6, 6, 6, True)
    assert found["filters"]["flexible_extract"]["value"] == pytest.approx(5 / 6)
    assert found["filters"]["strict_match"]["stderr"] == pytest.approx(0.22360679)
    assert (tmp_path / "run" / "accuracy" / "lm_eval" / "log.txt").stat().st_size > 0
