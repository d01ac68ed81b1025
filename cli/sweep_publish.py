"""Where a sweep goes: page, terminal, JSON, Markdown, JUnit, the step summary of a CI job."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from atom.bench.junit import JunitCase, junit_xml
from atom.bench.report.sweep_page import write_sweep_page
from atom.bench.run_facts import checked_run
from atom.bench.rundir import RunDirectory, Validity
from atom.bench.sweep import Conclusion, Point, State, Swept, conclude, latest
from atom.bench.sweep_index import SweepIndex, index_path
from atom.cli.publish import Attempts, Output, TableConsole, append_step_summary, show_tables, write_or_print
from atom.cli.render import SEPARATOR, UNSUPPORTED, Table, markdown, number
from atom.recipes.errors import ExitStatus

__all__ = ["publish_sweep", "read_sweep_summary", "republish_sweep", "sweep_tables"]

_KNEE_FIGURES: Final = (
    *("request_throughput", "output_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms"),
    *("median_tpot_ms", "p99_itl_ms", "median_e2el_ms"),
)


def publish_sweep(run_dir: RunDirectory, index: SweepIndex, conclusion: Conclusion, output: Output) -> None:
    """Write summary.json, report.html and everything in `output`. What cannot be written keeps nothing else from being
    written or shown; RunError names it at the end."""
    attempt = Attempts()
    summary = sweep_summary(run_dir, index, conclusion)
    attempt(lambda: run_dir.write_summary(summary))
    tables = sweep_tables(run_dir, index, conclusion)
    attempt(lambda: write_sweep_page(run_dir, index, conclusion, tables[0].title, tables[0].notes))
    place = Table("", (), (), [f"report: {run_dir.report_html}"])
    text = json.dumps(_document(run_dir, summary, output), indent=2, allow_nan=False) + "\n"
    for path in output.json:
        attempt(partial(write_or_print, path, text))
    if output.markdown is not None:
        attempt(partial(write_or_print, output.markdown, markdown([*tables, place])))
    if output.junit is not None:
        attempt(partial(write_or_print, output.junit, _junit(index, conclusion)))
    if output.step_summary is not None:
        append_step_summary(output.step_summary, markdown([*tables, place]) + "\n")
    if output.quiet or output.owns_stdout:
        for reason in _troubles(index, conclusion):
            print(reason, file=sys.stderr)
    else:
        attempt(lambda: show_tables([*tables, place], TableConsole()))
    attempt.raise_failures()


def republish_sweep(run_dir: RunDirectory, output: Output) -> int:
    """From sweep.json, also of a sweep that was killed. The exit status is the sweep's, 4 if it did not end."""
    index, conclusion = _read(run_dir)
    publish_sweep(run_dir, index, conclusion, output)
    if conclusion.status is ExitStatus.FAILED or run_dir.read_run_json().get("validity") == Validity.FAILED:
        return ExitStatus.FAILED
    return conclusion.status if index.ended == "done" else ExitStatus.INVALID


def read_sweep_summary(run_dir: RunDirectory) -> dict[str, Any]:
    return sweep_summary(run_dir, *_read(run_dir))


def _read(run_dir: RunDirectory) -> tuple[SweepIndex, Conclusion]:
    index = SweepIndex.read(run_dir)
    return index, conclude(index.plan, index.points, index.objectives, index.fail_below)


def sweep_summary(run_dir: RunDirectory, index: SweepIndex, conclusion: Conclusion) -> dict[str, Any]:
    """The sweep as `atom get` reads it: the knee, and the figures there as `knee_…`."""
    run = checked_run(run_dir)
    knee = conclusion.knee
    at = next((p for p in latest(index.points) if knee is not None and p.value == knee.value), None)
    figures: dict[str, Any] = {
        "knee": {
            "value": None if knee is None else knee.value,
            "unit": index.plan.swept.unit,
            "n": len(index.points),
            "definition": "the point to run at" if knee is None else knee.detail,
            "supported": True,
        },
        "points": {
            "value": len(index.points),
            "unit": "points",
            "n": len(index.points),
            "definition": "points that were measured to their end",
            "supported": True,
        },
    }
    if at is not None:
        figures |= {f"knee_{name}": dict(at.figures[name]) for name in _KNEE_FIGURES if name in at.figures}
    return {
        "title": "sweep",
        "load": run.get("load") or {},
        "server": run.get("target") or {},
        "validity": str(run.get("validity") or Validity.INTERRUPTED),
        "reasons": list(dict.fromkeys([*(run.get("reasons") or []), *conclusion.reasons])),
        "notes": conclusion.notes,
        "figures": figures,
    }


def _document(run_dir: RunDirectory, summary: Mapping[str, Any], output: Output) -> dict[str, Any]:
    """sweep.json and the summary in one."""
    content: dict[str, Any] = json.loads(index_path(run_dir).read_text(encoding="utf-8"))
    place = str(run_dir.path.absolute())
    return {"label": output.label, **output.metadata, **content, **summary, "run_directory": place}


