"""What a streamed OpenAI response says: which chunks bear tokens, how many, how it ended, and what was wrong with it.

Body bytes and the time of the read they came in go in; a `RequestRecord`'s second half comes out. Everything here
runs after the bytes have been stamped, when the event loop has nothing more urgent to do.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from atom.bench.load import Api
from atom.bench.records import Outcome, RequestRecord
from atom.bench.sse import EventTooLargeError, SseDecoder, TypedEvent

__all__ = ["StreamReader"]

MAX_PLAIN_BODY: Final = 64 << 10
"""Of a body that is no stream (an error page), this much is kept."""
_TEXT, _EMPTY, _EMPTY_FINAL = 0, 1, 2
_FAILED_FINISH: Final = frozenset({"abort", "error"})
"""Finish reasons with which an engine gives up on a request although the stream ends in good order."""
_PLAIN: Final = bytes(set(range(0x20, 0x7F)) - {0x22, 0x5C})
"""Bytes that stand for themselves inside a JSON string."""


class _Template(NamedTuple):
    """One chunk is `opening`, text, `closing`; several are `before`, `key`, text, `between`, `key`, text, … `after`."""

    opening: bytes
    closing: bytes
    key: bytes
    before: bytes
    between: bytes
    after: bytes


class StreamReader:
    """Reads one response. `begin` with its head, `feed` with its body, then `finish` or `fail`, then `fill`.

    Most chunks of a stream differ in their text alone. So the first one is parsed as JSON, cut at its text and kept as
    a template; later chunks that equal it before and after the text, with only plain characters in between, can mean
    nothing else, and are not parsed again. That is what makes several hundred thousand chunks a second possible in
    Python.
    """

    __slots__ = (
        "_anomalies",
        "_api",
        "_decoder",
        "_done",
        "_error",
        "_finish_reasons",
        "_kinds",
        "_location",
        "_plain",
        "_status",
        "_template",
        "_template_tries",
        "_text",
        "_times",
        "_tokens",
        "_tokens_seen",
        "_usage",
    )

    def __init__(self, api: Api, *, keep_text: bool = False) -> None:
        self._api = api
        self._decoder = SseDecoder()
        self._plain: bytes | None = None
        self._status: int | None = None
        self._location: str | None = None
        self._times = array("q")
        self._kinds = bytearray()
        self._tokens = array("q")
        """Tokens per chunk, as long as every chunk so far said how many."""
        self._tokens_seen = 0
        self._usage: dict[str, int | None] = {}
        self._finish_reasons: list[str] = []
        self._done = False
        self._error: tuple[str, str] | None = None
        self._anomalies: dict[str, int] = {}
        self._text: list[str] | None = [] if keep_text else None
        self._template: _Template | None = None
        self._template_tries = 0

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status
        self._location = headers.get("location") if 300 <= status < 400 else None
        kind = headers.get("content-type", "")
        if status != 200 or "json" in kind or "html" in kind:
            self._plain = b""
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            self.fail("protocol", f"the server compressed the stream ({coding}) although it was asked not to")
            self._plain = b""

    def feed(self, body: bytes, t_ns: int) -> None:
        if self._plain is not None:
            self._plain = (self._plain + body)[:MAX_PLAIN_BODY]
            return
        template = self._template
        if template is not None and body.startswith(template.opening) and body.endswith(template.closing):
            text = body[len(template.opening) : -len(template.closing)]
            if text and not text.translate(None, _PLAIN) and self._decoder.between_events:
                self._take_texts([text], t_ns)  # the usual read: one chunk, and nothing new but its text
                return
        try:
            whole = self._decoder.take(body)
        except EventTooLargeError as error:
            self.fail("bad_event", str(error))
            self._plain = b""
            return
        if whole and not (self._template and self._same_but_text(whole, t_ns)):
            for event in self._decoder.events(whole):
                self._event(event, t_ns)

    def fail(self, kind: str, message: str) -> None:
        """Count the request as failed; the first reason stands. Messages come from servers and end on terminals."""
        if self._error is None:
            self._error = (kind, "".join(c if c.isprintable() else " " for c in message))

    def finish(self, *, cut: bool = False) -> None:
        """The response ended: in good order, or (`cut`) because the connection did."""
        if self._plain is not None:
            self._finish_plain(cut=cut)
            return
        if not self._done and self._decoder.rest.strip() in (b"data: [DONE]", b"data:[DONE]"):
            self._done = True
            self._note("unterminated_event")
        elif self._decoder.rest.strip():
            self._note("partial_event")
        if cut:
            self._note("connection_cut")
            if not self._done:
                self.fail("truncated", "the connection ended before the stream did")
        elif not self._done:
            self._note("missing_done")
            if not self._finish_reasons:
                self.fail("truncated", "the stream ended without a finish_reason and without [DONE]")
        if self._done and not self._finish_reasons:
            self._note("no_finish_reason")
        if not self._times and not (self._usage.get("output") or self._error):
            self.fail("empty", "the stream ended well but had no token")

    def fill(self, record: RequestRecord) -> None:
        """Write what the response said into `record`."""
        record.status = self._status
        record.finish_reason = self._finish_reasons[-1] if self._finish_reasons else None
        record.prompt_tokens = self._usage.get("prompt")
        record.cached_tokens = self._usage.get("cached")
        self._fill_chunks(record)
        if record.first_ns is None:
            self.fail("empty", "the stream ended well but no chunk of it had a token")
        if self._error is not None:
            record.outcome = Outcome.FAILED
            record.error_class, record.error_message = self._error
        else:
            record.outcome = Outcome.COMPLETED
        record.anomalies = self._anomalies
        record.text = None if self._text is None else "".join(self._text)

    def _fill_chunks(self, record: RequestRecord) -> None:
        """Decide which candidate chunks bore tokens (docs/definitions.md, "token-bearing chunk")."""
        kinds, total = self._kinds, self._usage.get("output")
        counted = len(self._tokens) == len(self._times) > 0
        texts, empties = kinds.count(_TEXT), kinds.count(_EMPTY)
        if counted:
            keep = [kind == _TEXT or tokens > 0 for kind, tokens in zip(kinds, self._tokens, strict=True)]
        elif empties or len(kinds) > texts:
            # A chunk without text may still be a token (half a character). The total says whether each of them was.
            wanted = {_TEXT}
            if total == len(kinds):
                wanted = {_TEXT, _EMPTY, _EMPTY_FINAL}
            elif total == texts + empties:
                wanted = {_TEXT, _EMPTY}
            keep = [kind in wanted for kind in kinds]
        else:
            keep = []
        if keep and not any(keep) and total:
            keep[-1] = True  # the tokens that usage counts came with one of these, at the latest with the last
        if keep:
            record.chunk_ns = [t for t, bears in zip(self._times, keep, strict=True) if bears]
            if counted:
                record.chunk_tokens = [n for n, bears in zip(self._tokens, keep, strict=True) if bears]
        else:
            record.chunk_ns = self._times.tolist()
        if record.chunk_ns:
            record.first_ns, record.last_ns = record.chunk_ns[0], record.chunk_ns[-1]
        if total is not None:
            record.output_tokens, record.tokens_from = total, "usage"
            if counted and sum(self._tokens) != total:
                self._note("usage_mismatch")
            if record.output_len is not None and total > record.output_len:
                self._note("more_tokens_than_asked")
        elif counted:
            record.output_tokens, record.tokens_from = sum(self._tokens), "token_ids"
        elif record.chunk_ns:
            record.output_tokens, record.tokens_from = len(record.chunk_ns), "chunks"
            if self._error is None:  # it comes with the end, which a broken stream does not reach
                self._note("no_usage")

    def _same_but_text(self, whole: bytes, t_ns: int) -> bool:
        """If `whole` holds nothing but chunks of the template with plain text in them, take them all and say True."""
        assert self._template is not None
        _, _, key, before, between, after = self._template
        pieces = whole.split(key)  # the key's quotes cannot stand in a plain text
        if pieces[0] != before or not pieces[-1].endswith(after):
            return False
        texts = [piece[: -len(between)] for piece in pieces[1:-1] if piece.endswith(between)]
        texts.append(pieces[-1][: -len(after)])
        if len(texts) != len(pieces) - 1 or b"".join(texts).translate(None, _PLAIN) or not all(texts):
            return False
        self._take_texts(texts, t_ns)
        return True

    def _take_texts(self, texts: list[bytes], t_ns: int) -> None:
        """Chunks of the template, by their texts."""
        self._times.extend([t_ns] * len(texts))
        self._kinds.extend(bytes(len(texts)))  # _TEXT
        self._template_tries = 0
        if self._text is not None:
            self._text.append(b"".join(texts).decode())

    def _event(self, event: bytes | TypedEvent, t_ns: int) -> None:
        if isinstance(event, TypedEvent):
            if event.type == b"error":
                self._note("error_event")
                self.fail("server_error", _error_text(event.data))
                return
            self._note("unknown_event_type")
            event = event.data
        elif (
            (template := self._template)
            and event.startswith(prefix := template.opening[6:])
            and event.endswith(suffix := template.closing[:-2])
        ):
            text = event[len(prefix) : -len(suffix)]
            if text and not text.translate(None, _PLAIN):
                self._take_texts([text], t_ns)
                return
        if self._done:
            self._note("after_done")
            return
        if event == b"[DONE]":
            self._done, self._template = True, None
            return
        self._chunk(event, t_ns)

    def _chunk(self, payload: bytes, t_ns: int) -> None:
        try:
            chunk = json.loads(payload.decode())
            if not isinstance(chunk, dict):
                raise ValueError("not an object")
            if error := chunk.get("error") or (chunk if chunk.get("object") == "error" else None):
                self._note("error_chunk")
                self.fail("server_error", _error_message(error))
                return
            choices = chunk.get("choices") or []
            tokens = self._read_usage(chunk.get("usage"))
            kind, ids = self._read_choices(choices)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self._note("bad_event")
            self.fail("bad_event", f"an event is no OpenAI chunk: {payload[:120]!r} ({error})")
            return
        if tokens is None:
            tokens = ids
        if not choices or (kind is None and not tokens):
            return
        if tokens is not None and len(self._tokens) == len(self._times):
            self._tokens.append(tokens)
        self._times.append(t_ns)
        self._kinds.append(_EMPTY if kind is None else kind)
        if kind == _TEXT and tokens is None:
            self._learn(payload, chunk)

    def _read_usage(self, usage: Any) -> int | None:
        """Keep the usage; return how many output tokens are new since the last one, None if it does not say."""
        if usage is None:
            return None
        details = usage.get("prompt_tokens_details") or {}
        for name, value in (
            ("prompt", usage.get("prompt_tokens")),
            ("output", usage.get("completion_tokens")),
            ("cached", details.get("cached_tokens")),
        ):
            if type(value) is int and value >= 0:
                self._usage[name] = value
            elif value is not None:
                raise ValueError(f"usage has {value!r} {name} tokens")
        total: int | None = usage.get("completion_tokens")
        if total is None:
            return None
        new = max(0, total - self._tokens_seen)
        self._tokens_seen = max(self._tokens_seen, total)
        return new

    def _read_choices(self, choices: list[Any]) -> tuple[int | None, int | None]:
        """What the chunk is (None: no candidate for a token) and how many token ids it has (None: not said)."""
        kind: int | None = None
        ids: int | None = None
        if not isinstance(choices, list):
            raise ValueError("choices is no list")
        for choice in choices:
            finish = choice.get("finish_reason")
            if self._api is Api.CHAT:
                delta = choice.get("delta") or {}
                text = _delta_text(delta)
                opening = "role" in delta and delta["role"] is not None
            else:
                text = choice.get("text") or ""
                opening = False
            if not isinstance(text, str):
                raise ValueError("the text is no string")
            if choice.get("token_ids") is not None:
                ids = (ids or 0) + len(choice["token_ids"])
            if text:
                kind = _TEXT
                if self._text is not None:
                    self._text.append(text)
            elif kind is None and not opening:
                kind = _EMPTY if finish is None else _EMPTY_FINAL
            if finish is not None:
                self._finish_reasons.append(str(finish))
                if finish in _FAILED_FINISH:
                    self._note("finish_" + finish)
                    self.fail("aborted", f"the server ended the request with finish_reason {finish!r}")
        return kind, ids

    def _learn(self, payload: bytes, chunk: dict[str, Any]) -> None:
        """Make `payload` the template, if replacing its text is all that can differ."""
        if self._template_tries > 16:
            return  # the chunks of this server differ elsewhere too
        self._template_tries += 1
        key = b'"text":' if self._api is Api.COMPLETIONS else b'"content":'
        if payload.count(key) != 1 or len(chunk["choices"]) != 1 or chunk["choices"][0].get("finish_reason"):
            return
        start = payload.index(key) + len(key)
        key = next((key + opening for opening in (b'"', b' "') if payload.startswith(opening, start)), b"")
        if not key:
            return
        start = end = payload.index(key) + len(key)
        while payload[end : end + 1] not in (b'"', b""):
            end += 2 if payload[end : end + 1] == b"\\" else 1
        prefix, suffix = payload[:start], payload[end:]
        # Proof rather than trust: with another text, the same chunk with that text must come out.
        choice = chunk["choices"][0]
        holder, name = (choice, "text") if self._api is Api.COMPLETIONS else (choice.get("delta"), "content")
        if not holder or holder.get("role") is not None or not isinstance(holder.get(name), str):
            return
        holder[name] = "~"
        try:
            proven = json.loads((prefix + b"~" + suffix).decode()) == chunk
        except ValueError:
            return
        if proven:
            opening, closing = b"data: " + prefix, suffix + b"\n\n"
            before = opening[: -len(key)]
            self._template = _Template(opening, closing, key, before, closing + before, closing)

    def _finish_plain(self, *, cut: bool) -> None:
        body = self._plain or b""
        if self._status != 200:
            message = _error_text(body) or "no body"
            if self._location is not None:
                message = f"redirects to {self._location}; redirects are not followed"
            self.fail(f"http_{self._status}", message)
            return
        text = _error_text(body)
        if text and b'"error"' in body:
            self._note("error_in_200")
            self.fail("server_error", text)
        elif cut:
            self.fail("truncated", "the connection ended before the response did")
        else:
            self.fail("not_streamed", f"the server answered without a stream: {body[:120]!r}")

    def _note(self, name: str) -> None:
        self._anomalies[name] = self._anomalies.get(name, 0) + 1


def _delta_text(delta: dict[str, Any]) -> str:
    """All that a chat delta may say, as one string: text, reasoning, a refusal, tool calls."""
    text = _content_text(delta.get("content"))
    for name in ("reasoning_content", "reasoning", "refusal"):
        text += _content_text(delta.get(name))
    calls = [(call or {}).get("function") for call in delta.get("tool_calls") or []]
    for function in (*calls, delta.get("function_call")):
        if function:
            text += (function.get("name") or "") + (function.get("arguments") or "")
    return text


def _content_text(content: Any) -> str:
    """Of a string, or of a list of parts with a text each (or thoughts: parts in parts)."""
    if isinstance(content, list):
        return "".join(_content_text(part.get("text") or part.get("thinking")) for part in content if part)
    if not isinstance(content, str | None):
        raise ValueError(f"{content!r:.40} is no text")
    return content or ""


def _error_message(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error
    return str(error)[:2000]


def _error_text(body: bytes) -> str:
    """The message of an error body, whatever its shape."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace").strip()[:2000]
    if isinstance(value, dict):
        value = value.get("error") or value.get("detail") or value
    return _error_message(value)
