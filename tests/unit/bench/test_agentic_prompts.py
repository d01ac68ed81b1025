"""Prompts share what the recording's hash ids say, token by token."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from atom.bench.agentic.chat_overhead import ChatOverhead
from atom.bench.agentic.load import AgenticLoad, CacheBust
from atom.bench.agentic.model import Agent, Session, Turn
from atom.bench.agentic.prompts import MARKER_TOKENS, PromptMaker, marker, messages
from atom.bench.datasets.text import load_tokenizer, word_list
from atom.bench.load import Api
from atom.bench.words import WORDS

SIZE = 4


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Two agents whose prompts grow, are cut back, or are replaced; with blocks for a part of them, or for too much."""
    agents = []
    for a in range(2):
        turns, before = [], []
        for k in range(draw(st.integers(1, 5))):
            kept = draw(st.sampled_from([len(before), draw(st.integers(0, len(before)))]))
            new = [kept * 100 + block for block in draw(st.lists(st.integers(0, 5), max_size=5))]
            while kept < len(before) and new and new[0] == before[kept]:
                new = new[1:]
            before = before[:kept] + new
            length = max(1, len(before) * SIZE + draw(st.integers(-SIZE + 1, 2 * SIZE)))
            turns.append(Turn(length, draw(st.integers(1, 9)), kept, np.array(new, np.int64), float(k), 0.5))
        agents.append(Agent(f"a{a}", a, None, draw(st.integers(0, 10)), tuple(turns)))
    return Session("trace", SIZE, "trace", tuple(agents))


def load(session: Session, api: Api = Api.COMPLETIONS, **fields: Any) -> AgenticLoad:
    return AgenticLoad(sessions=(session,), api=api, model="m", concurrency=1, **fields)


def maker(made: AgenticLoad) -> PromptMaker:
    return PromptMaker(made, word_list(None) if made.api is Api.CHAT else None)


def prompts(of: AgenticLoad, mark: str | None = None) -> dict[tuple[int, int], list[int]]:
    make, session = maker(of), of.sessions[0]
    bodies = {(a, k): make.body(session, a, k, mark, 7) for a, k, _ in session.walk()}
    return {key: json.loads(body)["prompt"] for key, body in bodies.items()}


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(sessions())
def test_prompts_have_the_recorded_length_and_equal_blocks_are_equal_tokens(session: Session) -> None:
    made = prompts(load(session))
    tokens: dict[int, list[int]] = {}
    for a, k, turn in session.walk():
        prompt = made[a, k]
        assert len(prompt) == turn.input_len
        assert all(type(token) is int and 256 <= token < 30_000 for token in prompt)
        for i, block in enumerate(session.blocks(a, k).tolist()):
            part = prompt[i * SIZE : (i + 1) * SIZE]
            known = tokens.setdefault(block, part)
            assert common(known, part) == min(len(known), len(part))
            tokens[block] = max(known, part, key=len)
    assert len({tuple(part) for part in tokens.values() if len(part) == SIZE}) == sum(
        len(part) == SIZE for part in tokens.values()
    ), "other blocks are other tokens"


@given(sessions())
def test_a_prompt_begins_with_the_previous_one_as_far_as_the_blocks_say(session: Session) -> None:
    made = prompts(load(session))
    for a, agent in enumerate(session.agents):
        for k in range(1, len(agent.turns)):
            shared, kept = common(made[a, k - 1], made[a, k]), agent.turns[k].kept_blocks * SIZE
            shortest = min(agent.turns[k - 1].input_len, agent.turns[k].input_len)
            assert shared >= min(kept, shortest)
            assert shared - min(kept, shortest) < SIZE, "beyond that, only by a history's last, started block"


def test_a_history_that_only_grows_is_kept_to_its_last_token() -> None:
    turns = (
        Turn(10, 3, 0, np.array([1, 2]), 0, 1),
        Turn(19, 3, 2, np.array([3, 4]), 2, 1),
        Turn(25, 3, 4, np.array([5, 6]), 4, 1),
    )
    session = Session("trace", SIZE, "trace", (Agent("a", 0, None, 0, turns),))
    made = prompts(load(session))
    assert made[0, 1][:10] == made[0, 0]
    assert made[0, 2][:19] == made[0, 1]
    assert [tuple(part) for part in messages(session, 0, 2)] == [
        ("user", 0, 10),
        ("assistant", 10, 13),
        ("user", 13, 19),
        ("assistant", 19, 22),
        ("user", 22, 25),
    ], "answers are as long as recorded"


