"""What a load is: where it goes, what is sent, under which limits. No I/O here: `bench/driver.py` says how a load is
driven, `bench/runner.py` sends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from atom.bench.redact import redact_text
from atom.bench.slices import DEFAULT_SLICE_S, LEAST_SLICE_S
from atom.recipes.errors import UsageError

if TYPE_CHECKING:
    from atom.bench.driver import Driver

__all__ = [
    "DEFAULT_FAILED_REQUEST_THRESHOLD",
    "Api",
    "Endpoint",
    "LoadSpec",
    "PlannedRequest",
    "RequestSource",
    "Shard",
    "Workload",
    "parse_goodput",
]

DEFAULT_FAILED_REQUEST_THRESHOLD: Final = 0.1
"""Share of failed requests beyond which a run is no valid evidence."""


class Api(StrEnum):
    """The OpenAI endpoint a load speaks."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The server and how to speak to it."""

    base_url: str
    """`http://host:port`, without the API path."""
    more_urls: tuple[str, ...] = ()
    """Further servers of the same model: requests go to each in turn."""
    path: str = "/v1/completions"
    api: Api = Api.COMPLETIONS
    model: str = ""
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    verify_tls: bool = True
    request_timeout: float = 6 * 3600.0
    """Seconds from sent to the end of the response."""
    connect_timeout: float = 30.0

    def __post_init__(self) -> None:
        for url in self.base_urls:
            _check_base_url(url)
        if not re.fullmatch(r"/[!-~]*", self.path):
            raise UsageError(f"--endpoint must begin with '/' and hold visible ASCII characters, got {self.path!r}")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise UsageError("--api-key (or OPENAI_API_KEY) must hold visible ASCII characters, and not be empty")
        for name, value in self.headers.items():
            _check_header(name, value)
        if not (self.request_timeout > 0 and math.isfinite(self.request_timeout)):
            raise UsageError(f"--request-timeout must be positive and finite, got {self.request_timeout:g}")

    @property
    def base_urls(self) -> tuple[str, ...]:
        return (self.base_url, *self.more_urls)


_OWN_HEADERS: Final = frozenset(
    ("accept-encoding", "connection", "content-length", "expect", "host", "te", "trailer", "transfer-encoding")
) | {"upgrade"}
"""Say how a message is framed or where it goes; a wrong one would make the server wait, or answer something else."""


def _check_header(name: str, value: str) -> None:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise UsageError(f"--header: {name!r} is no name of a header")
    if name.lower() in _OWN_HEADERS:
        raise UsageError(f"--header {name}: the client sets this one itself")
    if not re.fullmatch(r"[\t -~]*", value):
        raise UsageError(f"--header {name}: the value must hold ASCII characters and no line break")


def _check_base_url(base_url: str) -> None:
    try:
        url = urlsplit(base_url)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        valid = False
    if not valid or not re.fullmatch(r"[!-~]+", base_url) or url.query or url.fragment:
        raise UsageError(f"--base-url must look like http://host:port (port 1 to 65535), got {base_url!r}")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, ready to be sent."""

    body: bytes
    """The JSON body."""
    input_len: int | None = None
    """Prompt tokens as planned; None where only the server can count them."""
    output_len: int | None = None
    """max_tokens asked for."""
    session: str | None = None
    turn: int | None = None
    tags: Mapping[str, Any] | None = None
    """Small JSON that the record keeps: what the load knows of this request and a report wants to group by."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one process in a load: worker `index` of `of`."""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.of

    def owns(self, index: int) -> bool:
        """Whether request (lane, session) `index` is this process's."""
        return index % self.of == self.index

    def share(self, total: int) -> int:
        """How many of 0 … `total` − 1 it owns."""
        return len(range(self.index, total, self.of))


class RequestSource(Protocol):
    """The requests of a load: the same for the same seed, whoever asks for them and in which order. Picklable."""

    def __len__(self) -> int: ...

    def offsets_ns(self) -> npt.NDArray[np.int64] | None:
        """[len] nanoseconds from the start of the load, ascending, where the requests have times of their own (a
        trace); None: the load's arrivals decide."""
        ...

    def request(self, index: int) -> PlannedRequest: ...

    def warmup(self, index: int) -> PlannedRequest:
        """A request of the same kind, but none of the measured ones (they would be found in the prefix cache)."""
        ...

    def describe(self) -> dict[str, Any]:
        """The parameters, for run.json."""
        ...


