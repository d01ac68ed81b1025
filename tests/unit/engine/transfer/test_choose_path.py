"""Which data path is used, and what is said about it."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace

import pytest

from atom.engine.errors import ConfigError
from atom.engine.transfer import choose_path, nixl_path
from atom.engine.transfer.choose_path import open_data_path
from atom.engine.transfer.nixl_path import find_nixl
from atom.engine.transfer.pool_layout import Piece, PoolLayout

LAYOUT = PoolLayout(4, "test", [Piece(0, "k", 0, 0, 1, 64)])


def no_nixl(name: str) -> ModuleType:
    raise ModuleNotFoundError(f"No module named '{name}'", name=name.partition(".")[0])


def test_without_nixl_memory_is_shared_and_why_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nixl_path.importlib, "import_module", no_nixl)
    with caplog.at_level(logging.INFO):
        path, said = open_data_path("auto", LAYOUT)
    assert path.close()
    assert said == "KV transfer by shared-memory (NIXL is not installed; one host only)"
    assert caplog.messages == [said]


def test_nixl_that_is_missing_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_path.importlib, "import_module", no_nixl)
    with pytest.raises(ConfigError, match=r"KV transfer over nixl: NIXL is not installed: pip install.*\[nixl\]"):
        open_data_path("nixl", LAYOUT)


def test_nixl_that_is_broken_says_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        if name.startswith("nixl_cu12"):
            raise ImportError("libcuda.so.1: cannot open shared object file")
        return no_nixl(name)

    monkeypatch.setattr(nixl_path.importlib, "import_module", broken)
    assert find_nixl() == "NIXL cannot be imported: libcuda.so.1: cannot open shared object file"


def test_nixl_without_a_transport_is_an_error_if_asked_for_and_else_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no UCX")

    api = SimpleNamespace(nixl_agent=fail, nixl_agent_config=lambda **_: None)
    for module in (nixl_path, choose_path):
        monkeypatch.setattr(module, "find_nixl", lambda: api)
    with pytest.raises(ConfigError, match="does not start with UCX: no UCX"):
        open_data_path("nixl", LAYOUT)
    path, said = open_data_path("auto", LAYOUT)
    assert path.close()
    assert path.kind == "shared-memory"
    assert "no UCX" in said


def test_an_unknown_choice_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="KV transfer over 'rdma': must be one of auto, nixl, shared-memory"):
        open_data_path("rdma", LAYOUT)
