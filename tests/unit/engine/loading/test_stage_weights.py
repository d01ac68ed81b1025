"""Ranks load their parts alone, whatever the format, and together have the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atom.engine.config import ModelConfig
from atom.engine.loading.weights import load_model, load_stage
from atom.engine.models.decoder import whole
from atom.engine.models.shard import Shard
from tests.tiny_models import tiny_config, write_checkpoint, write_gguf

SIZES = [(2, 1), (1, 2), (2, 2), (4, 1)]
CONFIGS = {
    "llama": tiny_config(num_hidden_layers=4),
    "biased": tiny_config(num_hidden_layers=4, attention_bias=True, mlp_bias=True, vocab_size=319),
    "tied qwen3": tiny_config("Qwen3ForCausalLM", num_hidden_layers=4, head_dim=24, tie_word_embeddings=True),
}


def check(model: ModelConfig, tp_size: int, pp_size: int) -> None:
    loaded = load_model(model, torch.float32).model.checkpoint_views()
    seen: set[str] = set()
    for rank in range(tp_size * pp_size):
        shard = Shard(rank % tp_size, tp_size, rank // tp_size, pp_size)
        stage = load_stage(model, torch.float32, shard, whole)
        for name, part, view in stage.checkpoint_parts():
            seen.add(name)
            expected = loaded[name]
            if part is not None:
                expected = expected.narrow(part.dimension, part.start, part.stop - part.start)
            assert torch.equal(view, expected), (name, shard)
    assert seen == set(loaded)


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_parts_of_safetensors(tmp_path: Path, kind: str, tp_size: int, pp_size: int) -> None:
    folder = write_checkpoint(tmp_path / "model", CONFIGS[kind], shards=2)
    check(ModelConfig(model=str(folder)), tp_size, pp_size)


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
def test_parts_of_gguf(tmp_path: Path, quantization: str, tp_size: int, pp_size: int) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_config(num_hidden_layers=4), quantization=quantization)
    check(ModelConfig(model=str(path)), tp_size, pp_size)


def test_parts_of_gguf_whose_pieces_end_within_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.engine.loading.gguf_file._CHUNK_ELEMENTS", 32 * 7)
    path = write_gguf(tmp_path / "model.gguf", tiny_config(), quantization="Q8_0")
    check(ModelConfig(model=str(path)), 2, 1)


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
def test_parts_of_made_up_weights(tmp_path: Path, tp_size: int, pp_size: int) -> None:
    folder = write_checkpoint(tmp_path / "model", CONFIGS["llama"])
    check(ModelConfig(model=str(folder), load_format="dummy", seed=5), tp_size, pp_size)


def test_a_bias_that_is_added_to_a_sum_is_held_once(tmp_path: Path) -> None:
    model = ModelConfig(model=str(write_checkpoint(tmp_path / "model", CONFIGS["biased"])))
    holders: dict[str, int] = {}
    for rank in range(2):
        parts: list[tuple[str, Any, Any]] = load_stage(model, torch.float32, Shard(rank, 2), whole).checkpoint_parts()
        for name, _, _ in parts:
            if name.endswith(".bias"):
                holders[name] = holders.get(name, 0) + 1
    for name, count in holders.items():
        assert count == (1 if ".o_proj." in name or ".down_proj." in name else 2), name


def test_a_rank_never_holds_the_whole_model(tmp_path: Path) -> None:
    model = ModelConfig(model=str(write_checkpoint(tmp_path / "model", CONFIGS["llama"])))
    total = sum(view.numel() for view in load_model(model, torch.float32).model.checkpoint_views().values())
    for rank in range(4):
        parts = load_stage(model, torch.float32, Shard(rank % 2, 2, rank // 2, 2), whole).checkpoint_parts()
        assert sum(view.numel() for _, _, view in parts) < 0.3 * total
