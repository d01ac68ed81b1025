"""A comparison as one JSON document: what `--json`, summary.json, the tables and the page say. Computed from
`plan.json`, `runs.jsonl` and the run directories alone, so that it is the same after `kill -9`, with `--resume` and in
`atom report`.

One load is `load_document.py`'s; the fields are described in docs/ab_compare.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from atom.bench.rundir import RunDirectory, Validity
from atom.diag.compare.accuracy import accuracy_section
from atom.diag.compare.api_process import api_process_section
from atom.diag.compare.causal import Question, causal_section
from atom.diag.compare.conductor import given_up
from atom.diag.compare.confounds import confounded, factors, observed, unasked
from atom.diag.compare.crossover import crossover_section
from atom.diag.compare.evidence import ScoredPair, metric_effects, scored_pairs
from atom.diag.compare.failures import failure_of
from atom.diag.compare.gate_document import is_load_decided, section_gates, unmatched_gates
from atom.diag.compare.journal import RUNS_FILE, DonePair, Records, read_records
from atom.diag.compare.load_document import half_text, load_documents, shape_of, target_of
from atom.diag.compare.metrics import METRICS
from atom.diag.compare.model import Arm, ArmKind, Comparison, Load
from atom.diag.compare.outcomes import RunEvidence, outcomes_of
from atom.diag.compare.outputs import Output, divergence, read_outputs
from atom.diag.compare.plan import Plan, Stream
from atom.diag.compare.shown import shown
from atom.diag.compare.source_proof import source_problems
from atom.diag.compare.statistics import Estimate, estimate
from atom.diag.compare.unit_tests import unit_tests_section
from atom.diag.compare.weighed import LoadEvidence, contrast_level, sound_control, weigh
from atom.recipes.errors import ExitStatus

__all__ = ["TITLE", "comparison_status", "document", "is_comparison", "is_decided"]

TITLE: Final = "ab-compare"
MOST_REASONS: Final = 6


def is_comparison(run_dir: RunDirectory) -> bool:
    return run_dir.read_run_json().get("name") == TITLE


def document(out: Path) -> dict[str, Any]:
    """Of the comparison in `out`, also one that still runs or was killed. UsageError if there is no plan."""
    view = _View.of(out)
    plan = view.plan
    loads = load_documents(
        [weigh(one) for one in view.loads() if one.load.section == "load" or (one.load.section == "gc" and one.pairs)]
    )
    sections = _sections(view)
    run = RunDirectory.open(out).read_run_json()
    unproven = source_problems(out, plan, view.records)
    validity, reasons = _worth(view, loads, run, unproven)
    gates = [
        *(_of_proven(gate, unproven) for load in loads for gate in load["gates"]),
        *unmatched_gates(plan),
        *section_gates(plan, sections, {plan.load(name).section for name in unproven}),
    ]
    gates = [_marked(gate, view) for gate in gates]
    for load in loads:
        load["gates"] = [_of_proven(_marked(gate, view), unproven) for gate in load["gates"]]
    result: dict[str, Any] = {
        "title": TITLE,
        "ended": run.get("ended"),
        "ended_text": run.get("ended_text") or "it was killed, or still runs; --resume goes on with it",
        "validity": str(validity),
        "valid": validity is Validity.VALID,
        "reasons": reasons,
        "headline": _headline(view, sections),
        "plan": plan.as_dict(),
        "arms": [_arm(view, arm) for arm in plan.arms],
        "comparisons": [_comparison(view, one) for one in plan.comparisons],
        "loads": loads,
        **sections,
        "confounded": list(dict.fromkeys(line for one in plan.comparisons for line in view.confounded(one))),
        "gates": gates,
        "scope": _scope(view, run),
        "notes": [*_notes(view, run, loads), *_outputs_notes(view.plan, loads, sections["outputs"])],
    }
    result["verdict"] = _word(loads)
    result["status"] = int(comparison_status(result))
    result["figures"] = _figures(loads)
    told: dict[str, Any] = shown(result)
    return told


def is_decided(out: Path, plan: Plan, stream: Stream, pairs: Sequence[DonePair]) -> bool:
    """Whether the pairs so far decide the primary metric of a stream: the question of `--until-decided`."""
    key, name = stream
    comparison = next(one for one in plan.comparisons if one.key == key)
    evidence = LoadEvidence(
        plan=plan,
        comparison=comparison,
        load=plan.load(name),
        pairs=scored_pairs(out, pairs, concurrent=plan.placement.concurrent),
        control=_View.of(out).scored((f"{comparison.base}..{comparison.base}", name)),
        planned=len(pairs),
    )
    family = len(plan.comparisons) * sum(load.section == "load" for load in plan.loads)
    return is_load_decided(evidence, family)


def comparison_status(told: Mapping[str, Any]) -> ExitStatus:
    """Of a comparison that came to its end."""
    if any(arm["runs"]["failed"] and not arm["runs"]["recorded"] for arm in told["arms"]):
        return ExitStatus.FAILED
    outcomes = {gate["outcome"] for gate in told["gates"]}
    if "undecided" in outcomes or not told["valid"] or any(gate["unasked"] for gate in told["gates"]):
        return ExitStatus.INVALID
    return ExitStatus.GATE if "fail" in outcomes else ExitStatus.OK


@dataclass(frozen=True, slots=True)
class _View:
    """What is there."""

    out: Path
    plan: Plan
    records: Records

    @classmethod
    def of(cls, out: Path) -> _View:
        return cls(out, Plan.read(out), read_records(out))

    def scored(self, stream: Stream) -> list[ScoredPair]:
        done = self.records.done_of(self.plan, stream)
        return scored_pairs(self.out, done, concurrent=self.plan.placement.concurrent)

    def loads(self) -> Iterator[LoadEvidence]:
        plan = self.plan
        for comparison in plan.comparisons:
            confounds = self.confounded(comparison)
            for load in plan.loads:
                stream = (comparison.key, load.name)
                yield LoadEvidence(
                    plan=plan,
                    comparison=comparison,
                    load=load,
                    pairs=self.scored(stream),
                    control=self.scored((f"{comparison.base}..{comparison.base}", load.name)),
                    confounded=confounds,
                    planned=sum(not plan.is_extra(pair) for pair in plan.pairs_of(stream)),
                    problem=self.why_not(comparison),
                )

    def confounded(self, comparison: Comparison, which: Callable[..., list[str]] = confounded) -> list[str]:
        """By the plan and by what the runs show. `which`: of it all, or what was not asked for."""
        seen = observed(self.matched(comparison))
        base, head = (self.plan.arm(label) for label in (comparison.base, comparison.head))
        loads = [load for load in self.plan.loads if load.section != "accuracy"] or self.plan.loads
        return list(dict.fromkeys(line for load in loads for line in which(base, head, load, seen)))

    def matched(self, comparison: Comparison) -> Iterator[tuple[Path, Path]]:
        """Run directories of base and head of every matched run that has both."""
        for load in self.plan.loads:
            for pair in self.records.done_of(self.plan, (comparison.key, load.name)):
                for base, head in pair.results:
                    if base.has_records and head.has_records:
                        yield self.out / base.directory, self.out / head.directory

    def runs_of(self, arm: str) -> list[Path]:
        return [self.out / one.directory for one in self.records.current.values() if one.arm == arm and one.has_records]

    def why_not(self, comparison: Comparison) -> str | None:
        """Why pairs of it are missing, where an arm is the reason."""
        lost = given_up(self.plan, self.records)
        return next((f"{arm} {lost[arm]}" for arm in (comparison.base, comparison.head) if arm in lost), None)

    def directories(self, comparison: Comparison, section: str) -> tuple[list[Path], list[Path]]:
        """Run directories of base and head under the loads of a section."""
        sides: tuple[list[Path], list[Path]] = ([], [])
        for load in self.plan.loads:
            if load.section != section:
                continue
            for pair in self.records.done_of(self.plan, (comparison.key, load.name)):
                for results in pair.results:
                    for side, one in zip(sides, results, strict=True):
                        if one.has_records:
                            side.append(self.out / one.directory)
        return sides


# ---- arms


def _arm(view: _View, arm: Arm) -> dict[str, Any]:
    made = [one for one in view.records.current.values() if one.arm == arm.label]
    recorded = [one for one in made if one.has_records]
    unstarted = [one for one in made if not one.has_records and one.status != ExitStatus.INTERRUPTED]
    broken = [one for one in recorded if one.problem is not None and one.status != ExitStatus.INTERRUPTED]
    failed = [*unstarted, *broken]
    problems = dict.fromkeys(one.problem for one in failed if one.problem is not None)
    return {
        "label": arm.label,
        "role": arm.role,
        "kind": str(arm.kind),
        "spec": arm.spec,
        "recipe": arm.recipe,
        "image": arm.image,
        "env": dict(arm.env),
        "server_args": list(arm.server_args),
        **arm.provenance,
        "runs": {
            "made": len(made),
            "recorded": len(recorded),
            "failed": len(failed),
            "superseded": len(_superseded(view, arm)),
        },
        "runs_text": _runs_text(len(recorded) - len(broken), len(broken), len(unstarted)),
        "problem": given_up(view.plan, view.records).get(arm.label) or next(iter(problems), None),
    }


def _runs_text(made: int, broken: int, unstarted: int) -> str:
    """`4 made, 2 failed under load`"""
    told = [f"{broken} failed under load"] * bool(broken) + [f"{unstarted} did not start"] * bool(unstarted)
    return ", ".join([f"{made} made"] * bool(made or not told) + told)


def _superseded(view: _View, arm: Arm) -> list[str]:
    return [one.directory for one in view.records.superseded if one.arm == arm.label]


def _comparison(view: _View, comparison: Comparison) -> dict[str, Any]:
    facts = (view.plan.extras.get("differences") or {}).get(comparison.key) or {}
    return {
        "key": comparison.key,
        "base": comparison.base,
        "head": comparison.head,
        "difference": dict(facts.get("shown") or {}),
        "changed_files": list(facts.get("changed_files") or []),
        "facts": {name: value for name, value in facts.items() if name not in ("shown", "changed_files")},
        "confounded": view.confounded(comparison),
    }


def _scope(view: _View, run: Mapping[str, Any]) -> dict[str, str]:
    """What the result holds for: each dimension with this run's value."""
    plan = view.plan
    host = run.get("host") or {}
    targets = [target for arm in plan.arms for target in _targets(view, arm)]
    halves = [half_text(half) for half in plan.placement.halves]
    recorded = all(arm.kind is ArmKind.RECORDED for arm in plan.arms)
    recipes = [arm.recipe for arm in plan.arms] + [load.recipe for load in plan.loads]
    scope = {
        "machine": "" if recorded else ", ".join(str(host[name]) for name in ("cpu", "kernel") if host.get(name)),
        "devices": ""
        if recorded
        else ", ".join(dict.fromkeys(map(str, run.get("devices") or []))) or f"{host.get('cpus', '?')} CPUs",
        "halves" if len(halves) > 1 else "placement": ""
        if not any(arm.kind in (ArmKind.REF, ArmKind.RECIPE) for arm in plan.arms)
        else (" / ".join(halves) if halves != ["whole"] else "the whole machine")
        + (", at the same time" if plan.placement.concurrent else ", in turns"),
        "model": _once(target.get("model") for target in targets),
        "executor": _once(_executor(target.get("executor")) for target in targets),
        "recipe": _once(recipes),
        "loads": "; ".join(f"{load.name} ({shape_of(load)})" for load in plan.loads),
        "seed": "" if recorded else str(plan.seed),
    }
    return {name: value for name, value in scope.items() if value}


