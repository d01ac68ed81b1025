"""What waiting for an agreement costs a pipeline: `python tests/benchmarks/bench_agreement_arms.py`, or with `--result
FILE` from what `atom trace-consensus run --json FILE` has measured. Prints the section of docs/benchmarks.md.

All figures are medians of the repeats of one invocation. Held against: the blocking wait falls from rank 0 to the last,
which has at most a tenth of rank 0's; time inside asynchronous calls is below 2% of the blocking wait, both summed over
ranks; asynchronous throughput is at least 99% of local-only and 1.5 times blocking.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAST_RANK, IN_LOOP, OF_LOCAL, OF_BLOCKING = 0.10, 0.02, 0.99, 1.5


def measure(requests: int, repeats: int) -> dict[str, Any]:
    code = "import sys; from atom.cli.dispatch import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = ["--requests", str(requests), "--repeats", str(repeats), "--json", str(result), "--quiet"]
        command = [sys.executable, "-c", code, "trace-consensus", "run", *options, "--output-dir", f"{folder}/run"]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(result.read_text())
    return document


def section(document: dict[str, Any]) -> tuple[str, bool]:
    """The Markdown, and whether everything holds."""
    arms = {one["label"]: one for one in document["arms"]}
    blocking, repair, bypass = arms["blocking"], arms["async"], arms["local-only"]
    facts = blocking["facts"]
    stages = ", ".join(f"{one:g}" for one in facts["stage_ms"])
    lines = [
        f"{len(facts['stage_ms'])} stages of {stages} ms (slept, ± {facts['jitter']:.0%}), "
        f"transfers of {facts['transfer_ms']:g} ms, {facts['requests']} requests, at most "
        f"{facts['micro_batches']} in the pipeline and {facts['depth']} not released, "
        f"{blocking['runs']} runs of each arm in turn.",
        "",
        "| arm | completed | req/s (runs) | % of control | wait by rank (s) | CPU by rank (s) | wall (s) |",
        "|---|---|---|---|---|---|---|",
    ]
    control = arms["control"]["requests_per_s"]
    for label, arm in arms.items():
        runs = ", ".join(f"{one:.2f}" for one in arm["requests_per_s_runs"])
        wait = " / ".join("–" if one is None else f"{one:.3f}" for one in arm["wait_s"])
        cpu = " / ".join("–" if one is None else f"{one:.2f}" for one in arm["cpu_s"])
        share = f"{100 * arm['requests_per_s'] / control:.1f}"
        done, rate = f"{arm['completed']}/{arm['total']}", f"{arm['requests_per_s']:.2f} ({runs})"
        lines.append(f"| {label} | {done} | {rate} | {share} | {wait} | {cpu} | {arm['wall_s']:.2f} |")
    waits = blocking["wait_s"]
    falls = all(one > other for one, other in itertools.pairwise(waits))
    last, inside = waits[-1] / waits[0], sum(repair["wait_s"]) / sum(waits)
    of_local = repair["requests_per_s"] / bypass["requests_per_s"]
    of_blocking = repair["requests_per_s"] / blocking["requests_per_s"]
    checks = [
        ("the blocking wait falls from rank to rank", "yes" if falls else "no", "yes", falls),
        ("the last rank's, of rank 0's", f"{last:.2%}", f"≤ {LAST_RANK:.0%}", last <= LAST_RANK),
        ("time in asynchronous calls, of the blocking wait", f"{inside:.2%}", f"< {IN_LOOP:.0%}", inside < IN_LOOP),
        ("async throughput, of local-only", f"{of_local:.2%}", f"≥ {OF_LOCAL:.0%}", of_local >= OF_LOCAL),
        ("async throughput, of blocking", f"{of_blocking:.2f} ×", f"≥ {OF_BLOCKING} ×", of_blocking >= OF_BLOCKING),
    ]
    lines += ["", "| | measured | goal | |", "|---|---|---|---|"]
    lines += [f"| {what} | {value} | {goal} | {'holds' if holds else 'FAILS'} |" for what, value, goal, holds in checks]
    lines += ["", f"Verdict: {document['verdict']['sentence']}."]
    return "\n".join(lines), all(holds for *_, holds in checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--result", type=Path, help="read this instead of measuring")
    options = parser.parse_args()
    measured = (
        measure(options.requests, options.repeats) if options.result is None else json.loads(options.result.read_text())
    )
    text, holds = section(measured)
    print(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
