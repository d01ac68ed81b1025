"""`TransformerConfig`: the architecture of a decoder, validated from a Hugging Face config.json. No torch.

A config.json is untrusted: every size has bounds, and whatever this decoder does not do (sliding windows, quantized
weights, partial rotary embeddings, other rope scalings) is refused by name instead of being computed wrongly. GGUF
metadata is mapped onto the same fields by `engine/loading/gguf.py`, named architectures are in
`engine/models/presets.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from atom.engine.errors import ModelLoadError

RopeType = Literal["default", "linear", "llama3", "yarn", "divisors"]
DTypeName = Literal["float32", "bfloat16", "float16"]

MAX_VOCAB_SIZE: Final = 1 << 22
MAX_HIDDEN_SIZE: Final = 1 << 17
MAX_INTERMEDIATE_SIZE: Final = 1 << 20
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 1024
MAX_POSITIONS: Final = 1 << 26
MAX_PARAMETERS: Final = 1 << 42


@dataclass(frozen=True, slots=True)
class Family:
    """What config.json leaves unsaid in one family: the defaults of its `transformers` configuration class."""

    model_type: str
    num_kv_heads: int | None
    """None: as many as query heads."""
    max_position_embeddings: int
    head_dim: int | None = None
    """None: hidden size divided by heads."""
    qk_norm: bool = False
    qkv_bias: bool | None = None
    """Fixed by the architecture, with an output projection without one; None: `attention_bias` says."""
    has_mlp_bias: bool = False
    """Whether `mlp_bias` exists."""
    sliding_window_flag: bool = False
    """Whether `sliding_window` counts only with `use_sliding_window`."""


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family("llama", None, 2048, has_mlp_bias=True),
    "MistralForCausalLM": Family("mistral", 8, 4096 * 32, qkv_bias=False),
    "Qwen2ForCausalLM": Family("qwen2", 32, 32768, qkv_bias=True, sliding_window_flag=True),
    "Qwen3ForCausalLM": Family("qwen3", 32, 32768, head_dim=128, qk_norm=True, sliding_window_flag=True),
}
"""Supported values of `architectures`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding: `inv_freq_i = theta^(−2i/k)`, rescaled as `type` says (`engine/models/rope.py`)."""

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    """How much longer the context became."""
    original_max_position_embeddings: int = 0
    """Context length before scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3: wavelengths between original/high and original/low are interpolated."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the ramp between `beta_fast` and `beta_slow` rotations, with its ends rounded outwards if `truncate`."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin."""
    divisors: tuple[float, ...] = ()
    """divisors: one number per frequency that divides it, as GGUF files of Llama 3.1 store their scaling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """A pre-norm decoder with RMSNorm, rotary embeddings, grouped-query attention and a SwiGLU MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    dtype: DTypeName | None = None
    """Of the checkpoint; None: not said."""

    @property
    def context_length(self) -> int:
        """Longest context that the positions are meant for. Scalings that leave `max_position_embeddings` at the
        original length (linear, yarn) multiply it, as vLLM derives it."""
        if self.rope.type == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return self.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        """Weights of the model, embeddings counted once when they are tied."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def validate(self, origin: str) -> None:
        """Check relations between fields; raises `ModelLoadError` starting with `origin`."""
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{origin}: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"{origin}: head_dim {self.head_dim} must be even for rotary embeddings")
        if self.num_parameters > MAX_PARAMETERS:
            raise ModelLoadError(f"{origin}: describes {self.num_parameters:.3g} parameters, more than is sensible")
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise ModelLoadError(f"{origin}: {len(self.rope.divisors)} rope factors for head_dim {self.head_dim}")


class Fields:
    """Typed, bounded access to an untrusted mapping; every refusal names its origin and the field."""

    def __init__(self, raw: dict[str, Any], origin: str) -> None:
        self.raw = raw
        self.origin = origin

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise ModelLoadError(f"{self.origin}: {name} must be an integer from {low} to {high}, got {value!r}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ModelLoadError(f"{self.origin}: {name} must be a number from {low:g} to {high:g}, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.origin}: {name} must be true or false, got {value!r}")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.origin}: {name} is missing")
        return value


def transformer_config(raw: dict[str, Any], origin: str) -> TransformerConfig:
    """Read a config.json's object. `origin` names the file in errors.

    Raises `ModelLoadError` for an unsupported architecture or option, and for values out of bounds.
    """
    architecture, family = _family(raw, origin)
    fields = Fields(raw, origin)
    _refuse_unsupported(raw, family, fields)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    hidden_size = fields.integer("hidden_size", 1, MAX_HIDDEN_SIZE)
    head_dim = family.head_dim
    if head_dim is None and raw.get("head_dim") is None:
        if hidden_size % num_heads:
            raise ModelLoadError(
                f"{origin}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
                "and head_dim is missing"
            )
        head_dim = hidden_size // num_heads
    max_positions = fields.integer("max_position_embeddings", 1, MAX_POSITIONS, family.max_position_embeddings)
    attention_bias = fields.boolean("attention_bias") if family.qkv_bias is None else False
    config = TransformerConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE_SIZE),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, family.num_kv_heads or num_heads),
        head_dim=fields.integer("head_dim", 1, MAX_HEAD_DIM, head_dim),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=_rope_config(raw, max_positions, origin),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias,
        mlp_bias=family.has_mlp_bias and fields.boolean("mlp_bias"),
        qk_norm=family.qk_norm,
        dtype=_dtype(raw),
    )
    config.validate(origin)
    return config


