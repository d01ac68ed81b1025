"""LLM, LLMEngine and AsyncLLMEngine over a core that echoes the prompt (`fake_core.py`), with a byte tokenizer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atom.engine.api_sequence import fan_out
from atom.engine.async_engine import AsyncLLMEngine
from atom.engine.config import EngineConfig, SchedulerConfig
from atom.engine.core_manager import CoreManager
from atom.engine.errors import (
    AtomEngineError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    OutputsNotConsumedError,
    QueueFullError,
    RequestError,
)
from atom.engine.llm import LLM, config_from_options
from atom.engine.llm_engine import LLMEngine
from atom.engine.loading.byte_tokenizer import ByteTokenizer
from atom.engine.request_output import RequestOutput
from atom.engine.sampling_params import SamplingParams

FAKE_CORE = Path(__file__).with_name("fake_core.py")
DIE, FAIL, GARBAGE, REFUSE, PAUSE = range(1_000, 1_005)
ALL = SamplingParams(max_tokens=None)
WAIT_S = 30.0


class Lenient(ByteTokenizer):
    """Lets the fake core's commands through the vocabulary check."""

    def __init__(self) -> None:
        super().__init__(2_000)


class FakeLLM(LLM):
    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine


def manager(max_waiting: int = 4096, *, asyncio_mode: bool = False) -> CoreManager:
    config = EngineConfig(scheduler=SchedulerConfig(max_waiting=max_waiting, max_num_seqs=4))
    return CoreManager(config, asyncio_mode=asyncio_mode, core_command=(sys.executable, str(FAKE_CORE)))


@contextmanager
def engine(max_waiting: int = 4096) -> Iterator[LLMEngine]:
    fake = manager(max_waiting)
    with LLMEngine(fake.config, manager=fake, tokenizer=Lenient()) as made:
        yield made


@asynccontextmanager
async def async_engine() -> AsyncIterator[AsyncLLMEngine]:
    fake = manager(asyncio_mode=True)
    async with AsyncLLMEngine(fake.config, manager=fake, tokenizer=Lenient()) as made:
        yield made


def finish(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished():
        outputs.extend(engine.step(timeout=WAIT_S))
    return outputs


# ---- LLMEngine -------------------------------------------------------------------------------------------------------


def test_text_in_text_out() -> None:
    with engine() as llm_engine:
        request_id = llm_engine.add_request("héllo", SamplingParams(max_tokens=4))
        assert llm_engine.has_unfinished()
        (output,) = finish(llm_engine)
        assert llm_engine.step() == []
    assert (output.request_id, output.prompt, list(output.prompt_token_ids)) == (
        request_id,
        "héllo",
        list("héllo".encode()),
    )
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.index) == ("hél", "length", 0)
    assert completion.token_ids == list("hél".encode())
    assert output.num_cached_tokens == 3
    timings = completion.timings
    assert timings.ttft_s is not None
    assert 0 < timings.ttft_s < timings.e2e_s


def test_n_logprobs_and_prompt_logprobs() -> None:
    with engine() as llm_engine:
        llm_engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, n=3, logprobs=1, prompt_logprobs=0))
        (output,) = finish(llm_engine)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(len(completion.logprobs or []) == 2 for completion in output.outputs)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 3


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
def test_stop_strings_offline(include: bool, text: str) -> None:
    params = SamplingParams(max_tokens=None, stop=("STOP",), include_stop_str_in_output=include, n=2, logprobs=0)
    with engine() as llm_engine:
        llm_engine.add_request([*b"one STOP two", PAUSE], params)
        (output,) = finish(llm_engine)
        assert llm_engine.manager.call("running") == []
    for completion in output.outputs:
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", "STOP")
        assert bytes(completion.token_ids) == b"one STOP"
        assert len(completion.logprobs or []) == 8


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_stop_token_offline(stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=None, stop=stop, stop_token_ids=(ord("c"),))
    with engine() as llm_engine:
        llm_engine.add_request("abcd", params)
        (output,) = finish(llm_engine)
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", ord("c"))
    assert bytes(completion.token_ids) == b"abc"


