"""The page of a comparison: made from plan, journal and run directories; well-formed, self-contained, and safe to open
whatever labels, subjects and errors hold."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory
from atom.cli.ab_tables import comparison_tables
from atom.diag.compare.document import document
from atom.diag.compare.journal import Journal
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, MatchedRun, Placement, RunResult
from atom.diag.compare.page import comparison_page
from atom.diag.compare.page_distributions import Pooled, density_card
from atom.diag.compare.plan import make_plan

S, MS = 1_000_000_000, 1_000_000
HOSTILE = """<script>alert(1)</script>"'&<!--body--><img src=x onerror=alert(2)>"""
VOID = {"meta", "br", "hr", "img", "link", "input"}


# ---- a comparison as it lies on disk


def records(step_ms: float, seed: int, failed: int = 0) -> list[RequestRecord]:
    """Four lanes of 30 requests of 20 tokens, steps with noise."""
    rng = np.random.default_rng(seed)
    made: list[tuple[int, list[int], int]] = []
    for lane in range(4):
        at = S + lane * 7 * MS
        for _ in range(30):
            steps = np.cumsum(rng.gamma(400, step_ms / 400, 22) * MS).astype(np.int64) + at
            made.append((at, [int(one) for one in steps[2:]], lane))
            at = int(steps[-1])
    made.sort()
    return [
        RequestRecord(
            index=index,
            lane=lane,
            outcome=Outcome.FAILED if index < failed else Outcome.COMPLETED,
            status=500 if index < failed else 200,
            error_class="http_status" if index < failed else None,
            error_message=HOSTILE if index < failed else None,
            ready_ns=sent,
            sent_ns=sent,
            first_ns=None if index < failed else chunks[0],
            last_ns=None if index < failed else chunks[-1],
            end_ns=chunks[-1],
            chunk_ns=[] if index < failed else chunks,
            prompt_tokens=7,
            input_len=7,
            output_len=20,
            output_tokens=None if index < failed else 20,
            tokens_from=None if index < failed else "usage",
        )
        for index, (sent, chunks, lane) in enumerate(made)
    ]


def write_run(path: Path, found: Sequence[RequestRecord], command: Sequence[str]) -> None:
    run_dir = RunDirectory(path)
    start, end = min(one.sent_ns or 0 for one in found), max(one.end_ns or 0 for one in found)
    load = {"name": "random", "max_concurrency": 4, "num_prompts": len(found)}
    told = {"host": {"boot_id": "one"}, "measured_start_ns": start, "load": load, "command": list(command)}
    run_dir.write_run_json(told)
    with run_dir.requests_writer() as writer:
        for record in found:
            writer.append_line(record.to_line())
    counts = {"started": len(found), "sent": len(found), "running_integral_ns": None, "interrupted": False}
    with run_dir.client_writer() as client:
        client.append({"kind": "measured_start", "t_ns": start, "start_ns": start})
        client.append({"kind": "measured_end", "t_ns": end, **counts})
    run_dir.seal("valid")


def arm(label: str, role: str, **more: Any) -> Arm:
    provenance = {"ref": label, "sha": label.encode().hex().ljust(40, "0")[:40], "subject": HOSTILE, "dirty": False}
    return Arm(label=label, role=role, kind=ArmKind.REF, spec=HOSTILE, provenance=provenance, **more)


class Made:
    """A comparison without processes: each arm has a step time, runs are written as a load would leave them."""

    def __init__(
        self, out: Path, steps_ms: dict[str, float], *, pairs: int = 3, aa_pairs: int = 2, **plan: Any
    ) -> None:
        self.out = out
        self.failed: dict[str, int] = {}
        self.lost: set[str] = set()
        self.steps_ms = steps_ms
        labels = list(steps_ms)
        roles = ["base", "head", *labels[2:]]
        halves = (Half(name="0", server_cpus=(2, 3), client_cpus=(0,)), Half(name="1", devices="4-7"))
        self.plan = make_plan(
            [arm(label, role) for label, role in zip(labels, roles, strict=True)],
            [Comparison(base=labels[0], head=label) for label in labels[1:]],
            [Load(name="random", bench="random", options={"num-prompts": 120, "max-concurrency": 4}, margin_pct=1.0)],
            Placement(halves=halves, reason=f"two halves {HOSTILE}"),
            pairs=pairs,
            aa_pairs=aa_pairs,
            seed=7,
            extras={"scope": {"executor": HOSTILE}, "notes": [HOSTILE]},
            **plan,
        )

    def write(self) -> Path:
        run_dir = RunDirectory(self.out)
        run_dir.write_run_json({"name": "ab-compare", "command": ["atom", "ab-compare", HOSTILE], "ended": "done"})
        self.plan.write(self.out)
        with Journal(self.out) as journal:
            for pair in self.plan.schedule:
                for run in pair.runs:
                    journal.append([self._run(journal, run, side) for side in (0, 1)])
        return self.out

    def _run(self, journal: Journal, run: MatchedRun, side: int) -> RunResult:
        label = run.runs[side].arm
        directory = journal.new_directory(label)
        if label not in self.lost:
            seed = zlib.crc32(f"{run.key}/{side}".encode())
            half = 1 + 0.01 * run.runs[side].half
            found = records(self.steps_ms[label] * half, seed, self.failed.get(label, 0))
            write_run(self.out / directory, found, ["atom", "bench", "random", HOSTILE])
        problem = f"server exited with 1: {HOSTILE}" if label in self.lost else None
        return RunResult(
            matched=run.key,
            arm=label,
            side=side,
            directory=str(directory.relative_to(self.out)),
            status=1 if problem else 0,
            started_ns=S,
            ended_ns=2 * S,
            problem=problem,
            stage="start" if problem else "done",
        )


