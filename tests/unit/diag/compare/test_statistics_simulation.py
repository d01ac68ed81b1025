"""What the verdicts get wrong, and what they find, by simulation: 2,000 seeded comparisons a case, through the judge.

The noise is 0.3% per run of one arm, so that one matched run scatters by 0.42% and a pair by 0.3%; half of it is seen
by the blocks of time within the runs, and the second half of the machine is 0.4% faster, unless a case says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from atom.diag.compare.sequential import Boundary, boundary_of
from atom.diag.compare.statistics import Effects, asymmetry, estimate
from atom.diag.compare.verdict import Verdict, evidence_of, judge, judge_all

FloatArray = NDArray[np.float64]

DRAWS = 2_000
PER_ARM = 0.003
HALF = 0.004
CALLED = ("faster", "slower")


def ratios(generator: np.random.Generator, pairs: int, effect: float, noise: FloatArray | None = None) -> FloatArray:
    """[draws, pairs, 2] ln(head/base); `noise` [draws, pairs, 2]: of a matched run, instead of the normal one."""
    shape = (DRAWS, pairs, 2)
    scatter = generator.normal(0, PER_ARM * 2**0.5, shape) if noise is None else noise
    return np.asarray(np.log1p(effect) + scatter + np.array([HALF, -HALF]))


def within(generator: np.random.Generator, pairs: int, share: float = 0.5) -> FloatArray:
    """[draws, pairs] what a bootstrap of some 30 blocks says of the share of variance that is within runs."""
    return np.asarray(PER_ARM * share**0.5 * np.sqrt(generator.chisquare(30, (DRAWS, pairs)) / 30))


def comparisons(log_ratios: FloatArray, within_se: FloatArray | None = None) -> Iterator[Effects]:
    nothing = np.full(log_ratios.shape[:2], np.nan)
    for one, se in zip(log_ratios, nothing if within_se is None else within_se, strict=True):
        yield Effects(one, se)


def share_of(verdicts: list[Verdict], *words: str) -> float:
    return sum(one.word in words for one in verdicts) / len(verdicts)


def verdicts_of(log_ratios: FloatArray, within_se: FloatArray | None = None) -> list[Verdict]:
    return [judge(evidence_of(one, better="lower")) for one in comparisons(log_ratios, within_se)]


@pytest.mark.parametrize("pairs", [2, 3, 4, 8])
def test_no_difference_is_called_at_most_one_time_in_twenty(pairs: int) -> None:
    generator = np.random.default_rng(pairs)
    assert share_of(verdicts_of(ratios(generator, pairs, 0.0), within(generator, pairs)), *CALLED) <= 0.05


def test_where_nothing_is_known_within_runs_the_level_is_exact() -> None:
    """Then the interval is Student's own: 5%, give or take what 2,000 draws can tell."""
    generator = np.random.default_rng(1)
    assert share_of(verdicts_of(ratios(generator, 3, 0.0)), *CALLED) == pytest.approx(0.05, abs=0.0125)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_percent_is_found_with_four_pairs(share: float) -> None:
    """The stated number of pairs: 4, in at least 80% (95% in fact); with the default of 3 it is about 80%."""
    generator = np.random.default_rng(11)
    verdicts = verdicts_of(ratios(generator, 4, 0.01), within(generator, 4, share))
    assert share_of(verdicts, "slower") >= 0.95
    assert share_of(verdicts, "faster") == 0
    three = verdicts_of(ratios(generator, 3, 0.01), within(generator, 3, share))
    assert share_of(three, "slower") >= 0.7


def test_two_percent_is_found_with_the_default_of_three_pairs() -> None:
    generator = np.random.default_rng(12)
    assert share_of(verdicts_of(ratios(generator, 3, -0.02), within(generator, 3)), "faster") >= 0.98


def test_unequal_halves_cancel_however_unequal() -> None:
    """One half 5% faster, sixteen times the noise: neither a difference is made of it, nor one hidden."""
    generator = np.random.default_rng(13)
    tilt = np.array([0.05, -0.05])
    assert share_of(verdicts_of(ratios(generator, 4, 0.0) + tilt, within(generator, 4)), *CALLED) <= 0.05
    slower = ratios(generator, 4, 0.01) + tilt
    assert share_of(verdicts_of(slower, within(generator, 4)), "slower") >= 0.95
    found = [asymmetry(one).mean for one in comparisons(slower)]
    assert np.mean(found) == pytest.approx(0.05 + HALF, abs=3e-4)
    # The same figures without the swap: every comparison calls the half's speed a difference.
    unswapped = slower - np.log1p(0.01)
    unswapped[:, :, 1] = np.nan
    assert share_of(verdicts_of(unswapped), *CALLED) > 0.95


