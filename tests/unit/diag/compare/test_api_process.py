"""Which arm's API process pays more with every request: from recorded captures of servers that never existed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atom.cli.ab_section_tables import api_process_section_tables
from atom.cli.render import markdown
from atom.diag.compare.api_process import api_process_section, shown_profiles
from atom.recipes.errors import UsageError

FAKE = Path(__file__).parents[1] / "gc_profile" / "conftest.py"


def _fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("synthetic_runs", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SyntheticRun = _fake().SyntheticRun


def flat(path: Path, **fields: Any) -> Path:
    passes = [(second, 0.002) for second in range(5, 120, 5)]
    written: Path = SyntheticRun(path, **{"passes": passes, **fields}).write()
    return written


def leaking(path: Path, factor: float = 1.0, **fields: Any) -> Path:
    """Pauses and memory grow; nothing else does."""
    passes = [(second, 0.002 + factor * 0.001 * second) for second in range(5, 120, 3)]
    rss = {"rss_mb": lambda t: 100.0 + factor * t / 2}
    written: Path = SyntheticRun(path, **{"passes": passes, **rss, **fields}).write()
    return written


def section(base: list[Path], head: list[Path]) -> dict[str, Any]:
    told = api_process_section(base, head, base_label="main", head_label="branch")
    json.dumps(told, allow_nan=False)
    return told


def findings(told: Mapping[str, Any]) -> dict[str, str | None]:
    return {q["quantity"]: q["finding"] for q in told["quantities"]}


def test_the_arm_that_leaks_is_exposed(tmp_path: Path) -> None:
    told = section([flat(tmp_path / "a")], [leaking(tmp_path / "b")])
    assert told["exposed"] == ["branch"]
    assert findings(told)["rss_mb"] == findings(told)["gen2_pause_ms"] == "head"
    assert findings(told)["metrics_series"] == "neither"
    assert "branch pays more with every request that it serves, main does not" in told["verdict"]
    assert "per 1,000 requests" in told["verdict"]
    back = section([leaking(tmp_path / "c")], [flat(tmp_path / "d")])
    assert back["exposed"] == ["main"]


def test_two_arms_alike_expose_nobody(tmp_path: Path) -> None:
    told = section([flat(tmp_path / "a")], [flat(tmp_path / "b", seed=1)])
    assert told["exposed"] == []
    assert set(findings(told).values()) <= {"neither", None}
    assert "Nothing is seen to grow in one arm alone." in told["verdict"]
    both = section([leaking(tmp_path / "c")], [leaking(tmp_path / "d", seed=1)])
    assert both["exposed"] == []
    assert findings(both)["rss_mb"] == "both"
    assert "Grows in both arms alike" in both["verdict"]


def test_how_many_times_as_fast_both_grow(tmp_path: Path) -> None:
    told = section([leaking(tmp_path / "a")], [leaking(tmp_path / "b", factor=4.0)])
    (rss,) = (q for q in told["quantities"] if q["quantity"] == "rss_mb")
    assert rss["finding"] == "both"
    assert rss["ratio"] == pytest.approx(4.0, rel=0.05)
    assert "API RSS grows in both, 4.0 times as fast in branch as in main" in told["verdict"]


def test_one_bad_run_of_several_does_not_expose(tmp_path: Path) -> None:
    """Most runs of an arm have to grow, and the slopes of all of them to lie beyond the other arm's."""
    base = [flat(tmp_path / "a")]
    head = [flat(tmp_path / f"b{i}", seed=i) for i in range(2)] + [leaking(tmp_path / "b2")]
    assert section(base, head)["exposed"] == []


def test_the_tables_have_both_arms_windows(tmp_path: Path) -> None:
    told = json.loads(json.dumps(section([flat(tmp_path / "a")], [leaking(tmp_path / "b")])))
    text = markdown(api_process_section_tables(told))
    for words in ("main: gen-2 share", "branch: API RSS (MB)", "0–20", "grows in branch alone", "branch pays more"):
        assert words in text
    tables = api_process_section_tables(told, width=60)
    assert tables[0].lead == [told["verdict"]]
    assert [profile.label for profile in shown_profiles(told)] == ["main", "branch"]


def test_too_little_is_said_to_be_too_little(tmp_path: Path) -> None:
    told = section([flat(tmp_path / "a", seconds=6.0)], [flat(tmp_path / "b", seconds=6.0)])
    assert told["exposed"] == []
    assert set(findings(told).values()) == {None}
    assert told["verdict"].startswith("Not enough data for ")


def test_an_arm_without_a_run_is_named(tmp_path: Path) -> None:
    told = section([flat(tmp_path / "a")], [tmp_path / "nowhere"])
    assert told["quantities"] == []
    assert told["verdict"] == "Not compared: an arm has no run that can be read."
    assert "branch: " in told["notes"][-1]
    assert markdown(api_process_section_tables(told))
    assert api_process_section_tables(None) == []


def test_a_damaged_section_is_one_line(tmp_path: Path) -> None:
    told = section([flat(tmp_path / "a")], [flat(tmp_path / "b")])
    del told["arms"][0]["runs"][0]["windows"]
    with pytest.raises(UsageError, match="damaged"):
        shown_profiles(told)
