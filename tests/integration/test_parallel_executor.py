"""Tensor and pipeline parallel workers give what one process gives, and none is left when one is gone.

The requests have shared prefixes, prompts in chunks, too few blocks for all at once, log probabilities, penalties and
seeded sampling, so a step mixes everything.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from atom.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from atom.engine.engine_core import EngineCore
from atom.engine.errors import ConfigError, EngineDeadError
from atom.engine.messages import AddRequest, TokenLogprobs
from atom.engine.sampling_params import SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_config, write_checkpoint
from tests.waiting import until

ROUNDING = 1e-4

Request = tuple[list[int], SamplingParams]


@dataclass
class Run:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0
    prefix_hits: int = 0


def requests(count: int = 40) -> list[Request]:
    draw = random.Random(0)
    shared = [draw.randrange(3, VOCAB_SIZE) for _ in range(40)]
    found: list[Request] = []
    for i in range(count):
        prompt = (shared if i % 3 == 0 else []) + [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 60))]
        options: dict[str, Any] = {"temperature": 0.0}
        if i % 5 == 3:
            options = {"temperature": 0.8, "seed": i, "top_p": 0.9}
        if i % 4 == 1:
            options["logprobs"] = 3
        if i % 7 == 2:
            options["prompt_logprobs"] = 2
        if i % 6 == 4:
            options["repetition_penalty"] = 1.2
        found.append((prompt, SamplingParams(max_tokens=draw.randrange(1, 40), ignore_eos=i % 2 == 0, **options)))
    return found


def config(model: Path, tp_size: int = 1, pp_size: int = 1, **model_options: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), **model_options),
        cache=CacheConfig(block_size=8, num_blocks=70),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=48),
        parallel=ParallelConfig(tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size),
        executor="cpu",
        num_threads=tp_size * pp_size,
    )


@contextmanager
def core_of(configuration: EngineConfig) -> Iterator[EngineCore]:
    core = EngineCore(configuration)
    try:
        yield core
    finally:
        core.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in core.info.get("worker_pids", ()))


def add(core: EngineCore, seq_id: int, request: Request) -> None:
    prompt, params = request
    core.add_request(AddRequest(seq_id, str(seq_id), np.array(prompt, "<i4").tobytes(), params, time.monotonic_ns()))


def step(core: EngineCore, into: Run) -> None:
    outputs = core.step()
    if outputs is None:
        return
    for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
        into.tokens.setdefault(seq_id, []).append(token)
    for seq_id, entries in outputs.logprobs.items():
        into.logprobs.setdefault(seq_id, []).extend(entries)
    into.prompt_logprobs |= outputs.prompt_logprobs
    assert not any(finished.error for finished in outputs.finished)


def finish(core: EngineCore, into: Run) -> None:
    while core.has_work:
        step(core, into)


def run(configuration: EngineConfig) -> Run:
    result = Run()
    with core_of(configuration) as core:
        for seq_id, request in enumerate(requests()):
            add(core, seq_id, request)
            if seq_id >= 20:
                step(core, result)
        finish(core, result)
        result.info = core.info
        stats, counts = core.stats(), core.check_integrity()
        result.preemptions, result.prefix_hits = stats["num_preemptions_total"], stats["prefix_cache_hits_total"]
        assert counts["used"] == 0
        assert counts["free"] == counts["total"] == 70
    return result


def values(entries: list[TokenLogprobs | None]) -> list[float]:
    return [value for entry in entries if entry is not None for value in entry.logprobs]


MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(num_hidden_layers=4),
    "qwen3, tied": tiny_config("Qwen3ForCausalLM", num_hidden_layers=4, head_dim=24, tie_word_embeddings=True),
    "qwen2, biased": tiny_config("Qwen2ForCausalLM", num_hidden_layers=4),
    "llama, odd vocabulary": tiny_config(num_hidden_layers=4, vocab_size=VOCAB_SIZE + 3, attention_bias=True),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("model", "tp_size", "pp_size", "kernels"),
    [
        ("llama", 2, 1, "auto"),
        ("qwen3, tied", 1, 2, "auto"),
        ("qwen2, biased", 2, 2, "auto"),
        ("llama, odd vocabulary", 4, 1, "attention"),  # two kv heads: each is held twice
        ("qwen3, tied", 2, 2, "torch"),
    ],
)
def test_the_same_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, tp_size: int, pp_size: int, kernels: str
) -> None:
    monkeypatch.setenv("ATOM_CPU_KERNELS", kernels)
    folder = write_checkpoint(tmp_path / "model", MODELS[model])
    one = run(config(folder))
    many = run(config(folder, tp_size, pp_size))
    assert many.tokens == one.tokens
    assert set(one.tokens) == set(range(40))
    assert one.preemptions > 0
    assert one.prefix_hits > 0
    assert (many.preemptions, many.prefix_hits) == (one.preemptions, one.prefix_hits)
    for name in ("logprobs", "prompt_logprobs"):
        expected, got = getattr(one, name), getattr(many, name)
        assert set(got) == set(expected) != set()
        for seq_id in expected:
            assert values(got[seq_id]) == pytest.approx(values(expected[seq_id]), abs=ROUNDING)
    assert (many.info["tensor_parallel_size"], many.info["pipeline_parallel_size"]) == (tp_size, pp_size)
    assert len(many.info["worker_pids"]) == tp_size * pp_size


def test_a_long_pipeline_with_aborts_and_single_tokens(tmp_path: Path) -> None:
    """Tokens that nobody waits for any more are taken from the connection all the same."""
    folder = write_checkpoint(tmp_path / "model", MODELS["llama"])

    def outputs(pp_size: int) -> dict[int, list[int]]:
        draw = random.Random(1)
        result = Run()
        with core_of(config(folder, pp_size=pp_size)) as core:
            for seq_id in range(120):
                prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randrange(1, 30))]
                params = SamplingParams(max_tokens=draw.choice([1, 1, 1, 30]), ignore_eos=True, temperature=0.0)
                add(core, seq_id, (prompt, params))
                step(core, result)
                if seq_id % 7 == 6:
                    core.abort([seq_id - 3, seq_id - 1])
            finish(core, result)
            assert core.check_integrity()["used"] == 0
        return {seq_id: tokens for seq_id, tokens in result.tokens.items() if seq_id % 7 not in (3, 5)}

    assert outputs(4) == outputs(1)


def test_a_killed_worker_ends_the_run_and_the_others(tiny_llama: Path) -> None:
    with core_of(config(tiny_llama, tp_size=2)) as core:
        for seq_id in range(4):
            add(core, seq_id, ([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True)))
        result = Run()
        step(core, result)
        first, second = core.info["worker_pids"]
        os.kill(second, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker 1 \(tp 1/2, pp 0/1\), pid {second}, was killed by SIGKILL"):
            finish(core, result)
        until(lambda: not psutil.pid_exists(first))


def test_a_worker_that_fails_says_why(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_CPU_KERNELS", "fastest")
    with pytest.raises(ConfigError, match="ATOM_CPU_KERNELS must be auto, attention or torch, got 'fastest'"):
        EngineCore(config(tiny_llama, tp_size=2))
    assert not [child for child in psutil.Process().children() if "atom.engine.worker" in child.cmdline()]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp_size": 3}, "--tensor-parallel-size 3 does not divide the 4 attention heads"),
        ({"pp_size": 4}, "--pipeline-parallel-size 4 does not divide the 2 layers"),
    ],
)
def test_what_does_not_divide_starts_nothing(tiny_llama: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineCore(config(tiny_llama, **sizes))


def test_the_memory_for_the_cache_is_for_all_workers_together(tiny_llama: Path) -> None:
    def blocks(tp_size: int) -> int:
        given = EngineConfig(
            model=ModelConfig(model=str(tiny_llama)),
            cache=CacheConfig(memory_bytes=1 << 20),
            parallel=ParallelConfig(tensor_parallel_size=tp_size),
            executor="cpu",
        )
        with core_of(given) as core:
            assert core.info["kv_cache_bytes"] <= 1 << 20
            return int(core.info["num_kv_blocks"])

    assert blocks(1) == blocks(2)


def test_workers_end_in_order(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorders that are put into a process complete their files in a function for its end."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, pathlib\n"
        f"atexit.register(lambda: pathlib.Path({str(tmp_path)!r}, f'end-{{os.getpid()}}').touch())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with core_of(config(tiny_llama, tp_size=2)) as core:
        pass
    assert {path.name for path in tmp_path.glob("end-*")} >= {f"end-{pid}" for pid in core.info["worker_pids"]}


def test_profiles_have_a_trace_of_each_worker(tiny_llama: Path, tmp_path: Path) -> None:
    with core_of(config(tiny_llama, pp_size=2)) as core:
        core.start_profile(str(tmp_path / "traces"))
        add(core, 1, ([5, 6, 7], SamplingParams(max_tokens=4)))
        result = Run()
        finish(core, result)
        trace = core.stop_profile()["trace"]
    traces = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert len(traces) == 2
    assert Path(trace).name in traces
