"""The PMPI recorder on a program that knows nothing of it: `python tests/benchmarks/bench_pmpi.py`.

Four ranks sleep 5, 10, 15 and 20 ms before a barrier (`tests/integration/pmpi_program.c`), so they wait for 15, 10, 5
and 0 ms in it. Printed is the median that the record has of each rank, less that of the rank that waits least, and what
a recorded call costs: barriers of one rank by itself, with the recorder and without, by turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from atom.diag.consensus.launcher import Launcher, find_launcher
from atom.diag.consensus.pmpi_build import build_recorder, find_mpicc
from atom.diag.consensus.pmpi_file import read_pmpi_record

PROGRAM = Path(__file__).parents[1] / "integration" / "pmpi_program.c"
EXPECTED_MS = (15.0, 10.0, 5.0, 0.0)
COST = """
import time
from mpi4py import MPI
comm, best = MPI.COMM_SELF, 1e9
for _ in range(20):
    begin = time.perf_counter()
    for _ in range(20_000):
        comm.Barrier()
    best = min(best, time.perf_counter() - begin)
print(best / 20_000 * 1e9)
"""


def recorded(library: Path, folder: Path) -> list[str]:
    return ["env", f"LD_PRELOAD={library}", f"ATOM_PMPI_DIR={folder}"]


def waits_ms(launcher: Launcher, library: Path, program: Path, scratch: Path, calls: int) -> list[float]:
    command = [*recorded(library, scratch / "trace"), str(program), str(scratch / "said-"), str(calls)]
    subprocess.run(launcher.ranks(4, command), check=True)
    ranks = [read_pmpi_record(scratch / "trace" / f"rank-{rank}.pmpi") for rank in range(4)]
    medians = [
        float(np.median([(call.exit - call.enter) / 1e6 for call in one.calls[1:] if call.exit is not None]))
        for one in ranks
    ]
    return [one - min(medians) for one in medians]


def nanoseconds_per_call(launcher: Launcher, preload: list[str]) -> float:
    command = launcher.ranks(1, [*preload, sys.executable, "-c", COST])
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200, help="barriers per repeat")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    launcher = find_launcher()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build_recorder(folder).library
        program = folder / "program"
        subprocess.run([*find_mpicc(), "-O2", str(PROGRAM), "-o", str(program)], check=True)
        print("| wait of ranks 0 / 1 / 2 / 3, ms | expected | largest difference | within 5% |\n|---|---|---|---|")
        for repeat in range(options.repeat):
            (folder / str(repeat)).mkdir()
            waits = waits_ms(launcher, library, program, folder / str(repeat), options.calls)
            off = max(abs(wait / due - 1) for wait, due in zip(waits, EXPECTED_MS, strict=True) if due)
            shown = " / ".join(f"{one:.2f}" for one in waits)
            print(f"| {shown} | 15 / 10 / 5 / 0 | {off:.1%} | {'yes' if off <= 0.05 else 'no'} |", flush=True)
        print("\n| a call without, ns | recorded, ns | the recorder's |\n|---|---|---|")
        for repeat in range(options.repeat):
            (folder / f"cost-{repeat}").mkdir()
            plain = nanoseconds_per_call(launcher, [])
            own = nanoseconds_per_call(launcher, recorded(library, folder / f"cost-{repeat}"))
            print(f"| {plain:.0f} | {own:.0f} | {own - plain:.0f} |")


if __name__ == "__main__":
    main()
