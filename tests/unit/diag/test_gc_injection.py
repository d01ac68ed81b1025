"""The hook's environment and actions; what is told of a process from its command line and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.diag.elf_symbols import ElfError, read_symbols
from atom.diag.gc_hook import ACTION_VARIABLE, check_action
from atom.diag.gc_injection import hook_environment, print_env
from atom.diag.python_process import is_python, isolating_option
from atom.recipes.processes import executable_of
from atom.recipes.recipe import Roles


@pytest.mark.parametrize(
    "text", ["freeze", "freeze:2.5", "disable", "threshold:700", "threshold:700,10,10", " freeze "]
)
def test_actions(text: str) -> None:
    assert check_action(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "none of freeze"),
        ("thaw", "none of freeze"),
        ("disable:1", "none of freeze"),
        ("freeze:", "freeze takes the seconds"),
        ("freeze:0.1", "at least 0.5"),
        ("freeze:-3", "freeze takes the seconds"),
        ("freeze:inf", "freeze takes the seconds"),
        ("threshold:", "one to three whole numbers"),
        ("threshold:0,10,10", "the first above 0"),
        ("threshold:1,2,3,4", "one to three whole numbers"),
        ("threshold:99999999999", "one to three whole numbers"),
    ],
)
def test_what_is_no_action_says_what_would_be_one(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_action(text)
    with pytest.raises(ValueError, match=message):
        hook_environment(Path("/tmp"), Roles(), text)


def test_the_printed_environment_works_in_a_shell(tmp_path: Path) -> None:
    directory = tmp_path / "with blank and 'quote'"
    text = print_env(directory, Roles(api=("the 'api'",)), "freeze")
    done = subprocess.run(
        ["sh", "-c", f'eval "$TEXT"; exec "{sys.executable}" -c "import gc; gc.collect()" "the \'api\'"'],
        env={"TEXT": text, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
    (record,) = directory.glob("gc-api-*.jsonl")
    assert '"type":"pass"' in record.read_text()
    assert ACTION_VARIABLE in text
    mounts = [line.split("-v ")[1] for line in text.splitlines() if line.startswith("#   -v /")]
    assert all(Path(mount.split(":")[0]).is_dir() for mount in mounts)
    assert len(mounts) == 2


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python server.py -I", None),
        ("python -I server.py", "-I"),
        ("python -uE -m server", "-E"),
        ("python -bS -c pass", "-S"),
        ("python -c pass -I", None),
        ("python -mserver -I", None),
        ("python -W error -X dev -s server.py -E", None),
        ("python -Werror -I", "-I"),
        ("python --check-hash-based-pycs default -I x", "-I"),
        ("python - -I", None),
        ("python", None),
        ("", None),
    ],
)
def test_options_that_keep_the_hook_out(command: str, option: str | None) -> None:
    assert isolating_option(command.split()) == option


def test_a_python_process_is_known_by_its_program_or_its_library() -> None:
    assert is_python(os.getpid(), executable_of(os.getpid())) is True
    with subprocess.Popen(["sleep", "600"]) as process:
        assert is_python(process.pid, executable_of(process.pid)) is False
        process.kill()
    assert is_python(process.pid, None) is None


def test_symbols_of_the_running_interpreter() -> None:
    symbols = read_symbols(Path(sys.executable).resolve(), ["main", "_start", "nothing_of_this_name"])
    assert "nothing_of_this_name" not in symbols.addresses


def _own_bytes() -> bytes:
    return Path(sys.executable).resolve().read_bytes()[: 1 << 16]


@given(st.data())
def test_files_that_are_no_programs_are_refused_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("elf") / "file"
    content = bytearray(_own_bytes())
    for at in data.draw(st.lists(st.integers(0, 800), max_size=20)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        symbols = read_symbols(path, ["main"])
    except ElfError:
        return
    assert set(symbols.addresses) <= {"main"}
