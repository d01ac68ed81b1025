"""AIPerf's `profile_export.jsonl` as records of a run directory: `requests/aiperf.jsonl`, with what it knows of each
request and null for the rest.

Its times are wall clock; they become those of this boot's monotonic clock by one reading of both, taken before AIPerf
was started. What a recording says of a request (its length, what an unlimited cache would have of it) is added from the
sessions that were replayed, found by the names that its Weka loader gives to conversations.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from atom.bench.agentic.model import Agent, Session
from atom.bench.agentic.tags import AgentTags
from atom.bench.agentic.theory import Hits, session_hits
from atom.bench.agentic.weka import load_traces
from atom.bench.aiperf_export import RECORDS_FILE, SUMMARY_FILE
from atom.bench.records import MEASURED, WARMUP, Outcome, RequestRecord, is_count
from atom.bench.rundir import RunDirectory, read_jsonl
from atom.bench.wall_clock import WallClock
from atom.recipes.errors import UsageError

__all__ = ["ARTIFACTS", "WORKER", "Imported", "import_records", "record_of_line", "take_over"]

ARTIFACTS: Final = "aiperf"
"""Folder of the run directory."""
TRACES: Final = "traces"
"""Of it: where generated sessions are."""

WORKER: Final = "aiperf"
"""Names its files in the run directory."""


@dataclass(slots=True)
class Imported:
    """What was taken over."""

    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    start_ns: int | None = None
    """Of its profiling phase."""
    end_ns: int | None = None
    first_error: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """For run.json: what AIPerf itself printed that a reader may want to compare."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A turn of a recording."""

    agent: str
    depth: int
    input_len: int
    output_len: int
    hits: Hits
    block_size: int


def take_over(run_dir: RunDirectory) -> None:
    """The records of a run that was killed before it took them over from AIPerf, as far as AIPerf has written them; not
    again of one that has ended. What a recording says of them is known of generated sessions alone, which are there."""
    run, folder = run_dir.read_run_json(), run_dir.path / ARTIFACTS
    load, facts = run.get("load"), run.get("aiperf")
    if not isinstance(load, dict) or load.get("client") != "aiperf" or run.get("validity") is not None:
        return
    if not (folder / RECORDS_FILE).is_file():
        return
    sessions: Sequence[Session] = ()
    if (folder / TRACES).is_dir():
        with contextlib.suppress(UsageError):
            sessions = load_traces(folder / TRACES).sessions
    imported = import_records(run_dir, folder, sessions, WallClock.of_run(run), stopped=False, ended=False)
    run_dir.write_run_json({"aiperf": {**(facts if isinstance(facts, dict) else {}), **imported.facts}})
    if imported.start_ns is not None:
        run_dir.write_run_json({"measured_start_ns": imported.start_ns})


def import_records(
    run_dir: RunDirectory,
    folder: Path,
    sessions: Sequence[Session],
    clock: WallClock,
    *,
    stopped: bool,
    ended: bool = True,
) -> Imported:
    """Write requests/aiperf.jsonl and client/aiperf.jsonl of `run_dir` from AIPerf's artifacts in `folder`, anew.
    `ended`: False if nobody saw AIPerf's end."""
    imported = Imported(facts=_facts(folder))
    names, places = _Names(), _Places(sessions)
    for path in (run_dir.requests, run_dir.client):
        (path / f"{WORKER}.jsonl").unlink(missing_ok=True)
    damaged = unmatched = 0
    with run_dir.requests_writer(WORKER) as requests:
        for index, line in enumerate(read_jsonl(folder / RECORDS_FILE)):
            try:
                record = _record(index, line, clock, names, places)
            except (KeyError, TypeError, ValueError, AttributeError):
                damaged += 1
                continue
            requests.append_line(record.to_line())
            unmatched += "theoretical_blocks" not in (record.tags or {})
            if record.phase == MEASURED:
                _count(imported, record)
                places.note(record)
    imported.start_ns = _start(folder, clock) or imported.start_ns
    imported.facts |= {"unreadable_lines": damaged, "requests_of_no_known_turn": unmatched}
    _write_bounds(run_dir, imported, places.finished, stopped=stopped, ended=ended)
    return imported


