"""The simulated executor: tokens that depend on seed and position alone, and a clock that overlaps."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.engine.config import CacheConfig, EngineConfig, ModelConfig, SimulatedConfig
from atom.engine.errors import ConfigError, RequestError
from atom.engine.executors.base import NewSequence, SchedulerOutput
from atom.engine.executors.factory import create_executor
from atom.engine.executors.simulated import SimulatedExecutor, lowest_token, token_at, token_table
from atom.engine.messages import DeviceTimes
from atom.engine.sampling_params import SamplingParams

INSTANT = SimulatedConfig(base_ms=0, prefill_us_per_token=0, decode_us_per_seq=0)


def executor(simulated: SimulatedConfig = INSTANT, **model: object) -> SimulatedExecutor:
    built = create_executor(
        EngineConfig(executor="simulated", simulated=simulated, model=ModelConfig(**model))  # type: ignore[arg-type]
    )
    assert isinstance(built, SimulatedExecutor)
    built.start()
    return built


def new(seq_id: int, prompt: int = 4, stop: tuple[int, ...] = (), **params: object) -> NewSequence:
    return NewSequence(
        seq_id,
        list(range(prompt)),
        prompt,
        SamplingParams(**params),  # type: ignore[arg-type]
        [0],
        0,
        stop_token_ids=stop,
    )


def prefill(*sequences: NewSequence, step: int = 0) -> SchedulerOutput:
    sizes = [len(sequence.token_ids) for sequence in sequences]
    return SchedulerOutput(
        step,
        [sequence.seq_id for sequence in sequences],
        sizes,
        [0] * len(sizes),
        [True] * len(sizes),
        new_sequences=list(sequences),
        num_prefill_tokens=sum(sizes),
    )


@given(st.integers(-(2**63), 2**64 - 1), st.integers(16, 1 << 22))
def test_the_table_equals_the_function(seed: int, vocab_size: int) -> None:
    table = token_table(seed, 20, vocab_size)
    assert table == [token_at(seed, position, vocab_size) for position in range(20)]
    assert min(table) >= lowest_token(vocab_size)
    assert max(table) < vocab_size


def test_seeds_and_positions_differ() -> None:
    assert token_table(1, 50, 32_000) != token_table(2, 50, 32_000)
    assert len(set(token_table(1, 50, 32_000))) > 45


def test_tokens_do_not_depend_on_the_batch_and_follow_the_requests_seed() -> None:
    run = executor(seed=5)
    result = run.collect(run.submit(prefill(new(1), new(2, 6), new(3, 6, seed=9))))
    assert result.seq_ids == [1, 2, 3]
    assert result.token_ids == [token_at(5, 4, 32_000), token_at(5, 6, 32_000), token_at(9, 6, 32_000)]
    mixed = SchedulerOutput(
        1, [3, 2, 4], [1, 1, 3], [6, 6, 0], [True, True, False], [new(4, 9)], released=[1], num_prefill_tokens=3
    )
    result = run.collect(run.submit(mixed))
    assert (result.seq_ids, result.token_ids) == ([3, 2], [token_at(9, 7, 32_000), token_at(5, 7, 32_000)])
    decode = SchedulerOutput(2, [2, 3], [1, 1], [7, 7], [True, True], num_decode_seqs=2)
    result = run.collect(run.submit(decode))
    assert (result.seq_ids, result.token_ids) == ([2, 3], [token_at(5, 8, 32_000), token_at(9, 8, 32_000)])


def test_stop_ids_are_masked_until_min_tokens() -> None:
    stop = (token_at(0, 4, 32_000), token_at(0, 4, 32_000) + 1)
    run = executor()
    result = run.collect(run.submit(prefill(new(1, stop=stop, min_tokens=1), new(2, stop=stop))))
    assert result.token_ids == [stop[0] + 2, stop[0]]


def test_logprobs_are_well_formed_and_reproducible() -> None:
    results = []
    for _ in range(2):
        run = executor()
        results.append(run.collect(run.submit(prefill(new(1, 5, logprobs=3, prompt_logprobs=2), new(2, logprobs=0)))))
    first, again = results
    assert (first.logprobs, first.prompt_logprobs) == (again.logprobs, again.prompt_logprobs)
    (chosen,) = first.logprobs[1]
    assert chosen.token_ids[0] == first.token_ids[0]
    assert [len(first.logprobs[seq_id][0].token_ids) for seq_id in (1, 2)] == [4, 1]
    prompt = first.prompt_logprobs[1]
    assert prompt[0] is None
    assert [entry.token_ids[0] for entry in prompt if entry is not None] == [1, 2, 3, 4]
    for entry in [chosen, *(entry for entry in prompt if entry is not None)]:
        top = list(zip(entry.token_ids, entry.logprobs, strict=True))[1:]
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert len({token for token, _ in top}) == len(top)
        assert (entry.rank <= len(top)) == (entry.token_ids[0] in [token for token, _ in top])
        assert sum(math.exp(value) for _, value in top) <= 1.0


def test_a_step_takes_what_the_model_says_and_steps_queue_up() -> None:
    run = executor(SimulatedConfig(base_ms=20, prefill_us_per_token=1000, decode_us_per_seq=5000))
    started = time.monotonic()
    first = run.submit(prefill(new(1)))
    second = run.submit(SchedulerOutput(1, [1], [1], [4], [True], num_decode_seqs=1))
    assert not run.is_done(first)
    assert run.collect(first).seconds == pytest.approx(0.024)
    assert run.is_done(first)
    assert time.monotonic() - started >= 0.024
    assert run.collect(second).seconds == pytest.approx(0.025)
    assert time.monotonic() - started >= 0.049


def test_the_device_timer_reports_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (run := executor()).collect(run.submit(prefill(new(1)))).device_times is None
    monkeypatch.setenv("ATOM_ENABLE_METRICS_DEVICE_TIMER", "1")
    run = executor(SimulatedConfig(base_ms=2, prefill_us_per_token=0, decode_us_per_seq=0))
    result = run.collect(run.submit(prefill(new(1))))
    assert result.device_times == [DeviceTimes(pytest.approx(0.002), None)]


def test_jitter_is_seeded() -> None:
    def seconds(seed: int) -> list[float]:
        run = executor(SimulatedConfig(base_ms=0.01, jitter=0.5), seed=seed)
        return [run.collect(run.submit(prefill(new(step), step=step))).seconds for step in range(5)]

    assert seconds(1) == seconds(1)
    assert seconds(1) != seconds(2)
    assert len(set(seconds(1))) == 5


def test_what_it_says_of_itself() -> None:
    info = executor().info()
    assert (info["executor"], info["simulated"], info["eos_token_ids"]) == ("simulated", True, [])
    assert (info["vocab_size"], info["max_model_len"]) == (32_000, 131_072)
    assert executor(max_model_len=100).info()["max_model_len"] == 100


def test_a_model_directory_brings_vocabulary_and_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64, "max_position_embeddings": 50}))
    run = executor(model=str(tmp_path))
    assert (run.info()["vocab_size"], run.info()["max_model_len"]) == (64, 50)
    assert 32 <= run.collect(run.submit(prefill(new(1)))).token_ids[0] < 64


@pytest.mark.parametrize(
    "text", ["{", '{"vocab_size": "big"}', '{"vocab_size": 3}', '{"vocab_size": true}', "[" * 9999]
)
def test_a_broken_model_config_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        executor(model=str(tmp_path))


def test_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        create_executor(EngineConfig(executor="simulated", cache=CacheConfig(memory_bytes=1 << 30)))
    with pytest.raises(RequestError, match="simulated executor has no profiler"):
        executor().start_profile("/nowhere")
    with pytest.raises(ConfigError, match="--executor cuda is not in this version"):
        create_executor(EngineConfig(executor="cuda"))
