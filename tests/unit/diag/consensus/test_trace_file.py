"""Reading `rank-N.jsonl`: whole, cut off, of another form, hostile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atom.diag.consensus.model import LIFECYCLE, Call, Held, Round, Work
from atom.diag.consensus.trace_file import read_trace
from atom.engine.transfer.trace import FIELDS
from atom.recipes.errors import UsageError
from tests.unit.diag.consensus.traces import MS, Pipeline, Writer


def append(path: Path, text: str) -> Path:
    with path.open("a") as file:
        file.write(text)
    return path


def rewrite_header(path: Path, **fields: Any) -> Path:
    first, rest = path.read_text().split("\n", 1)
    header = {name: one for name, one in (json.loads(first) | fields).items() if one != "absent"}
    path.write_text(json.dumps(header) + "\n" + rest)
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    writer = Writer(1, 4, facts={"requests": 2})
    writer.emit(1, "enqueue", r=7, p=2)
    writer.emit(2, "work_start", w="forward")
    writer.emit(4, "work_end", w="forward")
    writer.emit(5, "vote", r=7, p=2, o="completed")
    writer.emit(6, "agree_enter", g="pp", k="outcome", q=0)
    writer.emit(9, "agree_exit", g="pp", k="outcome", q=0, n=1, d=1)
    writer.emit(9, "commit", r=7, p=2, q=0, o="failed")
    writer.emit(10, "held", b=12)
    writer.emit(11, "dropped", n=3)
    end = {"wall_s": 2.0, "cpu_s": 0.5, "wait_s": {"pp": 1.5}, "abandoned": 1, "pending_sends": 2, "digest": "ab"}
    return writer.write(tmp_path, {**end, "counters": {"votes": 1}, "released_before_commit": 3, "total": 2})


def test_everything_is_read(whole: Path) -> None:
    trace = read_trace(whole)
    assert (trace.rank, trace.size, trace.stage, trace.pp, trace.mode, trace.clock) == (1, 4, 1, 4, "blocking", "boot")
    assert trace.calls == [Call("pp", "shard 0", "outcome", 0, 6 * MS, 9 * MS, 1, 1)]
    assert trace.work == [Work("forward", 2 * MS, 4 * MS)]
    assert trace.held == [Held(10 * MS, 12)]
    commit = trace.requests[-1]
    assert (commit.name, commit.round, commit.outcome, commit.value) == ("commit", Round(7, 2), "failed", 0)
    assert trace.dropped == 3
    assert trace.end is not None
    assert (trace.end.wait_s, trace.end.abandoned, trace.end.pending_sends) == ({"pp": 1.5}, 1, 2)
    assert (trace.end.released_before_commit, trace.end.total, trace.end.digest) == (3, 2, "ab")
    assert trace.wall_s == 2.0
    assert trace.damaged == 0


def test_every_event_that_ranks_write_is_known() -> None:
    """The writer's table against the reader's."""
    others = {"agree_enter", "agree_exit", "work_start", "work_end", "held", "dropped"}
    assert set(FIELDS) == {*LIFECYCLE, *others}


def test_outcomes_by_the_number_on_the_wire(tmp_path: Path) -> None:
    writer = Writer(0, 1)
    writer.emit(1, "vote", r=1, p=0, o=3)
    assert read_trace(writer.write(tmp_path, None)).requests[0].outcome == "cancelled"


def test_killed_in_the_middle_of_a_line(whole: Path) -> None:
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:6]) + lines[6][:20])
    trace = read_trace(whole)
    assert trace.end is None
    assert trace.damaged == 0
    assert trace.calls == [Call("pp", "shard 0", "outcome", 0, 6 * MS, None)]


def test_lines_of_another_form_are_counted(whole: Path) -> None:
    for line in ('{"t":1}', "[]", "nonsense", '{"t":-1,"e":"enqueue","r":1}', '{"t":1,"e":["vote"]}'):
        append(whole, line + "\n")
    append(whole, '{"t":1,"e":"vote","r":1,"p":0,"o":"won"}\n{"t":2,"e":"agree_exit","g":"pp","k":"outcome","q":99}\n')
    assert read_trace(whole).damaged == 7


def test_events_of_a_later_writer_are_left_out(whole: Path) -> None:
    append(whole, '{"t":1,"e":"teleported","r":1}\n')
    assert read_trace(whole).damaged == 0


def test_events_beyond_the_bound_are_counted(whole: Path) -> None:
    trace = read_trace(whole, most_events=3)
    assert trace.unread == 5
    assert trace.end is not None
    assert trace.dropped == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schema": "something"}, "no header"),
        ({"schema_version": 2}, "newer than this atom reads"),
        ({"schema_version": "1"}, "schema_version must be a number"),
        ({"mode": "quorum"}, "mode must be one of"),
        ({"mode": "absent"}, "has no mode"),
        ({"rank": 4}, "whole number from 0 to 3"),
        ({"size": 10**9}, "whole number from 1"),
        ({"start_ns": True}, "not a whole number"),
        ({"run": "x" * 1000}, "reasonable length"),
    ],
)
def test_headers_that_are_refused(whole: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_trace(rewrite_header(whole, **fields))


def test_header_of_another_engine_needs_little(whole: Path) -> None:
    names = ("run", "arm", "stage", "shard", "pp", "tp", "host", "boot_id", "pid", "facts")
    trace = read_trace(rewrite_header(whole, **dict.fromkeys(names, "absent")))
    assert (trace.stage, trace.shard, trace.pp, trace.tp, trace.clock) == (1, 0, 4, 1, None)


def test_communicators_by_the_header(whole: Path) -> None:
    assert read_trace(rewrite_header(whole, domains={"pp": "lane 3"})).calls[0].domain == "lane 3"


def test_no_regular_file_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.jsonl")
    with pytest.raises(UsageError, match="no header"):
        read_trace(tmp_path / "rank-0.jsonl")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*FIELDS, "end"]) | st.text(max_size=3)
lines = st.fixed_dictionaries(
    {"t": json_values, "e": names},
    optional=dict.fromkeys(("r", "p", "o", "q", "b", "g", "k", "n", "d", "w", "counters", "wait_s"), json_values),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lines | json_values, max_size=6))
@example([{"t": 1, "e": "end", "wall_s": 10**400, "counters": {"votes": 10**400}}])
def test_nothing_in_a_file_breaks_the_reader(whole: Path, some: list[Any]) -> None:
    path = whole.with_name("copy.jsonl")
    path.write_text(whole.read_text() + "".join(json.dumps(one) + "\n" for one in some))
    trace = read_trace(path)
    assert trace.damaged <= len(some)
    assert all(call.exit is None or call.exit >= call.enter for call in trace.calls)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = tmp_path_factory.mktemp("cut")
    path = Pipeline([1, 2], requests=3).write(place) / "rank-1.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(len(content.partition(b"\n")[0]) + 1, len(content)))])
    assert read_trace(path).damaged == 0


@pytest.mark.parametrize("domains", [{"pp": {"a": 1}}, {"pp": None}, {"pp": 3}, {"pp": "x" * 500}, ["pp"], "pp", 1])
def test_domains_that_are_none_are_named(domains: object, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text(json.dumps({**Writer(0, 1).header(), "domains": domains}) + "\n")
    with pytest.raises(UsageError, match=r"rank-0\.jsonl: its header: domains must") as caught:
        read_trace(path)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_facts_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"deep": deep}
    facts = {"simulated": "\x1b[31mred", "scope": [{"value\x07": "\x9b2J"}], "requests": float("nan"), "deep": deep}
    path = Writer(0, 1, facts=facts).write(tmp_path, {})
    found = read_trace(path).facts
    assert found["simulated"] == "?[31mred"
    assert found["scope"] == [{"value?": "?2J"}]
    assert found["requests"] is None
    json.dumps(found, allow_nan=False)
