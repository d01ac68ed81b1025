"""Votes and timeouts of rounds: black-box cases of what a coordinator may decide, and when."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.transfer.errors import VoteError
from atom.engine.transfer.outcome import Outcome, Round, dominant
from atom.engine.transfer.reducer import Ready, VoteReducer

C, F, X = Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED
NOTHING = Ready([], [])


def of(size: int) -> VoteReducer:
    return VoteReducer(range(size))


def test_decided_only_when_every_participant_has_voted() -> None:
    votes, one = of(4), Round(17, 0)
    for rank in range(3):
        votes.vote(rank, one, C)
        assert votes.take_ready() == NOTHING
        assert votes.missing(one) == list(range(rank + 1, 4))
    votes.vote(3, one, C)
    assert votes.take_ready() == Ready([], [(one, C)])
    assert votes.take_ready() == NOTHING
    assert len(votes) == 0


def test_a_failure_dominates_but_does_not_short_circuit() -> None:
    votes, one = of(4), Round(23, 0)
    for rank, outcome in enumerate((C, F, C)):
        votes.vote(rank, one, outcome)
        assert votes.take_ready() == NOTHING
    votes.vote(3, one, C)
    assert votes.take_ready().decided == [(one, F)]


def test_a_vote_is_immutable_and_the_same_one_again_is_ignored() -> None:
    votes, one = of(2), Round(29, 0)
    votes.vote(0, one, C)
    votes.vote(0, one, C)
    with pytest.raises(VoteError, match="rank 0 voted COMPLETED for request 29 epoch 0 and now FAILED"):
        votes.vote(0, one, F)
    votes.vote(1, one, C)
    assert votes.take_ready().decided == [(one, C)]


def test_rounds_are_decided_in_the_order_of_their_last_votes() -> None:
    votes, one, other = of(2), Round(31, 0), Round(37, 0)
    votes.vote(0, one, C)
    votes.vote(1, other, F)
    votes.vote(0, other, C)
    votes.vote(1, one, C)
    assert votes.take_ready().decided == [(other, F), (one, C)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_no_participant_is_refused_and_opens_nothing(rank: int) -> None:
    votes = of(2)
    with pytest.raises(VoteError, match=f"rank {rank} is no participant: 0, 1"):
        votes.vote(rank, Round(1, 0), C)
    with pytest.raises(VoteError, match="no participant"):
        votes.propose_timeout(rank, Round(1, 0))
    assert len(votes) == 0


def test_nobody_is_no_agreement() -> None:
    with pytest.raises(ValueError, match="participants"):
        VoteReducer([])


def test_a_timeout_is_reported_once_and_makes_failed_of_what_all_completed() -> None:
    votes, one = of(2), Round(43, 0)
    votes.propose_timeout(0, one)
    votes.propose_timeout(0, one)
    assert votes.take_ready() == Ready([one], [])
    votes.propose_timeout(1, one)
    assert votes.take_ready() == NOTHING
    votes.vote(0, one, C)
    votes.vote(1, one, C)
    assert votes.take_ready() == Ready([], [(one, F)])


def test_a_timeout_decides_nothing_by_itself() -> None:
    votes, one = of(3), Round(53, 0)
    votes.vote(2, one, C)
    votes.propose_timeout(1, one)
    votes.vote(0, one, C)
    assert votes.take_ready() == Ready([one], [])
    votes.vote(1, one, C)
    assert votes.take_ready() == Ready([], [(one, F)])


def test_a_timeout_after_the_own_vote_is_refused() -> None:
    votes = of(2)
    votes.vote(0, Round(1, 0), C)
    with pytest.raises(VoteError, match="after its vote COMPLETED"):
        votes.propose_timeout(0, Round(1, 0))


def test_an_epoch_is_a_round_of_its_own() -> None:
    votes = of(2)
    votes.vote(0, Round(7, 0), C)
    votes.vote(1, Round(7, 1), C)
    assert votes.take_ready() == NOTHING
    votes.vote(0, Round(7, 1), F)
    assert votes.take_ready().decided == [(Round(7, 1), F)]
    assert votes.missing(Round(7, 0)) == [1]


def test_one_participant_decides_at_once() -> None:
    votes = of(1)
    votes.vote(0, Round(1, 0), X)
    assert votes.take_ready().decided == [(Round(1, 0), X)]


def test_clear_counts_what_it_drops() -> None:
    votes = of(2)
    votes.vote(0, Round(1, 0), C)
    votes.propose_timeout(0, Round(2, 0))
    assert votes.clear() == 2
    assert votes.take_ready() == NOTHING
    assert votes.oldest() is None


@given(st.permutations([(rank, outcome) for rank, outcome in enumerate((C, F, X, C))]))
def test_the_order_of_votes_does_not_matter(order: list[tuple[int, Outcome]]) -> None:
    votes = of(4)
    for rank, outcome in order:
        votes.vote(rank, Round(1, 0), outcome)
    assert votes.take_ready().decided == [(Round(1, 0), X)]


def test_cancelled_beats_failed_beats_completed_and_a_timeout_beats_completed_alone() -> None:
    for votes in itertools.product(Outcome, repeat=3):
        expected = X if X in votes else F if F in votes else C
        assert dominant(votes) is expected
        assert dominant(votes, timed_out=True) is (F if expected is C else expected)
