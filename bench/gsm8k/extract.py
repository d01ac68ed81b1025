"""The number that a text gives as its answer, by the two filters of lm-evaluation-harness's task `gsm8k` (version 3),
and the comparison with the right one. The harness's behaviour is the definition, quirks included.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["FILTERS", "FLEXIBLE", "INVALID", "STRICT", "extracted", "is_hit", "normalised"]

STRICT: Final = "strict_match"
FLEXIBLE: Final = "flexible_extract"
FILTERS: Final = (FLEXIBLE, STRICT)
INVALID: Final = "[invalid]"
"""What a filter gives where it finds nothing."""

_STRICT: Final = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE: Final = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_IGNORED: Final = tuple(map(re.compile, (",", r"\$", "(?s:.*)#### ", r"\.$")))
"""Taken out one after the other before answers are compared."""


def extracted(text: str, name: str) -> str:
    """`strict_match`: the first number after `#### `. `flexible_extract`: the last number of the text."""
    found: list[str] = (_STRICT if name == STRICT else _FLEXIBLE).findall(text)
    if not found:
        return INVALID
    return found[0 if name == STRICT else -1].strip()


def normalised(answer: str) -> str:
    """Without thousands separators, dollar signs, whatever stands before `#### `, and one final period; lower case."""
    for pattern in _IGNORED:
        answer = pattern.sub("", answer)
    return answer.lower()


def is_hit(answer: str, gold: str) -> bool:
    """`answer` as extracted; `gold` as `Problem.gold` has it."""
    return normalised(answer) == gold
