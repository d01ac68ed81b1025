"""The ASGI application: routes, the API key, request ids, and the one place where an exception becomes a response."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from atom.engine.server import status
from atom.engine.server.api_errors import ApiError, ClientDisconnected, from_exception
from atom.engine.server.body import header
from atom.engine.server.completions import chat_completions, completions
from atom.engine.server.response_writer import ResponseWriter
from atom.engine.server.service import Exchange, Service
from atom.engine.server.tokenization import detokenize_ids, tokenize_prompt

log = logging.getLogger(__name__)

MAX_REQUEST_ID_BYTES: Final = 128
Handler = Callable[[Service, Exchange], Awaitable[None]]

ROUTES: Final[tuple[tuple[str, str, Handler], ...]] = (
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/chat/completions", chat_completions),
    ("GET", "/v1/models", status.list_models),
    ("GET", "/v1/models/{model:path}", status.get_model),
    ("GET", "/health", status.health),
    ("GET POST", "/ping", status.health),
    ("GET", "/version", status.show_version),
    ("GET", "/load", status.load),
    ("GET", "/metrics", status.metrics),
    ("GET", "/server_info", status.server_info),
    ("POST", "/tokenize", tokenize_prompt),
    ("POST", "/detokenize", detokenize_ids),
    ("POST", "/start_profile", status.start_profile),
    ("POST", "/stop_profile", status.stop_profile),
)


class _Endpoint:
    """A handler as the router wants it."""

    def __init__(self, route: str, handler: Handler, service: Service) -> None:
        self._route = route
        self._handler = handler
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        exchange.route = self._route
        await self._handler(self._service, exchange)


class Application:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = tuple(key.encode("ascii") for key in service.config.api_keys)
        self._router = Router(
            [
                Route(path, _Endpoint(path, handler, service), methods=methods.split())
                for methods, path, handler in ROUTES
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "lifespan and websockets are off"
        request_id = _request_id(scope)
        writer = ResponseWriter(send, ((b"x-request-id", request_id.encode("ascii")),))
        exchange = Exchange(scope, receive, writer, request_id, time.monotonic_ns())
        scope["state"]["exchange"] = exchange
        scope["app"] = self  # so that the router raises for 404 and 405 instead of answering in plain text
        try:
            self._check_key(scope)
            await self._router(scope, receive, send)
        except ClientDisconnected:
            return
        except Exception as exception:
            self._respond(exchange, exception)
        finally:
            scope["state"].clear()  # a circle otherwise: see `Answer._release`
            if writer.status:
                self._service.recorder.responded(exchange.route, writer.status)

    def _check_key(self, scope: Scope) -> None:
        path: str = scope["path"]
        if not self._keys or not (path == "/v1" or path.startswith("/v1/")):
            return
        scheme, _, given = (header(scope, b"authorization") or b"").partition(b" ")
        # Every key is compared, so that the time says nothing about which one was close.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )

    def _respond(self, exchange: Exchange, exception: Exception) -> None:
        error = _http_error(exchange.scope, exception) or from_exception(exception)
        if error is None:
            log.exception("request %s failed in the server", exchange.request_id)
            error = ApiError(500, "the server failed; its log says why")
        if exchange.writer.started:
            log.error("request %s failed after its response began: %s", exchange.request_id, error.message)
            raise exception
        exchange.respond_with(error)


def _http_error(scope: Scope, exception: Exception) -> ApiError | None:
    """What the router raises."""
    if not isinstance(exception, HTTPException):
        return None
    shown = scope["path"][:200]
    if exception.status_code == 404:
        return ApiError(404, f"there is no {shown!r} here", code="not_found")
    if exception.status_code == 405:
        allowed = ", ".join(sorted((exception.headers or {}).get("Allow", "").replace(" ", "").split(",")))
        message = f"{shown} takes {allowed}, not {scope['method']}"
        return ApiError(405, message, code="method_not_allowed", headers=((b"allow", allowed.encode("ascii")),))
    return ApiError(exception.status_code, str(exception.detail))


def _request_id(scope: Scope) -> str:
    """The client's X-Request-Id where it can be a header again, else a new one."""
    given = header(scope, b"x-request-id")
    if given and len(given) <= MAX_REQUEST_ID_BYTES and given.isascii():
        text = given.decode("ascii")
        if text.isprintable():
            return text
    return uuid.uuid4().hex
