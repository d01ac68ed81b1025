"""Prompts as they arrive from the API process."""

from __future__ import annotations

from array import array

import pytest

from atom.engine.errors import RequestError
from atom.engine.sampling_params import SamplingParams
from atom.engine.sequence import Sequence, Status, decode_prompt


def test_a_prompt_is_little_endian_int32() -> None:
    assert decode_prompt(b"\x01\x00\x00\x00\xff\xff\xff\x7f") == array("i", [1, 2**31 - 1])
    assert decode_prompt(b"") == array("i")


def test_half_a_token_is_refused() -> None:
    with pytest.raises(RequestError, match="6 bytes is not a whole number"):
        decode_prompt(b"\x01\x00\x00\x00\x02\x00")


def test_counts() -> None:
    seq = Sequence(1, "r", array("i", [5, 6]), SamplingParams(), 0, stop_ids=frozenset(), max_total=9)
    seq.tokens.append(7)
    assert (seq.num_prompt_tokens, seq.num_output_tokens, seq.status) == (2, 1, Status.WAITING)
    assert "prompt 2, known 3" in repr(seq)
