"""CPUs by number, as `--server-cpus` and `--client-cpus` take them: `0-3,8`, and whether this process may use them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection
from itertools import pairwise
from pathlib import PurePath
from typing import Final

from atom.recipes.errors import UsageError
from atom.recipes.recipe import Recipe

__all__ = ["allow_cpus", "check_cpus", "check_pinnable", "format_cpus", "own_cpus", "parse_cpus"]

_MOST: Final = 8192
"""As many as Linux can be built for."""
_ELSEWHERE: Final = frozenset(
    {"docker", "podman", "nerdctl", "kubectl", "oc", "enroot", "ssh", "srun", "mpiexec", "mpirun"}
)
"""Prefixes whose server is no child of what is started here."""
_RANGE: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


def own_cpus() -> tuple[int, ...]:
    """Those this process runs on now."""
    return tuple(sorted(os.sched_getaffinity(0)))


def parse_cpus(flag: str, text: str) -> tuple[int, ...]:
    """`0-3,8` → (0, 1, 2, 3, 8). UsageError that names `flag` for anything else."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= _MOST:
            raise UsageError(f"{flag} must be numbers of CPUs such as 0-3,8; got {text!r}")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Collection[int]) -> str:
    """(0, 1, 2, 3, 8) → `0-3,8`, as `parse_cpus` reads it."""
    numbers = sorted(cpus)
    breaks = [0, *(at + 1 for at, (low, high) in enumerate(pairwise(numbers)) if high != low + 1), len(numbers)]
    runs = [(numbers[start], numbers[end - 1]) for start, end in pairwise(breaks) if start < end]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def check_cpus(flag: str, cpus: Collection[int]) -> None:
    """UsageError unless a process of ours could be put on all of these.

    Asked of the kernel: which CPUs a container may use stands in no file that is the same everywhere, and of a set that
    is only partly allowed the kernel silently takes that part.
    """
    missing: set[int] = set(cpus)

    def ask() -> None:  # the affinity of this thread alone
        for cpu in cpus:
            try:
                os.sched_setaffinity(0, {cpu})
            except (OSError, OverflowError):
                continue
            missing.discard(cpu)

    thread = threading.Thread(target=ask, name="atom-check-cpus", daemon=True)
    thread.start()
    thread.join()
    if missing:
        raise UsageError(
            f"{flag} {format_cpus(cpus)}: this process cannot use CPU {format_cpus(missing)}; it runs on "
            f"{format_cpus(own_cpus())}"
        )


def check_pinnable(flag: str, recipe: Recipe) -> None:
    """UsageError if the recipe's server is started by somebody else, who would not pass on what is asked here."""
    program = PurePath(recipe.exec[0]).name if recipe.exec else ""
    if program in _ELSEWHERE:
        raise UsageError(
            f"{flag}: recipe {recipe.name} starts its server through {program}, which chooses its CPUs; say so in the "
            "recipe's `exec` (docker: --cpuset-cpus)"
        )


def allow_cpus(cpus: Collection[int]) -> None:
    """Put this thread, and all threads and processes that it starts from now on, on these CPUs."""
    os.sched_setaffinity(0, cpus)
