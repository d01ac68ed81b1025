"""Tables of a profile: the document's own numbers, several arms, nothing seen, hostile text, narrow terminals."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from atom.cli.gc_detail_tables import short_command
from atom.cli.gc_tables import gate_table, profile_tables
from atom.cli.render import Table, markdown, print_tables
from atom.diag.gc_profile.gates import check_gates, parse_gates
from atom.diag.gc_profile.model import (
    Attribution,
    Cause,
    CauseKind,
    Growth,
    GrowthVerdict,
    HookedProcess,
    Profile,
    SlowEvents,
    Totals,
    Window,
)

MAIN = (
    *((0.019, 19.5, 94, 1977), (0.069, 45.5, 268, 2199), (0.145, 88.3, 504, 2425)),
    *((0.227, 135.0, 748, 2654), (0.313, 193.9, 1009, 2885), (0.340, 239.1, 1205, 3022)),
)


def window(index: int, share: float, mean: float, metrics: float, rss: float, end: float | None = None) -> Window:
    start = index * 300.0
    return Window(
        start_s=start,
        end_s=end or start + 300,
        gen2_share=share,
        gen2_mean_pause_ms=mean,
        metrics_p50_ms=metrics,
        rss_mb=rss,
        requests_per_s=12.34,
        ttft_mean_ms=661.0,
        ttft_p99_ms=1757.0,
        running_mean=58.6,
        prompt_tok_per_s=24_800.0,
        health_max_ms=812.3,
    )


def grows(quantity: str, label: str, unit: str, slope: float) -> Growth:
    return Growth(
        quantity=quantity,
        label=label,
        verdict=GrowthVerdict.GROWS,
        unit=unit,
        per="1,000 requests",
        slope=slope,
        slope_low=slope * 0.9,
        slope_high=slope * 1.1,
        confidence=0.99,
        first=slope,
        last=slope * 19,
        n=300,
        blocks=20,
    )


def slow(kind: str) -> SlowEvents:
    return SlowEvents(
        kind=kind,
        threshold_ms=980.0,
        typical_ms=420.0,
        events=20_000,
        slow=1_203,
        in_pass=800,
        in_render=500,
        in_both=300,
        neither=203,
        expected_in_pass=310.2,
        expected_in_render=490.7,
        lift_pass=2.58,
        lift_pass_low=0.9,
        lift_pass_high=1.1,
        lift_render=1.02,
        lift_render_low=0.91,
        lift_render_high=1.09,
        p_pass=0.005,
        p_render=0.3,
        excess_s=1234.0,
        excess_in_pass_s=800.0,
        excess_in_render_s=300.0,
    )


def process(pid: int = 4711, **more: Any) -> HookedProcess:
    given: dict[str, Any] = {
        "pid": pid,
        "role": "api",
        "command": "/usr/bin/python3 /opt/venv/bin/vllm serve Qwen/Qwen3-8B --port 8000 --max-num-seqs 256",
        "hooked": True,
        "python": "CPython 3.11.9",
        "collector": "generational",
        "thresholds": (700, 10, 10),
        "frozen": 0,
        "gen2_passes": 2569,
        "gen2_seconds": 312.6,
        "gen2_share": 0.18,
        "rss_mb": 3022.0,
    }
    return HookedProcess(**{**given, **more})


def profile(label: str = "main", **more: Any) -> Profile:
    given: dict[str, Any] = {
        "label": label,
        "directory": f"runs/{label}",
        "simulated": False,
        "old_object_passes": "gen-2 passes",
        "window_s": 300.0,
        "windows": tuple(window(i, *row, end=1737.0 if i == 5 else None) for i, row in enumerate(MAIN)),
        "totals": Totals(
            duration_s=1737.0,
            gen2_passes=2569,
            gen2_seconds=312.6,
            gen2_share=0.18,
            gen2_mean_pause_ms=121.7,
            gen2_max_pause_ms=251.0,
            metrics_series=43_668,
            metrics_body_bytes=6_500_000,
            requests=20_000,
            hook_cpu_share=0.0004,
        ),
        "growth": {
            "rss_mb": grows("rss_mb", "API RSS", "MB", 52.0),
            "gen2_share": grows("gen2_share", "gen-2 share", "fraction", 0.016),
            "threads": Growth(
                quantity="threads",
                label="threads",
                verdict=GrowthVerdict.NOT_ENOUGH_DATA,
                unit="",
                per="1,000 requests",
                reason="fewer than 8 blocks",
            ),
        },
        "attribution": Attribution(first_tokens=slow("first token"), chunk_gaps=slow("chunk gap"), shifts=200),
        "causes": (
            Cause(
                kind=CauseKind.HEAP_GROWS,
                statement="RSS rises by 52 MB per 1,000 requests",
                advice="look for what keeps finished requests",
            ),
        ),
        "verdict": "Garbage collection is the problem: 18.0% of the wall clock.",
        "is_problem": True,
        "processes": (process(), process(4712, role="core", hooked=False, reason="it is no Python process")),
        "growing_families": {"atom:prefill_request_context_tokens": (12, 21_834)},
        "validity": "valid",
    }
    return Profile(**{**given, **more})


def empty(label: str = "nothing") -> Profile:
    """A run in which nothing was seen."""
    windows = (Window(start_s=0.0, end_s=300.0), Window(start_s=300.0, end_s=400.0))
    attribution = Attribution(first_tokens=None, chunk_gaps=None, shifts=0, note="no request was recorded")
    return profile(
        label,
        windows=windows,
        totals=Totals(duration_s=400.0),
        growth={},
        attribution=attribution,
        causes=(),
        verdict="It could not be told.",
        is_problem=None,
        processes=(),
        growing_families={},
        validity=None,
    )


def printed(tables: list[Table], width: int) -> str:
    stream = io.StringIO()
    print_tables(tables, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_documents_table() -> None:
    table = profile_tables([profile()])[1]
    assert [" ".join(column.split()) for column in table.columns] == [
        *("minutes", "gen-2 share", "mean gen-2 pause (ms)", "/metrics p50 (ms)", "API RSS (MB)")
    ]
    assert [list(row) for row in table.rows] == [
        ["0–5", "1.9%", "19.5", "94", "1,977"],
        ["5–10", "6.9%", "45.5", "268", "2,199"],
        ["10–15", "14.5%", "88.3", "504", "2,425"],
        ["15–20", "22.7%", "135.0", "748", "2,654"],
        ["20–25", "31.3%", "193.9", "1,009", "2,885"],
        ["25–29", "34.0%", "239.1", "1,205", "3,022"],
    ]


def test_two_arms_stand_side_by_side() -> None:
    branch = profile("this branch", windows=tuple(window(i, 0.0, 3.5, 5.1, 1737) for i in range(6)))
    table = profile_tables([profile(), branch], width=100)[1]
    assert table.groups == [("main", 4), ("this branch", 4)]
    header = markdown([table]).splitlines()[2]
    assert header.startswith("| minutes | main: gen-2 share | main: mean gen-2 pause (ms) | main: /metrics p50 (ms) |")
    assert "| this branch: gen-2 share |" in header
    line = printed([table], 100).splitlines()[1]
    assert line.split("  ")[0] == ""
    assert line.split() == ["main", "this", "branch"]
    assert list(table.rows[0]) == ["0–5", "1.9%", "19.5", "94", "1,977", "0.0%", "3.5", "5.1", "1,737"]


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("arms", [1, 2, 3, 4])
def test_nothing_wraps_into_a_mess(width: int, arms: int) -> None:
    profiles = [profile(label) for label in ("clean", "retention", "gauges", "both")[:arms]]
    tables = profile_tables(profiles, width=width)
    shares = sum(list(table.columns).count("gen-2\nshare") for table in tables if "over time" in table.title)
    assert shares == arms
    for table in tables:
        if not table.columns:
            continue
        text = printed([replace(table, notes=(), lead=(), title="", groups=())], width)
        lines = [line for line in text.splitlines() if line.strip()]
        header = max(column.count("\n") for column in table.columns) + 1
        assert len(lines) == header + 1 + len(table.rows), f"rows are one line each:\n{text}"
        assert all(cell_len(line) <= width for line in lines)


def test_arms_of_different_length() -> None:
    short = profile("b", windows=profile().windows[:3], totals=Totals(duration_s=900.0))
    table = profile_tables([profile("a"), short])[1]
    assert len(table.rows) == 6
    assert list(table.rows[-1][5:]) == ["–"] * 4
    assert table.notes[0] == "observed: a 29 minutes, b 15 minutes"


def test_arms_of_different_windows_get_tables_of_their_own() -> None:
    seconds = profile("b", window_s=20.0, windows=(Window(start_s=0, end_s=20), Window(start_s=20, end_s=31.4)))
    first, second = profile_tables([profile("a"), seconds])[1:3]
    assert len(first.columns) == len(second.columns) == 5
    assert [row[0] for row in second.rows] == ["0–20", "20–31"]
    assert second.columns[0].strip() == "seconds"


def test_nothing_seen_is_a_dash_and_no_zero() -> None:
    tables = profile_tables([empty()])
    text = printed(tables, 100)
    assert list(tables[1].rows[0]) == ["0–5", "–", "–", "–", "–"]
    assert "0.0%" not in text
    assert "no hook in the API process" in text
    assert "no request was recorded" in text
    assert "NOT VALID: not sealed" in text
    assert "no process was seen" in text


def test_totals_growth_attribution_and_processes() -> None:
    text = printed(profile_tables([profile()], width=100), 100)
    for part in (
        *("2,569", "312.6", "18.0%", "43,668", "0.04%", "GROWS", "+52.0", "+46.8 to +57.2", "1,000 requests"),
        *("not enough data: threads: fewer than 8 blocks", "2.58 [0.90–1.10]", "310.2", "20,000", "slow chunk gaps"),
        *("generational", "700/10/10", "4711", "vllm serve Qwen/Qwen3-8B", "it is no Python process"),
        *("atom:prefill_request_context_tokens 12 → 21,834", "heap grows with requests served", "Next: look for"),
    ):
        assert part in text, part


def test_verdict_and_causes_come_first() -> None:
    first = profile_tables([profile(), profile("b")])[0]
    assert not first.columns
    assert first.lead[0].startswith("main: Garbage collection is the problem")


def test_simulated_and_what_if_are_named_in_every_table() -> None:
    frozen = profile("frozen", simulated=True, processes=(process(action="freeze"),))
    for tables in (profile_tables([frozen]), profile_tables([profile("a"), frozen])):
        about = [table for table in tables if "frozen" in table.title or "over time" in table.title]
        assert len(about) >= 6
        assert all("SIMULATED" in table.title and "what-if freeze" in table.title for table in about)
    assert "gen 2 here: increments" in markdown(profile_tables([profile(old_object_passes="increments")]))


def test_long_labels_become_letters_that_are_explained() -> None:
    tables = profile_tables([profile("20260101-120000-gc-profile"), profile("20260101-130000-gc-profile")])
    assert [name for name, _ in tables[1].groups] == ["A", "B"]
    assert "A: 20260101-120000-gc-profile, B: 20260101-130000-gc-profile" in tables[1].title


HOSTILE = "<script>alert(1)</script>|\n[red]x[/red] \x1b[2J\x9b`&\u2028\u202e"


def test_hostile_text_stays_text() -> None:
    bad = profile(
        HOSTILE,
        verdict=HOSTILE,
        notes=(HOSTILE,),
        old_object_passes=HOSTILE,
        processes=(process(command=HOSTILE, role=HOSTILE, collector=HOSTILE, python=HOSTILE, action=HOSTILE),),
        growth={HOSTILE: replace(grows("x", HOSTILE, HOSTILE, 1.0), per=HOSTILE, reason=HOSTILE)},
        growing_families={HOSTILE: (1, 2)},
        causes=(Cause(kind=CauseKind.HEAP_GROWS, statement=HOSTILE, advice=HOSTILE),),
        attribution=Attribution(first_tokens=None, chunk_gaps=None, shifts=0, note=HOSTILE),
    )
    tables = profile_tables([bad, bad], width=100)
    text = printed(tables, 100)
    assert not {"\x1b", "\x9b", "\u202e", "\u2028"} & set(text)
    assert "[red]x[/red]" in " ".join(text.split())
    for line in markdown(tables).splitlines():
        assert "<script" not in line
        assert not line.startswith("[red]")


def test_commands_are_shortened() -> None:
    command = "/usr/bin/python3 /opt/venv/bin/vllm serve Qwen/Qwen3-8B"
    assert short_command(command, 40) == "python3 vllm serve Qwen/Qwen3-8B"
    assert short_command(command, 20) == "python3 vllm serve…"


def test_gates_say_what_they_found_and_why_not() -> None:
    arms = [profile("a"), empty("b")]
    table = gate_table(check_gates(arms, parse_gates(["gen2_share>1%", "growth.rss_mb=grows"])))
    assert [list(row) for row in table.rows] == [
        ["gen2_share>1%", "a", "18.0%", "FAILED"],
        ["gen2_share>1%", "b", "–", "no answer"],
        ["growth.rss_mb=grows", "a", "grows", "FAILED"],
        ["growth.rss_mb=grows", "b", "–", "no answer"],
    ]
    assert list(table.notes) == [
        "no answer: gen2_share was not seen in this run (gen2_share>1%)",
        "no answer: rss_mb was not seen in this run (growth.rss_mb=grows)",
    ]


def test_arms_of_one_label_are_told_apart_by_their_directories() -> None:
    tables = profile_tables([profile("main"), profile("main", directory="runs/other")])
    assert "A: main (runs/main), B: main (runs/other)" in tables[1].title


def judged(label: str, verdict: GrowthVerdict, **more: Any) -> Growth:
    return replace(grows(label, label, "ms", 1.0), verdict=verdict, **more)


def test_a_rise_that_is_not_called_growth_says_why() -> None:
    """And nothing else does: a slope that may be none needs no excuse."""
    growth = {
        "rises": judged("rises", GrowthVerdict.FLAT, reason="rises, but by less than 25%"),
        "too": judged("too", GrowthVerdict.FLAT, reason="rises, but by less than 25%"),
        "level": judged("level", GrowthVerdict.FLAT, slope_low=-1.0, reason="no rise"),
        "grows": judged("grows", GrowthVerdict.GROWS, reason="rises over the whole span"),
        "unseen": judged("unseen", GrowthVerdict.NOT_ENOUGH_DATA, reason="no probe was recorded"),
    }
    notes = next(table for table in profile_tables([profile(growth=growth)]) if "growth" in table.title).notes
    assert [note for note in notes if note.startswith(("flat", "not enough", "GROWS"))] == [
        "flat: rises, too: rises, but by less than 25%",
        "not enough data: unseen: no probe was recorded",
    ]


@pytest.mark.parametrize(
    ("passes", "note"),
    [
        ((), None),
        (((120.0, 36.8),), None),
        (((120.0, 36.8), (240.4, 74.1)), "the 2 passes: 36.8 and 74.1 ms at 120 and 240 s"),
        (
            ((120.0, 36.8), (240.0, 74.1), (360.0, 110.0)),
            "the 3 passes: 36.8, 74.1 and 110.0 ms at 120, 240 and 360 s, each longer than the one before",
        ),
        (((1.0, 9.0), (2.0, 8.0), (3.0, 10.0)), "the 3 passes: 9.0, 8.0 and 10.0 ms at 1, 2 and 3 s"),
    ],
)
def test_few_passes_are_told_one_by_one(passes: tuple[tuple[float, float], ...], note: str | None) -> None:
    tables = profile_tables([profile(few_passes=passes)])
    notes = next(table for table in tables if "growth" in table.title).notes
    assert [one for one in notes if "passes:" in one] == ([] if note is None else [note])


def test_a_quantity_and_a_window_are_named_once_for_all_arms() -> None:
    tables = profile_tables([profile("a"), profile("b")])
    for title, names in (("growth", ["API RSS (MB)", "gen-2 share", "threads"]), ("traffic", ["0–5", "5–10"])):
        table = next(table for table in tables if table.title.startswith(title))
        assert [row[:2] for row in table.rows][: 2 * len(names)] == [
            row for name in names for row in ([name, "a"], ["", "b"])
        ]


def test_bytes_are_shown_as_kilobytes_and_counts_whole() -> None:
    growth = {
        "body": replace(grows("body", "/metrics body", "bytes", 2048.0), first=1024.0, last=3 * 1024.0),
        "series": replace(grows("series", "series", "series", 10.0), first=601.0, last=4012.0),
    }
    table = next(table for table in profile_tables([profile(growth=growth)]) if "growth" in table.title)
    assert [list(row) for row in table.rows] == [
        ["/metrics body (KB)", "GROWS", "+2.00", "+1.80 to +2.20", "1.00 → 3.00"],
        ["series", "GROWS", "+10.0", "+9.00 to +11.0", "601 → 4,012"],
    ]


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d(?:[\d.,]*\d)?", text))


NARROW = [profile("main"), profile("a branch", processes=(process(action="freeze"),)), empty()]


@given(st.integers(30, 200), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_no_number_and_no_label_is_cut_on_any_terminal(width: int, arms: int) -> None:
    profiles = NARROW[:arms]
    known = numbers(markdown([*profile_tables(profiles), *gates_of(profiles)]))
    tables = [*profile_tables(profiles, width=width), *gates_of(profiles)]
    text = printed(tables, width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert numbers(text) <= known, f"cut: {numbers(text) - known}"
    for table in tables:
        shown = printed([replace(table, title="", lead=(), notes=())], width).splitlines()
        for label in {row[0] for row in table.rows}:
            assert any(line.startswith(label) for line in shown), f"{label!r} at {width}"


def gates_of(profiles: list[Profile]) -> list[Table]:
    return [gate_table(check_gates(profiles, parse_gates(["gen2_share>1%", "growth.rss_mb=grows"])))]


@pytest.mark.parametrize("width", [34, 44, 60])
def test_columns_that_are_not_shown_are_named(width: int) -> None:
    whole = profile_tables([profile()])
    for table in profile_tables([profile()], width=width):
        full = next(one for one in whole if one.title == table.title)
        gone = [" ".join(column.split()) for column in full.columns if column not in table.columns]
        said = [note for note in table.notes if note.startswith("not shown")]
        named = said[0].partition(": ")[2].split(", ") if said else []
        assert sorted(named) == sorted(name for name in gone), table.title


def test_a_table_that_no_terminal_is_too_narrow_for() -> None:
    table = Table("", ("quantity", "first\nvalue", "unit"), [["pause", "1,234.5", "ms"], ["", "", "s"]])
    lines = [line.rstrip() for line in printed([table], 20).splitlines()]
    assert [line for line in lines if line] == [
        *("pause", "  first value:", "  1,234.5", "  unit: ms", "pause", "  unit: s")
    ]


def test_markdown_has_commands_whole() -> None:
    command = "python3 -m server --filter 'a|b' " + "--port 8000 " * 30
    text = markdown(profile_tables([profile(processes=(process(command=command),))]))
    assert command.replace("|", "\\|").strip() in text


def test_a_command_is_not_cut_within_a_number() -> None:
    assert short_command("serve --port 8000 --x", 16) == "serve --port…"
    assert short_command("serve --port 8000 --x", 19) == "serve --port 8000…"


def test_growth_that_cannot_be_told_is_one_line() -> None:
    unseen = {name: judged(name, GrowthVerdict.NOT_ENOUGH_DATA, reason="too short") for name in ("pause", "RSS")}
    for width in (None, 40, 200):
        (table,) = [one for one in profile_tables([profile(growth=unseen)], width=width) if "growth" in one.title]
        assert not table.columns
        assert [note for note in table.notes if "families" not in note] == ["not enough data: pause, RSS: too short"]
