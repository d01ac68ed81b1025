"""Realistic agentic sessions without a download: long-tailed numbers of turns, tool calls, sub-agents, and prompts of
which a stated share has been sent before. They are written as Weka traces, which AIPerf reads as well.

Every agent's history only grows: by its last answer and by a tool's result or a user's message. How long
prompts are sets the size of the prompt an agent begins with and of a result; what share of them was sent before follows
from the number of turns (the more, the higher), and the other way round. Expectations over the random numbers of turns
are taken from a fixed sample.
So session `s` depends on the configuration and (seed, s) alone, and a set of few sessions may stray from the means.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.bench.agentic.model import Session
from atom.bench.agentic.theory import session_hits
from atom.bench.agentic.weka import parse_trace
from atom.recipes.errors import AtomError, UsageError

__all__ = ["GenerateConfig", "generate_traces", "write_traces"]

_STREAM: Final = 11
"""Keeps these random numbers apart from those of prompts and arrivals."""
_SAMPLE: Final = 512
"""Sessions that stand for the expectation."""
_GOLDEN: Final = 0.6180339887498949
_SHARED_PREFIX: Final = 0.96
_MAX_TURNS: Final = 4096
_BEGINNING: Final = 0.5
"""Share of all prompt tokens (without answers) that an agent began with; the rest are results."""
_LEAST_BASE: Final = 2
"""Blocks of the prompt that an agent begins with."""
_LEAST_RESULT: Final = 1
"""Tokens of a mean result."""
_TURNS_SIGMA: Final = 0.8
_OUTPUT_SIGMA: Final = 0.9
_RESULT_SIGMA: Final = 1.0
_MOST_TURNS: Final = 20
"""Times the median: where the long tail ends."""
_SUB_TURNS: Final = 0.3
"""A sub-agent's median of turns, of the main agent's."""
_SUB_BASE: Final = 0.35
"""The prompt that a sub-agent begins with, of the main agent's."""
_SYSTEM: Final = 0.6
"""Tools and system prompt, of the shortest prompt that an agent begins with."""
_SHORTEST: Final = 0.8
"""The shortest first prompt, of the mean."""
_BACKGROUND: Final = 0.15
"""Share of the sub-agents that nobody waits for."""
_USER_TURN: Final = 0.1
"""Share of the turns that a user's message begins, not a tool's result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """What the sessions are to be like."""

    num_sessions: int = 64
    turns: int | None = None
    """Median number of the main agent's requests; the mean is higher, the longest have many times as many. None: as
    many as `shared_prefix` asks for."""
    input_len: int = 40_000
    """Mean prompt length over all requests, in tokens."""
    output_len: int = 218
    """Median answer, in tokens."""
    shared_prefix: float | None = None
    """Share of all prompt tokens that the session has sent before. None: what `turns` leads to, or 0.96."""
    subagents: float = 0.05
    """Share of the main agent's turns that begin sub-agents, one to three of them."""
    block_size: int = 64
    max_context_length: int | None = None
    """Sessions end before a prompt and its answer would be longer than this."""
    model: str = "model"

    def __post_init__(self) -> None:
        for flag, value in (
            ("--generate-sessions", self.num_sessions),
            ("--generate-input-len", self.input_len),
            ("--generate-output-len", self.output_len),
            ("--generate-block-size", self.block_size),
        ):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1, got {value}")
        if self.turns is not None and not 2 <= self.turns <= _MAX_TURNS:
            raise UsageError(f"--generate-turns must be from 2 to {_MAX_TURNS}, got {self.turns}")
        if self.shared_prefix is not None and not 0 < self.shared_prefix < 1:
            raise UsageError(f"--generate-shared-prefix is a share between 0 and 1, got {self.shared_prefix:g}")
        if self.turns is not None and self.shared_prefix is not None:
            raise UsageError("--generate-turns and --generate-shared-prefix: either one leads to the other; give one")
        if not 0 <= self.subagents <= 1:
            raise UsageError(f"--generate-subagents is a share from 0 to 1, got {self.subagents:g}")
        _sizes(self)


def generate_traces(config: GenerateConfig, seed: int) -> tuple[Session, ...]:
    """The sessions, as `write_traces` and `weka.load_traces` would bring them back."""
    sessions = (parse_trace(trace, "generated") for trace in _traces(config, seed))
    return tuple(session for session in sessions if session is not None)


