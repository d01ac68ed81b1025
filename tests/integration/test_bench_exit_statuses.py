"""The exit statuses of `atom bench`, as a shell script of a CI job sees them: bench_exit_statuses.sh, a test a case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
EMITTER = ROOT / "tests" / "benchmarks" / "emitter.py"
SCRIPT = Path(__file__).with_suffix("").with_name("bench_exit_statuses.sh")
SERVERS = {"GOOD": (), "ALL": ("--error-every", "1"), "SOME": ("--error-every", "3")}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`atom` on PATH, and the ports of the servers that the script wants."""
    folder = tmp_path_factory.mktemp("servers")
    command = folder / "bin" / "atom"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m atom.cli.main "$@"\n')
    command.chmod(0o755)
    processes = []
    path = ":".join(
        [str(command.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # mpiexec is beside Python
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "PATH": path}
    env.pop("GITHUB_STEP_SUMMARY", None)
    for name, options in SERVERS.items():
        port = folder / name
        arguments = ["--port-file", str(port), "--tick-ms", "5", *options]
        processes.append(subprocess.Popen([sys.executable, str(EMITTER), *arguments]))
        until(lambda port=port: port.exists() and port.read_text() != "")  # type: ignore[misc]
        env[name] = port.read_text()
    yield env
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(20)


@pytest.mark.parametrize(
    "case",
    [
        "ok",
        "all_failed",
        "nobody_listens",
        "threshold",
        "saturated",
        "interrupted",
        "terminated",
        "usage",
    ],
)
def test_exit_status(case: str, environment: dict[str, str], tmp_path: Path) -> None:
    run_case(case, environment, tmp_path)


@pytest.mark.parametrize("case", ["ranks", "ranks_interrupted"])
def test_exit_status_of_an_mpi_job(case: str, environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    if shutil.which("mpiexec", path=environment["PATH"]) is None:
        pytest.skip("no mpiexec on this machine")
    run_case(case, environment, tmp_path)


def run_case(case: str, environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), case],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout == f"{case}: ok\n", done.stdout + done.stderr
    assert done.returncode == 0
