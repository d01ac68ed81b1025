"""CPUs by number: lists as they are written, and whether this process may use them."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.recipes.cpus import check_cpus, check_pinnable, format_cpus, own_cpus, parse_cpus
from atom.recipes.errors import UsageError
from atom.recipes.recipe import Recipe


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 5 , 4-5", (4, 5)), ("8191", (8191,))]
)
def test_lists_are_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus("--server-cpus", text) == cpus


@pytest.mark.parametrize("text", ["", ",", "a", "3-1", "-1", "0-99999", "8192", "0--1", "1.5", "0-", "٣"])
def test_what_is_no_list_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--server-cpus must be numbers of CPUs"):
        parse_cpus("--server-cpus", text)


@given(st.sets(st.integers(0, 8191), min_size=1))
def test_what_is_written_is_read_again(cpus: set[int]) -> None:
    assert parse_cpus("--cpus", format_cpus(cpus)) == tuple(sorted(cpus))


def test_own_cpus_can_be_used_and_asking_moves_nobody() -> None:
    before = os.sched_getaffinity(0)
    check_cpus("--server-cpus", own_cpus())
    assert os.sched_getaffinity(0) == before == set(own_cpus())


def test_a_cpu_that_is_not_there_names_the_flag_and_what_there_is() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(UsageError, match=r"--client-cpus .*8190-8191.*cannot use CPU 8190-8191; it runs on "):
        check_cpus("--client-cpus", [own_cpus()[0], 8190, 8191])
    assert os.sched_getaffinity(0) == before


def test_a_server_that_somebody_else_starts_cannot_be_pinned() -> None:
    def recipe(*prefix: str) -> Recipe:
        return Recipe(name="r", source="test", command=("serve",), exec=prefix)

    check_pinnable("--server-cpus", recipe())
    check_pinnable("--server-cpus", recipe("numactl", "--membind", "0"))
    with pytest.raises(UsageError, match="--server-cpus: recipe r starts its server through docker"):
        check_pinnable("--server-cpus", recipe("/usr/bin/docker", "exec", "x"))
