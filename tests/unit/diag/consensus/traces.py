"""Traces of made-up runs, written as a rank would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS = 1_000_000


@dataclass
class Writer:
    """One rank's file."""

    rank: int
    size: int
    mode: str = "blocking"
    arm: str = "blocking"
    tp: int = 1
    boot_id: str | None = "boot"
    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def emit(self, t: float, event: str, **fields: Any) -> None:
        """`t` in ms."""
        self.lines.append({"t": int(t * MS), "e": event, **fields})

    def header(self) -> dict[str, Any]:
        return {
            "schema": "atom-agreement-trace",
            "schema_version": 1,
            "run": "r",
            "arm": self.arm,
            "mode": self.mode,
            "rank": self.rank,
            "size": self.size,
            "stage": self.rank // self.tp,
            "shard": self.rank % self.tp,
            "pp": self.size // self.tp,
            "tp": self.tp,
            "host": "h",
            "boot_id": self.boot_id,
            "pid": 1,
            "start_ns": 0,
            "facts": self.facts,
        }

    def write(self, directory: Path, end: dict[str, Any] | None) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank-{self.rank}.jsonl"
        lines = [self.header(), *sorted(self.lines, key=lambda one: one["t"])]
        last = max((one["t"] for one in self.lines), default=0)
        if end is not None:
            lines.append({"e": "end", "t": last, **end})
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return path


def totals(directory: Path, pp_s: Sequence[float], wall_s: float, tp_s: float = 0.0, **more: Any) -> Path:
    """Nothing but end lines."""
    for rank, wait in enumerate(pp_s):
        end = {"wall_s": wall_s, "wait_s": {"pp": wait, "tp": tp_s}, "cpu_s": 1.0, **more}
        Writer(rank, len(pp_s)).write(directory, end)
    return directory


@dataclass
class Pipeline:
    """A context pipeline under stated forward times in ms, by stage. In blocking mode every rank enters a call after
    each of its forwards; otherwise a commit comes shortly after the last vote."""

    stage_ms: Sequence[float]
    mode: str = "blocking"
    arm: str | None = None
    requests: int = 40
    transfer_ms: float = 3.0
    differing: Sequence[int] = ()
    """Requests that the last rank ends as failed, and the others as completed."""
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        size = len(self.stage_ms)
        arm = self.arm or self.mode
        writers = [Writer(rank, size, self.mode, arm, facts=self.facts) for rank in range(size)]
        free = [0.0] * size
        waits = [0.0] * size
        for number in range(self.requests):
            ready = free[0]
            entered = []
            for rank, took in enumerate(self.stage_ms):
                start = max(ready, free[rank])
                writer = writers[rank]
                writer.emit(0, "enqueue", r=number, p=0)
                writer.emit(start, "activate", r=number, p=0)
                writer.emit(start, "work_start", w="forward")
                writer.emit(start, "forward_start", r=number, p=0)
                writer.emit(start + took, "forward_end", r=number, p=0)
                writer.emit(start + took, "work_end", w="forward")
                writer.emit(start + took, "send_submit", r=number, p=0)
                ready = free[rank] = start + took
                entered.append(start + took)
            over = max(entered)
            for rank, writer in enumerate(writers):
                self._end(writer, rank, number, entered[rank], over)
                if self.mode == "blocking":
                    free[rank] = over
                    waits[rank] += over - entered[rank]
        for rank, writer in enumerate(writers):
            last = max(one["t"] for one in writer.lines) / 1e9
            pp = waits[rank] / 1e3 if self.mode == "blocking" else 0.0001
            end = {"wall_s": last, "cpu_s": 0.5, "wait_s": {"pp": pp, "tp": 0.0}, "abandoned": 0, "pending_sends": 0}
            writer.write(directory, end)
        return directory

    def _end(self, writer: Writer, rank: int, number: int, entered: float, over: float) -> None:
        last = rank == len(self.stage_ms) - 1
        outcome = "failed" if last and number in self.differing else "completed"
        if self.mode == "blocking":
            writer.emit(entered, "agree_enter", g="pp", k="outcome", q=number)
            writer.emit(over, "agree_exit", g="pp", k="outcome", q=number, n=1, d=1)
        done = entered + self.transfer_ms
        over = max(over, entered) + self.transfer_ms
        writer.emit(done, "transfer_done", r=number, p=0)
        if self.mode != "none":
            writer.emit(done, "vote", r=number, p=0, o=outcome)
            commit = done if self.mode == "local-only" else over + 0.1
            agreed = outcome if self.mode == "local-only" else ("failed" if number in self.differing else "completed")
            writer.emit(commit, "commit", r=number, p=0, q=number, o=agreed)
            writer.emit(commit + 0.01, "apply", r=number, p=0)
            writer.emit(commit + 0.02, "release", r=number, p=0, b=8)
        writer.emit(over + 0.2, "cleanup", r=number, p=0)
