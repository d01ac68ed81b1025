"""`atom bench sharegpt`, `custom` and `trace` on a server: what the files say is what is sent, and the server finds
in its cache what the trace says that it could find."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.bench.records import RequestRecord, read_records
from atom.bench.rundir import RunDirectory
from atom.cli import main as cli
from atom.recipes.errors import ExitStatus
from tests.server_process import FAST, RunningServer, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FAST, "--max-model-len", "4096") as running:
        yield running


Bench = Callable[..., tuple[list[RequestRecord], dict[str, Any]]]


@pytest.fixture
def bench(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run a load; its measured records in order, and run.json's load."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    runs = iter(range(100))

    def run(*arguments: str) -> tuple[list[RequestRecord], dict[str, Any]]:
        folder = tmp_path / f"run-{next(runs)}"
        more = ("--port", str(server.port), "--output-dir", str(folder), "--quiet")
        status = cli.main(["bench", *arguments, *more])
        assert status in (ExitStatus.OK, ExitStatus.INVALID), "measured; on a busy machine the client may be saturated"
        run_dir = RunDirectory.open(folder)
        records = sorted(read_records(run_dir), key=lambda record: record.index)
        assert {record.outcome for record in records} == {"completed"}
        return records, run_dir.read_run_json()["load"]

    return run


def mooncake(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Turns of four conversations over a common beginning, in blocks of 16 tokens."""
    rows = []
    for turn in range(3):
        for talk in range(4):
            ids = [1, 2, *(100 * talk + block for block in range(10, 10 + 2 * turn + 1))]
            rows.append(
                {
                    "timestamp": 40 * len(rows),
                    "input_length": 16 * len(ids) - talk,
                    "output_length": 2 + talk,
                    "hash_ids": ids,
                }
            )
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, rows


def test_a_trace_keeps_its_lengths_times_and_prefixes(bench: Bench, tmp_path: Path, server: RunningServer) -> None:
    file, rows = mooncake(tmp_path)
    arguments = ("--dataset-path", str(file), "--block-size", "16", "--ignore-eos", "--max-concurrency", "1")
    records, load = bench("trace", *arguments, "--seed", "11")
    assert [record.prompt_tokens for record in records] == [row["input_length"] for row in rows]
    assert [record.output_tokens for record in records] == [row["output_length"] for row in rows]
    first = records[0].scheduled_ns
    assert first is not None
    assert [(record.scheduled_ns or 0) - first for record in records] == [row["timestamp"] * 10**6 for row in rows]
    tagged = [(record.tags or {})["theoretical_cached_tokens"] for record in records]
    cached = [record.cached_tokens for record in records]
    assert load["source"]["theoretical_cached_tokens"] == sum(tagged) > 0
    # The server's blocks have 16 tokens too, and it knows whole ones only.
    assert cached == [tokens // 16 * 16 for tokens in tagged]

    shared_nothing, load = bench("trace", *arguments, "--seed", "12", "--trace-lengths-only", "--time-scale", "0.1")
    assert [record.prompt_tokens for record in shared_nothing] == [row["input_length"] for row in rows]
    assert {record.cached_tokens for record in shared_nothing} == {0}
    assert load["source"]["theoretical_hit_rate"] is None


def test_csv_traces_are_sent_as_messages_too(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    rows = "".join(f"{i / 100},ChatGPT,{5 + i},{i % 4},{5 + i + i % 4},API log\n" for i in range(8))
    file.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + rows)
    records, load = bench("trace", "--dataset-path", str(file), "--backend", "openai-chat", "--ignore-eos")
    assert [record.output_tokens for record in records] == [1, 2, 3, 1, 2, 3]
    assert load["source"]["dropped"] == {"no input or no output tokens": 2}
    assert load["source"]["trace_format"] == "burstgpt"


def test_sharegpt(bench: Bench, tmp_path: Path) -> None:
    talks = [
        {
            "conversations": [
                {"from": "human", "value": f"question {i}: " + "why " * 9},
                {"from": "gpt", "value": "because " * (i + 2)},
            ]
        }
        for i in range(6)
    ]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps(talks))
    arguments = ("--dataset-path", str(file), "--num-prompts", "8", "--ignore-eos", "--num-warmups", "2")
    records, load = bench("sharegpt", *arguments, "--max-concurrency", "4")
    measured = [record for record in records if record.phase == "measured"]
    assert len(measured) == 8
    assert {record.output_tokens for record in measured} == {2 * i + 4 for i in range(6)}
    assert load["source"]["repeated"] == 2