def _write_bounds(
    run_dir: RunDirectory, imported: Imported, finished: Mapping[str, int], *, stopped: bool, ended: bool
) -> None:
    """The measured phase, as a client of this project notes its own. How many AIPerf sent is its own count, so that a
    record that is missing is seen."""
    started = imported.completed + imported.failed + imported.cancelled
    told = imported.facts.get("requests")
    if is_count(told) and not stopped:
        started = max(started, int(told or 0) + imported.cancelled)
    with run_dir.client_writer(WORKER) as client:
        if imported.start_ns is not None:
            client.append({"kind": "measured_start", "t_ns": imported.start_ns, "requests": None})
        for tree, moment in finished.items():
            client.append({"kind": "session_end", "t_ns": moment, "session": tree})
        if not ended:
            return
        client.append(
            {
                "kind": "measured_end",
                "t_ns": imported.end_ns or imported.start_ns or 0,
                "start_ns": imported.start_ns,
                "started": started,
                "sent": started,
                "completed": imported.completed,
                "failed": imported.failed,
                "cancelled": imported.cancelled,
                "running_integral_ns": None,
                "interrupted": stopped,
            }
        )


def _count(imported: Imported, record: RequestRecord) -> None:
    if record.outcome == Outcome.COMPLETED:
        imported.completed += 1
    elif record.outcome == Outcome.FAILED:
        imported.failed += 1
        imported.first_error = imported.first_error or f"{record.error_class}: {record.error_message}"
    else:
        imported.cancelled += 1
    if record.ready_ns is not None or record.sent_ns is not None:
        first = record.ready_ns if record.ready_ns is not None else record.sent_ns
        assert first is not None
        imported.start_ns = first if imported.start_ns is None else min(imported.start_ns, first)
    if record.end_ns is not None:
        imported.end_ns = max(imported.end_ns or 0, record.end_ns)


def _facts(folder: Path) -> dict[str, Any]:
    summary = _summary(folder)
    theory = summary.get("theoretical_prefix_cache_hit")
    counts = [summary.get(name, {}).get("avg") for name in ("request_count", "error_request_count")]
    told = [int(count) for count in counts if isinstance(count, int | float)]
    return {
        "was_cancelled": summary.get("was_cancelled"),
        "is_complete": summary.get("is_complete"),
        "metadata": summary.get("metadata"),
        "branch_stats": summary.get("branch_stats"),
        "theoretical_prefix_cache_hit": theory if isinstance(theory, dict) else None,
        "requests": sum(told) if told else None,
    }


def _summary(folder: Path) -> dict[str, Any]:
    """Its profile_export_aiperf.json; empty if it wrote none that can be read."""
    try:
        value = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _start(folder: Path, clock: WallClock) -> int | None:
    """When its profiling phase began: local time without a zone."""
    try:
        when = datetime.fromisoformat(_summary(folder)["start_time"])
    except (KeyError, TypeError, ValueError):
        return None
    moment = clock.monotonic(round(when.timestamp() * 1e6) * 1000)
    return moment if moment >= 0 else None


class _Names:
    """Trees numbered in the order in which they appear; an agent's conversation is named as the native client does."""

    def __init__(self) -> None:
        self._trees: dict[str, str] = {}
        self._conversations: dict[str, str] = {}

    def tree(self, root: str, trace: str) -> str:
        return self._trees.setdefault(root, f"{len(self._trees)}:{trace}")

    def conversation(self, correlation: str, tree: str, agent: str, depth: int) -> str:
        return self._conversations.setdefault(correlation, tree if depth == 0 else f"{tree}/{agent}")

    def of(self, correlation: str | None) -> str | None:
        return None if correlation is None else self._conversations.get(correlation)


def _conversations(trace: str, agent: Agent) -> list[str]:
    """What AIPerf may call an agent. Those that a recording does not name are agents (`fa`) or helpers (`aux`) to it,
    or members of a group (`wg`), whose numbers are not known here."""
    if agent.parent is None:
        return [trace]
    owner, mark, number = agent.name.rpartition("fa:")
    if not mark:
        return [f"{trace}::sa:{agent.name}"]
    return [f"{trace}::{f'sa:{owner}' if owner else ''}{kind}:{number}" for kind in ("fa", "aux")]


