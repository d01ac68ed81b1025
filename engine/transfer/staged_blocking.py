"""The blocking agreement of shards and stages: first the shards of a stage agree, then the stages, as the groups of a
tensor- and pipeline-parallel instance do. Two collectives at every poll, each of which all its ranks enter.
"""

from __future__ import annotations

from atom.engine.transfer.agreement import Agreement, Mode, Progress
from atom.engine.transfer.ledger import Counters
from atom.engine.transfer.outcome import Outcome, Round

__all__ = ["StagedBlockingAgreement"]


class StagedBlockingAgreement:
    """`stage`: the blocking agreement of this stage's shards; `pipeline`: that of this shard's ranks in all stages.
    Every shard of a stage hears the same from its stage, in the same order, so all pipelines decide alike."""

    mode: Mode = "blocking"

    def __init__(self, rank: int, size: int, stage: Agreement, pipeline: Agreement) -> None:
        self.rank, self.size = rank, size
        self._stage, self._pipeline = stage, pipeline
        self._voted: set[Round] = set()
        """Rounds that the stage has decided and the pipeline has not."""
        self._closing_pipeline = False

    @property
    def counters(self) -> Counters:
        """The pipeline's: its votes are the stage's decisions."""
        return self._pipeline.counters

    @property
    def open_rounds(self) -> int:
        return self._stage.open_rounds + self._pipeline.open_rounds

    @property
    def closed(self) -> bool:
        return self._pipeline.closed

    def digest(self) -> str:
        return self._pipeline.digest()

    def publish(self, round_: Round, outcome: Outcome) -> None:
        self._stage.publish(round_, outcome)

    def publish_timeout(self, round_: Round) -> bool:
        return self._stage.publish_timeout(round_)

    def poll(self) -> Progress:
        of_stage = self._stage.poll()
        for round_ in of_stage.timed_out:
            if round_ not in self._voted:
                self._pipeline.publish_timeout(round_)
        for _, round_, outcome in of_stage.commits:
            self._voted.add(round_)
            self._pipeline.publish(round_, outcome)
        if self._stage.closed and not self._closing_pipeline:
            self._closing_pipeline = True
            self._pipeline.begin_close()
        progress = self._pipeline.poll()
        self._voted.difference_update(commit.round for commit in progress.commits)
        return progress

    def begin_close(self) -> None:
        self._stage.begin_close()
