"""The endpoints beside completions: models, health, version, load, metrics, tokenizing, profiling."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from atom.engine.errors import AtomEngineError
from atom.engine.server.api_errors import invalid, unavailable
from atom.engine.server.body import decode_body, header, read_body
from atom.engine.server.fields import check_detokenize_fields, check_tokenize_fields
from atom.engine.server.formats import encode_json
from atom.engine.server.prompts import LONG_IDS, chat_text, in_thread_if, tokenize
from atom.engine.server.protocol import decode_detokenize, decode_tokenize
from atom.engine.server.service import Exchange, Service

DISTRIBUTION: Final = "atom-serving"


def server_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


def _reply(exchange: Exchange, body: Any) -> None:
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
    _reply(exchange, {"object": "list", "data": [_model_card(service, name) for name in service.model_names]})


async def get_model(service: Service, exchange: Exchange) -> None:
    name: str = exchange.scope["path_params"]["model"]
    _reply(exchange, _model_card(service, service.check_model(name)))


async def health(service: Service, exchange: Exchange) -> None:
    """200 with an empty body while requests are served; 503 with the reason otherwise."""
    error = service.unhealthy()
    if error is not None:
        raise error
    exchange.writer.respond(200, b"", ())


async def show_version(service: Service, exchange: Exchange) -> None:
    _reply(exchange, {"version": server_version()})


async def load(service: Service, exchange: Exchange) -> None:
    _reply(exchange, {"server_load": service.in_flight})


async def metrics(service: Service, exchange: Exchange) -> None:
    accept = (header(exchange.scope, b"accept") or b"").decode("latin-1")
    body, content_type = await service.exporter.render(accept)
    exchange.writer.respond(200, body, ((b"content-type", content_type.encode("latin-1")),))


async def server_info(service: Service, exchange: Exchange) -> None:
    info = service.manager.info
    _reply(
        exchange,
        {
            "version": server_version(),
            "model": service.model_names[0],
            "max_model_len": service.max_model_len,
            "vocab_size": service.vocab_size,
            "simulated": bool(info.get("simulated")),
            "engine": info,
            "config": asdict(service.engine_config),
            "metrics_dialect": service.config.metrics_dialect,
            "pids": {"api": os.getpid(), **{f"core-{core.index}": core.pid for core in service.manager.engines}},
        },
    )


async def tokenize_endpoint(service: Service, exchange: Exchange) -> None:
    body = await read_body(exchange.scope, exchange.receive, service.config.max_body_bytes)
    request = await decode_body(body, decode_tokenize, check_tokenize_fields)
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if request.messages is not None:
        text = await chat_text(
            service,
            request.messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            template_kwargs=request.chat_template_kwargs,
        )
        ids = await tokenize(service, text, add_special_tokens=bool(request.add_special_tokens))
    else:
        assert request.prompt is not None
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise invalid(f"{name} needs messages", name)
        special = request.add_special_tokens is not False
        ids = await tokenize(service, request.prompt, add_special_tokens=special)
    reply = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": list(ids), "token_strs": None}
    if request.return_token_strs:
        text_of = service.tokenizer.token_text
        reply["token_strs"] = await in_thread_if(
            service, len(ids) > LONG_IDS, lambda: [text_of(token_id) for token_id in ids]
        )
    _reply(exchange, reply)


async def detokenize_endpoint(service: Service, exchange: Exchange) -> None:
    body = await read_body(exchange.scope, exchange.receive, service.config.max_body_bytes)
    request = await decode_body(body, decode_detokenize, check_detokenize_fields)
    service.check_model(request.model)
    ids = request.tokens
    if ids and not 0 <= min(ids) <= max(ids) < service.vocab_size:
        raise invalid(f"tokens has an id outside [0, {service.vocab_size})", "tokens")
    text = await in_thread_if(
        service, len(ids) > LONG_IDS, lambda: service.tokenizer.decode(ids, skip_special_tokens=False)
    )
    _reply(exchange, {"prompt": text})


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
        result = await service.manager.call_async(method, args)
    except AtomEngineError as refusal:
        raise invalid(f"{method}: {refusal}") from None
    except TimeoutError as timeout:
        raise unavailable(str(timeout), "engine_busy") from None
    _reply(exchange, result)
