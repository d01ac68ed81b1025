"""What a comparison says of one load: its matched runs, each metric with interval and verdict, and sentences. The
whole is `document.py`; the words of a verdict are `verdict.py`'s, gates `gate_document.py`'s, which pairs count is
`weighed.py`'s."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from atom.bench.regular_file import read_regular
from atom.bench.report.numbers import signed_percent
from atom.diag.compare.evidence import ScoredPair, ScoredRun, Side, metric_values
from atom.diag.compare.gate_document import load_gates
from atom.diag.compare.mechanism import disagreement
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.model import ArmKind, Half, Load
from atom.diag.compare.plan import Plan
from atom.diag.compare.statistics import Effects, asymmetry, half_effects, outliers, percent
from atom.diag.compare.verdict import MetricEvidence, Verdict, judge_all, pairs_text
from atom.diag.compare.weighed import Key, Weighed
from atom.recipes.cpus import format_cpus

__all__ = ["half_text", "load_documents", "shape_of", "target_of"]

_MOST_RUN_JSON: Final = 16 << 20
MOST_REASONS: Final = 4


def load_documents(loads: Sequence[Weighed]) -> list[dict[str, Any]]:
    """As JSON; see docs/ab_compare.md. Verdicts and gates are corrected for how many there are, over all loads."""
    verdicts: dict[Key, Verdict] = {}
    for section in dict.fromkeys(one.evidence.load.section for one in loads):
        own = [one for one in loads if one.evidence.load.section == section]
        verdicts |= judge_all(
            {one.key(name): metric for one in own for name, metric in one.metrics.items()},
            [one.key(one.primary) for one in own],
        )
    gates = load_gates(loads)
    return [
        _load(one, {name: verdicts[one.key(name)] for name in one.metrics}, own)
        for one, own in zip(loads, gates, strict=True)
    ]


def _load(weighed: Weighed, verdicts: Mapping[str, Verdict], gates: list[dict[str, Any]]) -> dict[str, Any]:
    evidence = weighed.evidence
    load, comparison = evidence.load, evidence.comparison
    verdict = verdicts[weighed.primary]
    return {
        "load": load.name,
        "section": load.section,
        "comparison": comparison.key,
        "base": comparison.base,
        "head": comparison.head,
        "bench": load.bench,
        "options": dict(load.options),
        "shape": _shape(weighed),
        "primary": load.primary,
        "margin_pct": load.margin_pct,
        "planned_pairs": evidence.planned,
        "pairs": [_pair(evidence.plan, pair) for pair in evidence.pairs],
        "control": {
            "pairs": [_pair(evidence.plan, pair) for pair in evidence.control],
            "left_out": list(weighed.left_out),
        }
        if evidence.control
        else None,
        "metrics": {name: _metric(weighed, name, verdicts[name]) for name in weighed.metrics},
        "censored": list(weighed.censored),
        "word": verdict.word,
        "finding": verdict.finding,
        "sentence": _sentence(weighed, verdict),
        "disagreement": _disagreement(weighed, verdicts),
        "noise": _noise(weighed),
        "remarks": _remarks(weighed),
        "gates": gates,
    }


# ---- runs


def _pair(plan: Plan, pair: ScoredPair) -> dict[str, Any]:
    return {
        "pair": pair.number,
        "complete": all(side.score is not None for one in pair.runs for side in one.sides),
        "runs": [_run(plan, one) for one in sorted(pair.runs, key=lambda one: one.run.index)],
    }


def _run(plan: Plan, one: ScoredRun) -> dict[str, Any]:
    return {
        "index": one.run.index,
        "half": _halves(plan, one),
        "base": _side(plan, one, 0),
        "head": _side(plan, one, 1),
    }


def _halves(plan: Plan, one: ScoredRun) -> str:
    """`0-3 / 4-7`: where base and head ran; in turns: which was first; of recorded arms: what was read."""
    if all(plan.arm(run.arm).kind is ArmKind.RECORDED for run in one.run.runs):
        return " / ".join(side.path.name for side in one.sides)
    if plan.placement.concurrent:
        return " / ".join(half_text(plan.half_of(run)) for run in one.run.runs)
    return " / ".join("1st" if run.order == 0 else "2nd" for run in one.run.runs)


def half_text(half: Half) -> str:
    """`0-3`: its GPUs, else its CPUs, else its name."""
    if half.devices is not None:
        parts = half.devices.split(",")
        return format_cpus([int(one) for one in parts]) if all(one.isdigit() for one in parts) else half.devices
    cpus = sorted({*half.server_cpus, *half.client_cpus})
    return f"CPU {format_cpus(cpus)}" if cpus else half.name


def _side(plan: Plan, one: ScoredRun, side: int) -> dict[str, Any]:
    this: Side = one.sides[side]
    run, score = one.run.runs[side], this.score
    half = plan.half_of(run)
    facts: dict[str, Any] = {
        "arm": run.arm,
        "run": this.result.directory,
        "half": run.half,
        "order": run.order,
        "devices": half.devices,
        "server_cpus": list(half.server_cpus),
        "status": this.result.status,
        "stage": str(this.result.stage),
        "problem": this.problem,
        "dismissed": this.dismissed,
        "censored": this.censored,
        "invalid": [],
        "metrics": {},
        "requests": None,
        "window": None,
    }
    if score is not None:
        told = score.as_dict()
        facts |= {
            "metrics": {name: value.value for name, value in score.metrics.items()},
            "samples": {name: value.n for name, value in score.metrics.items()},
            "requests": told["counts"],
            "window": told["window"],
            "invalid": told["invalid"],
        }
    return facts


# ---- metrics


def _metric(weighed: Weighed, name: str, verdict: Verdict) -> dict[str, Any]:
    metric, evidence, effects = METRICS[name], weighed.metrics[name], weighed.effects[name]
    found = evidence.estimate
    base = _usual(metric_values(_counted(weighed.evidence.pairs), name, 0))
    head = base * math.exp(found.mean) if base is not None and math.isfinite(found.mean) else None
    interval = found.ci_pct
    return {
        "title": metric.title,
        "unit": metric.unit,
        "better": metric.better,
        "definition": metric.definition,
        "primary": name == weighed.primary,
        "base": base,
        "head": head,
        "delta": None if head is None or base is None else head - base,
        "delta_pct": found.delta_pct,
        "ci_pct": None if interval is None else list(interval),
        "repeated": evidence.repeated,
        "half_effects_pct": [percent(one) for one in half_effects(effects)],
        "asymmetry_pct": percent(asymmetry(effects, weighed.control.get(name)).mean),
        "noise_floor_pct": None if evidence.floor is None else percent(evidence.floor),
        "noise_floor_pairs": evidence.floor_pairs,
        "pairs": found.n,
        "p": evidence.p,
        "supported": _supported(weighed.evidence.pairs, name),
        "word": verdict.word,
        "finding": verdict.finding,
        "short": _short(verdict, evidence),
        "verdict": verdict.text,
        "more_pairs": verdict.n_more,
        "outliers": [weighed.evidence.pairs[index].number for index in outliers(effects)],
    }


def _short(verdict: Verdict, evidence: MetricEvidence) -> str:
    """The verdict where the figures stand beside it."""
    if verdict.finding is None:
        return verdict.word
    if verdict.indicative:
        return "confounded: indicative" if evidence.confounded else "indicative"
    text: str = verdict.finding
    interval = evidence.estimate.ci_pct
    margin = evidence.margin_pct
    if verdict.finding == "equivalent":
        text += f" within {margin:g}%"
    elif verdict.finding in ("faster", "slower") and margin is not None and interval is not None:
        text += f", within the {margin:g}% margin" if max(map(abs, interval)) < margin else ""
    elif verdict.finding == "inconclusive" and verdict.n_more is not None:
        text += f": {pairs_text(verdict.n_more)}"
    return f"confounded: {text}" if evidence.confounded else text


def _counted(pairs: Sequence[ScoredPair]) -> list[ScoredPair]:
    """Pairs that have all runs; where none has, those there are."""
    whole = [pair for pair in pairs if all(side.score is not None for one in pair.runs for side in one.sides)]
    return whole or list(pairs)


def _usual(values: Sequence[float]) -> float | None:
    """Geometric mean, so that head ÷ base is the effect."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def _supported(pairs: Sequence[ScoredPair], name: str) -> bool:
    scores = [side.metric(name) for pair in pairs for one in pair.runs for side in one.sides]
    return all(score.supported for score in scores if score is not None)


