"""The measured session with real servers: captures, seals, and the ends a server can come to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.bench.rundir import RunDirectory, Validity, read_jsonl
from atom.bench.runner import LoadOutcome
from atom.diag.capture import CaptureConfig, CaptureProcess
from atom.diag.gc_records import read_gc_records
from atom.diag.http_fetch import ScrapeError, fetch
from atom.diag.metrics_target import MetricsTarget, parse_metrics_targets
from atom.diag.server_figures import server_figures
from atom.diag.session import MeasuredSession, ServerUnderTest, UrlTarget
from atom.recipes.errors import ServerDiedError, UsageError
from atom.recipes.launcher import LaunchOptions, launch
from atom.recipes.processes import labelled_processes, read_stat
from atom.recipes.recipe import Recipe, Roles, Stop
from atom.recipes.resolve import resolve_recipe
from atom.recipes.spawn import import_root
from tests.waiting import until

STAND_IN = Path(__file__).with_name("stand_in_server.py")
WAIT_S = 30.0


def recipe(*behaviours: str) -> Recipe:
    words = [sys.executable, str(STAND_IN), "--port", "{port}", "--port-file", "{port_file}"]
    for behaviour in behaviours:
        words += ["--behaviour", behaviour]
    return Recipe(
        name="stand-in",
        source="test",
        command=tuple(words),
        ready_timeout_s=WAIT_S,
        stop=Stop(grace_s=10.0),
        roles=Roles(api=("stand_in_server",)),
    )


def outcome(started_ns: int, **fields: Any) -> LoadOutcome:
    given: dict[str, Any] = {"started": 1, "sent": 1, "completed": 1, "failed": 0, "cancelled": 0, "interrupted": False}
    return LoadOutcome(started_ns=started_ns, ended_ns=time.monotonic_ns(), first_error=None, **{**given, **fields})


def lines_in(path: Path) -> int:
    return sum(1 for _ in read_jsonl(path))


def observe(run_dir: RunDirectory, count: int = 2) -> Callable[[ServerUnderTest], LoadOutcome]:
    """A load that lasts until each capture has some lines."""

    def load(_server: ServerUnderTest) -> LoadOutcome:
        started = time.monotonic_ns()
        for name in ("metrics-api.jsonl", "process.jsonl"):
            until(lambda name=name: lines_in(run_dir.server / name) >= count)  # type: ignore[misc]
        return outcome(started)

    return load


def test_a_session_from_start_to_seal(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    result = MeasuredSession(recipe("collect"), run_dir).run(observe(run_dir, 3))
    assert result.reasons == []
    assert result.stop is not None
    assert result.stop.status == 0
    assert not result.server_died
    content = run_dir.read_run_json()
    assert content["validity"] == "valid"
    assert content["recipe"]["name"] == "stand-in"
    assert content["server"]["info"]["models"]["data"][0]["id"] == "stand-in"
    assert content["server_stop"] == {"status": 0, "swept": 0, "seconds": content["server_stop"]["seconds"]}
    assert content["capture"]["process.jsonl"]["lost"] == 0
    assert "stand-in: stopped" in (run_dir.server / "server.log").read_text()
    figures = {
        figure.key: figure
        for figure in server_figures(run_dir.server, result.outcome.started_ns, result.outcome.ended_ns)
    }
    for key in ("gen2_share", "gen2_mean_pause_ms", "metrics_p50_ms", "rss_mb"):
        assert (figures[key].value or 0) > 0, key
        assert figures[key].n > 0
    assert figures["running_requests_mean"].value == 5.0
    assert result.server.server is not None
    assert labelled_processes(result.server.server.label) == []


def test_a_server_that_had_to_be_killed_is_said(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    deaf = replace(recipe("hang-on-stop"), stop=Stop(grace_s=1.3))
    said: list[str] = []
    result = MeasuredSession(deaf, run_dir, on_stopping=said.append).run(observe(run_dir, 1))
    assert said == ["waiting for the server to stop (SIGTERM sent, SIGKILL after 0 s)"]
    why = "the server did not stop within 1.3 s of SIGTERM: it was killed"
    assert why in result.reasons
    assert why in run_dir.read_run_json()["reasons"]


@pytest.mark.parametrize("behaviour", ["metrics-404", "metrics-garbage", "metrics-endless"])
def test_metrics_that_are_none_leave_null_and_a_valid_run(tmp_path: Path, behaviour: str) -> None:
    run_dir = RunDirectory(tmp_path)
    result = MeasuredSession(recipe(behaviour), run_dir).run(observe(run_dir, 1))
    (line, *_) = read_jsonl(run_dir.server / "metrics-api.jsonl")
    assert line["error"]
    assert set(line["values"].values()) == {None}
    figures = {figure.key: figure for figure in server_figures(run_dir.server, 0, time.monotonic_ns())}
    assert figures["metrics_p50_ms"].value is None
    assert figures["rss_mb"].value is not None
    assert result.reasons == []
    assert run_dir.read_run_json()["validity"] == "valid"


def test_a_server_that_dies_during_the_load(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    told = threading.Event()

    def load(server: ServerUnderTest) -> LoadOutcome:
        started = time.monotonic_ns()
        server.call_when_dead(told.set)
        until(lambda: lines_in(run_dir.server / "process.jsonl") >= 1)
        assert not told.is_set()
        with pytest.raises(ScrapeError):
            fetch(f"{server.base_url}/die")
        assert told.wait(WAIT_S)
        return outcome(started, sent=5, completed=2, failed=3, interrupted=True)

    result = MeasuredSession(recipe(), run_dir).run(load)
    assert result.server_died
    assert "exit status 9" in result.reasons[0]
    content = run_dir.read_run_json()
    assert content["validity"] == "failed"
    assert content["server_stop"]["status"] == 9
    assert lines_in(run_dir.server / "process.jsonl") >= 1


def test_callbacks_of_a_load_that_is_over_are_not_called(tmp_path: Path) -> None:
    calls: list[int] = []

    def load(server: ServerUnderTest) -> LoadOutcome:
        server.call_when_dead(lambda: calls.append(1))
        return outcome(time.monotonic_ns())

    MeasuredSession(recipe(), RunDirectory(tmp_path)).run(load)
    assert calls == []


def test_a_server_that_cannot_start_seals_the_directory(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    with pytest.raises(ServerDiedError):
        MeasuredSession(recipe("die-at-start"), run_dir).run(lambda _: outcome(0))
    content = run_dir.read_run_json()
    assert content["validity"] == "failed"
    assert "warp_drive" in content["reasons"][0]


@pytest.mark.parametrize(("error", "validity"), [(KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_a_load_that_raises_leaves_no_server(tmp_path: Path, error: type[BaseException], validity: str) -> None:
    run_dir = RunDirectory(tmp_path)
    labels: list[str] = []

    def load(server: ServerUnderTest) -> LoadOutcome:
        assert server.server is not None
        labels.append(server.server.label)
        raise error("because")

    with pytest.raises(error):
        MeasuredSession(recipe(), run_dir).run(load)
    assert labelled_processes(labels[0]) == []
    assert run_dir.read_run_json()["validity"] == validity


def test_the_judge_decides_and_the_session_adds(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    MeasuredSession(recipe(), run_dir, gc_hook=False).run(
        lambda _: outcome(0), lambda _: (Validity.NOT_VALID, ["client saturated"])
    )
    content = run_dir.read_run_json()
    assert (content["validity"], content["reasons"]) == ("not valid", ["client saturated"])
    assert list(run_dir.server.glob("gc-*")) == []


def test_a_hook_that_does_not_load_is_said(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    isolated = recipe()
    isolated = Recipe(
        name="isolated",
        source="test",
        command=(isolated.command[0], "-I", *isolated.command[1:]),
        roles=isolated.roles,
    )
    result = MeasuredSession(isolated, run_dir).run(lambda _: outcome(0))
    why = "started with -I, which ignores PYTHONPATH; attach to it instead (--pid)"
    assert result.reasons == [f"the GC hook did not load in the API process ({why}): no GC figures"]
    assert run_dir.read_run_json()["validity"] == "valid"


def test_our_own_engine_is_hooked_in_both_processes(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    result = MeasuredSession(resolve_recipe("simulated"), run_dir).run(observe(run_dir))
    assert result.reasons == []
    assert result.stop is not None
    assert (result.stop.status, result.stop.swept) == (0, 0)
    hooked = {process.role: process for process in read_gc_records(run_dir.server)}
    assert set(hooked) == {"api", "core"}
    sampled = {line["pid"]: line["role"] for line in read_jsonl(run_dir.server / "process.jsonl")}
    assert sampled[hooked["api"].pid] == "api"
    assert sampled[hooked["core"].pid] == "core"
    *_, scrape = read_jsonl(run_dir.server / "metrics-api.jsonl")
    assert scrape["error"] is None
    unknown = {name for name, value in scrape["values"].items() if value is None}
    assert unknown == {  # it does not speculate, and tells of single requests only if it is asked to
        *("drafts", "draft_tokens", "accepted_tokens", "acceptance_length"),
        *(f"{kind}_context_{what}" for kind in ("prefill", "decode") for what in ("mean", "max", "series")),
    }
    assert scrape["dialect"] == "atom"
    assert scrape["values"]["running"] == 0


def test_a_running_server_by_its_url(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    with launch(recipe(), LaunchOptions()) as server:
        result = MeasuredSession(UrlTarget(base_url=server.base_url), run_dir).run(observe(run_dir))
        server.raise_if_dead()  # a session stops only what it started
        (line, *_) = read_jsonl(run_dir.server / "process.jsonl")
        assert (line["pid"], line["role"]) == (server.pid, "api")
    figures = {
        figure.key: figure.value
        for figure in server_figures(run_dir.server, result.outcome.started_ns, result.outcome.ended_ns)
    }
    assert figures["gen2_share"] is None
    assert figures["metrics_p50_ms"] is not None
    assert figures["rss_mb"] is not None
    hook = run_dir.read_run_json()["gc_hook"]
    assert hook["how"] == "outside"
    assert [one["reason"] for one in hook["processes"]] == ["measured from outside: no hook"]


def test_secrets_are_not_recorded(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    options = LaunchOptions(env={"HF_TOKEN": "hunter2"})
    MeasuredSession(recipe(), run_dir, options=options).run(lambda _: outcome(0))
    assert "hunter2" not in run_dir.run_json.read_text()


# ---- the capture process -------------------------------------------------------------------------------------------


def test_a_capture_ends_with_its_parent(tmp_path: Path) -> None:
    config = {"directory": str(tmp_path), "listeners": [os.getpid()], "metrics": []}
    code = (
        "import json, os, sys\n"
        "from atom.diag.capture import CaptureConfig, CaptureProcess\n"
        "capture = CaptureProcess(CaptureConfig.from_json(sys.argv[1]))\n"
        "print(capture.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(config)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(import_root())},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    until(lambda: (stat := read_stat(pid)) is None or not stat.alive)


def test_several_endpoints_with_roles_on_one_clock(tmp_path: Path) -> None:
    """A router's instances: each has its file, and one that refuses, or answers garbage, stops no other."""
    run_dir = RunDirectory(tmp_path)
    with launch(recipe(), LaunchOptions()) as prefill, launch(recipe("metrics-garbage"), LaunchOptions()) as decode:
        given = [f"prefill={prefill.base_url}", f"decode={decode.metrics_url}", "gone=http://127.0.0.1:9"]
        roles = ("api", "prefill", "decode", "gone")
        files = {role: run_dir.server / f"metrics-{role}.jsonl" for role in roles}

        def load(_server: ServerUnderTest) -> LoadOutcome:
            started = time.monotonic_ns()
            for path in files.values():
                until(lambda path=path: lines_in(path) >= 2)  # type: ignore[misc]
            return outcome(started)

        session = MeasuredSession(recipe(), run_dir, extra_metrics=parse_metrics_targets(given))
        result = session.run(load)
    assert result.reasons == []
    first = {role: next(iter(read_jsonl(path))) for role, path in files.items()}
    assert (first["prefill"]["dialect"], first["prefill"]["values"]["running"]) == ("vllm", 5.0)
    assert first["decode"]["error"] == "no Prometheus text"
    assert first["gone"]["error"] == "connection refused"
    assert run_dir.read_run_json()["server_metrics"] == {
        "api": run_dir.read_run_json()["server"]["metrics_url"],
        "prefill": prefill.metrics_url,
        "decode": decode.metrics_url,
        "gone": "http://127.0.0.1:9/metrics",
    }
    found = {
        figure.key: figure.value
        for figure in server_figures(run_dir.server, result.outcome.started_ns, result.outcome.ended_ns)
    }
    assert found["kv_usage_mean"] == found["kv_usage_mean_prefill"] == pytest.approx(0.6)
    assert not [key for key in found if key.endswith(("_decode", "_gone"))]