def _targets(view: _View, arm: Arm) -> list[Mapping[str, Any]]:
    """What the servers of an arm said of themselves."""
    return [target for path in view.runs_of(arm.label) if (target := target_of(path))]


def _executor(name: Any) -> str | None:
    return "SIMULATED: no model was run" if name == "simulated" else name


def _once(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value))


# ---- sections


def _sections(view: _View) -> dict[str, Any]:
    first = view.plan.comparisons[0]
    accuracy, gc = view.directories(first, "accuracy"), view.directories(first, "gc")
    return {
        "tests": unit_tests_section(view.out, first.base, first.head),
        "accuracy": accuracy_section(*accuracy, base_label=first.base, head_label=first.head)
        if any(accuracy)
        else None,
        "gc": api_process_section(*gc, base_label=first.base, head_label=first.head) if any(gc) else None,
        "outputs": _outputs(view),
        "causal": _net(view, crossed=False),
        "cross": _net(view, crossed=True),
    }


def _outputs(view: _View) -> list[dict[str, Any]] | None:
    """Greedy outputs of two arms against each other and against themselves, per load that asked for them: under another
    load the same arm may well answer otherwise. Runs of the A/A control are runs of the base."""
    told = []
    for comparison in view.plan.comparisons:
        for load in view.plan.loads:
            if load.section != "load":
                continue
            pairs = view.scored((comparison.key, load.name))
            base, head = _answers(pairs, 0), _answers(pairs, 1)
            control, _ = sound_control(view.scored((f"{comparison.base}..{comparison.base}", load.name)))
            base += [one for side in (0, 1) for one in _answers(control, side)]
            found = divergence(base, head)
            if found is not None:
                names = {"load": load.name, "base": comparison.base, "head": comparison.head}
                told.append({**names, **found.as_dict()})
    return told or None


