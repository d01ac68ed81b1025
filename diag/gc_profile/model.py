"""What a profile says: the dataclasses that the analysis fills, the tables print and `--json` writes.

One `Profile` is one run of one server (an arm). How the numbers are made: `windows.py`, `growth.py`, `attribution.py`,
`causes.py`, put together by `profile.py`; nothing is computed here. None everywhere means "not seen", never zero.
Times called `_s` are seconds since the start of the observed span (the measured phase of a load, if there was one).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    "Attribution",
    "Cause",
    "CauseKind",
    "Growth",
    "GrowthVerdict",
    "HookedProcess",
    "Profile",
    "SlowEvents",
    "Totals",
    "Window",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One row of the table: [start_s, end_s)."""

    start_s: float
    end_s: float
    gen2_share: float | None = None
    """Σ pause of old-object passes of the API process within the window ÷ how much of it the hook watched, 0..1."""
    gen2_passes: int | None = None
    gen2_mean_pause_ms: float | None = None
    gen2_max_pause_ms: float | None = None
    metrics_p50_ms: float | None = None
    metrics_failed: int | None = None
    """Scrapes of the window without a usable answer."""
    metrics_series: int | None = None
    metrics_body_bytes: int | None = None
    """Series and body of the window's last good scrape."""
    rss_mb: float | None = None
    """API process, last sample of the window, MB = 2^20 bytes."""
    api_cpu: float | None = None
    """CPU seconds per second."""
    threads: int | None = None
    health_p50_ms: float | None = None
    health_max_ms: float | None = None
    """`/health` at 10 Hz: how long a trivial request waits for the event loop. A probe cut by its timeout counts."""
    requests: int | None = None
    """Completed in the window."""
    requests_per_s: float | None = None
    ttft_mean_ms: float | None = None
    ttft_p99_ms: float | None = None
    ttft_n: int | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    running_mean: float | None = None
    prompt_tok_per_s: float | None = None
    output_tok_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The observed span as a whole."""

    duration_s: float
    gen2_passes: int | None = None
    gen2_seconds: float | None = None
    gen2_share: float | None = None
    gen2_mean_pause_ms: float | None = None
    gen2_max_pause_ms: float | None = None
    young_passes: int | None = None
    young_seconds: float | None = None
    metrics_p50_ms: float | None = None
    metrics_series: int | None = None
    metrics_body_bytes: int | None = None
    """Series and body at the end."""
    metrics_scrapes: int | None = None
    metrics_failed: int | None = None
    rss_mb: float | None = None
    requests: int | None = None
    requests_failed: int | None = None
    requests_per_s: float | None = None
    ttft_mean_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    output_tok_per_s: float | None = None
    hook_cpu_share: float | None = None
    """CPU time of the hook itself ÷ duration, API process."""


class GrowthVerdict(StrEnum):
    FLAT = "flat"
    GROWS = "grows"
    NOT_ENOUGH_DATA = "not enough data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Whether one quantity rises while the server serves; the warm-up is left out."""

    quantity: str
    """gen2_pause_ms, gen2_share, metrics_ms, metrics_series, metrics_body_bytes, rss_mb, threads, …"""
    label: str
    verdict: GrowthVerdict
    unit: str
    """Of the quantity; the slope is `unit` per `per`."""
    per: str
    """"1,000 requests", or "minute" where the number of requests is not known."""
    slope: float | None = None
    slope_low: float | None = None
    slope_high: float | None = None
    """The interval of the slope (block bootstrap); its level is in `confidence`."""
    confidence: float | None = None
    first: float | None = None
    last: float | None = None
    """What was seen in the first and in the last sixth of what was used: the median, or the mean where it is rare large
    values that count (share, `/health`, TTFT)."""
    n: int = 0
    blocks: int = 0
    excludes_rise: bool | None = None
    """Of a flat one that shows no rise: whether the interval excludes a rise that would count."""
    reason: str = ""
    """Why this verdict, in one clause."""


class CauseKind(StrEnum):
    HEAP_GROWS = "heap grows with requests served"
    SERIES_PER_REQUEST = "a metric family has one series per request"
    RENDER_ON_LOOP = "scrapes hold up the event loop"
    ALLOCATION_PATTERN = "allocation pattern"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    kind: CauseKind
    statement: str
    """One sentence with its numbers, for the reader."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""
    """The next step, in one clause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowEvents:
    """The slow first tokens, or the slow chunk gaps, and what the API process did meanwhile.

    An event's interval is sent → first token, or chunk → next chunk. It counts as in a pass (a render) if passes
    (renders) cover at least half of its excess over the typical interval. Expected: the same after the pauses are
    shifted circularly in time by a random offset, mean over the shifts.
    """

    kind: str
    """"first token" or "chunk gap"."""
    threshold_ms: float
    typical_ms: float
    events: int
    slow: int
    in_pass: int | None
    in_render: int | None
    in_both: int | None
    """Of `slow`; in_pass and in_render each count those in both too. None without a record of passes (of scrapes)."""
    neither: int
    """In none of the two, as far as they were recorded."""
    expected_in_pass: float | None
    expected_in_render: float | None
    lift_pass: float | None
    """in_pass ÷ expected; about 1 for pauses that have nothing to do with latency. None where nothing is expected."""
    lift_pass_low: float | None
    lift_pass_high: float | None
    """95% interval of what unrelated pauses would give as lift."""
    lift_render: float | None
    lift_render_low: float | None
    lift_render_high: float | None
    p_pass: float | None
    p_render: float | None
    """(Shifts with at least as many + 1) ÷ (shifts + 1)."""
    excess_s: float
    """Σ excess over the typical interval of the slow events."""
    excess_in_pass_s: float | None
    excess_in_render_s: float | None
    """Of that, as much as passes (renders) covered within each event's interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    first_tokens: SlowEvents | None
    chunk_gaps: SlowEvents | None
    shifts: int
    note: str = ""
    """Why there is none, or what to keep in mind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedProcess:
    """A process of the server."""

    pid: int
    role: str
    command: str
    hooked: bool
    reason: str = ""
    """Why the hook is not in it."""
    python: str | None = None
    collector: str | None = None
    thresholds: tuple[int, ...] | None = None
    frozen: int | None = None
    """Objects in `gc.freeze`, last seen."""
    action: str | None = None
    """What-if action that the hook carried out: `freeze`, `disable`, `threshold:…`."""
    gen2_passes: int | None = None
    gen2_seconds: float | None = None
    gen2_share: float | None = None
    rss_mb: float | None = None
    hook_cpu_share: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One run."""

    label: str
    directory: str
    simulated: bool
    """No model was run: figures are those of a step-time model."""
    old_object_passes: str
    """What is counted as gen 2 here, in words: `gen-2 passes`, `increments and full passes`, …"""
    window_s: float
    windows: tuple[Window, ...]
    totals: Totals
    growth: Mapping[str, Growth]
    attribution: Attribution
    causes: tuple[Cause, ...]
    verdict: str
    """One or two sentences: is garbage collection the problem, and what is."""
    is_problem: bool | None
    """Whether it is; None where it could not be told."""
    processes: tuple[HookedProcess, ...]
    few_passes: tuple[tuple[float, float], ...] = ()
    """Each pass over old objects, where they are too few for a trend (8 at most): when it began in seconds, and its
    pause in ms."""
    growing_families: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Metric family → series at the first and the last scrape, of those that grew."""
    validity: str | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: the totals' fields stand at the top level beside `windows`, `growth`, `attribution`, …"""
        raw = asdict(self)
        return {**raw.pop("totals"), **raw}
