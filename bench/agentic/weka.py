"""Reads recorded sessions: Weka / kv-cache-tester traces, a JSON file per session in a directory, or JSON lines.

Agents that a recording does not name are found by their prompts (`bench/agentic/chains.py`).

A trace file is someone else's: everything is checked and bounded, and an error names the file and the field. What a
replay does not need (think times, stop reasons, totals) is not read.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.agentic.chains import Recorded, common_prefix, split_chains
from atom.bench.agentic.model import Agent, Damage, Session, Turn
from atom.recipes.errors import UsageError

__all__ = ["Traces", "load_traces", "parse_trace"]

MAX_SESSION_BYTES: Final = 256 << 20
MAX_TOTAL_BYTES: Final = 4 << 30
MAX_FILES: Final = 100_000
MAX_REQUESTS: Final = 20_000
"""Of one session."""
MAX_TOKENS: Final = 1 << 24
"""Of one prompt or answer."""
MAX_BLOCK_SIZE: Final = 1 << 16
MAX_DEPTH: Final = 8
"""Sub-agents of sub-agents."""
MAX_SECONDS: Final = 10 * 365 * 86400.0
_MAX_NAME: Final = 256
_JOIN_SLACK_S: Final = 1e-6
_EMPTY: Final[npt.NDArray[np.int64]] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Traces:
    """What was read."""

    sessions: tuple[Session, ...]
    left_out: Mapping[str, int]
    """Why → how many recorded sessions are not among them (of those read until there were enough)."""


def load_traces(path: Path, *, max_sessions: int | None = None, max_context_length: int | None = None) -> Traces:
    """The sessions of a file (`.json`: one; `.jsonl`: one a line) or of all such files in a directory, by name.

    `max_context_length` leaves out sessions with a prompt and answer beyond it; `max_sessions` takes the first that are
    left. Sessions without a request of their main agent are left out too. UsageError if a file is none of the format,
    or nothing is left.
    """
    sessions: list[Session] = []
    left_out: Counter[str] = Counter()
    names: dict[str, str] = {}
    for where, blob in _blobs(path):
        session = parse_trace(blob, where)
        if session is None:
            left_out["no request of the main agent"] += 1
            continue
        if session.name in names:
            raise UsageError(f"{where}: id {session.name!r} is also that of {names[session.name]}")
        names[session.name] = where
        if max_context_length is None or session.max_total_len <= max_context_length:
            sessions.append(session)
            if len(sessions) == max_sessions:
                break
        else:
            left_out[f"a prompt and answer beyond {max_context_length:,} tokens"] += 1
    if not sessions:
        fits = f"none of its {len(names)} sessions fits in {max_context_length} tokens"
        raise UsageError(f"--input-file {path}: {fits if names else 'holds no session'}")
    return Traces(tuple(sessions), dict(left_out))


def _blobs(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, JSON value) of every session."""
    try:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".jsonl") and file.is_file())
            if not files:
                raise UsageError(f"--input-file {path}: the directory holds no .json or .jsonl file")
            if len(files) > MAX_FILES:
                raise UsageError(f"--input-file {path}: more than {MAX_FILES:,} files")
        elif not path.is_file():
            raise UsageError(f"--input-file {path}: no such file or directory")
        total = 0
        for where, data in itertools.chain.from_iterable(map(_sessions_of, files)):
            total += len(data)
            if total > MAX_TOTAL_BYTES:
                raise UsageError(
                    f"--input-file {path}: more than {MAX_TOTAL_BYTES >> 20:,} MiB in all: --num-dataset-entries takes "
                    "the first sessions"
                )
            yield where, _decode(data, where)
    except OSError as error:
        raise UsageError(f"--input-file {error.filename or path}: {error.strerror}") from None


def _sessions_of(file: Path) -> Iterator[tuple[str, bytes]]:
    """(place, text) of every session in a file."""
    with file.open("rb") as content:
        if file.suffix != ".jsonl":
            yield str(file), _bounded(content.read(MAX_SESSION_BYTES + 1), str(file))
            return
        number = 0
        while line := content.readline(MAX_SESSION_BYTES + 1):
            number += 1
            where = f"{file}, line {number}"
            if _bounded(line, where).strip():
                yield where, line


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > MAX_SESSION_BYTES:
        raise UsageError(f"{where}: longer than {MAX_SESSION_BYTES >> 20} MiB")
    return data


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: no JSON ({error})") from None


