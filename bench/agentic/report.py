"""What a run that replayed session trees shows beyond every other: by turn, by depth, by session; section `agentic` of
the summary, and figures of its own.

All of it is over the measured phase. A hit rate without what the server says (`usage.prompt_tokens_details`) is null.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from atom.bench.agentic.driver import is_context_overflow
from atom.bench.agentic.tags import AgentTags
from atom.bench.agentic.validity import scenario_reasons
from atom.bench.metrics import Figure, is_supported, percentile
from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory, read_jsonl

__all__ = ["AgenticSection", "agentic_section", "replays_sessions"]

MAX_SESSIONS: Final = 500
"""Sessions that the section lists; all are counted."""
ABOVE_THEORY: Final = 0.05
"""Share of the prompts by which a server's cache may have more than an unlimited one would."""
TURN_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Turns from one of these on, up to the next, are one row."""

DEFINITIONS: Final[Mapping[str, tuple[str, str]]] = {
    "interactivity": (
        "tok/s",
        "1 ÷ 90th percentile of (TPOT + TTFT ÷ output tokens), over completed requests whose output "
        "tokens came at more than one time",
    ),
    "theoretical_cached_share": (
        "fraction",
        "Σ blocks of the prompts that an unlimited cache would have ÷ Σ blocks, of completed requests",
    ),
    "realised_cached_share": (
        "fraction",
        "Σ cached prompt tokens ÷ Σ prompt tokens, of completed requests whose usage has both",
    ),
    "sessions_started": ("sessions", "session trees with a measured request"),
    "sessions_finished": ("sessions", "of these, the ones whose last turn has ended in the measured phase"),
    "sessions_recycled": ("sessions", "of those started, the ones that a lane took up after another one"),
    "sessions_overflowed": ("sessions", "session trees with a request longer than the server's context"),
    "context_overflows": ("requests", "requests that the server refused as longer than its context"),
    "p50_join_wait_s": ("s", "median time of an agent between two turns during which a sub-agent of it was at work"),
    "max_join_wait_s": ("s", "longest time of an agent between two turns during which a sub-agent of it was at work"),
    "p50_subagent_s": ("s", "median time of a sub-agent, from its first request sent to its last ended"),
}


@dataclass(frozen=True, slots=True)
class AgenticSection:
    content: dict[str, Any]
    figures: dict[str, Figure]
    reasons: list[str]
    """Why the run is no valid evidence, beyond what holds for every load."""


def replays_sessions(load: Mapping[str, Any]) -> bool:
    return "recordings" in load and "scenario" in load


def agentic_section(
    run_dir: RunDirectory,
    load: Mapping[str, Any],
    records: Sequence[RequestRecord],
    start_ns: int,
    *,
    interrupted: bool,
) -> AgenticSection:
    """Of a run for which `replays_sessions`. `records`: of the measured phase, from `start_ns` on."""
    tagged = [(record, tags) for record in records if (tags := AgentTags.of(record)) is not None]
    everything = _Group.of(record_tags for record_tags in tagged)
    sessions = _sessions(tagged, _ended_sessions(run_dir), start_ns)
    waits, spans = _waits(tagged)
    reasons, scenario = scenario_reasons(load, records, interrupted=interrupted)
    by_turn = _by_turn(tagged)
    content = {
        "scenario": {
            "name": load.get("scenario"),
            "valid": not scenario if load.get("scenario") is not None else None,
            "reasons": scenario,
            "official_submission": False,
        },
        "all": everything.row(),
        "by_turn": by_turn,
        "by_depth": _by_depth(tagged),
        "sessions": sessions[:MAX_SESSIONS],
        "sessions_left_out": max(0, len(sessions) - MAX_SESSIONS),
        "notes": _notes(load, everything, by_turn),
    }
    return AgenticSection(content, _figures(everything, sessions, waits, spans), reasons)


@dataclass(slots=True)
class _Group:
    """Requests that share a row."""

    requests: int = 0
    completed: int = 0
    failed: int = 0
    overflows: int = 0
    input_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    """Of the completed requests of which they are known."""
    cached: int = 0
    cached_of: int = 0
    blocks_hit: int = 0
    blocks: int = 0
    ttft_ms: array[float] = field(default_factory=lambda: array("d"))
    tpot_ms: array[float] = field(default_factory=lambda: array("d"))
    per_token_ms: array[float] = field(default_factory=lambda: array("d"))
    """TPOT + TTFT ÷ output tokens."""

    @classmethod
    def of(cls, tagged: Iterable[tuple[RequestRecord, AgentTags]]) -> _Group:
        group = cls()
        for record, tags in tagged:
            group.add(record, tags)
        return group

    def add(self, record: RequestRecord, tags: AgentTags) -> None:
        self.requests += 1
        self.failed += record.outcome == Outcome.FAILED
        self.overflows += is_context_overflow(record)
        if record.outcome != Outcome.COMPLETED:
            return
        self.completed += 1
        prompt = record.prompt_tokens if record.prompt_tokens is not None else record.input_len
        if prompt is not None:
            self.input_tokens.append(prompt)
        if record.output_tokens is not None:
            self.output_tokens.append(record.output_tokens)
        if record.cached_tokens is not None and record.prompt_tokens is not None:
            self.cached += record.cached_tokens
            self.cached_of += record.prompt_tokens
        if tags.blocks:
            self.blocks_hit += min(tags.cached_blocks or 0, tags.blocks)
            self.blocks += tags.blocks
        if record.first_ns is not None and record.last_ns is not None and record.sent_ns is not None:
            self._latencies(record.first_ns - record.sent_ns, record.last_ns - record.first_ns, record.output_tokens)

    def _latencies(self, ttft_ns: int, decode_ns: int, output: int | None) -> None:
        self.ttft_ms.append(ttft_ns / 1e6)
        if output is not None and output > 1 and decode_ns > 0:  # else all of them came in one read: not known
            tpot = decode_ns / 1e6 / (output - 1)
            self.tpot_ms.append(tpot)
            self.per_token_ms.append(tpot + ttft_ns / 1e6 / output)

    @property
    def theoretical(self) -> float | None:
        return self.blocks_hit / self.blocks if self.blocks else None

    @property
    def realised(self) -> float | None:
        return self.cached / self.cached_of if self.cached_of else None

    @property
    def interactivity(self) -> float | None:
        worst = percentile(self.per_token_ms, 90)
        return 1000 / worst if worst else None

    def row(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "completed": self.completed,
            "failed": self.failed,
            "context_overflows": self.overflows,
            "mean_input_tokens": _mean(self.input_tokens),
            "mean_output_tokens": _mean(self.output_tokens),
            "median_ttft_ms": percentile(self.ttft_ms, 50),
            "median_ttft_supported": is_supported(len(self.ttft_ms), 50),
            "p99_ttft_ms": percentile(self.ttft_ms, 99),
            "p99_ttft_supported": is_supported(len(self.ttft_ms), 99),
            "median_tpot_ms": percentile(self.tpot_ms, 50),
            "median_tpot_supported": is_supported(len(self.tpot_ms), 50),
            "interactivity": self.interactivity,
            "interactivity_supported": is_supported(len(self.per_token_ms), 90),
            "theoretical_cached_share": self.theoretical,
            "realised_cached_share": self.realised,
        }


def _notes(load: Mapping[str, Any], everything: _Group, by_turn: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader of the rows would wonder about."""
    by_aiperf = load.get("client") == "aiperf"
    if by_aiperf and not everything.requests:
        return ["AIPerf has left no record of a measured request"]
    excess, row = max(((_excess(row), row) for row in by_turn), key=lambda one: one[0], default=(0.0, {}))
    overall = (everything.realised or 0.0) - (everything.theoretical or 0.0)
    if excess <= ABOVE_THEORY or (overall > ABOVE_THEORY and not by_aiperf):  # which has a note of its own
        return []
    low, high = row["from_turn"], row["to_turn"]
    turns = f"turn {low}" if low == high else f"turns {low} and on" if high is None else f"turns {low} to {high}"
    why = (
        "AIPerf's theory counts each session by itself, not what they share (a recording that is replayed again has "
        "the same system prompt)"
        if by_aiperf
        else "sessions share more than each of them has sent before, or the server had seen these prompts"
    )
    theory, real = row["theoretical_cached_share"], row["realised_cached_share"]
    return [f"{turns}: {real:.1%} of the prompts were in the server's cache, {theory:.1%} in theory: {why}"]