@pytest.mark.parametrize("kind", ["steady", "wandering"])
def test_drift_cancels_in_abba_order(kind: str) -> None:
    """One device: base, head, head, base. A machine that slows by 0.5% from run to run, or wanders by as much as the
    noise, makes no difference; a true one is found all the same."""
    generator = np.random.default_rng(14)
    pairs = 5
    steps = np.full((DRAWS, pairs * 4), 0.005) if kind == "steady" else generator.normal(0, 0.003, (DRAWS, pairs * 4))
    level = np.cumsum(steps, axis=1).reshape(DRAWS, pairs, 4)
    noise = generator.normal(0, PER_ARM, (DRAWS, pairs, 4))
    runs = level + noise  # base, head, head, base
    log_ratios = np.stack([runs[:, :, 1] - runs[:, :, 0], runs[:, :, 2] - runs[:, :, 3]], axis=2)
    assert share_of(verdicts_of(log_ratios, within(generator, pairs)), *CALLED) <= 0.05
    assert share_of(verdicts_of(log_ratios + np.log1p(0.01), within(generator, pairs)), "slower") >= 0.8


@pytest.mark.parametrize("kind", ["one run in ten slower by 5%", "student t of 2", "lognormal bursts"])
def test_outliers_and_heavy_tails_make_no_difference(kind: str) -> None:
    generator = np.random.default_rng(15)
    runs = generator.normal(0, PER_ARM, (DRAWS, 6, 2, 2))
    if kind == "one run in ten slower by 5%":
        runs += 0.05 * (generator.random(runs.shape) < 0.1)
    elif kind == "student t of 2":
        runs = PER_ARM * generator.standard_t(2, runs.shape)
    else:
        runs += generator.lognormal(np.log(0.002), 1.5, runs.shape)
    noise = runs[..., 1] - runs[..., 0]
    assert share_of(verdicts_of(ratios(generator, 6, 0.0, noise), within(generator, 6)), *CALLED) <= 0.05
    verdicts = verdicts_of(ratios(generator, 6, 0.05, noise), within(generator, 6))
    assert share_of(verdicts, "slower") >= 0.6  # power is lost, truth is not
    assert share_of(verdicts, "faster") <= 0.001


def test_an_aa_floor_hides_no_difference_that_four_pairs_find() -> None:
    generator = np.random.default_rng(16)
    control = comparisons(ratios(generator, 2, 0.0), within(generator, 2))
    head = comparisons(ratios(generator, 4, 0.01), within(generator, 4))
    verdicts = [
        judge(evidence_of(one, better="lower", control=aa, margin_pct=0.5))
        for one, aa in zip(head, control, strict=True)
    ]
    assert share_of(verdicts, "slower") >= 0.9


@pytest.mark.parametrize("pairs", [3, 6])
def test_what_differs_by_the_margin_is_not_called_equivalent(pairs: int) -> None:
    generator = np.random.default_rng(17)
    found = comparisons(ratios(generator, pairs, 0.01), within(generator, pairs))
    verdicts = [judge(evidence_of(one, better="lower", margin_pct=1.0)) for one in found]
    assert share_of(verdicts, "equivalent") <= 0.05


def test_many_metrics_of_several_loads_are_corrected() -> None:
    """Three loads of a primary and two secondary metrics that go together as metrics do: no difference anywhere, and
    in at most 5% of comparisons any primary one is called, and any secondary one: two families, so that anything at
    all is in at most 10%, as is said beside the tables."""
    generator = np.random.default_rng(18)
    loads, metrics, pairs = 3, 3, 3
    shared = generator.normal(0, PER_ARM, (DRAWS, loads, 1, pairs, 2))
    own = generator.normal(0, PER_ARM, (DRAWS, loads, metrics, pairs, 2))
    noise = shared + own
    primary = {(load, 0) for load in range(loads)}
    blocks = within(generator, pairs, 0.25)
    called, uncorrected = {"primary": 0, "secondary": 0, "any": 0}, 0
    for draw, within_se in zip(noise, blocks, strict=True):
        evidence = {
            (load, metric): evidence_of(Effects(draw[load, metric], within_se), better="lower")
            for load in range(loads)
            for metric in range(metrics)
        }
        words = {key: verdict.word for key, verdict in judge_all(evidence, primary).items()}
        called["primary"] += any(words[key] in CALLED for key in primary)
        called["secondary"] += any(word in CALLED for key, word in words.items() if key not in primary)
        called["any"] += any(word in CALLED for word in words.values())
        uncorrected += any(one.estimate.p <= 0.05 for one in evidence.values())
    assert called["primary"] / DRAWS <= 0.05
    assert called["secondary"] / DRAWS <= 0.05
    assert called["any"] / DRAWS <= 0.10
    assert uncorrected / DRAWS > 0.05  # what the correction is for


