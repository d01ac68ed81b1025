"""What is said of speculative decoding beside an accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atom.bench.gsm8k.speculation import speculation_of
from atom.bench.rundir import RunDirectory

SECOND = 1_000_000_000


def state(tmp_path: Path, run: dict[str, Any]) -> str:
    return speculation_of(RunDirectory(tmp_path / "run"), run, 10 * SECOND, 20 * SECOND).state


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, "not reported"),
        ({"server": {"command": None, "env": None}, "target": {}}, "not reported"),
        ({"server": {"command": ["vllm", "serve", "m", "--speculative-config", '{"method": "mtp"}']}}, "on"),
        ({"server": {"command": ["sglang", "--speculative-algorithm", "EAGLE"]}}, "on"),
        ({"server": {"command": ["atom", "--spec-decode-acceptance-length", "2.99"]}}, "forced"),
        (
            {"server": {"command": ["v", "--speculative-config", '{"synthetic_acceptance_length": 2.9}']}},
            "forced",
        ),
        ({"server": {"env": {"SGLANG_SIMULATE_ACC_LEN": "3"}}}, "forced"),
        ({"server": {"env": {"SGLANG_SIMULATE_ACC_LEN": "-1"}}}, "not reported"),
        ({"server": {"env": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": "1"}}}, "forced"),
        ({"target": {"speculation": "speculative_config=None, tokenizer='m'"}}, "off"),
        ({"target": {"speculation": "speculative_algorithm=null"}}, "off"),
        ({"target": {"speculation": 'speculative_algorithm="EAGLE"'}}, "on"),
        (
            {
                "target": {
                    "speculation": "speculative_config=SpeculativeConfig(method='mtp', "
                    "rejection_sample_method='standard', synthetic_acceptance_rates=None)"
                }
            },
            "on",
        ),
        ({"target": {"speculation": "speculative_config=C(rejection_sample_method='synthetic')"}}, "forced"),
    ],
)
def test_how_the_server_was_started_and_what_it_says(tmp_path: Path, run: dict[str, Any], expected: str) -> None:
    assert state(tmp_path, run) == expected


def test_settings_alone_do_not_make_acceptance_real(tmp_path: Path) -> None:
    found = speculation_of(RunDirectory(tmp_path / "run"), {"target": {"speculation": "speculative_algorithm=X"}}, 0, 1)
    assert "real" not in found.text
    assert "no counters" in found.text


def test_counters_within_the_window(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    scrapes = [(2, 900, 100), (10, 1000, 500), (15, 1100, 800), (20, 1200, 980), (40, 9000, 9000)]
    lines = [
        json.dumps({"sent_ns": at * SECOND, "values": {"drafts": drafts, "accepted_tokens": accepted}})
        for at, drafts, accepted in scrapes
    ]
    (run_dir.server / "metrics-api.jsonl").write_text("\n".join([*lines, '{"sent_ns": 1', "[]"]))
    found = speculation_of(run_dir, {}, 10 * SECOND, 20 * SECOND)
    assert found.state == "real"
    assert "3.40 tokens a step (200 drafts verified)" in found.text


def test_forced_acceptance_is_said_even_with_counters(tmp_path: Path) -> None:
    text = speculation_of(
        RunDirectory(tmp_path / "run"), {"server": {"env": {"SGLANG_SIMULATE_ACC_LEN": "3"}}}, 0, 1
    ).text
    assert "FORCED" in text
