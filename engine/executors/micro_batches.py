"""Divides steps into micro-batches, so that all stages of a pipeline have work, and puts their results together again.

A sequence stays in one group: a micro-batch then needs no token but those of its own group's micro-batch of the step
before, and while that one is in the last stage the first stage computes the other groups. Micro-batches run in the
order of their submission on every stage, so what the scheduler relies on (a block's old owner writes before its new
one) holds as it does for whole steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from atom.engine.executors.base import SchedulerOutput, StepResult
from atom.engine.messages import DeviceTimes

__all__ = ["MicroBatches", "PendingStep"]


class MicroBatches:
    """Who is in which group. `num_groups` 1: every step is one micro-batch."""

    def __init__(self, num_groups: int) -> None:
        self._group: dict[int, int] = {}
        self._sizes = [0] * num_groups

    def divide(self, output: SchedulerOutput) -> list[SchedulerOutput]:
        """At least one; each has its own sequences in their order, and the first also what the step releases."""
        for seq_id in output.released:
            group = self._group.pop(seq_id, None)
            if group is not None:
                self._sizes[group] -= 1
        if len(self._sizes) == 1:
            return [output]
        for new in output.new_sequences:
            group = min(range(len(self._sizes)), key=self._sizes.__getitem__)
            self._group[new.seq_id] = group
            self._sizes[group] += 1
        parts = [SchedulerOutput(output.step, [], [], [], []) for _ in self._sizes]
        columns = (output.seq_ids, output.num_new_tokens, output.num_computed_tokens, output.samples)
        for seq_id, new_tokens, computed, samples in zip(*columns, strict=True):
            part = parts[self._group[seq_id]]
            part.seq_ids.append(seq_id)
            part.num_new_tokens.append(new_tokens)
            part.num_computed_tokens.append(computed)
            part.samples.append(samples)
        for new in output.new_sequences:
            parts[self._group[new.seq_id]].new_sequences.append(new)
        for seq_id, blocks in output.new_block_ids.items():
            parts[self._group[seq_id]].new_block_ids[seq_id] = blocks
        kept = [part for part in parts if part.seq_ids] or parts[:1]
        kept[0].released = output.released
        return kept


@dataclass(slots=True)
class PendingStep:
    """A step until all its micro-batches have answered."""

    output: SchedulerOutput
    num_parts: int
    results: list[StepResult] = field(default_factory=list)

    def add(self, result: StepResult) -> bool:
        """Whether it was the last."""
        assert result.step == self.output.step, "results arrive in the order of submission"
        self.results.append(result)
        return len(self.results) == self.num_parts

    def merge(self, seconds: float) -> StepResult:
        """The step's result in the order of its batch."""
        if self.num_parts == 1:
            (only,) = self.results
            only.seconds = seconds
            return only
        tokens = {
            seq_id: token
            for result in self.results
            for seq_id, token in zip(result.seq_ids, result.token_ids, strict=True)
        }
        seq_ids = [seq_id for seq_id, wanted in zip(self.output.seq_ids, self.output.samples, strict=True) if wanted]
        merged = StepResult(self.output.step, seq_ids, [tokens[seq_id] for seq_id in seq_ids], seconds=seconds)
        for result in self.results:
            merged.logprobs |= result.logprobs
            merged.prompt_logprobs |= result.prompt_logprobs
        times = [one for result in self.results for one in result.device_times or ()]
        if times:
            samples = [one.sample_seconds for one in times if one.sample_seconds is not None]
            merged.device_times = [
                DeviceTimes(sum(one.forward_seconds for one in times), sum(samples) if samples else None)
            ]
        return merged
