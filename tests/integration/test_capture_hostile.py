"""Sessions with servers nobody here wrote, and with what they do to whoever watches: exit, die, hide their port, serve
no HTTP, hang, answer garbage. Each leaves a sealed run directory with null where nothing was seen."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.runner import LoadOutcome
from atom.diag.observe import observe
from atom.diag.session import MeasuredSession, PidTarget, ServerUnderTest, SessionResult, UrlTarget
from atom.recipes.command import recipe_from_command
from atom.recipes.errors import RunError, ServerDiedError, UsageError
from atom.recipes.launcher import LaunchOptions, launch
from atom.recipes.processes import labelled_processes, read_stat
from tests.waiting import until

STAND_IN = str(Path(__file__).with_name("stand_in_server.py"))
WAIT_S = 30.0
Load = Callable[[ServerUnderTest], LoadOutcome]


def watch(run_dir: RunDirectory, seconds: float = 1.3) -> Load:
    return lambda server: observe(server, seconds, threading.Event(), run_dir)


def lines(run_dir: RunDirectory, name: str) -> list[dict[str, Any]]:
    return list(read_jsonl(run_dir.server / name))


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that nobody here launched; it has said one line."""
    process = subprocess.Popen([sys.executable, "-u", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# ---- a command as it is --------------------------------------------------------------------------------------------


def test_a_command_that_hides_its_port(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    session = MeasuredSession(recipe_from_command([sys.executable, STAND_IN, "--behaviour", "collect"]), run_dir)
    result = session.run(watch(run_dir))
    assert result.reasons == []
    assert result.server.server is not None
    pid = result.server.server.pid
    run = run_dir.read_run_json()
    assert run["recipe"]["source"] == "command line"
    assert run["server"]["listeners"] == [pid]
    assert run["server"]["metrics_tried"] == [{"url": run["server"]["metrics_url"], "status": 200, "error": None}]
    assert run["gc_hook"]["processes"] == [{"pid": pid, "role": "api", "hooked": True, "reason": None}]
    assert (run_dir.server / f"gc-api-{pid}.jsonl").is_file()
    assert {line["role"] for line in lines(run_dir, "process.jsonl")} == {"api"}
    assert {line["status"] for line in lines(run_dir, "health.jsonl")} == {200}
    scrape, *_ = lines(run_dir, "metrics-api.jsonl")
    assert scrape["family_series"]["vllm:num_requests_running"] == 2
    assert scrape["values"]["requests_finished"] is None
    assert labelled_processes(result.server.server.label) == []


def test_a_command_whose_server_is_below_a_shell_and_on_ipv6(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "health").touch()
    command = ["sh", "-c", f'"{sys.executable}" -m http.server 0 --bind ::1 -d "{tmp_path}/www"; exit 5']
    result = MeasuredSession(recipe_from_command(command), run_dir).run(watch(run_dir, 1.0))
    assert result.reasons == []
    assert result.server.base_url.startswith("http://[::1]:")
    roles = {line["name"]: line["role"] for line in lines(run_dir, "process.jsonl")}
    assert roles.pop("sh") == "other"
    assert set(roles.values()) == {"api"}
    hook = {one["hooked"]: one for one in run_dir.read_run_json()["gc_hook"]["processes"]}
    assert hook[False]["reason"].startswith("not a Python process")
    assert {line["status"] for line in lines(run_dir, "health.jsonl")} == {200}
    assert {line["error"] for line in lines(run_dir, "metrics-api.jsonl")} == {"HTTP 404"}


def test_a_command_that_ends_before_it_listens(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    recipe = recipe_from_command([sys.executable, STAND_IN, "--behaviour", "die-at-start"])
    with pytest.raises(
        ServerDiedError, match=r"command `python\S* stand_in_server.py` died with exit status 3"
    ) as caught:
        MeasuredSession(recipe, run_dir).run(watch(run_dir))
    assert "No module named 'warp_drive'" in str(caught.value)
    assert run_dir.read_run_json()["validity"] == "failed"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^cannot run 'no-such-server': No such file"):
        MeasuredSession(recipe_from_command(["no-such-server"]), RunDirectory(tmp_path)).run(
            watch(RunDirectory(tmp_path))
        )


def test_a_port_that_another_server_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UsageError, match="already in use"):
            launch(recipe_from_command([sys.executable, STAND_IN, "--port", port]), LaunchOptions())


def test_the_action_starts_with_the_load(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    recipe = recipe_from_command([sys.executable, STAND_IN, "--port", "{port}"])
    seen: list[bool] = []

    def load(server: ServerUnderTest) -> LoadOutcome:
        seen.append((run_dir.server / "gc-action-start").is_file())
        return observe(server, 0.1, threading.Event(), run_dir)

    MeasuredSession(recipe, run_dir, gc_action="freeze").run(load)
    assert seen == [True]
    assert run_dir.read_run_json()["gc_hook"]["action"] == "freeze"
    with pytest.raises(UsageError, match="needs the GC hook"):
        MeasuredSession(UrlTarget(base_url="http://127.0.0.1:9"), run_dir, gc_action="freeze")


# ---- watching without a load ---------------------------------------------------------------------------------------


def observed(tmp_path: Path, seconds: float | None, during: Callable[[ServerUnderTest, threading.Event], None]) -> Any:
    run_dir = RunDirectory(tmp_path)
    recipe = recipe_from_command([sys.executable, STAND_IN, "--port", "{port}"])
    outcomes: list[LoadOutcome] = []

    def load(server: ServerUnderTest) -> LoadOutcome:
        stop = threading.Event()
        threading.Thread(target=during, args=(server, stop), daemon=True).start()
        outcomes.append(observe(server, seconds, stop, run_dir))
        return outcomes[0]

    result = MeasuredSession(recipe, run_dir, gc_hook=False, health_probe=False).run(load)
    (start, end) = read_jsonl(run_dir.client / "observer.jsonl")
    assert (start["kind"], end["kind"]) == ("measured_start", "measured_end")
    assert start["t_ns"] == outcomes[0].started_ns == run_dir.read_run_json()["measured_start_ns"]
    assert end["t_ns"] == outcomes[0].ended_ns
    assert end["interrupted"] == outcomes[0].interrupted
    assert not (run_dir.server / "health.jsonl").exists()
    return result, outcomes[0], run_dir.read_run_json()


def test_an_observation_ends_when_told_to(tmp_path: Path) -> None:
    _, outcome, run = observed(tmp_path / "open", None, lambda _, stop: stop.set())
    assert (outcome.interrupted, run["validity"]) == (False, "valid")
    _, outcome, run = observed(tmp_path / "timed", 60.0, lambda _, stop: stop.set())
    assert (outcome.interrupted, run["validity"]) == (True, "interrupted")


def test_an_observation_ends_with_the_server(tmp_path: Path) -> None:
    def kill(server: ServerUnderTest, _: threading.Event) -> None:
        assert server.server is not None
        assert server.server.pid is not None
        os.kill(server.server.pid, signal.SIGKILL)

    result, outcome, run = observed(tmp_path, None, kill)
    assert outcome.interrupted
    assert result.server_died
    assert "SIGKILL" in result.reasons[0]
    assert run["validity"] == "failed"


# ---- a running process ---------------------------------------------------------------------------------------------


class FakeAttach(types.ModuleType):
    """Stands in for what puts hooks into processes; says what it was asked."""

    def __init__(self, error: Exception | None = None, *, ok: bool = False) -> None:
        super().__init__("atom.diag.attach")
        self.calls: list[str] = []
        self._error, self._ok = error, ok

    def attach(self, pid: int, directory: Path, roles: object, *, method: str, action: str | None) -> list[Any]:
        self.calls.append(f"attach {method} {action}")
        if self._error is not None:
            raise self._error
        reason = "" if self._ok else "gdb is not installed"
        return [types.SimpleNamespace(pid=pid, role="other", ok=self._ok, method=method, reason=reason)]

    def detach(self, directory: Path) -> list[int]:
        self.calls.append(f"detach {directory.name}")
        return []


@pytest.fixture
def attaching(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeAttach]:
    def use(*args: Any, **options: Any) -> FakeAttach:
        fake = FakeAttach(*args, **options)
        monkeypatch.setitem(sys.modules, "atom.diag.attach", fake)
        return fake

    return use


def profile(run_dir: RunDirectory, target: PidTarget, load: Load | None = None) -> SessionResult:
    return MeasuredSession(target, run_dir).run(load or watch(run_dir))


def test_a_running_server_by_its_pid(tmp_path: Path, attaching: Callable[..., FakeAttach]) -> None:
    fake, run_dir = attaching(), RunDirectory(tmp_path)
    with running(STAND_IN) as process:
        until(lambda: bool(socket_of(process.pid)))
        result = profile(run_dir, PidTarget(pid=process.pid))
        assert process.poll() is None  # a session ends only what it started
    assert fake.calls == ["attach auto None", "detach server"]
    assert result.reasons == ["the GC hook did not load in the API process (gdb is not installed): no GC figures"]
    run = run_dir.read_run_json()
    assert run["server"]["base_url"] == result.server.base_url
    assert run["gc_hook"]["how"] == "attach"
    assert run["gc_hook"]["processes"][0]["reason"] == "gdb is not installed"
    assert lines(run_dir, "metrics-api.jsonl")[0]["error"] is None
    assert {(line["pid"], line["role"]) for line in lines(run_dir, "process.jsonl")} == {(process.pid, "api")}


def socket_of(pid: int) -> list[int]:
    from atom.recipes.listening import tree_listeners

    return [one.port for one in tree_listeners([pid])]


def test_a_process_without_http_is_profiled_all_the_same(tmp_path: Path, attaching: Callable[..., FakeAttach]) -> None:
    attaching(RunError("ptrace is not allowed"))
    run_dir = RunDirectory(tmp_path)
    with running("-c", "print(1); import time; time.sleep(600)") as process:
        result = profile(run_dir, PidTarget(pid=process.pid))
    assert result.reasons == ["the GC hook could not be attached: ptrace is not allowed"]
    with pytest.raises(UsageError, match="give --base-url"):
        _ = result.server.base_url
    run = run_dir.read_run_json()
    assert (run["validity"], run["server"]["base_url"], run["server"]["metrics_url"]) == ("valid", None, None)
    assert run["gc_hook"]["problem"] == "ptrace is not allowed"
    assert {line["role"] for line in lines(run_dir, "process.jsonl")} == {"api"}
    assert not (run_dir.server / "metrics-api.jsonl").exists()


def test_a_pid_that_dies_while_it_is_profiled(tmp_path: Path, attaching: Callable[..., FakeAttach]) -> None:
    fake, run_dir = attaching(), RunDirectory(tmp_path)
    with running(STAND_IN) as process:
        until(lambda: bool(socket_of(process.pid)))

        def load(server: ServerUnderTest) -> LoadOutcome:
            until(lambda: bool(lines(run_dir, "metrics-api.jsonl")))
            process.kill()
            process.wait()
            outcome = observe(server, 60.0, threading.Event(), run_dir)
            until(lambda: lines(run_dir, "health.jsonl")[-1]["error"] is not None)
            return outcome

        result = profile(run_dir, PidTarget(pid=process.pid), load)
    assert fake.calls[-1] == "detach server"
    assert result.server_died
    assert result.reasons[0] == f"process {process.pid} ended while it was profiled"
    assert run_dir.read_run_json()["validity"] == "failed"
    last = lines(run_dir, "health.jsonl")[-1]
    assert (last["latency_ns"], last["status"]) == (None, None)


def test_the_hook_is_taken_out_after_errors_too(tmp_path: Path, attaching: Callable[..., FakeAttach]) -> None:
    fake, run_dir = attaching(), RunDirectory(tmp_path)

    def load(_: ServerUnderTest) -> LoadOutcome:
        raise KeyboardInterrupt

    with running("-c", "print(1); import time; time.sleep(600)") as process, pytest.raises(KeyboardInterrupt):
        profile(run_dir, PidTarget(pid=process.pid), load)
    assert fake.calls == ["attach auto None", "detach server"]
    assert run_dir.read_run_json()["validity"] == "interrupted"


def test_a_pid_that_is_none(tmp_path: Path) -> None:
    with running("-c", "print(1)") as process:
        process.wait()
    assert read_stat(process.pid) is None
    with pytest.raises(UsageError, match="--pid"):
        profile(RunDirectory(tmp_path), PidTarget(pid=process.pid))


# ---- from outside --------------------------------------------------------------------------------------------------


def test_a_server_that_hangs_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never says a word: neither the start nor the end of a session waits for it."""
    monkeypatch.setattr("atom.diag.metrics_path._TIMEOUT_S", 0.2)
    monkeypatch.setattr("atom.diag.server_info.TIMEOUT_S", 0.2)
    run_dir = RunDirectory(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        result = MeasuredSession(UrlTarget(base_url=url), run_dir).run(watch(run_dir))
    assert result.reasons == []
    run = run_dir.read_run_json()
    assert run["validity"] == "valid"
    assert {attempt["error"] for attempt in run["server"]["metrics_tried"]} == {"no complete answer within 0.2 s"}
    for name in ("metrics-api.jsonl", "health.jsonl"):
        (line,) = lines(run_dir, name)
        assert line["latency_ns"] is None
        assert "the capture ended" in line["error"]
    assert lines(run_dir, "process.jsonl")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RunError, match=rf"no server answers at {url}: connection refused; nothing was measured"):
        MeasuredSession(UrlTarget(base_url=url), run_dir).run(watch(run_dir))
    assert not list(run_dir.server.iterdir())
