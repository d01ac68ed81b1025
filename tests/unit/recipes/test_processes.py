"""Processes by label, by descent, by identity; real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.recipes.errors import UsageError
from atom.recipes.ports import free_port, read_port_file, refuse_taken_port
from atom.recipes.processes import (
    LABEL_VARIABLE,
    OwnerState,
    command_line,
    descendants,
    labelled_processes,
    listening_processes,
    owner_state,
    process_token,
    read_stat,
    signal_process,
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A sleeping child that carries a label (in `child.args[-1]`)."""
    label = str(uuid.uuid4())
    code = "import sys,time; print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, label], env={**os.environ, LABEL_VARIABLE: label}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def label_of(child: subprocess.Popen[bytes]) -> str:
    assert isinstance(child.args, list)
    return str(child.args[-1])


def test_a_process_is_found_by_its_label_and_by_its_parent(child: subprocess.Popen[bytes]) -> None:
    assert labelled_processes(label_of(child)) == [child.pid]
    assert labelled_processes(label_of(child)[:-1]) == []
    assert child.pid in descendants(os.getpid())
    assert label_of(child) in command_line(child.pid)


def test_the_dead_are_not_found(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    stat = read_stat(child.pid)
    assert stat is not None
    assert not stat.alive
    assert labelled_processes(label_of(child)) == []
    assert child.pid not in descendants(os.getpid())


def test_a_signal_reaches_only_the_process_it_was_meant_for(child: subprocess.Popen[bytes]) -> None:
    stat = read_stat(child.pid)
    assert stat is not None
    assert not signal_process(child.pid, signal.SIGKILL, start_ticks=stat.start_ticks + 1)
    assert child.poll() is None
    assert signal_process(child.pid, signal.SIGKILL, start_ticks=stat.start_ticks)
    assert child.wait(10) == -signal.SIGKILL


def test_a_token_outlives_its_process_and_is_never_mistaken(child: subprocess.Popen[bytes]) -> None:
    token = process_token(child.pid)
    assert owner_state(token) is OwnerState.ALIVE
    pid, ticks, namespace, boot = token.split(":")
    assert owner_state(f"{pid}:{int(ticks) + 1}:{namespace}:{boot}") is OwnerState.GONE
    assert owner_state(f"{pid}:{ticks}:[1]:{boot}") is OwnerState.ELSEWHERE
    assert owner_state(f"{pid}:{ticks}:{namespace}:another-boot") is OwnerState.GONE
    for garbage in ("", "x", "1:2", "a:b:c:d", f"{pid}:{ticks}:{namespace}"):
        assert owner_state(garbage) is OwnerState.ELSEWHERE
    child.kill()
    child.wait()
    assert owner_state(token) is OwnerState.GONE


def test_a_taken_port_is_refused_and_its_holder_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert listening_processes(port) == [os.getpid()]
        with pytest.raises(UsageError, match=rf"--port {port} is already in use by pid {os.getpid()} "):
            refuse_taken_port("127.0.0.1", port)
    assert listening_processes(port) is None
    refuse_taken_port("127.0.0.1", port)
    assert free_port("127.0.0.1") > 0
    with pytest.raises(UsageError, match=r"--host 192\.0\.2\.1"):
        free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("text", "port"),
    [("8000", 8000), (" 8000\n", 8000), ('{"port": 8000}', 8000), ("", None), ("80", 80), ("x", None), ("0", None)],
)
def test_port_files(tmp_path: Path, text: str, port: int | None) -> None:
    path = tmp_path / "port"
    assert read_port_file(path) is None
    path.write_text(text)
    assert read_port_file(path) == port