# ---- words


def shape_of(load: Load) -> str:
    """`2,048 in / 64 out · C64 · 3,000 requests`, as far as the options say."""
    options = load.options
    parts = []

    def number(*names: str) -> Any:
        return next((options[name] for name in names if name in options), None)

    lengths = number("random-input-len", "input-len"), number("random-output-len", "output-len")
    if None not in lengths:
        parts.append(f"{lengths[0]:,} in / {lengths[1]:,} out" if all(isinstance(x, int) for x in lengths) else "")
    if (concurrency := number("max-concurrency", "concurrency")) is not None:
        parts.append(f"C{concurrency}")
    if (rate := number("request-rate")) is not None:
        parts.append(f"{rate} req/s")
    if (duration := number("duration", "benchmark-duration")) is not None:
        parts.append(f"{duration} s")
    elif (count := number("num-prompts", "limit")) is not None:
        parts.append(f"{count:,} requests" if isinstance(count, int) else f"{count} requests")
    return " · ".join([load.bench, *filter(None, parts)])


def _shape(weighed: Weighed) -> str:
    """With what the server is, as the runs say."""
    targets = [target_of(side.path) for pair in weighed.evidence.pairs for one in pair.runs for side in one.sides]
    models = dict.fromkeys(str(one["model"]) for one in targets if one.get("model"))
    executors = dict.fromkeys(str(one["executor"]) for one in targets if one.get("executor"))
    words = ["SIMULATED executor: no model was run" if one == "simulated" else f"{one} executor" for one in executors]
    return " · ".join([shape_of(weighed.evidence.load), *models, *words])


