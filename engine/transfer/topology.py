"""Who reports to whom: a tree whose root is the coordinator. Flat: all ranks report to the last. Staged: the shards of
a pipeline stage report to the stage's last shard, and these to that of the last stage."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """`parents[rank]` is the rank it reports to; None for the root, of which there is one."""

    parents: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...] = field(init=False)
    root: int = field(init=False)
    _heights: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        roots = [rank for rank, parent in enumerate(self.parents) if parent is None]
        if len(roots) != 1:
            raise ValueError(f"a topology has one root, got {roots or 'none'}")
        children: list[list[int]] = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent is not None:
                if not 0 <= parent < len(self.parents):
                    raise ValueError(f"rank {rank} reports to rank {parent}, which is not there")
                children[parent].append(rank)
        object.__setattr__(self, "children", tuple(map(tuple, children)))
        object.__setattr__(self, "root", roots[0])
        downward = [roots[0]]
        for rank in downward:  # which it extends, so that all above a rank come before it
            downward += children[rank]
        if len(downward) != len(self.parents):
            raise ValueError("a topology is one tree: some ranks do not reach the root")
        heights = [0] * len(self.parents)
        for rank in reversed(downward):
            heights[rank] = max((1 + heights[child] for child in children[rank]), default=0)
        object.__setattr__(self, "_heights", tuple(heights))

    @classmethod
    def flat(cls, size: int) -> Topology:
        """The last rank is the coordinator: in a pipeline it is the last to finish, so no decision waits for a further
        hop."""
        return cls((*(size - 1,) * (size - 1), None))

    @classmethod
    def staged(cls, stages: int, shards: int) -> Topology:
        """Rank `stage · shards + shard`. Shards → stage vote → pipeline commit → fan-out."""
        if stages < 1 or shards < 1:
            raise ValueError(f"a topology has stages and shards, got {stages} and {shards}")
        leaders = [stage * shards + shards - 1 for stage in range(stages)]
        return cls(
            tuple(
                (None if rank == leaders[-1] else leaders[-1]) if rank in leaders else leaders[rank // shards]
                for rank in range(stages * shards)
            )
        )

    @property
    def size(self) -> int:
        return len(self.parents)

    def height(self, rank: int) -> int:
        """Hops to the deepest rank below; 0 for one that nobody reports to."""
        return self._heights[rank]