@given(sessions(), st.integers(0, 3))
def test_messages_cover_the_prompt_and_the_last_one_is_the_user_s(session: Session, seed: int) -> None:
    made = load(session, Api.CHAT, seed=seed)
    make = maker(made)
    for a, k, turn in session.walk():
        parts = messages(session, a, k)
        assert parts[0].start == 0
        assert parts[-1].end == turn.input_len
        assert all(x.end == y.start and x.start < x.end for x, y in itertools.pairwise(parts))
        assert parts[-1].role == "user"
        assert [part.role for part in parts].count("system") <= 1
        body = json.loads(make.body(session, a, k, None, 7))
        words = [message["content"].split() for message in body["messages"]]
        assert list(map(len, words)) == [part.end - part.start for part in parts]
        assert make.input_len(session, a, k, None) is None, "the template's tokens are not known"
        expected = [make.tokens(session, a, k)[part.start : part.end].tolist() for part in parts]
        lookup: dict[str, int] = {}
        for message, ids in zip(words, expected, strict=True):
            for word, token in zip(message, ids, strict=True):
                assert lookup.setdefault(word, token) == token


@given(sessions(), st.sampled_from(list(CacheBust)))
def test_a_marker_keeps_trees_apart_from_where_it_stands(session: Session, bust: CacheBust) -> None:
    made = load(session, cache_bust=bust)
    marks = [marker(made, number, session) for number in (0, 1)]
    make = maker(made)
    first, second = (prompts(made, mark) for mark in marks)
    for a, k, turn in session.walk():
        assert len(first[a, k]) == make.input_len(session, a, k, marks[0])
        if bust is CacheBust.NONE:
            assert marks == [None, None]
            assert first[a, k] == second[a, k]
        else:
            at = 0 if bust is CacheBust.SYSTEM_PREFIX else math.ceil(session.agents[a].system_len / SIZE) * SIZE
            at = min(at, turn.input_len)
            assert len(first[a, k]) == turn.input_len + MARKER_TOKENS
            assert common(first[a, k], second[a, k]) == at
            assert first[a, k][:at] + first[a, k][at + MARKER_TOKENS :] == prompts(made)[a, k]


def test_a_chat_s_marker_is_text_before_the_first_user_message_or_before_everything() -> None:
    turns = (Turn(12, 3, 0, np.array([1, 2, 3]), 0, 1),)
    session = Session("trace", SIZE, "trace", (Agent("a", 0, None, 5, turns),))
    for bust, place in ((CacheBust.FIRST_TURN_PREFIX, 1), (CacheBust.SYSTEM_PREFIX, 0)):
        made = load(session, Api.CHAT, cache_bust=bust)
        mark = marker(made, 0, session)
        assert mark is not None
        assert len(mark) == len("[rid:0123456789ab]\n\n")
        body = json.loads(maker(made).body(session, 0, 0, mark, 7))
        assert [message["content"].startswith(mark) for message in body["messages"]] == [place == 0, place == 1]


def test_seed_scope_and_nonce_make_other_prompts_and_nothing_else_does() -> None:
    turns = (Turn(10, 3, 0, np.array([1, 2]), 0, 1),)

    def session(name: str, scope: str) -> Session:
        return Session(name, SIZE, scope, (Agent("a", 0, None, 0, turns),))

    one = prompts(load(session("x", "x")))[0, 0]
    assert prompts(load(session("x", "x"), nonce="again"))[0, 0] == one
    assert prompts(load(session("x", "x"), seed=1))[0, 0] != one
    assert common(prompts(load(session("y", "y")))[0, 0], one) < SIZE
    shared = prompts(load(session("x", "")))[0, 0], prompts(load(session("y", "")))[0, 0]
    assert common(*shared) == 2 * SIZE, "blocks of one scope; the rest is each session's own"
    x = session("x", "x")
    assert marker(load(x), 0, x) != marker(load(x, nonce="again"), 0, x) != marker(load(x), 1, x)


