"""The options of `atom ab-compare` in groups, and the `Request` that they make: checked, but nothing looked up yet.

What a ref, recipe or URL is, is found by `diag/compare/arms.py`; what becomes of a request is `cli/ab_run.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from atom.cli import options as opt
from atom.cli.options import parse_duration
from atom.diag.compare.gate_document import ACCURACY_MARGIN_PCT
from atom.diag.compare.gates import Gate, parse_gate
from atom.diag.compare.metrics import PRIMARY_CHOICES, metric
from atom.recipes.errors import UsageError

__all__ = [
    "ArmChange",
    "ArmRequest",
    "Request",
    "arm_changes",
    "arm_options",
    "evidence_options",
    "further_options",
    "load_options",
    "output_options",
    "request_of",
    "schedule_options",
]

ARMS: Final = "Arms"
LOADS: Final = "Loads"
SCHEDULE: Final = "Schedule"
EVIDENCE: Final = "Evidence"
FURTHER: Final = "Further comparisons"
CAUSAL_ROLES: Final = ("control", "treatment", "bypass", "repair", "discriminator", "recorded")
BASE: Final = "base"
HEAD: Final = "head"
SECTION_GATES: Final = ("tests", "accuracy", "gc")
"""Gates on what is no metric: a test that fails on the head alone, accuracy that is lost, what grows with requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmChange:
    """What one arm has that its recipe does not say."""

    env: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    server_args: tuple[str, ...] = ()
    image: str | None = None
    python: str | None = None
    sha: str | None = None
    """Of what cannot tell its commit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRequest:
    """One arm as it was asked for; `spec` as `diag/compare/arms.py` takes it, `[label=]` included."""

    spec: str
    role: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A comparison as it was asked for."""

    arms: tuple[ArmRequest, ...]
    """The first is what the others are compared with."""
    changes: Mapping[str, Any]
    """The options that change one arm, as they were given: for `arm_changes`."""
    repo: Path
    recipe: str | None
    suite: str | None
    loads: tuple[str, ...]
    pairs: int
    swap: bool
    aa_pairs: int
    seed: int
    until_decided: bool
    max_pairs: int | None
    deadline_s: float | None
    cooldown_s: float | None
    primary: str | None
    margin_pct: float | None
    gates: tuple[Gate, ...]
    section_gates: tuple[str, ...]
    """`tests`, `accuracy`, `gc`: what the base has and the head has not fails."""
    accuracy_margin_pct: float
    """Percentage points that `--gate accuracy` lets the head lose."""
    placement: str
    devices: str | None
    cpus: str | None
    tests: str | None
    """Command of the unit tests; empty: the default one; None: none."""
    accuracy: int | None
    """Word problems."""
    accuracy_dataset: Path | None
    gc: bool
    cross: bool
    probe_outputs: int
    """Prompts, of every run of one load."""
    told: frozenset[str] = frozenset()
    """Options that were given, by the names of their parameters."""


# ---- groups; see cli/option_groups.py


def arm_options(
    repo: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Git repository that refs are of; default: the one around the current directory.",
            rich_help_panel=ARMS,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="How a ref is built and started; default: the load's own.", rich_help_panel=ARMS
        ),
    ] = None,
    base_image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Container image that the base's server runs in.", rich_help_panel=ARMS),
    ] = None,
    head_image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="And the head's.", rich_help_panel=ARMS)
    ] = None,
    base_args: Annotated[
        str | None,
        typer.Option(metavar="ARGS", help="Arguments that only the base's server gets.", rich_help_panel=ARMS),
    ] = None,
    head_args: Annotated[str | None, typer.Option(metavar="ARGS", help="And the head's.", rich_help_panel=ARMS)] = None,
    base_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Variable that only the base's server gets; repeatable.", rich_help_panel=ARMS
        ),
    ] = None,
    head_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="And the head's.", rich_help_panel=ARMS)
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE:[LABEL=]SPEC",
            help=(
                "A further arm, compared with the base in pairs of its own; ROLE: treatment, bypass, repair, "
                "discriminator, recorded, or control in the place of BASE. Repeatable."
            ),
            rich_help_panel=ARMS,
        ),
    ] = None,
    arm_env: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL:NAME=VALUE", help="Variable of an arm's server.", rich_help_panel=ARMS),
    ] = None,
    arm_set: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL:NAME=VALUE", help="--set of an arm's recipe.", rich_help_panel=ARMS),
    ] = None,
    arm_args: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL:ARGS", help="Arguments of an arm's server.", rich_help_panel=ARMS),
    ] = None,
    arm_image: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL:IMAGE", help="Container image of an arm.", rich_help_panel=ARMS),
    ] = None,
    arm_python: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL:PATH", help="{python} of an arm's recipe.", rich_help_panel=ARMS),
    ] = None,
    arm_sha: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL:SHA",
            help="Commit of a recorded arm, or of a server that runs already, which does not tell.",
            rich_help_panel=ARMS,
        ),
    ] = None,
) -> None:
    """What is compared."""


