"""The driver of agentic loads in virtual time: what is sent when, by a sender that only waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from atom.bench.agentic.driver import FAILED_PAUSE_NS, AgenticDriver, is_context_overflow
from atom.bench.agentic.generate import GenerateConfig, generate_traces
from atom.bench.agentic.load import AgenticLoad, CacheBust
from atom.bench.agentic.model import Agent, Session, Turn
from atom.bench.load import Api, Endpoint, LoadSpec, PlannedRequest, Shard
from atom.bench.records import MEASURED, WARMUP, Outcome, RequestRecord

BLOCKS = np.arange(3)
NO_BLOCKS = np.empty(0, np.int64)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while anything runs, and jumps to the next timer when nothing does."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now = 0.0
        select = self._selector.select

        def jump(timeout: float | None = None) -> Any:
            events = select(0)
            if not events:
                assert timeout is not None, "everything waits for ever"
                self._now += timeout
            return events

        self._selector.select = jump

    def time(self) -> float:
        return self._now


class AtOnce(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass
class Sent:
    phase: str
    at: float
    plan: PlannedRequest
    index: int
    lane: int
    lateness: float

    @property
    def tags(self) -> Mapping[str, Any]:
        assert self.plan.tags is not None
        return self.plan.tags

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tags["trace"], self.tags["agent"], self.plan.turn or 0


@dataclass
class FakeSender:
    """Answers take `took` seconds, and fail where `fails` says how."""

    took: float = 1.0
    duration: float = float("inf")
    fails: Callable[[PlannedRequest], str | None] = lambda plan: None
    sent: list[Sent] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    phase: str = WARMUP
    started_ns: int = 0
    under_way: int = 0
    most: int = 0
    driver: AgenticDriver | None = None

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.started_ns / 1e9

    @property
    def closed(self) -> bool:
        return self.phase == MEASURED and self.now >= self.duration

    async def perform(self, plan: PlannedRequest, **where: Any) -> asyncio.Future[RequestRecord]:
        raise NotImplementedError

    async def send(
        self,
        plan: PlannedRequest,
        *,
        index: int,
        lane: int,
        scheduled_ns: int | None = None,
        ready_ns: int | None = None,
    ) -> RequestRecord:
        assert not self.closed
        late = 0.0 if ready_ns is None else self.now - (ready_ns - self.started_ns) / 1e9
        self.sent.append(Sent(self.phase, round(self.now, 6), plan, index, lane, round(late, 6)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self.took)
        self.under_way -= 1
        record = RequestRecord(index=index, outcome=Outcome.COMPLETED, end_ns=round((self.now) * 1e9) + self.started_ns)
        if message := self.fails(plan):
            record.outcome, record.error_message = Outcome.FAILED, message
        return record

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def of(self, phase: str = MEASURED) -> list[Sent]:
        return [sent for sent in self.sent if sent.phase == phase]


def drive(load: AgenticLoad, sender: FakeSender | None = None, shard: Shard | None = None) -> FakeSender:
    sender = sender or FakeSender()
    spec = LoadSpec(
        name="x",
        endpoint=Endpoint(base_url="http://x:1"),
        workload=load,
        shard=shard or Shard(),
        duration=None if load.num_sessions else 1e6,
    )

    async def main() -> None:
        loop = asyncio.get_running_loop()
        driver = AgenticDriver(load, spec, now_ns=lambda: round(loop.time() * 1e9), threads=AtOnce())
        sender.driver = driver
        driver.prepare(lambda: False)
        await driver.warm_up(sender)
        sender.phase, sender.started_ns = MEASURED, round(loop.time() * 1e9)
        await driver.measure(sender)
        driver.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    return sender


def turn(start: float, took: float = 1.0, spawns: tuple[int, ...] = (), joins: tuple[int, ...] = ()) -> Turn:
    return Turn(10, 5, 0, BLOCKS, start, took, spawns, joins)


def session(name: str, *agents: list[Turn]) -> Session:
    made = (
        Agent("main" if i == 0 else f"a{i}", min(i, 1), 0 if i else None, 0, tuple(t)) for i, t in enumerate(agents)
    )
    return Session(name, 4, name, tuple(made))


def load(*sessions: Session, **fields: Any) -> AgenticLoad:
    fields = {"concurrency": 1, "num_sessions": 1, "start_min_ratio": 0.0, "start_max_ratio": 0.0, **fields}
    return AgenticLoad(sessions=sessions, api=Api.COMPLETIONS, model="m", **fields)


def test_turns_pause_from_the_end_of_the_previous_one_whatever_it_took() -> None:
    sender = drive(load(session("s", [turn(0), turn(3), turn(8)])), FakeSender(took=10.0))
    assert [sent.at for sent in sender.of()] == [0, 10 + 2, 22 + 4]
    assert [sent.lateness for sent in sender.of()] == [0, 0, 0]


def test_sub_agents_run_beside_their_parent_until_it_joins_them() -> None:
    tree = session(
        "s",
        [turn(0, spawns=(1, 2)), turn(10, joins=(1,)), turn(20)],
        [turn(2), turn(5)],
        [turn(2), turn(90)],
    )
    sender = drive(load(tree))
    starts = {sent.key[1:]: sent.at for sent in sender.of()}
    # main 0 ends at 1; a1 begins 1 later, its turns end at 3 and 6; main 1 begins 4 after that.
    assert starts == {
        ("main", 0): 0,
        ("a1", 0): 2,
        ("a2", 0): 2,
        ("a1", 1): 5,
        ("main", 1): 10,
        ("main", 2): 20,
        ("a2", 1): 90,
    }
    assert {sent.tags["kind"] for sent in sender.of() if sent.tags["depth"]} == {"subagent"}
    parents = {(sent.plan.session, sent.tags["parent"], sent.tags["root"]) for sent in sender.of()}
    assert parents == {("0:s", None, "0:s"), ("0:s/a1", "0:s", "0:s"), ("0:s/a2", "0:s", "0:s")}


def test_a_lane_takes_its_next_session_when_the_whole_tree_has_ended_with_another_marker() -> None:
    tree = session("s", [turn(0, spawns=(1,)), turn(2)], [turn(50)])
    sender = drive(load(tree, session("t", [turn(0)]), num_sessions=3))
    assert [(sent.key, sent.at) for sent in sender.of()] == [
        (("s", "main", 0), 0),
        (("s", "main", 1), 2),
        (("s", "a1", 0), 50),
        (("t", "main", 0), 51),
        (("s", "main", 0), 52),
        (("s", "main", 1), 54),
        (("s", "a1", 0), 102),
    ]
    marks = [sent.tags["marker"] for sent in sender.of()]
    assert len(set(marks)) == 3
    assert [sent.tags["lane_session"] for sent in sender.of()] == [0, 0, 0, 1, 2, 2, 2]
    assert [fields["session"] for name, fields in sender.events if name == "session_end"] == ["0:s", "1:t", "2:s"]


def test_every_agent_s_last_turn_before_the_cut_warms_and_the_rest_is_measured_at_its_distance() -> None:
    tree = session("s", [turn(0), turn(10, spawns=(1,)), turn(60), turn(100)], [turn(20), turn(40), turn(70)])
    sender = drive(load(tree, start_min_ratio=0.5, start_max_ratio=0.5))
    assert [sent.key[1:] for sent in sender.of(WARMUP)] == [("main", 1), ("a1", 1)]
    assert all(sent.tags["kind"] == "warmup" and sent.plan.output_len == 5 for sent in sender.of(WARMUP))
    assert [(sent.key[1:], sent.at) for sent in sender.of()] == [(("main", 2), 10), (("a1", 2), 20), (("main", 3), 50)]
    assert len({sent.tags["marker"] for sent in sender.sent}) == 1, "what is warm stays findable"


def test_lanes_advance_by_one_token_requests_without_pauses_and_go_on_from_there() -> None:
    tree = session("s", [turn(100.0 * k) for k in range(6)])
    made = load(tree, start_min_ratio=0.3, start_max_ratio=0.3, warmup_requests_per_lane=2, num_sessions=2)
    sender = drive(made)
    assert [(sent.plan.turn, sent.plan.output_len, sent.at) for sent in sender.of(WARMUP)] == [
        (1, 5, 0),
        (2, 1, 1),
        (3, 1, 2),
    ]
    assert [(sent.plan.turn, sent.plan.output_len) for sent in sender.of()][:2] == [(4, 5), (5, 5)]
    assert sender.of()[0].at == pytest.approx(99.0), "the pause after the last of them"
    assert len(sender.of()) == made.size() == 2 + 6
    beyond = drive(load(tree, warmup_requests_per_lane=8, num_sessions=2))
    assert [sent.key[0] for sent in beyond.of(WARMUP)] == ["s"] * 8
    assert [sent.plan.turn for sent in beyond.of()] == [2, 3, 4, 5], "it went on into the lane's next session"


def test_failures_are_answers_and_a_context_overflow_ends_the_session() -> None:
    tree = session("s", [turn(0), turn(1), turn(2)])

    def fails(plan: PlannedRequest) -> str | None:
        assert plan.tags is not None
        if plan.turn == 1 and plan.tags["lane_session"] == 1:
            return "This model's maximum context length is 4096 tokens"
        return "overloaded" if plan.turn == 0 else None

    sender = drive(load(tree, num_sessions=3), FakeSender(fails=fails))
    assert [(sent.tags["lane_session"], sent.plan.turn) for sent in sender.of()] == [
        *((0, k) for k in range(3)),
        *((1, k) for k in range(2)),
        *((2, k) for k in range(3)),
    ]
    assert sender.of()[1].at == 1 + FAILED_PAUSE_NS / 1e9, "no busy loop against a server that refuses"


def test_bodies_made_ahead_of_turns_that_never_come_count_no_longer() -> None:
    tree = session("s", [turn(k) for k in range(3)])  # the next turn is due at once: its body is made ahead
    sender = drive(load(tree, num_sessions=40), FakeSender(fails=lambda plan: "prompt is too long"))
    assert len(sender.of()) == 40
    assert sender.driver is not None
    assert sender.driver._ahead_bytes == 0


def test_an_overflow_of_a_sub_agent_lets_its_parent_go_on() -> None:
    tree = session("s", [turn(0, spawns=(1,)), turn(10, joins=(1,))], [turn(1), turn(3)])

    def fails(plan: PlannedRequest) -> str | None:
        return "prompt is too long" if plan.session == "0:s/a1" else None

    assert [sent.key[1:] for sent in drive(load(tree), FakeSender(fails=fails)).of()] == [
        ("main", 0),
        ("a1", 0),
        ("main", 1),
    ]


@pytest.mark.parametrize(
    ("outcome", "message", "expected"),
    [
        (Outcome.FAILED, "the request has 5000 tokens, more than max_model_len 4096", True),
        (Outcome.FAILED, "connection refused", False),
        (Outcome.FAILED, None, False),
        (Outcome.CANCELLED, "context length", False),
    ],
)
def test_what_counts_as_an_overflow(outcome: Outcome, message: str | None, expected: bool) -> None:
    assert is_context_overflow(RequestRecord(index=0, outcome=outcome, error_message=message)) is expected


def test_after_the_duration_nothing_begins_and_what_is_under_way_ends() -> None:
    tree = session("s", [turn(5.0 * k) for k in range(100)])
    sender = drive(load(tree, num_sessions=None), FakeSender(took=3.0, duration=20.0))
    assert [sent.at for sent in sender.of()] == [0, 7, 14]
    assert sender.under_way == 0


def test_when_nothing_is_under_way_all_waiting_turns_move_up_together() -> None:
    one, two = session("s", [turn(0), turn(1000), turn(1010)]), session("t", [turn(0), turn(1004)])
    sender = drive(load(one, two, concurrency=2, num_sessions=2, system_idle_gap_cap=10))
    starts = {sent.key: sent.at for sent in sender.of()}
    assert starts == {
        ("s", "main", 0): 0,
        ("t", "main", 0): 0,
        ("s", "main", 1): 11,
        ("t", "main", 1): 15,
        ("s", "main", 2): 21,
    }
    assert sender.events[-1] == ("system_idle", {"jumps": 1, "skipped_ns": 989 * 10**9})


def test_a_gap_of_one_trace_is_shortened_whatever_others_do() -> None:
    one, two = session("s", [turn(0), turn(1000)]), session("t", [turn(0.5 * k, 0.25) for k in range(50)])
    sender = drive(load(one, two, concurrency=2, num_sessions=2, trace_idle_gap_cap=7, system_idle_gap_cap=100))
    assert {sent.key: sent.at for sent in sender.of()}["s", "main", 1] == 7


def test_concurrency_is_the_number_of_live_trees() -> None:
    sessions = [session(f"s{i}", [turn(k) for k in range(5)]) for i in range(3)]
    sender = drive(load(*sessions, concurrency=4, num_sessions=11), FakeSender(took=2.0))
    assert sender.most == 4
    assert {sent.lane for sent in sender.sent} == {0, 1, 2, 3}
    assert len(sender.of()) == 11 * 5 - sum(sent.phase == WARMUP for sent in sender.sent)


def test_the_same_requests_whatever_the_number_of_workers() -> None:
    sessions = generate_traces(GenerateConfig(num_sessions=5, turns=6, input_len=500, output_len=10), 3)
    made = load(
        *sessions,
        concurrency=5,
        num_sessions=13,
        start_min_ratio=0.2,
        start_max_ratio=0.9,
        warmup_requests_per_lane=2,
        seed=7,
    )

    def requests(workers: int) -> dict[tuple[str, int], tuple[Any, ...]]:
        found = {}
        for index in range(workers):
            for sent in drive(made, shard=Shard(index, workers)).sent:
                assert sent.lane % workers == index
                key = sent.phase, sent.index
                assert key not in found
                found[key] = (sent.plan, sent.lane)
        return found

    alone = requests(1)
    assert requests(2) == alone
    assert requests(7) == alone, "two workers have no lane"
    assert sum(phase == MEASURED for phase, _ in alone) == made.size()
    assert sum(made.requests(Shard(i, 3)) or 0 for i in range(3)) == made.size()
    other = {
        (sent.phase, sent.index): sent.plan.body for sent in drive(load(*sessions, concurrency=5, num_sessions=13)).sent
    }
    shared = other.keys() & alone.keys()
    assert shared
    assert all(other[key] != alone[key][0].body for key in shared), "another seed"


def test_theoretical_hits_are_the_recording_s_and_know_what_markers_leave() -> None:
    turns = [Turn(10, 5, 0, BLOCKS[:2], 0, 1), Turn(12, 5, 2, BLOCKS[2:], 2, 1)]
    tree = Session("s", 4, "s", (Agent("main", 0, None, 4, tuple(turns)),))

    def cached(bust: CacheBust) -> list[int]:
        return [
            sent.tags["theoretical_cached_blocks"] for sent in drive(load(tree, num_sessions=2, cache_bust=bust)).of()
        ]

    assert cached(CacheBust.SYSTEM_PREFIX) == [0, 2, 0, 2]
    assert cached(CacheBust.FIRST_TURN_PREFIX) == [0, 2, 1, 2], "the system prompt is shared"
    assert cached(CacheBust.NONE) == [0, 2, 2, 3], "all of it was sent before"
