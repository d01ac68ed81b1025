"""Records what the garbage collector does in a process that knows nothing of it. Standard library only, Python 3.8 on.

A package that stands alone: `diag/gc_inject/sitecustomize.py` loads it by path into a server and each of its children
when `ATOM_GC_HOOK_DIR` is set (`diag/gc_injection.py` makes that environment), and `diag/attach.py` carries its source
into a server that is running. Reading the files is `diag/gc_records.py`.

`passes.py` has the callbacks, `hook.py` the thread that takes what they noted, `tally.py` the sums, `record.py` the
file, `origins.py` where the process's modules come from, `actions.py` what it does to the collector if asked,
`forks.py` what happens when the process forks, `process.py` how it gets into a process. All times are nanoseconds of
CLOCK_MONOTONIC.

Files in the hook's directory: `gc-<role>-<pid>.jsonl`, the record. `gc-action-start`, made by the session, starts the
what-if action. `gc-hook-stop` makes every hook undo its action and remove itself. `gc-hook-owner` is locked by whoever
attached; a hook that was attached removes itself when the lock is gone. `gc-failed-<pid>.json`: why it did not load.
`origins-<role>-<pid>.json`: where modules come from, if that was asked.
"""

from .actions import check_action
from .hook import GcHook, collector_kind, old_generations
from .process import (
    ACTION_VARIABLE,
    DIRECTORY_VARIABLE,
    INTERFACE,
    ORIGINS_VARIABLE,
    ROLES_VARIABLE,
    install,
    install_attached,
    install_from_environment,
)
from .record import ACTION_FILE, OWNER_FILE, STOP_FILE

__all__ = [
    "ACTION_FILE",
    "ACTION_VARIABLE",
    "DIRECTORY_VARIABLE",
    "INTERFACE",
    "ORIGINS_VARIABLE",
    "OWNER_FILE",
    "ROLES_VARIABLE",
    "STOP_FILE",
    "GcHook",
    "check_action",
    "collector_kind",
    "install",
    "install_attached",
    "install_from_environment",
    "old_generations",
]
