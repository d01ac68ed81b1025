"""Run directories that were damaged, or never were what they say: counted, named, and no valid evidence."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.bench.export import junit, vllm_result
from atom.bench.records import RequestRecord, read_records
from atom.bench.report.page import write_report
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.summary import summarize
from atom.cli.get import get
from atom.cli.render import bench_tables, markdown
from atom.cli.server_side import summed_up
from atom.recipes.errors import UsageError

MS = 1_000_000
RUN: dict[str, Any] = {
    "schema_version": "1.0",
    "validity": "valid",
    "reasons": [],
    "name": "bench random",
    "command": ["atom", "bench"],
    "start_time": "2026-01-01T00:00:00+0000",
    "host": {"name": "h", "cpu": "c", "cpus": 2, "python": "3.11", "cpu_affinity": [0, 1]},
    "git": {"sha": "0123456789abcdef", "branch": "main", "dirty": False},
    "packages": {"numpy": "2.0"},
    "devices": ["none"],
    "recipe": {"name": "r"},
    "target": {"base_url": "http://127.0.0.1:1", "model": "m", "executor": "cpu", "engine": None},
    "backend": "openai",
    "measured_start_ns": 0,
    "load": {
        "name": "random",
        "model": "m",
        "num_prompts": 4,
        "request_rate": 2.0,
        "burstiness": 1.0,
        "max_concurrency": 2,
        "failed_request_threshold": 0.1,
        "goodput_ms": {"ttft": 30.0},
        "source": {"random_input_len": 8, "random_output_len": 4, "random_range_ratio": 0.5, "random_prefix_len": 1},
    },
}


def record(index: int) -> dict[str, Any]:
    chunks = [(650 * index + 20 + 10 * i) * MS for i in range(4)]
    times = {"ready_ns": 650 * index * MS, "sent_ns": 650 * index * MS, "end_ns": chunks[-1], "connect_ns": MS}
    line: dict[str, Any] = json.loads(
        RequestRecord(
            index=index,
            outcome="completed",
            first_ns=chunks[0],
            last_ns=chunks[-1],
            chunk_ns=chunks,
            chunk_tokens=[1] * 4,
            prompt_tokens=8,
            output_tokens=4,
            anomalies={"no_usage": 1},
            **times,
        ).to_line()
    )
    return line


WINDOW = {"kind": "window", "phase": "measured", "t_ns": 10**9, "start_ns": 0, "cpu_share": 0.2, "lag_ms": [0.5]}
END = {
    "kind": "measured_end",
    "t_ns": 2 * 10**9,
    "started": 4,
    "sent": 4,
    "running_integral_ns": 200 * MS,
    "interrupted": False,
}
CLIENT: list[dict[str, Any]] = [{"kind": "measured_start", "t_ns": 0}, WINDOW, END]


SERVER: dict[str, list[dict[str, Any]]] = {
    "metrics-api": [
        {
            "sent_ns": n * 10**9,
            "latency_ns": MS,
            "body_bytes": 9,
            "series": 3,
            "values": {"running": 1.0},
            "error": None,
        }
        for n in range(2)
    ],
    "process": [{"t_ns": n * 10**9, "role": "api", "pid": 7, "rss_bytes": 2**20, "cpu_s": 0.5 * n} for n in range(2)],
}


def write(
    path: Path, requests: list[Any], client: list[Any] | None = None, run: Any = None, server: Any = None
) -> RunDirectory:
    for folder in ("requests", "client", "server"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    for name, lines in (("requests", requests), ("client", CLIENT if client is None else client)):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (path / name / "0.jsonl").write_text(text)
    for name, lines in (SERVER if server is None else server).items():
        (path / "server" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "run.json").write_text(json.dumps(RUN if run is None else run))
    return RunDirectory.open(path)


def everything(run_dir: RunDirectory) -> dict[str, Any]:
    """All that is made of a run directory."""
    summary = summed_up(run_dir)
    write_report(run_dir, summary)
    markdown(bench_tables(summary))
    junit(summary)
    json.dumps(vllm_result(run_dir, summary, backend="openai", detailed=True), allow_nan=False)
    return summary


def test_whole_run_is_valid(tmp_path: Path) -> None:
    summary = everything(write(tmp_path / "run", [record(i) for i in range(4)]))
    assert (summary["validity"], summary["reasons"]) == ("valid", [])


def spoiled(**fields: Any) -> dict[str, Any]:
    return {**record(3), **fields}


@pytest.mark.parametrize(
    "line",
    [
        '{"index": 3, "phase": "measured", "outc',
        "[]",
        "nonsense",
        spoiled(first_ns=None),
        spoiled(sent_ns="now"),
        spoiled(sent_ns=True),
        spoiled(end_ns=-1),
        spoiled(end_ns=1),
        spoiled(last_ns=2**80),
        spoiled(chunk_ns={}),
        spoiled(chunk_ns=[3, 2, 1, 0]),
        spoiled(chunk_tokens=[1]),
        spoiled(anomalies=[]),
        spoiled(anomalies={"a": "b"}),
        spoiled(outcome="fine"),
        spoiled(error="boom"),
        spoiled(error={"class": 5}),
        spoiled(phase=None),
        spoiled(text=7),
    ],
)
def test_unreadable_line_is_counted_and_no_evidence(
    tmp_path: Path, line: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the run was sealed, and summed up, as valid before."""
    run_dir = write(tmp_path / "run", [record(i) for i in range(4)])
    assert summarize(run_dir)["validity"] == "valid"
    write(tmp_path / "run", [*(record(i) for i in range(3)), line])
    get(run_dir.path, "validity")
    assert capsys.readouterr().out == "not valid\n"
    summary = everything(run_dir)
    assert summary["validity"] == "not valid"
    assert "1 unreadable line in requests/0.jsonl" in summary["reasons"]
    assert summary["figures"]["failed"]["value"] == 0
    assert any("1 unreadable line" in note for note in bench_tables(summary)[1].notes)


