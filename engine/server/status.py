"""What the server says about itself: models, health, version, load, metrics, configuration; and profiling."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from atom.engine.errors import AtomEngineError
from atom.engine.server.api_errors import invalid, unavailable
from atom.engine.server.body import header
from atom.engine.server.formats import encode_json
from atom.engine.server.service import Exchange, Service

DISTRIBUTION: Final = "atom-serving"


def server_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


def reply(exchange: Exchange, body: Any) -> None:
    exchange.writer.respond(200, encode_json(body))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "atom",
        "root": service.engine_config.model.model,
        "parent": None,
        "max_model_len": service.max_model_len,
        "permission": [],
    }


async def list_models(service: Service, exchange: Exchange) -> None:
    reply(exchange, {"object": "list", "data": [_model_card(service, name) for name in service.model_names]})


async def get_model(service: Service, exchange: Exchange) -> None:
    name: str = exchange.scope["path_params"]["model"]
    reply(exchange, _model_card(service, service.check_model(name)))


async def health(service: Service, exchange: Exchange) -> None:
    """200 with an empty body while requests are served; 503 with the reason otherwise."""
    error = service.unhealthy()
    if error is not None:
        raise error
    exchange.writer.respond(200, b"", ())


async def show_version(service: Service, exchange: Exchange) -> None:
    reply(exchange, {"version": server_version()})


async def load(service: Service, exchange: Exchange) -> None:
    reply(exchange, {"server_load": service.in_flight})


async def metrics(service: Service, exchange: Exchange) -> None:
    accept = (header(exchange.scope, b"accept") or b"").decode("latin-1")
    body, content_type = await service.exporter.render(accept)
    exchange.writer.respond(200, body, ((b"content-type", content_type.encode("latin-1")),))


async def server_info(service: Service, exchange: Exchange) -> None:
    info = service.manager.info
    reply(
        exchange,
        {
            "version": server_version(),
            "model": service.model_names[0],
            "max_model_len": service.max_model_len,
            "vocab_size": service.vocab_size,
            "simulated": bool(info.get("simulated")),
            "data_parallel_size": len(service.manager.engines),
            "engine": info,
            "config": asdict(service.engine_config),
            "metrics_dialect": service.config.metrics_dialect,
            "tensor_parallel_size": service.engine_config.parallel.tensor_parallel_size,
            "pipeline_parallel_size": service.engine_config.parallel.pipeline_parallel_size,
            "pids": _pids(service),
        },
    )


def _pids(service: Service) -> dict[str, int]:
    """Of every process of the server; the workers of a core by their rank."""
    pids = {"api": os.getpid()}
    for core in service.manager.engines:
        pids[f"core-{core.index}"] = core.pid
        for rank, pid in enumerate(core.info.get("worker_pids", ())):
            pids[f"worker-{core.index}-{rank}"] = pid
    return pids


async def start_profile(service: Service, exchange: Exchange) -> None:
    directory = service.config.profile_dir
    if directory is None:
        raise invalid("profiling is off: start the server with --profile-dir DIR")
    await _profile(service, exchange, "start_profile", {"directory": str(directory.absolute())})


async def stop_profile(service: Service, exchange: Exchange) -> None:
    if service.config.profile_dir is None:
        raise invalid("profiling is off: start the server with --profile-dir DIR")
    await _profile(service, exchange, "stop_profile", {})


async def _profile(service: Service, exchange: Exchange, method: str, args: dict[str, str]) -> None:
    error = service.unhealthy()
    if error is not None:
        raise error
    try:
        results = await service.manager.call_all_async(method, args)
    except AtomEngineError as refusal:
        raise invalid(f"{method}: {refusal}") from None
    except TimeoutError as timeout:
        raise unavailable(str(timeout), "engine_busy") from None
    reply(exchange, results[0] if len(results) == 1 else {"engines": results})