def sweep_tables(run_dir: RunDirectory, index: SweepIndex, conclusion: Conclusion) -> list[Table]:
    swept, knee = index.plan.swept, conclusion.knee
    goodput = any("request_goodput" in p.figures and p.figure("request_goodput") is not None for p in index.points)
    columns = [
        *("point", "req/s", "output\ntok/s", "TTFT p50\n(ms)", "TTFT p99\n(ms)", "TPOT p50\n(ms)", "ITL p99\n(ms)"),
        *(["goodput\n(req/s)"] if goodput else []),
        "SLO met" if index.objectives else "in limits",
    ]
    rows = []
    for point in ordered(index):
        names = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
        cells = [_cell(point, name) for name in (*names, "p99_itl_ms", *(["request_goodput"] if goodput else []))]
        mark = " ← knee" if knee is not None and point.value == knee.value else ""
        rows.append([swept.show(point.value) + mark, *cells, point.verdict])
    return [Table(_title(run_dir, index), columns, rows, _notes(index, conclusion), text_columns=(len(columns) - 1,))]


def _title(run_dir: RunDirectory, index: SweepIndex) -> str:
    run = checked_run(run_dir)
    load, server = run.get("load") or {}, run.get("target") or {}
    source = load.get("source") or {}
    parts = [f"sweep of {'concurrency' if index.plan.swept is Swept.CONCURRENCY else 'request rate'}"]
    if source.get("random_input_len") is not None and source.get("random_output_len") is not None:
        parts.append(f"{source['random_input_len']:,} in / {source['random_output_len']:,} out")
    if load.get("max_concurrency"):
        parts.append(f"at most C{load['max_concurrency']}")
    if model := load.get("model") or server.get("model"):
        parts.append(str(model))
    if server.get("executor"):
        executor = str(server["executor"])
        parts.append("SIMULATED executor: no model was run" if executor == "simulated" else f"{executor} executor")
    return SEPARATOR.join(parts)


def _cell(point: Point, name: str) -> str:
    text = number(point.figure(name))
    return f"{text} {UNSUPPORTED}" if text != "–" and not point.figures[name]["supported"] else text


def ordered(index: SweepIndex) -> list[Point]:
    """By value, the last attempt of each."""
    return sorted(latest(index.points), key=lambda point: point.value)


def _notes(index: SweepIndex, conclusion: Conclusion) -> list[str]:
    swept, knee = index.plan.swept, conclusion.knee
    notes = _troubles(index, conclusion)
    if index.objectives:
        notes.append("SLO: " + ", ".join(one.expression for one in index.objectives))
    if knee is not None:
        notes.append(f"knee: {swept.show(knee.value)}, {knee.detail}")
    for point in ordered(index):
        if point.why and not any(point.why in note for note in notes):
            notes.append(f"{swept.show(point.value)}: {point.why}")
    for value in sorted({p.value for p in index.points if p not in latest(index.points)}):
        notes.append(f"{swept.show(value)} was measured again: the first time was no valid evidence")
    notes += conclusion.notes
    if any(UNSUPPORTED in _cell(p, name) for p in index.points for name in ("p99_ttft_ms", "p99_itl_ms")):
        notes.append(f"{UNSUPPORTED} fewer than 10 samples lie beyond this quantile: not supported by n")
    return notes


def _troubles(index: SweepIndex, conclusion: Conclusion) -> list[str]:
    """What makes the exit status another one than 0."""
    troubles = []
    if index.ended != "done":
        why = f" ({index.ended})" if index.ended is not None else ""
        troubles.append(f"INTERRUPTED: the sweep did not come to its end{why}; --resume goes on with it")
    if conclusion.reasons and index.points:
        word = "NOT VALID" if conclusion.validity is Validity.NOT_VALID else "FAILED"
        troubles.append(f"{word}: {'; '.join(conclusion.reasons)}")
    return troubles


def _junit(index: SweepIndex, conclusion: Conclusion) -> str:
    """A case per point: only one without evidence is an error, for a sweep is made to end at one that is too much. And
    one for what the sweep was to show."""
    show = index.plan.swept.show
    cases = [
        JunitCase(show(point.value), error=point.why if point.state is State.UNKNOWN else None)
        for point in ordered(index)
    ]
    troubles = "\n".join(_troubles(index, conclusion))
    valid = conclusion.validity is Validity.VALID and index.ended == "done"
    cases.append(
        JunitCase("sweep", failure=troubles if valid and troubles else None, error=troubles if not valid else None)
    )
    knee = "" if conclusion.knee is None else f"{conclusion.knee.value:g}"
    return junit_xml("atom bench sweep", cases, {"knee": knee, "swept": str(index.plan.swept)})
