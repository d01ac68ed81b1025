"""The asynchronous agreement on a modelled network: the same protocol code over a discrete-event transport.

What is real: `ordered.py` with every packet it sends. What is stated: how long a packet takes, what it costs a rank's
processor, how often a rank polls, and when its transfers end. A step of a rank publishes the votes that are due and
polls; steps in which nothing has arrived are left out, as they change nothing. Time is in nanoseconds and starts at 0;
nothing depends on the machine, so a seed gives the same result everywhere.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from atom.engine.errors import ConfigError
from atom.engine.transfer.agreement import Limits
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.topology import Topology
from atom.engine.transfer.transport import Message
from atom.engine.transfer.wire import Stream

__all__ = ["NetworkModel", "ScaleResult", "Workload", "simulate"]

_NEVER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkModel:
    """Stated costs. ConfigError names one that is negative."""

    latency_us: float = 5.0
    """From the end of sending to the arrival."""
    bandwidth_gb_s: float = 12.5
    """Of a rank's link, 10⁹ bytes a second; its packets leave one after the other."""
    send_us: float = 5.0
    """Processor time of a packet at its sender: the protocol's and MPI's."""
    receive_us: float = 10.0
    poll_us: float = 5.0
    """Processor time of a step without its packets."""
    poll_interval_us: float = 1000.0
    """How often a rank comes to its poll. Ranks are not in phase."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            positive = one.name in ("bandwidth_gb_s", "poll_interval_us")
            if not (0 < value < _NEVER_S if positive else 0 <= value < _NEVER_S):
                raise ConfigError(f"{one.name} must be {'positive' if positive else 'at least 0'}, got {value:g}")

    def wire_ns(self, size: int) -> int:
        """Nanoseconds that a packet of `size` bytes occupies its sender's link."""
        return round(size / self.bandwidth_gb_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests that end at every rank, each at its own time."""

    requests: int = 64
    requests_per_s: float = 100.0
    spread_ms: float = 20.0
    """Ranks vote within this time, evenly spread, from a request's arrival on."""
    failures: float = 0.0
    """Fraction of (request, rank) that votes failed."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"requests must be at least 1, got {self.requests}")
        if not 0 < self.requests_per_s < _NEVER_S:
            raise ConfigError(f"requests_per_s must be positive, got {self.requests_per_s:g}")
        if not 0 <= self.spread_ms < _NEVER_S:
            raise ConfigError(f"spread_ms must be at least 0, got {self.spread_ms:g}")
        if not 0 <= self.failures <= 1:
            raise ConfigError(f"failures must be a fraction from 0 to 1, got {self.failures:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleResult:
    """What one simulated run needed. All ranks applied the same commits in the same order; a run where they do not
    raises AssertionError."""

    messages_per_request: float
    """Of all ranks."""
    coordinator_messages_per_request: float
    """Sent and received by the rank that takes most."""
    coordinator_us_per_request: float
    """Its processor time."""
    coordinator_load: float
    """Share of a core that the offered rate takes there; from 1 on it cannot keep up."""
    limit_requests_per_s: float
    """Rate at which that load is 1."""
    commit_ms: tuple[float, ...]
    """By request: from its last vote until the last rank has applied its commit, milliseconds."""
    digest: str
    """Of the applied commits."""

    def commit_quantile_ms(self, percentile: float) -> float:
        return float(np.percentile(self.commit_ms, percentile))


class _Rank:
    """A rank's processor and link, and what is on the way to it: its transport and its clock."""

    def __init__(self, network: _Network, rank: int, phase_ns: int) -> None:
        self._network, self._model = network, network.model
        self.rank, self.size = rank, network.size
        self.time_ns = 0
        """Where the processor is: all before is done."""
        self.busy_ns = 0
        self.scheduled_ns: int | None = None
        """When its next step is."""
        self._phase_ns = phase_ns
        self._interval_ns = round(self._model.poll_interval_us * 1e3)
        self._costs_ns = {name: round(getattr(self._model, f"{name}_us") * 1e3) for name in ("send", "receive", "poll")}
        self._latency_ns = round(self._model.latency_us * 1e3)
        self._link_free_ns = 0
        self._departures: deque[int] = deque()
        self._coming: list[tuple[int, int, Message]] = []
        self._here: dict[int, deque[Message]] = {}
        """Peer → what has arrived of it, in the order in which peers take turns."""

    # The transport

    def send(self, peer: int, stream: Stream, data: bytes) -> None:
        self.work("send")
        self._link_free_ns = max(self.time_ns, self._link_free_ns) + self._model.wire_ns(len(data))
        self._departures.append(self._link_free_ns)
        self._network.deliver(peer, self._link_free_ns + self._latency_ns, Message(self.rank, stream, data))

    def poll(self, max_messages: int) -> Sequence[Message]:
        while self._coming and self._coming[0][0] <= self.time_ns:
            message = heapq.heappop(self._coming)[2]
            self._here.setdefault(message.peer, deque()).append(message)
        messages: list[Message] = []
        while self._here and len(messages) < max_messages:
            peer = next(iter(self._here))
            waiting = self._here.pop(peer)
            messages.append(waiting.popleft())
            if waiting:
                self._here[peer] = waiting  # to the end of the queue
            self.work("receive")
        return messages

    def pending(self) -> int:
        while self._departures and self._departures[0] <= self.time_ns:
            self._departures.popleft()
        return len(self._departures)

    def close(self) -> None:
        """There is nothing to free."""

    # The clock, and the simulation's view

    def now_ns(self) -> int:
        return self.time_ns

    def work(self, what: str) -> None:
        self.time_ns += self._costs_ns[what]
        self.busy_ns += self._costs_ns[what]

    def receive_at(self, t_ns: int, number: int, message: Message) -> None:
        heapq.heappush(self._coming, (t_ns, number, message))

    def step_after(self, t_ns: int) -> int:
        """The first step at or after `t_ns`. One that the processor is late for begins when it is free."""
        ticks = -((self._phase_ns - t_ns) // self._interval_ns)
        return max(self._phase_ns + ticks * self._interval_ns, self.time_ns)

    def wanted_ns(self) -> int | None:
        """When there is something to poll for."""
        if self._here:
            return self.time_ns
        return self._coming[0][0] if self._coming else None

    def departure_ns(self) -> int:
        return self._departures[0] if self._departures else self.time_ns

    def wait_for_link(self) -> None:
        self.time_ns = max(self.time_ns, self._link_free_ns)


class _Network:
    """The ranks, and the steps to come in the order of time."""

    def __init__(self, topology: Topology, model: NetworkModel, rng: np.random.Generator) -> None:
        self.size, self.model = topology.size, model
        self._numbers = itertools.count()
        self._steps: list[tuple[int, int, int]] = []
        interval_ns = round(model.poll_interval_us * 1e3)
        self.ranks = [_Rank(self, rank, int(rng.integers(interval_ns))) for rank in range(self.size)]
        limits = Limits(idle_deadline_s=_NEVER_S)
        self.agreements = [OrderedAgreement(one, one, topology=topology, limits=limits) for one in self.ranks]

    def deliver(self, peer: int, t_ns: int, message: Message) -> None:
        self.ranks[peer].receive_at(t_ns, next(self._numbers), message)
        self.wake(peer, t_ns)

    def wake(self, rank: int, t_ns: int) -> None:
        """The rank has something to do from `t_ns` on."""
        one = self.ranks[rank]
        step_ns = one.step_after(t_ns)
        if one.scheduled_ns is None or step_ns < one.scheduled_ns:
            one.scheduled_ns = step_ns
            heapq.heappush(self._steps, (step_ns, next(self._numbers), rank))

    def next_step(self) -> int | None:
        """Move to the next step; whose it is."""
        while self._steps:
            t_ns, _, rank = heapq.heappop(self._steps)
            one = self.ranks[rank]
            if one.scheduled_ns != t_ns:  # an earlier one took its place
                continue
            if one.time_ns > t_ns:  # the processor is not free yet
                one.scheduled_ns = one.time_ns
                heapq.heappush(self._steps, (one.time_ns, next(self._numbers), rank))
                continue
            one.scheduled_ns, one.time_ns = None, t_ns
            one.work("poll")
            return rank
        return None

    def wake_again(self, rank: int) -> None:
        """After a step: what it left to do."""
        one, agreement = self.ranks[rank], self.agreements[rank]
        if (wanted_ns := one.wanted_ns()) is not None:
            self.wake(rank, wanted_ns)
        if agreement.pending_sends > one.pending():  # more than may be in flight
            self.wake(rank, one.departure_ns())


def simulate(topology: Topology, model: NetworkModel, workload: Workload) -> ScaleResult:
    """Run `workload` over the ranks of `topology`, and close."""
    rng = np.random.default_rng(workload.seed)
    network = _Network(topology, model, rng)
    votes, last_vote_ns = _votes(workload, topology.size, rng)
    for voter, mine in enumerate(votes):
        network.wake(voter, mine[0][0])
    applied_ns = [0] * workload.requests
    while (rank := network.next_step()) is not None:
        one, agreement, mine = network.ranks[rank], network.agreements[rank], votes[rank]
        while mine and mine[0][0] <= one.time_ns:
            _, round_, outcome = mine.popleft()
            agreement.publish(round_, outcome)
        for commit in agreement.poll().commits:
            applied_ns[commit.round.request] = max(applied_ns[commit.round.request], one.time_ns)
        if mine:
            network.wake(rank, mine[0][0])
        network.wake_again(rank)
    result = _result(network, workload, np.array(applied_ns) - last_vote_ns)
    _close(network)
    return result


def _votes(
    workload: Workload, size: int, rng: np.random.Generator
) -> tuple[list[deque[tuple[int, Round, Outcome]]], np.ndarray]:
    """By rank its votes in the order of time, and by request the time of the last one."""
    arrivals_r = np.arange(workload.requests) * 1e9 / workload.requests_per_s
    due_pr = (arrivals_r + rng.random((size, workload.requests)) * workload.spread_ms * 1e6).astype(np.int64)
    failed_pr = rng.random((size, workload.requests)) < workload.failures
    votes = []
    for due_r, failed_r in zip(due_pr, failed_pr, strict=True):
        order = np.argsort(due_r, kind="stable")
        votes.append(
            deque(
                (int(due_r[r]), Round(int(r), 0), Outcome.FAILED if failed_r[r] else Outcome.COMPLETED) for r in order
            )
        )
    return votes, due_pr.max(axis=0)


def _result(network: _Network, workload: Workload, commit_ns: np.ndarray) -> ScaleResult:
    counters = [one.counters for one in network.agreements]
    assert all(one.commits == workload.requests for one in counters), "a rank has not applied every commit"
    digests = {one.digest() for one in network.agreements}
    assert len(digests) == 1, "ranks applied different commits"
    busiest = max(network.ranks, key=lambda one: one.busy_ns)
    handled = counters[busiest.rank].sent + counters[busiest.rank].received
    us_per_request = busiest.busy_ns / 1e3 / workload.requests
    return ScaleResult(
        messages_per_request=sum(one.sent for one in counters) / workload.requests,
        coordinator_messages_per_request=handled / workload.requests,
        coordinator_us_per_request=us_per_request,
        coordinator_load=us_per_request * workload.requests_per_s / 1e6,
        limit_requests_per_s=1e6 / us_per_request if us_per_request else float("inf"),
        commit_ms=tuple((commit_ns / 1e6).tolist()),
        digest=digests.pop(),
    )


def _close(network: _Network) -> None:
    for one, agreement in zip(network.ranks, network.agreements, strict=True):
        agreement.begin_close()
        network.wake(one.rank, one.time_ns)
    while (rank := network.next_step()) is not None:
        network.agreements[rank].poll()
        network.wake_again(rank)
    for one, agreement in zip(network.ranks, network.agreements, strict=True):
        one.wait_for_link()
        assert agreement.closed, f"rank {agreement.rank} did not close"
        assert agreement.counters.abandoned == 0, f"rank {agreement.rank} abandoned votes"
