"""The engine in one process: steps, utilities, and what is left after thousands of requests."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import pytest

from atom.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SimulatedConfig
from atom.engine.engine_core import EngineCore
from atom.engine.errors import AtomEngineError, ConfigError, RequestError
from atom.engine.executors.base import SchedulerOutput, StepHandle, StepResult
from atom.engine.executors.simulated import SimulatedExecutor, token_at
from atom.engine.messages import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, AddRequest, DeviceTimes, StepOutputs
from atom.engine.sampling_params import SamplingParams

VOCAB = 32_000


def config(**parts: Any) -> EngineConfig:
    parts.setdefault("simulated", SimulatedConfig(base_ms=0, prefill_us_per_token=0, decode_us_per_seq=0))
    return EngineConfig(executor="simulated", **parts)


def request(seq_id: int, prompt: list[int] | int = 8, **params: Any) -> AddRequest:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    params.setdefault("max_tokens", 5)
    return AddRequest(seq_id, f"r{seq_id}", array("i", tokens).tobytes(), SamplingParams(**params), 0)


class Client:
    """Collects what a core reports, and checks that no token follows an end."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.steps = 0

    def step(self) -> StepOutputs | None:
        outputs = self.core.step()
        if outputs is not None:
            self.steps += 1
            assert len(outputs.seq_ids) == len(outputs.token_ids)
            for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
                assert seq_id not in self.ends
                self.tokens.setdefault(seq_id, []).append(token)
            for end in outputs.finished:
                assert end.seq_id not in self.ends
                self.ends[end.seq_id] = end.reason
        return outputs

    def run(self) -> None:
        while self.core.has_work:
            self.step()


def test_a_request_from_start_to_end() -> None:
    core = EngineCore(config(), engine_index=3)
    client = Client(core)
    core.add_request(request(1, 8, max_tokens=4))
    first = client.step()
    assert first is not None
    assert (first.engine_index, first.step, first.seq_ids, first.token_ids) == (3, 0, [1], [token_at(0, 8, VOCAB)])
    assert [entry.seq_id for entry in first.first_scheduled] == [1]
    assert first.stats is not None
    assert first.stats.num_running == 1
    client.run()
    assert client.tokens == {1: [token_at(0, 8 + index, VOCAB) for index in range(4)]}
    assert client.ends == {1: FINISH_LENGTH}
    assert client.step() is None


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_do_not_depend_on_batching_preemption_or_overlap(overlap: bool) -> None:
    core = EngineCore(
        config(
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, overlap=overlap),
            cache=CacheConfig(num_blocks=12, block_size=4),
            model=ModelConfig(seed=3),
        )
    )
    client = Client(core)
    rng = random.Random(1)
    lengths = {}
    for seq_id in range(60):
        lengths[seq_id] = (rng.randint(1, 20), rng.randint(1, 20))
        core.add_request(request(seq_id, lengths[seq_id][0], max_tokens=lengths[seq_id][1]))
    client.run()
    assert core.stats()["num_preemptions_total"] > 0
    assert core.stats()["prefix_cache_hits_total"] > 0
    for seq_id, (prompt, output) in lengths.items():
        assert client.tokens[seq_id] == [token_at(3, prompt + index, VOCAB) for index in range(output)]


class CountingExecutor(SimulatedExecutor):
    """Notes how many steps are in flight."""

    def __init__(self, engine_config: EngineConfig) -> None:
        super().__init__(engine_config)
        self.in_flight = 0
        self.most = 0

    def submit(self, output: SchedulerOutput) -> StepHandle:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return super().submit(output)

    def collect(self, handle: StepHandle) -> StepResult:
        self.in_flight -= 1
        return super().collect(handle)


@pytest.mark.parametrize(("overlap", "most"), [(True, 2), (False, 1)])
def test_overlap_keeps_a_step_queued_behind_the_one_that_runs(overlap: bool, most: int) -> None:
    settings = config(scheduler=SchedulerConfig(overlap=overlap))
    executor = CountingExecutor(settings)
    core = EngineCore(settings, executor)
    core.add_request(request(1))
    Client(core).run()
    assert (executor.most, executor.in_flight) == (most, 0)


class LateTimer(SimulatedExecutor):
    """Learns the times of a step when the next one is collected, as with events on a device."""

    def collect(self, handle: StepHandle) -> StepResult:
        result = super().collect(handle)
        result.device_times = [DeviceTimes(float(handle.step - 1))] if handle.step else None
        return result


def test_device_times_that_come_late_travel_with_a_later_step() -> None:
    core = EngineCore(config(), LateTimer(config()))
    core.add_request(request(1, max_tokens=4, ignore_eos=True))
    reports = []
    while core.has_work:
        if (outputs := core.step()) is not None:
            assert outputs.stats is not None
            reports.append((outputs.step, outputs.stats.device_times))
    core.shutdown()
    first, *others = reports
    assert first[1] is None
    assert others == [(step, [DeviceTimes(float(step - 1))]) for step, _ in others]


