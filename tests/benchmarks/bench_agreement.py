"""What the agreement of ranks costs: `python tests/benchmarks/bench_agreement.py`, with nothing else on the machine.

Three parts, each beside what it is held against:

* publish → commit over MPI while every rank polls without a pause, against round trips between a follower and the
  coordinator over the same transport, measured by turns in the same job with all ranks polling, after the same pauses.
  Once for a follower whose vote is the last one, and once for ranks that all vote as soon as they have applied the
  commit before: there the time counts from each follower's own vote, and has the wait for those of the others in it.
* ranks that back off when nothing happens: processor time of a rank while no request ends, and, with requests that end
  at random times, the time from the last rank's vote to the commit on each rank, in units of the longest pause.
* votes per second through the protocol code: all ranks of a group in one process, on one core, over queues instead of
  MPI. A vote's share of its commit, which every rank applies, is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from atom.engine.transfer.agreement import close
from atom.engine.transfer.back_off import BackOff
from atom.engine.transfer.mpi_transport import MpiCollective, MpiTransport
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.transport import Message
from atom.engine.transfer.wire import HEAD_BYTES, Stream

PING, STOP = b"p" * HEAD_BYTES, b"s" * HEAD_BYTES
GOALS = {"round trips": 4.0, "idle %": 3.0, "intervals": 3.0, "votes/s": 50_000}


class Clock:
    def now_ns(self) -> int:
        return time.monotonic_ns()


# A rank of the MPI job


class Rank:
    """One rank; every method is called by all of them at the same place."""

    def __init__(self, interval_s: float) -> None:
        from mpi4py import MPI

        self.everyone = MpiCollective(MPI.COMM_WORLD)
        self.rank, self.size = self.everyone.rank, self.everyone.size
        self.wires = MpiTransport(MPI.COMM_WORLD)
        self.agreement = OrderedAgreement(MpiTransport(MPI.COMM_WORLD), Clock())
        self.interval_s = interval_s
        self.requests = 0
        self._chance = random.Random(self.rank)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [json.loads(one) for one in self.everyone.allgather(json.dumps(list(values)).encode())]

    def round_trips_us(self, count: int) -> list[float]:
        """Rank 0 and the coordinator send a packet to and fro while the others poll."""
        took: list[float] = []
        coordinator = self.size - 1
        if self.rank == 0:
            for _ in range(count):
                self._poll_for_a_while(self.wires)
                begin_ns = time.monotonic_ns()
                self.wires.send(coordinator, Stream.EVENTS, PING)
                self._hear()
                took.append((time.monotonic_ns() - begin_ns) / 1e3)
            for peer in range(1, self.size):
                self.wires.send(peer, Stream.EVENTS, STOP)
        else:
            while (data := self._hear()) != STOP:
                self.wires.send(0, Stream.UPDATES, data)
        while self.wires.pending():
            os.sched_yield()
        return took

    def _poll_for_a_while(self, what: MpiTransport | OrderedAgreement) -> None:
        until = time.monotonic() + self._chance.uniform(0.0003, 0.0006)
        while time.monotonic() < until:
            what.poll(1) if isinstance(what, MpiTransport) else what.poll()
            os.sched_yield()

    def _hear(self) -> bytes:
        while not (messages := self.wires.poll(1)):
            os.sched_yield()
        return messages[0].data

    def commits_us(self, count: int, *, rank_0_last: bool) -> list[float]:
        """This rank's votes, each until its commit is applied here."""
        took = []
        for _ in range(count):
            if rank_0_last and self.rank == 0:
                self._poll_for_a_while(self.agreement)
            begin_ns = time.monotonic_ns()
            self._publish()
            while not self.agreement.poll().commits:
                os.sched_yield()
            took.append((time.monotonic_ns() - begin_ns) / 1e3)
        return took

    def _publish(self) -> None:
        self.agreement.publish(Round(self.requests, 0), Outcome.COMPLETED)
        self.requests += 1

    def idle_share(self, seconds: float) -> float:
        """Share of a core that polling with back-off takes while nothing ends."""
        back_off = BackOff(self.interval_s)
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        while time.monotonic() - begin_s < seconds:
            self.agreement.poll()
            back_off.pause()
        return (time.process_time() - begin_cpu_s) / (time.monotonic() - begin_s)

    def backed_off_intervals(self, count: int, seed: int) -> list[float]:
        """Requests that end at random times: from the last vote to the commit here, in longest pauses."""
        chance = random.Random(seed)
        start_s = max(one[0] for one in self.gather([time.monotonic()])) + 0.05
        due_s = [start_s := start_s + chance.uniform(0.015, 0.035) for _ in range(count)]
        voted_s, applied_s, back_off = [], [], BackOff(self.interval_s)
        while len(applied_s) < count:
            if len(voted_s) < count and time.monotonic() >= due_s[len(voted_s)]:
                voted_s.append(time.monotonic())
                self._publish()
                back_off.reset()
            applied_s += [time.monotonic()] * len(self.agreement.poll().commits)
            back_off.pause()
        last_s = np.array(self.gather(voted_s)).max(axis=0)
        return [float(one) for one in (np.array(applied_s) - last_s) / self.interval_s]

    def close(self) -> None:
        close(self.agreement, 30.0)
        self.wires.close()
        self.everyone.close()


