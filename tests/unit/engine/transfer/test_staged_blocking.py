"""Shards agree before stages do: the same outcome on every rank, in one order, whoever saw what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest

from atom.engine.transfer.agreement import close
from atom.engine.transfer.blocking import BlockingAgreement
from atom.engine.transfer.in_process import InProcessCollective, ManualClock
from atom.engine.transfer.outcome import Commit, Outcome, Round
from atom.engine.transfer.staged_blocking import StagedBlockingAgreement

STAGES, SHARDS = 2, 2
SIZE = STAGES * SHARDS


class Played(NamedTuple):
    """By rank."""

    ranks: list[StagedBlockingAgreement]
    got: list[list[Commit]]
    overdue: list[list[Round]]


def play(script: Callable[[int, StagedBlockingAgreement, int], None], steps: int) -> Played:
    """`script(rank, agreement, step)` before each of `steps` polls, on every rank."""
    shards = [InProcessCollective.make(SHARDS) for _ in range(STAGES)]
    stages = [InProcessCollective.make(STAGES) for _ in range(SHARDS)]
    clock = ManualClock()
    ranks, failures = [], list[BaseException]()
    got: list[list[Commit]] = [[] for _ in range(SIZE)]
    overdue: list[list[Round]] = [[] for _ in range(SIZE)]
    for rank in range(SIZE):
        stage, shard = divmod(rank, SHARDS)
        of_stage = BlockingAgreement(shards[stage][shard], clock)
        of_pipeline = BlockingAgreement(stages[shard][stage], clock)
        ranks.append(StagedBlockingAgreement(rank, SIZE, of_stage, of_pipeline))

    def run(rank: int) -> None:
        agreement = ranks[rank]
        try:
            for step in range(steps):
                script(rank, agreement, step)
                progress = agreement.poll()
                got[rank] += progress.commits
                overdue[rank] += progress.timed_out
            close(agreement, 30.0)
        except BaseException as error:
            failures.append(error)
            for one in (*shards[rank // SHARDS], *stages[rank % SHARDS]):
                one._barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    return Played(ranks, got, overdue)


@pytest.mark.parametrize("failing", range(SIZE))
def test_one_shard_that_fails_fails_the_request_everywhere(failing: int) -> None:
    def script(rank: int, agreement: StagedBlockingAgreement, step: int) -> None:
        if step == rank:  # one after the other
            agreement.publish(Round(1, 0), Outcome.FAILED if rank == failing else Outcome.COMPLETED)
        if step == SIZE - rank:
            agreement.publish(Round(2, 0), Outcome.COMPLETED)

    played = play(script, SIZE + 2)
    assert all(sorted((c.round.request, c.outcome) for c in one) == [(1, 2), (2, 1)] for one in played.got)
    assert len({one.digest() for one in played.ranks}) == 1
    assert all(one.closed and one.open_rounds == 0 for one in played.ranks)


@pytest.mark.parametrize("late", range(SIZE))
def test_a_timeout_of_one_shard_is_known_everywhere_before_the_commit(late: int) -> None:
    def script(rank: int, agreement: StagedBlockingAgreement, step: int) -> None:
        if step == 0 and rank == late:
            agreement.publish_timeout(Round(7, 3))
        if step == 2:
            agreement.publish(Round(7, 3), Outcome.COMPLETED)

    played = play(script, 4)
    assert all(one == [Round(7, 3)] for one in played.overdue)
    assert all([(c.round, c.outcome) for c in one] == [(Round(7, 3), Outcome.FAILED)] for one in played.got)