def test_the_servers_own_endpoint_under_another_role_is_refused(tmp_path: Path) -> None:
    with launch(recipe(), LaunchOptions()) as server:
        target = UrlTarget(base_url=server.base_url, metrics=recipe().metrics)
        own = f"router={server.metrics_url}"
        session = MeasuredSession(target, RunDirectory(tmp_path), extra_metrics=parse_metrics_targets([own]))
        with pytest.raises(UsageError, match=re.escape(own) + ".*the loaded server's own.*role api"):
            session.run(lambda _: outcome(time.monotonic_ns()))


def test_the_environments_proxy_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{unused.getsockname()[1]}")
        with launch(recipe(), LaunchOptions()) as server:
            capture = CaptureProcess(
                CaptureConfig(directory=str(tmp_path), metrics=[MetricsTarget(url=server.metrics_url)])
            )
            until(lambda: lines_in(tmp_path / "metrics-api.jsonl") >= 1)
            capture.stop()
    (line, *_) = read_jsonl(tmp_path / "metrics-api.jsonl")
    assert (line["error"], line["values"]["running"]) == (None, 5.0)


FAKE_NVML = """
import os, pathlib, time
NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 1
class NVMLError(Exception): ...
class NVMLError_NotSupported(NVMLError): ...
class Utilization: gpu = 80
class Memory: used, total = 2 << 30, 8 << 30
def nvmlInit(): ...
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}aaa"
def nvmlDeviceGetName(handle): return "Fake GPU"
def nvmlDeviceGetUtilizationRates(handle): return Utilization
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetPowerUsage(handle):
    while pathlib.Path(os.environ["FAKE_HANG"]).exists(): time.sleep(0.05)
    return 300_000
"""


