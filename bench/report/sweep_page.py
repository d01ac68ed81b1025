"""report.html of a sweep: the throughput–latency curve with the knee, latencies and rates over what grew, the points.
Self-contained, without scripts; made from sweep.json alone."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any, Final

from atom.bench.report.numbers import number
from atom.bench.report.svg_chart import Chart, ChartLine, ChartPoint
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, Validity, write_text
from atom.bench.sweep import Conclusion, Point, State, Swept, latest
from atom.bench.sweep_index import SweepIndex

__all__ = ["write_sweep_page"]

_SHAPES: Final = {State.MET: "dot", State.BROKEN: "cross", State.UNKNOWN: "ring"}
_COLUMNS: Final = (
    ("request_throughput", "req/s"),
    ("output_throughput", "output tok/s"),
    ("request_goodput", "goodput (req/s)"),
    ("median_ttft_ms", "TTFT p50 (ms)"),
    ("p99_ttft_ms", "TTFT p99 (ms)"),
    ("median_tpot_ms", "TPOT p50 (ms)"),
    ("p99_itl_ms", "ITL p99 (ms)"),
    ("median_e2el_ms", "E2EL p50 (ms)"),
    ("mean_concurrency", "at once, mean"),
)


def write_sweep_page(
    run_dir: RunDirectory, index: SweepIndex, conclusion: Conclusion, title: str, notes: Sequence[str]
) -> None:
    """Write `run_dir`'s report.html."""
    run = checked_run(run_dir)
    validity = str(conclusion.validity) if index.ended == "done" else str(Validity.INTERRUPTED)
    kind = {"valid": "good", "not valid": "bad", "failed": "bad"}.get(validity, "warn")
    command = shlex.join(map(str, run.get("command") or []))
    body = [
        f'<h1>{escape(title)}<span class="badge {kind}">{escape(validity)}</span></h1>',
        f'<p class="sub">{escape(str(run.get("start_time") or ""))}</p>',
        f'<p class="sub"><code>{escape(command)}</code></p>' if command else "",
        _knee(index, conclusion),
        '<h2>Curves</h2><div class="grid">',
        *_charts(index, conclusion),
        "</div>",
        "<h2>Points</h2>",
        _table(index, conclusion),
        "<h2>Notes</h2>",
        '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>",
    ]
    folder = resources.files("atom.bench.report")
    page = (folder / "sweep.html").read_text(encoding="utf-8")
    page = page.replace("/*style.css*/", (folder / "style.css").read_text(encoding="utf-8"))
    page = page.replace("<!--title-->", escape(title)).replace("<!--body-->", "\n".join(filter(None, body)))
    write_text(run_dir.report_html, page)


