"""The launcher with real processes: every way a server can start badly, end badly or be abandoned leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.recipes import launcher as launcher_module
from atom.recipes.errors import RunError, ServerDiedError, UsageError
from atom.recipes.launcher import LaunchOptions, LaunchProgress, launch
from atom.recipes.ports import free_port
from atom.recipes.processes import command_line, labelled_processes, listening_processes, read_stat
from atom.recipes.recipe import Health, Recipe, Requirement, Stop
from atom.recipes.server import Server
from atom.recipes.spawn import import_root

STAND_IN = Path(__file__).with_name("stand_in_server.py")
WAIT_S = 30.0


def recipe(*behaviours: str, port_file: bool = True, **fields: object) -> Recipe:
    words = [sys.executable, str(STAND_IN), "--host", "{host}", "--port", "{port}"]
    words += ["--port-file", "{port_file}"] if port_file else []
    for behaviour in behaviours:
        words += ["--behaviour", behaviour]
    given: dict[str, object] = {"ready_timeout_s": WAIT_S, "stop": Stop(grace_s=10.0), **fields}
    return Recipe(name="stand-in", source="test", command=tuple(words), **given)  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or not stat.alive


def assert_nothing_left(server: Server) -> None:
    assert labelled_processes(server.label) == []
    assert gone(server.supervisor_pid)
    assert listening_processes(server.port) is None


def test_start_and_stop(tmp_path: Path) -> None:
    seen: list[LaunchProgress] = []
    lines: list[str] = []
    with launch(recipe(), LaunchOptions(log_dir=tmp_path), on_progress=seen.append, on_log=lines.append) as server:
        assert server.port > 0
        assert server.pid is not None
        assert server.processes() == [server.pid]
        assert server.ready_ns is not None
        assert not server.wait_for_end(0.0)
        server.raise_if_dead()
    report = server.stop()
    assert (report.status, report.swept, report.log_error) == (0, 0, None)
    assert seen[0].timeout_s == WAIT_S
    assert lines == ["stand-in: starting", "stand-in: listening", "stand-in: stopped"]
    assert (tmp_path / "server.log").read_text().splitlines() == lines
    assert_nothing_left(server)


def test_the_label_and_the_owner_are_in_the_servers_environment() -> None:
    with launch(recipe(), LaunchOptions(env={"EXTRA": "1"})) as server:
        assert server.pid is not None
        env = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert f"ATOM_RUN_LABEL={server.label}".encode() in env
        assert any(entry.startswith(f"ATOM_RUN_OWNER={server.supervisor_pid}:".encode()) for entry in env)
        assert b"EXTRA=1" in env


def test_a_server_that_dies_at_start_is_noticed_at_once() -> None:
    with pytest.raises(ServerDiedError) as caught:
        launch(recipe("die-at-start"), LaunchOptions())
    message = str(caught.value)
    assert caught.value.server_status == 3
    assert "stand-in died with exit status 3 after" in message
    assert "s, while it started: " in message
    assert "the module warp_drive is missing" in message
    assert "No module named 'warp_drive'" in message.splitlines()[-1]


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"^cannot run 'no-such-program': No such file"):
        launch(Recipe(name="x", source="test", command=("no-such-program",)), LaunchOptions())


def test_a_server_that_never_becomes_healthy(tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(RunError, match=r"not ready after 1 s.*it answers 503.*--ready-timeout") as caught:
        launch(
            recipe("never-healthy"),
            LaunchOptions(ready_timeout_s=1.0, log_dir=tmp_path),
            on_start=lambda server: pids.append(server.supervisor_pid),
        )
    assert f"{tmp_path}/server.log" in str(caught.value)
    assert not isinstance(caught.value, ServerDiedError)
    assert gone(pids[0])


def test_a_server_that_dies_after_it_was_ready() -> None:
    with launch(recipe("die-after-ready"), LaunchOptions()) as server:
        assert server.wait_for_end(WAIT_S)
        with pytest.raises(ServerDiedError, match="exit status 9") as caught:
            server.raise_if_dead()
        assert "about to die" in str(caught.value)
    assert_nothing_left(server)


def test_a_server_that_closes_its_port_is_still_stopped() -> None:
    with launch(recipe("close-port"), LaunchOptions()) as server:
        assert until(lambda: listening_processes(server.port) is None)
        server.raise_if_dead()
    assert server.stop().status == 0
    assert_nothing_left(server)


def test_a_server_that_hangs_on_stop_is_killed_after_its_grace() -> None:
    said: list[str] = []
    with launch(recipe("hang-on-stop", stop=Stop(grace_s=1.5)), LaunchOptions()) as server:
        server.on_stopping = said.append
    report = server.stop()
    assert said == ["waiting for the server to stop (SIGTERM sent, SIGKILL after 0 s)"]
    assert report.killed == "the server did not stop within 1.5 s of SIGTERM: it was killed"
    assert report.status == -signal.SIGKILL
    assert report.swept == 1
    assert_nothing_left(server)


def test_an_interrupt_while_it_stops_kills_it_first() -> None:
    server = launch(recipe("hang-on-stop", stop=Stop(grace_s=3600.0)), LaunchOptions())

    def interrupt(_line: str) -> None:
        server.on_stopping = None
        raise KeyboardInterrupt

    server.on_stopping = interrupt
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert_nothing_left(server)
    assert listening_processes(server.port) is None


def test_a_server_that_goes_into_the_background_is_told_not_to() -> None:
    command = ("sh", "-c", "sleep 600 & echo gone; exit 0")
    said: list[str] = []
    servers: list[Server] = []

    def started(server: Server) -> None:
        server.on_stopping = said.append
        servers.append(server)

    with pytest.raises(ServerDiedError, match=r"ended with exit status 0 before .*foreground.*--pid.*\n    gone"):
        launch(Recipe(name="x", source="test", command=command), LaunchOptions(), on_start=started)
    assert said == []
    assert_nothing_left(servers[0])


def test_a_second_request_cuts_a_hanging_stop_short() -> None:
    server = launch(recipe("hang-on-stop", stop=Stop(grace_s=3600.0)), LaunchOptions())
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    server.kill_now()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert server.stop().status == -signal.SIGKILL
    assert_nothing_left(server)


def test_a_grandchild_in_a_session_of_its_own_goes_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with launch(recipe("grandchild"), LaunchOptions(extra_args=["--note", str(note)])) as server:
        assert until(lambda: note.exists() and note.read_text() != "")
        grandchild = int(note.read_text())
        assert os.getsid(grandchild) == grandchild
        assert grandchild in server.processes()
    assert gone(grandchild)
    assert server.stop().swept == 1
    assert_nothing_left(server)


LAUNCHER = """
import json, sys, time
sys.path.insert(0, {root!r})
from atom.recipes.launcher import LaunchOptions, launch
from atom.recipes.recipe import Recipe, Stop
recipe = Recipe(name="x", source="test", command=tuple(json.loads(sys.argv[1])), stop=Stop(grace_s=2.0))
server = launch(recipe, LaunchOptions())
print(json.dumps([server.label, server.supervisor_pid, server.port, str(server.log_path.parent)]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that launches a server and then sleeps."""
    started: list[subprocess.Popen[str]] = []

    def start(*behaviours: str) -> subprocess.Popen[str]:
        words = [*recipe(*behaviours).command, "--note", str(tmp_path / "pid")]
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER.format(root=str(import_root())), json.dumps(words)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("behaviours", [(), ("grandchild",), ("hang-on-stop", "grandchild")])
@pytest.mark.parametrize("whole_group", [False, True])
def test_kill_9_of_the_parent_leaves_no_process(
    parent: Callable[..., subprocess.Popen[str]], behaviours: tuple[str, ...], whole_group: bool
) -> None:
    process = parent(*behaviours)
    assert process.stdout is not None
    label, supervisor, port, scratch = json.loads(process.stdout.readline())
    assert labelled_processes(label) != []
    if whole_group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    assert until(lambda: gone(supervisor))
    assert labelled_processes(label) == []
    assert listening_processes(port) is None
    assert not Path(scratch).exists()


def test_kill_9_of_the_supervisor_is_answered_by_the_launcher(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    server = launch(recipe("grandchild"), LaunchOptions(extra_args=["--note", str(note)]))
    assert until(lambda: note.exists() and note.read_text() != "")
    os.kill(server.supervisor_pid, signal.SIGKILL)
    assert server.wait_for_end(WAIT_S)
    with pytest.raises(ServerDiedError, match="supervisor"):
        server.raise_if_dead()
    server.stop()
    assert_nothing_left(server)


def test_sigterm_to_the_supervisor_stops_the_server() -> None:
    server = launch(recipe(), LaunchOptions())
    os.kill(server.supervisor_pid, signal.SIGTERM)
    assert until(lambda: labelled_processes(server.label) == [])
    server.stop()
    assert_nothing_left(server)


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(UsageError, match=rf"already in use by pid {os.getpid()}"):
            launch(recipe(), LaunchOptions(port=holder.getsockname()[1]))


def test_a_port_that_is_lost_between_probe_and_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        offers = [taken, free_port("127.0.0.1")]
        monkeypatch.setattr(launcher_module, "free_port", lambda _host: offers.pop(0))
        # The holder accepts connections but never answers, and the server dies on the port meanwhile.
        with launch(recipe(port_file=False), LaunchOptions()) as server:
            assert server.port != taken
    assert offers == []


def test_an_answer_by_somebody_else_is_not_taken_for_the_server() -> None:
    with launch(recipe(), LaunchOptions()) as stranger:
        # A server that ignores the port it is given, while another one answers there.
        sleeper = Recipe(
            name="sleeper",
            source="test",
            command=(sys.executable, "-c", "import time; time.sleep(600)"),
            ports={"other": stranger.port},
            health=Health(port="other"),
        )
        with pytest.raises(RunError, match=rf"answered by pid {stranger.pid} .*not the server of recipe sleeper"):
            launch(sleeper, LaunchOptions())


def test_a_full_disk_costs_the_log_not_the_server(tmp_path: Path) -> None:
    (tmp_path / "server.log").symlink_to("/dev/full")
    with launch(recipe("chatty"), LaunchOptions(log_dir=tmp_path)) as server:
        assert until(lambda: server.last_line().startswith("line 19999"))
        server.raise_if_dead()
    assert "No space left" in (server.stop().log_error or "")


def test_a_chatty_server_has_a_bounded_log(tmp_path: Path) -> None:
    with launch(recipe("chatty", log_max_bytes=100_000), LaunchOptions(log_dir=tmp_path)) as server:
        assert until(lambda: server.last_line().startswith("line 19999"))
    assert server.stop().status == 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000
    assert (tmp_path / "server.log").read_text().splitlines()[-1] == "stand-in: stopped"


def test_a_launcher_that_does_not_read_does_not_block_the_server(tmp_path: Path) -> None:
    blocked = threading.Event()
    release = threading.Event()

    def stuck(_line: str) -> None:
        blocked.set()
        release.wait(WAIT_S)

    timer = threading.Timer(2.0, release.set)
    timer.start()
    with launch(recipe("chatty"), LaunchOptions(log_dir=tmp_path), on_log=stuck):
        assert blocked.is_set()
        assert until(lambda: "line 19999" in (tmp_path / "server.log").read_text()[-300:])
        release.set()
    timer.join()


def test_a_reader_of_the_log_that_fails_does_not_hide_the_servers_end() -> None:
    def broken(_line: str) -> None:
        raise BrokenPipeError  # `atom serve 2>&1 | head -1`

    with launch(recipe(), LaunchOptions(), on_log=broken) as server:
        assert server.last_line() == "stand-in: listening"
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait_for_end(WAIT_S)


def test_prepare_runs_first_and_its_failure_is_told(tmp_path: Path) -> None:
    made = tmp_path / "made"
    good = recipe(prepare=((sys.executable, "-c", f"open({str(made)!r}, 'w')"),))
    with launch(good, LaunchOptions()):
        assert made.exists()
    bad = recipe(prepare=((sys.executable, "-c", "print('no weights'); raise SystemExit(4)"),))
    with pytest.raises(ServerDiedError, match=r"prepare\[0\].*exit status 4") as caught:
        launch(bad, LaunchOptions())
    assert "no weights" in str(caught.value)


def test_a_command_behind_a_prefix_that_runs_it_elsewhere(tmp_path: Path) -> None:
    """The prefix leaves the server to a process that is no descendant of ours, as `docker exec` does."""
    prefix = tmp_path / "prefix.py"
    prefix.write_text(
        "import os, subprocess, sys, time\n"
        "sock = sys.argv[1]\n"
        "import socket, json\n"
        "with socket.socket(socket.AF_UNIX) as s:\n"
        "    s.connect(sock); s.sendall(json.dumps([sys.argv[2:], dict(os.environ)]).encode()); s.shutdown(1)\n"
        "    s.recv(1)\n"
    )
    address = str(tmp_path / "daemon")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(address)
        daemon.listen()
        running: list[subprocess.Popen[bytes]] = []

        def serve() -> None:
            connection, _ = daemon.accept()
            data = b""
            while chunk := connection.recv(65536):
                data += chunk
            command, env = json.loads(data)
            running.append(subprocess.Popen(command, env=env))
            running[0].wait()
            connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        elsewhere = recipe(exec=(sys.executable, str(prefix), address))
        with launch(elsewhere, LaunchOptions()) as server:
            assert server.pid != running[0].pid
            assert running[0].pid in server.processes()
        thread.join(WAIT_S)
        assert running[0].returncode == 0  # it heard of the stop although it is nobody's child here
    assert labelled_processes(server.label) == []


def test_a_detached_server_is_stopped_by_its_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    starter = (
        "import subprocess, sys\n"
        "p = subprocess.Popen(sys.argv[2:], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(p.pid))\n"
    )
    stopper = "import os, signal, sys; os.kill(int(open(sys.argv[1]).read()), signal.SIGTERM)"
    detached = recipe(
        detached=True,
        stop=Stop(grace_s=10.0, command=(sys.executable, "-c", stopper, str(pid_file))),
    )
    words = (sys.executable, "-c", starter, str(pid_file), *detached.command)
    with launch(
        Recipe(
            name="detached",
            source="test",
            command=words,
            detached=True,
            stop=detached.stop,
            ready_timeout_s=WAIT_S,
        ),
        LaunchOptions(),
    ) as server:
        assert until(lambda: gone(server.pid or 0))  # the command has returned
        server.raise_if_dead()
        assert not server.wait_for_end(0.1)
    assert gone(int(pid_file.read_text()))
    assert_nothing_left(server)


def test_what_cannot_be_started_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="disaggregated recipes are not supported"):
        launch(recipe(disaggregated=True), LaunchOptions())
    with pytest.raises(UsageError, match="--devices"):
        launch(recipe(), LaunchOptions(devices="0"))
    with_python = Recipe(
        name="x",
        source="test",
        command=("{python}", "-c", "pass"),
        requires=Requirement(modules=("warp_drive", "json"), install="pip install warp"),
    )
    with pytest.raises(UsageError, match=r"needs warp_drive, missing in .*: pip install warp"):
        launch(with_python, LaunchOptions())
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    with pytest.raises(UsageError, match=rf"needs warp_drive, missing in {link}"):
        launch(with_python, LaunchOptions(variables={"python": str(link)}))
    with pytest.raises(UsageError, match="no interpreter at"):
        launch(with_python, LaunchOptions(variables={"python": "/none/python"}))
    with pytest.raises(UsageError, match="does not run as a Python interpreter"):
        launch(with_python, LaunchOptions(variables={"python": "/bin/false"}))


def test_the_processes_of_two_servers_are_told_apart() -> None:
    with launch(recipe(), LaunchOptions()) as one, launch(recipe(), LaunchOptions()) as two:
        assert one.port != two.port
        assert set(one.processes()).isdisjoint(two.processes())
        assert str(STAND_IN) in command_line(one.processes()[0])
