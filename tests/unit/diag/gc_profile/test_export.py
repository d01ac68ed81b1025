"""Profiles as JSON and JUnit."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

from atom.diag.gc_profile.export import profile_json, profile_junit
from atom.diag.gc_profile.gates import check_gates, parse_gates
from atom.diag.gc_profile.model import Attribution, Profile, Totals, Window


def profile(label: str = "main", **more: Any) -> Profile:
    given: dict[str, Any] = {
        "label": label,
        "directory": "run",
        "simulated": False,
        "old_object_passes": "gen-2 passes",
        "window_s": 300.0,
        "windows": (Window(start_s=0, end_s=300, gen2_share=0.02),),
        "totals": Totals(duration_s=300.0, gen2_share=0.02, gen2_seconds=float("nan"), metrics_series=44),
        "growth": {},
        "attribution": Attribution(first_tokens=None, chunk_gaps=None, shifts=0),
        "causes": (),
        "verdict": "no",
        "is_problem": False,
        "processes": (),
        "growing_families": {"a": (1, 2)},
        "validity": "valid",
    }
    return Profile(**{**given, **more})


def test_json_has_the_named_keys_and_every_arm() -> None:
    arms = [profile(), profile("branch")]
    result = json.loads(
        json.dumps(profile_json(arms, check_gates(arms, parse_gates(["gen2_share>1%"]))), allow_nan=False)
    )
    assert result["schema_version"].startswith("1.")
    for key in ("gen2_passes", "gen2_seconds", "gen2_share", "metrics_series", "metrics_body_bytes", "growth"):
        assert key in result
    assert result["windows"][0] | {"start_s": 0, "end_s": 300, "gen2_share": 0.02} == result["windows"][0]
    assert result["gen2_seconds"] is None
    assert result["windows"][0]["metrics_p50_ms"] is None
    assert [arm["label"] for arm in result["arms"]] == ["main", "branch"]
    assert result["label"] == "main"
    assert [gate["outcome"] for gate in result["gates"]] == ["failed", "failed"]


def test_junit_has_gates_and_evidence() -> None:
    arms = [profile("a<&\x00"), profile("b", validity=None, totals=Totals(duration_s=1.0), notes=("cut\noff",))]
    results = check_gates(arms, parse_gates(["gen2_share>1%"]))
    suite = ElementTree.fromstring(profile_junit(arms, results))
    assert suite.attrib | {"tests": "4", "failures": "2", "errors": "1"} == suite.attrib
    states = {case.attrib["name"]: [child.tag for child in case] for case in suite.iter("testcase")}
    assert states == {
        "evidence (a<&)": [],
        "evidence (b)": ["failure"],
        "fail if gen2_share>1% (a<&)": ["failure"],
        "fail if gen2_share>1% (b)": ["error"],
    }