def _excess(row: Mapping[str, Any]) -> float:
    theory, real = row["theoretical_cached_share"], row["realised_cached_share"]
    return 0.0 if theory is None or real is None else float(real - theory)


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _by_turn(tagged: Sequence[tuple[RequestRecord, AgentTags]]) -> list[dict[str, Any]]:
    """Rows by the number of the turn within its agent, from 1."""
    groups: dict[int, _Group] = defaultdict(_Group)
    for record, tags in tagged:
        if record.turn is not None:
            groups[int(np.searchsorted(TURN_BUCKETS, record.turn + 1, side="right")) - 1].add(record, tags)
    rows = []
    for bucket, group in sorted(groups.items()):
        low = TURN_BUCKETS[bucket]
        high = TURN_BUCKETS[bucket + 1] - 1 if bucket + 1 < len(TURN_BUCKETS) else None
        rows.append({"from_turn": low, "to_turn": high, **group.row()})
    return rows


def _by_depth(tagged: Sequence[tuple[RequestRecord, AgentTags]]) -> list[dict[str, Any]]:
    groups: dict[int, _Group] = defaultdict(_Group)
    for record, tags in tagged:
        groups[tags.depth].add(record, tags)
    return [{"depth": depth, **group.row()} for depth, group in sorted(groups.items())]


