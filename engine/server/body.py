"""Request bodies: read with a bound, decoded strictly, and the large ones without stopping the event loop.

Decoding is msgspec's: NaN, half surrogates, trailing bytes, numbers out of range and deep nesting are errors. What
the fields are is said in `engine/server/protocol.py`, which of the others are refused in `engine/server/fields.py`.

A thread alone does not keep the loop free: msgspec holds the GIL from the first byte to the last, 0.1 s for half a
million token ids. So the array of a large token-id prompt is cut out first and decoded in slices, with the GIL given
up between them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from starlette.types import Receive, Scope

from atom.engine.server.api_errors import ApiError, ClientDisconnected, invalid

LARGE_BODY_BYTES: Final = 64 << 10
"""From here on a body is decoded in a thread."""
SLICE_BYTES: Final = 32 << 10
TOTAL_BODY_BYTES: Final = 256 << 20
READ_TIMEOUT_S: Final = 60.0
"""How long a client may pause within its body."""
_INT32_MAX: Final = (1 << 31) - 1
_TOKEN_ARRAY: Final = re.compile(rb'"prompt"[ \t\r\n]*:[ \t\r\n]*\[(?=[ \t\r\n]*-?\d)')
_VALIDATION_PATH: Final = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]+)`")

T = TypeVar("T")
CheckFields: TypeAlias = Callable[[Mapping[str, msgspec.Raw]], None]
"""Sees the raw fields of a body; raises `ApiError` for one that is refused."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_integers = msgspec.json.Decoder(list[int]).decode


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


class BodyBudget:
    """How much the bodies that are being read and decoded may hold, one and all together.

    Without the second bound, a few hundred clients that send slowly hold gigabytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        """Of one body."""
        self.max_total = max(TOTAL_BODY_BYTES, 4 * max_bytes)
        self.held = 0

    def take(self, size: int) -> None:
        if self.held + size > self.max_total:
            raise ApiError(
                503,
                f"the request bodies being read hold {self.held} bytes already; try again later",
                code="queue_full",
                headers=((b"retry-after", b"1"),),
            )
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size


async def read_request(
    scope: Scope,
    receive: Receive,
    budget: BodyBudget,
    decode: Callable[[bytes], T],
    check_fields: CheckFields,
) -> T:
    """Read and decode the body of a request; nothing keeps the bytes after that. Raises what `read_body` and
    `decode_body` raise."""
    held = 0

    def hold(size: int) -> None:
        nonlocal held
        budget.take(size)
        held += size

    try:
        body = await read_body(scope, receive, budget.max_bytes, hold)
        return await decode_body(body, decode, check_fields)
    finally:
        budget.give_back(held)


def _hold_nothing(size: int) -> None:
    """For a body that no budget counts."""


async def read_body(
    scope: Scope, receive: Receive, max_bytes: int, hold: Callable[[int], None] = _hold_nothing
) -> bytes:
    """The whole body. Raises `ApiError` 413 as soon as it is known to be larger than `max_bytes`, 408 when the client
    pauses for too long, `ClientDisconnected`, and what `hold` raises for the bytes of each piece."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    first = await _receive(receive)
    body: bytes = first.get("body", b"")
    hold(len(body))
    if not first.get("more_body", False):
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        return body
    chunks = bytearray(body)
    more = True
    while more:
        if len(chunks) > max_bytes:
            raise _too_large(max_bytes)
        message = await _receive(receive)
        piece: bytes = message.get("body", b"")
        hold(len(piece))
        chunks += piece
        more = message.get("more_body", False)
    if len(chunks) > max_bytes:
        raise _too_large(max_bytes)
    return bytes(chunks)


async def _receive(receive: Receive) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            message = await receive()
    except TimeoutError:
        raise ApiError(
            408, f"the request body paused for more than {READ_TIMEOUT_S:g} s", headers=((b"connection", b"close"),)
        ) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {max_bytes} bytes", code="request_too_large")


async def decode_body(body: bytes, decode: Callable[[bytes], T], check_fields: CheckFields) -> T:
    """Decode a JSON object. `check_fields` sees the raw fields first and raises `ApiError` for one that it refuses.

    Raises `ApiError` 400 naming what is wrong and where.
    """
    if len(body) < LARGE_BODY_BYTES:
        return _decode(body, decode, check_fields)
    return await asyncio.to_thread(_decode_large, body, decode, check_fields)


def _decode(body: bytes, decode: Callable[[bytes], T], check_fields: CheckFields) -> T:
    if not body:
        raise invalid("the request body is empty; it must be a JSON object")
    try:
        body.decode("utf-8")  # msgspec does not look into the strings of fields that it skips
        check_fields(_decode_fields(body))
        return decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except UnicodeDecodeError as error:
        raise invalid(f"the request body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise invalid("the request body is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise invalid(f"the request body is not valid JSON: {error}") from None


def _decode_large(body: bytes, decode: Callable[[bytes], T], check_fields: CheckFields) -> T:
    cut = _cut_token_array(body)
    if cut is None:
        return _decode(body, decode, check_fields)
    rest, marker, token_ids = cut
    request: Any = _decode(rest, decode, check_fields)
    if getattr(request, "prompt", None) != [marker]:  # what was cut out was no top-level prompt
        return _decode(body, decode, check_fields)
    replaced: T = msgspec.structs.replace(request, prompt=token_ids)
    return replaced


def _cut_token_array(body: bytes) -> tuple[bytes, int, array[int]] | None:
    """The body with a marker in place of a flat `"prompt": [1, 2, …]`, the marker, and the ids; None if there is
    no such array or it is not well-formed, in which case decoding the whole body says what is wrong with it."""
    start = _TOKEN_ARRAY.search(body)
    if start is None:
        return None
    end = body.find(b"]", start.end())
    if end < 0:
        return None
    ids: array[int] = array("i")
    position = start.end()
    while position < end:
        stop = min(position + SLICE_BYTES, end)
        if stop < end:
            stop = body.rfind(b",", position, stop)
            if stop < 0:
                return None
        try:
            decoded = _decode_integers(b"[" + body[position:stop] + b"]")
            ids.extend(decoded)
        except (msgspec.MsgspecError, ValueError, OverflowError):
            return None
        if not decoded or stop + 1 == end:  # a trailing comma
            return None
        position = stop + 1
        time.sleep(0)  # gives the GIL to the event loop
    marker = secrets.randbelow(1 << 62) + _INT32_MAX
    rest = b"%b%d%b" % (body[: start.end()], marker, body[end:])
    return rest, marker, ids


def _invalid_field(message: str) -> ApiError:
    """`Expected `int`, got `str` - at `$.max_tokens`` as a 400 that names `max_tokens`."""
    missing = _MISSING.search(message)
    match = _VALIDATION_PATH.match(message)
    assert match is not None
    path = (match["path"] or "").removesuffix("[...]")
    what = match["what"].replace("`", "").replace(" | null", "")
    if missing is not None:
        param = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid(f"{param} is required", param)
    if not path:
        return invalid(f"the request body: {what[0].lower()}{what[1:]}")
    return invalid(f"{path}: {what[0].lower()}{what[1:]}", path)
