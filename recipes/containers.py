"""Containers that carry this project's labels: which engine there is, and what of them was left behind.

Nothing here starts one: recipes do, by their `exec` prefix.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atom.recipes.errors import UsageError
from atom.recipes.processes import OwnerState, owner_state

__all__ = ["ENGINES", "OWNER_LABEL", "RUN_LABEL", "StaleContainer", "container_engine", "remove", "stale_containers"]

ENGINES: Final = ("docker", "podman")
RUN_LABEL: Final = "atom.run"
"""The label of the run it belongs to, as `ATOM_RUN_LABEL` has it."""
OWNER_LABEL: Final = "atom.owner"
"""Token of the process that answers for it (`recipes/processes.py`)."""
_ANSWER_S: Final = 20.0
_REMOVE_S: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleContainer:
    engine: str
    id: str
    label: str


def container_engine() -> str:
    """The first of `ENGINES` that is installed; UsageError if none is."""
    for engine in ENGINES:
        if shutil.which(engine) is not None:
            return engine
    raise UsageError(f"a container image needs {' or '.join(ENGINES)}, and neither is on PATH here")


def stale_containers() -> list[StaleContainer]:
    """Those whose owner is gone. An engine that does not answer has none."""
    found = []
    for engine in ENGINES:
        ids = (_ask(engine, ["ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={RUN_LABEL}"]) or "").split()
        told = _ask(engine, ["inspect", "--format", "{{json .Config.Labels}}", *ids]) if ids else None
        lines = [] if told is None else told.splitlines()
        if len(lines) != len(ids):
            continue  # one of them has just ended
        for identity, line in zip(ids, lines, strict=True):
            labels = json.loads(line)
            if owner_state(str(labels.get(OWNER_LABEL, ""))) is OwnerState.GONE:
                found.append(StaleContainer(engine=engine, id=identity, label=str(labels[RUN_LABEL])))
    return found


def remove(container: StaleContainer) -> bool:
    """End and remove it. Whether it is gone."""
    return _ask(container.engine, ["rm", "--force", container.id], _REMOVE_S) is not None


def _ask(engine: str, words: Sequence[str], patience_s: float = _ANSWER_S) -> str | None:
    """What the engine prints; None if it is not installed, does not answer, or says no."""
    try:
        done = subprocess.run(
            [engine, *words], capture_output=True, text=True, timeout=patience_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
