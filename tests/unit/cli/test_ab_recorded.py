"""`atom ab-compare` over results that another tool recorded: everything after the runs, without a server."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from atom.cli.dispatch import main
from atom.diag.compare.document import document, is_decided
from atom.diag.compare.journal import read_records
from atom.diag.compare.plan import Plan

REQUESTS = 120
LANES = 8


def write_result(path: Path, *, factor: float = 1.0, failed: int = 0, seed: int = 0) -> Path:
    """As `vllm bench serve --save-result --save-detailed` has it: a closed loop of 8, 10 ms between tokens."""
    draw = random.Random(f"{path.name}{seed}")
    ttfts = [0.05 * factor * (1 + draw.gauss(0, 0.02)) for _ in range(REQUESTS)]
    itls = [[0.010 * factor * (1 + draw.gauss(0, 0.01)) for _ in range(15)] for _ in range(REQUESTS)]
    starts = [1000.0 + (index // LANES) * 0.205 * factor for index in range(REQUESTS)]
    ends = [start + ttft + sum(gaps) for start, ttft, gaps in zip(starts, ttfts, itls, strict=True)]
    duration = max(ends) - starts[0]
    content = {
        "date": "20261130-120000",
        "backend": "openai",
        "model_id": "m",
        "num_prompts": REQUESTS,
        "max_concurrency": LANES,
        "duration": duration,
        "completed": REQUESTS - failed,
        "failed": failed,
        "total_input_tokens": REQUESTS * 64,
        "total_output_tokens": REQUESTS * 16,
        "request_throughput": REQUESTS / duration,
        "output_throughput": REQUESTS * 16 / duration,
        "input_lens": [64] * REQUESTS,
        "output_lens": [0 if index < failed else 16 for index in range(REQUESTS)],
        "ttfts": [0.0 if index < failed else value for index, value in enumerate(ttfts)],
        "itls": [[] if index < failed else gaps for index, gaps in enumerate(itls)],
        "start_times": starts,
        "generated_texts": ["x"] * REQUESTS,
        "errors": ["out of blocks" if index < failed else "" for index in range(REQUESTS)],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def arm(folder: Path, label: str, runs: int = 3, **what: Any) -> str:
    paths = [write_result(folder / f"{label}-{n}.json", **what) for n in range(runs)]
    return f"{label}=run:{','.join(map(str, paths))}"


def compare(folder: Path, specs: Sequence[str], *options: str) -> tuple[int, dict[str, Any]]:
    out = folder / "out"
    status = main(["ab-compare", *specs, "--output-dir", str(out), *options])
    return status, json.loads((out / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def no_ci_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def test_slower_is_said_first_and_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "main"), arm(tmp_path, "branch", factor=1.05)]
    junit = tmp_path / "ab.xml"
    status, told = compare(tmp_path, specs, "--fail-if-slower", "2%", "--junit", str(junit))
    assert status == 3
    output, errors = capsys.readouterr()
    assert output.startswith("recorded: branch is slower than main by ")
    assert "schedule" in errors
    assert "FAIL: slower by" in output
    (load,) = told["loads"]
    metric = load["metrics"]["itl_p50"]
    assert metric["primary"]
    assert metric["delta_pct"] == pytest.approx(5, abs=0.5)
    assert metric["head"] / metric["base"] == pytest.approx(1 + metric["delta_pct"] / 100)
    assert metric["ci_pct"][0] < metric["delta_pct"] < metric["ci_pct"][1]
    assert load["word"] == told["verdict"] == "slower"
    assert [len(pair["runs"]) for pair in load["pairs"]] == [1, 1, 1]
    assert (told["valid"], told["status"]) == (True, 3)
    suite = ElementTree.parse(junit).getroot()
    assert next(case.get("name") for case in suite.iter("testcase")) == "recorded: itl_p50"
    assert len(list(suite.iter("failure"))) == 1
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_gate_that_passes(tmp_path: Path) -> None:
    status, told = compare(tmp_path, [arm(tmp_path, "a"), arm(tmp_path, "b", seed=1)], "--fail-if-slower", "2%")
    assert status == 0
    assert [gate["outcome"] for gate in told["gates"]] == ["pass"]
    assert told["loads"][0]["word"] == "equivalent"


def test_a_gate_on_a_load_that_there_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "a"), arm(tmp_path, "b", factor=1.5)]
    out = tmp_path / "out"
    assert main(["ab-compare", *specs, "--output-dir", str(out), "--gate", "recroded/itl_p50:2%"]) == 2
    assert "there is no load 'recroded' to gate; there are recorded" in capsys.readouterr().err
    assert not out.exists()


def test_a_gate_on_what_was_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "a"), arm(tmp_path, "b", factor=1.5)]
    status, told = compare(tmp_path, specs, "--gate", "server_step_p50:2%")
    assert (status, told["status"]) == (4, 4)
    assert [gate["outcome"] for gate in told["gates"]] == ["undecided"]
    assert "UNDECIDED: it is not in the records of both arms" in " ".join(capsys.readouterr().out.split())


def test_one_pair_is_indicative_and_decides_no_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "a", runs=1), arm(tmp_path, "b", runs=1, factor=1.2)]
    status, told = compare(tmp_path, specs, "--fail-if-slower", "2%", "--quiet")
    assert status == 4
    assert told["loads"][0]["word"] == "indicative"
    output, errors = capsys.readouterr()
    assert output == ""
    assert "gate undecided" in errors


def test_a_censored_arm_never_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "a"), arm(tmp_path, "b", factor=0.9, failed=8)]
    status, told = compare(tmp_path, specs, "--fail-if-slower", "2%")
    assert status == 4
    assert told["loads"][0]["word"] == "censored"
    assert {metric["word"] for metric in told["loads"][0]["metrics"].values()} == {"censored"}
    output = capsys.readouterr().out
    assert output.startswith("recorded: censored, no winner between a and b: b, ")
    assert "8 of 120 requests failed" in output
    assert "faster" not in output


def test_report_and_get_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = compare(tmp_path, [arm(tmp_path, "a"), arm(tmp_path, "b", factor=1.05)])
    first = capsys.readouterr().out
    out = tmp_path / "out"
    (out / "summary.json").unlink()
    assert main(["report", str(out)]) == status == 0
    assert capsys.readouterr().out == first
    assert main(["get", str(out), "verdict"]) == 0
    assert main(["get", str(out), "recorded.itl_p50_delta_pct"]) == 0
    assert main(["get", str(out), "output_throughput_head", "--unit"]) == 0
    word, delta, throughput = capsys.readouterr().out.splitlines()
    assert word == "slower"
    assert float(delta) == pytest.approx(5, abs=0.5)
    assert throughput.endswith(" tok/s")


def test_a_comparison_that_was_killed(tmp_path: Path) -> None:
    """Of two pairs the journal has one and a half; the last line is torn."""
    compare(tmp_path, [arm(tmp_path, "a", runs=2), arm(tmp_path, "b", runs=2)], "--quiet")
    out = tmp_path / "out"
    lines = (out / "runs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "runs.jsonl").write_text("".join(lines[:3]) + lines[3][:20], encoding="utf-8")
    run = json.loads((out / "run.json").read_text(encoding="utf-8"))
    run |= {"validity": None, "ended": None}
    (out / "run.json").write_text(json.dumps(run), encoding="utf-8")
    told = document(out)
    assert told["validity"] == "interrupted"
    assert [pair["complete"] for pair in told["loads"][0]["pairs"]] == [True]
    assert main(["report", str(out), "--quiet"]) == 4
    assert main(["ab-compare", "--resume", str(out), "--quiet"]) == 0
    assert len(document(out)["loads"][0]["pairs"]) == 2


@pytest.mark.parametrize("place", ["", "plan.json", "runs.jsonl"])
def test_resume_runs_no_plan_that_others_can_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    compare(tmp_path, [arm(tmp_path, "a", runs=1), arm(tmp_path, "b", runs=1)])
    out = tmp_path / "out"
    path = out / place
    mode = path.stat().st_mode & 0o777
    assert not mode & 0o022
    path.chmod(mode | 0o020)
    capsys.readouterr()
    assert main(["ab-compare", "--resume", str(out)]) == 2
    assert f"others can write {path}" in capsys.readouterr().err
    path.chmod(mode)
    assert main(["ab-compare", "--resume", str(out)]) in (0, 4)
    assert "schedule" in capsys.readouterr().err  # what it runs is shown first


def test_resume_runs_no_plan_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(tmp_path, [arm(tmp_path, "a", runs=1), arm(tmp_path, "b", runs=1)])
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert main(["ab-compare", "--resume", str(tmp_path / "out")]) == 2
    assert "is another user's" in capsys.readouterr().err


def test_resume_takes_no_other_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(tmp_path, [arm(tmp_path, "a"), arm(tmp_path, "b")], "--quiet")
    out = str(tmp_path / "out")
    capsys.readouterr()
    assert main(["ab-compare", "--resume", out, "--pairs", "5", "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert "--pairs" in error
    assert "--seed" in error
    assert main(["ab-compare", "--resume", str(tmp_path)]) == 2


def test_more_than_two_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "before"), arm(tmp_path, "after", factor=1.3)]
    bypass = arm(tmp_path, "local", factor=1.01)
    status, told = compare(tmp_path, specs, "--arm", f"bypass:{bypass}")
    assert status == 0
    (section,) = told["causal"]
    assert [one["arm"] for one in section["arms"]] == ["before", "after", "local"]
    assert [one["role"] for one in section["arms"]] == ["control", "treatment", "bypass"]
    assert len(told["loads"]) == 2
    assert "local" in capsys.readouterr().out


def test_figures_and_words_of_several_arms_name_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "before"), arm(tmp_path, "after", factor=1.3)]
    junit = tmp_path / "ab.xml"
    options = ("--arm", f"bypass:{arm(tmp_path, 'local', factor=1.6)}", "--fail-if-slower", "2%", "--junit", str(junit))
    _, told = compare(tmp_path, specs, *options)
    gates = capsys.readouterr().out.partition("gate ")[2]
    for head in ("after", "local"):
        assert f"before → {head}" in gates
    assert [(one["base"], one["head"]) for one in told["gates"]] == [("before", "after"), ("before", "local")]
    assert [one["comparison"] for one in told["gates"]] == [one["key"] for one in told["comparisons"]]
    names = [case.get("name") for case in ElementTree.parse(junit).getroot().iter("testcase")]
    assert len(set(names)) == len(names) == 4
    for name, expected in (("", 30), ("recorded.", 30), ("recorded.local.", 60)):
        assert main(["get", str(tmp_path / "out"), f"{name}itl_p50_delta_pct"]) == 0
        assert float(capsys.readouterr().out) == pytest.approx(expected, abs=1)
    assert main(["get", str(tmp_path / "out"), "verdict"]) == 0
    assert capsys.readouterr().out == "recorded, before → after: slower; recorded, before → local: slower\n"
    options = (*options[:4], "--quiet")
    main(["ab-compare", *specs, *options, "--output-dir", str(tmp_path / "quiet")])
    errors = capsys.readouterr().err
    assert "gate fail: recorded, before → after: ITL p50" in errors
    assert "gate fail: recorded, before → local: ITL p50" in errors


def test_several_results_in_one_file_are_to_be_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_result(tmp_path / "a.json")
    path.write_text(f"{path.read_text()}\n" * 2)
    assert main(["ab-compare", f"run:{path}", f"run:{path}", "--output-dir", str(tmp_path / "out")]) == 2
    expected = f"error: {path} holds several results (--append-result): split it into one file each\n"
    assert capsys.readouterr().err == expected


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "a"), arm(tmp_path, "b")]
    assert main(["ab-compare", *specs, "--dry-run", "--output-dir", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out").exists()
    assert "nothing is run" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["80", "120"])
def test_every_line_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    specs = [arm(tmp_path, "a-rather-long-name"), arm(tmp_path, "another-rather-long-one", factor=1.02)]
    compare(tmp_path, specs, "--fail-if-slower", "5%")
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= int(width)
    assert "▸ ITL p50 (ms)" in output


def test_what_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = arm(tmp_path, "a")
    for arguments in ([spec], [spec, "no-such-thing-anywhere"], [spec, arm(tmp_path, "b", runs=2)], [spec, spec]):
        assert main(["ab-compare", *arguments, "--output-dir", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_records_that_cannot_be_read_are_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_result(tmp_path / "good.json")
    bad = tmp_path / "nan.json"
    bad.write_text(re.sub(r'"ttfts": \[[0-9.]+', '"ttfts": [NaN', good.read_text()))
    assert main(["ab-compare", f"run:{good}", f"run:{bad}", "--output-dir", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {bad}, request 0: ttfts: must be a time in seconds, got 'nan'\n"
    assert not (tmp_path / "out").exists()


def test_an_arm_that_is_called_as_its_file_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_result(tmp_path / "a.json"), write_result(tmp_path / "b.json", failed=8)
    _, told = compare(tmp_path, [f"run:{path}" for path in paths])
    assert told["loads"][0]["censored"][0] == "b.json: 8 of 120 requests failed"
    assert "b.json, b.json" not in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "pairs", "expected"), [(1.05, 3, True), (1.0, 3, True), (1.05, 1, False)])
def test_when_no_more_pairs_are_needed(tmp_path: Path, factor: float, pairs: int, expected: bool) -> None:
    """The question of --until-decided: a difference, or that there is none within the margin."""
    compare(tmp_path, [arm(tmp_path, "a"), arm(tmp_path, "b", factor=factor)], "--quiet", "--margin", "2%")
    out = tmp_path / "out"
    plan = dataclasses.replace(Plan.read(out), until_decided=True, max_pairs=8)
    (stream,) = plan.streams
    assert is_decided(out, plan, stream, read_records(out).done_of(plan, stream)[:pairs]) is expected


def test_refs_of_another_project_need_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True)
    assert main(["ab-compare", "HEAD", "HEAD", "--repo", str(tmp_path), "--output-dir", str(tmp_path / "out")]) == 2
    assert "--recipe" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_figures_are_there_under_both_names(tmp_path: Path) -> None:
    _, told = compare(tmp_path, [arm(tmp_path, "a"), arm(tmp_path, "b")], "--quiet")
    assert told["figures"]["itl_p50_base"] == told["figures"]["recorded.itl_p50_base"]


def test_results_of_different_loads_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each arm's results differ among themselves in the same way, so only matched results show it."""
    specs = [arm(tmp_path, "a"), arm(tmp_path, "b")]
    for label, lengths in (("a", (64, 64, 64)), ("b", (64, 128, 256))):
        for number, length in enumerate(lengths):
            path = tmp_path / f"{label}-{number}.json"
            told = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(json.dumps({**told, "input_lens": [length] * REQUESTS}), encoding="utf-8")
    junit, page = tmp_path / "ab.xml", tmp_path / "ab.md"
    options = ("--fail-if-slower", "5%", "--junit", str(junit), "--markdown", str(page))
    status, told = compare(tmp_path, specs, "--quiet", *options)
    differs = "load input tokens: 7680 / 15360; 7680 / 30720"
    assert told["confounded"] == [differs]
    assert told["loads"][0]["word"].startswith("confounded")
    (gate,) = told["gates"]
    assert (status, told["status"], gate["outcome"]) == (4, 4, "pass")  # of loads that nobody meant to be different
    assert gate["confounded"] == gate["unasked"] == [differs]
    assert told["loads"][0]["gates"] == [gate]
    assert f"the arms differ in {differs}" in gate["reason"]
    assert "gate pass (confounded): " in capsys.readouterr().err
    assert "PASS (confounded): " in page.read_text()
    (error,) = ElementTree.parse(junit).getroot().iter("error")
    assert differs in str(error.get("message"))


def test_a_result_of_another_commit_is_stamped(tmp_path: Path) -> None:
    specs = [arm(tmp_path, "before"), arm(tmp_path, "after", factor=1.3)]
    old = ["--arm", f"recorded:{arm(tmp_path, 'old', factor=1.1)}"]
    shas = ["--arm-sha", f"after:{'a' * 40}", "--arm-sha", f"old:{'b' * 40}"]
    _, told = compare(tmp_path, specs, *old, *shas, "--quiet")
    stamps = {one["arm"]: one["stamp"] for one in told["causal"][0]["arms"]}
    assert stamps == {"before": None, "after": None, "old": "not this head"}


def test_the_shape_of_recorded_loads_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [arm(tmp_path, "a"), arm(tmp_path, "b")]
    assert main(["ab-compare", *specs, "--dry-run"]) == 0
    assert f"C{LANES} · {REQUESTS} requests" in capsys.readouterr().out
    assert main(["ab-compare", *specs, "--dry-run", "--load", "random", "--pairs", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: --")