def load_options(
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Loads of a suite; default: one for this machine.", rich_help_panel=LOADS
        ),
    ] = None,
    load: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'SUBCOMMAND OPTIONS'",
            help="A load as `atom bench` takes it, such as 'random --input-len 2048'; repeatable; instead of a suite.",
            rich_help_panel=LOADS,
        ),
    ] = None,
) -> None:
    """Under which loads."""


def schedule_options(
    pairs: Annotated[int, typer.Option(help="Pairs per load.", rich_help_panel=SCHEDULE)] = 3,
    swap: Annotated[
        bool,
        typer.Option("--swap/--no-swap", help="Run each pair again with the halves swapped.", rich_help_panel=SCHEDULE),
    ] = True,
    aa: Annotated[
        int,
        typer.Option(
            "--aa",
            "--aa-pairs",
            metavar="N",
            help="First run the base against itself, N pairs: noise floor.",
            rich_help_panel=SCHEDULE,
        ),
    ] = 0,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided", help="Add pairs until the primary metrics are decided.", rich_help_panel=SCHEDULE
        ),
    ] = False,
    max_pairs: Annotated[
        int | None,
        typer.Option(help="But no more than these; default: 12.", rich_help_panel=SCHEDULE),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Begin no pair that would not end in this time, such as 50m.", rich_help_panel=SCHEDULE
        ),
    ] = None,
    cooldown: Annotated[
        str | None, typer.Option(metavar="TIME", help="Rest between matched runs.", rich_help_panel=SCHEDULE)
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            help="halves: both arms at the same time; serial: one after the other; auto.", rich_help_panel=SCHEDULE
        ),
    ] = "auto",
    devices: Annotated[
        str | None,
        typer.Option(metavar="A/B", help="GPUs of the two halves, such as 0-3/4-7.", rich_help_panel=SCHEDULE),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(metavar="A/B", help="CPUs of the two halves, such as 0-7/8-15.", rich_help_panel=SCHEDULE),
    ] = None,
    seed: opt.SeedOption = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and exit.", rich_help_panel=SCHEDULE)
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Go on with a comparison that was interrupted.", rich_help_panel=SCHEDULE),
    ] = None,
) -> None:
    """How often, in which order, and where."""


def evidence_options(
    primary: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="The metric that decides; default: the load's.", rich_help_panel=EVIDENCE),
    ] = None,
    margin: Annotated[
        str | None,
        typer.Option(
            metavar="PCT", help="Differences within ± this are equivalent; default: 1%.", rich_help_panel=EVIDENCE
        ),
    ] = None,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="PCT",
            help="Exit status 3 if a primary metric is slower by this much, 4 if that stays open.",
            rich_help_panel=EVIDENCE,
        ),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:PCT",
            help="The same for any metric; or tests, accuracy[:POINTS], gc, where those are compared. Repeatable.",
            rich_help_panel=EVIDENCE,
        ),
    ] = None,
) -> None:
    """What counts."""


def further_options(
    tests: Annotated[
        bool,
        typer.Option("--tests", help="Run both refs' unit tests; --tests=COMMAND to say how.", rich_help_panel=FURTHER),
    ] = False,
    tests_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="How; {python}, {src} and {junit} are filled in. Default: pytest of tests/unit.",
            rich_help_panel=FURTHER,
        ),
    ] = None,
    accuracy: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ask both arms N word problems, question by question.", rich_help_panel=FURTHER),
    ] = None,
    accuracy_dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="GSM8K, as `atom bench gsm8k` takes it; default: generated.", rich_help_panel=FURTHER
        ),
    ] = None,
    probe_outputs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Compare greedy answers to N prompts, judged by how much runs of one arm differ; 0: none.",
            rich_help_panel=FURTHER,
        ),
    ] = 4,
    gc: Annotated[
        bool,
        typer.Option(
            "--gc", help="A long run, and what grows in the API process of each arm.", rich_help_panel=FURTHER
        ),
    ] = False,
    cross: Annotated[
        bool,
        typer.Option(
            "--cross",
            help="Source and runtime of BASE and HEAD crossed, 2×2: which of them makes the difference.",
            rich_help_panel=FURTHER,
        ),
    ] = False,
) -> None:
    """What else is compared."""


