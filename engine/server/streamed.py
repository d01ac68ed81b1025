"""Answers as server-sent events: one event per sequence and engine step, also when its text is empty.

Only the pending events of a reader that cannot keep up are merged; a merged event says how many tokens it carries by
`continuous_usage_stats` or `return_token_ids`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from atom.engine.messages import FINISH_ABORT, FINISH_ERROR
from atom.engine.server.answer import SECONDS_PER_NS, Answer, Choice, Prompt, log
from atom.engine.server.api_errors import ApiError
from atom.engine.server.formats import ChunkEncoder, encode_json, usage_chunk
from atom.engine.server.response_writer import DONE
from atom.engine.streaming import TokenEvent, merge_events


class StreamedChoice(Choice):
    """Encodes events and hands them to the writer."""

    __slots__ = (
        "_after",
        "_before",
        "_echo",
        "_encoder",
        "_observe_itl",
        "_opening",
        "_recorder",
        "_writer",
        "pending",
    )

    answer: StreamedAnswer
    _observe_itl: Callable[[float, int], None]
    """There once `_after` is set."""

    def __init__(self, answer: StreamedAnswer, index: int, prompt: Prompt) -> None:
        super().__init__(answer, index, prompt)
        format = answer.format
        self._encoder = ChunkEncoder(format, index, len(prompt.token_ids), prompt.token_ids)
        self._before = self._encoder.before
        self._after: bytes | None = None
        """Set once the first event is out, if the others are plain."""
        self._opening: bytes | None = format.opening_chunk(index)
        self._echo = answer.options.echo
        self._writer = answer.writer
        self._recorder = answer.service.recorder
        self.pending: list[TokenEvent] = []
        """What the reader has not taken yet."""

    def __call__(self, event: TokenEvent) -> None:
        """The sink; what is written out here is what happens 40,000 times a second."""
        after = self._after
        if after is None or event.finish_reason is not None or self._writer.blocked:
            super().__call__(event)
            return
        try:
            now = time.monotonic_ns()
            if tokens := len(event.token_ids):
                self._observe_itl((now - self.last_ns) * SECONDS_PER_NS / tokens, tokens)
                self.last_ns = now
            self._recorder.stream_events += 1
            self._writer.write(self._before + encode_json(event.text) + after)
        except Exception:
            self.fail()

    def take(self, event: TokenEvent) -> None:
        if event.finish_reason in (FINISH_ABORT, FINISH_ERROR):
            return  # the answer fails as a whole, with an error
        if self._writer.blocked:
            self.pending.append(event)
        elif event.finish_reason is None:
            self._writer.write(self._encode(event))
        else:
            # Written together with what follows it, if it is the last one: one write less per request.
            self.answer.tail += self._encode(event)

    def flush(self) -> None:
        """The reader has caught up: write what is pending."""
        parts, self.pending = self.pending, []
        if len(parts) > 1:
            self._recorder.merged_events += 1
        self._writer.write(self._encode(parts[0] if len(parts) == 1 else merge_events(parts)))

    def _encode(self, event: TokenEvent) -> bytes:
        self._recorder.stream_events += 1
        if self._opening is None:
            return self._encoder.encode(event)
        opening, self._opening = self._opening, None
        self._after = self._encoder.after
        self._observe_itl = self.figures.inter_token.observe
        return opening + self._encoder.encode(event, self._echoed(event) if self._echo else None)

    def _echoed(self, event: TokenEvent) -> TokenEvent:
        """The prompt as an event of its own."""
        prompt = self.prompt
        text = prompt.text
        if text is None:
            text = self.answer.service.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return TokenEvent(text, prompt.token_ids, 0, event.received_ns, prompt_logprobs=event.prompt_logprobs)


class StreamedAnswer(Answer):
    streams = True

    choices: list[StreamedChoice]  # type: ignore[assignment]
    tail = b""
    """Encoded, but not written yet."""
    _finished = False

    def new_choice(self, index: int, prompt: Prompt) -> StreamedChoice:
        return StreamedChoice(self, index, prompt)

    def begin(self) -> None:
        self.writer.on_drained(self._drained)
        self.writer.start_stream()

    def choice_ended(self) -> None:
        super().choice_ended()
        if not self._finished:
            self._write_tail()

    def complete(self) -> None:
        if self.options.include_usage:
            self._end(usage_chunk(self.format, self.usage()) + DONE)
        else:
            self._end(DONE)

    def send_error(self, error: ApiError) -> None:
        """Without [DONE]: a stream that failed must not look complete."""
        self._end(b"data: " + encode_json(error.body()) + b"\n\n")

    def _end(self, data: bytes) -> None:
        self.tail += data
        self._finished = True
        if not self.writer.blocked:
            self._write_tail()

    def _write_tail(self) -> None:
        tail, self.tail = self.tail, b""
        if self._finished:
            self.writer.finish(tail)
        elif tail:
            self.writer.write(tail)

    def _drained(self) -> None:
        try:
            self._flush_pending()
        except Exception:
            log.exception("request %s failed in the server", self.exchange.request_id)
            self.fail(ApiError(500, "the server failed to build the answer"))

    def _flush_pending(self) -> None:
        """What came while the reader was slow goes out as one event per choice, until it is slow again."""
        if self.writer.ended:
            return
        for choice in self.choices:
            if choice.pending:
                choice.flush()
                if self.writer.blocked:
                    return
        self._write_tail()
