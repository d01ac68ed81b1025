"""The ranks of one `mpiexec` or `srun` job: whether this process is one of several, and messages between them.

Every rank runs the same command line. Rank 0 leads (`bench/rank_leader.py`): it has the run directory, the server and
the output; the others send their share of its loads (`bench/rank_follower.py`) and print nothing. Only this file knows
mpi4py. Nobody ever blocks in MPI, whose implementations wait by spinning: messages are looked for, and slept between.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from atom.bench.worker_messages import failure
from atom.recipes.errors import RunError, UsageError

__all__ = ["MAX_PAYLOAD", "Launch", "Link", "Message", "Ranks", "current", "join", "launched"]

MAX_PAYLOAD: Final = 1 << 20
"""Bytes of a file that one message carries."""
_MAX_HEADER: Final = 1 << 16
_POLL_S: Final = 0.01
_FAREWELL_S: Final = 60.0
"""How long the ranks wait for each other at the end of the command."""
_TAG: Final = 0x41
_LAUNCHER_VARIABLE: Final = re.compile(
    r"(PMI2?|PMIX|OMPI_COMM_WORLD|OMPI_UNIVERSE|PRTE|HYDI)_.*|MPI_LOCALN?RANK(ID|S)|MPIR_CVAR_.*_FD"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher said in the environment."""

    rank: int
    size: int


def launched(environ: Mapping[str, str]) -> Launch | None:
    """This process's place among several that one launcher started; None if it stands alone.

    Inside a batch job Slurm's variables describe the job's tasks whether or not `srun` started this process; only a
    step that has several tasks of its own did.
    """
    pairs = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
    if environ.get("SLURM_STEP_ID", "").isdecimal():
        pairs += [("PMIX_RANK", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    for rank_name, size_name in pairs:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return Launch(int(rank), int(size)) if int(size) > 1 else None
    return None


class Link(Protocol):
    """Ordered messages between ranks, none of whose calls ever waits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, peer: int, data: bytes) -> None: ...

    def poll(self) -> tuple[int, bytes] | None:
        """The next message and who sent it."""
        ...

    def close(self) -> None:
        """When every rank has called it."""
        ...

    def abort(self, status: int) -> None:
        """End the whole job at once."""
        ...


class MpiLink:
    """Over a communicator of its own. MPI is initialised by making one."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm: Any = MPI.COMM_WORLD.Dup()
        self._status: Any = MPI.Status()
        self._sending: list[tuple[Any, bytes]] = []
        """Buffers have to stay until they have been taken."""
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()

    def send(self, peer: int, data: bytes) -> None:
        self._sending = [(request, buffer) for request, buffer in self._sending if not request.Test()]
        self._sending.append((self._comm.Isend([data, self._mpi.BYTE], dest=peer, tag=_TAG), data))

    def poll(self) -> tuple[int, bytes] | None:
        if not self._comm.Iprobe(source=self._mpi.ANY_SOURCE, tag=_TAG, status=self._status):
            return None
        peer, size = self._status.Get_source(), self._status.Get_count(self._mpi.BYTE)
        buffer = bytearray(size)
        self._comm.Recv([buffer, self._mpi.BYTE], source=peer, tag=_TAG)
        return peer, bytes(buffer)

    def close(self) -> None:
        self._mpi.Request.Waitall([request for request, _ in self._sending])
        self._comm.Free()
        self._mpi.Finalize()

    def abort(self, status: int) -> None:
        self._mpi.COMM_WORLD.Abort(status)


@dataclass(frozen=True, slots=True)
class Message:
    """`fields` always has `kind`; `payload` are the bytes of a file."""

    peer: int
    fields: Mapping[str, Any]
    payload: bytes = b""

    @property
    def kind(self) -> str:
        return str(self.fields["kind"])


class Ranks:
    """This process among the ranks of its job."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.size = link.rank, link.size
        self.peers: list[int] = [peer for peer in range(link.size) if peer != link.rank]
        self.end_status: int | None = None
        """Of a follower: the exit status that rank 0 ended the command with."""

    def tell(self, peer: int, fields: Mapping[str, Any], payload: bytes = b"") -> None:
        header = json.dumps(fields, separators=(",", ":")).encode()
        assert len(header) <= _MAX_HEADER, f"a message of {len(header)} bytes"
        assert len(payload) <= MAX_PAYLOAD
        self._link.send(peer, header + b"\n" + payload)

    def tell_all(self, fields: Mapping[str, Any]) -> None:
        for peer in self.peers:
            self.tell(peer, fields)

    def poll(self) -> Message | None:
        """The next message; never waits. RunError for what is none: the ranks do not run the same version."""
        taken = self._link.poll()
        if taken is None:
            return None
        peer, data = taken
        header, _, payload = data.partition(b"\n")
        try:
            fields = json.loads(header)
            if not isinstance(fields["kind"], str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise RunError(f"rank {peer} sent what is no message; do all ranks run the same version of atom?") from None
        if self.rank and fields["kind"] == "end":
            self.end_status = int(fields["status"])
        return Message(peer, fields, payload)

    def conclude(self, status: int, error: BaseException | None) -> int:
        """The command is over on this rank: agree on its exit status, which is that of rank 0, and leave MPI together.

        A follower's own error is told to rank 0, which shows it if it still matters.
        """
        try:
            if self.rank == 0:
                self._dismiss(status)
            else:
                status = self._await_end(error)
            self._link.close()
        except BaseException:
            self._link.abort(status or 1)
            raise
        return status

    def _dismiss(self, status: int) -> None:
        self.tell_all({"kind": "end", "status": status})
        staying, deadline = set(self.peers), time.monotonic() + _FAREWELL_S
        while staying:
            message = self.poll()
            if message is None:
                if time.monotonic() > deadline:
                    raise RunError(f"rank {min(staying)} does not end")
                time.sleep(_POLL_S)
            elif message.kind == "bye":
                staying.discard(message.peer)

    def _await_end(self, error: BaseException | None) -> int:
        if error is not None and self.end_status is None:
            self.tell(0, failure(error))
        while self.end_status is None:
            if self.poll() is None:
                time.sleep(_POLL_S)
        self.tell(0, {"kind": "bye"})
        return self.end_status


_current: Ranks | None = None


def current() -> Ranks | None:
    """The ranks that this process has joined; None for a process that stands alone."""
    return _current


def join() -> Ranks | None:
    """Join the other ranks, if a launcher started several. Ranks but 0 are silent from here on, and leave signals to
    rank 0. UsageError without mpi4py, or if MPI sees other ranks than the launcher started."""
    global _current
    launch = launched(os.environ)
    if launch is None:
        return None
    if launch.rank:
        _be_silent()
    try:
        link = MpiLink()
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"{launch.size} processes were started to share this load, which needs MPI: "
            f"pip install 'atom-serving[mpi]' ({str(error).partition(chr(10))[0]})"
        ) from None
    if link.size != launch.size:
        raise UsageError(
            f"the launcher started {launch.size} processes, MPI sees {link.size}: its mpiexec is another MPI's than "
            "mpi4py uses, or srun needs --mpi=pmi2 or --mpi=pmix"
        )
    for name in [name for name in os.environ if _LAUNCHER_VARIABLE.fullmatch(name)]:
        del os.environ[name]  # a server or a worker that is started from here is no rank of this job
    if link.rank:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    _current = Ranks(link)
    return _current


def _be_silent() -> None:
    """What the interpreter or a library says as it crashes goes past this, to the descriptor."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