def _outputs_notes(
    plan: Plan, loads: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]] | None
) -> Iterator[str]:
    """Why there are none."""
    asking = [load.name for load in plan.loads if load.options.get("probe-outputs")]
    if not asking and (text := plan.extras.get("outputs_text")) is not None:
        yield f"greedy outputs: {text}"
    known = {(one["load"], one["head"]) for one in told or ()}
    for load in loads:
        if load["load"] in asking and load["pairs"] and (load["load"], load["head"]) not in known:
            arms = f"{load['base']} and {load['head']}"
            yield f"{load['load']}: greedy outputs: no prompt was answered in every run of {arms}"


def _answers(pairs: Sequence[ScoredPair], side: int) -> list[Mapping[int, Output]]:
    """Of each run of a side."""
    sides = (one.sides[side] for pair in pairs for one in pair.runs)
    return [read_outputs(one.path) for one in sides if one.result.has_records and one.path.is_dir()]


def _net(view: _View, *, crossed: bool) -> list[dict[str, Any]]:
    """Sections of more than two arms, one per load."""
    plan, sections = view.plan, []
    if len(plan.arms) < 3:
        return []
    for load in plan.loads:
        if load.section != "load":
            continue
        question = _question(load)
        evidence: list[RunEvidence] = []
        estimates: dict[tuple[str, str], Estimate] = {}
        for comparison in plan.comparisons:
            pairs = view.scored((comparison.key, load.name))
            evidence += _run_evidence(view, pairs, load, question.metric)
            found = estimate(metric_effects(pairs, question.metric))
            if found.n:
                estimates[comparison.base, comparison.head] = found
        outcomes = outcomes_of(evidence)
        level = contrast_level(plan, [found.n for found in estimates.values()])
        if crossed:
            section = crossover_section(
                plan.arms,
                outcomes,
                estimates,
                load=load.name,
                metric=question.metric,
                title=question.title,
                unit=question.unit,
                level=level,
            )
        elif _is_crossover(plan):
            section = None
        else:
            section = causal_section(plan.arms, outcomes, estimates, replace(question, level=level))
        if section is not None:
            sections.append(section)
    return sections


