"""What tables and pages call the arms of a profile, where labels are long or alike."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from atom.diag.gc_profile.model import Profile

__all__ = ["ArmName", "arm_names", "one_line"]

LONGEST: Final = 16
"""With longer labels the arms are called A, B, …"""


@dataclass(frozen=True, slots=True)
class ArmName:
    short: str
    """Where there is little room: no other arm's."""
    label: str
    """In sentences; with the run directory where labels are alike."""

    @property
    def full(self) -> str:
        return self.label if self.short == self.label else f"{self.short}: {self.label}"


def arm_names(profiles: Sequence[Profile]) -> list[ArmName]:
    labels = [one_line(profile.label) or "run" for profile in profiles]
    alike = len({*labels}) < len(labels)
    if alike:
        labels = [f"{label} ({one_line(p.directory)})" for label, p in zip(labels, profiles, strict=True)]
    short = len(labels) == 1 or (not alike and all(len(label) <= LONGEST for label in labels))
    letters = (chr(ord("A") + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(len(labels)))
    return [ArmName(label if short else letter, label) for label, letter in zip(labels, letters, strict=True)]


def one_line(text: str, limit: int = 200) -> str:
    """Text from a server or a run directory: at most `limit` characters of it, and none that controls a terminal."""
    kept = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text[: limit * 2])
    flat = " ".join(kept.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