def write_traces(config: GenerateConfig, seed: int, directory: Path) -> list[Path]:
    """One Weka trace file per session in `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for trace in _traces(config, seed):
        path = directory / f"{trace['id']}.json"
        path.write_text(json.dumps(trace, separators=(",", ":")) + "\n")
        paths.append(path)
    return paths


@dataclass(slots=True)
class _Shape:
    """An agent without its sizes."""

    base: float
    """The prompt it begins with, of the configuration's."""
    outputs: list[int]
    results: list[float]
    """Per turn, what came in before it, of the mean result; the first turn has none."""
    subs: dict[int, list[_Shape]] = field(default_factory=dict)
    """The sub-agents that each turn begins."""
    background: bool = False


def _shape(rng: np.random.Generator, config: GenerateConfig, turns: float, place: float | None = None) -> _Shape:
    """A main agent at `place` of the distribution of turns (0 to 1), or (None) a sub-agent."""
    sub = place is None
    median = turns * (_SUB_TURNS if sub else 1.0)
    deviation = float(rng.normal()) if place is None else NormalDist().inv_cdf(min(max(place, 1e-9), 1 - 1e-9))
    count = int(np.clip(median * np.exp(_TURNS_SIGMA * deviation), 2, _MOST_TURNS * median))
    outputs = np.maximum(1, rng.lognormal(np.log(config.output_len), _OUTPUT_SIGMA, count)).astype(int)
    results = rng.lognormal(-(_RESULT_SIGMA**2) / 2, _RESULT_SIGMA, count)
    results[0] = 0.0
    shape = _Shape(
        float(rng.uniform(_SHORTEST, 2 - _SHORTEST)) * (_SUB_BASE if sub else 1.0), outputs.tolist(), results.tolist()
    )
    if sub:
        shape.background = bool(rng.random() < _BACKGROUND)
    else:
        for turn in np.flatnonzero(rng.random(count - 1) < config.subagents).tolist():
            shape.subs[turn] = [_shape(rng, config, turns) for _ in range(int(rng.integers(1, 4)))]
    return shape


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the stated means lead to."""

    turns: float
    base: float
    """Tokens that an agent begins with."""
    result: float
    """Mean tokens of a tool's result or a user's message."""
    shared_prefix: float


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a sample of sessions: each row holds the coefficients of (first prompt, mean result, 1)."""

    total: npt.NDArray[np.float64]
    """[3] tokens of all prompts."""
    fresh: npt.NDArray[np.float64]
    """[3] those not sent before."""
    prompts: int

    def sizes(self, turns: float, input_len: int) -> _Sizes:
        """For a mean prompt of `input_len` tokens; not positive where the answers alone are longer."""
        goal = self.prompts * input_len
        unknown = goal - self.total[2]
        base, result = unknown * _BEGINNING / self.total[0], unknown * (1 - _BEGINNING) / self.total[1]
        return _Sizes(turns, float(base), float(result), 1 - float(self.fresh @ (base, result, 1.0)) / goal)

    def least_input_len(self, block_size: int) -> int:
        """The shortest mean prompt, in hundreds of tokens, that leaves room for a first prompt and for results."""
        base, result = _LEAST_BASE * block_size / _BEGINNING, _LEAST_RESULT / (1 - _BEGINNING)
        least = (self.total[2] + max(base * self.total[0], result * self.total[1])) / self.prompts
        return 100 * math.ceil(float(least) * 1.02 / 100)


@lru_cache(maxsize=64)
def _sums(config: GenerateConfig, turns: float) -> _Sums:
    total, fresh, prompts = np.zeros(3), np.zeros(3), 0
    for number in range(_SAMPLE):  # each with numbers of its own, so that the sums are smooth in `turns`
        rng = np.random.default_rng([_STREAM, _STREAM, number])
        main = _shape(rng, config, turns, (number + 0.5) / _SAMPLE)
        subs = [sub for group in main.subs.values() for sub in group]
        for place, agent in enumerate((main, *subs)):
            grown = np.concatenate([[0], np.cumsum(agent.outputs)[:-1]])
            results = np.cumsum(agent.results)
            total += [agent.base * len(grown), results.sum(), grown.sum()]
            shared = (
                _SHORTEST * _SYSTEM * _SUB_BASE if place > 1 else 0.0
            )  # the first sub-agent has sent the system prompt
            fresh += [agent.base - shared, results[-1], grown[-1]]
            prompts += len(grown)
    return _Sums(total, fresh, prompts)


