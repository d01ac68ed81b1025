"""Stop strings across pieces, and what counts and shows of the tokens of a sequence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.engine.detokenizer import DetokenizerFactory
from atom.engine.loading.byte_tokenizer import EOS_ID, ByteTokenizer
from atom.engine.output_processor import StopMatcher, TextOutput
from atom.engine.sampling_params import SamplingParams

FACTORY = DetokenizerFactory(ByteTokenizer())


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: of all occurrences the one that ends first, of those the longest; the text up to its start."""
    found = [
        (start + len(stop), start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start)
    ]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_match_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for start, end in pairwise(sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})):
        shown += matcher.feed(text[start:end])
        if matcher.matched is not None:
            break
        # Minimal hold-back: exactly the longest end of the text that begins a stop string.
        held = text[len(shown) : end]
        longest = max((k for k in range(5) for s in stops if k < len(s) and text[:end].endswith(s[:k])), default=0)
        assert len(held) == longest
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == reference(text, stops)


def run(text: str, params: SamplingParams, size: int = 1) -> tuple[str, str | None, int]:
    """Feed the bytes of `text` as tokens, `size` per step."""
    output = TextOutput(FACTORY, params)
    ids = list(text.encode())
    shown = ""
    for start in range(0, len(ids), size):
        shown += output.append(ids[start : start + size], finished=start + size >= len(ids))
        if output.stop is not None:
            break
    return shown, output.stop, output.num_tokens


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_tokens_count_up_to_the_one_that_completes_the_stop_string(size: int) -> None:
    assert run("hello END world", SamplingParams(stop=("END",)), size) == ("hello ", "END", 9)
    assert run("hello END world", SamplingParams(stop=("END",), include_stop_str_in_output=True), size) == (
        "hello END",
        "END",
        9,
    )
    assert run("hello EN", SamplingParams(stop=("END",)), size) == ("hello EN", None, 8)


def test_multi_byte_stop_strings() -> None:
    assert run("ab🙂c", SamplingParams(stop=("🙂",))) == ("ab", "🙂", 6)


def test_no_stop_before_min_tokens() -> None:
    params = SamplingParams(stop=("aa",), min_tokens=4, max_tokens=100)
    assert run("aaaaaa", params) == ("aaa", "aa", 5)
    assert run("aaa", params) == ("aaa", None, 3)


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_stop_token_counts_but_does_not_show(stop: tuple[str, ...]) -> None:
    hidden = SamplingParams(stop=stop, skip_special_tokens=False)
    output = TextOutput(FACTORY, hidden)
    assert output.append([104, 105]) == "hi"
    assert output.append([EOS_ID], finished=True, ends_with_stop_token=True) == ""
    assert output.num_tokens == 3
    shown = SamplingParams(stop=stop, skip_special_tokens=False, include_stop_str_in_output=True)
    output = TextOutput(FACTORY, shown)
    assert output.append([104, EOS_ID], finished=True, ends_with_stop_token=True) == "h<|eos|>"
    assert output.num_tokens == 2


def test_what_is_held_comes_out_when_it_ends_without_tokens() -> None:
    output = TextOutput(FACTORY, SamplingParams(stop=("END",)))
    assert output.append(b"xE") == "x"
    assert output.append([0xF0]) == ""
    assert output.append((), finished=True) == "E\ufffd"