class Workload(Protocol):
    """What a load sends, and in which order: a picklable description, the same for every process of the load."""

    def describe(self) -> dict[str, Any]:
        """Its parameters, for run.json."""
        ...

    def size(self) -> int | None:
        """Measured requests of the whole load; None where a duration ends it."""
        ...

    def driver(self, spec: LoadSpec) -> Driver:
        """What drives the share of `spec.shard`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """One load: what it sends, where, and its limits. The same in every process of the load, but for `shard`."""

    name: str
    endpoint: Endpoint
    workload: Workload
    max_concurrency: int | None = None
    """Most requests at once, over all processes."""
    num_warmups: int = 0
    warmup_duration: float | None = None
    """Seconds of warm-up, instead of a number of requests."""
    seed: int = 0
    duration: float | None = None
    """Seconds after which no request is started; None: until all are done."""
    grace_period: float | None = None
    """Seconds that requests may take beyond `duration` before they are cancelled; None: as long as they take."""
    cancellation_rate: float = 0.0
    """Share of the requests that this client cancels on purpose, `cancellation_delay` seconds after sending them."""
    cancellation_delay: float = 0.0
    ignore_eos: bool = False
    keep_text: bool = False
    """Keep each response's text in its record (`--save-detailed`)."""
    failed_request_threshold: float = DEFAULT_FAILED_REQUEST_THRESHOLD
    """Share of failed requests above which the run is no valid evidence."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """SLO per metric (`ttft`, `tpot`, `e2el`), in milliseconds."""
    slice_duration: float = DEFAULT_SLICE_S
    """Seconds per slice of the summary's time series."""
    worker: str = "0"
    """Names this process's files in the run directory."""
    shard: Shard = Shard()

    def __post_init__(self) -> None:
        if self.workload.size() is None and self.duration is None:
            raise UsageError("a load without an end of its own needs --duration")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.max_concurrency is not None and self.max_concurrency < self.shard.of:
            raise UsageError(
                f"--max-concurrency {self.max_concurrency} is less than the {self.shard.of} processes that share the "
                "load (--workers, MPI ranks): each needs one"
            )
        if self.num_warmups < 0:
            raise UsageError(f"--num-warmups must not be negative, got {self.num_warmups}")
        if self.warmup_duration is not None:
            if not (self.warmup_duration > 0 and math.isfinite(self.warmup_duration)):
                raise UsageError(f"--warmup-duration must be positive and finite, got {self.warmup_duration:g}")
            if self.num_warmups:
                raise UsageError("--warmup-duration and --num-warmups both say how much: give one of them")
            if self.max_concurrency is None:
                raise UsageError("--warmup-duration needs --max-concurrency: that many requests run at once meanwhile")
        if self.seed < 0:
            raise UsageError(f"--seed must not be negative, got {self.seed}")
        if self.duration is not None and not (self.duration > 0 and math.isfinite(self.duration)):
            raise UsageError(f"--duration must be positive and finite, got {self.duration:g}")
        if self.grace_period is not None and not (self.grace_period >= 0 and math.isfinite(self.grace_period)):
            raise UsageError(f"--grace-period must not be negative, and finite, got {self.grace_period:g}")
        if self.grace_period is not None and self.duration is None:
            raise UsageError("--grace-period is counted from the end of --duration, which is not given")
        if not 0 <= self.cancellation_rate <= 1:
            raise UsageError(f"--request-cancellation-rate is a share from 0 to 1, got {self.cancellation_rate:g}")
        if not (self.cancellation_delay >= 0 and math.isfinite(self.cancellation_delay)):
            raise UsageError(f"--request-cancellation-delay must not be negative, got {self.cancellation_delay:g}")
        if not LEAST_SLICE_S <= self.slice_duration < math.inf:
            raise UsageError(f"--slice-duration must be at least {LEAST_SLICE_S:g} s, got {self.slice_duration:g}")
        if not 0 <= self.failed_request_threshold <= 1:
            raise UsageError(
                f"--failed-request-threshold is a share from 0 to 1, got {self.failed_request_threshold:g}"
            )

    def describe(self) -> dict[str, Any]:
        """The load as run.json keeps it. The API key stays out."""
        return {
            "name": self.name,
            "base_url": redact_text(self.endpoint.base_url),
            "more_urls": [redact_text(url) for url in self.endpoint.more_urls],
            "endpoint": self.endpoint.path,
            "api": str(self.endpoint.api),
            "model": self.endpoint.model,
            "num_prompts": self.workload.size(),
            "max_concurrency": self.max_concurrency,
            "num_warmups": self.num_warmups,
            "warmup_duration_s": self.warmup_duration,
            "seed": self.seed,
            "duration_s": self.duration,
            "grace_period_s": self.grace_period,
            "cancellation_rate": self.cancellation_rate,
            "cancellation_delay_s": self.cancellation_delay,
            "workers": self.shard.of,
            "ignore_eos": self.ignore_eos,
            "failed_request_threshold": self.failed_request_threshold,
            "goodput_ms": dict(self.goodput),
            "slice_duration_s": self.slice_duration,
            **self.workload.describe(),
        }


def parse_goodput(items: list[str]) -> dict[str, float]:
    """`["ttft:200 tpot:30"]` or `["ttft:200", "tpot:30"]` → {"ttft": 200.0, "tpot": 30.0} (milliseconds)."""
    slo: dict[str, float] = {}
    for item in " ".join(items).replace(",", " ").split():
        name, separator, value = item.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise UsageError(f"--goodput knows ttft, tpot and e2el (milliseconds), got {item!r}")
        try:
            slo[name] = float(value)
        except ValueError:
            separator = ""
        if not separator or not (slo[name] > 0 and math.isfinite(slo[name])):
            raise UsageError(f"--goodput must look like ttft:200 (milliseconds), got {item!r}")
    return slo