def test_ten_thousand_aborted_failed_and_finished_requests_leave_nothing() -> None:
    core = EngineCore(
        config(
            scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_waiting=300),
            cache=CacheConfig(num_blocks=400, block_size=4),
        )
    )
    client = Client(core)
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(50)]
    for seq_id in range(10_000):
        kind = rng.random()
        prompt = rng.choice(prompts) if kind < 0.9 else rng.choice([[], [VOCAB], [1] * 2000])
        core.add_request(request(seq_id, prompt, max_tokens=rng.randint(1, 12)))
        if rng.random() < 0.4:
            core.abort([rng.randint(max(0, seq_id - 40), seq_id)])
        if rng.random() < 0.25:
            client.step()
    client.run()
    assert len(client.ends) == 10_000
    reasons = Counter(client.ends.values())
    assert min(reasons[FINISH_ABORT], reasons[FINISH_ERROR], reasons[FINISH_LENGTH]) > 500
    counts = core.check_integrity()
    assert (counts["used"], counts["free"]) == (0, 400)
    scheduler = core.scheduler
    assert not scheduler.sequences
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.num_in_flight == 0
    assert len(scheduler._released) <= 64
    assert core.reset_prefix_cache()["forgotten_blocks"] == counts["cached"]
    assert core.check_integrity()["vacant"] == 400


def test_draining_refuses_what_is_new_and_finishes_what_is_there() -> None:
    core = EngineCore(config())
    client = Client(core)
    core.add_request(request(1))
    client.step()
    core.stop_admission(abort=False)
    core.add_request(request(2))
    client.run()
    assert client.ends == {1: FINISH_LENGTH, 2: FINISH_ERROR}


def test_stopping_aborts_what_is_there() -> None:
    core = EngineCore(config())
    client = Client(core)
    core.add_request(request(1, max_tokens=1000))
    core.add_request(request(2))
    client.step()
    core.stop_admission(abort=True)
    client.run()
    assert client.ends == {1: FINISH_ABORT, 2: FINISH_ABORT}


def test_a_refusal_is_reported_without_a_step() -> None:
    core = EngineCore(config())
    core.add_request(request(1, []))
    assert core.has_work
    outputs = core.step()
    assert outputs is not None
    assert (outputs.step, outputs.seq_ids, [end.reason for end in outputs.finished]) == (-1, [], [FINISH_ERROR])
    assert not core.has_work


def test_the_context_is_limited_by_the_cache() -> None:
    core = EngineCore(config(cache=CacheConfig(num_blocks=4)))
    assert core.info["max_model_len"] == 64
    assert (core.info["num_kv_blocks"], core.info["block_size"], core.info["executor"]) == (4, 16, "simulated")
    with pytest.raises(ConfigError, match=r"--max-model-len 65 does not fit.*lower it to 64"):
        EngineCore(config(cache=CacheConfig(num_blocks=4), model=ModelConfig(max_model_len=65)))


class ClosableExecutor(SimulatedExecutor):
    closed = False

    def shutdown(self) -> None:
        self.closed = True
        super().shutdown()


def test_a_core_that_cannot_start_stops_its_executor() -> None:
    settings = config(cache=CacheConfig(num_blocks=4), model=ModelConfig(max_model_len=65))
    executor = ClosableExecutor(settings)
    with pytest.raises(ConfigError):
        EngineCore(settings, executor)
    assert executor.closed


def test_utilities() -> None:
    core = EngineCore(config())
    assert core.call("ping", {})["engine_index"] == 0
    assert core.call("stats", {})["kv_blocks_total"] == 1 << 16
    assert core.call("check_integrity", {})["free"] == 1 << 16
    with pytest.raises(RequestError, match="no operation 'shutdown'"):
        core.call("shutdown", {})
    with pytest.raises(RequestError, match="missing a required argument: 'directory'"):
        core.call("start_profile", {})
    with pytest.raises(RequestError, match="no profiler"):
        core.call("start_profile", {"directory": "/nowhere"})
    with pytest.raises(RequestError, match="no profiler"):
        core.call("stop_profile", {})


def test_a_lost_block_is_noticed_when_the_engine_goes_idle() -> None:
    core = EngineCore(config())
    core.add_request(request(1))
    core.scheduler.kv.pool._vacant.pop()
    with pytest.raises(AssertionError, match="lost or duplicated"):
        Client(core).run()


def test_a_leaked_reference_is_noticed_when_the_engine_goes_idle() -> None:
    core = EngineCore(config())
    core.add_request(request(1))
    core.scheduler.kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="in use"):
        Client(core).run()


class BrokenExecutor(SimulatedExecutor):
    def collect(self, handle: StepHandle) -> StepResult:
        raise AtomEngineError("the device is gone")


def test_what_a_step_raises_comes_through_and_shutdown_is_safe_twice() -> None:
    settings = config()
    core = EngineCore(settings, BrokenExecutor(settings))
    core.add_request(request(1))
    with pytest.raises(AtomEngineError, match="the device is gone"):
        core.step()
    core.shutdown()
    core.shutdown()
