"""`python -m atom.engine.probes.agreement_scale`: how far a flat agreement goes, and what a hierarchy changes.

Runs the asynchronous agreement's own code over `transfer/simulation.py`'s modelled network, up to thousands of ranks in
one process. Prints a JSON line per number of ranks and topology, or a table with `--markdown`. Nothing is measured: the
costs are stated, and the first line says them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from atom.engine.errors import ConfigError
from atom.engine.transfer.simulation import NetworkModel, ScaleResult, Workload, simulate
from atom.engine.transfer.topology import Topology

__all__ = ["main"]

_MOST_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class _Case:
    ranks: int
    shards: int | None
    """Of a stage; None: flat."""

    @property
    def name(self) -> str:
        return "flat" if self.shards is None else f"{self.ranks // self.shards} × {self.shards}"

    @property
    def topology(self) -> Topology:
        if self.shards is None:
            return Topology.flat(self.ranks)
        return Topology.staged(self.ranks // self.shards, self.shards)


def _cases(ranks: Sequence[int], shards: int) -> Iterator[_Case]:
    """Flat, stages of so many shards, and as many shards as stages where that is something else."""
    for size in ranks:
        yield _Case(size, None)
        square = 1 << round(math.log2(math.sqrt(size)))
        for one in sorted({shards, square}):
            if 1 < one < size and size % one == 0:
                yield _Case(size, one)


def _row(case: _Case, result: ScaleResult) -> dict[str, object]:
    return {
        "ranks": case.ranks,
        "topology": "flat" if case.shards is None else "staged",
        "stages": None if case.shards is None else case.ranks // case.shards,
        "shards": case.shards,
        "messages_per_request": result.messages_per_request,
        "coordinator_messages_per_request": result.coordinator_messages_per_request,
        "coordinator_us_per_request": result.coordinator_us_per_request,
        "coordinator_load": result.coordinator_load,
        "keeps_up": result.coordinator_load < 1,
        "limit_requests_per_s": result.limit_requests_per_s,
        "commit_ms_p50": result.commit_quantile_ms(50),
        "commit_ms_max": max(result.commit_ms),
        "requests": len(result.commit_ms),
    }


_COLUMNS = (
    "ranks",
    "stages × shards",
    "messages per request",
    "of them at the coordinator",
    "its processor time, ms per request",
    "its load",
    "most requests/s",
    "last vote → applied everywhere, p50 / max, ms",
)
_HEAD = f"| {' | '.join(_COLUMNS)} |\n|---:|---|{'---:|' * 6}"


def _table_line(case: _Case, result: ScaleResult) -> str:
    late = f"{result.commit_quantile_ms(50):.1f} / {max(result.commit_ms):.1f}"
    return (
        f"| {case.ranks:,} | {case.name} | {result.messages_per_request:,.0f} "
        f"| {result.coordinator_messages_per_request:,.0f} | {result.coordinator_us_per_request / 1e3:.2f} "
        f"| {result.coordinator_load:.1%} | {result.limit_requests_per_s:,.0f} "
        f"| {late if result.coordinator_load < 1 else 'grows without end'} |"
    )


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m atom.engine.probes.agreement_scale", description=__doc__)
    parser.add_argument("--ranks", default="4,16,64,256,1024,4096", help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=8, help="shards of a stage (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON lines")
    for group in (NetworkModel(), Workload()):
        for one in fields(group):
            value = getattr(group, one.name)
            flag = "--" + one.name.replace("_", "-")
            parser.add_argument(flag, type=type(value), default=value, help=f"(default: {value:g})")
    return parser.parse_args(argv)


def _ranks(text: str) -> list[int]:
    try:
        ranks = [int(one) for one in text.split(",")]
    except ValueError:
        ranks = []
    if not ranks or not all(2 <= one <= _MOST_RANKS for one in ranks):
        raise ConfigError(f"--ranks takes numbers from 2 to {_MOST_RANKS} with commas between, got {text!r}")
    return ranks


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    try:
        cases = list(_cases(_ranks(options.ranks), options.shards))
        model = NetworkModel(**{one.name: getattr(options, one.name) for one in fields(NetworkModel)})
        workload = Workload(**{one.name: getattr(options, one.name) for one in fields(Workload)})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stated = {**asdict(model), **asdict(workload)}
    if options.markdown:
        print("Stated: " + ", ".join(f"{name} {value:g}" for name, value in stated.items()) + "\n\n" + _HEAD)
    else:
        print(json.dumps({"simulated": True, **stated}))
    for case in cases:
        result = simulate(case.topology, model, workload)
        print(_table_line(case, result) if options.markdown else json.dumps(_row(case, result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
