"""One completion request from the engine's side: its sequences, their end, and what ends it early.

An answer has one choice per prompt and n; a choice is the sink of one engine sequence. `run` starts them and then only
waits for the client to go away: everything else happens in the sinks, on the event loop, without a task per request.
Streams: `engine/server/streamed.py`; answers in one piece: `engine/server/collected.py`.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from atom.engine.api_sequence import fan_out
from atom.engine.messages import FINISH_ABORT, FINISH_ERROR
from atom.engine.sampling_params import SamplingParams
from atom.engine.server.api_errors import ApiError, invalid, shutting_down, unavailable
from atom.engine.server.formats import AnswerFormat, Usage, usage
from atom.engine.server.metrics.recorder import SequenceRecorder
from atom.engine.server.protocol import GenerationRequest
from atom.engine.server.request_log import RequestLine
from atom.engine.server.service import Exchange, Service
from atom.engine.streaming import Stream, TokenEvent

log = logging.getLogger(__name__)

MAX_SEQUENCES: Final = 4096
"""Of one request: prompts × n."""
SECONDS_PER_NS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int]
    text: str | None
    """As the client gave it; None for token ids."""


class Choice(abc.ABC):
    """One sequence of an answer."""

    __slots__ = ("answer", "ended", "finish_reason", "first_ns", "index", "last_ns", "num_cached", "num_tokens",
                 "prompt", "stream")  # fmt: skip

    def __init__(self, answer: Answer, index: int, prompt: Prompt) -> None:
        self.answer = answer
        self.index = index
        self.prompt = prompt
        self.stream: Stream | None = None
        self.ended = False
        self.finish_reason: str | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.num_tokens = 0
        self.num_cached = 0

    def __call__(self, event: TokenEvent) -> None:
        """The sink."""
        try:
            self.observe(event, time.monotonic_ns())
            self.take(event)
            if event.finish_reason is not None:
                self.end(event)
        except Exception:
            self.fail()

    def fail(self) -> None:
        """Out of an exception handler: the request must not be left without an end."""
        log.exception("request %s failed in the server", self.answer.exchange.request_id)
        self.answer.fail(ApiError(500, "the server failed to build the answer"))

    def observe(self, event: TokenEvent, now: int) -> None:
        """Count an event's tokens and the time they took."""
        tokens = len(event.token_ids)
        if not tokens:
            return
        figures = self.figures
        if self.last_ns:
            figures.inter_token.observe((now - self.last_ns) * SECONDS_PER_NS / tokens, tokens)
        else:
            self.first_ns = now
            figures.ttft[self.answer.streams].observe((now - self.answer.exchange.received_ns) * SECONDS_PER_NS)
        self.last_ns = now

    @property
    def figures(self) -> SequenceRecorder:
        """Where the engine that serves this sequence is counted; which one that is, its first event knows."""
        assert self.stream is not None
        return self.answer.service.recorder.sequences[self.stream.sequence.engine_index]

    @property
    def context_id(self) -> str:
        """Names this sequence in metrics: the answer's id, with the choice's number where there are several."""
        answer = self.answer
        return answer.format.id if len(answer.prompts) * answer.params.n == 1 else f"{answer.format.id}-{self.index}"

    @abc.abstractmethod
    def take(self, event: TokenEvent) -> None:
        """Do with it what this kind of answer does."""

    def end(self, event: TokenEvent) -> None:
        """The last event was taken."""
        reason = event.finish_reason
        assert reason is not None
        assert self.stream is not None
        self.ended = True
        self.finish_reason = reason
        self.num_tokens = event.num_output_tokens
        self.num_cached = event.num_cached_tokens
        answer = self.answer
        now = time.monotonic_ns()
        self.figures.finished_sequence(self.stream.sequence, reason, answer.exchange.received_ns, now)
        self.close_context()
        if reason in (FINISH_ABORT, FINISH_ERROR):
            answer.fail(answer.engine_error(event))
        else:
            answer.choice_ended()

    def close_context(self) -> None:
        contexts = self.answer.service.recorder.contexts
        if contexts is not None:
            contexts.ended(self.context_id)


