"""Sweeping what interrupted runs left: only what nobody answers for any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.recipes.leftovers import find_leftovers, sweep
from atom.recipes.processes import LABEL_VARIABLE, OWNER_VARIABLE, process_token
from atom.recipes.scratch import make_scratch, stale_scratch

Spawn = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def gone_token() -> str:
    """Token of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    token = process_token(process.pid)
    process.kill()
    process.wait()
    return token


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(owner: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, LABEL_VARIABLE: str(uuid.uuid4()), OWNER_VARIABLE: owner}
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_only_processes_without_an_owner_are_swept(spawn: Spawn, gone_token: str) -> None:
    orphan, owned, garbled = spawn(gone_token), spawn(process_token()), spawn("garbage")
    found = find_leftovers()
    mine = [process for process in found.processes if process.pid in (orphan.pid, owned.pid, garbled.pid)]
    assert [process.pid for process in mine] == [orphan.pid]
    assert found.owned >= 2
    # Other tests of this machine may leave theirs for a moment: sweep what is ours.
    assert sweep(type(found)(mine, [], found.owned)) == []
    assert orphan.wait(10) != 0
    assert owned.poll() is None
    assert garbled.poll() is None


def test_scratch_directories_go_with_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone_token: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = make_scratch()
    stale = make_scratch(repository=tmp_path)
    (stale.path / "owner.json").write_text(json.dumps({"owner": gone_token, "repository": str(tmp_path)}))
    garbled = make_scratch()
    (garbled.path / "owner.json").write_text("{")
    (tmp_path / "atom-scratch-link").symlink_to(stale.path)
    assert [scratch.path for scratch in stale_scratch()] == [stale.path]
    sweep(type(find_leftovers())([], stale_scratch(), 0))
    assert not stale.path.exists()
    assert kept.path.exists()
    assert garbled.path.exists()