def output_options(
    output_dir: opt.OutputDirOption = None,
    json_path: opt.JsonOption = None,
    markdown: opt.MarkdownOption = None,
    junit: opt.JunitOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Where results go."""


# ---- what they mean together


def request_of(
    base: str | None, head: str | None, given: Mapping[str, Any], told: Collection[str] = frozenset()
) -> Request:
    """UsageError that names the option, for what cannot be. `told`: which of `given` were not left to their default."""
    _check_numbers(given)
    arms = _arms(base, head, given)
    if given["load"] and given["suite"]:
        raise UsageError("--load and --suite both say which loads there are; give one of them")
    tests = given["tests_command"] if given["tests_command"] is not None else ("" if given["tests"] else None)
    if given["accuracy_dataset"] is not None and given["accuracy"] is None:
        raise UsageError("--accuracy-dataset needs --accuracy N: how many of its questions are asked")
    gates, sections, accuracy_margin_pct = _gates(given["fail_if_slower"], given["gate"] or [])
    _check_section_gates(sections, given)
    if given["primary"] is not None and given["primary"] not in PRIMARY_CHOICES:
        raise UsageError(f"--primary must be one of {', '.join(PRIMARY_CHOICES)}; got {given['primary']!r}")
    return Request(
        arms=arms,
        changes={name: given[name] for name in _CHANGES},
        repo=given["repo"] or Path(),
        recipe=given["recipe"],
        suite=given["suite"],
        loads=tuple(given["load"] or ()),
        pairs=given["pairs"],
        swap=given["swap"],
        aa_pairs=given["aa"],
        seed=given["seed"],
        until_decided=given["until_decided"],
        max_pairs=given["max_pairs"],
        deadline_s=parse_duration("--deadline", given["deadline"]),
        cooldown_s=0.0 if given["cooldown"] in ("0", "0s") else parse_duration("--cooldown", given["cooldown"]),
        primary=given["primary"],
        margin_pct=None if given["margin"] is None else parse_percent("--margin", given["margin"]),
        gates=gates,
        section_gates=sections,
        accuracy_margin_pct=accuracy_margin_pct,
        placement=given["placement"],
        devices=given["devices"],
        cpus=given["cpus"],
        tests=tests,
        accuracy=given["accuracy"],
        accuracy_dataset=given["accuracy_dataset"],
        gc=given["gc"],
        cross=given["cross"],
        probe_outputs=given["probe_outputs"],
        told=frozenset(told),
    )


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name, least in (("pairs", 1), ("aa", 0), ("accuracy", 1), ("max_pairs", 1), ("probe_outputs", 0)):
        value, most = given[name], {"probe_outputs": 256, "accuracy": 1_000_000}.get(name, 1000)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} must be {least} to {most}, got {value}")
    if given["max_pairs"] is not None:
        if not given["until_decided"]:
            raise UsageError("--max-pairs is for --until-decided; --pairs says how many there are without it")
        if given["max_pairs"] < 2:
            raise UsageError("--max-pairs must be at least 2: one pair decides nothing")
        if given["max_pairs"] < given["pairs"]:
            raise UsageError(f"--max-pairs {given['max_pairs']} is fewer than --pairs {given['pairs']}")
    if given["placement"] not in ("auto", "halves", "serial"):
        raise UsageError(f"--placement must be auto, halves or serial, got {given['placement']!r}")


def parse_percent(flag: str, text: str) -> float:
    """`2%` or `2`: above 0, below 1000."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%?\s*", text, re.ASCII)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{flag} must be a percentage above 0 such as 2%, got {text!r}")
    return float(match[1])


def _gates(fail_if_slower: str | None, gates: Sequence[str]) -> tuple[tuple[Gate, ...], tuple[str, ...], float]:
    """Of metrics, and of sections; and the margin of accuracy."""
    found: list[Gate] = []
    sections: list[str] = []
    margin_pct = ACCURACY_MARGIN_PCT
    if fail_if_slower is not None:
        found.append(Gate(slower_pct=parse_percent("--fail-if-slower", fail_if_slower)))
    for text in gates:
        if text in SECTION_GATES:
            sections.append(text)
            continue
        name, colon, limit = text.partition(":")
        if name == "accuracy" and colon:
            margin_pct = parse_percent(f"--gate {text}: its limit", limit)
            if margin_pct > 100:
                raise UsageError(f"--gate {text}: no more than 100 points can be lost")
            sections.append(name)
            continue
        try:
            gate = parse_gate(text)
            if gate.metric is not None:
                metric(gate.metric)
        except UsageError as error:
            raise UsageError(f"--gate {text}: {error}; or one of {', '.join(SECTION_GATES)}") from None
        if any((one.metric, one.load) == (gate.metric, gate.load) for one in found):
            raise UsageError(f"--gate {text}: there is one on this already")
        found.append(gate)
    return tuple(found), tuple(dict.fromkeys(sections)), margin_pct


