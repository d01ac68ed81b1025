"""Results of whole requests, for those who wait until a request is finished: what `LLM.generate`, `LLMEngine.step` and
`AsyncLLMEngine.complete` return, and how it is put together from a request's sequences. Results token by token:
`engine/streaming.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atom.engine.api_sequence import ApiSequence, fan_out
from atom.engine.core_manager import CoreManager
from atom.engine.detokenizer import DetokenizerFactory, SupportsDecode
from atom.engine.messages import TokenLogprobs
from atom.engine.output_processor import TextOutput
from atom.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """`time.monotonic_ns()` of one sequence's milestones; None for what never happened."""

    arrival_ns: int
    """Admitted by the API process."""
    queued_ns: int | None
    """Queued in the core's scheduler."""
    scheduled_ns: int | None
    """First scheduled."""
    first_token_ns: int | None
    """First token back in the API process."""
    finish_ns: int

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_ns is None else (self.first_token_ns - self.arrival_ns) / 1e9

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the end."""
        return (self.finish_ns - self.arrival_ns) / 1e9


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of a request's `n` sequences."""

    index: int
    text: str
    token_ids: list[int]
    """All that were generated, also an end-of-sequence token that `text` does not show."""
    finish_reason: str
    """One of `messages.FINISH_*`."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended it; None at end of sequence and at length."""
    logprobs: list[TokenLogprobs] | None
    """One per token of `token_ids`, when asked for."""
    timings: RequestTimings
    error: str | None = None
    """With finish reason error."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: Sequence[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    """One per prompt token, the first None, when asked for."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache, of the sequence that found most."""
    outputs: list[CompletionOutput]
    """By index."""


class PendingRequest:
    """A request of n sequences until all have finished. It is the `owner` of its sequences."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int]) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.seq_ids: list[int] = []
        self.abandoned = False
        self._texts: dict[int, _StopText] = {}
        self._outputs: list[CompletionOutput] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0

    def submit(self, manager: CoreManager, detokenizers: DetokenizerFactory, params: SamplingParams) -> None:
        """Send its sequences to the core: all, or none and an exception."""
        children = fan_out(params)
        manager.check_admission(len(children))
        self._missing = len(children)
        try:
            for child in children:
                # Without stop strings the text is decoded once, at the end.
                watcher = _StopText(manager, TextOutput(detokenizers, child)) if child.stop else None
                callback = watcher.on_tokens if watcher is not None else None
                seq = manager.add_sequence(self.request_id, self.prompt_token_ids, child, callback, owner=self)
                self.seq_ids.append(seq.seq_id)
                if watcher is not None:
                    self._texts[seq.seq_id] = watcher
        except BaseException:
            self.abandoned = True
            manager.abort(self.seq_ids, discard=True)
            raise

    def collect(self, seq: ApiSequence, tokenizer: SupportsDecode) -> RequestOutput | None:
        """Take one of its finished sequences; the whole when it was the last."""
        if self.abandoned:
            return None
        watcher = self._texts.pop(seq.seq_id, None)
        text = watcher.text() if watcher is not None else _decode(seq, tokenizer)
        assert seq.finish_reason is not None
        self._outputs.append(
            CompletionOutput(
                index=self.seq_ids.index(seq.seq_id),
                text=text,
                token_ids=seq.output_token_ids,
                finish_reason=seq.finish_reason,
                stop_reason=seq.stop_reason,
                logprobs=seq.logprobs,
                timings=RequestTimings(
                    seq.arrival_ns,
                    seq.queued_ns or None,
                    seq.scheduled_ns or None,
                    seq.first_token_ns or None,
                    seq.finish_ns,
                ),
                error=seq.error,
            )
        )
        self._num_cached_tokens = max(self._num_cached_tokens, seq.num_cached_tokens)
        if seq.prompt_logprobs is not None:
            self._prompt_logprobs = seq.prompt_logprobs
        self._missing -= 1
        if self._missing:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            outputs=sorted(self._outputs, key=lambda output: output.index),
        )


class _StopText:
    """The text of a sequence with stop strings: followed as it grows, to end the sequence where one matches."""

    def __init__(self, manager: CoreManager, output: TextOutput) -> None:
        self._manager = manager
        self._output = output
        self._pieces: list[str] = []

    def on_tokens(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        piece = self._output.append(
            token_ids, finished=seq.finish_reason is not None, ends_with_stop_token=seq.stop_token_id is not None
        )
        self._pieces.append(piece)
        if self._output.stop is not None:
            self._manager.stop_sequence(seq, self._output.stop, self._output.num_tokens)

    def text(self) -> str:
        return "".join(self._pieces)


def _decode(seq: ApiSequence, tokenizer: SupportsDecode) -> str:
    shown = seq.output_token_ids
    if seq.stop_token_id is not None and not seq.params.include_stop_str_in_output:
        shown = shown[:-1]
    return tokenizer.decode(shown, skip_special_tokens=seq.params.skip_special_tokens)
