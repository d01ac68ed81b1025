"""Which worked examples stand before a question.

lm-evaluation-harness draws them anew for each question from one generator, `random.Random(1234)`, in the order of the
questions; so do we, and with the same pool the prompts are the same to the byte.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from atom.bench.gsm8k.problems import Problem, ProblemSet
from atom.recipes.errors import UsageError

__all__ = ["BUILT_IN", "DEFAULT_SEED", "SAMPLERS", "FewShots"]

DEFAULT_SEED: Final = 1234
SAMPLERS: Final = ("default", "first_n")
"""The harness's names: drawn for each question, or the first ones for all."""

_EXAMPLES: Final = (
    (
        "A gardener plants 6 rows of 9 tulips. Rabbits eat 14 of them. How many tulips are left?",
        "The gardener plants 6*9=<<6*9=54>>54 tulips.\n"
        "After the rabbits, 54-14=<<54-14=40>>40 tulips are left.\n#### 40",
    ),
    (
        "A bus carries 38 passengers. At the first stop 11 get off and 7 get on. At the second stop twice as many get "
        "on as at the first. How many passengers are on the bus then?",
        "After the first stop there are 38-11+7=<<38-11+7=34>>34 passengers.\n"
        "At the second stop 7*2=<<7*2=14>>14 get on.\nThen there are 34+14=<<34+14=48>>48 passengers.\n#### 48",
    ),
    (
        "A notebook costs $4 and a pen costs half as much. What do 5 notebooks and 6 pens cost, in dollars?",
        "A pen costs 4/2=$<<4/2=2>>2.\nThe notebooks cost 5*4=$<<5*4=20>>20.\nThe pens cost 6*2=$<<6*2=12>>12.\n"
        "Together they cost 20+12=$<<20+12=32>>32.\n#### 32",
    ),
    (
        "A tank holds 1200 liters. A pump fills it at 45 liters a minute while 5 liters a minute leak out. How many "
        "minutes does it take to fill the empty tank?",
        "Each minute the tank gains 45-5=<<45-5=40>>40 liters.\n"
        "It is full after 1200/40=<<1200/40=30>>30 minutes.\n#### 30",
    ),
    (
        "There are 84 books on three shelves. The first shelf has 30 books and the second has 6 fewer than the first. "
        "How many books are on the third shelf?",
        "The second shelf has 30-6=<<30-6=24>>24 books.\nThe first two have 30+24=<<30+24=54>>54 books.\n"
        "The third has 84-54=<<84-54=30>>30 books.\n#### 30",
    ),
    (
        "A cyclist rides 18 kilometers an hour for 2 hours and then 12 kilometers an hour for 3 hours. How many "
        "kilometers is that in all?",
        "In the first part it is 18*2=<<18*2=36>>36 kilometers.\nIn the second it is 12*3=<<12*3=36>>36 kilometers.\n"
        "In all it is 36+36=<<36+36=72>>72 kilometers.\n#### 72",
    ),
    (
        "A shop sells a coat of $150 with 20% off. How many dollars does it cost then?",
        "The discount is 150*20/100=$<<150*20/100=30>>30.\nThe coat costs 150-30=$<<150-30=120>>120.\n#### 120",
    ),
    (
        "A class of 27 pupils and 3 teachers goes to a museum. Tickets cost $4 for pupils and $9 for teachers. How "
        "much do all tickets cost, in dollars?",
        "The pupils pay 27*4=$<<27*4=108>>108.\nThe teachers pay 3*9=$<<3*9=27>>27.\n"
        "Together that is 108+27=$<<108+27=135>>135.\n#### 135",
    ),
)
BUILT_IN: Final = ProblemSet(
    name="built-in examples (not GSM8K's)",
    problems=tuple(Problem(question, answer) for question, answer in _EXAMPLES),
)
"""For problems that come without examples."""


@dataclass(frozen=True, kw_only=True)
class FewShots:
    """`count` examples of `pool` for each of `questions` questions."""

    pool: ProblemSet
    count: int
    questions: int
    sampler: str = "default"
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError(f"--num-fewshot must not be negative, got {self.count}")
        if self.count > len(self.pool):
            raise UsageError(
                f"--num-fewshot {self.count}: {self.pool.name} has {len(self.pool)}; name a file with more of them "
                "(--fewshot-path)"
            )
        if self.sampler not in SAMPLERS:
            raise UsageError(f"--fewshot-sampler must be {' or '.join(SAMPLERS)}, got {self.sampler!r}")

    def of(self, index: int) -> Sequence[Problem]:
        """The examples of question `index`."""
        return [self.pool.problems[i] for i in self._drawn[index]]

    def first(self) -> Sequence[Problem]:
        return self.pool.problems[: self.count]

    def describe(self) -> dict[str, Any]:
        return {
            "num_fewshot": self.count,
            "fewshot_examples": self.pool.name,
            "fewshot_origin": dict(self.pool.origin),
            "fewshot_sampler": self.sampler,
            "fewshot_seed": self.seed,
        }

    @cached_property
    def _drawn(self) -> list[list[int]]:
        """[questions][count] indices into the pool."""
        if self.sampler == "first_n":
            return [list(range(self.count))] * self.questions
        rng = random.Random(self.seed)
        return [rng.sample(range(len(self.pool)), self.count) for _ in range(self.questions)]
