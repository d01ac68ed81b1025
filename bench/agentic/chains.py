"""Finds the agents in a recording that does not name them: requests of parallel agents, written down as one list.

A request goes on with the conversation whose last prompt it begins with. Where it shares only a part of a prompt, it is
either another agent that forked off there, or the same one after its history was compacted: the latter if nobody ever
goes on from the longer history. The rules are those by which AIPerf splits these traces, so that both replay the same
conversations.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Recorded", "common_prefix", "split_chains"]

_SLACK_S: Final = 1e-6
_SEAM_GAP_S: Final = 3600.0
_SEAM_OVERLAP: Final = 0.5
"""A compacted history goes on soon, or keeps most of its blocks; what does neither is another conversation."""
MAX_COMPARED: Final = 2_000_000_000
"""Blocks of one session's prompts that are compared at most, each comparison counted as 1,000 more. Whoever wrote the
recording decides how many there are: agents in parallel are compared each with each."""
_PREAMBLE_OUTPUT: Final = 64
"""A first request of its own (a title for the session) has an answer no longer than this, or shares no block at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """What tells conversations apart."""

    start_s: float
    end_s: float
    model: str
    output_len: int
    blocks: npt.NDArray[np.int64]
    """[blocks] hash ids of the prompt; empty where they were not recorded: such a request stays in the first chain."""


