"""Recipes: what is accepted, and that every refusal names file, line, field and what would be right."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.recipes.errors import UsageError
from atom.recipes.placeholders import expand, resolve_variables
from atom.recipes.recipe import Recipe
from atom.recipes.resolve import builtin_recipes, load_recipe, resolve_recipe
from atom.recipes.spawn import import_root, module_command


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_recipe(write(tmp_path, text))
    message = str(caught.value)
    assert message.startswith(f"recipe {tmp_path}/recipe.yaml")
    assert "\n" not in message
    return message.removeprefix(f"recipe {tmp_path}/recipe.yaml")


FULL = """\
name: full
description: everything at once
model: /models/m
variables:
  level: "3"
  python: {default: null, env: A_PYTHON, help: an interpreter}
prepare: [echo preparing, [echo, "{model}"]]
command: [serve, "{model}", --port, "{port}", --level, "{level}", --admin, "{admin}", 7]
exec: docker exec -e ATOM_RUN_LABEL={label} box
env: {A: "{devices}", B: 3, C: null}
devices: {env: [CUDA_VISIBLE_DEVICES]}
ports: {admin: null}
health: {path: /ready, status: 204, port: admin}
ready_timeout: 5
logs: {max_bytes: 65536}
stop: {signal: SIGINT, grace: 2.5, command: "docker stop box"}
metrics: {dialect: sglang, path: /m, port: admin}
roles: {api: ['^a'], worker: [w]}
source: {path: lib/python, packages: [a.b, c]}
"""


def test_every_field_arrives(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, FULL))
    assert recipe.prepare == (("echo", "preparing"), ("echo", "{model}"))
    assert recipe.command[-1] == "7"
    assert recipe.exec[:2] == ("docker", "exec")
    assert recipe.env == {"A": "{devices}", "B": "3", "C": None}
    assert (recipe.health.path, recipe.health.status, recipe.health.port) == ("/ready", 204, "admin")
    assert (recipe.stop.signal, recipe.stop.grace_s, recipe.stop.command) == (
        signal.SIGINT,
        2.5,
        ("docker", "stop", "box"),
    )
    assert (recipe.metrics.dialect, recipe.metrics.path, recipe.metrics.port) == ("sglang", "/m", "admin")
    assert recipe.roles.role_of("a worker w") == "worker"
    assert recipe.roles.role_of("api") == "api"
    assert recipe.roles.role_of("b") == "other"
    assert (recipe.source_tree.path, recipe.source_tree.packages) == ("lib/python", ("a.b", "c"))
    assert recipe.ready_timeout_s == 5
    assert recipe.log_max_bytes == 65536


@pytest.mark.parametrize("name", sorted(builtin_recipes()))
def test_builtin_recipes_are_valid_and_named_after_their_file(name: str) -> None:
    assert resolve_recipe(name).name == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\n", ["line 1", "`command`", "missing", "list of arguments"]),
        ("name: x\ncommand: a\ncomand: b\n", ["line 3", "`comand`", "did you mean `command`"]),
        ("name: X Y\ncommand: a\n", ["line 1", "`name`", "lower-case"]),
        ("name: x\ncommand: [a, true]\n", ["line 2", "`command`"]),
        ("name: x\ncommand: 'a \"b'\n", ["line 2", "`command`", "split"]),
        ("name: x\ncommand: a\nstop:\n  signal: TERM\n", ["line 4", "`stop.signal`", "SIGTERM"]),
        ("name: x\ncommand: a\nenv: {A: true}\n", ["line 3", "`env.A`", "quote true/false"]),
        ("name: x\ncommand: a\nenv: {1A: b}\n", ["`env.1A`", "must match"]),
        ("name: x\ncommand: a\nhealth: {path: health}\n", ["`health.path`", "begins with '/'"]),
        ("name: x\ncommand: a\nhealth: {port: admin}\n", ["`health.port`", "a name from `ports`"]),
        ("name: x\ncommand: a\nports: {model: 3}\n", ["`ports.model`", "another placeholder"]),
        ("name: x\ncommand: a\nports: {admin: 70000}\n", ["`ports.admin`", "1 to 65535"]),
        ("name: x\ncommand: a\nready_timeout: 0\n", ["`ready_timeout`", "more than 0"]),
        ("name: x\ncommand: a\nroles: {api: ['(']}\n", ["`roles.api[0]`", "no regular expression"]),
        ("name: x\ncommand: a\nsource: {path: ../x}\n", ["line 3", "`source.path`", "inside the checkout"]),
        ("name: x\ncommand: a\nsource: {packages: [a/b]}\n", ["`source.packages[0]`", "a package such as"]),
        ("name: x\ncommand: a {modle}\n", ["`command`", "{modle}", "known here", "model"]),
        ("name: x\ncommand: a {env}\n", ["{env}", "only allowed"]),
        ("name: x\ncommand: 'a }b'\n", ["single '}'", "twice"]),
        ("name: x\ncommand: a\ndetached: true\n", ["`detached`", "stop.command"]),
        ("name: x\nname: y\ncommand: a\n", ["line 2", "`name`", "twice"]),
        ("name: &a x\ncommand: *a\n", ["line 2", "aliases"]),
        ("name: [\n", ["line"]),
        ("- a\n", ["must be a mapping"]),
        ("", ["must be a mapping"]),
        ("name: !!python/object:os.system x\ncommand: a\n", ["line 1", "tag"]),
        ("name: x\ncommand: a\nx: " + "[" * 200 + "]" * 200 + "\n", ["nested too deeply"]),
    ],
)
def test_refusals_name_the_place_and_the_fix(tmp_path: Path, text: str, expected: list[str]) -> None:
    message = refusal(tmp_path, text)
    for part in expected:
        assert part in message


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        load_recipe(path)
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(UsageError, match="larger than"):
        load_recipe(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"no recipe 'warp'.*embedded"):
        resolve_recipe("warp")


@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=200))
def test_any_text_is_a_recipe_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(text.encode())
    message = str(path)
    try:
        load_recipe(path)
    except UsageError as error:
        message = str(error)
    assert str(path) in message


def values(**given: str | None) -> dict[str, str | None]:
    names = ("src", "model", "port", "devices", "host", "python", "port_file", "label", "scratch")
    return {name: given.get(name, f"<{name}>") for name in names} | given


def test_expansion_keeps_values_with_spaces_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    monkeypatch.setenv("GONE", "1")
    recipe = Recipe(
        name="x",
        source="x",
        command=("serve", "{model}", "a{{b}}{port}"),
        env={"A": "{host}", "GONE": None, "PYTHONPATH": "{src}"},
    )
    done = expand(recipe, values(model="/my models/a"), extra_args=["--x", "{y}"], python_path=[Path("/hook")])
    assert done.command == ["serve", "/my models/a", "a{b}<port>", "--x", "{y}"]
    assert done.env["A"] == "<host>"
    assert "GONE" not in done.env
    assert done.env["PYTHONPATH"] == "/hook:<src>"


def test_a_prefix_gets_the_environment_where_it_asks_for_it() -> None:
    recipe = Recipe(name="x", source="x", command=("serve", "{model}"), exec=("srun", "-n1", "{env}"), env={"A": "b c"})
    assert expand(recipe, values(model="m")).command == ["srun", "-n1", "env", "A=b c", "serve", "m"]
    over_ssh = Recipe(
        name="x", source="x", command=("serve", "{model}"), exec=("ssh", "-tt", "host", "{env}"), env={"A": "b c"}
    )
    command = expand(over_ssh, values(model="my model")).command
    assert command == ["ssh", "-tt", "host", "env 'A=b c' serve 'my model'"]


def test_a_value_that_was_not_given_says_how_to_give_it() -> None:
    recipe = Recipe(name="x", source="x", command=("serve", "{model}"))
    with pytest.raises(UsageError, match="needs a model"):
        expand(recipe, values(model=None))


def test_variables_come_from_set_then_environment_then_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(write(tmp_path, FULL))
    monkeypatch.delenv("A_PYTHON", raising=False)
    with pytest.raises(UsageError, match=r"needs a value for `python` \(an interpreter\).*--set python=.*A_PYTHON"):
        resolve_variables(recipe, {})
    monkeypatch.setenv("A_PYTHON", "/env/python")
    assert resolve_variables(recipe, {}) == {"level": "3", "python": "/env/python"}
    assert resolve_variables(recipe, {"python": "/set", "level": "4"}) == {"level": "4", "python": "/set"}
    with pytest.raises(UsageError, match="no such variable; it has level, python, src"):
        resolve_variables(recipe, {"lvl": "4"})


@pytest.mark.parametrize("name", ["embedded", "simulated"])
def test_our_servers_are_not_taken_from_the_current_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as below a clone: `python -m` looks in the current directory first."""
    for folder in ("atom", "atom/engine"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise SystemExit('from the current directory')\n")
    monkeypatch.chdir(tmp_path)
    names = ("src", "model", "port", "host", "port_file", "python")
    values: dict[str, str | None] = {**dict.fromkeys(names, "x"), "src": str(import_root()), "python": sys.executable}
    start = expand(resolve_recipe(name), values)
    interpreter, dash_m, module = start.command[:3]
    assert (dash_m, module) == ("-m", "atom.engine.server")
    done = subprocess.run([interpreter, dash_m, "atom.engine.errors"], env=start.env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_command(tmp_path: Path) -> None:
    command = module_command("atom.recipes.check")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 wrong" in done.stdout
    write(tmp_path, "name: x\n")
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "`command` is missing" in done.stderr
    assert sys.executable == command[0]
