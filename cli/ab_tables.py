"""The tables of a comparison, from its document (`diag/compare/document.py`). The first line says what came out.

Tables of unit tests, accuracy and the API process are `cli/ab_section_tables.py`, those of more than two arms
`cli/ab_causal_tables.py`, the plan's `cli/ab_plan_tables.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from atom.bench.report.numbers import signed_percent
from atom.cli.ab_causal_tables import causal_tables
from atom.cli.ab_plan_tables import commit_text
from atom.cli.ab_section_tables import (
    accuracy_section_tables,
    api_process_section_tables,
    unit_test_section_tables,
)
from atom.cli.render import Table, number, table_width

__all__ = ["arms_text", "comparison_tables", "gate_name", "outcome_text", "signed", "verdict_lines"]

LONGEST_LABEL: Final = 13
NARROW_LABEL: Final = 8
PRIMARY: Final = "▸ "
MOST_NAMED: Final = 8
"""Changed files, outliers: more are counted."""

Document = Mapping[str, Any]


def comparison_tables(document: Document, *, width: int = 10_000, location: str | None = None) -> list[Table]:
    """All of them. `width`: cells of the terminal; Markdown takes the wide form."""
    tables = [Table("", (), (), lead=verdict_lines(document))]
    tables += [*_troubles(document), *causal_tables(document)]
    tables += _pair_tables(document, width)
    for load in document["loads"]:
        tables += _metric_tables(load, document, width)
    tables += _sections(document, width)
    tables += [*_arm_tables(document), *_difference_tables(document), *_gate_tables(document), *_scope_tables(document)]
    told = [note for note in document["notes"] if note not in tables[0].lead]
    if notes := [*told, *([f"report: {location}"] if location is not None else [])]:
        tables.append(Table("", (), (), notes))
    return [table for table in tables if table.rows or table.lead or table.notes]


def verdict_lines(document: Document) -> list[str]:
    """One sentence per load; of a comparison without any, what there is to say instead."""
    lines = [line for load in document["loads"] for line in (load["sentence"], *load["disagreement"])]
    lines = [*map(_crossed, document["cross"]), *lines]
    if document.get("headline"):
        lines = [document["headline"], *lines]
    if document["ended"] == "deadline":
        lines.append(document["ended_text"])
    return lines or ["nothing was compared"]


def _crossed(section: Mapping[str, Any]) -> str:
    mark = "indicative: " if section["indicative"] else ""
    return f"{section['load']}: source and runtime crossed: {mark}{section['verdict']}"


# ---- troubles


def _troubles(document: Document) -> Iterator[Table]:
    notes = []
    if document["validity"] == "interrupted":
        notes.append(f"INTERRUPTED: {document['ended_text']}")
    if document["validity"] in ("not valid", "failed") and document["reasons"]:
        word = "NOT VALID" if document["validity"] == "not valid" else "FAILED"
        notes += [f"{word}: {reason}" for reason in document["reasons"]]
        notes += _advice(document)
    if document["confounded"]:
        one = len(document["confounded"]) == 1
        notes.append(f"CONFOUNDED: the arms differ in {'one thing' if one else 'things'} more than what is compared")
        notes += [f"  {line}" for line in document["confounded"]]
    if notes:
        yield Table("", (), (), notes)


def _advice(document: Document) -> Iterator[str]:
    """What would make evidence of it, where that is for a person to change."""
    if not any("client saturated" in reason for reason in document["reasons"]):
        return
    plan = document["plan"]
    if all(arm["kind"] == "recorded" for arm in plan["arms"]):
        yield "What helps: records of a client that keeps up; a comparison says nothing of runs whose client did not"
        return
    apart = all(half["client_cpus"] for half in plan["placement"]["halves"])
    where = "--cpus with more CPUs in each half" if apart else "a machine with more CPUs, for clients of their own"
    yield f"What helps: fewer streams (--load '… --max-concurrency N'), more client processes (--workers N), or {where}"


# ---- end-to-end pairs


def _pair_tables(document: Document, width: int) -> list[Table]:
    """The documents' table: a row for each matched run. One per pair of arms; per load where that is too wide."""
    tables = []
    for base, head in dict.fromkeys((load["base"], load["head"]) for load in document["loads"]):
        own = [load for load in document["loads"] if (load["base"], load["head"]) == (base, head) and load["pairs"]]
        if not own:
            continue
        names, short = _names(base, head, document), _names(base, head, document, NARROW_LABEL)
        found = [_pair_table(own, names, document)]
        if table_width(found[0]) > width:
            found = [_pair_table(own, short, document)]
        if table_width(found[0]) > width:
            found = [_pair_table([load], short, document, alone=True) for load in own]
        tables += found
    return tables


