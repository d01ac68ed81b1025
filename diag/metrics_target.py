"""One `/metrics` endpoint to scrape, and the role that names its file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from atom.recipes.errors import UsageError
from atom.recipes.recipe import MetricsDialect

__all__ = ["MAIN_ROLE", "MetricsTarget", "parse_metrics_targets"]

MAIN_ROLE: Final = "api"
"""Of the server that the load goes to."""
_ROLE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
_MOST: Final = 256


@dataclass(frozen=True, kw_only=True)
class MetricsTarget:
    """Scraped into `server/metrics-<role>.jsonl`."""

    url: str
    dialect: MetricsDialect = "auto"
    """`auto`: known by the names in its first scrape that has any."""
    role: str = MAIN_ROLE


def parse_metrics_targets(texts: Sequence[str]) -> list[MetricsTarget]:
    """The targets of `--server-metrics role=URL`, several also in one text with commas between. `URL` alone is named by
    its port, a URL without a path means /metrics. UsageError for what is none, and for a role that is taken."""
    given = [item for text in texts for item in text.split(",") if item.strip()]
    if len(given) > _MOST:
        raise UsageError(f"--server-metrics: at most {_MOST} endpoints, got {len(given)}")
    targets: dict[str, MetricsTarget] = {}
    for item in given:
        target = _parse(item.strip())
        if target.role == MAIN_ROLE:
            raise UsageError(f"--server-metrics {item}: the role {MAIN_ROLE} is the loaded server's own; name another")
        if target.role in targets:
            raise UsageError(
                f"--server-metrics {item}: {targets[target.role].url} has the role {target.role} already; "
                "name them apart, as in prefill=http://host:port"
            )
        targets[target.role] = target
    return list(targets.values())


def _parse(item: str) -> MetricsTarget:
    # An "=" before the "://" is a role's; one behind it belongs to a query.
    head, separator, rest = item.partition("=")
    named = bool(separator) and "://" not in head
    role, url = (head, rest) if named else ("", item)
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and parts.username is None  # credentials would not be sent
    except ValueError:
        valid = False
    if not valid or not re.fullmatch(r"[!-~]+", url):
        raise UsageError(f"--server-metrics must look like role=http://host:port/metrics, got {item!r}")
    role = role if named else str(port)
    if not _ROLE.fullmatch(role):
        raise UsageError(
            f"--server-metrics: a role names a file: letters, digits, '.', '_' and '-', at most 40, got {role!r}"
        )
    if parts.path in ("", "/"):
        parts = parts._replace(path="/metrics")
    return MetricsTarget(url=parts.geturl(), role=role)
