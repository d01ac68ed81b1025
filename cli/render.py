"""Tables of a run, and any table (`bench/table.py`) rendered for the terminal (rich) or as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from atom.bench.report.numbers import number
from atom.bench.table import Table

__all__ = ["Table", "bench_tables", "markdown", "number", "print_tables", "table_width"]

UNSUPPORTED: Final = "†"
SEPARATOR: Final = " · "
COLUMN_GAP: Final = 3
"""Cells between two columns on the terminal."""
LEAST_ROOM: Final = 16
"""Cells; a text that breaks between its words has at least these."""
CONNECT_MS: Final = 1.0
CONNECT_SHARE: Final = 0.01
"""A median time to connect above this, or above this share of TTFT, has a row of its own."""


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    return "–" if value is None else f"{int(value):,}"


def bench_tables(summary: Mapping[str, Any], location: str | None = None) -> list[Table]:
    """The tables of one load: latencies, then throughput and the server's side. `location`: where the report lies."""
    title = _title(summary)
    return [
        Table(title, ("latency", "mean (ms)", "p50 (ms)", "p99 (ms)", "n"), _latency_rows(summary)),
        Table("", ("figure", "value"), _figure_rows(summary), _notes(summary, location)),
    ]


def _title(summary: Mapping[str, Any]) -> str:
    load, server = summary["load"], summary["server"]
    source = load.get("source") or {}
    parts = [summary["title"] or "run"]
    if source.get("random_input_len") is not None and source.get("random_output_len") is not None:
        shape = f"{source['random_input_len']:,} in / {source['random_output_len']:,} out"
        if source.get("random_range_ratio"):
            shape += f" ±{source['random_range_ratio']:.0%}"
        if source.get("random_prefix_len"):
            shape += f", {source['random_prefix_len']:,} shared"
        parts.append(shape)
    if source.get("shape"):
        parts.append(source["shape"])
    concurrency = load.get("max_concurrency") or load.get("concurrency")
    if concurrency:
        parts.append(f"C{concurrency}")
    if load.get("request_rate") not in (None, "inf"):
        parts.append(f"{load['request_rate']:g} req/s")
    if (ramp := load.get("ramp")) is not None:
        parts.append(f"{ramp['start_rps']:g} to {ramp['end_rps']:g} req/s")
    if load.get("num_prompts") is not None:
        parts.append(f"{load['num_prompts']:,} requests")
    elif load.get("duration_s") is not None:
        parts.append(f"{load['duration_s']:g} s")
    parts.append(str(load.get("model") or server.get("model") or "?"))
    if server.get("executor"):
        executor = str(server["executor"])
        parts.append("SIMULATED executor: no model was run" if executor == "simulated" else f"{executor} executor")
    return SEPARATOR.join(parts)


_LATENCY_LABELS: Final = {
    "connect": "connect",
    "ttft": "TTFT",
    "ttft_scheduled": "TTFT from schedule",
    "itl": "ITL",
    "per_token_itl": "ITL per token",
    "tpot": "TPOT",
    "e2el": "E2EL",
}


def _latency_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    figures = summary["figures"]
    rows: list[list[str]] = []
    for name, label in _LATENCY_LABELS.items():
        mean = figures.get(f"mean_{name}_ms")
        if mean is None or (name == "per_token_itl" and not _several_tokens_per_chunk(figures)):
            continue
        if name == "connect" and not _connect_matters(figures):
            continue
        cells = [_marked(figures[f"{key}_{name}_ms"]) for key in ("mean", "median", "p99")]
        rows.append([label, *cells, count(mean["n"])])
    return rows


def _several_tokens_per_chunk(figures: Mapping[str, Any]) -> bool:
    """Where each chunk is one token, the row would say the same as ITL."""
    tokens = figures["tokens_per_chunk"]["value"]
    return tokens is not None and tokens != 1


def _connect_matters(figures: Mapping[str, Any]) -> bool:
    """Whether the time to connect is long: by itself, or beside TTFT, which leaves it out."""
    connect, ttft = (figures.get(f"median_{name}_ms", {}).get("value") for name in ("connect", "ttft"))
    return connect is not None and (connect > CONNECT_MS or (ttft is not None and connect > CONNECT_SHARE * ttft))


def _marked(figure: Mapping[str, Any]) -> str:
    text = number(figure["value"])
    return text if figure["supported"] or figure["value"] is None else f"{text} {UNSUPPORTED}"


