"""Where a comparison goes: page, terminal, JSON, Markdown, JUnit, the step summary of a CI job; and its exit status."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from atom.bench.junit import JunitCase, junit_xml
from atom.bench.rundir import RunDirectory, write_text
from atom.cli.ab_tables import arms_text, comparison_tables, gate_name, outcome_text, verdict_lines
from atom.cli.publish import Attempts, Output, TableConsole, append_step_summary, show_tables, write_or_print
from atom.cli.render import markdown
from atom.diag.compare.document import document
from atom.diag.compare.page import comparison_page
from atom.recipes.errors import ExitStatus

__all__ = ["comparison_junit", "publish_comparison"]


def publish_comparison(run_dir: RunDirectory, output: Output) -> ExitStatus:
    """Sum up what there is, write and show everything in `output`. What cannot be written keeps nothing else from being
    written or shown; RunError names it at the end."""
    told = document(run_dir.path)
    text = json.dumps({**told, "run_directory": str(run_dir.path.absolute())}, indent=2, allow_nan=False) + "\n"
    place = str(run_dir.report_html)
    wide = markdown(comparison_tables(told, location=place))
    attempt = Attempts()
    attempt(lambda: run_dir.write_summary(told))
    attempt(lambda: write_text(run_dir.report_html, comparison_page(run_dir.path, told, comparison_tables(told))))
    for path in output.json:
        attempt(partial(write_or_print, path, text))
    if output.markdown is not None:
        attempt(partial(write_or_print, output.markdown, wide))
    if output.junit is not None:
        attempt(partial(write_or_print, output.junit, comparison_junit(told)))
    if output.step_summary is not None:
        append_step_summary(output.step_summary, wide + "\n")
    if output.quiet or output.owns_stdout:
        _complain(told)
    else:
        console = TableConsole()
        attempt(lambda: show_tables(comparison_tables(told, width=console.width, location=place), console))
    attempt.raise_failures()
    _name_written(output)
    return ExitStatus(told["status"])


def _name_written(output: Output) -> None:
    named = [str(path) for path in (*output.json, output.markdown, output.junit) if path is not None]
    if (files := [path for path in named if path != "-"]) and not output.quiet:
        with contextlib.suppress(OSError):
            print(f"wrote {', '.join(files)}", file=sys.stderr)


def _complain(told: Mapping[str, Any]) -> None:
    """Where no table is shown, standard error has the verdicts, and what makes the exit status another one than 0."""
    for line in [*verdict_lines(told), *told["reasons"]]:
        print(line, file=sys.stderr)
    for gate in told["gates"]:
        if gate["outcome"] != "pass" or gate["confounded"]:
            print(f"gate {outcome_text(gate)}: {gate_name(gate, told)}: {gate['reason']}", file=sys.stderr)


def comparison_junit(told: Mapping[str, Any]) -> str:
    """A case per load (its primary metric), per gate, and per unit test that changed status. A load that is slower is
    no failure by itself: that is for gates to say; one that is no evidence is an error."""
    properties = {"verdict": str(told["verdict"]), "validity": str(told["validity"])}
    return junit_xml("atom ab-compare", list(_cases(told)), properties)


def _cases(told: Mapping[str, Any]) -> Iterator[JunitCase]:
    for load in told["loads"]:
        arms = f" ({arms})" if (arms := arms_text(load, told)) else ""
        evidence = not load["censored"] and any(pair["complete"] for pair in load["pairs"])
        yield JunitCase(f"{load['load']}: {load['primary']}{arms}", error=None if evidence else load["sentence"])
    for gate in told["gates"]:
        where = ", ".join(filter(None, (gate["load"], arms_text(gate, told))))
        name = f"gate {gate['gate']}" + f" ({where})" * bool(where) + " (confounded)" * bool(gate["confounded"])
        unanswered = gate["outcome"] == "undecided" or (gate["outcome"] == "pass" and gate["unasked"])
        yield JunitCase(
            name,
            failure=gate["reason"] if gate["outcome"] == "fail" else None,
            error=gate["reason"] if unanswered else None,
        )
    tests = told.get("tests") or {"changed": [], "new_failures": []}
    changed = {one["test"]: f"{one['base']} → {one['head']}: {one['message']}" for one in tests["changed"]}
    new = set(tests["new_failures"])
    for name in [*changed, *(name for name in tests["new_failures"] if name not in changed)]:
        yield JunitCase(f"test {name}", failure=changed.get(name, "fails on the head alone") if name in new else None)
    if told["validity"] != "valid":
        yield JunitCase("comparison", error="\n".join(told["reasons"]) or told["ended_text"])
