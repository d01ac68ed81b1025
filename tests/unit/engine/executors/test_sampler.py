"""The sampler against a slow one that treats each row alone, in float64, straight from the definitions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.engine.executors.base import NewSequence
from atom.engine.executors.penalties import PenaltyState
from atom.engine.executors.random_draws import draw_key, uniform_draws
from atom.engine.executors.sampler import Sampler
from atom.engine.executors.sequence_table import SequenceState, SequenceTable
from atom.engine.kernels.bindings import CPUKernels
from atom.engine.sampling_params import SamplingParams

VOCAB = 24
CLOSE = 1e-4
"""A draw or a cut-off this near to a boundary may fall on either side of it."""


def make_state(
    params: SamplingParams, prompt: list[int], output: list[int], seq_id: int = 0, stops: tuple[int, ...] = ()
) -> SequenceState:
    table = SequenceTable(1, 128, 16, seed=3)
    table.add(NewSequence(seq_id, prompt, len(prompt), params, [0], 0, stops))
    state = table[seq_id]
    for token in output:
        table.append_token(state, token)
    return state


def reference_logits(row: torch.Tensor, state: SequenceState, prompt: list[int], output: list[int]) -> list[float]:
    """Bias, mask, penalties."""
    params = state.params
    logits = row.double().tolist()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        for token in state.stop_token_ids:
            logits[token] = -math.inf
    counts = Counter(output)
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        logits[token] -= params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
    return logits


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def acceptable_sets(logits: list[float], params: SamplingParams) -> list[list[float]]:
    """Filtered distributions, one for each way that near-ties at the cut-offs may fall."""
    scaled = [x / params.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    results = []
    for slack in (-CLOSE, 0.0, CLOSE):
        threshold = -math.inf
        if params.min_p > 0:
            threshold = scaled[order[0]] + min(0.0, math.log(params.min_p) + slack)
        if 0 < params.top_k < len(scaled):
            threshold = max(threshold, scaled[order[params.top_k - 1]])
        kept = [i for i in order if scaled[i] >= threshold]
        if params.top_p < 1:
            probs = softmax([scaled[i] for i in kept])
            total = 0.0
            for i, p in zip(kept, probs, strict=True):
                total += p
                threshold = scaled[i]
                if total >= params.top_p + slack:
                    break
        masked = [x if x >= threshold else -math.inf for x in scaled]
        results.append(softmax(masked))
    return results


def check_token(token: int, logits: list[float], state: SequenceState, uniform: float) -> None:
    params = state.params
    if params.greedy:
        assert logits[token] >= max(logits) - CLOSE
        assert all(logits[i] < max(logits) or i == token for i in range(token)) or logits[token] != max(logits)
        return
    for probs in acceptable_sets(logits, params):
        below = sum(probs[:token])
        if probs[token] > 0 and below - CLOSE <= uniform <= below + probs[token] + CLOSE:
            return
    raise AssertionError((token, uniform, acceptable_sets(logits, params)))


tokens_list = st.lists(st.integers(0, VOCAB - 1), max_size=12)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
    top_k=st.sampled_from([0, -1, 1, 3, 10, VOCAB, 1000]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    min_tokens=st.integers(0, 6),
    max_tokens=st.just(50),
    logprobs=st.none() | st.integers(0, 5),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
)
rows_strategy = st.lists(
    st.tuples(params_strategy, tokens_list.filter(bool), tokens_list, st.sets(st.integers(0, VOCAB - 1), max_size=3)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("compiled", [True, False])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
@given(rows=rows_strategy, seed=st.integers(0, 10_000))
def test_every_option_in_combination(kernels: CPUKernels, compiled: bool, rows: list[Any], seed: int) -> None:
    states = [
        make_state(params, prompt, output, seq_id, tuple(stops))
        for seq_id, (params, prompt, output, stops) in enumerate(rows)
    ]
    logits_nv = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    raw_nv = logits_nv.clone()
    tokens, logprobs = Sampler(kernels if compiled else None).sample(logits_nv, states)
    assert set(logprobs) == {state.seq_id for state in states if state.params.logprobs is not None}
    for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
        _, prompt, output, _ = rows[row]
        expected = reference_logits(raw_nv[row], state, prompt, output)
        uniform = uniform_draws(
            np.array([state.key], dtype=np.uint64), np.array([len(prompt) + len(output)], dtype=np.uint64)
        )[0]
        check_token(token, expected, state, float(uniform))
        if state.params.logprobs is not None:
            check_logprobs(logprobs[state.seq_id][0], raw_nv[row], token, state.params.logprobs)


def check_logprobs(entry: Any, raw: torch.Tensor, token: int, count: int) -> None:
    """Of the raw logits: whatever the other parameters did to the choice."""
    exact = raw.double().log_softmax(-1)
    order = exact.argsort(descending=True).tolist()
    assert entry.token_ids == [token, *order[:count]]
    assert entry.logprobs == pytest.approx([exact[i].item() for i in entry.token_ids], abs=1e-5)
    assert entry.rank == order.index(token) + 1


@pytest.mark.parametrize("compiled", [True, False])
def test_large_vocabulary_filters(kernels: CPUKernels, compiled: bool) -> None:
    """Flat rows need more than the candidates looked at first; peaked ones fewer."""
    vocab = 5000
    params = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_p=0.999, temperature=2.0),
        SamplingParams(top_k=2000, top_p=0.7),
        SamplingParams(min_p=0.01, top_k=300),
    ]
    for scale in (0.0, 0.01, 1.0, 6.0):
        states = [make_state(p, [1], [], seq_id) for seq_id, p in enumerate(params)]
        logits_nv = torch.randn(4, vocab, generator=torch.Generator().manual_seed(4)) * scale
        tokens, _ = Sampler(kernels if compiled else None).sample(logits_nv.clone(), states)
        for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
            uniform = uniform_draws(np.array([state.key], dtype=np.uint64), np.array([1], dtype=np.uint64))[0]
            check_token(token, logits_nv[row].double().tolist(), state, float(uniform))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_draws_follow_the_distribution(kernels: CPUKernels, compiled: bool, options: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws of unseeded sequences; fixed run seed, so the outcome never changes."""
    draws = 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    base = make_state(SamplingParams(**options), [1], [])
    probs = np.array(acceptable_sets(logits.double().tolist(), base.params)[1])
    states = []
    for seq_id in range(draws):
        states.append(SequenceState(seq_id, 0, 1, 1, 0, base.params, (), draw_key(None, 0, seq_id), None, False))
    tokens, _ = Sampler(kernels if compiled else None).sample(logits.repeat(draws, 1), states)
    counts = np.bincount(tokens, minlength=len(logits))
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    statistic = float((((counts - draws * probs) ** 2)[kept] / (draws * probs)[kept]).sum())
    # 99.9% quantiles of chi-square with 1 to 7 degrees of freedom.
    assert statistic < [10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32][int(kept.sum()) - 2]