def _ended_sessions(run_dir: RunDirectory) -> set[str]:
    """The trees that came to their end, as the clients noted."""
    ended: set[str] = set()
    for path in sorted(run_dir.client.glob("*.jsonl")):
        for line in read_jsonl(path):
            if line.get("kind") == "session_end" and isinstance(line.get("session"), str):
                ended.add(line["session"])
    return ended


def _sessions(
    tagged: Sequence[tuple[RequestRecord, AgentTags]], ended: set[str], start_ns: int
) -> list[dict[str, Any]]:
    """One entry per tree, in the order in which they began."""
    trees: dict[str, list[tuple[RequestRecord, AgentTags]]] = defaultdict(list)
    for record, tags in tagged:
        trees[tags.root].append((record, tags))
    sessions = []
    for root, requests in trees.items():
        group = _Group.of(requests)
        sent = [record.sent_ns for record, _ in requests if record.sent_ns is not None]
        ends = [record.end_ns for record, _ in requests if record.end_ns is not None]
        first = requests[0]
        sessions.append(
            {
                "session": root,
                "trace": first[1].trace,
                "lane": first[0].lane,
                "lane_session": first[1].lane_session,
                "agents": len({record.session for record, _ in requests}),
                "start_s": (min(sent) - start_ns) / 1e9 if sent else None,
                "end_s": (max(ends) - start_ns) / 1e9 if ends else None,
                "ended": "overflow" if group.overflows else "finished" if root in ended else "open",
                **group.row(),
            }
        )
    return sorted(sessions, key=lambda session: (session["start_s"] is None, session["start_s"] or 0.0))


def _waits(tagged: Sequence[tuple[RequestRecord, AgentTags]]) -> tuple[list[float], list[float]]:
    """Seconds that agents waited for their sub-agents between two turns, and seconds that each sub-agent took."""
    busy: dict[str, list[tuple[int, int]]] = defaultdict(list)
    parent: dict[str, str] = {}
    for record, tags in tagged:
        if record.session is None or record.sent_ns is None or record.end_ns is None:
            continue
        busy[record.session].append((record.sent_ns, record.end_ns))
        if tags.parent is not None:
            parent[record.session] = tags.parent
    spans = {child: (min(busy[child])[0], max(end for _, end in busy[child])) for child in parent}
    children: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for child, span in spans.items():
        children[parent[child]].append(span)
    waits = []
    for agent, of in children.items():
        turns = sorted(busy.get(agent, ()))
        for (_, ended), (sent, _) in pairwise(turns):
            if (wait := _covered(of, ended, sent)) > 0:
                waits.append(wait / 1e9)
    return waits, [(end - start) / 1e9 for start, end in spans.values()]


def _covered(spans: Iterable[tuple[int, int]], low: int, high: int) -> int:
    """How much of low … high the spans cover."""
    covered, reached = 0, low
    for start, end in sorted(spans):
        begin, finish = max(start, reached), min(end, high)
        if finish > begin:
            covered += finish - begin
            reached = finish
    return covered


def _figures(
    everything: _Group, sessions: Sequence[Mapping[str, Any]], waits: Sequence[float], spans: Sequence[float]
) -> dict[str, Figure]:
    n = len(sessions)
    known = [session["lane_session"] for session in sessions if session["lane_session"] is not None]
    values: dict[str, tuple[float | None, int]] = {
        "interactivity": (everything.interactivity, len(everything.per_token_ms)),
        "theoretical_cached_share": (everything.theoretical, everything.blocks),
        "realised_cached_share": (everything.realised, everything.cached_of),
        "sessions_started": (n, n),
        "sessions_finished": (sum(session["ended"] == "finished" for session in sessions), n),
        "sessions_recycled": (sum(map(bool, known)) if known else None, len(known)),
        "sessions_overflowed": (sum(session["ended"] == "overflow" for session in sessions), n),
        "context_overflows": (everything.overflows, everything.requests),
        "p50_join_wait_s": (percentile(waits, 50), len(waits)),
        "max_join_wait_s": (max(waits, default=None), len(waits)),
        "p50_subagent_s": (percentile(spans, 50), len(spans)),
    }
    supported = {"interactivity": 90.0, "p50_join_wait_s": 50.0, "p50_subagent_s": 50.0}
    return {
        name: Figure(
            value,
            DEFINITIONS[name][0],
            n,
            DEFINITIONS[name][1],
            name not in supported or is_supported(n, supported[name]),
        )
        for name, (value, n) in values.items()
    }