def common_prefix(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Length of it."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def split_chains(requests: Sequence[Recorded]) -> list[list[int]]:
    """Places in `requests` of each conversation's requests, in time order: the main one's first, then the others' by
    their beginning. ValueError if that takes too many comparisons."""
    if not requests:
        return []
    order = sorted(range(len(requests)), key=lambda i: (requests[i].start_s, i))
    preamble = _preamble(requests, order)
    splitter = _Splitter(requests)
    for place in order[preamble:]:
        splitter.add(place)
    splitter.join_seams()
    main = splitter.owner(order[preamble])
    chains = [splitter.chains[main].places + order[:preamble]]
    others = [chain for number, chain in enumerate(splitter.chains) if number != main and chain.joined is None]
    chains += [chain.places for chain in others]

    def when(place: int) -> tuple[float, int]:
        return requests[place].start_s, place

    for chain in chains:
        chain.sort(key=when)
    return [chains[0], *sorted(chains[1:], key=lambda chain: when(chain[0]))]


def _preamble(requests: Sequence[Recorded], order: list[int]) -> int:
    """1 if the first request is no part of any conversation, else 0. It is replayed with the main one."""
    first = requests[order[0]]
    others = [requests[place].blocks for place in order[1:]]
    if not others or not len(first.blocks):
        return 0
    if any(common_prefix(first.blocks, blocks) for blocks in others):
        return 0
    alone = not np.isin(first.blocks, np.concatenate(others)).any()
    return int(first.output_len <= _PREAMBLE_OUTPUT or bool(alone))


@dataclass(slots=True, eq=False)
class _Chain:
    places: list[int]
    tail: int | None
    """Its last request with blocks."""
    shared: int = 0
    """Blocks that its first prompt shared with the one it forked off."""
    joined: int | None = None
    """The chain that it turned out to be the continuation of."""


class _Splitter:
    def __init__(self, requests: Sequence[Recorded]) -> None:
        self._requests = requests
        self.chains: list[_Chain] = []
        self._chain_of: dict[int, int] = {}
        self._forks: dict[int, list[int]] = {}
        """Request → chains that forked off it."""
        self._tails: dict[int, dict[int, list[int]]] = {}
        """Length of a last prompt → its last block → the chains, in order."""
        self._compared = 0

    def owner(self, place: int) -> int:
        number = self._chain_of[place]
        while (joined := self.chains[number].joined) is not None:
            number = joined
        return number

    def add(self, place: int) -> None:
        """The next request in time."""
        request = self._requests[place]
        if not len(request.blocks):
            if not self.chains:
                self.chains.append(_Chain([], None))
            self._append(0, place)
            return
        number = self._continued(request)
        if number is None and all(chain.tail is None for chain in self.chains):
            number = 0
            if not self.chains:
                self.chains.append(_Chain([], None))
        if number is None:
            number = self._fork(request)
        self._append(number, place)

    def _append(self, number: int, place: int) -> None:
        chain = self.chains[number]
        chain.places.append(place)
        self._chain_of[place] = number
        if len(self._requests[place].blocks):
            if chain.tail is not None:
                self._forget_tail(number, self._requests[chain.tail].blocks)
            chain.tail = place
            blocks = self._requests[place].blocks
            bisect.insort(self._tails.setdefault(len(blocks), {}).setdefault(int(blocks[-1]), []), number)

    def _forget_tail(self, number: int, blocks: npt.NDArray[np.int64]) -> None:
        ends = self._tails[len(blocks)]
        ends[int(blocks[-1])].remove(number)
        if not ends[int(blocks[-1])]:
            del ends[int(blocks[-1])]
        if not ends:
            del self._tails[len(blocks)]

    def _shared(self, a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
        self._compared += 1000 + min(len(a), len(b))
        if self._compared > MAX_COMPARED:
            raise ValueError(
                f"its {len(self._requests):,} requests are of too many agents at once to tell which goes on with which"
            )
        return common_prefix(a, b)

    def _continued(self, request: Recorded) -> int | None:
        """The chain with the longest last prompt that `request` begins with, of its model, and over by then."""
        for size in sorted((size for size in self._tails if size <= len(request.blocks)), reverse=True):
            for number in self._tails[size].get(int(request.blocks[size - 1]), ()):
                last = self.chains[number].tail
                assert last is not None
                tail = self._requests[last]
                if (
                    tail.model == request.model
                    and tail.end_s <= request.start_s + _SLACK_S
                    and self._shared(tail.blocks, request.blocks) == size
                ):
                    return number
        return None

    def _fork(self, request: Recorded) -> int:
        """A new chain, off the last prompt that shares most with it (of several, the longest)."""
        source, most = None, (0, 0)
        for chain in self.chains:
            if chain.tail is None:
                continue
            tail = self._requests[chain.tail].blocks
            shared = self._shared(tail, request.blocks)
            if shared and (shared, len(tail)) > most:
                source, most = chain.tail, (shared, len(tail))
        number = len(self.chains)
        self.chains.append(_Chain([], None, most[0]))
        if source is not None:
            self._forks.setdefault(source, []).append(number)
        return number

    def join_seams(self) -> None:
        """Where nobody went on from a prompt, one of the chains that forked off it is its conversation's continuation;
        the others are looked at again from that one's end."""
        open_ends = sorted(self._forks)
        seen: set[int] = set()
        while open_ends:
            source = heapq.heappop(open_ends)
            if source in seen:
                continue
            seen.add(source)
            owner = self.owner(source)
            if self.chains[owner].tail != source:
                continue
            forks = [number for number in self._forks[source] if self.chains[number].joined is None]
            chosen = self._continuation(source, forks)
            if chosen is None:
                continue
            self.chains[owner].places += self.chains[chosen].places
            self.chains[owner].tail = end = self.chains[chosen].tail
            self.chains[chosen].joined = owner
            assert end is not None
            if self._look_again(end, [number for number in forks if number != chosen]):
                seen.discard(end)
                heapq.heappush(open_ends, end)

    def _continuation(self, source: int, forks: list[int]) -> int | None:
        before = self._requests[source]

        def goes_on(number: int) -> bool:
            chain = self.chains[number]
            first = self._requests[chain.places[0]]
            late = first.start_s - before.end_s > _SEAM_GAP_S
            return (
                chain.shared > 0
                and first.model == before.model
                and before.end_s <= first.start_s + _SLACK_S
                and not (late and chain.shared / len(before.blocks) < _SEAM_OVERLAP)
            )

        def rank(number: int) -> tuple[int, float, int]:
            chain = self.chains[number]
            return chain.shared, -self._requests[chain.places[0]].start_s, -number

        return max(filter(goes_on, forks), key=rank, default=None)

    def _look_again(self, end: int, forks: list[int]) -> bool:
        found = False
        for number in forks:
            chain = self.chains[number]
            shared = self._shared(self._requests[end].blocks, self._requests[chain.places[0]].blocks)
            if shared:
                chain.shared = shared
                self._forks.setdefault(end, []).append(number)
                found = True
        return found
