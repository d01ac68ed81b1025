"""Scrapes a server's `/metrics` once a second, as Prometheus would, and records what that cost and what it said.

One line per scrape in `server/metrics-<role>.jsonl`. What was not seen is null: a server that refuses, answers garbage
or hangs leaves a complete record.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from atom.diag.dialects import guess_dialect, names_for
from atom.diag.http_fetch import TIMEOUT_S, Exchange, ScrapeError, fetch
from atom.diag.prometheus_text import parse_metrics
from atom.recipes.errors import UsageError
from atom.recipes.recipe import MetricsDialect

__all__ = ["CUT", "MetricsScraper"]

PERIOD_S: Final = 1.0
MAX_FAMILIES: Final = 2000
CUT: Final = "the capture ended during this scrape"


class MetricsScraper:
    """Scrapes on a fixed schedule; a scrape that takes longer than a period skips the ones it covered."""

    def __init__(self, url: str, dialect: MetricsDialect, *, period_s: float = PERIOD_S, timeout_s: float = TIMEOUT_S):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the metrics URL must look like http://host:port/metrics, got {url!r}")
        self.url = url
        self.period_s = period_s
        self.timeout_s = timeout_s
        self.dialect: MetricsDialect = dialect
        """Whose names are read; `auto` until they are known."""
        self._exchange = Exchange()
        self._families: dict[str, int] = {}
        """Family → series, as recorded so far."""

    def cut(self) -> None:
        """End the scrape that is under way, from another thread: it is recorded as failed."""
        self._exchange.cut(CUT)

    def run(self, record: Callable[[Mapping[str, Any]], None], stop: threading.Event) -> None:
        """Scrape and hand each record to `record` until `stop` is set."""
        due = time.monotonic()
        while not stop.wait(max(due - time.monotonic(), 0.0)):
            record(self.scrape(int(due * 1e9)))
            behind = time.monotonic() - due
            due += self.period_s * max(1, int(behind // self.period_s) + 1)

    def scrape(self, scheduled_ns: int) -> dict[str, Any]:
        """One scrape as the line to record."""
        wanted = names_for(self.dialect)
        line: dict[str, Any] = {
            "scheduled_ns": scheduled_ns,
            "sent_ns": time.monotonic_ns(),
            "latency_ns": None,
            "connect_ns": None,
            "status": None,
            "body_bytes": None,
            "series": None,
            "families": None,
            "family_series": None,
            "malformed_lines": None,
            "dialect": self.dialect,
            "values": dict.fromkeys(wanted),
            "error": None,
        }
        self._exchange = Exchange()
        try:
            response = fetch(self.url, timeout_s=self.timeout_s, exchange=self._exchange)
        except ScrapeError as error:
            return {**line, "error": str(error)}
        line |= {
            "sent_ns": response.sent_ns,
            "latency_ns": response.latency_ns,
            "connect_ns": response.connect_ns,
            "status": response.status,
            "body_bytes": len(response.body),
        }
        if response.status != 200:
            return {**line, "error": f"HTTP {response.status}"}
        if response.encoding:
            return {**line, "error": f"compressed ({response.encoding}), which was not asked for"}
        text = parse_metrics(response.body, wanted)
        if text.malformed and not text.series:
            return {**line, "malformed_lines": text.malformed, "error": "no Prometheus text"}
        if self.dialect == "auto":
            self.dialect = guess_dialect(text.by_family)
        return {
            **line,
            "series": text.series,
            "families": text.families,
            "family_series": self._changes(text.by_family),
            "malformed_lines": text.malformed,
            "dialect": self.dialect,
            "values": text.values,
        }

    def _changes(self, now: Mapping[str, int]) -> dict[str, int]:
        """The families whose series changed since they were last recorded, 0 for one that is gone: all of them in the
        first scrape. Only so many are followed, because a server may invent new names for ever."""
        changed = {name: count for name, count in now.items() if self._families.get(name) != count}
        changed |= {name: 0 for name, count in self._families.items() if count and name not in now}
        room = MAX_FAMILIES - len(self._families)
        kept = {}
        for name, count in changed.items():
            if name not in self._families:
                if room <= 0:
                    continue
                room -= 1
            kept[name] = count
        self._families |= kept
        return kept
