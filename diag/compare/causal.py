"""Causal comparison of more than two arms: which of them completes the load, what each one's throughput is of that of
its matched control, what follows from that by rule, and how much of the loss a single changed factor explains.

`control` is the arm without the change (the base), `treatment` the one with it (the head, unless another arm has that
role: then the head is what is to be kept, without being called a repair that nobody declared), `bypass` is without
what is suspected, which may remove a guarantee, `repair` is meant to be kept. Any other arm changes one factor of the
treatment: a discriminator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from atom.diag.compare.contrasts import Contrast, Network, Ratio
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.outcomes import ArmOutcome
from atom.diag.compare.statistics import Estimate

__all__ = ["NOT_THIS_HEAD", "Question", "causal_section"]

NOT_THIS_HEAD: Final = "not this head"
DOMINANT: Final = 0.5
"""A factor that explains at least this share of the gap is the dominant one."""
UNRELATED: Final = ("infrastructure",)
"""Classes of failure that say nothing of the arm's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What the arms are compared by."""

    load: str
    metric: str = "output_throughput"
    title: str = "output throughput"
    unit: str = "tok/s"
    margin_pct: float = 1.0
    """Within this of the control is as good as the control."""
    level: float = 0.95


def causal_section(
    arms: Sequence[Arm],
    outcomes: Mapping[str, ArmOutcome],
    estimates: Mapping[tuple[str, str], Estimate],
    question: Question,
    *,
    head_sha: str | None = None,
) -> dict[str, Any] | None:
    """Rows, gap and discriminators of one load, as JSON. None with fewer than three arms.

    `estimates`: by (base, head) of each comparison, the log ratio head / base of the question's metric over its pairs;
    those without a valid pair are left out. `head_sha`: the commit under review; default that of the head's arm.
    """
    if len(arms) < 3:
        return None
    cast = _Cast.of(arms)
    net = Network(estimates)
    shas = [arm.provenance.get("sha") for arm in arms if arm.role == "head"]
    table = _Table(cast, outcomes, net, estimates, question, head_sha or next(iter(shas), None))
    return {
        "load": question.load,
        "metric": question.metric,
        "title": question.title,
        "unit": question.unit,
        "control": cast.control.label,
        "treatment": cast.treatment.label if cast.treatment else None,
        "arms": [table.row(arm) for arm in arms],
        "gap": table.gap(),
        "discriminators": [one for arm in arms if (one := table.discriminator(arm)) is not None],
        "dominant_share": DOMINANT,
    }


@dataclass(frozen=True, slots=True)
class _Cast:
    """Who plays what."""

    control: Arm
    treatment: Arm | None
    roles: Mapping[str, str]
    """By label."""

    @classmethod
    def of(cls, arms: Sequence[Arm]) -> _Cast:
        def first(*roles: str) -> Arm | None:
            return next((arm for role in roles for arm in arms if arm.role == role), None)

        control = first("control", "base") or arms[0]
        treatment = first("treatment", "head")
        roles = {arm.label: arm.role for arm in arms}
        roles[control.label] = "control"
        if treatment is not None:
            roles[treatment.label] = "treatment"
        return cls(control, treatment, roles)


