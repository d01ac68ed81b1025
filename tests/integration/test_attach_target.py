"""What `--pid` may name, and what is put into an interpreter of another age: nothing that it does not understand."""

from __future__ import annotations

import contextlib
import io
import keyword
import os
import shutil
import signal
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.diag.attach import attach
from atom.diag.attach_target import ancestors, server_process
from atom.diag.attach_text import attach_text
from atom.diag.python_process import find_runtime
from atom.recipes.errors import UsageError
from atom.recipes.recipe import Roles

# One write per line: unbuffered, print writes its text and its newline apart, and two processes on one pipe mix.
SLEEP = r"import os,time; os.write(1, b'up\n'); time.sleep(600)"
LISTEN = "import socket; s=socket.create_server(('127.0.0.1',0)); " + SLEEP


@contextlib.contextmanager
def shell(script: str, *codes: str, ups: int) -> Iterator[subprocess.Popen[str]]:
    """A shell with Python children, once they have said that they are up."""
    words = ["sh", "-c", script, "sh", sys.executable, *codes]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(ups)] == ["up\n"] * ups
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_launcher_stands_for_the_server_below_it() -> None:
    with shell('"$1" -c "$2" & "$1" -c "$3" & wait', LISTEN, SLEEP, ups=2) as process:
        server, note = server_process(process.pid)
        assert ancestors(server)[0] == process.pid
        assert server_process(server) == (server, None)
        assert note is not None
        assert f"attaching to its server, {server} (" in note
        assert f"pid {process.pid} (" in note


def test_a_process_that_is_no_server_is_refused_with_those_below_it() -> None:
    with shell('"$1" -c "$2" & "$1" -c "$2" & wait', SLEEP, ups=2) as process:
        with pytest.raises(UsageError, match=r"is no Python process; below it are \d+ \(.*\), \d+ \(") as refused:
            server_process(process.pid)
        assert "\n" not in str(refused.value)
    with shell('"$1" -c "$2" & "$1" -c "$2" & wait', LISTEN, ups=2) as process, pytest.raises(UsageError, match="give"):
        server_process(process.pid)
    with shell("echo up; sleep 600; true", ups=1) as process, pytest.raises(UsageError, match="there is none below it"):
        server_process(process.pid)


def test_init_and_our_own_processes_are_refused() -> None:
    for pid in {1, os.getpid(), *ancestors(os.getpid())}:
        with pytest.raises(UsageError, match=rf"--pid {pid} "):
            server_process(pid)


def test_the_text_parses_in_every_python() -> None:
    """No name in it was ever a keyword; strings are plain."""
    text = attach_text("/nowhere", {}, None, "/nowhere")
    words = {*keyword.kwlist, "exec", "print", "async", "await"} - {"try", "if", "except", "pass", "None"}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        assert not (token.type == tokenize.NAME and token.string in words), token
    assert text.isascii()


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
def test_an_old_python_is_left_alone(version: str, tmp_path: Path) -> None:
    python = _interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    process = subprocess.Popen(
        [python, "-c", "import sys, time\nsys.stdout.write('up\\n'); sys.stdout.flush()\nwhile 1: time.sleep(.01)"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        runtime = find_runtime(process.pid)
        assert runtime is not None
        assert not runtime.recent
        (result,) = attach(process.pid, tmp_path, Roles())
        assert not result.ok
        assert result.reason == f"it is Python {version}; the hook needs 3.8 or later, so nothing was put into it"
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        _, errors = process.communicate()
    assert errors == ""
    text = tmp_path / "text.py"
    text.write_text(attach_text(str(tmp_path), {}, None, str(tmp_path / "answer")))
    done = subprocess.run([python, str(text)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _interpreter(version: str) -> str | None:
    """On the PATH, or among those of pyenv, whose shims are no interpreters."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    return str(found[0]) if found else shutil.which(f"python{version}")
