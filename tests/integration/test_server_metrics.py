"""/metrics of a real server with two cores: opt-in families, figures by engine, scrapes that share a render."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.server_process import FAST, RunningServer, running_server, wait_for

NUM_REQUESTS = 12
PROMPT = [300, 301, 302, 303, 304]
MAX_TOKENS = 7
OPT_IN = {"ATOM_METRICS_PER_REQUEST_CONTEXT": "1", "ATOM_ENABLE_METRICS_DEVICE_TIMER": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*FAST, "--data-parallel-size", "2", env={**os.environ, **OPT_IN}) as running:
        yield running


def families(server: RunningServer) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}


def by_label(family: Metric, label: str, suffix: str = "") -> dict[str, float]:
    """Values by one label, summed over the others."""
    totals: dict[str, float] = {}
    for sample in family.samples:
        if sample.name == family.name + suffix:
            totals[sample.labels[label]] = totals.get(sample.labels[label], 0.0) + sample.value
    return totals


@pytest.fixture(scope="module")
def request_ids(server: RunningServer) -> list[str]:
    """Ids of requests that were served."""
    client = server.client()

    def complete(_number: int) -> str:
        return client.completions.create(model=server.model, prompt=PROMPT, max_tokens=MAX_TOKENS).id

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(complete, range(NUM_REQUESTS)))


def test_every_request_leaves_its_context_where_that_is_asked_for(
    server: RunningServer, request_ids: list[str]
) -> None:
    found = families(server)
    prefill = by_label(found["atom:prefill_request_context_tokens"], "request_id")
    decode = by_label(found["atom:decode_request_context_tokens"], "request_id")
    assert {request_id: prefill[request_id] for request_id in request_ids} == dict.fromkeys(request_ids, len(PROMPT))
    whole = len(PROMPT) + MAX_TOKENS
    assert {request_id: decode[request_id] for request_id in request_ids} == dict.fromkeys(request_ids, whole)


def test_each_sequence_of_a_request_has_a_series(server: RunningServer, request_ids: list[str]) -> None:
    client = server.client()
    answer = client.completions.create(model=server.model, prompt=PROMPT, max_tokens=2, n=2)
    assert answer.id not in request_ids
    decode = by_label(families(server)["atom:decode_request_context_tokens"], "request_id")
    assert [decode[f"{answer.id}-{index}"] for index in range(2)] == [len(PROMPT) + 2] * 2


@pytest.mark.usefixtures("request_ids")
def test_figures_by_engine_add_up_to_those_of_the_server(server: RunningServer) -> None:
    found = families(server)
    for vllm, total in (
        ("vllm:e2e_request_latency_seconds", "atom:e2e_request_latency_seconds"),
        ("vllm:inter_token_latency_seconds", "atom:inter_token_latency_seconds"),
    ):
        counts = by_label(found[vllm], "engine", "_count")
        assert set(counts) == {"0", "1"}
        assert all(counts.values()), "both engines served"
        (whole,) = [sample.value for sample in found[total].samples if sample.name == f"{total}_count"]
        assert sum(counts.values()) == whole
    generated = by_label(found["vllm:generation_tokens"], "engine", "_total")
    assert sum(generated.values()) == sum(sample.value for sample in found["atom:generation_tokens"].samples)
    assert by_label(found["vllm:request_params_n"], "engine", "_count").keys() == {"0", "1"}


@pytest.mark.usefixtures("request_ids")
def test_every_process_and_every_step_is_there(server: RunningServer) -> None:
    found = families(server)
    assert set(by_label(found["atom:process_resident_memory_bytes"], "process")) == {"api", "core-0", "core-1"}
    steps = by_label(found["atom:engine_step_seconds"], "dp_rank", "_count")
    assert by_label(found["atom:device_forward_seconds"], "dp_rank", "_count") == steps
    assert by_label(found["atom:device_sample_seconds"], "dp_rank", "_count") == {"0": 0, "1": 0}, "simulated"
    assert sum(sample.value for sample in found["atom:gc_frozen_objects"].samples) > 10_000


def test_the_lag_timer_runs(server: RunningServer) -> None:
    name = "atom:event_loop_lag_seconds_count"
    before = server.metrics()[name]
    wait_for(lambda: server.metrics()[name] >= before + 3)


def test_a_wrong_value_keeps_the_server_from_starting() -> None:
    env = {**os.environ, "ATOM_METRICS_PER_REQUEST_CONTEXT": "yes"}
    with pytest.raises(AssertionError) as caught, running_server(*FAST, env=env):
        pass
    assert "ATOM_METRICS_PER_REQUEST_CONTEXT must be 1 (on) or 0 (off), got 'yes'" in str(caught.value)
    assert "Traceback" not in str(caught.value)
