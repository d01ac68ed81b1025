"""Tables of a run that replayed session trees: by turn, by depth of the agent, sessions and what the scenario says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from atom.cli.render import Table, count, number, percent

__all__ = ["agentic_tables"]

_COLUMNS: Final = (
    "req",
    "input\n(tok)",
    "output\n(tok)",
    "TTFT p50\n(ms)",
    "TTFT p99\n(ms)",
    "TPOT p50\n(ms)",
    "inter-\nactivity",
    "cached:\ntheory",
    "cached:\nreal",
)


def agentic_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Empty for a run that replayed none."""
    section = summary.get("agentic")
    if section is None:
        return []
    tables = [
        Table("by turn of its agent", ("turns", *_COLUMNS), [[_turns(row), *_cells(row)] for row in section["by_turn"]])
    ]
    depths = [[_depth(row["depth"]), *_cells(row)] for row in section["by_depth"]]
    tables.append(Table("by depth of the agent", ("agent", *_COLUMNS), [*depths, ["all", *_cells(section["all"])]]))
    tables.append(_sessions(summary["figures"], section))
    return tables


def _turns(row: Mapping[str, Any]) -> str:
    low, high = row["from_turn"], row["to_turn"]
    return f"{low}+" if high is None else f"{low}" if low == high else f"{low}–{high}"


def _depth(depth: int) -> str:
    return "main" if depth == 0 else "sub-agent" if depth == 1 else f"depth {depth}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    p99 = number(row["p99_ttft_ms"])
    if row["p99_ttft_ms"] is not None and not row["p99_ttft_supported"]:
        p99 += " †"
    return [
        count(row["requests"]),
        number(row["mean_input_tokens"]),
        number(row["mean_output_tokens"], 3),
        number(row["median_ttft_ms"]),
        p99,
        number(row["median_tpot_ms"]),
        number(row["interactivity"]),
        percent(row["theoretical_cached_share"]),
        percent(row["realised_cached_share"]),
    ]


def _sessions(figures: Mapping[str, Any], section: Mapping[str, Any]) -> Table:
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
        ["interactivity", f"{number(values['interactivity'])} tok/s: 1 ÷ p90 of (TPOT + TTFT ÷ output tokens)"],
    ]
    if figures["p50_subagent_s"]["n"]:
        text = f"{count(figures['p50_subagent_s']['n'])}, p50 {number(values['p50_subagent_s'])} s each"
        if waits := figures["p50_join_wait_s"]["n"]:
            text += (
                f"; waited for {count(waits)} times, p50 {number(values['p50_join_wait_s'])} s, most "
                f"{number(values['max_join_wait_s'])} s"
            )
        rows.append(["sub-agents", text])
    if values["realised_cached_share"] is None:
        rows.append(["cache: real", "not known: the server does not say how many prompt tokens it had cached"])
    return Table("", ("replay", "value"), rows, _scenario_notes(section["scenario"]))


def _scenario_notes(scenario: Mapping[str, Any]) -> Sequence[str]:
    if scenario["name"] is None:
        return ()
    told = "would count for it" if scenario["valid"] else "does not count for it"
    return (
        f"scenario {scenario['name']}: this run {told}; a result of atom is no official submission",
        *(f"- {reason}" for reason in scenario["reasons"]),
    )
