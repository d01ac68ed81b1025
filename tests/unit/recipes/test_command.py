"""A command line read as a recipe: its port, its dialect, and not a word of it changed."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.recipes.command import command_dialect, recipe_from_command
from atom.recipes.errors import UsageError
from atom.recipes.known_servers import KNOWN_ROLES
from atom.recipes.placeholders import expand, uses

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


@given(st.lists(st.one_of(WORDS, st.sampled_from(['{"a": 1}', "{{port}}", "{model}", "{", "}", "{port"])), min_size=1))
def test_a_command_is_run_as_it_is(argv: list[str]) -> None:
    argv = [word.replace("{port}", "port") if word != "{{port}}" else word for word in argv]
    if argv[0] in ("docker", "ssh"):
        return
    assert expand(recipe_from_command(argv), {"port": "1"}).command == argv


def test_a_port_is_filled_in_where_it_is_asked_for() -> None:
    recipe = recipe_from_command(["serve", "--bind", "[::]:{port}", '{"port": {port}}'])
    assert uses(recipe, "port")
    assert expand(recipe, {"port": "81"}).command == ["serve", "--bind", "[::]:81", '{"port": 81}']


@pytest.mark.parametrize(
    ("command", "port", "host"),
    [
        ("vllm serve m --port 8001", 8001, None),
        ("vllm serve m --port=8002 --host 0.0.0.0", 8002, None),
        ("vllm serve m -p 8003 --host ::1", 8003, "::1"),
        ("vllm serve m --port 1 --port 2", 2, None),
        ("python my_server.py", None, None),
        ("python my_server.py --port 0", None, None),
        ("python my_server.py --port ²", None, None),
        ("python my_server.py --port 99999999999999999999", None, None),
        ("cp -p a b", None, None),
        ("docker run -p 9000:8000 vllm/vllm-openai:latest --model m", 9000, None),
        ("docker run -p 127.0.0.1:9001:8000 image", 9001, None),
    ],
)
def test_where_it_listens(command: str, port: int | None, host: str | None) -> None:
    listens = recipe_from_command(command.split()).listens
    assert listens is not None
    assert (listens.port, listens.host) == (port, host)
    assert listens.elsewhere == command.startswith("docker")


def test_a_base_url_says_where() -> None:
    listens = recipe_from_command(["ssh", "host", "serve"], base_url="http://host:81").listens
    assert listens is not None
    assert (listens.port, listens.host, listens.elsewhere) == (81, "host", True)
    for wrong in ("https://host:81", "host:81", "http://host:99999", "http://host:81/v1"):
        with pytest.raises(UsageError, match="--base-url"):
            recipe_from_command(["serve"], base_url=wrong)


def test_what_cannot_be_run() -> None:
    with pytest.raises(UsageError, match="no command"):
        recipe_from_command([])
    with pytest.raises(UsageError, match="--base-url"):
        recipe_from_command(["ssh", "host", "vllm", "serve", "m"])


@pytest.mark.parametrize(
    ("command", "dialect", "path"),
    [
        ("vllm serve m", "vllm", "/metrics"),
        ("/opt/venv/bin/vllm serve m", "vllm", "/metrics"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vllm", "/metrics"),
        ("docker run -p 1:8000 vllm/vllm-openai:v1 --model m", "vllm", "/metrics"),
        ("python3 -m sglang.launch_server --model-path m", "sglang", "/metrics"),
        ("mpirun -n 1 trtllm-llmapi-launch trtllm-serve m", "trtllm", "/prometheus/metrics"),
        ("atom serve simulated", "atom", "/metrics"),
        ("python my_vllm_server.py", "auto", "/metrics"),
        ("python proxy.py --backend vllm", "auto", "/metrics"),
    ],
)
def test_whose_server_it_is(command: str, dialect: str, path: str) -> None:
    recipe = recipe_from_command(command.split())
    assert command_dialect(command.split()) == recipe.metrics.dialect == dialect
    assert recipe.metrics.path == path


def test_its_name_has_no_secrets() -> None:
    assert recipe_from_command(["/a/vllm", "serve", "m", "--api-key", "hunter2"]).name == "vllm serve"
    assert recipe_from_command(["python", "-m", "a.b", "hunter2"]).name == "python -m a.b"
    assert recipe_from_command(["python", "--token=hunter2", "/srv/app.py"]).name == "python app.py"
    assert recipe_from_command(["sh", "-c", "TOKEN=hunter2 serve"]).name == "sh"
    assert recipe_from_command([sys.executable]).title.startswith("command `python")


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("/usr/bin/python3 /usr/bin/vllm serve m", "api"),
        ("VLLM::APIServer_1", "api"),
        ("VLLM::EngineCore", "core"),
        ("VLLM::EngineCore_DP1", "core"),
        ("VLLM::Worker_TP0", "worker"),
        ("VLLM::DPCoordinator", "other"),
        ("python3 -m sglang.launch_server --model-path m", "api"),
        ("sglang::scheduler_TP0", "core"),
        ("sglang::detokenizer", "worker"),
        ("sglang::data_parallel_controller", "other"),
        ("/usr/bin/python3 /usr/local/bin/trtllm-serve m", "api"),
        ("/usr/bin/python3 -m mpi4py.futures.server", "worker"),
        ("/usr/bin/python3 /venv/bin/transformers serve", "api"),
        ("python -m atom.engine.server m", "api"),
        ("python -c from multiprocessing.resource_tracker import main;main(5)", "other"),
    ],
)
def test_what_others_call_their_processes(title: str, role: str) -> None:
    assert KNOWN_ROLES.role_of(title) == role