class _TooShort(Exception):
    """A mean prompt that leaves no room for what an agent begins with, or for results."""

    def __init__(self, turns: float, least: int) -> None:
        self.turns = turns
        self.least = least
        """The shortest one that has room with so many turns."""


@lru_cache(maxsize=64)
def _sizes(config: GenerateConfig) -> _Sizes:
    try:
        return _solve(config, config.input_len)
    except _TooShort as short:
        turns, enough = short.turns, _long_enough(config, short.least)
    raise UsageError(
        f"--generate-input-len {config.input_len:,} is too short for a median of {turns:.0f} turns whose answers have "
        f"{config.output_len:,} tokens: {enough:,} would do, or fewer --generate-turns, or a smaller "
        "--generate-output-len"
    )


def _long_enough(config: GenerateConfig, input_len: int) -> int:
    """`input_len`, or what it takes for the turns that a longer prompt leads to."""
    while True:
        try:
            _solve(config, input_len)
        except _TooShort as short:
            input_len = max(short.least, input_len + 100)
        except UsageError:
            return input_len  # not for its length
        else:
            return input_len


def _solve(config: GenerateConfig, input_len: int) -> _Sizes:
    if config.turns is not None:
        sizes = _sizes_for(config, config.turns, input_len)
    else:
        wanted = config.shared_prefix or _SHARED_PREFIX
        guess = 1 / (1 - wanted)  # the share that was not sent before falls like 1 / turns
        low, high = max(1.0, guess / 4), min(guess * 4, float(_MAX_TURNS))
        for _ in range(8):
            middle = (low * high) ** 0.5
            sizes = _sizes_for(config, middle, input_len)
            low, high = (middle, high) if sizes.shared_prefix < wanted else (low, middle)
        if abs(sizes.shared_prefix - wanted) > 0.005:
            raise UsageError(
                f"--generate-shared-prefix {wanted:g} cannot be had with --generate-input-len {input_len:,} and "
                f"--generate-output-len {config.output_len:,}; the nearest is {sizes.shared_prefix:.3f}"
            )
    return sizes


def _sizes_for(config: GenerateConfig, turns: float, input_len: int) -> _Sizes:
    sums = _sums(config, turns)
    sizes = sums.sizes(turns, input_len)
    if sizes.base < _LEAST_BASE * config.block_size or sizes.result < _LEAST_RESULT:
        raise _TooShort(turns, sums.least_input_len(config.block_size))
    return sizes


def _traces(config: GenerateConfig, seed: int) -> Iterator[dict[str, Any]]:
    for number in range(config.num_sessions):
        yield _Writer(config, seed, number).trace()


