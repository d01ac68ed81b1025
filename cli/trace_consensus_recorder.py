"""`atom trace-consensus recorder`: the recorder for MPI programs whose source cannot be touched. The building is
`diag/consensus/pmpi_build.py`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from atom.cli import options as opt
from atom.diag.consensus.pmpi_build import SOURCE, build_recorder
from atom.recipes.errors import UsageError

__all__ = ["EXAMPLES", "recorder"]

EXAMPLES: Final = (
    "Examples:\n\n"
    "  atom trace-consensus recorder --build recorder/\n\n"
    "  atom trace-consensus recorder --build recorder/ --mpicc /opt/openmpi/bin/mpicc\n\n"
    "  atom trace-consensus recorder > recorder.c\n\n"
    "Exit status: 0 · 1 the compiler failed · 2 wrong usage, no mpicc."
)


def recorder(
    build: Annotated[
        Path | None, typer.Option("--build", metavar="DIR", help="Build it there, and say how it is used.")
    ] = None,
    mpicc: Annotated[
        str | None,
        typer.Option(
            "--mpicc",
            metavar="COMMAND",
            help="Compiler of the MPI that the program uses; default: the first mpicc of PATH, else the MPI wheel's.",
        ),
    ] = None,
    json_path: opt.JsonOption = None,
    quiet: opt.QuietOption = False,
) -> None:
    """Print the source of the PMPI recorder, or build it.

    Preloaded into any MPI program, it records when each rank enters and leaves its blocking collectives; `atom
    trace-consensus report` then says who waited for whom.
    """
    if build is None:
        if mpicc is not None or json_path is not None:
            raise UsageError(f"{'--mpicc' if mpicc is not None else '--json'} goes with --build DIR")
        typer.echo(SOURCE.read_text(encoding="utf-8"), nl=False)
        return
    opt.check_writable("--json", json_path)
    built = build_recorder(build, mpicc)
    library = shlex.quote(str(built.library))
    command = f"mpiexec -n 4 env LD_PRELOAD={library} ATOM_PMPI_DIR=trace PROGRAM"
    if json_path is not None:
        text = json.dumps({"schema_version": "1.0", "library": str(built.library), "mpicc": list(built.mpicc)})
        if json_path == "-":
            typer.echo(text)
        else:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    if not quiet and json_path != "-":
        typer.echo(f"built {built.library} with {shlex.join(built.mpicc)}")
        typer.echo("it fits programs of that MPI library alone; record one and read the record with")
        typer.echo(f"  {command}\n  atom trace-consensus report trace/")
