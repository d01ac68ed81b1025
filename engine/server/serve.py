"""One API process from its first socket to its exit status.

    bind → start the cores → load the tokenizer → serve → drain → exit

    SIGTERM, SIGINT   no new completions (503), open ones may finish for --shutdown-timeout seconds; exit status 0
    before ready      it has served nothing: exit status 143 (SIGTERM) or 130 (SIGINT), as a shell says it
    a second one      what is open gets an error; exit status 1, as when the time runs out
    EngineCore dies   what is open gets an error, /health says 503 for a moment; exit status 1

The one line on stdout, once the server is ready, is JSON: {"event": "ready", "host", "port", "url", "pid", "model", …}.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import uvicorn

from atom.engine import envs
from atom.engine.config import EMBEDDED_MODEL, EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.errors import AtomEngineError, ConfigError, EngineDeadError, ModelLoadError
from atom.engine.llm_engine import load_engine_tokenizer
from atom.engine.loading.source import resolve_model
from atom.engine.loading.tokenizer import BYTE_TOKENIZER, Tokenizer, load_tokenizer
from atom.engine.server.api_errors import engine_dead, shutting_down
from atom.engine.server.app import Application
from atom.engine.server.body import BodyBudget
from atom.engine.server.config import ServerConfig
from atom.engine.server.http_protocol import BoundedHttpProtocol
from atom.engine.server.metrics.exporter import MetricsExporter
from atom.engine.server.metrics.loop_lag import LoopLagTimer
from atom.engine.server.metrics.recorder import Recorder
from atom.engine.server.metrics.request_context import RequestContextGauges
from atom.engine.server.metrics.source import MetricsSource
from atom.engine.server.request_log import RequestLog
from atom.engine.server.service import Service
from atom.engine.streaming import StreamDispatcher

log = logging.getLogger(__name__)

DEATH_NOTICE_S: Final = 1.0
"""How long a server whose engine died still says so on /health."""
LAST_BYTES_S: Final = 2
"""How long responses that have ended may take to leave."""
ENGINE_SHUTDOWN_S: Final = 10.0
BACKLOG: Final = 4096
SIMULATED_NAME: Final = "simulated"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class ExitStatus(IntEnum):
    OK = 0
    FAILED = 1


class _Signals:
    """SIGTERM and SIGINT, counted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number: signal.Signals | None = None
        """The first one."""
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.number is None:
            self.number = number
        (self.second if self.first.is_set() else self.first).set()


class _HttpServer(uvicorn.Server):
    """Signals are ours; tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run the server until it is told to stop or its engine dies. Returns the exit status.

    Raises `AtomEngineError` when it cannot start: a wrong flag, a port in use, a model that does not load.
    """
    loop = asyncio.get_running_loop()
    signals = _Signals(loop)
    envs.check_environment()  # now, not after a model was loaded
    request_log = RequestLog(config.request_log) if config.request_log is not None else None
    listener = bind(config.host, config.port)
    try:
        engine_config, tokenizer = await asyncio.to_thread(_prepare_simulated, engine_config, config)
        manager = CoreManager(engine_config)
        if not await _start_engine(manager, signals):
            assert signals.number is not None
            log.warning("stopped by %s before it was ready", signals.number.name)
            return 128 + signals.number
        try:
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(load_engine_tokenizer, engine_config, manager)
            service = _build_service(engine_config, config, manager, tokenizer, request_log)
            return await _serve_until_stopped(service, listener, signals)
        finally:
            await asyncio.to_thread(manager.shutdown, False, ENGINE_SHUTDOWN_S)
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a port in use is found before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except UnicodeError:
        listener.close()
        raise ConfigError(f"--host {host!r} is no host name") from None
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _prepare_simulated(engine_config: EngineConfig, config: ServerConfig) -> tuple[EngineConfig, Tokenizer | None]:
    """Make tokenizer and simulated executor agree on the vocabulary, with or without a model.

    Without one (the embedded default is not installed), the byte tokenizer serves. Other executors have a model, whose
    vocabulary is known once they run: None then.
    """
    if engine_config.executor != "simulated":
        return engine_config, None
    model = engine_config.model
    if model.tokenizer is None and model.model == EMBEDDED_MODEL:
        try:
            resolve_model(model.model)
        except ModelLoadError:
            model = dataclasses.replace(
                model, tokenizer=BYTE_TOKENIZER, served_model_name=model.served_model_name or SIMULATED_NAME
            )
            engine_config = dataclasses.replace(engine_config, model=model)
    if not config.sim_vocab_from_tokenizer or (Path(model.model) / "config.json").is_file():
        return engine_config, None
    if model.tokenizer == BYTE_TOKENIZER:
        return engine_config, None  # any vocabulary will do
    tokenizer = load_tokenizer(model.model, model.tokenizer, model.chat_template)
    simulated = dataclasses.replace(engine_config.simulated, vocab_size=tokenizer.vocab_size)
    return dataclasses.replace(engine_config, simulated=simulated), tokenizer


async def _start_engine(manager: CoreManager, signals: _Signals) -> bool:
    """False when a signal came first; the engine is gone then."""
    start = asyncio.ensure_future(asyncio.to_thread(manager.start))
    stop = asyncio.ensure_future(signals.first.wait())
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    if start.done():
        stop.cancel()
        start.result()
        return True
    await asyncio.to_thread(manager.shutdown, False, 0.0)
    await asyncio.wait({start})
    start.exception()  # that it was shut down
    return False


