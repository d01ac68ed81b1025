"""How a comparison begins and ends: what is refused before anything is made, what a full disk or Ctrl-C leaves, and
what is said of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.cli import ab_compare as command
from atom.cli.ab_tables import comparison_tables
from atom.cli.dispatch import main
from atom.cli.render import markdown
from atom.diag.compare.conductor import Conductor
from atom.diag.compare.journal import Journal
from atom.diag.compare.plan import Plan
from atom.recipes.errors import ExitStatus

LOAD = "random --input-len 64 --output-len 8 --max-concurrency 4 --num-prompts 8"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """Two arms of two runs each, as `vllm bench serve --save-result --save-detailed` has them."""
    specs = []
    for label, gap in (("main", 0.010), ("branch", 0.011)):
        paths = [write_result(tmp_path / f"{label}-{number}.json", gap + number * 1e-5) for number in range(2)]
        specs.append(f"{label}=run:{','.join(map(str, paths))}")
    return specs


def write_result(path: Path, gap: float, count: int = 64) -> Path:
    per_request: dict[str, Any] = {
        "input_lens": 64,
        "output_lens": 16,
        "ttfts": 0.05,
        "itls": [gap] * 15,
        "generated_texts": "x",
        "errors": "",
    }
    seconds = 0.05 + 15 * gap
    content = {
        **{name: [value] * count for name, value in per_request.items()},
        "start_times": [1000.0 + index // 8 * seconds for index in range(count)],
        "model_id": "m",
        "num_prompts": count,
        "max_concurrency": 8,
        "duration": count // 8 * seconds,
        "completed": count,
        "failed": 0,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    path = tmp_path / "repo"
    (path / ".src").mkdir(parents=True)
    (path / ".src/x").write_text("x")
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(path), *identity, *words], check=True)
    return path


def no_room(path: Path) -> None:
    """As `write_text` fails where a disk is full."""
    import errno
    import os

    from atom.recipes.errors import RunError

    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


# ---- before anything is made ---------------------------------------------------------------------------------------


def test_what_servers_need_is_asked_before_anything_is_built(
    tmp_path: Path, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "needy.yaml"
    recipe.write_text(
        'name: needy\ncommand: ["{python}", "{src}", --port, "{port}"]\n'
        "requires: {modules: [json, no_such_module_1], install: pip install it}\n"
    )
    out = tmp_path / "out"
    words = ["main", "head=main", "--repo", repo, "--recipe", recipe, "--load", LOAD, "--output-dir", out]
    assert main(["ab-compare", *map(str, words)]) == ExitStatus.USAGE
    errors = capsys.readouterr().err
    assert "schedule" in errors  # right after the plan
    assert errors.count("no_such_module_1") == 1
    assert errors.endswith(f"error: recipe needy needs no_such_module_1, missing in {sys.executable}: pip install it\n")
    assert not out.exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("tests", ["{nope} x", "{python} 'x", "{python.x"])
def test_a_test_command_that_is_none_is_refused_before_the_plan(
    repo: Path, capsys: pytest.CaptureFixture[str], tests: str
) -> None:
    words = ["main", "head=main", "--repo", str(repo), "--load", LOAD, f"--tests={tests}", "--dry-run"]
    assert main(["ab-compare", *words]) == ExitStatus.USAGE
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: --tests: cannot make a command of")
    assert errors.count("\n") == 1


# ---- a full disk ---------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_be_written_leaves_the_directory_to_the_next(
    tmp_path: Path, recorded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["ab-compare", *recorded, "--output-dir", str(tmp_path / "out")]
    with monkeypatch.context() as full:
        full.setattr(Plan, "write", lambda _, directory: no_room(directory / "plan.json"))
        assert main(words) == ExitStatus.FAILED
    assert capsys.readouterr().err.endswith("plan.json: No space left on device\n")
    assert not (tmp_path / "out").exists()
    assert main(words) == ExitStatus.OK


def test_what_a_full_disk_ended_says_how_it_goes_on(
    tmp_path: Path, recorded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(Journal, "append", lambda *_: no_room(out / "runs.jsonl"))
        assert main(["ab-compare", *recorded, "--output-dir", str(out)]) == ExitStatus.FAILED
    told = (
        f"error: cannot write {out}/runs.jsonl: No space left on device; --resume {out} goes on with it once there is"
    )
    assert capsys.readouterr().err.endswith(f"{told} room\n")
    assert json.loads((out / "run.json").read_text())["validity"] == "failed"
    assert main(["ab-compare", "--resume", str(out)]) == ExitStatus.OK


# ---- the end -------------------------------------------------------------------------------------------------------


def test_what_was_written_is_named_at_the_end(
    tmp_path: Path, recorded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / name) for name in ("ab.json", "ab.md", "ab.xml")]
    outputs = [word for pair in zip(("--json", "--markdown", "--junit"), files, strict=True) for word in pair]
    words = ["ab-compare", *recorded, *outputs]
    assert main([*words, "--output-dir", str(tmp_path / "out")]) == ExitStatus.OK
    assert capsys.readouterr().err.endswith(f"\nwrote {', '.join(files)}\n")
    assert main([*words, "--output-dir", str(tmp_path / "again"), "--quiet"]) == ExitStatus.OK
    assert "wrote" not in capsys.readouterr().err


def test_a_comparison_that_is_finished_has_nothing_left_to_do(
    tmp_path: Path, recorded: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert main(["ab-compare", *recorded, "--output-dir", str(out)]) == ExitStatus.OK
    first, before = capsys.readouterr().out, (out / "run.json").read_bytes()
    monkeypatch.setattr(Conductor, "run", lambda _: pytest.fail("there is nothing to conduct"))
    assert main(["ab-compare", "--resume", str(out)]) == ExitStatus.OK
    output, errors = capsys.readouterr()
    assert "nothing left to do: " in errors
    assert output == first
    assert (out / "run.json").read_bytes() == before


def test_pairs_that_are_gone_are_made_again(
    tmp_path: Path, recorded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["ab-compare", *recorded, "--output-dir", str(out)]) == ExitStatus.OK
    before = (out / "runs.jsonl").read_text().splitlines()
    (out / "runs.jsonl").write_text("\n".join(before[:2]) + "\n")
    assert main(["ab-compare", "--resume", str(out)]) == ExitStatus.OK
    assert "nothing left to do" not in capsys.readouterr().err
    assert len((out / "runs.jsonl").read_text().splitlines()) == len(before)


def test_a_saturated_client_comes_with_what_helps(tmp_path: Path, recorded: list[str]) -> None:
    out = tmp_path / "out"
    assert main(["ab-compare", *recorded, "--output-dir", str(out)]) == ExitStatus.OK
    told = json.loads((out / "summary.json").read_text())
    assert "What helps" not in markdown(comparison_tables(told))
    told |= {"validity": "not valid", "reasons": ["load: client saturated in 1 of 4 runs, main's run-1"]}
    assert "What helps: records of a client that keeps up" in markdown(comparison_tables(told))
    told["plan"]["arms"][0]["kind"] = "ref"
    half = told["plan"]["placement"]["halves"][0]
    for client_cpus, where in (([], "a machine with more CPUs"), ([1], "--cpus with more CPUs in each half")):
        half["client_cpus"] = client_cpus
        advice = next(line for line in markdown(comparison_tables(told)).splitlines() if "What helps" in line)
        assert "fewer streams" in advice
        assert "--workers N" in advice
        assert where in advice


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("owner", "name", "kept"), [(command, "plan_of", False), (Plan, "write", False), (Conductor, "run", True)]
)
def test_the_last_line_says_that_it_was_interrupted(
    tmp_path: Path,
    recorded: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    kept: bool,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as context:
        context.setattr(owner, name, _interrupt)
        assert main(["ab-compare", *recorded, "--output-dir", str(out)]) == ExitStatus.INTERRUPTED
    what = f"--resume {out} goes on with it" if kept else "nothing was run"
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted: {what}"
    assert out.exists() == kept
    if kept:
        assert main(["ab-compare", "--resume", str(out)]) == ExitStatus.OK