def _is_crossover(plan: Plan) -> bool:
    from atom.diag.compare.crossover import cells_of

    return cells_of(plan.arms) is not None


def _question(load: Load) -> Question:
    """Throughput, as in the documents; the load's own metric where it has declared another rate."""
    name = load.primary if METRICS[load.primary].better == "higher" else "output_throughput"
    metric = METRICS[name]
    return Question(load=load.name, metric=name, title=metric.title, unit=metric.unit, margin_pct=load.margin_pct)


def _run_evidence(view: _View, pairs: Sequence[ScoredPair], load: Load, metric: str) -> Iterator[RunEvidence]:
    for pair in pairs:
        for one in pair.runs:
            for side in one.sides:
                if side.dismissed:
                    continue  # it says nothing of this arm that the other one did not start
                score = side.metric(metric)
                failure = failure_of(side.result, side.path, censored=side.censored)
                counts = None if side.score is None else side.score.counts
                yield RunEvidence(
                    result=side.result,
                    completed=None if counts is None else counts.completed,
                    requests=_asked(load),
                    value=None if score is None else score.value,
                    censored=() if side.score is None else tuple(side.censored),
                    invalid=() if side.score is None else side.score.invalid,
                    failure_class=None if failure is None else str(failure.kind),
                    failure_line=None if failure is None else failure.line,
                )


