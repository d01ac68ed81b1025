"""The asynchronous agreement, message by message: votes, timeouts, epochs, order, bounds, faults, close."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atom.engine.transfer.agreement import Limits, Progress
from atom.engine.transfer.errors import (
    AgreementClosedError,
    AgreementError,
    AgreementFullError,
    AgreementStalledError,
    ProtocolError,
    VoteError,
)
from atom.engine.transfer.in_process import InProcessNetwork, ManualClock
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.outcome import Commit, Outcome, Round
from atom.engine.transfer.topology import Topology
from atom.engine.transfer.wire import Kind, Packet, Stream, pack

C, F, X = Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED


class Ranks:
    """Several ends of one agreement, and what each applied."""

    def __init__(
        self,
        size: int,
        *,
        limits: Limits | None = None,
        topology: Topology | None = None,
        cancel_in_flight: bool = True,
    ) -> None:
        self.clock, self.network = ManualClock(), InProcessNetwork(size)
        self.ends = [
            OrderedAgreement(transport, self.clock, topology=topology, limits=limits, cancel_in_flight=cancel_in_flight)
            for transport in self.network.transports
        ]
        self.applied: list[list[Commit]] = [[] for _ in self.ends]
        self.overdue: list[list[Round]] = [[] for _ in self.ends]

    def poll(self, rank: int) -> Progress:
        progress = self.ends[rank].poll()
        self.applied[rank] += progress.commits
        self.overdue[rank] += progress.timed_out
        return progress

    def settle(self, rounds: int = 6) -> None:
        for _ in range(rounds):
            self.network.let_all_through()
            for rank in range(len(self.ends)):
                self.poll(rank)

    def close(self) -> None:
        for end in self.ends:
            end.begin_close()
        self.settle()
        assert all(end.closed for end in self.ends)


def test_a_commit_reaches_every_rank_once_and_only_after_the_last_vote() -> None:
    ranks, one = Ranks(4), Round(5, 0)
    for rank in (2, 0, 3):
        ranks.ends[rank].publish(one, C)
        ranks.settle()
        assert ranks.applied == [[]] * 4
    ranks.ends[1].publish(one, C)
    ranks.settle()
    assert ranks.applied == [[Commit(0, one, C)]] * 4
    assert len({end.digest() for end in ranks.ends}) == 1
    ranks.close()
    assert [end.counters.abandoned for end in ranks.ends] == [0] * 4
    assert [end.pending_sends for end in ranks.ends] == [0] * 4


@pytest.mark.parametrize(("votes", "outcome"), [((C, F, C, C), F), ((F, X, C, F), X), ((C, C, C, X), X)])
def test_the_dominant_outcome_is_committed(votes: tuple[Outcome, ...], outcome: Outcome) -> None:
    ranks = Ranks(4)
    for end, vote in zip(ranks.ends, votes, strict=True):
        end.publish(Round(1, 0), vote)
    ranks.settle()
    assert ranks.applied == [[Commit(0, Round(1, 0), outcome)]] * 4


def test_the_same_vote_again_sends_nothing_and_a_changed_one_is_refused() -> None:
    ranks = Ranks(2)
    ranks.ends[0].publish(Round(1, 0), C)
    ranks.ends[0].publish(Round(1, 0), C)
    assert ranks.ends[0].counters.sent == 1
    with pytest.raises(VoteError, match="voted COMPLETED before, and now FAILED"):
        ranks.ends[0].publish(Round(1, 0), F)
    assert ranks.ends[0].counters.sent == 1
    ranks.ends[1].publish(Round(1, 0), C)
    ranks.settle()
    assert ranks.applied[0] == [Commit(0, Round(1, 0), C)]
    ranks.ends[0].publish(Round(1, 0), C)  # also after the commit
    with pytest.raises(VoteError, match="needs an epoch after 0"):
        ranks.ends[0].publish(Round(1, 0), F)


def test_a_reused_id_is_not_decided_by_a_vote_of_its_past() -> None:
    ranks = Ranks(2)
    for end in ranks.ends:
        end.publish(Round(7, 0), C)
    ranks.network.let_all_through()
    ranks.poll(1)  # committed at the coordinator; rank 0 has not heard of it
    ranks.ends[1].publish(Round(7, 1), C)
    ranks.poll(1)
    assert ranks.applied[1] == [Commit(0, Round(7, 0), C)]
    ranks.settle()
    assert ranks.applied[0] == [Commit(0, Round(7, 0), C)]
    ranks.ends[0].publish(Round(7, 1), F)
    ranks.settle()
    assert ranks.applied[0] == ranks.applied[1] == [Commit(0, Round(7, 0), C), Commit(1, Round(7, 1), F)]


def test_all_apply_in_one_order_however_they_poll() -> None:
    ranks = Ranks(3)
    for rank, request in ((0, 5), (1, 5), (0, 3), (1, 3), (2, 5)):
        ranks.ends[rank].publish(Round(request, 0), C)
    ranks.settle(1)
    ranks.poll(0)  # rank 0 sees the commits one by one, rank 1 both at once
    ranks.network.let_all_through()
    ranks.poll(0)
    ranks.ends[2].publish(Round(3, 0), C)
    ranks.settle()
    order = [commit.round.request for commit in ranks.applied[0]]
    assert order == [5, 3]
    assert ranks.applied == [ranks.applied[0]] * 3


def test_a_timeout_reaches_all_once_and_travels_before_the_vote() -> None:
    ranks, one = Ranks(3), Round(9, 0)
    assert ranks.ends[0].publish_timeout(one)
    assert ranks.ends[0].publish_timeout(one)
    ranks.ends[0].publish(one, C)
    ranks.settle()
    assert ranks.overdue == [[one]] * 3
    assert ranks.applied == [[]] * 3
    for end in ranks.ends[1:]:
        end.publish(one, C)
    ranks.settle()
    assert ranks.applied == [[Commit(0, one, F)]] * 3
    assert ranks.overdue == [[one]] * 3


def test_a_timeout_after_the_own_vote_is_refused() -> None:
    ranks = Ranks(2)
    ranks.ends[0].publish(Round(1, 0), C)
    with pytest.raises(VoteError, match="must come before the own vote"):
        ranks.ends[0].publish_timeout(Round(1, 0))


def test_without_cancellation_in_flight_timeouts_are_counted_and_not_published() -> None:
    ranks = Ranks(2, cancel_in_flight=False)
    assert not ranks.ends[0].publish_timeout(Round(1, 0))
    assert ranks.ends[0].counters.suppressed_timeouts == 1
    for end in ranks.ends:
        end.publish(Round(1, 0), C)
    ranks.settle()
    assert ranks.overdue == [[], []]
    assert ranks.applied == [[Commit(0, Round(1, 0), C)]] * 2


def test_open_rounds_are_bounded() -> None:
    ranks = Ranks(2, limits=Limits(max_open_rounds=2))
    ranks.ends[0].publish(Round(1, 0), C)
    ranks.ends[0].publish(Round(2, 0), C)
    with pytest.raises(AgreementFullError, match="2 rounds are open"):
        ranks.ends[0].publish(Round(3, 0), C)
    ranks.ends[1].publish(Round(1, 0), C)
    ranks.settle()
    ranks.ends[0].publish(Round(3, 0), C)


def test_sends_beyond_the_bound_wait_in_order() -> None:
    ranks = Ranks(2, limits=Limits(max_pending_sends=1))
    for request in range(5):
        ranks.ends[0].publish(Round(request, 0), C)
    assert ranks.network.count(0) == 1
    assert ranks.ends[0].pending_sends == 5
    for request in reversed(range(5)):
        ranks.ends[1].publish(Round(request, 0), C)
    ranks.settle(20)
    assert [commit.round.request for commit in ranks.applied[0]] == list(range(5))
    assert ranks.applied[0] == ranks.applied[1]


def test_a_poll_takes_so_many_messages_and_no_rank_shuts_out_another() -> None:
    ranks = Ranks(3, limits=Limits(max_messages_per_poll=4))
    for request in range(50):
        ranks.ends[0].publish(Round(request, 0), C)
        ranks.ends[2].publish(Round(request, 0), C)
    ranks.ends[1].publish(Round(0, 0), C)
    ranks.network.let_all_through()
    ranks.poll(2)
    assert ranks.ends[2].counters.received == 4
    assert ranks.applied[2] == [Commit(0, Round(0, 0), C)]


def test_the_watchdog_names_request_epoch_and_missing_voters_and_all_fail_alike() -> None:
    ranks = Ranks(4, limits=Limits(idle_deadline_s=10))
    for rank in (0, 2):
        ranks.ends[rank].publish(Round(8, 3), C)
    ranks.settle()
    ranks.clock.advance(11.5)
    texts = set()
    for _ in range(3):
        ranks.network.let_all_through()
        for rank in (3, 0, 1, 2):
            try:
                ranks.poll(rank)
            except AgreementStalledError as error:
                texts.add(str(error))
    assert texts == {"request 8 epoch 3 is open for 11.5 s: no vote from rank 1, 3"}
    for end in ranks.ends:
        with pytest.raises(AgreementStalledError):
            end.publish(Round(9, 0), C)
    assert ranks.applied == [[]] * 4


def test_a_coordinator_that_is_gone_trips_the_others_too() -> None:
    ranks = Ranks(3, limits=Limits(idle_deadline_s=10))
    for end in ranks.ends[:2]:
        end.publish(Round(8, 0), C)
    ranks.clock.advance(13)
    for rank in (0, 1):
        with pytest.raises(AgreementStalledError, match=rf"request 8 epoch 0: rank {rank} voted 13\.0 s ago"):
            ranks.poll(rank)


@pytest.mark.parametrize(
    ("sender", "receiver", "stream", "packet", "message"),
    [
        (2, 0, Stream.UPDATES, Packet(Kind.COMMIT, 2, Round(1, 0), C, 0), "in which this rank has not voted"),
        (2, 0, Stream.UPDATES, Packet(Kind.COMMIT, 2, Round(1, 0), C, 4), "commit 4 of request 1 epoch 0 where 0"),
        (2, 0, Stream.UPDATES, Packet(Kind.CLOSE, 2), "closed before this rank did"),
        (2, 0, Stream.UPDATES, Packet(Kind.VOTE, 2, Round(1, 0), C), "VOTE as an update"),
        (1, 0, Stream.UPDATES, Packet(Kind.COMMIT, 1, Round(1, 0), C), "COMMIT on stream UPDATES from rank 1"),
        (0, 2, Stream.EVENTS, Packet(Kind.COMMIT, 0, Round(1, 0), C), "coordinates nothing"),
        (0, 2, Stream.EVENTS, Packet(Kind.VOTE, 1, Round(1, 0), C), "of rank 1 came from rank 0"),
        (0, 2, Stream.UPDATES, Packet(Kind.TIMEOUT, 0, Round(1, 0)), "on stream UPDATES from rank 0"),
    ],
)
def test_a_message_that_no_correct_peer_sends_fails_every_rank(
    sender: int, receiver: int, stream: Stream, packet: Packet, message: str
) -> None:
    ranks = Ranks(3)
    ranks.network.put((sender, receiver, stream), pack(packet))
    ranks.network.let_all_through()
    with pytest.raises(ProtocolError, match=message):
        ranks.poll(receiver)
    failed = set[int]()
    for _ in range(3):
        ranks.network.let_all_through()
        for rank in range(3):
            try:
                ranks.poll(rank)
            except AgreementError:
                failed.add(rank)
    assert failed == {0, 1, 2}


def test_changed_votes_on_the_wire_name_the_participant() -> None:
    ranks = Ranks(2)
    for outcome in (C, C, F):
        ranks.network.put((0, 1, Stream.EVENTS), pack(Packet(Kind.VOTE, 0, Round(1, 0), outcome)))
    ranks.network.let_all_through()
    with pytest.raises(VoteError, match="rank 0 voted COMPLETED for request 1 epoch 0 and now FAILED"):
        ranks.poll(1)


def test_commits_before_a_fault_are_handed_out_first() -> None:
    ranks = Ranks(2)
    for end in ranks.ends:
        end.publish(Round(1, 0), C)
    ranks.settle(1)
    ranks.network.put((1, 0, Stream.UPDATES), b"nonsense")
    ranks.network.let_all_through()
    assert ranks.ends[0].poll().commits == [Commit(0, Round(1, 0), C)]
    with pytest.raises(ProtocolError, match="8 bytes"):
        ranks.ends[0].poll()


def test_publishing_ends_with_the_close() -> None:
    ranks = Ranks(2)
    ranks.ends[0].begin_close()
    with pytest.raises(AgreementClosedError):
        ranks.ends[0].publish(Round(1, 0), C)
    with pytest.raises(AgreementClosedError):
        ranks.ends[0].publish_timeout(Round(1, 0))


def test_a_close_waits_for_all_and_counts_what_is_abandoned() -> None:
    ranks = Ranks(3)
    ranks.ends[0].publish(Round(1, 0), C)
    for end in ranks.ends:
        end.publish(Round(2, 0), C)
    ranks.ends[0].begin_close()
    ranks.ends[1].begin_close()
    ranks.settle()
    assert not any(end.closed for end in ranks.ends)
    ranks.ends[2].publish(Round(3, 0), C)  # still open, and will never be decided
    ranks.close()
    assert ranks.applied == [[Commit(0, Round(2, 0), C)]] * 3
    assert [end.counters.abandoned for end in ranks.ends] == [1, 0, 1]


def test_a_vote_after_a_close_is_a_fault() -> None:
    ranks = Ranks(2)
    ranks.network.put((0, 1, Stream.EVENTS), pack(Packet(Kind.CLOSE, 0)))
    ranks.network.put((0, 1, Stream.EVENTS), pack(Packet(Kind.VOTE, 0, Round(1, 0), C)))
    ranks.network.let_all_through()
    with pytest.raises(ProtocolError, match="after its close"):
        ranks.poll(1)


@pytest.mark.parametrize("topology", [Topology.staged(3, 2), Topology.staged(1, 4), Topology.staged(4, 1)])
def test_a_hierarchy_agrees_like_a_flat_one(topology: Topology) -> None:
    ranks = Ranks(topology.size, topology=topology)
    ranks.ends[0].publish_timeout(Round(2, 0))
    for rank, end in enumerate(ranks.ends):
        end.publish(Round(1, 0), F if rank == 1 else C)
        end.publish(Round(2, 0), C)
        end.publish(Round(3, 0), X if rank == 0 else C)
    ranks.settle()
    outcomes = {commit.round.request: commit.outcome for commit in ranks.applied[0]}
    assert outcomes == {1: F, 2: F, 3: X}
    assert ranks.applied == [ranks.applied[0]] * topology.size
    assert ranks.overdue == [[Round(2, 0)]] * topology.size
    ranks.close()


def test_the_rank_nearest_to_a_missing_shard_names_it() -> None:
    topology = Topology.staged(3, 4)
    ranks = Ranks(12, topology=topology, limits=Limits(idle_deadline_s=10))
    for rank, end in enumerate(ranks.ends):
        if rank != 5:
            end.publish(Round(8, 0), C)
    texts = set()
    for _ in range(40):
        ranks.network.let_all_through()
        for rank in range(12):
            try:
                ranks.poll(rank)
            except AgreementStalledError as error:
                texts.add((rank, str(error)))
        ranks.clock.advance(0.5)
    assert {rank for rank, _ in texts} == set(range(12))
    assert all("no vote from rank 5" in text for _, text in texts), texts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology((None, None)), "one root"),
        (lambda: Topology((1, 0)), "one root"),
        (lambda: Topology((None, 2, 1)), "one tree"),
        (lambda: Topology((None, 7)), "rank 7, which is not there"),
        (lambda: Topology.staged(0, 1), "stages and shards"),
    ],
)
def test_what_is_no_tree_is_refused(make: Callable[[], Topology], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="topology of 3 ranks over a transport of 2"):
        OrderedAgreement(InProcessNetwork(2).transports[0], ManualClock(), topology=Topology.flat(3))


def test_one_rank_agrees_with_itself() -> None:
    ranks = Ranks(1)
    ranks.ends[0].publish(Round(1, 0), F)
    ranks.poll(0)
    assert ranks.applied == [[Commit(0, Round(1, 0), F)]]
    ranks.close()
