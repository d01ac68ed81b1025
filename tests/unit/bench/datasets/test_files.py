"""ShareGPT and custom files: chosen as documented, the same for the same seed, refused with file, line and field."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from atom.bench.datasets.bodies import RequestFields
from atom.bench.datasets.custom import CustomChoice, CustomSource, custom_source
from atom.bench.datasets.sharegpt import ShareGptChoice, ShareGptSource, sharegpt_source
from atom.bench.load import Api, RequestSource
from atom.recipes.errors import UsageError

COMPLETIONS, CHAT = RequestFields(api=Api.COMPLETIONS, model="m"), RequestFields(api=Api.CHAT, model="m")
same_folder = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each word between spaces."""
    inner = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = tmp_path_factory.mktemp("tokenizer") / "words.json"
    inner.save(str(file))
    return file


def bodies(source: RequestSource) -> list[dict[str, Any]]:
    return [json.loads(source.request(index).body) for index in range(len(source))]


# ---- ShareGPT


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def pair(prompt_words: int, answer_words: int) -> dict[str, Any]:
    return talk(("human", "p " * prompt_words), ("gpt", "a " * answer_words))


def sharegpt(folder: Path, talks: list[Any], fields: RequestFields = COMPLETIONS, **choice: Any) -> ShareGptSource:
    file = folder / "talks.json"
    file.write_text(json.dumps(talks))
    return sharegpt_source(file, ShareGptChoice(**choice), fields)


def test_first_answered_human_turn_is_the_prompt(tmp_path: Path, tokenizer: Path) -> None:
    talks = [
        talk(
            ("system", "be kind"), ("human", "one two three four"), ("gpt", "a b c d e"), ("human", "x"), ("gpt", "y")
        ),
        talk(("gpt", "before anybody asked"), ("human", "five six seven eight"), ("gpt", "f g h i")),
        talk(("human", "nobody answers"), ("human", "really nobody")),
        talk(("user", "nine ten eleven twelve"), ("assistant", "j k l m n o")),
        {"id": "no conversation"},
    ]
    source = sharegpt(tmp_path, talks, tokenizer=tokenizer, shuffle=False, oversample=False)
    assert [(body["prompt"], body["max_tokens"]) for body in bodies(source)] == [
        ("one two three four", 5),
        ("five six seven eight", 4),
        ("nine ten eleven twelve", 6),
    ]
    assert [source.request(i).input_len for i in range(3)] == [4, 4, 4]
    assert source.samples.skipped == {"no human turn that is answered": 2}


def test_limits_leave_conversations_out_as_vllm_does(tmp_path: Path, tokenizer: Path) -> None:
    talks = [pair(3, 9), pair(9, 3), pair(1025, 9), pair(1024, 1025), pair(1024, 1024), pair(4, 4)]
    source = sharegpt(tmp_path, talks, tokenizer=tokenizer, shuffle=False, oversample=False)
    assert [(p.input_len, p.output_len) for p in map(source.request, range(2))] == [(1024, 1024), (4, 4)]
    assert len(source) == 2
    assert source.samples.skipped == {
        "shorter than --sharegpt-min-len": 2,
        "prompt beyond --sharegpt-max-prompt-len": 1,
        "prompt and output beyond --sharegpt-max-total-len": 1,
    }
    fixed = sharegpt(tmp_path, talks, tokenizer=tokenizer, output_len=2, shuffle=False, oversample=False)
    assert [fixed.request(i).output_len for i in range(len(fixed))] == [2] * 4, "short answers count no more"


def test_without_a_tokenizer_lengths_are_estimates_and_said_to_be(tmp_path: Path) -> None:
    source = sharegpt(tmp_path, [talk(("human", "x" * 41), ("gpt", "y" * 80))], num_prompts=1)
    assert (source.request(0).input_len, source.request(0).output_len) == (None, 20)
    assert "estimates of 4 characters a token" in source.describe()["notes"][0]


def test_too_few_conversations_are_repeated_and_counted(tmp_path: Path) -> None:
    talks = [talk(("human", f"question {i} of several"), ("gpt", "an answer of some length")) for i in range(3)]
    source = sharegpt(tmp_path, talks, num_prompts=10)
    prompts = [body["prompt"] for body in bodies(source)]
    assert sorted(prompts[:3]) == sorted(talk["conversations"][0]["value"] for talk in talks)
    assert (len(prompts), set(prompts)) == (10, set(prompts[:3]))
    assert source.describe()["repeated"] == 7
    assert any("7 of 10 prompts are repeated" in note for note in source.describe()["notes"])
    assert len(sharegpt(tmp_path, talks, num_prompts=10, oversample=False)) == 3