def test_abort_returns_what_there_is() -> None:
    with engine() as llm_engine:
        llm_engine.add_request([*b"ab", PAUSE], ALL, request_id="stuck")
        with pytest.raises(RequestError, match="'stuck' is in use"):
            llm_engine.add_request("x", ALL, request_id="stuck")
        while llm_engine.manager.latest_stats[0].num_steps_total < 2:
            assert llm_engine.step(timeout=0.01) == []
        llm_engine.abort("stuck")
        llm_engine.abort("unknown")
        (output,) = finish(llm_engine)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "abort")


def test_requests_are_checked_before_they_are_sent() -> None:
    with engine() as llm_engine:
        with pytest.raises(ContextLengthError, match="100000"):
            llm_engine.add_request([1] * 99_999, SamplingParams(max_tokens=2))
        with pytest.raises(RequestError, match="at least one token"):
            llm_engine.add_request("", ALL)
        with pytest.raises(RequestError, match="outside"):
            llm_engine.add_request([-1], ALL)
        with pytest.raises(RequestError, match="temperature"):
            llm_engine.add_request("x", SamplingParams(temperature=-1))
        assert not llm_engine.has_unfinished()


def test_a_request_is_sent_whole_or_not_at_all() -> None:
    with engine(max_waiting=4) as llm_engine:  # and 4 that may run
        with pytest.raises(QueueFullError):
            llm_engine.add_request("abc", SamplingParams(n=9))
        assert not llm_engine.has_unfinished()
        llm_engine.add_request("abc", SamplingParams(max_tokens=1))
        (output,) = finish(llm_engine)
        assert output.outputs[0].text == "a"


def test_step_raises_on_an_engine_that_a_server_took_over() -> None:
    with engine() as llm_engine:
        llm_engine.add_request([1, PAUSE], ALL)
        llm_engine.manager.deliver_through_callbacks(lambda: None)
        with pytest.raises(OutputsNotConsumedError):
            llm_engine.step()


def test_a_dead_core_fails_every_request() -> None:
    with engine() as llm_engine:
        llm_engine.add_request([1, PAUSE], ALL)
        llm_engine.add_request([1, DIE], ALL)
        outputs = finish(llm_engine)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 2
        with pytest.raises(EngineDeadError):
            llm_engine.add_request("x", ALL)


# ---- LLM -------------------------------------------------------------------------------------------------------------


def test_generate_keeps_the_order_of_prompts_whoever_finishes_first() -> None:
    with engine() as llm_engine:
        llm = FakeLLM(llm_engine)
        prompts: list[str | Sequence[int]] = ["long" * 50, "s", [97, 98]]
        assert [output.outputs[0].text for output in llm.generate(prompts, ALL)] == ["long" * 50, "s", "ab"]
        params = [SamplingParams(max_tokens=count) for count in (1, 2)]
        assert [output.outputs[0].text for output in llm.generate(["abc", "abc"], params)] == ["a", "ab"]
        assert [output.outputs[0].text for output in llm.generate("abc")] == ["abc"]
        assert [output.outputs[0].text for output in llm.generate([97, 98, 99])] == ["abc"]
        assert llm.generate([]) == []
        chat = llm.chat([{"role": "user", "content": "hi"}], ALL)
        assert "user: hi" in chat.outputs[0].text


def test_generate_takes_more_prompts_than_admission_does() -> None:
    with engine(max_waiting=4) as llm_engine:
        outputs = FakeLLM(llm_engine).generate([[number, 1] for number in range(100)], SamplingParams(n=2))
    assert [output.outputs[1].token_ids for output in outputs] == [[number, 1] for number in range(100)]


def test_generate_leaves_nothing_running_when_it_fails() -> None:
    with engine() as llm_engine:
        llm = FakeLLM(llm_engine)
        with pytest.raises(RequestError, match="temperature"):
            llm.generate([[1, PAUSE], [2]], [ALL, SamplingParams(temperature=-1)])
        assert not llm_engine.has_unfinished()
        assert llm_engine.manager.call("running") == []
        with pytest.raises(AtomEngineError, match="refused by the fake core"):
            llm.generate([[1, PAUSE], [1, REFUSE]], ALL)
        assert not llm_engine.has_unfinished()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate([[1, PAUSE], [1, DIE]], ALL)


