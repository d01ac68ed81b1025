"""`python -m atom.engine.probes.agreement_arms CONFIG.json`, under mpiexec: a rank of a context pipeline that agrees on
its transfers in one of the modes, or not at all, and traces what it does.

The scheduler loop, the flow of micro-batches from stage to stage, the agreement and the retention of blocks are real;
what a device would do is `stage_model.py`'s stated times, which are slept, so that ranks that wait take no processor
from one that is late. A step is: take a request (the first stage admits it, others get it from the stage before), run
it, pass it on, look after transfers, agree. What the early stages could do instead of waiting is the next request: at
most `micro_batches` are between the first stage and the end of the last, and at most `depth` are not released. Rank 0
prints one JSON line; everything else is in the traces. `CONFIG.json` has the fields of `ArmConfig`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atom.engine.errors import AtomEngineError
from atom.engine.probes.context_rank import ContextRank
from atom.engine.probes.micro_batches import MicroBatches
from atom.engine.probes.rank_guard import guard_rank
from atom.engine.probes.stage_model import ArmConfig
from atom.engine.transfer.agreement import Agreement, Limits, close
from atom.engine.transfer.blocking import BlockingAgreement
from atom.engine.transfer.errors import AgreementError
from atom.engine.transfer.local_only import LocalOnlyAgreement
from atom.engine.transfer.mpi_transport import MpiCollective, MpiTransport
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.scope import Scope, qualify
from atom.engine.transfer.staged_blocking import StagedBlockingAgreement
from atom.engine.transfer.startup import Descriptor, agree_on_start
from atom.engine.transfer.topology import Topology
from atom.engine.transfer.trace import Trace, TraceEnd, TraceHeader, TraceMode, TraceWriter, trace_path
from atom.engine.transfer.traced import TracedAgreement

if TYPE_CHECKING:
    from mpi4py import MPI

_FAREWELL_S: Final = 2.0
"""How long a rank that failed goes on telling the others of it."""


class _Clock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


@dataclass(slots=True)
class _Agreed:
    """A rank's agreement, and what belongs to it."""

    agreement: Agreement | None
    traced: dict[str, TracedAgreement]
    """Group → the agreement whose calls are timed."""
    ordered: OrderedAgreement | None
    owned: Sequence[MpiTransport | MpiCollective]

    def wait_s(self) -> dict[str, float]:
        return {"pp": 0.0, "tp": 0.0} | {group: one.wait_ns / 1e9 for group, one in self.traced.items()}


def _header(config: ArmConfig, rank: int) -> tuple[TraceHeader, TraceMode]:
    """The trace's first line, and the mode that runs: outside the scope of the asynchronous one it is another."""
    mode: TraceMode = config.mode
    scope: list[dict[str, Any]] = []
    fell_back = None
    if config.mode != "none":
        asked = Scope(pipeline=config.pp, tensor=config.tp, hierarchical=config.tp > 1)
        mode, table, fell_back = qualify(asked, config.mode)
        scope = [
            {"dimension": row.name, "qualified": row.qualified, "value": row.value, "holds": row.holds} for row in table
        ]
    facts = {
        "asked_mode": config.mode,
        "fell_back": fell_back,
        "scope": scope,
        "topology": "flat" if config.tp == 1 else "staged",
        "stage_ms": list(config.stage_ms),
        "jitter": config.jitter,
        "transfer_ms": config.transfer_ms,
        "failures": config.failures,
        "timeouts": config.timeouts,
        "micro_batches": config.micro_batches or config.pp,
        "depth": config.depth,
        "blocks": config.blocks,
        "requests": config.requests,
        "seed": config.seed,
        "simulated": "stage times are slept, transfers are modelled",
    }
    header = TraceHeader(
        run=config.run,
        arm=config.arm,
        mode=mode,
        rank=rank,
        size=config.size,
        pp=config.pp,
        tp=config.tp,
        facts=facts,
    )
    return header, mode


