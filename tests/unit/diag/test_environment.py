"""`atom doctor`'s looking: complete on a machine that has much, and on one that has nothing."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from atom.cli.doctor import app
from atom.diag import environment
from atom.diag.environment import Finding, State, examine
from atom.recipes.spawn import import_root

SECTIONS = ["python", "packages", "tools", "devices", "cpu and memory", "clocks", "limits"]


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking torch takes seconds; these tests are about the rest."""
    monkeypatch.setattr(environment, "_ask", lambda _script, _timeout: None)


@pytest.mark.usefixtures("no_torch")
def test_every_finding_is_complete() -> None:
    findings = examine()
    assert list(dict.fromkeys(one.section for one in findings)) == SECTIONS
    for one in findings:
        assert one.value
        assert (one.state is State.OK) == (one.consequence is None), one


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


def test_a_machine_that_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    findings = by_name(examine())
    assert findings["torch"].state is State.MISSING
    assert "pip install 'atom-serving[engine]'" in (findings["torch"].consequence or "")
    assert findings["[engine]"].state is State.MISSING
    assert findings["mpi4py"].state is State.MISSING
    assert findings["gdb"].consequence is not None
    assert findings["memory"].state is State.OK


@pytest.mark.usefixtures("no_torch")
def test_nvidia_devices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = "NVIDIA H200, 143771, 4, 570.86, 9.0, 1980\n"
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/bin/{name}")
    monkeypatch.setattr(
        environment, "_output", lambda command, _t: row * 2 if "nvidia-smi" in command[0] else "tool 1.2"
    )
    found = [one for one in examine() if one.section == "devices"]
    assert [one.name for one in found][:2] == ["NVIDIA 0", "NVIDIA 1"]
    assert "NVIDIA H200, 143771 MiB" in found[0].value


def test_a_child_that_hangs_or_talks_nonsense_is_no_error() -> None:
    assert environment._ask("import time; time.sleep(60)", 0.5) is None
    assert environment._ask("print('x')", 30) is None
    assert environment._ask("print('[1]')", 30) is None
    assert environment._ask("raise SystemExit(1)", 30) is None
    assert environment._ask("print('noise'); print('{\"a\": 1}')", 30) == {"a": 1}
    assert environment._output(["/none"], 1) is None


@pytest.mark.usefixtures("no_torch")
def test_the_command_prints_json_or_a_table() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["--json", "-"])
    assert done.exit_code == 0
    document: dict[str, Any] = json.loads(done.stdout)
    assert {one["section"] for one in document["findings"]} == set(SECTIONS)
    done = runner.invoke(app, [])
    assert done.exit_code == 0
    assert "missing, and what it switches off" in done.stdout
    assert runner.invoke(app, ["--quiet"]).stdout == ""


def test_nothing_heavy_is_imported() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(import_root())!r})\n"
        "from atom.diag import environment\n"
        "environment._ask = lambda *a: None\n"
        "environment.examine()\n"
        "print([m for m in ('torch', 'mpi4py', 'transformers', 'numpy', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
