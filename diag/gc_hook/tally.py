"""Running sums over the collections of a process."""

from __future__ import annotations

__all__ = ["Tally"]


class Tally:
    """Counts and nanoseconds since the hook was installed; `old_from` is the first generation that has old objects."""

    def __init__(self, old_from: int) -> None:
        self.old_from = old_from
        self.old_passes = self.old_ns = self.old_max_ns = self.old_collected = self.old_uncollectable = 0
        self.young_passes = self.young_ns = self.young_max_ns = self.young_collected = 0
        self.by_generation = [0, 0, 0]

    def add(self, pause_ns: int, info: dict[str, int]) -> bool:
        """Count one pass; whether it was one over old objects."""
        generation = info["generation"]
        self.by_generation[generation] += 1
        if generation < self.old_from:
            self.young_passes += 1
            self.young_ns += pause_ns
            self.young_collected += info["collected"]
            if pause_ns > self.young_max_ns:
                self.young_max_ns = pause_ns
            return False
        self.old_passes += 1
        self.old_ns += pause_ns
        self.old_collected += info["collected"]
        self.old_uncollectable += info["uncollectable"]
        if pause_ns > self.old_max_ns:
            self.old_max_ns = pause_ns
        return True

    def as_dict(self) -> dict[str, object]:
        """Under the names that the record has."""
        return {
            "old_passes": self.old_passes,
            "old_ns": self.old_ns,
            "old_max_ns": self.old_max_ns,
            "old_collected": self.old_collected,
            "old_uncollectable": self.old_uncollectable,
            "young_passes": self.young_passes,
            "young_ns": self.young_ns,
            "young_max_ns": self.young_max_ns,
            "young_collected": self.young_collected,
            "passes_by_generation": list(self.by_generation),
        }
