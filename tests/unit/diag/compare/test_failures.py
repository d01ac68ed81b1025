"""Classes of failure, by the evidence that runs leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory
from atom.diag.compare.failures import Failure, failure_of
from atom.diag.compare.model import RunResult


def result(stage: str = "done", problem: str | None = None, **more: Any) -> RunResult:
    return RunResult(
        matched="main..branch/cpu/pair-0/0",
        arm="branch",
        side=1,
        directory="arms/branch/run-0",
        status=1,
        started_ns=0,
        ended_ns=1,
        stage=stage,
        problem=problem,
        **more,
    )


def run(path: Path, errors: list[tuple[str, str]] = (), log: str = "") -> Path:  # type: ignore[assignment]
    run_dir = RunDirectory(path / "run")
    with run_dir.requests_writer() as writer:
        for index, (kind, message) in enumerate(errors):
            record = RequestRecord(index=index, outcome=Outcome.FAILED, error_class=kind, error_message=message)
            writer.append_line(record.to_line())
    (run_dir.server / "server.log").write_text(log)
    return run_dir.path


def told(failure: Failure | None) -> tuple[str, str] | None:
    return None if failure is None else (str(failure.kind), failure.line)


@pytest.mark.parametrize(
    ("stage", "problem", "log", "kind"),
    [
        ("start", "the server died with exit status 1: SyntaxError: invalid syntax", "", "functional"),
        ("start", "the server died with exit status 1: ImportError: undefined symbol: nvshmem_x", "", "infrastructure"),
        ("start", "the server died with signal SIGKILL while it started", "", "infrastructure"),
        ("start", "docker: Error response from daemon: no such image", "", "infrastructure"),
        ("start", "the server was not ready after 600 s", "ncclInternalError: NCCL error: unhandled\n", "transport"),
        ("start", "the server died with exit status 1", "ModeMismatchError: rank 2 speaks async\n", "agreement"),
        ("prepare", "the command prepare[0] died with exit status 2: make: *** [all] stopped", "", "infrastructure"),
        ("start", None, "", "functional"),
    ],
)
def test_arms_that_do_not_start(tmp_path: Path, stage: str, problem: str | None, log: str, kind: str) -> None:
    failure = failure_of(result(stage, problem), run(tmp_path, log=log))
    assert told(failure) == (kind, problem or "nothing was recorded")


@pytest.mark.parametrize(
    ("errors", "log", "kind", "line"),
    [
        ([("http_500", "boom")] * 3 + [("connection", "reset")], "", "functional", "3 × http_500: boom"),
        ([("connection", "reset before it answered")], "", "transport", "1 × connection: reset before it answered"),
        ([("timeout", "no answer in time")], "", "functional", "1 × timeout: no answer in time"),
        ([("connection", "reset")], "RuntimeError: CUDA error: out of memory\n", "infrastructure", None),
        ([("http_500", "x")], "AgreementStalledError: request 7: missing votes of rank 1\nbye\n", "agreement", None),
        ([("http_500", "x")], "the KV transfer of request 3 timed out\nall good\n", "functional", "1 × http_500: x"),
        ([], "NIXL_ERR_BACKEND: transfer failed\n", "transport", None),
        ([], "", "functional", "5 of 9 requests are missing"),
    ],
)
def test_runs_that_lose_requests(
    tmp_path: Path, errors: list[tuple[str, str]], log: str, kind: str, line: str | None
) -> None:
    failure = failure_of(result(), run(tmp_path, errors, log), censored=["5 of 9 requests are missing"])
    assert told(failure) == (kind, log.splitlines()[0] if line is None else line)


def test_a_server_that_died_is_not_a_matter_of_connections(tmp_path: Path) -> None:
    path = run(tmp_path, [("connect", "Connection refused")] * 5, "IndexError: list index out of range\n")
    failure = failure_of(result("load", "the server died with exit status 1: IndexError"), path, censored=["gone"])
    assert told(failure) == ("functional", "the server died with exit status 1: IndexError")


def test_a_gate_is_a_failure_only_where_everything_else_went_well(tmp_path: Path) -> None:
    path = run(tmp_path)
    assert failure_of(result(), path) is None
    gate = "output 794.61 tok/s, 51% of the control"
    assert told(failure_of(result(), path, gate=gate)) == ("performance gate", gate)
    assert told(failure_of(result(), path, censored=["1 of 9 requests failed"], gate=gate)) != (
        "performance gate",
        gate,
    )


def test_evidence_is_one_line_without_secrets(tmp_path: Path) -> None:
    path = run(tmp_path, [("http_500", "bad\x1b[31m\nthing " + "x" * 500)])
    failure = failure_of(result(), path, censored=["1 of 1 requests failed"])
    assert failure is not None
    assert failure.line.isprintable()
    assert len(failure.line) == 240
