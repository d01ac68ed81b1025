"""Figures of an engine from scrapes of vLLM's, SGLang's and our own `/metrics`, and of the GPUs beside it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from atom.bench.report.series import collect_series
from atom.bench.rundir import RunDirectory
from atom.cli.render import _server_rows
from atom.diag.dialects import COMBINED, TOTALS, VALUE_NAMES, guess_dialect, names_for
from atom.diag.metrics_target import parse_metrics_targets
from atom.diag.prometheus_text import parse_metrics
from atom.diag.server_figures import ServerFigure, server_figures
from atom.recipes.errors import UsageError

SECOND = 1_000_000_000

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="Qwen/Qwen3-8B"}} {running}
vllm:num_requests_running{{engine="1",model_name="Qwen/Qwen3-8B"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="Qwen/Qwen3-8B"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="Qwen/Qwen3-8B",reason="capacity"}} {waiting}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="Qwen/Qwen3-8B"}} {usage}
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {queries}
vllm:prefix_cache_queries_created{{engine="0",model_name="Qwen/Qwen3-8B"}} 1.7565e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {hits}
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {preemptions}
vllm:generation_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {tokens}
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="Qwen/Qwen3-8B"}} 3.0
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="Qwen/Qwen3-8B"}} {steps}
vllm:iteration_tokens_total_count{{engine="0",model_name="Qwen/Qwen3-8B"}} {steps}
vllm:iteration_tokens_total_sum{{engine="0",model_name="Qwen/Qwen3-8B"}} {step_tokens}
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="Qwen/Qwen3-8B",position="0"}} {accepted}
"""

SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {running}
sglang:num_queue_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {waiting}
sglang:token_usage{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {usage}
sglang:cache_hit_rate{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} 0.31
sglang:num_retracted_reqs{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} 2.0
sglang:num_retracted_requests_total{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} {preemptions}
sglang:spec_accept_length{{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"}} 2.5
sglang:prompt_tokens_total{{model_name="m"}} {queries}
sglang:cached_tokens_total{{cache_source="device",model_name="m"}} {hits}
sglang:generation_tokens_total{{model_name="m"}} {tokens}
"""

ATOM = """\
atom:requests_running {running}
atom:requests_waiting {waiting}
atom:kv_cache_usage_ratio{{dp_rank="0"}} {usage}
atom:preemptions_total {preemptions}
atom:engine_steps_total {steps}
atom:engine_step_seconds_count{{dp_rank="0"}} {steps}
atom:engine_step_seconds_sum{{dp_rank="0"}} {step_seconds}
atom:prefix_cache_full_tokens_total {queries}
atom:prefix_cache_cached_tokens_total {hits}
atom:generation_tokens_total {tokens}
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
atom:prefill_request_context_tokens{{request_id="a"}} 100
atom:prefill_request_context_tokens{{request_id="b"}} 300
atom:decode_request_context_tokens{{request_id="a"}} 150
"""


def at(second: int, **changes: float) -> dict[str, float]:
    """Counters of a server that does the same every second."""
    return {
        "running": 4,
        "waiting": 2 * (second % 2),
        "usage": 0.1 * (1 + second % 5),
        "queries": 1000 * second,
        "hits": 900 * second,
        "preemptions": 3 if second >= 5 else 0,
        "tokens": 250 * second,
        "steps": 100 * second,
        "step_tokens": 650 * second,
        "step_seconds": 0.8 * second,
        "drafts": 125 * second,
        "drafted": 375 * second,
        "accepted": 250 * second,
        **changes,
    }


def recorded(
    folder: Path, text: str, dialect: str, seconds: Sequence[int], state: Callable[[int], Mapping[str, float]] = at
) -> None:
    """What the scraper writes for these bodies, one a second."""
    lines = []
    for second in seconds:
        values = parse_metrics(text.format(**state(second)).encode(), names_for(dialect)).values  # type: ignore[arg-type]
        lines.append({"sent_ns": second * SECOND, "latency_ns": 1000, "error": None, "values": values})
    (folder / "metrics-api.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def figures(folder: Path, start: float = 2, end: float = 8) -> dict[str, ServerFigure]:
    found = server_figures(folder, int(start * SECOND), int(end * SECOND))
    assert len({figure.key for figure in found}) == len(found)
    return {figure.key: figure for figure in found}


def test_vllm(tmp_path: Path) -> None:
    recorded(tmp_path, VLLM, "vllm", range(10))
    found = figures(tmp_path)
    assert found["running_requests_mean"].value == found["running_requests_max"].value == 8
    assert (found["waiting_requests_mean"].value, found["waiting_requests_max"].value) == (1, 2)
    assert found["kv_usage_mean"].value == pytest.approx(sum(0.1 * (1 + s % 5) for s in range(2, 8)) / 6)
    assert found["kv_usage_max"].value == pytest.approx(0.5)
    assert found["preemptions"].value == 3
    assert (found["server_prefix_hit_share"].value, found["server_prefix_hit_share"].n) == (0.9, 6000)
    assert (found["acceptance_length"].value, found["acceptance_length"].n) == (3.0, 750)
    assert found["draft_acceptance_share"].value == pytest.approx(2 / 3)
    # No step time: the time from scrape to scrape by the steps in between.
    assert found["server_step_p50_ms"].value == pytest.approx(10)
    assert "tells no step time" in found["server_step_p50_ms"].definition
    assert found["step_tokens_mean"].value == 6.5


def test_sglang(tmp_path: Path) -> None:
    recorded(tmp_path, SGLANG, "sglang", range(10))
    found = figures(tmp_path)
    assert (found["running_requests_mean"].value, found["waiting_requests_max"].value) == (4, 2)
    assert (found["preemptions"].value, found["server_prefix_hit_share"].value) == (3, 0.9)
    assert found["server_step_p50_ms"].value is None
    assert (found["acceptance_length"].value, found["acceptance_length"].n) == (2.5, 6)
    assert "gauge" in found["acceptance_length"].definition
    recorded(tmp_path, SGLANG + 'sglang:spec_verify_calls_total{{model_name="m"}} {drafts}\n', "sglang", range(10))
    found = figures(tmp_path)
    assert (found["acceptance_length"].value, found["acceptance_length"].n) == (2.0, 750)
    assert "draft_acceptance_share" not in found


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        (VLLM, "vllm"),
        (SGLANG, "sglang"),
        (SGLANG + 'sglang:spec_verify_calls_total{{model_name="m"}} {drafts}\n', "sglang"),
        (ATOM, "atom"),
    ],
)
@pytest.mark.parametrize("restart", [False, True])
def test_timeline_and_table_say_the_same(tmp_path: Path, text: str, dialect: str, restart: bool) -> None:
    run_dir = RunDirectory(tmp_path / "run")

    def state(second: int) -> dict[str, float]:
        return at(second - 5 if restart and second >= 5 else second)

    recorded(run_dir.server, text, dialect, range(10), state)
    found = figures(run_dir.server, start=0, end=10)
    drawn = collect_series(run_dir, [], 0, 10 * SECOND)["metrics"]["api"]
    for name, key in (("step_ms", "server_step_p50_ms"), ("acceptance_length", "acceptance_length")):
        values = [value for _, value in drawn.get(name, [])]
        figure = found.get(key)
        assert bool(values) == (figure is not None and figure.value is not None), name
        if values and figure is not None:
            assert statistics.median(values) == pytest.approx(figure.value), name
    assert sum(value for _, value in drawn.get("preemptions_per_s", [])) == found["preemptions"].value


def test_our_own(tmp_path: Path) -> None:
    recorded(tmp_path, ATOM, "atom", range(10))
    found = figures(tmp_path)
    assert found["server_step_p50_ms"].value == pytest.approx(8)
    assert found["server_step_p50_ms"].n == 600
    assert (found["prefill_context_mean"].value, found["prefill_context_max"].value) == (200, 300)
    assert (found["prefill_context_mean"].n, found["decode_context_max"].n) == (2, 1)
    assert "acceptance_length" not in found
    rows = dict(_server_rows({key: {**figure.as_dict(), "side": "server"} for key, figure in found.items()}))
    assert rows["waiting requests"] == "mean 1, most 2 requests"
    assert rows["KV cache"] == "mean 30.00%, most 50.00%, preempted 3 sequences"
    assert rows["server step"] == "p50 8.00 ms"
    assert rows["server prefix hits"] == "90.00%"


def test_a_value_that_first_appears_in_the_middle(tmp_path: Path) -> None:
    """Some servers have no engine metric before their first request."""
    recorded(tmp_path, VLLM, "vllm", range(5, 10))
    late = (tmp_path / "metrics-api.jsonl").read_text()
    empty = {"sent_ns": 2 * SECOND, "latency_ns": 1, "error": None, "values": {}}
    nulls = {**empty, "sent_ns": 3 * SECOND, "values": dict.fromkeys(VALUE_NAMES)}
    (tmp_path / "metrics-api.jsonl").write_text(json.dumps(empty) + "\n" + json.dumps(nulls) + "\n" + late)
    found = figures(tmp_path)
    assert found["kv_usage_max"].n == 3
    assert (found["acceptance_length"].value, found["acceptance_length"].n) == (3.0, 250)


def test_a_server_that_started_again_counts_from_zero(tmp_path: Path) -> None:
    def restarted(second: int) -> dict[str, float]:
        return at(second if second < 5 else second - 5, preemptions=second if second < 5 else second - 5)

    recorded(tmp_path, VLLM, "vllm", range(10), restarted)
    assert figures(tmp_path)["preemptions"].value == 3 + 0 + 2  # 1 → 4, again at 0, 0 → 2


@pytest.mark.parametrize("text", [VLLM, ATOM])
def test_an_idle_server_has_no_step(tmp_path: Path, text: str) -> None:
    recorded(tmp_path, text, "atom", range(10), lambda second: at(0, running=0))
    found = figures(tmp_path)
    assert found["server_step_p50_ms"].value is None
    assert found["server_prefix_hit_share"].value is None
    assert found.get("acceptance_length") is None
    assert found["preemptions"].value == 0


def test_a_killed_or_early_window_has_nulls(tmp_path: Path) -> None:
    recorded(tmp_path, VLLM, "vllm", [3])
    found = figures(tmp_path)
    assert found["kv_usage_mean"].value is not None
    assert found["preemptions"].value is None


def test_whose_names_these_are() -> None:
    assert guess_dialect(["vllm:num_requests_running", "python_gc_objects_collected"]) == "vllm"
    assert guess_dialect(["vllm:num_requests_running", "atom:requests_running"]) == "atom"
    assert guess_dialect(["sglang:token_usage"]) == "sglang"
    assert guess_dialect(["trtllm_num_requests_running"]) == "trtllm"
    assert guess_dialect(["python_gc_objects_collected"]) == "auto"
    assert not TOTALS & set(COMBINED)


# ---- endpoints -------------------------------------------------------------------------------------------------------


def test_endpoints_by_role() -> None:
    found = parse_metrics_targets(
        ["prefill=http://a:9000/metrics", "http://b:9001", "decode-0=https://c/m?x=1,d.1=http://d"]
    )
    assert [(one.role, one.url) for one in found] == [
        ("prefill", "http://a:9000/metrics"),
        ("9001", "http://b:9001/metrics"),
        ("decode-0", "https://c/m?x=1"),
        ("d.1", "http://d/metrics"),
    ]
    assert parse_metrics_targets(["http://a:1/m?role=x"])[0].role == "1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["localhost:9000"], "must look like role=http://host:port/metrics"),
        (["prefill=ftp://a/"], "must look like"),
        (["http://a:99999"], "must look like"),
        (["http://user:pw@a:1"], "must look like"),
        (["../x=http://a:1"], "a role names a file"),
        (["=http://a:1"], "a role names a file"),
        (["api=http://a:1"], "the loaded server's own"),
        (["http://a:1", "http://b:1"], "http://a:1/metrics has the role 1 already"),
        ([f"r{n}=http://a:1" for n in range(300)], "at most 256"),
    ],
)
def test_endpoints_that_are_none(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match="--server-metrics") as caught:
        parse_metrics_targets(given)
    assert said in str(caught.value)


def test_figures_of_instances_carry_their_role(tmp_path: Path) -> None:
    recorded(tmp_path, VLLM, "vllm", range(10))
    (tmp_path / "metrics-api.jsonl").rename(tmp_path / "metrics-decode.jsonl")
    found = figures(tmp_path)
    assert found["kv_usage_max"].value is None
    assert (found["kv_usage_max_decode"].value, found["kv_usage_max_decode"].role) == (0.5, "decode")
    assert found["running_requests_mean_decode"].value == 8
    rows = dict(_server_rows({key: {**figure.as_dict(), "side": "server"} for key, figure in found.items()}))
    assert rows["KV cache (decode)"] == "mean 30.00%, most 50.00%, preempted 3 sequences"


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def gpu_lines(folder: Path, *cards: Mapping[str, Any]) -> None:
    lines = [
        {"t_ns": second * SECOND, "index": index, **{k: v(second) if callable(v) else v for k, v in card.items()}}
        for second in range(10)
        for index, card in enumerate(cards)
    ]
    lines.append({"t_ns": 5 * SECOND, "index": None, "error": "nvmlInit did not return within 5 s"})
    (folder / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_gpus(tmp_path: Path) -> None:
    recorded(tmp_path, VLLM, "vllm", range(10))
    counter = {"energy_j": lambda second: 1e6 + 400.0 * second, "power_w": 9999, "utilization": 0.5}
    sampled = {"energy_j": None, "power_w": 100, "utilization": 1.0, "memory_used_bytes": 3 << 30, "temperature_c": 61}
    gpu_lines(tmp_path, counter, sampled)
    found = figures(tmp_path)
    assert found["gpu_utilization_mean"].value == 0.75
    assert found["gpu_utilization_mean"].label == "2 GPUs"
    assert found["gpu_power_w"].value == pytest.approx(500)
    assert found["gpu_energy_j"].value == pytest.approx(3000)
    assert found["energy_per_output_token_j"].value == pytest.approx(500 / 250)
    assert (found["gpu_memory_max_mb"].value, found["gpu_temperature_max_c"].value) == (3072, 61)
    assert "gpu_sm_clock_mean_mhz" not in found


def test_a_card_without_power_leaves_no_total(tmp_path: Path) -> None:
    gpu_lines(tmp_path, {"utilization": 0.5, "power_w": 100}, {"utilization": 0.5, "power_w": None})
    found = figures(tmp_path)
    assert "gpu_power_w" not in found
    assert "energy_per_output_token_j" not in found


def test_no_gpu_no_figures(tmp_path: Path) -> None:
    assert not [key for key in figures(tmp_path) if "gpu" in key or "energy" in key]
