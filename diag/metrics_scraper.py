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

from atom.diag.dialects import names_for
from atom.diag.http_fetch import TIMEOUT_S, Exchange, ScrapeError, fetch
from atom.diag.prometheus_text import parse_metrics
from atom.recipes.errors import UsageError
from atom.recipes.recipe import MetricsDialect

__all__ = ["MetricsScraper"]

PERIOD_S: Final = 1.0


class MetricsScraper:
    """Scrapes on a fixed schedule; a scrape that takes longer than a period skips the ones it covered."""

    def __init__(self, url: str, dialect: MetricsDialect, *, period_s: float = PERIOD_S, timeout_s: float = TIMEOUT_S):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"the metrics URL must look like http://host:port/metrics, got {url!r}")
        self.url = url
        self.period_s = period_s
        self.timeout_s = timeout_s
        self._wanted = names_for(dialect)
        self._exchange = Exchange()

    def cut(self) -> None:
        """End the scrape that is under way, from another thread: it is recorded as failed."""
        self._exchange.cut("the capture ended during this scrape")

    def run(self, record: Callable[[Mapping[str, Any]], None], stop: threading.Event) -> None:
        """Scrape and hand each record to `record` until `stop` is set."""
        due = time.monotonic()
        while not stop.wait(max(due - time.monotonic(), 0.0)):
            record(self.scrape(int(due * 1e9)))
            behind = time.monotonic() - due
            due += self.period_s * max(1, int(behind // self.period_s) + 1)

    def scrape(self, scheduled_ns: int) -> dict[str, Any]:
        """One scrape as the line to record."""
        line: dict[str, Any] = {
            "scheduled_ns": scheduled_ns,
            "sent_ns": time.monotonic_ns(),
            "latency_ns": None,
            "connect_ns": None,
            "status": None,
            "body_bytes": None,
            "series": None,
            "families": None,
            "largest_families": None,
            "malformed_lines": None,
            "values": dict.fromkeys(self._wanted),
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
        text = parse_metrics(response.body, self._wanted)
        return {
            **line,
            "series": text.series,
            "families": text.families,
            "largest_families": text.largest,
            "malformed_lines": text.malformed,
            "values": text.values,
            "error": "no Prometheus text" if text.malformed and not text.series else None,
        }