def _pair_table(
    loads: Sequence[Mapping[str, Any]], names: tuple[str, str], document: Document, *, alone: bool = False
) -> Table:
    """`alone`: of one load, which the title names."""
    one, other = names
    placement = document["plan"]["placement"]["halves"]
    where = "halves" if len(placement) == 2 else document["plan"]["extras"].get("turns", "order")
    skipped = 1 if alone else 0
    # As wide together as the name of their group.
    columns = ("load", f"{where}\n{one} / {other}", one.rjust(5), other.rjust(5), "Δ step\n(ms)", f"{one} → {other}")
    groups = (("", 1), ("ITL p50 (ms)", 2), ("", 1), ("output tok/s", 1))
    title = f"{loads[0]['base']} → {loads[0]['head']}, matched runs"
    return Table(
        f"{loads[0]['load']}: {title}" if alone else title,
        columns[skipped:],
        [row[skipped:] for load in loads for row in _pair_rows(load)],
        [load["noise"] for load in loads if load["noise"]],
        text_columns=() if alone else (1,),
        groups=groups[skipped:],
    )


def _pair_rows(load: Mapping[str, Any]) -> Iterator[list[str]]:
    label = load["load"]
    for pair in load["pairs"]:
        for run in pair["runs"]:
            base, head = run["base"], run["head"]
            before, after = base["metrics"].get("itl_p50"), head["metrics"].get("itl_p50")
            step = "–" if before is None or after is None else signed(after - before)
            tokens = " → ".join(_raw(side, "output_throughput") for side in (base, head))
            yield [label, run["half"], _raw(base, "itl_p50"), _raw(head, "itl_p50"), step, tokens]
            label = ""


def _raw(side: Mapping[str, Any], name: str) -> str:
    """A run that has no figure says why; one that is censored has a mark."""
    value = side["metrics"].get(name)
    if value is None:
        return "did not start" if side["stage"] in ("prepare", "start") and not side["dismissed"] else "–"
    return f"{number(value)}{' c' if side.get('censored') else ''}"


# ---- metrics


def _metric_tables(load: Mapping[str, Any], document: Document, width: int) -> list[Table]:
    """Primary metric first. A narrow terminal has no Δ, and noise floors and the rest of a verdict below the table."""
    metrics = [metric for metric in load["metrics"].values() if metric["primary"] or metric["pairs"]]
    metrics.sort(key=lambda metric: not metric["primary"])
    if not any(metric["pairs"] for metric in metrics):
        return []
    table = _metric_table(load, metrics, document, wide=True)
    if table_width(table) > width:
        table = _metric_table(load, metrics, document, wide=False)
    return [table]


_FAMILIES: Final = (
    "two families, each wrong in at most 5% of comparisons without a difference: what decides, and everything else"
)
_CONFOUNDED: Final = "confounded: "
_EQUIVALENT: Final = "equivalent within"


