"""From a request to a plan: arms looked up, loads chosen and checked, halves of the machine, what the arms differ in.
Makes nothing and starts nothing, so that a plan can be shown first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atom.cli.ab_loads import parse_load, suite_loads
from atom.cli.ab_options import ArmChange, Request, arm_changes
from atom.diag.compare.arms import resolve_arm
from atom.diag.compare.confounds import confounded
from atom.diag.compare.crossover import crossed_arms, crossed_comparisons
from atom.diag.compare.gates import Gate
from atom.diag.compare.git import open_repository
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, Placement
from atom.diag.compare.placement import choose_placement, this_machine
from atom.diag.compare.plan import Plan, make_plan
from atom.diag.compare.provenance import difference, with_packages
from atom.diag.compare.unit_tests import DEFAULT_COMMAND
from atom.recipes.errors import UsageError
from atom.recipes.placeholders import uses
from atom.recipes.resolve import resolve_recipe
from atom.recipes.suite import default_suite

__all__ = ["plan_of"]

_NOWHERE: Final = Placement(halves=(Half(name="recorded"),), reason="nothing is run: the arms are records")

GC_SECONDS: Final = 60
"""Of the long run of `--gc`, where no suite says otherwise: long enough for growth to be told from noise."""
SIMULATED: Final = "simulated"
_PROBED: Final = ("random", "sharegpt", "custom", "trace")


def plan_of(request: Request) -> Plan:
    """UsageError for what cannot be."""
    arms = _arms(request)
    _check_refs(request, arms)
    comparisons = [Comparison(base=arms[0].label, head=arm.label) for arm in arms[1:]]
    if request.cross:
        comparisons = crossed_comparisons(arms[0], arms[1])
        arms = [*arms, *crossed_arms(arms[0], arms[1])]
    recorded = all(arm.kind is ArmKind.RECORDED for arm in arms)
    placement = (
        _NOWHERE
        if recorded
        else choose_placement(
            request.devices,
            request.cpus,
            asked=request.placement,
            machine=this_machine(gpus=_may_use_gpus(request, arms)),
        )
    )
    loads, suite = _loads(request, arms, gpus=placement.halves[0].devices is not None)
    arms = [_with_packages(arm, loads) for arm in arms]
    _check_tests(request, arms)
    return make_plan(
        arms,
        comparisons,
        loads,
        placement,
        pairs=request.pairs,
        swap=request.swap and not recorded,
        aa_pairs=request.aa_pairs,
        seed=request.seed,
        until_decided=request.until_decided,
        max_pairs=request.max_pairs,
        deadline_s=request.deadline_s,
        cool_down_s=request.cooldown_s or 0.0,
        gates=[*map(_gate, request.gates), *({"section": name} for name in request.section_gates)],
        suite=suite,
        extras=_extras(request, arms, comparisons, loads),
    )


def _arms(request: Request) -> list[Arm]:
    plain = _resolved(request, [ArmChange()] * len(request.arms))
    return _resolved(request, arm_changes([arm.label for arm in plain], request.changes))


def _resolved(request: Request, changes: Sequence[ArmChange]) -> list[Arm]:
    arms: list[Arm] = []
    for one, change in zip(request.arms, changes, strict=True):
        arms.append(
            resolve_arm(
                one.spec,
                role=one.role,
                repo=request.repo,
                recipe=request.recipe,
                python=change.python,
                image=change.image,
                variables=change.variables,
                env=change.env,
                server_args=change.server_args,
                taken=[arm.label for arm in arms],
            )
        )
    return arms


def _may_use_gpus(request: Request, arms: Sequence[Arm]) -> bool:
    """Whether halves are to be of GPUs: not for servers whose recipes take none."""
    if request.devices is not None:
        return True
    names = [arm.recipe for arm in arms if arm.recipe is not None]
    names += [load.recipe for load in map(parse_load, request.loads) if load.recipe is not None]
    return any(uses(resolve_recipe(name), "devices") for name in dict.fromkeys(names))


def _check_refs(request: Request, arms: Sequence[Arm]) -> None:
    """Refs of other projects need a recipe."""
    refs = [arm for arm in arms if arm.kind is ArmKind.REF and arm.recipe is None]
    if not refs or any(load.recipe is not None for load in map(parse_load, request.loads)):
        return
    places = {(str(arm.provenance["repository"]), str(arm.provenance["sha"])) for arm in refs}
    if not any(open_repository(Path(place)).ask("rev-parse", "--verify", "-q", f"{sha}:.src") for place, sha in places):
        raise UsageError(
            f"{refs[0].spec} is a ref of {refs[0].provenance['repository']}, which is another project: --recipe FILE "
            "says how its server is built and started (docs/recipes.md)"
        )


def _with_packages(arm: Arm, loads: Sequence[Load]) -> Arm:
    name = arm.recipe or next((load.recipe for load in loads if load.recipe is not None), None)
    return arm if name is None else with_packages(arm, resolve_recipe(name))


# ---- loads


def _loads(request: Request, arms: Sequence[Arm], *, gpus: bool) -> tuple[list[Load], str | None]:
    """And the suite that they are from."""
    own = all(arm.kind is not ArmKind.REF or arm.recipe is not None or request.recipe for arm in arms)
    suite = None
    if request.loads:
        loads = [parse_load(text) for text in request.loads]
    elif all(arm.kind is ArmKind.RECORDED for arm in arms):
        loads = [Load(name="recorded", bench="recorded")]
    else:
        suite = request.suite or default_suite(gpus=int(gpus), own_servers=own)
        loads = suite_loads(suite)
    loads = [_declared(load, request) for load in _told_apart(loads)]
    loads = _probed(loads, request.probe_outputs)
    if request.gc and not any(load.section == "gc" for load in loads):
        loads.append(_long_run(own, gpus))
    if request.accuracy is not None:
        loads.append(_accuracy(request, own))
    if not own:
        loads = [load if load.recipe is not None else replace(load, recipe=SIMULATED) for load in loads]
    return loads, suite


def _probed(loads: list[Load], count: int) -> list[Load]:
    """One of them also asks for greedy outputs: the last whose server computes something."""
    able = [load for load in loads if load.section == "load" and load.bench in _PROBED and load.recipe != SIMULATED]
    if not count or not able or any("probe-outputs" in load.options for load in loads):
        return loads
    return [
        replace(load, options={**load.options, "probe-outputs": count}) if load is able[-1] else load for load in loads
    ]


def _told_apart(loads: Sequence[Load]) -> list[Load]:
    """Loads that got the same name by themselves are numbered."""
    found: list[Load] = []
    for load in loads:
        names = {one.name for one in found}
        numbered = (load.name if n == 1 else f"{load.name}-{n}" for n in range(1, len(loads) + 2))
        found.append(replace(load, name=next(name for name in numbered if name not in names)))
    return found


def _declared(load: Load, request: Request) -> Load:
    changes: dict[str, Any] = {}
    if request.primary is not None:
        changes["primary"] = request.primary
    if request.margin_pct is not None:
        changes["margin_pct"] = request.margin_pct
    return replace(load, **changes)


def _long_run(own: bool, gpus: bool) -> Load:
    """For a time and not for a number of requests, so that a slower arm is seen for as long."""
    lengths = (2048, 64, 64) if gpus else (64, 8, 16)
    options = {
        "random-input-len": lengths[0],
        "random-output-len": lengths[1],
        "max-concurrency": lengths[2],
        "duration": 1200 if gpus else GC_SECONDS,
        "num-prompts": 50_000 if gpus else 500 * GC_SECONDS,  # prepared beforehand; more than time allows
        "ignore-eos": True,
    }
    return Load(
        name="long-run",
        bench="random",
        options=options,
        recipe=None if own else SIMULATED,
        server_args=() if own else ("--sim-base-ms", "8"),
        primary="ttft_mean",
        section="gc",
        seconds=float(options["duration"]) + 10.0,
    )


def _accuracy(request: Request, own: bool) -> Load:
    options: dict[str, Any] = {"limit": request.accuracy}
    if request.accuracy_dataset is not None:
        options["dataset-path"] = str(request.accuracy_dataset.absolute())
    return Load(name="gsm8k", bench="gsm8k", options=options, recipe=None if own else "embedded", section="accuracy")


# ---- what else the plan has


def _check_tests(request: Request, arms: Sequence[Arm]) -> None:
    if request.tests is not None and any(arm.kind is not ArmKind.REF for arm in arms[:2]):
        raise UsageError("--tests: unit tests are run for git refs, and one of the arms is none")


def _gate(gate: Gate) -> dict[str, Any]:
    return {"slower_pct": gate.slower_pct, "metric": gate.metric, "load": gate.load}


def _extras(
    request: Request, arms: Sequence[Arm], comparisons: Sequence[Comparison], loads: Sequence[Load]
) -> dict[str, Any]:
    by_label = {arm.label: arm for arm in arms}
    pairs = {one.key: (by_label[one.base], by_label[one.head]) for one in comparisons}
    extras: dict[str, Any] = {
        "turns": "order",
        "differences": {key: difference(base, head) for key, (base, head) in pairs.items()},
        "confounded": {
            key: list(dict.fromkeys(line for load in loads for line in confounded(base, head, load)))
            for key, (base, head) in pairs.items()
        },
    }
    if all(arm.kind is ArmKind.RECORDED for arm in arms):
        extras["turns"] = "recorded"
    if request.tests is not None:
        command = request.tests or DEFAULT_COMMAND
        extras |= {"tests_command": command, "tests_text": f"unit tests of both refs: {command}"}
    if request.accuracy is not None:
        source = request.accuracy_dataset or "generated problems, which are not GSM8K"
        extras["accuracy_text"] = f"{request.accuracy:,} questions per run, one by one: {source}"
    if request.gc:
        extras["gc_text"] = "the API process of each arm over a long run"
    return extras
