"""Where servers and clients run: `--server-cpus`, `--client-cpus`, and what else reaches only the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atom.cli.main import main
from atom.recipes.cpus import own_cpus
from atom.recipes.launcher import LaunchOptions, launch
from atom.recipes.processes import read_environment
from atom.recipes.recipe import Recipe
from atom.recipes.spawn import module_command

STAND_IN = Path(__file__).with_name("stand_in_server.py")
FIRST, LAST = own_cpus()[0], own_cpus()[-1]
NONE_SUCH = "8191"
ATOM = module_command("atom.cli.main")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "stand-in.yaml"
    path.write_text(
        f'name: stand-in\ncommand: [{sys.executable}, {STAND_IN}, --port, "{{port}}", --port-file, "{{port_file}}"]\n'
    )
    return path


def test_everything_of_a_server_is_where_it_was_put() -> None:
    words = (
        sys.executable,
        str(STAND_IN),
        "--port",
        "{port}",
        "--port-file",
        "{port_file}",
        "--behaviour",
        "grandchild",
    )
    with launch(Recipe(name="r", source="test", command=words), LaunchOptions(cpus=(LAST,))) as server:
        assert len(server.processes()) == 2
        for pid in server.processes():
            assert os.sched_getaffinity(pid) == {LAST}
    assert os.sched_getaffinity(0) == set(own_cpus())


def test_serve_puts_it_there(recipe: Path) -> None:
    process = subprocess.Popen(
        [*ATOM, "serve", "--recipe", str(recipe), "--port", "0", "--json", "-", "--server-cpus", str(FIRST)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    assert os.sched_getaffinity(facts["pid"]) == {FIRST}
    assert os.sched_getaffinity(process.pid) == set(own_cpus())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    process.stdout.close()


def test_a_client_that_moves_does_not_take_its_server_along(recipe: Path, tmp_path: Path) -> None:
    """And what the server gets in its environment is not the client's."""
    out = tmp_path / "run"
    words = [
        "--client-cpus",
        str(LAST),
        "--server-env",
        "ONLY=the server",
        "--num-prompts",
        "2",
        "--backend",
        "openai-chat",
    ]
    done = subprocess.run(
        [
            *module_command("atom.cli.main"),
            "bench",
            "random",
            "--recipe",
            str(recipe),
            "--output-dir",
            str(out),
            *words,
        ],
        capture_output=True,
        text=True,
    )
    run = json.loads((out / "run.json").read_text())
    assert run["host"]["cpu_affinity"] == [LAST], done.stderr
    assert run["server"]["cpus"] == list(own_cpus())
    assert run["server"]["env"]["ONLY"] == "the server"
    assert "ONLY" not in read_environment(os.getpid())


@pytest.mark.parametrize(
    "command", [["bench", "random"], ["bench", "sweep", "--max-concurrency", "1"], ["serve"]], ids=" ".join
)
def test_a_cpu_that_is_not_there_names_the_flag(
    command: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--recipe", str(recipe), "--server-cpus", NONE_SUCH]) == 2
    assert f"--server-cpus {NONE_SUCH}: this process cannot use CPU {NONE_SUCH}" in capsys.readouterr().err
    if command[0] == "bench":
        assert main([*command, "--recipe", str(recipe), "--client-cpus", "x"]) == 2
        assert "--client-cpus must be numbers of CPUs" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--server-cpus", "0"), ("--server-env", "A=b")])
def test_what_is_for_a_server_that_is_started_is_refused_without_one(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "random", "--base-url", "http://127.0.0.1:9", flag, value]) == 2
    assert f"{flag}: only for a server that --recipe starts" in capsys.readouterr().err


def test_a_server_behind_a_prefix_is_not_ours_to_pin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "remote.yaml"
    path.write_text("name: remote\ncommand: [serve]\nexec: [ssh, host]\n")
    for command in (["bench", "random"], ["serve"]):
        assert main([*command, "--recipe", str(path), "--server-cpus", str(FIRST)]) == 2
        assert "starts its server through ssh" in capsys.readouterr().err
