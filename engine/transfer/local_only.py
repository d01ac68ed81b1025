"""No agreement at all: every rank applies its own outcome at once. Unsafe, and only for measuring what agreement costs:
ranks diverge when their outcomes do, and blocks are freed that others still need."""

from __future__ import annotations

from atom.engine.errors import ConfigError
from atom.engine.transfer.agreement import Limits, Mode, Progress
from atom.engine.transfer.errors import AgreementClosedError
from atom.engine.transfer.ledger import Counters, Ledger
from atom.engine.transfer.outcome import Commit, Outcome, Round
from atom.engine.transfer.transport import Clock

__all__ = ["LocalOnlyAgreement"]


class LocalOnlyAgreement:
    """ConfigError unless `unsafe`."""

    mode: Mode = "local-only"

    def __init__(
        self,
        rank: int,
        size: int,
        clock: Clock,
        *,
        unsafe: bool,
        cancel_in_flight: bool = True,
        limits: Limits | None = None,
    ) -> None:
        if not unsafe:
            raise ConfigError("local-only agreement frees blocks that other ranks may need: it needs --unsafe")
        limits = limits or Limits()
        self.rank, self.size = rank, size
        self.counters = Counters()
        self._clock = clock
        self._cancel_in_flight = cancel_in_flight
        self._ledger = Ledger(limits.max_open_rounds, limits.max_finished_epochs)
        self._commits: list[Commit] = []
        self._timed_out: list[Round] = []
        self._closing = False
        self._last_poll_ns = clock.now_ns()

    @property
    def open_rounds(self) -> int:
        return self._ledger.open_rounds

    @property
    def closed(self) -> bool:
        return self._closing and not self._commits

    def digest(self) -> str:
        return self._ledger.digest()

    def publish(self, round_: Round, outcome: Outcome) -> None:
        begin_ns = self._begin()
        if self._ledger.vote(round_, outcome, begin_ns):
            self.counters.votes += 1
            commit = Commit(self._ledger.next_sequence, round_, outcome)
            self._ledger.apply(commit)
            self.counters.commits += 1
            self._commits.append(commit)
        self.counters.inside_ns += self._clock.now_ns() - begin_ns

    def publish_timeout(self, round_: Round) -> bool:
        self._begin()
        if not self._cancel_in_flight:
            self.counters.suppressed_timeouts += 1
            return False
        if self._ledger.propose(round_):
            self.counters.timeouts += 1
            self._timed_out.append(round_)
        return True

    def poll(self) -> Progress:
        now_ns = self._clock.now_ns()
        self.counters.polls += 1
        self.counters.longest_gap_ns = max(self.counters.longest_gap_ns, now_ns - self._last_poll_ns)
        self._last_poll_ns = now_ns
        progress = Progress(self._commits, self._timed_out)
        self._commits, self._timed_out = [], []
        self.counters.inside_ns += self._clock.now_ns() - now_ns
        return progress

    def begin_close(self) -> None:
        self._closing = True

    def _begin(self) -> int:
        if self._closing:
            raise AgreementClosedError(f"rank {self.rank}: the agreement is closing, nothing more can be published")
        return self._clock.now_ns()
