"""Tables of a run that replayed session trees: by turn, by depth of the agent, sessions and what the scenario says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from atom.cli.render import UNSUPPORTED, Table, count, number, percent

__all__ = ["agentic_tables"]

_COLUMNS: Final = (
    *("req", "in", "out", "p50\n(ms)", "p99\n(ms)"),
    *("inter-\nactiv-\nity", "theory\n(%)", "real\n(%)"),
)
"""Few and short: with six digits each they fit into 80 cells."""
_GROUPS: Final = (("", 1), ("tokens", 2), ("TTFT", 2), ("", 1), ("cached", 2))
_NOTE: Final = f"{UNSUPPORTED} fewer than 10 samples lie beyond this quantile: not supported by n"


def agentic_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Empty for a run that replayed none."""
    section = summary.get("agentic")
    if section is None:
        return []
    turns = [[_turns(row), *_cells(row)] for row in section["by_turn"]]
    depths = [[_depth(row["depth"]), *_cells(row)] for row in section["by_depth"]]
    depths.append(["all", *_cells(section["all"])])
    marks = _marks([*turns, *depths])
    return [
        Table("by turn of its agent", ("turns", *_COLUMNS), turns, groups=_GROUPS),
        Table("by depth of the agent", ("agent", *_COLUMNS), depths, marks, groups=_GROUPS),
        _sessions(summary["figures"], section, marks_told=bool(marks)),
    ]


def _marks(rows: Sequence[Sequence[str]]) -> Sequence[str]:
    return (_NOTE,) if any(UNSUPPORTED in cell for row in rows for cell in row) else ()


def _turns(row: Mapping[str, Any]) -> str:
    low, high = row["from_turn"], row["to_turn"]
    return f"{low}+" if high is None else f"{low}" if low == high else f"{low}–{high}"


def _depth(depth: int) -> str:
    return "main" if depth == 0 else "sub" if depth == 1 else f"depth {depth}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        count(row["requests"]),
        number(row["mean_input_tokens"], 3),
        number(row["mean_output_tokens"], 3),
        _marked(row["median_ttft_ms"], row["median_ttft_supported"]),
        _marked(row["p99_ttft_ms"], row["p99_ttft_supported"]),
        _marked(row["interactivity"], row["interactivity_supported"]),
        percent(row["theoretical_cached_share"]).rstrip("%"),
        percent(row["realised_cached_share"]).rstrip("%"),
    ]


def _marked(value: float | None, supported: bool) -> str:
    return number(value, 3) + ("" if supported or value is None else UNSUPPORTED)


def _figure(figure: Mapping[str, Any], unit: str) -> str:
    mark = "" if figure["supported"] or figure["value"] is None else f" {UNSUPPORTED}"
    return f"{number(figure['value'])} {unit}{mark}"


def _sessions(figures: Mapping[str, Any], section: Mapping[str, Any], *, marks_told: bool) -> Table:
    values = {name: figure["value"] for name, figure in figures.items()}
    started = f"{count(values['sessions_started'])} begun"
    parts = [
        f"{count(values[f'sessions_{name}'])} {label}"
        for name, label in (("finished", "finished"), ("recycled", "begun after another one of their lane"))
        if values[f"sessions_{name}"] is not None
    ]
    rows = [
        ["sessions", ", ".join([started, *parts])],
        [
            "beyond the context",
            f"{count(values['context_overflows'])} requests, {count(values['sessions_overflowed'])} sessions",
        ],
        ["interactivity", f"{_figure(figures['interactivity'], 'tok/s')}: 1 ÷ p90 of (TPOT + TTFT ÷ output tokens)"],
    ]
    if figures["p50_subagent_s"]["n"]:
        text = f"{count(figures['p50_subagent_s']['n'])}, p50 {_figure(figures['p50_subagent_s'], 's')} each"
        if waits := figures["p50_join_wait_s"]["n"]:
            text += (
                f"; waited for {count(waits)} times, p50 {_figure(figures['p50_join_wait_s'], 's')}, most "
                f"{number(values['max_join_wait_s'])} s"
            )
        rows.append(["sub-agents", text])
    if values["realised_cached_share"] is None and section["all"]["completed"]:
        rows.append(["cache: real", "not known: the server does not say how many prompt tokens it had cached"])
    marks = () if marks_told else _marks(rows)
    return Table("", ("replay", "value"), rows, (*section["notes"], *marks, *_scenario_notes(section["scenario"])))


def _scenario_notes(scenario: Mapping[str, Any]) -> Sequence[str]:
    if scenario["name"] is None:
        return ()
    told = "would count for it" if scenario["valid"] else "does not count for it"
    return (
        f"scenario {scenario['name']}: this run {told}; a result of atom is no official submission",
        *(f"against the scenario: {reason}" for reason in scenario["reasons"]),
    )
