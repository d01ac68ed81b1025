"""The stated times of a pipeline: the same for every arm, spread as stated, and wrong configurations are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.errors import ConfigError
from atom.engine.probes.stage_model import ArmConfig
from atom.engine.transfer.outcome import Outcome, Round


def values(**changes: Any) -> dict[str, Any]:
    base = {"run": "r", "arm": "a", "mode": "async", "trace_dir": "t", "pp": 2, "stage_ms": [10, 20], "requests": 100}
    return {**base, **changes}


@given(st.integers(0, 1 << 30), st.integers(0, 99), st.integers(0, 1), st.floats(0, 1))
def test_arms_of_one_seed_have_the_same_times_within_the_jitter(
    seed: int, number: int, stage: int, jitter: float
) -> None:
    one = ArmConfig.of(values(seed=seed, jitter=jitter))
    other = ArmConfig.of(values(seed=seed, jitter=jitter, mode="blocking", arm="b"))
    assert one.forward_s(number, stage) == other.forward_s(number, stage)
    assert one.transfer(number, stage) == other.transfer(number, stage)
    stated = one.stage_ms[stage] / 1e3
    assert (1 - jitter) * stated - 1e-12 <= one.forward_s(number, stage) <= (1 + jitter) * stated + 1e-12


def test_faults_come_as_often_as_stated() -> None:
    config = ArmConfig.of(values(failures=0.2, timeouts=0.1, requests=4000))
    transfers = [config.transfer(number, rank) for number in range(4000) for rank in range(2)]
    stuck = sum(one.seconds == float("inf") for one in transfers)
    failed = sum(one.outcome is Outcome.FAILED for one in transfers) - stuck
    assert 0.08 < stuck / len(transfers) < 0.12
    assert 0.17 < failed / len(transfers) < 0.23


def test_ids_are_used_again_with_the_next_epoch() -> None:
    config = ArmConfig.of(values(ids=16))
    assert (config.round(0), config.round(15), config.round(16)) == (Round(0, 0), Round(15, 0), Round(0, 1))
    assert ArmConfig.of(values()).round(99) == Round(99, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": "maybe"}, "mode must be one of async, blocking, local-only, none, got 'maybe'"),
        ({"stage_ms": [1]}, r"stage_ms must be one time for each of 2 stages"),
        ({"stage_ms": [1, -1]}, "stage_ms must be milliseconds"),
        ({"failures": 1.5}, "failures must be a fraction from 0 to 1, got 1.5"),
        ({"ids": 3}, "ids must be 0, or at least the depth 16, got 3"),
        ({"requests": 0}, "requests must be 1 to"),
        ({"colour": "red"}, "unknown field colour"),
        ({"deadline_s": 0}, "deadline_s must be seconds"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ArmConfig.of(values(**changes))


def test_a_missing_field_is_named() -> None:
    given_values = values()
    del given_values["arm"]
    with pytest.raises(ConfigError, match="'arm'"):
        ArmConfig.of(given_values)
