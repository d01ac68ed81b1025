"""Starts the emitter (tests/benchmarks/emitter.c, which says what it is): builds it on first use, then becomes it.

    python tests/benchmarks/emitter.py --port-file PORT --log LOG.jsonl --tick-ms 10
    python tests/benchmarks/emitter.py --port-file PORT --full-rate
    python tests/benchmarks/emitter.py --build

Needs a C compiler (cc, gcc or clang; $CC) once. `ATOM_EMITTER` names a program that was built elsewhere.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def build() -> Path:
    """The program; SystemExit in words if there is none and none can be built."""
    if built := os.environ.get("ATOM_EMITTER"):
        return Path(built)
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atom"
    program = folder / f"emitter-{digest}"
    if program.exists():
        return program
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise SystemExit(
            f"the emitter ({SOURCE.name}) needs a C compiler: install gcc or clang, or set CC; or build it elsewhere "
            f"(cc -O2 -o emitter {SOURCE}) and set ATOM_EMITTER to the program"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / "emitter"
        subprocess.run([compiler, "-O2", "-o", fresh, SOURCE], check=True)
        fresh.replace(program)  # whoever builds at the same time builds the same
    return program


def main() -> None:
    program = build()
    if sys.argv[1:] == ["--build"]:
        print(program)
        return
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
