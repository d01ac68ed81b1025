"""The GC hook put into running interpreters through gdb, and taken out again: busy, idle, blocked, forked; what is
refused and why; servers that are left as they were."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.diag import attach_gdb
from atom.diag.attach import Attached, attach, detach
from atom.diag.attach_checks import choose_method
from atom.diag.gc_hook import ACTION_FILE, OWNER_FILE
from atom.diag.gc_injection import hook_environment, hook_python_path
from atom.diag.gc_records import GcProcess, check_books, read_gc_records
from atom.diag.hooked_processes import hooked_processes
from atom.diag.python_process import find_runtime, libc_function
from atom.recipes.errors import UsageError
from atom.recipes.processes import command_line, descendants, read_stat
from atom.recipes.recipe import Roles
from tests.waiting import until

WAIT_S = 30.0
ROLES = Roles(api=("the-api",), core=("the-core",))

needs_gdb = pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")

IDLE = (
    "import asyncio\nasync def main():\n    print('up', flush=True)\n"
    "    await asyncio.Event().wait()\nasyncio.run(main())"
)
BUSY = (
    "import asyncio\nasync def main():\n    print('up', flush=True)\n"
    "    while True:\n        sum(range(1000)); await asyncio.sleep(0)\nasyncio.run(main())"
)
LOCKED = "import threading\nlock = threading.Lock(); lock.acquire(); print('up', flush=True); lock.acquire()"
# Answers questions on stdin in its main thread: `eval` of a line.
ASKED = (
    "import gc, select, sys\nprint('up', flush=True)\n"
    "while True:\n"
    "    if select.select([0], [], [], 0.05)[0]: print(eval(sys.stdin.readline()), flush=True)"
)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ask(process: subprocess.Popen[str], question: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def the_one(directory: Path) -> GcProcess:
    (process,) = read_gc_records(directory)
    return process


@needs_gdb
@pytest.mark.parametrize("code", [IDLE, BUSY, LOCKED], ids=["idle", "busy", "locked"])
def test_attach_and_detach(code: str, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(code, "the-api")
    assert attach(process.pid, tmp_path, ROLES) == [Attached(process.pid, "api", True, "gdb", "")]
    (again,) = attach(process.pid, tmp_path, ROLES)
    assert (again.ok, again.reason) == (True, "was hooked already, into this directory")
    assert detach(tmp_path) == []
    record = the_one(tmp_path)
    assert (record.role, record.attached, record.end) == ("api", True, "stopped")
    assert check_books(record) == []
    assert process.poll() is None
    assert not (tmp_path / OWNER_FILE).exists()


@needs_gdb
def test_the_process_is_as_it_was(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(ASKED)
    state = "sorted(globals()), gc.callbacks, gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()"
    threads = "len(__import__('os').listdir('/proc/self/task'))"
    before, threads_before = ask(process, state), ask(process, threads)
    for action in ("freeze", "disable", "threshold:50000,5,7"):
        assert all(one.ok for one in attach(process.pid, tmp_path, ROLES, action=action))
        (tmp_path / ACTION_FILE).touch()
        until(lambda action=action: any(one.action == action for one in read_gc_records(tmp_path)))  # type: ignore[misc]
        during = ask(process, "len(gc.callbacks), gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 0")
        thresholds = (50000, 5, 7) if action.startswith("threshold") else gc.get_threshold()
        assert during == str((2, thresholds, action != "disable", action == "freeze"))
        assert detach(tmp_path) == []
        assert ask(process, state) == before
    assert ask(process, threads) == threads_before
    records = read_gc_records(tmp_path)
    assert [one.action for one in records] == ["freeze", "disable", "threshold:50000,5,7"]
    assert [any(totals["frozen"] for totals in one.history) for one in records] == [True, False, False]


@needs_gdb
def test_forced_collections_are_recorded_with_their_length(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    code = (
        "import gc, json, sys, time\ngc.disable()\nheap = [[] for _ in range(300000)]\n"
        "def collect():\n    a = time.monotonic_ns(); gc.collect(); return time.monotonic_ns() - a\n"
        "print('up', flush=True)\nfor line in sys.stdin: print(json.dumps([collect() for _ in range(20)]), flush=True)"
    )
    process = start(code, "the-api")
    assert all(one.ok for one in attach(process.pid, tmp_path, ROLES))
    taken = json.loads(ask(process, ""))
    assert detach(tmp_path) == []
    record = the_one(tmp_path)
    recorded = [one.pause_ns for one in record.passes]
    assert len(recorded) == 20
    # The outer clock is read outside the collection, where another thread may come in between: so most, not all, agree.
    assert all(inner <= outer for inner, outer in zip(recorded, taken, strict=True))
    assert statistics.median(inner / outer for inner, outer in zip(recorded, taken, strict=True)) > 0.99


@needs_gdb
def test_a_tree_of_processes(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', 'the-' + 'core'])\n"
        "if os.fork() == 0: time.sleep(600)\n"
        "print('up', flush=True); time.sleep(600)\n"
    )
    process = start(code, "the-api")
    until(lambda: any("the-core" in command_line(pid) for pid in descendants(process.pid)))
    time.sleep(0.3)  # the interpreter of the core is up
    results = attach(process.pid, tmp_path, ROLES)
    assert [(one.role, one.ok) for one in sorted(results, key=lambda one: one.role)] == [
        ("api", True), ("api", True), ("core", True)
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "attach.jsonl").read_text().splitlines()]
    assert {line["pid"] for line in lines} == {one.pid for one in results}
    assert detach(tmp_path) == []
    assert [one.end for one in read_gc_records(tmp_path)] == ["stopped"] * 3


@needs_gdb
def test_beside_a_hook_of_the_environment(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    env = {**os.environ, **hook_environment(first, ROLES), "PYTHONPATH": str(hook_python_path())}
    process = start(ASKED, "the-api", env=env)
    assert [one.reason for one in attach(process.pid, first, ROLES)] == ["was hooked already, into this directory"]
    assert [one.reason for one in attach(process.pid, second, ROLES)] == [""]
    assert ask(process, "len(gc.callbacks), gc.collect() >= 0") == "(4, True)"
    assert detach(second) == []
    assert ask(process, "len(gc.callbacks)") == "2"
    assert detach(first) == []
    assert ask(process, "len(gc.callbacks)") == "0"
    one, two = the_one(first), the_one(second)
    assert (len(one.passes), len(two.passes)) == (1, 1)
    assert (one.attached, two.attached) == (False, True)


@needs_gdb
def test_a_hook_leaves_when_whoever_attached_is_gone(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(ASKED)
    code = (
        "import sys; from pathlib import Path; from atom.diag import attach; from atom.recipes.recipe import Roles\n"
        f"print(attach.attach({process.pid}, Path({str(tmp_path)!r}), Roles())[0].ok)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert done.stdout == "True\n"
    assert ask(process, "len(gc.callbacks)") == "2"
    until(lambda: ask(process, "len(gc.callbacks)") == "0")
    assert the_one(tmp_path).end == "abandoned"


@needs_gdb
def test_a_call_that_does_not_return_is_taken_back(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start(ASKED)
    runtime = find_runtime(process.pid)
    assert runtime is not None
    pause = libc_function(process.pid, "pause")
    assert pause is not None
    monkeypatch.setattr(attach_gdb, "TIMEOUT_S", 2.0)
    runtime.functions["Py_AddPendingCall"] = pause
    call = attach_gdb.queue_text(process.pid, runtime, "pass")
    assert not call.ok
    assert "did not finish" in call.reason
    stat = read_stat(process.pid)
    assert stat is not None
    assert stat.state not in "Tt"
    assert ask(process, "6 * 7") == "42"


def test_what_cannot_be_attached_to_says_why(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    sleeping = subprocess.Popen(["sleep", "600"])
    try:
        (result,) = attach(sleeping.pid, tmp_path, ROLES)
        assert (result.ok, result.reason) == (False, "not a Python process, nor below it")
    finally:
        sleeping.kill()
        sleeping.wait()
    with pytest.raises(UsageError, match="there is no such process"):
        attach(sleeping.pid, tmp_path, ROLES)
    with pytest.raises(ValueError, match="threshold takes"):
        attach(os.getpid(), tmp_path, ROLES, action="threshold:0")
    process = start(ASKED)
    with pytest.raises(UsageError, match="is this command itself"):
        attach(os.getpid(), tmp_path, ROLES)
    with pytest.raises(UsageError, match="this command itself was started from"):
        attach(os.getppid(), tmp_path, ROLES)
    (result,) = attach(process.pid, tmp_path, ROLES, method="remote_exec")
    if sys.version_info < (3, 14):
        assert not result.ok
        assert "3.14" in result.reason
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: (stat := read_stat(process.pid)) is not None and stat.state == "T")
    assert [one.reason for one in attach(process.pid, tmp_path, ROLES, method="gdb")] == ["it is stopped (SIGSTOP)"]


@needs_gdb
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_a_directory_that_the_servers_user_cannot_write_to(tmp_path: Path) -> None:
    code = "import os, time; os.setgid(65534); os.setuid(65534); print('up', flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        (result,) = attach(process.pid, tmp_path, ROLES)
        assert not result.ok
        assert "its user (uid 65534) cannot write to" in result.reason
    finally:
        process.kill()
        process.communicate()


def test_the_method_is_chosen_by_what_both_sides_have(start: Callable[..., subprocess.Popen[str]]) -> None:
    process = start(ASKED)
    runtime = find_runtime(process.pid)
    assert runtime is not None
    assert runtime.version == sys.version_info[:2]
    ours = (3, 14)
    theirs = type(runtime)(runtime.path, runtime.functions, (3, 14))

    def choice(wanted: str, *, own: tuple[int, int] = ours, remote: bool = True, gdb: bool = True) -> object:
        return choose_method(wanted, theirs, own_version=own, remote_exec=remote, gdb=gdb)  # type: ignore[arg-type]

    assert choice("auto") == ("remote_exec", "")
    assert choice("gdb") == ("gdb", "")
    assert choice("auto", own=(3, 15)) == ("gdb", "")
    assert choice("auto", remote=False) == ("gdb", "")
    assert choice("remote_exec", gdb=False) == ("remote_exec", "")
    for refused in (choice("remote_exec", own=(3, 15)), choice("auto", own=(3, 15), gdb=False)):
        assert isinstance(refused, tuple)
        assert refused[0] is None
        assert "here 3.15, there 3.14" in refused[1]
    static = type(runtime)("/opt/python", {}, None)
    method, why = choose_method("auto", static, own_version=ours, remote_exec=True, gdb=True)
    assert method is None
    for version, found in (((2, 7), "it is Python 2.7"), (None, "its Python is older")):
        old = type(runtime)(runtime.path, runtime.functions, version, recent=False)
        too_old = choose_method("auto", old, own_version=ours, remote_exec=True, gdb=True)
        assert too_old == (None, f"{found}; the hook needs 3.8 or later, so nothing was put into it")
    assert "does not export Py_IsInitialized" in why


def test_processes_without_the_hook_are_listed_with_a_reason(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    from atom.diag.process_sampler import ProcessSampler

    server = tmp_path / "server"
    server.mkdir()
    code = (
        "import os, subprocess, sys, time\n"
        "sleep = 'import time; time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-I', '-c', sleep])\n"
        "subprocess.Popen([sys.executable, '-c', sleep], env={'PATH': '/bin'})\n"
        "subprocess.Popen([sys.executable, '-c', sleep], env={**os.environ, 'PYTHONPATH': '/none'})\n"
        "subprocess.Popen([sys.executable, '-c', sleep], env={**os.environ, 'ATOM_GC_HOOK_ACTION': 'nonsense'})\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "print('up', flush=True); time.sleep(600)\n"
    )
    env = {**os.environ, **hook_environment(server, ROLES), "PYTHONPATH": str(hook_python_path())}
    process = start(code, "the-api", env=env)
    until(lambda: len(descendants(process.pid)) == 5)
    until(lambda: any(server.glob("gc-failed-*.json")) and any(server.glob("gc-api-*.jsonl")))
    sampler = ProcessSampler(label=None, roots=[], listeners=[], trees=[process.pid], roles=ROLES)
    (server / "process.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sampler.sample()))
    processes = hooked_processes(server)
    assert [(one.pid, one.role) for one in processes if one.hooked] == [(process.pid, "api")]
    reasons = sorted(one.reason for one in processes if not one.hooked)
    expected = ["ATOM_GC_HOOK_DIR is not in its environment", "PYTHONPATH was replaced", "not a Python process (sleep)",
                "started with -I", "the hook did not load: ValueError: 'nonsense' is none of"]  # fmt: skip
    assert len(reasons) == len(expected)
    assert all(reason.startswith(start) for reason, start in zip(reasons, expected, strict=True)), reasons
