"""The real process over real sockets: what it answers, how it ends, and that it never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from atom.engine.config import CacheConfig, EngineConfig, SchedulerConfig, SimulatedConfig
from atom.engine.executors.simulated import token_at
from atom.engine.messages import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    AbortRequests,
    AddRequest,
    CoreInput,
    CoreOutput,
    EngineFailed,
    EngineReady,
    Shutdown,
    StepOutputs,
    UtilityCall,
    UtilityResult,
)
from atom.engine.sampling_params import SamplingParams

TIMEOUT_S = 30
QUICK = SimulatedConfig(base_ms=0.1, prefill_us_per_token=0, decode_us_per_seq=0)
ROOT = Path(__file__).parents[3]


def simulated(simulated_config: SimulatedConfig = QUICK, **parts: Any) -> EngineConfig:
    return EngineConfig(executor="simulated", simulated=simulated_config, **parts)


def environment(config_json: str) -> dict[str, str]:
    return {**os.environ, "ATOM_ENGINE_CONFIG": config_json, "PYTHONPATH": str(ROOT / ".src")}


def command(directory: str) -> list[str]:
    addresses = ["--input", f"ipc://{directory}/input", "--output", f"ipc://{directory}/output"]
    return [sys.executable, "-m", "atom.engine.core_process", *addresses, "--index", "0"]


class Core:
    """A core process and our ends of its sockets."""

    def __init__(self, config_json: str, directory: str) -> None:
        self.context = zmq.Context()
        self.input = self.context.socket(zmq.PUSH)
        self.input.bind(f"ipc://{directory}/input")
        self.output = self.context.socket(zmq.PULL)
        self.output.setsockopt(zmq.RCVTIMEO, TIMEOUT_S * 1000)
        self.output.bind(f"ipc://{directory}/output")
        self.decoder: msgspec.msgpack.Decoder[CoreOutput] = msgspec.msgpack.Decoder(CoreOutput)
        self.process = subprocess.Popen(
            command(directory), env=environment(config_json), stderr=subprocess.PIPE, text=True
        )
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, tuple[str, str | None]] = {}

    def send(self, message: CoreInput) -> None:
        self.input.send(msgspec.msgpack.encode(message))

    def add(self, seq_id: int, prompt: int = 4, **params: Any) -> None:
        tokens = array("i", range(prompt)).tobytes()
        self.send(AddRequest(seq_id, f"r{seq_id}", tokens, SamplingParams(**params), time.monotonic_ns()))

    def receive(self) -> CoreOutput:
        message: CoreOutput = self.decoder.decode(self.output.recv())
        if isinstance(message, StepOutputs):
            for seq_id, token in zip(message.seq_ids, message.token_ids, strict=True):
                self.tokens.setdefault(seq_id, []).append(token)
            for end in message.finished:
                assert end.seq_id not in self.ends
                self.ends[end.seq_id] = (end.reason, end.error)
        return message

    def ready(self) -> EngineReady:
        message = self.receive()
        assert isinstance(message, EngineReady), message
        return message

    def call(self, method: str, **args: Any) -> UtilityResult:
        self.send(UtilityCall(42, method, args))
        while not isinstance(message := self.receive(), UtilityResult):
            pass
        assert message.call_id == 42
        return message

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.receive()

    def wait(self) -> tuple[int, str]:
        """Exit status and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.context.destroy(linger=0)


StartCore = Callable[..., Core]


@pytest.fixture
def directory() -> Iterator[str]:
    # Not tmp_path: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="atom-test-") as path:
        yield path


@pytest.fixture
def start(directory: str) -> Iterator[StartCore]:
    cores: list[Core] = []

    def start_core(config: EngineConfig | str | None = None) -> Core:
        text = config if isinstance(config, str) else (config or simulated()).to_json()
        cores.append(Core(text, directory))
        return cores[-1]

    yield start_core
    for core in cores:
        core.close()