def page_of(out: Path) -> str:
    told = document(out)
    return comparison_page(out, told, comparison_tables(told))


class Balance(HTMLParser):
    """Raises at an element that is closed by another one."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def checked(page: str) -> Balance:
    balance = Balance()
    balance.feed(page)
    balance.close()
    assert balance.open == []
    assert not {"script", "img", "link", "iframe", "object"} & balance.seen.keys()
    assert not [name for name, _ in balance.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?://|@import|url\(", page)
    assert "nan%" not in page
    assert "inf%" not in page
    assert "<!--" not in page.replace("<!doctype", "")
    return balance


# ---- tests


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Made(tmp_path_factory.mktemp("slower"), {"main": 10.0, "branch": 10.6}, pairs=2).write()


def test_well_formed_and_self_contained(slower: Path) -> None:
    page = page_of(slower)
    balance = checked(page)
    assert balance.seen["h1"] == 1
    assert len(page) < 600_000


def test_text_of_others_is_text(slower: Path) -> None:
    page = page_of(slower)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") > 5


def test_the_verdict_stands_on_top(slower: Path) -> None:
    page, told = page_of(slower), document(slower)
    assert told["loads"][0]["word"] == "slower"
    assert page.index(told["loads"][0]["sentence"]) < page.index("<svg")
    assert '<li class="bad">' in page


def test_pairs_halves_and_distributions_are_drawn(slower: Path) -> None:
    page = page_of(slower)
    for text in ("ITL p50: pairs", "ITL p50: halves swapped", "All metrics", "ITL: distribution", "TTFT: distribution"):
        assert text in page
    assert page.count(">A/A 1<") == page.count(">A/A 2<") == 1
    assert "A/A noise floor ±" in page
    assert page.count('class="floor"') > 5
    assert 'class="tip-bad"' in page
    assert "CPUs 2-3" in page
    assert "GPUs 4-7" in page
    assert "atom bench random" in page  # how the figures were obtained


def test_without_a_control_there_is_no_band(tmp_path: Path) -> None:
    page = page_of(Made(tmp_path, {"main": 10.0, "branch": 10.0}, pairs=1, aa_pairs=0).write())
    checked(page)
    assert 'class="floor"' not in page.partition("</style>")[2]


def test_a_censored_arm(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 9.0}, pairs=1, aa_pairs=0)
    made.failed["branch"] = 8
    page = page_of(made.write())
    checked(page)
    assert "censored" in page
    assert '<li class="warn">' in page


def test_an_arm_that_did_not_start(tmp_path: Path) -> None:
    made = Made(tmp_path, {"main": 10.0, "branch": 9.0}, pairs=1, aa_pairs=0)
    made.lost.add("branch")
    page = page_of(made.write())
    checked(page)
    assert "could not be run" in page
    assert "server exited with 1" in page


def test_causal_arms_have_their_tables(tmp_path: Path) -> None:
    steps = {"main": 10.0, "branch": 12.0, "bypass": 10.0}
    page = page_of(Made(tmp_path, steps, pairs=1, aa_pairs=0).write())
    checked(page)
    assert "causal arms" in page
    assert "how much of the gap one factor explains" in page


def test_runs_that_are_gone_leave_a_page(slower: Path, tmp_path: Path) -> None:
    """The document may be older than what is left of the runs."""
    told = document(slower)
    page = comparison_page(tmp_path, told, comparison_tables(told))
    checked(page)
    assert "not in these curves" in page


def test_pooled_quantiles_are_of_the_bins() -> None:
    values = np.random.default_rng(3).lognormal(2.0, 0.5, 50_000)
    pooled = Pooled()
    pooled.add(values[:20_000])
    pooled.add(values[20_000:])
    assert pooled.n == 50_000
    for q in (0.01, 0.5, 0.99):
        assert pooled.quantile(q) == pytest.approx(float(np.quantile(values, q)), rel=0.005)


@pytest.mark.parametrize("values", [[0.0], [5.0], [1e-9, 1e12], [10.0, 10.0, 10.1]])
def test_any_values_are_drawn(values: list[float]) -> None:
    arms = (Pooled(), Pooled())
    for one in arms:
        one.add(values)
    balance = Balance()
    balance.feed(density_card("ITL", "ms", ("<a>", "b"), arms))
    assert balance.open == []


def test_no_values_have_no_curve() -> None:
    assert density_card("ITL", "ms", ("a", "b"), (Pooled(), Pooled())) == ""
