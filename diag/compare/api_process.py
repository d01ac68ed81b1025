"""The API process over a long run, arm beside arm: which one pays more with every request that it serves.

Profiles are `diag/gc_profile`'s: windows, and a verdict of growth per quantity. This file compares them: a quantity
that grows in one arm and not in the other, as far as the intervals of the two slopes do not overlap, exposes that arm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from atom.diag.gc_profile.model import Attribution, Growth, GrowthVerdict, Profile, Totals, Window
from atom.diag.gc_profile.profile import profile_run
from atom.diag.gc_profile.words import amount, joined
from atom.recipes.errors import UsageError

__all__ = ["api_process_section", "shown_profiles"]

QUANTITIES: Final = (
    "gen2_share",
    "gen2_pause_ms",
    "metrics_ms",
    "metrics_series",
    "metrics_body_bytes",
    "rss_mb",
    "threads",
    "health_ms",
)
"""What may grow with requests served in an API process; TTFT is a consequence of them."""
SHIFTS: Final = 20
"""For the attribution of slow tokens, of which only the profile's own sentence is shown here."""


def api_process_section(
    base: Sequence[Path],
    head: Sequence[Path],
    *,
    base_label: str,
    head_label: str,
    window_s: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Of the run directories of the long run, one or more per arm.

    `{base, head, arms[] {label, runs[] {directory, label, simulated, old_object_passes, window_s, windows[], totals,
    growth{}, hooked, validity, verdict}}, quantities[] {quantity, label, unit, per, base {verdict, slope, slope_low,
    slope_high, first, last, runs}, head {…}, ratio, finding}, exposed[], verdict, notes[]}`. `finding`: `base`, `head`
    (grows there alone), `both`, `neither`, or None where one side has not enough data. `exposed`: labels of the arms
    in which something grows that does not in the other.
    """
    notes: list[str] = []
    profiles = [
        _profiles(directories, label, window_s, seed, notes)
        for label, directories in ((base_label, base), (head_label, head))
    ]
    quantities = [_quantity(name, *profiles) for name in QUANTITIES] if all(profiles) else []
    exposed = [
        label
        for side, label in (("base", base_label), ("head", head_label))
        if any(q["finding"] == side for q in quantities)
    ]
    arms = [
        {"label": label, "runs": [_run(profile) for profile in side]}
        for label, side in zip((base_label, head_label), profiles, strict=True)
    ]
    return {
        "base": base_label,
        "head": head_label,
        "arms": arms,
        "quantities": quantities,
        "exposed": exposed,
        "verdict": _verdict(quantities, base_label, head_label),
        "notes": notes,
    }


def _profiles(
    directories: Sequence[Path], label: str, window_s: float | None, seed: int, notes: list[str]
) -> list[Profile]:
    found = []
    for directory in directories:
        try:
            found.append(profile_run(directory, window_s=window_s, label=label, seed=seed, shifts=SHIFTS))
        except UsageError as error:
            notes.append(f"{label}: {error}")
            continue
        notes += (f"{label}: {note}" for note in found[-1].notes)
    return found


def _run(profile: Profile) -> dict[str, Any]:
    return {
        "directory": profile.directory,
        "label": profile.label,
        "simulated": profile.simulated,
        "old_object_passes": profile.old_object_passes,
        "window_s": profile.window_s,
        "windows": [asdict(window) for window in profile.windows],
        "totals": asdict(profile.totals),
        "growth": {name: asdict(growth) for name, growth in profile.growth.items()},
        "hooked": any(one.hooked and one.role == "api" for one in profile.processes),
        "validity": profile.validity,
        "verdict": profile.verdict,
    }


# ---- one quantity ------------------------------------------------------------------------------------------------


def _quantity(name: str, base: Sequence[Profile], head: Sequence[Profile]) -> dict[str, Any]:
    sides = {
        side: _together([profile.growth[name] for profile in profiles if name in profile.growth])
        for side, profiles in (("base", base), ("head", head))
    }
    one = next(profile.growth[name] for profile in (*head, *base))
    finding = _finding(sides["base"], sides["head"])
    return {
        "quantity": name,
        "label": one.label,
        "unit": one.unit,
        "per": one.per,
        **sides,
        "finding": finding,
        "ratio": _ratio(sides["base"], sides["head"]) if finding == "both" else None,
    }


def _together(growths: Sequence[Growth]) -> dict[str, Any]:
    """Of an arm's runs. It grows if it does in most of those that have enough data; the slope's interval holds those of
    all of them."""
    known = [growth for growth in growths if growth.verdict is not GrowthVerdict.NOT_ENOUGH_DATA]
    grows = [growth for growth in known if growth.verdict is GrowthVerdict.GROWS]
    if not known:
        reason = growths[0].reason if growths else ""
        return {"verdict": str(GrowthVerdict.NOT_ENOUGH_DATA), "reason": reason, "runs": len(growths)}
    verdict = GrowthVerdict.GROWS if 2 * len(grows) > len(known) else GrowthVerdict.FLAT

    def values(name: str) -> list[float]:
        return [value for growth in known if (value := getattr(growth, name)) is not None]

    return {
        "verdict": str(verdict),
        "reason": known[0].reason,
        "runs": len(growths),
        "slope": statistics.fmean(values("slope")),
        "slope_low": min(values("slope_low")),
        "slope_high": max(values("slope_high")),
        "first": statistics.fmean(values("first")),
        "last": statistics.fmean(values("last")),
    }


def _finding(base: Mapping[str, Any], head: Mapping[str, Any]) -> str | None:
    verdicts = (base["verdict"], head["verdict"])
    if GrowthVerdict.NOT_ENOUGH_DATA in verdicts:
        return None
    grows = [verdict == GrowthVerdict.GROWS for verdict in verdicts]
    if not any(grows):
        return "neither"
    if base["slope_low"] > head["slope_high"]:
        return "both" if grows[1] else "base"
    if head["slope_low"] > base["slope_high"]:
        return "both" if grows[0] else "head"
    return "both" if all(grows) else "neither"


def _ratio(base: Mapping[str, Any], head: Mapping[str, Any]) -> float | None:
    """How many times as fast the head grows, where the two intervals are apart; None where they overlap."""
    apart = base["slope_low"] > head["slope_high"] or head["slope_low"] > base["slope_high"]
    return float(head["slope"] / base["slope"]) if apart and base["slope"] > 0 else None


# ---- words -------------------------------------------------------------------------------------------------------


def _verdict(quantities: Sequence[Mapping[str, Any]], base_label: str, head_label: str) -> str:
    sentences = []
    labels = {"base": base_label, "head": head_label}
    for side, other in (("base", "head"), ("head", "base")):
        found = [_grows(q, side) for q in quantities if q["finding"] == side]
        if found:
            who = f"{labels[side]} pays more with every request that it serves, {labels[other]} does not"
            sentences.append(f"{who}: {joined(found)}.")
    for q in quantities:
        if q["ratio"] is not None:
            faster, slower = ("head", "base") if q["ratio"] > 1 else ("base", "head")
            times = q["ratio"] if q["ratio"] > 1 else 1 / q["ratio"]
            sentences.append(
                f"{q['label']} grows in both, {times:.1f} times as fast in {labels[faster]} as in {labels[slower]}."
            )
    same = [q["label"] for q in quantities if q["finding"] == "both" and q["ratio"] is None]
    if same:
        sentences.append(f"Grows in both arms alike: {joined(same)}.")
    unknown = [q["label"] for q in quantities if q["finding"] is None]
    if not sentences and quantities and len(unknown) < len(quantities):
        sentences.append("Nothing is seen to grow in one arm alone.")
    if unknown and quantities:
        sentences.append(f"Not enough data for {joined(unknown)}.")
    return " ".join(sentences) or "Not compared: an arm has no run that can be read."


def _grows(quantity: Mapping[str, Any], side: str) -> str:
    own, unit = quantity[side], quantity["unit"]
    slope = f"{amount(own['slope'], unit)} per {quantity['per']}"
    return f"{quantity['label']} {amount(own['first'], unit)} → {amount(own['last'], unit)} ({slope})"


# ---- back to profiles, for tables --------------------------------------------------------------------------------


def shown_profiles(section: Mapping[str, Any]) -> list[Profile]:
    """The first run of each arm as far as tables of windows and totals need it; from JSON, which may be damaged."""
    try:
        return [_profile(arm["runs"][0]) for arm in section["arms"] if arm["runs"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the gc section is damaged: {error}") from None


def _profile(run: Mapping[str, Any]) -> Profile:
    return Profile(
        label=run["label"],
        directory=run["directory"],
        simulated=run["simulated"],
        old_object_passes=run["old_object_passes"],
        window_s=run["window_s"],
        windows=tuple(Window(**window) for window in run["windows"]),
        totals=Totals(**run["totals"]),
        growth={},
        attribution=Attribution(first_tokens=None, chunk_gaps=None, shifts=0),
        causes=(),
        verdict=run["verdict"],
        is_problem=None,
        processes=(),
        validity=run["validity"],
    )
