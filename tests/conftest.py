"""Fixtures that every room's tests may use. Checkpoints to order: `from tests.tiny_models import write_checkpoint`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from atom.engine.errors import ModelLoadError

# A suite that runs under nohup or as a shell's background job has these ignored, and every process that a test starts
# would inherit that and rightly ignore them too.
for _signal, _handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _handler)


@pytest.fixture(autouse=True)
def interrupts_as_they_were() -> Iterator[None]:
    """The command's `main` ends with SIGINT ignored, as a process that is about to end may. A test that calls it here
    would leave that to every process that later tests start."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama directory: float32, grouped queries, untied embeddings. Shared: do not write to it."""
    from tests.tiny_models import write_checkpoint  # imports torch, which most rooms' tests do without

    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 directory: float32, QK-norm, tied embeddings, head_dim apart from hidden size. Do not write to it."""
    from tests.tiny_models import tiny_config, write_checkpoint

    config = tiny_config("Qwen3ForCausalLM", head_dim=24, tie_word_embeddings=True)
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny-qwen3", config)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's GGUF file; skips where the package is not installed."""
    from atom.engine.loading.embedded import embedded_model_path

    try:
        return embedded_model_path()
    except ModelLoadError as error:
        pytest.skip(str(error))
