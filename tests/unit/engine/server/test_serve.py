"""Start-up decisions of the server that need no process."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from atom.engine.config import EngineConfig, ModelConfig, SimulatedConfig
from atom.engine.errors import ConfigError, ModelLoadError
from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.server import serve
from atom.engine.server.config import ServerConfig

SIMULATED = EngineConfig(executor="simulated")


def test_without_the_embedded_model_simulated_runs_use_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(model: str) -> None:
        raise ModelLoadError("not installed")

    monkeypatch.setattr(serve, "resolve_model", missing)
    config, tokenizer = serve._prepare_simulated(SIMULATED, ServerConfig())
    assert (config.model.tokenizer, config.model.served_model_name) == ("bytes", "simulated")
    assert tokenizer is None
    assert serve._model_name(config) == "simulated"
    cpu = dataclasses.replace(SIMULATED, executor="cpu")
    assert serve._prepare_simulated(cpu, ServerConfig()) == (cpu, None)


def test_the_simulated_vocabulary_is_the_tokenizer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "resolve_model", lambda model: None)
    monkeypatch.setattr(serve, "load_tokenizer", lambda *args: ByteTokenizer(777))
    config, tokenizer = serve._prepare_simulated(SIMULATED, ServerConfig())
    assert config.simulated.vocab_size == 777
    assert tokenizer is not None
    given = dataclasses.replace(SIMULATED, simulated=SimulatedConfig(vocab_size=300))
    config, tokenizer = serve._prepare_simulated(given, ServerConfig(sim_vocab_from_tokenizer=False))
    assert config.simulated.vocab_size == 300


def test_a_model_s_config_decides_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = dataclasses.replace(SIMULATED, model=ModelConfig(model=str(tmp_path)))
    assert serve._prepare_simulated(config, ServerConfig()) == (config, None)
    assert serve._model_name(config) == tmp_path.name


def test_a_socket_is_bound_before_it_listens() -> None:
    with serve.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        listener.listen()
        with pytest.raises(ConfigError, match=f"--port {port}"):
            serve.bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        serve.bind("no.such.host.invalid", 0)
