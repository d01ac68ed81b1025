"""The executor as the scheduler sees it: steps in flight, its own tokens as input, errors, and a clean end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from atom.engine.errors import ConfigError
from atom.engine.executors.base import NewSequence, SchedulerOutput, StepResult
from atom.engine.executors.cpu import CPUExecutor
from atom.engine.loading.weights import load_model
from atom.engine.models.dense_attention import DenseAttention
from atom.engine.sampling_params import SamplingParams
from tests.tiny_models import EOS_IDS, VOCAB_SIZE, tiny_config, write_checkpoint

GREEDY = SamplingParams(temperature=0)
PROMPT = [11, 12, 13, 14, 15, 16]


def engine_config(model: Path, **options: Any) -> EngineConfig:
    fields = {"dtype": options.pop("dtype", "auto"), "max_model_len": options.pop("max_model_len", None)}
    return EngineConfig(
        model=ModelConfig(model=str(model), **fields),
        cache=CacheConfig(**{"num_blocks": 40, **options}),
        scheduler=SchedulerConfig(max_num_seqs=4),
        executor="cpu",
        num_threads=2,
    )


@pytest.fixture
def executor(tiny_llama: Path) -> Iterator[CPUExecutor]:
    made = CPUExecutor(engine_config(tiny_llama))
    assert made.start() == 40
    yield made
    made.shutdown()


def new(seq_id: int, tokens: list[int], params: SamplingParams = GREEDY, blocks: Any = None, **options: Any) -> Any:
    return NewSequence(seq_id, tokens, options.pop("num_prompt_tokens", len(tokens)), params, blocks or [0, 1], 0)


def first_step(sequence: NewSequence, released: list[int] | None = None) -> SchedulerOutput:
    count = len(sequence.token_ids)
    return SchedulerOutput(0, [sequence.seq_id], [count], [0], [True], [sequence], released=released or [])


def decode(seq_id: int, position: int) -> SchedulerOutput:
    return SchedulerOutput(1, [seq_id], [1], [position], [True])


def greedy_continuation(model: Path, prompt: list[int], count: int) -> list[int]:
    plain = load_model(ModelConfig(model=str(model)), dtype=torch.float32).model
    tokens = list(prompt)
    for _ in range(count):
        attention = DenseAttention().step({0: len(tokens)})
        hidden = plain.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention)
        tokens.append(int(plain.compute_logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def test_many_steps_in_flight(executor: CPUExecutor, tiny_llama: Path) -> None:
    """Nothing is collected before everything is submitted: each step's input is what the executor itself sampled."""
    handles = [executor.submit(first_step(new(3, PROMPT)))]
    handles += [executor.submit(decode(3, len(PROMPT) + i)) for i in range(9)]
    results = [executor.collect(handle) for handle in handles]
    assert all(executor.is_done(handle) for handle in handles)
    assert [token for result in results for token in result.token_ids] == greedy_continuation(tiny_llama, PROMPT, 10)
    assert [result.seq_ids for result in results] == [[3]] * 10
    assert all(result.seconds > 0 for result in results)


def test_a_preempted_sequence_goes_on_with_the_same_draws(executor: CPUExecutor) -> None:
    params = SamplingParams(temperature=1.5, seed=5, repetition_penalty=1.2, frequency_penalty=0.3)

    def run(preempt_after: int, seq_id: int) -> list[int]:
        tokens: list[int] = []
        output = first_step(new(seq_id, PROMPT, params))
        for i in range(8):
            if i == preempt_after:
                again = new(seq_id, PROMPT + tokens, params, [7, 9], num_prompt_tokens=len(PROMPT))
                output = first_step(again, released=[seq_id])
            tokens += executor.collect(executor.submit(output)).token_ids
            output = decode(seq_id, len(PROMPT) + i)
        executor.collect(executor.submit(SchedulerOutput(9, [], [], [], [], released=[seq_id])))
        return tokens

    whole = run(-1, 1)
    assert run(3, 2) == whole
    assert run(6, 3) == whole


def test_prompt_logprobs_in_chunks(executor: CPUExecutor, tiny_llama: Path) -> None:
    """One list per prompt, with the last chunk; the first entry is None, because nothing predicts the first token."""
    params = SamplingParams(temperature=0, prompt_logprobs=3)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(30)]
    sequence = new(1, prompt, params)
    first = executor.collect(executor.submit(SchedulerOutput(0, [1], [13], [0], [False], [sequence])))
    assert (first.prompt_logprobs, first.token_ids) == ({}, [])
    last = executor.collect(executor.submit(SchedulerOutput(1, [1], [17], [13], [True])))
    assert len(last.token_ids) == 1
    entries = last.prompt_logprobs[1]
    assert entries[0] is None
    assert len(entries) == len(prompt)
    plain = load_model(ModelConfig(model=str(tiny_llama)), dtype=torch.float32).model
    hidden = plain.forward(torch.tensor(prompt), torch.arange(30), DenseAttention().step({0: 30}))
    exact = plain.compute_logits(hidden).log_softmax(-1)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        assert entry.token_ids[0] == prompt[position]
        assert entry.logprobs == pytest.approx([exact[position - 1, i].item() for i in entry.token_ids], abs=1e-4)
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
        assert len(entry.token_ids) == 4


def test_positions_from_the_prefix_cache_have_no_prompt_logprobs(executor: CPUExecutor) -> None:
    executor.collect(executor.submit(first_step(new(1, PROMPT * 5, blocks=[0, 1]))))
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    sequence = NewSequence(2, PROMPT * 5, 30, params, [0, 2], 16)
    result = executor.collect(executor.submit(SchedulerOutput(1, [2], [14], [16], [True], [sequence])))
    entries = result.prompt_logprobs[2]
    assert [entry is None for entry in entries] == [True] * 17 + [False] * 13


