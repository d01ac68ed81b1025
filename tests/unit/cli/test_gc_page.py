"""The page of a profile: its tables without scripts, its charts in a browser, hostile text, nothing from elsewhere."""

from __future__ import annotations

import html.parser
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atom.bench.records import Outcome, RequestRecord
from atom.bench.rundir import RunDirectory
from atom.cli.gc_tables import profile_tables
from atom.diag.gc_profile.model import Attribution, HookedProcess, Profile, Totals, Window
from atom.diag.gc_profile.page import write_page
from atom.diag.gc_profile.page.series import MAX_POINTS, arm_series

MS = 1_000_000
SECOND = 1_000 * MS
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<script>alert(1)</script></table><!--head--><!--lower-->/*data*/null\n' onload=x \"&"


def run_of(
    path: Path, *, seconds: int = 60, leaking: bool = True, requests: int = 240, role: str = "api"
) -> RunDirectory:
    """A run of a server whose passes get longer while it serves, or of one that has none."""
    rng = random.Random(seconds)
    start = 10 * SECOND
    run_dir = RunDirectory(path)
    run_dir.write_run_json({"measured_start_ns": start, "validity": "valid"})
    with run_dir.client_writer() as client:
        client.append({"kind": "measured_start", "t_ns": start})
        client.append({"kind": "measured_end", "t_ns": start + seconds * SECOND})
    passes = [start + i * SECOND // 2 for i in range(2 * seconds)] if leaking else []
    pause = {moment: int(5 * MS + 4 * MS * i) for i, moment in enumerate(passes)}
    with run_dir.requests_writer() as writer:
        for index in range(requests):
            sent = start + index * seconds * SECOND // requests
            stall = max((p - (sent - at) for at, p in pause.items() if at <= sent < at + p), default=0)
            first = sent + int(rng.gauss(120, 12) * MS) + stall
            chunks = [first, first + 30 * MS]
            record = RequestRecord(
                index=index,
                outcome=Outcome.COMPLETED,
                sent_ns=sent,
                first_ns=chunks[0],
                last_ns=chunks[1],
                end_ns=chunks[1],
                chunk_ns=chunks,
                prompt_tokens=2048,
                output_tokens=2,
            )
            writer.append_line(record.to_line())
    hook = {
        "type": "hook",
        "schema_version": "1.0",
        "pid": 7,
        "role": role,
        "command": "python -m server",
        "collector": "generational",
        "old_generations": [2],
        "thresholds": [700, 10, 10],
        "installed_ns": start,
    }
    lines: list[dict[str, Any]] = [hook]
    lines += [
        {"type": "pass", "start_ns": at, "stop_ns": at + p, "generation": 2, "collected": 0, "uncollectable": 0}
        for at, p in pause.items()
    ]
    lines.append({"type": "totals", "t_ns": start + seconds * SECOND, "recorded": len(passes), "dropped": 0})
    (run_dir.server / f"gc-{role}-7.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    scrapes, samples, probes = [], [], []
    for second in range(seconds):
        t, grown = start + second * SECOND, second if leaking else 0
        scrapes.append(
            {"sent_ns": t, "latency_ns": (5 + 9 * grown) * MS, "series": 120 + 40 * grown, "body_bytes": 9000}
        )
        samples.append(
            {"t_ns": t, "pid": 7, "role": "api", "rss_bytes": (900 + 3 * grown) << 20, "cpu_s": 0.4 * second}
        )
        probes.append({"sent_ns": t, "latency_ns": (1 + 3 * grown) * MS, "status": 200, "error": None})
    for name, values in (("metrics-api", scrapes), ("process", samples), ("health", probes)):
        (run_dir.server / f"{name}.jsonl").write_text("\n".join(map(json.dumps, values)) + "\n")
    return run_dir


def profile(run_dir: RunDirectory, label: str, seconds: float = 60.0, **more: Any) -> Profile:
    share = 0.0 if "clean" in label else 0.34
    given: dict[str, Any] = {
        "label": label,
        "directory": str(run_dir.path),
        "simulated": False,
        "old_object_passes": "gen-2 passes",
        "window_s": 10.0,
        "windows": tuple(
            Window(start_s=10.0 * i, end_s=10.0 * i + 10, gen2_share=share * i / 5, gen2_mean_pause_ms=40.0 * i + 20)
            for i in range(int(seconds) // 10)
        ),
        "totals": Totals(duration_s=seconds, gen2_share=share / 2, gen2_passes=120),
        "growth": {},
        "attribution": Attribution(first_tokens=None, chunk_gaps=None, shifts=0),
        "causes": (),
        "verdict": "Garbage collection is not the problem." if share == 0 else "Garbage collection is the problem.",
        "is_problem": share > 0,
        "processes": (HookedProcess(pid=7, role="api", command="python -m server", hooked=True),),
        "validity": "valid",
    }
    return Profile(**{**given, **more})


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outward: list[str] = []
        self.events: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outward += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")
        ]
        self.events += [name for name, _ in attrs if name.startswith("on")]


def read(page: Path) -> tuple[str, Reader]:
    text = page.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    return text, reader


def test_tables_stand_in_the_html_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    arms = [profile(run_of(tmp_path / "a"), "leaking"), profile(run_of(tmp_path / "b", leaking=False), "clean")]
    write_page(tmp_path / "page.html", arms, profile_tables(arms))
    text, reader = read(tmp_path / "page.html")
    assert reader.outward == reader.events == []
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "Garbage collection is the problem." in text
    assert '<th class="group" colspan="4">clean</th>' in text
    assert "34.0%" in text
    assert text.index("34.0%") < text.index('id="charts"') < text.index("totals")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "a", seconds=4, requests=4)
    process = HookedProcess(pid=1, role=HOSTILE, command=HOSTILE, hooked=False, reason=HOSTILE)
    bad = profile(run_dir, HOSTILE, 10, verdict=HOSTILE, notes=(HOSTILE,), processes=(process,), validity=HOSTILE)
    plain = profile(run_dir, "x", 10)
    pages = []
    for one in (bad, plain):
        write_page(tmp_path / "page.html", [one], profile_tables([one]))
        text, reader = read(tmp_path / "page.html")
        assert reader.events == []
        pages.append(reader.tags.count("script"))
        assert text.count("</html>") == text.count("<main>") == 1
    assert pages[0] == pages[1]


def test_a_run_that_is_gone_leaves_its_tables(tmp_path: Path) -> None:
    gone = profile(run_of(tmp_path / "a", seconds=4), "gone", directory=str(tmp_path / "nowhere"))
    series = arm_series(gone, "gone")
    assert "is no run directory" in series["why_empty"]
    assert series["ttft_ms"] == []
    write_page(tmp_path / "page.html", [gone], profile_tables([gone]))
    assert "Garbage collection is the problem." in (tmp_path / "page.html").read_text()


def test_series_are_bounded_and_keep_the_stalls(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path / "a", seconds=30, requests=6000)
    series = arm_series(profile(run_dir, "a", 30.0), "a")
    assert len(series["ttft_ms"]) <= MAX_POINTS
    assert series["passes_ms"][-1] == (29.5, 241.0)
    assert max(value for _, value in series["ttft_ms"]) > 300
    times = [at for at, _ in series["ttft_ms"]]
    assert times == sorted(times)
    assert series["metrics_ms"][0] == (0.0, 5.0)
    assert series["rss_mb"][-1] == (29.0, 987.0)
    assert series["health_ms"][1] == (1.0, 4.0)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_page_in_a_browser(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    arms = [profile(run_of(tmp_path / "a"), "leaking"), profile(run_of(tmp_path / "b", leaking=False), "clean")]
    page = tmp_path / "page.html"
    write_page(page, arms, profile_tables(arms))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,2000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert "Pauses over latencies: clean" in shown
    assert "</i>time to first token</span>" in shown
    assert "</i>gen-2 pause</span>" in shown
    assert "time (s)</text>" in shown
    assert shown.count("<svg viewBox") == 6, "two arms' latencies, then four charts with both"
    axes = re.findall(r"Pauses over latencies: \w+</h3>.*?(<text .*?)<circle", shown, re.DOTALL)
    ticks = [re.findall(r">([\d.k]+)</text>", axis) for axis in axes]
    assert len(ticks) == 2
    assert ticks[0] == ticks[1], "arms share their axes"
    assert 'stroke="var(--bad)"' in shown
