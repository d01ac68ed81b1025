"""Where the arms run: devices and CPUs of each half of the machine, with the client's CPUs apart from the server's.

`choose_placement` decides from numbers alone; `this_machine` is where they come from. Cores are cut along hardware:
hyperthreads of one core stay together, and so do the cores of a NUMA node where halves can be made of whole nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from atom.diag.compare.model import Half, Placement
from atom.diag.machine import cpu_quota
from atom.recipes.cpus import format_cpus, own_cpus, parse_cpus
from atom.recipes.errors import UsageError

__all__ = ["WAYS", "Machine", "choose_placement", "this_machine"]

WAYS: Final = ("auto", "halves", "serial")
"""Values of `--placement`."""

_FEWEST_FOR_HALVES: Final = 4
"""CPUs: below, a half could not keep client and server apart."""
_CLIENT_SHARE: Final = 4
"""One core in so many is the client's,"""
_CLIENT_MOST: Final = 8
"""but no more than these: a load generator is no bigger for a bigger server."""
_MOST_DEVICES: Final = 1024
_DEVICES: Final = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What there is to share."""

    devices: tuple[int, ...] = ()
    cpus: tuple[int, ...]
    cores: Mapping[int, int] = field(default_factory=dict)
    """CPU → the lowest of its core's hyperthreads; one that is missing is a core of its own."""
    nodes: Mapping[int, int] = field(default_factory=dict)
    """CPU → NUMA node."""
    quota: float | None = None
    """CPUs' worth of time that a container may use; None: no limit."""

    @property
    def at_once(self) -> float:
        """So many of the CPUs can be busy."""
        return len(self.cpus) if self.quota is None else min(self.quota, len(self.cpus))

    def among(self, cpus: Iterable[int]) -> list[tuple[int, ...]]:
        """Whole cores of these CPUs, in the order of node and number."""
        found: dict[int, list[int]] = {}
        for cpu in sorted(cpus, key=lambda one: (self.nodes.get(one, 0), self.cores.get(one, one), one)):
            found.setdefault(self.cores.get(cpu, cpu), []).append(cpu)
        return [tuple(core) for core in found.values()]


def choose_placement(
    devices: str | None = None, cpus: str | None = None, *, asked: str = "auto", machine: Machine | None = None
) -> Placement:
    """Two halves where the machine has them, else one. UsageError that names the flag which asks for what cannot be.

    `devices`, `cpus`, `asked`: `--devices`, `--cpus` and `--placement` as they were given. `0-3/4-7` are the halves,
    `0-3` is all there is to share. `machine`: default `this_machine()`.
    """
    if asked not in WAYS:
        raise UsageError(f"--placement must be one of {', '.join(WAYS)}; got {asked!r}")
    machine = machine or this_machine()
    device_sets, cpu_sets = _device_sets(devices, machine), _cpu_sets(cpus, machine)
    if (len(device_sets) == 2 or len(cpu_sets) == 2) and asked == "serial":
        flag = "--devices" if len(device_sets) == 2 else "--cpus"
        raise UsageError(f"{flag} names two halves, and --placement serial runs in one: leave one of them out")
    if device_sets[0]:
        return _with_devices(machine, asked, device_sets, cpu_sets)
    return _without_devices(machine, asked, cpu_sets)


# ---- what was asked for ----------------------------------------------------------------------------------------------


def _device_sets(text: str | None, machine: Machine) -> list[tuple[int, ...]]:
    """One set, or two."""
    if text is None:
        return [machine.devices]
    sets = [_devices_of(text, part) for part in text.split("/")]
    _check_halves("--devices", text, sets)
    return sets


def _devices_of(text: str, part: str) -> tuple[int, ...]:
    if not _DEVICES.fullmatch(part.strip()):
        raise UsageError(f"--devices must be numbers of GPUs such as 0-3, or two halves such as 0-3/4-7; got {text!r}")
    numbers: set[int] = set()
    for one in part.strip().split(","):
        first, _, last = one.partition("-")
        if int(last or first) >= _MOST_DEVICES or int(last or first) < int(first):
            raise UsageError(f"--devices: {one} is no range of GPUs")
        numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _cpu_sets(text: str | None, machine: Machine) -> list[tuple[int, ...]]:
    if text is None:
        return [machine.cpus]
    sets = [parse_cpus("--cpus", part) for part in text.split("/")]
    _check_halves("--cpus", text, sets)
    missing = sorted({cpu for part in sets for cpu in part} - set(machine.cpus))
    if missing:
        raise UsageError(
            f"--cpus {text}: this process cannot use CPU {format_cpus(missing)}; it has {format_cpus(machine.cpus)}"
        )
    return sets


