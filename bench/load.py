"""What a load is: where it goes, which requests, when they are sent. No I/O here; `bench/runner.py` drives it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from atom.recipes.errors import UsageError

__all__ = ["Api", "Endpoint", "LoadSpec", "PlannedRequest", "RequestSource", "parse_goodput"]


class Api(StrEnum):
    """The OpenAI endpoint a load speaks."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The server and how to speak to it."""

    base_url: str
    """`http://host:port`, without the API path."""
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
        _check_base_url(self.base_url)
        if not re.fullmatch(r"/[!-~]*", self.path):
            raise UsageError(f"--endpoint must begin with '/' and hold visible ASCII characters, got {self.path!r}")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise UsageError("--api-key (or OPENAI_API_KEY) must hold visible ASCII characters, and not be empty")
        for name, value in self.headers.items():
            _check_header(name, value)
        if not (self.request_timeout > 0 and math.isfinite(self.request_timeout)):
            raise UsageError(f"--request-timeout must be positive and finite, got {self.request_timeout:g}")


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


class RequestSource(Protocol):
    """The requests of a load: the same for the same seed, whoever asks for them and in which order."""

    def __len__(self) -> int: ...

    def request(self, index: int) -> PlannedRequest: ...

    def warmup(self, index: int) -> PlannedRequest:
        """A request of the same kind, but none of the measured ones (they would be found in the prefix cache)."""
        ...

    def describe(self) -> dict[str, Any]:
        """The parameters, for run.json."""
        ...


MAX_SCHEDULE_S: Final = 10 * 365 * 86400.0
"""Arrivals are nanoseconds in 64 bits; this is far inside, and beyond what anybody waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """One load: requests, arrivals, limits."""

    name: str
    endpoint: Endpoint
    source: RequestSource
    request_rate: float = math.inf
    """Requests per second; inf: as fast as `max_concurrency` lets through."""
    burstiness: float = 1.0
    """Shape of the gamma distributed gaps: 1 is Poisson, below 1 burstier, above 1 more even."""
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    duration: float | None = None
    """Seconds after which no request is started; None: until all are done."""
    ignore_eos: bool = False
    keep_text: bool = False
    """Keep each response's text in its record (`--save-detailed`)."""
    failed_request_threshold: float = 0.1
    """Share of failed requests above which the run is no valid evidence."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """SLO per metric (`ttft`, `tpot`, `e2el`), in milliseconds."""
    worker: str = "0"

    def __post_init__(self) -> None:
        if len(self.source) < 1:
            raise UsageError("--num-prompts must be at least 1")
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate must be positive or inf, got {self.request_rate:g}")
        if len(self.source) / self.request_rate > MAX_SCHEDULE_S:
            raise UsageError(
                f"--request-rate {self.request_rate:g}: {len(self.source):,} requests would take more than ten years"
            )
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise UsageError(f"--burstiness must be positive, got {self.burstiness:g}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if self.num_warmups < 0:
            raise UsageError(f"--num-warmups must not be negative, got {self.num_warmups}")
        if self.seed < 0:
            raise UsageError(f"--seed must not be negative, got {self.seed}")
        if self.duration is not None and not (self.duration > 0 and math.isfinite(self.duration)):
            raise UsageError(f"--duration must be positive and finite, got {self.duration:g}")
        if not 0 <= self.failed_request_threshold <= 1:
            raise UsageError(
                f"--failed-request-threshold is a share from 0 to 1, got {self.failed_request_threshold:g}"
            )

    def describe(self) -> dict[str, Any]:
        """The load as run.json keeps it. The API key stays out."""
        return {
            "name": self.name,
            "base_url": _without_credentials(self.endpoint.base_url),
            "endpoint": self.endpoint.path,
            "api": str(self.endpoint.api),
            "model": self.endpoint.model,
            "num_prompts": len(self.source),
            "request_rate": self.request_rate if math.isfinite(self.request_rate) else "inf",
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            "num_warmups": self.num_warmups,
            "seed": self.seed,
            "duration_s": self.duration,
            "ignore_eos": self.ignore_eos,
            "failed_request_threshold": self.failed_request_threshold,
            "goodput_ms": dict(self.goodput),
            "source": self.source.describe(),
        }


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


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
