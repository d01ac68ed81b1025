"""Packets: what is packed comes back, and what no correct peer sends is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.transfer.errors import ProtocolError
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.wire import HEAD_BYTES, MAX_PACKET, Kind, Packet, pack, unpack

U64 = st.integers(0, 2**64 - 1)


@given(st.sampled_from([Kind.VOTE, Kind.COMMIT]), st.integers(0, 2**32 - 1), U64, U64, U64, st.sampled_from(Outcome))
def test_votes_and_commits_come_back(
    kind: Kind, source: int, request: int, epoch: int, sequence: int, outcome: Outcome
) -> None:
    packet = Packet(kind, source, Round(request, epoch), outcome, sequence)
    assert unpack(pack(packet)) == packet
    assert len(pack(packet)) == HEAD_BYTES


@given(st.text(max_size=2000))
def test_the_text_of_a_failure_is_bounded(text: str) -> None:
    data = pack(Packet(Kind.FAIL, 3, text=text.replace("\ud800", "")))
    assert len(data) <= MAX_PACKET
    assert text.startswith(unpack(data).text.rstrip("\ufffd"))


@given(st.binary(max_size=600))
def test_garbage_is_refused_or_read(data: bytes) -> None:
    try:
        packet = unpack(data)
    except ProtocolError:
        return
    assert (packet.outcome is not None) is (packet.kind in (Kind.VOTE, Kind.COMMIT))


GOOD = pack(Packet(Kind.VOTE, 1, Round(5, 2), Outcome.FAILED))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes"),
        (GOOD[:-1], "31 bytes"),
        (GOOD + b"x", "VOTE from rank 1 of 33 bytes"),
        (GOOD + bytes(600), "632 bytes"),
        (b"\x02" + GOOD[1:], "protocol version 2; this is 1"),
        (GOOD[:1] + b"\x63" + GOOD[2:], "unknown kind 99 from rank 1"),
        (GOOD[:2] + b"\x63" + GOOD[3:], "VOTE from rank 1 with outcome code 99"),
        (GOOD[:2] + b"\x00" + GOOD[3:], "VOTE from rank 1 with outcome code 0"),
        (struct.pack("<BBBxIQQQ", 1, Kind.CLOSE, 1, 0, 0, 0, 0), "CLOSE from rank 0 with outcome code 1"),
    ],
)
def test_what_no_correct_peer_sends_is_named(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack(data)