@lru_cache(maxsize=4096)
def target_of(path: Path) -> Mapping[str, Any]:
    """What the server of a run said of itself: model, executor; empty where that was not recorded."""
    try:
        target = json.loads(read_regular(path / "run.json", _MOST_RUN_JSON)).get("target")
    except (OSError, ValueError, RecursionError, AttributeError):
        return {}
    return target if isinstance(target, dict) else {}


def _sentence(weighed: Weighed, verdict: Verdict) -> str:
    """The verdict of the load."""
    evidence = weighed.evidence
    load, base, head = evidence.load.name, evidence.comparison.base, evidence.comparison.head
    title = METRICS[weighed.primary].title
    if weighed.censored and evidence.pairs:
        more = f" (and {len(weighed.censored) - 1} more)" if len(weighed.censored) > 1 else ""
        return f"{load}: censored, no winner between {base} and {head}: {weighed.censored[0]}{more}"
    if verdict.word in ("faster", "slower"):
        return f"{load}: {head} is {verdict.word} than {base}{verdict.text.removeprefix(verdict.word)} in {title}"
    return f"{load}: {head} against {base}, {title}: {verdict.text}"


def _noise(weighed: Weighed) -> str | None:
    """The documents' sentence below the pairs: how far the matched runs themselves lie apart."""
    evidence, parts = weighed.evidence, []
    for name in dict.fromkeys((weighed.primary, "itl_p50", "output_throughput")):
        one = weighed.metrics.get(name)
        if one is None:
            continue
        found = _moves(weighed.effects[name])
        if not found:
            continue
        noise = "" if name not in weighed.control else _beside(found, _moves(weighed.control[name]))
        parts.append(f"{METRICS[name].title} moves {_range(found)}{noise}")
    runs = sum(len(pair.runs) for pair in evidence.pairs)
    return f"{evidence.load.name}: over {runs} matched run{'s' * (runs > 1)} " + "; ".join(parts) if parts else None


