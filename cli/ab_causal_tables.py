"""Tables of more than two arms (`diag/compare/causal.py`) and of a crossover (`diag/compare/crossover.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atom.cli.render import Table, number

__all__ = ["causal_tables"]

Section = Mapping[str, Any]


def causal_tables(document: Mapping[str, Any]) -> list[Table]:
    """Of a comparison's document: `causal` and `cross` have a section per load. Empty where there is none."""
    tables = [table for section in _sections(document, "causal") for table in _causal(section)]
    return tables + [table for section in _sections(document, "cross") for table in _crossover(section)]


def _sections(document: Mapping[str, Any], name: str) -> Sequence[Section]:
    found = document.get(name) or []
    return [found] if isinstance(found, Mapping) else found


# ---- causal arms


def _causal(section: Section) -> Iterator[Table]:
    arms = section["arms"]
    rows = [[_name(arm), _functional(arm), _value(arm), arm["interpretation"], _of_control(arm)] for arm in arms]
    unit = f"{section['title']}\n({section['unit']})"
    yield Table(
        f"{section['load']}: causal arms",
        ("arm", "functional result", unit, "interpretation", "% of matched\ncontrol"),
        rows,
        [*_causal_notes(section), *_evidence(arms)],
        text_columns=(1, 3),
    )
    if section["discriminators"]:
        yield _discriminators(section)


def _name(arm: Section) -> str:
    role = "" if arm["role"] in ("arm", arm["arm"]) else f" ({arm['role']})"
    stamp = f", {arm['stamp']}" if arm["stamp"] else ""
    return f"{arm['arm']}{role}{stamp}"


def _functional(arm: Section) -> str:
    """`481/512 completed; functional`"""
    parts = []
    if arm["completed"] is not None:
        of = "" if arm["requests"] is None else f"/{arm['requests']:,}"
        parts.append(f"{arm['completed']:,}{of} completed")
    elif arm["problem"]:
        parts.append("nothing recorded")
    if arm["failure"]:
        parts.append(arm["failure"]["class"])
    return "; ".join(parts) or "–"


def _value(arm: Section) -> str:
    if arm["value"] is None:
        return "–"
    return f"{number(arm['value'])}{' raw, censored' if arm['censored'] or arm['problem'] else ''}"


def _of_control(arm: Section) -> str:
    found = arm["pct_of_control"]
    if found is None:
        return "–"
    text = f"{found['value']:.2f}"
    if found["ci"] is not None:
        text += " ({:.2f} … {:.2f})".format(*found["ci"])
    return text if found["matched"] else f"{text} unmatched"


def _causal_notes(section: Section) -> Iterator[str]:
    if any(arm["pct_of_control"] and not arm["pct_of_control"]["matched"] for arm in section["arms"]):
        yield "unmatched: measured at another time than the control, so that more than the arm may differ"
    if any(arm["stamp"] for arm in section["arms"]):
        yield "not this head: recorded at another commit; it is no result of the commit under review"
    if any(arm["runs"] > 1 for arm in section["arms"]):
        mean = f"requests are summed over runs, {section['title']} is their geometric mean"
        yield f"{mean}; % of the matched control is over pairs"


def _evidence(arms: Sequence[Section]) -> Iterator[str]:
    for arm in arms:
        if arm["failure"] and arm["failure"]["line"]:
            yield f"{arm['arm']}: {arm['failure']['class']}: {arm['failure']['line']}"
        elif arm["problem"]:
            yield f"{arm['arm']}: {arm['problem']}"
        elif arm["censored"]:
            yield f"{arm['arm']}: {arm['censored'][0]}"


def _discriminators(section: Section) -> Table:
    rows = []
    for one in section["discriminators"]:
        share = "–" if one["share"] is None else f"{100 * one['share']:.1f}".replace("-", "−")
        between = (
            "–"
            if one["share_ci"] is None
            else "{:.1f} … {:.1f}".format(*(100 * x for x in one["share_ci"])).replace("-", "−")
        )
        rows.append([one["arm"], _signed(one["effect_pct"]), share, between, one["verdict"]])
    treatment, control, gap = section["treatment"], section["control"], section["gap"]
    if gap is None:
        lead = f"the gap between {control} and {treatment} has no size: one of them is no valid evidence"
    else:
        lead = f"{treatment} is {_signed(gap['pct'])}% against {control}{_between(gap['ci_pct'])}"
    return Table(
        f"{section['load']}: how much of the gap one factor explains",
        ("arm", f"Δ to {treatment}\n(%)", "share of\nthe gap (%)", "95% CI (%)", "verdict"),
        rows,
        [
            f"the dominant factor explains at least {section['dominant_share']:.0%} of the gap",
            "shares are of the gap's logarithm: two factors of a product add up",
        ],
        [lead],
        text_columns=(4,),
    )


# ---- crossover


def _crossover(section: Section) -> Iterator[Table]:
    cells = {(one["source"], one["runtime"]): one for one in section["cells"]}
    sides = ("base", "head")
    yield Table(
        f"{section['load']}: {section['title']} ({section['unit']}) by source and runtime",
        ("", *(f"{side}'s runtime" for side in sides)),
        [[f"{source}'s source", *(_cell(cells[source, runtime]) for runtime in sides)] for source in sides],
        [
            "the base's cell is the geometric mean of its runs; the others are that times their effect, over pairs",
            *(f"{_where(one)}: {one['why']}" for one in section["cells"] if one["problem"] and one["why"]),
        ],
        [section["verdict"]],
    )
    effects = {
        f"main effect of {name}" if name != "interaction" else name: one for name, one in section["effects"].items()
    }
    known = {name: one for name, one in {**effects, **section["simple"]}.items() if one is not None}
    if known:
        rows = [[name, _signed(one["pct"]), _interval(one["ci_pct"])] for name, one in known.items()]
        notes = ["indicative: one pair"] if section["indicative"] else []
        yield Table("", ("effect", "Δ %", "95% CI (%)"), rows, notes)


def _cell(cell: Section) -> str:
    problem = cell["problem"]
    if cell["value"] is None:
        return problem or "–"
    return f"{number(cell['value'])}{f' raw, {problem}' if problem else ''}"


def _where(cell: Section) -> str:
    return f"{cell['source']}'s source on {cell['runtime']}'s runtime"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")


def _between(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({_interval(interval)})"


def _interval(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "–"
    return " … ".join(_signed(one) for one in interval)