def test_it_serves_answers_calls_and_shuts_down(start: StartCore) -> None:
    core = start()
    ready = core.ready()
    assert ready.pid == core.process.pid
    assert {"num_kv_blocks", "block_size", "max_model_len", "vocab_size", "eos_token_ids"} <= set(ready.info)
    assert any("atom.engine.core_process" in part for part in psutil.Process(ready.pid).cmdline())
    core.add(1, max_tokens=5)
    core.add(2, prompt=0)
    core.until(lambda: len(core.ends) == 2)
    assert core.tokens == {1: [token_at(0, 4 + index, 32_000) for index in range(5)]}
    assert core.ends == {1: (FINISH_LENGTH, None), 2: (FINISH_ERROR, "the prompt has no tokens")}
    assert core.call("ping").value["pid"] == ready.pid
    assert core.call("check_integrity").value["free"] == ready.info["num_kv_blocks"]
    assert core.call("stats").value["generation_tokens_total"] == 5
    assert core.call("reset_prefix_cache").error is None
    assert "no profiler" in (core.call("start_profile", directory="/nowhere").error or "")
    assert "no operation 'nope'" in (core.call("nope").error or "")
    core.send(Shutdown(drain=True))
    assert core.wait()[0] == 0


def test_an_abort_is_answered_and_frees_the_blocks(start: StartCore) -> None:
    core = start()
    total = core.ready().info["num_kv_blocks"]
    core.add(1, max_tokens=None)
    core.until(lambda: bool(core.tokens))
    core.send(AbortRequests([1, 999]))
    core.until(lambda: 1 in core.ends)
    assert core.ends[1] == (FINISH_ABORT, None)
    assert core.call("check_integrity").value["free"] == total


def test_thousands_of_requests_leave_no_block_file_or_thread(start: StartCore) -> None:
    config = simulated(
        SimulatedConfig(base_ms=0, prefill_us_per_token=0, decode_us_per_seq=0),
        cache=CacheConfig(num_blocks=200, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, max_waiting=500),
    )
    core = start(config)
    core.ready()
    core.add(0)
    core.until(lambda: bool(core.ends))
    process = psutil.Process(core.process.pid)
    before = (process.num_fds(), process.num_threads())
    for first in range(1, 3000, 200):
        for seq_id in range(first, first + 200):
            core.add(seq_id, prompt=seq_id % 30, max_tokens=1 + seq_id % 7)
            if seq_id % 3 == 0:
                core.send(AbortRequests([seq_id - seq_id % 10]))
        core.until(lambda first=first: len(core.ends) == first + 200)  # type: ignore[misc]
    assert {reason for reason, _ in core.ends.values()} == {FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR}
    counts = core.call("check_integrity").value
    assert (counts["used"], counts["free"]) == (0, 200)
    assert (process.num_fds(), process.num_threads()) == before


def test_shutdown_without_draining_aborts_what_runs(start: StartCore) -> None:
    core = start()
    core.ready()
    core.add(1, max_tokens=None)
    core.until(lambda: bool(core.tokens))
    core.send(Shutdown(drain=False))
    core.until(lambda: 1 in core.ends)
    assert core.ends[1][0] == FINISH_ABORT
    assert core.wait()[0] == 0


def test_sigint_is_ignored_and_sigterm_drains(start: StartCore) -> None:
    core = start()
    core.ready()
    core.add(1, max_tokens=300)
    core.until(lambda: bool(core.tokens))
    core.process.send_signal(signal.SIGINT)
    core.process.send_signal(signal.SIGTERM)
    core.until(lambda: 1 in core.ends)
    assert core.ends[1][0] == FINISH_LENGTH
    assert len(core.tokens[1]) == 300
    assert core.wait()[0] == 0


