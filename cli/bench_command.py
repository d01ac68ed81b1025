"""What every `atom bench` command does with its options: check them, and make a `BenchRun` of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from atom.bench.load import Endpoint
from atom.bench.rundir import RunDirectory
from atom.cli import options as opt
from atom.cli.bench_checks import check_numbers, check_texts
from atom.cli.bench_run import BenchRun
from atom.cli.load_choices import check_address, launch_options, pin_client, server_choice
from atom.cli.load_run import Afterwards, LoadFactory
from atom.cli.publish import Output
from atom.recipes.errors import UsageError

__all__ = ["CHECK_ONLY", "SERVER_ARGUMENTS", "bench", "bench_output"]

CHECK_ONLY: Final = "atom.check_only"
"""In a context's `meta`: the command checks what it is given, and measures nothing."""

SERVER_ARGUMENTS: Final = {"allow_extra_args": True}
"""What stands after `--` goes to a recipe's server."""
Given = dict[str, Any]
"""Options by parameter name; `ctx` is the command's context."""


def bench(
    name: str,
    given: Given,
    load: Callable[[Given], LoadFactory],
    *,
    check: Callable[[Given], None] | None = None,
    afterwards: Afterwards | None = None,
    server_env: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run the load `name` that `load` makes of the options, to the exit status. `server_env`: of a server that is
    started."""
    check_numbers(given)
    if check is not None:
        check(given)
    check_texts(given)
    check_address(given)
    launch = launch_options(given)
    pin_client(given)
    run = BenchRun(
        name=name,
        server=server_choice(given, replace(launch, env={**server_env, **launch.env})),
        load=load(given),
        output=bench_output(given),
        afterwards=_afterwards(given, afterwards),
    )
    return run.check() if CHECK_ONLY in given["ctx"].meta else run.run()


def _afterwards(given: Given, own: Afterwards | None) -> Afterwards | None:
    """What the load does itself afterwards, and then the probe of outputs."""
    count: int = given.get("probe_outputs") or 0
    if not count:
        return own

    def run(endpoint: Endpoint, run_dir: RunDirectory) -> None:
        from atom.diag.compare.outputs import probe_outputs

        if own is not None:
            own(endpoint, run_dir)
        probe_outputs(endpoint, run_dir, count)

    return run


def bench_output(given: Given) -> Output:
    result: Path | None = None
    if given["save_result"]:
        name = given["result_filename"] or _result_name(given)
        result = (given["result_dir"] or Path()) / name
    elif given["result_dir"] or given["result_filename"]:
        raise UsageError("--result-dir and --result-filename need --save-result")
    aiperf: Path | None = given.get("export_aiperf")
    if aiperf is not None and aiperf.exists() and not aiperf.is_dir():
        raise UsageError(f"--export-aiperf {aiperf} is no directory")
    opt.check_outputs(given["json_path"], given["markdown"], given["junit"], save_result=result)
    return Output(
        directory=given["output_dir"],
        json=[path for path in (given["json_path"], result) if path is not None],
        markdown=given["markdown"],
        junit=given["junit"],
        step_summary=opt.step_summary(),
        detailed=given["save_detailed"],
        label=given["label"],
        metadata=opt.parse_pairs("--metadata", given["metadata"] or []),
        percentiles=opt.parse_percentiles(given["metric_percentiles"]),
        metrics=_metrics(given["percentile_metrics"]),
        quiet=given["quiet"],
        aiperf=aiperf,
    )


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(set(names) - {"ttft", "tpot", "itl", "e2el"})
    if unknown or not names:
        raise UsageError(f"--percentile-metrics knows ttft, tpot, itl and e2el, got {text!r}")
    return names


def _result_name(given: Given) -> str:
    """As `vllm bench serve` names its files."""
    model = re.sub(r"[^\w.-]+", "_", given["model"] or "model")
    limit = f"-concurrency{given['max_concurrency']}" if given["max_concurrency"] else ""
    rate = given.get("request_rate", "inf")
    return f"{given['backend']}-{rate}qps{limit}-{model}-{time.strftime('%Y%m%d-%H%M%S')}.json"