def _figure_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    values = {name: figure["value"] for name, figure in summary["figures"].items()}

    def rate(name: str, unit: str) -> str:
        return f"{number(values.get(name))} {unit}"

    rows = [
        ["requests", _requests(values)],
        ["duration", rate("duration", "s")],
        ["throughput", rate("request_throughput", "req/s")],
        ["output", f"{rate('output_throughput', 'tok/s')} (peak {number(values.get('max_output_tokens_per_s'))})"],
        ["input + output", rate("total_token_throughput", "tok/s")],
        [
            "concurrency",
            f"mean {number(values.get('mean_concurrency'))}, most {count(values['max_concurrent_requests'])}",
        ],
    ]
    if values.get("requested_rate") is not None and values.get("achieved_rate") is not None:
        rows.append(
            [
                "arrivals",
                f"{number(values['requested_rate'])} req/s by schedule, {number(values['achieved_rate'])} as sent",
            ]
        )
    if values.get("request_goodput") is not None:
        slo = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in summary["load"]["goodput_ms"].items())
        rows.append(["goodput", f"{rate('request_goodput', 'req/s')} ({slo})"])
    theoretical = None if "agentic" in summary else values.get("theoretical_cached_share")
    if values.get("cached_share") or theoretical is not None:
        cached = "not reported" if values.get("cached_share") is None else percent(values["cached_share"])
        limit = "" if theoretical is None else f" ({percent(theoretical)} in a cache without end)"
        rows.append(["prompt tokens cached", cached + limit])
    rows += _server_rows(summary["figures"])
    client: list[str] = []
    if values["p99_client_lag_ms"] is not None:
        lag = f"loop lag p99 {number(values['p99_client_lag_ms'])} ms, max {number(values['max_client_lag_ms'])} ms"
        client.append(lag)
    if values["client_cpu_share"] is not None:
        workers = summary.get("workers") or []
        busiest = max(workers, key=lambda worker: worker["cpu_share"] or 0.0, default=None)
        who = f" (worker {busiest['worker']}, the busiest of {len(workers)})" if busiest is not None else ""
        client.append(f"CPU {percent(values['client_cpu_share'])}{who}")
    if (kernel := values.get("kernel_stamp_share")) is not None:
        client.append("arrival times by the kernel" if kernel == 1 else f"arrival times by the kernel: {kernel:.1%}")
    if client:
        rows.append(["client", ", ".join(client)])
    return rows


def _requests(values: Mapping[str, float | None]) -> str:
    text = f"{count(values['completed'])} completed, {count(values['failed'])} failed"
    if values["cancelled"]:
        text += f", {count(values['cancelled'])} cancelled"
    return text


