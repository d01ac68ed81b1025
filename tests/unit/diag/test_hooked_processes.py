"""Who is listed as hooked, under which pid, and the reasons of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from atom.diag.hooked_processes import hooked_processes

S = 1_000_000_000


def sample(pid: int, t_s: float, **first: Any) -> dict[str, Any]:
    return {"t_ns": int(t_s * S), "pid": pid, "role": "other", "name": "python", "rss_bytes": pid << 20, **first}


def hook(pid: int, ticks: int | None, command: str = "python", **more: Any) -> dict[str, Any]:
    return {
        "type": "hook", "schema_version": "1.0", "pid": pid, "start_ticks": ticks, "role": "other", "command": command,
        "installed_ns": 1, "python": "3.11.7", "collector": "generational", "old_generations": [2],
        "thresholds": [700, 10, 10], **more,
    }  # fmt: skip


def totals(**more: Any) -> dict[str, Any]:
    return {
        "type": "totals", "t_ns": 2 * S + 1, "recorded": 0, "dropped": 0, "old_passes": 0, "old_ns": 0, **more
    }  # fmt: skip


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_figures_of_a_hooked_process(tmp_path: Path) -> None:
    write(tmp_path / "process.jsonl", sample(7, 1, start_ticks=70, command="a", exe="/bin/python3", role="api"))
    late = totals(thresholds=[9, 9, 9], frozen=5, action="freeze", hook_cpu_ns=S // 50, enabled=True)
    write(tmp_path / "gc-other-7.jsonl", hook(7, 70), late)
    (one,) = hooked_processes(tmp_path)
    assert (one.pid, one.role, one.hooked, one.reason) == (7, "api", True, "")
    assert (one.thresholds, one.frozen, one.action, one.rss_mb) == ((9, 9, 9), 5, "freeze", 7.0)
    assert one.hook_cpu_share == 0.01
    assert one.gen2_passes is None


def test_a_process_is_known_by_its_start_also_inside_a_container(tmp_path: Path) -> None:
    write(
        tmp_path / "process.jsonl",
        sample(500, 1, start_ticks=70, command="python", exe="/usr/bin/python3"),
        sample(501, 1, start_ticks=71, command="python", exe="/usr/bin/python3", hook_obstacle="started with -I"),
        sample(7, 1, start_ticks=99, command="sh", exe="/bin/sh", hook_obstacle="not a Python process (sh)"),
        sample(500, 9),
        sample(501, 9),
    )
    write(tmp_path / "gc-api-7.jsonl", hook(7, 70))
    found = {one.pid: (one.role, one.hooked, one.reason) for one in hooked_processes(tmp_path)}
    assert found == {
        500: ("api", True, ""),
        501: ("other", False, "started with -I"),
        7: ("other", False, "not a Python process (sh)"),
    }


def test_a_reused_pid_is_two_processes(tmp_path: Path) -> None:
    write(
        tmp_path / "process.jsonl",
        sample(7, 1, start_ticks=70, command="python a", exe="/usr/bin/python3"),
        sample(7, 50, start_ticks=5000, command="python b", exe="/usr/bin/python3"),
        sample(7, 99),
    )
    write(tmp_path / "gc-api-7.jsonl", hook(7, 5000))
    found = [(one.command, one.hooked, one.reason) for one in hooked_processes(tmp_path)]
    assert found == [
        ("python b", True, ""),
        ("python a", False, "ended within 2.5 s, before the hook's first line"),
    ]


def test_reasons_of_an_attach(tmp_path: Path) -> None:
    write(
        tmp_path / "process.jsonl",
        *(sample(pid, 1, start_ticks=pid, command="python", exe="/usr/bin/python3") for pid in (1, 2, 3)),
        *(sample(pid, 60) for pid in (1, 2, 3)),
    )
    write(tmp_path / "gc-api-1.jsonl", hook(1, 1, attached=True))
    write(tmp_path / "attach.jsonl", {"pid": 1, "ok": True, "reason": ""}, {"pid": 2, "ok": False, "reason": "no gdb"})
    reasons = {one.pid: one.reason for one in hooked_processes(tmp_path)}
    assert reasons == {
        1: "attached while it ran: what came before is not known",
        2: "no gdb",
        3: "was not there, or not running Python, when the hook was attached",
    }


def test_garbage_is_no_process(tmp_path: Path) -> None:
    assert hooked_processes(tmp_path) == []
    write(
        tmp_path / "process.jsonl", {"pid": "x"}, {"pid": 1}, {"t_ns": [], "pid": 2}, sample(3, 1, command=[1], exe=3)
    )
    (tmp_path / "gc-failed-3.json").write_text("{")
    (tmp_path / "gc-failed-4.json").write_text("[]")
    (tmp_path / "gc-other-9.jsonl").write_text('{"type":"hook","schema_version":"1.0"}\nnull\n')
    (one,) = hooked_processes(tmp_path)
    assert (one.pid, one.hooked, one.command) == (3, False, "")
