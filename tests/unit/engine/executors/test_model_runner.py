"""The three ways to compute a step give the logits of the plain model, for every option of the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atom.engine.config import ModelConfig
from atom.engine.executors.base import NewSequence, SchedulerOutput
from atom.engine.executors.kv_cache import KVCache, KVCacheShape
from atom.engine.executors.model_runner import Backend, BackendKind, ModelRunner, choose_backend, create_backend
from atom.engine.executors.sequence_table import SequenceTable
from atom.engine.executors.step_batch import build_batch
from atom.engine.kernels.bindings import CPUKernels
from atom.engine.loading.weights import load_model
from atom.engine.models.dense_attention import DenseAttention
from atom.engine.sampling_params import SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_config, write_checkpoint

LENGTH = 45
BLOCK_SIZE = 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mqa-head-dim": {"num_key_value_heads": 1, "head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "yarn": {"rope_scaling": YARN},
    "odd-sizes": {"hidden_size": 70, "intermediate_size": 102, "head_dim": 10, "vocab_size": VOCAB_SIZE},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "head_dim": 32},
}
KINDS: list[BackendKind] = ["fused", "attention", "torch"]


def checkpoint(tmp_path: Path, name: str) -> Path:
    return write_checkpoint(tmp_path / name, tiny_config(**CASES[name]))


def backend(path: Path, kind: BackendKind, kernels: CPUKernels, dtype: torch.dtype = torch.float32) -> Backend:
    loaded = load_model(ModelConfig(model=str(path)), dtype=dtype)
    config = loaded.transformer_config
    shape = KVCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    return create_backend(kind, loaded.model, KVCache(shape, 32), kernels, 128)


def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model = load_model(ModelConfig(model=str(path)), dtype=torch.float32).model
    attention = DenseAttention().step({0: len(tokens)})
    hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention)
    return model.compute_logits(hidden)


def chunk_logits(computed: Backend, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of every position, the sequence cut into chunks."""
    table = SequenceTable(2, 128, BLOCK_SIZE, seed=0)
    params = SamplingParams(temperature=0)
    blocks = [(5 * i + 3) % 32 for i in range(-(-len(tokens) // BLOCK_SIZE))]
    table.add(NewSequence(7, tokens, len(tokens), params, blocks, 0))
    rows = []
    start = 0
    for size in sizes:
        batch = build_batch(SchedulerOutput(0, [7], [size], [start], [True]), table, BLOCK_SIZE)
        logits, hidden = computed.forward(batch, want_hidden=True)
        assert hidden is not None
        assert hidden.shape[0] == size
        every = computed.compute_logits(hidden)
        torch.testing.assert_close(every[-1:], logits, rtol=1e-4, atol=1e-5)
        rows.append(every.clone())
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_plain_model(tmp_path: Path, kernels: CPUKernels, name: str, kind: BackendKind) -> None:
    path = checkpoint(tmp_path, name)
    tokens = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference_logits(path, tokens)
    with torch.inference_mode():
        logits = chunk_logits(backend(path, kind, kernels), tokens, [30, 1, 1, 13])
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "odd-sizes"])
def test_fused_logits_are_the_same_bits_in_any_chunking(
    tmp_path: Path, kernels: CPUKernels, name: str, dtype: torch.dtype
) -> None:
    computed = backend(checkpoint(tmp_path, name), "fused", kernels, dtype)
    tokens = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    whole = chunk_logits(computed, tokens, [LENGTH])
    assert torch.equal(whole, chunk_logits(computed, tokens, [1] * LENGTH))
    assert torch.equal(whole, chunk_logits(computed, tokens, [20, 9, 16]))


def test_bfloat16_stays_near_float32(tmp_path: Path, kernels: CPUKernels) -> None:
    """Weights rounded once to bfloat16, KV rounded: relative errors of a few 2^-9."""
    path = checkpoint(tmp_path, "llama")
    tokens = list(range(40))
    expected = reference_logits(path, tokens)
    for kind in KINDS:
        with torch.inference_mode():
            logits = chunk_logits(backend(path, kind, kernels, torch.bfloat16), tokens, [40])
        error = (logits - expected).norm() / expected.norm()
        assert error < 0.03, (kind, error)


@pytest.mark.parametrize(
    ("overrides", "dtype", "wanted", "kind", "reason"),
    [
        ({}, torch.float32, "auto", "fused", ""),
        ({}, torch.bfloat16, "auto", "fused", ""),
        ({}, torch.bfloat16, "attention", "attention", "asked for"),
        ({}, torch.float32, "torch", "torch", "off"),
        ({}, torch.float16, "auto", "torch", "float16"),
        ({"head_dim": 258}, torch.float32, "auto", "torch", "head_dim 258"),
        ({"intermediate_size": 97}, torch.float32, "auto", "attention", "even"),
    ],
)
def test_choice_of_backend(
    tmp_path: Path,
    kernels: CPUKernels,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    wanted: Any,
    kind: BackendKind,
    reason: str,
) -> None:
    path = write_checkpoint(tmp_path / "model", tiny_config(**overrides))
    model = load_model(ModelConfig(model=str(path)), dtype=dtype).model
    assert choose_backend(model.config, model.dtype, None, wanted)[0] == "torch"
    chosen, why = choose_backend(model.config, model.dtype, kernels, wanted)
    assert chosen == kind
    assert reason in why
    assert bool(why) == (kind != "fused")


def test_the_runner_feeds_itself_and_forgets(tmp_path: Path, kernels: CPUKernels) -> None:
    """Decode steps name no tokens; a released id is free for reuse in the same step."""
    path = checkpoint(tmp_path, "llama")
    runner = ModelRunner(backend(path, "fused", kernels), SequenceTable(1, 128, BLOCK_SIZE, 0), BLOCK_SIZE, kernels)
    params = SamplingParams(temperature=0, max_tokens=20)
    prompt = [5, 6, 7, 8, 9]

    def generate(first_block: int, released: list[int], seq_id: int) -> list[int]:
        new = NewSequence(seq_id, prompt, len(prompt), params, [first_block], 0)
        tokens = runner.run(SchedulerOutput(0, [seq_id], [5], [0], [True], [new], released=released)).token_ids
        for position in range(5, 12):
            blocks = {seq_id: [first_block + 1]} if position == BLOCK_SIZE else {}
            output = SchedulerOutput(1, [seq_id], [1], [position], [True], new_block_ids=blocks)
            tokens += runner.run(output).token_ids
        return tokens

    first = generate(0, [], 1)
    assert generate(7, [1, 99], 2) == first
    known = prompt + first
    expected = reference_logits(path, known).argmax(-1).tolist()
    assert known[len(prompt) :] == expected[len(prompt) - 1 : -1]
