"""From what a person types to arms: a ref, a recipe, a URL, or what was recorded; and what has to be there before one
can be started.

`resolve_arm` looks things up and makes nothing, so that a plan can be shown first. `prepare_arm` then makes the
checkout of a ref (`compare/source.py`), runs what the recipe says prepares it, and checks where its modules come from
(`compare/origins.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from atom.diag.compare.git import WORKTREE, Commit, Repository, find_repository, open_repository
from atom.diag.compare.model import Arm, ArmKind
from atom.diag.compare.origins import refuse_foreign_modules
from atom.diag.compare.provenance import with_packages
from atom.diag.compare.recorded_arms import arms_of, compared_runs, is_comparison, recorded_source
from atom.diag.compare.source import Checkout, checkout
from atom.recipes.containers import OWNER_LABEL, RUN_LABEL, container_engine
from atom.recipes.errors import RunError, UsageError
from atom.recipes.launcher import PREPARED_VARIABLE
from atom.recipes.placeholders import Expansion, expand, resolve_variables, uses
from atom.recipes.processes import process_token
from atom.recipes.recipe import Recipe
from atom.recipes.resolve import builtin_recipes, resolve_recipe

__all__ = ["arm_environment", "prepare_arm", "resolve_arm"]

_LABEL: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(.+)", re.S)
_PREFIX: Final = re.compile(r"(ref|recipe|url|run):(.+)", re.S)
_SHA: Final = re.compile(r"[0-9A-Fa-f]{7,64}")
_NO_LABEL: Final = re.compile(r"[^A-Za-z0-9._-]+")
_RECORDS: Final = ("run.json", "profile_export.jsonl", "profile_export_aiperf.json")
"""A directory with one of these holds what was recorded."""
_RECORD_SUFFIXES: Final = (".json", ".jsonl")


def resolve_arm(
    spec: str,
    *,
    role: str,
    repo: Path | None = None,
    recipe: str | None = None,
    python: str | None = None,
    image: str | None = None,
    variables: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    server_args: Sequence[str] = (),
    sha: str | None = None,
    taken: Collection[str] = (),
    complete: bool = True,
) -> Arm:
    """The arm that `[label=]SPEC` stands for. UsageError, with what would be right, if it stands for nothing or for
    several things; `ref:`, `recipe:`, `url:` and `run:` before it always say which.

    `repo`: where refs are looked up; None: the repository of the current directory, else this tool's own. `recipe` is
    how a ref is started; None: as each load says. `sha`: the commit of an arm that cannot tell. `taken`: labels of
    other arms; a label that was not given is made different from those. `complete`: False for an arm of which not all
    is known yet: what its recipe needs is not checked.
    """
    label, rest = (match[1], match[2]) if (match := _LABEL.fullmatch(spec)) else (None, spec)
    if label is not None and label in taken:
        raise UsageError(f"{spec!r}: another arm is called {label} already; give this one another label")
    try:
        found = _find(rest, repo)
    except UsageError as error:
        raise UsageError(_bad_label(rest, repo) or str(error)) from None
    common: dict[str, Any] = {
        "spec": spec,
        "role": role,
        "python": python,
        "image": image,
        "variables": dict(variables or {}),
        "env": dict(env or {}),
        "server_args": tuple(server_args),
    }
    if found.kind in (ArmKind.URL, ArmKind.RECORDED):
        _refuse_changes(found, common)
    arm = replace(found, **common, recipe=recipe if found.kind is ArmKind.REF else found.recipe)
    if arm.recipe is not None and complete:
        arm = replace(arm, recipe=_checked_recipe(arm))
    if sha is not None:
        arm = replace(arm, provenance={**arm.provenance, "sha": _stated(arm, sha), "sha_from": "--arm-sha"})
    return replace(arm, label=label or _free_label(found.label, taken))


def _bad_label(spec: str, repo: Path | None) -> str | None:
    """What is wrong with the label, where the rest of a spec that stands for nothing stands for something."""
    label, equals, rest = spec.partition("=")
    if not equals or not rest or _PREFIX.fullmatch(spec) or "://" in label:
        return None
    try:
        _find(rest, repo)
    except UsageError:
        return None
    return f"{label!r} is no label; one has letters, digits, '.', '_' and '-', at most 64, the first a letter or digit"


def _find(spec: str, repo: Path | None) -> Arm:
    """What a spec without its label is; its label is a suggestion."""
    if match := _PREFIX.fullmatch(spec):
        return _MADE_BY[match[1]](match[2], repo)
    if re.match(r"https?://", spec):
        return _url(spec, repo)
    if spec in (WORKTREE, "."):
        return _ref(spec, repo)
    repository, no_repository = _repository(repo)
    is_ref = repository is not None and repository.try_resolve(spec) is not None
    is_recipe = spec in builtin_recipes() or (spec.endswith((".yaml", ".yml")) and Path(spec).is_file())
    is_run = bool(_recorded_at(Path(spec)))
    meant = [name for name, yes in (("ref", is_ref), ("recipe", is_recipe), ("run", is_run)) if yes]
    if len(meant) > 1:
        what = {
            "ref": f"a ref of {repository.path if repository else ''}",
            "recipe": "a recipe",
            "run": "a recorded run",
        }
        raise UsageError(
            f"{spec!r} is {' and '.join(what[name] for name in meant)}: write "
            f"{' or '.join(f'{name}:{spec}' for name in meant)}"
        )
    if meant:
        return _MADE_BY[meant[0]](spec, repo)
    if spec.endswith((".yaml", ".yml")):
        raise UsageError(f"{spec!r}: there is no such recipe file")
    if Path(spec).exists() and "/" in spec:
        raise UsageError(f"{spec!r} is no run directory (it has no {' or '.join(_RECORDS)}) and no result file")
    if repository is None:
        raise UsageError(
            f"{spec!r} is no recipe ({', '.join(builtin_recipes())}), URL or run directory, and no ref: {no_repository}"
        )
    try:
        return _ref(spec, repo)  # it may be a branch of the remote only
    except UsageError as error:
        raise UsageError(
            f"{error}; nor is it a recipe ({', '.join(builtin_recipes())}), URL or run directory"
        ) from None


def _repository(repo: Path | None) -> tuple[Repository | None, str]:
    """Where refs are looked up, or why there is no such place."""
    try:
        repository = find_repository(repo)
    except UsageError as error:
        return None, str(error)
    return repository, "there is no git repository here; give --repo"


def _ref(ref: str, repo: Path | None) -> Arm:
    repository, no_repository = _repository(repo)
    if repository is None:
        raise UsageError(f"ref {ref!r}: {no_repository}")
    commit = repository.resolve(ref)
    name = "worktree" if commit.ref == WORKTREE else commit.ref
    return Arm(label=_label_of(name), kind=ArmKind.REF, spec=ref, provenance=_provenance(repository, commit))


def _provenance(repository: Repository, commit: Commit) -> dict[str, Any]:
    submodules = repository.submodules(commit.sha)
    notes = [] if commit.note is None else [commit.note]
    if submodules:
        more = f" and {len(submodules) - 3} more" if len(submodules) > 3 else ""
        notes.append(
            f"submodules ({', '.join(submodules[:3])}{more}) are not in a checkout unless the recipe's `prepare` "
            "fetches them"
        )
    return {
        "repository": str(repository.path),
        "ref": commit.ref,
        "sha": commit.sha,
        "subject": commit.subject,
        "commit_time": commit.commit_time,
        "dirty": commit.dirty,
        "head": commit.head,
        "notes": notes,
    }


def _recipe(name: str, _repo: Path | None) -> Arm:
    return Arm(label=_label_of(resolve_recipe(name).name), kind=ArmKind.RECIPE, spec=name, recipe=name)


def _url(url: str, _repo: Path | None) -> Arm:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no URL of a server; it must look like http://HOST:PORT")
    if parts.username or parts.password:
        raise UsageError("the URL of an arm must not hold a user or password; give the key with OPENAI_API_KEY")
    name = f"{parts.hostname}-{port}" if port else parts.hostname
    return Arm(label=_label_of(name), kind=ArmKind.URL, spec=url, url=url.rstrip("/"))


def _run(text: str, _repo: Path | None) -> Arm:
    paths: list[Path] = []
    for part in text.split(",") if not Path(text).exists() else [text]:
        found = _recorded_at(Path(part))
        if not found:
            raise UsageError(
                f"{part!r} is no run directory (with {' or '.join(_RECORDS)}), has no run-N, and is no result file"
            )
        paths += _counted(Path(part).absolute(), found)
    recorded = tuple(str(path.absolute()) for path in paths)
    return Arm(
        label=_label_of(_name_of(Path(text)) if Path(text).exists() else _common_name(recorded)),
        kind=ArmKind.RECORDED,
        spec=text,
        recorded=recorded,
        provenance=recorded_source(map(Path, recorded)),
    )


def _name_of(path: Path) -> str:
    """Of a run in `arms/LABEL` the label."""
    folder = path.absolute().parent
    return folder.name if re.fullmatch(r"run-[0-9]+", path.name) and folder.parent.name == "arms" else path.name


def _common_name(recorded: Sequence[str]) -> str:
    """Of several: what their names begin with (`b-0.json`, `b-1.json`: `b`), else the first one's and how many more."""
    names = [_name_of(Path(one)) for one in recorded]
    first, more = names[0], len(names) - 1
    if len(set(names)) == 1:
        return first
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    common = _NO_LABEL.sub("-", "".join(letters[0] for letters in same)).strip("-._")
    return common if common[:1].isalpha() else f"{Path(first).stem}-and-{more}-more"


