"""Arrival times from the kernel: believed where they can be, and counted."""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

import pytest

from atom.bench import kernel_clock
from atom.bench.kernel_clock import ANCILLARY_BYTES, SO_TIMESTAMPNS, KernelClock, request_stamps

TIMESPEC = struct.Struct("@ll")


def ancillary(wall_ns: int) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, SO_TIMESTAMPNS, TIMESPEC.pack(wall_ns // 10**9, wall_ns % 10**9))]


def test_stamp_lies_between_sending_and_reading() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    request_stamps(client)
    clock = KernelClock()
    with listener, client, server:
        for _ in range(20):  # the kernel starts stamping a moment after it is asked to
            before = time.monotonic_ns()
            server.sendall(b"x")
            select.select([client], [], [])
            clock.check()
            _, stamp, _, _ = client.recvmsg(100, ANCILLARY_BYTES)
            at = clock.stamp(stamp, 0)
            if clock.kernel:
                assert before - clock.uncertainty_ns - 1000 <= at <= time.monotonic_ns()
                break
            time.sleep(0.05)
    assert clock.kernel + clock.read >= 1
    assert clock.counts == {"kernel": clock.kernel, "read": clock.read}


def test_late_reading_does_not_make_the_stamp_late() -> None:
    clock = KernelClock()
    wall, monotonic = time.time_ns(), time.monotonic_ns()
    time.sleep(0.02)
    clock.check()
    assert abs(clock.stamp(ancillary(wall), monotonic - 10**6) - monotonic) < 10_000_000
    assert clock.counts == {"kernel": 1, "read": 0}


@pytest.mark.parametrize(
    "data",
    [
        [],
        [(socket.SOL_SOCKET, SO_TIMESTAMPNS, b"short")],
        [(socket.SOL_SOCKET, SO_TIMESTAMPNS + 1, bytes(TIMESPEC.size))],
        ancillary(0),  # before the request was sent
        ancillary(time.time_ns() + 10**13),  # in the future
    ],
)
def test_what_cannot_be_is_stamped_at_the_read(data: Any) -> None:
    clock = KernelClock()
    clock.check()
    before = time.monotonic_ns()
    assert before <= clock.stamp(data, before - 10**9) <= time.monotonic_ns()
    assert clock.counts == {"kernel": 0, "read": 1}


@pytest.mark.parametrize("step_ns", [10**9, -(10**9), 200_000_000])
def test_stamps_from_before_a_step_of_the_wall_clock_are_not_believed(
    step_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = KernelClock()
    floor, old = time.monotonic_ns(), time.time_ns()
    monkeypatch.setattr(kernel_clock, "time_ns", lambda: time.time_ns() + step_ns)
    clock.check()
    assert clock.steps == 1
    assert clock.stamp(ancillary(old), floor) >= floor
    assert clock.counts == {"kernel": 0, "read": 1}
    arrived = time.monotonic_ns()
    new = time.time_ns() + step_ns
    clock.check()
    assert clock.steps == 1
    assert abs(clock.stamp(ancillary(new), floor) - arrived) < 50_000_000
    assert clock.counts == {"kernel": 1, "read": 1}
