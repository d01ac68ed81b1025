"""A command whose load several ranks send (`mpiexec`, `srun`): what this process is among them. The ranks themselves
are `bench/mpi_ranks.py`; rank 0 runs the command as if it were alone, the others follow it from load to load."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Mapping
from typing import Any

from atom.bench.clocks import clock_identity
from atom.bench.load import LoadSpec
from atom.bench.mpi_ranks import current
from atom.bench.rank_follower import RankFollower
from atom.bench.rank_leader import RankLeader

__all__ = ["follow", "follows", "leader", "rank_count"]


def rank_count() -> int:
    ranks = current()
    return 1 if ranks is None else ranks.size


def follows() -> bool:
    """Whether this process only does as rank 0 says."""
    ranks = current()
    return ranks is not None and ranks.rank > 0


def follow(spec_of: Callable[[Mapping[str, Any]], LoadSpec]) -> int:
    """Be one of the other ranks until rank 0 ends the command; its exit status. `spec_of`: the load of what rank 0 says
    of it (`LoadRunner.spec_of`)."""
    ranks = current()
    assert ranks is not None
    return RankFollower(ranks, spec_of, identity=clock_identity(), host=socket.gethostname()).follow()


@functools.cache
def leader() -> RankLeader | None:
    """None where this process stands alone."""
    ranks = current()
    if ranks is None or ranks.rank:
        return None
    return RankLeader(ranks, identity=clock_identity(), host=socket.gethostname())
