"""Why metrics disagree, where the records show it: what a run did in its window besides being fast or slow, and words
for arms whose TTFT and throughput, or any others, point to different sides.

A closed loop keeps the number of requests: those that do not wait for their first token decode. A server that admits
earlier has a better TTFT, more requests in a step, and longer steps; one that holds prompts back has it the other way
round. Nothing here is a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from atom.bench.engine_window import EngineWindow
from atom.bench.records import Outcome, RequestRecord
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.window import Window
from atom.diag.server_captures import read_scrapes

__all__ = ["FACTS", "Fact", "disagreement", "run_facts"]


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a run did in its window."""

    name: str
    title: str
    unit: str = ""
    digits: int = 1
    share: bool = False
    """0..1, shown in percent."""


_ALL: Final = (
    Fact("waiting", "requests waiting for their first token"),
    Fact("decoding", "requests decoding"),
    Fact("running", "requests running"),
    Fact("prompt_rate", "prompts", "tok/s", 0),
    Fact("step_tokens", "tokens per engine step"),
    Fact("server_waiting", "requests queued in the server"),
    Fact("cached_share", "prompt tokens from the cache", share=True),
    Fact("output_len", "tokens per answer"),
    Fact("tokens_per_chunk", "tokens per chunk", digits=2),
)
FACTS: Final[Mapping[str, Fact]] = {one.name: one for one in _ALL}

LEAST_CHANGE: Final = 0.01
"""Of a fact, relative; one that changes less explains nothing."""
_MOST_FACTS: Final = 4


def run_facts(path: Path, records: Sequence[RequestRecord], window: Window) -> dict[str, float]:
    """By name of `FACTS`; what is not known is not there. `records`: of the measured phase."""
    if window.seconds <= 0:
        return {}
    done = [one for one in records if one.outcome == Outcome.COMPLETED]
    facts = {
        "waiting": _mean_number([(one.sent_ns, one.first_ns or one.end_ns) for one in records], window),
        "decoding": _mean_number([(one.first_ns, one.last_ns) for one in records], window),
        "running": _mean_number([(one.sent_ns, one.end_ns) for one in records], window),
    }
    begun = [one for one in done if window.holds(one.first_ns)]
    prompts = [one.prompt_tokens if one.prompt_tokens is not None else one.input_len or 0 for one in begun]
    if any(prompts):
        facts["prompt_rate"] = sum(prompts) / window.seconds
    cached = [one for one in begun if one.cached_tokens is not None and one.prompt_tokens]
    if cached:
        facts["cached_share"] = sum(one.cached_tokens or 0 for one in cached) / sum(
            one.prompt_tokens or 0 for one in cached
        )
    ended = [one for one in done if window.holds(one.last_ns) and one.output_tokens and len(one.chunk_ns)]
    if ended:
        tokens = sum(one.output_tokens or 0 for one in ended)
        facts["output_len"] = tokens / len(ended)
        facts["tokens_per_chunk"] = tokens / sum(len(one.chunk_ns) for one in ended)
    return facts | _server_facts(path, window)


def _mean_number(spans: Sequence[tuple[int | None, int | None]], window: Window) -> float:
    """How many of the spans cover a moment of the window, on average."""
    known = np.array([span for span in spans if None not in span], dtype=np.int64).reshape(-1, 2)
    inside = np.minimum(known[:, 1], window.end_ns) - np.maximum(known[:, 0], window.start_ns)
    return float(np.maximum(inside, 0).sum()) / 1e9 / window.seconds


def _server_facts(path: Path, window: Window) -> dict[str, float]:
    if not (path / "server").is_dir():
        return {}
    scrapes = read_scrapes(path / "server")
    engine = EngineWindow(scrapes.sent_ns, scrapes.values, window.start_ns, window.end_ns)
    facts: dict[str, float] = {}
    waiting = engine.gauge("waiting")
    if len(waiting):
        facts["server_waiting"] = float(waiting.mean())
    tokens, steps = engine.growth("step_tokens", "steps"), engine.growth("steps", "step_tokens")
    if tokens is not None and steps is not None and steps.amount > 0:
        facts["step_tokens"] = tokens.amount / steps.amount
    return facts