def test_a_second_sigterm_aborts(start: StartCore) -> None:
    core = start()
    core.ready()
    core.add(1, max_tokens=None)
    core.until(lambda: bool(core.tokens))
    core.process.terminate()
    refused = (FINISH_ERROR, "the engine is shutting down")
    for seq_id in range(2, 1000):  # the signal may be slower than a message
        core.add(seq_id, max_tokens=1)
        core.until(lambda seq_id=seq_id: seq_id in core.ends)  # type: ignore[misc]
        if core.ends[seq_id] == refused:
            break
    assert refused in core.ends.values()
    core.process.terminate()
    core.until(lambda: 1 in core.ends)
    assert core.ends[1][0] == FINISH_ABORT
    assert core.wait()[0] == 0


def test_an_idle_core_waits_and_ends_on_sigterm(start: StartCore) -> None:
    core = start()
    core.ready()
    process = psutil.Process(core.process.pid)
    before = process.cpu_times().user
    time.sleep(0.5)
    assert process.cpu_times().user - before < 0.25, "it spins"
    core.process.terminate()
    assert core.wait()[0] == 0


def test_a_message_that_is_none_ends_it_with_a_reason(start: StartCore) -> None:
    core = start()
    core.ready()
    core.input.send(b"\xc1 no msgpack")
    failed = core.receive()
    assert isinstance(failed, EngineFailed)
    assert "\n" not in failed.error
    status, errors = core.wait()
    assert status == 1
    assert "Traceback" in errors


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{}", "is not an engine configuration"),
        ("[1]", "is not an engine configuration"),
        ("{", "is not an engine configuration"),
        (
            '{"model": {}, "cache": {"block_size": 3}, "scheduler": {}, "simulated": {}, "parallel": {}, '
            '"executor": "simulated"}',
            "--block-size must be a power of two",
        ),
        (
            '{"model": {"max_model_len": 99}, "cache": {"num_blocks": 1}, "scheduler": {}, "simulated": {}, '
            '"parallel": {}, "executor": "simulated"}',
            "--max-model-len 99 does not fit",
        ),
        (
            '{"model": {}, "cache": {}, "scheduler": {}, "simulated": {}, "parallel": {}, "executor": "cuda"}',
            "--executor cuda",
        ),
    ],
)
def test_a_wrong_configuration_is_one_line_without_traceback(start: StartCore, config: str, message: str) -> None:
    core = start(config)
    failed = core.receive()
    assert isinstance(failed, EngineFailed)
    assert message in failed.error
    status, errors = core.wait()
    assert status == 1
    assert "Traceback" not in errors


def test_it_outlives_the_thread_that_started_it(directory: str, start: StartCore) -> None:
    started: list[Core] = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    (core,) = started
    core.ready()
    time.sleep(0.3)
    assert core.call("ping").error is None


PARENT = """
import subprocess, sys, time, zmq, msgspec
from array import array
from atom.engine.messages import AddRequest, CoreOutput, EngineReady, StepOutputs
from atom.engine.sampling_params import SamplingParams
directory, busy, command = sys.argv[1], sys.argv[2] == "busy", sys.argv[3:]
context = zmq.Context()
inputs, outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
inputs.bind(f"ipc://{directory}/input")
outputs.bind(f"ipc://{directory}/output")
process = subprocess.Popen(command)
assert isinstance(msgspec.msgpack.decode(outputs.recv(), type=CoreOutput), EngineReady)
if busy:
    params = SamplingParams(max_tokens=100)
    inputs.send(msgspec.msgpack.encode(AddRequest(1, "r", array("i", [1, 2]).tobytes(), params, 0)))
    assert isinstance(msgspec.msgpack.decode(outputs.recv(), type=CoreOutput), StepOutputs)
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_it_dies_with_a_parent_that_is_killed(directory: str, state: str) -> None:
    """Busy: asleep inside a step of minutes, where it reads no message."""
    slow = simulated(SimulatedConfig(base_ms=0, prefill_us_per_token=0, decode_us_per_seq=120e6))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, directory, state, *command(directory)],
        env=environment(slow.to_json()),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        core = psutil.Process(int(parent.stdout.readline()))
        assert core.is_running()
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + TIMEOUT_S
    # Whoever inherited it may not reap it; a zombie is gone, too.
    while core.is_running() and core.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the core outlived its parent"
        time.sleep(0.02)
