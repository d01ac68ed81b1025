"""What `atom gc-profile` is asked to look at, and which of its options go together."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

from atom.cli import options as opt
from atom.cli.gc_profile_watch import Observation, WorkFactory
from atom.cli.load_choices import LOAD_DEFAULTS, random_load, server_choice
from atom.cli.load_run import LoadRunner
from atom.diag.attach_checks import AttachMethod
from atom.diag.attach_target import server_process
from atom.diag.server_under_test import PidTarget, UrlTarget
from atom.recipes.command import recipe_from_command
from atom.recipes.errors import UsageError
from atom.recipes.launcher import LaunchOptions
from atom.recipes.recipe import Recipe
from atom.recipes.resolve import resolve_recipe

__all__ = ["Source", "check_combination", "given_source", "profile_target", "work_factory"]


class Source(StrEnum):
    """What is profiled, as errors call it."""

    COMMAND = "a command after `--`"
    RECIPE = "--recipe"
    PID = "--pid"
    URL = "--url"
    RUN_DIRS = "a run directory"
    PRINT_ENV = "--print-env"


METHODS: Final[Mapping[str, AttachMethod]] = {"auto": "auto", "gdb": "gdb", "remote-exec": "remote_exec"}
"""Values of --attach-method."""

_STARTED: Final = frozenset({Source.COMMAND, Source.RECIPE})
_MEASURED: Final = _STARTED | {Source.PID, Source.URL}
_PROFILED: Final = _MEASURED | {Source.RUN_DIRS}

_ONLY_WITH: Final[Mapping[str, tuple[str, frozenset[Source]]]] = {
    "set_": ("--set", frozenset({Source.RECIPE})),
    "devices": ("--devices", _STARTED),
    "ready_timeout": ("--ready-timeout", _STARTED),
    "attach_method": ("--attach-method", frozenset({Source.PID})),
    "duration": ("--duration", _MEASURED),
    "num_prompts": ("--num-prompts", _MEASURED),
    "what_if": ("--what-if", _STARTED),
    "output_dir": ("--output-dir", _MEASURED | {Source.PRINT_ENV}),
    "window": ("--window", _PROFILED),
    "fail_if": ("--fail-if", _PROFILED),
    "label": ("--label", _PROFILED),
    "json_path": ("--json", _PROFILED),
    "markdown": ("--markdown", _PROFILED),
    "junit": ("--junit", _PROFILED),
    "html": ("--html", _PROFILED),
}
"""Parameter → its flag, and what it can be given with."""

_OF_A_LOAD: Final[Mapping[str, str]] = {
    "model": "--model",
    "backend": "--backend",
    "endpoint": "--endpoint",
    "api_key": "--api-key",
    "header": "--header",
    "insecure": "--insecure",
    "random_input_len": "--random-input-len",
    "random_output_len": "--random-output-len",
    "random_range_ratio": "--random-range-ratio",
    "num_warmups": "--num-warmups",
    "max_concurrency": "--max-concurrency",
    "request_rate": "--request-rate",
    "ignore_eos": "--ignore-eos",
    "extra_body": "--extra-body",
}
"""Parameter → its flag, of what says nothing without a load."""


def given_source(given: Mapping[str, Any]) -> Source:
    """What is to be profiled; UsageError unless exactly one thing is."""
    found = [
        source
        for source, present in (
            (Source.RUN_DIRS, bool(given["runs"])),
            (Source.PRINT_ENV, given["print_env"]),
            (Source.RECIPE, given["recipe"] is not None),
            (Source.COMMAND, given["foreign"] is not None and given["recipe"] is None),
            (Source.PID, given["pid"] is not None),
        )
        if present
    ]
    if given["url"] is not None and not (found and set(found) <= {Source.PID, Source.COMMAND}):
        found.append(Source.URL)
    if not found:
        raise UsageError(
            "nothing to profile: give a command after `--`, --recipe NAME, --pid PID, --url URL, or run directories"
        )
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)} each say what to profile: give one of them")
    return found[0]


def check_combination(given: Mapping[str, Any], source: Source) -> None:
    """Refuse options that would be ignored; the message names both flags."""
    for name, (flag, sources) in _ONLY_WITH.items():
        if _typed(given, name) and source not in sources:
            wanted = " or ".join(one for one in Source if one in sources)
            raise UsageError(f"{flag} means nothing with {source}: it needs {wanted}")
    if given["num_prompts"] is None:
        for name, flag in _OF_A_LOAD.items():
            if _typed(given, name) and not (name == "model" and source is Source.RECIPE):
                raise UsageError(f"{flag} is of a load, and there is none: give --num-prompts too, or leave it out")
        if given["what_if"] is not None:
            raise UsageError("--what-if compares two servers under the same load: give --num-prompts")
    if given["label"] is not None and (len(given["runs"] or []) > 1 or given["what_if"] is not None):
        raise UsageError("--label names one run, and there are several: their arms or directories name them")
    for name in ("recipe", "url", "model", "endpoint", "label"):
        if given[name] is not None and not given[name].strip():
            raise UsageError(f"--{name} must not be empty")
    if given["attach_method"] not in METHODS:
        raise UsageError(f"--attach-method must be {', '.join(METHODS)}; got {given['attach_method']!r}")
    if given["pid"] is not None and given["pid"] < 1:
        raise UsageError(f"--pid must be a process id, got {given['pid']}")


def _typed(given: Mapping[str, Any], name: str) -> bool:
    """Whether the option is on the command line; a default, or a variable of the environment, is not."""
    source = given["ctx"].get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def profile_target(given: Mapping[str, Any], source: Source) -> tuple[Recipe | UrlTarget | PidTarget, LaunchOptions]:
    """The server, and how to start it if it is to be started."""
    options = LaunchOptions(
        model=given["model"] if source is Source.RECIPE else None,
        devices=given["devices"],
        variables=opt.parse_pairs("--set", given["set_"] or []),
        extra_args=(given["foreign"] or []) if source is Source.RECIPE else [],
        ready_timeout_s=given["ready_timeout"],
    )
    url = None if given["url"] is None else _base_url(given["url"])
    if source is Source.RECIPE:
        return resolve_recipe(given["recipe"]), options
    if source is Source.COMMAND:
        return recipe_from_command(given["foreign"], base_url=url), options
    if source is Source.PID:
        pid, note = server_process(given["pid"])
        if note is not None and not given["quiet"]:
            print(note, file=sys.stderr)
        return PidTarget(pid=pid, base_url=url, method=METHODS[given["attach_method"]]), options
    assert source is Source.URL
    assert url is not None
    return UrlTarget(base_url=url), options


def _base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        port = parts.port if parts.port is not None else 80
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port:
        raise UsageError(f"--url must look like http://HOST:PORT, got {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def work_factory(given: Mapping[str, Any], launch: LaunchOptions) -> WorkFactory:
    """What is done with each server: our load if one is asked for, else nothing but watching."""
    quiet, duration = given["quiet"], given["duration"]
    if given["num_prompts"] is None:
        return lambda line: Observation(duration_s=duration, line=line, quiet=quiet)
    options = {**LOAD_DEFAULTS, **given, "base_url": given["url"]}
    server, load = server_choice(options, launch), random_load(options)
    return lambda line: LoadRunner(name="random", server=server, load=load, line=line, quiet=quiet)
