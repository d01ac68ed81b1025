"""The random load: reproducible, of the lengths asked for, in range; and its arrivals."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.arrivals import Arrivals
from atom.bench.load import Api, parse_goodput
from atom.bench.random_load import DEFAULT_TOKEN_RANGE, RandomSource, token_range
from atom.bench.spool import RequestSpool
from atom.bench.words import WORDS
from atom.recipes.errors import UsageError


def source(**more: Any) -> RandomSource:
    return RandomSource(**{"num_prompts": 8, "api": Api.COMPLETIONS, "model": "m", **more})


def bodies(load: RandomSource) -> list[dict[str, Any]]:
    return [json.loads(load.request(i).body) for i in range(len(load))]


@given(st.integers(0, 2**32), st.integers(1, 60), st.floats(0, 0.99))
def test_same_seed_same_requests_in_any_order(seed: int, length: int, ratio: float) -> None:
    one, two = (
        source(seed=seed, input_len=length, range_ratio=ratio),
        source(seed=seed, input_len=length, range_ratio=ratio),
    )
    forward = [one.request(i) for i in range(8)]
    backward = [two.request(i) for i in reversed(range(8))][::-1]
    assert forward == backward


def test_other_seed_other_prompts() -> None:
    assert bodies(source(seed=1)) != bodies(source(seed=2))


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 0.99))
def test_lengths_lie_in_vllms_range(input_len: int, output_len: int, ratio: float) -> None:
    load = source(input_len=input_len, output_len=output_len, range_ratio=ratio)
    for i in range(8):
        plan = load.request(i)
        body = json.loads(plan.body)
        assert len(body["prompt"]) == plan.input_len
        assert max(1, math.floor(input_len * (1 - ratio))) <= plan.input_len <= math.ceil(input_len * (1 + ratio))
        assert body["max_tokens"] == plan.output_len
        assert max(1, math.floor(output_len * (1 - ratio))) <= plan.output_len <= math.ceil(output_len * (1 + ratio))
        assert plan.input_len + plan.output_len <= load.max_total_len


def test_ratio_zero_is_exact() -> None:
    assert {len(body["prompt"]) for body in bodies(source(input_len=17))} == {17}


@pytest.mark.parametrize("ratio", [1.0, 1.5, -0.1, math.nan])
def test_ratio_of_one_or_more_is_refused_with_an_explanation(ratio: float) -> None:
    with pytest.raises(UsageError, match=r"--random-range-ratio.*below 1.*SGLang"):
        source(range_ratio=ratio)


def test_shared_prefix_and_different_rest() -> None:
    prompts = [body["prompt"] for body in bodies(source(input_len=20, prefix_len=30))]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:]) for prompt in prompts}) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {50}


def test_warmups_are_none_of_the_measured_prompts() -> None:
    load = source()
    measured = {load.request(i).body for i in range(8)}
    assert measured.isdisjoint({load.warmup(i).body for i in range(8)})


@given(st.integers(4, 300_000))
def test_token_ids_lie_inside_the_vocabulary(vocab: int) -> None:
    low, high = token_range(vocab)
    assert 0 <= low < high <= vocab


def test_token_ids_are_drawn_from_the_range() -> None:
    tokens = [t for body in bodies(source(input_len=500)) for t in body["prompt"]]
    assert DEFAULT_TOKEN_RANGE[0] <= min(tokens) <= max(tokens) < DEFAULT_TOKEN_RANGE[1]
    tokens = [t for body in bodies(source(input_len=500, vocab_size=64)) for t in body["prompt"]]
    assert (min(tokens), max(tokens)) == (8, 59)


def test_body_of_a_completion() -> None:
    body = bodies(source(ignore_eos=True, sampling={"temperature": 0.0}, extra_body={"top_k": 5}))[0]
    assert body.pop("prompt")
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 128,
        "temperature": 0.0,
        "ignore_eos": True,
        "top_k": 5,
    }
    assert "ignore_eos" not in bodies(source())[0]


def test_body_of_a_chat() -> None:
    load = source(api=Api.CHAT, input_len=12, prefix_len=3, continuous_usage_stats=True)
    plan = load.request(0)
    body = json.loads(plan.body)
    assert plan.input_len is None
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 15
    assert set(message["content"].split()) <= set(WORDS)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("num_prompts", 0, "--num-prompts"),
        ("input_len", 0, "--random-input-len"),
        ("output_len", 0, "--random-output-len"),
        ("prefix_len", -1, "--random-prefix-len"),
        ("vocab_size", 3, "--vocab-size"),
    ],
)
def test_wrong_value_names_its_flag(field: str, value: int, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        source(**{field: value})


def test_spool_gives_back_what_it_got_also_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.bench.spool.MAX_MEMORY", 1000)
    load = source(num_prompts=20, input_len=200)
    spool = RequestSpool(load.request(i) for i in range(20))
    assert len(spool) == 20
    assert [spool[i] for i in (19, 0, 7)] == [load.request(i) for i in (19, 0, 7)]
    spool.close()


@given(st.integers(1, 400), st.floats(0.1, 1e4), st.floats(0.05, 50), st.integers(0, 99))
def test_arrivals_meet_the_rate_exactly(count: int, rate: float, burstiness: float, seed: int) -> None:
    offsets = Arrivals(request_rate=rate, burstiness=burstiness).offsets_ns(count, seed)
    assert offsets is not None
    assert len(offsets) == count
    assert np.all(np.diff(offsets) >= 0)
    assert offsets[-1] == pytest.approx(count / rate * 1e9, rel=1e-6, abs=2)
    again = Arrivals(request_rate=rate, burstiness=burstiness).offsets_ns(count, seed)
    assert np.array_equal(offsets, again)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    def variation(burstiness: float) -> float:
        offsets = Arrivals(request_rate=100, burstiness=burstiness).offsets_ns(20_000, 0)
        assert offsets is not None
        gaps = np.diff(offsets)
        return float(gaps.std() / gaps.mean())

    assert variation(1) == pytest.approx(1, abs=0.05)
    assert variation(0.25) == pytest.approx(2, abs=0.15)
    assert variation(100) == pytest.approx(0.1, abs=0.01)


def test_infinite_rate_has_no_schedule() -> None:
    assert Arrivals().offsets_ns(10, 0) is None


@pytest.mark.parametrize("items", [["ttft:200 tpot:30"], ["ttft:200", "tpot:30"], ["ttft:200,tpot:30"]])
def test_goodput_spellings(items: list[str]) -> None:
    assert parse_goodput(items) == {"ttft": 200.0, "tpot": 30.0}


@pytest.mark.parametrize("item", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:-1", "ttft:inf", ":5"])
def test_wrong_goodput_is_refused(item: str) -> None:
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput([item])
