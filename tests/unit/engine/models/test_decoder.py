"""Logits and greedy output against transformers, for every option of the architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atom.engine.config import ModelConfig
from atom.engine.loading.weights import LoadedModel, load_model
from atom.engine.models.decoder import DecoderLM
from atom.engine.models.dense_attention import DenseAttention
from atom.engine.models.layers import Linear
from tests.tiny_models import EOS_IDS, tiny_config, write_checkpoint

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mha": {"num_key_value_heads": 4},
    "llama-mqa": {"num_key_value_heads": 1},
    "llama-head-dim": {"head_dim": 24},
    "llama-default-head-dim": {"head_dim": None},
    "llama-attention-bias": {"attention_bias": True},
    "llama-mlp-bias": {"mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-theta": {"rope_theta": 500000.0, "rms_norm_eps": 1e-3},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope-llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "rope-yarn": {"rope_scaling": {"rope_type": "yarn", **YARN}},
    "rope-yarn-old-spelling": {"rope_scaling": {"type": "yarn", **YARN}},
    "rope-yarn-betas": {"rope_scaling": {"rope_type": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, **YARN}},
    "rope-yarn-attention-factor": {"rope_scaling": {"rope_type": "yarn", "attention_factor": 0.7, **YARN}},
    "rope-yarn-mscale": {"rope_scaling": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.1, **YARN}},
    "rope-yarn-no-truncate": {"rope_scaling": {"rope_type": "yarn", "truncate": False, **YARN}},
    "rope-parameters-default": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "rope-parameters-linear": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0},
    },
    "rope-parameters-llama3": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    },
    "rope-parameters-yarn": {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
    "mistral": {"architecture": "MistralForCausalLM"},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
    "qwen3-tied-bias": {
        "architecture": "Qwen3ForCausalLM",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "head_dim": 24,
        "num_key_value_heads": 1,
    },
    "qwen3-yarn": {"architecture": "Qwen3ForCausalLM", "rope_scaling": {"rope_type": "yarn", **YARN}},
}


def run(model: DecoderLM, token_ids: list[int], attention: DenseAttention | None = None, past: int = 0) -> torch.Tensor:
    """Logits `[t, v]` of the tokens, which follow `past` earlier ones in `attention`."""
    attention = attention or DenseAttention()
    positions = torch.arange(past, past + len(token_ids))
    hidden = model.forward(torch.tensor(token_ids), positions, attention.step({0: len(token_ids)}))
    return model.compute_logits(hidden)


def greedy(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy continuation with a cache, including the token that ended it."""
    attention = DenseAttention()
    tokens, new = list(prompt), list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        logits = run(loaded.model, new, attention, len(tokens) - len(new))
        new = [int(logits[-1].argmax())]
        tokens += new
        if new[0] in loaded.eos_token_ids:
            break
    return tokens[len(prompt) :]


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    # Not AutoModelForCausalLM: it imports every model, which takes 4 s.
    return getattr(transformers, architecture).from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def prompt_tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_config(**CASES[case]), seed=len(case))
    loaded = load_model(ModelConfig(model=str(folder)))
    theirs = reference(folder)
    prompt = prompt_tokens(90)  # beyond original_max_position_embeddings of the scaled cases
    expected = theirs(torch.tensor([prompt])).logits[0]
    actual = run(loaded.model, prompt)
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()
    continuation = greedy(loaded, prompt, 24)
    # One pass over the whole text says, position by position, what the reference would have chosen.
    choices = theirs(torch.tensor([prompt + continuation])).logits[0].argmax(-1)
    assert choices[len(prompt) - 1 : -1].tolist() == continuation


def test_greedy_output_is_that_of_generate(tiny_llama: Path) -> None:
    prompt = prompt_tokens(20)
    output = reference(tiny_llama).generate(
        torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=list(EOS_IDS), pad_token_id=0
    )
    loaded = load_model(ModelConfig(model=str(tiny_llama)))
    assert greedy(loaded, prompt, 64) == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_checkpoints_in_float32(dtype: torch.dtype, shards: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"), dtype=dtype, shards=shards)
    loaded = load_model(ModelConfig(model=str(folder), dtype="float32"))
    prompt = prompt_tokens(40)
    expected = reference(folder)(torch.tensor([prompt])).logits[0]
    assert (run(loaded.model, prompt) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_close_to_float32_as_the_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"), dtype=dtype)
    loaded = load_model(ModelConfig(model=str(folder)))
    assert loaded.model.dtype == dtype
    prompt = prompt_tokens(64)
    exact = reference(folder)(torch.tensor([prompt])).logits[0]
    theirs = reference(folder, dtype)(torch.tensor([prompt])).logits[0].float()
    ours = run(loaded.model, prompt)
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


def test_sequences_and_chunks_do_not_see_each_other(tiny_llama: Path) -> None:
    model = load_model(ModelConfig(model=str(tiny_llama))).model
    first, second = prompt_tokens(17, 1), prompt_tokens(9, 2)
    attention = DenseAttention()
    hidden = model.forward(
        torch.tensor(first[:5] + second), torch.tensor([*range(5), *range(9)]), attention.step({7: 5, 8: 9})
    )
    together_second = model.compute_logits(hidden[5:])
    rest = model.forward(torch.tensor(first[5:]), torch.arange(5, 17), attention.step({7: 12}))
    torch.testing.assert_close(model.compute_logits(rest), run(model, first)[5:])
    torch.testing.assert_close(together_second, run(model, second))


def test_projections_can_be_replaced(tiny_qwen3: Path) -> None:
    model = load_model(ModelConfig(model=str(tiny_qwen3))).model
    prompt = prompt_tokens(12)
    expected = run(model, prompt)
    calls: list[str] = []

    def wrap(name: str, inner: Linear) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return inner(x)

        return call

    for name, owner, attribute, projection in list(model.named_linears()):
        setattr(owner, attribute, wrap(name, projection))
    torch.testing.assert_close(run(model, prompt), expected, rtol=0, atol=0)
    assert len(calls) == len(set(calls)) == 2 * 4 + 1
    assert not list(model.named_linears())


def test_fused_weights_are_contiguous_views(tiny_llama: Path) -> None:
    model = load_model(ModelConfig(model=str(tiny_llama))).model
    views = model.checkpoint_views()
    assert all(view.is_contiguous() for view in views.values())
    distinct = {view.untyped_storage().data_ptr() for view in views.values()}
    assert len(distinct) == 3 + 2 * 6  # embedding, norm, head; per layer two norms, qkv, o, gate_up, down
