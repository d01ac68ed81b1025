"""The loads of a comparison from what a person types or a suite file says, checked by the options that `atom bench`
itself declares: a load that could not begin is refused before anything runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

from atom.cli import bench
from atom.cli.bench_command import CHECK_ONLY
from atom.cli.options import split_multiple
from atom.diag.compare.arm_process import option_words
from atom.diag.compare.metrics import PRIMARY_CHOICES
from atom.diag.compare.model import Load
from atom.recipes.errors import AtomError, UsageError
from atom.recipes.suite import Suite, resolve_suite

__all__ = ["BENCH_LOADS", "load_argv", "parse_load", "suite_loads"]

BENCH_LOADS: Final = ("random", "sharegpt", "custom", "trace", "aiperf-agentic", "gsm8k")
"""Subcommands of `atom bench` that are one load. A sweep is many."""
_OWN: Final[Mapping[str, str]] = {
    "base_url": "an arm is given as a URL",
    "host": "an arm is given as a URL",
    "port": "an arm is given as a URL",
    "api_key": "set OPENAI_API_KEY, which is not written down",
    "header": "headers carry keys, and the plan is written down",
    "devices": "use --devices A/B of ab-compare",
    "server_cpus": "use --cpus A/B of ab-compare",
    "client_cpus": "use --cpus A/B of ab-compare",
    "set_": "use --arm-set of ab-compare",
    "server_env": "use --base-env and --head-env of ab-compare",
    "server_env_file": "use --base-env and --head-env of ab-compare",
    "seed": "use --seed of ab-compare, which all arms share",
    "output_dir": "each run has its own",
    "json_path": "use --json of ab-compare",
    "markdown": "use --markdown of ab-compare",
    "junit": "use --junit of ab-compare",
    "quiet": "use --quiet of ab-compare",
    "save_result": "the run directories have it",
    "save_detailed": "the run directories have it",
    "result_dir": "the run directories have it",
    "result_filename": "the run directories have it",
    "export_aiperf": "`atom report` does it for a run directory",
}
"""Parameters of `atom bench` that the comparison sets itself, and what to use instead."""
_FIELDS: Final = ("primary", "margin")
"""Options of a load on ab-compare's command line alone."""


def parse_load(text: str) -> Load:
    """`[NAME=]SUBCOMMAND OPTIONS [-- SERVER ARGUMENTS]`, as it stands after `atom bench`; with `--primary METRIC` and
    `--margin PCT` of the load. UsageError names what is wrong."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--load {text!r}: {error}") from None
    if not words:
        raise UsageError("--load must be a load as `atom bench` takes it, such as 'random --random-input-len 2048'")
    name, equals, bench_name = words[0].rpartition("=")
    if equals and not name:
        raise UsageError(f"--load {text!r}: there is no name before '='")
    where = f"--load {text!r}"
    end = words.index("--") if "--" in words else len(words)
    arguments, own = _take_fields(where, words[1:end])
    options, recipe = _options(where, bench_name, arguments)
    fields: dict[str, Any] = {} if "primary" not in own else {"primary": _primary(where, "--primary", own["primary"])}
    if "margin" in own:
        fields["margin_pct"] = _margin(where, own["margin"])
    return Load(
        name=name or _name_of(bench_name, options),
        bench=bench_name,
        options=options,
        recipe=recipe,
        server_args=tuple(words[end + 1 :]),
        **fields,
    )


def suite_loads(suite: Suite | str) -> list[Load]:
    """The loads of a suite (or of the one with this name or path), checked as those of `--load` are."""
    suite = resolve_suite(suite) if isinstance(suite, str) else suite
    loads = []
    for fields in suite.loads:
        where = f"suite {suite.source}, load {fields['name']}"
        options, recipe = _options(where, fields["bench"], load_argv(fields.get("options", {})))
        if "primary" in fields:
            _primary(where, "primary", fields["primary"])
        loads.append(Load.from_dict({**fields, "options": options, "recipe": _recipe_of(fields, recipe)}))
    return loads


def _recipe_of(fields: Mapping[str, Any], given: str | None) -> str | None:
    return _recipe(fields["recipe"]) if "recipe" in fields else given


def load_argv(options: Mapping[str, Any]) -> list[str]:
    """`Load.options` as arguments."""
    return [word for name, value in options.items() for word in option_words(name, value)]


def _take_fields(where: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What is `atom bench`'s, and `--primary` and `--margin`."""
    rest: list[str] = []
    own: dict[str, str] = {}
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        position += 1
        name = flag.removeprefix("--")
        if not flag.startswith("--") or name not in _FIELDS:
            rest.append(words[position - 1])
            continue
        if not equals:
            if position == len(words):
                raise UsageError(f"{where}: {flag} needs a value")
            value = words[position]
            position += 1
        own[name] = value
    return rest, own


