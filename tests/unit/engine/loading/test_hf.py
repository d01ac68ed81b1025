"""Loading Hugging Face directories: complete ones, and one clear error for each way of being broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom.engine.config import ModelConfig
from atom.engine.errors import ModelLoadError
from atom.engine.loading.describe import describe_model
from atom.engine.loading.weights import LoadedModel, load_model
from tests.tiny_models import EOS_IDS, tiny_config, tiny_weights, write_checkpoint, write_weights


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), **options))


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "broken"))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_arrives(shards: int, dtype: str, tmp_path: Path) -> None:
    config = tiny_config("Qwen3ForCausalLM", attention_bias=True)
    loaded = load(write_checkpoint(tmp_path / "my-model", config, shards=shards), dtype=dtype)
    views = loaded.model.checkpoint_views()
    expected = tiny_weights(config)
    assert views.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(views[name], tensor.to(getattr(torch, dtype))), name
    assert loaded.name == "my-model"
    assert loaded.eos_token_ids == EOS_IDS
    assert loaded.model.embed_vd.dtype == getattr(torch, dtype)


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    assert load(write_checkpoint(tmp_path / "m", dtype=torch.bfloat16)).model.dtype == torch.bfloat16


def test_served_model_name(tiny_llama: Path) -> None:
    assert load(tiny_llama, served_model_name="mine").name == "mine"


def test_links_of_a_download_cache_are_followed(tmp_path: Path, tiny_llama: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in tiny_llama.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert load(snapshot).name == "abc"


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path / "m", config)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert load(folder).transformer_config.tie_word_embeddings


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reshard(folder: Path, **weight_map: str) -> None:
    """Two shards and an index in which some entries are replaced."""
    (folder / "model.safetensors").unlink()
    write_weights(folder, tiny_weights(tiny_config()), shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= weight_map
    index.write_text(json.dumps(content))


def break_truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def break_pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def break_fifo(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def break_link_to_device(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def break_empty_index(folder: Path) -> None:
    reshard(folder)
    edit_json(folder / "model.safetensors.index.json", weight_map={})


def break_duplicate(folder: Path) -> None:
    reshard(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(shard), "model.norm.weight": torch.ones(64), "lm_head.weight": torch.ones(320, 64)}, shard)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config-not-json": (lambda f: (f / "config.json").write_text("{"), "config.json: is not valid JSON"),
    "config-a-list": (lambda f: (f / "config.json").write_text("[]"), "config.json: must be a JSON object"),
    "config-deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: is not valid JSON"),
    "config-not-utf8": (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json: is not UTF-8"),
    "absurd-size": (
        lambda f: edit_json(f / "config.json", hidden_size=10**15),
        "config.json: hidden_size must be an integer from 1 to",
    ),
    "larger-than-the-file": (
        lambda f: edit_json(f / "config.json", vocab_size=1 << 22, hidden_size=1 << 17, num_attention_heads=512),
        "tensor model.embed_tokens.weight has shape [320, 64], the configuration says [4194304, 131072]",
    ),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "pickle-only": (break_pickle_only, "pickled weights, which are never loaded"),
    "truncated": (break_truncated, "model.safetensors: is not a complete safetensors file"),
    "empty-file": (lambda f: os.truncate(f / "model.safetensors", 0), "model.safetensors: is not a complete"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 999), "is not a complete safetensors file"),
    "fifo": (break_fifo, "model.safetensors: weight file is missing or not a regular file"),
    "device": (break_link_to_device, "model.safetensors: weight file is missing or not a regular file"),
    "missing-tensor": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        "tensor model.layers.1.mlp.up_proj.weight is missing",
    ),
    "unexpected-tensor": (
        lambda f: edit_weights(f, lambda t: t.update(extra=torch.ones(1))),
        "model.safetensors: tensor extra does not belong to LlamaForCausalLM",
    ),
    "unexpected-bias": (
        lambda f: edit_weights(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)})),
        "tensor model.layers.0.self_attn.q_proj.bias does not belong",
    ),
    "wrong-shape": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(63)})),
        "model.safetensors: tensor model.norm.weight has shape [63], the configuration says [64]",
    ),
    "wrong-dtype": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        "model.safetensors: tensor model.norm.weight has dtype I8; supported are BF16, F16, F32",
    ),
    "index-traversal": (lambda f: reshard(f, **{"model.norm.weight": "../secret.safetensors"}), "is not a plain name"),
    "index-absolute": (lambda f: reshard(f, **{"model.norm.weight": "/etc/x.safetensors"}), "is not a plain name"),
    "index-pickle": (lambda f: reshard(f, **{"model.norm.weight": "pytorch_model.bin"}), "is not a plain name"),
    "index-number": (lambda f: reshard(f, **{"model.norm.weight": 3}), "is not a plain name"),  # type: ignore[arg-type]
    "index-empty": (break_empty_index, "weight_map"),
    "index-missing-file": (
        lambda f: reshard(f, **{"model.norm.weight": "gone.safetensors"}),
        "gone.safetensors: weight file is missing",
    ),
    "index-wrong-file": (
        lambda f: reshard(
            f,
            **{"model.norm.weight": "model-00001-of-00002.safetensors", "phantom": "model-00001-of-00002.safetensors"},
        ),
        "model-00001-of-00002.safetensors: tensor ",
    ),
    "index-duplicate": (break_duplicate, "is also in model-00001-of-00002.safetensors"),
    "bad-eos": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id="2"),
        "generation_config.json: eos_token_id must be a token id or a list",
    ),
    "eos-out-of-range": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id=[2, 999]),
        "end-of-sequence token 999 is not below vocab_size 320",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_directories_give_one_clear_error(fault: str, folder: Path) -> None:
    break_it, message = BROKEN[fault]
    break_it(folder)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_model() -> None:
    with pytest.raises(ModelLoadError, match="'/nowhere' was not found: give a Hugging Face directory"):
        load(Path("/nowhere"))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~nobody-of-that-name/x", "", "/", "preset:", "/etc/passwd"])
def test_names_that_are_no_model(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        describe_model(name)
    assert len(str(caught.value)) < 6000


def test_load_format_must_fit(tiny_llama: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"--load-format gguf does not fit the model .* which is hf"):
        load(tiny_llama, load_format="gguf")


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("Qwen3ForCausalLM")))
    first, again = load(tmp_path, load_format="dummy", seed=3), load(tmp_path, load_format="dummy", seed=3)
    other = load(tmp_path, load_format="dummy", seed=4)
    views = first.model.checkpoint_views()
    assert all(torch.equal(view, again.model.checkpoint_views()[name]) for name, view in views.items())
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(views[name], other.model.checkpoint_views()[name])
    assert views[name].std().item() == pytest.approx(0.02, rel=0.1)
    assert (views["model.layers.1.self_attn.q_norm.weight"] == 1).all()


def test_preset_is_dummy_without_files() -> None:
    loaded = load_model(ModelConfig(model="preset:llama-tiny"))
    assert loaded.name == "llama-tiny"
    assert loaded.transformer_config.vocab_size == 512
    assert describe_model("preset:llama-tiny").eos_token_ids == loaded.eos_token_ids


def test_describe_agrees_with_what_is_loaded(tiny_qwen3: Path) -> None:
    described, loaded = describe_model(str(tiny_qwen3)), load(tiny_qwen3)
    assert described.config == loaded.transformer_config
    assert described.eos_token_ids == loaded.eos_token_ids == EOS_IDS
    assert described.name == loaded.name == "tiny-qwen3"
    assert (described.vocab_size, described.max_model_len) == (320, 512)


def test_eos_of_the_config_and_the_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=7)
    assert describe_model(str(folder)).eos_token_ids == (7, 2)
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert describe_model(str(folder)).eos_token_ids == (7, 0)