def _counted(path: Path, found: list[Path]) -> list[Path]:
    """What was found there, without what does not count in a comparison."""
    if is_comparison(path):
        one = " or ".join(map(str, arms_of(path))) or "arms/LABEL"
        raise UsageError(f"{path} is a whole comparison: name one of its arms, {one}")
    if path.parent.name == "arms" and is_comparison(path.parent.parent):
        if not (runs := compared_runs(path)):
            raise UsageError(f"{path} has no run of its comparison that was made to its end")
        return runs
    return found


def _recorded_at(path: Path) -> list[Path]:
    """A run directory or result file; the `run-N` of a directory that has them, in order."""
    try:
        if path.is_file():
            return [path] if path.suffix in _RECORD_SUFFIXES else []
        if not path.is_dir():
            return []
        if any((path / name).is_file() for name in _RECORDS):
            return [path]
        runs = [one for one in path.glob("run-*") if re.fullmatch(r"run-[0-9]{1,9}", one.name)]
        runs = [one for one in runs if any((one / name).is_file() for name in _RECORDS)]
    except (OSError, ValueError):
        return []
    return sorted(runs, key=lambda one: int(one.name.removeprefix("run-")))


_MADE_BY: Final[Mapping[str, Callable[[str, Path | None], Arm]]] = {
    "ref": _ref,
    "recipe": _recipe,
    "url": _url,
    "run": _run,
}


