"""From the catalog to the text of `/metrics`. `prometheus-client` renders it, on a thread, once for all who ask at the
same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from atom.engine.server.config import MetricsDialect
from atom.engine.server.metrics.catalog import FAMILIES, Family
from atom.engine.server.metrics.histogram import Histogram
from atom.engine.server.metrics.source import MetricsSource


class CatalogCollector(Collector):
    """Reads every family of a dialect when it is asked."""

    def __init__(self, source: MetricsSource, dialect: MetricsDialect) -> None:
        self._source = source
        self._families = [family for family in FAMILIES if dialect in ("both", family.dialect)]

    def collect(self) -> Iterator[Metric]:
        self._source.refresh()
        for family in self._families:
            yield _metric(family, self._source)

    def describe(self) -> Iterator[Metric]:
        """Nothing is read at registration."""
        return iter(())


def _metric(family: Family, source: MetricsSource) -> Metric:
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(family.name, family.meaning, labels=family.labels)
        for labels, value in family.read(source):
            assert isinstance(value, Histogram)
            histograms.add_metric(labels, buckets=value.buckets(), sum_value=value.total)
        return histograms
    numbers: CounterMetricFamily | GaugeMetricFamily
    if family.kind == "counter":
        numbers = CounterMetricFamily(family.name, family.meaning, labels=family.labels)
    else:
        numbers = GaugeMetricFamily(family.name, family.meaning, labels=family.labels)
    for labels, value in family.read(source):
        assert not isinstance(value, Histogram)
        numbers.add_metric(labels, value)
    return numbers


class MetricsExporter:
    """`render` for an event loop."""

    def __init__(self, source: MetricsSource, dialect: MetricsDialect) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(CatalogCollector(source, dialect))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._renders: dict[str, asyncio.Future[bytes]] = {}
        """The render in progress, by content type."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type, as the scraper's Accept header wants it. Scrapes that come while one is
        rendered get that one."""
        encode, content_type = exposition.choose_encoder(accept)
        render = self._renders.get(content_type)
        if render is None:
            render = asyncio.get_running_loop().run_in_executor(self._thread, self._render, encode)
            self._renders[content_type] = render
            render.add_done_callback(lambda _done: self._renders.pop(content_type, None))
        # A scraper that gives up must not take the render away from the others.
        return await asyncio.shield(render), content_type

    def _render(self, encode: Callable[[CollectorRegistry], bytes]) -> bytes:
        return encode(self._registry)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