def _asked(load: Load) -> int | None:
    count = load.options.get("num-prompts")
    return count if isinstance(count, int) else None


# ---- what it is worth


def _of_proven(gate: dict[str, Any], unproven: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A gate decides nothing about code that was not seen to run."""
    lines = unproven.get(gate["load"])
    return gate if not lines else {**gate, "outcome": "undecided", "reason": lines[0]}


def _marked(gate: dict[str, Any], view: _View) -> dict[str, Any]:
    """With what its arms differ in besides what is compared. Unit tests run under no load, on the refs alone."""
    compared = next((one for one in view.plan.comparisons if one.key == gate["comparison"]), None)
    if compared is None or gate["gate"] == "tests":
        return {**gate, "confounded": [], "unasked": []}
    lines = view.confounded(compared, unasked)
    reason = f"{gate['reason']}; the arms differ in {lines[0]}" if lines else gate["reason"]
    return {**gate, "reason": reason, "confounded": view.confounded(compared), "unasked": lines}


def _worth(
    view: _View,
    loads: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    unproven: Mapping[str, Sequence[str]],
) -> tuple[Validity, list[str]]:
    reasons = []
    for arm in view.plan.arms:
        told = _arm(view, arm)
        if told["runs"]["failed"] and not told["runs"]["recorded"]:
            reasons.append(f"{arm.label} could not be run: {told['problem'] or 'no reason known'}")
    if reasons:
        return Validity.FAILED, reasons
    reasons = [f"{name}: {line}" for name, lines in unproven.items() for line in lines]
    reasons += [f"{load['load']}: censored: {line}" for load in loads for line in load["censored"]]
    reasons += [reason for load in loads if load["section"] != "gc" for reason in _invalid(load)]
    compared = [load for load in loads if any(pair["complete"] for pair in load["pairs"])]
    if view.plan.loads and not compared and not any(view.directories(view.plan.comparisons[0], "accuracy")):
        reasons.append("no pair was completed")
    if run.get("ended") in (None, "interrupted"):
        return Validity.INTERRUPTED, reasons
    more = len(reasons) - MOST_REASONS
    reasons = reasons if more <= 0 else [*reasons[:MOST_REASONS], f"and {more} more like these"]
    return (Validity.NOT_VALID if reasons else Validity.VALID), reasons


def _invalid(load: Mapping[str, Any]) -> list[str]:
    """Runs that are no valid evidence by themselves, by kind: `client saturated in 3 of 8 runs, such as main's run-2:
    …`."""
    sides = [run[side] for pair in load["pairs"] for run in pair["runs"] for side in ("base", "head")]
    found: dict[str, list[tuple[str, str]]] = {}
    for side in sides:
        if side["censored"]:
            continue  # said already
        for line in side["invalid"]:
            kind, _, detail = line.partition(": ")
            found.setdefault(kind, []).append((f"{side['arm']}'s {side['run'].rpartition('/')[2]}", detail))
    lines = []
    for kind, runs in found.items():
        who, detail = runs[0]
        such = f", such as {who}" if len(runs) > 1 else f", {who}"
        lines.append(
            f"{load['load']}: {kind} in {len(runs)} of {len(sides)} runs{such}" + (f": {detail}" if detail else "")
        )
    return lines


def _headline(view: _View, sections: Mapping[str, Any]) -> str | None:
    """What stands above the loads' sentences: an arm that cannot be run, arms that do not differ."""
    lost = [arm for arm in view.plan.arms if (runs := _arm(view, arm)["runs"])["failed"] and not runs["recorded"]]
    if lost:
        names = " and ".join(arm.label for arm in lost)
        return f"{names} could not be run, so there is nothing to compare with"
    told = [line for one in view.plan.comparisons if (line := _sameness(view, one)) is not None]
    if sections["gc"] is not None:
        told.append(f"API process: {sections['gc']['verdict']}")
    return "; ".join(told) or None


def _sameness(view: _View, comparison: Comparison) -> str | None:
    """Of two names of one commit that is run in one way."""
    base, head = (view.plan.arm(label) for label in (comparison.base, comparison.head))
    commit = base.provenance.get("sha")
    loads = [load for load in view.plan.loads if load.section != "accuracy"] or view.plan.loads
    if base.kind is not ArmKind.REF or commit is None or any(factors(base, head, load) for load in loads):
        return None
    return f"{base.label} and {head.label} are one commit ({str(commit)[:12]}), run in one way: what differs is noise"


def _word(loads: Sequence[Mapping[str, Any]]) -> str:
    """Of each load, and of each comparison where there are several; never several folded into one."""
    if len(loads) == 1:
        return str(loads[0]["word"])
    several = len({load["comparison"] for load in loads}) > 1
    arms = {load["comparison"]: f", {load['base']} → {load['head']}" if several else "" for load in loads}
    told = (f"{load['load']}{arms[load['comparison']]}: {load['word']}" for load in loads)
    return ("; " if several else ", ").join(told) or "nothing was compared"


def _notes(view: _View, run: Mapping[str, Any], loads: Sequence[Mapping[str, Any]]) -> list[str]:
    # A client that was late says nothing of the server's memory and collections.
    notes = [line for load in loads if load["section"] == "gc" for line in _invalid(load)]
    if view.records.malformed:
        count = view.records.malformed
        notes.append(f"{RUNS_FILE}: {count} {'line' if count == 1 else 'lines'} cannot be read")
    if run.get("ended") == "deadline":
        notes.append(str(run.get("ended_text")))
    if superseded := len(view.records.superseded):
        notes.append(f"{superseded} runs of interrupted pairs were made again; their directories are kept")
    return [*notes, *(view.plan.extras.get("notes") or [])]


# ---- figures, for `atom get`

FIGURES: Final = {
    "base": ("", "geometric mean of the base's runs"),
    "head": ("", "the base's value times head/base, the mean over pairs"),
    "delta_pct": ("%", "head against base: mean of log(head/base) over pairs"),
    "ci_low_pct": ("%", "lower end of its confidence interval"),
    "ci_high_pct": ("%", "upper end of its confidence interval"),
    "noise_floor_pct": ("%", "what comparisons of an arm with itself stay below"),
}


def _figures(loads: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`LOAD.METRIC_delta_pct` and so on of the first comparison, `LOAD.ARM.METRIC_delta_pct` of another, by its head;
    of the first, with one load, also without its name."""
    figures: dict[str, Any] = {}
    alone = len({load["load"] for load in loads}) == 1
    for load in loads:
        is_first = load["comparison"] == loads[0]["comparison"]
        prefixes = [f"{load['load']}."] if is_first else [f"{load['load']}.{load['head']}."]
        prefixes += [""] if is_first and alone else []
        for name, metric in load["metrics"].items():
            low, high = metric["ci_pct"] or (None, None)
            values = {**metric, "ci_low_pct": low, "ci_high_pct": high}
            for key, (unit, definition) in FIGURES.items():
                figure = {
                    "value": values[key],
                    "unit": unit or metric["unit"],
                    "n": metric["pairs"],
                    "definition": f"{metric['title']}: {definition}",
                    "supported": metric["supported"],
                }
                figures |= {f"{prefix}{name}_{key}": figure for prefix in prefixes}
    return figures