def run_rank(options: argparse.Namespace) -> None:
    rank = Rank(options.interval_ms / 1e3)
    lines = []
    for repeat in range(options.repeat):
        trips: list[float] = []
        last: list[float] = []
        at_once: list[float] = []
        rank.commits_us(50, rank_0_last=True)
        rank.round_trips_us(50)
        for _ in range(10):  # by turns, so that what else happens on the machine happens to both
            trips += rank.round_trips_us(options.rounds // 10)
            last += rank.commits_us(options.rounds // 10, rank_0_last=True)
            at_once += rank.commits_us(options.rounds // 10, rank_0_last=False)
        of_followers = [took for one in rank.gather(at_once)[:-1] for took in one]
        idle = [one[0] for one in rank.gather([rank.idle_share(options.idle_s)])]
        waits = [wait for one in rank.gather(rank.backed_off_intervals(options.requests, repeat)) for wait in one]
        lines.append({"trips": trips, "last": last, "at_once": of_followers, "idle": idle, "waits": waits})
    if rank.rank == 0:
        Path(options.write_to).write_text(json.dumps(lines))
    rank.close()


# The protocol code alone


class Queues:
    """A transport between ranks of this process that does as little as one can."""

    def __init__(self, rank: int, group: list[Queues], size: int) -> None:
        self.rank, self.size, self._group = rank, size, group
        self._arrived: deque[Message] = deque()

    def send(self, peer: int, stream: Stream, data: bytes) -> None:
        self._group[peer]._arrived.append(Message(self.rank, stream, data))

    def poll(self, max_messages: int) -> list[Message]:
        return [self._arrived.popleft() for _ in range(min(max_messages, len(self._arrived)))]

    def pending(self) -> int:
        return 0

    def close(self) -> None:
        pass


def votes_per_second(ranks: int, at_once: int, requests: int) -> float:
    """Votes of all ranks per second of processor time; `at_once` requests end between two polls."""
    group: list[Queues] = []
    group += [Queues(rank, group, ranks) for rank in range(ranks)]
    agreements = [OrderedAgreement(one, Clock()) for one in group]
    begin_s, applied = time.process_time(), 0
    for request in range(0, requests, at_once):
        for agreement in agreements:
            for one in range(request, request + at_once):
                agreement.publish(Round(one, 0), Outcome.COMPLETED)
        while applied < ranks * (request + at_once):
            for agreement in reversed(agreements):  # the coordinator first
                applied += len(agreement.poll().commits)
    took_s = time.process_time() - begin_s
    return applied / took_s


# What is printed


def mpi_parts(options: argparse.Namespace) -> list[dict[str, list[float]]]:
    folder = str(Path(sys.executable).parent)
    mpiexec = options.mpiexec or shutil.which("mpiexec", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if mpiexec is None:
        sys.exit("there is no mpiexec: pip install mpich")
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        own = [sys.executable, "-m", "mpi4py", __file__, "--write-to", str(result)]
        given = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in _SHARED]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([*mpiexec.split(), "-n", str(options.ranks), *own, *given], check=True, env=environment)
        return json.loads(result.read_text())


def against(value: float, goal: float, *, most: bool = True) -> str:
    return "yes" if (value <= goal if most else value >= goal) else "no"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def percentile(values: Sequence[float]) -> Callable[[float], float]:
    return lambda which: float(np.percentile(values, which))


def print_mpi(lines: Sequence[dict[str, list[float]]], options: argparse.Namespace) -> None:
    latency, idle = [], []
    for one in lines:
        trip, wait, share = percentile(one["trips"]), percentile(one["waits"]), max(one["idle"]) * 100
        for votes, name in (("last", "rank 0 last"), ("at_once", "all at once")):
            commit = percentile(one[votes])
            ratio = commit(50) / trip(50)
            latency.append(
                [
                    *(name, f"{trip(50):.1f} / {trip(99):.0f}", f"{commit(50):.1f} / {commit(99):.0f}"),
                    *(f"{ratio:.2f}", against(ratio, GOALS["round trips"])),
                ]
            )
        idle.append(
            [
                *(f"{share:.2f}", against(share, GOALS["idle %"]), f"{wait(50):.2f}", f"{wait(99):.2f}"),
                *(against(wait(99), GOALS["intervals"]), f"{len(one['waits']):,}"),
            ]
        )
    head = ("votes", "round trip p50 / p99, µs", "publish → commit p50 / p99, µs", "round trips, p50", "≤ 4")
    table(f"Publish → commit, {options.ranks} ranks, all polling:", head, latency)
    head = ("% of a core, busiest rank", "< 3", "last vote → commit p50, intervals", "p99", "≤ 3", "n")
    table(f"Back-off to {options.interval_ms:g} ms, {options.ranks} ranks:", head, idle)


def print_votes(options: argparse.Namespace) -> None:
    rows = []
    for ranks in (2, 4, 8):
        for at_once in (1, 8, 64):
            rates = sorted(votes_per_second(ranks, at_once, 6_400) for _ in range(options.repeat))
            median = float(np.median(rates))
            rows.append(
                [
                    *(str(ranks), str(at_once), f"{median:,.0f}", f"{rates[0]:,.0f} – {rates[-1]:,.0f}"),
                    against(median, GOALS["votes/s"], most=False),
                ]
            )
    head = ("ranks", "requests that end between polls", "votes/s, median", "range", "≥ 50,000")
    table("Protocol code alone, all ranks on one core:", head, rows)


_SHARED = ("rounds", "requests", "idle_s", "interval_ms", "repeat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2000, help="round trips and commits per repeat")
    parser.add_argument("--requests", type=int, default=300, help="commits with back-off per repeat")
    parser.add_argument("--idle-s", type=float, default=4.0)
    parser.add_argument("--interval-ms", type=float, default=1.0, help="longest pause between polls")
    parser.add_argument("--mpiexec", help="command that starts ranks with -n")
    parser.add_argument("--write-to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_to is not None:
        run_rank(options)
        return
    lines = mpi_parts(options)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}\n")
    print_mpi(lines, options)
    print_votes(options)


if __name__ == "__main__":
    main()
