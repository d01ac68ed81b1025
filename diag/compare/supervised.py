"""One command run to its end under a supervisor: nothing of it outlives this process, however that ends."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from atom.recipes.placeholders import Expansion
from atom.recipes.recipe import Recipe
from atom.recipes.scratch import make_scratch
from atom.recipes.server import SupervisorLink

__all__ = ["Ended", "run_supervised"]

_GRACE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How it ended."""

    status: int | None
    """As in `subprocess.Popen.returncode`; None if it did not run, or did not end by itself."""
    problem: str | None
    """Why there is no status."""
    lines: Sequence[str]
    """The last of its output."""
    late: bool = False
    """It was ended because its time was over."""


def run_supervised(
    argv: Sequence[str],
    *,
    cwd: Path | None,
    env: Mapping[str, str],
    log: Path,
    timeout_s: float,
    log_max_bytes: int | None = None,
) -> Ended:
    """Run `argv` with `env` as its whole environment, its output in `log`, which is rotated at `log_max_bytes`
    (default: as a server's)."""
    recipe = Recipe(name="command", source="command line", command=tuple(argv))
    if log_max_bytes is not None:
        recipe = replace(recipe, log_max_bytes=log_max_bytes)
    scratch = make_scratch()
    link = None
    try:
        link = SupervisorLink(
            label=str(uuid.uuid4()),
            expansion=Expansion(
                prepare=[],
                command=list(argv),
                stop_command=None,
                env=dict(env),
                recipe_env={},
                cwd=None if cwd is None else str(cwd),
            ),
            recipe=recipe,
            log_path=log,
            grace_s=_GRACE_S,
            scratch=scratch,
            on_log=None,
        )
        in_time = link.wait(lambda: link.ended, timeout_s)
        link.ask("stop")
        link.finish()
        lines = list(link.lines)
        if "exec_failed" in link.events:
            return Ended(None, f"cannot run {argv[0]}: {link.events['exec_failed']['message']}", lines)
        if not in_time:
            return Ended(None, f"it had not ended after {timeout_s:g} s", lines, late=True)
        status = link.events.get("exited", {}).get("status")
        if status is None:
            return Ended(None, link.supervisor_error() or "it was killed", lines)
        return Ended(int(status), None, lines)
    except BaseException:
        if link is not None:
            link.ask("kill")
            link.finish()
        raise
    finally:
        scratch.remove()
