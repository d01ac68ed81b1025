"""One rank's end of a data path in a process of its own, told what to do in JSON lines: `KIND CHUNK_BYTES`.

Polls all the time, except while it is stopped. Answers every line with one.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import numpy as np

from atom.engine.transfer.choose_path import open_data_path
from atom.engine.transfer.data_path import Handle, Limits
from atom.engine.transfer.outcome import Round
from atom.engine.transfer.pool_layout import Piece, PoolLayout

NUM_BLOCKS, NUM_LAYERS, HEAD_BYTES = 16, 4, 4096


def layout(first_layer: int, num_layers: int, first_head: int, num_heads: int) -> PoolLayout:
    pieces = []
    for index in range(2 * num_layers):
        offset = index * NUM_BLOCKS * num_heads * HEAD_BYTES
        pieces.append(Piece(first_layer + index // 2, "kv"[index % 2], offset, first_head, num_heads, HEAD_BYTES))
    return PoolLayout(NUM_BLOCKS, "test", pieces)


def pattern(salt: int, block: int, piece: Piece) -> np.ndarray:
    """What every byte of a block's piece is: of its layer, kind, head and block, and of the writer's salt."""
    heads = np.arange(piece.first_head, piece.first_head + piece.num_heads)[:, None]
    bytes_ = np.arange(HEAD_BYTES)[None, :]
    mixed = heads * 7919 + bytes_ * 31 + block * 101 + piece.layer * 1009 + ord(piece.kind) * 13 + salt * 37
    return (mixed % 253 + 1).astype(np.uint8).reshape(-1)


class Peer:
    def __init__(self, kind: str, chunk_bytes: int, part: list[int]) -> None:
        self.layout = layout(*part)
        self.path, self.said = open_data_path(kind, self.layout, Limits(chunk_bytes=chunk_bytes, lost_grace_s=0.5))
        self.bytes = np.frombuffer(self.path.memory, np.uint8)
        self.handles: dict[str, Handle] = {}

    def hello(self) -> dict[str, Any]:
        return {
            "name": self.path.name,
            "description": self.path.description.hex(),
            "pid": os.getpid(),
            "said": self.said,
            "kind": self.path.kind,
        }

    def fill(self, salt: int) -> None:
        for piece in self.layout.pieces:
            for block in range(NUM_BLOCKS):
                self.part(piece, block)[:] = pattern(salt, block, piece)

    def part(self, piece: Piece, block: int) -> np.ndarray:
        return self.bytes[piece.offset + block * piece.block_bytes :][: piece.block_bytes]

    def holds(self, block: int, salt: int, source: int) -> bool:
        """Whether every byte of the block is that of the writer's block `source`."""
        return all((self.part(piece, block) == pattern(salt, source, piece)).all() for piece in self.layout.pieces)

    def is_zero(self, block: int) -> bool:
        return not any(self.part(piece, block).any() for piece in self.layout.pieces)

    def started(self, block: int) -> bool:
        return not self.is_zero(block)

    def zero(self) -> None:
        self.bytes[:] = 0

    def expect(self, key: str, round_: list[int], blocks: list[int], sources: list[str], deadline_s: float) -> None:
        self.handles[key] = self.path.expect(Round(*round_), blocks, sources, deadline_s=deadline_s)

    def push(
        self, key: str, round_: list[int], source: list[int], remote: str, destination: list[int], deadline_s: float
    ) -> None:
        self.handles[key] = self.path.push(
            Round(*round_), source, bytes.fromhex(remote), destination, deadline_s=deadline_s
        )

    def state(self, key: str) -> dict[str, Any]:
        handle = self.handles[key]
        outcome = handle.state.outcome
        return {
            "progress": handle.state.progress.value,
            "reason": handle.state.reason,
            "outcome": outcome.name if outcome is not None else None,
            "quiescent": handle.quiescent,
        }

    def cancel(self, key: str) -> bool:
        return self.handles[key].cancel()

    def cpu_s(self) -> float:
        return time.process_time()

    def counters(self) -> dict[str, int]:
        counters = self.path.counters
        return {name: getattr(counters, name) for name in ("completed", "stale_notices", "lost_peers", "bad_messages")}

    def close(self) -> bool:
        return self.path.close(10.0)


def main() -> None:
    kind, chunk_bytes, part = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    answers = os.fdopen(int(sys.argv[4]), "w", buffering=1)  # libraries write to standard output as they like
    peer = Peer(kind, chunk_bytes, part)
    print(json.dumps(peer.hello()), file=answers)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        peer.path.poll()
        try:
            line = lines.get(timeout=0.0005)
        except queue.Empty:
            continue
        if not line:
            return
        method, arguments = json.loads(line)
        print(json.dumps(getattr(peer, method)(*arguments)), file=answers)


if __name__ == "__main__":
    main()
