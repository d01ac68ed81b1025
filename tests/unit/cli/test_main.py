"""The shell of the command: exit statuses, one-line errors, lazy imports, options that vLLM users type."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from atom.cli import dispatch as cli
from atom.cli.options import parse_pairs, parse_percentiles, parse_rate, split_multiple
from atom.cli.signals import Terminated
from atom.recipes.errors import AtomError, ExitStatus, GateError, InvalidRunError, RunError, ServerDiedError, UsageError

SRC = str(Path(__file__).resolve().parents[3] / ".src")


WRONG_URLS = ("http://h:99999", "http://h:0", "http://h:x", "http://[::1", "http://é", "http://h/a b", "http://h?a=1")
FIELDS_OF_THE_LOAD = (
    *("stream", "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream_options", "ignore_eos"),
    *("temperature", "top_p", "top_k", "min_p", "logprobs", "top_logprobs"),
)
OWN_HEADERS = ("Content-Length", "host", "Transfer-Encoding", "CONNECTION", "Accept-Encoding", "Upgrade")
HUGE = ("99999999999999999999", "-1000000000000")
WRONG_NUMBERS = {
    **dict.fromkeys(("--duration", "--request-timeout", "--ready-timeout"), ("nan", "inf", "-1", "0", "1e300")),
    **dict.fromkeys(("--temperature", "--min-p"), ("nan", "inf", "-0.1", "1e300")),
    "--top-p": ("nan", "inf", "0", "-0.1", "1.1"),
    "--burstiness": ("nan", "inf", "1e-300", "1e300"),
    "--random-range-ratio": ("nan", "inf", "-0.1"),
    "--failed-request-threshold": ("nan", "inf", "-0.1"),
    "--request-rate": ("nan", "-inf", "-1", "0"),
    **dict.fromkeys(("--num-prompts", "--num-warmups", "--max-concurrency", "--seed", "--top-k", "--logprobs"), HUGE),
    **dict.fromkeys(("--random-input-len", "--random-output-len", "--random-prefix-len", "--vocab-size"), HUGE),
    "--port": HUGE,
    "--goodput": ("ttft:nan", "ttft:inf", "ttft:-1"),
    "--metric-percentiles": ("nan", "inf"),
}


def atom(*arguments: str, code: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    program = ["-m", "atom.cli.main", *arguments] if code is None else ["-c", code, *arguments]
    return subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SRC, "COLUMNS": "100", **env},
        timeout=60,
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AtomError("x"), 1),
        (RunError("x"), 1),
        (ServerDiedError("x"), 1),
        (UsageError("x"), 2),
        (GateError("x"), 3),
        (InvalidRunError("x"), 4),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (Terminated(143), 143),
        (Terminated(129), 129),
        (OSError(28, "No space left", "x.json"), 1),
        (OSError(28, "No space left"), 1),
        (SystemExit(5), 5),
        (ValueError("x"), 1),
    ],
)
def test_exit_status_of_each_exception(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.typer.main, "get_command", lambda _: type("Command", (), {"main": staticmethod(fail)}))
    assert cli.main([]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") <= 1


def test_no_password_of_a_url_is_in_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "random", "--base-url", "http://user:s3cret@127.0.0.1:0"]) == ExitStatus.USAGE
    error = capsys.readouterr().err
    assert "http://127.0.0.1:0" in error
    assert "s3cret" not in error


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RunError("boom")

    monkeypatch.setattr(cli.typer.main, "get_command", lambda _: type("Command", (), {"main": staticmethod(fail)}))
    assert cli.main(["bench", "--traceback", "random"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_version_needs_no_extra_and_no_command_module() -> None:
    code = (
        "import sys\nfrom atom.cli.main import main\nstatus = main(sys.argv[1:])\n"
        "loaded = {'torch', 'numpy', 'httpx', 'atom.bench', 'atom.diag'} & set(sys.modules)\n"
        "print('loaded:', sorted(loaded))\nsys.exit(status)\n"
    )
    done = atom("--version", code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("atom ")
    assert "loaded: []" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "No such command 'nope'"),
        (["--nope"], "No such option: --nope"),
        (["bench", "random", "--num-prompts", "many"], "--num-prompts"),
        (["bench", "random", "--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["bench", "random", "--random-range-ratio", "1"], "--random-range-ratio"),
        (["bench", "random", "--request-rate", "fast"], "--request-rate"),
        (["bench", "random", "--request-rate", "0"], "--request-rate"),
        (["bench", "random", "--request-rate", "5", "--duration", "inf"], "--duration"),
        (["bench", "random", "--request-rate", "5", "--duration", "nan"], "--duration"),
        (["bench", "random", "--request-rate", "5", "--duration", "-5"], "--duration"),
        (["bench", "random", "--request-rate", "1e6", "--duration", "1e8"], "--duration"),
        (["bench", "random", "--burstiness", "0"], "--burstiness"),
        (["bench", "random", "--max-concurrency", "0"], "--max-concurrency"),
        (["bench", "random", "--backend", "grpc"], "--backend"),
        (["bench", "random", "--base-url", "localhost:8000"], "--base-url"),
        (["bench", "random", "--base-url", "http://h", "--recipe", "simulated"], "--recipe"),
        (["bench", "random", "--goodput", "itl:5"], "--goodput"),
        (["bench", "random", "--extra-body", "[]"], "--extra-body"),
        (["bench", "random", "--extra-body", "{"], "--extra-body"),
        (["bench", "random", "--header", "nothing"], "--header"),
        (["bench", "random", "--header", "A=b\r\nX: y"], "--header"),
        (["bench", "random", "--metric-percentiles", "101"], "--metric-percentiles"),
        (["bench", "random", "--percentile-metrics", "ttfb"], "--percentile-metrics"),
        (["bench", "random", "--json", "/nonexistent/x.json"], "--json"),
        (["bench", "random", "--json", "-", "--markdown", "-"], "--markdown"),
        (["bench", "random", "--result-dir", "/tmp"], "--save-result"),
        (["bench", "random", "--devices", "0"], "--devices"),
        (["bench", "random", "surplus"], "surplus"),
        (["bench", "random", "--failed-request-threshold", "10"], "--failed-request-threshold"),
        (["bench", "random", "--request-timeout", "0"], "--request-timeout"),
        (["bench", "random", "--recipe", "nope"], "no recipe 'nope'"),
        (["bench", "random", "--base-url", "http://h", "--port", "8000"], "--port"),
        (["bench", "random", "--base-url", "http://h", "--host", "h"], "--host"),
        (["bench", "random", "--recipe", "simulated", "--port", "8000"], "--port"),
        (["bench", "random", "--base-url", ""], "--base-url"),
        (["bench", "random", "--host", ""], "--host"),
        (["bench", "random", "--host", "a b"], "--host"),
        (["bench", "random", "--model", ""], "--model"),
        (["bench", "random", "--ready-timeout", "5"], "--ready-timeout"),
        (["bench", "random", "--json", "x", "--markdown", "./x"], "--json x and --markdown ./x"),
        (["bench", "random", "--json", "r", "--save-result", "--result-filename", "r"], "--save-result"),
        (["bench", "random", "--num-prompts", "10000000"], "prompt tokens"),
        (["bench", "random", "--request-rate", "1e-300"], "--request-rate"),
        *((["bench", "random", "--base-url", url], "--base-url") for url in WRONG_URLS),
        *((["bench", "random", "--header", f"{name}=3"], f"--header {name}") for name in OWN_HEADERS),
        *((["bench", "random", "--header", text], "--header") for text in ("X=é", "é=X", "A B=c", "X=\x01")),
        *((["bench", "random", "--api-key", text], "--api-key") for text in ("é", "a b", "a\n", "")),
        *((["bench", "random", "--endpoint", text], "--endpoint") for text in ("/a b", "/é", "v1", "")),
        *((["bench", "random", "--extra-body", text], "--extra-body") for text in ('{"x":NaN}', '{"x":[1e999]}')),
        *((["bench", "random", "--extra-body", f'{{"{field}":1}}'], f"{field!r}") for field in FIELDS_OF_THE_LOAD),
        *((["bench", "random", flag, value], flag) for flag, values in WRONG_NUMBERS.items() for value in values),
        *((["bench", "random", flag, "x\udcff=1"], flag) for flag in ("--model", "--label", "--metadata", "--header")),
        (["get", "/nonexistent", "x"], "no run directory"),
        (["report", "/nonexistent"], "no run directory"),
    ],
)
def test_wrong_usage_is_2_and_one_line_that_names_the_flag(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == ExitStatus.USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_help_of_every_command_has_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    for arguments in ([], ["bench", "random"], ["report"], ["get"]):
        assert cli.main([*arguments, "--help"]) == 0
        text = capsys.readouterr().out
        assert "Example" in text, arguments


def test_help_breaks_no_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the terminal is wide enough, a paragraph is a line, however the source is wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")
    for command in ("serve", "get", "report", "doctor", "clean", "bench", "bench random"):
        assert cli.main([*command.split(), "--help"]) == 0
        text = capsys.readouterr().out.partition("╭")[0]
        lines = [line.strip() for line in text.splitlines()]
        for line, following in itertools.pairwise(lines):
            assert not (line and following), f"{command}: {line!r} goes on in {following!r}"


def test_completion_script_is_shown() -> None:
    done = atom(_ATOM_COMPLETE="source_bash")
    assert done.returncode == 0, done.stderr
    assert "_ATOM_COMPLETE" in done.stdout


def test_foreign_atom_package_is_named(tmp_path: Path) -> None:
    """A regular package of that name that was imported first keeps this namespace's parts from being found."""
    foreign = tmp_path / "atom"
    foreign.mkdir()
    (foreign / "__init__.py").write_text(f"__path__ = [{SRC + '/atom'!r}]\n")
    done = subprocess.run(
        [sys.executable, "-m", "atom.cli.main", "--version"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 2
    assert str(foreign / "__init__.py") in done.stderr


def test_reader_that_goes_away_is_no_traceback() -> None:
    shell = f"'{sys.executable}' -m atom.cli.main bench random --help | head -1"
    done = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SRC}, timeout=60
    )
    assert done.stderr == ""


