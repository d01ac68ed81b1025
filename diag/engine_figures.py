"""What an engine said of itself in `/metrics` over a window of time, as figures: queue, KV cache, speculation, steps,
prefix hits. How they follow from the scrapes is `bench/engine_window.py`; which words there are is `diag/dialects.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atom.bench.engine_window import EngineWindow, Growth, acceptance, step_times
from atom.diag.server_captures import FloatArray, Scrapes
from atom.diag.server_figure import ServerFigure

__all__ = ["engine_figures", "tokens_per_s"]


def engine_figures(scrapes: Scrapes, start_ns: int, end_ns: int, role: str | None = None) -> list[ServerFigure]:
    """Figures of [start_ns, end_ns). `role`: of a further endpoint; its figures carry that name, and only those that
    it has are there. Of the loaded server the usual ones are null where it does not say."""
    window = _window(scrapes, start_ns, end_ns)
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
    growth = _window(scrapes, start_ns, end_ns).growth("generation_tokens")
    return None if growth is None or growth.seconds <= 0 else growth.amount / growth.seconds


def _window(scrapes: Scrapes, start_ns: int, end_ns: int) -> EngineWindow:
    return EngineWindow(scrapes.sent_ns, scrapes.values, start_ns, end_ns)


def _queue(window: EngineWindow) -> Iterator[ServerFigure]:
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


def _cache(window: EngineWindow) -> Iterator[ServerFigure]:
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


def _steps(window: EngineWindow) -> Iterator[ServerFigure]:
    times = step_times(window)
    value = float(np.median(times.each_s)) * 1e3 if len(times.each_s) else None
    yield ServerFigure("server_step_p50_ms", "server step", value, "ms", _STEP_TIMES[times.measured], times.n, "p50")
    tokens, steps = window.growth("step_tokens", "steps"), window.growth("steps", "step_tokens")
    if (per_step := _ratio(tokens, steps)) is not None:
        definition = "tokens of an engine step, prompt and output, mean over the window's steps"
        yield ServerFigure("step_tokens_mean", "server step", per_step, "tokens", definition, _count(steps))


_STEP_TIMES = {
    True: "median execution time of a step as the server measures it, by second; n: steps",
    False: "median time between two scrapes ÷ engine steps in it, where requests ran at both: the server tells no step "
    "time; n: steps",
}


def _speculation(window: EngineWindow) -> Iterator[ServerFigure]:
    found = acceptance(window)
    yield ServerFigure(
        "acceptance_length", "speculation", found.length, "tokens", found.definition, found.n, "acceptance length"
    )
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


def _contexts(window: EngineWindow) -> Iterator[ServerFigure]:
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


def _ratio(part: Growth | None, whole: Growth | None) -> float | None:
    return None if part is None or whole is None or whole.amount <= 0 else part.amount / whole.amount


def _count(growth: Growth | None) -> int:
    return 0 if growth is None else int(growth.amount)
