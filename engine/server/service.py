"""What the endpoints share: the engine, the tokenizer, the counters, and who may come in. Built once, in
`engine/server/serve.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope

from atom.engine.config import EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.loading.tokenizer import Tokenizer
from atom.engine.server.api_errors import ApiError, engine_dead, shutting_down, unavailable
from atom.engine.server.body import BodyBudget, CheckFields, read_request
from atom.engine.server.config import ServerConfig
from atom.engine.server.metrics.exporter import MetricsExporter
from atom.engine.server.metrics.loop_lag import LoopLagTimer
from atom.engine.server.metrics.recorder import Recorder
from atom.engine.server.request_log import RequestLog
from atom.engine.server.response_writer import JSON_HEADER, ResponseWriter
from atom.engine.streaming import StreamDispatcher

T = TypeVar("T")


class OpenAnswer(Protocol):
    """A request that is being answered, as a shutdown sees it."""

    def fail(self, error: ApiError) -> None:
        """End it with an error that the client sees."""
        ...


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request and its response."""

    scope: Scope
    receive: Receive
    writer: ResponseWriter
    request_id: str
    """The client's X-Request-Id, or one of ours."""
    received_ns: int
    """`time.monotonic_ns()` when its head had arrived."""
    route: str = "other"
    """The path of the endpoint that took it, for counting."""

    def respond_with(self, error: ApiError) -> None:
        """Send an error as the whole response."""
        self.writer.respond(error.status, error.json(), (JSON_HEADER, *error.headers))


@dataclass(slots=True, eq=False)
class Service:
    config: ServerConfig
    engine_config: EngineConfig
    manager: CoreManager
    dispatcher: StreamDispatcher
    tokenizer: Tokenizer
    recorder: Recorder
    exporter: MetricsExporter
    loop_lag: LoopLagTimer
    model_names: tuple[str, ...]
    """The first is the one that responses carry."""
    max_model_len: int
    vocab_size: int
    bodies: BodyBudget
    request_log: RequestLog | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    """Nothing new is taken; what is open is finished."""
    in_flight: int = 0
    """Completions between their head and their last byte."""
    answers: set[OpenAnswer] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever nothing is in flight."""
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
    )
    """For what would hold the loop up: long texts, long lists of logprobs."""

    def unhealthy(self) -> ApiError | None:
        """Why no request can be served now, or None."""
        if self.manager.failure is not None:
            return engine_dead(str(self.manager.failure))
        if self.draining or not self.manager.is_alive:
            return shutting_down()
        if self.config.core_timeout:
            for index, seconds in enumerate(self.manager.silence):
                if seconds > self.config.core_timeout:
                    what = f"EngineCore {index} has requests and has said nothing for {seconds:.0f} s (--core-timeout)"
                    return unavailable(what, "engine_silent")
        return None

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around a completion. Raises `ApiError` 503 when it must not come in."""
        error = self.unhealthy()
        if error is not None:
            raise error
        limit = self.engine_config.scheduler.max_waiting
        if self.manager.num_waiting >= limit:
            raise unavailable(f"{limit} requests are waiting already (--max-waiting); try again later", "queue_full")
        self.in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    async def read(self, exchange: Exchange, decode: Callable[[bytes], T], check_fields: CheckFields) -> T:
        """The decoded body of a request; see `body.read_request`."""
        return await read_request(exchange.scope, exchange.receive, self.bodies, decode, check_fields)

    def check_model(self, name: str | None) -> str:
        """The name that the response carries. Raises `ApiError` 404 for a model that is not served."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        served = ", ".join(self.model_names)
        shown = name if len(name) <= 200 else f"{name[:200]}…"
        raise ApiError(
            404, f"the model {shown!r} does not exist; this server has {served}", param="model", code="model_not_found"
        )

    def close(self) -> None:
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.loop_lag.stop()
        self.exporter.close()
        if self.request_log is not None:
            self.request_log.close()
