"""Keeps `--concurrency` session trees alive: each lane replays one after the other, and sends what is ready when it is
due. Which turns are ready is `bench/agentic/sessions.py`'s, when is `bench/agentic/pacer.py`'s."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Final, TypeVar

from atom.bench.agentic.load import AgenticLoad
from atom.bench.agentic.model import Session
from atom.bench.agentic.pacer import Pacer
from atom.bench.agentic.prompts import PromptMaker, marker
from atom.bench.agentic.sessions import Ready, SessionRun
from atom.bench.agentic.theory import Hits, replayed_hits, session_hits
from atom.bench.agentic.timing import Timeline, timeline
from atom.bench.datasets.text import word_list
from atom.bench.driver import Sender
from atom.bench.load import Api, LoadSpec, PlannedRequest
from atom.bench.records import Outcome, RequestRecord

__all__ = ["AgenticDriver", "is_context_overflow"]

LEAD_NS: Final = 250_000_000
"""How long before it is due a body is made."""
MAX_AHEAD: Final = 256 << 20
"""Bytes of bodies that may wait for an answer to end before they are due at once; others are made when it has."""
_BYTES_PER_TOKEN: Final = 7
FAILED_PAUSE_NS: Final = 100_000_000
"""Least time before what follows a failed request: a server that refuses at once is not asked in a busy loop."""
TURNS_PER_SESSION: Final = 1 << 20
"""Request number = session number × this + the turn's place in its tree: the same however many workers there are."""

_T = TypeVar("_T")
_OVERFLOW: Final = (
    "context length",
    "context_length",
    "context window",
    "maximum context",
    "max_model_len",
    "maximum model length",
    "prompt is too long",
    "input is too long",
)


def is_context_overflow(record: RequestRecord) -> bool:
    """Whether the server refused the request because it is longer than its context: so will all later ones be."""
    if record.outcome != Outcome.FAILED:
        return False
    message = (record.error_message or "").lower()
    return any(phrase in message for phrase in _OVERFLOW)


@dataclass(slots=True)
class _Tree:
    """One session of the load."""

    number: int
    session: Session
    name: str
    mark: str | None
    run: SessionRun
    times: Timeline
    hits: tuple[tuple[Hits, ...], ...]
    seen_before: bool
    first_index: tuple[int, ...]
    """Per agent, the place of its first turn in the tree."""
    ahead: dict[int, asyncio.Future[bytes]] = field(default_factory=dict)
    """Per agent, the body of its next turn where it is made before this one has ended."""


@dataclass(slots=True)
class _Lane:
    number: int
    sessions: int
    """How many it has begun."""
    tree: _Tree | None


