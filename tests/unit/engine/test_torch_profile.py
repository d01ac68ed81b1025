"""Recordings of what torch did."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from atom.engine.errors import RequestError
from atom.engine.executors.torch_profile import TorchProfile


def test_a_recording_holds_named_steps_and_operators(tmp_path: Path) -> None:
    profile = TorchProfile()
    profile.start(str(tmp_path / "new" / "folder"))
    with profile.span("step 7"):
        torch.ones(4, 4) @ torch.ones(4, 4)
    path = Path(profile.stop())
    assert path.parent == tmp_path / "new" / "folder"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"step 7", "aten::mm"} <= names


def test_spans_cost_nothing_while_none_is_recorded(tmp_path: Path) -> None:
    profile = TorchProfile()
    with profile.span("step 1"):
        torch.ones(1)
    assert list(tmp_path.iterdir()) == []


def test_wrong_calls_and_places_are_clear_errors(tmp_path: Path) -> None:
    profile = TorchProfile()
    with pytest.raises(RequestError, match="no profile is being recorded"):
        profile.stop()
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot create"):
        profile.start(str(tmp_path / "file"))
    profile.start(str(tmp_path))
    with pytest.raises(RequestError, match="already"):
        profile.start(str(tmp_path))
    assert Path(profile.stop()).exists()
