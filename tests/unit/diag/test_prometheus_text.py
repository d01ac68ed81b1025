"""The fast reader of Prometheus text against the official parser and against garbage."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from atom.diag.dialects import VALUE_NAMES, names_for
from atom.diag.prometheus_text import parse_metrics
from atom.recipes.recipe import MetricsDialect


def exposition() -> bytes:
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "Running", ["engine"], registry=registry)
    running.labels("0").set(3)
    running.labels("1").set(2)
    usage = Gauge("vllm:kv_cache_usage_perc", "KV", ["engine"], registry=registry)
    usage.labels("0").set(0.5)
    usage.labels("1").set(0.7)
    Counter("vllm:prompt_tokens", "Prompt", registry=registry).inc(1e6)
    latency = Histogram("vllm:e2e_request_latency_seconds", "E2E", registry=registry)
    latency.observe(0.3)
    odd = Gauge("odd", "Odd", ["text"], registry=registry)
    odd.labels('a } "quoted" \\ {b="c"} 9').set(7)
    return generate_latest(registry)


def test_series_agree_with_the_official_parser() -> None:
    body = exposition()
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    text = parse_metrics(body, names_for("vllm"))
    assert text.series == len(samples)
    assert text.malformed == 0
    assert (
        text.largest["vllm:e2e_request_latency_seconds"]
        == len(
            [
                sample
                for sample in samples
                if sample.name.startswith("vllm:e2e") and not sample.name.endswith("_created")
            ]
        )
        + 1
    )


def test_values_are_summed_and_fractions_averaged() -> None:
    values = parse_metrics(exposition(), names_for("vllm")).values
    assert values["running"] == 5.0
    assert values["kv_usage"] == 0.6
    assert values["prompt_tokens"] == 1e6
    assert values["waiting"] is None


def test_labels_with_braces_and_quotes_do_not_hide_the_value() -> None:
    body = b'm{a="x } y"} 4 1700000000000\nm{a="\\"} 9"} 5\n'
    assert parse_metrics(body, {"running": ("m",)}).values["running"] == 9.0


def test_values_that_are_no_numbers_are_null() -> None:
    for text in (b"m NaN\n", b"m +Inf\n", b"m\n", b"m x\n", b"m{\n", b""):
        assert parse_metrics(text, {"running": ("m",)}).values["running"] is None


def test_the_dialect_table_is_complete() -> None:
    for dialect in get_args(MetricsDialect):
        assert tuple(names_for(dialect)) == VALUE_NAMES


def test_totals_of_each_server() -> None:
    body = (
        b'vllm:request_success_total{finished_reason="stop"} 3\n'
        b'vllm:request_success_total{finished_reason="length"} 4\n'
        b"vllm:time_to_first_token_seconds_sum 1.5\nvllm:time_to_first_token_seconds_count 7\n"
        b"sglang:num_requests_total 8\ntrtllm_request_success_total 9\ntrtllm_num_requests_running 2\n"
    )
    vllm = parse_metrics(body, names_for("vllm")).values
    assert (vllm["requests_finished"], vllm["ttft_sum_s"], vllm["ttft_count"]) == (7, 1.5, 7)
    assert parse_metrics(body, names_for("sglang")).values["requests_finished"] == 8
    trtllm = parse_metrics(body, names_for("trtllm")).values
    assert (trtllm["requests_finished"], trtllm["running"], trtllm["preemptions"]) == (9, 2, None)


def test_absurd_names_are_bounded() -> None:
    text = parse_metrics(b"".join(b"m%d 1\n" % n for n in range(21_000)) + b"x" * 300 + b" 1\n", {})
    assert (text.series, text.families, text.malformed) == (21_000, 20_000, 1)


@given(st.binary(max_size=400))
def test_garbage_is_counted_never_raised(body: bytes) -> None:
    text = parse_metrics(body, names_for("auto"))
    lines = [line for line in body.split(b"\n") if line and line[0] != 35 and not line.isspace()]
    assert text.series + text.malformed == len(lines)
