"""How the hook gets into a process: by its environment at start, or by a call that `diag/attach.py` makes it run; and
the hooks that one process has."""

# ruff: noqa: PTH104, PTH110, PTH118

from __future__ import annotations

import _thread
import gc
import json
import os

from .forks import HOOKS
from .hook import GcHook
from .record import STOP_FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["install", "install_attached", "install_from_environment"]

INTERFACE = 1
"""Changes when what `diag/attach.py` calls here does; a package of another version found in a process is left alone."""

DIRECTORY_VARIABLE = "ATOM_GC_HOOK_DIR"
ROLES_VARIABLE = "ATOM_GC_HOOK_ROLES"
ACTION_VARIABLE = "ATOM_GC_HOOK_ACTION"
ORIGINS_VARIABLE = "ATOM_GC_HOOK_ORIGINS"

_installing = _thread.allocate_lock()
_answering: set[str] = set()
"""Confirmations that were asked for: a process may be made to run the same text twice."""


def install(
    directory: str,
    roles: Mapping[str, Sequence[str]],
    action: str | None = None,
    attached: bool = False,
    packages: Sequence[str] = (),
) -> bool:
    """Record this process into `directory`; False if it is already. Another directory gets a hook of its own."""
    with _installing:
        wanted = os.path.realpath(directory)
        there = [hook for hook in HOOKS if os.path.realpath(hook.record.directory) == wanted]
        if not there:
            GcHook(directory, roles, action, attached, packages).install()
        if attached:
            (there or HOOKS)[-1].begin()
        return not there


def install_from_environment() -> None:
    """Install the hook as the environment says, if it does and the interpreter has callbacks.

    `ATOM_GC_HOOK_DIR`: where the files go. `ATOM_GC_HOOK_ROLES`: JSON, role to regular expressions on the command line,
    the most specific role first. `ATOM_GC_HOOK_ACTION`: see `actions.check_action`. `ATOM_GC_HOOK_ORIGINS`: JSON, the
    packages whose modules' origins are recorded.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory or not hasattr(gc, "callbacks") or os.path.exists(os.path.join(directory, STOP_FILE)):
        return
    try:
        roles = json.loads(os.environ.get(ROLES_VARIABLE) or "{}")
        packages = json.loads(os.environ.get(ORIGINS_VARIABLE) or "[]")
    except ValueError:
        roles, packages = {}, []
    install(directory, roles, os.environ.get(ACTION_VARIABLE) or None, packages=packages)


def install_attached(directory: str, roles: Mapping[str, Sequence[str]], action: str | None, confirmation: str) -> None:
    """What `diag/attach.py` has the process call, in a thread of its own. Tells the result in the file `confirmation`:
    `{"ok": true, "already": whether it was hooked}`, or an error."""
    with _installing:
        if confirmation in _answering:
            return
        _answering.add(confirmation)
    try:
        if not hasattr(gc, "callbacks"):
            raise RuntimeError("this interpreter has no gc.callbacks")
        if os.path.exists(os.path.join(directory, STOP_FILE)):
            return  # a call that was queued and ran only after the detach
        result: dict[str, object] = {"ok": True, "already": not install(directory, roles, action, attached=True)}
    except Exception as error:
        result = {"ok": False, "error": repr(error)}
    with open(confirmation + ".new", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.rename(confirmation + ".new", confirmation)
