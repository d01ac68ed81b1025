"""`EngineService`: the engine inside somebody's threaded program. Requests in, text through callbacks; no event loop,
no HTTP, no queue to read.

Under an event loop: `engine/async_engine.py`; whole results instead of callbacks: `engine/llm_engine.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

from atom.engine.api_sequence import ApiSequence
from atom.engine.config import EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.detokenizer import DetokenizerFactory
from atom.engine.errors import AtomEngineError, EngineDeadError, RequestError
from atom.engine.llm_engine import load_engine_tokenizer, validate_request
from atom.engine.loading.tokenizer import Tokenizer
from atom.engine.sampling_params import SamplingParams
from atom.engine.streaming import EventMaker, TokenEvent

__all__ = ["EngineService", "EventCallback"]

EventCallback: TypeAlias = "Callable[[str, TokenEvent], None]"
"""Called on the engine's output thread with the request's id and what one step added to it. Must not block: all
requests wait meanwhile. May `add` and `abort`."""


class EngineService:
    """Thread-safe. Every request that was added and not aborted gets exactly one event with a finish reason, its last:
    also when the engine dies (`error`) or the service is closed (`abort`)."""

    def __init__(
        self, config: EngineConfig, *, manager: CoreManager | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        """`manager`: one that is not started yet, in place of a new one; `tokenizer`: in place of the model's."""
        self.config = config
        self.manager = manager or CoreManager(config)
        self.manager.deliver_through_callbacks()
        self._given_tokenizer = tokenizer
        self._detokenizers: DetokenizerFactory | None = None
        """There once `start` is through."""
        self._changed = threading.Condition(threading.Lock())
        """Guards what follows; notified when a request is over."""
        self._open: dict[str, _Request] = {}
        self._num_ending = 0
        """Requests whose last callback is running."""
        self._draining = False

    def start(self) -> None:
        """Start the cores and load the tokenizer; returns when requests can be served. Raises `EngineDeadError` with
        the reason."""
        self.manager.start()
        try:
            self.tokenizer = self._given_tokenizer or load_engine_tokenizer(self.config, self.manager)
            self._detokenizers = DetokenizerFactory(self.tokenizer)
        except BaseException:
            self.manager.shutdown()
            raise

    def add(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams | None, callback: EventCallback
    ) -> None:
        """Start one sequence for a text or for token ids; `callback(request_id, event)` once per step that concerned
        it.

        Raises `RequestError` (also for an id that is open), `QueueFullError` when too many are open,
        `EngineDeadError`, `AtomEngineError` while draining. No callback comes then.
        """
        self.manager.check_admission()
        if self._detokenizers is None:
            raise EngineDeadError("the service has not started yet")
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError("a request of EngineService is one sequence: n must be 1", "n")
        prompt_token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        validate_request(self.manager, self.tokenizer, prompt_token_ids, params)
        request = _Request(self, request_id, EventMaker(self.manager, self._detokenizers, params), callback)
        with self._changed:
            if self._draining:
                raise AtomEngineError("this service is draining and takes no further requests")
            if request_id in self._open:
                raise RequestError(f"request id {request_id!r} is in use", "request_id")
            # With the lock held, so that neither its end nor an abort comes before it is entered.
            seq = self.manager.add_sequence(request_id, prompt_token_ids, params, request.on_tokens)
            request.seq_id = seq.seq_id
            self._open[request_id] = request

    def abort(self, request_id: str) -> bool:
        """End a request without a further callback, except one that is running at this moment. False: it is not open,
        it has ended or was never there."""
        with self._changed:
            request = self._open.pop(request_id, None)
            if request is None:
                return False
            request.ended = True
            self.manager.abort((request.seq_id,))
            self._changed.notify_all()
            return True

    def drain(self, timeout: float | None = None) -> bool:
        """Take no further request, and wait until those that are open have had their last callback. False when some
        are left after `timeout` seconds; they go on. Not from a callback."""
        if self.manager.on_output_thread:
            raise RuntimeError("a callback cannot wait for requests to end: none would")
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._open and not self._num_ending, timeout)

    def close(self, *, timeout: float = 10.0) -> None:
        """Stop the engine. What is open gets its last event, with reason abort. Safe to call twice, also before
        `start`. Not from a callback."""
        if self.manager.on_output_thread:
            raise RuntimeError("a callback cannot close the service: it runs on the thread that would be waited for")
        with self._changed:
            self._draining = True
        self.manager.shutdown(timeout=timeout)

    @property
    def num_open(self) -> int:
        """Requests that have neither ended nor been aborted."""
        return len(self._open)

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the engine is dead, once it is."""
        return self.manager.failure

    def __enter__(self) -> EngineService:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _end(self, request: _Request, event: TokenEvent) -> None:
        """Pass on a request's last event. Its id is free again when the callback sees it."""
        with self._changed:
            if request.ended:
                return
            request.ended = True
            del self._open[request.request_id]
            self._num_ending += 1
        try:
            request.callback(request.request_id, event)
        finally:
            with self._changed:
                self._num_ending -= 1
                self._changed.notify_all()


class _Request:
    """One open request."""

    __slots__ = ("_maker", "_service", "callback", "ended", "request_id", "seq_id")

    def __init__(self, service: EngineService, request_id: str, maker: EventMaker, callback: EventCallback) -> None:
        self._service = service
        self._maker = maker
        self.request_id = request_id
        self.callback = callback
        self.seq_id = 0
        self.ended = False

    def on_tokens(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        """The sequence's callback, on the output thread. What the user's callback raises ends the request with an
        error: the manager then calls once more."""
        if self.ended:
            return
        event = self._maker.make(seq, token_ids)
        if event.finish_reason is None:
            self.callback(self.request_id, event)
        else:
            self._service._end(self, event)
