"""A load's end of the line to whoever started it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from atom.bench.runner import Progress
from atom.cli.start_gate import START_GATE, StartGate, start_gate
from atom.diag.compare import arm_process
from atom.recipes.errors import UsageError
from tests.waiting import until


class Starter:
    """The other end. Its pipe stays open: the end of it would be this process's."""

    def __init__(self) -> None:
        self.gate_reads, self._writes = os.pipe()
        self._reads, self.gate_writes = os.pipe()
        os.set_blocking(self._reads, False)
        self.said: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        os.write(self._writes, text.encode())

    def hears(self, event: str) -> bool:
        try:
            data = os.read(self._reads, 1 << 20)
        except BlockingIOError:
            data = b""
        self.said += map(json.loads, data.splitlines())
        return any(one["event"] == event for one in self.said)


@pytest.fixture
def starter() -> Starter:
    return Starter()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    start_gate.cache_clear()
    yield
    start_gate.cache_clear()


def test_both_ends_mean_the_same_variable() -> None:
    assert arm_process.START_GATE == START_GATE


def test_without_the_variable_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(START_GATE, raising=False)
    assert start_gate() is None


@pytest.mark.parametrize("text", ["x", "1", "1,2,3", "9999,9998"])
def test_what_names_no_descriptors_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(START_GATE, text)
    with pytest.raises(UsageError, match="ATOM_START_GATE must be two open descriptors"):
        start_gate()


def test_the_server_hears_nothing_of_it(monkeypatch: pytest.MonkeyPatch, starter: Starter) -> None:
    for fd in (starter.gate_reads, starter.gate_writes):
        os.set_inheritable(fd, True)
    monkeypatch.setenv(START_GATE, f"{starter.gate_reads},{starter.gate_writes}")
    gate = start_gate()
    assert gate is not None
    assert start_gate() is gate
    assert START_GATE not in os.environ
    assert not os.get_inheritable(starter.gate_reads)
    assert not os.get_inheritable(starter.gate_writes)


def test_a_load_begins_when_it_is_told_and_not_before_the_moment(starter: Starter) -> None:
    gate = StartGate(starter.gate_reads, starter.gate_writes)
    through: list[int] = []

    def load() -> None:
        gate.pass_through(threading.Event())
        through.append(time.monotonic_ns())

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: starter.hears("ready"))
    assert through == []
    at_ns = time.monotonic_ns() + 30_000_000
    starter.say(json.dumps({"event": "go", "at_ns": at_ns})[:20])  # a message may come in pieces
    starter.say(json.dumps({"event": "go", "at_ns": at_ns})[20:] + "\n")
    thread.join()
    assert through[0] >= at_ns
    gate.pass_through(threading.Event())  # open from now on
    assert [one["event"] for one in starter.said].count("ready") == 1


def test_a_server_that_died_is_not_waited_for(starter: Starter) -> None:
    gate = StartGate(starter.gate_reads, starter.gate_writes)
    died = threading.Event()
    died.set()
    gate.pass_through(died)


def test_progress_is_reported_and_passed_on(starter: Starter) -> None:
    gate = StartGate(starter.gate_reads, starter.gate_writes)
    passed: list[Progress] = []
    progress = Progress(phase="measured", total=10, completed=3, failed=1, output_tokens=64)
    gate.reporting(passed.append)(progress)
    until(lambda: starter.hears("progress"))
    assert passed == [progress]
    (figures, *_) = [one for one in starter.said if one["event"] == "progress"]
    assert (figures["phase"], figures["done"], figures["total"], figures["failed"]) == ("measured", 4, 10, 1)
    assert figures["output_tokens"] == 64
    gate.loaded()
    until(lambda: starter.hears("loaded"))


def test_a_starter_that_does_not_read_holds_nothing(starter: Starter) -> None:
    gate = StartGate(starter.gate_reads, starter.gate_writes)
    for _ in range(20_000):
        gate.loaded()
