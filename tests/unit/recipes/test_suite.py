"""Suites of loads: the built-in ones are right, and what is wrong with one is said by file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.recipes.check import main as check
from atom.recipes.errors import UsageError
from atom.recipes.suite import builtin_suites, default_suite, load_suite, resolve_suite

SUITE = """
name: mine
loads:
  - name: one
    bench: random
    recipe: simulated
    server_args: [--sim-base-ms, 8]
    env: {NAME: 3}
    options: {random-input-len: 64, goodput: [ttft:500, tpot:30], ignore-eos: true}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "suites" / "mine.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_built_in_suites_are_named_as_their_files() -> None:
    assert {"cpu", "documents", "gpu", "small"} <= set(builtin_suites())
    for name in builtin_suites():
        suite = resolve_suite(name)
        assert suite.name == name
        assert suite.loads
        assert suite.description


def test_a_suite_is_read_with_arguments_and_variables_as_text(tmp_path: Path) -> None:
    suite = load_suite(write(tmp_path, SUITE))
    assert suite.loads[0]["server_args"] == ["--sim-base-ms", "8"]
    assert suite.loads[0]["env"] == {"NAME": "3"}
    assert suite.loads[0]["options"] == {"random-input-len": 64, "goodput": ["ttft:500", "tpot:30"], "ignore-eos": True}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bench: random", "banch: random", r"line 5: field `loads\[0\].banch` is unknown; did you mean `bench`?"),
        ("    bench: random\n", "", r"field `loads\[0\].bench` is missing; it must be a subcommand of `atom bench`"),
        ("name: one", "name: One!", r"line 4: field `loads\[0\].name` is \"One!\"; it must be lower-case letters"),
        (
            "ignore-eos: true",
            "ignore-eos: false",
            r"it must be a number, a text, a list of them .*, or true for a flag",
        ),
        ("ignore-eos", "Ignore", r"has a name that must match"),
        ("name: mine", "title: mine", r"is unknown|is missing"),
        ("recipe: simulated", "margin_pct: 0", r"differences within ± this many percent"),
        ("recipe: simulated", "section: other", r"load, gc or accuracy"),
    ],
)
def test_what_is_wrong_is_said_by_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, SUITE.replace(old, new))
    with pytest.raises(UsageError, match=message) as error:
        load_suite(path)
    assert str(error.value).startswith(f"suite {path}, line ")


def test_two_loads_of_one_name(tmp_path: Path) -> None:
    path = write(tmp_path, SUITE + "  - {name: one, bench: random}\n")
    with pytest.raises(UsageError, match=r"line 10: field `loads\[1\].name` is 'one' again"):
        load_suite(path)


def test_a_suite_that_there_is_not() -> None:
    with pytest.raises(UsageError, match="no suite 'nightly'; there are cpu, documents, gpu, small, or give the path"):
        resolve_suite("nightly")
    with pytest.raises(UsageError, match=r"suite nightly.yaml: cannot read it"):
        resolve_suite("./nightly.yaml")


def test_the_recipe_check_reads_suites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check([]) == 0
    path = write(tmp_path, SUITE.replace("bench: random", "bench: 3"))
    assert check([str(path)]) == 2
    captured = capsys.readouterr()
    assert f"suite {path}, line 5" in captured.err
    assert "1 wrong" in captured.out


def test_the_default_fits_the_machine() -> None:
    assert default_suite(gpus=0, own_servers=False) == "cpu"
    assert default_suite(gpus=8, own_servers=False) == "cpu"  # the engine of this project's refs computes on CPUs
    assert default_suite(gpus=0, own_servers=True) == "small"
    assert default_suite(gpus=2, own_servers=True) == "gpu"
