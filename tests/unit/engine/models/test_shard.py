"""Which part of a model a rank holds: together the ranks hold everything, and what does not divide is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.config import EngineConfig, ParallelConfig
from atom.engine.errors import ConfigError
from atom.engine.models.config import TransformerConfig
from atom.engine.models.shard import Shard, check_division

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def config(**overrides: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 16,
    }
    return TransformerConfig(**{**sizes, **overrides})


@given(
    tp_size=st.sampled_from([1, 2, 3, 4, 6, 8]),
    heads_per_rank=st.integers(1, 3),
    kv_heads=st.integers(1, 8),
    columns=st.integers(1, 5),
    vocab_size=st.integers(16, 400),
)
def test_ranks_hold_everything_once_and_their_own_kv_heads(
    tp_size: int, heads_per_rank: int, kv_heads: int, columns: int, vocab_size: int
) -> None:
    heads = heads_per_rank * tp_size
    if heads % kv_heads:
        return
    model = config(
        num_heads=heads, num_kv_heads=kv_heads, intermediate_size=columns * tp_size, vocab_size=vocab_size, head_dim=2
    )
    try:
        check_division(model, tp_size, 1)
    except ConfigError:
        return
    shards = [Shard(rank, tp_size) for rank in range(tp_size)]
    ids = [token for shard in shards for token in shard.vocabulary(model)]
    assert ids == list(range(vocab_size))
    assert all(len(shard.vocabulary(model)) for shard in shards)
    if tp_size == 1:
        return
    widths = {"q_proj": heads * 2, "o_proj": heads * 2}
    for name in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        parts = [shard.part(f"model.layers.0.x.{name}.weight", model) for shard in shards]
        covered = [i for part in parts if part is not None for i in range(part.start, part.stop)]
        assert covered == list(range(widths.get(name, columns * tp_size)))
    for shard in shards:
        local = shard.local_config(model)
        part = shard.part("model.layers.0.self_attn.k_proj.weight", model)
        assert part is not None
        assert part.stop - part.start == local.num_kv_heads * 2
        assert local.num_heads % local.num_kv_heads == 0
        for head in range(local.num_heads):
            group = (shard.tp_rank * local.num_heads + head) // (heads // kv_heads)
            own = part.start // 2 + head // (local.num_heads // local.num_kv_heads)
            assert own == group, "a query head attends to another one's keys"


def test_stages_have_all_layers_in_order() -> None:
    model = config(num_layers=12)
    layers = [layer for stage in range(3) for layer in Shard(0, 1, stage, 3).layers(model)]
    assert layers == list(range(12))
    assert [Shard(1, 2, stage, 3).rank for stage in range(3)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("overrides", "tp_size", "pp_size", "message"),
    [
        ({}, 3, 1, "--tensor-parallel-size 3 does not divide the 8 attention heads .*; 1, 2, 4, 8 would"),
        ({"intermediate_size": 90}, 4, 1, "does not divide the 90 MLP columns .*; 1, 2 would"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, 1, "neither divides the 4 key/value heads .*; 1, 2, 4, 12 would"),
        ({"vocab_size": 5}, 4, 1, "--tensor-parallel-size 4 is too many for the vocabulary of 5"),
        ({}, 1, 3, "--pipeline-parallel-size 3 does not divide the 4 layers .*; 1, 2, 4 would"),
    ],
)
def test_what_does_not_divide_is_refused(overrides: dict[str, Any], tp_size: int, pp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_division(config(**overrides), tp_size, pp_size)


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size must be from 1"),
        ({"pipeline_parallel_size": 65}, "--pipeline-parallel-size must be from 1 to 64"),
        ({"tensor_parallel_size": 16, "pipeline_parallel_size": 8}, "must be at most 64 workers, got 128"),
    ],
)
def test_sizes_are_bounded(sizes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ParallelConfig(**sizes)


def test_a_simulated_executor_has_nothing_to_divide() -> None:
    with pytest.raises(ConfigError, match="must be 1 with --executor simulated"):
        EngineConfig(executor="simulated", parallel=ParallelConfig(tensor_parallel_size=2))
