"""The shared-memory path in one process: any order of pushes, cancellations and reuse, with every byte looked at."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.engine.errors import ConfigError
from atom.engine.transfer.data_messages import Ended, Hello, encode, read_description
from atom.engine.transfer.data_path import Handle, Limits, PathClosedError, Progress, TransferFullError
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.pool_layout import Piece, PoolLayout
from atom.engine.transfer.shared_memory_path import SharedMemoryPath
from atom.engine.transfer.socket_link import address_of

BLOCKS = 6
PART = 96
LAYOUT = PoolLayout(BLOCKS, "test", [Piece(0, "k", 0, 0, 1, PART), Piece(0, "v", 1024, 0, 1, PART)])
FREE = 255
"""What the receiver writes into blocks that belong to nobody."""


def block(path: SharedMemoryPath, index: int) -> np.ndarray:
    """Both pieces of a block, `[2, PART]`."""
    whole = np.frombuffer(path.memory, np.uint8)
    return np.stack([whole[piece.offset + index * PART :][:PART] for piece in LAYOUT.pieces])


def fill(path: SharedMemoryPath, index: int, value: int) -> None:
    whole = np.frombuffer(path.memory, np.uint8)
    for piece in LAYOUT.pieces:
        whole[piece.offset + index * PART :][:PART] = value


def wait(condition: Callable[[], bool], *paths: SharedMemoryPath) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        for path in paths:
            path.poll()
        time.sleep(1e-4)


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemoryPath, SharedMemoryPath]]:
    sender, receiver = SharedMemoryPath(LAYOUT), SharedMemoryPath(LAYOUT)
    yield sender, receiver
    assert sender.close()
    assert receiver.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "push", "push old", "cancel push", "cancel reception", "poll sender", "poll receiver", "let copy"]
        ),
        st.integers(0, 100),
        st.sampled_from([(0,), (3, 1), (2, 5, 4)]),
    ),
    min_size=5,
    max_size=40,
)


class Traffic:
    """One sender, one receiver, ids and blocks used again and again, old rounds pushed again."""

    def __init__(self) -> None:
        limits = Limits(chunk_bytes=16, max_segments=1)
        self.sender, self.receiver = SharedMemoryPath(LAYOUT, limits), SharedMemoryPath(LAYOUT, limits)
        self.epochs: dict[int, int] = {}
        self.open: dict[Round, tuple[Handle, tuple[int, ...]]] = {}
        self.pushes: dict[Round, Handle] = {}
        self.past: list[tuple[Round, tuple[int, ...]]] = []
        for index in range(BLOCKS):
            fill(self.sender, index, 10 + index)
            fill(self.receiver, index, FREE)
        self.begin(0, (0,))
        self.push(*self.past[-1])
        self.let_copy()  # from here on the two know each other

    def do(self, operation: str, number: int, blocks: tuple[int, ...]) -> None:
        if operation == "begin":
            self.begin(number % 2, blocks)
        elif operation == "push" and self.past:
            self.push(*self.past[-1])
        elif operation == "push old" and self.past:
            self.push(*self.past[number % len(self.past)])
        elif operation == "cancel push" and self.pushes:
            list(self.pushes.values())[number % len(self.pushes)].cancel()
        elif operation == "cancel reception" and self.open:
            list(self.open.values())[number % len(self.open)][0].cancel()
        elif operation == "poll sender":
            self.poll_sender()
        elif operation == "poll receiver":
            self.poll_receiver()
        elif operation == "let copy":
            self.let_copy()

    def begin(self, request: int, blocks: tuple[int, ...]) -> None:
        if any(index in used for index in blocks for _, used in self.open.values()):
            return
        self.epochs[request] = self.epochs.get(request, 0) + 1
        round_ = Round(request, self.epochs[request])
        self.open[round_] = self.receiver.expect(round_, blocks, [self.sender.name], deadline_s=60), blocks
        self.past.append((round_, blocks))

    def push(self, round_: Round, blocks: tuple[int, ...]) -> None:
        if round_ not in self.pushes:
            self.pushes[round_] = self.sender.push(round_, blocks, self.receiver.description, blocks, deadline_s=60)

    def poll_sender(self) -> None:
        self.sender.poll()
        self.pushes = {round_: push for round_, push in self.pushes.items() if not push.quiescent}

    def poll_receiver(self) -> None:
        self.receiver.poll()
        for round_, (reception, blocks) in list(self.open.items()):
            if reception.quiescent:
                if reception.state.progress is Progress.DONE:
                    assert all((block(self.receiver, index) == 10 + index).all() for index in blocks)
                del self.open[round_]
                for index in blocks:
                    fill(self.receiver, index, FREE)

    def let_copy(self) -> None:
        """Until nothing that was pushed moves any more."""
        until = time.monotonic() + 20
        while self.pushes:
            assert time.monotonic() < until, "a push that nothing holds up does not end"
            self.poll_sender()
            self.poll_receiver()

    def free_blocks_are_left_alone(self) -> None:
        used = {index for _, blocks in self.open.values() for index in blocks}
        for index in range(BLOCKS):
            assert index in used or (block(self.receiver, index) == FREE).all(), f"block {index} was written"

    def finish(self) -> None:
        for handle in [*(reception for reception, _ in self.open.values()), *self.pushes.values()]:
            handle.cancel()
        until = time.monotonic() + 20
        while self.open or self.pushes:
            assert time.monotonic() < until, "something never became quiescent"
            self.poll_sender()
            self.poll_receiver()
        self.free_blocks_are_left_alone()
        assert not self.sender._pushes
        assert not self.receiver._blocks_in_use
        assert not self.receiver._marks.any()


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_no_order_of_pushes_cancellations_and_reuse_writes_where_nothing_is_expected(
    operations: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    traffic = Traffic()
    try:
        for operation in operations:
            traffic.do(*operation)
            traffic.free_blocks_are_left_alone()
        traffic.finish()
    finally:
        closed = traffic.sender.close(), traffic.receiver.close()
    assert closed == (True, True)


def test_a_cancelled_push_stops_between_chunks_and_its_blocks_can_be_used_again() -> None:
    large = PoolLayout(4, "test", [Piece(0, "k", 0, 0, 1, 1 << 20)])
    sender, receiver = SharedMemoryPath(large, Limits(chunk_bytes=4)), SharedMemoryPath(large)
    np.frombuffer(sender.memory, np.uint8)[:] = 7
    target = np.frombuffer(receiver.memory, np.uint8)
    old = receiver.expect(Round(1, 1), [0, 1], [sender.name], deadline_s=60)
    push = sender.push(Round(1, 1), [0, 1], receiver.description, [0, 1], deadline_s=60)
    wait(lambda: bool(target[0]), sender, receiver)
    assert push.cancel()
    wait(lambda: push.quiescent and old.quiescent, sender, receiver)
    assert push.state.outcome is old.state.outcome is Outcome.CANCELLED
    assert not target[(2 << 20) - 1], "it was not stopped on the way"
    target[:] = 0
    sender.limits = Limits()
    new = receiver.expect(Round(1, 2), [1, 2], [sender.name], deadline_s=60)
    again = sender.push(Round(1, 2), [2, 3], receiver.description, [1, 2], deadline_s=60)
    wait(lambda: again.quiescent and new.quiescent, sender, receiver)
    assert new.state.progress is Progress.DONE
    assert not target[: 1 << 20].any()
    assert (target[1 << 20 : 3 << 20] == 7).all()
    assert sender.close()
    assert receiver.close()


def test_what_the_receiver_revokes_stops_at_the_sender() -> None:
    large = PoolLayout(4, "test", [Piece(0, "k", 0, 0, 1, 1 << 20)])
    sender, receiver = SharedMemoryPath(large, Limits(chunk_bytes=4)), SharedMemoryPath(large)
    np.frombuffer(sender.memory, np.uint8)[:] = 7
    target = np.frombuffer(receiver.memory, np.uint8)
    reception = receiver.expect(Round(1, 1), [0], [sender.name], deadline_s=60)
    push = sender.push(Round(1, 1), [0], receiver.description, [0], deadline_s=60)
    wait(lambda: bool(target[0]), sender, receiver)
    assert reception.cancel()
    for _ in range(5):
        receiver.poll()
        assert not reception.quiescent, "the sender has not said yet that it stopped"
    with pytest.raises(ValueError, match="still belongs to request 1 epoch 1"):
        receiver.expect(Round(2, 1), [0], [sender.name], deadline_s=60)
    wait(lambda: reception.quiescent and push.quiescent, sender, receiver)
    assert reception.state.outcome is Outcome.CANCELLED
    assert push.state.progress is Progress.FAILED
    assert sender.close()
    assert receiver.close()


def test_bounds_and_wrong_blocks(pair: tuple[SharedMemoryPath, SharedMemoryPath]) -> None:
    sender, receiver = pair
    sender.limits = Limits(max_transfers=1)
    with pytest.raises(ValueError, match="0 to 5"):
        sender.push(Round(1, 1), [6], receiver.description, [0], deadline_s=1)
    with pytest.raises(ValueError, match="0 to 5"):
        sender.push(Round(1, 1), [0], receiver.description, [-1], deadline_s=1)
    with pytest.raises(ValueError, match="twice"):
        sender.push(Round(1, 1), [0, 1], receiver.description, [2, 2], deadline_s=1)
    with pytest.raises(ValueError, match="2 source blocks for 1"):
        sender.push(Round(1, 1), [0, 1], receiver.description, [2], deadline_s=1)
    sender.push(Round(1, 1), [0], receiver.description, [0], deadline_s=60)
    with pytest.raises(TransferFullError):
        sender.push(Round(2, 1), [0], receiver.description, [0], deadline_s=1)
    receiver.expect(Round(1, 1), [0], [sender.name], deadline_s=60)
    with pytest.raises(ValueError, match="expected already"):
        receiver.expect(Round(1, 1), [1], [sender.name], deadline_s=60)


def test_a_receiver_that_does_not_answer_is_a_failed_push() -> None:
    sender, receiver = SharedMemoryPath(LAYOUT, Limits(handshake_s=0.05)), SharedMemoryPath(LAYOUT)
    push = sender.push(Round(1, 1), [0], receiver.description, [0], deadline_s=60)
    wait(lambda: push.quiescent, sender)  # the receiver is never polled
    assert push.state.outcome is Outcome.FAILED
    assert "did not answer" in push.state.reason
    late = sender.push(Round(1, 2), [0], receiver.description, [0], deadline_s=0.05)
    wait(lambda: late.quiescent, sender)
    assert late.state.outcome is Outcome.FAILED
    assert receiver.close()
    gone = sender.push(Round(1, 3), [0], receiver.description, [0], deadline_s=60)
    wait(lambda: gone.quiescent, sender)
    assert "does not listen" in gone.state.reason
    assert sender.close()
    with pytest.raises(PathClosedError):
        sender.push(Round(1, 4), [0], receiver.description, [0], deadline_s=60)


def test_a_sender_that_never_comes_is_a_failed_reception(pair: tuple[SharedMemoryPath, SharedMemoryPath]) -> None:
    sender, receiver = pair
    reception = receiver.expect(Round(1, 1), [0], [sender.name], deadline_s=0.02)
    wait(lambda: reception.quiescent, receiver)
    assert sender.name[:8] in reception.state.reason
    push = sender.push(Round(1, 1), [0], receiver.description, [0], deadline_s=60)
    wait(lambda: push.quiescent, sender, receiver)
    assert "does not expect" in push.state.reason
    assert not block(receiver, 0).any()
    wait(lambda: receiver.counters.stale_notices == 1, receiver)


def test_another_hosts_pool_is_refused(pair: tuple[SharedMemoryPath, SharedMemoryPath]) -> None:
    sender, receiver = pair
    description = read_description(receiver.description)
    for change, said in (({"host": "another"}, r"\[nixl\]"), ({"kind": "nixl"}, "same way of transfer")):
        other = encode(msgspec.structs.replace(description, **change))
        with pytest.raises(ConfigError, match=said):
            sender.push(Round(1, 1), [0], other, [0], deadline_s=1)


def test_nothing_grows_with_the_number_of_transfers(pair: tuple[SharedMemoryPath, SharedMemoryPath]) -> None:
    sender, receiver = pair
    for epoch in range(100):
        reception = receiver.expect(Round(1, epoch), [epoch % BLOCKS], [sender.name], deadline_s=60)
        push = sender.push(Round(1, epoch), [0], receiver.description, [epoch % BLOCKS], deadline_s=60)
        wait(lambda push=push, reception=reception: push.quiescent and reception.quiescent, sender, receiver)
    (link,) = sender._outgoing.values()
    kept = [sender._pushes, receiver._receptions, receiver._blocks_in_use, link._unsent, sender._ending]
    assert [len(things) for things in kept] == [0] * len(kept)
    assert len(link._jobs) <= 1
    assert not receiver._marks.any()


def test_the_memory_of_a_receiver_that_is_gone_is_let_go(pair: tuple[SharedMemoryPath, SharedMemoryPath]) -> None:
    sender, _ = pair
    receiver = SharedMemoryPath(LAYOUT)
    receiver.expect(Round(1, 1), [0], [sender.name], deadline_s=60)
    sender.push(Round(1, 1), [0], receiver.description, [0], deadline_s=60)
    wait(lambda: not sender._pushes and not receiver._receptions, sender, receiver)
    pool = weakref.ref(sender._outgoing[receiver.name]._pool)
    assert receiver.close()
    gc.disable()  # as an engine may have it
    try:
        wait(lambda: not sender._outgoing and not sender._ending, sender)
        wait(lambda: pool() is None)
    finally:
        gc.enable()


def test_strangers_are_not_let_in(pair: tuple[SharedMemoryPath, SharedMemoryPath]) -> None:
    sender, receiver = pair
    said = [b"", b"\xff" * 100, encode(Ended(1, 1, Outcome.COMPLETED)), encode(Hello(99, "0" * 32))]
    for data in said:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(5)
            stranger.connect(address_of(receiver.name))
            stranger.send(data)
            until = time.monotonic() + 5
            while time.monotonic() < until and receiver.counters.bad_messages + 1 < 10:
                receiver.poll()
                try:
                    stranger.setblocking(False)
                    assert stranger.recv(100) == b"", "a stranger got an answer"
                    break
                except BlockingIOError:
                    time.sleep(1e-3)
            else:
                raise AssertionError("the connection was not ended")
    reception = receiver.expect(Round(1, 1), [0], [sender.name], deadline_s=60)
    push = sender.push(Round(1, 1), [0], receiver.description, [0], deadline_s=60)
    wait(lambda: push.quiescent and reception.quiescent, sender, receiver)
    assert reception.state.progress is Progress.DONE


def test_a_pool_has_no_name_and_its_owner_alone_may_open_it(
    pair: tuple[SharedMemoryPath, SharedMemoryPath],
) -> None:
    _, receiver = pair
    status = os.fstat(receiver._pool.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_nlink == 0
    with pytest.raises(OSError):
        os.ftruncate(receiver._pool.fd, 0)
    assert fcntl.fcntl(receiver._pool.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
