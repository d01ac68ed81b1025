"""Tables of a comparison's sections beside the loads: unit tests of both refs, accuracy, the API process over time.

What the sections hold is written in `diag/compare/{unit_tests,accuracy,api_process}.py`. Names and messages come from
code under test and from servers: they are shortened, and hold nothing that controls a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from atom.bench.gsm8k.problems import GSM8K
from atom.cli.accuracy_tables import plus_minus
from atom.cli.gc_cells import NONE
from atom.cli.gc_tables import window_tables
from atom.cli.render import SEPARATOR, Table, count
from atom.diag.compare.api_process import shown_profiles
from atom.diag.gc_profile.names import one_line
from atom.diag.gc_profile.words import amount, counted

__all__ = ["accuracy_section_tables", "api_process_section_tables", "unit_test_section_tables"]

MOST_NAMED: Final = 20
"""Tests of one kind that are named; the rest are counted."""
_LONGEST_NAME: Final = 110


# ---- unit tests --------------------------------------------------------------------------------------------------


def unit_test_section_tables(section: Mapping[str, Any] | None) -> list[Table]:
    """Empty where no tests were asked for."""
    if section is None:
        return []
    rows = [
        [
            one_line(arm["label"], 40),
            *(_counted(arm, name) for name in ("passed", "skipped", "failed", "errors")),
            f"{arm['seconds']:,.0f}",
        ]
        for arm in section["arms"]
    ]
    notes = [f"{one_line(arm['label'], 40)}: {one_line(arm['problem'])}" for arm in section["arms"] if arm["problem"]]
    notes += _test_notes(section)
    columns = ("unit tests", "passed", "skipped", "failed", "errors", "seconds")
    return [Table("unit tests of both", columns, rows, notes), *_changed_table(section)]


def _counted(arm: Mapping[str, Any], name: str) -> str:
    nothing = arm["problem"] and not any(arm[one] for one in ("passed", "skipped", "failed", "errors"))
    return NONE if nothing else count(arm[name])


def _test_notes(section: Mapping[str, Any]) -> list[str]:
    base, head = one_line(section["base"], 40), one_line(section["head"], 40)
    notes: list[str] = []
    if not any(not arm["problem"] and _ran(arm) for arm in section["arms"]):
        return notes
    if not section["changed"] and section["complete"]:
        notes.append("no test that both have changes status")
    notes += _named(f"fail on both: {len(section['fail_on_both']):,}", section["fail_on_both"])
    if section["complete"]:
        for label, only in ((base, section["only_base"]), (head, section["only_head"])):
            bad = [one["test"] for one in only if one["status"] in ("failed", "error")]
            notes += [f"only in {label}: {counted(len(only), 'test')}"] if only else []
            notes += _named(f"of those, fail: {len(bad):,}", bad)
    return notes


def _ran(arm: Mapping[str, Any]) -> bool:
    return any(arm[name] for name in ("passed", "skipped", "failed", "errors"))


def _named(what: str, tests: Sequence[str]) -> list[str]:
    if not tests:
        return []
    shown = ", ".join(one_line(test, _LONGEST_NAME) for test in tests[:MOST_NAMED])
    more = f" and {len(tests) - MOST_NAMED:,} more" if len(tests) > MOST_NAMED else ""
    return [f"{what} ({shown}{more})"]


def _changed_table(section: Mapping[str, Any]) -> list[Table]:
    changed = section["changed"]
    if not changed:
        return []
    rows = [
        [one_line(one["test"], _LONGEST_NAME), one["base"], one["head"], one_line(one["message"], 80)]
        for one in changed[:MOST_NAMED]
    ]
    notes = [f"{len(changed) - MOST_NAMED:,} more change status"] if len(changed) > MOST_NAMED else []
    columns = ("test", one_line(section["base"], 40), one_line(section["head"], 40), "why")
    return [Table("tests that change status", columns, rows, notes, text_columns=(1, 2, 3))]


# ---- accuracy ----------------------------------------------------------------------------------------------------


def accuracy_section_tables(section: Mapping[str, Any] | None) -> list[Table]:
    if section is None:
        return []
    base, head = one_line(section["base"], 40), one_line(section["head"], 40)
    notes = [one_line(note) for note in section["notes"]]
    within = [
        f"{label} {share:.1%}"
        for label, share in ((base, section["within"]["base"]), (head, section["within"]["head"]))
        if share is not None
    ]
    if within:
        notes.insert(0, f"questions on which two runs of the same arm disagree: {', '.join(within)}")
    runs = section["runs"]
    form = f" ({GSM8K} format)" if section["figure"] == GSM8K else ""
    title = SEPARATOR.join(
        (
            f"accuracy on {one_line(section['problems'] or '?', 80)}{form}",
            counted(section["n"], "question"),
            f"{counted(runs['base'], 'run')} / {counted(runs['head'], 'run')}",
        )
    )
    if not section["n"]:
        return [Table(title, (), (), notes)]
    rows = [
        [
            row["filter"].replace("_", "-"),
            plus_minus(row["base"]["value"], row["base"]["stderr"]),
            plus_minus(row["head"]["value"], row["head"]["stderr"]),
            NONE if row["difference"] is None else f"{row['difference']:+.4f}",
            NONE if row["ci"] is None else f"{row['ci'][0]:+.4f} … {row['ci'][1]:+.4f}",
            f"{row['better']:,} / {row['worse']:,}",
            NONE if row["p"] is None else f"{row['p']:.2g}",
            one_line(row["verdict"]),
        ]
        for row in section["filters"]
    ]
    columns = ("filter", f"{base} ± stderr", f"{head} ± stderr", "Δ", "95% interval", "better / worse", "p", "verdict")
    return [Table(title, columns, rows, notes, text_columns=(7,))]


# ---- the API process ---------------------------------------------------------------------------------------------


def api_process_section_tables(section: Mapping[str, Any] | None, *, width: int | None = None) -> list[Table]:
    """The verdict, the windows of each arm's first run, and which quantities grow."""
    if section is None:
        return []
    lead = [one_line(section["verdict"], 900)]
    notes = [one_line(note) for note in section["notes"]]
    profiles = shown_profiles(section)
    tables = [Table("API process over the long run", (), (), notes, lead=lead)]
    if profiles:
        tables += window_tables(profiles, width=width)
    return [*tables, *_growth_table(section)]


