"""Makes matched runs with real processes: each arm's part is an `atom bench` of its own, on its half of the machine.

Both are started, and begin to load at the same moment, when both servers are ready; where there is one half, one after
the other. The load generator is this installation's for every arm: only the server comes from the arm. Nothing of it
prints to the terminal: each load writes to `client.log` in its run directory.

Each load is in a session of its own, so that a Ctrl-C is passed on by this process, which waits for both ends. When
this process is gone, however it went, a load ends by itself and stops its server: the control pipe tells it
(`cli/start_gate.py` is its end of it).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from atom.bench.redact import redact_environment
from atom.diag.compare.arm_problem import complaint, port_was_taken
from atom.diag.compare.arms import arm_environment
from atom.diag.compare.container import write_container_recipe
from atom.diag.compare.model import START_GATE, Arm, ArmKind, Half, Load, MatchedRun, Placement, RunResult, labels
from atom.recipes.cpus import format_cpus
from atom.recipes.errors import ExitStatus, RunError, UsageError
from atom.recipes.launcher import takes_devices
from atom.recipes.resolve import resolve_recipe
from atom.recipes.spawn import module_command

__all__ = [
    "CLIENT_LOG",
    "ArmProgress",
    "ProcessExecutor",
    "command_of",
    "longest_of",
    "secret_environment",
    "server_environment",
]

CLIENT_LOG: Final = "client.log"
_LEAD_NS: Final = 50_000_000
"""The moment both begin is this far ahead, so that neither hears of it too late."""
_TICK_S: Final = 0.25
_END_S: Final = 150.0
"""What a load may take to stop its server, write what it has and end: more than any recipe's grace."""
_KILLED_S: Final = 10.0
_LIMIT_TIMES: Final = 10
_LEAST_LIMIT_S: Final = 1800.0
_REQUEST_S: Final = 60.0
"""A request of a load that does not say how long it takes, at most."""
_LONGEST_START_S: Final = 5 * 3600.0
"""Builds included: until a load is ready, or says why it is not."""
_NOT_FOR_LOADS: Final = ("GITHUB_STEP_SUMMARY", START_GATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmProgress:
    """How far one arm's part of the matched run is."""

    matched: str
    arm: str
    side: int
    stage: str
    """`starting`, `ready` (it waits for the other one), `load`, `ending`, `ended`."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Of the load: `phase`, `done`, `total`, `failed`, `running`, `output_tokens`, `elapsed_s`."""


OnArmProgress = Callable[[ArmProgress], None]


def command_of(
    arm: Arm,
    load: Load,
    half: Half,
    *,
    directory: Path,
    seed: int = 0,
    recipe: str | None = None,
    pin_server: bool = True,
) -> list[str]:
    """What follows `atom`: the arm's load as anybody could type it, with its `secret_environment` on standard input.
    `recipe`: in place of the arm's own. `pin_server`: unless its recipe does that. UsageError for an arm that nothing
    can be started of."""
    words = ["bench", load.bench]
    server_words: list[str] = []
    if arm.kind is ArmKind.URL:
        assert arm.url is not None
        words += ["--base-url", arm.url]
    else:
        given = arm.recipe or load.recipe
        if given is None:
            raise UsageError(f"arm {arm.label}: neither it nor load {load.name} has a recipe to start its server with")
        words += ["--recipe", recipe or given]
        for name, value in {"src": arm.src, "python": arm.python, **arm.variables}.items():
            words += [] if value is None else ["--set", f"{name}={value}"]
        secret = secret_environment(arm, load)
        for name, value in server_environment(arm, load).items():
            words += [] if name in secret else ["--server-env", f"{name}={value}"]
        words += ["--server-env-file", "-"] if secret else []
        if half.devices is not None:
            words += ["--devices", half.devices]
        if half.server_cpus and pin_server:
            words += ["--server-cpus", format_cpus(half.server_cpus)]
        server_words = [*load.server_args, *arm.server_args]
    if half.client_cpus:
        words += ["--client-cpus", format_cpus(half.client_cpus)]
    for name, value in {"seed": seed, **load.options}.items():
        words += option_words(name, value)
    words += ["--output-dir", str(directory), "--quiet"]
    return [*words, "--", *server_words] if server_words else words


def server_environment(arm: Arm, load: Load) -> dict[str, str]:
    """What the arm's server finds in its environment beyond this process's: compile caches of its own, and what load
    and arm ask for."""
    return {**arm_environment(arm), **load.env, **arm.env}


def secret_environment(arm: Arm, load: Load) -> dict[str, str]:
    """What of it must not stand on a command line, which every user of the machine can read."""
    if arm.kind is ArmKind.URL:
        return {}
    env = server_environment(arm, load)
    return {name: env[name] for name, shown in redact_environment(env).items() if shown != env[name]}


def option_words(name: str, value: Any) -> list[str]:
    """A flag as words. A value that looks like one of its own stays with its flag."""
    flag = f"--{name}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list | tuple):
        return [word for one in value for word in option_words(name, one)]
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def longest_of(load: Load) -> float:
    """Seconds after which a run of it is given up: ten times what it says it takes, half an hour at least. Of one that
    does not say: half an hour, and what its requests and its duration may take beyond that."""
    if load.seconds is not None:
        return max(_LIMIT_TIMES * load.seconds, _LEAST_LIMIT_S)

    def number(*names: str) -> float:
        found = next((load.options[name] for name in names if load.options.get(name) is not None), 0)
        return float(found) if isinstance(found, int | float) else 0.0

    requests, rate = number("num-prompts", "limit"), number("request-rate")
    lanes = number("max-concurrency", "concurrency") or 1.0
    arrivals = requests / rate if 0 < rate < float("inf") else 0.0
    return _LEAST_LIMIT_S + 2 * number("duration", "benchmark-duration") + arrivals + _REQUEST_S * requests / lanes


class ProcessExecutor:
    """Carries out matched runs below the comparison's directory `out`. `seed`: of every load that names none.
    `cool_down_s`: between arms that take turns. `limit_s`: what a load may take once it has begun, lest a server that
    hangs holds everything up; default: `longest_of` the load."""

    def __init__(
        self,
        out: Path,
        arms: Sequence[Arm],
        loads: Sequence[Load],
        placement: Placement,
        *,
        seed: int = 0,
        cool_down_s: float = 0.0,
        limit_s: float | None = None,
        on_progress: OnArmProgress | None = None,
    ) -> None:
        self._out = out.absolute()
        self._arms = labels(arms)
        self._loads = {load.name: load for load in loads}
        self._placement = placement
        self._seed = seed
        self._cool_down_s = cool_down_s
        self._limit_s = limit_s
        self._on_progress = on_progress

    def execute(self, matched: MatchedRun, directories: tuple[Path, Path]) -> tuple[RunResult, RunResult]:
        """Both parts, to their ends. What fails is told in the results; only an interrupt raises, when both have
        ended."""
        parts = [self._part(matched, side, directory) for side, directory in enumerate(directories)]
        live = [part for part in parts if part.arm.kind is not ArmKind.RECORDED]
        try:
            if any(part.refusal is not None for part in live):
                for part in live:
                    part.skip()
            elif self._placement.concurrent:
                self._together(live)
            else:
                live.sort(key=lambda part: matched.runs[part.side].order)
                for part in live:
                    if any(one.failed_to_start for one in live):
                        part.skip()
                        continue
                    if part is not live[0]:
                        time.sleep(self._cool_down_s)
                    self._together([part])
        except BaseException as error:
            self._end(live, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            for part in live:
                part.close()
        base, head = (self._result(matched, part) for part in parts)
        return base, head

    # ---- one matched run -----------------------------------------------------------------------------------------

    def _part(self, matched: MatchedRun, side: int, directory: Path) -> _Part:
        run = matched.runs[side]
        arm, load, half = self._arms[run.arm], self._loads[matched.load], self._placement.halves[run.half]
        directory = directory.absolute()  # it holds `out`, which may be relative
        limit_s = longest_of(load) if self._limit_s is None else self._limit_s
        part = _Part(arm=arm, side=side, directory=directory, matched=matched.key, limit_s=limit_s)
        if arm.kind is not ArmKind.RECORDED:
            try:
                part.command = self._command(arm, load, half, directory)
                part.secrets = secret_environment(arm, load)
            except UsageError as error:
                part.refusal = str(error)
        return part

    def _command(self, arm: Arm, load: Load, half: Half, directory: Path) -> list[str]:
        recipe = None
        if arm.kind is not ArmKind.URL and (given := arm.recipe or load.recipe) is not None:
            if arm.image is not None:
                recipe = str(write_container_recipe(given, arm, load, half, out=self._out))
            if half.devices is not None and not takes_devices(resolve_recipe(recipe or given)):
                half = replace(half, devices=None)
        return command_of(
            arm, load, half, directory=directory, seed=self._seed, recipe=recipe, pin_server=arm.image is None
        )

    def _together(self, parts: Sequence[_Part]) -> None:
        """Start all, let them begin at once, wait for their ends. If one does not start, the others are ended."""
        for part in parts:
            part.start()
        self._wait(parts, lambda: all(part.ready for part in parts) or any(part.ended for part in parts))
        for part in parts:
            if part.ended and not part.ready and port_was_taken(part.directory, part.log):
                part.start_again()
        self._wait(parts, lambda: all(part.ready for part in parts) or any(part.ended for part in parts))
        if any(part.ended for part in parts):
            for part in parts:
                part.dismiss()
        else:
            at_ns = time.monotonic_ns() + _LEAD_NS
            for part in parts:
                part.go(at_ns)
        self._wait(parts, lambda: all(part.ended for part in parts))

    def _wait(self, parts: Sequence[_Part], condition: Callable[[], bool]) -> None:
        """Take what the loads say until `condition` holds."""
        with selectors.DefaultSelector() as selector:
            for part in parts:
                if part.events_fd >= 0:
                    selector.register(part.events_fd, selectors.EVENT_READ, part)
            while True:
                for part in parts:
                    part.look()
                    self._tell(part)
                    part.keep_to_limits()
                if condition():
                    return
                for key, _ in selector.select(_TICK_S):
                    if not key.data.read():
                        selector.unregister(key.fd)

    def _end(self, parts: Sequence[_Part], number: signal.Signals) -> None:
        """All of them, whatever it takes. An interrupt while they end goes to them too: they kill their servers then,
        and one after that kills the loads."""
        for patience, signalled in ((_END_S, number), (_KILLED_S, number), (_KILLED_S, signal.SIGKILL)):
            for part in parts:
                part.signal(signalled)
            deadline = time.monotonic() + patience
            try:
                while any(part.running for part in parts) and time.monotonic() < deadline:
                    time.sleep(0.02)
            except (KeyboardInterrupt, SystemExit):
                continue
            if not any(part.running for part in parts):
                return

    def _tell(self, part: _Part) -> None:
        if self._on_progress is not None and part.told != (news := part.progress()):
            part.told = news
            self._on_progress(news)

    def _result(self, matched: MatchedRun, part: _Part) -> RunResult:
        if part.arm.kind is ArmKind.RECORDED:
            number = matched.pair % max(len(part.arm.recorded), 1)  # a pair each: nothing was swapped
            now = time.monotonic_ns()
            return RunResult(
                matched=matched.key,
                arm=part.arm.label,
                side=part.side,
                directory=part.arm.recorded[number],
                status=int(ExitStatus.OK),
                started_ns=now,
                ended_ns=now,
            )
        return RunResult(
            matched=matched.key,
            arm=part.arm.label,
            side=part.side,
            directory=os.path.relpath(part.directory, self._out),
            status=part.status,
            started_ns=part.started_ns,
            ended_ns=part.ended_ns,
            problem=part.problem(),
            stage=part.stage,
        )


# ---- one arm's part ----------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, eq=False)
class _Part:
    """One arm's load: its process, the line to it, and what it has said."""

    arm: Arm
    side: int
    directory: Path
    matched: str
    command: list[str] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    """What it reads from its standard input."""
    refusal: str | None = None
    """Why there is no such command."""
    ready: bool = False
    loaded: bool = False
    gone: bool = False
    """The word to begin was given."""
    figures: dict[str, Any] = field(default_factory=dict)
    told: ArmProgress | None = None
    events_fd: int = -1
    started_ns: int = 0
    ended_ns: int = 0
    limit_s: float
    _gone_ns: int = 0
    _told_to_end_ns: int = 0
    _go_fd: int = -1
    _process: subprocess.Popen[bytes] | None = None
    _rest: bytes = b""
    _why_ended: str | None = None
    """Why this process ended it, or never started it."""
    _blameless: bool = False
    """It was well, and ended because of the other one."""

    @property
    def log(self) -> Path:
        return self.directory / CLIENT_LOG

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> bool:
        return self._process is not None and self.ended_ns > 0

    @property
    def seconds(self) -> float:
        """Since its load began; 0 before and after."""
        return 0.0 if self.ended_ns or not self.gone else (time.monotonic_ns() - self._gone_ns) / 1e9

    @property
    def failed_to_start(self) -> bool:
        return self.ended and not self.gone

    def start(self) -> None:
        self.started_ns, self.ended_ns = time.monotonic_ns(), 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            log = self.log.open("ab")
        except OSError as error:
            raise RunError(f"cannot write {self.directory}: {error.strerror}") from None
        go_read, self._go_fd = os.pipe()
        self.events_fd, events_write = os.pipe()
        os.set_blocking(self.events_fd, False)
        env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_LOADS}
        with log:
            try:
                self._process = subprocess.Popen(
                    [*module_command("atom.cli.main"), *self.command],
                    stdin=subprocess.PIPE if self.secrets else subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**env, START_GATE: f"{go_read},{events_write}"},
                    pass_fds=(go_read, events_write),
                    start_new_session=True,
                )
            finally:
                os.close(go_read)
                os.close(events_write)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError), self._process.stdin as stdin:  # it has just died: its status says so
                stdin.write(json.dumps(self.secrets).encode())

    def start_again(self) -> None:
        """Once more, in a directory that is empty again but for the log."""
        kept = self.log.read_bytes()
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(kept + b"--- once more, with another port ---\n")
        self._process, self._rest = None, b""
        began = self.started_ns
        self.start()
        self.started_ns = began

    def skip(self) -> None:
        """It is not started, because the other one was not ready, or could not be."""
        self.started_ns = self.ended_ns = time.monotonic_ns()
        self._blameless = self.refusal is None

    def dismiss(self) -> None:
        """The other one did not start: there is nothing to compare with."""
        if not self.ended:
            self._blameless = True
            self._end()

    def keep_to_limits(self) -> None:
        """End it when it takes too long, and kill it when that does not help: what it has started ends with it."""
        now = time.monotonic_ns()
        if self._told_to_end_ns:
            if now > self._told_to_end_ns + _END_S * 1e9:
                self.signal(signal.SIGKILL)
        elif self.seconds > self.limit_s:
            self._why_ended = f"it was ended after {self.limit_s:g} s, before its load was over"
            self._end()
        elif not self.ready and self.running and now > self.started_ns + _LONGEST_START_S * 1e9:
            self._why_ended = f"it was ended after {_LONGEST_START_S:g} s, before its server was ready"
            self._end()

    def _end(self) -> None:
        self._told_to_end_ns = time.monotonic_ns()
        self.signal(signal.SIGTERM)

    def go(self, at_ns: int) -> None:
        self.gone, self._gone_ns = True, at_ns
        with contextlib.suppress(OSError):  # it has just died: its exit status says so
            os.write(self._go_fd, json.dumps({"event": "go", "at_ns": at_ns}).encode() + b"\n")

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def look(self) -> None:
        """Notice its end, once all it said is read."""
        if self._process is not None and not self.ended_ns and self._process.poll() is not None:
            while self.read():
                pass
            self.ended_ns = time.monotonic_ns()

    def read(self) -> bool:
        """Take what it says. False: there is nothing now, or it will say no more."""
        try:
            data = os.read(self.events_fd, 65536)
        except BlockingIOError:
            return self.running
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            kind = event.pop("event")
            self.ready |= kind == "ready"
            self.loaded |= kind == "loaded"
            if kind == "progress":
                self.figures = event
        return bool(data)

    def close(self) -> None:
        for fd in (self._go_fd, self.events_fd):
            if fd >= 0:
                os.close(fd)
        self._go_fd = self.events_fd = -1

    def progress(self) -> ArmProgress:
        if self.ended_ns:
            stage = "ended"
        elif self.loaded:
            stage = "ending"
        else:
            stage = "load" if self.gone else "ready" if self.ready else "starting"
        return ArmProgress(matched=self.matched, arm=self.arm.label, side=self.side, stage=stage, figures=self.figures)

    # ---- what became of it ---------------------------------------------------------------------------------------

    @property
    def status(self) -> int:
        if self.refusal is not None:
            return int(ExitStatus.USAGE)
        if self._blameless or self._process is None:
            return int(ExitStatus.INTERRUPTED)
        return self._process.returncode

    @property
    def stage(self) -> str:
        if self.refusal is not None:
            return "prepare"
        if not self.gone:
            return "prepare" if "command prepare[" in (self.problem() or "") else "start"
        return "done" if self.loaded and self.status in (0, 1, 4) else "load"

    def problem(self) -> str | None:
        """In one line; None where there is something to compare."""
        if self.refusal is not None:
            return self.refusal.partition("\n")[0]
        if self._blameless:
            return "not run: the other arm did not start"
        if self._why_ended is not None:
            return self._why_ended
        if self.gone and self.status in (ExitStatus.OK, ExitStatus.INVALID):
            return None
        return complaint(self.directory, self.log, self.status)
