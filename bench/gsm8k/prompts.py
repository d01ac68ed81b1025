"""The text that is sent for a question: the harness's format of the task `gsm8k`, plain or as chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from atom.bench.gsm8k.problems import Problem

__all__ = ["MAX_TOKENS", "STOP", "chat_messages", "completion_prompt"]

STOP: Final = ("Question:", "</s>", "<|im_end|>")
MAX_TOKENS: Final = 256
"""The harness's limit for servers (`max_gen_toks`)."""


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def completion_prompt(examples: Sequence[Problem], question: str) -> str:
    shots = (f"{_asked(example.question)} {example.answer}\n\n" for example in examples)
    return "".join(shots) + _asked(question)


def chat_messages(examples: Sequence[Problem], question: str) -> list[dict[str, str]]:
    """One turn of user and assistant for each example, as the harness does with a chat template."""
    messages: list[dict[str, str]] = []
    for example in examples:
        messages.append({"role": "user", "content": _asked(example.question)})
        messages.append({"role": "assistant", "content": example.answer})
    return [*messages, {"role": "user", "content": _asked(question)}]
