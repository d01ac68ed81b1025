"""Whether two arms differ in one thing.

What was to be compared is one factor: the source of two refs, one field of two recipes, the image. Whatever differs
beside it may as well be the reason of what is measured: the comparison is then *confounded*, and the list says with
what. `factors` names all that differs, from what was asked for; `confounded` adds what the runs show.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from atom.bench.redact import redact_arguments, redact_environment, redact_option
from atom.diag.compare.model import Arm, ArmKind, Load
from atom.diag.compare.recorded import load_of, run_facts_of
from atom.recipes.errors import UsageError
from atom.recipes.recipe import Recipe
from atom.recipes.resolve import resolve_recipe

__all__ = ["Factor", "confounded", "factors", "observed", "unasked"]

_SHOWN: Final = 4
_COMPARED: Final = ("source", "kind", "url", "server")
"""What is taken for the thing that was to be compared, where it differs."""
_OF_THE_ARM: Final = frozenset(("base_url", "more_urls", "nonce", "model"))
"""Of a load's description: where it went."""
_OF_THE_SAME_SERVER: Final = ("model", "prepare", "exec", "cwd", "env", "detached", "source_tree")
"""Fields of a recipe that change what runs, besides its command."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One thing in which two arms differ."""

    name: str
    text: str
    asked: bool = False
    """By an option of one arm: its environment, variables, server arguments, image or Python."""


def confounded(
    base: Arm,
    head: Arm,
    load: Load | None = None,
    seen: Iterable[Factor] = (),
) -> list[str]:
    """What differs beside the one thing that is compared; empty if the arms differ in one thing, or none.

    `load`: whose recipe arms without one of their own run with. `seen`: what `observed` found in the runs.
    """
    return [f"{one.name}: {one.text}" for one in _confounding(base, head, load, seen)]


def unasked(base: Arm, head: Arm, load: Load | None = None, seen: Iterable[Factor] = ()) -> list[str]:
    """Of what `confounded` lists, that which no option of an arm asked for: a gate is no answer then."""
    return [f"{one.name}: {one.text}" for one in _confounding(base, head, load, seen) if not one.asked]


def _confounding(base: Arm, head: Arm, load: Load | None, seen: Iterable[Factor]) -> list[Factor]:
    found = factors(base, head, load)
    told = {factor.name for factor in found}
    found += [one for one in seen if one.name not in told]
    if len(found) <= 1:
        return []
    treatment = next((one for one in found if one.name in _COMPARED), None)
    return [one for one in found if one is not treatment]


def factors(base: Arm, head: Arm, load: Load | None = None) -> list[Factor]:
    """All in which two arms differ, as far as it was asked for."""
    return [*_kinds(base, head), *_recipes(base, head, load), *_changes(base, head), *_runtimes(base, head)]


# ---- what was asked for --------------------------------------------------------------------------------------------


def _kinds(base: Arm, head: Arm) -> Iterator[Factor]:
    if base.kind is not head.kind:
        yield Factor("kind", f"{base.kind} {base.spec} / {head.kind} {head.spec}")
    elif base.kind is ArmKind.REF:
        names = ("repository", "sha")
        if any(base.provenance.get(name) != head.provenance.get(name) for name in names):
            yield Factor("source", _both(*(str(arm.provenance.get("sha"))[:12] for arm in (base, head))))
    elif base.kind is ArmKind.URL and base.url != head.url:
        yield Factor("url", _both(base.url, head.url))
    elif base.kind is ArmKind.RECORDED and base.recorded != head.recorded:
        yield Factor("source", "two records")


def _recipes(base: Arm, head: Arm, load: Load | None) -> Iterator[Factor]:
    names = [arm.recipe or (load.recipe if load is not None else None) for arm in (base, head)]
    if names[0] == names[1] or None in names:
        return
    try:
        one, other = (resolve_recipe(str(name)) for name in names)
    except UsageError:  # the file has gone since
        yield Factor("recipe", _both(*names))
        return
    if _server(one) != _server(other):
        # Another program has other flags, another environment, and so on: that is what is compared.
        yield Factor("server", f"{one.name}: {_server(one)} / {other.name}: {_server(other)}")
        if one.model is not None and other.model is not None and one.model != other.model:
            yield Factor("model", _both(one.model, other.model))
        return
    yield from _words("command", one.command, other.command)
    for field in fields(Recipe):
        if field.name in _OF_THE_SAME_SERVER:
            values = [getattr(recipe, field.name) for recipe in (one, other)]
            if field.name == "env":
                yield from _mappings("recipe env", *values)
            elif values[0] != values[1]:
                yield Factor(field.name.replace("_", " "), _both(*map(_plain, values)))
    if one.variables != other.variables:
        yield from _mappings("recipe variable", *({n: v.default for n, v in r.variables.items()} for r in (one, other)))