def _server_rows(figures: Mapping[str, Any]) -> list[list[str]]:
    """What was captured at the server; rows appear where there is something to show, figures of one label in one."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for figure in figures.values():
        if figure.get("side") == "server" and figure["value"] is not None and not figure.get("detail"):
            role = figure.get("role")
            rows.setdefault(f"{figure['label']} ({role})" if role else figure["label"], []).append(figure)
    return [[label, _joined(own)] for label, own in rows.items()]


def _joined(figures: Sequence[Mapping[str, Any]]) -> str:
    """`mean 12.3, most 40 requests`: a unit that several share is said once."""
    cells = []
    for figure, after in zip(figures, [*figures[1:], None], strict=True):
        text = _with_unit(figure["value"], figure["unit"])
        if after is not None and after["unit"] == figure["unit"]:
            text = text.removesuffix(f" {figure['unit']}")
        cells.append(f"{figure.get('part') or ''} {text}".strip())
    return cells[0].removeprefix("mean ") if len(cells) == 1 else ", ".join(cells)


def _with_unit(value: float, unit: str) -> str:
    if unit == "fraction":
        return f"{value:.2%}"
    if unit in ("bytes", "series", "sequences"):
        return f"{int(value):,} {unit}"
    if unit == "requests" and float(value).is_integer():
        return f"{int(value):,} {unit}"
    return f"{number(value)} {unit}"


def _notes(summary: Mapping[str, Any], location: str | None) -> list[str]:
    notes: list[str] = []
    if summary["validity"] != "valid":
        notes.append(f"{str(summary['validity']).upper()}: " + "; ".join(summary["reasons"]))
    for error in summary["errors"][:5]:
        notes.append(f"{error['count']:,} × {error['class']}: {error['message'][:300]}")
    anomalies = {name: n for name, n in summary["anomalies"].items() if n}
    if anomalies:
        notes.append("anomalies: " + ", ".join(f"{name} × {n:,}" for name, n in sorted(anomalies.items())))
    notes += summary["notes"]
    if _connect_matters(summary["figures"]):
        notes.append("TTFT and all below it begin when the request is sent: the time to connect comes on top")
    if any(not f["supported"] and f["value"] is not None for f in _shown(summary["figures"])):
        notes.append(f"{UNSUPPORTED} fewer than 10 samples lie beyond this quantile: not supported by n")
    for check in summary["checks"]:
        if check["ok"] is False and not any(check["detail"] in reason for reason in summary["reasons"]):
            notes.append(f"self-check {check['name']} does not hold: {check['detail']}")
    if location is not None:
        notes.append(f"report: {location}")
    return notes


def _shown(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    keys = (f"{key}_{name}_ms" for name in _LATENCY_LABELS for key in ("median", "p99"))
    return [figures[key] for key in keys if key in figures]


def print_tables(tables: Sequence[Table], console: Console) -> None:
    parts: list[RenderableType] = []
    for index, table in enumerate(tables):
        if table.title:
            parts.append(Text(_lines(table.title, console.width), style="bold"))
        parts += map(Text, table.lead)
        if table.columns:
            parts += _drawn(table, console.width)
        if table.columns or table.lead:
            parts.append(Text(""))
        for note in table.notes:
            parts.append(
                Text(note, style="yellow" if note.startswith(("NOT VALID", "FAILED", "INTERRUPTED")) else "dim")
            )
        if table.notes and index < len(tables) - 1:
            parts.append(Text(""))
    console.print(Group(*parts), soft_wrap=False)


def _drawn(table: Table, width: int) -> list[RenderableType]:
    """Rows side by side where they fit. Where they do not, the texts of a list break between words, and of what has
    more columns every cell gets a line of its own: no label and no number is cut."""
    if table_width(table) <= width:
        return [*([Text(_group_line(table))] if table.groups else []), _rich_table(table)]
    if len(table.columns) == 2:
        longest = max((cell_len(word) for row in table.rows for word in row[1].split()), default=0)
        if width - column_widths(table)[0] - COLUMN_GAP >= max(longest, LEAST_ROOM):
            return [_rich_table(table, breaking=1)]
        return [Text(f"{label}: {value}") for label, value in table.rows]
    return _cell_by_cell(table)


def _cell_by_cell(table: Table) -> list[RenderableType]:
    """Each row as its label and below it `header: cell`; a label that stands for several rows is said in each."""
    headers = table.headers if len(table.groups) > 1 else replace(table, groups=()).headers
    label, lines = "", list[RenderableType]()
    for row in table.rows:
        label = row[0] or label
        lines.append(Text(label))
        lines += [
            Padding(Text(f"{header}: {cell}"), (0, 0, 0, 2), expand=False)
            for header, cell in zip(headers[1:], row[1:], strict=True)
            if cell
        ]
    return lines


def column_widths(table: Table) -> list[int]:
    """Cells of each column on a terminal that is wide enough."""
    columns = zip(table.columns, *table.rows, strict=True)
    return [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]


def table_width(table: Table) -> int:
    """Cells that the table takes on a terminal."""
    return sum(width + COLUMN_GAP for width in column_widths(table)) - COLUMN_GAP


def _group_line(table: Table) -> str:
    """The names of the groups, each where its first column begins."""
    widths = column_widths(table)
    line, column, at = "", 1, widths[0] + COLUMN_GAP
    for name, columns in table.groups:
        wide = sum(widths[column : column + columns]) + COLUMN_GAP * (columns - 1)
        line = set_cell_size(line, at) + set_cell_size(name, min(wide, cell_len(name)))
        column, at = column + columns, at + wide + COLUMN_GAP
    return line


def _rich_table(table: Table, breaking: int | None = None) -> RichTable:
    """`breaking`: the column whose cells may take several lines."""
    rich = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(table.columns):
        numeric = table.is_numeric(index)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        rich.add_column(Text(column), justify=justify, no_wrap=index != breaking, overflow="fold")
    for row in table.rows:
        rich.add_row(*map(Text, row))
    return rich


def _lines(title: str, width: int) -> str:
    """A title broken between its parts, never inside one that fits a line."""
    lines: list[str] = []
    for part in title.split(SEPARATOR):
        if lines and cell_len(lines[-1] + SEPARATOR + part) <= width:
            lines[-1] += SEPARATOR + part
        else:
            lines.append(part)
    return "\n".join(lines)


def markdown(tables: Sequence[Table]) -> str:
    """GitHub-flavoured Markdown, ready to paste into a pull request."""
    lines: list[str] = []
    for table in tables:
        if table.title:
            lines += [f"**{_cell(table.title)}**", ""]
        for sentence in table.lead:
            lines += [_cell(sentence), ""]
        if table.columns:
            lines.append("| " + " | ".join(map(_cell, table.headers)) + " |")
            lines.append("|" + "".join("---:|" if table.is_numeric(i) else "---|" for i in range(len(table.columns))))
            lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows]
            lines.append("")
        lines += [f"- {_cell(note)}" for note in table.notes]
        if table.notes:
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text from a server must neither break the table nor become markup."""
    flat = " ".join(text.split())
    for mark in "\\`*_[]<>|":
        flat = (
            flat.replace(mark, "\\" + mark)
            if mark not in "<>"
            else flat.replace(mark, {"<": "&lt;", ">": "&gt;"}[mark])
        )
    return flat
