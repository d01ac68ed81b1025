"""`atom gc-profile`: what its command lines mean, and which are refused with one line that names the flags."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atom.cli import dispatch
from atom.cli.options import parse_duration, split_multiple
from atom.diag.gc_profile.arms import ReplayLoad, StepTime
from atom.recipes.errors import ExitStatus, UsageError


def run(*arguments: str) -> int:
    return dispatch.main(["gc-profile", *arguments])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), ("250ms", 0.25), ("2.5", 2.5), ("5 ", 5), ("2min", 120)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--window", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "0", "-1s", "10x", "1h30", "nan", "inf", "1e3", "20y", "9999999999h", "٣s"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError, match="--window"):
        parse_duration("--window", text)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--"], ["command after `--`"]),
        (["--pid", "7", "--recipe", "simulated"], ["--pid", "--recipe"]),
        (["--pid", "7", "--", "server"], ["--pid", "`--`"]),
        (["--recipe", "simulated", "--url", "http://127.0.0.1:1"], ["--recipe", "--url"]),
        (["run", "--url", "http://127.0.0.1:1"], ["run directory", "--url"]),
        (["run", "--", "server"], ["run directory", "`--`"]),
        (["run", "--duration", "3s"], ["--duration", "run directory"]),
        (["run", "--num-prompts", "3"], ["--num-prompts", "run directory"]),
        (["run", "--output-dir", "x"], ["--output-dir", "run directory"]),
        (["--url", "http://127.0.0.1:1", "--what-if", "freeze", "--num-prompts", "3"], ["--what-if", "--url"]),
        (["--pid", "7", "--what-if", "freeze", "--num-prompts", "3"], ["--what-if", "--pid"]),
        (["--recipe", "simulated", "--what-if", "freeze"], ["--what-if", "--num-prompts"]),
        (["--recipe", "simulated", "--what-if", "melt", "--num-prompts", "3"], ["--what-if", "melt"]),
        (["--recipe", "simulated", "--input-len", "3"], ["--random-input-len", "--num-prompts"]),
        (["--url", "http://127.0.0.1:1", "--set", "a=b"], ["--set", "--url"]),
        (["--url", "http://127.0.0.1:1", "--attach-method", "gdb"], ["--attach-method", "--url"]),
        (["--print-env", "--json", "-"], ["--json", "--print-env"]),
        (["a", "b", "--label", "x"], ["--label"]),
        (["--pid", "0"], ["--pid"]),
        (["--url", ""], ["--url"]),
        (["--url", "127.0.0.1:8000"], ["--url"]),
        (["--url", "ftp://127.0.0.1:8000"], ["--url", "ftp"]),
        (["--url", "http://127.0.0.1:99999"], ["--url", "99999"]),
        (["--pid", str(os.getppid()), "--attach-method", "foo"], ["--attach-method", "foo"]),
        (["--pid", str(os.getppid())], ["--pid", "this command itself was started from"]),
        (["--pid", str(os.getpid())], ["--pid", "this command itself"]),
        (["run", "--label", " "], ["--label"]),
        (["--url", "http://127.0.0.1:1", "--duration", "99999999h"], ["--duration", "too long"]),
        (["run", "--html", "-"], ["--html"]),
        (["run", "--junit", "-", "--json", "-"], ["--junit", "--json", "standard output"]),
        (["--recipe", "simulated", "--duration", "soon"], ["--duration"]),
        (["--recipe", "simulated", "--window", "0"], ["--window"]),
        (["--recipe", "simulated", "--fail-if", "gen2_shar>1%"], ["--fail-if", "gen2_share"]),
        (["nowhere"], ["nowhere", "no run directory"]),
        (["replay", "--arms", "dirty"], ["--arms", "dirty"]),
        (["replay", "--arms", ","], ["--arms"]),
        (["replay", "--faults", "everything"], ["--faults", "everything"]),
        (["replay", "--faults", "gauges", "--arms", "clean"], ["--faults", "--arms"]),
        (["replay", "--scale", "0"], ["--scale"]),
        (["replay", "--scale", "nan"], ["--scale"]),
        (["replay", "--num-prompts", "0"], ["--num-prompts"]),
        (["replay", "--fail-if", "clena:gen2_share>1%"], ["--fail-if", "clena"]),
        (["replay", "--", "server"], ["server"]),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flags(
    arguments: list[str],
    named: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == ExitStatus.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for name in named:
        assert name in captured.err
    assert not any(tmp_path.iterdir()), "nothing is left of a command that was refused"


def test_help_of_the_profile_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "atom gc-profile [OPTIONS]" in text
    assert "replay" in text
    assert "--what-if" in text
    assert "freeze:SECONDS" in text
    assert dispatch.main(["--help"]) == 0
    assert "Say whether garbage collection is" in capsys.readouterr().out
    assert run("replay", "--help") == 0
    assert "atom gc-profile replay [OPTIONS]" in capsys.readouterr().out


def test_what_follows_the_dashes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even atom's own options are taken from somebody else's command line."""
    foreign = ["--", "server", "--traceback", "--set", "a", "b", "--markdown"]
    assert split_multiple(["gc-profile", "--set", "a=1", "b=2", *foreign]) == [
        *["gc-profile", "--set", "a=1", "--set", "b=2"],
        *foreign,
    ]
    seen: list[list[str]] = []

    def take(arguments: list[str]) -> int:
        seen.append(arguments)
        return 0

    monkeypatch.setattr(dispatch, "_run", take)
    assert dispatch.main(["gc-profile", "--traceback", *foreign]) == 0
    assert seen == [["gc-profile", *foreign]]


def test_the_plan_of_the_replay_is_the_documents_load_in_minutes() -> None:
    load = ReplayLoad()
    assert (load.num_prompts, load.input_len, load.output_len, load.concurrency) == (20_000, 2_048, 64, 64)
    assert 230 < load.seconds < 250
    assert load.num_prompts / load.seconds == pytest.approx(83, abs=1)
    half_an_hour = ReplayLoad(step_time=StepTime().scaled(7))
    assert half_an_hour.seconds == pytest.approx(7 * load.seconds)
    assert half_an_hour.seconds / 60 == pytest.approx(28, abs=1)