def _check_halves(flag: str, text: str, sets: Sequence[tuple[int, ...]]) -> None:
    if len(sets) > 2:
        raise UsageError(f"{flag} {text}: that are {len(sets)} parts; give two halves, such as 0-3/4-7")
    if len(sets) == 2:
        if both := sorted(set(sets[0]) & set(sets[1])):
            raise UsageError(f"{flag} {text}: {format_cpus(both)} is in both halves")
        if len(sets[0]) != len(sets[1]):
            raise UsageError(f"{flag} {text}: the halves have {len(sets[0])} and {len(sets[1])}; they must be equal")


# ---- with GPUs -------------------------------------------------------------------------------------------------------


def _with_devices(
    machine: Machine, asked: str, devices: list[tuple[int, ...]], cpus: list[tuple[int, ...]]
) -> Placement:
    if len(devices) == 1:
        (all_of_them,) = devices
        if asked == "serial" or len(all_of_them) < 2:
            if asked == "halves":
                raise UsageError(
                    f"--placement halves needs two GPUs, and there is {len(all_of_them)}: leave it out, and the arms "
                    "run one after the other"
                )
            return _whole(machine, all_of_them, cpus, "as asked for" if asked == "serial" else "there is one GPU")
        each = len(all_of_them) // 2
        devices = [all_of_them[:each], all_of_them[each : 2 * each]]
        spare = all_of_them[2 * each :]
    else:
        spare = ()
    left_out = f"; GPU {format_cpus(spare)} is left out, so that both have as many" if spare else ""
    shares, how = _cpu_halves(machine, cpus)
    halves = tuple(
        _half(machine, name, share, devices=own)
        for name, own, share in zip(("first", "second"), devices, shares, strict=True)
    )
    return Placement(
        halves=halves,
        reason=f"both arms at once, {len(devices[0])} GPU{'s' * (len(devices[0]) > 1)} each{left_out}; {how}",
    )


def _whole(machine: Machine, devices: tuple[int, ...], cpus: list[tuple[int, ...]], why: str) -> Placement:
    every = tuple(cpu for part in cpus for cpu in part)
    share = every if min(machine.at_once, len(every)) >= _FEWEST_FOR_HALVES else ()
    half = _half(machine, "whole", share, devices=devices)
    apart = f"{len(half.client_cpus)} of {len(every)} CPUs are the client's" if share else "nothing is pinned"
    return Placement(halves=(half,), reason=f"one arm after the other: {why}; {apart}")


# ---- without ---------------------------------------------------------------------------------------------------------


def _without_devices(machine: Machine, asked: str, cpus: list[tuple[int, ...]]) -> Placement:
    every = tuple(cpu for part in cpus for cpu in part)
    busy = min(machine.at_once, len(every))
    if len(cpus) == 1 and asked != "halves" and (asked == "serial" or busy < _FEWEST_FOR_HALVES):
        few = f"{len(every)} CPUs" if busy == len(every) else f"a quota of {busy:g} CPUs"
        why = "as asked for" if asked == "serial" else f"{few} {'are' if busy == len(every) else 'is'} too few for two"
        return _whole(machine, (), cpus, why)
    if len(every) < 2:
        raise UsageError("--placement halves needs two CPUs, and this process may use one")
    shares, how = _cpu_halves(machine, cpus, at_least=2)
    halves = tuple(_half(machine, name, share) for name, share in zip(("first", "second"), shares, strict=True))
    crowded = "" if len(shares[0]) > 1 else ": too few to keep clients apart from servers"
    return Placement(halves=halves, reason=f"both arms at once, no GPU; {how}{crowded}")


# ---- CPUs ------------------------------------------------------------------------------------------------------------


