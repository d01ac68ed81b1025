"""Extraction and comparison: expectations are what lm-evaluation-harness 0.4.13 gives for its task `gsm8k`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.bench.gsm8k.extract import FLEXIBLE, INVALID, STRICT, extracted, is_hit, normalised

WORKED = "so 20-2=<<20-2=18>>18.\n#### 18"

# text, right answer, flexible-extract, hit, strict-match, hit
TABLE = [
    ("#### 18", WORKED, "18", True, "18", True),
    ("The answer is 18.", WORKED, "18.", True, INVALID, False),
    ("#### 18.", WORKED, "18.", True, "18.", True),
    ("#### $18", WORKED, "$18", True, INVALID, False),
    ("It is $18.", WORKED, "$18.", True, INVALID, False),
    ("#### 1,234", "#### 1234", "1,234", True, "1,234", True),
    ("#### 1234", "#### 1,234", "1234", True, "1234", True),
    ("She has $1,234.00 left", "#### 1234", "$1,234.00", False, INVALID, False),
    ("-5", "#### -5", "-5", True, INVALID, False),
    ("minus 5: - 5", "#### -5", "5", False, INVALID, False),
    ("#### -5", "#### -5", "-5", True, "-5", True),
    ("#### - 5", "#### -5", "5", False, INVALID, False),
    ("#### 18 and then #### 19", WORKED, "19", False, "18", True),
    ("17 no, 18", WORKED, "18", True, INVALID, False),
    ("18, or 17", WORKED, "17", False, INVALID, False),
    ("no number at all", WORKED, INVALID, False, INVALID, False),
    ("", WORKED, INVALID, False, INVALID, False),
    ("####18", WORKED, "18", True, INVALID, False),
    ("####  18", WORKED, "18", True, INVALID, False),
    ("#### 18\n\nQuestion 2", WORKED, "2", False, "18", True),
    ("18...", WORKED, "18...", False, INVALID, False),
    ("...", WORKED, "...", False, INVALID, False),
    ("$", WORKED, INVALID, False, INVALID, False),
    ("$$ 18", WORKED, "18", True, INVALID, False),
    ("18%", WORKED, "18", True, INVALID, False),
    ("18 dollars and 50 cents", "#### 18.50", "50", False, INVALID, False),
    ("#### 18.50", "#### 18.50", "18.50", True, "18.50", True),
    ("#### 18.0", WORKED, "18.0", False, "18.0", False),
    ("x=18-", WORKED, "18", True, INVALID, False),
    ("a-18b", WORKED, "-18", False, INVALID, False),
    ("1 8", WORKED, "8", False, INVALID, False),
    ("1,8", WORKED, "1,8", True, INVALID, False),
    ("\u0661\u0668", WORKED, INVALID, False, INVALID, False),
    ("#### .", WORKED, INVALID, False, ".", False),
    ("#### ,18", WORKED, ",18", True, ",18", True),
    ("18,", WORKED, "18,", True, INVALID, False),
]


@pytest.mark.parametrize(("text", "answer", "flexible", "flexible_hit", "strict", "strict_hit"), TABLE)
def test_answers_are_found_as_the_harness_finds_them(
    text: str, answer: str, flexible: str, flexible_hit: bool, strict: str, strict_hit: bool
) -> None:
    gold = normalised(answer)
    assert (extracted(text, FLEXIBLE), is_hit(flexible, gold)) == (flexible, flexible_hit)
    assert (extracted(text, STRICT), is_hit(strict, gold)) == (strict, strict_hit)


@given(st.text(), st.integers())
def test_an_answer_in_the_asked_form_is_a_hit_whatever_stands_before(before: str, number: int) -> None:
    worked = f"{before}\n#### {number:,}"
    if "#### " not in before:
        assert is_hit(extracted(worked, STRICT), normalised(f"#### {number}"))
    assert is_hit(extracted(worked, FLEXIBLE), normalised(worked))
