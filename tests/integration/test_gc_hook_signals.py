"""A server's signals reach it whatever the GC hook is doing: during collections, and around forks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atom.diag.attach import attach, detach
from atom.diag.gc_injection import hook_environment, hook_python_path
from atom.diag.gc_records import check_books, read_gc_records
from atom.recipes.recipe import Roles

WAIT_S = 30.0
ROLES = Roles(api=("the-api",))

# Nearly all its time goes into collections of a heap of 30,000 lists.
COLLECTS = (
    "import gc, signal, sys, time\n"
    "{before}\n"
    "heap = [[] for _ in range(30_000)]\n"
    "print('up', flush=True)\n"
    "end = time.monotonic() + {seconds}\n"
    "while time.monotonic() < end: gc.collect()\n"
    "sys.exit(99)\n"
)
EXITS = "def end(*_): sys.exit(7)\nsignal.signal(signal.SIGTERM, end)"
# A timer raises in the main thread again and again; all must come out where the program is. `work` is what it does.
RAISES = (
    "import gc, os, random, signal, sys\n"
    "class Told(Exception): pass\n"
    "raised = caught = 0\n"
    "def handler(*_):\n"
    "    global raised\n"
    "    raised += 1\n"
    "    raise Told(raised)\n"
    "signal.signal(signal.SIGALRM, handler)\n"
    "heap = [[] for _ in range(30_000)]\n"
    "while raised < {times}:\n"
    "    try:\n"
    "        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.02), 1.0)\n"
    "        while True: {work}\n"
    "    except Told as told:\n"
    "        caught += told.args == (raised,)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    "print(raised, caught)\n"
)
COLLECT = "gc.collect()"
FORK = "os.fork() or os._exit(0); os.wait()"


def environment(directory: Path) -> dict[str, str]:
    return {**os.environ, **hook_environment(directory, ROLES), "PYTHONPATH": str(hook_python_path())}


def start(code: str, env: dict[str, str] | None) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, "the-api"], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    process.send_signal(number)
    try:
        errors = process.communicate(timeout=WAIT_S)[1]
    finally:
        process.kill()
        process.wait()
    return process.returncode, errors


def test_sigterm_during_a_collection_ends_the_server(tmp_path: Path) -> None:
    code, env = COLLECTS.format(before=EXITS, seconds=5), environment(tmp_path)
    servers = [start(code, env) for _ in range(8)]
    assert [end(one, signal.SIGTERM) for one in servers] == [(7, "")] * 8
    records = read_gc_records(tmp_path)
    assert [one.end for one in records] == ["exit"] * 8
    assert [check_books(one) for one in records] == [[]] * 8


def test_sigint_during_a_collection_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    process = start(COLLECTS.format(before="", seconds=5), environment(tmp_path))
    code, errors = end(process, signal.SIGINT)
    assert code == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "ignored" not in errors


@pytest.mark.parametrize("work", [COLLECT, FORK], ids=["collect", "fork"])
def test_what_a_handler_raises_comes_out_in_the_program(work: str, tmp_path: Path) -> None:
    code = RAISES.format(times=100, work=work)
    done = subprocess.run(
        [sys.executable, "-c", code, "the-api"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert "_drain_for_ever" not in done.stderr
    raised, caught = map(int, done.stdout.split())
    if work == FORK and sys.version_info >= (3, 12):
        # What a function of os.register_at_fork raises as it begins is lost by CPython.
        assert caught >= raised - 5
    else:
        assert (caught, done.stderr) == (raised, "")


def test_a_handler_that_does_not_raise_runs_once_per_signal(tmp_path: Path) -> None:
    before = (
        "calls = []\n"
        "def count(*_):\n"
        "    calls.append(1)\n"
        "    print(len(calls), flush=True)\n"
        "    if len(calls) == 20: sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, count)"
    )
    process = start(COLLECTS.format(before=before, seconds=20), environment(tmp_path))
    assert process.stdout is not None
    try:
        for number in range(1, 21):
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == f"{number}\n"
        assert process.communicate(timeout=WAIT_S) == ("", "")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 7


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_event_loop_that_collects_ends_in_order(loop: str, tmp_path: Path) -> None:
    code = (
        f"import asyncio, gc, signal, sys, {loop}\n"
        "heap = [[] for _ in range(30_000)]\n"
        "async def main():\n"
        "    ended = asyncio.Event()\n"
        "    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)\n"
        "    print('up', flush=True)\n"
        "    while not ended.is_set(): gc.collect(); await asyncio.sleep(0)\n"
        "    print('in order', flush=True)\n"
        f"with asyncio.Runner(loop_factory={loop}.new_event_loop) as runner: runner.run(main())\n"
        "sys.exit(7)\n"
    )
    process = start(code, environment(tmp_path))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=WAIT_S) == ("in order\n", "")
    assert process.returncode == 7


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_a_server_that_was_attached_to_ends_too(tmp_path: Path) -> None:
    process = start(COLLECTS.format(before=EXITS, seconds=20), None)
    try:
        (attached,) = attach(process.pid, tmp_path, ROLES)
        assert attached.ok, attached.reason
        assert end(process, signal.SIGTERM) == (7, "")
    finally:
        process.kill()
        process.wait()
        detach(tmp_path)
