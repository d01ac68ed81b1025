"""Finds the recordings in what a user names: run directories with one run or several arms, directories of traces,
single files; and reads each rank's file with the reader of its format.

A format is one entry of `FORMATS`: whether a file is of it, by its first bytes, and its reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from atom.bench.regular_file import read_head
from atom.diag.consensus.flight_recorder import complete_by_clock, is_flight_record, read_flight_record, refuse_pickle
from atom.diag.consensus.foreign_json import load_json
from atom.diag.consensus.kineto import is_profile, read_profile
from atom.diag.consensus.model import RankTrace, Recording
from atom.diag.consensus.pmpi_file import is_pmpi_record, read_pmpi_record
from atom.diag.consensus.trace_file import is_trace, printable, read_trace
from atom.recipes.errors import UsageError

__all__ = ["FORMATS", "Format", "find_recordings", "read_rank"]

_HEAD_BYTES: Final = 4096
MOST_FILES: Final = 8192


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    recognises: Callable[[bytes], bool]
    """By the first bytes of a file, unpacked or not."""
    read: Callable[[Path], RankTrace]


def _is_json(head: bytes) -> bool:
    return head[:2] == b"\x1f\x8b" or head.lstrip()[:1] == b"{"


def _read_json(path: Path) -> RankTrace:
    value = load_json(path)
    if is_profile(value):
        return read_profile(path, value)
    if is_flight_record(value):
        return read_flight_record(path, value)
    raise UsageError(f"{path} is neither a profiler trace nor a dump of a Flight Recorder")


FORMATS: Final[tuple[Format, ...]] = (
    Format("agreement trace", is_trace, read_trace),
    Format("PMPI record", is_pmpi_record, read_pmpi_record),
    Format("profiler trace or Flight Recorder dump", _is_json, _read_json),
)
"""In this order: the first that recognises a file reads it."""


def read_rank(path: Path) -> RankTrace:
    """One rank's file of any format. UsageError if it is of none."""
    head = _head(path)
    refuse_pickle(path, head)
    for one in FORMATS:
        if one.recognises(head):
            return one.read(path)
    raise UsageError(f"{path} is of no format that is known: {', '.join(one.name for one in FORMATS)}")


def _head(path: Path) -> bytes:
    """UsageError if it cannot be read, or is a pipe or a device, which may never end."""
    try:
        return read_head(path, _HEAD_BYTES)
    except OSError as error:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no regular file") from None
        raise UsageError(f"{path}: {error.strerror}") from None


def find_recordings(paths: Sequence[Path]) -> list[Recording]:
    """All of them, in the order given. Arms of one name in several of `paths` are told apart by these. UsageError for
    a path in which there is nothing."""
    files = [path for path in paths if path.is_file()]
    found: list[tuple[Path, list[Recording]]] = []
    if files:
        found.append((files[0].parent, _of_files(files)))
    for path in paths:
        if path.is_dir():
            found.append((path, _of_directory(path)))
        elif not path.is_file():
            if path.exists():
                raise UsageError(f"{path} is no regular file, and no directory")
            raise UsageError(f"{path}: there is no such file or directory")
    owners: dict[str, set[Path]] = {}
    for place, some in found:
        for one in some:
            owners.setdefault(one.label, set()).add(place)
    return [
        replace(one, label=f"{place.name}/{one.label}") if len(owners[one.label]) > 1 else one
        for place, some in found
        for one in some
    ]


def _of_directory(path: Path) -> list[Recording]:
    recordings = [one for arm in sorted((path / "arms").glob("*/")) for one in _of_arm(arm)]
    if not recordings and not (path / "trace").is_dir():
        recordings = _of_arm(path)
    if recordings:
        return recordings
    ranks = list(_rank_files(path))
    if not ranks:
        looked_for = "arms/*/run-*/trace/rank-*.jsonl, run-*/trace/rank-*.jsonl, trace/rank-*.jsonl, or files of ranks"
        raise UsageError(f"{path} has no traces ({looked_for})")
    return [_recording(ranks, path)]


def _of_arm(arm: Path) -> list[Recording]:
    """The runs of one arm's directory, by number."""
    runs = sorted(arm.glob("run-*/"), key=lambda one: _number(one.name))
    return [
        _recording(ranks, run, label=arm.name or arm.resolve().name, repeat=_number(run.name))
        for run in runs
        if (ranks := list(_rank_files(run)))
    ]


def _number(name: str) -> int:
    found = re.search(r"(\d{1,9})$", name)
    return int(found[1]) if found else 0


def _rank_files(path: Path) -> Iterator[Path]:
    """The files of ranks in a run's directory; a run directory of ours has other files too."""
    place = path / "trace" if (path / "trace").is_dir() else path
    own = sorted(place.glob("rank-*.jsonl"), key=lambda one: _number(one.stem))
    if own:
        yield from own
        return
    if (path / "run.json").is_file() and place == path:
        return
    for one in sorted(place.iterdir()):
        if one.is_file() and not one.name.startswith(".") and _looks_like_one(one):
            yield one


def _looks_like_one(path: Path) -> bool:
    head = _head(path)
    return head[:1] == b"\x80" or any(one.recognises(head) for one in FORMATS)


def _of_files(files: Sequence[Path]) -> list[Recording]:
    """Files of one directory are the ranks of one run."""
    by_place: dict[Path, list[Path]] = {}
    for one in files:
        by_place.setdefault(one.parent, []).append(one)
    return [_recording(some, where) for where, some in by_place.items()]


def _signal(path: Path) -> str | None:
    """What ended a rank, if its guard saw it."""
    try:
        value = json.loads(read_head(path, _HEAD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    name = value.get("signal") if isinstance(value, dict) else None
    return name if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9 ]{1,20}", name) else None


def _recording(files: Sequence[Path], place: Path, *, label: str | None = None, repeat: int = 0) -> Recording:
    if len(files) > MOST_FILES:
        raise UsageError(f"{place} has {len(files)} files; {MOST_FILES} ranks are the most that are read")
    traces = [read_rank(one) for one in files]
    by_rank: dict[int, RankTrace] = {}
    problems = []
    for trace in traces:
        if trace.rank in by_rank:
            raise UsageError(
                f"{trace.source} and {by_rank[trace.rank].source} are both of rank {trace.rank}: one run at a time"
            )
        by_rank[trace.rank] = trace
    if len({(one.mode, one.run) for one in traces}) > 1:
        raise UsageError(f"{place} has traces of several runs or modes: one run a directory")
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    for trace in ranks:
        if trace.end is None:
            trace.killed_by = _signal(trace.source.with_name(f"rank-{trace.rank}.exit.json"))
    size = max(one.size for one in ranks)
    if all(one.format == "flight recorder" for one in ranks):
        complete_by_clock(ranks)
    if missing := [rank for rank in range(size) if rank not in by_rank]:
        some = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        problems.append(f"no trace of rank {some}" if len(missing) == 1 else f"no traces of ranks {some}")
    name = printable(label or ranks[0].arm or place.resolve().name)
    return Recording(label=name, ranks=ranks, place=place, repeat=repeat, problems=tuple(problems))