def test_a_nonce_changes_a_chat_s_marker_and_nothing_else() -> None:
    """Markers of hexadecimal digits were of 7 to 12 tokens, and a message has as many words fewer."""
    turns = (Turn(60, 3, 0, np.array([1, 2, 3]), 0, 1),)
    session = Session("trace", SIZE, "trace", (Agent("a", 0, None, 0, turns),))

    def texts(nonce: str) -> tuple[str, str]:
        made = load(session, Api.CHAT, nonce=nonce)
        mark = marker(made, 0, session)
        assert mark is not None
        assert re.fullmatch(r"\[rid:\d{12}\]\n\n", mark)
        (message,) = json.loads(maker(made).body(session, 0, 0, mark, 7))["messages"]
        return mark, message["content"].removeprefix(mark)

    seen = [texts(str(nonce)) for nonce in range(20)]
    assert len({mark for mark, _ in seen}) == 20
    assert len({rest for _, rest in seen}) == 1


@settings(max_examples=20)
@given(sessions())
def test_a_body_has_what_a_load_asks_for(session: Session) -> None:
    made = load(session, sampling={"temperature": 0}, extra_body={"x": 1}, continuous_usage_stats=True)
    body = json.loads(maker(made).body(session, 0, 0, None, 7))
    body.pop("prompt")
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 7,
        "temperature": 0,
        "ignore_eos": True,
        "x": 1,
    }


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator([f"{word}\n {word}" for word in WORDS] * 20, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def test_a_message_has_as_many_words_fewer_as_the_template_adds(tokenizer_dir: Path) -> None:
    turns = (
        Turn(60, 20, 0, np.arange(15), 0, 1),
        Turn(90, 3, 15, np.arange(15, 22), 2, 1),  # an answer of 20 tokens, 10 of the user
        Turn(96, 9, 22, np.arange(22, 24), 2, 1),  # of 3, and 3: less than what the template adds
        Turn(140, 3, 24, np.arange(24, 35), 2, 1),
    )
    overhead = ChatOverhead(alone=9, with_system=14, pair=11)
    tokenizer = load_tokenizer(tokenizer_dir)
    for system in (0, 20):
        session = Session("trace", SIZE, "trace", (Agent("a", 0, None, system, turns),))
        made = load(session, Api.CHAT, tokenizer=tokenizer_dir, overhead=overhead)
        mark = marker(made, 0, session)
        make = PromptMaker(made, word_list(tokenizer_dir))
        before: list[str] = []
        for k, turn in enumerate(turns):
            texts = [message["content"] for message in json.loads(make.body(session, 0, k, mark, 7))["messages"]]
            assert texts[: len(before)] == before, "what was sent stays the beginning"
            before = texts
            counted = sum(tokenizer.count(text, special_tokens=False) for text in texts)
            added = (overhead.with_system if system else overhead.alone) + k * overhead.pair
            short = 5 + 6 + 6 if k == 2 else 0  # both have to have a word; the next turn's messages make up for it
            assert counted + added - turn.input_len <= short + 2, "a marker may merge with the word behind it"
            assert counted + added >= turn.input_len - 2


def test_words_that_a_tokenizer_knows_are_as_many_tokens_as_recorded(tokenizer_dir: Path) -> None:
    turns = (Turn(1000, 37, 0, np.arange(200), 0, 1), Turn(1100, 3, 200, np.arange(200, 270), 2, 1))
    session = Session("trace", SIZE, "trace", (Agent("a", 0, None, 50, turns),))
    make = PromptMaker(load(session, Api.CHAT), word_list(tokenizer_dir))
    tokenizer = load_tokenizer(tokenizer_dir)
    body = json.loads(make.body(session, 0, 1, None, 7))
    counts = [tokenizer.count(message["content"], special_tokens=False) for message in body["messages"]]
    assert counts == [part.end - part.start for part in messages(session, 0, 1)]
    assert sum(counts) == 1100
