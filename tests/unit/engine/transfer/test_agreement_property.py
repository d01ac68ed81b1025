"""Every implementation gives the same outcome per (request, epoch), whatever the schedule: messages are delayed and
interleaved in every way that keeps each lane in order, and ranks vote and poll when they like."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.engine.errors import ConfigError
from atom.engine.transfer.agreement import Agreement, Limits, close
from atom.engine.transfer.blocking import BlockingAgreement
from atom.engine.transfer.divergence import divergence
from atom.engine.transfer.errors import AgreementFullError, AgreementStalledError
from atom.engine.transfer.in_process import InProcessCollective, InProcessNetwork, ManualClock
from atom.engine.transfer.local_only import LocalOnlyAgreement
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.outcome import Commit, Outcome, Round, dominant
from atom.engine.transfer.topology import Topology

Script = list[tuple[Round, Outcome, bool]]
"""One rank's votes in its order: round, outcome, whether it proposes a timeout before."""
Scripts = list[Script]


@st.composite
def scripts(draw: st.DrawFn, size: int | None = None) -> Scripts:
    ranks = size or draw(st.integers(1, 8))
    epochs = {request: draw(st.integers(1, 3)) for request in range(draw(st.integers(1, 5)))}
    every = [Round(request, epoch) for request, count in epochs.items() for epoch in range(count)]
    outcome = st.sampled_from([Outcome.COMPLETED] * 4 + [Outcome.FAILED, Outcome.CANCELLED])
    result = []
    for _ in range(ranks):
        order = sorted(draw(st.permutations(every)), key=lambda one: one.epoch)
        result.append([(one, draw(outcome), draw(st.integers(0, 5)) == 0) for one in order])
    return result


def expected(votes: Scripts) -> dict[Round, Outcome]:
    by_round: dict[Round, list[Outcome]] = {}
    overdue = set()
    for script in votes:
        for round_, outcome, timed_out in script:
            by_round.setdefault(round_, []).append(outcome)
            if timed_out:
                overdue.add(round_)
    return {round_: dominant(seen, timed_out=round_ in overdue) for round_, seen in by_round.items()}


class Rank:
    """Plays a script: an epoch of a reused id begins once the one before it is applied."""

    def __init__(self, agreement: Agreement, script: Script) -> None:
        self.agreement, self.script = agreement, list(script)
        self.applied: list[Commit] = []
        self.overdue: list[Round] = []

    def act(self) -> bool:
        """Cast the next vote that is possible; whether there was one."""
        over = {commit.round for commit in self.applied}
        for number, (round_, outcome, timed_out) in enumerate(self.script):
            if round_.epoch == 0 or Round(round_.request, round_.epoch - 1) in over:
                try:
                    if timed_out:
                        self.agreement.publish_timeout(round_)
                    self.agreement.publish(round_, outcome)
                except AgreementFullError:
                    return False
                del self.script[number]
                return True
        return False

    def poll(self) -> None:
        progress = self.agreement.poll()
        self.applied += progress.commits
        self.overdue += progress.timed_out


def check(ranks: list[Rank], votes: Scripts) -> None:
    outcomes = expected(votes)
    for rank in ranks:
        assert {commit.round: commit.outcome for commit in rank.applied} == outcomes
        assert [commit.sequence for commit in rank.applied] == list(range(len(outcomes)))
        assert rank.applied == ranks[0].applied
        assert rank.agreement.digest() == ranks[0].agreement.digest()
        assert rank.agreement.open_rounds == 0
        assert max(Counter(rank.overdue).values(), default=0) <= 1
        assert set(rank.overdue) == {one for script in votes for one, _, timed_out in script if timed_out}
        assert rank.agreement.counters.abandoned == 0
    assert divergence([rank.applied for rank in ranks]).unequal == []


LIMITS = Limits(max_open_rounds=5, max_pending_sends=2, max_messages_per_poll=3, max_finished_epochs=16)


