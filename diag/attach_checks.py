"""Why the hook could not be put into a process, found out before it is touched; and which way it would go in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from atom.diag.python_process import PythonRuntime
from atom.recipes.processes import read_stat

__all__ = ["AttachMethod", "choose_method", "obstacle", "permission_hint"]

AttachMethod = Literal["auto", "gdb", "remote_exec"]

_SYS_PTRACE: Final = 19


def choose_method(
    wanted: AttachMethod,
    runtime: PythonRuntime,
    *,
    own_version: tuple[int, int],
    remote_exec: bool,
    gdb: bool,
) -> tuple[Literal["gdb", "remote_exec"] | None, str]:
    """The way in, or None and why there is none. `remote_exec`, `gdb`: whether we have them."""
    theirs = "an unknown version" if runtime.version is None else "{}.{}".format(*runtime.version)
    ours = "{}.{}".format(*own_version)
    remote = remote_exec and runtime.version == own_version and own_version >= (3, 14)
    no_remote = f"sys.remote_exec needs the same CPython, 3.14 or later, on both sides (here {ours}, there {theirs})"
    if wanted != "gdb" and remote:
        return "remote_exec", ""
    if wanted == "remote_exec":
        return None, no_remote
    if not gdb:
        how = "gdb is not installed (`apt-get install gdb`)"
        return None, how if wanted == "gdb" else f"{how}, and {no_remote}"
    if runtime.missing:
        return None, (
            f"{Path(runtime.path).name} does not export {', '.join(runtime.missing)}: "
            "a statically linked Python without them, or no CPython; start it with the hook (--print-env)"
        )
    if not runtime.recent:
        found = f"it is Python {theirs}" if runtime.version is not None else "its Python is older"
        return None, f"{found}; the hook needs 3.8 or later, so nothing was put into it"
    return "gdb", ""


def obstacle(pid: int, directory: Path) -> str | None:
    """What keeps this process from being attached to, or from writing to `directory`; None if nothing is seen."""
    status = _status(pid)
    if status is None:
        return "it ended"
    if (tracer := status.get("TracerPid", "0")) != "0":
        return f"it is traced already, by pid {tracer}"
    stat = read_stat(pid)
    if stat is not None and stat.state == "T":
        return "it is stopped (SIGSTOP)"
    return _no_permission(status) or _not_visible(pid, directory) or _not_writable(status, directory)


def permission_hint() -> str:
    """What would allow ptrace where it was refused."""
    scope = _yama_scope()
    if scope == 3:
        return "kernel.yama.ptrace_scope=3 forbids it until the next boot; start the server with the hook (--print-env)"
    if scope in (1, 2):
        return f"kernel.yama.ptrace_scope={scope} allows it to root only: run as root, or set it to 0 with sysctl"
    return (
        "run as root, and in a container with `--cap-add SYS_PTRACE`; or start the server with the hook (--print-env)"
    )


def _no_permission(status: dict[str, str]) -> str | None:
    uid = int(status["Uid"].split()[0])
    own = _status(os.getpid()) or {}
    privileged = bool(int(own.get("CapEff", "0"), 16) >> _SYS_PTRACE & 1)
    if privileged:
        return None if _yama_scope() != 3 else permission_hint()
    if uid != os.geteuid():
        return f"it belongs to another user (uid {uid}): run as that user, or as root"
    return permission_hint() if _yama_scope() else None


def _not_visible(pid: int, directory: Path) -> str | None:
    """A process in a container has another root: the directory must be mounted there under the same path."""
    try:
        inside, outside = os.stat(f"/proc/{pid}/root{directory}"), directory.stat()  # noqa: PTH116 (a magic link)
    except PermissionError:
        return None
    except OSError:
        inside = None
    if inside is not None and (inside.st_dev, inside.st_ino) == (outside.st_dev, outside.st_ino):
        return None
    return f"it runs in a container that does not see {directory}: mount that there, or start it with --print-env"


def _not_writable(status: dict[str, str], directory: Path) -> str | None:
    uid, gid = int(status["Uid"].split()[1]), int(status["Gid"].split()[1])
    groups = {gid, *(int(word) for word in status.get("Groups", "").split())}
    if uid == 0:
        return None
    found = directory.stat()
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
    if found.st_mode >> shift & 0o3 == 0o3:
        return None
    return f"its user (uid {uid}) cannot write to {directory}: give it a directory that it can write to (--output-dir)"


def _status(pid: int) -> dict[str, str] | None:
    try:
        text = (Path("/proc") / str(pid) / "status").read_text()
    except OSError:
        return None
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def _yama_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0
