"""Tables of a run that asked word problems: accuracy per filter, two runs question by question, the harness beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atom.bench.gsm8k.problems import GSM8K
from atom.bench.gsm8k.section import COMPARISON_FILE, HARNESS_FILE, UNSCORED
from atom.cli.render import SEPARATOR, Table

__all__ = ["accuracy_tables", "plus_minus"]


def accuracy_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Empty for a run that asked none."""
    section = summary.get("accuracy")
    if section is None:
        return []
    tables = [_accuracy(summary, section)]
    if section["compared"] is not None:
        tables.append(_or_damaged(COMPARISON_FILE, lambda: _compared(section["compared"])))
    if section["harness"] is not None:
        tables.append(_or_damaged(HARNESS_FILE, lambda: _harness(section["harness"], section["filters"])))
    return tables


def _or_damaged(file: str, table: Callable[[], Table]) -> Table:
    """These two are shown as the run directory has them, and that may have been damaged."""
    try:
        return table()
    except (KeyError, TypeError, ValueError, AttributeError):
        return Table("", (), (), [f"{file} is damaged: it cannot be shown"])


def plus_minus(value: float | None, stderr: float | None) -> str:
    """`0.9158 ± 0.0076`"""
    if value is None:
        return "–"
    return f"{value:.4f} ± {stderr:.4f}" if stderr is not None else f"{value:.4f}"


def _accuracy(summary: Mapping[str, Any], section: Mapping[str, Any]) -> Table:
    source = summary["load"]["source"]
    n = max(row["n"] for row in section["filters"])
    shots = f"{source.get('num_fewshot')}-shot"
    chosen = source.get("sampling")
    sampling = (
        ", ".join(f"{name} {_plain(value)}" for name, value in chosen.items()) if isinstance(chosen, dict) else ""
    )
    form = f" ({GSM8K} format)" if section["figure"] == GSM8K else ""
    title = [f"accuracy on {section['problems']}{form}", f"{n:,} questions", shots, sampling]
    if (summary.get("server") or {}).get("executor") == "simulated":
        title.append("SIMULATED executor: no model was run")
    notes = [section["speculation"]["text"]]
    if source.get("num_fewshot"):
        notes.append(f"examples: {source.get('fewshot_examples')}, {source.get('fewshot_sampler')} sampler")
    if section["failed"]:
        failed = ", ".join(f"{count:,} × {name}" for name, count in sorted(section["failed"].items()))
        notes.append(f"failed requests count as wrong: {failed}")
    if section["truncated"]:
        notes.append(
            f"{section['truncated']:,} of {n:,} texts were cut off at --max-gen-toks {source.get('max_tokens')}"
        )
    if section["unscored"]:
        notes.append(UNSCORED.format(section["unscored"]))
    if section["cancelled"]:
        notes.append(f"{section['cancelled']:,} questions were asked and not waited for: they are in no figure")
    return Table(
        SEPARATOR.join(part for part in title if part),
        ("filter", "accuracy ± stderr", "correct", "n"),
        [
            [_name(row["filter"]), plus_minus(row["value"], row["stderr"]), f"{row['correct']:,}", f"{row['n']:,}"]
            for row in section["filters"]
        ],
        notes,
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _compared(compared: Mapping[str, Any]) -> Table:
    rows = [
        [
            _name(row["filter"]),
            *(f"{row[name]:,}" if compared["n"] else "–" for name in ("both", "only_a", "only_b", "neither")),
            f"{row['difference']:+.4f} ± {row['difference_stderr']:.4f}"
            if row["difference_stderr"] is not None
            else "–",
            f"{row['mcnemar_p']:.3g}" if compared["n"] else "–",
        ]
        for row in compared["filters"]
    ]
    return Table(
        "question by question",
        ("filter", "both right", "only A", "only B", "neither", "B − A ± stderr", "McNemar p"),
        rows,
        [f"A: {compared['a']}; B: this run; {compared['n']:,} questions in both", *compared["notes"]],
    )


def _harness(harness: Mapping[str, Any], ours: list[Mapping[str, Any]]) -> Table:
    if harness.get("error") is not None:
        return Table("lm-evaluation-harness", (), (), [f"NOT VALID: {harness['error']}"])
    rows = []
    for row in ours:
        theirs = harness["filters"][row["filter"]]
        rows.append(
            [
                _name(row["filter"]),
                plus_minus(row["value"], row["stderr"]),
                plus_minus(theirs["value"], theirs["stderr"]),
                f"{theirs['same_hit']:,} of {harness['n']:,}",
                f"{theirs['rescored_same']:,} of {harness['n']:,}",
            ]
        )
    return Table(
        f"lm-evaluation-harness {harness['version']} on the same server",
        ("filter", "this run", "lm_eval", "same verdict", "its texts, scored here: same"),
        rows,
        [
            f"prompts identical: {harness['same_prompt']:,} of {harness['n']:,}; texts identical: "
            f"{harness['same_text']:,} of {harness['n']:,}",
            *harness["notes"],
        ],
    )


def _name(name: str) -> str:
    """As the harness writes it."""
    return name.replace("_", "-")