def _metric_table(
    load: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], document: Document, *, wide: bool
) -> Table:
    pairs = sum(pair["complete"] for pair in load["pairs"])
    what = "matched run" if any(len(pair["runs"]) < 2 for pair in load["pairs"]) else "pair"
    count = f"{pairs} {what}" + ("" if pairs == 1 else "s")
    title = f"{load['load']}: {load['base']} → {load['head']}, {count} · {load['shape']}"
    marks = [_CONFOUNDED] if all(_CONFOUNDED in one["short"] for one in metrics) else []
    indicative = [one["pairs"] == 1 and one["finding"] is not None for one in metrics]
    floors = wide and any(one["noise_floor_pct"] is not None for one in metrics)
    columns = ["metric", *_names(load["base"], load["head"], document, LONGEST_LABEL if wide else NARROW_LABEL)]
    columns += [*(["Δ"] if wide else []), "Δ %", _interval_head(metrics), *(["noise\nfloor (%)"] if floors else [])]
    columns.append("\n".join([*(mark.rstrip(": ") + "," for mark in marks), "verdict"]))
    rows = [_metric_row(metric, marks, wide=wide, floor=floors) for metric in metrics]
    said = [f"{_CENSORED}{line}" for line in load["censored"]] if _lists_reasons(document) else []
    notes = [one for one in load["remarks"] if one not in said]
    notes += [f"{one['title']}: {one['pairs']} of {count}" for one in metrics if 0 < one["pairs"] < pairs]
    notes += [*([] if wide else _below(metrics, marks)), f"{PRIMARY}decides: declared before anything ran"]
    if len(metrics) > 1 and not all(indicative) and not any(one["word"] == "censored" for one in metrics):
        notes.append(_FAMILIES)
    if _CONFOUNDED in marks:
        notes.append("confounded: the arms differ in more than what is compared")
    if any(indicative):
        notes.append("indicative: of one pair, which does not show how much pairs scatter")
    return Table(title, columns, rows, notes, text_columns=(len(columns) - 1,))


