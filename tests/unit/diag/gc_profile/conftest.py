"""Run directories of a server that never existed: what each capture would have said is given by functions of time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SECOND = 1_000_000_000
EPOCH = 5_000 * SECOND
MEGABYTE = 1 << 20

Interval = tuple[float, float]


@dataclass
class SyntheticRun:
    """Times in seconds since the start of the measured phase. `write` may be called once."""

    directory: Path
    seconds: float = 120.0
    seed: int = 0
    requests_per_s: float = 10.0
    ttft_s: float = 0.1
    gap_s: float = 0.02
    chunks: int = 6
    passes: Sequence[Interval] = ()
    """Start and length."""
    stalls: Sequence[Interval] = ()
    """Start and length of what delays every token and probe, whatever it is."""
    scrape_ms: Callable[[float], float] = lambda _: 5.0
    series: Callable[[float], float] = lambda _: 500.0
    rss_mb: Callable[[float], float] = lambda _: 100.0
    with_requests: bool = True
    with_hook: bool = True
    with_health: bool = True
    ended: bool = True
    families: dict[str, Callable[[float], float]] = field(default_factory=dict)

    def write(self) -> Path:
        rng = np.random.default_rng(self.seed)
        self._stall_start = np.array(sorted(start for start, _ in self.stalls))
        self._stall_stop = self._stall_start + np.array([length for _, length in sorted(self.stalls)])
        facts: dict[str, Any] = {"schema_version": "1.0", "validity": "valid", "measured_start_ns": EPOCH}
        self._text("run.json", json.dumps(facts if self.ended else {**facts, "validity": None}))
        client = [{"kind": "measured_start", "t_ns": EPOCH}]
        if self.ended:
            client.append({"kind": "measured_end", "t_ns": self.ns(self.seconds)})
        self.lines("client/0.jsonl", client)
        if self.with_requests:
            self.lines("requests/0.jsonl", self._requests(rng))
        if self.with_hook:
            self.lines("server/gc-api-10.jsonl", self._hook())
        self.lines("server/metrics-api.jsonl", self._scrapes(rng))
        self.lines("server/process.jsonl", self._samples())
        if self.with_health:
            self.lines("server/health.jsonl", self._health(rng))
        return self.directory

    def ns(self, seconds: float) -> int:
        return EPOCH + round(seconds * SECOND)

    def lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        self._text(name, "".join(json.dumps(line) + "\n" for line in lines))

    def _text(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def after_stall(self, moment: float) -> float:
        """When what was due at `moment` happens."""
        at = int(np.searchsorted(self._stall_start, moment, side="right")) - 1
        return float(max(moment, self._stall_stop[at])) if at >= 0 else moment

    def _requests(self, rng: np.random.Generator) -> list[dict[str, Any]]:
        lines = []
        for index in range(int(self.seconds * self.requests_per_s)):
            sent = index / self.requests_per_s + rng.random() * 0.01
            times = [self.after_stall(sent + self.ttft_s + rng.exponential(0.002))]
            for _ in range(self.chunks - 1):
                times.append(self.after_stall(times[-1] + self.gap_s + rng.exponential(0.0005)))
            if times[-1] > self.seconds:
                break
            chunks = [self.ns(time) for time in times]
            lines.append(
                {
                    "index": index,
                    "outcome": "completed",
                    "sent_ns": self.ns(sent),
                    "first_ns": chunks[0],
                    "last_ns": chunks[-1],
                    "end_ns": chunks[-1],
                    "prompt_tokens": 100,
                    "output_tokens": len(chunks),
                    "chunk_ns": chunks,
                }
            )
        return lines

    def _hook(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = [
            {
                "type": "hook",
                "schema_version": "1.0",
                "pid": 10,
                "role": "api",
                "command": "server",
                "installed_ns": EPOCH - 10 * SECOND,
                "collector": "generational",
                "old_generations": [2],
                "thresholds": [700, 10, 10],
            }
        ]
        done, spent = 0, 0
        for start, length in sorted(self.passes):
            begin, stop = self.ns(start), self.ns(start) + round(length * SECOND)
            done, spent = done + 1, spent + stop - begin
            lines.append(
                {
                    "type": "pass",
                    "start_ns": begin,
                    "stop_ns": stop,
                    "generation": 2,
                    "collected": 100,
                    "uncollectable": 0,
                }
            )
        totals = {"type": "totals", "recorded": done, "dropped": 0, "old_passes": done, "old_ns": spent}
        return [*lines, {**totals, "t_ns": self.ns(self.seconds), "young_passes": 7, "young_ns": SECOND}]

    def _scrapes(self, rng: np.random.Generator) -> list[dict[str, Any]]:
        lines = []
        moment, first = 0.3, True
        while moment < self.seconds:
            families = {name: int(count(moment)) for name, count in self.families.items()}
            series = int(self.series(moment)) + sum(families.values())
            took = self.scrape_ms(moment) * (1 + 0.1 * rng.random())
            lines.append(
                {
                    "sent_ns": self.ns(moment),
                    "latency_ns": round(took * 1e6),
                    "status": 200,
                    "body_bytes": 90 * series,
                    "series": series,
                    "family_series": {**families, **({"base": int(self.series(moment))} if first else {})},
                    "values": {"running": 4.0},
                    "error": None,
                }
            )
            first = False
            moment += max(1.0, np.ceil(took / 1e3))
        return lines

    def _samples(self) -> list[dict[str, Any]]:
        return [
            {
                "t_ns": self.ns(moment),
                "pid": 10,
                "role": "api",
                "command": "server",
                "rss_bytes": int(self.rss_mb(moment) * MEGABYTE),
                "cpu_s": moment / 10,
                "threads": 9,
            }
            for moment in np.arange(0.1, self.seconds, 1.0)
        ]

    def _health(self, rng: np.random.Generator) -> list[dict[str, Any]]:
        lines, free = [], 0.0
        for due in np.arange(0.05, self.seconds, 0.1):
            if due < free:
                continue
            free = self.after_stall(due + 0.001 + rng.exponential(0.0005))
            took = round((free - due) * SECOND)
            lines.append({"t_ns": self.ns(due), "sent_ns": self.ns(due), "latency_ns": took, "error": None})
        return lines


Builder = Callable[..., SyntheticRun]


@pytest.fixture
def synthetic(tmp_path: Path) -> Builder:
    """`synthetic(seconds=…, passes=…)` → a run that is not written yet."""

    def build(name: str = "run", **fields: Any) -> SyntheticRun:
        return SyntheticRun(tmp_path / name, **fields)

    return build