def _label_of(name: str) -> str:
    return _NO_LABEL.sub("-", name).strip("-._")[:48] or "arm"


def _free_label(label: str, taken: Collection[str]) -> str:
    numbered = (label if n == 1 else f"{label}-{n}" for n in range(1, len(taken) + 2))
    return next(name for name in numbered if name not in taken)


def _stated(arm: Arm, sha: str) -> str:
    """The commit that a person says an arm is of."""
    if not _SHA.fullmatch(sha):
        raise UsageError(f"--arm-sha: {sha!r} is no commit; it must be 7 to 64 digits of its hash")
    known = arm.provenance.get("sha")
    if known is not None and not str(known).startswith(sha.lower()):
        raise UsageError(f"--arm-sha: {arm.spec} is known to be of commit {str(known)[:12]}, and not of {sha}")
    return str(known) if known is not None else sha.lower()


def _refuse_changes(arm: Arm, given: Mapping[str, Any]) -> None:
    for field in ("python", "image", "variables", "env", "server_args"):
        if given[field]:
            what = "a server that runs already" if arm.kind is ArmKind.URL else "a recorded run"
            raise UsageError(f"{given['spec']!r} is {what}: its {field.replace('_', ' ')} cannot be chosen here")


def _checked_recipe(arm: Arm) -> str:
    """Its name or absolute path. UsageError for a recipe that does not exist, or does not take what this arm gives."""
    assert arm.recipe is not None
    recipe = resolve_recipe(arm.recipe)
    resolve_variables(recipe, {**arm.variables, **({} if arm.python is None else {"python": arm.python})})
    if arm.kind is ArmKind.REF:
        _refuse_no_source(recipe, arm)
    return arm.recipe if arm.recipe in builtin_recipes() else str(Path(arm.recipe).absolute())


def _refuse_no_source(recipe: Recipe, arm: Arm) -> None:
    if arm.image is None and not uses(recipe, "src"):
        raise UsageError(
            f"recipe {recipe.name} has no {{src}} in any field: {arm.spec} would be started from the same source as "
            "every other ref"
        )


# ---- before an arm is started --------------------------------------------------------------------------------------


