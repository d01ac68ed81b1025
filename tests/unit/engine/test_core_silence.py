"""How long a core has owed an answer, on a clock of the test's own."""

from __future__ import annotations

from atom.engine.core_silence import CoreSilence


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_silence_counts_from_the_request_or_the_last_word() -> None:
    clock = Clock()
    silence = CoreSilence(2, clock)
    silence.sent(1)
    clock.now += 5
    assert silence.seconds(1) == 5
    silence.heard(1)
    clock.now += 2
    assert silence.seconds(1) == 2


def test_idle_time_is_no_silence() -> None:
    clock = Clock()
    silence = CoreSilence(1, clock)
    silence.sent(0)
    silence.heard(0)
    clock.now += 1000
    silence.sent(0)
    assert silence.seconds(0) == 0


def test_clients_that_give_up_do_not_hide_a_silent_core() -> None:
    clock = Clock()
    silence = CoreSilence(1, clock)
    silence.sent(0)
    clock.now += 60  # given up; the next one comes
    silence.sent(0)
    clock.now += 60
    assert silence.seconds(0) == 120
    silence.heard(0)
    clock.now += 1
    assert silence.seconds(0) == 1