def _family(raw: dict[str, Any], origin: str) -> tuple[str, Family]:
    named = raw.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    if not names:
        for architecture, family in FAMILIES.items():
            if raw.get("model_type") == family.model_type:
                return architecture, family
    wanted = ", ".join(names) or f"model_type {raw.get('model_type')!r}"
    raise ModelLoadError(f"{origin}: architecture {wanted} is not supported; supported are {', '.join(FAMILIES)}")


def _refuse_unsupported(raw: dict[str, Any], family: Family, fields: Fields) -> None:
    origin = fields.origin
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelLoadError(f"{origin}: hidden_act {activation!r} is not supported; 'silu' is")
    if raw.get("quantization_config") is not None:
        raise ModelLoadError(
            f"{origin}: quantization_config: quantized safetensors are not supported; use bf16 or GGUF"
        )
    if family.sliding_window_flag:
        if fields.boolean("use_sliding_window"):
            raise ModelLoadError(f"{origin}: use_sliding_window: sliding-window attention is not supported")
    elif raw.get("sliding_window") is not None and family.model_type == "mistral":
        window = fields.integer("sliding_window", 1, MAX_POSITIONS)
        if window < fields.integer("max_position_embeddings", 1, MAX_POSITIONS, family.max_position_embeddings):
            raise ModelLoadError(f"{origin}: sliding_window {window}: sliding-window attention is not supported")
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        raise ModelLoadError(f"{origin}: layer_types: only 'full_attention' layers are supported")


def _dtype(raw: dict[str, Any]) -> DTypeName | None:
    value = raw.get("dtype", raw.get("torch_dtype"))
    if isinstance(value, str):
        value = value.removeprefix("torch.")
    names: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")
    return next((name for name in names if name == value), None)


def _rope_config(raw: dict[str, Any], max_positions: int, origin: str) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    scaling = raw.get(name)
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise ModelLoadError(f"{origin}: {name} must be one flat object; rotary embeddings per layer are not supported")
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    fields = Fields({"rope_theta": raw.get("rope_theta"), **scaling}, f"{origin}: {name}")
    rotary = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotary not in (None, 1, 1.0):
        raise ModelLoadError(f"{origin}: partial_rotary_factor {rotary!r} is not supported; 1.0 is")
    theta = fields.number("rope_theta", 1.0, 1e15, 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = raw.get("original_max_position_embeddings")
    if original is not None:
        fields.raw["original_max_position_embeddings"] = original
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=fields.number("factor", 1.0, 1e6))
    if kind == "llama3":
        return _llama3(fields, theta, max_positions)
    if kind == "yarn":
        return _yarn(fields, theta, max_positions)
    raise ModelLoadError(f"{origin}: {name}: rope_type {kind!r} is not supported; default, linear, llama3 and yarn are")


def _llama3(fields: Fields, theta: float, max_positions: int) -> RopeConfig:
    low = fields.number("low_freq_factor", 1e-6, 1e6)
    high = fields.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise ModelLoadError(f"{fields.origin}: high_freq_factor {high:g} must exceed low_freq_factor {low:g}")
    return RopeConfig(
        theta=theta,
        type="llama3",
        factor=fields.number("factor", 1.0, 1e6),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=fields.integer(
            "original_max_position_embeddings", 1, MAX_POSITIONS, max_positions
        ),
    )


def _yarn(fields: Fields, theta: float, max_positions: int) -> RopeConfig:
    original = fields.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    factor = fields.number("factor", 1.0, 1e6, max(1.0, max_positions / original))
    if theta <= 1.0:
        raise ModelLoadError(f"{fields.origin}: rope_theta must exceed 1 with yarn")
    if fields.raw.get("attention_factor") is not None:
        attention_factor = fields.number("attention_factor", 1e-6, 1e6)
    else:
        mscale = fields.number("mscale", 0.0, 1e6, 0.0)
        mscale_all_dim = fields.number("mscale_all_dim", 0.0, 1e6, 0.0)
        if mscale and mscale_all_dim:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_mscale(factor)
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=fields.number("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=fields.number("beta_slow", 1e-6, 1e6, 1.0),
        truncate=fields.boolean("truncate", True),
        attention_factor=attention_factor,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN: `0.1 · mscale · ln(factor) + 1` (https://arxiv.org/abs/2309.00071, §3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