def _build_service(
    engine_config: EngineConfig,
    config: ServerConfig,
    manager: CoreManager,
    tokenizer: Tokenizer,
    request_log: RequestLog | None,
) -> Service:
    info = manager.info
    max_model_len: int = info["max_model_len"]
    wants_contexts = envs.METRICS_PER_REQUEST_CONTEXT.read() and config.metrics_dialect != "vllm"
    contexts = RequestContextGauges() if wants_contexts else None
    device_timer = envs.METRICS_DEVICE_TIMER.read()
    recorder = Recorder(max_model_len, len(manager.engines), device_timer=device_timer, contexts=contexts)
    manager.on_step = recorder.on_step
    names = config.served_model_names or (_model_name(engine_config),)
    pids = {"api": os.getpid(), **{f"core-{core.index}": core.pid for core in manager.engines}}
    source = MetricsSource(recorder, manager, pids, names[0], engine_config.cache)
    return Service(
        config=config,
        engine_config=engine_config,
        manager=manager,
        dispatcher=StreamDispatcher(manager, tokenizer, asyncio.get_running_loop()),
        tokenizer=tokenizer,
        recorder=recorder,
        exporter=MetricsExporter(source, config.metrics_dialect),
        loop_lag=LoopLagTimer(recorder.loop_lag),
        model_names=names,
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        bodies=BodyBudget(config.max_body_bytes),
        request_log=request_log,
    )


def _model_name(engine_config: EngineConfig) -> str:
    model = engine_config.model
    if model.served_model_name is not None:
        return model.served_model_name
    try:
        return resolve_model(model.model).name
    except ModelLoadError:
        return Path(model.model).name or model.model


async def _serve_until_stopped(service: Service, listener: socket.socket, signals: _Signals) -> int:
    config, loop = service.config, asyncio.get_running_loop()
    died = asyncio.Event()

    def on_failure(_error: EngineDeadError) -> None:
        loop.call_soon_threadsafe(died.set)

    service.manager.on_failure = on_failure
    if service.manager.failure is not None:
        died.set()
    http = _HttpServer(
        uvicorn.Config(
            Application(service),
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=config.access_log,
            server_header=False,
            timeout_keep_alive=config.timeout_keep_alive,
            timeout_graceful_shutdown=LAST_BYTES_S,
            backlog=BACKLOG,
        )
    )
    service.idle.set()
    # What exists now lives as long as the process: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    service.exporter.source.frozen_objects = gc.get_freeze_count()
    service.loop_lag.start()
    _listen(listener, config)
    serving = asyncio.create_task(http.serve([listener]))
    await http.listening.wait()
    try:
        _announce(service, listener)
        stopped = await _first(signals.first, died)
        if stopped is died:
            return await _bury(service)
        return await _drain(service, signals, died)
    finally:
        http.should_exit = True
        await serving
        service.close()


def _listen(listener: socket.socket, config: ServerConfig) -> None:
    """Two servers may bind one port; only the first may listen on it."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(config.host, config.port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    what = error.strerror or str(error)
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"--host {host}: {what}; it must be an address of this machine")
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port}: {what}; ports below 1024 are for root")
    return ConfigError(f"--host {host} --port {port}: {what}")


def _announce(service: Service, listener: socket.socket) -> None:
    config = service.config
    port: int = listener.getsockname()[1]
    if config.port_file is not None:
        temporary = config.port_file.with_name(f".{config.port_file.name}.{os.getpid()}")
        try:
            temporary.write_text(f"{port}\n", encoding="ascii")
            temporary.replace(config.port_file)
        except OSError as error:
            raise ConfigError(f"--port-file {config.port_file}: cannot be written: {error.strerror}") from None
    host = f"[{config.host}]" if ":" in config.host else config.host
    ready: dict[str, Any] = {
        "event": "ready",
        "host": config.host,
        "port": port,
        "url": f"http://{host}:{port}",
        "pid": os.getpid(),
        "model": service.model_names[0],
        "simulated": bool(service.manager.info.get("simulated")),
        "data_parallel_size": len(service.manager.engines),
    }
    with contextlib.suppress(OSError):  # whoever started us need not be listening
        print(json.dumps(ready), flush=True)


async def _first(*events: asyncio.Event, timeout: float | None = None) -> asyncio.Event | None:
    """The first of these events to be set, or None after `timeout` seconds."""
    waits = {asyncio.ensure_future(event.wait()): event for event in events}
    try:
        done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return next((event for wait, event in waits.items() if wait in done), None)


async def _drain(service: Service, signals: _Signals, died: asyncio.Event) -> int:
    service.draining = True
    timeout = service.config.shutdown_timeout
    if service.in_flight:
        log.warning("stopping: %d requests may finish within %g s", service.in_flight, timeout)
    ended = await _first(service.idle, signals.second, died, timeout=timeout)
    if ended is service.idle:
        return ExitStatus.OK
    if ended is died:
        return await _bury(service)
    log.warning("stopping: %d requests are cut off", service.in_flight)
    for answer in list(service.answers):
        answer.fail(shutting_down())
    await _first(service.idle, timeout=LAST_BYTES_S)
    return ExitStatus.FAILED


async def _bury(service: Service) -> int:
    """The engine is dead; its sequences have got their error through the dispatcher."""
    failure = service.manager.failure
    log.error("the engine died: %s", failure)
    error = engine_dead(str(failure))
    for answer in list(service.answers):
        answer.fail(error)
    await asyncio.sleep(DEATH_NOTICE_S)
    await _first(service.idle, timeout=LAST_BYTES_S)
    return ExitStatus.FAILED


def run(engine_config: EngineConfig, config: ServerConfig) -> int:
    """`serve` on a uvloop event loop; what keeps it from starting becomes one line on stderr."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(engine_config, config))
    except AtomEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.FAILED
