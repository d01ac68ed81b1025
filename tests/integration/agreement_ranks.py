"""One rank of a real MPI job that plays votes through an agreement; run by test_agreement_mpi.py under mpiexec.

Writes JSON lines to rank-N.jsonl in the folder it is given: its pid, that it plays, and what it applied with its digest
and counters, or the error that ended it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI

from atom.engine.transfer.agreement import Agreement, Limits, close
from atom.engine.transfer.back_off import BackOff
from atom.engine.transfer.blocking import BlockingAgreement
from atom.engine.transfer.errors import AgreementError
from atom.engine.transfer.mpi_transport import MpiCollective, MpiTransport
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.outcome import Commit, Outcome, Round, dominant
from atom.engine.transfer.startup import Descriptor, agree_on_start
from atom.engine.transfer.topology import Topology


class MonotonicClock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


def script(seed: int, rank: int, requests: int) -> list[tuple[Round, Outcome, bool]]:
    """This rank's votes: mostly completed, every request id used twice, in an order of its own."""
    chance = random.Random(f"{seed} {rank}")
    votes = []
    for epoch in (0, 1):
        order = list(range(requests))
        chance.shuffle(order)
        for request in order:
            outcome = chance.choices(list(Outcome), weights=(20, 1, 1))[0]
            votes.append((Round(request, epoch), outcome, chance.random() < 0.05))
    return votes


def expected(seed: int, size: int, requests: int) -> dict[str, int]:
    votes: dict[Round, list[Outcome]] = {}
    overdue = set()
    for rank in range(size):
        for round_, outcome, timed_out in script(seed, rank, requests):
            votes.setdefault(round_, []).append(outcome)
            if timed_out:
                overdue.add(round_)
    return {f"{r.request}/{r.epoch}": int(dominant(seen, timed_out=r in overdue)) for r, seen in votes.items()}


def play(agreement: Agreement, options: dict[str, object], rank: int) -> list[Commit]:
    seed, requests = int(str(options["seed"])), int(str(options["requests"]))
    todo, applied, over = script(seed, rank, requests), list[Commit](), set[Round]()
    pause_s = 0.02 if rank == options.get("slow") else 0.0002
    back_off = BackOff()
    while len(applied) < 2 * requests:
        ready = next((one for one in todo if one[0].epoch == 0 or Round(one[0].request, 0) in over), None)
        if ready is not None and rank != options.get("silent"):
            round_, outcome, timed_out = ready
            todo.remove(ready)
            if timed_out:
                agreement.publish_timeout(round_)
            agreement.publish(round_, outcome)
            time.sleep(pause_s)
        progress = agreement.poll()
        applied += progress.commits
        over |= {commit.round for commit in progress.commits}
        if progress:
            back_off.reset()
        elif ready is None or rank == options.get("silent"):
            back_off.pause()
    return applied


def main() -> int:
    options = json.loads(sys.argv[1])
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    path = Path(options["folder"], f"rank-{rank}.jsonl")  # launchers tear lines on stdout apart
    report = path.open("a", buffering=1)
    report.write(json.dumps({"pid": os.getpid()}) + "\n")
    if rank == options.get("asleep"):
        signal.pause()
    topology = Topology.staged(size // 2, 2) if options.get("staged") else Topology.flat(size)
    deadline_s = options.get("deadline_s", 60.0)
    limits = Limits(idle_deadline_s=deadline_s)
    mode = options.get("odd_mode") if rank == 0 and "odd_mode" in options else options["mode"]
    said: dict[str, object] = {"rank": rank}
    agreement: Agreement | None = None
    try:
        collective = MpiCollective(world, deadline_s=deadline_s)
        agree_on_start(collective, Descriptor.of(mode, cancel_in_flight=True, topology=topology))
        transport = MpiTransport(world, deadline_s=deadline_s)
        if mode == "async":
            agreement = OrderedAgreement(transport, MonotonicClock(), topology=topology, limits=limits)
        else:
            agreement = BlockingAgreement(collective, MonotonicClock(), limits=limits)
        report.write(json.dumps({"plays": True}) + "\n")
        applied = play(agreement, options, rank)
        close(agreement, 30.0)
        said |= {
            "outcomes": {f"{c.round.request}/{c.round.epoch}": int(c.outcome) for c in applied},
            "expected": expected(options["seed"], size, options["requests"]),
            "digest": agreement.digest(),
            "abandoned": agreement.counters.abandoned,
            "pending": transport.pending(),
        }
        transport.close()
        collective.close()
    except AgreementError as error:
        said["error"] = f"{type(error).__name__}: {error}"
        report.write(json.dumps(said) + "\n")
        until = time.monotonic() + 2.0  # let the others hear of it
        while time.monotonic() < until:
            with contextlib.suppress(AgreementError):
                if agreement is not None:
                    agreement.poll()
            time.sleep(0.01)
        os._exit(3)  # MPI's own end would wait for a rank that is stopped
    report.write(json.dumps(said) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
