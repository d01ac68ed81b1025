"""report.html: the series behind its charts, and the page as a browser lays it out."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from atom.bench.records import Outcome, RequestRecord
from atom.bench.report.page import write_report
from atom.bench.report.series import collect_series
from atom.bench.rundir import RunDirectory
from atom.bench.summary import summarize
from atom.cli.render import number

MS = 1_000_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run_of(path: Path, spans: list[tuple[float, float]], hooked: bool = False) -> RunDirectory:
    """A run whose requests are sent and ended at these milliseconds, with two tokens each, the first half way."""
    run_dir = RunDirectory(path)
    run_dir.write_run_json({"load": {"name": "random", "model": "m"}, "measured_start_ns": 0})
    with run_dir.requests_writer() as writer:
        for index, (begin, end) in enumerate(spans):
            sent, last = int(begin * MS), int(end * MS)
            chunks = [(sent + last) // 2, last]
            record = RequestRecord(
                index=index,
                outcome=Outcome.COMPLETED,
                sent_ns=sent,
                first_ns=chunks[0],
                last_ns=last,
                end_ns=last,
                chunk_ns=chunks,
                output_tokens=2,
            )
            writer.append_line(record.to_line())
    if hooked:
        (run_dir.server / "gc-api-1.jsonl").write_text('{"type": "hook"}\n')
    return run_dir


@pytest.mark.parametrize("wall_ms", [4.0, 49.9, 50.0, 70.0, 999.0, 12_345.0])
def test_partial_bins_are_as_wide_as_the_run(tmp_path: Path, wall_ms: float) -> None:
    """Two requests at once all the time are two at once in every bin, and no token is lost or doubled."""
    run_dir = run_of(tmp_path / "run", [(0, wall_ms), (0, wall_ms)])
    summary = summarize(run_dir)
    series = collect_series(run_dir, summary["start_ns"], summary["end_ns"])
    timeline = series["timeline"]
    assert timeline["running"] == [2.0] * len(timeline["running"])
    bounds = [min(i * timeline["width"], series["wall_s"]) for i in range(len(timeline["running"]) + 1)]
    bounds[-1] = series["wall_s"]
    widths = [right - left for left, right in pairwise(bounds)]
    assert sum(rate * w for rate, w in zip(timeline["tokens_per_s"], widths, strict=True)) == pytest.approx(4, rel=0.01)


def dom(run_dir: RunDirectory, width: int) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},2000"]
    profile = f"--user-data-dir={run_dir.path / 'profile'}"
    done = subprocess.run(
        [*command, profile, "--dump-dom", run_dir.report_html.absolute().as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_page_in_a_browser(tmp_path: Path) -> None:
    """Percentiles that nearly coincide, no collection seen, two widths of window."""
    run_dir = run_of(tmp_path / "run", [(10 * i, 10 * i + 40 + (i == 30) * 400) for i in range(60)], hooked=True)
    gen2 = {
        "value": 0.0,
        "unit": "fraction",
        "n": 0,
        "definition": "d",
        "supported": True,
        "side": "server",
        "label": "gen-2 share",
    }
    summary = summarize(run_dir, extra={"gen2_share": gen2})
    write_report(run_dir, summary)
    for width in (1280, 500):
        page = dom(run_dir, width)
        assert "All figures" in page, "the script came to its end"
        charts = [int(found) for found in re.findall(r'<svg viewBox="0 0 (\d+) ', page)]
        assert charts
        assert max(charts) <= width
        assert all(one > 200 for one in charts)
        labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*class="mark"', page)
        assert len(labels) >= 3
        places = [(float(x), float(y)) for x, y in labels[:3]]
        for one, (x, y) in enumerate(places):
            assert all(abs(x - other_x) >= 24 or y != other_y for other_x, other_y in places[:one])
        assert f"no pass in {number(summary['figures']['duration']['value'])} s observed" in page
        assert "<h3>Garbage collection" not in page
        for figure in summary["figures"].values():
            if figure["unit"] == "ms" and figure["value"] is not None:
                assert re.search(rf">{re.escape(number(figure['value']))}( †)?<", page), "formatted as in the table"
