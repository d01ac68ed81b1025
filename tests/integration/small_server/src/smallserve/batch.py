"""The engine: one thread, one step at a time, and in each step one token for every open sequence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP_MS = 4.0
"""Of a decode step, however many sequences take part."""
FAIL_EVERY = 0
"""Every so manieth request is refused; 0: none."""

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


class Batch:
    """`add` may be called from any thread; `emit(text, last)` is called on the engine's thread."""

    def __init__(self) -> None:
        self.generated = self.finished = 0
        self._open: list[tuple[list[str], Callable[[str, bool], None]]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def running(self) -> int:
        return len(self._open)

    def add(self, prompt_words: int, max_tokens: int, emit: Callable[[str, bool], None]) -> None:
        texts = [f" {WORDS[(prompt_words + i) % len(WORDS)]}" for i in range(max_tokens)]
        with self._changed:
            self._open.append((texts[::-1], emit))
            self._changed.notify()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
                batch = list(self._open)
            due = max(due, time.monotonic()) + STEP_MS / 1e3
            time.sleep(max(0.0, due - time.monotonic()))
            for texts, emit in batch:
                emit(texts.pop(), not texts)
                self.generated += 1
            with self._changed:
                self._open = [one for one in self._open if one[0]]
            self.finished += sum(not texts for texts, _ in batch)