def _moves(effects: Effects) -> list[float]:
    """ln(head/base) of each matched run by itself, ascending."""
    ratios = effects.log_ratios
    return sorted(float(x) for x in ratios[np.isfinite(ratios)])


def _beside(found: Sequence[float], control: Sequence[float]) -> str:
    """Single matched runs beside those of one arm with itself: a noise floor is of means, and says nothing of them."""
    if not control:
        return ""
    if control[0] <= found[0] and found[-1] <= control[-1]:
        return f", within what A/A runs move ({_range(control)})"
    return f", where A/A runs move {_range(control)}"


def _range(values: Sequence[float]) -> str:
    return _percent(values[0]) if len(values) == 1 else f"{_percent(values[0])} to {_percent(values[-1])}"


def _remarks(weighed: Weighed) -> list[str]:
    evidence, primary = weighed.evidence, weighed.effects[weighed.primary]
    remarks = [f"censored: {line}" for line in weighed.censored]
    if evidence.pairs and len(evidence.pairs) < evidence.planned:
        remarks.append(f"{len(evidence.pairs)} of {evidence.planned} planned pairs were made")
    remarks += weighed.left_out
    remarks += _half_remarks(weighed)
    if named := outliers(primary):
        numbers = ", ".join(str(evidence.pairs[index].number + 1) for index in named)
        remarks.append(f"pair {numbers} stands out in {METRICS[weighed.primary].title}; it is in every figure")
    unsupported = [METRICS[name].title for name in weighed.metrics if not _supported(evidence.pairs, name)]
    if unsupported:
        remarks.append(f"fewer than 10 samples lie beyond the quantile in a run: {', '.join(unsupported)}")
    notes: dict[str, None] = {}
    for pair in evidence.pairs:
        for run in pair.runs:
            for side in run.sides:
                notes |= dict.fromkeys(side.score.notes if side.score is not None else ())
    return [*remarks, *list(notes)[:MOST_REASONS]]


def _disagreement(weighed: Weighed, verdicts: Mapping[str, Verdict]) -> list[str]:
    """Metrics that point to different sides, and what the records show of why."""
    findings = {}
    for name, verdict in verdicts.items():
        delta = weighed.metrics[name].estimate.delta_pct
        if verdict.finding is not None and delta is not None:
            findings[name] = (str(verdict.finding), delta)
    runs = []
    for one in (one for pair in weighed.evidence.pairs for one in pair.runs):
        base, head = (side.score for side in one.sides)
        if base is not None and head is not None:
            runs.append((base.facts, head.facts))
    indicative = any(one.indicative and one.finding in ("faster", "slower") for one in verdicts.values())
    prefix = f"{weighed.evidence.load.name}: {'indicative: ' if indicative else ''}"
    return [f"{prefix}{line}" for line in disagreement(findings, runs)]


def _half_remarks(weighed: Weighed) -> list[str]:
    """What swapping the halves took out, or what is in the figures because nothing was swapped."""
    effects, control = weighed.effects[weighed.primary], weighed.control.get(weighed.primary)
    plan, title = weighed.evidence.plan, METRICS[weighed.primary].title
    lean = asymmetry(effects, control)
    if lean.n < 2 or not (lean.low > 0 or lean.high < 0):
        return []
    concurrent = plan.placement.concurrent
    line = f"{'the halves differ' if concurrent else 'what runs first and second differs'} by {_percent(lean.mean)}"
    if not effects.swapped:
        return [f"{line} in {title}, by the A/A pairs; nothing was swapped, so that is in the figures"]
    first, second = half_effects(effects)
    return [f"{line} in {title}: {_percent(first)} one way round, {_percent(second)} the other; the mean is free of it"]


def _percent(log_ratio: float) -> str:
    value = percent(log_ratio)
    return "–" if value is None else f"{signed_percent(value)}%"
