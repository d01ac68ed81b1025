"""Tiny random checkpoints for tests: Hugging Face directories written directly, in a few milliseconds.

`write_checkpoint(folder, tiny_config("Qwen3ForCausalLM", head_dim=24))` makes one with config.json, safetensors,
tokenizer.json (byte-level BPE of 320 tokens), a ChatML template and generation_config.json. Names and shapes are
spelled out here, independently of the engine's loader, and `transformers` loads the result.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
BOS, IM_START, IM_END = 0, 1, 2
EOS_IDS = (IM_END, BOS)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def tiny_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """A config.json of a two-layer model; a value None removes the key."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "dtype": "float32",
    }
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Float32 tensors by their Hugging Face names, scaled so that logits are well apart."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def weight(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * columns**-0.5

    def vector(name: str, size: int, around: float) -> None:
        tensors[name] = around + 0.1 * torch.randn(size, generator=generator)

    d, i = config["hidden_size"], config["intermediate_size"]
    k = config.get("head_dim") or d // config["num_attention_heads"]
    q = config["num_attention_heads"] * k
    kv = config.get("num_key_value_heads", config["num_attention_heads"]) * k
    qkv_bias = config.get("attention_bias", False) or config["model_type"] == "qwen2"
    tensors["model.embed_tokens.weight"] = torch.randn(config["vocab_size"], d, generator=generator)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
        for name, (rows, columns) in shapes.items():
            weight(f"{prefix}.self_attn.{name}", rows, columns)
            if qkv_bias if name != "o_proj" else config.get("attention_bias", False):
                vector(f"{prefix}.self_attn.{name}.bias", rows, 0.0)
        for name, (rows, columns) in {"gate_proj": (i, d), "up_proj": (i, d), "down_proj": (d, i)}.items():
            weight(f"{prefix}.mlp.{name}", rows, columns)
            if config.get("mlp_bias", False):
                vector(f"{prefix}.mlp.{name}.bias", rows, 0.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            vector(f"{prefix}.{norm}.weight", d, 1.0)
        if config["model_type"] == "qwen3":
            for norm in ("q_norm", "k_norm"):
                vector(f"{prefix}.self_attn.{norm}.weight", k, 1.0)
    vector("model.norm.weight", d, 1.0)
    if not config.get("tie_word_embeddings", False):
        weight("lm_head", config["vocab_size"], d)
    return tensors


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """Write a complete model directory and return it."""
    config = tiny_config() if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(EOS_IDS), "bos_token_id": BOS}))
    write_weights(folder, {name: tensor.to(dtype) for name, tensor in tiny_weights(config, seed).items()}, shards)
    write_tokenizer(folder)
    return folder


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """model.safetensors, or `shards` files with an index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[BOS],
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@functools.cache
def tiny_tokenizer_json() -> str:
    """A byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens, every one with text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    text = (
        "the quick brown fox jumps over the lazy dog while other foxes and the hounds are sleeping in the garden there"
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return str(tokenizer.to_str())


GGUF_NAMES = {
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


def write_gguf(
    path: Path,
    config: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    quantization: str = "F32",
    metadata: dict[str, Any] | None = None,
    pre_tokenizer: str = "gpt-2",
) -> Path:
    """The checkpoint of `write_checkpoint` as llama.cpp's converter writes it; norms and biases stay F32.

    `metadata`: further float, integer or string entries, keys without the architecture's prefix.
    """
    import gguf

    config = tiny_config() if config is None else config
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (metadata or {}).items():
        add: Any = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{kind}.{key}", value)
    _add_gguf_tokenizer(writer, pre_tokenizer)
    type_ = gguf.GGMLQuantizationType[quantization]
    for name, tensor in tiny_weights(config, seed).items():
        values = _llama_cpp_layout(name, tensor, config).numpy()
        if values.ndim == 1 or type_ == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_tensor_name(name), values)
        else:
            writer.add_tensor(gguf_tensor_name(name), gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensor_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}.get(stem)
    if top is not None:
        return f"{top}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{suffix}"


def _llama_cpp_layout(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The converter's `permute`: pairs of rotated rows lie side by side, for the architecture `llama` only."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    if config["model_type"] != "llama" or part not in heads:
        return tensor
    halves = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _add_gguf_tokenizer(writer: Any, pre_tokenizer: str) -> None:
    model = json.loads(tiny_tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_chat_template(CHAT_TEMPLATE)