class _Places:
    """Turns of the recordings by AIPerf's (conversation, turn)."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._found: dict[tuple[str, int], _Place] = {}
        self._last_turn = {session.name: len(session.agents[0].turns) - 1 for session in sessions}
        self.finished: dict[str, int] = {}
        """Tree → when the last turn of its main agent ended."""
        for session in sessions:
            hits = session_hits(session)
            for a, agent in enumerate(session.agents):
                for k, turn in enumerate(agent.turns):
                    place = _Place(
                        agent.name, agent.depth, turn.input_len, turn.output_len, hits[a][k], session.block_size
                    )
                    self._found |= {(name, k): place for name in _conversations(session.name, agent)}

    def note(self, record: RequestRecord) -> None:
        tags = AgentTags.of(record)
        if tags is None or tags.depth or record.turn != self._last_turn.get(tags.trace) or record.end_ns is None:
            return
        if record.outcome != Outcome.CANCELLED:
            self.finished[tags.root] = record.end_ns

    def of(self, conversation: str | None, turn: int | None) -> _Place | None:
        return None if conversation is None or turn is None else self._found.get((conversation, turn))


def record_of_line(index: int, line: Mapping[str, Any], clock: WallClock) -> RequestRecord:
    """One line of `profile_export.jsonl`, of whatever load. ValueError if it is none."""
    try:
        return _record(index, line, clock, _Names(), _Places(()))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no line of AIPerf: {error}") from None


def _record(index: int, line: Mapping[str, Any], clock: WallClock, names: _Names, places: _Places) -> RequestRecord:
    """ValueError, KeyError, TypeError or AttributeError if the line is none of AIPerf's."""
    meta = line["metadata"]
    values = {tag: metric["value"] for tag, metric in (line.get("metrics") or {}).items()}
    sent, end = clock.monotonic(_whole(meta["request_start_ns"])), clock.monotonic(_whole(meta["request_end_ns"]))
    issued = meta.get("credit_issued_ns")
    conversation, turn = meta.get("conversation_id"), meta.get("turn_index")
    place = places.of(conversation, turn)
    warm = meta["benchmark_phase"] == "warmup"
    error = line.get("error")
    outcome = Outcome.CANCELLED if meta.get("was_cancelled") else Outcome.COMPLETED if error is None else Outcome.FAILED
    record = RequestRecord(
        index=index,
        phase=WARMUP if warm else MEASURED,
        worker=WORKER,
        session=conversation,
        turn=turn,
        outcome=outcome,
        ready_ns=None if issued is None else clock.monotonic(_whole(issued)),
        sent_ns=sent,
        end_ns=end,
        input_len=None,
        output_len=None if place is None else 1 if warm else place.output_len,
        prompt_tokens=_token_count(values, "usage_prompt_tokens"),
        cached_tokens=_token_count(values, "usage_prompt_cache_read_tokens"),
        output_tokens=_token_count(values, "output_sequence_length"),
        tokens_from="usage" if "usage_completion_tokens" in values else None,
        tags=_tags(meta, place, names, warm),
    )
    if record.tags is not None:
        record.session = names.of(meta["x_correlation_id"])
    if outcome == Outcome.FAILED:
        assert error is not None
        record.status = error.get("code")
        record.error_class, record.error_message = str(error.get("type") or "error"), str(error.get("message") or "")
    if outcome == Outcome.COMPLETED:
        record.status = 200
        _times(record, values)
    return RequestRecord.from_json(json.loads(record.to_line()))


def _times(record: RequestRecord, values: Mapping[str, Any]) -> None:
    """First, last and every chunk: its gaps are milliseconds with a fraction of nanoseconds."""
    assert record.sent_ns is not None
    ttft, latency = values.get("time_to_first_token"), values.get("request_latency")
    if ttft is None or latency is None:
        return
    record.first_ns, record.last_ns = record.sent_ns + round(ttft * 1e6), record.sent_ns + round(latency * 1e6)
    gaps = values.get("inter_chunk_latency", [])
    record.chunk_ns = list(accumulate((round(gap * 1e6) for gap in gaps), initial=record.first_ns))
    record.last_ns = max(record.first_ns, record.last_ns, record.chunk_ns[-1])
    record.end_ns = max(record.last_ns, record.end_ns or 0)


def _tags(meta: Mapping[str, Any], place: _Place | None, names: _Names, warm: bool) -> dict[str, Any] | None:
    trace, root = meta.get("source_trace_id"), meta.get("root_correlation_id")
    if trace is None or root is None:
        return None
    tree = names.tree(root, trace)
    depth = int(meta.get("agent_depth") or 0)
    agent = place.agent if place is not None else str(meta["conversation_id"]).partition("::")[2] or "main"
    names.conversation(meta["x_correlation_id"], tree, agent, depth)
    tags = {
        "kind": "warmup" if warm else "subagent" if depth else "turn",
        "trace": trace,
        "agent": agent,
        "depth": depth,
        "root": tree,
        "parent": (names.of(meta.get("parent_correlation_id")) or tree) if depth else None,
    }
    if place is None:
        return tags
    return tags | {
        "trace_input_len": place.input_len,
        "theoretical_cached_blocks": place.hits.cached,
        "theoretical_blocks": place.hits.total,
        "theoretical_cached_tokens": min(place.hits.cached * place.block_size, place.input_len),
    }


def _token_count(values: Mapping[str, Any], tag: str) -> int | None:
    value = values.get(tag)
    return None if value is None else int(value)


def _whole(value: Any) -> int:
    if not is_count(value):
        raise ValueError("not a time")
    return int(value)
