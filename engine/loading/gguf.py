"""GGUF files of the Llama, Qwen2 and Qwen3 architectures: metadata to `TransformerConfig`, and weights by their Hugging
Face names. No torch (the API process reads the configuration). The container format is `engine/loading/gguf_file.py`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names and the permutation of q and k: llama.cpp's
convert_hf_to_gguf.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from atom.engine.errors import ModelLoadError
from atom.engine.loading.gguf_file import GGUFFile
from atom.engine.models.config import RopeConfig, TransformerConfig, transformer_config, yarn_mscale

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` to the architecture that computes it."""
ROPE_FACTORS: Final = "rope_freqs.weight"

_GLOBAL_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_config(file: GGUFFile) -> TransformerConfig:
    """The architecture of a GGUF file. Raises `ModelLoadError` naming the file and what is unsupported in it."""
    metadata, origin = file.metadata, str(file.path)
    kind = file.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelLoadError(
            f"{origin}: general.architecture {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if metadata.get(f"{kind}.expert_count"):
        raise ModelLoadError(f"{origin}: {kind}.expert_count: mixtures of experts are not supported")
    raw = _as_hf_config(file, kind)
    config = transformer_config(raw, origin)
    if metadata.get(f"{kind}.rope.dimension_count", config.head_dim) != config.head_dim:
        raise ModelLoadError(f"{origin}: {kind}.rope.dimension_count: partial rotary embeddings are not supported")
    config = replace(
        config,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        dtype=None,
    )
    if ROPE_FACTORS in file.tensors:
        divisors = tuple(float(value) for value in file.tensor(ROPE_FACTORS).ravel())
        if not all(1e-6 < value < 1e6 for value in divisors):
            raise ModelLoadError(f"{origin}: {ROPE_FACTORS} must hold positive numbers")
        config = replace(config, rope=RopeConfig(theta=config.rope.theta, type="divisors", divisors=divisors))
        config.validate(origin)
    return config


def _as_hf_config(file: GGUFFile, kind: str) -> dict[str, Any]:
    """The same architecture as a config.json would say it."""

    def get(key: str) -> Any:
        value = file.metadata.get(f"{kind}.{key}")
        if isinstance(value, list):  # per-layer values are written as an array
            if not value or any(item != value[0] for item in value):
                raise ModelLoadError(f"{file.path}: {kind}.{key}: layers of different shapes are not supported")
            return value[0]
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    if get("attention.value_length") != get("attention.key_length"):
        raise ModelLoadError(f"{file.path}: {kind}.attention.value_length must equal key_length")
    context_length = get("context_length")
    head_dim = get("attention.key_length")
    if head_dim is None and kind == "qwen3":  # without the key, llama.cpp divides; Qwen3's own default is 128
        head_dim = _divide(get("embedding_length"), get("attention.head_count"))
    scaling = _rope_scaling(file, kind, context_length)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": embedding.shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv") or get("attention.head_count"),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context_length,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": scaling,
    }


def _divide(whole: Any, parts: Any) -> Any:
    return whole // parts if type(whole) is int and type(parts) is int and parts > 0 else None


def _rope_scaling(file: GGUFFile, arch: str, context_length: Any) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind, factor = file.text(f"{prefix}.type"), file.number(f"{prefix}.factor")
    linear = file.number(f"{arch}.rope.scale_linear")  # the spelling before 2023-08
    if kind is None and linear not in (None, 0.0, 1.0):
        kind, factor = "linear", linear
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        attention = file.number(f"{prefix}.attn_factor")
        scaling |= {
            "original_max_position_embeddings": file.number(f"{prefix}.original_context_length") or context_length,
            "beta_fast": file.number(f"{prefix}.yarn_beta_fast"),
            "beta_slow": file.number(f"{prefix}.yarn_beta_slow"),
            # llama.cpp multiplies YaRN's temperature by it, transformers replaces the temperature.
            "attention_factor": None if attention is None else attention * yarn_mscale(factor or 1.0),
        }
    return scaling


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name that a decoder has."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def read_gguf_tensor(
    file: GGUFFile, config: TransformerConfig, name: str
) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """The tensor called `name` in Hugging Face checkpoints, its rotary layout undone: pieces of flat float32 values,
    each with the index of its first element.

    Files of the architecture `llama` have the rows of q and k interleaved within each head, (0, k/2, 1, k/2+1, …).
    Rows are reordered before they are dequantized: blocks never cross them.
    """
    info = file.tensors[gguf_name(name)]
    raw = file.raw(info)
    if file.metadata.get("general.architecture") == "llama" and (".q_proj." in name or ".k_proj." in name):
        num_heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
        # A bias is one row of the file but has one element per row of its weight.
        rows = raw if len(info.shape) > 1 else raw.reshape(info.shape[0], -1)
        raw = rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
    return file.chunks(info, raw)