def test_requests_that_are_gone_are_missed(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [])
    (run_dir.requests / "0.jsonl").unlink()
    summary = everything(run_dir)
    assert summary["validity"] == "not valid"
    assert "requests/0.jsonl is missing: 4 requests were started" in summary["reasons"]
    fewer = everything(write(tmp_path / "fewer", [record(i) for i in range(3)]))
    assert fewer["validity"] == "not valid"
    assert any("started 4" in reason for reason in fewer["reasons"])


def test_client_that_is_gone_is_missed(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [record(i) for i in range(4)])
    (run_dir.client / "0.jsonl").unlink()
    summary = everything(run_dir)
    assert summary["validity"] == "not valid"
    assert any("client/*.jsonl" in reason for reason in summary["reasons"])


@pytest.mark.parametrize("number", range(3))
def test_client_line_without_a_key_is_named(tmp_path: Path, number: int) -> None:
    for key in CLIENT[number].keys() - {"kind", "requests", "started", "phase"}:
        client = copy.deepcopy(CLIENT)
        del client[number][key]
        summary = everything(write(tmp_path / key, [record(i) for i in range(4)], client))
        assert summary["validity"] == "not valid"
        assert "1 unreadable line in client/0.jsonl" in summary["reasons"]


@pytest.mark.parametrize("where", ["requests", "client"])
def test_line_of_a_newer_schema_is_refused_by_file_and_line(tmp_path: Path, where: str) -> None:
    lines: dict[str, list[Any]] = {"requests": [record(i) for i in range(4)], "client": copy.deepcopy(CLIENT)}
    lines[where][2]["schema_version"] = "2.0"
    run_dir = write(tmp_path / "run", lines["requests"], lines["client"])
    with pytest.raises(UsageError, match=rf"{where}/0.jsonl, line 3: schema_version 2.0 is newer"):
        summarize(run_dir)
    lines[where][2]["schema_version"] = "1.7"
    assert summarize(write(tmp_path / "minor", lines["requests"], lines["client"]))["validity"] == "valid"


def test_a_run_of_any_verdict_names_its_damage(tmp_path: Path) -> None:
    for validity in Validity:
        run = {**RUN, "validity": str(validity), "reasons": ["why"] if validity != "valid" else []}
        summary = everything(write(tmp_path / validity, [*(record(i) for i in range(4)), "{"], run=run))
        assert summary["validity"] == (Validity.NOT_VALID if validity == Validity.VALID else validity)
        assert summary["reasons"][-1] == "1 unreadable line in requests/0.jsonl"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(2**70) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any) -> list[Callable[[Any], None]]:
    """Setters for every place in a JSON value."""
    found: list[Callable[[Any], None]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append(lambda new, key=key: value.__setitem__(key, new))
        found += places(inner)
    return found


@settings(max_examples=250)
@given(data=st.data())
def test_any_type_anywhere_is_no_fault(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One place of one file holds anything that JSON can say: the outcome is a summary, or an error that names it."""
    document = {"run": copy.deepcopy(RUN), "client": copy.deepcopy(CLIENT), "requests": [record(i) for i in range(4)]}
    document |= copy.deepcopy(SERVER)
    target = data.draw(st.sampled_from(sorted(document)))
    data.draw(st.sampled_from(places(document[target])))(data.draw(ANY))
    folder = tmp_path_factory.mktemp("any") / "run"
    with contextlib.suppress(UsageError):
        run_dir = write(
            folder, document["requests"], document["client"], document["run"], {name: document[name] for name in SERVER}
        )
        summary = everything(run_dir)
        assert summary["validity"] in tuple(Validity)
        list(read_records(run_dir))