def test_custom_lines_are_sent_at_their_times(bench: Bench, tmp_path: Path) -> None:
    lines = [{"prompt": [300 + i] * (i + 1), "output_tokens": i + 1, "timestamp": 20 * i} for i in range(6)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records, _ = bench("custom", "--dataset-path", str(file), "--ignore-eos")
    assert [(r.prompt_tokens, r.output_tokens) for r in records] == [(i + 1, i + 1) for i in range(6)]
    first = records[0].scheduled_ns or 0
    assert [(record.scheduled_ns or 0) - first for record in records] == [20_000_000 * i for i in range(6)]


def test_random_text_and_prefixes(bench: Bench) -> None:
    arguments = ("--random-input-len", "20", "--random-output-len", "2", "--num-prompts", "6", "--ignore-eos")
    prefixes = ("--random-prefix-len", "64", "--num-prefixes", "2", "--max-concurrency", "1")
    records, load = bench("random", *arguments, *prefixes)
    assert [record.cached_tokens for record in records] == [0, 0, 64, 64, 64, 64]
    records, load = bench("random", *arguments, "--prompt-type", "text")
    assert load["source"]["prompt"] == "text"
    assert all(record.input_len is None and (record.prompt_tokens or 0) > 20 for record in records)


def test_what_would_be_ignored_or_is_too_long_is_refused(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _ = mooncake(tmp_path)
    long = tmp_path / "long.csv"
    long.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,4000,200\n")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"prompt": "x", "max_tokens": 3}\n{"prompt": 7}\n')
    trace = ("trace", "--dataset-path", str(file), "--block-size", "16")
    for arguments, message in (
        ((*trace, "--request-rate", "3"), "--request-rate: a trace is sent at its own times"),
        ((*trace, "--burstiness", "3"), "--burstiness: a trace is sent at its own times"),
        ((*trace, "--no-use-trace-timestamps", "--time-scale", "3"), "--time-scale is for recorded times"),
        ((*trace, "--tokenizer", "x"), "--tokenizer is for text"),
        ((*trace, "--backend", "openai-chat", "--vocab-size", "512"), "--vocab-size is for token ids"),
        ((*trace, "--backend", "openai-chat", "--prompt-type", "ids"), "--prompt-type ids"),
        ((*trace, "--over-length", "clip"), "--over-length says what happens beyond"),
        ((*trace, "--over-length", "cut", "--max-input-len", "9"), "--over-length must be drop or clip"),
        ((*trace, "--extra-body", '{"max_tokens": 1}'), "use --max-output-len"),
        (("trace", "--dataset-path", str(file)), f"{file}:1: field 'hash_ids' has 3 blocks"),
        (("trace", "--dataset-path", str(long)), "1 of 1 requests have more tokens"),
        (("custom", "--dataset-path", str(damaged)), f"{damaged}:2: field 'prompt' must be"),
        (("custom", "--dataset-path", str(file)), f"{file}:1: must have one of the fields"),
        (("sharegpt", "--dataset-path", str(tmp_path / "none")), "--dataset-path"),
        (("random", "--backend", "openai-chat", "--vocab-size", "512"), "--vocab-size is for token ids"),
        (("random", "--num-prefixes", "2"), "--random-prefix-len"),
        (("random", "--prompt-type", "words"), "--prompt-type must be ids or text"),
    ):
        folder = tmp_path / "refused"
        status = cli.main(["bench", *arguments, "--port", str(server.port), "--output-dir", str(folder)])
        said = capsys.readouterr().err
        assert (status, message in said) == (ExitStatus.USAGE, True), (arguments, said)
        assert said.count("\n") == 1
        assert not folder.exists()
