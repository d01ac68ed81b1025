"""The GC hook in real interpreters: injected by environment, beside an existing sitecustomize, under fork, exec, spawn,
`kill -9`, a full disk."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.diag.gc_hook import GcHook
from atom.diag.gc_hook.passes import CAPACITY
from atom.diag.gc_injection import hook_environment, hook_python_path
from atom.diag.gc_records import GcProcess, check_books, read_gc_records
from atom.recipes.recipe import Roles
from tests.waiting import until

WAIT_S = 30.0
ROLES = Roles(api=("the-api",), core=("the-core",))


def environment(directory: Path, *extra_path: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (hook_python_path(), *extra_path)))
    return {**os.environ, **hook_environment(directory, ROLES), "PYTHONPATH": path}


def run(directory: Path, code: str, *words: str, extra_path: tuple[Path, ...] = (), flags: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, *words],
        env=environment(directory, *extra_path),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def the_one(directory: Path) -> GcProcess:
    (process,) = read_gc_records(directory)
    return process


def test_passes_are_recorded_and_the_books_balance(tmp_path: Path) -> None:
    code = "import gc\nfor _ in range(5): gc.collect()\nfor _ in range(7): gc.collect(0)\n"
    assert run(tmp_path, code, "the-api") == ""
    process = the_one(tmp_path)
    assert process.role == "api"
    assert process.collector == "generational"
    assert len(process.passes) == 5
    assert all(one.generation == 2 and one.pause_ns > 0 for one in process.passes)
    assert process.totals is not None
    assert process.totals["old_passes"] == 5
    assert process.totals["young_passes"] >= 7
    assert sum(process.totals["passes_by_generation"]) == process.totals["old_passes"] + process.totals["young_passes"]
    assert check_books(process) == []


def test_what_was_collected_is_recorded(tmp_path: Path) -> None:
    code = "import gc\ngc.collect()\nfor _ in range(100):\n    a = []; a.append(a)\ndel a\ngc.collect()\n"
    run(tmp_path, code)
    process = the_one(tmp_path)
    assert process.passes[-1].collected == 100
    assert process.passes[-1].uncollectable == 0


def test_the_existing_sitecustomize_is_chained(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import helper_of_site\nprint('site ran', __name__, __file__)\n")
    (site / "helper_of_site.py").write_text("")
    records = tmp_path / "records"
    records.mkdir()
    code = (
        "import gc, sys; gc.collect()\n"
        "import sitecustomize; print(sitecustomize.__file__)\n"
        "print([p for p in sys.path if 'gc_inject' in p])"
    )
    lines = run(records, code, extra_path=(site,)).splitlines()
    assert lines == [f"site ran sitecustomize {site}/sitecustomize.py", f"{site}/sitecustomize.py", "[]"]
    assert len(the_one(records).passes) == 1


def test_a_sitecustomize_that_is_a_package_is_chained(tmp_path: Path) -> None:
    site = tmp_path / "site" / "sitecustomize"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text(
        "from . import part\nfrom sitecustomize.part import word\nprint(word, __path__)\n"
    )
    (site / "part.py").write_text("word = 'site ran'\n")
    records = tmp_path / "records"
    records.mkdir()
    assert run(records, "import gc; gc.collect()", extra_path=(site.parent,)) == f"site ran ['{site}']\n"
    assert len(the_one(records).passes) == 1


def test_an_error_in_the_chained_sitecustomize_is_its_own(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("raise ValueError('mine')\n")
    output = run(tmp_path, "import gc; gc.collect(); print('runs')", extra_path=(site,))
    assert "mine" in output
    assert "runs" in output


def test_without_the_variable_nothing_is_installed(tmp_path: Path) -> None:
    env = {**environment(tmp_path), "ATOM_GC_HOOK_DIR": ""}
    code = "import gc, threading; print(gc.callbacks, threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"


def test_a_fork_records_for_itself_and_warns_nobody(tmp_path: Path) -> None:
    code = (
        "import gc, os, sys\n"
        "gc.collect(); gc.collect()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    for _ in range(3): gc.collect()\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "gc.collect()\n"
        "print(pid)\n"
    )
    # In the child, sys.exit ends the interpreter in order: its totals are written at exit.
    child_pid = int(run(tmp_path, code, "the-api", flags=("-W", "error")))
    processes = {process.pid == child_pid: process for process in read_gc_records(tmp_path)}
    assert len(processes[False].passes) == 3
    assert len(processes[True].passes) == 3
    assert processes[True].passes[0].start_ns > processes[False].passes[1].stop_ns
    for process in processes.values():
        assert check_books(process) == []


def test_children_of_subprocess_and_multiprocessing_are_hooked(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import gc, multiprocessing, subprocess, sys, time\n"
        "def work():\n"
        "    gc.collect()\n"
        "    time.sleep(0.8)\n"  # a forked worker ends by os._exit: what it did is written on the way
        "if __name__ == '__main__':\n"
        "    for kind in ('fork', 'spawn', 'forkserver'):\n"
        "        process = multiprocessing.get_context(kind).Process(target=work)\n"
        "        process.start(); process.join()\n"
        "        assert process.exitcode == 0\n"
        "    subprocess.run([sys.executable, '-c', 'import gc; gc.collect()', 'the-core'], check=True)\n"
    )
    records = tmp_path / "records"
    records.mkdir()
    subprocess.run([sys.executable, str(script)], env=environment(records), check=True, timeout=WAIT_S)
    passes = sorted((process.role, len(process.passes)) for process in read_gc_records(records) if process.passes)
    assert passes == [("core", 1), ("other", 1), ("other", 1), ("other", 1)]


def test_exec_continues_in_the_same_file(tmp_path: Path) -> None:
    code = (
        "import gc, os, sys, time\n"
        "gc.collect()\n"
        "time.sleep(0.8)\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import gc; gc.collect(); gc.collect()'])\n"
    )
    run(tmp_path, code)
    first, second = read_gc_records(tmp_path)
    assert first.pid == second.pid
    assert (len(first.passes), len(second.passes)) == (1, 2)


def test_a_short_helper_leaves_no_file(tmp_path: Path) -> None:
    run(tmp_path, "pass")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code, "the-api"], env=environment(tmp_path))
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_kill_9_leaves_what_was_recorded(tmp_path: Path, running: Callable[[str], subprocess.Popen[bytes]]) -> None:
    process = running(
        "import gc, time\nfor _ in range(4): gc.collect()\nfor _ in range(9): gc.collect(0)\ntime.sleep(600)"
    )
    until(lambda: any(one.totals for one in read_gc_records(tmp_path)))
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = the_one(tmp_path)
    assert len(record.passes) == 4
    assert record.totals is not None
    assert record.totals["young_passes"] >= 9
    assert check_books(record) == []


def test_the_file_follows_a_title_set_after_start(
    tmp_path: Path, running: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    # A process that renames itself rewrites its argument area; setting the pointer to it needs no privilege here.
    code = (
        "import ctypes, gc, time\n"
        "gc.collect()\n"
        "time.sleep(1.2)\n"
        "raw = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
        "start, end = int(raw[45]), int(raw[46])\n"
        "ctypes.memset(start, 0, end - start)\n"
        "ctypes.memmove(start, b'the-' + b'core', 8)\n"
        "time.sleep(600)\n"
    )
    running(code)
    until(lambda: any(tmp_path.glob("gc-api-*.jsonl")))
    until(lambda: any(tmp_path.glob("gc-core-*.jsonl")))
    assert not list(tmp_path.glob("gc-api-*.jsonl"))
    assert the_one(tmp_path).role == "core"


def test_a_directory_that_cannot_be_written_is_the_hooks_problem_only(tmp_path: Path) -> None:
    assert run(tmp_path / "none", "import gc; gc.collect(); print('runs')").strip() == "runs"


def test_a_full_disk_stops_the_record_not_the_server(tmp_path: Path) -> None:
    code = (
        "import gc, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))\n"  # enough for the first line
        "assert '_atom_gc_hook' in sys.modules and gc.callbacks\n"
        "for _ in range(1000): gc.collect(0)\n"
        "for _ in range(20): gc.collect()\n"
        "print('runs')\n"
    )
    records = tmp_path / "records"
    records.mkdir()
    env = {**environment(records), "ATOM_GC_HOOK_ROLES": "not json"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "runs"
    assert done.stderr == ""
    (path,) = records.iterdir()
    assert path.stat().st_size <= 700


def test_an_action_starts_and_ends_with_its_files(
    tmp_path: Path, running: Callable[[str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_GC_HOOK_ACTION", "threshold:12345,6,7")
    # The child is forked while the action is on, and undoes it for itself.
    code = (
        "import gc, os, time\ngc.set_threshold(800, 11, 12)\n"
        f"while not os.path.exists({str(tmp_path / 'fork')!r}): time.sleep(0.05)\n"
        "pid = os.fork()\n"
        f"while gc.callbacks: time.sleep(0.05)\n"
        f"open({str(tmp_path)!r} + f'/after-{{pid == 0}}', 'w').write(str(gc.get_threshold()))\n"
        "time.sleep(600 if pid else 0)\n"
    )
    running(code)
    until(lambda: any(one.totals for one in read_gc_records(tmp_path)))
    record = the_one(tmp_path)
    assert (record.action, record.last_thresholds, record.enabled) == (None, (800, 11, 12), True)
    (tmp_path / "gc-action-start").touch()
    until(lambda: the_one(tmp_path).action == "threshold:12345,6,7")
    assert the_one(tmp_path).last_thresholds == (12345, 6, 7)
    (tmp_path / "fork").touch()
    until(lambda: len(read_gc_records(tmp_path)) == 2)
    (tmp_path / "gc-hook-stop").touch()
    until(lambda: len(list(tmp_path.glob("after-*"))) == 2)
    until(lambda: all(path.read_text() == "(800, 11, 12)" for path in tmp_path.glob("after-*")))
    assert [one.end for one in read_gc_records(tmp_path)] == ["stopped", "stopped"]
    assert run(tmp_path, "import gc; print(gc.callbacks)") == "[]\n"  # who comes later is not hooked


def test_what_the_server_froze_is_recorded(tmp_path: Path) -> None:
    run(tmp_path, "import gc; gc.collect(); gc.freeze(); gc.set_threshold(0); gc.disable()")
    process = the_one(tmp_path)
    assert process.frozen is not None
    assert process.frozen > 1000
    assert (process.last_thresholds[0], process.enabled, process.action) == (0, False, None)


def test_a_record_is_never_mixed_with_another_process_of_the_same_pid(tmp_path: Path) -> None:
    code = (
        "import gc, os\n"
        f"stranger = os.path.join({str(tmp_path)!r}, f'gc-api-{{os.getpid()}}.jsonl')\n"
        'open(stranger, \'w\').write(\'{"type":"hook","pid":%d,"start_ticks":1}\\n\' % os.getpid())\n'
        "gc.collect()\n"
    )
    run(tmp_path, code, "the-api")
    (mine,) = tmp_path.glob("gc-api-*.1.jsonl")
    assert '"type":"pass"' in mine.read_text()
    (stranger,) = set(tmp_path.glob("gc-api-*.jsonl")) - {mine}
    assert len(stranger.read_text().splitlines()) == 1


def test_the_books_balance_while_threads_collect(tmp_path: Path) -> None:
    code = (
        "import gc, sys, threading, time\n"
        "sys.setswitchinterval(1e-6)\n"  # threads change within the hook's callback
        "end = time.monotonic() + 3\n"
        "def work():\n"
        "    while time.monotonic() < end: gc.collect(); gc.collect(0)\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[one.start() for one in threads]; [one.join() for one in threads]\n"
    )
    run(tmp_path, code)
    process = the_one(tmp_path)
    assert process.passes
    for at, totals in enumerate(process.history):
        assert totals["recorded"] + totals["dropped"] == totals["old_passes"], at
        assert sum(totals["passes_by_generation"]) == totals["old_passes"] + totals["young_passes"]
        recorded = process.passes[: totals["recorded"]]
        if not totals["dropped"]:
            assert sum(one.pause_ns for one in recorded) == totals["old_ns"]
    assert process.hook_cpu_ns is not None
    assert process.callback_ns is not None
    assert process.hook_cpu_ns >= process.callback_ns * sum(process.history[-1]["passes_by_generation"])


def collect(hook: GcHook, times: int) -> None:
    """Call the callbacks as the collector does."""
    for _ in range(times):
        for phase in ("start", "stop"):
            info = {"generation": 2, "collected": 1, "uncollectable": 0}
            for callback in hook.passes.callbacks:
                callback(phase, info)


def test_the_callbacks_allocate_nothing_that_the_collector_tracks(tmp_path: Path) -> None:
    hook = GcHook(str(tmp_path), {})
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(2):  # specialised bytecode, cached integers and CPython's free lists are in place
            collect(hook, 1000)
            hook.passes.take()
        before, known = gc.get_count()[0], len(gc.get_objects())
        collect(hook, 1000)
        if sys.version_info < (3, 14):  # which tracks the dictionaries that it makes
            assert len(gc.get_objects()) - known <= 5
        assert len(hook.passes.take()) == 1000
        assert gc.get_count()[0] - before <= 100  # what was kept for the drain thread counts no more
    finally:
        if enabled:
            gc.enable()


def test_a_full_buffer_is_counted(tmp_path: Path) -> None:
    hook = GcHook(str(tmp_path), {})
    collect(hook, CAPACITY + 904)
    hook.drain(totals=True)
    collect(hook, 3)
    hook.drain(totals=True)
    hook.record.close()
    process = the_one(tmp_path)
    assert len(process.passes) == CAPACITY + 3
    assert process.totals is not None
    assert process.totals["dropped"] == 904
    assert "904 passes were not recorded" in check_books(process)[0]


def test_the_lines_are_one_json_object_each(tmp_path: Path) -> None:
    run(tmp_path, "import gc; gc.collect()")
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["hook", "pass", "totals", "end"]
    assert lines[0]["boot_id"]
    assert lines[0]["python"] == sys.version.split()[0]