def prepare_arm(
    arm: Arm,
    *,
    recipes: Sequence[str],
    hold: contextlib.ExitStack,
    note: Callable[[str], None] = lambda _: None,
) -> Arm:
    """The arm with `src`, `checkout` and `cache`: for a ref, with the checkout made, or found from an earlier
    comparison, and prepared. Of a ref or recipe, with the packages of its interpreter in its provenance.

    `recipes`: of the loads, for an arm that has none of its own. `hold` keeps the checkout from being removed; leave it
    when the arm is not needed any more. RunError: git or the recipe's `prepare` failed, or a module would come from
    elsewhere. UsageError: recipes that disagree.
    """
    chosen = [resolve_recipe(name) for name in dict.fromkeys([arm.recipe] if arm.recipe else recipes)]
    if arm.kind is not ArmKind.REF:
        return with_packages(arm, chosen[0]) if arm.kind is ArmKind.RECIPE else arm
    if not chosen:
        raise UsageError(f"{arm.spec}: a ref needs a recipe that says how it is started; give --recipe")
    paths = {one.source_tree.path for one in chosen}
    if len(paths) > 1:
        raise UsageError(
            f"recipes {' and '.join(one.name for one in chosen)} disagree on `source.path` "
            f"({', '.join(sorted(paths))}), and {arm.spec} is to run with all of them"
        )
    for recipe in chosen:
        _refuse_no_source(recipe, arm)
    found = hold.enter_context(_checkout_of(arm, chosen, note))
    src = found.tree / paths.pop()
    if not src.is_dir():
        raise RunError(f"{arm.spec} ({arm.provenance['sha'][:12]}) has no directory {src.relative_to(found.tree)}")
    ready = replace(arm, checkout=str(found.tree), src=str(src.absolute()), cache=str(found.cache(_way_to_run(arm))))
    if arm.image is None:
        for recipe in chosen:
            refuse_foreign_modules(ready, recipe)
    return with_packages(ready, chosen[0])


def _checkout_of(arm: Arm, recipes: Sequence[Recipe], note: Callable[[str], None]) -> Checkout:
    def commands(tree: Path) -> list[tuple[list[str], Mapping[str, str]]]:
        starts = [_prepare_start(arm, recipe, tree) for recipe in recipes if recipe.prepare]
        if arm.image is not None:
            return [(_in_image(arm.image, one, command, tree), os.environ) for one in starts for command in one.prepare]
        return [(command, start.env) for start in starts for command in start.prepare]

    # What would run, without the checkout's own place, says whether another checkout would be the same.
    pattern = [_prepare_start(arm, recipe, Path("/CHECKOUT")) for recipe in recipes if recipe.prepare]
    variant = json.dumps([[one.prepare, one.recipe_env] for one in pattern] + [arm.image]) if pattern else ""
    repository = open_repository(Path(arm.provenance["repository"]))
    return checkout(
        repository, arm.provenance["sha"], prepare=commands if pattern else None, variant=variant, note=note
    )


def _in_image(image: str, start: Expansion, command: Sequence[str], tree: Path) -> list[str]:
    """A command of `prepare` in a container that has nothing but the checkout, in which it leaves what it builds."""
    if ":" in str(tree):
        raise UsageError(f"{tree} cannot be mounted into a container, for it has a colon; set XDG_CACHE_HOME")
    labels = {RUN_LABEL: f"prepare-{uuid.uuid4()}", OWNER_LABEL: process_token()}
    return [
        *(container_engine(), "run", "--rm", "--init", "--name", f"atom-{labels[RUN_LABEL]}"),
        *(word for name, value in labels.items() for word in ("--label", f"{name}={value}")),
        *("--network", "host", "--volume", f"{tree}:{tree}", "--workdir", str(tree), "--entrypoint", "", image),
        *("env", *(f"{name}={value}" for name, value in start.recipe_env.items()), *command),
    ]


def _prepare_start(arm: Arm, recipe: Recipe, tree: Path) -> Expansion:
    """The recipe's `prepare` and its environment, without what only a server that is started has."""
    variables = resolve_variables(recipe, arm.variables)
    values: dict[str, str | None] = {
        "python": sys.executable if arm.image is None else "python3",
        **dict.fromkeys((*recipe.ports, "port", "host", "port_file", "label", "scratch"), ""),
        "devices": None,
        "model": recipe.model,
        **variables,
        **({} if arm.python is None else {"python": arm.python}),
        "src": str(tree / recipe.source_tree.path),
    }
    return expand(replace(recipe, exec=(), command=("true",)), values, env=arm.env)


def _way_to_run(arm: Arm) -> str:
    """Arms that run one checkout in different ways do not share compiled code."""
    way = [arm.recipe, arm.python, arm.image, dict(arm.variables), dict(arm.env), arm.server_args]
    return hashlib.sha256(json.dumps(way, sort_keys=True).encode()).hexdigest()[:12]


def arm_environment(arm: Arm) -> dict[str, str]:
    """What this arm's server has in its environment besides `arm.env` (`--server-env`): compile caches of its own, and
    for the launcher the word that its checkout is prepared."""
    variables = {} if arm.src is None else {PREPARED_VARIABLE: arm.src}
    if arm.cache is not None:
        variables |= {name: str(Path(arm.cache) / folder) for name, folder in _CACHES.items()}
    return variables


_CACHES: Final = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
