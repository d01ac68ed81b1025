"""Agents that a recording does not name, found by their prompts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.agentic import chains
from atom.bench.agentic.chains import Recorded, common_prefix, split_chains
from atom.bench.agentic.weka import parse_trace
from atom.recipes.errors import UsageError


def request(start: float, blocks: list[int], took: float = 1.0, model: str = "m", output_len: int = 100) -> Recorded:
    return Recorded(start, start + took, model, output_len, np.array(blocks, np.int64))


def test_requests_that_only_grow_are_one_conversation() -> None:
    assert split_chains([request(0, [1, 2]), request(2, [1, 2, 3]), request(4, [1, 2, 3, 4])]) == [[0, 1, 2]]


def test_two_agents_that_ran_at_once_are_two_conversations() -> None:
    requests = [
        request(0, [1, 2]),
        request(2, [1, 2, 3], took=9),
        request(3, [1, 2, 7]),  # while the former is under way
        request(5, [1, 2, 7, 8]),
        request(12, [1, 2, 3, 4]),
    ]
    assert split_chains(requests) == [[0, 1, 4], [2, 3]]


def test_another_model_is_another_agent() -> None:
    assert split_chains([request(0, [1]), request(2, [1, 2], model="small"), request(4, [1, 2])]) == [[0, 2], [1]]


def test_a_compacted_history_is_the_same_conversation_if_nobody_goes_on_from_the_longer_one() -> None:
    compacted = [request(0, [1, 2, 3, 4]), request(2, [1, 9]), request(4, [1, 9, 10])]
    assert split_chains(compacted) == [[0, 1, 2]]
    assert split_chains([*compacted, request(6, [1, 2, 3, 4, 5])]) == [[0, 3], [1, 2]], "a fork after all"


@pytest.mark.parametrize(("gap", "kept", "chains"), [(3000, 1, 1), (4000, 1, 2), (4000, 2, 1)])
def test_what_goes_on_much_later_with_little_in_common_is_another_conversation(
    gap: float, kept: int, chains: int
) -> None:
    requests = [request(0, [1, 2, 3, 4]), request(gap, [*range(1, kept + 1), 9])]
    assert len(split_chains(requests)) == chains


def test_a_request_for_a_title_does_not_found_the_main_conversation() -> None:
    title = request(0, [50, 51], output_len=10)
    requests = [title, request(1, [1, 2]), request(3, [1, 2, 3], took=9), request(4, [1, 8])]
    assert split_chains(requests) == [[0, 1, 2], [3]]


def test_requests_without_blocks_stay_with_the_main_conversation() -> None:
    assert split_chains([request(0, []), request(2, [1]), request(4, []), request(6, [1, 2])]) == [[0, 1, 2, 3]]
    assert split_chains([]) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.integers(0, 5),
            st.sampled_from("mn"),
            st.lists(st.integers(0, 3), max_size=5),
        ),
        max_size=25,
    )
)
def test_each_request_is_in_one_conversation_in_the_order_of_time(
    drawn: list[tuple[int, int, str, list[int]]],
) -> None:
    requests = [request(start, blocks, took, model) for start, took, model, blocks in drawn]
    chains = split_chains(requests)
    assert sorted(place for chain in chains for place in chain) == list(range(len(requests)))
    for chain in chains:
        assert chain
        starts = [requests[place].start_s for place in chain]
        assert starts == sorted(starts)
    if requests:
        assert min(range(len(requests)), key=lambda i: (requests[i].start_s, i)) == chains[0][0]


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(np.array(a, np.int64), np.array(b, np.int64)) == expected


def test_more_agents_at_once_than_can_be_told_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with each, so whoever writes a recording says how long that takes: there is an end to it."""
    forks = [request(float(i), [1, i + 2], took=1e6) for i in range(60)]
    assert len(split_chains(forks)) == 60
    monkeypatch.setattr(chains, "MAX_COMPARED", 1_000_000)
    with pytest.raises(ValueError, match="its 60 requests are of too many agents at once"):
        split_chains(forks)
    entries = [{"t": i, "type": "n", "in": 9, "out": 9, "hash_ids": [1, i + 2], "api_time": 1e6} for i in range(60)]
    with pytest.raises(UsageError, match="here: its 60 requests"):
        parse_trace({"id": "t", "requests": entries}, "here")
    grown = [request(2.0 * i, list(range(i + 1))) for i in range(900)]
    monkeypatch.setattr(chains, "MAX_COMPARED", 1450 * 900)
    assert len(split_chains(grown)) == 1, "a prompt of one agent is compared with its last one alone"


def test_agents_found_in_a_trace_are_spawned_and_joined_like_named_ones() -> None:
    def entry(t: float, ids: list[int], took: float = 1.0) -> dict[str, object]:
        return {"t": t, "type": "n", "model": "m", "in": 300, "out": 9, "hash_ids": ids, "api_time": took}

    inner = [entry(20, [70]), entry(22, [70, 71], 5), entry(23, [70, 75])]
    requests = [
        entry(0, [1, 2]),
        entry(2, [1, 2, 3], 9),
        entry(3, [1, 2, 7]),
        entry(5, [1, 2, 7, 8]),
        entry(12, [1, 2, 3, 4]),
        {"t": 19, "type": "subagent", "agent_id": "a1", "requests": inner, "duration_ms": 9000},
        entry(30, [1, 2, 3, 4, 5]),
    ]
    session = parse_trace({"id": "t", "hash_id_scope": "local", "requests": requests}, "here")
    assert session is not None
    assert [(agent.name, agent.depth, agent.parent, len(agent.turns)) for agent in session.agents] == [
        ("main", 0, None, 4),
        ("fa:000", 1, 0, 2),
        ("a1", 1, 0, 2),
        ("a1:fa:000", 1, 0, 1),
    ]
    main = session.agents[0].turns
    assert [turn.spawns for turn in main] == [(), (1,), (2, 3), ()]
    assert [turn.joins for turn in main] == [(), (), (1,), (2, 3)]
