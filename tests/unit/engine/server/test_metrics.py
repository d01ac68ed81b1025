"""Metrics: accumulators against prometheus-client's own, the catalog against the documents, scrapes that share."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from atom.engine.api_sequence import ApiSequence
from atom.engine.config import CacheConfig
from atom.engine.messages import FINISH_STOP, DeviceTimes, FirstSchedule, SchedulerStats, StepOutputs
from atom.engine.sampling_params import SamplingParams
from atom.engine.server.metrics.catalog import FAMILIES
from atom.engine.server.metrics.exporter import TURN_S, MetricsExporter
from atom.engine.server.metrics.histogram import (
    FINE_ITL_BUCKETS,
    ITL_BUCKETS,
    LAG_BUCKETS,
    Histogram,
    token_buckets,
)
from atom.engine.server.metrics.loop_lag import INTERVAL_S, LoopLagTimer
from atom.engine.server.metrics.recorder import Recorder
from atom.engine.server.metrics.request_context import RequestContextGauges
from atom.engine.server.metrics.source import MetricsSource

ROOT = Path(__file__).parents[4]
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"
OBSERVATIONS = st.lists(st.sampled_from(FINE_ITL_BUCKETS) | st.floats(0, 200), max_size=30)


class StandInCore:
    def __init__(self, num_kv_blocks: int) -> None:
        self.info: dict[str, Any] = {"num_kv_blocks": num_kv_blocks}


class StandInEngine:
    """Engine i has 100 (i + 1) blocks."""

    def __init__(self, num_engines: int = 1) -> None:
        self.latest_stats = [SchedulerStats() for _ in range(num_engines)]
        self.engines = [StandInCore(100 * (index + 1)) for index in range(num_engines)]
        self.num_held_back = 0


def make_source(num_engines: int = 1, **kwargs: Any) -> MetricsSource:
    recorder = Recorder(max_model_len=1000, num_engines=num_engines, **kwargs)
    pids = {"api": os.getpid(), **{f"core-{index}": os.getppid() for index in range(num_engines)}}
    return MetricsSource(recorder, StandInEngine(num_engines), pids, "m", CacheConfig())


@pytest.fixture
def source() -> MetricsSource:
    return make_source()


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


async def test_what_no_engine_has_yet_waits_too() -> None:
    source = make_source(3)
    engine = source.engine
    assert isinstance(engine, StandInEngine)
    engine.latest_stats[1] = SchedulerStats(num_waiting=4)
    engine.num_held_back = 8
    exporter = MetricsExporter(source, "both")
    families = await scrape(exporter)
    exporter.close()
    rows = {name: [row.value for row in family.samples] for name, family in families.items()}
    assert rows["vllm:num_requests_waiting"] == [3.0, 7.0, 2.0]
    assert rows["atom:requests_waiting"] == [12.0]
    assert rows["atom:requests_held_back"] == [8.0]


async def test_every_family_has_the_samples_that_it_promises(exporter: MetricsExporter) -> None:
    families = await scrape(exporter)
    for row in FAMILIES:
        if row.has_samples.startswith("Opt-in"):
            continue
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


async def test_what_is_opt_in_has_no_samples(exporter: MetricsExporter) -> None:
    families = await scrape(exporter)
    opt_in = [row for row in FAMILIES if row.has_samples.startswith("Opt-in")]
    assert len(opt_in) == 4
    for row in opt_in:
        assert row.name not in families or not families[row.name].samples


def sequence(prompt_tokens: int, engine_index: int = 0) -> ApiSequence:
    seq = ApiSequence(1, "r", range(prompt_tokens), SamplingParams(), arrival_ns=0)
    seq.engine_index = engine_index
    return seq


def values(family: Any) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


async def test_request_context_gauges_where_they_are_asked_for() -> None:
    contexts = RequestContextGauges()
    exporter = MetricsExporter(make_source(contexts=contexts), "both")
    first, second = sequence(10), sequence(20)
    contexts.submitted("a", first)
    contexts.submitted("b", second)
    families = await scrape(exporter)
    assert values(families["atom:prefill_request_context_tokens"]) == {("a",): 10, ("b",): 20}
    assert not families["atom:decode_request_context_tokens"].samples
    first.output_token_ids.extend([1, 2, 3])
    assert values((await scrape(exporter))["atom:decode_request_context_tokens"]) == {("a",): 13}
    first.output_token_ids.append(4)
    contexts.ended("a")
    contexts.ended("a")
    contexts.ended("b")  # without a token
    first.output_token_ids.append(5)  # nobody looks any more
    families = await scrape(exporter)
    assert values(families["atom:decode_request_context_tokens"]) == {("a",): 14}
    assert len(families["atom:prefill_request_context_tokens"].samples) == 2, "a series stays"
    assert families["atom:prefill_request_context_tokens"].type == "gauge"
    exporter.close()


async def test_device_times_where_they_are_asked_for() -> None:
    source = make_source(device_timer=True)
    times = [DeviceTimes(0.004, 0.001), DeviceTimes(0.002)]  # of this step and of one before
    source.recorder.on_step(StepOutputs(0, 1, 0, [], [], stats=SchedulerStats(device_times=times)))
    exporter = MetricsExporter(source, "atom")
    families = await scrape(exporter)
    for name, count, total in (("forward", 2, 0.006), ("sample", 1, 0.001)):
        samples = {sample.name: sample for sample in families[f"atom:device_{name}_seconds"].samples}
        assert samples[f"atom:device_{name}_seconds_count"].value == count
        assert samples[f"atom:device_{name}_seconds_sum"].value == pytest.approx(total)
        assert samples[f"atom:device_{name}_seconds_sum"].labels == {"dp_rank": "0"}
    exporter.close()


async def test_every_engine_has_its_own_series_and_they_add_up() -> None:
    source = make_source(num_engines=3)
    for index in range(3):
        figures = source.recorder.sequences[index]
        for _ in range(index + 1):
            figures.ttft[True].observe(0.1)
            figures.inter_token.observe(0.02)
            figures.finished_sequence(sequence(5, index), FINISH_STOP, 0, 10**9)
            figures.ended_request(1, None)
        source.recorder.on_step(StepOutputs(index, 1, 0, [], [], stats=SchedulerStats(step_decode_seqs=1)))
    exporter = MetricsExporter(source, "both")
    families = await scrape(exporter)
    for row in FAMILIES:
        label = next((label for label in row.labels if label in ("dp_rank", "engine")), None)
        if label is not None and row.has_samples.startswith("always"):
            assert {sample.labels[label] for sample in families[row.name].samples} == {"0", "1", "2"}, row.name

    def counts(name: str) -> list[float]:
        return [sample.value for sample in families[name].samples if sample.name == f"{name}_count"]

    for name in ("e2e_request_latency_seconds", "inter_token_latency_seconds"):
        assert counts(f"vllm:{name}") == [1, 2, 3]
        assert counts(f"atom:{name}") == [6]
    assert counts("vllm:request_params_n") == [1, 2, 3]
    assert counts("vllm:time_to_first_token_seconds") == [1, 2, 3]
    assert sum(counts("atom:time_to_first_token_seconds")) == 6
    stopped = {key: value for key, value in values(families["vllm:request_success"]).items() if "stop" in key}
    assert sorted(stopped.values()) == [1, 2, 3]
    assert values(families["atom:requests_finished"])[("stop",)] == 6
    blocks = {sample.labels["engine"]: sample.labels for sample in families["vllm:cache_config_info"].samples}
    assert [blocks[str(index)]["num_gpu_blocks"] for index in range(3)] == ["100", "200", "300"]
    (total,) = families["atom:kv_cache_blocks_total"].samples
    assert total.value == 600
    processes = {sample.labels["process"] for sample in families["atom:process_resident_memory_bytes"].samples}
    assert processes == {"api", "core-0", "core-1", "core-2"}
    exporter.close()


async def test_openmetrics_where_it_is_asked_for(exporter: MetricsExporter) -> None:
    text, _ = await exporter.render("")
    names = {line.split("{")[0].split(" ")[0] for line in text.decode().splitlines() if not line.startswith("#")}
    for accept in ("application/openmetrics-text", PROMETHEUS_2, PROMETHEUS_3):
        body, content_type = await exporter.render(accept)
        assert content_type.startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")
        lines = body.decode().splitlines()
        assert {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")} == names


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


async def test_the_loop_runs_on_while_many_series_are_rendered() -> None:
    contexts = RequestContextGauges()
    for number in range(10_000):
        contexts.submitted(f"cmpl-{number}", sequence(1))
    exporter = MetricsExporter(make_source(contexts=contexts), "both")
    usual = sys.getswitchinterval()
    rendering = [asyncio.create_task(exporter.render(accept)) for accept in ("", "application/openmetrics-text")]
    turns, shortest = 0, usual
    while not all(task.done() for task in rendering):
        await asyncio.sleep(0)
        turns += 1
        shortest = min(shortest, sys.getswitchinterval())
    assert turns > 100
    assert shortest == pytest.approx(TURN_S), "a render must not keep the interpreter for long"
    assert sys.getswitchinterval() == pytest.approx(usual), "nor leave the process changed"
    (text, text_type), (openmetrics, openmetrics_type) = [task.result() for task in rendering]
    assert text.count(b"atom:prefill_request_context_tokens{") == 10_000
    assert openmetrics.count(b"atom:prefill_request_context_tokens{") == 10_000
    assert text_type.startswith("text/plain")
    assert openmetrics_type.startswith("application/openmetrics-text")
    exporter.close()


async def test_a_render_that_fails_leaves_the_process_as_it_was(exporter: MetricsExporter) -> None:
    usual = sys.getswitchinterval()

    def fail(_registry: Any) -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        exporter._render(fail)
    assert sys.getswitchinterval() == pytest.approx(usual)


async def test_the_lag_of_the_loop_is_its_stalls() -> None:
    lag = Histogram(LAG_BUCKETS)
    timer = LoopLagTimer(lag)
    timer.start()
    time.sleep(0.4)  # noqa: ASYNC251 - the stall
    await asyncio.sleep(0.3)
    timer.stop()
    observed, total = lag.count, lag.total
    assert observed >= 2
    assert total >= 0.4 - INTERVAL_S, "the stall, less up to one interval"
    await asyncio.sleep(2 * INTERVAL_S)
    assert lag.count == observed, "a timer that is stopped counts nothing"


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
        assert "request_id" not in row.labels or row.has_samples.startswith("Opt-in")
