"""Which EngineCore gets which request, and when: load-balancing policies and the backlog of lazy dispatch.

With several cores a request leaves only for a core that has room: at most `limit` requests are in a core's hand, the
others are held back here, first come first served, and leave as requests end. Decided as late as that, a request meets
the load as it is then; decided on arrival, long answers would pile up behind one core while another runs dry.

Pure bookkeeping, not thread-safe: sockets, locks and what a request is are `engine/core_manager.py`'s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from atom.engine.config import LoadBalance

__all__ = ["Dispatcher", "EngineLoad"]

T = TypeVar("T")


@dataclass(slots=True)
class EngineLoad:
    """What one core has in hand."""

    requests: int = 0
    tokens: int = 0
    """Sum of the costs of those requests."""


_POLICIES: Final[dict[LoadBalance, Callable[[EngineLoad], tuple[int, int]]]] = {
    "round_robin": lambda load: (0, 0),
    "least_requests": lambda load: (load.requests, load.tokens),
    "least_tokens": lambda load: (load.tokens, load.requests),
}
"""The core of the lowest value is chosen; of equals, the next one in turn."""


@dataclass(slots=True)
class _InHand:
    engine_index: int
    cost: int


class Dispatcher(Generic[T]):
    """Requests by number. Each is added once, leaves once through `take`, and is released once; what is no longer, or
    not yet, known is ignored by `release`, so that finishing and aborting may meet."""

    def __init__(self, num_engines: int, policy: LoadBalance, limit: int | None) -> None:
        """`limit`: requests in one core's hand at most; None: without bound."""
        assert num_engines >= 1
        assert limit is None or limit >= 1
        self.loads = [EngineLoad() for _ in range(num_engines)]
        self._value = _POLICIES[policy]
        self._limit = limit
        self._turn = 0
        self._backlog: OrderedDict[int, tuple[T, int]] = OrderedDict()
        self._in_hand: dict[int, _InHand] = {}
        self._stopped = False

    @property
    def num_held_back(self) -> int:
        return len(self._backlog)

    @property
    def num_in_hand(self) -> int:
        return len(self._in_hand)

    def add(self, number: int, request: T, cost: int) -> None:
        """Put a request behind all that are held back; `take` says whether it leaves at once. `cost`: its tokens."""
        assert number not in self._in_hand
        assert number not in self._backlog
        self._backlog[number] = (request, cost)

    def take(self) -> tuple[int, int, T] | None:
        """Number, core and contents of the next request to leave; None when none is held back or no core has room."""
        if not self._backlog or self._stopped:
            return None
        engine_index = self._choose()
        if engine_index is None:
            return None
        number, (request, cost) = self._backlog.popitem(last=False)
        self._in_hand[number] = _InHand(engine_index, cost)
        load = self.loads[engine_index]
        load.requests += 1
        load.tokens += cost
        self._turn = (engine_index + 1) % len(self.loads)
        return number, engine_index, request

    def _choose(self) -> int | None:
        best: int | None = None
        for offset in range(len(self.loads)):
            index = (self._turn + offset) % len(self.loads)
            load = self.loads[index]
            if self._limit is not None and load.requests >= self._limit:
                continue
            if best is None or self._value(load) < self._value(self.loads[best]):
                best = index
        return best

    def put_back(self, number: int, request: T) -> None:
        """A request that `take` gave could not leave: it is the next one again."""
        in_hand = self._in_hand[number]
        self._uncount(number)
        self._backlog[number] = (request, in_hand.cost)
        self._backlog.move_to_end(number, last=False)

    def release(self, number: int) -> int | None:
        """A request is over. Returns the core that had it; None when it was held back or is not known."""
        self._backlog.pop(number, None)
        return self._uncount(number)

    def _uncount(self, number: int) -> int | None:
        in_hand = self._in_hand.pop(number, None)
        if in_hand is None:
            return None
        load = self.loads[in_hand.engine_index]
        load.requests -= 1
        load.tokens -= in_hand.cost
        return in_hand.engine_index

    def stop(self) -> None:
        """Let nothing leave any more."""
        self._stopped = True
