"""Halves of machines of every shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.diag.compare.model import Half
from atom.diag.compare.placement import Machine, choose_placement, this_machine
from atom.recipes.cpus import own_cpus
from atom.recipes.errors import UsageError


def machine(cores: int, *, threads: int = 1, nodes: int = 1, gpus: int = 0, quota: float | None = None) -> Machine:
    """Numbered as Linux does: all first hyperthreads, then all second ones; nodes in blocks of cores."""
    cpus = tuple(range(cores * threads))
    return Machine(
        devices=tuple(range(gpus)),
        cpus=cpus,
        cores={cpu: cpu % cores for cpu in cpus},
        nodes={cpu: cpu % cores * nodes // cores for cpu in cpus},
        quota=quota,
    )


def test_few_cpus_take_turns() -> None:
    for cpus in (1, 2, 3):
        placement = choose_placement(machine=machine(cpus))
        assert placement.halves == (Half(name="whole"),)
        assert not placement.concurrent
        assert f"{cpus} CPUs" in placement.reason


def test_cpus_are_halved_and_clients_are_apart() -> None:
    first, second = choose_placement(machine=machine(8)).halves
    assert (first.server_cpus, first.client_cpus) == ((0, 1, 2), (3,))
    assert (second.server_cpus, second.client_cpus) == ((4, 5, 6), (7,))


def test_hyperthreads_stay_together() -> None:
    first, second = choose_placement(machine=machine(4, threads=2)).halves
    assert (first.server_cpus, first.client_cpus) == ((0, 4), (1, 5))
    assert (second.server_cpus, second.client_cpus) == ((2, 6), (3, 7))
    one_core_each = choose_placement(machine=machine(2, threads=2)).halves
    assert [(half.server_cpus, half.client_cpus) for half in one_core_each] == [((0,), (2,)), ((1,), (3,))]


def test_nodes_are_halves_where_they_can_be() -> None:
    placement = choose_placement(machine=machine(32, threads=2, nodes=2, gpus=8))
    first, second = placement.halves
    assert (first.devices, second.devices) == ("0,1,2,3", "4,5,6,7")
    assert {*first.server_cpus, *first.client_cpus} == {*range(16), *range(32, 48)}
    assert len(first.client_cpus) == 8
    assert "NUMA nodes" in placement.reason
    uneven = Machine(cpus=tuple(range(6)), nodes={cpu: int(cpu > 3) for cpu in range(6)})
    assert len(choose_placement(machine=uneven).halves) == 2


def test_one_gpu_is_for_one_arm_at_a_time() -> None:
    placement = choose_placement(machine=machine(16, gpus=1))
    (half,) = placement.halves
    assert half.devices == "0"
    assert (len(half.server_cpus), len(half.client_cpus)) == (12, 4)
    assert "there is one GPU" in placement.reason


def test_an_odd_gpu_is_left_out() -> None:
    placement = choose_placement(machine=machine(16, gpus=5))
    assert [half.devices for half in placement.halves] == ["0,1", "2,3"]
    assert "GPU 4 is left out" in placement.reason


def test_many_gpus_and_few_cpus_are_not_pinned() -> None:
    placement = choose_placement(machine=machine(2, gpus=2))
    assert placement.halves == (Half(name="first", devices="0"), Half(name="second", devices="1"))
    assert "nothing is pinned" in placement.reason


def test_a_quota_counts_and_not_what_can_be_seen() -> None:
    placement = choose_placement(machine=machine(64, quota=2.0))
    assert not placement.concurrent
    assert "a quota of 2 CPUs" in placement.reason
    assert choose_placement(machine=machine(64, quota=8.0)).concurrent


def test_what_is_asked_for_is_done() -> None:
    two = choose_placement(asked="halves", machine=machine(2))
    assert [(half.server_cpus, half.client_cpus) for half in two.halves] == [((0,), (0,)), ((1,), (1,))]
    assert "too few to keep clients apart" in two.reason
    serial = choose_placement(asked="serial", machine=machine(8, gpus=2))
    assert [half.devices for half in serial.halves] == ["0,1"]
    given = choose_placement("0,3/1-2", "0-3/4-7", machine=machine(8, gpus=4))
    assert [half.devices for half in given.halves] == ["0,3", "1,2"]
    assert [{*half.server_cpus, *half.client_cpus} for half in given.halves] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    some = choose_placement("2-3", "0-3", machine=machine(8, gpus=4))
    assert [half.devices for half in some.halves] == ["2", "3"]
    assert {cpu for half in some.halves for cpu in (*half.server_cpus, *half.client_cpus)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("devices", "cpus", "asked", "words"),
    [
        (None, None, "both", "--placement must be one of auto, halves, serial; got 'both'"),
        ("0-1/1-2", None, "auto", "--devices 0-1/1-2: 1 is in both halves"),
        ("0/1-2", None, "auto", "--devices 0/1-2: the halves have 1 and 2"),
        ("0/1/2", None, "auto", "--devices 0/1/2: that are 3 parts"),
        ("a", None, "auto", "--devices must be numbers of GPUs such as 0-3"),
        ("", None, "auto", "--devices must be numbers of GPUs"),
        ("3-1", None, "auto", "--devices: 3-1 is no range"),
        ("0-9999", None, "auto", "--devices: 0-9999 is no range"),
        ("0", None, "halves", "--placement halves needs two GPUs, and there is 1"),
        ("0/1", None, "serial", "--devices names two halves"),
        (None, "0-1/2-3", "serial", "--cpus names two halves"),
        (None, "0-3/2-5", "auto", "--cpus 0-3/2-5: 2-3 is in both halves"),
        (None, "0-3/8-11", "auto", "--cpus 0-3/8-11: this process cannot use CPU 8-11; it has 0-7"),
        (None, "x", "auto", "--cpus must be numbers of CPUs"),
        (None, "0", "halves", "--placement halves needs two CPUs"),
    ],
)
def test_what_cannot_be_names_its_flag(devices: str | None, cpus: str | None, asked: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_placement(devices, cpus, asked=asked, machine=machine(8))
    assert words in str(caught.value)


@given(
    cores=st.integers(1, 80),
    threads=st.integers(1, 2),
    nodes=st.integers(1, 4),
    gpus=st.integers(0, 9),
    asked=st.sampled_from(["auto", "serial", "halves"]),
)
def test_halves_are_equal_and_nothing_is_given_twice(
    cores: int, threads: int, nodes: int, gpus: int, asked: str
) -> None:
    whole = machine(cores, threads=threads, nodes=nodes, gpus=gpus)
    try:
        placement = choose_placement(asked=asked, machine=whole)
    except UsageError:
        assert asked == "halves"
        assert gpus == 1 or (gpus == 0 and cores * threads == 1)
        return
    halves = placement.halves
    sizes = {(len(half.server_cpus), len(half.client_cpus), len(half.devices or "")) for half in halves}
    assert len(sizes) == 1
    if len(whole.cpus) >= 4:
        used = [cpu for half in halves for cpu in (*half.server_cpus, *half.client_cpus)]
        assert len(used) == len(set(used))
        assert set(used) <= set(whole.cpus)
        assert all(half.server_cpus and half.client_cpus for half in halves)
    assert placement.concurrent or asked != "halves"


def test_the_machine_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    first = own_cpus()[0]
    folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{first}"
    (folder / "topology").mkdir(parents=True)
    (folder / "node3").mkdir()
    (folder / "topology" / "thread_siblings_list").write_text("0,64\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    found = this_machine(sys=tmp_path, dev=tmp_path)
    assert (found.cpus, found.devices) == (own_cpus(), (0, 1))
    assert (found.cores, found.nodes) == ({first: 0}, {first: 3})
    assert this_machine(gpus=False, sys=tmp_path, dev=tmp_path).devices == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert this_machine(sys=tmp_path, dev=tmp_path).devices == (5, 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine(sys=tmp_path, dev=tmp_path).devices == ()


def test_gpus_of_another_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for number, units in enumerate((0, 256, 256)):
        node = tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 1\nsimd_count {units}\n")
    assert this_machine(sys=tmp_path, dev=tmp_path).devices == (0, 1)
