"""report.html: the series behind its charts, and the page as a browser lays it out."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atom.bench.records import WARMUP, Outcome, RequestRecord, read_records
from atom.bench.report.page import write_report
from atom.bench.report.series import collect_series
from atom.bench.report.timeline import timeline_svg
from atom.bench.rundir import JsonlWriter, RunDirectory
from atom.bench.summary import summarize
from atom.cli.accuracy_tables import accuracy_tables
from atom.cli.publish import Output, publish
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


def test_two_at_once_are_two_everywhere(tmp_path: Path) -> None:
    """No bin is narrower than the others, so none has a wild rate."""
    for wall_ms in (0.5, 4.0, 49.9, 999.0, 12_345.0):
        run_dir = run_of(tmp_path / str(wall_ms), [(0, wall_ms), (0, wall_ms)])
        summary = summarize(run_dir)
        records = list(read_records(run_dir, None))
        series = collect_series(run_dir, records, summary["start_ns"], summary["end_ns"])
        svg = timeline_svg(records, series, summary["start_ns"], summary["end_ns"])
        running = re.findall(r"Requests running client: (\S+)", svg)
        assert running
        assert {float(one) for one in running} == {2.0}, wall_ms


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def scrape(second: float, **values: float) -> dict[str, Any]:
    return {"sent_ns": int(second * 1000 * MS), "latency_ns": 5 * MS, "error": None, "values": values}


def full_run(path: Path, gpus: int = 2) -> RunDirectory:
    """Four seconds, the first of them warm-up, with everything that a server can tell."""
    run_dir = run_of(path, [(1000 + 100 * i, 1000 + 100 * i + 400) for i in range(30)], hooked=True)
    with JsonlWriter(run_dir.path / "requests" / "1.jsonl") as writer:
        for i in range(5):
            sent = (100 + 150 * i) * MS
            writer.append_line(
                RequestRecord(
                    index=i,
                    phase=WARMUP,
                    worker="1",
                    outcome=Outcome.COMPLETED,
                    sent_ns=sent,
                    first_ns=sent + MS,
                    last_ns=sent + MS,
                    end_ns=sent + MS,
                    chunk_ns=[sent + MS],
                    output_tokens=1,
                ).to_line()
            )
    run_dir.write_run_json({"measured_start_ns": 1000 * MS})
    counters = {"preemptions": 1.0, "step_sum_s": 0.5, "timed_steps": 100.0, "drafts": 10.0, "accepted_tokens": 20.0}
    for role in ("api", "<b>role</b>"):
        write_lines(
            run_dir.server / f"metrics-{role.replace('/', '')}.jsonl",
            *(
                scrape(s, running=4, waiting=s, kv_usage=0.2 * s, **{k: v * s for k, v in counters.items()})
                for s in (0.5, 1.5, 2.5, 3.5)
            ),
        )
    write_lines(
        run_dir.server / "gpu.jsonl",
        *(
            {"t_ns": s * 500 * MS, "index": g, "utilization": 0.5, "power_w": 300 + g, "memory_used_bytes": None}
            for s in range(8)
            for g in range(gpus)
        ),
        {"t_ns": 5, "index": None, "error": "hangs"},
    )
    write_lines(
        run_dir.server / "process.jsonl",
        *({"t_ns": s * 1000 * MS, "pid": 7, "role": "api", "rss_bytes": 100 << 20, "cpu_s": s} for s in range(4)),
    )
    return run_dir


def page_of(run_dir: RunDirectory) -> str:
    write_report(run_dir, summarize(run_dir))
    return run_dir.report_html.read_text()


def test_one_axis_for_requests_and_server(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "run"))
    timeline = page[page.index("<svg class=") : page.index("</svg>")]
    titles = re.findall(r'class="title"[^>]*>([^<]+?) ?<', timeline)
    assert titles == [
        *("Requests running", "Requests", "Output", "TTFT", "ITL", "Server queue", "KV cache in use", "Preemptions"),
        *("Acceptance length", "GPU busy", "GPU power", "Resident memory"),
    ]
    assert ">warm-up</text>" in timeline
    assert "seconds since the measured phase began" in timeline
    said = html.unescape(timeline)
    for one in (
        "Acceptance length api: 3 tokens",
        "ITL server step api: 5 ms",
        "GPU power GPU 1: 301 W",
        "busy GPU 0: 50",
    ):
        assert one in said, one
    assert "<b>" not in timeline
    assert len(page) < 400_000


def test_many_gpus_are_a_mean_and_a_band(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "run", gpus=8))
    assert "mean of 8 GPUs" in page
    assert 'class="band f0"' in page


def test_a_run_of_the_client_alone_has_no_empty_panels(tmp_path: Path) -> None:
    page = page_of(run_of(tmp_path / "run", [(0, 500), (100, 900)]))
    titles = re.findall(r'class="title"[^>]*>([^<]+?) ?<', page)
    assert titles == ["Requests running", "Requests", "Output", "TTFT", "ITL"]


def test_an_observed_run_without_requests(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "run")
    for path in (run_dir.path / "requests").iterdir():
        path.unlink()
    run_dir.write_run_json({"load": {"name": "observe"}})
    summary = {**summarize(run_dir), "start_ns": 1000 * MS, "end_ns": 4000 * MS}
    write_report(run_dir, summary)
    assert "KV cache in use" in run_dir.report_html.read_text()


def test_damaged_lines_of_the_server_are_left_out(tmp_path: Path) -> None:
    run_dir = full_run(tmp_path / "run")
    with (run_dir.server / "gpu.jsonl").open("a") as file:
        file.write('{"t_ns": "x", "index": 0}\n{"t_ns": 1, "index": [], "power_w": 1e999}\n{"t_ns": 1, "ind')
    with (run_dir.server / "metrics-api.jsonl").open("a") as file:
        file.write('{"sent_ns": 2000000000, "values": [1]}\n{"sent_ns": 2100000000, "values": {"kv_usage": "NaN"}}\n')
    assert "GPU power" in page_of(run_dir)


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


def asked(path: Path, text: str = "#### 5", count: int = 3) -> RunDirectory:
    """A run of word problems: `text` is every answer, the right one is 5."""
    run_dir = run_of(path, [(10 * i, 10 * i + 5) for i in range(count)])
    source = {"kind": "word problems", "figure": "gsm8k", "problems": "<i>own</i>.jsonl", "num_fewshot": 0}
    run_dir.write_run_json({"load": {"name": "gsm8k", "model": "m", "source": source}})
    records = list(read_records(run_dir))
    for file in run_dir.request_files():
        file.unlink()
    with run_dir.requests_writer() as writer:
        for record in records:
            record.text, record.tags = text, {"question": f"q{record.index}", "gold": "5"}
            writer.append_line(record.to_line())
    return run_dir


def published(run_dir: RunDirectory) -> str:
    publish(run_dir, summarize(run_dir), Output(quiet=True))
    return run_dir.report_html.read_text()


def test_accuracy_stands_on_the_page_as_on_the_terminal(tmp_path: Path) -> None:
    run_dir = asked(tmp_path / "run")
    compared = {"both": 3, "only_a": 0, "only_b": 0, "neither": 0, "difference": 0.0, "difference_stderr": 0.0}
    (run_dir.path / "accuracy").mkdir()
    (run_dir.path / "accuracy" / "comparison.json").write_text(
        json.dumps(
            {
                "a": "<b>base</b>",
                "n": 3,
                "filters": [{"filter": name, **compared, "mcnemar_p": 1.0} for name in ("flexible_extract",)],
                "notes": [],
            }
        )
    )
    page = published(run_dir)
    block = page[page.index('<div id="results">') : page.index('<section id="timeline">')]
    for table in accuracy_tables(summarize(run_dir)):
        for text in (table.title, *table.columns, *(cell for row in table.rows for cell in row), *table.notes):
            assert html.escape(text) in block, text
    assert "1.0000 ± 0.0000" in block
    assert "5 ✓" in block, "each question has its row"
    assert "<b>" not in block
    assert "<i>" not in block


def test_a_load_without_a_result_of_its_own_has_no_block_for_it(tmp_path: Path) -> None:
    assert '<div id="results"></div>' in published(run_of(tmp_path / "run", [(0, 500)]))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_result_stands_above_what_every_load_has(tmp_path: Path) -> None:
    """Cards and tables first; quantiles that n does not support are marked in the charts' captions too."""
    run_dir = asked(tmp_path / "run")
    published(run_dir)
    page = dom(run_dir, 1200)
    card, table, first = (page.index(text) for text in ("3 of 3 correct", "accuracy ± stderr", ">TTFT mean<"))
    assert card < table < first
    assert re.search(r"n = 3, p50 [\d.]+ †, p99 [\d.]+ †, max", page)