def test_nothing_to_send_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none of 2 conversations can be sent \(1: no human turn.*; 1: shorter than"):
        sharegpt(tmp_path, [{"id": 3}, pair(1, 1)], shuffle=False)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, r"talks.json:1: must be a JSON object"),
        ({"conversations": "x"}, r"talks.json:1: field 'conversations' must be a list"),
        ({"conversations": [3]}, r"talks.json:1: field 'conversations' must hold objects"),
        (talk(("human", "ok"), ("gpt", 7)), r"talks.json:1: field 'value' of a turn must be a string"),  # type: ignore[arg-type]
        (talk(("human", "\ud83d"), ("gpt", "fine")), r"talks.json:1: field 'value' has half a surrogate"),
    ],
)
def test_what_is_no_sharegpt_is_refused_with_its_line(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sharegpt(tmp_path, [entry])


@same_folder
@given(st.integers(0, 2**40), st.integers(1, 30), st.booleans())
def test_the_seed_alone_decides(tmp_path: Path, seed: int, count: int, shuffle: bool) -> None:
    talks = [talk(("human", f"question {i} of several"), ("gpt", "an answer of some length")) for i in range(9)]
    one = sharegpt(tmp_path, talks, num_prompts=count, seed=seed, shuffle=shuffle)
    other = pickle.loads(pickle.dumps(one))  # noqa: S301 (as workers get it)
    assert [one.request(i) for i in range(count)] == [other.request(i) for i in reversed(range(count))][::-1]
    assert one.warmup(3) == other.warmup(3)
    assert {one.request(i).body for i in range(count)}.isdisjoint({one.warmup(i).body for i in range(count)})


# ---- custom


def custom(folder: Path, lines: list[Any], fields: RequestFields = COMPLETIONS, **choice: Any) -> CustomSource:
    file = folder / "mine.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return custom_source(file, CustomChoice(**{"shuffle": False, "num_prompts": None, **choice}), fields)


def test_text_and_ids_with_lengths_of_their_own(tmp_path: Path, tokenizer: Path) -> None:
    lines = [
        {"prompt": "one two ü", "output_tokens": 10, "category": "not sent"},
        {"prompt": [5, 6, 7, 8], "max_tokens": 11.0},
        {"prompt": "x", "max_completion_tokens": 12},
    ]
    source = custom(tmp_path, lines, tokenizer=tokenizer)
    assert [(b["prompt"], b["max_tokens"]) for b in bodies(source)] == [
        ("one two ü", 10),
        ([5, 6, 7, 8], 11),
        ("x", 12),
    ]
    assert [source.request(i).input_len for i in range(3)] == [3, 4, 1]
    assert set(bodies(source)[0]) == {"model", "stream", "stream_options", "max_tokens", "prompt"}
    assert [body["max_tokens"] for body in bodies(custom(tmp_path, lines, output_len=3))] == [3, 3, 3]
    assert custom(tmp_path, lines).request(0).input_len is None


def test_chat_sends_messages_as_they_are_and_text_as_one(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    lines = [{"messages": messages, "max_tokens": 4}, {"prompt": "hello", "max_tokens": 4}]
    sent = bodies(custom(tmp_path, lines, CHAT))
    assert sent[0]["messages"] == messages
    assert sent[1]["messages"] == [{"role": "user", "content": "hello"}]


def test_batch_lines_keep_their_body_but_for_what_the_load_sets(tmp_path: Path) -> None:
    body = {
        "model": "gpt",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
        "stream": False,
        "temperature": 0.7,
        "tools": [{"type": "function"}],
        "n": 1,
    }
    line = {"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    fields = RequestFields(api=Api.CHAT, model="m", sampling={"temperature": 0.0, "top_p": 0.5}, extra_body={"k": 1})
    (sent,) = bodies(custom(tmp_path, [line], fields))
    assert sent == {
        "model": "m",
        "messages": body["messages"],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.5,
        "tools": [{"type": "function"}],
        "k": 1,
    }


def test_times_of_the_lines_are_the_schedule(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{i}", "max_tokens": 1, "timestamp": time} for i, time in enumerate((500, 100.5, 500, 900))]
    source = custom(tmp_path, lines, shuffle=True, num_prompts=3)
    assert [body["prompt"] for body in bodies(source)] == ["p1", "p0", "p2"]
    offsets = source.offsets_ns()
    assert offsets is not None
    assert offsets.tolist() == [0, 399_500_000, 399_500_000]
    plain = custom(tmp_path, lines, use_timestamps=False, num_prompts=9)
    assert plain.offsets_ns() is None
    assert len(plain) == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"mine.jsonl:2: no JSON"),
        ({"text": "x"}, r"mine.jsonl:2: must have one of the fields 'prompt' and 'messages'"),
        ({"prompt": "x", "messages": [{"role": "user"}]}, r"mine.jsonl:2: .*not both"),
        ({"prompt": ""}, r"mine.jsonl:2: field 'prompt' must be"),
        ({"prompt": []}, r"mine.jsonl:2: field 'prompt' must be"),
        ({"prompt": ["x"]}, r"mine.jsonl:2: field 'prompt' must be"),
        ({"prompt": [1, True]}, r"mine.jsonl:2: field 'prompt' must be"),
        ({"prompt": [-1]}, r"mine.jsonl:2: field 'prompt' must be"),
        ({"prompt": "\ud800", "max_tokens": 1}, r"mine.jsonl:2: field 'prompt' has half a surrogate"),
        ({"messages": "x"}, r"mine.jsonl:2: field 'messages' must be"),
        ({"messages": [{"content": "x"}]}, r"mine.jsonl:2: field 'messages' must be"),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, r"mine.jsonl:2: .*--backend openai-chat"),
        ({"prompt": "x"}, r"mine.jsonl:2: none of the fields output_tokens.*--custom-output-len"),
        ({"prompt": "x", "max_tokens": 0}, r"mine.jsonl:2: field 'max_tokens' must be from 1"),
        ({"prompt": "x", "max_tokens": "9"}, r"mine.jsonl:2: field 'max_tokens' must be a whole number"),
        ('{"prompt": "x", "max_tokens": Infinity}', r"mine.jsonl:2: field 'max_tokens'"),
        ({"prompt": "x", "max_tokens": 1, "timestamp": "now"}, r"mine.jsonl:2: field 'timestamp'"),
        ({"prompt": "x", "max_tokens": 1, "timestamp": -1}, r"mine.jsonl:2: field 'timestamp'"),
        ({"body": 3}, r"mine.jsonl:2: field 'body'"),
        ({"body": {"prompt": "x", "n": 2, "max_tokens": 1}}, r"mine.jsonl:2: field 'n' of the body"),
        ('{"body": {"prompt": "x", "max_tokens": 1, "top_p": NaN}}', r"mine.jsonl:2: has NaN or Infinity"),
    ],
)
def test_lines_that_cannot_be_sent_are_refused_with_their_number(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        custom(tmp_path, [{"prompt": "fine", "max_tokens": 1}, line])


def test_token_ids_and_chat_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mine.jsonl:1: field 'prompt' has token ids, which need --backend openai"):
        custom(tmp_path, [{"prompt": [1, 2], "max_tokens": 1}], CHAT)


def test_a_line_without_the_time_that_the_first_one_has_is_refused(tmp_path: Path) -> None:
    lines = [{"prompt": "x", "max_tokens": 1, "timestamp": 3}, {"prompt": "x", "max_tokens": 1}]
    with pytest.raises(UsageError, match=r"mine.jsonl:2: no field 'timestamp'.*--no-use-trace-timestamps"):
        custom(tmp_path, lines)


@same_folder
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_garbage_is_a_usage_error_that_names_the_file(tmp_path: Path, lines: list[bytes]) -> None:
    file = tmp_path / "garbage"
    file.write_bytes(b"\n".join(lines))
    for read in (
        lambda: custom_source(file, CustomChoice(num_prompts=None, output_len=1), COMPLETIONS),
        lambda: sharegpt_source(file, ShareGptChoice(), COMPLETIONS),
    ):
        with pytest.raises(UsageError, match="garbage"):
            read()


@pytest.mark.parametrize(
    ("choice", "flag"), [({"num_prompts": 0}, "--num-prompts"), ({"output_len": 0}, "--custom-output-len")]
)
def test_choices_that_cannot_be_are_refused(choice: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        CustomChoice(**choice)
