"""How long each step of a request's life took, per rank: durations within one clock, from the events of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atom.diag.consensus.model import RankTrace, Recording, RequestEvent, Round
from atom.diag.consensus.waits import Quantiles, quantiles

__all__ = [
    "STEPS",
    "BlocksHeld",
    "Step",
    "VoteSpread",
    "blocks_held",
    "durations",
    "lifecycle",
    "rounds_of",
    "vote_spread",
]


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    """As a sentence has it."""
    begin: str
    end: str
    """Events that it lies between."""
    kind: str
    """`work`, `queue` (it grows with whatever is slow behind it), or `agreement`."""


STEPS: Final = (
    Step("admission", "enqueue", "activate", "queue"),
    Step("context scheduling", "activate", "forward_start", "queue"),
    Step("context forward", "forward_start", "forward_end", "work"),
    Step("sender submission", "forward_end", "send_submit", "work"),
    Step("transfer", "send_submit", "transfer_done", "work"),
    Step("local vote", "transfer_done", "vote", "queue"),
    Step("vote to commit", "vote", "commit", "agreement"),
    Step("commit to apply", "commit", "apply", "queue"),
    Step("release", "apply", "release", "queue"),
    Step("cleanup", "release", "cleanup", "queue"),
)
"""In the order of a request's life."""

Times = dict[str, int]


def rounds_of(trace: RankTrace) -> dict[Round, Times]:
    """Per request and epoch: event → time. The first of each, but the last `forward_end`: a prompt in chunks has
    several."""
    found: dict[Round, Times] = {}
    for event in trace.requests:
        times = found.setdefault(event.round, {})
        if event.name == "forward_end" or event.name not in times:
            times[event.name] = event.t
    return found


def durations(recording: Recording) -> dict[str, dict[int, list[float]]]:
    """Step → rank → its durations in seconds, for steps that were recorded at all."""
    found: dict[str, dict[int, list[float]]] = {step.name: {} for step in STEPS}
    for trace in recording.ranks:
        computed = _forwards(trace.requests)
        for round_, times in rounds_of(trace).items():
            for step in STEPS:
                if step.begin == "forward_start":
                    value = computed.get(round_)
                else:
                    begin, end = times.get(step.begin), times.get(step.end)
                    value = end - begin if begin is not None and end is not None else None
                if value is not None and value >= 0:
                    found[step.name].setdefault(trace.rank, []).append(value / 1e9)
    return {name: ranks for name, ranks in found.items() if ranks}


def lifecycle(recording: Recording) -> dict[str, dict[int, Quantiles]]:
    """The same, summed up."""
    found = durations(recording).items()
    return {name: {rank: quantiles(some) for rank, some in ranks.items()} for name, ranks in found}


def _forwards(events: Sequence[RequestEvent]) -> dict[Round, int]:
    """Time in the forward pass, all chunks of a prompt together."""
    started: dict[Round, int] = {}
    total: dict[Round, int] = {}
    for event in events:
        if event.name == "forward_start":
            started[event.round] = event.t
        elif event.name == "forward_end" and (start := started.pop(event.round, None)) is not None:
            total[event.round] = total.get(event.round, 0) + event.t - start
    return total


# ---- votes of one round, where the ranks share a clock


@dataclass(frozen=True, slots=True)
class VoteSpread:
    """How far apart the ranks voted on one request. Only of ranks that share a clock."""

    spread: Quantiles
    """Last vote − first vote."""
    decision: Quantiles
    """Last vote → the first commit anywhere."""
    last: dict[int, int]
    """Rank → requests on which it voted last."""


def vote_spread(recording: Recording) -> VoteSpread | None:
    if not recording.one_clock or len(recording.ranks) < 2:
        return None
    votes: dict[Round, dict[int, int]] = {}
    commits: dict[Round, int] = {}
    for trace in recording.ranks:
        for round_, times in rounds_of(trace).items():
            if (t := times.get("vote")) is not None:
                votes.setdefault(round_, {})[trace.rank] = t
            if (t := times.get("commit")) is not None:
                commits[round_] = min(commits.get(round_, t), t)
    whole = {round_: some for round_, some in votes.items() if len(some) == len(recording.ranks)}
    if not whole:
        return None
    last: dict[int, int] = {}
    for some in whole.values():
        rank = max(some, key=lambda rank: some[rank])
        last[rank] = last.get(rank, 0) + 1
    decided = [commits[round_] - max(some.values()) for round_, some in whole.items() if round_ in commits]
    return VoteSpread(
        quantiles([(max(some.values()) - min(some.values())) / 1e9 for some in whole.values()]),
        quantiles([max(one, 0) / 1e9 for one in decided]),
        dict(sorted(last.items())),
    )


# ---- what it costs to keep blocks


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """KV blocks of one rank."""

    rank: int
    most: int | None
    block_s: float | None
    """∫ blocks held over time, block-seconds; None where it was not recorded."""
    after_transfer_block_s: float | None
    """Of that, after the request's own transfer was done: what waiting for the commit costs."""


def blocks_held(recording: Recording) -> list[BlocksHeld]:
    """Of the ranks that recorded any."""
    found = []
    for trace in recording.ranks:
        after = _after_transfer(trace)
        if not trace.held and after is None:
            continue
        total = None
        if trace.held:
            held = sorted(trace.held)
            times = np.array([*(one.t for one in held), max(trace.stop, held[-1].t)], dtype=np.float64)
            blocks = np.array([one.blocks for one in held], dtype=np.float64)
            total = float((np.diff(times) * blocks).sum() / 1e9)
        most = max((one.blocks for one in trace.held), default=None)
        found.append(BlocksHeld(trace.rank, most, total, after))
    return found


def _after_transfer(trace: RankTrace) -> float | None:
    done: dict[Round, int] = {}
    total, known = 0.0, False
    for event in trace.requests:
        if event.name == "transfer_done" or (event.name == "vote" and event.round not in done):
            done[event.round] = event.t
        elif event.name == "release" and event.value is not None and event.round in done:
            known = True
            total += event.value * max(event.t - done.pop(event.round), 0) / 1e9
    return total if known else None
