"""From a request to a plan: arms looked up, loads chosen and checked, halves of the machine, what the arms differ in.
Makes nothing and starts nothing, so that a plan can be shown first."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atom.cli.ab_loads import parse_load, suite_loads
from atom.cli.ab_options import ArmChange, Request, arm_changes
from atom.diag.compare.arms import resolve_arm
from atom.diag.compare.confounds import confounded
from atom.diag.compare.crossover import crossed_arms, crossed_comparisons
from atom.diag.compare.gates import Gate, check_gate_loads
from atom.diag.compare.git import open_repository
from atom.diag.compare.model import Arm, ArmKind, Comparison, Half, Load, Placement
from atom.diag.compare.placement import choose_placement, this_machine
from atom.diag.compare.plan import MAX_PAIRS, Plan, make_plan
from atom.diag.compare.provenance import difference, with_packages
from atom.diag.compare.recorded import read_recorded
from atom.diag.compare.recorded_arms import recorded_load
from atom.diag.compare.unit_tests import DEFAULT_COMMAND, check_command
from atom.recipes.errors import UsageError
from atom.recipes.launcher import takes_devices
from atom.recipes.resolve import resolve_recipe
from atom.recipes.suite import default_suite

__all__ = ["plan_of"]

_NOWHERE: Final = Placement(halves=(Half(name="recorded"),), reason="nothing is run: the arms are records")
_NOT_OF_RECORDS: Final = (
    *("recipe", "suite", "load", "pairs", "swap", "aa", "until_decided", "max_pairs", "deadline", "cooldown"),
    *("placement", "devices", "cpus", "seed", "tests", "tests_command", "accuracy", "gc", "cross", "probe_outputs"),
)
"""Options that say how arms are run."""
_OWN_ENGINE: Final = "atom.engine"
"""It takes devices, and computes on CPUs."""
_NONCE_BYTES: Final = 4
_AGENTIC: Final = "aiperf-agentic"

GC_SECONDS: Final = 60
"""Of the long run of `--gc`, where no suite says otherwise: long enough for growth to be told from noise."""
SIMULATED: Final = "simulated"
_PROBED: Final = ("random", "sharegpt", "custom", "trace")


def plan_of(request: Request) -> Plan:
    """UsageError for what cannot be."""
    arms = _arms(request)
    _check_options(request, arms)
    given = _given_loads(request)
    _check_refs(request, arms, given)
    comparisons = [Comparison(base=arms[0].label, head=arm.label) for arm in arms[1:]]
    if request.cross:
        comparisons = crossed_comparisons(arms[0], arms[1])
        arms = [*arms, *crossed_arms(arms[0], arms[1])]
    recorded = all(arm.kind is ArmKind.RECORDED for arm in arms)
    placement = _NOWHERE if recorded else _placement(request, arms, given)
    loads, suite = _loads(request, arms, given, gpus=placement.halves[0].devices is not None)
    _check_devices(request, arms, loads)
    declared = given if given is not None else [] if suite is None else suite_loads(suite)
    arms = [_with_packages(arm, loads) for arm in arms]
    _check_tests(request, arms)
    check_gate_loads(request.gates, loads)
    for path in dict.fromkeys(path for arm in arms for path in arm.recorded):
        read_recorded(Path(path))  # what cannot be read is wrong usage, and no run that went wrong
    return make_plan(
        arms,
        comparisons,
        loads,
        placement,
        pairs=min(len(arms[0].recorded), MAX_PAIRS) if recorded else request.pairs,
        swap=request.swap and not recorded,
        aa_pairs=request.aa_pairs,
        seed=request.seed,
        until_decided=request.until_decided,
        max_pairs=request.max_pairs,
        deadline_s=request.deadline_s,
        cool_down_s=request.cooldown_s or 0.0,
        gates=[*map(_gate, request.gates), *_section_gates(request)],
        suite=suite,
        extras={
            **_extras(request, arms, comparisons, loads),
            "notes": _notes(request, arms, loads, declared, placement),
            **({} if recorded else {"outputs_text": _outputs_text(request, loads)}),
        },
    )


def _arms(request: Request) -> list[Arm]:
    plain = _resolved(request, [ArmChange()] * len(request.arms), complete=False)
    return _resolved(request, arm_changes([arm.label for arm in plain], request.changes))


def _resolved(request: Request, changes: Sequence[ArmChange], *, complete: bool = True) -> list[Arm]:
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
                sha=change.sha,
                complete=complete,
                taken=[arm.label for arm in arms],
            )
        )
    return arms


def _check_options(request: Request, arms: Sequence[Arm]) -> None:
    """What was given and would be ignored."""
    recorded = [arm.kind is ArmKind.RECORDED for arm in arms]
    refused = _NOT_OF_RECORDS if all(recorded) else ()
    if recorded[0] or all(recorded[1:]):  # each comparison has as many pairs as there are records
        refused = (*refused, "pairs", "until_decided", "max_pairs")
    for name in refused:
        if name in request.told:
            flag = "--no-swap" if name == "swap" and not request.swap else f"--{name.replace('_', '-')}"
            why = "nothing is run" if all(recorded) else "there are as many pairs as records"
            raise UsageError(f"{flag}: leave it out, for the arms are recorded already: {why}")
    if request.recipe is not None and all(arm.kind is not ArmKind.REF for arm in arms):
        raise UsageError("--recipe says how a git ref is built and started, and none of the arms is one: leave it out")


def _check_devices(request: Request, arms: Sequence[Arm], loads: Sequence[Load]) -> None:
    """GPUs that were named are used by every server, or it is said which one takes none."""
    if request.devices is None:
        return
    for arm in arms:
        if arm.kind is ArmKind.URL:
            raise UsageError(f"--devices: {arm.label} is a server that runs already, and its devices are its own")
        if arm.kind is ArmKind.RECORDED:
            continue
        for name in dict.fromkeys([arm.recipe] if arm.recipe else [load.recipe for load in loads]):
            if name is not None and not takes_devices(resolve_recipe(name)):
                raise UsageError(
                    f"--devices: recipe {name} of {arm.label} says in no field how to choose devices; "
                    "give it `devices.env`, or leave --devices out"
                )


def _placement(request: Request, arms: Sequence[Arm], loads: Sequence[Load] | None) -> Placement:
    """Of servers that run already only the clients are placed."""
    machine = this_machine(gpus=request.devices is not None or _may_use_gpus(arms, loads or ()))
    placement = choose_placement(request.devices, request.cpus, asked=request.placement, machine=machine)
    if any(arm.kind in (ArmKind.REF, ArmKind.RECIPE) for arm in arms):
        return placement
    halves = tuple(replace(half, devices=None, server_cpus=()) for half in placement.halves)
    how = "both arms at once" if placement.concurrent else "one arm after the other"
    return Placement(halves=halves, reason=f"{how}: the servers run already, where they are")


def _may_use_gpus(arms: Sequence[Arm], loads: Sequence[Load]) -> bool:
    """Whether halves are to be of GPUs: not for servers whose recipes take none, or that compute on CPUs."""
    names = [arm.recipe for arm in arms if arm.recipe is not None]
    if any(arm.kind is ArmKind.REF and arm.recipe is None for arm in arms):
        names += [load.recipe for load in loads if load.recipe is not None]
    recipes = map(resolve_recipe, dict.fromkeys(names))
    return any(takes_devices(one) and _OWN_ENGINE not in one.source_tree.packages for one in recipes)


def _check_refs(request: Request, arms: Sequence[Arm], loads: Sequence[Load] | None) -> None:
    """Refs of other projects need a recipe."""
    refs = [arm for arm in arms if arm.kind is ArmKind.REF and arm.recipe is None]
    if not refs or (request.loads and any(load.recipe is not None for load in loads or ())):
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


def _given_loads(request: Request) -> list[Load] | None:
    """Those that were asked for; None where that is left to the machine."""
    if request.loads:
        return [parse_load(text) for text in request.loads]
    return None if request.suite is None else suite_loads(request.suite)


def _loads(
    request: Request, arms: Sequence[Arm], given: Sequence[Load] | None, *, gpus: bool
) -> tuple[list[Load], str | None]:
    """And the suite that they are from."""
    own = all(arm.kind is not ArmKind.REF or arm.recipe is not None or request.recipe for arm in arms)
    suite = request.suite
    if all(arm.kind is ArmKind.RECORDED for arm in arms):
        return [_declared(recorded_load(arms), request)], None
    if given is None:
        suite = default_suite(gpus=int(gpus), own_servers=own)
        given = suite_loads(suite)
    loads = [_same_markers(_declared(load, request), request.seed) for load in _told_apart(given)]
    if not own:
        loads = [load if load.recipe is not None else replace(load, recipe=SIMULATED) for load in loads]
    loads = _probed(loads, request.probe_outputs)
    if request.gc and not any(load.section == "gc" for load in loads):
        loads.append(_long_run(own, gpus))
    if request.accuracy is not None:
        loads.append(_accuracy(request, own))
    return loads, suite


def _probed(loads: list[Load], count: int) -> list[Load]:
    """One of them also asks for greedy outputs: the last whose server computes something."""
    able = [load for load in loads if load.section == "load" and load.bench in _PROBED and load.recipe != SIMULATED]
    if not count or not able or any("probe-outputs" in load.options for load in loads):
        return loads
    return [
        replace(load, options={**load.options, "probe-outputs": count}) if load is able[-1] else load for load in loads
    ]


def _outputs_text(request: Request, loads: Sequence[Load]) -> str:
    """Which load asks for greedy outputs, or why none does."""
    asking = [load for load in loads if load.options.get("probe-outputs")]
    if asking:
        return "; ".join(f"{load.options['probe-outputs']} prompts after {load.name}" for load in asking)
    if not request.probe_outputs:
        return "not asked for (--probe-outputs 0)"
    if any(load.section == "load" and load.recipe == SIMULATED for load in loads):
        return "not asked for: the simulated executor computes no text"
    return f"not asked for: only loads of {', '.join(_PROBED)} do that"


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


def _same_markers(load: Load, seed: int) -> Load:
    """What tells an agentic load's prompts from those of other runs is the same in all runs of a comparison."""
    options = load.options
    if load.bench != _AGENTIC or "cache-bust-nonce" in options or options.get("cache-bust") == "none":
        return load
    if options.get("client", "native") != "native":
        return load
    nonce = hashlib.sha256(f"{seed}:{load.name}".encode()).hexdigest()[: 2 * _NONCE_BYTES]
    return replace(load, options={**options, "cache-bust-nonce": nonce})


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
    if request.tests:
        check_command(request.tests)


