"""What `validate` refuses before anything is sent: types and ranges, each naming its parameter."""

from __future__ import annotations

from typing import Any

import pytest

from atom.engine.errors import RequestError
from atom.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": "x"},
        {"stop": (5,)},
        {"seed": 1.5},
        {"max_tokens": 5.5},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"top_k": 1.5},
        {"ignore_eos": 1},
        {"prompt_logprobs": True},
        {"temperature": "1"},
        {"temperature": float("nan")},
        {"stop_token_ids": 5},
        {"stop_token_ids": ("a",)},
        {"logit_bias": {"five": 1.0}},
        {"n": 0},
        {"top_p": 0.0},
        {"min_tokens": 20, "max_tokens": 5},
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong).validate()
    assert caught.value.param == next(iter(wrong))


def test_the_defaults_and_the_limits_are_fine() -> None:
    SamplingParams().validate()
    SamplingParams(
        n=2, temperature=0, top_p=1.0, top_k=-1, seed=2**64 - 1, stop=("a",), logit_bias={5: -100.0}, max_tokens=None
    ).validate(vocab_size=10)
