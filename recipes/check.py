"""`python -m atom.recipes.check [PATH…]`: check recipes against their schema; without paths, the built-in ones.

A file in a folder called `suites` is a suite of loads, and is checked against the schema of suites.

Exit status 0 if all are right, 2 if one is wrong (one line each on standard error).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from atom.recipes.errors import ExitStatus, UsageError
from atom.recipes.resolve import builtin_recipes, load_recipe
from atom.recipes.suite import builtin_suites, load_suite

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [*builtin_recipes().values(), *builtin_suites().values()]
    files = [file for path in paths for file in (sorted(path.glob("*.y*ml")) if path.is_dir() else [path])]
    wrong = 0
    for file in files:
        try:
            if file.parent.name == "suites":
                load_suite(file)
            else:
                load_recipe(file)
        except UsageError as error:
            print(error, file=sys.stderr)
            wrong += 1
    print(f"{len(files)} recipes and suites checked, {wrong} wrong")
    return ExitStatus.USAGE if wrong else ExitStatus.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
