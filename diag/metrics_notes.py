"""What the reader of a run has to know about endpoints that were to be scraped and gave nothing, or not all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from atom.diag.metrics_scraper import CUT
from atom.diag.metrics_target import MAIN_ROLE
from atom.diag.server_captures import Scrapes, ServerCaptures

__all__ = ["metrics_notes"]


def metrics_notes(server: Path, start_ns: int, end_ns: int) -> list[str]:
    """A sentence per endpoint with something amiss in the window [start_ns, end_ns), from a run's `server/` directory.

    The loaded server itself is only spoken of where its scrapes failed: a short run may have none, and what it has no
    names for is missing from the table.
    """
    captures = ServerCaptures.read(server)
    told = {MAIN_ROLE: _failed(captures.scrapes, start_ns, end_ns)}
    for role, scrapes in captures.others.items():
        told[role] = _failed(scrapes, start_ns, end_ns) or _empty(scrapes, start_ns, end_ns)
    return [f"metrics of {role}: {text}" for role, text in told.items() if text is not None]


def _failed(scrapes: Scrapes, start_ns: int, end_ns: int) -> str | None:
    part = scrapes.window(start_ns, end_ns)
    # One that was under way when the capture ended says nothing of the server.
    outcomes = [error for error in scrapes.errors[part] if error != CUT]
    errors = Counter(error for error in outcomes if error)
    if not errors:
        return None
    n, most = len(outcomes), errors.most_common(1)[0][0]
    if errors.total() == n:
        return f"no metrics in {_scrapes(n)} ({most})"
    return f"{errors.total():,} of {_scrapes(n)} failed ({most})"


def _empty(scrapes: Scrapes, start_ns: int, end_ns: int) -> str | None:
    part = scrapes.window(start_ns, end_ns)
    n, series = part.stop - part.start, scrapes.series[part]
    if not n:
        return "not scraped in the measured phase"
    known = series[~np.isnan(series)]
    if not known.any():
        return f"no series in {_scrapes(n)}: its URL is no metrics page"
    if all(np.isnan(values[part]).all() for values in scrapes.values.values()):
        return f"{int(known[-1]):,} series in its last scrape, none with a name that is known here"
    return None


def _scrapes(n: int) -> str:
    return f"{n:,} scrape" if n == 1 else f"{n:,} scrapes"
