"""Metrics that disagree, and what the records show of why."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.bench.records import Outcome, RequestRecord
from atom.diag.compare.mechanism import disagreement, run_facts
from atom.diag.compare.window import Window

S = 1_000_000_000


def facts(decoding: float, **more: float) -> dict[str, float]:
    return {"waiting": 64 - decoding, "decoding": decoding, "running": 64.0, **more}


def test_facts_of_a_window(tmp_path: Path) -> None:
    """One request after the other: a second of waiting, three of decoding, four tokens in two chunks."""
    records = [
        RequestRecord(
            index=i,
            outcome=Outcome.COMPLETED,
            sent_ns=4 * i * S,
            first_ns=(4 * i + 1) * S,
            last_ns=4 * (i + 1) * S,
            end_ns=4 * (i + 1) * S,
            chunk_ns=[(4 * i + 1) * S, 4 * (i + 1) * S],
            output_tokens=4,
            prompt_tokens=100,
            cached_tokens=25,
        )
        for i in range(10)
    ]
    found = run_facts(tmp_path, records, Window(4 * S, 24 * S, True))
    assert found == {
        "waiting": 0.25,
        "decoding": 0.75,
        "running": 1.0,
        "prompt_rate": 25.0,
        "cached_share": 0.25,
        "output_len": 4.0,
        "tokens_per_chunk": 2.0,
    }


def test_facts_of_nothing(tmp_path: Path) -> None:
    found = run_facts(tmp_path, [], Window(0, S, False))
    assert found == {"waiting": 0.0, "decoding": 0.0, "running": 0.0}
    assert run_facts(tmp_path, [], Window(0, 0, False)) == {}


def test_earlier_admission_is_told_from_its_traces() -> None:
    findings = {"itl_p50": ("slower", 4.0), "itl_p99": ("slower", 9.0), "ttft_mean": ("faster", -20.0)}
    runs = [(facts(40 + i, prompt_rate=9000), facts(48 + i, prompt_rate=9500)) for i in range(4)]
    lines = disagreement(findings, runs)
    assert lines == [
        "metrics disagree: TTFT mean (−20.0%) better, ITL p50 (+4.0%) worse",
        "in the windows of every matched run: requests waiting for their first token 22.5 → 14.5; requests decoding "
        "41.5 → 49.5; prompts 9,000 → 9,500 tok/s. Requests are admitted earlier, so more of them share a step, and "
        "steps take longer",
    ]


@pytest.mark.parametrize(
    ("findings", "base", "head", "why"),
    [
        ({"itl_p50": "faster", "ttft_p50": "slower"}, 40, 30, "Requests wait longer before they are admitted"),
        ({"itl_p50": "faster", "output_throughput": "slower"}, 40, 30, "Steps are shorter because fewer requests"),
        ({"itl_p50": "slower", "output_throughput": "faster"}, 30, 40, "Steps take longer because more requests"),
    ],
)
def test_what_ties_them_together(findings: dict[str, str], base: float, head: float, why: str) -> None:
    told = {name: (word, 5.0 if word == "slower" else -5.0) for name, word in findings.items()}
    assert why in disagreement(told, [(facts(base), facts(head))] * 2)[1]


def test_metrics_that_agree_need_no_words() -> None:
    runs = [(facts(40), facts(50))]
    assert disagreement({"itl_p50": ("faster", -2.0), "output_throughput": ("faster", 2.0)}, runs) == []
    assert disagreement({"itl_p50": ("faster", -2.0), "ttft_mean": ("equivalent", 2.0)}, runs) == []
    assert disagreement({}, runs) == []


def test_what_is_not_the_same_in_every_run_explains_nothing() -> None:
    findings = {"itl_p50": ("slower", 4.0), "ttft_mean": ("faster", -20.0)}
    runs = [(facts(40), facts(48)), (facts(40), facts(39))]
    assert disagreement(findings, runs)[1] == "nothing in the records shows why"
    assert disagreement(findings, [(facts(40), facts(40.1))])[1] == "nothing in the records shows why"


def test_answers_of_another_length_are_said() -> None:
    findings = {"e2el_mean": ("slower", 4.0), "ttft_mean": ("faster", -20.0)}
    line = disagreement(findings, [({"output_len": 60.0}, {"output_len": 64.0})])[1]
    assert "tokens per answer 60.0 → 64.0. Answers are not of the same length" in line
