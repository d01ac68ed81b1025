"""Reading config.json: defaults of the families, refusals that name the field, hostile input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.errors import ModelLoadError
from atom.engine.models.config import FAMILIES, TransformerConfig, transformer_config
from atom.engine.models.presets import PRESETS, preset_config
from tests.tiny_models import tiny_config


def read(architecture: str = "LlamaForCausalLM", **overrides: Any) -> TransformerConfig:
    return transformer_config(tiny_config(architecture, **overrides), "config.json")


def test_fields() -> None:
    config = read(torch_dtype="bfloat16", dtype=None, attention_bias=True, mlp_bias=True)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (320, 64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, True, True, False)
    assert config.dtype == "bfloat16"
    assert config.rope.theta == 10000.0


def test_defaults_follow_the_family() -> None:
    bare: dict[str, Any] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": None,
        "rope_theta": None,
    }
    llama = read(**bare)
    assert (llama.num_kv_heads, llama.head_dim, llama.max_position_embeddings) == (4, 16, 2048)
    qwen3 = read("Qwen3ForCausalLM", **{**bare, "num_attention_heads": 32})
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.max_position_embeddings) == (32, 128, 32768)
    qwen2 = read("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.o_bias) == (True, False)


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert read(architectures=None).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_context_length(rope: dict[str, Any] | None, length: int) -> None:
    assert read(rope_scaling=rope).context_length == length


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size must be an integer"),
    ({"hidden_size": True}, "hidden_size must be an integer"),
    ({"hidden_size": 10**12}, "hidden_size must be an integer from 1 to 131072, got 1000000000000"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"vocab_size": 1 << 40}, "vocab_size"),
    ({"vocab_size": -1}, "vocab_size"),
    ({"intermediate_size": 1 << 30}, "intermediate_size"),
    ({"num_attention_heads": 1 << 20}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ({"head_dim": 15}, "head_dim 15 must be even"),
    ({"head_dim": None, "hidden_size": 66}, "head_dim is missing"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"max_position_embeddings": 1 << 60}, "max_position_embeddings"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_scaling": []}, "rope_scaling must be one flat object"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "high_freq_factor",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters must be one flat object"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"architecture": "Qwen2ForCausalLM", "use_sliding_window": True}, "use_sliding_window"),
    ({"architecture": "Qwen3ForCausalLM", "use_sliding_window": True}, "use_sliding_window"),
    ({"architecture": "MistralForCausalLM", "sliding_window": 128}, "sliding_window 128"),
    (
        {"vocab_size": 1 << 22, "hidden_size": 1 << 17, "num_hidden_layers": 1024, "intermediate_size": 1 << 20},
        "parameters, more than is sensible",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals_name_the_field(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(**overrides)
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_that_never_closes_is_allowed() -> None:
    assert read("MistralForCausalLM", sliding_window=512).max_position_embeddings == 512
    assert not read("Qwen2ForCausalLM", sliding_window=16, use_sliding_window=False).qk_norm


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    changes=st.dictionaries(
        st.sampled_from([*tiny_config(), "rope_scaling", "rope_parameters", "layer_types", "sliding_window"]), JSON
    ),
    rope=st.dictionaries(
        st.sampled_from(["type", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale"]),
        JSON | st.sampled_from(["yarn", "llama3", "linear"]),
    ),
)
def test_any_object_is_read_or_refused(architecture: str, changes: dict[str, Any], rope: dict[str, Any]) -> None:
    raw = {**tiny_config(architecture), "rope_scaling": rope or None, **changes}
    try:
        config = transformer_config(raw, "config.json")
    except ModelLoadError:
        return
    assert config.num_parameters > 0
    assert config.context_length >= 1


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    assert preset_config(name).head_dim % 2 == 0


def test_preset_sizes_are_those_of_the_models() -> None:
    assert preset_config("qwen3-8b").num_parameters == pytest.approx(8.19e9, rel=0.001)
    assert preset_config("llama-3.1-8b").num_parameters == pytest.approx(8.03e9, rel=0.001)


def test_unknown_preset() -> None:
    with pytest.raises(ModelLoadError, match="preset:nope: no such preset; there are llama-tiny"):
        preset_config("nope")
