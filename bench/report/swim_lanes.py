"""Swim lanes of a run that replayed session trees, as an SVG that needs no script: a lane per slot of --concurrency, a
bar per request, time to the right.

A bar is coloured by the depth of its agent; its pale part is the time to the first token. The shade behind it is its
session, so what is not covered by a bar is a pause of the recording (or a wait for a sub-agent). Requests of one lane
that overlap, of sub-agents for instance, lie below each other. Bounded: `MAX_LANES` lanes, `MAX_REQUESTS` bars.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from atom.bench.agentic.tags import AgentTags
from atom.bench.records import Outcome, RequestRecord
from atom.bench.report.axis import short, ticks

__all__ = ["swim_lanes"]

MAX_LANES: Final = 24
MAX_REQUESTS: Final = 1500
MAX_ROWS: Final = 8
"""Of one lane; requests beyond them lie on the last."""
WIDTH: Final = 1120
LEFT: Final = 58
RIGHT: Final = 12
TOP: Final = 6
ROW: Final = 11.0
BAR: Final = 9.0
LANE_GAP: Final = 7.0
AXIS: Final = 36
DEEPEST: Final = 3
"""Depths from here on have one colour."""
MIN_BAR: Final = 0.8
_Scale = Callable[[float], float]
"""Seconds → pixels."""
_LEGEND: Final = ("main agent", "sub-agent", "its sub-agents", "deeper")


@dataclass(frozen=True, slots=True)
class _Bar:
    record: RequestRecord
    tags: AgentTags
    begin: float
    first: float | None
    end: float
    row: int


def swim_lanes(records: Sequence[RequestRecord], start_ns: int, end_ns: int) -> str:
    """Caption, legend and SVG; "" for a run without session trees. `records` of any phase; seconds count from the
    start of the measured one."""
    found = _requests(records, start_ns, end_ns)
    if not found:
        return ""
    lanes = _lanes(found)
    shown = dict(list(lanes.items())[:MAX_LANES])
    end_s, cut = (end_ns - start_ns) / 1e9, None
    begins = sorted((record.sent_ns or 0) for requests in shown.values() for record, _ in requests)
    if len(begins) > MAX_REQUESTS:
        end_s = cut = (begins[MAX_REQUESTS] - start_ns) / 1e9
    begin_s = min(0.0, (begins[0] - start_ns) / 1e9)
    bars = {name: _stacked(requests, start_ns, end_s) for name, requests in shown.items()}
    svg = "\n".join(_svg(bars, begin_s, max(end_s, begin_s + 1e-3)))
    depths = {min(bar.tags.depth, DEEPEST) for lane in bars.values() for bar in lane}
    return f'{_caption(len(shown), len(lanes), cut)}\n{_legend(depths)}\n<div class="wide-scroll">{svg}</div>'


def _requests(records: Sequence[RequestRecord], start_ns: int, end_ns: int) -> list[tuple[RequestRecord, AgentTags]]:
    if end_ns <= start_ns:
        return []
    return [
        (record, tags)
        for record in records
        if record.sent_ns is not None and record.end_ns is not None and (tags := AgentTags.of(record)) is not None
    ]


def _lanes(
    found: Sequence[tuple[RequestRecord, AgentTags]],
) -> dict[str, list[tuple[RequestRecord, AgentTags]]]:
    """Lane → its requests. A client that names no lanes has its sessions put into as few as hold them."""
    lanes: dict[str, list[tuple[RequestRecord, AgentTags]]] = defaultdict(list)
    if all(record.lane is not None for record, _ in found):
        for record, tags in sorted(found, key=lambda one: one[0].lane or 0):
            lanes[str(record.lane)].append((record, tags))
        return lanes
    trees: dict[str, list[tuple[RequestRecord, AgentTags]]] = defaultdict(list)
    for record, tags in found:
        trees[tags.root].append((record, tags))
    spans = {
        root: (min(r.sent_ns or 0 for r, _ in of), max(r.end_ns or 0 for r, _ in of)) for root, of in trees.items()
    }
    free: list[tuple[int, int]] = []  # (when a lane is free, its number)
    for root, (begin, end) in sorted(spans.items(), key=lambda one: one[1]):
        number = heapq.heappop(free)[1] if free and free[0][0] <= begin else len(lanes)
        heapq.heappush(free, (end, number))
        lanes[str(number)] += trees[root]
    return lanes


def _stacked(requests: Sequence[tuple[RequestRecord, AgentTags]], start_ns: int, end_s: float) -> list[_Bar]:
    """The requests of one lane up to `end_s`, each in the first row that is free."""
    free: list[int] = []
    bars = []
    for record, tags in sorted(requests, key=lambda one: one[0].sent_ns or 0):
        assert record.sent_ns is not None
        assert record.end_ns is not None
        begin = (record.sent_ns - start_ns) / 1e9
        if begin >= end_s:
            break
        row = next((row for row, until in enumerate(free) if until <= record.sent_ns), len(free))
        if row == len(free) and row < MAX_ROWS:
            free.append(record.end_ns)
        row = min(row, MAX_ROWS - 1)
        free[row] = max(free[row], record.end_ns)
        first = None if record.first_ns is None else (record.first_ns - start_ns) / 1e9
        bars.append(_Bar(record, tags, begin, first, (record.end_ns - start_ns) / 1e9, row))
    return bars


def _svg(lanes: dict[str, list[_Bar]], begin_s: float, end_s: float) -> Iterator[str]:
    rows = {name: max((bar.row for bar in bars), default=0) + 1 for name, bars in lanes.items()}
    base = TOP + sum(count * ROW + LANE_GAP for count in rows.values())

    def x(moment: float) -> float:
        share = (moment - begin_s) / (end_s - begin_s)
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    yield (
        f'<svg class="timeline lanes" viewBox="0 0 {WIDTH} {base + AXIS:.0f}" role="img" '
        'aria-label="requests of each lane over time">'
    )
    for moment in ticks(begin_s, end_s, 12):
        at = x(moment)
        yield f'<line class="gridline" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{base:.0f}"/>'
        yield f'<text x="{at:.1f}" y="{base + 15:.0f}" text-anchor="middle">{short(moment)}</text>'
    if begin_s < 0:
        at = x(0.0)
        yield f'<rect class="shade" x="{LEFT}" y="0" width="{at - LEFT:.1f}" height="{base:.0f}"/>'
        yield f'<line class="phase" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{base:.0f}"/>'
    yield (
        f'<text x="{WIDTH - RIGHT}" y="{base + 31:.0f}" text-anchor="end">seconds since the measured phase began</text>'
    )
    top = float(TOP)
    for name, bars in lanes.items():
        yield f'<text x="{LEFT - 8}" y="{top + ROW - 2:.1f}" text-anchor="end">{escape(name)}</text>'
        yield from _sessions(bars, x, top, rows[name] * ROW)
        for bar in bars:
            yield from _bar(bar, x, top + bar.row * ROW)
        yield from _changes(bars, x, top, rows[name] * ROW)
        top += rows[name] * ROW + LANE_GAP
    yield "</svg>"


def _sessions(bars: Sequence[_Bar], x: _Scale, top: float, height: float) -> Iterator[str]:
    spans: dict[str, tuple[float, float]] = {}
    for bar in bars:
        begin, end = spans.get(bar.tags.root, (bar.begin, bar.end))
        spans[bar.tags.root] = min(begin, bar.begin), max(end, bar.end)
    for root, (begin, end) in spans.items():
        left, width = x(begin), x(end) - x(begin)
        title = escape(f"session {root[:60]}\n{short(begin)} to {short(end)} s")
        yield (
            f'<rect class="session" x="{left:.1f}" y="{top - 2:.1f}" width="{max(width, MIN_BAR):.1f}" '
            f'height="{height + 2:.1f}"><title>{title}</title></rect>'
        )


def _changes(bars: Sequence[_Bar], x: _Scale, top: float, height: float) -> Iterator[str]:
    """A line where the lane takes up another session."""
    seen: set[str] = set()
    for bar in bars:
        if seen and bar.tags.root not in seen:
            at = x(bar.begin)
            yield f'<line class="change" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4:.1f}" y2="{top + height + 1:.1f}"/>'
        seen.add(bar.tags.root)


def _bar(bar: _Bar, x: _Scale, y: float) -> Iterator[str]:
    left, right = x(bar.begin), x(bar.end)
    failed = bar.record.outcome != Outcome.COMPLETED
    color = "f4" if failed else f"f{min(bar.tags.depth, DEEPEST)}"
    first = right if bar.first is None else min(max(x(bar.first), left), right)
    yield f"<g><title>{escape(_said(bar))}</title>"
    if first - left >= 0.1:
        yield f'<rect class="{color} wait" x="{left:.1f}" y="{y:.1f}" width="{first - left:.1f}" height="{BAR}"/>'
    width = max(right - first, MIN_BAR if first - left < MIN_BAR else 0.0)
    if width > 0:
        yield f'<rect class="{color}" x="{first:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}"/>'
    yield "</g>"


def _said(bar: _Bar) -> str:
    record = bar.record
    lines = [f"{bar.tags.root[:60]} · {bar.tags.agent[:40]} · turn {1 + (record.turn or 0)} ({record.phase})"]
    prompt = record.prompt_tokens if record.prompt_tokens is not None else record.input_len
    cached = "" if record.cached_tokens is None else f", {record.cached_tokens:,} cached"
    lines.append(f"{_known(prompt)} in{cached} / {_known(record.output_tokens)} out")
    times = f"{short(bar.begin)} s, took {short(bar.end - bar.begin)} s"
    lines.append(times if bar.first is None else f"{times}, first token after {short(bar.first - bar.begin)} s")
    if record.outcome != Outcome.COMPLETED:
        lines.append(f"{record.outcome}: {(record.error_message or record.error_class or '')[:120]}")
    return "\n".join(lines)


def _known(count: int | None) -> str:
    return "?" if count is None else f"{count:,}"


def _caption(shown: int, lanes: int, cut: float | None) -> str:
    said = "A lane per live session; the pale part of a bar is the time to its first token, a line a new session."
    left_out = []
    if shown < lanes:
        left_out.append(f"the first {shown} of {lanes} lanes")
    if cut is not None:
        left_out.append(f"the first {cut:,.1f} s")
    if left_out:
        said += f" Shown: {' and '.join(left_out)}."
    return f'<p class="cap">{escape(said)}</p>'


def _legend(depths: set[int]) -> str:
    parts = [
        f'<span><svg width="10" height="10"><rect class="f{depth}" width="10" height="10" rx="3"/></svg>'
        f"{_LEGEND[depth]}</span>"
        for depth in sorted(depths)
    ]
    return f'<div class="legend lanes">{"".join(parts)}</div>'