def test_a_seeded_draw_depends_on_seed_and_position_alone(kernels: CPUKernels) -> None:
    seeded = SamplingParams(seed=11)
    other = SamplingParams(seed=12, top_p=0.7)
    logits = torch.randn(400)

    def draw(neighbours: int, seq_id: int, position: int) -> int:
        mine = make_state(seeded, [1] * position, [], seq_id)
        rest = [make_state(other, [2], [], 100 + i) for i in range(neighbours)]
        tokens, _ = Sampler(kernels).sample(logits.repeat(neighbours + 1, 1), [*rest, mine])
        return tokens[-1]

    alone = [draw(0, 1, position) for position in range(1, 30)]
    assert alone == [draw(5, 77, position) for position in range(1, 30)]
    assert len(set(alone)) > 10


def test_unseeded_sequences_differ_and_the_run_seed_reproduces_them() -> None:
    keys = [draw_key(None, run_seed, seq_id) for run_seed in (0, 1) for seq_id in range(1000)]
    assert len(set(keys)) == 2000
    assert keys[:1000] == [draw_key(None, 0, seq_id) for seq_id in range(1000)]


def test_uniforms_are_uniform() -> None:
    keys = np.array([draw_key(seed, 0, 0) for seed in range(300)], dtype=np.uint64)
    draws = np.concatenate([uniform_draws(keys, np.full(300, p, dtype=np.uint64)) for p in range(300)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    statistic = float(((counts - 900) ** 2 / 900).sum())
    assert 60 < statistic < 149  # 0.1% quantiles for 99 degrees of freedom
    grid = draws.reshape(300, 300)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.015  # neighbouring positions
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.015  # neighbouring seeds


@pytest.mark.parametrize("compiled", [True, False])
def test_plans_follow_a_changing_batch(kernels: CPUKernels, compiled: bool) -> None:
    """The same sampler, batches that grow, shrink and leave min_tokens behind."""
    sampler = Sampler(kernels if compiled else None)
    held_back = SamplingParams(temperature=0, min_tokens=2, max_tokens=9)
    state = make_state(held_back, [1], [], 0, stops=(4,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 9] = 2.0, 1.0
    assert sampler.sample(logits.clone(), [state])[0] == [9]
    state.num_tokens += 1
    assert sampler.sample(logits.clone(), [state])[0] == [9]
    state.num_tokens += 1
    assert sampler.sample(logits.clone(), [state])[0] == [4]
    greedy = make_state(SamplingParams(temperature=0), [1], [], 1)
    assert sampler.sample(logits.repeat(2, 1), [greedy, state])[0] == [4, 4]
    assert sampler.sample(logits.repeat(1, 1), [greedy])[0] == [4]


def test_penalties_count_any_number_of_distinct_tokens() -> None:
    output = [token for token in range(300) for _ in range(1 + token % 2)]
    state = PenaltyState(SamplingParams(frequency_penalty=0.5), [], output)
    assert dict(zip(state.tokens.tolist(), state.counts.tolist(), strict=True)) == Counter(output)
