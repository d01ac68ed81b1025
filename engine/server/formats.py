"""How the two APIs, completions and chat completions, spell an answer: whole, and chunk by chunk.

A chunk of a stream differs from the one before in little but its text, so each choice keeps the bytes around it and
only the text is encoded per event.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from atom.engine.loading.tokenizer import Tokenizer
from atom.engine.messages import TokenLogprobs
from atom.engine.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from atom.engine.server.parameters import AnswerOptions
from atom.engine.streaming import TokenEvent

encode_json: Final = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    details = {"cached_tokens": cached_tokens}
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class AnswerFormat(abc.ABC):
    """One answer's constants, and what depends on the API. `id` is also the request's id in the engine."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    open_text: bytes
    """From the choice's index to its text in a chunk."""
    close_text: bytes

    def __init__(self, answer_id: str, created: int, model: str, options: AnswerOptions, tokenizer: Tokenizer) -> None:
        self.id = answer_id
        self.created = created
        self.model = model
        self.options = options
        self.tokenizer = tokenizer

    def chunk_head(self) -> bytes:
        """A chunk up to its choices."""
        head = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}
        return b"data: " + encode_json(head)[:-1] + b',"choices":['

    def whole_head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.whole_object, "created": self.created, "model": self.model}

    def opening_chunk(self, index: int) -> bytes:
        """What comes before a choice's first token."""
        return b""

    @abc.abstractmethod
    def logprobs_formatter(self) -> LogprobsFormatter:
        """A fresh one per choice: it may keep state."""

    @abc.abstractmethod
    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """A choice of a whole answer, up to its finish reason."""

    @abc.abstractmethod
    def add_prompt_details(
        self, body: dict[str, Any], choices: Sequence[dict[str, Any]], prompts: Sequence[PromptDetails]
    ) -> None:
        """Put prompt logprobs and token ids where this API has them. `prompts`: one per choice."""


class LogprobsFormatter(abc.ABC):
    @abc.abstractmethod
    def format(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]: ...


class PromptDetails(msgspec.Struct):
    """Of one choice: what was asked for about its prompt."""

    token_ids: Sequence[int] | None
    logprobs: list[TokenLogprobs | None] | None


class _CompletionFormatter(CompletionLogprobs, LogprobsFormatter):
    pass


class CompletionFormat(AnswerFormat):
    id_prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"
    open_text = b'"text":'
    close_text = b""

    def logprobs_formatter(self) -> LogprobsFormatter:
        return _CompletionFormatter(self.tokenizer, self.options.logprobs or 0)

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs}

    def add_prompt_details(
        self, body: dict[str, Any], choices: Sequence[dict[str, Any]], prompts: Sequence[PromptDetails]
    ) -> None:
        for choice, prompt in zip(choices, prompts, strict=True):
            if prompt.logprobs is not None and self.options.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self.tokenizer, prompt.logprobs, self.options.prompt_logprobs
                )
            if prompt.token_ids is not None:
                choice["prompt_token_ids"] = list(prompt.token_ids)


class _ChatFormatter(LogprobsFormatter):
    def __init__(self, tokenizer: Tokenizer, num_alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._num_alternatives = num_alternatives

    def format(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        known = [entry for entry in entries if entry is not None]
        return chat_logprobs(self._tokenizer, known, self._num_alternatives)


class ChatFormat(AnswerFormat):
    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    open_text = b'"delta":{"content":'
    close_text = b"}"

    def opening_chunk(self, index: int) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        usage_null = b',"usage":null' if self.options.include_usage else b""
        return self.chunk_head() + encode_json(choice) + b"]" + usage_null + b"}\n\n"

    def logprobs_formatter(self) -> LogprobsFormatter:
        return _ChatFormatter(self.tokenizer, self.options.logprobs or 0)

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs}

    def add_prompt_details(
        self, body: dict[str, Any], choices: Sequence[dict[str, Any]], prompts: Sequence[PromptDetails]
    ) -> None:
        prompt = prompts[0]  # one conversation, however many choices
        if prompt.logprobs is not None and self.options.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, prompt.logprobs, self.options.prompt_logprobs)
        if prompt.token_ids is not None:
            body["prompt_token_ids"] = list(prompt.token_ids)


class ChunkEncoder:
    """The chunks of one choice of a stream."""

    __slots__ = ("_finish", "_logprobs", "_options", "_prompt", "_prompt_tokens", "_usage", "after", "before")

    def __init__(self, format: AnswerFormat, index: int, prompt_tokens: int, prompt_token_ids: Sequence[int]) -> None:
        options = format.options
        self._options = options
        self._prompt: Sequence[int] | None = prompt_token_ids if options.token_ids else None
        self._logprobs = format.logprobs_formatter() if options.logprobs is not None else None
        self.before = format.chunk_head() + b'{"index":%d,' % index + format.open_text
        self._finish = format.close_text + b',"logprobs":%b,"finish_reason":%b%b}]%b}\n\n'
        if options.continuous_usage:
            self._usage = b',"usage":{"prompt_tokens":%d,"completion_tokens":%%d,"total_tokens":%%d}' % prompt_tokens
        else:
            self._usage = b',"usage":null' if options.include_usage else b""
        self._prompt_tokens = prompt_tokens
        plain = not options.continuous_usage and not options.token_ids and self._logprobs is None
        self.after: bytes | None = self._finish % (b"null", b"null", b"", self._usage) if plain else None
        """`before + text + after` is the whole chunk of an event that does not end the choice; None: use `encode`."""

    def encode(self, event: TokenEvent, echo: TokenEvent | None = None) -> bytes:
        """Any event. `echo`: the prompt's text, token ids and logprobs, to come before it."""
        text, token_ids, entries = event.text, event.token_ids, event.logprobs
        if echo is not None:
            text = echo.text + text
            if echo.prompt_logprobs is not None:
                token_ids = [*echo.token_ids, *token_ids]
                entries = [*echo.prompt_logprobs, *(entries or ())]  # type: ignore[list-item]
        logprobs = b"null"
        if self._logprobs is not None and entries:
            logprobs = encode_json(self._logprobs.format(token_ids, entries))
        reason, extra = b"null", b""
        if event.finish_reason is not None:
            reason = encode_json(event.finish_reason)
            extra = b',"stop_reason":' + encode_json(event.stop_reason)
        if self._options.token_ids:
            extra += b',"token_ids":' + encode_json(list(event.token_ids))
            if self._prompt is not None:
                extra += b',"prompt_token_ids":' + encode_json(list(self._prompt))
                self._prompt = None
        usage_part = self._usage
        if self._options.continuous_usage:
            total = self._prompt_tokens + event.num_output_tokens
            usage_part = usage_part % (event.num_output_tokens, total)
        return b"".join((self.before, encode_json(text), self._finish % (logprobs, reason, extra, usage_part)))


def usage_chunk(format: AnswerFormat, totals: Usage) -> bytes:
    """The last chunk of a stream with `include_usage`: no choices."""
    return format.chunk_head() + b'],"usage":' + encode_json(totals) + b"}\n\n"