class _Writer:
    """Writes one session."""

    def __init__(self, config: GenerateConfig, seed: int, number: int) -> None:
        self._config = config
        self._rng = np.random.default_rng([seed, _STREAM, number])
        # Multiples of the golden ratio spread evenly: any run of sessions has its share of long ones.
        self._place = float(np.random.default_rng([seed, _STREAM]).random() + number * _GOLDEN) % 1.0
        self._name = f"generated-{seed}-{number:05d}"
        self._sizes = _sizes(config)
        self._next_id = 0
        self._sub_system = self._ids(self._system_blocks(_SUB_BASE))
        self._agents = 0

    def trace(self) -> dict[str, Any]:
        shape = _shape(self._rng, self._config, self._sizes.turns, self._place)
        system = self._system_blocks(1.0)
        requests, _ = self._run(shape, self._ids(system), 0.0)
        return {
            "id": self._name,
            "models": [self._config.model],
            "block_size": self._config.block_size,
            "hash_id_scope": "local",
            "tool_tokens": 0,
            "system_tokens": system * self._config.block_size,
            "requests": requests,
        }

    def _system_blocks(self, base: float) -> int:
        """Fits into the shortest first prompt."""
        return int(_SHORTEST * _SYSTEM * base * self._sizes.base) // self._config.block_size

    def _ids(self, count: int) -> list[int]:
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def _run(self, shape: _Shape, blocks: list[int], t: float) -> tuple[list[dict[str, Any]], float]:
        """An agent's requests from time `t` on, its prompts beginning with `blocks`; and when the last has ended."""
        size, rng = self._config.block_size, self._rng
        requests: list[dict[str, Any]] = []
        length, results, think, end, from_tool = shape.base * self._sizes.base, 0.0, 0.0, t, False
        for turn, output in enumerate(shape.outputs):
            results += shape.results[turn]
            input_len = int(length + results * self._sizes.result)
            if self._too_long(input_len + output) and requests:
                break
            blocks = blocks + self._ids(max(0, input_len // size - len(blocks)))
            start = round(end + think, 3)
            ttft = float(rng.uniform(0.2, 0.6)) + input_len * 2e-6
            api_time = round(ttft + output * 0.012, 3)
            last = turn + 1 == len(shape.outputs)
            to_tool = not last and bool(rng.random() >= _USER_TURN)
            requests.append(
                {
                    "t": start,
                    "type": "s",
                    "model": self._config.model,
                    "in": input_len,
                    "out": output,
                    "hash_ids": blocks[: input_len // size],
                    "input_types": ["tool_result"] if from_tool else ["text"],
                    "output_types": ["text", "tool_use"] if to_tool else ["text"],
                    "stop": "tool_use" if to_tool else "end_turn",
                    "api_time": api_time,
                    "think_time": round(think, 3),
                    "ttft": round(ttft, 3),
                }
            )
            end = start + api_time
            length += output
            think, from_tool = self._pause(to_tool), to_tool
            joined = end
            for sub in shape.subs.get(turn, ()):
                entry, over = self._sub_agent(sub, round(end + float(rng.uniform(0.05, 0.5)), 3))
                requests.append(entry)
                if not sub.background:
                    joined = max(joined, over)
            end = joined
        return requests, end

    def _sub_agent(self, shape: _Shape, start: float) -> tuple[dict[str, Any], float]:
        requests, end = self._run(shape, self._sub_system, start)
        duration_ms = int(np.ceil((end - start) * 1000))
        self._agents += 1
        entry = {
            "t": start,
            "type": "subagent",
            "agent_id": f"agent_{self._agents:03d}",
            "subagent_type": "general",
            "duration_ms": duration_ms,
            "total_tokens": sum(request["in"] + request["out"] for request in requests),
            "tool_use_count": sum(request["stop"] == "tool_use" for request in requests),
            "status": "async_launched" if shape.background else "completed",
            "models": [self._config.model],
            "tool_tokens": 0,
            "system_tokens": len(self._sub_system) * self._config.block_size,
            "requests": requests,
        }
        return entry, start + duration_ms / 1000

    def _too_long(self, total: int) -> bool:
        most = self._config.max_context_length
        return most is not None and total > most

    def _pause(self, tool: bool) -> float:
        """Seconds until the next input: most tools are quick, some compile, and a user reads first."""
        median, sigma = (1.2, 1.2) if tool else (25.0, 1.0)
        return float(min(self._rng.lognormal(np.log(median), sigma), 3600.0))


def main() -> None:
    """`python -m atom.bench.agentic.generate DIRECTORY`: write traces, and print what they are like as JSON."""
    parser = argparse.ArgumentParser(prog="python -m atom.bench.agentic.generate", description=main.__doc__)
    defaults = GenerateConfig()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generate-sessions", dest="num_sessions", type=int, default=defaults.num_sessions)
    parser.add_argument("--generate-max-context-length", dest="max_context_length", type=int)
    for name in ("turns", "input_len", "output_len", "shared_prefix", "subagents", "block_size"):
        kind = float if name in ("shared_prefix", "subagents") else int
        flag = f"--generate-{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, type=kind, default=getattr(defaults, name))
    given = vars(parser.parse_args())
    directory, seed = given.pop("directory"), given.pop("seed")
    try:
        config = GenerateConfig(**given)
        paths = write_traces(config, seed, directory)
    except AtomError as error:
        parser.error(str(error))
    print(json.dumps({"files": len(paths), **statistics(generate_traces(config, seed))}))


def statistics(sessions: tuple[Session, ...]) -> dict[str, float]:
    """What `sessions` are like: means over all their requests, medians over sessions."""
    turns = [turn for session in sessions for _, _, turn in session.walk()]
    hits = [hit for session in sessions for agent in session_hits(session) for hit in agent]
    return {
        "requests": len(turns),
        "agents": sum(len(session.agents) for session in sessions),
        "input_len_mean": float(np.mean([turn.input_len for turn in turns])),
        "input_len_max": max(turn.input_len for turn in turns),
        "output_len_median": float(np.median([turn.output_len for turn in turns])),
        "turns_median": float(np.median([len(session.agents[0].turns) for session in sessions])),
        "turns_max": max(len(session.agents[0].turns) for session in sessions),
        "shared_prefix": sum(hit.cached for hit in hits) / max(1, sum(hit.total for hit in hits)),
    }


if __name__ == "__main__":
    main()