def _server(recipe: Recipe) -> str:
    """The program that a recipe starts: its command up to the first flag that is not how Python finds it."""
    words = list(recipe.command)
    start = words[:1]
    for word in words[1:]:
        if start[-1] == "-m" or not word.startswith("-") or word == "-m":
            start.append(word)
        else:
            break
    return " ".join(start)


def _changes(base: Arm, head: Arm) -> Iterator[Factor]:
    found = [
        *_mappings("env", base.env, head.env),
        *_mappings("variable", base.variables, head.variables),
        *_words("server argument", base.server_args, head.server_args),
    ]
    yield from (replace(one, asked=True) for one in found)


def _runtimes(base: Arm, head: Arm) -> Iterator[Factor]:
    if base.image != head.image:
        yield Factor("image", _both(base.image, head.image), asked=True)
        return  # it has another Python and other packages in any case
    interpreters = [arm.provenance.get("interpreter") for arm in (base, head)]
    packages = [arm.provenance.get("packages") for arm in (base, head)]
    texts = []
    if base.python != head.python:
        texts.append(_both(base.python, head.python))
    elif all(interpreters) and interpreters[0] != interpreters[1]:
        texts.append(_both(*interpreters))
    if all(isinstance(one, Mapping) for one in packages):
        texts += _listed(_differing(*packages))  # type: ignore[arg-type]
    if texts:
        yield Factor("python", "; ".join(texts), asked=base.python != head.python)


def _mappings(name: str, base: Mapping[str, Any], head: Mapping[str, Any]) -> Iterator[Factor]:
    for key in sorted({*base, *head}):
        if base.get(key) != head.get(key) or (key in base) != (key in head):
            shown = [redact_environment({name: str(value) for name, value in side.items()}) for side in (base, head)]
            values = [side.get(key, "unset") for side in shown]
            yield Factor(f"{name} {key}", _both(*values))


def _words(name: str, base: Sequence[str], head: Sequence[str]) -> Iterator[Factor]:
    """A factor per flag that differs; one for all that is no flag."""
    sides = [_flags(redact_arguments(words)) for words in (base, head)]
    hidden = [_flags(words) for words in (base, head)]
    for flag in dict.fromkeys([*sides[0], *sides[1]]):
        if hidden[0].get(flag) != hidden[1].get(flag):
            values = [" ".join([flag, *side[flag]]).strip() if flag in side else "not given" for side in sides]
            yield Factor(f"{name} {flag}".strip(), _both(*values))


def _flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values by flag, in order; of words before the first flag under the empty one."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in words:
        if word.startswith("-") and len(word) > 1 and not word[1:].replace(".", "").isdigit():
            flag, given, value = word.partition("=")
            found[flag] = (*found.get(flag, ()), *([value] if given else []))
        else:
            found[flag] = (*found.get(flag, ()), word)
    return found


def _both(base: Any, head: Any) -> str:
    return f"{'–' if base is None else base} / {'–' if head is None else head}"


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "; ".join(_plain(one) if isinstance(one, tuple) else str(one) for one in value) or "–"
    return str(value)


def _differing(base: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {base.get(name, 'not there')} / {head.get(name, 'not there')}"
        for name in sorted({*base, *head})
        if base.get(name) != head.get(name)
    ]


def _listed(texts: Sequence[str]) -> list[str]:
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return [*texts[:_SHOWN], *more]


# ---- what the runs show --------------------------------------------------------------------------------------------


def observed(matched: Iterable[tuple[Path, Path]]) -> list[Factor]:
    """In what the two sides of a matched run differ and must not: machine, devices by kind, model, the load's options.
    What only one side says is no difference. `matched`: directories (or files) of base and head."""
    found: dict[str, list[str]] = {}
    for base, head in matched:
        one, other = _facts_of(base), _facts_of(head)
        for name in sorted({*one} & {*other}):
            if one[name] != other[name]:
                found.setdefault(name, []).append(_both(one[name], other[name]))
    return [Factor(name, "; ".join(_listed(list(dict.fromkeys(texts))))) for name, texts in sorted(found.items())]


def _facts_of(run_dir: Path) -> dict[str, str]:
    run, load = run_facts_of(run_dir), load_of(run_dir)
    host, devices = _mapping(run, "host"), run.get("devices")
    kinds = sorted({str(one).partition(",")[0] for one in devices}) if isinstance(devices, list) else []
    facts = {
        "host": host.get("name"),
        "kernel": host.get("kernel"),
        "devices": ", ".join(kinds) or None,
        "model": load.get("model"),
    }
    texts = {name: str(value)[:200] for name, value in facts.items() if isinstance(value, str) and value}
    for name, value in {**load, **_mapping(load, "source")}.items():
        if name not in _OF_THE_ARM and isinstance(value, str | int | float | list | bool):
            texts[f"load {name.replace('_', ' ')}"] = str(redact_option(name, value))[:200]
    return texts


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, dict) else {}
