"""From the catalog to the text of `/metrics`. `prometheus-client` renders it, on a thread, once for all who ask at the
same time.

A thread alone does not keep a render away from the event loop: pure Python holds the interpreter for a whole switch
interval (5 ms) whenever the loop wants it back, so that each turn of the loop takes that long while one renders. For
as long as a render runs, the interval is therefore `TURN_S`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from atom.engine.server.config import MetricsDialect
from atom.engine.server.metrics.catalog import FAMILIES, Family, Sample
from atom.engine.server.metrics.histogram import Histogram
from atom.engine.server.metrics.source import MetricsSource

Encode: TypeAlias = "Callable[[Collector], bytes]"
TURN_S: Final = 0.0002
"""Measured with 40,000 series (`tests/benchmarks/bench_metrics_render.py`): the loop is late by 5.3 ms at each turn
with the interpreter's default, by 0.4 ms with this. The render takes longer by what the loop does meanwhile."""


class _ShortTurns:
    """A smaller switch interval while anybody is inside. The interval belongs to the process, as this does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(TURN_S, self._usual))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    sys.setswitchinterval(self._usual)


_short_turns: Final = _ShortTurns()


def _choose_encoder(accept: str) -> tuple[Encode, str]:
    """How to write, and the content type to say. No name here needs escaping; asked to write OpenMetrics with
    underscores for what does (Prometheus 2 asks), prometheus-client 0.26 takes the colons of samples for that, but not
    those of their metadata."""
    encode, content_type = exposition.choose_encoder(accept)
    if isinstance(encode, partial) and encode.keywords.get("escaping") == openmetrics.UNDERSCORES:
        encode = partial(encode, escaping=openmetrics.ALLOWUTF8)
    return encode, content_type


class CatalogCollector(Collector):
    """Reads every family of a dialect when it is asked."""

    def __init__(self, source: MetricsSource, dialect: MetricsDialect) -> None:
        self._source = source
        self._families = [family for family in FAMILIES if dialect in ("both", family.dialect)]

    def collect(self) -> Iterator[Metric]:
        self._source.refresh()
        for family in self._families:
            if family.read is not None:
                yield _metric(family, family.read(self._source))

    def describe(self) -> Iterator[Metric]:
        """Nothing is read at registration."""
        return iter(())


def _metric(family: Family, samples: Iterable[Sample]) -> Metric:
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(family.name, family.meaning, labels=family.labels)
        for labels, value in samples:
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, buckets=value.buckets(), sum_value=value.total)
        return histograms
    numbers: CounterMetricFamily | GaugeMetricFamily
    if family.kind == "counter":
        numbers = CounterMetricFamily(family.name, family.meaning, labels=family.labels)
    else:
        numbers = GaugeMetricFamily(family.name, family.meaning, labels=family.labels)
    for labels, value in samples:
        assert not isinstance(value, Histogram)
        numbers.add_metric(labels, value)
    return numbers


class MetricsExporter:
    """`render` for an event loop."""

    def __init__(self, source: MetricsSource, dialect: MetricsDialect) -> None:
        self.source = source
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(CatalogCollector(source, dialect))
        contexts = source.recorder.contexts
        if contexts is not None:
            self._registry.register(contexts.prefill)
            self._registry.register(contexts.decode)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._renders: dict[str, asyncio.Future[bytes]] = {}
        """The render in progress, by content type."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type, as the scraper's Accept header wants it. Scrapes that come while one is
        rendered get that one."""
        encode, content_type = _choose_encoder(accept)
        render = self._renders.get(content_type)
        if render is None:
            render = asyncio.get_running_loop().run_in_executor(self._thread, self._render, encode)
            self._renders[content_type] = render
            render.add_done_callback(lambda _done: self._renders.pop(content_type, None))
        # A scraper that gives up must not take the render away from the others.
        return await asyncio.shield(render), content_type

    def _render(self, encode: Encode) -> bytes:
        with _short_turns():
            return encode(self._registry)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
