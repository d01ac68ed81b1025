"""The `atom` command: finds the subcommand, runs it, and turns how it ended into an exit status. Nothing else does.

Subcommands are imported when they are asked for (`cli/lazy_group.py`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from atom.cli.lazy_group import HELP_OPTIONS, LazyGroup
from atom.cli.options import split_multiple, split_tests
from atom.cli.outputs import describe_os_error
from atom.cli.signals import raising
from atom.recipes.errors import AtomError, ExitStatus, RunError, UsageError

__all__ = ["COMMANDS", "DISTRIBUTION", "main"]

DISTRIBUTION: Final = "atom-serving"

COMMANDS: Final = {
    "serve": "serve",
    "bench": "bench",
    "gc-profile": "gc_profile",
    "trace-consensus": "trace_consensus",
    "ab-compare": "ab_compare",
    "report": "report",
    "get": "get",
    "doctor": "doctor",
    "clean": "clean",
}
"""Subcommand → module of this package, in the order of the help."""


class _Commands(LazyGroup):
    MODULES = COMMANDS


app = typer.Typer(
    name="atom",
    cls=_Commands,
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
    rich_markup_mode="rich",
    help="Launches, benchmarks and diagnoses LLM serving runs.",
    epilog=(
        "Examples:\n\n"
        "  atom serve\n\n"
        "  atom bench random --recipe embedded --num-prompts 32 --max-concurrency 4\n\n"
        "  atom bench random --base-url http://127.0.0.1:8000 --random-input-len 2048 --json result.json\n\n"
        "  atom bench sweep --port 8000 --max-concurrency auto --slo 'p99_ttft_ms<=500'\n\n"
        "  atom gc-profile --duration 10m -- vllm serve MODEL\n\n"
        "  atom ab-compare main branch"
    ),
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"atom {importlib.metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error. May stand anywhere before --.")
    ] = False,
) -> None:
    del version, show_traceback  # --version acts in its callback, --traceback is taken by main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run `atom` with `argv` (default: the process's) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What follows `--` is somebody else's command line.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, foreign = arguments[:end], arguments[end:]
    show_traceback = "--traceback" in own
    arguments = [*(argument for argument in own if argument != "--traceback"), *foreign]
    if arguments[:1] in (["bench"], ["gc-profile"], ["trace-consensus"], ["ab-compare"]):
        arguments = split_multiple(arguments)
    if arguments[:1] == ["ab-compare"]:
        arguments = split_tests(arguments)
    failed: BaseException | None = None
    try:
        with raising():
            if arguments[:1] == ["bench"]:
                _join_ranks()
            status = _run(arguments)
    except BrokenPipeError as error:
        # Whoever read our output has seen enough, as with `atom … | head`. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status, failed = ExitStatus.FAILED, error
    except BaseException as error:
        status, failed = _status(error, show_traceback), error
    return _conclude_ranks(status, failed)


def _join_ranks() -> None:
    """Become one of the ranks that `mpiexec` or `srun` started, if one of them did."""
    if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")):
        from atom.bench.mpi_ranks import join

        join()


def _conclude_ranks(status: int, failed: BaseException | None) -> int:
    module = sys.modules.get("atom.bench.mpi_ranks")
    ranks = None if module is None else module.current()
    return status if ranks is None else int(ranks.conclude(status, failed))


_NO_MORE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a write says when a disk is full, a limit is reached or a terminal is gone."""


def _run(arguments: list[str]) -> int:
    _check_namespace()
    command = typer.main.get_command(app)
    try:
        result = command.main(args=arguments, prog_name="atom", standalone_mode=False)
    except OSError as error:
        if error.filename is None and error.errno in _NO_MORE:  # every file of ours is named
            raise RunError(f"cannot write standard output: {error.strerror}") from error
        raise
    _flush_stdout()
    return int(result) if isinstance(result, int) else ExitStatus.OK


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"cannot write standard output: {error.strerror}") from None


def _status(error: BaseException, show_traceback: bool) -> int:
    """The exit status of an exception; prints its one line."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitStatus.OK
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return ExitStatus.INTERRUPTED
    if show_traceback:
        traceback.print_exception(error)
    if isinstance(error, AtomError):
        _say(str(error))
        return error.status
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's own: wrong usage
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        if message := error.format_message():  # empty where the help was all there is to say
            _say(message + hint)
        return int(error.exit_code)
    if isinstance(error, OSError):  # the machine's fault: a full disk, a directory that may not be written
        _say(describe_os_error(error))
        return ExitStatus.FAILED
    _say(f"{type(error).__name__}: {error} (this is a fault in atom; --traceback shows where)")
    return ExitStatus.FAILED


def _say(message: str) -> None:
    from atom.bench.redact import redact  # commands that succeed need not load it

    with contextlib.suppress(OSError, ValueError):
        print(f"error: {redact(message)}", file=sys.stderr)  # logs of CI are public, and a URL may have a password


def _check_namespace() -> None:
    """`atom` is a namespace package; a regular package of that name elsewhere on sys.path hides parts of it."""
    package = sys.modules.get("atom")
    foreign = getattr(package, "__file__", None)
    if foreign is not None:
        raise UsageError(
            f"another package named atom shadows this one: {foreign}; remove it from PYTHONPATH or the environment "
            f"(pip uninstall atom), or install {DISTRIBUTION} into an environment of its own"
        )
