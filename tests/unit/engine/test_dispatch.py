"""The dispatcher against any sequence of additions, dispatches, failures to send and releases."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.config import EngineConfig, LoadBalance, ParallelConfig, SchedulerConfig
from atom.engine.dispatch import Dispatcher
from atom.engine.errors import ConfigError

POLICIES = get_args(LoadBalance)


def fill(dispatcher: Dispatcher[str], costs: Sequence[int]) -> list[int]:
    """The core of each request, all added at once; what is held back is missing."""
    for number, cost in enumerate(costs):
        dispatcher.add(number, f"request {number}", cost)
    engines: list[int] = []
    while (taken := dispatcher.take()) is not None:
        assert taken[0] == len(engines), "not first come, first served"
        engines.append(taken[1])
    return engines


def test_round_robin_takes_turns_whatever_is_in_hand() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(3, "round_robin", 2)
    assert fill(dispatcher, [1000, 1, 1, 1, 1, 1, 1]) == [0, 1, 2, 0, 1, 2]
    assert dispatcher.num_held_back == 1
    assert dispatcher.release(1) == 1
    assert dispatcher.take() == (6, 1, "request 6")


def test_round_robin_skips_a_core_without_room() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(2, "round_robin", 2)
    assert fill(dispatcher, [1, 1, 1, 1]) == [0, 1, 0, 1]
    for number in (1, 3):
        dispatcher.release(number)
    dispatcher.add(9, "a", 1)
    dispatcher.add(10, "b", 1)
    assert [taken[1] for taken in (dispatcher.take(), dispatcher.take()) if taken] == [1, 1]


def test_least_requests_ignores_tokens_but_for_ties() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(2, "least_requests", None)
    assert fill(dispatcher, [1000, 1, 1, 1]) == [0, 1, 1, 0]


def test_least_tokens_evens_tokens_out() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(2, "least_tokens", None)
    assert fill(dispatcher, [1000, 10, 10, 10, 10]) == [0, 1, 1, 1, 1]
    assert [load.tokens for load in dispatcher.loads] == [1000, 40]


@pytest.mark.parametrize("policy", POLICIES)
def test_single_requests_take_turns(policy: LoadBalance) -> None:
    """Equal cores take turns, so that a load of one request at a time warms and uses all of them."""
    dispatcher: Dispatcher[str] = Dispatcher(2, policy, 8)
    engines = []
    for number in range(4):
        dispatcher.add(number, "", 10)
        taken = dispatcher.take()
        assert taken is not None
        engines.append(taken[1])
        dispatcher.release(number)
    assert engines == [0, 1, 0, 1]


def test_nothing_leaves_after_stop() -> None:
    dispatcher: Dispatcher[str] = Dispatcher(1, "least_requests", None)
    dispatcher.add(1, "a", 1)
    dispatcher.stop()
    assert dispatcher.take() is None
    assert dispatcher.release(1) is None
    assert dispatcher.num_held_back == 0


@given(
    num_engines=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
    limit=st.none() | st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "take", "fail", "release"]), st.integers(0, 50)), min_size=1, max_size=80
    ),
)
def test_no_request_is_lost_or_doubled(
    num_engines: int, policy: LoadBalance, limit: int | None, steps: list[tuple[str, int]]
) -> None:
    dispatcher: Dispatcher[int] = Dispatcher(num_engines, policy, limit)
    waiting: deque[int] = deque()
    in_hand: dict[int, int] = {}
    costs: dict[int, int] = {}
    for step, (what, value) in enumerate(steps):
        if what == "add":
            dispatcher.add(step, step * 7, value)
            costs[step] = value
            waiting.append(step)
        elif what == "release":
            known = [*in_hand, *waiting]
            number = known[value % len(known)] if known else step
            expected = in_hand.pop(number, None)
            if number in waiting:
                waiting.remove(number)
            assert dispatcher.release(number) == expected
            assert dispatcher.release(number) is None, "releasing again must change nothing"
        else:
            taken = dispatcher.take()
            has_room = limit is None or any(load.requests < limit for load in dispatcher.loads)
            if taken is None:
                assert not waiting or not has_room, "held back without need"
            else:
                number, engine, request = taken
                assert number == waiting.popleft(), "first come, first served"
                assert request == number * 7
                if what == "fail":
                    dispatcher.put_back(number, request)
                    waiting.appendleft(number)
                else:
                    in_hand[number] = engine
        assert dispatcher.num_held_back == len(waiting)
        assert dispatcher.num_in_hand == len(in_hand)
        for engine, load in enumerate(dispatcher.loads):
            held = [number for number, where in in_hand.items() if where == engine]
            assert load.requests == len(held)
            assert load.tokens == sum(costs[number] for number in held)
            assert limit is None or load.requests <= limit
    for number in [*waiting, *in_hand]:
        dispatcher.release(number)
    assert (dispatcher.num_held_back, dispatcher.num_in_hand) == (0, 0)
    assert all((load.requests, load.tokens) == (0, 0) for load in dispatcher.loads)


def test_limits_follow_from_the_configuration() -> None:
    one = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=64, max_waiting=100))
    assert (one.dispatch_limit, one.max_open_sequences) == (None, 164)
    scheduler = SchedulerConfig(max_num_seqs=256, max_waiting=100)
    several = EngineConfig(scheduler=scheduler, parallel=ParallelConfig(data_parallel_size=4))
    assert (several.dispatch_limit, several.max_open_sequences) == (288, 1124)
    small = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=2), parallel=ParallelConfig(data_parallel_size=2))
    assert small.dispatch_limit == 10
    few = SchedulerConfig(max_num_seqs=4, max_waiting=2)
    for limit in (None, 20):
        strict = EngineConfig(scheduler=few, parallel=ParallelConfig(data_parallel_size=2, dispatch_limit=limit))
        assert strict.dispatch_limit == 6, "a core refuses more than may run and wait"
    given_limit = EngineConfig(parallel=ParallelConfig(data_parallel_size=2, dispatch_limit=3))
    assert given_limit.dispatch_limit == 3
    assert EngineConfig.from_json(given_limit.to_json()) == given_limit


@pytest.mark.parametrize(
    ("options", "flag"),
    [({"data_parallel_size": 0}, "--data-parallel-size"), ({"dispatch_limit": 0}, "--dp-dispatch-limit")],
)
def test_wrong_values_name_the_flag(options: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ParallelConfig(**options)  # type: ignore[arg-type]
