"""What a person reads: numbers agree with their nouns, names with the collector, and nothing is said of what was not
seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.diag.gc_profile.model import Profile
from atom.diag.gc_profile.profile import profile_run
from atom.diag.gc_profile.words import amount, counted, duration, figure, joined, per_cent

Builder = Callable[..., Any]

EVERY_SECOND = [(0.5 + i, 0.05) for i in range(59)]
RECORD = "server/gc-api-10.jsonl"


def profile(
    synthetic: Builder, name: str = "run", change: Callable[[Path], None] | None = None, **more: Any
) -> Profile:
    directory = synthetic(name, **{"seconds": 60, "requests_per_s": 4, "chunks": 2, **more}).write()
    if change is not None:
        change(directory)
    return profile_run(directory, shifts=20)


def collector(kind: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        record = directory / RECORD
        record.write_text(record.read_text().replace('"generational"', json.dumps(kind)))

    return change


@pytest.mark.parametrize(
    ("kind", "passes", "said"),
    [
        ("generational", [], "there was no gen-2 pass in 60 s."),
        ("generational", [(40, 0.0368)], "1 gen-2 pass took 36.8 ms of 60 s (0.06%)"),
        ("generational", [(40, 0.01), (50, 0.02)], "2 gen-2 passes took 30 ms of 60 s (0.05%), the longest 20 ms"),
        ("generational", [(-1, 1.2)], "the end of a longer gen-2 pass took 200 ms of 60 s (0.3%)"),
        ("incremental", [], "there was no increment or full pass in 60 s."),
        ("incremental", [(40, 0.01)], "1 increment or full pass took 10 ms of 60 s (0.02%)"),
        ("incremental", EVERY_SECOND, "59 increments and full passes took 2.95 s of 60 s (4.9%), the longest 50 ms."),
        ("free-threaded", [(40, 0.01)], "1 pass took 10 ms of 60 s (0.02%)"),
        ("free-threaded", EVERY_SECOND, "59 passes took 2.95 s of 60 s (4.9%), the longest 50 ms."),
    ],
)
def test_passes_by_number_and_collector(synthetic: Builder, kind: str, passes: Any, said: str) -> None:
    found = profile(synthetic, change=collector(kind), passes=passes)
    assert f": {said}" in found.verdict
    for cause in found.causes:
        assert "in 60 s there were 59 " in cause.statement
        assert "each freed 100 objects; thresholds 700, 10, 10, no object frozen" in cause.statement


def test_of_several_api_processes_the_busiest_is_meant(synthetic: Builder) -> None:
    def second(directory: Path) -> None:
        record = (directory / RECORD).read_text().replace('"pid": 10', '"pid": 11')
        kept = [line for line in record.splitlines() if '"pass"' not in line]
        (directory / "server/gc-api-11.jsonl").write_text("\n".join(kept) + "\n")

    busy = profile(synthetic, change=second, passes=EVERY_SECOND)
    assert "(4.9%) in the busiest of 2 API processes, the longest" in busy.verdict
    idle = profile(synthetic, "idle", change=second)
    assert "there was no gen-2 pass in any of 2 API processes in 60 s" in idle.verdict


def failing(count: int) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "server/metrics-api.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        failed = {"latency_ns": None, "status": 404, "error": "HTTP 404"}
        lines = [{"sent_ns": line["sent_ns"], **failed} if i < count else line for i, line in enumerate(lines)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return change


def test_scrapes_that_failed_say_why(synthetic: Builder) -> None:
    none = profile(synthetic, change=failing(1000))
    said = "none of 60 scrapes succeeded: HTTP 404"
    assert said in none.notes
    assert none.attribution.note == said
    assert none.growth["metrics_ms"].reason == said
    assert none.growth["metrics_series"].reason == said
    some = profile(synthetic, "some", change=failing(3))
    assert "3 of 60 scrapes failed: HTTP 404" in some.notes
    assert not some.attribution.note
    never = profile(synthetic, "never", change=lambda directory: (directory / "server/metrics-api.jsonl").unlink())
    assert never.attribution.note == "no scrape was recorded"


def test_a_hook_that_came_late_is_not_called_missing(synthetic: Builder) -> None:
    def late(directory: Path) -> None:
        record = directory / RECORD
        record.write_text(re.sub(r'"installed_ns": \d+', f'"installed_ns": {5_050 * 10**9}', record.read_text()))

    found = profile(synthetic, change=late)
    assert found.is_problem is None
    assert "the GC hook saw less than half of the span" in found.verdict
    assert found.growth["gen2_pause_ms"].reason == "the GC hook saw less than half of the span"


def test_per_minute_where_nobody_counted_requests(synthetic: Builder) -> None:
    longer = [(3 + 4.0 * i, 0.002 * 1.25**i) for i in range(14)]
    found = profile(synthetic, with_requests=False, passes=longer)
    assert "It is little yet, but more with every minute." in found.verdict
    assert "request" not in found.verdict


def test_slow_tokens_in_passes_by_number(synthetic: Builder) -> None:
    stalled = [(40, 0.4)]
    several = profile(synthetic, requests_per_s=10, passes=stalled, stalls=stalled)
    assert "400 ms of 60 s (0.7%); 4 of 4 slow tokens were in one, none by chance." in several.verdict
    one = profile(synthetic, "one", passes=stalled, stalls=stalled)
    assert "; 1 of 1 slow token was in one, none by chance." in one.verdict
    calm = profile(synthetic, "calm", passes=[(40, 0.001)])
    assert calm.verdict.endswith("; no token was slow.")
    elsewhere = profile(synthetic, "elsewhere", passes=[(20, 0.001)], stalls=stalled)
    assert elsewhere.verdict.endswith("; the one slow token was in none.")


def test_what_a_what_if_arm_answers_is_not_asked_again(synthetic: Builder) -> None:
    def acted(directory: Path) -> None:
        record = directory / RECORD
        record.write_text(record.read_text().replace('"totals"', '"totals", "action": "freeze"'))

    assert "--what-if" in profile(synthetic, passes=EVERY_SECOND).verdict
    assert "--what-if" not in profile(synthetic, "acted", change=acted, passes=EVERY_SECOND).verdict


def test_words() -> None:
    assert [counted(n, "pass", "passes") for n in (0, 1, 2000)] == ["0 passes", "1 pass", "2,000 passes"]
    assert [joined(list(names)) for names in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
    assert [duration(s) for s in (0.0368, 0.9996, 4.532, 110, 1737)] == ["36.8 ms", "1 s", "4.53 s", "110 s", "1,737 s"]
    assert [per_cent(share) for share in (0, 1e-6, 0.00015, 0.117)] == ["0%", "under 0.01%", "0.01%", "11.7%"]
    assert [figure(value) for value in (0, 0.0123, 0.996, 11.36, 49.96, 1234.5)] == [
        *("0", "0.012", "1", "11.4", "50", "1,234")
    ]
    assert [amount(value, unit) for value, unit in ((54_353, "bytes"), (0.005, "fraction"), (601, "series"))] == [
        *("53 KB", "0.5%", "601 series")
    ]
