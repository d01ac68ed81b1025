"""KV blocks between two real processes: every byte looked at, processes killed and stopped, blocks used again."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atom.engine.transfer.nixl_path import find_nixl

PROGRAM = Path(__file__).with_name("data_path_peer.py")
WHOLE = (0, 4, 0, 4)
"""First layer, layers, first head, heads."""
SLOW = 1
"""Bytes of a chunk with which `MANY` take a million of them: whatever happens then happens on the way."""
MANY = list(range(8))
FAST = 4 << 20


class Rank:
    """A process of `data_path_peer.py`."""

    def __init__(self, kind: str, chunk_bytes: int, part: tuple[int, ...]) -> None:
        self.answers, their_end = os.pipe()
        arguments = [kind, str(chunk_bytes), json.dumps(part), str(their_end)]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[their_end],
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        os.close(their_end)
        self._unread = b""
        hello = self.read()
        self.name, self.description, self.kind = hello["name"], hello["description"], hello["kind"]

    def read(self, timeout_s: float = 60) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            until = time.monotonic() + timeout_s
            while b"\n" not in self._unread:
                assert selector.select(until - time.monotonic()), "the rank says nothing"
                data = os.read(self.answers, 1 << 16)
                assert data, f"the rank ended with status {self.process.wait(10)}"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def __call__(self, method: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return self.read()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)

    def ends(self, key: str) -> dict[str, Any]:
        """The state, once it is quiescent."""
        wait(lambda: bool(self("state", key)["quiescent"]))
        state: dict[str, Any] = self("state", key)
        return state

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(30)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        os.close(self.answers)


def wait(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


@pytest.fixture(params=["shared-memory", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    found = find_nixl()
    if request.param == "nixl" and isinstance(found, str):
        pytest.skip(f"{found}; pip install 'atom-serving[nixl]'")
    return str(request.param)


@pytest.fixture
def start(kind: str) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start(chunk_bytes: int = FAST, part: tuple[int, ...] = WHOLE) -> Rank:
        ranks.append(Rank(kind, chunk_bytes, part))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.end()
    names = Path("/proc/net/unix").read_text()
    assert not [rank.name for rank in ranks if rank.name in names], "an address is left"


def test_every_byte_arrives(start: Callable[..., Rank], kind: str) -> None:
    sender, receiver = start(), start()
    sender("fill", 5)
    for epoch in range(1, 6):
        receiver("zero")
        receiver("expect", "in", [1, epoch], [3, 9, 4], [sender.name], 60)
        sender("push", "out", [1, epoch], [0, 1, 15], receiver.description, [3, 9, 4], 60)
        assert sender.ends("out")["outcome"] == receiver.ends("in")["outcome"] == "COMPLETED"
        assert all(receiver("holds", to, 5, source) for source, to in ((0, 3), (1, 9), (15, 4)))
        assert all(receiver("is_zero", block) for block in range(16) if block not in (3, 9, 4))
    assert sender("counters")["completed"] == 5
    assert kind == "nixl" or receiver.name in Path("/proc/net/unix").read_text()
    assert sender("close")
    assert receiver("close")


def test_four_context_ranks_fill_one_generation_rank(start: Callable[..., Rank]) -> None:
    """Two stages of two layers by two shards of two heads, into one rank that has all."""
    senders = [start(part=(layer, 2, head, 2)) for layer in (0, 2) for head in (0, 2)]
    receiver = start()
    receiver("expect", "in", [1, 1], [2, 7], [sender.name for sender in senders], 60)
    for sender in senders:
        assert receiver("state", "in")["progress"] == "in flight"
        sender("fill", 1)
        sender("push", "out", [1, 1], [4, 5], receiver.description, [2, 7], 60)
        assert sender.ends("out")["outcome"] == "COMPLETED"
    assert receiver.ends("in")["outcome"] == "COMPLETED"
    assert receiver("holds", 2, 1, 4)
    assert receiver("holds", 7, 1, 5)
    assert receiver("is_zero", 3)


def test_a_killed_sender_is_a_failed_reception(start: Callable[..., Rank]) -> None:
    sender, receiver = start(SLOW), start()
    sender("fill", 1)
    receiver("expect", "in", [1, 1], MANY, [sender.name], 60)
    sender("push", "out", [1, 1], MANY, receiver.description, MANY, 60)
    wait(lambda: bool(receiver("started", 0)))
    sender.kill()
    assert receiver.ends("in")["outcome"] == "FAILED"
    assert not all(receiver("holds", block, 1, block) for block in MANY), "it was not killed on the way"
    receiver("zero")
    successor = start()
    successor("fill", 2)
    receiver("expect", "next", [1, 2], [1, 0], [successor.name], 60)
    successor("push", "out", [1, 2], [0, 1], receiver.description, [1, 0], 60)
    assert receiver.ends("next")["outcome"] == "COMPLETED"
    assert receiver("holds", 1, 2, 0)
    assert receiver("counters")["lost_peers"] == 1
    assert receiver("close")


def test_a_killed_receiver_is_a_failed_push(start: Callable[..., Rank]) -> None:
    sender, receiver, other = start(SLOW), start(), start()
    sender("fill", 1)
    receiver("expect", "in", [1, 1], MANY, [sender.name], 60)
    sender("push", "out", [1, 1], MANY, receiver.description, MANY, 60)
    wait(lambda: bool(receiver("started", 0)))
    receiver.kill()
    assert sender.ends("out")["outcome"] == "FAILED"
    sender("push", "again", [1, 2], [0, 1], receiver.description, [0, 1], 20)
    assert sender.ends("again")["outcome"] == "FAILED"
    other("expect", "in", [2, 1], MANY, [sender.name], 60)
    sender("push", "elsewhere", [2, 1], MANY, other.description, MANY, 60)
    wait(lambda: bool(other("started", 0)))
    assert sender("cancel", "elsewhere")  # all of it would take long
    assert sender.ends("elsewhere")["outcome"] == other.ends("in")["outcome"] == "CANCELLED"
    assert sender("close")


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_blocks_of_a_cancelled_transfer_are_used_again_without_corruption(start: Callable[..., Rank], who: str) -> None:
    old, new, receiver = start(SLOW), start(), start()
    old("fill", 1)
    new("fill", 2)
    receiver("expect", "in", [1, 1], MANY, [old.name], 60)
    old("push", "out", [1, 1], MANY, receiver.description, MANY, 60)
    wait(lambda: bool(receiver("started", 0)))
    assert old("cancel", "out") if who == "sender" else receiver("cancel", "in")
    assert receiver.ends("in")["outcome"] == "CANCELLED"
    assert old.ends("out")["progress"] == "failed"
    receiver("zero")
    receiver("expect", "next", [1, 2], [1, 2], [new.name], 60)
    new("push", "out", [1, 2], [8, 9], receiver.description, [1, 2], 60)
    old("push", "late", [1, 1], MANY, receiver.description, MANY, 60)  # the old round, once more
    assert receiver.ends("next")["outcome"] == "COMPLETED"
    late = old.ends("late")
    assert (late["outcome"], "does not expect" in late["reason"]) == ("FAILED", True)
    assert receiver("holds", 1, 2, 8)
    assert receiver("holds", 2, 2, 9)
    assert receiver("is_zero", 0)
    wait(lambda: receiver("counters")["stale_notices"] >= 1)


def test_a_stopped_sender_is_a_failure_in_time_but_its_blocks_stay_until_it_says_so(
    start: Callable[..., Rank],
) -> None:
    sender, receiver = start(SLOW), start()
    sender("fill", 1)
    receiver("expect", "in", [1, 1], MANY, [sender.name], 5.0)
    sender("push", "out", [1, 1], MANY, receiver.description, MANY, 60)
    wait(lambda: bool(receiver("started", 0)))
    sender.signal(signal.SIGSTOP)
    wait(lambda: receiver("state", "in")["progress"] == "failed")
    state = receiver("state", "in")
    assert sender.name[:8] in state["reason"]
    assert not state["quiescent"], "it may go on and write"
    sender.signal(signal.SIGCONT)
    assert receiver.ends("in")["outcome"] == "FAILED"
    assert sender.ends("out")["progress"] == "failed"


def test_a_stopped_receiver_is_a_failure_in_time(start: Callable[..., Rank]) -> None:
    sender, receiver = start(), start()
    receiver.signal(signal.SIGSTOP)
    sender("push", "out", [1, 1], [0], receiver.description, [0], 1.0)
    state = sender.ends("out")
    assert (state["outcome"], "did not answer within 1 s" in state["reason"]) == ("FAILED", True)
    receiver.signal(signal.SIGCONT)
    assert receiver("is_zero", 0)


def test_an_idle_path_takes_no_processor(start: Callable[..., Rank]) -> None:
    """No thread of it may spin: the peer's own loop, which sleeps half a millisecond, is all that runs."""
    sender, receiver = start(), start()
    receiver("expect", "in", [1, 1], [0], [sender.name], 60)
    sender("push", "out", [1, 1], [0], receiver.description, [0], 60)
    assert sender.ends("out")["outcome"] == "COMPLETED"
    before, since = sender("cpu_s"), time.monotonic()
    time.sleep(1.0)
    assert sender("cpu_s") - before < 0.5 * (time.monotonic() - since)
