"""The replay of a session tree against a plain recursion over what waits for what."""

from __future__ import annotations

import functools
import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.bench.agentic.model import Agent, Session, Turn
from atom.bench.agentic.sessions import SessionRun
from atom.bench.agentic.theory import hit_rate, session_hits
from atom.bench.agentic.timing import Cut, cut_at, cut_time, timeline

NONE = np.empty(0, np.int64)


def turn(start: float = 0.0, took: float = 0.0, spawns: tuple[int, ...] = (), joins: tuple[int, ...] = ()) -> Turn:
    return Turn(10, 5, 0, NONE, start, took, spawns, joins)


def session(*agents: list[Turn], parents: tuple[int | None, ...] | None = None) -> Session:
    parents = parents or (None, *(0 for _ in agents[1:]))
    made = (
        Agent(f"a{i}", 0 if parents[i] is None else 1, parents[i], 0, tuple(turns)) for i, turns in enumerate(agents)
    )
    return Session("s", 64, "s", tuple(made))


@st.composite
def trees(draw: st.DrawFn) -> Session:
    """Sub-agents of sub-agents, some joined by a later turn of their parent, some by none."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    spawned: list[tuple[int, int]] = []
    joined: dict[int, int] = {}
    parents: list[int | None] = [None]
    for child in range(1, len(lengths)):
        parent = draw(st.integers(0, child - 1))
        at = draw(st.integers(0, lengths[parent] - 1))
        parents.append(parent)
        spawned.append((parent, at))
        if at + 1 < lengths[parent] and draw(st.booleans()):
            joined[child] = draw(st.integers(at + 1, lengths[parent] - 1))
    agents = []
    for a, length in enumerate(lengths):
        turns, start = [], 0.0 if a == 0 else agents[spawned[a - 1][0]][spawned[a - 1][1]].end_s
        for k in range(length):
            start += draw(st.integers(0, 9))
            turns.append(
                turn(
                    start,
                    draw(st.integers(0, 5)),
                    tuple(c + 1 for c, place in enumerate(spawned) if place == (a, k)),
                    tuple(c for c, at in joined.items() if parents[c] == a and at == k),
                )
            )
            start = turns[-1].end_s
        agents.append(turns)
    return session(*agents, parents=tuple(parents))


def replay(
    run: SessionRun, took: dict[tuple[int, int], int], stops: set[tuple[int, int]] = frozenset()
) -> dict[tuple[int, int], int]:
    """Start of each turn, in nanoseconds, with answers that take `took`."""
    starts: dict[tuple[int, int], int] = {}
    under_way: list[tuple[int, int, int]] = []

    def launch() -> None:
        for ready in run.take_ready():
            key = (ready.agent, ready.turn)
            assert key not in starts
            starts[key] = (ready.after_ns or 0) + ready.pause_ns
            heapq.heappush(under_way, (starts[key] + took[key], *key))

    launch()
    while under_way:
        now, agent, at = heapq.heappop(under_way)
        if (agent, at) in stops:
            run.stop(agent, now)
        else:
            run.ended(agent, at, now)
        launch()
    assert run.done
    return starts


@settings(deadline=None)
@given(trees(), st.data())
def test_every_turn_begins_when_the_last_of_what_it_waits_for_has_ended_and_its_pause_is_over(
    tree: Session, data: st.DataObject
) -> None:
    times = timeline(tree, data.draw(st.none() | st.floats(0, 10)))
    keys = [(a, k) for a, k, _ in tree.walk()]
    took = {key: data.draw(st.integers(0, 10**10)) for key in keys}
    stops = {key for key in keys if data.draw(st.integers(0, 9)) == 0}

    @functools.cache
    def sent(agent: int, at: int) -> bool:
        if at > 0:
            return sent(agent, at - 1) and (agent, at - 1) not in stops
        if agent not in tree.spawned_by:
            return True
        place = tree.spawned_by[agent]
        return sent(*place) and place not in stops

    @functools.cache
    def end(agent: int, at: int) -> int:
        return start(agent, at) + took[agent, at]

    def over(agent: int) -> int:
        return max(end(agent, k) for k in range(len(tree.agents[agent].turns)) if sent(agent, k))

    @functools.cache
    def start(agent: int, at: int) -> int:
        waits_for = [over(child) for child in tree.agents[agent].turns[at].joins]
        if at > 0:
            waits_for.append(end(agent, at - 1))
        elif agent in tree.spawned_by:
            waits_for.append(end(*tree.spawned_by[agent]))
        return max(waits_for, default=0) + round(times.pause_s[agent][at] * 1e9)

    expected = {key: start(*key) for key in keys if sent(*key)}
    assert replay(SessionRun(tree, times), took, stops) == expected


@settings(deadline=None)
@given(trees(), st.floats(0, 1))
def test_a_session_entered_in_the_middle_sends_what_is_left_and_warms_what_went_before(
    tree: Session, share: float
) -> None:
    times = timeline(tree, None)
    last = max(starts[-1] for starts in times.start_s)
    cut = cut_at(tree, times, share * last)
    run = SessionRun(tree, times, cut)
    assert sorted(run.primers) == sorted(
        (a, next_turn - 1) for a, next_turn in enumerate(cut.next_turn) if 0 < next_turn < len(tree.agents[a].turns)
    )
    keys = {(a, k) for a, k, _ in tree.walk()}
    left = {(a, k) for a, k in keys if k >= cut.next_turn[a]}
    assert left, "the last turn begins at the latest cut"
    assert replay(run, dict.fromkeys(keys, 10**9)).keys() == left
    assert not {(a, k) for a, k in keys - left if times.start_s[a][k] >= share * last}


def test_with_the_recorded_durations_a_replay_has_the_recorded_times() -> None:
    tree = session(
        [turn(0, 2, spawns=(1,)), turn(10, 1, joins=(1,)), turn(12, 1)],
        [turn(3, 2), turn(7, 2)],
    )
    times = timeline(tree, None)
    assert times.pause_s == ((0, 1, 1), (1, 2)), "the joining turn pauses after the end of what it joins"
    starts = replay(SessionRun(tree, times), {(a, k): int(t.duration_s * 1e9) for a, k, t in tree.walk()})
    assert {key: at / 1e9 for key, at in starts.items()} == {(a, k): t.start_s for a, k, t in tree.walk()}


def test_long_gaps_are_shortened_for_the_whole_tree_at_once() -> None:
    tree = session([turn(0, 1, spawns=(1,)), turn(100, 1), turn(103, 1)], [turn(50, 1), turn(52, 1)])
    times = timeline(tree, 10)
    assert times.start_s == ((0, 22, 25), (10, 12))
    assert times.pause_s == ((0, 21, 2), (9, 1))


def test_the_first_pause_after_the_cut_is_shortened_too_and_the_others_keep_their_distance() -> None:
    tree = session([turn(0, 1, spawns=(1,)), turn(100, 1)], [turn(1, 1), turn(130, 1)])
    run = SessionRun(tree, timeline(tree, None), Cut(40.0, (1, 1)), idle_gap_cap=10)
    assert {ready.agent: ready.pause_ns for ready in run.take_ready()} == {0: 10 * 10**9, 1: 40 * 10**9}


def test_the_cut_depends_on_seed_session_and_lane_alone_and_lies_between_the_ratios() -> None:
    tree = session([turn(0), turn(100), turn(200)])
    times = timeline(tree, None)
    cuts = [cut_time(times, tree, lane, 42, 0.25, 0.75) for lane in range(50)]
    assert cuts == [cut_time(times, tree, lane, 42, 0.25, 0.75) for lane in range(50)]
    assert all(50 <= cut <= 150 for cut in cuts)
    assert len(set(cuts)) == 50
    assert cut_time(times, tree, 0, 43, 0.25, 0.75) != cuts[0]
    assert cut_time(times, tree, 0, 42, 0.5, 0.5) == 100


@settings(deadline=None)
@given(trees(), st.data())
def test_theoretical_hits_are_those_of_a_set_of_all_blocks_sent_before(tree: Session, data: st.DataObject) -> None:
    agents, prompts = [], {}
    for a, agent in enumerate(tree.agents):
        turns, before = [], []
        for k, at in enumerate(agent.turns):
            kept = data.draw(st.integers(0, len(before)))
            new = data.draw(st.lists(st.integers(0, 12), max_size=4))
            while kept < len(before) and new and new[0] == before[kept]:
                new = new[1:]
            before = before[:kept] + new
            prompts[a, k] = before
            turns.append(Turn(10, 5, kept, np.array(new, np.int64), at.start_s, at.duration_s, at.spawns, at.joins))
        agents.append(Agent(agent.name, agent.depth, agent.parent, 0, tuple(turns)))
    tree = Session("s", 64, "s", tuple(agents))
    hits = session_hits(tree)
    seen: set[int] = set()
    for a, k, _ in tree.walk():
        assert tree.blocks(a, k).tolist() == prompts[a, k]
        found = next((i for i, block in enumerate(prompts[a, k]) if block not in seen), len(prompts[a, k]))
        assert (hits[a][k].cached, hits[a][k].total) == (found, len(prompts[a, k]))
        seen.update(prompts[a, k])
    total = sum(map(len, prompts.values()))
    rate = hit_rate(tree)
    assert rate is None if total == 0 else rate == pytest.approx(sum(h.cached for agent in hits for h in agent) / total)
