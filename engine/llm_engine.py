"""`LLMEngine`: a synchronous engine with requests in and finished requests out, `add_request` / `step` / `abort`.

It reads the manager's queue of finished sequences. Whole lists of prompts at once: `engine/llm.py`; under an event
loop: `engine/async_engine.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType

from atom.engine.api_sequence import check_prompt
from atom.engine.config import EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.detokenizer import DetokenizerFactory
from atom.engine.errors import RequestError
from atom.engine.loading.tokenizer import Tokenizer, load_tokenizer
from atom.engine.request_output import PendingRequest, RequestOutput
from atom.engine.sampling_params import SamplingParams


class LLMEngine:
    """Starts its core on construction. Use from one thread, as a context manager or with `close()`."""

    def __init__(
        self, config: EngineConfig, *, manager: CoreManager | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        """`manager`: one that is not started yet, in place of a new one; `tokenizer`: in place of the model's."""
        self.config = config
        self.manager = manager or CoreManager(config)
        self.manager.start()
        try:
            self.tokenizer = tokenizer or load_engine_tokenizer(config, self.manager)
            self._detokenizers = DetokenizerFactory(self.tokenizer)
        except BaseException:
            self.manager.shutdown()
            raise
        self._requests: dict[str, PendingRequest] = {}
        self._numbers = itertools.count()

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Start a request for a text or for token ids; returns its id. Raises `RequestError`, `QueueFullError`,
        `EngineDeadError`."""
        params = params or SamplingParams()
        request_id = request_id if request_id is not None else f"request-{next(self._numbers)}"
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        prompt_token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        validate_request(self.manager, self.tokenizer, prompt_token_ids, params)
        request = PendingRequest(request_id, prompt if isinstance(prompt, str) else None, prompt_token_ids)
        request.submit(self.manager, self._detokenizers, params)
        self._requests[request_id] = request
        return request_id

    def step(self, timeout: float | None = None) -> list[RequestOutput]:
        """Wait until sequences finish and return the requests that this completes, possibly none; `[]` at once when
        nothing is unfinished, and after `timeout` seconds. A request that the core lost has `error` in its outputs."""
        if not self._requests:
            return []
        outputs = []
        for seq in self.manager.get_output(timeout):
            assert isinstance(seq.owner, PendingRequest)
            output = seq.owner.collect(seq, self.tokenizer)
            if output is not None:
                del self._requests[output.request_id]
                outputs.append(output)
        return outputs

    def abort(self, request_id: str) -> None:
        """End a request; `step` returns what it has, with reason abort. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self.manager.abort(request.seq_ids)

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def close(self) -> None:
        """Stop the core. What is unfinished is lost. Safe to call twice."""
        self.manager.shutdown()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_engine_tokenizer(config: EngineConfig, manager: CoreManager) -> Tokenizer:
    """The tokenizer of a started engine's model."""
    model = config.model
    return load_tokenizer(model.model, model.tokenizer, model.chat_template, manager.info.get("vocab_size"))


def validate_request(
    manager: CoreManager, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> None:
    """Raise `RequestError` naming the parameter unless the engine can serve this request."""
    params.validate(tokenizer.vocab_size)
    max_model_len = manager.info.get("max_model_len")
    assert isinstance(max_model_len, int), "the core reports max_model_len when it is ready"
    check_prompt(prompt_token_ids, params, max_model_len, tokenizer.vocab_size)