def _agree(world: MPI.Intracomm, everyone: MpiCollective, config: ArmConfig, mode: TraceMode, trace: Trace) -> _Agreed:
    """Every rank comes here at the same place; they find out whether they mean the same."""
    if mode == "none":
        return _Agreed(None, {}, None, [])
    limits = Limits(idle_deadline_s=config.deadline_s)
    topology = Topology.flat(config.size) if config.tp == 1 else Topology.staged(config.pp, config.tp)
    agree_on_start(everyone, Descriptor.of(mode, cancel_in_flight=True, topology=topology))
    clock, rank = _Clock(), everyone.rank
    if mode == "async":
        transport = MpiTransport(world, deadline_s=config.deadline_s)
        ordered = OrderedAgreement(transport, clock, topology=topology, limits=limits)
        traced = TracedAgreement(ordered, trace)
        return _Agreed(traced, {"pp": traced}, ordered, [transport])
    if mode == "local-only":
        local = LocalOnlyAgreement(rank, config.size, clock, unsafe=config.unsafe, limits=limits)
        traced = TracedAgreement(local, trace)
        return _Agreed(traced, {"pp": traced}, None, [])

    from mpi4py import MPI

    def blocking(group: MPI.Comm) -> tuple[BlockingAgreement, MpiCollective]:
        collective = MpiCollective(MPI.Intracomm(group), deadline_s=config.deadline_s)
        return BlockingAgreement(collective, clock, limits=limits), collective

    if config.tp == 1:
        inner, collective = blocking(world)
        traced = TracedAgreement(inner, trace)
        return _Agreed(traced, {"pp": traced}, None, [collective])
    of_stage, shards = blocking(world.Split(rank // config.tp, rank))
    of_pipeline, stages = blocking(world.Split(rank % config.tp, rank))
    tp = TracedAgreement(of_stage, trace, group="tp", commits=False)
    pp = TracedAgreement(of_pipeline, trace, group="pp", votes=False)
    return _Agreed(StagedBlockingAgreement(rank, config.size, tp, pp), {"tp": tp, "pp": pp}, None, [shards, stages])


def _run(world: MPI.Intracomm, config: ArmConfig) -> int:
    rank = world.Get_rank()
    header, mode = _header(config, rank)
    trace = TraceWriter(trace_path(Path(config.trace_dir), rank), header)
    agreed: _Agreed | None = None
    try:
        everyone = MpiCollective(world, deadline_s=config.deadline_s)
        agreed = _agree(world, everyone, config, mode, trace)
        flow = MicroBatches(world, stage_stride=config.tp, deadline_s=config.deadline_s)
        pipeline = ContextRank(config, rank, mode, flow, agreed.agreement, trace)
        everyone.allgather(b"")  # all begin together
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        pipeline.run()
        wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
        if agreed.agreement is not None:
            close(agreed.agreement, config.deadline_s)
        end = _end(config, agreed, pipeline, wall_s, cpu_s)
    except AtomEngineError as error:
        text = f"{type(error).__name__}: {error}"
        wait_s = {} if agreed is None else agreed.wait_s()
        trace.close(TraceEnd(error=text, wait_s=wait_s, total=config.requests))
        print(f"rank {rank}: {text}", file=sys.stderr, flush=True)
        _tell_the_others(agreed)
        os._exit(3)  # MPI's own end would wait for a rank that is stopped
    trace.close(end)
    said = [json.loads(one) for one in everyone.allgather(end.line().encode())]
    if rank == 0:
        wall_s = max(one["wall_s"] for one in said)
        result = {"arm": config.arm, "mode": mode, "requests_per_s": config.requests / wall_s, "ranks": said}
        print(json.dumps(result), flush=True)
    flow.close()
    for one in (*agreed.owned, everyone):
        one.close()
    return 0


def _end(config: ArmConfig, agreed: _Agreed, pipeline: ContextRank, wall_s: float, cpu_s: float) -> TraceEnd:
    agreement = agreed.agreement
    return TraceEnd(
        counters=None if agreement is None else agreement.counters,
        digest=None if agreement is None else agreement.digest(),
        abandoned=sum(one.counters.abandoned for one in agreed.traced.values()),
        pending_sends=0 if agreed.ordered is None else agreed.ordered.pending_sends,
        cpu_s=cpu_s,
        wall_s=wall_s,
        wait_s=agreed.wait_s(),
        released_before_commit=pipeline.released_before_commit,
        completed=pipeline.completed,
        total=config.requests,
    )


def _tell_the_others(agreed: _Agreed | None) -> None:
    """A failed agreement takes its neighbours along while it is polled. In a collective each finds out by itself, and
    the launcher ends all as soon as one has left."""
    until = time.monotonic() + _FAREWELL_S
    while time.monotonic() < until:
        if agreed is not None and agreed.ordered is not None:
            with contextlib.suppress(AgreementError):
                agreed.ordered.poll()
        time.sleep(0.01)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m atom.engine.probes.agreement_arms CONFIG.json", file=sys.stderr)
        return 2
    try:
        config = ArmConfig.of(json.loads(Path(argv[0]).read_text()))
    except (AtomEngineError, ValueError, OSError) as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 2
    guard_rank(Path(config.trace_dir))
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if config.size != world.Get_size():  # every rank reads the same, and comes here
        print(f"pp {config.pp} and tp {config.tp} need {config.size} ranks, got {world.Get_size()}", file=sys.stderr)
        return 2
    try:
        return _run(world, config)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # MPI's own end would wait for the others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