def _knee(index: SweepIndex, conclusion: Conclusion) -> str:
    knee = conclusion.knee
    if knee is None:
        return '<p class="reasons">No knee: ' + escape("; ".join([*conclusion.reasons, *conclusion.notes])) + "</p>"
    point = next(p for p in latest(index.points) if p.value == knee.value)
    tiles = [("knee", index.plan.swept.show(knee.value), "")]
    for name, label, unit in (
        ("request_throughput", "requests", "req/s"),
        ("output_throughput", "output", "tok/s"),
        ("p99_ttft_ms", "TTFT p99", "ms"),
        ("median_tpot_ms", "TPOT p50", "ms"),
        ("p99_itl_ms", "ITL p99", "ms"),
    ):
        tiles.append((label, number(point.figure(name)), unit))
    cells = "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}'
        f"<small>{escape(unit)}</small></div></div>"
        for label, value, unit in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _charts(index: SweepIndex, conclusion: Conclusion) -> list[str]:
    swept = index.plan.swept
    points = sorted(latest(index.points), key=lambda point: point.value)
    log = len(points) > 2 and points[-1].value >= 8 * points[0].value
    grows = "concurrency (requests at once)" if swept is Swept.CONCURRENCY else "requested rate (req/s)"

    def over(name: str, label: str, color: str, *, x: str | None = None, labels: bool = False) -> ChartLine:
        """`labels`: name the points; where their values stand on the axis, the knee alone."""
        marks = []
        for point in points:
            at, y = (point.value if x is None else point.figure(x)), point.figure(name)
            if at is not None and y is not None:
                labelled = labels and (x is not None or _is_knee(conclusion, point))
                marks.append(_mark(index, conclusion, point, at, y, label, labelled))
        return ChartLine(label, color, marks)

    def limits(*names: str) -> list[tuple[float, str]]:
        return [(one.limit, one.expression) for one in index.objectives if one.figure in names]

    curve = over("output_throughput", "output tok/s", "var(--a)", x="median_e2el_ms", labels=True)
    first_token = [over("median_ttft_ms", "p50", "var(--a)"), over("p99_ttft_ms", "p99", "var(--b)", labels=True)]
    tokens = [over("median_tpot_ms", "TPOT p50", "var(--a)"), over("p99_itl_ms", "ITL p99", "var(--b)", labels=True)]
    rates = [over("request_throughput", "completed", "var(--a)", labels=True)]
    if any(point.figure("request_goodput") is not None for point in points):
        rates.append(over("request_goodput", "goodput", "var(--c)"))
    if swept is Swept.RATE:
        rates.append(
            ChartLine("requested", "var(--dim)", [ChartPoint(p.value, p.value, "dot", "", "requested") for p in points])
        )
    ttft = limits("median_ttft_ms", "p50_ttft_ms", "p99_ttft_ms", "mean_ttft_ms")
    itl = limits("median_tpot_ms", "p50_tpot_ms", "p99_tpot_ms", "mean_tpot_ms", "p99_itl_ms", "median_itl_ms")
    return [
        _card(
            "Throughput over latency", "output tok/s over E2EL p50 (ms)", Chart(lines=[curve], x_label="E2EL p50 (ms)")
        ),
        _card("Requests per second", "req/s", Chart(lines=rates, x_label=grows, log_x=log)),
        _card("Time to first token", "ms", Chart(lines=first_token, x_label=grows, limits=ttft, log_x=log)),
        _card("Time per token", "ms", Chart(lines=tokens, x_label=grows, limits=itl, log_x=log)),
    ]


def _mark(
    index: SweepIndex, conclusion: Conclusion, point: Point, x: float, y: float, label: str, labelled: bool
) -> ChartPoint:
    name = index.plan.swept.show(point.value)
    knee = _is_knee(conclusion, point)
    title = f"{name}: {label} {number(y)}" + (f" ({point.why})" if point.why else "")
    text = (f"{name} knee" if knee else name) if labelled else ""
    return ChartPoint(x, y, _SHAPES[point.state], text, title, knee)


def _is_knee(conclusion: Conclusion, point: Point) -> bool:
    return conclusion.knee is not None and conclusion.knee.value == point.value


def _card(name: str, caption: str, chart: Chart) -> str:
    legend = ""
    if len(chart.lines) > 1:
        keys = (f'<span><i style="background:{one.color}"></i>{escape(one.name)}</span>' for one in chart.lines)
        legend = f'<div class="legend">{"".join(keys)}</div>'
    return f'<div class="card"><h3>{escape(name)}</h3><p class="cap">{escape(caption)}</p>{legend}{chart.svg()}</div>'


def _table(index: SweepIndex, conclusion: Conclusion) -> str:
    points = sorted(latest(index.points), key=lambda point: point.value)
    columns = [(n, label) for n, label in _COLUMNS if any(point.figure(n) is not None for point in points)]
    head = "".join(f'<th class="num">{escape(label)}</th>' for _, label in columns)
    rows = []
    for point in points:
        knee = _is_knee(conclusion, point)
        cells = "".join(f'<td class="num">{escape(_cell(point, name))}</td>' for name, _ in columns)
        directory = escape(point.directory)
        rows.append(
            f'<tr class="{"knee" if knee else ""}"><td class="key"><a href="{directory}/report.html">'
            f"{escape(index.plan.swept.show(point.value))}</a>{' ← knee' if knee else ''}</td>{cells}"
            f"<td>{escape(point.verdict)}</td></tr>"
        )
    met = "SLO met" if index.objectives else "within limits"
    return (
        f'<div class="scroll"><table><thead><tr><th>point</th>{head}<th>{met}</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(point: Point, name: str) -> str:
    figure: dict[str, Any] = dict(point.figures.get(name, {}))
    text = number(point.figure(name))
    return text if text == "–" or figure["supported"] else f"{text} †"
