"""The whole engine below HTTP: API side and core process together, on the simulated executor."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.engine.async_engine import AsyncLLMEngine
from atom.engine.config import EngineConfig
from atom.engine.core_manager import CoreManager
from atom.engine.errors import EngineDeadError, RequestError
from atom.engine.llm import LLM, Prompt, config_from_options
from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.sampling_params import SamplingParams
from atom.engine.streaming import StreamDispatcher, TokenEvent

WAIT_S = 60.0


def config(**options: Any) -> EngineConfig:
    """A small fast engine whose tokens a byte tokenizer can show."""
    defaults: dict[str, Any] = {
        "model": "embedded",
        "tokenizer": "bytes",
        "executor": "simulated",
        "base_ms": 0.0,
        "prefill_us_per_token": 0.0,
        "decode_us_per_seq": 0.0,
        "vocab_size": 1000,
        "num_blocks": 512,
        "max_num_seqs": 32,
        "max_model_len": 1024,
    }
    return config_from_options(**defaults | options)


def counts(core: CoreManager) -> dict[str, int]:
    checked: dict[str, int] = core.call("check_integrity")
    return checked


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (it happens in another process)
            await asyncio.sleep(0.005)


def test_generate_is_reproducible_and_bounded() -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=2)
    with LLM(config()) as llm:
        prompts: list[Prompt] = ["a prompt", [1, 2, 3]]
        first = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
        assert [[one.token_ids for one in output.outputs] for output in first] == [
            [one.token_ids for one in output.outputs] for output in again
        ]
        for output in first:
            for one in output.outputs:
                assert (len(one.token_ids), one.finish_reason) == (20, "length")
                assert one.timings.arrival_ns <= (one.timings.scheduled_ns or 0) <= (one.timings.first_token_ns or 0)
        with pytest.raises(RequestError, match="context length of 1024"):
            llm.generate([[1] * 1020], params)
        llm.engine.manager.call("reset_prefix_cache")
        total = counts(llm.engine.manager)
        assert total["free"] == total["total"]


def test_a_simulated_model_has_the_vocabulary_of_its_tokenizer() -> None:
    with LLM(model="embedded", tokenizer="bytes", executor="simulated", base_ms=0.0) as llm:
        assert llm.engine.manager.info["vocab_size"] == ByteTokenizer().vocab_size
        (output,) = llm.generate("any text", SamplingParams(max_tokens=5, ignore_eos=True))
        assert max(output.outputs[0].token_ids) < ByteTokenizer().vocab_size


def test_choice_i_of_a_seeded_request_is_what_seed_plus_i_alone_gives() -> None:
    with LLM(config()) as llm:
        (several,) = llm.generate("x", SamplingParams(max_tokens=8, ignore_eos=True, n=3, seed=10))
        singles = [
            llm.generate("x", SamplingParams(max_tokens=8, ignore_eos=True, seed=seed))[0].outputs[0]
            for seed in (10, 11, 12)
        ]
    assert [one.token_ids for one in several.outputs] == [one.token_ids for one in singles]
    assert len({tuple(one.token_ids) for one in singles}) == 3


async def test_thousands_of_finished_aborted_and_failed_requests_free_every_block() -> None:
    manager = CoreManager(config(num_blocks=96))
    await asyncio.to_thread(manager.start)
    try:
        dispatcher = StreamDispatcher(manager, ByteTokenizer(1000), asyncio.get_running_loop())
        rng = random.Random(1)
        open_now, finished = 0, 0

        def sink(event: TokenEvent) -> None:
            nonlocal open_now, finished
            if event.finish_reason is not None:
                open_now -= 1
                finished += 1

        async def burst(count: int) -> None:
            nonlocal open_now
            for _ in range(count):
                prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
                # Some ask for more than the pool holds and are refused or preempted; some carry an id that is none.
                prompt[0] = 5_000_000 if rng.random() < 0.05 else prompt[0]
                params = SamplingParams(max_tokens=rng.randrange(1, 60), ignore_eos=True, seed=rng.randrange(3))
                stream = dispatcher.submit("r", prompt, params, sink)
                open_now += 1
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.002)
                    if not stream.sequence.finished:
                        stream.abort()
                        open_now -= 1
            await until(lambda: manager.num_open_sequences == 0)

        await burst(300)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        await burst(1700)
        await until(lambda: manager.call("stats")["num_running"] == 0)
        checked = counts(manager)
        assert (checked["used"], checked["free"]) == (0, checked["total"])
        assert finished > 100
        assert not dispatcher.streams
        assert not dispatcher.events
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)  # noqa: PTH208
    finally:
        await asyncio.to_thread(manager.shutdown)


async def test_abort_frees_blocks_of_a_running_stream() -> None:
    async with AsyncLLMEngine(config(base_ms=1.0, enable_prefix_caching=False)) as llm:
        generator = llm.generate([1] * 100, SamplingParams(max_tokens=900, ignore_eos=True))
        await anext(generator)
        assert counts(llm.manager)["used"] > 0
        await generator.aclose()
        await until(lambda: counts(llm.manager)["used"] == 0)


async def test_offline_streaming_and_complete_agree() -> None:
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=3)
    async with AsyncLLMEngine(config()) as llm:
        output = await llm.complete("hello", params)
        events = [event async for event in llm.generate("hello", params)]
    assert "".join(event.text for event in events) == output.outputs[0].text
    assert [token for event in events for token in event.token_ids] == output.outputs[0].token_ids


async def test_a_killed_core_is_an_error_for_everybody() -> None:
    async with AsyncLLMEngine(config(base_ms=5.0)) as llm:
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        tasks = [asyncio.create_task(llm.complete([1, 2], params)) for _ in range(4)]
        generator = llm.generate([1, 2], params)
        await anext(generator)
        os.kill(llm.manager.engines[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in generator:
                pass
        for task in tasks:
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await asyncio.wait_for(task, WAIT_S)
        assert not llm.manager.is_alive


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineDeadError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"), executor="cpu")


def test_a_killed_api_process_takes_its_core_along(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from atom.engine.config import EngineConfig\n"
        "from atom.engine.core_manager import CoreManager\n"
        "manager = CoreManager(EngineConfig(executor='simulated'))\n"
        "manager.start()\n"
        "print(manager.engines[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent, parent.stdout:
        core = int(parent.stdout.readline())
        assert list(tmp_path.iterdir()) == []
        parent.kill()
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{core}/cmdline").exists() and Path(f"/proc/{core}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the core outlives its parent"
        time.sleep(0.02)
    assert list(tmp_path.iterdir()) == []