@settings(max_examples=150, deadline=None)
@given(scripts(), st.integers(0, 2**32), st.sampled_from(["flat", "staged"]), st.booleans())
def test_any_schedule_gives_the_same_outcomes_in_one_order(votes: Scripts, seed: int, shape: str, tight: bool) -> None:
    size, chance = len(votes), random.Random(seed)
    topology = Topology.staged(size // 2, 2) if shape == "staged" and size % 2 == 0 else Topology.flat(size)
    clock, network = ManualClock(), InProcessNetwork(size)
    limits = LIMITS if tight else None
    ranks = [
        Rank(OrderedAgreement(transport, clock, topology=topology, limits=limits), script)
        for transport, script in zip(network.transports, votes, strict=True)
    ]
    wanted = len(expected(votes))
    for _ in range(20_000):
        what, lanes = chance.randrange(3), network.under_way()
        rank = ranks[chance.randrange(size)]
        if what == 0:
            rank.act()
        elif what == 1 and lanes:
            network.let_through(lanes[chance.randrange(len(lanes))])
        else:
            rank.poll()
        if all(len(one.applied) == wanted for one in ranks):
            break
    for rank in ranks:
        rank.agreement.begin_close()
    for _ in range(100 * size):
        network.let_all_through()
        for rank in ranks:
            rank.poll()
    assert all(rank.agreement.closed for rank in ranks)
    assert all(not network.count(number) for number in range(size))
    check(ranks, votes)


@settings(max_examples=20, deadline=None)
@given(scripts(size=3), st.integers(0, 2**32))
def test_the_blocking_agreement_decides_alike(votes: Scripts, seed: int) -> None:
    clock = ManualClock()
    ranks = [
        Rank(BlockingAgreement(collective, clock, limits=Limits(max_open_rounds=64)), script)
        for collective, script in zip(InProcessCollective.make(len(votes)), votes, strict=True)
    ]
    wanted, errors = len(expected(votes)), list[BaseException]()

    def play(number: int) -> None:
        chance, rank = random.Random(f"{seed} {number}"), ranks[number]
        try:
            while len(rank.applied) < wanted:
                for _ in range(chance.randrange(3)):
                    rank.act()
                rank.poll()
            last = close(rank.agreement, 30.0)
            rank.applied += last.commits
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=play, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check(ranks, votes)


@settings(max_examples=100, deadline=None)
@given(scripts())
def test_divergences_of_the_local_only_mode_are_counted_exactly(votes: Scripts) -> None:
    clock = ManualClock()
    ranks = [
        Rank(LocalOnlyAgreement(number, len(votes), clock, unsafe=True), script) for number, script in enumerate(votes)
    ]
    for rank in ranks:
        while rank.act():
            rank.poll()
        rank.agreement.begin_close()
        assert rank.agreement.closed
    by_round: dict[Round, set[Outcome]] = {}
    for script in votes:
        for round_, outcome, _ in script:
            by_round.setdefault(round_, set()).add(outcome)
    found = divergence([rank.applied for rank in ranks])
    assert found.unequal == sorted(round_ for round_, seen in by_round.items() if len(seen) > 1)
    assert found.incomplete == []


def test_the_local_only_mode_refuses_to_start_unless_it_is_meant() -> None:
    with pytest.raises(ConfigError, match="--unsafe"):
        LocalOnlyAgreement(0, 2, ManualClock(), unsafe=False)


def test_divergence_sees_what_is_missing_and_out_of_order() -> None:
    one, two = Round(1, 0), Round(2, 0)
    a = [Commit(0, one, Outcome.COMPLETED), Commit(1, two, Outcome.COMPLETED)]
    b = [Commit(0, two, Outcome.COMPLETED), Commit(1, one, Outcome.FAILED)]
    found = divergence([a, b])
    assert (found.unequal, found.incomplete, found.same_order) == ([one], [], False)
    assert divergence([a, a[:1]]).incomplete == [two]
    assert divergence([]).same_order


def test_a_stalled_round_fails_every_rank_of_the_blocking_agreement_in_one_collective() -> None:
    clock = ManualClock()
    collectives = InProcessCollective.make(3)
    ends = [BlockingAgreement(one, clock, limits=Limits(idle_deadline_s=5)) for one in collectives]
    ends[0].publish(Round(4, 1), Outcome.COMPLETED)
    texts: list[str] = []

    def play(end: BlockingAgreement, barrier: threading.Barrier) -> None:
        end.poll()
        if barrier.wait() == 0:
            clock.advance(6)
        barrier.wait()
        try:
            end.poll()
        except AgreementStalledError as error:
            texts.append(str(error))

    barrier = threading.Barrier(3, timeout=30)
    threads = [threading.Thread(target=play, args=(end, barrier)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["request 4 epoch 1 is open for over 5 s by the clock of rank 0: no vote from rank 1, 2"] * 3
