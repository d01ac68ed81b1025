"""Compiles the C kernels on first use and caches the library; `bindings.py` loads and calls it.

The cache is `$XDG_CACHE_HOME/atom` (or `~/.cache/atom`), private to the user. A file name there is a hash over the
sources, the compiler's version, the flags and the CPU's features, so a library built on another machine with the same
home directory is never loaded. Concurrent first uses compile side by side and rename atomically.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

__all__ = ["KernelsUnavailableError", "build_library"]

_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra")
_COMPILE_TIMEOUT_S = 300


class KernelsUnavailableError(Exception):
    """There is no compiler, or it failed, or the cache directory cannot be trusted. The message says which."""


def build_library() -> Path:
    """Path of the compiled kernels for this machine, compiling them if they are not in the cache."""
    compiler = _find_compiler()
    sources = sorted(_SOURCES.glob("*.c"))
    key = _cache_key(compiler, [*sources, *sorted(_SOURCES.glob("*.h"))])
    directory = _private_directory()
    library = directory / f"cpu-kernels-{key}.so"
    if library.exists():
        _check_owner(library)
        return library
    handle, name = tempfile.mkstemp(prefix="building-", suffix=".so", dir=directory)
    os.close(handle)
    temporary = Path(name)
    try:
        _compile(compiler, sources, temporary)
        temporary.chmod(0o500)
        temporary.replace(library)
    finally:
        temporary.unlink(missing_ok=True)
    return library


def _find_compiler() -> str:
    """`$CC` if set, else the first of cc, gcc, clang on the path."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise KernelsUnavailableError("no C compiler found (cc, gcc or clang); the torch path serves instead")


def _cache_key(compiler: str, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=False).stdout
    for part in (compiler.encode(), version, " ".join(_FLAGS).encode(), _cpu_features().encode()):
        digest.update(part + b"\0")
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """What `-march=native` looks at: the machine type and the CPU's model and flags."""
    lines = [platform.machine()]
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.split(":")[0].strip() in ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part"):
                lines.append(line)
            if not line.strip():
                break
    except OSError:
        lines.append(platform.processor())
    return "\n".join(lines)


def _private_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    directory = (Path(base) if base else Path.home() / ".cache") / "atom"
    try:
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        info = directory.lstat()
    except OSError as error:
        raise KernelsUnavailableError(f"the kernel cache {directory} cannot be created: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise KernelsUnavailableError(f"the kernel cache {directory} is not a directory owned by this user")
    if info.st_mode & 0o077:
        directory.chmod(0o700)
    return directory


def _check_owner(library: Path) -> None:
    info = library.lstat()
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise KernelsUnavailableError(f"{library} is not a regular file that only this user can write")


def _compile(compiler: str, sources: list[Path], output: Path) -> None:
    command = [compiler, *_FLAGS, *map(str, sources), "-o", str(output), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{compiler} did not compile the kernels: {error}") from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise KernelsUnavailableError(f"{compiler} did not compile the kernels: {first.strip()}")