def test_generate_refuses_ambiguous_arguments() -> None:
    with engine() as llm_engine:
        llm = FakeLLM(llm_engine)
        with pytest.raises(RequestError, match="not both"):
            llm.generate([1, "a"])  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="2 sampling_params for 1"):
            llm.generate("a", [ALL, ALL])


def test_options_go_to_their_sections() -> None:
    config = config_from_options(model="m", block_size=32, max_num_seqs=3, base_ms=0.5, executor="simulated")
    assert (config.model.model, config.cache.block_size, config.scheduler.max_num_seqs) == ("m", 32, 3)
    assert (config.simulated.base_ms, config.executor) == (0.5, "simulated")
    with pytest.raises(ConfigError, match="'blok_size'"):
        config_from_options(blok_size=1)
    with pytest.raises(ConfigError, match="not both"):
        LLM(config, block_size=32)


def test_fan_out_gives_each_sequence_its_own_seed() -> None:
    assert [child.seed for child in fan_out(SamplingParams(n=3, seed=7))] == [7, 8, 9]
    assert [child.seed for child in fan_out(SamplingParams(n=2))] == [None, None]
    assert [child.seed for child in fan_out(SamplingParams(n=2, seed=2**64 - 1))] == [2**64 - 1, 0]
    assert all(child.n == 1 for child in fan_out(SamplingParams(n=3)))


# ---- AsyncLLMEngine --------------------------------------------------------------------------------------------------


async def test_generate_streams() -> None:
    async with async_engine() as llm:
        events = [event async for event in llm.generate("héllo", ALL)]
        assert "".join(event.text for event in events) == "héllo"
        assert events[-1].finish_reason == "length"
        with pytest.raises(RequestError, match="n must be 1"):
            await anext(llm.generate("x", SamplingParams(n=2)))


async def test_complete_many_at_once() -> None:
    async with async_engine() as llm:
        outputs = await asyncio.gather(*(llm.complete(f"prompt {number}", ALL) for number in range(50)))
        assert [output.outputs[0].text for output in outputs] == [f"prompt {number}" for number in range(50)]
        long = "x" * 20_000
        assert (await llm.complete(long, SamplingParams(max_tokens=1, n=2))).outputs[1].text == "x"
        assert len(llm._waiting) == llm.manager.num_open_sequences == llm.manager._num_unread == 0


async def test_leaving_early_aborts_in_the_core() -> None:
    async with async_engine() as llm:
        async with aclosing(llm.generate([1, PAUSE], ALL)) as events:
            await anext(events)
        task = asyncio.create_task(llm.complete([1, PAUSE], ALL))
        while llm.manager.num_open_sequences == 0:  # noqa: ASYNC110 (set by another task, without an event)
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await llm.manager.call_async("running") == []
        assert len(llm._waiting) == 0


async def test_a_dead_core_fails_streams_and_requests() -> None:
    async with async_engine() as llm:
        waiting = asyncio.create_task(llm.complete([1, PAUSE], ALL))
        with pytest.raises(AtomEngineError, match="refused"):
            await llm.complete([1, REFUSE], ALL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            _ = [event async for event in llm.generate([1, DIE], ALL)]
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(waiting, WAIT_S)
        with pytest.raises(EngineDeadError):
            await llm.complete("x", ALL)


async def test_start_that_fails_leaves_nothing() -> None:
    command = (sys.executable, str(FAKE_CORE), "fails-to-load")
    broken = CoreManager(EngineConfig(), asyncio_mode=True, core_command=command)
    with pytest.raises(EngineDeadError, match="no such model"):
        await AsyncLLMEngine(EngineConfig(), manager=broken).start()
    assert broken.engines[0].returncode is not None


async def test_a_tokenizer_that_cannot_be_loaded_stops_the_core(tmp_path: Path) -> None:
    missing: Any = tmp_path / "none"
    config = config_from_options(tokenizer=str(missing))
    fake = manager(asyncio_mode=True)
    with pytest.raises(ConfigError):
        await AsyncLLMEngine(config, manager=fake).start()
    assert fake.engines[0].returncode is not None
    fake = manager()
    with pytest.raises(ConfigError):
        LLMEngine(config, manager=fake)
    assert fake.engines[0].returncode is not None
