"""`atom bench aiperf-agentic`: options that do not go together, and the command line that AIPerf gets."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from atom.bench.agentic import aiperf_client
from atom.bench.agentic.aiperf_client import Aiperf, AiperfClient, find_aiperf
from atom.bench.agentic.aiperf_launch import VARIABLE
from atom.bench.agentic.chat_overhead import ChatOverhead
from atom.bench.agentic.generate import GenerateConfig, generate_traces
from atom.bench.agentic.load import AgenticLoad, CacheBust
from atom.bench.agentic.model import Damage
from atom.bench.agentic.scenario_load import ScenarioLoad
from atom.bench.load import Api, Endpoint, LoadSpec, Shard
from atom.bench.redact import REDACTED
from atom.cli import main as cli
from atom.recipes.errors import ExitStatus, UsageError

MVP = "inferencex-agentx-mvp"
SESSIONS = generate_traces(GenerateConfig(num_sessions=2, turns=3, input_len=300, output_len=4, block_size=16), 1)
FLAGS = (
    "--benchmark-grace-period --trace-idle-gap-cap-seconds --system-idle-gap-cap-seconds --max-context-length "
    "--num-dataset-entries --cache-bust --agentic-warmup-grace-period --workers-max"
)


OPEN = ("--unsafe-override", "--system-idle-gap-cap-seconds", "none")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--input-file PATH, or are made up with --generate"),
        (["--generate", "--input-file", "x"], "give one of them"),
        (["--input-file", "x", "--generate-turns", "3", "--unsafe-override"], "--generate-turns is for --generate"),
        (["--generate", "--duration", "60"], "at least 900 s count. --unsafe-override runs it anyway"),
        (["--generate", "--cache-bust", "none"], "--cache-bust none: first_turn_prefix is fixed"),
        (["--generate", "--cache-bust", "x"], "--cache-bust must be one of"),
        (["--generate", "--no-ignore-eos"], "--ignore-eos off: on is fixed"),
        (["--generate", "--system-idle-gap-cap-seconds", "3"], "--system-idle-gap-cap-seconds 3: 10 is fixed"),
        (["--generate", "--trace-idle-gap-cap-seconds", "x"], "a number of seconds, or none"),
        (["--generate", "--client", "x"], "--client must be one of native, aiperf"),
        (["--generate", "--aiperf-executable", "x"], "--aiperf-executable is for --client aiperf"),
        (["--generate", "--client", "aiperf", "--aiperf-executable", "/none"], "cannot be run; install AIPerf"),
        (["--generate", "--vocab-size", "9000"], "--vocab-size is for token ids, and a chat's prompts are text"),
        (["--generate", "--backend", "completions", "--tokenizer", "x"], "--tokenizer is for text, and completions"),
        (["--generate", "--client", "aiperf", "--insecure"], "--insecure is for --client native"),
        (["--generate", "--client", "aiperf", "--save-detailed"], "--save-detailed is for --client native"),
        (
            ["--generate", "--workers", "2", "--concurrency", "2"],
            "--system-idle-gap-cap-seconds 10: whether all sessions are idle is seen by",
        ),
        (["--generate", "--client", "aiperf", "--cache-bust-nonce", ""], "--cache-bust-nonce is for --client native"),
        (
            ["--generate", "--unsafe-override", "--cache-bust", "none", "--cache-bust-nonce", "x"],
            "--cache-bust-nonce goes into markers, and --cache-bust none has none",
        ),
        (["--generate", "--scenario", "x"], "--scenario must be one of"),
        (["--generate", "--stats-interval", "0"], "--stats-interval must be positive"),
        (["--generate", "--warmup-grace-period", "-1"], "--warmup-grace-period must not be negative"),
        (["--input-file", "/none"], "--input-file /none: no such file"),
        (["--generate", "--benchmark-duration", "-5"], "--benchmark-duration (--duration) must be positive"),
        (["--generate", "--endpoint-type", "foo"], "--endpoint-type must be one of chat, completions, openai, "),
        (
            ["--generate", "--concurrency", "1", "--workers", "2", *OPEN],
            "--concurrency 1 is less than the 2 processes that share",
        ),
        (
            ["--generate", "--concurrency", "3", "--num-sessions", "2", "--workers", "3", *OPEN],
            "--num-sessions 2 is less than the 3 processes that share",
        ),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    small = [
        "--generate-sessions",
        "2",
        "--generate-turns",
        "3",
        "--generate-input-len",
        "300",
        "--generate-output-len",
        "4",
    ]
    more = small if "--generate" in arguments and "--input-file" not in arguments else []
    assert cli.main(["bench", "aiperf-agentic", *arguments, *more]) == ExitStatus.USAGE
    error = capfd.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def a_client(aiperf: Aiperf | None = None, scenario: str | None = MVP, **changes: Any) -> AiperfClient:
    fields: dict[str, Any] = {"sessions": SESSIONS, "api": Api.CHAT, "model": "m", "concurrency": 3, "seed": 7}
    load = AgenticLoad(**{**fields, "tokenizer": Path(__file__).parent, **changes})
    return AiperfClient(
        executable=aiperf or Aiperf("/bin/aiperf", "0.13.0", FLAGS.replace(" ", "")),
        traces=lambda folder: folder,
        load=ScenarioLoad(load=load, scenario=scenario, conflicts=(), client="aiperf"),
        unsafe_override=True,
        max_context_length=4096,
        num_dataset_entries=None,
        server_metrics=("http://h:1/metrics", "http://h:2/metrics"),
    )


def test_what_makes_prompts_and_sessions_other_than_recorded_is_noted() -> None:
    def notes(client: str = "native", **changes: Any) -> list[str]:
        damage = {Damage.NO_BLOCKS: 1, Damage.BACK_IN_TIME: 1200}
        orphaned = (replace(SESSIONS[0], orphans=2, damage=damage), *SESSIONS[1:])
        load = AgenticLoad(**{"sessions": orphaned, "api": Api.CHAT, "model": "m", "concurrency": 1, **changes})
        made = ScenarioLoad(load=load, scenario=MVP, conflicts=(), client=client, left_out={"too long": 1500})
        found: list[str] = made.describe()["source"]["notes"]
        return found

    left_out = ["1,500 recorded sessions were left out: too long", "2 sub-agents were left out: recorded before any"]
    left_out += ["1 recorded turn without any block", "1,200 recorded turns at an earlier time"]
    assert [note[: len(start)] for note, start in zip(notes(), left_out, strict=False)] == left_out
    assert [note.split()[0] for note in notes()[4:]] == ["prompts", "what"]
    assert [note.split()[0] for note in notes(tokenizer=Path("x"))[4:]] == ["what"]
    assert len(notes(tokenizer=Path("x"), overhead=ChatOverhead(9, 14, 11))) == 4
    assert len(notes(api=Api.COMPLETIONS)) == len(notes("aiperf")) == 4


def test_what_aiperf_is_told() -> None:
    client = a_client(
        trace_idle_gap_cap=30.0, cache_bust=CacheBust.FIRST_TURN_PREFIX, sampling={"temperature": 0.5}, ignore_eos=False
    )
    endpoint = Endpoint(
        base_url="http://h:8000", path="/v1/chat/completions", api=Api.CHAT, model="m", api_key="k", headers={"A": "b"}
    )
    spec = LoadSpec(
        name="x", endpoint=endpoint, workload=client.load, duration=60.0, grace_period=5.0, shard=Shard(0, 4), seed=7
    )
    command = client.command(spec, Path("/t"), Path("/a"))
    pairs = dict(pairwise(command))
    assert command[:4] == ["/bin/aiperf", "profile", "--scenario", MVP]
    assert pairs["--random-seed"] == "7"
    assert pairs["--concurrency"] == "3"
    assert pairs["--benchmark-duration"] == "60"
    assert pairs["--benchmark-grace-period"] == "5"
    assert pairs["--trace-idle-gap-cap-seconds"] == "30"
    assert pairs["--cache-bust"] == "first-turn-prefix"
    assert pairs["--max-context-length"] == "4096"
    assert pairs["--workers-max"] == "4"
    assert pairs["--input-file"] == "/t"
    assert "--header" not in command
    assert "--api-key" not in command
    assert "temperature:0.5" in command
    assert "ignore_eos:false" in command
    at = command.index("--server-metrics")
    assert command[at : at + 3] == ["--server-metrics", "http://h:1/metrics", "http://h:2/metrics"]
    assert "--system-idle-gap-cap-seconds" not in command


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer": None}, "needs --tokenizer"),
        ({"num_sessions": 3}, "--num-sessions is for --client native"),
        ({"nonce": "x"}, "--cache-bust-nonce is for --client native"),
        ({"warmup_requests_per_lane": 2}, "has no --warmup-requests-per-lane"),
        ({"scenario": None}, "only under a --scenario"),
    ],
)
def test_what_aiperf_cannot_do_is_said_before_anything_starts(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        a_client(**changes)


def an_executable(path: Path, code: str) -> str:
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


SAYS_ALL = (
    "import json; print(json.dumps([sys.argv, open('/proc/self/cmdline').read(), list(__import__('os').environ)]))"
)


def told(path: Path, executable: str) -> tuple[list[str], list[str], str, list[str], list[str]]:
    """What is started; arguments, command line and environment there; what run.json keeps."""
    client = a_client(Aiperf(executable, "0.13.0", FLAGS.replace(" ", "")), extra_body={"auth_token": "s3cret", "n": 1})
    endpoint = Endpoint(base_url="http://u:s3cret@h:1", model="m", api_key="s3cret", headers={"A": "s3cret"})
    spec = LoadSpec(name="x", endpoint=endpoint, workload=client.load, duration=60.0)
    hidden = aiperf_client._hidden(spec, client.load)
    started, env = client._start(client.command(spec, path, path), hidden)
    done = subprocess.run(started, env=env, capture_output=True, text=True, check=True, cwd=path)
    return started, *json.loads(done.stdout), aiperf_client._shown(hidden)


def test_no_secret_is_in_aiperfs_command_line_nor_kept(tmp_path: Path) -> None:
    started, arguments, line, environment, kept = told(tmp_path, an_executable(tmp_path / "aiperf", SAYS_ALL))
    assert not any("s3cret" in part for part in [*started, line, *kept])
    given = dict(pairwise(arguments))
    assert given["--url"] == "http://u:s3cret@h:1"
    assert given["--api-key"] == "s3cret"
    assert given["--header"] == "A:s3cret"
    assert {"auth_token:s3cret", "n:1"} <= set(arguments)
    assert arguments[:2] == [str(tmp_path / "aiperf"), "profile"]
    assert VARIABLE not in environment
    assert kept[:4] == ["--url", "http://h:1", "--api-key", REDACTED]


def test_a_script_whose_interpreter_has_a_long_path(tmp_path: Path) -> None:
    script = tmp_path / "aiperf"
    an_executable(script, SAYS_ALL)
    _, *rest = script.read_text().splitlines()
    first = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
    script.write_text("\n".join([first, *rest]))
    assert "s3cret" in told(tmp_path, str(script))[1]


def test_a_wrapper_that_could_pass_secrets_only_openly_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "aiperf"
    script.write_text('#!/bin/sh\nexec python3 -m aiperf "$@"\n')
    with pytest.raises(UsageError, match="is no Python script"):
        told(tmp_path, str(script))


def test_an_aiperf_is_asked_for_its_version_and_flags(tmp_path: Path) -> None:
    boxed = "print('1.2.3' if '--version' in sys.argv else '│ --endpoint-type --cache-bu │\\n│ st  text  │')"
    found = find_aiperf(an_executable(tmp_path / "aiperf", boxed))
    assert found.version == "1.2.3"
    assert found.require("--cache-bust") == "--cache-bust"
    with pytest.raises(UsageError, match=r"AIPerf 1\.2\.3 .* has no --other"):
        found.require("--other")


@pytest.mark.parametrize("path", ["/bin/true", "/bin/echo"])
def test_what_is_no_aiperf_is_called_none(path: str) -> None:
    with pytest.raises(UsageError, match=f"{path} is not AIPerf"):
        find_aiperf(path)


def test_an_aiperf_that_does_not_run_is_named_with_its_last_words(tmp_path: Path) -> None:
    broken = an_executable(tmp_path / "aiperf", "print('first', file=sys.stderr); sys.exit('no module')")
    with pytest.raises(UsageError, match=r"aiperf --version fails: no module"):
        find_aiperf(broken)


def test_export_aiperf_wants_a_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert cli.main(["bench", "random", "--export-aiperf", str(file)]) == ExitStatus.USAGE
    assert "is no directory" in capfd.readouterr().err
