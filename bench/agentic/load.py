"""The agentic load as a command describes it: which sessions, how many at once, and how a replay is begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atom.bench.agentic.chat_overhead import ChatOverhead
from atom.bench.agentic.model import Session
from atom.bench.agentic.timing import Cut, Timeline, cut_at, cut_time, timeline
from atom.bench.load import Api, LoadSpec, Shard
from atom.bench.random_load import token_range
from atom.recipes.errors import UsageError

if TYPE_CHECKING:
    from atom.bench.agentic.driver import AgenticDriver

__all__ = ["AgenticLoad", "CacheBust"]


class CacheBust(StrEnum):
    """Where each session tree's marker goes, so that no tree finds another one's blocks in the server's cache."""

    NONE = "none"
    SYSTEM_PREFIX = "system_prefix"
    """Before everything."""
    FIRST_TURN_PREFIX = "first_turn_prefix"
    """Before the first user message: tools and system prompt stay shared."""


@dataclass(frozen=True, kw_only=True)
class AgenticLoad:
    """`concurrency` lanes, each of which replays one session tree after the other.

    Session number `s` of the load (lane `s mod concurrency`, its `s div concurrency`-th) is the same for the same
    seed, whatever the number of workers: which recording it replays, where it begins, its marker, its prompts.
    """

    sessions: tuple[Session, ...]
    """The recordings: `weka.load_traces(path)` or `generate.generate_traces(config, seed)`."""
    api: Api
    model: str
    concurrency: int
    """Session trees alive at once (`--concurrency`). A tree's sub-agents may have several requests under way at once,
    so this is no limit on requests: leave `LoadSpec.max_concurrency` unset."""
    seed: int = 0
    num_sessions: int | None = None
    """Trees to replay in all; None: as many as the duration lets begin."""
    start_min_ratio: float = 0.25
    start_max_ratio: float = 0.75
    """A lane's first tree is entered between these shares of its recorded time (`--trajectory-start-min-ratio`)."""
    warmup_requests_per_lane: int = 0
    """Requests of one token that each lane advances by, without pauses, after its warm-up turns."""
    warmup_grace_period: float | None = None
    """Seconds of the warm-up after which no further request of it begins; None: all of them are made."""
    trace_idle_gap_cap: float | None = None
    """Seconds; longer gaps between two requests of one tree are shortened to it."""
    system_idle_gap_cap: float | None = None
    """Seconds; when nothing is under way for longer, everything that waits moves up together. For one process alone:
    of several, none would know whether the others' lanes are idle."""
    cache_bust: CacheBust = CacheBust.FIRST_TURN_PREFIX
    nonce: str = ""
    """Goes into every marker: with another one, a server that has seen this load before knows none of its prompts."""
    vocab_size: int | None = None
    """Of the model, for prompts of token ids; None: a range inside every common vocabulary."""
    tokenizer: Path | None = None
    """A `tokenizer.json`, or the directory that holds it, that says which words are one token, for prompts of text."""
    overhead: ChatOverhead | None = None
    """Of the server's chat template: prompts of text have as many words fewer (where each is a token, so with
    `tokenizer`). None: it is not known, and comes on top."""
    ignore_eos: bool = True
    continuous_usage_stats: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sessions:
            raise UsageError("--input-file: holds no session")
        if self.concurrency < 1:
            raise UsageError(f"--concurrency must be at least 1, got {self.concurrency}")
        if self.num_sessions is not None and self.num_sessions < 1:
            raise UsageError(f"--num-sessions must be at least 1, got {self.num_sessions}")
        if not 0 <= self.start_min_ratio <= self.start_max_ratio <= 1:
            raise UsageError(
                "--trajectory-start-min-ratio and --trajectory-start-max-ratio must ascend within 0 to 1, got "
                f"{self.start_min_ratio:g} and {self.start_max_ratio:g}"
            )
        if self.warmup_requests_per_lane < 0:
            raise UsageError(f"--warmup-requests-per-lane must not be negative, got {self.warmup_requests_per_lane}")
        for flag, value in (
            ("--warmup-grace-period", self.warmup_grace_period),
            ("--trace-idle-gap-cap-seconds", self.trace_idle_gap_cap),
            ("--system-idle-gap-cap-seconds", self.system_idle_gap_cap),
        ):
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{flag} must not be negative, and finite, got {value:g}")

    @property
    def lanes(self) -> int:
        """Lanes that have a session to replay."""
        return self.concurrency if self.num_sessions is None else min(self.concurrency, self.num_sessions)

    def session(self, number: int) -> Session:
        """Which recording session `number` replays: all of them in turn."""
        return self.sessions[number % len(self.sessions)]

    def cut(self, number: int, times: Timeline) -> Cut | None:
        """Where session `number` is entered; None: at its beginning."""
        if number >= self.concurrency:
            return None
        session = self.session(number)
        at_s = cut_time(times, session, number, self.seed, self.start_min_ratio, self.start_max_ratio)
        return cut_at(session, times, at_s)

    def requests(self, shard: Shard) -> int | None:
        """Measured requests of a shard if every session runs to its end; None where the duration decides."""
        if self.num_sessions is None:
            return None
        total = 0
        for lane in range(shard.index, self.lanes, shard.of):
            left = sum(self._turns(number) for number in range(lane, self.num_sessions, self.concurrency))
            total += max(0, left - self.warmup_requests_per_lane)
        return total

    def _turns(self, number: int) -> int:
        session = self.session(number)
        cut = self.cut(number, timeline(session, self.trace_idle_gap_cap)) if number < self.concurrency else None
        return session.num_turns - (sum(cut.next_turn) if cut else 0)

    def size(self) -> int | None:
        """Measured requests of the load if every session runs to its end; None where the duration decides."""
        return self.requests(Shard())

    def describe(self) -> dict[str, Any]:
        text = self.api is Api.CHAT
        return {
            "concurrency": self.concurrency,
            "recordings": len(self.sessions),
            "recorded_requests": sum(session.num_turns for session in self.sessions),
            "num_sessions": self.num_sessions,
            "trajectory_start_min_ratio": self.start_min_ratio,
            "trajectory_start_max_ratio": self.start_max_ratio,
            "warmup_requests_per_lane": self.warmup_requests_per_lane,
            "warmup_grace_period_s": self.warmup_grace_period,
            "trace_idle_gap_cap_s": self.trace_idle_gap_cap,
            "system_idle_gap_cap_s": self.system_idle_gap_cap,
            "cache_bust": str(self.cache_bust),
            "nonce": self.nonce,
            "prompt": "text" if text else "token ids",
            "token_range": None if text else list(token_range(self.vocab_size)),
            "tokenizer": None if self.tokenizer is None else str(self.tokenizer),
            "chat_template_tokens": None if self.overhead is None else asdict(self.overhead),
            "continuous_usage_stats": self.continuous_usage_stats,
            "sampling": dict(self.sampling),
            "extra_body": dict(self.extra_body),
        }

    def driver(self, spec: LoadSpec) -> AgenticDriver:
        from atom.bench.agentic.driver import AgenticDriver

        assert spec.shard.of == 1 or self.system_idle_gap_cap is None
        return AgenticDriver(self, spec)
