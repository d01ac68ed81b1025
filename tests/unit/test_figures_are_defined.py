"""docs/definitions.md, or the page of the load that it links, against every figure that the code can make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.bench.agentic import report as agentic
from atom.bench.gsm8k.generate import generate_problems
from atom.bench.gsm8k.problems import GSM8K
from atom.bench.gsm8k.questions import questions_of
from atom.bench.gsm8k.score import accuracy_figures
from atom.bench.metrics import DISTRIBUTIONS, RATES, collect
from atom.bench.rundir import RunDirectory
from atom.bench.slices import slices_of
from atom.bench.sweep import Plan, Swept, conclude
from atom.bench.sweep_index import SweepIndex
from atom.cli.sweep_publish import sweep_summary
from atom.diag.compare.document import FIGURES
from atom.diag.compare.metrics import METRICS

ROOT = Path(__file__).parents[2]


def named(page: str) -> set[str]:
    """What stands between backticks in a page of docs/."""
    return set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


def server_figure_keys() -> Iterator[tuple[str, str]]:
    """Where each `ServerFigure` of the code is made, and a pattern of its key: what is filled in at run time may be any
    word."""
    for path in sorted((ROOT / "diag").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ServerFigure":
                parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
                texts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z]+" for part in parts]
                yield f"{path.relative_to(ROOT)}:{node.lineno}", "".join(texts)


def test_rates_and_latencies() -> None:
    assert not {*RATES, *DISTRIBUTIONS} - named("definitions.md")


def test_figures_of_agent_sessions() -> None:
    assert not set(agentic.DEFINITIONS) - named("definitions.md") - named("agentic.md")


def test_figures_of_word_problems() -> None:
    words = named("definitions.md")
    figures = set(accuracy_figures(questions_of([]), GSM8K))
    assert {name for name in figures if not name.endswith("_stderr")} <= words
    assert {name.removesuffix("_stderr") for name in figures if name.endswith("_stderr")} <= words
    assert "_stderr" in words
    assert f"{generate_problems(1, 0).figure}_" in words


def test_figures_of_a_sweep(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.write_run_json({"name": "bench sweep"})
    plan = Plan(swept=Swept.CONCURRENCY)
    index = SweepIndex(plan=plan, objectives=[], fail_below=None, options={})
    assert not set(sweep_summary(run_dir, index, conclude(plan, [], []))["figures"]) - named("definitions.md")


def test_figures_of_a_comparison() -> None:
    words = named("ab_compare.md")
    assert {f"LOAD.METRIC_{name}" for name in FIGURES} <= words
    assert set(METRICS) <= words


def test_figures_of_the_server() -> None:
    words, keys = named("definitions.md"), list(server_figure_keys())
    assert keys
    missing = [f"{where}: {key}" for where, key in keys if not any(re.fullmatch(key, word) for word in words)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("page", ["definitions.md", "run_directory.md", "ab_compare.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Pages, and the headings in them, that the definitions are left to."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([a-z_0-9]+\.md)?(?:#([a-z0-9-]+))?\)", text):
        linked = (ROOT / "docs" / (target or page)).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{target}#{anchor}"


def test_columns_of_slices() -> None:
    slices = slices_of([], collect([], {}), 0, 1_000_000_000, 1.0).as_dict()
    assert not set(slices) - named("run_directory.md")
