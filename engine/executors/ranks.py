"""What the ranks of one model exchange, over gloo on this host's loopback: tensors as bytes, never pickled objects.

Shape legend: t tokens, d hidden size, n rows, v vocabulary, w a rank's part of it. All ranks of a group call the same
operations in the same order. What a rank does with its results: `stage_runner.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from atom.engine.errors import AtomEngineError
from atom.engine.models.config import TransformerConfig
from atom.engine.models.shard import Shard

__all__ = ["LOOPBACK_VARIABLE", "PeerLostError", "Ranks"]

LOOPBACK_VARIABLE: Final = ("GLOO_SOCKET_IFNAME", "lo")
"""What a worker's environment needs before it starts: gloo listens on 127.0.0.1 alone."""
TIMEOUT: Final = timedelta(days=1)
"""A peer that ends closes its connections, which every wait notices; a slow step is no failure."""
MAX_SENDS: Final = 16

T = TypeVar("T")


class PeerLostError(AtomEngineError):
    """An exchange failed because another rank is gone."""


class Ranks:
    """This rank's connections to the others."""

    def __init__(self, shard: Shard, store_path: str) -> None:
        """Waits for all ranks. `store_path`: a file that all of them can open, empty at first."""
        self._shard = shard
        self._group: Any = None
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()
        _guard(self._connect, store_path)

    def _connect(self, store_path: str) -> None:
        shard = self._shard
        store = dist.FileStore(  # type: ignore[attr-defined]
            store_path, shard.num_ranks
        )
        dist.init_process_group("gloo", store=store, rank=shard.rank, world_size=shard.num_ranks, timeout=TIMEOUT)
        for stage in range(shard.pp_size):
            first = stage * shard.tp_size
            group = dist.new_group(list(range(first, first + shard.tp_size)), timeout=TIMEOUT)
            if stage == shard.pp_rank:
                self._group = group

    # Within a stage ----------------------------------------------------------------------------------------------

    def reduce(self, x_td: torch.Tensor) -> torch.Tensor:
        """Sum over the tensor-parallel ranks, in place where it is float32; added up in float32 in any case."""
        if self._shard.tp_size == 1:
            return x_td
        sum_td = x_td.to(torch.float32)
        _guard(dist.all_reduce, sum_td, group=self._group)
        return sum_td.to(x_td.dtype)

    def gather_logits(self, logits_nw: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
        """Logits `[n, v]` of the whole vocabulary, on every rank."""
        if self._shard.tp_size == 1:
            return logits_nw
        size, width = self._shard.tp_size, self._shard.vocabulary_width(config)
        rows = logits_nw.shape[0]
        padded_nw = logits_nw
        if logits_nw.shape[1] < width:
            padded_nw = torch.full((rows, width), -torch.inf)
            padded_nw[:, : logits_nw.shape[1]] = logits_nw
        all_rnw = torch.empty(size, rows, width)
        _guard(dist.all_gather, list(all_rnw.unbind(0)), padded_nw.contiguous(), group=self._group)
        return all_rnw.transpose(0, 1).reshape(rows, size * width)[:, : config.vocab_size].contiguous()

    def argmax(self, logits_nw: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
        """The most likely token of each row, ties to the lowest id, as int64 `[n]` on every rank. Two numbers per row
        travel instead of the vocabulary."""
        value_n, index_n = logits_nw.max(dim=-1)
        index_n = index_n + self._shard.vocabulary(config).start
        best_n2 = torch.stack((value_n.double(), index_n.double()), dim=1)  # exact: ids are below 2**53
        all_rn2 = torch.empty(self._shard.tp_size, *best_n2.shape, dtype=torch.float64)
        _guard(dist.all_gather, list(all_rn2.unbind(0)), best_n2, group=self._group)
        winner_1n = all_rn2[:, :, 0].argmax(dim=0)[None]
        return all_rn2[:, :, 1].gather(0, winner_1n)[0].long()

    # Between stages ----------------------------------------------------------------------------------------------

    def send_to_stage(self, stage: int, tensor: torch.Tensor) -> None:
        """To the rank of the same place in `stage`. Returns at once unless many sends are open."""
        work: Any = _guard(dist.isend, tensor, self._peer(stage))
        self._sends.append((work, tensor))  # gloo borrows the memory
        while len(self._sends) > MAX_SENDS:
            oldest, _ = self._sends.popleft()
            _guard(oldest.wait)

    def receive_from_stage(self, stage: int, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to fill `tensor`; calling the result waits until it is."""
        work: Any = _guard(dist.irecv, tensor, self._peer(stage))

        def wait() -> None:
            _guard(work.wait)

        return wait

    def _peer(self, stage: int) -> int:
        return stage * self._shard.tp_size + self._shard.tp_rank


def _guard(function: Callable[..., T], *args: Any, **options: Any) -> T:
    try:
        return function(*args, **options)
    except RuntimeError as error:  # what torch.distributed raises, its own classes included
        raise PeerLostError(f"the exchange with another worker failed: {error}") from error