class AgenticDriver:
    """The lanes of one shard. A lane whose tree is done goes on with its next session, from the first turn, with a
    marker of its own. Failed requests are answers like any other; one that the server refuses as too long for its
    context stops its agent."""

    def __init__(
        self,
        load: AgenticLoad,
        spec: LoadSpec,
        *,
        now_ns: Callable[[], int] = monotonic_ns,
        threads: Executor | None = None,
    ) -> None:
        self._load = load
        self._shard = spec.shard
        self._now_ns = now_ns
        self._threads = threads or ThreadPoolExecutor(2, "prompts")
        self._lanes: list[_Lane] = []
        self._recorded: dict[str, tuple[Timeline, tuple[tuple[Hits, ...], ...]]] = {}
        self._ahead_bytes = 0

    @property
    def total(self) -> int | None:
        return self._load.requests(self._shard)

    def prepare(self, stopped: Callable[[], bool]) -> None:
        load = self._load
        self._prompts = PromptMaker(load, word_list(load.tokenizer) if load.api is Api.CHAT else None)
        for number in range(self._shard.index, load.lanes, self._shard.of):
            if stopped():
                return
            self._lanes.append(_Lane(number, 1, self._open(number, None)))

    async def warm_up(self, sender: Sender) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(self._warm_lane(sender, lane))

    async def measure(self, sender: Sender) -> None:
        cap = self._load.system_idle_gap_cap
        pacer = Pacer(self._now_ns, lambda: sender.closed, None if cap is None else round(cap * 1e9))
        pacing = asyncio.create_task(pacer.run())
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes:
                    group.create_task(self._replay_lane(sender, pacer, lane))
        finally:
            pacing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pacing
            sender.event("system_idle", jumps=pacer.jumps, skipped_ns=pacer.skipped_ns)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    async def _warm_lane(self, sender: Sender, lane: _Lane) -> None:
        """The last turn before the cut of every agent, with its recorded length: it fills the cache with what the lane
        has said so far. Then one-token requests that go on from there without pauses."""
        tree = lane.tree
        for agent, turn in tree.run.primers if tree else ():
            assert tree is not None
            if not self._may_warm(sender):
                break
            plan = self._plan(tree, agent, turn, await self._make(tree, agent, turn), "warmup")
            if is_context_overflow(await self._send(sender, lane, tree, plan, agent)):
                tree.run.stop(agent, self._now_ns())
        for _ in range(self._load.warmup_requests_per_lane):
            if not self._may_warm(sender):
                break
            await self._go_on(lane, None)
            if (tree := lane.tree) is None:
                return
            ready = tree.run.take_first()
            body = await self._make(tree, ready.agent, ready.turn, output_len=1)
            plan = self._plan(tree, ready.agent, ready.turn, body, "warmup", output_len=1)
            self._ended(tree, ready, await self._send(sender, lane, tree, plan, ready.agent))
        await self._go_on(lane, None)

    def _may_warm(self, sender: Sender) -> bool:
        limit = self._load.warmup_grace_period
        return limit is None or self._now_ns() - sender.started_ns < limit * 1e9

    async def _replay_lane(self, sender: Sender, pacer: Pacer, lane: _Lane) -> None:
        while lane.tree is not None and not sender.closed:
            ended_ns = await self._replay(sender, pacer, lane, lane.tree)
            if lane.tree.run.done:
                sender.event("session_end", lane=lane.number, session=lane.tree.name)
            await self._go_on(lane, ended_ns)

    async def _go_on(self, lane: _Lane, after_ns: int | None) -> None:
        """If the lane's tree is done, its next one, or None where the load has no further sessions."""
        while lane.tree is not None and lane.tree.run.done:
            number = lane.number + lane.sessions * self._load.concurrency
            lane.sessions += 1
            lane.tree = await self._in_thread(partial(self._open, number, after_ns))

    async def _replay(self, sender: Sender, pacer: Pacer, lane: _Lane, tree: _Tree) -> int | None:
        """All that is left of a tree; when the load has closed, only what is under way. Returns when it last ended."""
        last_ns: int | None = None

        async def one(ready: Ready) -> None:
            nonlocal last_ns
            plan_at = await self._when_due(sender, pacer, tree, ready)
            if plan_at is None:
                return
            body, due_ns = plan_at
            pacer.begin()
            try:
                plan = self._plan(tree, ready.agent, ready.turn, await body)
                self._make_ahead(tree, ready.agent, ready.turn + 1)
                record = await self._send(sender, lane, tree, plan, ready.agent, due_ns)
            finally:
                pacer.end()
            last_ns = self._ended(tree, ready, record)
            launch()

        def launch() -> None:
            for ready in tree.run.take_ready():
                group.create_task(one(ready))

        async with asyncio.TaskGroup() as group:
            launch()
        return last_ns

    async def _when_due(
        self, sender: Sender, pacer: Pacer, tree: _Tree, ready: Ready
    ) -> tuple[asyncio.Future[bytes], int] | None:
        """The turn's body, in the making, at the time it is due; None if the load closes before."""
        due_ns = (sender.started_ns if ready.after_ns is None else ready.after_ns) + ready.pause_ns
        body = self._take_ahead(tree, ready.agent, ready.turn)
        if body is None:
            soon = await pacer.until(due_ns, lead_ns=LEAD_NS)
            if soon is None:
                return None
            due_ns, body = soon, self._make(tree, ready.agent, ready.turn)
        moment = await pacer.until(due_ns)
        if moment is None:
            body.cancel()
            return None
        return body, moment

    def _ended(self, tree: _Tree, ready: Ready, record: RequestRecord) -> int:
        """Tell the tree; returns when its next turns may begin to wait."""
        at_ns = self._now_ns() if record.end_ns is None else record.end_ns
        if record.outcome == Outcome.FAILED:
            at_ns += FAILED_PAUSE_NS
        if is_context_overflow(record):
            tree.run.stop(ready.agent, at_ns)
            if (body := self._take_ahead(tree, ready.agent, ready.turn + 1)) is not None:
                body.cancel()
        else:
            tree.run.ended(ready.agent, ready.turn, at_ns)
        return at_ns

    def _open(self, number: int, after_ns: int | None) -> _Tree | None:
        """Session `number` of the load; the first of a lane is entered in the middle."""
        load = self._load
        if load.num_sessions is not None and number >= load.num_sessions:
            return None
        session = load.session(number)
        if session.name not in self._recorded:
            self._recorded[session.name] = timeline(session, load.trace_idle_gap_cap), session_hits(session)
        times, hits = self._recorded[session.name]
        return _Tree(
            number=number,
            session=session,
            name=f"{number}:{session.name}",
            mark=marker(load, number, session),
            run=SessionRun(session, times, load.cut(number, times), load.trace_idle_gap_cap, after_ns),
            times=times,
            hits=hits,
            seen_before=number >= len(load.sessions),
            first_index=tuple(itertools.accumulate((len(agent.turns) for agent in session.agents), initial=0)),
        )

    def _make(self, tree: _Tree, agent: int, turn: int, output_len: int | None = None) -> asyncio.Future[bytes]:
        """The body of a turn, made in a thread."""
        if output_len is None:
            output_len = tree.session.agents[agent].turns[turn].output_len
        return self._in_thread(partial(self._prompts.body, tree.session, agent, turn, tree.mark, output_len))

    def _make_ahead(self, tree: _Tree, agent: int, turn: int) -> None:
        """The body of an agent's next turn, if it may be due as soon as this one has ended."""
        turns = tree.session.agents[agent].turns
        if turn >= len(turns) or tree.times.pause_s[agent][turn] * 1e9 > LEAD_NS:
            return
        size = self._bytes(tree, agent, turn)
        if self._ahead_bytes + size <= MAX_AHEAD:
            self._ahead_bytes += size
            tree.ahead[agent] = self._make(tree, agent, turn)

    def _take_ahead(self, tree: _Tree, agent: int, turn: int) -> asyncio.Future[bytes] | None:
        """The body of a turn where it was made ahead: it counts no longer."""
        body = tree.ahead.pop(agent, None)
        if body is not None:
            self._ahead_bytes -= self._bytes(tree, agent, turn)
        return body

    def _bytes(self, tree: _Tree, agent: int, turn: int) -> int:
        return _BYTES_PER_TOKEN * tree.session.agents[agent].turns[turn].input_len

    def _in_thread(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _plan(
        self, tree: _Tree, agent: int, turn: int, body: bytes, kind: str | None = None, output_len: int | None = None
    ) -> PlannedRequest:
        session = tree.session
        of, now = session.agents[agent], session.agents[agent].turns[turn]
        hits = replayed_hits(
            tree.hits[agent][turn], session, agent, self._load.cache_bust, seen_before=tree.seen_before
        )
        tags = {
            "kind": kind or ("subagent" if of.depth else "turn"),
            "trace": session.name,
            "agent": of.name,
            "depth": of.depth,
            "root": tree.name,
            "parent": None if of.parent is None else self._conversation(tree, of.parent),
            "lane_session": tree.number // self._load.concurrency,
            "marker": tree.mark,
            "trace_input_len": now.input_len,
            "theoretical_cached_blocks": hits.cached,
            "theoretical_blocks": hits.total,
            "theoretical_cached_tokens": min(hits.cached * session.block_size, now.input_len),
        }
        return PlannedRequest(
            body,
            self._prompts.input_len(session, agent, turn, tree.mark),
            now.output_len if output_len is None else output_len,
            self._conversation(tree, agent),
            turn,
            tags,
        )

    def _conversation(self, tree: _Tree, agent: int) -> str:
        return tree.name if agent == 0 else f"{tree.name}/{tree.session.agents[agent].name}"

    async def _send(
        self, sender: Sender, lane: _Lane, tree: _Tree, plan: PlannedRequest, agent: int, ready_ns: int | None = None
    ) -> RequestRecord:
        assert plan.turn is not None
        index = tree.number * TURNS_PER_SESSION + tree.first_index[agent] + plan.turn
        return await sender.send(plan, index=index, lane=lane.number, ready_ns=ready_ns)
