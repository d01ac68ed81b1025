"""Building and caching the kernels: private, keyed, atomic, and with a reason where it cannot be done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atom.engine.kernels import build
from atom.engine.kernels.bindings import CPUKernels
from atom.engine.kernels.build import KernelsUnavailableError, build_library

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "atom"


@pytest.fixture
def quick_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile at once, in place of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    (folder / "one.h").write_text("#define ONE 1\n")
    monkeypatch.setattr(build, "_SOURCES", folder)
    return folder


@needs_compiler
def test_built_once_and_rebuilt_when_a_source_changes(cache: Path, quick_sources: Path) -> None:
    first = build_library()
    stamp = first.stat().st_mtime_ns
    assert build_library() == first
    assert first.stat().st_mtime_ns == stamp
    assert cache.stat().st_mode & 0o777 == 0o700
    (quick_sources / "one.h").write_text("#define ONE 2\n")
    assert build_library() != first
    assert [path.suffix for path in cache.iterdir()] == [".so", ".so"]


@needs_compiler
def test_a_library_that_others_could_write_is_refused(cache: Path, quick_sources: Path) -> None:
    build_library().chmod(0o722)
    with pytest.raises(KernelsUnavailableError, match="only this user can write"):
        build_library()


@needs_compiler
def test_an_open_cache_directory_is_closed(cache: Path, quick_sources: Path) -> None:
    cache.mkdir(mode=0o777)
    build_library()
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_symbolic_link_is_no_cache_directory(cache: Path, quick_sources: Path, tmp_path: Path) -> None:
    cache.symlink_to(quick_sources)
    with pytest.raises(KernelsUnavailableError, match=r"not a directory owned by this user|no C compiler"):
        build_library()


@needs_compiler
def test_a_failing_compiler_is_quoted(cache: Path, quick_sources: Path) -> None:
    (quick_sources / "one.c").write_text("int one(void) { return nothing; }\n")
    with pytest.raises(KernelsUnavailableError, match="nothing"):
        build_library()
    assert list(cache.iterdir()) == []


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(KernelsUnavailableError, match="no C compiler"):
        build_library()


@needs_compiler
def test_first_uses_at_the_same_time(cache: Path, quick_sources: Path) -> None:
    code = (
        "import pathlib, sys; from atom.engine.kernels import build; "
        "build._SOURCES = pathlib.Path(sys.argv[1]); print(build.build_library())"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(quick_sources)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(answers) == 1
    assert len(list(cache.iterdir())) == 1


@needs_compiler
@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-mno-avx512f", "-mno-avx2", "-mno-fma")])
def test_the_kernels_compile_for_lesser_machines(
    cache: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """And without a warning: an unused branch of the sources would otherwise rot."""
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("flags of x86")
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, *flags, "-Werror"))
    assert build_library().exists()


@needs_compiler
def test_the_kernels_load() -> None:
    kernels = CPUKernels(1)
    assert kernels.isa in ("avx512", "avx2", "neon", "generic")
    kernels.close()