_FINDINGS: Final[Mapping[str | None, Callable[[str, str], str]]] = {
    "base": lambda base, head: f"grows in {base} alone",
    "head": lambda base, head: f"grows in {head} alone",
    "both": lambda base, head: "grows in both",
    "neither": lambda base, head: "no difference seen",
    None: lambda base, head: "not enough data",
}


def _growth_table(section: Mapping[str, Any]) -> list[Table]:
    told = [q for q in section["quantities"] if q["finding"] is not None]
    if not told:
        return []
    base, head = one_line(section["base"], 40), one_line(section["head"], 40)
    rows = [
        [
            q["label"],
            *(cell for side in ("base", "head") for cell in _grown(q[side], q["unit"])),
            _FINDINGS[q["finding"]](base, head),
        ]
        for q in told
    ]
    per = " or ".join(dict.fromkeys(q["per"] for q in told))
    return [
        Table(
            "what grows with the requests served",
            ("quantity", "first → last", f"per {per}", "first → last", f"per {per}", "finding"),
            rows,
            ["an arm stands out where it grows and the 99.5% intervals of the two slopes are apart"],
            groups=((base, 2), (head, 2), ("", 1)),
            text_columns=(5,),
        )
    ]


def _grown(side: Mapping[str, Any], unit: str) -> tuple[str, str]:
    first, last = amount(side["first"], unit), amount(side["last"], unit)
    name = first.rpartition(" ")[2]
    both = f"{first.removesuffix(f' {name}')} → {last}" if last.endswith(f" {name}") else f"{first} → {last}"
    return both, amount(side["slope"], unit)
