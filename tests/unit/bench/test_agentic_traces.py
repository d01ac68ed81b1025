"""Weka traces: read as they are, refused where they are none, and generated ones with what they were to be like."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.agentic import weka
from atom.bench.agentic.generate import GenerateConfig, generate_traces, statistics, write_traces
from atom.bench.agentic.model import Damage, Session
from atom.bench.agentic.theory import hit_rate, session_hits
from atom.bench.agentic.timing import timeline
from atom.bench.agentic.weka import load_traces, parse_trace
from atom.recipes.errors import UsageError


def request(t: float, took: float = 1.0, ids: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    base = {
        "t": t,
        "type": "n",
        "model": "m",
        "in": max(100, 64 * len(ids or [])),
        "out": 5,
        "hash_ids": ids or [],
        "api_time": took,
    }
    return {**base, **fields}


def subagent(t: float, requests: list[dict[str, Any]], name: str = "a1", **fields: Any) -> dict[str, Any]:
    base = {"t": t, "type": "subagent", "agent_id": name, "subagent_type": "Explore", "status": "completed"}
    return {**base, "models": ["m"], "requests": requests, **fields}


def trace(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    base = {"id": "t", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests)}
    return {**base, **fields}


def parsed(*requests: dict[str, Any], **fields: Any) -> Session:
    session = parse_trace(trace(*requests, **fields), "here")
    assert session is not None
    return session


def same(a: Session, b: Session) -> bool:
    return pickle.dumps(a) == pickle.dumps(b)


def test_a_trace_becomes_a_tree_of_agents() -> None:
    session = parsed(
        request(0, 2, [1, 2], out=0),
        subagent(2.5, [request(3, 1, [9]), request(4.5, 1, [9, 10])], system_tokens=10, duration_ms=3500),
        request(7, 1, [1, 2, 3]),
        request(9, None, [1, 4]),  # no api_time
        tool_tokens=30,
        system_tokens=40,
    )
    main, sub = session.agents
    assert (main.name, main.depth, main.parent, main.system_len) == ("main", 0, None, 70)
    assert (sub.name, sub.depth, sub.parent, sub.system_len) == ("a1", 1, 0, 10)
    assert [turn.output_len for turn in main.turns] == [1, 5, 5], "an answer has at least a token"
    assert [turn.kept_blocks for turn in main.turns] == [0, 2, 1]
    assert [session.blocks(0, k).tolist() for k in range(3)] == [[1, 2], [1, 2, 3], [1, 4]]
    assert session.blocks(1, 1).tolist() == [9, 10]
    assert (main.turns[0].spawns, main.turns[1].joins, main.turns[2].duration_s) == ((1,), (1,), 0)
    assert (session.num_turns, session.max_total_len) == (5, 197)
    assert timeline(session, None).pause_s == ((0, 1.5, 1), (1, 0.5))


@pytest.mark.parametrize(
    ("fields", "joined"),
    [
        ({"duration_ms": 4000}, 1),
        ({"duration_ms": 4001}, 2),
        ({"duration_ms": 9000}, None),
        ({"duration_ms": None}, 1),
        ({"duration_ms": float("nan")}, 1),
        ({"duration_ms": -5}, 1),
    ],
)
def test_a_sub_agent_is_joined_by_the_first_turn_after_its_end(fields: dict[str, Any], joined: int | None) -> None:
    session = parsed(request(0), subagent(1, [request(2)], **fields), request(5), request(9.5))
    assert [turn.joins for turn in session.agents[0].turns] == [(1,) if k == joined else () for k in range(3)]


def test_older_sub_agents_count_their_times_from_their_own_start() -> None:
    session = parsed(request(0), subagent(10, [request(0.5), request(2)]), request(20))
    assert [turn.start_s for turn in session.agents[1].turns] == [10.5, 12]


def test_sub_agents_before_the_first_request_and_without_one_are_left_out() -> None:
    session = parsed(
        subagent(0, [request(0)]), request(1), subagent(2, [], "a2"), subagent(2, [request(3)], "a3"), request(9)
    )
    assert [agent.name for agent in session.agents] == ["main", "a3"]
    assert parse_trace(trace(subagent(0, [request(0)])), "here") is None


def test_sub_agents_of_sub_agents() -> None:
    inner = subagent(3, [request(4)], "deep")
    session = parsed(request(0), subagent(1, [request(2), inner, request(6)]), request(9))
    assert [(agent.name, agent.depth, agent.parent) for agent in session.agents] == [
        ("main", 0, None),
        ("a1", 1, 0),
        ("a1.deep", 2, 1),
    ]
    assert session.agents[1].turns[1].joins == (2,)


def test_hash_ids_of_global_scope_are_shared_between_sessions() -> None:
    assert parsed(request(0)).scope == "t"
    assert parsed(request(0), hash_id_scope="global").scope == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": 5}, "here: id must be a string of 1 to 256 printable characters, got 5"),
        ({"id": "a\nb"}, "id must be"),
        ({"block_size": 0}, "block_size must be a whole number from 1 to 65,536, got 0"),
        ({"hash_id_scope": "mine"}, "hash_id_scope must be 'local' or 'global', got 'mine'"),
        ({"requests": 5}, "requests must be a list of at most 20,000, got 5"),
        ({"requests": [5]}, "here: requests[0]: must be a JSON object, got 5"),
        ({"requests": [{"type": "x"}]}, "requests[0]: type must be 'n', 's' or 'subagent', got 'x'"),
        ({"requests": [request(float("nan"))]}, "requests[0]: t must be a number of seconds, got nan"),
        ({"requests": [request(0, **{"in": -1})]}, "requests[0]: in must be a whole number from 0 to"),
        ({"requests": [request(0, out=1.5)]}, "requests[0]: out must be a whole number from 0 to"),
        ({"requests": [request(0, hash_ids=[1, "2"])]}, "requests[0]: hash_ids must be a list of whole numbers"),
        ({"requests": [request(0, hash_ids=[True])]}, "requests[0]: hash_ids must be a list of whole numbers"),
        ({"requests": [request(0, hash_ids=[1 << 70])]}, "requests[0]: hash_ids must be a list of whole numbers"),
        ({"requests": [request(0), subagent(1, [{"type": "n"}])]}, "here: requests[1]: requests[0]: t must be"),
        (
            {"requests": [request(0), subagent(1, [request(1)]), subagent(2, [request(2)])]},
            "requests[2]: agent_id must be another one for each sub-agent, got 'a1'",
        ),
    ],
)
def test_an_error_names_the_file_and_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_trace({**trace(request(0)), **change}, "here")
    assert message in str(error.value)


def test_nesting_and_numbers_of_requests_are_bounded() -> None:
    deep = request(0)
    for _ in range(20):
        deep = subagent(1, [request(0), deep], "x")
    with pytest.raises(UsageError, match="nested deeper than 8"):
        parse_trace(trace(request(0), deep), "here")
    many = [request(0)] * 12_000
    with pytest.raises(UsageError, match="more than 20,000 requests in one session"):
        parse_trace(trace(*many, subagent(1, many)), "here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
FIELDS = ["id", "block_size", "hash_id_scope", "requests", "t", "type", "in", "out", "hash_ids", "api_time", "agent_id"]


@given(st.data())
def test_whatever_a_file_holds_it_is_read_or_refused(data: st.DataObject) -> None:
    blob: Any = trace(request(0, 1, [1]), subagent(1, [request(2)], duration_ms=5), request(3, 1, [1, 2]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from([blob, *blob.get("requests", [])])) if isinstance(blob, dict) else None
        if isinstance(at, dict):
            at[data.draw(st.sampled_from([*FIELDS, "duration_ms", "tool_tokens"]))] = data.draw(JSON)
            if not isinstance(blob.get("requests"), list):
                break
    session, refused = None, "here: "
    try:
        session = parse_trace(copy.deepcopy(blob), "here")
    except UsageError as error:
        refused = str(error)
    assert refused.startswith("here: ")
    if session is not None:
        timeline(session, 1.0)
        hit_rate(session)


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    long = trace(request(0, **{"in": 500}), id="long")
    orphan = trace(subagent(0, [request(0)]), request(1), id="orphan")
    empty = trace(subagent(0, [request(0)]), id="empty")
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, (long, orphan, empty))))
    traces = load_traces(tmp_path, max_context_length=200)
    assert [(session.name, session.orphans) for session in traces.sessions] == [("orphan", 1)]
    assert traces.left_out == {"a prompt and answer beyond 200 tokens": 1, "no request of the main agent": 1}


def test_files_together_have_a_bound_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [json.dumps(trace(request(0), id=f"s{i}")) for i in range(3)]
    (tmp_path / "1.json").write_text(text[0])
    (tmp_path / "2.jsonl").write_text("\n".join(text[1:]))
    monkeypatch.setattr(weka, "MAX_TOTAL_BYTES", sum(map(len, text)))
    with pytest.raises(UsageError, match=r"more than 0 MiB in all: --num-dataset-entries takes the first"):
        load_traces(tmp_path)
    assert len(load_traces(tmp_path, max_sessions=2).sessions) == 2
    monkeypatch.setattr(weka, "MAX_SESSION_BYTES", len(text[1]))
    with pytest.raises(UsageError, match=r"2\.jsonl, line 1: longer than"):
        load_traces(tmp_path)
    monkeypatch.setattr(weka, "MAX_SESSION_BYTES", len(text[0]) - 1)
    with pytest.raises(UsageError, match=r"1\.json: longer than"):
        load_traces(tmp_path)
    (tmp_path / "0.json").touch()
    with pytest.raises(UsageError, match=r"0\.json: no JSON"):
        load_traces(tmp_path)


def test_files_lines_and_directories(tmp_path: Path) -> None:
    for number in (2, 1):
        (tmp_path / f"{number}.json").write_text(json.dumps(trace(request(0, **{"in": number * 100}), id=f"s{number}")))
    lines = [json.dumps(trace(request(0), id=f"line{i}")) for i in range(2)]
    (tmp_path / "3.jsonl").write_text("\n".join([lines[0], "", lines[1]]))
    (tmp_path / "README.md").write_text("not read")
    assert [session.name for session in load_traces(tmp_path).sessions] == ["s1", "s2", "line0", "line1"]
    assert [session.name for session in load_traces(tmp_path / "2.json").sessions] == ["s2"]
    assert [session.name for session in load_traces(tmp_path, max_sessions=2).sessions] == ["s1", "s2"]
    assert [session.name for session in load_traces(tmp_path, max_context_length=150).sessions] == [
        "s1",
        "line0",
        "line1",
    ]
    with pytest.raises(UsageError, match="none of its 4 sessions fits in 50 tokens"):
        load_traces(tmp_path, max_context_length=50)
    (tmp_path / "4.json").write_text(json.dumps(trace(request(0), id="line1")))
    with pytest.raises(UsageError, match=r"4\.json: id 'line1' is also that of .*3\.jsonl, line 3"):
        load_traces(tmp_path)
    (tmp_path / "4.json").write_text("{")
    with pytest.raises(UsageError, match=r"4\.json: no JSON"):
        load_traces(tmp_path)
    with pytest.raises(UsageError, match="no such file or directory"):
        load_traces(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no \.json or \.jsonl file"):
        load_traces(tmp_path / "empty")


@pytest.mark.parametrize("share", [0.85, 0.96])
def test_generated_sessions_have_the_stated_lengths_and_shared_share(share: float) -> None:
    config = GenerateConfig(num_sessions=80, input_len=20_000, output_len=100, shared_prefix=share)
    found = statistics(generate_traces(config, 5))
    assert found["shared_prefix"] == pytest.approx(share, abs=0.01)
    assert found["input_len_mean"] == pytest.approx(20_000, rel=0.1)
    assert found["output_len_median"] == pytest.approx(100, rel=0.1)
    assert found["turns_max"] > 5 * found["turns_median"], "a long tail"
    assert found["agents"] > 80 + 20


def test_generated_sessions_have_the_stated_number_of_turns_and_stay_below_a_context() -> None:
    config = GenerateConfig(num_sessions=40, turns=10, input_len=2000, output_len=20, max_context_length=4000)
    sessions = generate_traces(config, 0)
    assert max(session.max_total_len for session in sessions) <= 4000
    free = GenerateConfig(num_sessions=40, turns=10, input_len=2000, output_len=20)
    assert statistics(generate_traces(free, 0))["turns_median"] == pytest.approx(10, abs=1)


def test_generated_files_are_read_back_as_they_were_and_each_depends_on_its_number_alone(tmp_path: Path) -> None:
    config = GenerateConfig(num_sessions=4, turns=8, input_len=3000, output_len=30, subagents=0.3)
    sessions = generate_traces(config, 1)
    assert len(write_traces(config, 1, tmp_path)) == 4
    assert all(map(same, load_traces(tmp_path).sessions, sessions))
    fewer = generate_traces(GenerateConfig(num_sessions=2, turns=8, input_len=3000, output_len=30, subagents=0.3), 1)
    assert all(map(same, fewer, sessions))
    assert not same(generate_traces(config, 2)[0], sessions[0])
    joins = [bool(turn.joins) for session in sessions for turn in session.agents[0].turns]
    assert any(joins)
    for session in sessions:
        for a, agent in enumerate(session.agents):
            lengths = np.array([turn.input_len for turn in agent.turns])
            outputs = np.array([turn.output_len for turn in agent.turns])
            assert (np.diff(lengths) >= outputs[:-1]).all(), "a history holds the answers"
            assert all(len(session.blocks(a, k)) == length // 64 for k, length in enumerate(lengths.tolist()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_sessions": 0}, "--generate-sessions must be at least 1, got 0"),
        ({"turns": 1}, "--generate-turns must be from 2 to 4096, got 1"),
        ({"shared_prefix": 1.0}, "--generate-shared-prefix is a share between 0 and 1, got 1"),
        ({"subagents": 2.0}, "--generate-subagents is a share from 0 to 1, got 2"),
        ({"turns": 5, "shared_prefix": 0.9}, "give one"),
        ({"turns": 30, "input_len": 1000}, "--generate-input-len 1,000 is too short for a median of 30 turns"),
        ({"shared_prefix": 0.2}, "--generate-shared-prefix 0.2 cannot be had"),
    ],
)
def test_what_cannot_be_generated_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        GenerateConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("fields", [{"turns": 30}, {}, {"shared_prefix": 0.9}])
def test_a_length_that_would_do_does(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="or fewer --generate-turns, or a smaller --generate-output-len") as error:
        GenerateConfig(input_len=100, **fields)
    said = re.search(r"tokens: ([\d,]+) would do", str(error.value))
    assert said is not None
    GenerateConfig(input_len=int(said[1].replace(",", "")), **fields)


def test_turns_that_cannot_be_are_counted_and_do_not_count_in_theory() -> None:
    """57 blocks for 256 tokens: an unlimited cache would have 4 of them at most."""
    session = parsed(
        request(0, 1, list(range(4)), **{"in": 256}),
        request(5, 1, list(range(57)), **{"in": 256}),
        request(3, 0.5, list(range(5)), **{"in": 300}),
        request(10, 1, [], **{"in": 320}),
        request(20, 1, [], **{"in": 63}),
    )
    assert session.damage == {Damage.TOO_MANY_BLOCKS: 1, Damage.BACK_IN_TIME: 1, Damage.NO_BLOCKS: 1}
    assert sum(hits.total for agent in session_hits(session) for hits in agent) == 4 + 4 + 5
    assert parsed(request(0, 1, [1]), request(2, 1, [1, 2], **{"in": 66})).damage == {}