def _check_section_gates(sections: Sequence[str], given: Mapping[str, Any]) -> None:
    asked = {"tests": given["tests"] or given["tests_command"] is not None, "accuracy": given["accuracy"] is not None}
    for name in sections:
        if not asked.get(name, given.get(name)):
            raise UsageError(f"--gate {name} needs --{name}: nothing would answer it")


def _arms(base: str | None, head: str | None, given: Mapping[str, Any]) -> tuple[ArmRequest, ...]:
    """Base first, then the others, each with what its own options change."""
    further = [_further(text) for text in given["arm"] or []]
    controls = [arm for arm in further if arm.role == "control"]
    if base is not None and controls:
        raise UsageError(f"--arm control:{controls[0].spec}: BASE is the control already")
    if base is None and len(controls) != 1:
        raise UsageError(
            "what is to be compared? Give BASE and HEAD (`atom ab-compare main branch`), "
            "or one --arm control:… and others"
        )
    others = [arm for arm in further if arm.role != "control"]
    first = ArmRequest(spec=base, role=BASE) if base is not None else controls[0]
    second = [ArmRequest(spec=head, role=HEAD)] if head is not None else []
    if not second and not others:
        raise UsageError(f"{first.spec} is to be compared with what? Give HEAD, or an --arm")
    arms = [first, *second, *others]
    if given["cross"] and (len(arms) != 2 or head is None):
        raise UsageError("--cross is for BASE and HEAD alone: it makes the other cells itself")
    return tuple(arms)


def _further(text: str) -> ArmRequest:
    role, colon, spec = text.partition(":")
    if not colon or role not in CAUSAL_ROLES or not spec:
        raise UsageError(f"--arm must be ROLE:LABEL=SPEC with ROLE one of {', '.join(CAUSAL_ROLES)}; got {text!r}")
    return ArmRequest(spec=spec, role=role)


_CHANGES: Final = (
    *("base_image", "head_image", "base_args", "head_args", "base_env", "head_env"),
    *("arm_env", "arm_set", "arm_args", "arm_image", "arm_python", "arm_sha"),
)


def arm_changes(labels: Sequence[str], given: Mapping[str, Any]) -> list[ArmChange]:
    """What --base-env, --arm-args and the like change of each arm; `base` and `head` are the first two."""
    named = {BASE: 0, HEAD: 1} | {label: index for index, label in enumerate(labels)}
    changes = [ArmChange() for _ in labels]

    def change(flag: str, label: str, **what: Any) -> None:
        if label not in named:
            raise UsageError(f"{flag} {label}:…: there is no arm {label!r}; there are {', '.join(labels)}")
        index = named[label]
        before = changes[index]
        merged: dict[str, Any] = {
            name: {**getattr(before, name), **value} if isinstance(value, dict) else value
            for name, value in what.items()
        }
        if "server_args" in merged:
            merged["server_args"] = (*before.server_args, *merged["server_args"])
        changes[index] = replace(before, **merged)

    for label in (BASE, HEAD):
        if (image := given[f"{label}_image"]) is not None:
            change(f"--{label}-image", label, image=image)
        if (args := given[f"{label}_args"]) is not None:
            change(f"--{label}-args", label, server_args=_words(f"--{label}-args", args))
        for text in given[f"{label}_env"] or []:
            change(f"--{label}-env", label, env=_pair(f"--{label}-env", text))
    for text in given["arm_env"] or []:
        label, value = _labelled("--arm-env", text)
        change("--arm-env", label, env=_pair("--arm-env", value))
    for text in given["arm_set"] or []:
        label, value = _labelled("--arm-set", text)
        change("--arm-set", label, variables=_pair("--arm-set", value))
    for text in given["arm_args"] or []:
        label, value = _labelled("--arm-args", text)
        change("--arm-args", label, server_args=_words("--arm-args", value))
    for text in given["arm_image"] or []:
        label, value = _labelled("--arm-image", text)
        change("--arm-image", label, image=value)
    for text in given["arm_python"] or []:
        label, value = _labelled("--arm-python", text)
        change("--arm-python", label, python=value)
    for text in given["arm_sha"] or []:
        label, value = _labelled("--arm-sha", text)
        change("--arm-sha", label, sha=value)
    return changes


def _labelled(flag: str, text: str) -> tuple[str, str]:
    label, colon, value = text.partition(":")
    if not colon or not value:
        raise UsageError(f"{flag} must be LABEL:VALUE, got {text!r}")
    return label, value


def _pair(flag: str, text: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{flag} must be NAME=VALUE, got {text!r}")
    return {name: value}


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from None
