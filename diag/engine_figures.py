"""What an engine said of itself in `/metrics` over a window of time: queue, KV cache, speculation, steps, prefix hits.

Values that only grow count from the last scrape before the window to the last one in it; a server that started again in
between counts from zero. Which words there are is `diag/dialects.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from atom.diag.server_captures import FloatArray, IntArray, Scrapes
from atom.diag.server_figure import ServerFigure

__all__ = ["engine_figures", "tokens_per_s"]


def engine_figures(scrapes: Scrapes, start_ns: int, end_ns: int, role: str | None = None) -> list[ServerFigure]:
    """Figures of [start_ns, end_ns). `role`: of a further endpoint; its figures carry that name, and only those that
    it has are there. Of the loaded server the usual ones are null where it does not say."""
    window = _Window(scrapes, start_ns, end_ns)
    found = [*_queue(window), *_cache(window), *_steps(window)]
    found += [figure for figure in (*_speculation(window), *_contexts(window)) if figure.value is not None]
    if role is None:
        return found
    running = window.gauge("running")
    mean = ServerFigure("running_requests_mean", "running requests", _mean(running), "requests", _RUNNING, len(running))
    return [
        replace(one, key=f"{one.key}_{role}", role=role, definition=f"{one.definition}; of {role}")
        for one in (replace(mean, part="mean"), *found)
        if one.value is not None
    ]


_RUNNING = "mean over the window's scrapes of the requests in the engine"


def tokens_per_s(scrapes: Scrapes, start_ns: int, end_ns: int) -> float | None:
    """Tokens generated per second between the scrapes of the window."""
    growth = _Window(scrapes, start_ns, end_ns).growth("generation_tokens")
    return None if growth is None or growth.seconds <= 0 else growth.amount / growth.seconds


@dataclass(frozen=True, slots=True)
class _Growth:
    steps: FloatArray
    """By how much it grew from each scrape to the next that has it."""
    seconds_between: FloatArray
    rows: IntArray
    """The scrapes from which, and to which, it grew: one more than `steps`."""

    @property
    def amount(self) -> float:
        return float(self.steps.sum())

    @property
    def seconds(self) -> float:
        return float(self.seconds_between.sum())


@dataclass(frozen=True, slots=True)
class _Window:
    scrapes: Scrapes
    start_ns: int
    end_ns: int

    def gauge(self, word: str) -> FloatArray:
        """Its known values in the window."""
        values = self.scrapes.values.get(word)
        if values is None:
            return np.array([])
        part = values[self.scrapes.window(self.start_ns, self.end_ns)]
        return part[~np.isnan(part)]

    def growth(self, *words: str) -> _Growth | None:
        """Of the first word, between scrapes that have all of them; None for fewer than two such scrapes."""
        columns = [self.scrapes.values.get(word) for word in words]
        known = [column for column in columns if column is not None]
        if len(known) < len(words):
            return None
        part = self.scrapes.window(self.start_ns, self.end_ns)
        sums: FloatArray = np.stack(known)[:, : part.stop].sum(axis=0)
        rows = np.flatnonzero(~np.isnan(sums))
        rows = rows[max(0, int(np.searchsorted(rows, part.start)) - 1) :]
        if len(rows) < 2:
            return None
        values, times = known[0][rows], self.scrapes.sent_ns[rows]
        steps = np.diff(values)
        return _Growth(np.where(steps < 0, values[1:], steps), np.diff(times) / 1e9, rows)


def _queue(window: _Window) -> Iterator[ServerFigure]:
    running, waiting = window.gauge("running"), window.gauge("waiting")
    most = "most requests in the engine at a scrape of the window"
    yield ServerFigure(
        "running_requests_max", "running requests", _most(running), "requests", most, len(running), "most"
    )
    what = "requests waiting in the server at the window's scrapes"
    yield ServerFigure(
        "waiting_requests_mean", "waiting requests", _mean(waiting), "requests", f"mean {what}", len(waiting), "mean"
    )
    yield ServerFigure(
        "waiting_requests_max", "waiting requests", _most(waiting), "requests", f"most {what}", len(waiting), "most"
    )


def _cache(window: _Window) -> Iterator[ServerFigure]:
    usage = window.gauge("kv_usage")
    what = "share of the KV cache in use at the window's scrapes, averaged over engines"
    yield ServerFigure("kv_usage_mean", "KV cache", _mean(usage), "fraction", f"mean {what}", len(usage), "mean")
    yield ServerFigure("kv_usage_max", "KV cache", _most(usage), "fraction", f"most {what}", len(usage), "most")
    preempted = window.growth("preemptions")
    yield ServerFigure(
        "preemptions",
        "KV cache",
        None if preempted is None else preempted.amount,
        "sequences",
        "sequences that the server took out of its batch for lack of KV cache (preempted, retracted)",
        0 if preempted is None else len(preempted.rows),
        "preempted",
    )
    hits, queries = window.growth("prefix_hits", "prefix_queries"), window.growth("prefix_queries", "prefix_hits")
    yield ServerFigure(
        "server_prefix_hit_share",
        "server prefix hits",
        _ratio(hits, queries),
        "fraction",
        "prompt tokens found in the prefix cache ÷ prompt tokens looked up, as the server counts them; n: looked up",
        _count(queries),
    )


def _steps(window: _Window) -> Iterator[ServerFigure]:
    seconds, timed = window.growth("step_sum_s", "timed_steps"), window.growth("timed_steps", "step_sum_s")
    if seconds is not None and timed is not None:
        each = seconds.steps[timed.steps > 0] / timed.steps[timed.steps > 0]
        yield _step_figure(each, _count(timed), "execution time of a step as the server measures it, by second")
    else:
        steps = window.growth("steps", "running")
        busy = _always_running(window, steps)
        each = np.array([]) if steps is None else steps.seconds_between[busy] / steps.steps[busy]
        yield _step_figure(
            each,
            0 if steps is None else int(steps.steps[busy].sum()),
            "time between two scrapes ÷ engine steps in it, where requests ran at both: the server tells no step time",
        )
    tokens, steps = window.growth("step_tokens", "steps"), window.growth("steps", "step_tokens")
    if (per_step := _ratio(tokens, steps)) is not None:
        definition = "tokens of an engine step, prompt and output, mean over the window's steps"
        yield ServerFigure("step_tokens_mean", "server step", per_step, "tokens", definition, _count(steps))


def _always_running(window: _Window, steps: _Growth | None) -> IntArray:
    """Which intervals have steps, and requests at both ends."""
    if steps is None:
        return np.array([], dtype=np.int64)
    running = window.scrapes.values["running"][steps.rows] > 0
    return np.flatnonzero((steps.steps > 0) & running[:-1] & running[1:]).astype(np.int64)


def _step_figure(each_s: FloatArray, n: int, definition: str) -> ServerFigure:
    value = float(np.median(each_s)) * 1e3 if len(each_s) else None
    return ServerFigure("server_step_p50_ms", "server step", value, "ms", f"median {definition}; n: steps", n, "p50")


def _speculation(window: _Window) -> Iterator[ServerFigure]:
    accepted, drafts = window.growth("accepted_tokens", "drafts"), window.growth("drafts", "accepted_tokens")
    value, n = _ratio(accepted, drafts), _count(drafts)
    definition = "1 + accepted draft tokens ÷ drafts (verifications, one per sequence and step); n: drafts"
    if value is not None:
        value += 1
    elif (calls := window.growth("drafts", "generation_tokens")) is not None:
        value, n = _ratio(window.growth("generation_tokens", "drafts"), calls), _count(calls)
        definition = "generated tokens ÷ verifications of drafts: this server does not count accepted tokens; n: those"
    else:
        gauge = window.gauge("acceptance_length")
        gauge = gauge[gauge > 0]
        value, n = _mean(gauge), len(gauge)
        definition = "mean over scrapes of the server's own running average (a gauge); n: scrapes"
    yield ServerFigure("acceptance_length", "speculation", value, "tokens", definition, n, "acceptance length")
    drafted = window.growth("draft_tokens", "accepted_tokens")
    yield ServerFigure(
        "draft_acceptance_share",
        "speculation",
        _ratio(window.growth("accepted_tokens", "draft_tokens"), drafted),
        "fraction",
        "accepted draft tokens ÷ drafted tokens; n: drafted",
        _count(drafted),
        "drafts accepted",
    )


def _contexts(window: _Window) -> Iterator[ServerFigure]:
    """Of servers that tell each request's context: as of the window's last scrape, over the requests since their
    start."""
    for kind, what in (("prefill", "prompt tokens"), ("decode", "prompt and generated tokens")):
        n = int(_last(window.gauge(f"{kind}_context_series")) or 0)
        for how, part in (("mean", "mean"), ("max", "most")):
            value = _last(window.gauge(f"{kind}_context_{how}"))
            definition = f"{part} {what} of a request, over the n requests that the window's last scrape has"
            yield ServerFigure(f"{kind}_context_{how}", f"{kind} context", value, "tokens", definition, n, part)


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if len(values) else None


def _most(values: FloatArray) -> float | None:
    return float(values.max()) if len(values) else None


def _last(values: FloatArray) -> float | None:
    return float(values[-1]) if len(values) else None


def _ratio(part: _Growth | None, whole: _Growth | None) -> float | None:
    return None if part is None or whole is None or whole.amount <= 0 else part.amount / whole.amount


def _count(growth: _Growth | None) -> int:
    return 0 if growth is None else int(growth.amount)
