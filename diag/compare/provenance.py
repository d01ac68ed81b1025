"""What is known of a comparison's two sides before anything runs: how far their commits are apart, an identity of the
difference, its files, and what is installed for each.

`difference` is of two arms, `with_packages` of one. Whether what differs is one thing is `compare/confounds.py`.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from atom.bench.redact import redact_text
from atom.diag.compare.confounds import factors
from atom.diag.compare.git import Repository, open_repository
from atom.diag.compare.model import Arm, ArmKind
from atom.recipes.errors import AtomError
from atom.recipes.placeholders import resolve_variables, uses
from atom.recipes.recipe import Recipe

__all__ = ["difference", "installed_packages", "patch_id", "with_packages"]

MOST_FILES: Final = 1000
_STABLE: Final = (
    *("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--full-index", "--unified=3", "--no-relative"),
    *("--diff-algorithm=myers", "--no-indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/", "--submodule=short"),
    *("--inter-hunk-context=0", "--ignore-submodules=none", "--no-function-context"),
)
"""What a user's git configuration may change in a diff: with these, the same difference has the same identity."""
_PACKAGES: Final = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for d in m.distributions():\n"
    "    name = (d.metadata or {}).get('Name')\n"
    "    if name and name.lower() not in found: found[name.lower()] = d.version\n"
    "print(json.dumps({'python': sys.version.split()[0], 'packages': dict(sorted(found.items()))}))\n"
)


def difference(base: Arm, head: Arm) -> dict[str, Any]:
    """What lies between two arms: `shown` (name to text, for a table) and, for two refs, `changed_files` and facts for
    programs. Small JSON."""
    facts: dict[str, Any] = {"shown": {}}
    if base.kind is ArmKind.REF and head.kind is ArmKind.REF:
        facts |= _between_refs(base, head)
    shown: dict[str, str] = {**facts["shown"]}
    for factor in factors(base, head):
        if factor.name != "source":
            shown[factor.name] = factor.text
    return {**facts, "shown": shown}


def _between_refs(base: Arm, head: Arm) -> dict[str, Any]:
    places = {arm.provenance.get("repository") for arm in (base, head)}
    old, new = str(base.provenance.get("sha")), str(head.provenance.get("sha"))
    if old == new:
        return {"shown": {"commits": f"the same one, {old[:12]}"}, "changed_files": []}
    if len(places) > 1:
        return {"shown": {"commits": "of two repositories"}}
    try:
        repository = open_repository(Path(str(places.pop())))
        return _between_commits(repository, old, new, trees=[bool(arm.provenance.get("dirty")) for arm in (base, head)])
    except AtomError as error:  # the repository has gone, or lost the objects: a plan that is resumed
        return {"shown": {"commits": f"not known: {error}"}}


def _between_commits(
    repository: Repository, old: str, new: str, *, trees: Sequence[bool] = (False, False)
) -> dict[str, Any]:
    """`trees`: which of the two is a working tree with changes, whose commit is made for the comparison alone."""
    merge_base = repository.ask("merge-base", old, new)
    files = _changed_files(repository, old, new)
    facts: dict[str, Any] = {
        "merge_base": merge_base,
        "commits_only_in_base": None,
        "commits_only_in_head": None,
        "patch_id": patch_id(repository, old, new),
        "changed_files": files[:MOST_FILES],
        "files": len(files),
    }
    shown = {"difference": _told(files), "patch id": facts["patch_id"] or "–"}
    if merge_base is None:
        why = "a shallow clone may lack it" if repository.shallow else "their histories have nothing in common"
        shown["commits"] = f"no merge base: {why}"
    else:
        words = repository.run("rev-list", "--left-right", "--count", f"{old}...{new}").split()
        left, right = (int(word) - tree for word, tree in zip(words, trees, strict=True))
        facts |= {"commits_only_in_base": left, "commits_only_in_head": right}
        at_least = "at least " if repository.shallow else ""
        sides = [
            f"{count} in the {side}{' and changes that are not committed' if tree else ''}"
            for side, count, tree in (("head", right, trees[1]), ("base", left, trees[0]))
        ]
        shown["commits"] = f"{at_least}{', '.join(sides)} since merge base {merge_base[:12]}"
        if left:
            # What the head lacks of the base is part of the difference as well.
            facts["branch_patch_id"] = patch_id(repository, merge_base, new)
            shown["patch id of the head's own commits"] = facts["branch_patch_id"] or "–"
            lacks = f"{left} {'commit' if left == 1 else 'commits'} of the base"
            shown["note"] = f"the head lacks {lacks}; rebase it to compare its own changes alone"
    return {**facts, "shown": {name: shown[name] for name in sorted(shown, key=_ORDER.index)}}


_ORDER: Final = ("commits", "difference", "patch id", "patch id of the head's own commits", "note")


def _told(files: list[dict[str, Any]]) -> str:
    added = sum(file["added"] or 0 for file in files)
    deleted = sum(file["deleted"] or 0 for file in files)
    return f"{len(files)} files, +{added} −{deleted}" if files else "none in any file"


def _changed_files(repository: Repository, old: str, new: str) -> list[dict[str, Any]]:
    """Path and lines added and deleted, None for a binary file; most changed first."""
    files = []
    for entry in repository.run("diff", "--numstat", "-z", *_STABLE, old, new).split("\0"):
        added, _, rest = entry.partition("\t")
        deleted, _, path = rest.partition("\t")
        if path:
            counts = [int(one) if one.isdigit() else None for one in (added, deleted)]
            shown = path.encode("utf-8", "replace").decode("utf-8")
            files.append({"path": shown, "added": counts[0], "deleted": counts[1]})
    return sorted(files, key=lambda one: (-(one["added"] or 0) - (one["deleted"] or 0), one["path"]))


def patch_id(repository: Repository, old: str, new: str) -> str | None:
    """`git diff old new | git patch-id --stable`; None if they do not differ. Line numbers and white space do not
    count, so the same change on top of another commit has the same one."""
    with (
        repository.stream("diff", *_STABLE, old, new) as diff,
        tempfile.TemporaryFile() as out,
        subprocess.Popen(
            ["git", "-C", str(repository.path), "patch-id", "--stable"],
            stdin=diff,
            stdout=out,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        diff.close()
        process.wait()
        out.seek(0)
        words = out.read(200).split()
    return words[0].decode("ascii", "replace") if words else None


# ---- what is installed ---------------------------------------------------------------------------------------------


def with_packages(arm: Arm, recipe: Recipe) -> Arm:
    """The arm with its interpreter and packages in its provenance, where the recipe has such an interpreter here."""
    if arm.kind not in (ArmKind.REF, ArmKind.RECIPE) or arm.image is not None or recipe.exec:
        return arm
    if not uses(recipe, "python"):
        return arm
    python = arm.python or resolve_variables(recipe, arm.variables).get("python") or sys.executable
    return replace(arm, provenance={**arm.provenance, **installed_packages(python)})


@functools.cache
def installed_packages(python: str) -> Mapping[str, Any]:
    """`interpreter`, and `packages` by name; what could not be found out is left out. Imports none of them."""
    try:
        done = subprocess.run(
            [python, "-c", _PACKAGES], capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL,
            cwd="/",
        )  # fmt: skip
        raw = json.loads(done.stdout.splitlines()[-1])
        packages = {str(name): str(version) for name, version in raw["packages"].items()}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError, AttributeError, TypeError):
        return {}
    version = re.sub(r"[^0-9a-z.+]", "", str(raw["python"]))
    return {"interpreter": f"{redact_text(python)} ({version})", "packages": packages}