def until_decided(found: Effects, boundary: Boundary, margin_pct: float | None = None) -> tuple[Verdict, int]:
    """As the conductor does it: a look after each pair, until the verdict is decided or no more pairs are allowed."""
    for n in boundary.looks:
        so_far = Effects(found.log_ratios[:n], found.within_se[:n])
        verdict = judge(evidence_of(so_far, better="lower", margin_pct=margin_pct, boundary=boundary))
        if verdict.decided:
            break
    return verdict, n


@pytest.mark.parametrize("blocks", [True, False])
def test_adding_pairs_until_it_is_decided_errs_no_more_often(blocks: bool) -> None:
    generator = np.random.default_rng(19)
    boundary = boundary_of(3, 8)
    null = ratios(generator, 8, 0.0)
    ends = [until_decided(one, boundary) for one in comparisons(null, within(generator, 8) if blocks else None)]
    assert share_of([verdict for verdict, _ in ends], *CALLED) <= 0.05


def test_peeking_at_the_plain_interval_would_err_twice_as_often() -> None:
    generator = np.random.default_rng(20)
    peeked = sum(
        any(estimate(Effects(one.log_ratios[:n], one.within_se[:n])).p <= 0.05 for n in range(3, 10))
        for one in comparisons(ratios(generator, 9, 0.0))
    )
    assert peeked / DRAWS > 0.1


def test_until_decided_finds_one_percent_in_about_five_pairs() -> None:
    generator = np.random.default_rng(21)
    boundary = boundary_of(3, 12)
    ends = [until_decided(one, boundary) for one in comparisons(ratios(generator, 12, 0.01), within(generator, 12))]
    assert share_of([verdict for verdict, _ in ends], "slower") >= 0.98
    assert np.mean([n for _, n in ends]) < 5.5


def test_until_decided_calls_nothing_equivalent_that_differs_by_the_margin() -> None:
    generator = np.random.default_rng(22)
    boundary = boundary_of(3, 6)
    found = comparisons(ratios(generator, 6, 0.01), within(generator, 6))
    ends = [until_decided(one, boundary, margin_pct=1.0) for one in found]
    assert share_of([verdict for verdict, _ in ends], "equivalent") <= 0.05


def test_repeated_intervals_all_cover_the_truth_together() -> None:
    generator = np.random.default_rng(23)
    boundary = boundary_of(3, 7)
    covered = 0
    for one in comparisons(ratios(generator, 7, 0.01)):
        looks = [boundary.estimate(Effects(one.log_ratios[:n], one.within_se[:n])) for n in boundary.looks]
        covered += all(look.low <= np.log1p(0.01) <= look.high for look in looks)
    assert covered / DRAWS == pytest.approx(0.95, abs=0.0125)


def test_until_decided_over_several_loads_is_corrected() -> None:
    """Three loads, each with pairs of its own until all are decided: at most 5% call any."""
    generator = np.random.default_rng(24)
    boundary = boundary_of(3, 5)
    noise = generator.normal(0, PER_ARM * 2**0.5, (DRAWS, 3, 5, 2))
    blocks = within(generator, 5)
    called = 0
    for draw, within_se in zip(noise, blocks, strict=True):
        seen: set[str] = set()
        for n in boundary.looks:
            evidence = {
                load: evidence_of(Effects(draw[load, :n], within_se[:n]), better="lower", boundary=boundary)
                for load in range(3)
            }
            seen |= {verdict.word for verdict in judge_all(evidence, {0, 1, 2}).values()}
        called += bool(seen & set(CALLED))
    assert called / DRAWS <= 0.05