def parse_trace(blob: Any, where: str) -> Session | None:
    """The session of one trace object; None if its main agent has no request. `where` begins the errors' text."""
    trace = _Fields(blob, where)
    scope = trace.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise trace.error("hash_id_scope", "'local' or 'global'", scope)
    name = trace.text("id")
    block_size = trace.whole("block_size", 1, MAX_BLOCK_SIZE, default=64)
    reader = _Tree(trace, block_size)
    if not reader.agents:
        return None
    scope = name if scope == "local" else ""
    return Session(name, block_size, scope, tuple(map(_frozen, reader.agents)), reader.orphans, reader.damage)


class _Fields:
    """A JSON object whose fields are read with a check each."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise UsageError(f"{where}: must be a JSON object, got {_short(value)}")
        self._value: Mapping[str, Any] = value
        self.where = where

    def error(self, name: str, wanted: str, got: Any) -> UsageError:
        return UsageError(f"{self.where}: {name} must be {wanted}, got {_short(got)}")

    def get(self, name: str, default: Any = None) -> Any:
        value = self._value.get(name)
        return default if value is None else value

    def text(self, name: str) -> str:
        value = self._value.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
            raise self.error(name, f"a string of 1 to {_MAX_NAME} printable characters", value)
        return value

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"a whole number from {low:,} to {high:,}", value)
        return value

    def seconds(self, name: str) -> float:
        value: Any = self._value.get(name)
        if type(value) not in (int, float) or not abs(value) <= MAX_SECONDS:
            raise self.error(name, "a number of seconds", value)
        return float(value)

    def duration(self, name: str, scale: float = 1.0) -> float | None:
        """Seconds; recordings have nulls, negatives and NaN where nothing was measured."""
        value: Any = self._value.get(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            return None
        return min(max(0.0, float(value) * scale), MAX_SECONDS)

    def items(self, name: str, most: int) -> Sequence[Any]:
        value = self.get(name, [])
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, f"a list of at most {most:,}", value)
        return value

    def hash_ids(self) -> npt.NDArray[np.int64]:
        value = self.items("hash_ids", MAX_TOKENS)
        try:
            if not set(map(type, value)) <= {int}:
                raise OverflowError
            return np.array(value, dtype=np.int64)
        except OverflowError:
            raise self.error("hash_ids", "a list of whole numbers of 64 bits", value) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


@dataclass(slots=True)
class _Turn:
    """A turn while its tree is being read."""

    place: int
    """Its number in the list of requests."""
    model: str
    turn: Turn
    blocks: npt.NDArray[np.int64]


@dataclass(slots=True)
class _Agent:
    name: str
    depth: int
    parent: int | None
    system_len: int
    turns: list[_Turn]


class _Tree:
    """Reads the agents of one session, parents before their children."""

    def __init__(self, trace: _Fields, block_size: int) -> None:
        self._block_size = block_size
        self._requests = 0
        self._names: set[str] = set()
        self.agents: list[_Agent] = []
        self.orphans = 0
        self.damage: Counter[Damage] = Counter()
        for number in self._conversations(trace, "main", None, 0)[1:]:
            chain = self.agents[number]
            place = chain.turns[0].place
            self._attach(number, 0, place, max(turn.turn.end_s for turn in chain.turns), or_first=True)

    def _conversations(
        self,
        fields: _Fields,
        name: str,
        parent: int | None,
        depth: int,
        origin_s: float = 0.0,
        within: int | None = None,
    ) -> list[int]:
        """Add the agent whose requests `fields` holds, those that are recorded among its requests, and the sub-agents
        it names; returns the numbers of the former, none if it has no request. Times before `origin_s` are counted from
        there (older recordings of sub-agents do that). `within`: the main list's place of what they are part of."""
        if depth > MAX_DEPTH:
            raise UsageError(f"{fields.where}: sub-agents are nested deeper than {MAX_DEPTH}")
        entries = fields.items("requests", MAX_REQUESTS)
        self._requests += len(entries)
        if self._requests > MAX_REQUESTS:
            raise UsageError(f"{fields.where}: more than {MAX_REQUESTS:,} requests in one session")
        system = fields.whole("tool_tokens", 0, MAX_TOKENS, 0) + fields.whole("system_tokens", 0, MAX_TOKENS, 0)
        turns: list[_Turn] = []
        named: list[tuple[int, _Fields]] = []
        for place, entry in enumerate(entries):
            request = _Fields(entry, f"{fields.where}: requests[{place}]")
            kind = request.get("type")
            if kind == "subagent":
                named.append((place, request))
            elif kind in ("n", "s"):
                turn = _read_turn(request, place, origin_s, place if within is None else within)
                self._check(turn, turns[-1] if turns else None)
                turns.append(turn)
            else:
                raise request.error("type", "'n', 's' or 'subagent'", kind)
        first = len(self.agents)
        try:
            chains = split_chains(list(map(_recorded, turns)))
        except ValueError as error:
            raise UsageError(f"{fields.where}: {error}") from None
        for n, chain in enumerate(chains):
            made = _Agent(name, depth, parent, system, [turns[i] for i in chain])
            if n > 0:
                made.name = f"{name}:fa:{n - 1:03d}" if depth else f"fa:{n - 1:03d}"
            if n > 0 and depth == 0:  # those found beside a named sub-agent belong to the same parent
                made.depth, made.parent = 1, first
            self.agents.append(made)
            self._names.add(made.name)
        for place, request in named if chains else ():
            self._sub_agent(request, place, first, place if within is None else within)
        return list(range(first, first + len(chains)))

    def _check(self, turn: _Turn, before: _Turn | None) -> None:
        """Count what is wrong with a turn, and leave out blocks beyond its prompt: no cache could have had them."""
        most = math.ceil(turn.turn.input_len / self._block_size)
        if len(turn.blocks) > most:
            self.damage[Damage.TOO_MANY_BLOCKS] += 1
            turn.blocks = turn.blocks[:most]
        elif not len(turn.blocks) and turn.turn.input_len >= self._block_size:
            self.damage[Damage.NO_BLOCKS] += 1
        if before is not None and turn.turn.start_s + _JOIN_SLACK_S < before.turn.start_s:
            self.damage[Damage.BACK_IN_TIME] += 1

    def _sub_agent(self, fields: _Fields, place: int, parent: int, within: int) -> None:
        start_s = fields.seconds("t")
        if not any(turn.place < place for turn in self.agents[parent].turns):
            self.orphans += 1
            return
        name = fields.text("agent_id")
        if self.agents[parent].depth:
            name = f"{self.agents[parent].name}.{name}"
        if name in self._names:
            raise fields.error("agent_id", "another one for each sub-agent", name)
        children = self._conversations(fields, name, parent, self.agents[parent].depth + 1, start_s, within)
        duration = fields.duration("duration_ms", 1e-3)
        if duration is None:
            ends = [turn.turn.end_s for child in children for turn in self.agents[child].turns]
            duration = max(ends, default=start_s) - start_s
        for child in children:
            self._attach(child, parent, place, start_s + duration)

    def _attach(self, child: int, parent: int, place: int, end_s: float, *, or_first: bool = False) -> None:
        """An agent begins after the last of its parent's turns that stands before it (`or_first`: or, if none does,
        after the first one), and is joined by the first one behind it that was sent once it had ended."""
        turns = self.agents[parent].turns
        before = [k for k, turn in enumerate(turns) if turn.place < place]
        spawner = max(before, default=0)
        assert before or or_first
        turns[spawner].turn = replace(turns[spawner].turn, spawns=(*turns[spawner].turn.spawns, child))
        for k in range(spawner + 1, len(turns)):
            turn = turns[k].turn
            if turns[k].place > place and turn.start_s + _JOIN_SLACK_S >= end_s:
                turns[k].turn = replace(turn, joins=(*turn.joins, child))
                return


def _recorded(turn: _Turn) -> Recorded:
    return Recorded(turn.turn.start_s, turn.turn.end_s, turn.model, turn.turn.output_len, turn.blocks)


def _read_turn(fields: _Fields, place: int, origin_s: float, within: int) -> _Turn:
    start_s = fields.seconds("t")
    if start_s + _JOIN_SLACK_S < origin_s:
        start_s += origin_s
    turn = Turn(
        input_len=max(1, fields.whole("in", 0, MAX_TOKENS)),
        output_len=max(1, fields.whole("out", 0, MAX_TOKENS)),
        kept_blocks=0,
        new_blocks=_EMPTY,
        start_s=start_s,
        duration_s=fields.duration("api_time") or 0.0,
        place=within,
    )
    return _Turn(place, str(fields.get("model", "")), turn, fields.hash_ids())


def _frozen(agent: _Agent) -> Agent:
    turns: list[Turn] = []
    before = _EMPTY
    for entry in agent.turns:
        kept = common_prefix(before, entry.blocks)
        turns.append(replace(entry.turn, kept_blocks=kept, new_blocks=entry.blocks[kept:].copy()))
        before = entry.blocks
    return Agent(agent.name, agent.depth, agent.parent, agent.system_len, tuple(turns))
