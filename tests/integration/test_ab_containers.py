"""Arms in container images, with a `docker` that runs what it is told on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.diag.compare.arm_process import ProcessExecutor
from atom.diag.compare.container import container_recipe, with_image_id
from atom.diag.compare.model import Arm, ArmKind, ArmRun, Half, Load, MatchedRun, Placement, Purpose, RunResult
from atom.recipes.containers import RUN_LABEL, remove, stale_containers
from atom.recipes.errors import UsageError
from atom.recipes.leftovers import find_leftovers
from atom.recipes.processes import process_token
from atom.recipes.spawn import import_root
from tests.waiting import until

FAKE = Path(__file__).with_name("fake_docker.py")
HALF = Half(name="whole", server_cpus=(0,), client_cpus=())
LOAD = Load(
    name="short",
    bench="random",
    options={"random-input-len": 16, "random-output-len": 8, "num-prompts": 4, "ignore-eos": True},
    recipe="simulated",
)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake keeps its containers. It is the only engine."""
    folder, state = tmp_path / "bin", tmp_path / "containers"
    folder.mkdir()
    state.mkdir()
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    return state


def in_image(**fields: Any) -> Arm:
    given = {
        "label": "base",
        "kind": ArmKind.REF,
        "spec": "main",
        "image": "registry.example/server:1",
        "python": sys.executable,
        "src": str(import_root()),
        "checkout": str(import_root().parent),
        **fields,
    }
    return Arm(**given)


def run_pair(out: Path, base: Arm, head: Arm) -> tuple[RunResult, RunResult]:
    matched = MatchedRun(
        comparison="base..head",
        purpose=Purpose.COMPARE,
        load="short",
        pair=0,
        index=0,
        runs=(ArmRun(arm="base", half=0, order=0), ArmRun(arm="head", half=0, order=1)),
    )
    executor = ProcessExecutor(out, [base, head], [LOAD], Placement(halves=(HALF,), reason="of the test"))
    return executor.execute(matched, (out / "arms/base/run-1", out / "arms/head/run-1"))


def test_an_arm_in_an_image_is_run_and_removed(docker: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base, head = run_pair(out, in_image(cache=str(tmp_path / "cache")), in_image(label="head", server_args=("--nope",)))
    assert base.problem is None
    assert head.problem is not None
    assert "--nope" in head.problem
    started = [json.loads(line) for line in (docker / "started.jsonl").read_text().splitlines()]
    assert [one["image"] for one in started] == ["registry.example/server:1"] * 2
    assert started[0]["options"]["--cpuset-cpus"] == ["0"]
    assert f"{tmp_path}/cache:{tmp_path}/cache" in started[0]["options"]["--volume"]
    assert [path.name for path in docker.iterdir()] == ["started.jsonl"]
    assert list((out / base.directory / "server").glob("gc-*.jsonl"))
    run = json.loads((out / base.directory / "run.json").read_text())
    assert run["validity"] == "valid"


def test_what_an_image_was_is_recorded(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag may be another image tomorrow."""
    told = with_image_id(in_image(provenance={"sha": "1"})).provenance
    assert told == {
        "sha": "1",
        "image_id": "sha256:feed",
        "image_digest": "registry.example/server@sha256:beef",
    }
    for arm in (in_image(image=None), in_image(image="unknown:1")):
        assert with_image_id(arm) == arm
    monkeypatch.setenv("PATH", "/nowhere")
    assert with_image_id(in_image()) == in_image()


def test_containers_whose_owner_is_gone_are_found_and_removed(docker: Path) -> None:
    gone = subprocess.Popen(["sleep", "600"], start_new_session=True)
    other = subprocess.Popen(["true"])
    token = process_token(other.pid)
    other.wait()
    for name, owner in (("left", token), ("owned", process_token()), ("foreign", "garbage")):
        labels = {RUN_LABEL: name, "atom.owner": owner}
        (docker / name).write_text(json.dumps({"pid": gone.pid if name == "left" else 2**22, "labels": labels}))
    (found,) = stale_containers()
    assert (found.engine, found.id, found.label) == ("docker", "left", "left")
    assert find_leftovers().containers == [found]
    assert remove(found)
    until(lambda: gone.poll() is not None)
    assert stale_containers() == []
    assert not remove(found)


def test_an_engine_that_does_not_answer_has_none(docker: Path) -> None:
    (docker / "broken").write_text("no JSON")
    assert stale_containers() == []


def test_without_an_engine_it_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    base, head = run_pair(tmp_path, in_image(), in_image(label="head"))
    for result in (base, head):
        assert (result.stage, result.status) == ("prepare", 2)
        assert result.problem == "a container image needs docker or podman, and neither is on PATH here"


def test_the_recipe_says_where_everything_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    arm = in_image(python=None, src=str(tmp_path / "{src}"), checkout=None, variables={"data": str(tmp_path)})
    recipe = container_recipe("vllm", arm, LOAD, Half(name="first", devices="0,1"), out=tmp_path, engine="podman")
    words = recipe["exec"]
    assert words[:3] == ["podman", "run", "--rm"]
    assert words[-3:] == ["", "registry.example/server:1", "{env}"]
    assert recipe["variables"]["python"] == "python3"
    assert "requires" not in recipe
    assert f"HF_HOME={tmp_path}" in words
    assert "HF_TOKEN" in words
    assert "hunter2" not in str(recipe)
    assert "nvidia.com/gpu=all" in words
    assert words.count(f"{tmp_path}:{tmp_path}") == 2  # out, and what Hugging Face's library has
    assert "--cpuset-cpus" not in words


def test_what_cannot_be_in_an_image_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "remote.yaml"
    recipe.write_text("name: remote\ncommand: [serve]\nexec: [ssh, host]\n")
    with pytest.raises(UsageError, match="has an `exec` of its own"):
        container_recipe(str(recipe), in_image(), LOAD, HALF, out=tmp_path, engine="docker")
    odd = tmp_path / "a:b"
    odd.mkdir()
    with pytest.raises(UsageError, match="has a colon"):
        container_recipe("simulated", in_image(checkout=str(odd)), LOAD, HALF, out=tmp_path, engine="docker")
