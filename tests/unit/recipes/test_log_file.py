"""The bounded log and the line splitter."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from atom.recipes.log_file import MAX_LINE_BYTES, BoundedLog, LineSplitter


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_lines_do_not_depend_on_how_the_stream_is_cut(data: bytes, cuts: list[int]) -> None:
    whole = LineSplitter()
    expected = [*whole.feed(data), *whole.flush()]
    splitter = LineSplitter()
    got: list[bytes] = []
    last = 0
    for cut in sorted({*cuts, len(data)}):
        got += splitter.feed(data[last:cut])
        last = max(last, min(cut, len(data)))
    got += splitter.flush()
    assert got == expected
    assert expected == [line for line in data.replace(b"\r", b"\n").split(b"\n") if line]


def test_a_line_without_end_is_delivered_in_pieces() -> None:
    splitter = LineSplitter()
    lines = list(splitter.feed(b"x" * (MAX_LINE_BYTES * 3 + 1)))
    assert [len(line) for line in lines] == [MAX_LINE_BYTES] * 3
    assert list(splitter.flush()) == [b"x"]


def test_the_newest_half_is_kept_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    log = BoundedLog(path, 1000)
    for number in range(1000):
        log.write(b"line %d" % number)
    log.close()
    older = Path(f"{path}.1")
    assert path.stat().st_size + older.stat().st_size <= 1000
    kept = (older.read_bytes() + path.read_bytes()).split(b"\n")
    assert kept[-2] == b"line 999"
    assert len(kept) > 50
    assert log.lost_bytes == 0


def test_a_full_disk_loses_lines_and_says_so() -> None:
    log = BoundedLog(Path("/dev/full"), 1000)
    log.write(b"x" * 100)
    log.write(b"y" * 2000)
    log.close()
    assert log.lost_bytes == 101 + 2001
    assert log.error is not None
    assert "No space left" in log.error


def test_a_log_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "none" / "server.log", 1000)
    log.write(b"x")
    assert log.lost_bytes == 2
    assert "No such file" in (log.error or "")
