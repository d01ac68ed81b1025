"""The environment that loads `diag/gc_hook/` into a server and all its Python children, without touching its code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from atom.diag.gc_hook import ACTION_VARIABLE, DIRECTORY_VARIABLE, ORIGINS_VARIABLE, ROLES_VARIABLE, check_action
from atom.recipes.known_servers import KNOWN_ROLES
from atom.recipes.recipe import Roles

__all__ = ["check_action", "hook_environment", "hook_python_path", "print_env"]

_IN_CONTAINER: Final = "/opt/atom-gc"


def hook_python_path() -> Path:
    """The directory to put first on PYTHONPATH: its `sitecustomize` loads the hook and chains the one it shadows."""
    return Path(__file__).absolute().parent / "gc_inject"


def hook_environment(
    directory: Path, roles: Roles, action: str | None = None, packages: Sequence[str] = ()
) -> Mapping[str, str]:
    """Variables that make the hook write to `directory` (which must exist) under the names of these roles.

    `action`: what it does to the collector once `gc-action-start` is in the directory; ValueError if it is none
    (`check_action`). `packages`: whose modules' origins it records.
    """
    variables = {DIRECTORY_VARIABLE: str(directory.absolute()), ROLES_VARIABLE: json.dumps(roles.as_dict())}
    if packages:
        variables[ORIGINS_VARIABLE] = json.dumps(list(packages))
    return variables if action is None else {**variables, ACTION_VARIABLE: check_action(action)}


def print_env(directory: Path | str, roles: Roles = KNOWN_ROLES, action: str | None = None) -> str:
    """What a person needs to start a server with the hook by hand: lines for a shell, and options for `docker run`.

    The text can be evaluated by a shell as it is: all but the exports is comments.
    """
    directory = Path(directory).absolute()
    variables = hook_environment(directory, roles, action)
    here = Path(__file__).resolve().parent
    path = shlex.quote(str(hook_python_path()))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    mounts = [
        f"{here / 'gc_hook'}:{_IN_CONTAINER}/gc_hook:ro",
        f"{here / 'gc_inject'}:{_IN_CONTAINER}/gc_inject:ro",
        f"{directory}:{directory}",
    ]
    options = [f"-v {shlex.quote(mount)}" for mount in mounts]
    options += [f"-e {shlex.quote(f'{name}={value}')}" for name, value in variables.items()]
    options.append(f"-e PYTHONPATH={_IN_CONTAINER}/gc_inject")
    return "\n".join(
        [
            "# In the shell that starts the server:",
            *exports,
            f'export PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}"',
            f"mkdir -p {shlex.quote(str(directory))}",
            "",
            "# For a container, options of `docker run`. If the image sets PYTHONPATH itself, append that to ours.",
            "# The user inside must be able to write to the directory.",
            *(f"#   {option}" for option in options),
            "",
            f"# Mountable hook: {here / 'gc_hook'} and {here / 'gc_inject'}, side by side in one folder.",
            f"# Afterwards: touch {shlex.quote(str(directory / 'gc-hook-stop'))} takes the hook out of the server.",
        ]
    )
