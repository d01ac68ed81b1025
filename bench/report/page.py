"""Writes report.html: template, style and script of this folder with the run's data set in. No network, no CDN."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from atom.bench.gsm8k.question_table import question_table
from atom.bench.gsm8k.questions import questions_of
from atom.bench.records import MEASURED, RequestRecord, read_records
from atom.bench.report.series import collect_series
from atom.bench.report.swim_lanes import swim_lanes
from atom.bench.report.tables import tables_html
from atom.bench.report.timeline import timeline_svg
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, write_text
from atom.bench.table import Table

__all__ = ["write_report"]


def write_report(run_dir: RunDirectory, summary: Mapping[str, Any], results: Sequence[Table] = ()) -> None:
    """Write `run_dir`'s report.html from its summary and its recorded series. `results`: the tables of what the load is
    about (accuracy, sessions), as the terminal has them; they stand above everything that any load has."""
    run = checked_run(run_dir)
    records = list(read_records(run_dir, None))
    start_ns, end_ns = summary["start_ns"], summary["end_ns"]
    series = collect_series(run_dir, records, start_ns, end_ns)
    data = {
        "summary": summary,
        "run": {
            "name": run.get("name"),
            "command": shlex.join(map(str, run.get("command") or [])),
            "start_time": run.get("start_time"),
            "end_time": run.get("end_time"),
            "host": run.get("host") or {},
            "git": run.get("git"),
            "packages": run.get("packages") or {},
            "devices": run.get("devices") or [],
            "recipe": run.get("recipe"),
            "directory": run_dir.path.name,
        },
        "series": series,
    }
    folder = resources.files("atom.bench.report")
    page = (folder / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", "charts.js", "report.js"):
        page = page.replace(f"/*{name}*/", (folder / name).read_text(encoding="utf-8"))
    # Inside <script> only "<" can end the data; the page's script sets every text as text, never as markup.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = page.replace("/*data*/null", text)  # before the other: there is no "<" in it that could be taken for one
    page = page.replace("<!--timeline-->", timeline_svg(records, series, start_ns, end_ns))
    page = page.replace("<!--results-->", tables_html(results) + _questions(summary, records))
    write_text(run_dir.report_html, page.replace("<!--swim lanes-->", _lanes(swim_lanes(records, start_ns, end_ns))))


def _lanes(drawn: str) -> str:
    heading = "<h2>Sessions</h2>"
    return f'<section id="lanes">{heading}<div class="card">{drawn}</div></section>' if drawn else ""


def _questions(summary: Mapping[str, Any], records: Sequence[RequestRecord]) -> str:
    if "accuracy" not in summary:
        return ""
    table = question_table(questions_of(record for record in records if record.phase == MEASURED))
    return f"<details><summary>Question by question</summary>{tables_html([table])}</details>"
