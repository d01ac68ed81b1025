"""report.html of a comparison: verdicts, pairs, halves, distributions, tables, plan, and how each figure was obtained.

Self-contained and readable without scripts; made from the comparison's document and its run directories. All text in it
(refs, subjects of commits, messages of servers, names of other people's tests) is escaped. Drawing is
`page_strips.py`'s and `page_distributions.py`'s, the tables are those that the terminal has.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Final

from atom.bench.report.tables import tables_html
from atom.bench.rundir import RunDirectory
from atom.bench.table import Table
from atom.diag.compare.page_distributions import distribution_cards
from atom.diag.compare.page_strips import arrows_card, kind_of, metrics_card, pairs_card
from atom.diag.compare.statistics import ALPHA
from atom.recipes.errors import AtomError

__all__ = ["comparison_page"]

MOST_COMMANDS: Final = 64
LONGEST_VALUE: Final = 600
_VALIDITY: Final = {"valid": "good", "not valid": "bad", "failed": "bad"}
_STATISTICS: Final = (
    "The unit of evidence is the pair: two matched runs, the second with the halves (or the order) swapped.",
    "Each run is scored on the window in which both arms of its matched run are in steady state.",
    "Δ % is exp(mean over pairs of the mean of log(head / base) over a pair's runs) − 1.",
    "Its interval is Student's t over pairs; the variance is the larger of that between pairs and that between blocks "
    "of time within them. Requests share engine steps, so they are never counted as independent.",
    "The base's value is the geometric mean of its runs; the head's is that times head / base.",
    "The A/A noise floor is what comparisons of the base with itself, over as many pairs, stay below with 95% "
    "probability, as predicted from the A/A pairs that were measured.",
    "Declared metrics are corrected for how many loads there are, all others for how many figures were looked at "
    "(Holm): two families, each of which calls a difference where there is none in at most 5% of comparisons. p values "
    "are corrected; the intervals shown are of each metric alone.",
)

Document = Mapping[str, Any]


def comparison_page(out: Path, document: Document, tables: Sequence[Table]) -> str:
    """Of the comparison in `out`. `tables`: those that the terminal has; what has no rows stands above the charts."""
    folder = resources.files("atom.diag.compare")
    page = (folder / "page.html").read_text(encoding="utf-8")
    style = (resources.files("atom.bench.report") / "style.css").read_text(encoding="utf-8")
    run = _run_json(out)
    title = _title(document)
    concurrent = len(document["plan"]["placement"]["halves"]) == 2
    body = [
        _head(document, run, title),
        tables_html([one for one in tables if not one.columns and not _is_verdict(one, document)]),
        *(_load(out, load, concurrent) for load in document["loads"]),
        tables_html([one for one in tables if one.columns]),
        _details("Plan", _plan_table(document)),
        _details("Where each arm is from", _arms_table(document)),
        _details("How each figure was obtained", _definitions(document)),
        _details("Runs and their commands", _commands(out, document)),
    ]
    # The body goes in last: nothing of it is taken for a place of the template.
    page = page.replace("/*style.css*/", style).replace("<!--title-->", escape(title))
    return page.replace("<!--body-->", "\n".join(filter(None, body)))


def _title(document: Document) -> str:
    pairs = dict.fromkeys((one["base"], one["head"]) for one in document["comparisons"])
    if not pairs:
        return "comparison"
    base = next(iter(pairs))[0]
    heads = [head for one, head in pairs if one == base]
    return f"{', '.join(heads)} against {base}"


def _head(document: Document, run: Mapping[str, Any], title: str) -> str:
    validity = str(document["validity"])
    command = run.get("command")
    parts = [
        f'<h1>{escape(title)}<span class="badge {_VALIDITY.get(validity, "warn")}">{escape(validity)}</span></h1>',
        f'<p class="sub">{escape(" · ".join(filter(None, [str(run.get("start_time") or ""), _shape(document)])))}</p>',
    ]
    if isinstance(command, list):
        parts.append(f'<p class="sub"><code>{escape(shlex.join(map(str, command)))}</code></p>')
    items = [(load["sentence"], kind_of(load["word"])) for load in document["loads"]]
    if document.get("headline"):
        items.insert(0, (document["headline"], "warn"))
    for section in (*_many(document.get("causal")), *_many(document.get("cross"))):
        if "verdict" in section:
            items.append((f"{section['load']}: crossover: {section['verdict']}", "warn"))
    sentences = "".join(f'<li class="{kind}">{escape(text)}</li>' for text, kind in items)
    parts.append(f'<ul class="verdicts">{sentences or "<li>nothing was compared</li>"}</ul>')
    return "".join(parts)


def _is_verdict(table: Table, document: Document) -> bool:
    """Whether it says what already stands on top."""
    said = {document.get("headline"), *(load["sentence"] for load in document["loads"])}
    return bool(table.lead) and set(table.lead) <= said and not table.notes


def _shape(document: Document) -> str:
    made = sum(pair["complete"] for load in document["loads"] for pair in load["pairs"])
    loads = len({load["load"] for load in document["loads"]})
    reason = document["plan"]["placement"]["reason"]
    return f"{_counted(made, 'complete pair')} under {_counted(loads, 'load')} · {reason}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _many(value: Any) -> Sequence[Mapping[str, Any]]:
    return [value] if isinstance(value, Mapping) else value or []


def _load(out: Path, load: Mapping[str, Any], concurrent: bool) -> str:
    primary = next((name for name, one in load["metrics"].items() if one["primary"]), None)
    if primary is None and load["metrics"]:
        primary = next(iter(load["metrics"]))
    if primary is None or not load["pairs"]:
        return ""
    cards = [
        pairs_card(load, primary),
        arrows_card(load, primary, concurrent=concurrent),
        metrics_card(load),
        distribution_cards(out, load),
    ]
    heading = f"{load['load']}: {load['base']} → {load['head']}"
    return (
        f'<section class="load"><h2>{escape(heading)}</h2><p class="cap">{escape(load["shape"])}</p>'
        f'<div class="grid">{"".join(cards)}</div></section>'
    )


def _details(title: str, tables: Sequence[Table]) -> str:
    return f"<details><summary>{escape(title)}</summary>{tables_html(tables)}</details>" if tables else ""


# ---- plan and provenance


def _plan_table(document: Document) -> list[Table]:
    plan = document["plan"]
    placement = plan["placement"]
    rows = [
        ["pairs", _pairs_text(plan)],
        ["halves", "swapped within each pair" if plan["swap"] else "not swapped"],
        ["A/A pairs", str(plan["aa_pairs"])],
        ["order", f"randomised, seed {plan['seed']}"],
        ["placement", placement["reason"]],
        *([f"half {one['name']}", _half_text(one)] for one in placement["halves"]),
        ["suite", plan["suite"] or "given on the command line"],
        ["confidence", f"{1 - ALPHA:.0%}"],
        ["cool-down", f"{plan['cool_down_s']:g} s between matched runs"],
        ["deadline", "none" if plan["deadline_s"] is None else f"{plan['deadline_s']:g} s"],
        *(["gate", _short(json.dumps(one))] for one in plan["gates"]),
        *([f"load {one['name']}", _load_text(one)] for one in plan["loads"]),
    ]
    return [Table("", ("declared before anything ran", "value"), rows)]


def _pairs_text(plan: Mapping[str, Any]) -> str:
    text = f"{plan['pairs']} per comparison and load"
    return f"{text}, more until decided, at most {plan['max_pairs']}" if plan["until_decided"] else text


def _half_text(half: Mapping[str, Any]) -> str:
    parts = [] if half["devices"] is None else [f"GPUs {half['devices']}"]
    for name in ("server", "client"):
        cpus = half[f"{name}_cpus"]
        parts.append(f"{name} on CPUs {_cpus(cpus)}" if cpus else f"{name} not pinned")
    return "; ".join(parts)


def _cpus(cpus: Sequence[int]) -> str:
    """`0-3,8`"""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _load_text(load: Mapping[str, Any]) -> str:
    words = [load["bench"]]
    for name, value in load["options"].items():
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    said = f"{shlex.join(words)}; decided by {load['primary']}, equivalent within {load['margin_pct']:g}%"
    extra = [f"server arguments {shlex.join(load['server_args'])}"] if load["server_args"] else []
    return _short("; ".join([said, *extra]))


def _arms_table(document: Document) -> list[Table]:
    """Everything that is known of where an arm is from, one column per arm."""
    arms = document["arms"]
    hidden = {"label", "runs", "runs_text", "changed_files", "packages"}
    names = dict.fromkeys(name for arm in arms for name in arm if name not in hidden)
    rows = [
        [name, *(_short(_plain(arm.get(name))) for arm in arms)] for name in names if any(arm.get(name) for arm in arms)
    ]
    rows += _package_rows([arm.get("packages") or {} for arm in arms])
    columns = ("", *(arm["label"] for arm in arms))
    return [Table("", columns, rows, text_columns=range(1, len(columns)))] if rows else []


def _package_rows(packages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """How many each arm has, and those that are not the same in all."""
    if not any(packages):
        return []
    names = sorted({name for some in packages for name in some})
    differing = [name for name in names if len({str(some.get(name)) for some in packages}) > 1]
    same = len(names) - len(differing)
    rows = [["packages", *(f"{len(some)}, of which {same} are the same in all arms" for some in packages)]]
    return rows + [[f"package {name}", *(_short(_plain(some.get(name))) for some in packages)] for name in differing]


def _plain(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_plain(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


# ---- how it was obtained


def _definitions(document: Document) -> list[Table]:
    metrics = {name: one for load in document["loads"] for name, one in load["metrics"].items()}
    rows = [
        [f"{one['title']} ({one['unit']})", f"{one['better']} is better", one["definition"]] for one in metrics.values()
    ]
    tables = [Table("", (), (), lead=list(_STATISTICS))]
    return [*tables, Table("", ("metric", "", "definition"), rows, text_columns=(1, 2))] if rows else tables


def _commands(out: Path, document: Document) -> list[Table]:
    """Each arm's part of each matched run: on how much it is scored, and the command that made it."""
    parts = {side["run"]: (where, side) for where, side in _parts(document)}  # a control serves several comparisons
    rows = []
    for where, side in list(parts.values())[:MOST_COMMANDS]:
        window, counts = side["window"], side["requests"]
        command = _run_json(out / side["run"]).get("command")
        rows.append(
            [
                side["run"],
                where,
                "–" if window is None else f"{window['seconds']:,.1f}{'' if window['steady'] else ' (whole)'}",
                "–" if counts is None else f"{counts['completed']:,}/{counts['started']:,}",
                _short(shlex.join(map(str, command))) if isinstance(command, list) else side["problem"] or "–",
            ]
        )
    notes = ["windows in which a matched run is scored; (whole): of its measured phase"]
    if len(parts) > len(rows):
        notes.append(f"and {_counted(len(parts) - len(rows), 'more run')}")
    columns = ("run directory", "load", "window (s)", "completed", "command")
    return [Table("", columns, rows, notes, text_columns=(1, 4))] if rows else []


def _parts(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What each run is part of, and the run."""
    for load in document["loads"]:
        for kind, pairs in (("A/A pair", (load["control"] or {}).get("pairs", ())), ("pair", load["pairs"])):
            for pair in pairs:
                for run in pair["runs"]:
                    for side in (run["base"], run["head"]):
                        yield f"{load['load']}, {kind} {pair['pair'] + 1}", side


def _run_json(path: Path) -> Mapping[str, Any]:
    """Empty where there is none that can be read."""
    try:
        return RunDirectory.open(path).read_run_json()
    except (AtomError, OSError):
        return {}
