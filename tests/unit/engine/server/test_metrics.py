"""Metrics: accumulators against prometheus-client's own, the catalog against the documents, scrapes that share."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from atom.engine.messages import FirstSchedule, SchedulerStats, StepOutputs
from atom.engine.server.metrics import catalog
from atom.engine.server.metrics.catalog import FAMILIES
from atom.engine.server.metrics.exporter import MetricsExporter
from atom.engine.server.metrics.histogram import FINE_ITL_BUCKETS, ITL_BUCKETS, Histogram, token_buckets
from atom.engine.server.metrics.recorder import Recorder
from atom.engine.server.metrics.source import MetricsSource

ROOT = Path(__file__).parents[4]
OBSERVATIONS = st.lists(st.sampled_from(FINE_ITL_BUCKETS) | st.floats(0, 200), max_size=30)


class StandInEngine:
    def __init__(self) -> None:
        self.latest_stats = [SchedulerStats()]
        self.info: dict[str, Any] = {"num_kv_blocks": 100}


@pytest.fixture
def source() -> MetricsSource:
    recorder = Recorder(max_model_len=1000)
    values = dict(zip(catalog.CACHE_INFO_LABELS, ("16", "True", "100"), strict=True))
    return MetricsSource(recorder, StandInEngine(), {"api": os.getpid()}, "m", values)


@pytest.fixture
def exporter(source: MetricsSource) -> Iterator[MetricsExporter]:
    it = MetricsExporter(source, "both")
    yield it
    it.close()


@given(values=OBSERVATIONS)
def test_a_histogram_counts_as_prometheus_client_does(values: list[float]) -> None:
    ours = Histogram(FINE_ITL_BUCKETS)
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "", buckets=FINE_ITL_BUCKETS, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (family,) = registry.collect()
    expected = [(row.labels["le"], row.value) for row in family.samples if row.name == "h_bucket"]
    assert ours.buckets() == expected
    assert ours.count == len(values)
    assert ours.total == pytest.approx(sum(values))


@given(values=OBSERVATIONS, more=OBSERVATIONS)
def test_histograms_rebin_and_add(values: list[float], more: list[float]) -> None:
    def filled(bounds: tuple[float, ...], observed: list[float]) -> Histogram:
        histogram = Histogram(bounds)
        for value in observed:
            histogram.observe(value)
        return histogram

    assert filled(FINE_ITL_BUCKETS, values).rebinned(ITL_BUCKETS).buckets() == filled(ITL_BUCKETS, values).buckets()
    both = filled(ITL_BUCKETS, values).plus(filled(ITL_BUCKETS, more))
    assert both.buckets() == filled(ITL_BUCKETS, values + more).buckets()


def test_a_weight_counts_as_so_many_observations() -> None:
    once, often = Histogram((1.0,)), Histogram((1.0,))
    once.observe(0.5, 3)
    for _ in range(3):
        often.observe(0.5)
    assert once.buckets() == often.buckets()
    assert once.total == often.total == 1.5


def test_token_buckets() -> None:
    assert token_buckets(60) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    assert token_buckets(1) == (1.0,)


def test_steps_are_counted(source: MetricsSource) -> None:
    recorder = source.recorder
    stats = SchedulerStats(step_prefill_tokens=7, step_decode_seqs=3, step_seconds=0.004, kv_blocks_total=100)
    recorder.on_step(StepOutputs(0, 1, 0, [], [], first_scheduled=[FirstSchedule(1, 0, 10**9, 0)], stats=stats))
    engine = recorder.engines[0]
    assert engine.iteration_tokens.total == 10
    assert engine.step_seconds.total == 0.004
    assert engine.queue_time.total == pytest.approx(1.0)
    recorder.on_step(StepOutputs(0, -1, 0, [], [], stats=stats))  # a report without a step
    assert engine.iteration_tokens.count == 1


async def scrape(exporter: MetricsExporter) -> dict[str, Any]:
    body, content_type = await exporter.render("")
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


async def test_every_family_has_the_samples_that_it_promises(exporter: MetricsExporter) -> None:
    families = await scrape(exporter)
    for row in FAMILIES:
        family = families[row.name]
        assert family.type == row.kind
        if not row.has_samples.startswith("always"):
            continue
        assert family.samples, row.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(row.labels), row.name


async def test_the_pool_is_known_before_the_first_step(exporter: MetricsExporter) -> None:
    (sample,) = (await scrape(exporter))["atom:kv_cache_blocks_total"].samples
    assert sample.value == 100


@pytest.mark.parametrize("dialect", ["atom", "vllm"])
async def test_a_dialect_shows_its_own_names_alone(source: MetricsSource, dialect: Any) -> None:
    exporter = MetricsExporter(source, dialect)
    assert {name.partition(":")[0] for name in await scrape(exporter)} == {dialect}
    exporter.close()


async def test_openmetrics_where_it_is_asked_for(exporter: MetricsExporter) -> None:
    body, content_type = await exporter.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


async def test_concurrent_scrapes_share_one_render(exporter: MetricsExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    release, renders = threading.Event(), []

    def render(encode: Any) -> bytes:
        renders.append(encode)
        release.wait(10)
        return b"x"

    monkeypatch.setattr(exporter, "_render", render)
    scrapes = [asyncio.create_task(exporter.render("")) for _ in range(5)]
    await asyncio.sleep(0.05)  # the loop runs on while the thread renders
    scrapes[0].cancel()
    await asyncio.sleep(0)
    release.set()
    assert [body for body, _ in await asyncio.gather(*scrapes[1:])] == [b"x"] * 4
    assert len(renders) == 1
    await exporter.render("")
    assert len(renders) == 2, "a finished render is not given out again"


def table_rows(document: str) -> list[list[str]]:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_guide_describes_every_family_as_it_is() -> None:
    expected = [
        [
            f"`{row.exposed_name}`",
            row.kind,
            ", ".join(f"`{label}`" for label in row.labels) or "–",
            row.meaning,
            row.has_samples,
        ]
        for row in FAMILIES
    ]
    assert sorted(table_rows("metrics_guide.md")) == sorted(expected)


def test_names_follow_prometheus() -> None:
    names = [row.exposed_name for row in FAMILIES]
    assert len(names) == len(set(names))
    for row in FAMILIES:
        assert re.fullmatch(r"(atom|vllm):[a-z][a-z0-9_]*", row.name)
        assert "request_id" not in row.labels
