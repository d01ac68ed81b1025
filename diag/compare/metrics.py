"""The metrics that a comparison knows: names, titles, units, and which way is better. `compare/scores.py` measures
them; what the words mean (TTFT, ITL, …) is in `bench/metrics.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from atom.recipes.errors import UsageError

__all__ = ["METRICS", "PRIMARY_CHOICES", "Metric", "metric"]

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run, positive, compared as a ratio."""

    name: str
    title: str
    """As the head of a table's column, without the unit."""
    unit: str
    better: Better
    definition: str
    side: Literal["client", "server"] = "client"
    """Who measured it."""
    quantile: float | None = None
    """0..1, of a distribution; None: a mean or a rate."""


_ITL: Final = "gaps between arrivals of one stream, by the later one's arrival in the window"
_TTFT: Final = "time to first token of requests sent in the window"
_E2EL: Final = "last token-bearing chunk − sent, of requests sent in the window"

_ALL: Final = (
    Metric("itl_p50", "ITL p50", "ms", "lower", f"median of {_ITL}", quantile=0.5),
    Metric("itl_p99", "ITL p99", "ms", "lower", f"99th percentile of {_ITL}", quantile=0.99),
    Metric("itl_mean", "ITL mean", "ms", "lower", f"mean of {_ITL}"),
    Metric("tpot_mean", "TPOT mean", "ms", "lower", "mean time per output token of requests sent in the window"),
    Metric("ttft_mean", "TTFT mean", "ms", "lower", f"mean {_TTFT}"),
    Metric("ttft_p50", "TTFT p50", "ms", "lower", f"median {_TTFT}", quantile=0.5),
    Metric("ttft_p99", "TTFT p99", "ms", "lower", f"99th percentile of {_TTFT}", quantile=0.99),
    Metric("e2el_mean", "E2EL mean", "ms", "lower", f"mean of {_E2EL}"),
    Metric("e2el_p50", "E2EL p50", "ms", "lower", f"median of {_E2EL}", quantile=0.5),
    Metric("e2el_p99", "E2EL p99", "ms", "lower", f"99th percentile of {_E2EL}", quantile=0.99),
    Metric(
        *("output_throughput", "output", "tok/s", "higher"),
        "tokens that arrived in the window, of completed requests ÷ its length",
    ),
    Metric(
        *("request_throughput", "requests", "req/s", "higher"),
        "completed requests whose last token arrived in the window ÷ its length",
    ),
    Metric(
        *("input_throughput", "input", "tok/s", "higher"),
        "prompt tokens of completed requests whose first token arrived in the window ÷ its length",
    ),
    Metric(
        *("server_step_p50", "server step p50", "ms", "lower"),
        "median by second of the engine's step time, as its /metrics has it in the window",
        "server",
    ),
)

METRICS: Final[Mapping[str, Metric]] = {one.name: one for one in _ALL}
"""In the order of tables."""
PRIMARY_CHOICES: Final = tuple(one.name for one in _ALL if one.side == "client")
"""Those that may decide: the client has them of every server."""


def metric(name: str) -> Metric:
    """UsageError that lists the names if there is none of this one."""
    try:
        return METRICS[name]
    except KeyError:
        raise UsageError(f"there is no metric {name!r}; there are {', '.join(METRICS)}") from None