def _cpu_halves(
    machine: Machine, cpus: list[tuple[int, ...]], *, at_least: int = _FEWEST_FOR_HALVES
) -> tuple[list[tuple[int, ...]], str]:
    """Two equal shares, and how they were made; two empty ones where there are too few to pin anything."""
    if len(cpus) == 2:
        return cpus, "CPUs as given"
    (every,) = cpus
    if len(every) < at_least:
        return [(), ()], f"nothing is pinned: {len(every)} CPUs are too few"
    by_node: dict[int, list[int]] = {}
    for cpu in every:
        by_node.setdefault(machine.nodes.get(cpu, 0), []).append(cpu)
    nodes = [by_node[node] for node in sorted(by_node)]
    middle = len(nodes) // 2
    low, high = sum(map(len, nodes[:middle])), sum(map(len, nodes[middle:]))
    if len(nodes) % 2 == 0 and low == high:
        halves = [tuple(cpu for node in part for cpu in node) for part in (nodes[:middle], nodes[middle:])]
        return halves, f"{len(halves[0])} CPUs each, of NUMA nodes of their own"
    cores = machine.among(every)
    if len(cores) < 2:  # two hyperthreads of one core
        return [(every[0],), (every[1],)], "one hyperthread each, of the same core"
    each = len(cores) // 2
    halves = [tuple(cpu for core in part for cpu in core) for part in (cores[:each], cores[each : 2 * each])]
    size = min(map(len, halves))
    return [half[:size] for half in halves], f"{size} CPU{'s' * (size > 1)} each"


def _half(machine: Machine, name: str, share: tuple[int, ...], *, devices: tuple[int, ...] = ()) -> Half:
    server, client = _split(machine, share)
    return Half(
        name=name,
        devices=",".join(map(str, devices)) or None,
        server_cpus=tuple(sorted(server)),
        client_cpus=tuple(sorted(client)),
    )


def _split(machine: Machine, share: tuple[int, ...]) -> tuple[Sequence[int], Sequence[int]]:
    """Server's and client's CPUs: whole cores where there are two, hyperthreads where there is one core."""
    units = machine.among(share)
    if len(units) == 1:
        units = [(cpu,) for cpu in share]
    if len(units) < 2:
        return share, share
    clients = min(max(len(units) // _CLIENT_SHARE, 1), _CLIENT_MOST)
    server = [cpu for unit in units[:-clients] for cpu in unit]
    return server, [cpu for unit in units[-clients:] for cpu in unit]


# ---- the machine at hand ---------------------------------------------------------------------------------------------

_SYS: Final = Path("/sys")
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def this_machine(*, gpus: bool = True, sys: Path = _SYS, dev: Path = Path("/dev")) -> Machine:
    """The CPUs and GPUs that this process may use, and what sysfs shows of cores and nodes. Without `gpus` for servers
    that use none."""
    cpus = own_cpus()
    cores: dict[int, int] = {}
    nodes: dict[int, int] = {}
    for cpu in cpus:
        folder = sys / "devices" / "system" / "cpu" / f"cpu{cpu}"
        with contextlib.suppress(OSError, UsageError):
            cores[cpu] = parse_cpus("", (folder / "topology" / "thread_siblings_list").read_text().strip())[0]
        for entry in folder.glob("node[0-9]*"):
            nodes[cpu] = int(entry.name.removeprefix("node"))
    devices = _gpus(sys, dev) if gpus else ()
    return Machine(devices=devices, cpus=cpus, cores=cores, nodes=nodes, quota=cpu_quota())


def _gpus(sys: Path, dev: Path) -> tuple[int, ...]:
    """Those that an environment variable leaves, else all that the drivers show, by number."""
    for name in _VISIBLE:
        if (value := os.environ.get(name)) is not None:
            return tuple(int(one) for one in value.split(",") if one.strip().isdigit())
    nvidia = sum(bool(re.fullmatch(r"nvidia\d+", entry.name)) for entry in dev.glob("nvidia*"))
    amd = 0
    for properties in (sys / "class" / "kfd" / "kfd" / "topology" / "nodes").glob("*/properties"):
        with contextlib.suppress(OSError):
            amd += re.search(r"^simd_count [1-9]", properties.read_text(), re.MULTILINE) is not None
    return tuple(range(nvidia or amd))
