"""Who held up the slow tokens, where that is known: passes, renders, both, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.diag.gc_profile.attribution import Pauses, compare
from atom.diag.gc_profile.model import SlowEvents
from atom.diag.gc_profile.profile import profile_run

Builder = Callable[..., Any]
Array = Any


def random_pauses(seed: int, n: int, seconds: float = 0.25, span: float = 120.0) -> list[tuple[float, float]]:
    rng = np.random.default_rng(seed)
    return [(float(start), seconds) for start in rng.uniform(0, span - seconds, n)]


def first_tokens(run: Any, shifts: int = 200) -> SlowEvents:
    found = profile_run(run.write(), shifts=shifts).attribution.first_tokens
    assert found is not None
    return found


# ---- how much pauses cover ---------------------------------------------------------------------------------------

interval = st.tuples(st.floats(0, 100), st.floats(0, 30))


@settings(max_examples=100, deadline=None)
@given(st.lists(interval, max_size=8), st.floats(0, 100), st.floats(0, 50), st.floats(0, 100))
def test_covered_is_what_counting_gives(pauses: list[Any], begin: float, length: float, shift: float) -> None:
    start = np.array([one for one, _ in pauses])
    stop = start + np.array([long for _, long in pauses])
    made = Pauses(start, stop, 100.0)
    begin, end = min(begin, 100.0), min(begin + length, 100.0)
    got = float(made.moved(shift).covered(np.array([begin]), np.array([end]))[0])
    grid = np.linspace(begin, end, 4001)
    moments = (grid[:-1] + grid[1:]) / 2
    inside = np.zeros(len(moments), dtype=bool)
    for one, other in zip(start, np.minimum(stop, 100.0), strict=True):
        inside |= ((moments - shift) % 100.0 >= one) & ((moments - shift) % 100.0 < other)
    assert got == pytest.approx(inside.mean() * (end - begin), abs=0.01 * (end - begin) + 1e-6)


# ---- causes of slow first tokens ---------------------------------------------------------------------------------


def test_pauses_that_delay_tokens_are_found(synthetic: Builder) -> None:
    pauses = random_pauses(1, 20)
    found = first_tokens(synthetic(passes=pauses, stalls=pauses))
    assert found.slow >= 20
    assert found.in_pass == found.slow
    assert found.neither == 0
    assert found.lift_pass is not None
    assert found.lift_pass_high is not None
    assert found.lift_pass > max(5, found.lift_pass_high)
    assert found.p_pass is not None
    assert found.p_pass < 0.01
    assert found.excess_in_pass_s == pytest.approx(found.excess_s, rel=0.1)


def test_pauses_that_have_nothing_to_do_with_it_have_a_lift_of_about_one(synthetic: Builder) -> None:
    lifts, outside = [], 0
    for seed in range(5):
        run = synthetic(f"run-{seed}", passes=random_pauses(seed, 60), stalls=random_pauses(100 + seed, 40))
        found = first_tokens(run, shifts=100)
        assert found.lift_pass is not None
        assert found.lift_pass_low is not None
        assert found.lift_pass_high is not None
        outside += not found.lift_pass_low <= found.lift_pass <= found.lift_pass_high
        lifts.append(found.lift_pass)
    assert np.mean(lifts) == pytest.approx(1.0, abs=0.35)
    assert outside <= 1


def scrapes(run: Any, every: float, ms: float) -> list[tuple[float, float]]:
    """What the builder scrapes: when, and how long at least."""
    return [(0.3 + every * i, ms / 1e3) for i in range(int(run.seconds / every))]


def test_renders_on_the_loop_are_found(synthetic: Builder) -> None:
    run = synthetic(scrape_ms=lambda _: 150)
    run.stalls = scrapes(run, 1.0, 150)
    found = first_tokens(run)
    assert found.in_pass == 0
    assert found.in_render is not None
    assert found.in_render >= 0.9 * found.slow
    assert found.lift_render is not None
    assert found.lift_render_high is not None
    assert found.lift_render > found.lift_render_high


def test_passes_and_renders_each_get_theirs(synthetic: Builder) -> None:
    run = synthetic(scrape_ms=lambda _: 150)
    renders = scrapes(run, 1.0, 150)
    pauses = [(start + 0.5, 0.2) for start, _ in renders[::4]]
    run.passes, run.stalls = pauses, [*pauses, *renders]
    found = first_tokens(run)
    assert found.in_pass is not None
    assert found.in_render is not None
    assert found.in_pass > 20
    assert found.in_render > 20
    assert found.in_both == 0
    assert found.neither == 0


def test_only_what_covers_the_excess_explains_a_long_wait() -> None:
    """3 s in a queue with 50 ms of passes in them: no pass explains that."""
    start = np.arange(0.0, 99.0, 1.0)
    stop = start + np.where(np.arange(99) % 10 == 0, 0.9, 0.1)
    passes = Pauses(start + 0.2, start + 0.25, 100.0)
    found = compare("first token", start, stop, passes, None, shifts=50, rng=np.random.default_rng(0))
    assert found is not None
    assert found.events.slow > 0
    assert found.events.in_pass == 0
    assert found.events.in_render is None
    assert found.events.lift_render is None


def test_many_slow_events_are_counted_whole(synthetic: Builder) -> None:
    rng = np.random.default_rng(0)
    start = np.sort(rng.uniform(0, 100, 1_000_000))
    slow = rng.random(len(start)) < 0.04
    passes = Pauses(np.arange(0.0, 100.0, 2.0), np.arange(0.0, 100.0, 2.0) + 0.2, 100.0)
    stop = np.minimum(start + np.where(slow, 0.1, 0.01), 100.0)
    found = compare("chunk gap", start, stop, passes, None, shifts=50, rng=rng)
    assert found is not None
    assert found.events.slow == pytest.approx(40_000, rel=0.05)
    assert found.events.lift_pass == pytest.approx(1.0, abs=0.1)


def test_too_few_events(synthetic: Builder) -> None:
    profile = profile_run(synthetic(seconds=3).write())
    assert profile.attribution.first_tokens is None
    assert profile.attribution.note == "28 first tokens seen, 50 needed"


def test_without_a_hook_passes_are_not_known(synthetic: Builder) -> None:
    found = first_tokens(synthetic(with_hook=False, stalls=random_pauses(1, 20)))
    assert found.in_pass is None
    assert found.lift_pass is None
    assert found.in_render is not None


def test_the_same_seed_gives_the_same_attribution(synthetic: Builder) -> None:
    directory = synthetic(passes=random_pauses(1, 20), stalls=random_pauses(2, 20)).write()
    assert profile_run(directory, seed=3).attribution == profile_run(directory, seed=3).attribution
