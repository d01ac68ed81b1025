"""The open sequences of a manager and what a step does to them: tokens, callbacks, ends.

`engine/core_manager.py` receives the steps and does with the ended sequences what is due. The callback loop here runs
40,000 times a second, so it is written out where a call could be.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

from atom.engine.api_sequence import ApiSequence
from atom.engine.messages import FINISH_ERROR, FINISH_STOP, StepOutputs

log = logging.getLogger(__name__)


def finish(seq: ApiSequence, reason: str, now_ns: int) -> None:
    """Mark a sequence as ended."""
    seq.finish_reason = reason
    seq.finish_ns = now_ns


class Delivery:
    """`sequences` may be touched by any thread, one dict operation at a time: who pops a sequence, ends it. Everything
    else belongs to the output thread."""

    def __init__(self) -> None:
        self.sequences: dict[int, ApiSequence] = {}
        """By seq_id, whatever has not ended."""
        self._ended: list[ApiSequence] = []
        self._aborts: list[int] = []

    def deliver(self, step: StepOutputs) -> tuple[list[ApiSequence], list[int]]:
        """One callback per sequence that got tokens or ended. Returns the sequences that ended, and the ids of those
        that ended here while their core still runs them."""
        now = time.monotonic_ns()
        sequences = self.sequences
        if step.finished or step.first_scheduled or step.logprobs or step.prompt_logprobs:
            self._apply_details(step, now)
        if step.counts is None:
            for seq_id, token in zip(step.seq_ids, step.token_ids, strict=True):
                seq = sequences.get(seq_id)
                if seq is None:
                    continue  # aborted meanwhile
                output = seq.output_token_ids
                if not output:
                    seq.first_token_ns = now
                output.append(token)
                seq.received_ns = now
                callback = seq.callback
                if callback is not None:
                    try:
                        callback(seq, (token,))
                    except Exception as error:
                        self._on_callback_error(seq, error)
        else:
            self._deliver_counted(step, step.counts, now)
        if step.finished:
            self._close_finished(step)
        return self._take_ended()

    def stop(self, seq: ApiSequence, stop: str, num_output_tokens: int) -> None:
        """See `CoreManager.stop_sequence`."""
        if seq.finish_reason is None:
            self._aborts.append(seq.seq_id)
        seq.truncate(num_output_tokens)
        finish(seq, FINISH_STOP, seq.received_ns)
        seq.stop_reason = stop
        seq.stop_token_id = None
        self._close(seq)

    def end_all(self, reason: str, error: str | None) -> list[ApiSequence]:
        """End whatever is open; one last callback each."""
        now = time.monotonic_ns()
        ended = []
        for seq_id in list(self.sequences):
            seq = self.sequences.pop(seq_id, None)
            if seq is None:
                continue
            finish(seq, reason, now)
            seq.error = error
            seq.received_ns = now
            self._call_back(seq, ())
            ended.append(seq)
        self._take_ended()  # a callback that raised while its sequence was ended anyway
        return ended

    def _take_ended(self) -> tuple[list[ApiSequence], list[int]]:
        ended, aborts = self._ended, self._aborts
        if ended:
            self._ended = []
        if aborts:
            self._aborts = []
        return ended, aborts

    def _close(self, seq: ApiSequence) -> None:
        if self.sequences.pop(seq.seq_id, None) is not None:
            self._ended.append(seq)

    def _call_back(self, seq: ApiSequence, token_ids: Sequence[int]) -> None:
        callback = seq.callback
        if callback is None:
            return  # nobody asked, or aborted meanwhile
        try:
            callback(seq, token_ids)
        except Exception as error:
            self._on_callback_error(seq, error)

    def _on_callback_error(self, seq: ApiSequence, error: Exception) -> None:
        """A callback that raises ends its own sequence and no other. It is called once more, to pass the error on."""
        log.error("the output of request %s could not be handled", seq.request_id, exc_info=error)
        if seq.finish_reason is None:
            self._aborts.append(seq.seq_id)
        finish(seq, FINISH_ERROR, time.monotonic_ns())
        seq.error = f"its output could not be handled: {error!r}"
        if seq.callback is not None:
            with contextlib.suppress(Exception):
                seq.callback(seq, ())
        self._close(seq)

    def _deliver_counted(self, step: StepOutputs, counts: list[int], now: int) -> None:
        start = 0
        for seq_id, count in zip(step.seq_ids, counts, strict=True):
            token_ids = step.token_ids[start : start + count]
            start += count
            seq = self.sequences.get(seq_id)
            if seq is None:
                continue
            if not seq.output_token_ids and token_ids:
                seq.first_token_ns = now
            seq.output_token_ids.extend(token_ids)
            seq.received_ns = now
            self._call_back(seq, token_ids)

    def _apply_details(self, step: StepOutputs, now: int) -> None:
        """Set what a step says of single sequences before their callbacks run."""
        sequences = self.sequences
        for first in step.first_scheduled:
            if (seq := sequences.get(first.seq_id)) is not None:
                seq.queued_ns = first.queued_ns
                seq.scheduled_ns = first.scheduled_ns
                seq.num_cached_tokens = first.num_cached_tokens
        for seq_id, prompt_logprobs in step.prompt_logprobs.items():
            if (seq := sequences.get(seq_id)) is not None:
                seq.prompt_logprobs = prompt_logprobs
        for seq_id, logprobs in step.logprobs.items():
            if (seq := sequences.get(seq_id)) is not None and seq.logprobs is not None:
                seq.logprobs.extend(logprobs)
        for finished in step.finished:
            if (seq := sequences.get(finished.seq_id)) is not None:
                finish(seq, finished.reason, now)
                seq.error = finished.error
                seq.stop_token_id = finished.stop_token_id
                if finished.stop_token_id in seq.params.stop_token_ids:
                    seq.stop_reason = finished.stop_token_id

    def _close_finished(self, step: StepOutputs) -> None:
        with_tokens = set(step.seq_ids)
        for finished in step.finished:
            seq = self.sequences.get(finished.seq_id)
            if seq is None:
                continue
            if finished.seq_id not in with_tokens:
                seq.received_ns = seq.finish_ns
                self._call_back(seq, ())
            self._close(seq)