def _gate(gate: Gate) -> dict[str, Any]:
    return {"slower_pct": gate.slower_pct, "metric": gate.metric, "load": gate.load}


def _section_gates(request: Request) -> list[dict[str, Any]]:
    margin = {"margin_pct": request.accuracy_margin_pct}
    return [{"section": name, **(margin if name == "accuracy" else {})} for name in request.section_gates]


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


def _notes(
    request: Request,
    arms: Sequence[Arm],
    loads: Sequence[Load],
    declared: Sequence[Load],
    placement: Placement,
) -> list[str]:
    """What else has to be known. `declared`: the loads before the command line changed them."""
    gpus = placement.halves[0].devices is not None
    return [*_overridden(request, declared), *(_not_placed(arms, loads) if gpus else ())]


def _overridden(request: Request, declared: Sequence[Load]) -> Iterator[str]:
    """What the loads declare, and the command line declares otherwise."""
    plain = Load(name="plain", bench="plain") if request.loads else None
    for load in declared:
        if request.primary not in (None, load.primary) and (plain is None or load.primary != plain.primary):
            yield f"--primary {request.primary} decides {load.name}, instead of {load.primary}"
        if request.margin_pct not in (None, load.margin_pct) and (plain is None or load.margin_pct != plain.margin_pct):
            yield f"--margin {request.margin_pct:g}% holds for {load.name}, instead of {load.margin_pct:g}%"


def _not_placed(arms: Sequence[Arm], loads: Sequence[Load]) -> Iterator[str]:
    """Servers that do not keep to the GPUs of their half."""
    started = [arm for arm in arms if arm.kind in (ArmKind.REF, ArmKind.RECIPE)]
    names = [name for arm in started for name in ([arm.recipe] if arm.recipe else [load.recipe for load in loads])]
    for name in dict.fromkeys(name for name in names if name is not None):
        recipe = resolve_recipe(name)
        if not takes_devices(recipe) and _OWN_ENGINE not in recipe.source_tree.packages:
            yield f"recipe {name} has no `devices.env`: its server is not told which GPUs are its half's"
