"""Files that a user names: replaced through links, written into where they are no regular file, refused early."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atom.cli.outputs import check_distinct, check_writable, write_output
from atom.recipes.errors import RunError, UsageError

SRC = str(Path(__file__).resolve().parents[3] / ".src")


def test_regular_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")
    path.chmod(0o600)
    write_output(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("existing", [True, False])
def test_link_stays_and_its_target_gets_the_text(tmp_path: Path, existing: bool) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "x.json", tmp_path / "link.json"
    if existing:
        target.write_text("old")
    link.symlink_to("data/x.json")
    check_writable("--json", link)
    write_output(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_fifo_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    check_writable("--json", path)  # does not wait for a reader
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    write_output(path, "text")
    reader.join(20)
    assert got == ["text"]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("through_link", [True, False])
def test_device_is_written_into_and_its_refusal_is_said(tmp_path: Path, through_link: bool) -> None:
    path = Path("/dev/full")
    if through_link:
        path = tmp_path / "link"
        path.symlink_to("/dev/full")
    check_writable("--json", path)
    with pytest.raises(RunError, match=rf"cannot write {path}: No space left"):
        write_output(path, "text")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    write_output("/dev/null", "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_descriptor_shares_its_offset_with_what_else_is_printed(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    code = (
        "from atom.cli.outputs import *\nprint('before', flush=True)\n"
        f"check_writable('--json', {name!r})\nwrite_output({name!r}, 'json\\n')\nprint('after')"
    )
    with out.open("w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, env={**os.environ, "PYTHONPATH": SRC})
    assert out.read_text() == "before\njson\nafter\n"


def test_unwritable_outputs_are_refused_and_nothing_is_made(tmp_path: Path) -> None:
    check_writable("--json", tmp_path / "new.json")
    check_writable("--json", "-")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for path, message in (
        (tmp_path, "directory"),
        (tmp_path / "a" / "b.json", "no directory"),
        (tmp_path / ("n" * 300), "too long"),
        (loop, "loop|Too many"),
    ):
        with pytest.raises(UsageError, match=message):
            check_writable("--json", path)
    assert list(tmp_path.iterdir()) == [loop]


def test_two_outputs_for_one_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("x")
    for first, second in (("-", "-"), (tmp_path / "x", tmp_path / "." / "x"), (tmp_path / "x", link)):
        with pytest.raises(UsageError, match=r"--json .* and --junit .*"):
            check_distinct([("--json", first), ("--markdown", None), ("--junit", second)])
    check_distinct([("--json", "/dev/null"), ("--markdown", "/dev/null"), ("--junit", tmp_path / "x")])
