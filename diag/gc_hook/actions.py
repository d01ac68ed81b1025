"""What-if actions: what the hook does to the collector of a process when asked, and how it is undone."""

from __future__ import annotations

import gc
import re
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Action", "check_action", "freeze_count"]

FREEZE_EVERY_S = 10.0
SHORTEST_FREEZE_S = 0.5


def check_action(text: str) -> str:
    """The action, without surrounding blanks; ValueError if it is none.

    `freeze` (`gc.freeze()` at the start and every 10 s), `freeze:SECONDS`, `disable`, `threshold:A[,B[,C]]`.
    """
    text = text.strip()
    _parse_action(text)
    return text


def _parse_action(text: str) -> tuple[str, Sequence[float]]:
    name, given, words = text.partition(":")
    if name == "disable" and not given:
        return name, ()
    if name == "freeze":
        if not given:
            return name, (FREEZE_EVERY_S,)
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", words) and float(words) >= SHORTEST_FREEZE_S:
            return name, (float(words),)
        raise ValueError(
            f"{text!r}: freeze takes the seconds between two freezes, at least {SHORTEST_FREEZE_S}: freeze:10"
        )
    if name == "threshold":
        if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9}){0,2}", words) and int(words.partition(",")[0]) > 0:
            return name, [int(word) for word in words.split(",")]
        raise ValueError(
            f"{text!r}: threshold takes one to three whole numbers, the first above 0: threshold:700,10,10"
        )
    raise ValueError(f"{text!r} is none of freeze, freeze:SECONDS, disable, threshold:A,B,C")


class Action:
    """One what-if action and how to undo it. A forked child inherits both."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.name, self.words = _parse_action(text)
        self.started = False
        self.next_freeze = 0.0

    def start(self) -> None:
        self.started = True
        self.was_enabled = gc.isenabled()
        self.thresholds = gc.get_threshold()
        self.was_frozen = freeze_count()
        if self.name == "disable":
            gc.disable()
        elif self.name == "threshold":
            gc.set_threshold(*[int(word) for word in self.words])

    def step(self) -> None:
        if self.name == "freeze" and time.monotonic() >= self.next_freeze:
            gc.freeze()
            self.next_freeze = time.monotonic() + self.words[0]

    def undo(self) -> None:
        if not self.started:
            return
        self.started = False
        if self.name == "disable" and self.was_enabled:
            gc.enable()
        elif self.name == "threshold":
            gc.set_threshold(*self.thresholds)
        elif self.name == "freeze" and not self.was_frozen:
            gc.unfreeze()  # where the server had frozen objects itself, they cannot be told from ours: all stay frozen


def freeze_count() -> int | None:
    return gc.get_freeze_count() if hasattr(gc, "get_freeze_count") else None
