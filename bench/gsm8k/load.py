"""The load that asks word problems: one request per question, each the same for the same files and seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atom.bench.gsm8k.fewshot import BUILT_IN, FewShots
from atom.bench.gsm8k.problems import Problem, ProblemSet
from atom.bench.gsm8k.prompts import MAX_TOKENS, STOP, chat_messages, completion_prompt
from atom.bench.load import Api, PlannedRequest
from atom.recipes.errors import UsageError

__all__ = ["KIND", "WordProblems"]

KIND: Final = "word problems"
"""`load.source.kind` in run.json."""


@dataclass(frozen=True, kw_only=True)
class WordProblems:
    """A `RequestSource`: question i with its examples. The record of each keeps the question's key and the right
    number (`tags`), so that a run can be scored from its records alone."""

    problems: ProblemSet
    fewshots: FewShots
    api: Api = Api.COMPLETIONS
    model: str = ""
    max_tokens: int = MAX_TOKENS
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    stream_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.fewshots.questions >= len(self.problems)
        if self.max_tokens < 1:
            raise UsageError(f"--max-gen-toks must be at least 1, got {self.max_tokens}")

    def __len__(self) -> int:
        return len(self.problems)

    def offsets_ns(self) -> None:
        return None

    def request(self, index: int) -> PlannedRequest:
        problem = self.problems.problems[index]
        body = self._body(problem.question, self.fewshots.of(index))
        return PlannedRequest(body, output_len=self.max_tokens, tags={"question": problem.key, "gold": problem.gold})

    def warmup(self, index: int) -> PlannedRequest:
        """A built-in question, after the examples of the load."""
        question = BUILT_IN.problems[index % len(BUILT_IN)].question
        return PlannedRequest(self._body(question, self.fewshots.first()), output_len=self.max_tokens)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "problems": self.problems.name,
            "figure": self.problems.figure,
            "origin": dict(self.problems.origin),
            "prompt": "messages" if self.api is Api.CHAT else "text",
            **self.fewshots.describe(),
            "max_tokens": self.max_tokens,
            "stop": list(STOP),
            "sampling": dict(self.sampling),
            "extra_body": dict(self.extra_body),
        }

    def _body(self, question: str, examples: Sequence[Problem]) -> bytes:
        fields: dict[str, Any] = {"model": self.model}
        if self.api is Api.CHAT:
            fields["messages"] = chat_messages(examples, question)
        else:
            fields["prompt"] = completion_prompt(examples, question)
        fields |= {
            "stream": True,
            "stream_options": {"include_usage": True, **self.stream_options},
            "max_tokens": self.max_tokens,
            "stop": list(STOP),
            **self.sampling,
            **self.extra_body,
        }
        return json.dumps(fields, separators=(",", ":")).encode()
