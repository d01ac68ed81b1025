"""How sure a figure of one run is: the standard error of its logarithm, by bootstrap over blocks of time.

Requests of one server share its steps, so they say less than their number promises; blocks of time longer than a
request are about independent. Blocks are drawn with replacement; a quantile of what is drawn comes from counts in fine
bins around it (at ranks of the whole sample), which costs the same however many samples there are.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atom.bench.metrics import FloatArray
from atom.bench.slices import IntArray
from atom.diag.compare.window import Window

__all__ = ["Blocks"]

DRAWS: Final = 200
MOST_BLOCKS: Final = 20
"""More would be shorter, and less independent: what disturbs a server for a second would not be seen as one thing."""
LEAST_BLOCKS: Final = 10
_SEED: Final = 0x5EED
"""The same draws for every run: figures do not change from one reading to the next."""
_BINS: Final = 128


class Blocks:
    """The blocks of one window, and draws of them."""

    def __init__(self, window: Window, longest_s: float) -> None:
        """`longest_s`: what a block should cover, such as a request; there are at least ten blocks anyway."""
        fitting = int(window.seconds / longest_s) if longest_s > 0 else MOST_BLOCKS
        self.count = min(max(fitting, LEAST_BLOCKS), MOST_BLOCKS)
        self._window = window
        drawn = np.random.default_rng(_SEED).multinomial(self.count, [1 / self.count] * self.count, DRAWS)
        self._weights: FloatArray = drawn.astype(np.float64)

    def of(self, moments_ns: IntArray) -> IntArray:
        """The block that each moment lies in. All lie in the window."""
        width = self._window.end_ns - self._window.start_ns
        places: IntArray = (moments_ns - self._window.start_ns) * self.count // width
        return places

    def of_one(self, moment_ns: int) -> int:
        window = self._window
        return (moment_ns - window.start_ns) * self.count // (window.end_ns - window.start_ns)

    def se_of_total(self, blocks: IntArray, amounts: FloatArray) -> float | None:
        """Of log(Σ amounts)."""
        sums = np.bincount(blocks, weights=amounts, minlength=self.count)
        return self._se(self._weights @ sums, sums)

    def se_of_mean(self, blocks: IntArray, values: FloatArray) -> float | None:
        """Of log(mean of the values)."""
        sums = np.bincount(blocks, weights=values, minlength=self.count)
        numbers = np.bincount(blocks, minlength=self.count)
        with np.errstate(invalid="ignore", divide="ignore"):
            return self._se((self._weights @ sums) / (self._weights @ numbers), numbers)

    def se_of_quantile(self, blocks: IntArray, values: FloatArray, q: float) -> float | None:
        """Of log(the `q`-quantile of the values), 0 < q < 1."""
        if len(values) < 2:
            return None
        edges = self._edges(values, q)
        if len(edges) < 2:
            return 0.0
        bins = np.searchsorted(edges, values, side="left") + blocks * (len(edges) + 1)
        counts = np.bincount(bins, minlength=self.count * (len(edges) + 1)).reshape(self.count, -1)
        below = np.cumsum(self._weights @ counts, axis=1)
        """[draws, edges + 1] samples up to each edge; the last column is their number."""
        some = below[below[:, -1] > 0]
        wanted = q * some[:, -1]
        at = np.clip(np.argmax(some >= wanted[:, None], axis=1), 1, len(edges) - 1)
        rows = np.arange(len(some))
        low, high = some[rows, at - 1], some[rows, at]
        share = np.clip((wanted - low) / np.maximum(high - low, 1.0), 0.0, 1.0)
        return self._se(edges[at - 1] + share * (edges[at] - edges[at - 1]), counts.sum(axis=1))

    @staticmethod
    def _edges(values: FloatArray, q: float) -> FloatArray:
        """At equal ranks over all, and finer around the quantile."""
        spread = min(q, 1 - q)
        ranks = np.concatenate([np.linspace(0, 1, _BINS), np.linspace(q - spread, q + spread, _BINS)])
        edges: FloatArray = np.unique(np.quantile(values, np.clip(ranks, 0.0, 1.0)))
        return edges

    def _se(self, drawn: FloatArray, per_block: FloatArray | IntArray) -> float | None:
        filled = int(np.count_nonzero(per_block))
        usable = drawn[np.isfinite(drawn) & (drawn > 0)]
        if filled < 2 or len(usable) < DRAWS // 2:
            return None
        # Draws with replacement from n blocks vary less than new blocks would, by (n − 1)/n.
        return float(np.log(usable).std() * np.sqrt(filled / (filled - 1)))
