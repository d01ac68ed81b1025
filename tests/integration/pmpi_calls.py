"""A rank that makes every kind of blocking collective, over the world and over two halves of it; run by
test_pmpi_recorder.py with the recorder preloaded. With `kill`, rank 1 is gone while the others are in a barrier."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI


def every_kind(comm: MPI.Comm) -> None:
    size = comm.Get_size()
    one, out, many = np.ones(1), np.zeros(1), np.zeros(size)
    counts, places, square = [1] * size, list(range(size)), np.ones(size)
    comm.Barrier()
    comm.Bcast(one)
    comm.Reduce(one, out)
    comm.Allreduce(one, out)
    comm.Gather(one, many)
    comm.Gatherv(one, [many, counts, places, MPI.DOUBLE])
    comm.Scatter(square, out)
    comm.Scatterv([square, counts, places, MPI.DOUBLE], out)
    comm.Allgather(one, many)
    comm.Allgatherv(one, [many, counts, places, MPI.DOUBLE])
    comm.Alltoall(square, many)
    comm.Alltoallv([square, counts, places, MPI.DOUBLE], [many, counts, places, MPI.DOUBLE])
    kinds = [MPI.DOUBLE] * size
    in_bytes = [8 * place for place in places]
    comm.Alltoallw([square, (counts, in_bytes), kinds], [many, (counts, in_bytes), kinds])
    comm.Reduce_scatter(square, out, counts)
    comm.Reduce_scatter_block(square, out)
    comm.Scan(one, out)
    comm.Exscan(one, out)


def main() -> int:
    world = MPI.COMM_WORLD
    if sys.argv[1:] == ["kill"]:
        world.Barrier()
        if world.Get_rank() == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        world.Barrier()
        return 0
    every_kind(world)
    half = world.Split(world.Get_rank() % 2)
    half.Set_name("tensor parallel")
    half.Barrier()
    copy = half.Dup()
    copy.Allreduce(np.ones(1), np.zeros(1))
    copy.Free()
    half.Barrier()
    world.Ibarrier().Wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