@dataclass(frozen=True, slots=True)
class _Table:
    cast: _Cast
    outcomes: Mapping[str, ArmOutcome]
    net: Network
    estimates: Mapping[tuple[str, str], Estimate]
    question: Question
    head_sha: str | None

    def row(self, arm: Arm) -> dict[str, Any]:
        outcome = self.outcomes.get(arm.label)
        of_control = None if arm is self.cast.control else self._of_control(arm)
        return {
            "arm": arm.label,
            "role": self.cast.roles[arm.label],
            "runs": 0 if outcome is None else outcome.runs,
            "completed": None if outcome is None else outcome.completed,
            "requests": None if outcome is None else outcome.requests,
            "failure": None if outcome is None or outcome.failure is None else dict(outcome.failure),
            "value": None if outcome is None else outcome.value,
            "censored": [] if outcome is None else list(outcome.censored),
            "problem": "was not run" if outcome is None else outcome.problem,
            "pct_of_control": of_control,
            "interpretation": self._interpretation(arm, outcome),
            "sha": arm.provenance.get("sha"),
            "stamp": self._stamp(arm),
        }

    def gap(self) -> dict[str, Any] | None:
        """What the treatment loses (or wins) against its control; None where that has no size."""
        treatment = self.cast.treatment
        if treatment is None or not (self._valid(treatment) and self._valid(self.cast.control)):
            return None
        found = self._against_control(treatment)
        return None if found is None else {"pct": _percent(found.value), "ci_pct": self._percents(found)}

    def discriminator(self, arm: Arm) -> dict[str, Any] | None:
        """How much of the gap is gone with this arm's one factor changed."""
        treatment = self.cast.treatment
        if treatment is None or arm in (self.cast.control, treatment):
            return None
        share = self._share(arm)
        found = self._between(arm, treatment) if self._valid(arm) and self._valid(treatment) else None
        verdict = self._dominance(arm, share)
        return {
            "arm": arm.label,
            "role": self.cast.roles[arm.label],
            "effect_pct": None if found is None else _percent(found.value),
            "effect_ci_pct": None if found is None else self._percents(found),
            "share": None if share is None or not share.bounded else share.value,
            "share_ci": None
            if share is None or not share.bounded or share.low == share.high
            else [share.low, share.high],
            "verdict": verdict,
        }

    # what is known of an arm

    def _valid(self, arm: Arm) -> bool:
        outcome = self.outcomes.get(arm.label)
        return outcome is not None and outcome.valid

    def _indicative(self, *arms: Arm) -> bool:
        """Whether what is known of one of them rests on a single pair, or on figures without any."""
        labels = {arm.label for arm in arms}
        single = any(one.n < 2 for pair, one in self.estimates.items() if labels & set(pair))
        return single or any(self.net.difference(arm.label, self.cast.control.label) is None for arm in arms)

    def _against_control(self, arm: Arm) -> Contrast | None:
        return self._between(arm, self.cast.control)

    def _between(self, arm: Arm, other: Arm) -> Contrast | None:
        """From the pairs; without any that have an interval from the figures alone, which have no spread then."""
        if (found := self.net.difference(arm.label, other.label)) is not None:
            return found
        mine, theirs = (self._value(one) for one in (arm, other))
        return Contrast(math.log(mine / theirs), 0.0, math.inf) if mine and theirs else None

    def _value(self, arm: Arm) -> float | None:
        outcome = self.outcomes.get(arm.label)
        return None if outcome is None else outcome.value

    def _of_control(self, arm: Arm) -> dict[str, Any] | None:
        """Share of the matched control's figure in percent; None if either is no evidence."""
        control = self.cast.control
        if not (self._valid(arm) and self._valid(control)):
            return None
        matched = ArmKind.RECORDED not in (arm.kind, control.kind) or arm.kind is control.kind
        found = self._against_control(arm)
        return (
            None
            if found is None
            else {"value": 100 * math.exp(found.value), "ci": self._percents(found, of=100.0), "matched": matched}
        )

    def _share(self, arm: Arm) -> Ratio | None:
        control, treatment = self.cast.control, self.cast.treatment
        if treatment is None or not all(map(self._valid, (arm, control, treatment))):
            return None
        recovered, gap = {arm.label: 1.0, treatment.label: -1.0}, {control.label: 1.0, treatment.label: -1.0}
        if (found := self.net.ratio(recovered, gap, self.question.level)) is not None:
            return found
        above, below = self._between(arm, treatment), self._between(control, treatment)
        if above is None or below is None:
            return None
        if abs(below.value) <= self._margin:
            return Ratio(math.nan, -math.inf, math.inf)
        share = above.value / below.value
        return Ratio(share, share, share)

    def _stamp(self, arm: Arm) -> str | None:
        """A recorded result is that of the commit it was recorded at."""
        sha = arm.provenance.get("sha")
        if arm.kind is not ArmKind.RECORDED or arm is self.cast.control or self.head_sha is None:
            return None
        if sha is None:
            return "head not known"
        return None if _same_commit(str(sha), self.head_sha) else NOT_THIS_HEAD

    def _percents(self, found: Contrast, of: float = 0.0) -> list[float] | None:
        """The interval, as what is above or below `of` = 100% or 0; None where the spread is not known."""
        return [of + _percent(one) for one in found.interval(self.question.level)] if found.se > 0 else None

    # what follows

    def _interpretation(self, arm: Arm, outcome: ArmOutcome | None) -> str:
        role = self.cast.roles[arm.label]
        if outcome is None:
            return "was not run"
        if not outcome.started and outcome.problem is not None:
            return "inconclusive: did not start"
        if not outcome.valid:
            return self._censored(role, outcome)
        if role == "control":
            return "valid matched control"
        if not self._valid(self.cast.control):
            return "no valid control to compare it with"
        rules = {"treatment": self._treatment, "bypass": self._bypass, "repair": self._repair, "head": self._repair}
        text = rules.get(role, self._other)(arm)
        if outcome.failure is not None and outcome.failure.get("class") == "performance gate":
            text += "; failed on a performance gate alone"
        return text

    def _censored(self, role: str, outcome: ArmOutcome) -> str:
        cause = None if outcome.failure is None else outcome.failure.get("class")
        if cause in UNRELATED:
            return f"censored: {cause} failed, which says nothing of this arm"
        if role == "control":
            return "censored: no valid control, and nothing is compared with it"
        if role == "treatment" and self._valid(self.cast.control):
            return "censored: the load is not completed with the change, and is without it"
        if role == "bypass":
            return "censored: bounds nothing"
        if role == "repair":
            return "censored: no repair"
        return "censored: no evidence"

    def _treatment(self, arm: Arm) -> str:
        found = self._against_control(arm)
        if found is None:
            return self._unmatched(arm)
        low, high = found.interval(self.question.level)
        if high < 0:
            return self._hedged(f"the change costs {abs(_percent(found.value)):.2f}% of its matched control", arm)
        if low > 0:
            return self._hedged("better than its matched control: no loss to explain", arm)
        if low > -self._margin:
            return self._hedged(f"within {self.question.margin_pct:g}% of its matched control: no loss to explain", arm)
        return "not told from its matched control"

    def _bypass(self, arm: Arm) -> str:
        if (found := self._against_control(arm)) is None:
            return self._unmatched(arm)
        if self._recovered(found):
            text = "causal upper bound: the loss is gone without what it bypasses; no repair, as a guarantee may be too"
            return self._hedged(text, arm)
        share = self._share(arm)
        if share is not None and share.bounded and share.low > 0:
            between = "" if share.low == share.high else f" ({100 * share.low:.0f} … {100 * share.high:.0f}%)"
            return self._hedged(f"{100 * share.value:.0f}%{between} of the gap is in what it bypasses", arm)
        if share is not None and share.bounded and share.high < DOMINANT:
            return self._hedged("the loss is not in what it bypasses", arm)
        return "not decided: the loss may be in what it bypasses or not"

    def _repair(self, arm: Arm) -> str:
        if (found := self._against_control(arm)) is None:
            return self._unmatched(arm)
        percent = f"{100 * math.exp(found.value):.2f}% of its matched control"
        if self._recovered(found):
            word = "repair: " if self.cast.roles[arm.label] == "repair" else ""
            return self._hedged(f"{word}completes the load at {percent}", arm)
        if found.interval(self.question.level)[1] < -self._margin:
            return self._hedged(f"completes the load; throughput is not recovered: {percent}", arm)
        return f"completes the load; recovery is not decided: {percent}"

    def _other(self, arm: Arm) -> str:
        if self.cast.treatment is None or self._against_control(arm) is None:
            return self._unmatched(arm)
        return self._dominance(arm, self._share(arm))

    def _unmatched(self, arm: Arm) -> str:
        return "no matched pair with its control: nothing follows"

    def _dominance(self, arm: Arm, share: Ratio | None) -> str:
        treatment = self.cast.treatment
        assert treatment is not None
        if not self._valid(treatment) or not self._valid(self.cast.control):
            return "the gap has no size: control or treatment is not valid"
        if share is None:
            return "not measured" if self._valid(arm) else "inconclusive: this arm is not valid"
        if not share.bounded:
            return "the gap is not told from zero: there is nothing to explain"
        if share.high < DOMINANT:
            return self._hedged("not the dominant factor", arm, treatment)
        if share.low >= DOMINANT:
            return self._hedged("the dominant factor", arm, treatment)
        return "not decided"

    def _recovered(self, found: Contrast) -> bool:
        return found.interval(self.question.level)[0] > -self._margin

    @property
    def _margin(self) -> float:
        return -math.log1p(-self.question.margin_pct / 100)

    def _hedged(self, text: str, *arms: Arm) -> str:
        return f"indicative: {text}" if self._indicative(*arms) else text


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _same_commit(one: str, other: str) -> bool:
    """Either may be abbreviated."""
    short = min(len(one), len(other))
    return short >= 7 and one[:short].lower() == other[:short].lower()
