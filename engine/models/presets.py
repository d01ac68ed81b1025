"""Named architectures for `preset:NAME`: shapes of published models, served with dummy weights and no files at all.
Each value is the model's config.json as far as `engine/models/config.py` reads it."""

from __future__ import annotations

from typing import Any, Final

from atom.engine.errors import ModelLoadError
from atom.engine.models.config import TransformerConfig, transformer_config


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
    }


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
    }


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "llama-tiny": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    },
    "llama-3.1-8b": _llama3(4096, 14_336, 32, 32),
    "llama-3.1-70b": _llama3(8192, 28_672, 80, 64),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, False),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, False),
}


def preset_config(name: str) -> TransformerConfig:
    """The architecture called `name`. Raises `ModelLoadError` listing what there is."""
    raw = PRESETS.get(name)
    if raw is None:
        raise ModelLoadError(f"model preset:{name}: no such preset; there are {', '.join(PRESETS)}")
    return transformer_config(raw, f"preset:{name}")
