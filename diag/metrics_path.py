"""Where a server keeps its Prometheus text: the first of its dialect's paths that answers with some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

from atom.diag.http_fetch import ScrapeError, fetch
from atom.diag.prometheus_text import parse_metrics
from atom.recipes.known_servers import METRICS_PATHS
from atom.recipes.recipe import Metrics

__all__ = ["MetricsPlace", "find_metrics", "metrics_paths"]

_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """What to scrape, and how that was found."""

    url: str
    tried: list[dict[str, Any]] = field(default_factory=list)
    """`url`, `status` and `error` of each attempt; error null for the one that has the text."""


def metrics_paths(metrics: Metrics) -> list[str]:
    """The paths to try: the one that was asked for, then those where such servers have it."""
    paths = [metrics.path, *METRICS_PATHS[metrics.dialect]]
    return list(dict.fromkeys(paths))


def find_metrics(base_url: str, paths: Sequence[str]) -> MetricsPlace:
    """Try each path of `base_url`, following one redirect within the server. None of them fits: the first one stays,
    because a server that has no metrics now (it hangs, it is busy) may have some later."""
    tried: list[dict[str, Any]] = []
    for path in paths:
        url: str | None = base_url + path
        while url is not None:
            status, error, target = _try(url)
            tried.append({"url": url, "status": status, "error": error})
            if error is None:
                return MetricsPlace(url, tried)
            seen = {attempt["url"] for attempt in tried}
            url = target if target not in seen else None
    return MetricsPlace(base_url + paths[0], tried)


def _try(url: str) -> tuple[int | None, str | None, str | None]:
    """Status, what is wrong with it (None: it has the text), and where on this server it sends us."""
    try:
        response = fetch(url, timeout_s=_TIMEOUT_S)
    except ScrapeError as error:
        return None, str(error), None
    if response.status == 200:
        text = parse_metrics(response.body, {})
        return 200, None if text.series else "no Prometheus text", None
    target = None
    if response.status in (301, 302, 307, 308) and response.location:
        there = urljoin(url, response.location)
        target = there if urlsplit(there).netloc == urlsplit(url).netloc else None
    return response.status, f"HTTP {response.status}", target