_FAMILIES: Final[Mapping[str, str]] = {
    "ttft": "first tokens",
    "itl": "steps",
    "tpot": "steps",
    "e2el": "whole answers",
    "output_throughput": "output",
    "request_throughput": "output",
}
"""What a metric is about, by the beginning of its name. Of each the first that says something speaks."""


def disagreement(
    findings: Mapping[str, tuple[str, float]], runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
) -> list[str]:
    """Sentences; empty where metrics agree. `findings`: metric → (`faster` or `slower`, Δ in percent) of those that
    found a difference. `runs`: the facts of base and head, of every matched run."""
    spoken: dict[str, str] = {}
    for name in METRICS:
        about = next((words for start, words in _FAMILIES.items() if name.startswith(start)), None)
        if about is not None and name in findings and findings[name][0] in ("faster", "slower"):
            spoken.setdefault(about, name)
    better = [name for name in spoken.values() if findings[name][0] == "faster"]
    worse = [name for name in spoken.values() if findings[name][0] == "slower"]
    if not better or not worse:
        return []
    lines = [f"metrics disagree: {_listed(better, findings)} better, {_listed(worse, findings)} worse"]
    changed = _changes(runs)
    if not changed:
        return [*lines, "nothing in the records shows why"]
    shown = [name for name in FACTS if name in changed][:_MOST_FACTS]
    facts = "; ".join(_shown(FACTS[name], *changed[name]) for name in shown)
    why = _why(spoken, findings, changed)
    return [*lines, f"in the windows of every matched run: {facts}" + (f". {why}" if why else "")]


def _changes(runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, tuple[float, float]]:
    """Fact → means of base and head, of the facts that change to the same side in every matched run."""
    changed: dict[str, tuple[float, float]] = {}
    for name in FACTS:
        both = [(base[name], head[name]) for base, head in runs if name in base and name in head]
        if len(both) < len(runs) or not both:
            continue
        signs = {math.copysign(1, head - base) for base, head in both if head != base}
        base, head = (math.fsum(one[side] for one in both) / len(both) for side in (0, 1))
        apart = abs(head - base) >= LEAST_CHANGE * max(abs(base), abs(head))
        if len(signs) == 1 and all(one != other for one, other in both) and apart:
            changed[name] = (base, head)
    return changed


def _why(
    spoken: Mapping[str, str], findings: Mapping[str, tuple[str, float]], changed: Mapping[str, tuple[float, float]]
) -> str | None:
    """The sentence that ties them together, where there is one."""

    def grew(name: str) -> bool | None:
        return changed[name][1] > changed[name][0] if name in changed else None

    def better(about: str) -> bool | None:
        return findings[spoken[about]][0] == "faster" if about in spoken else None

    decoding = grew("decoding")
    if decoding is True and better("first tokens") is True and better("steps") is False:
        return "Requests are admitted earlier, so more of them share a step, and steps take longer"
    if decoding is False and better("first tokens") is False and better("steps") is True:
        return "Requests wait longer before they are admitted, so fewer of them share a step, and steps are shorter"
    if decoding is False and better("steps") is True and better("output") is False:
        return "Steps are shorter because fewer requests are in them: less comes out of each"
    if decoding is True and better("steps") is False and better("output") is True:
        return "Steps take longer because more requests are in them: more comes out of each"
    if grew("output_len") is not None:
        return "Answers are not of the same length: latencies of whole answers and rates are not of the same work"
    if grew("cached_share") is not None:
        return "The prefix cache does not give both the same: they do not compute the same prompts"
    return None


def _listed(names: Sequence[str], findings: Mapping[str, tuple[str, float]]) -> str:
    signed = (f"{findings[name][1]:+.1f}%".replace("-", "−") for name in names)
    return " and ".join(f"{METRICS[name].title} ({change})" for name, change in zip(names, signed, strict=True))


def _shown(fact: Fact, base: float, head: float) -> str:
    if fact.share:
        return f"{fact.title} {base:.1%} → {head:.1%}"
    unit = f" {fact.unit}" if fact.unit else ""
    return f"{fact.title} {base:,.{fact.digits}f} → {head:,.{fact.digits}f}{unit}"
