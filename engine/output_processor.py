"""From the tokens that a step added to a sequence to the text that its client sees: detokenization, stop strings and
the token that must not show. One `TextOutput` per sequence, used by streams and by offline generation alike.

Pure bookkeeping: what follows from a matched stop string (ending the sequence in the core) is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

from atom.engine.detokenizer import DetokenizerFactory, IncrementalDetokenizer
from atom.engine.sampling_params import SamplingParams


class StopMatcher:
    """Finds stop strings in a text that comes in pieces; the result does not depend on where it was cut.

    The match that ends first wins, of those the one that starts first. Held back is exactly the longest end of the
    text that could still become a stop string. Knuth-Morris-Pratt, so that a character costs O(1) per stop string
    whatever a client sends.
    """

    __slots__ = ("_failures", "_first", "_held", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        """Per stop string: how many of its characters the text so far ends with."""
        self._first = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take a piece, return what is certain to come before any stop string. After a match nothing may follow."""
        assert self.matched is None
        if not self._held and self._first.isdisjoint(text):
            return text
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                self.matched = stop
                self._held = ""
                return pending[: position - len(stop)]
        keep = max(self._states)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _advance(self, character: str) -> str | None:
        """The longest stop string that this character completes."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            failure = self._failures[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = failure[state - 1]
            self._states[index] = state
        return found

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def _failure_table(pattern: str) -> list[int]:
    """Per prefix the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table


class TextOutput:
    """The text of one sequence as it grows.

    After each `append`, `stop` is the stop string that the text has reached, if any, and `num_tokens` how many tokens
    count: up to and including the one that completed it.
    """

    __slots__ = ("_include_stop", "_min_tokens", "detokenizer", "matcher", "num_tokens")

    def __init__(self, factory: DetokenizerFactory, params: SamplingParams) -> None:
        self.detokenizer: IncrementalDetokenizer = factory.create(params.skip_special_tokens)
        self.matcher = StopMatcher(params.stop) if params.stop else None
        self.num_tokens = 0
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens

    @property
    def stop(self) -> str | None:
        return self.matcher.matched if self.matcher is not None else None

    def append(self, token_ids: Sequence[int], *, finished: bool = False, ends_with_stop_token: bool = False) -> str:
        """The text that may be shown after these tokens. `finished`: they are the last, so nothing is held back.

        `ends_with_stop_token`: the last one is the end-of-sequence or stop token that ended the sequence. It counts,
        but shows only with `include_stop_str_in_output`.
        """
        shown = token_ids
        if ends_with_stop_token and not self._include_stop and token_ids:
            shown = token_ids[:-1]
        if self.matcher is None:
            self.num_tokens += len(token_ids)
            text = self.detokenizer.append(shown) if shown else ""
            return text + self.detokenizer.finish() if finished else text
        text = self._append_until_stop(self.matcher, shown)
        if self.matcher.matched is not None:
            return text + self.matcher.matched if self._include_stop else text
        self.num_tokens += len(token_ids) - len(shown)
        if finished:
            text += self._flush(self.matcher)
        return text

    def _append_until_stop(self, matcher: StopMatcher, token_ids: Sequence[int]) -> str:
        """Token by token, so that it is known which one completed the stop string."""
        pieces = []
        for token in token_ids:
            self.num_tokens += 1
            piece = self.detokenizer.append((token,))
            # No stop before min_tokens: neither does text from before count towards a match.
            pieces.append(matcher.feed(piece) if self.num_tokens >= self._min_tokens else piece)
            if matcher.matched is not None:
                break
        return "".join(pieces)

    def _flush(self, matcher: StopMatcher) -> str:
        text = matcher.feed(self.detokenizer.finish())
        if matcher.matched is not None:
            return text + matcher.matched if self._include_stop else text
        return text + matcher.flush()