def test_several_values_after_one_flag_as_vllm_takes_them() -> None:
    assert split_multiple(["bench", "--goodput", "ttft:1", "tpot:2", "--seed", "1"]) == [
        *("bench", "--goodput", "ttft:1", "--goodput", "tpot:2", "--seed", "1")
    ]
    assert split_multiple(["--seed", "1", "x"]) == ["--seed", "1", "x"]
    assert split_multiple(["--goodput", "a:1", "--", "b", "c"]) == ["--goodput", "a:1", "--", "b", "c"]


def test_markdown_may_stand_without_a_path() -> None:
    assert split_multiple(["--markdown"]) == ["--markdown", "-"]
    assert split_multiple(["--markdown", "--quiet"]) == ["--markdown", "-", "--quiet"]
    assert split_multiple(["--markdown", "x.md"]) == ["--markdown", "x.md"]
    assert split_multiple(["--markdown", "-"]) == ["--markdown", "-"]


def test_small_parsers() -> None:
    assert parse_rate("inf") == float("inf")
    assert parse_rate("2.5") == 2.5
    assert parse_percentiles("50, 99.9") == [50.0, 99.9]
    assert parse_pairs("--header", ["A=b=c", "X: y"], "=:") == {"A": "b=c", "X": "y"}


def test_ctrl_c_before_a_command_is_there_is_said() -> None:
    code = "import os, signal; from atom.cli.main import _leave; signal.signal(2, _leave); os.kill(os.getpid(), 2)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
