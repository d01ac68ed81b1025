"""Tables and progress lines: what a person reads."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from atom.bench.metrics import distribution
from atom.bench.runner import Progress
from atom.cli.get import _resolve
from atom.cli.progress import LoadProgress, StatusLine, progress_line
from atom.cli.publish import TableConsole
from atom.cli.render import SEPARATOR, Table, bench_tables, markdown, number, print_tables
from atom.recipes.errors import UsageError


def summary(**more: Any) -> dict[str, Any]:
    figures = {}
    for name in ("ttft", "itl", "tpot", "e2el"):
        figures |= {key: f.as_dict() for key, f in distribution(name, [1.0, 2.0, 3.0], [50, 99]).items()}
    names = (
        *("completed", "failed", "cancelled", "duration", "request_throughput", "output_throughput"),
        *("total_token_throughput", "max_output_tokens_per_s", "mean_concurrency", "max_concurrent_requests"),
        *("p99_client_lag_ms", "max_client_lag_ms", "client_cpu_share"),
    )
    figures |= {name: {"value": 3.0, "unit": "x", "n": 1, "definition": "", "supported": True} for name in names}
    return {
        "title": "random",
        "load": {"model": "m", "num_prompts": 3, "max_concurrency": 2, "request_rate": "inf"},
        "server": {},
        "validity": "valid",
        "reasons": [],
        "errors": [],
        "anomalies": {},
        "notes": [],
        "checks": [],
        "figures": figures,
        **more,
    }


def text_of(tables: list[Table]) -> str:
    stream = io.StringIO()
    print_tables(tables, Console(file=stream, width=120))
    return stream.getvalue()


def test_numbers_keep_about_four_digits() -> None:
    assert [number(v) for v in (None, 0, 0.0123, 1.234, 12.345, 123.45, 1234.5, 1234567.0)] == [
        *("–", "0", "0.012", "1.23", "12.35", "123.5", "1,234", "1,234,567")
    ]


def test_table_has_the_rows_and_marks_unsupported_quantiles() -> None:
    text = text_of(bench_tables(summary(), "run/report.html"))
    for word in ("TTFT", "ITL", "TPOT", "E2EL", "req/s", "tok/s", "run/report.html"):
        assert word in text
    assert "2.98 †" in text
    assert "not supported by n" in text


def test_simulated_run_says_so_in_every_format() -> None:
    tables = bench_tables(summary(server={"executor": "simulated"}))
    assert "SIMULATED" in text_of(tables)
    assert "SIMULATED" in markdown(tables)


def test_server_figures_appear_when_captured() -> None:
    data = summary()
    assert "gen-2" not in text_of(bench_tables(data))
    data["figures"]["gen2_share"] = {
        "value": 0.0123,
        "unit": "fraction",
        "n": 4,
        "definition": "",
        "supported": True,
        "label": "gen-2 share",
        "side": "server",
    }
    assert "1.23%" in text_of(bench_tables(data))


def test_invalid_run_says_why() -> None:
    text = text_of(bench_tables(summary(validity="not valid", reasons=["client saturated: late"])))
    assert "NOT VALID: client saturated: late" in text


def test_anomalies_and_errors_are_shown() -> None:
    data = summary(anomalies={"missing_done": 2}, errors=[{"class": "http_500", "count": 7, "message": "boom"}])
    text = text_of(bench_tables(data))
    assert "missing_done × 2" in text
    assert "7 × http_500: boom" in text


def test_markdown_survives_hostile_text() -> None:
    data = summary(errors=[{"class": "x", "count": 1, "message": "a | b\n<img> `c` [d](e)"}])
    lines = markdown(bench_tables(data)).splitlines()
    assert "- 1 × x: a \\| b &lt;img&gt; \\`c\\` \\[d\\](e)" in lines
    for line in lines:
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") in (3, 6)


def test_rich_markup_of_a_server_stays_text() -> None:
    data = summary(errors=[{"class": "x", "count": 1, "message": "[bold]no[/bold] [/x]"}])
    assert "[bold]no[/bold] [/x]" in text_of(bench_tables(data))


def test_progress_line() -> None:
    progress = Progress(phase="measured", total=10, completed=4, failed=1, running=3, output_tokens=500, elapsed_s=2.0)
    progress.ttft_sum_ms, progress.ttft_count, progress.first_error = 90.0, 3, "http_500: boom"
    line = progress_line(progress, bar=False)
    assert line == "5/10  250 tok/s  TTFT 30 ms  3 running  1 errors (http_500: boom)  2 s"
    assert progress_line(progress, bar=True).startswith("━" * 12 + "╌" * 12)


def test_requests_that_were_cancelled_are_not_done() -> None:
    progress = Progress(phase="measured", total=200, completed=3, cancelled=64, elapsed_s=2.0)
    assert progress_line(progress, bar=False) == "3/200  0 tok/s  0 running  64 cancelled  0 errors  2 s"
    progress.total = 12
    assert progress_line(progress, bar=True).startswith("━" * 6 + "╌" * 18)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "rewrites"), [(Terminal(), True), (io.StringIO(), False)])
def test_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(stream: io.StringIO, rewrites: bool) -> None:
    with LoadProgress(StatusLine(stream), quiet=False) as show:
        show(Progress(phase="measured", total=1, completed=1, elapsed_s=1.0))
        deadline = time.monotonic() + 20
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    written = stream.getvalue()
    assert ("\r\x1b[2K" in written) == rewrites
    assert written.endswith("1 s\n")


def test_quiet_prints_nothing() -> None:
    stream = io.StringIO()
    with LoadProgress(StatusLine(stream), quiet=True) as show:
        show(Progress(phase="measured"))
    assert stream.getvalue() == ""


def test_status_line_fits_and_passes_no_control_character_on() -> None:
    progress = Progress(
        phase="measured", total=10_000, completed=4, failed=1, running=3, output_tokens=5, elapsed_s=2.0
    )
    progress.first_error = "bad\n\x1b[2J" + "宽" * 60
    for width in (20, 79, 119):
        line = progress_line(progress, bar=True, width=width)
        stream = Terminal()
        status = StatusLine(stream)
        status.show(line)
        frame = stream.getvalue().removeprefix("\r\x1b[2K")
        assert "\x1b" not in frame
        assert "\n" not in frame
        assert cell_len(frame) <= 79


@pytest.mark.parametrize("width", [50, 60, 80, 120, 300])
@pytest.mark.parametrize("executor", ["cpu", "simulated"])
def test_title_breaks_between_its_parts(width: int, executor: str) -> None:
    load = {"model": "SmolLM2-135M-Instruct.Q4_1.gguf", "num_prompts": 3, "max_concurrency": 2, "request_rate": 7}
    tables = bench_tables(summary(load=load, server={"executor": executor}))[:1]
    stream = io.StringIO()
    print_tables(tables, Console(file=stream, width=width))
    title = stream.getvalue().partition("latency")[0]
    lines = [line.strip() for line in title.splitlines() if line.strip()]
    assert SEPARATOR.join(lines) == tables[0].title
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("metric", "near"),
    [
        ("TTFT", "median_ttft_ms"),
        ("itl", "p99_itl_ms"),
        ("ttft_ms", "mean_ttft_ms"),
        ("P99-TTFT", "p99_ttft_ms"),
        ("outputthroughput", "output_throughput"),
    ],
)
def test_unknown_figure_suggests_near_names(metric: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"did you mean .*\b{near}\b"):
        _resolve(metric, summary()["figures"])


@pytest.mark.parametrize("width", range(30, 121, 3))
def test_no_number_of_a_load_is_cut(width: int) -> None:
    tables = bench_tables(summary())
    stream = io.StringIO()
    print_tables(tables, Console(file=stream, width=width))
    numbers = re.compile(r"\d(?:[\d.,]*\d)?")
    assert set(numbers.findall(stream.getvalue())) == set(numbers.findall(markdown(tables)))
    assert all(cell_len(line) <= width for line in stream.getvalue().splitlines())


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("47", 47), ("wide", 100)])
def test_a_log_is_wider_than_rich_takes_it_for(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert TableConsole().width == width