class Answer(abc.ABC):
    """A request being answered. Subclasses say how."""

    streams: ClassVar[bool]

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        format: AnswerFormat,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ) -> None:
        self.service = service
        self.exchange = exchange
        self.format = format
        self.request = request
        self.options = format.options
        self.prompts = prompts
        self.params = params
        self.writer = exchange.writer
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        self._num_open = 0
        self._submitted = False

    async def run(self) -> None:
        """Submit, answer, and return when the response is complete or the client is gone. What the engine refuses at
        once is raised; nothing has been sent then."""
        self.service.answers.add(self)
        try:
            self._submit()
            self.begin()
            # The server says "disconnect" also when the response is complete.
            while (await self.exchange.receive())["type"] != "http.disconnect":
                pass
        finally:
            self.service.answers.discard(self)
            self._abort_open()
            self._log()
            if self._submitted:
                self.choices[0].figures.ended_request(self.params.n, self.params.max_tokens)
            self._release()

    def _submit(self) -> None:
        n = self.params.n
        if len(self.prompts) * n > MAX_SEQUENCES:
            raise invalid(f"{len(self.prompts)} prompts times n {n} is more than {MAX_SEQUENCES} sequences", "prompt")
        children = fan_out(self.params)
        self._num_open = len(self.prompts) * n
        dispatcher, recorder = self.service.dispatcher, self.service.recorder
        for prompt_index, prompt in enumerate(self.prompts):
            for child_index, child in enumerate(children):
                choice = self.new_choice(prompt_index * n + child_index, prompt)
                choice.stream = dispatcher.submit(self.format.id, prompt.token_ids, child, choice)
                self.choices.append(choice)
                if recorder.contexts is not None:
                    recorder.contexts.submitted(choice.context_id, choice.stream.sequence)
        recorder.submitted(self.exchange.received_ns, time.monotonic_ns())
        self._submitted = True

    @abc.abstractmethod
    def new_choice(self, index: int, prompt: Prompt) -> Choice: ...

    @abc.abstractmethod
    def begin(self) -> None:
        """The sequences are with the engine."""

    @abc.abstractmethod
    def complete(self) -> None:
        """Every choice has ended well."""

    @abc.abstractmethod
    def send_error(self, error: ApiError) -> None:
        """The response has begun: end it with an error."""

    def choice_ended(self) -> None:
        self._num_open -= 1
        if self._num_open:
            return
        n = self.params.n
        for start in range(0, len(self.choices), n):
            longest = max(one.num_tokens for one in self.choices[start : start + n])
            self.choices[start].figures.max_generation_tokens.observe(longest)
        self.complete()

    def fail(self, error: ApiError) -> None:
        """End the request with an error that the client sees. The first one stands."""
        if self.error is not None or self.writer.ended:
            return
        self.error = error
        self._abort_open()
        if self.writer.started:
            self.send_error(error)
        else:
            self.exchange.respond_with(error)

    def _abort_open(self) -> None:
        for choice in self.choices:
            if not choice.ended and choice.stream is not None:
                choice.ended = True
                choice.finish_reason = FINISH_ABORT
                choice.num_tokens = choice.stream.sequence.num_output_tokens
                choice.stream.abort()
                choice.figures.finished[FINISH_ABORT] += 1
                choice.close_context()

    def _release(self) -> None:
        """Cut the circle of answer, writer, choices and streams: a circle is left to the garbage collector, and at
        some hundred requests a second that is what makes an API process stop and walk its heap."""
        self.writer.on_drained(None)
        for choice in self.choices:
            choice.stream = None
            del choice.answer
        self.choices = []

    def engine_error(self, event: TokenEvent) -> ApiError:
        """Why the engine gave up on a sequence."""
        if self.service.manager.failure is not None:
            return ApiError(500, f"the engine died: {event.error or self.service.manager.failure}", code="engine_dead")
        if self.service.draining or event.finish_reason == FINISH_ABORT:
            return shutting_down()
        # Whatever can be wrong with the request itself was checked before: what is left is a queue that filled up.
        return unavailable(f"the engine refused the request: {event.error}", "request_refused")

    def usage(self) -> Usage:
        n = self.params.n
        return usage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(choice.num_tokens for choice in self.choices),
            sum(choice.num_cached for choice in self.choices[::n]),
        )

    def _log(self) -> None:
        request_log = self.service.request_log
        if request_log is None or not self.choices:
            return
        totals = self.usage()
        first = [choice.first_ns for choice in self.choices if choice.first_ns]
        received_ns = self.exchange.received_ns
        request = self.request
        request_log.write(
            RequestLine(
                time=time.time(),
                request_id=self.exchange.request_id,
                route=self.exchange.route,
                model=self.format.model,
                status=self.error.status if self.error is not None else self.writer.status,
                stream=self.streams,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.prompt_tokens_details["cached_tokens"],
                completion_tokens=totals.completion_tokens,
                finish_reasons=[choice.finish_reason for choice in self.choices],
                ttft_s=(min(first) - received_ns) * SECONDS_PER_NS if first else None,
                e2e_s=(time.monotonic_ns() - received_ns) * SECONDS_PER_NS,
                error=self.error.message if self.error is not None else None,
                user=request.user,
                safety_identifier=request.safety_identifier,
                metadata=request.metadata,
            )
        )
