"""What is sent: the harness's prompts, the same for every worker."""

from __future__ import annotations

import json
import pickle
import random
import re

import pytest

from atom.bench.gsm8k.extract import STRICT, extracted, is_hit
from atom.bench.gsm8k.fewshot import BUILT_IN, FewShots
from atom.bench.gsm8k.generate import generate_problems
from atom.bench.gsm8k.load import WordProblems
from atom.bench.load import Api
from atom.recipes.errors import UsageError


def source(*, api: Api = Api.COMPLETIONS, shots: int = 2, sampler: str = "default") -> WordProblems:
    problems = generate_problems(6, 0)
    fewshots = FewShots(pool=BUILT_IN, count=shots, questions=len(problems), sampler=sampler)
    return WordProblems(problems=problems, fewshots=fewshots, api=api, model="m")


def test_the_prompt_has_drawn_examples_and_then_the_question() -> None:
    load, rng = source(), random.Random(1234)
    for index in range(len(load)):
        # The harness draws from its list of examples, question after question, from one generator.
        one, two = rng.sample(list(BUILT_IN.problems), 2)
        body = json.loads(load.request(index).body)
        question = load.problems.problems[index].question
        assert body["prompt"] == (
            f"Question: {one.question}\nAnswer: {one.answer}\n\n"
            f"Question: {two.question}\nAnswer: {two.answer}\n\n"
            f"Question: {question}\nAnswer:"
        )
        assert body["stop"] == ["Question:", "</s>", "<|im_end|>"]
        assert (body["temperature"], body["max_tokens"], body["stream"]) == (0.0, 256, True)


def test_chat_has_one_turn_for_each_example() -> None:
    messages = json.loads(source(api=Api.CHAT, sampler="first_n").request(3).body)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[1]["content"] == BUILT_IN.problems[0].answer
    assert messages[-1]["content"].endswith("\nAnswer:")


def test_a_request_depends_on_its_number_alone() -> None:
    load = source()
    copy = pickle.loads(pickle.dumps(load))  # noqa: S301 (our own)
    assert [copy.request(i) for i in (5, 1, 3)] == [load.request(i) for i in (5, 1, 3)]


def test_the_record_gets_what_a_score_needs() -> None:
    load = source()
    assert load.request(2).tags == {
        "question": load.problems.problems[2].key,
        "gold": load.problems.problems[2].gold,
    }


def test_warmups_are_other_questions() -> None:
    load = source()
    asked = {json.loads(load.request(i).body)["prompt"] for i in range(len(load))}
    assert json.loads(load.warmup(0).body)["prompt"] not in asked
    assert load.warmup(0).tags is None


def test_no_examples_at_all() -> None:
    body = json.loads(source(shots=0).request(0).body)
    assert body["prompt"].startswith("Question: ")
    assert body["prompt"].count("Question: ") == 1


def test_more_examples_than_there_are() -> None:
    with pytest.raises(UsageError, match=r"--num-fewshot 9: built-in examples .* has 8; name a file"):
        source(shots=9)
    with pytest.raises(UsageError, match="--fewshot-sampler must be default or first_n"):
        source(sampler="best")


def test_built_in_examples_are_right() -> None:
    for example in BUILT_IN.problems:
        for expression, value in re.findall(r"<<([-+*/\d]+)=(\d+)>>", example.answer):
            assert eval(expression) == int(value)  # noqa: S307 (digits and operators alone)
        assert is_hit(extracted(example.answer, STRICT), example.gold)
    assert len({example.key for example in BUILT_IN.problems}) == len(BUILT_IN)
