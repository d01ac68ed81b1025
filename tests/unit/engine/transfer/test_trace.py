"""The trace that a rank writes: every event in its form, what is lost is counted, and nothing disturbs the rank."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from atom.engine.transfer.blocking import BlockingAgreement
from atom.engine.transfer.in_process import InProcessCollective, InProcessNetwork, ManualClock
from atom.engine.transfer.ledger import Counters
from atom.engine.transfer.ordered import OrderedAgreement
from atom.engine.transfer.outcome import Outcome, Round
from atom.engine.transfer.trace import FIELDS, Trace, TraceEnd, TraceHeader, TraceWriter, trace_path
from atom.engine.transfer.traced import TracedAgreement

TEXTS = {"g": "pp", "k": "outcome", "w": "forward", "o": Outcome.FAILED}


def header(rank: int = 0, **fields: Any) -> TraceHeader:
    return TraceHeader(**{"run": "r", "arm": "a", "mode": "async", "rank": rank, "size": 4, "pp": 2, "tp": 2, **fields})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorder(Trace):
    """Keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self.times: list[int] = []

    def emit_at(self, t_ns: int, event: str, *values: Any) -> None:
        assert len(values) == len(FIELDS[event])
        self.times.append(t_ns)
        self.events.append((event, values))


def test_every_event_is_a_line_with_its_fields(tmp_path: Path) -> None:
    writer = TraceWriter(trace_path(tmp_path, 3), header(3, facts={"seed": 7}))
    for number, (name, fields) in enumerate(FIELDS.items()):
        writer.emit_at(1000 + number, name, *(TEXTS.get(field, number) for field in fields))
    counters = Counters(votes=2)
    writer.close(TraceEnd(counters=counters, digest="ab", cpu_s=0.5, wall_s=2.0, wait_s={"pp": 1.5, "tp": 0.0}))
    first, *events, end = lines(tmp_path / "rank-3.jsonl")
    assert (first["schema"], first["schema_version"]) == ("atom-agreement-trace", 1)
    assert (first["rank"], first["size"], first["stage"], first["shard"]) == (3, 4, 1, 1)
    assert first["facts"] == {"seed": 7}
    for number, (event, (name, fields)) in enumerate(zip(events, FIELDS.items(), strict=True)):
        values = {field: {**TEXTS, "o": "failed"}.get(field, number) for field in fields}
        assert event == {"t": 1000 + number, "e": name, **values}
    assert (end["e"], end["counters"]["votes"], end["digest"]) == ("end", 2, "ab")
    assert end["wait_s"] == {"pp": 1.5, "tp": 0.0}


def test_what_a_full_ring_loses_is_counted_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.engine.transfer.trace._EVERY_S", 3600.0)  # nobody empties it meanwhile
    writer = TraceWriter(tmp_path / "rank-0.jsonl", header(), ring=4)
    for number in range(10):
        writer.emit("held", number)
    writer._drain()
    writer.emit("held", 10)
    for number in range(11, 20):
        writer.emit("held", number)
    writer.close()
    events = [(one["e"], one.get("b", one.get("n"))) for one in lines(tmp_path / "rank-0.jsonl")[1:]]
    kept = [
        ("held", 0),
        ("held", 1),
        ("held", 2),
        ("held", 3),
        ("dropped", 6),
        ("held", 10),
        ("held", 11),
        ("held", 12),
    ]
    assert events == [*kept, ("dropped", 7)]
    assert writer.dropped == 13
    assert sum(name == "held" for name, _ in events) + writer.dropped == 20


def test_an_event_that_does_not_fit_its_fields_is_a_dropped_one(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank-0.jsonl", header())
    writer.emit("vote", 1)
    writer.emit("no such event")
    writer.emit("held", 5)
    writer.close()
    assert [(one["e"]) for one in lines(tmp_path / "rank-0.jsonl")[1:]] == ["dropped", "dropped", "held"]
    assert writer.dropped == 2


def test_a_disk_that_is_full_disturbs_nobody(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "rank-0.jsonl", header())
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    os.dup2(os.open(full, os.O_WRONLY), writer._fd)
    writer.emit("held", 1)
    writer.emit("held", 2)
    writer.close()
    assert writer.error == "No space left on device"
    assert writer.dropped == 2
    assert len(lines(tmp_path / "rank-0.jsonl")) == 1


def test_a_file_is_written_by_one_rank(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "rank-0.jsonl", header()).close()
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path / "rank-0.jsonl", header())


def test_asynchronous_calls_that_do_nothing_are_not_written() -> None:
    network, clock = InProcessNetwork(2), ManualClock()
    trace = Recorder()
    ranks = [OrderedAgreement(transport, clock) for transport in network.transports]
    first = TracedAgreement(ranks[0], trace)
    for _ in range(3):
        first.poll()
    assert trace.events == []
    first.publish(Round(5, 1), Outcome.FAILED)
    first.publish(Round(5, 1), Outcome.FAILED)  # the same vote again
    ranks[1].publish(Round(5, 1), Outcome.COMPLETED)
    network.let_all_through()
    ranks[1].poll()
    network.let_all_through()
    first.poll()
    assert trace.events == [
        ("vote", (5, 1, Outcome.FAILED)),
        ("agree_enter", ("pp", "outcome", 3)),
        ("agree_exit", ("pp", "outcome", 3, 1, 0)),
        ("agree_enter", ("pp", "outcome", 5)),
        ("agree_exit", ("pp", "outcome", 5, 0, 1)),
        ("commit", (5, 1, 0, Outcome.FAILED)),
    ]
    assert trace.times == sorted(trace.times)
    assert first.wait_ns > 0


def test_every_blocking_call_is_written_with_what_was_said_and_got() -> None:
    collectives, clock = InProcessCollective.make(2), ManualClock()
    traces = [Recorder(), Recorder()]
    ranks = [
        TracedAgreement(BlockingAgreement(one, clock), trace, group="tp", votes=False, commits=False)
        for one, trace in zip(collectives, traces, strict=True)
    ]

    def play(rank: TracedAgreement) -> None:
        rank.publish_timeout(Round(1, 0))
        rank.publish(Round(1, 0), Outcome.COMPLETED)
        rank.poll()
        rank.poll()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for trace in traces:
        assert trace.events == [
            ("agree_enter", ("tp", "outcome", 0)),
            ("agree_exit", ("tp", "outcome", 0, 2, 1)),
            ("agree_enter", ("tp", "outcome", 1)),
            ("agree_exit", ("tp", "outcome", 1, 0, 0)),
        ]