def test_a_failed_step_fails_all_later_ones(executor: CPUExecutor) -> None:
    bad = executor.submit(decode(99, 0))
    later = executor.submit(first_step(new(1, PROMPT)))
    with pytest.raises(KeyError):
        executor.collect(bad)
    with pytest.raises(KeyError):
        executor.collect(later)


def test_more_sequences_than_planned_for(executor: CPUExecutor) -> None:
    """The table grows: state in flight may outlive what the scheduler counts."""
    sequences = [new(i, PROMPT, blocks=[i]) for i in range(11)]
    count = len(sequences)
    output = SchedulerOutput(0, list(range(count)), [6] * count, [0] * count, [True] * count, sequences)
    result = executor.collect(executor.submit(output))
    assert len(set(result.token_ids)) == 1
    assert len(result.token_ids) == count


def test_info(executor: CPUExecutor) -> None:
    info = executor.info()
    assert info["executor"] == "cpu"
    assert info["vocab_size"] == VOCAB_SIZE
    assert info["max_model_len"] == 512
    assert info["eos_token_ids"] == list(EOS_IDS)
    assert info["dtype"] == info["kv_cache_dtype"] == "float32"
    assert info["num_blocks"] == 40
    assert info["activations"] == "float32"
    assert info["threads"] == 2
    assert info["kernels"].split()[0] in ("fused", "torch")


@pytest.mark.parametrize(
    ("checkpoint", "asked", "dtype"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "float32"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float32, "float16", "float16"),
    ],
)
def test_dtype(tmp_path: Path, checkpoint: torch.dtype, asked: str, dtype: str) -> None:
    model = write_checkpoint(tmp_path / "model", dtype=checkpoint)
    made = CPUExecutor(engine_config(model, dtype=asked))
    try:
        made.start()
        assert made.info()["dtype"] == dtype
        assert made.info()["dtype_reason"]
        assert len(made.collect(made.submit(first_step(new(1, PROMPT)))).token_ids) == 1
    finally:
        made.shutdown()


def run_once(model: Path, **options: Any) -> tuple[StepResult, dict[str, Any]]:
    made = CPUExecutor(engine_config(model), **options)
    try:
        made.start()
        return made.collect(made.submit(first_step(new(1, PROMPT)))), made.info()
    finally:
        made.shutdown()


def test_without_a_compiler_torch_serves_and_says_so(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = run_once(tiny_llama)
    from atom.engine.kernels import bindings

    bindings._library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    result, info = run_once(tiny_llama)
    bindings._library.cache_clear()
    assert info["kernels"] == "torch"
    assert "no C compiler" in info["kernels_reason"]
    assert result.token_ids == expected.token_ids


def test_kernels_by_environment(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_CPU_KERNELS", "torch")
    assert run_once(tiny_llama)[1]["kernels"] == "torch"
    monkeypatch.setenv("ATOM_CPU_KERNELS", "fast")
    with pytest.raises(ConfigError, match="ATOM_CPU_KERNELS must be auto, attention or torch, got 'fast'"):
        CPUExecutor(engine_config(tiny_llama))


def test_the_device_timer(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_ENABLE_METRICS_DEVICE_TIMER", "1")
    run = CPUExecutor(engine_config(tiny_llama))
    run.start()
    try:
        chunk = first_step(new(1, [5, 6, 7, 8]))
        chunk.num_new_tokens, chunk.samples = [2], [False]
        last = SchedulerOutput(1, [1], [2], [2], [True], num_prefill_tokens=2)
        results = [run.collect(run.submit(output)) for output in (chunk, last)]
        nothing = run.collect(run.submit(SchedulerOutput(2, [], [], [], [], released=[1])))
    finally:
        run.shutdown()
    (unsampled,), (sampled,) = [result.device_times or [] for result in results]
    assert unsampled.sample_seconds is None
    assert sampled.sample_seconds is not None
    assert 0 < sampled.forward_seconds < sampled.forward_seconds + sampled.sample_seconds <= results[1].seconds
    assert nothing.device_times is None, "a step without tokens has no forward pass"


def test_a_context_beyond_the_model_is_refused_and_nothing_stays(tiny_llama: Path) -> None:
    threads, torch_threads = threading.active_count(), torch.get_num_threads()
    made = CPUExecutor(engine_config(tiny_llama, max_model_len=513))
    with pytest.raises(ConfigError, match="--max-model-len 513 exceeds the model's context length 512"):
        made.start()
    assert threading.active_count() == threads
    assert torch.get_num_threads() == torch_threads


def test_shutdown_twice_and_restores_torch_threads(tiny_llama: Path) -> None:
    torch_threads = torch.get_num_threads()
    made = CPUExecutor(engine_config(tiny_llama))
    made.start()
    made.shutdown()
    made.shutdown()
    assert torch.get_num_threads() == torch_threads


def test_the_last_position_of_the_context(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_config(max_position_embeddings=32))
    made = CPUExecutor(engine_config(model))
    try:
        made.start()
        handles = [made.submit(first_step(new(1, list(range(30)))))]
        handles += [made.submit(decode(1, position)) for position in (30, 31)]
        tokens = [made.collect(handle).token_ids[0] for handle in handles]
    finally:
        made.shutdown()
    assert tokens == greedy_continuation(model, list(range(30)), 3)