def _interval_head(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Where pairs are added until it is decided, intervals hold at every look."""
    return "95% repeated\nCI (%)" if any(one["repeated"] for one in metrics) else "95% CI (%)"


_CENSORED: Final = "censored: "


def _lists_reasons(document: Document) -> bool:
    """Whether what is censored stands at the top already."""
    return document["validity"] == "not valid" and not any("more like these" in one for one in document["reasons"])


def _metric_row(metric: Mapping[str, Any], marks: Sequence[str], *, wide: bool, floor: bool) -> list[str]:
    name = f"{PRIMARY if metric['primary'] else ''}{metric['title']} ({metric['unit']})"
    cells = [name, number(metric["base"]), number(metric["head"])]
    cells += [signed(metric["delta"])] if wide else []
    cells += [signed_percent(metric["delta_pct"]), _interval(metric["ci_pct"]), *([_floor(metric)] if floor else [])]
    text = _unmarked(metric["short"], marks)
    return [*cells, text if wide else _word(metric, text)]


def _unmarked(text: str, marks: Sequence[str]) -> str:
    """Without what the head of the column says of all."""
    for mark in marks:
        text = text.replace(mark, "", 1)
    return text


def _word(metric: Mapping[str, Any], text: str) -> str:
    """The verdict in a narrow column: what the figures say, without the rest of it."""
    finding = metric["finding"]
    return text if finding is None or finding not in text else text[: text.index(finding) + len(finding)]


def _below(metrics: Sequence[Mapping[str, Any]], marks: Sequence[str]) -> Iterator[str]:
    """What has no room in a narrow table. That a secondary metric needs more pairs is in the wide one alone."""
    floors = [f"{one['title']} {_floor(one)}%" for one in metrics if one["noise_floor_pct"] is not None]
    if floors:
        yield f"noise floor of A/A pairs: {', '.join(floors)}"
    told: dict[str, list[str]] = {}
    for one in metrics:
        text = _unmarked(one["short"], marks)
        if text != _word(one, text) and (one["primary"] or one["finding"] != "inconclusive"):
            told.setdefault(text, []).append(one["title"])
    for text, titles in told.items():
        same = text.startswith(_EQUIVALENT)  # all of them are held against the load's one margin
        yield text.replace(" ", ": ", 1) if same else f"{', '.join(titles)}: {text}"


def signed(value: float | None) -> str:
    """With its sign; U+2212 for minus."""
    if value is None:
        return "–"
    text = number(abs(value))
    return text if value == 0 else f"{'−' if value < 0 else '+'}{text}"


def _interval(interval: Sequence[float | None] | None) -> str:
    if interval is None or None in interval:
        return "–"
    return " … ".join(signed_percent(one) for one in interval)


def _floor(metric: Mapping[str, Any]) -> str:
    floor = metric["noise_floor_pct"]
    if floor is None:
        return "–"
    return "> ±999" if floor > 999 else f"±{floor:.{2 if floor < 100 else 0}f}"


# ---- arms and what they differ in


def _arm_tables(document: Document) -> list[Table]:
    rows, notes = [], []
    for arm in document["arms"]:
        rows.append([arm["label"], arm["role"], commit_text(arm) or "–", arm["runs_text"]])
        if arm.get("problem"):
            notes.append(f"FAILED: {arm['label']}: {arm['problem']}")
        told = arm.get("subject") or (arm["spec"] if arm["spec"] != arm["label"] else None)
        notes += [f"{arm['label']}: {told}"] if told else []
    return [Table("arms", ("arm", "role", "commit", "runs"), rows, notes, text_columns=(1, 2, 3))]


def _difference_tables(document: Document) -> list[Table]:
    tables = []
    for one in document["comparisons"]:
        rows = [[name, value] for name, value in one["difference"].items() if value]
        files = one.get("changed_files") or []
        rows += [["changed files" if i == 0 else "", text] for i, text in enumerate(_files(files))]
        if rows:
            tables.append(Table(f"{one['base']} → {one['head']}: what differs", ("", "value"), rows))
    return tables


def _files(files: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for file in files[:MOST_NAMED]:
        counts = "" if file.get("added") is None else f"  +{file['added']} −{file['deleted']}"
        lines.append(f"{file['path']}{counts}")
    if len(files) > MOST_NAMED:
        lines.append(f"and {len(files) - MOST_NAMED} more")
    return lines


def _gate_tables(document: Document) -> list[Table]:
    rows = []
    for gate in document["gates"]:
        rows.append([gate_name(gate, document), f"{outcome_text(gate, str.upper)}: {gate['reason']}"])
    return [Table("gates", ("gate", "outcome"), rows)] if rows else []


def gate_name(gate: Mapping[str, Any], document: Document) -> str:
    """With its load, and with its arms where there are several comparisons."""
    where = [gate["load"]] if gate["load"] is not None else []
    where += [arms] if (arms := arms_text(gate, document)) else []
    return ": ".join([*([", ".join(where)] if where else []), gate["gate"]])


def outcome_text(gate: Mapping[str, Any], case: Callable[[str], str] = str) -> str:
    return f"{case(gate['outcome'])}{' (confounded)' if gate['confounded'] else ''}"


def arms_text(one: Mapping[str, Any], document: Document) -> str:
    """`main → branch` of a load's or gate's document; empty where there is one comparison."""
    return f"{one['base']} → {one['head']}" if one["base"] and len(document["comparisons"]) > 1 else ""


def _scope_tables(document: Document) -> list[Table]:
    rows = [[name, value] for name, value in document["scope"].items()]
    return [Table("this result holds for", ("dimension", "this run's value"), rows)] if rows else []


def _sections(document: Document, width: int) -> list[Table]:
    """Tables of the parts of a comparison that are no load."""
    tables = [
        *unit_test_section_tables(document["tests"]),
        *accuracy_section_tables(document["accuracy"]),
        *api_process_section_tables(document["gc"], width=width),
    ]
    if outputs := document.get("outputs"):
        several = len({(one["base"], one["head"]) for one in outputs}) > 1
        lines = [f"{one['load']}{', ' + one['head'] if several else ''}: {one['text']}" for one in outputs]
        tables.append(Table("", (), (), lines))
    return tables


def _names(base: str, head: str, document: Document, most: int = LONGEST_LABEL) -> tuple[str, str]:
    """Labels as heads of columns. Of two arms one that is too long is called by its role; among more, where another one
    may be the head, by its beginning."""
    if len(document["arms"]) <= 2:
        return _short(base, "base", most), _short(head, "head", most)
    one, other = (label if len(label) <= most else f"{label[: most - 1]}…" for label in (base, head))
    return (one, other) if one != other else ("base", "other")


def _short(label: str, role: str, most: int) -> str:
    return label if len(label) <= most else role