def test_gpu_lines_beside_a_load_and_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes, hang = tmp_path / "fakes", tmp_path / "hang"
    fakes.mkdir()
    (fakes / "pynvml.py").write_text(FAKE_NVML)
    monkeypatch.setenv("PYTHONPATH", f"{fakes}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("FAKE_HANG", str(hang))
    monkeypatch.syspath_prepend(fakes)
    run_dir = RunDirectory(tmp_path / "run")
    path = run_dir.server / "gpu.jsonl"

    def load(_server: ServerUnderTest) -> LoadOutcome:
        started = time.monotonic_ns()
        until(lambda: lines_in(path) >= 2)
        hang.touch()
        until(lambda: any(line["error"] for line in read_jsonl(path)))
        return outcome(started)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    result = MeasuredSession(recipe(), run_dir).run(load)
    problem = "nvmlDeviceGetPowerUsage of GPU 1 did not return within 5 s: samples are missing"
    assert result.reasons == [f"GPU telemetry: {problem}"]
    content = run_dir.read_run_json()
    assert content["validity"] == "valid"
    assert content["capture"]["gpu.jsonl"]["problem"] == problem
    first, *_ = lines = list(read_jsonl(path))
    assert {line["index"] for line in lines} == {1}
    assert (first["name"], first["power_w"], first["utilization"], first["energy_j"]) == ("Fake GPU", 300, 0.8, None)


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "process.jsonl").symlink_to("/dev/full")
    capture = CaptureProcess(CaptureConfig(directory=str(tmp_path), listeners=[os.getpid()]))
    time.sleep(0.5)
    report, reasons = capture.stop()
    assert report["process.jsonl"]["lost"] >= 1
    assert "No space left" in reasons[0]


def test_a_capture_that_is_killed_is_reported(tmp_path: Path) -> None:
    capture = CaptureProcess(
        CaptureConfig(directory=str(tmp_path), metrics=[MetricsTarget(url="http://127.0.0.1:9/metrics")])
    )
    os.kill(capture.pid, signal.SIGKILL)
    assert capture.stop() == ({}, ["the capture process ended early (status -9)"])


def test_a_hanging_scrape_does_not_hold_the_session_up(tmp_path: Path) -> None:
    """The scrape that hangs when the session ends is cut; what was recorded before stays."""
    with launch(recipe("metrics-hang"), LaunchOptions()) as server:
        capture = CaptureProcess(
            CaptureConfig(
                directory=str(tmp_path),
                metrics=[MetricsTarget(url=server.metrics_url)],
                listeners=[server.pid or 0],
            )
        )
        until(lambda: lines_in(tmp_path / "process.jsonl") >= 1)
        report, _ = capture.stop()
    assert report["process.jsonl"]["lines"] >= 1
    (line,) = read_jsonl(tmp_path / "metrics-api.jsonl")
    assert line["latency_ns"] is None
    assert line["error"] == "the capture ended during this scrape"