def _primary(where: str, field: str, name: str) -> str:
    if name not in PRIMARY_CHOICES:
        raise UsageError(f"{where}: {field} must be one of {', '.join(PRIMARY_CHOICES)}; got {name!r}")
    return name


def _margin(where: str, text: str) -> float:
    try:
        margin = float(text.removesuffix("%"))
    except ValueError:
        margin = 0.0
    if not 0 < margin <= 100:
        raise UsageError(f"{where}: --margin must be a percentage above 0 and at most 100, got {text!r}")
    return margin


def _options(where: str, bench_name: str, arguments: list[str]) -> tuple[dict[str, Any], str | None]:
    """`Load.options` of the arguments as their command reads them, each by the first of its names, and `--recipe`."""
    if bench_name not in BENCH_LOADS:
        raise UsageError(f"{where}: {bench_name!r} is no load of `atom bench`; there are {', '.join(BENCH_LOADS)}")
    if not {"-h", "--help"}.isdisjoint(arguments):
        raise UsageError(f"{where}: for help use `atom bench {bench_name} --help`")
    group: Any = typer.main.get_command(bench.app)  # a type of typer's own or of click, depending on its version
    parent = typer.Context(group, info_name="atom bench")
    command = group.get_command(parent, bench_name)
    try:
        context = command.make_context(bench_name, split_multiple(arguments), parent=parent)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"{where}: {error.format_message()}") from None
    if context.args:
        raise UsageError(f"{where}: {context.args[0]!r} is no option; server arguments stand after --")
    options: dict[str, Any] = {}
    recipe: str | None = None
    for parameter in command.params:
        source = context.get_parameter_source(parameter.name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name]
        if parameter.name in _OWN:
            raise UsageError(f"{where}: {_flag(parameter)} is the comparison's to set: {_OWN[parameter.name]}")
        if parameter.name == "recipe":
            recipe = _recipe(str(value))
        else:
            options |= _option(parameter, value)
    context.meta[CHECK_ONLY] = True
    try:
        command.invoke(context)
    except AtomError as error:
        raise UsageError(f"{where}: {error}") from None
    return options, recipe


def _flag(parameter: Any) -> str:
    return str(next(one for one in parameter.opts if one.startswith("--")))


def _option(parameter: Any, value: Any) -> dict[str, Any]:
    if value is False:
        off = next(one for one in parameter.secondary_opts if one.startswith("--"))
        return {off.removeprefix("--"): True}
    name = _flag(parameter).removeprefix("--")
    if isinstance(value, list | tuple):
        return {name: [_json(one) for one in value]}
    return {name: _json(value)}


def _json(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else value


def _recipe(name_or_path: str) -> str:
    is_path = "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))
    return str(Path(name_or_path).absolute()) if is_path else name_or_path


def _name_of(bench_name: str, options: Mapping[str, Any]) -> str:
    """Such as `random-2048-64-c16`."""
    lengths = [options.get(f"random-{which}-len") for which in ("input", "output")]
    parts = [bench_name, *(str(one) for one in lengths if one is not None)]
    for letter, option in (("c", "max-concurrency"), ("r", "request-rate")):
        if option in options:
            parts.append(f"{letter}{options[option]}")
    return "-".join(parts)
