"""Options that commands share, and the spelling helpers for them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from atom.cli.outputs import check_distinct, check_writable
from atom.recipes.cpus import check_cpus, parse_cpus
from atom.recipes.errors import UsageError

__all__ = [
    "HtmlOption",
    "JsonOption",
    "JunitOption",
    "MarkdownOption",
    "OutputDirOption",
    "QuietOption",
    "SeedOption",
    "check_outputs",
    "check_writable",
    "given_cpus",
    "parse_duration",
    "parse_pairs",
    "parse_percentiles",
    "parse_rate",
    "split_multiple",
    "split_tests",
    "step_summary",
]

OUTPUT = "Output"

JsonOption = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="PATH|-", help="Write the result as JSON; -: only JSON on stdout.", rich_help_panel=OUTPUT
    ),
]
MarkdownOption = Annotated[
    str | None,
    typer.Option(
        "--markdown",
        metavar="PATH|-",
        help="Write the tables as Markdown; - or no value: only Markdown on stdout.",
        rich_help_panel=OUTPUT,
    ),
]
JunitOption = Annotated[
    Path | None,
    typer.Option(
        "--junit", metavar="PATH|-", help="Write checks as JUnit XML; -: only XML on stdout.", rich_help_panel=OUTPUT
    ),
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="PATH",
        help="Write the page there; default: gc-profile.html in the run directory.",
        rich_help_panel=OUTPUT,
    ),
]
OutputDirOption = Annotated[
    Path | None,
    typer.Option(
        "--output-dir", metavar="DIR", help="Run directory; default: atom-runs/DATE-LOAD.", rich_help_panel=OUTPUT
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress and no tables.", rich_help_panel=OUTPUT)
]
SeedOption = Annotated[int, typer.Option("--seed", help="Same seed: same prompts, order and arrivals.")]

MULTIPLE: Final = frozenset({"--goodput", "--header", "--metadata", "--set"})
"""Options that `vllm bench serve` lets take several values after one flag."""


OPTIONAL_VALUE: Final = {"--markdown": "-"}
"""Options that may stand without their value, and what they mean then."""


def split_multiple(arguments: Sequence[str]) -> list[str]:
    """`--goodput ttft:200 tpot:30` → `--goodput ttft:200 --goodput tpot:30` for the options in MULTIPLE, and a bare
    option of OPTIONAL_VALUE gets its value."""
    result: list[str] = []
    flag: str | None = None
    taken = 0
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[position:]]
        if argument in OPTIONAL_VALUE:
            following = arguments[position + 1] if position + 1 < len(arguments) else "--"
            bare = following.startswith("-") and following != "-"
            result += [argument, OPTIONAL_VALUE[argument]] if bare else [argument]
            flag = None
            continue
        if argument.startswith("-"):
            flag, taken = (argument if argument in MULTIPLE else None), 0
        elif flag is not None:
            if taken:
                result.append(flag)
            taken += 1
        result.append(argument)
    return result


def split_tests(arguments: Sequence[str]) -> list[str]:
    """`--tests=COMMAND` → `--tests-command=COMMAND`: a flag that may stand alone takes no value otherwise."""
    return [
        f"--tests-command={one.removeprefix('--tests=')}" if one.startswith("--tests=") else one for one in arguments
    ]


def parse_rate(text: str) -> float:
    """`--request-rate`: a number, or inf."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if math.isnan(rate):
        raise UsageError(f"--request-rate must be a number of requests per second, or inf; got {text!r}")
    return rate


def given_cpus(flag: str, text: str) -> tuple[int, ...]:
    """`0-3,8` → (0, 1, 2, 3, 8), all of which this process may use; UsageError otherwise."""
    cpus = parse_cpus(flag, text)
    check_cpus(flag, cpus)
    return cpus


_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_MAX_DURATION_S: Final = 10 * 365 * 86400.0


def parse_duration(flag: str, text: str | None) -> float | None:
    """`90s`, `10m`, `1h30m`; a number alone is seconds. None stays None."""
    if text is None:
        return None
    parts = re.findall(r"(\d{1,12}(?:\.\d{1,9})?)(ms|min|[smhd]|)", text.strip(), re.ASCII)
    seconds = sum(float(value) * _SECONDS[unit] for value, unit in parts)
    whole = "".join(value + unit for value, unit in parts) == text.strip()
    several = len(parts) > 1 and any(unit == "" for _, unit in parts)
    if whole and not several and seconds > _MAX_DURATION_S:
        raise UsageError(f"{flag} {text} is too long: it may be ten years at most ({_MAX_DURATION_S / 86400:.0f}d)")
    if not whole or several or seconds <= 0:
        raise UsageError(f"{flag} must be a duration such as 90s, 10m or 1h30m, got {text!r}")
    return seconds


def parse_percentiles(text: str) -> list[float]:
    """`--metric-percentiles 50,99.9`."""
    try:
        values = [float(item) for item in text.split(",") if item.strip()]
    except ValueError:
        values = [-1.0]
    if not values or not all(0 < value < 100 for value in values):
        raise UsageError(f"--metric-percentiles must look like 50,90,99 (between 0 and 100), got {text!r}")
    return values


def parse_pairs(flag: str, items: Sequence[str], separators: str = "=") -> dict[str, str]:
    """`["A=b", "C=d"]` → {"A": "b", "C": "d"}; the first of `separators` found in an item splits it."""
    pairs: dict[str, str] = {}
    for item in items:
        position = min((at for at in map(item.find, separators) if at > 0), default=-1)
        if position < 0:
            raise UsageError(f"{flag} must look like NAME{separators[0]}VALUE, got {item!r}")
        pairs[item[:position].strip()] = item[position + 1 :].strip()
    return pairs


def check_outputs(json_path: str | None, markdown: str | None, junit: Path | None, **more: Path | None) -> None:
    """Refuse output files that cannot be written, and two formats for one file. `more`: by option name."""
    outputs: list[tuple[str, str | Path | None]] = [
        ("--json", json_path),
        ("--markdown", markdown),
        ("--junit", junit),
        *((f"--{name.replace('_', '-')}", path) for name, path in more.items()),
    ]
    for flag, path in outputs:
        if flag == "--html" and str(path) == "-":
            raise UsageError("--html -: a page is for a file; give it a path")
        check_writable(flag, path)
    check_distinct(outputs)


def step_summary() -> Path | None:
    """The page that a CI job of GitHub's shows, where there is one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(path) if path else None
