"""The compiled kernels against torch, and what they promise beyond it: results that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.engine.kernels.arena import WeightArena
from atom.engine.kernels.bindings import CPUKernels

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)


@SHARED
@given(
    m=st.integers(1, 40) | st.sampled_from([191, 192, 193, 400]),
    n=st.integers(1, 130),
    k=st.integers(1, 150).map(lambda half: 2 * half),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_linear_equals_torch(kernels: CPUKernels, m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_nk = torch.randn(n, k, generator=generator).to(dtype)
    a_mk = torch.randn(m, k, generator=generator)
    packed = kernels.pack(weight_nk, WeightArena())
    out_mn = kernels.linear(packed, n, a_mk)
    exact = a_mk.double() @ weight_nk.double().T
    bound = 1e-6 * (a_mk.abs().double() @ weight_nk.abs().double().T)
    assert ((out_mn - exact).abs() <= bound + 1e-12).all()


@SHARED
@given(
    m=st.integers(2, 60) | st.just(200),
    n=st.integers(1, 100),
    k=st.integers(1, 200).map(lambda half: 2 * half),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_of_linear_is_the_same_in_every_batch(
    kernels: CPUKernels, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    weight_nk = torch.randn(n, k).to(dtype)
    a_mk = torch.randn(m, k)
    packed = kernels.pack(weight_nk, WeightArena())
    together = kernels.linear(packed, n, a_mk)
    one_thread = CPUKernels(1)
    for row in {0, m // 2, m - 1}:
        assert torch.equal(together[row], one_thread.linear(packed, n, a_mk[row : row + 1])[0])
    one_thread.close()


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 49152])
def test_argmax_takes_the_first_of_equal_maxima(kernels: CPUKernels, vocab: int) -> None:
    logits_nv = torch.randint(-3, 3, (17, vocab)).float()
    logits_nv[0] = -torch.inf
    first = torch.tensor([row.tolist().index(row.max().item()) for row in logits_nv])
    assert torch.equal(kernels.argmax(logits_nv), first)


@SHARED
@given(
    vocab=st.integers(1, 3000),
    scale=st.floats(0.01, 30.0),
    inv_temperature=st.floats(0.01, 50.0),
    seed=st.integers(0, 1000),
)
def test_sample_inverts_the_cumulative_distribution(
    kernels: CPUKernels, vocab: int, scale: float, inv_temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_nv = torch.randn(4, vocab, generator=generator) * scale
    logits_nv[1, torch.rand(vocab, generator=generator) < 0.7] = -torch.inf
    logits_nv[1, vocab // 2] = 0.0
    uniform_n = torch.rand(4, generator=generator, dtype=torch.float64)
    uniform_n[2], uniform_n[3] = 0.0, 1 - 2.0**-53
    tokens = kernels.sample(logits_nv, torch.full((4,), inv_temperature), uniform_n)
    probs_nv = (logits_nv.double() * inv_temperature).softmax(-1)
    for row, token in enumerate(tokens.tolist()):
        assert logits_nv[row, token] > -torch.inf
        below = probs_nv[row, :token].sum().item()
        # Slack for float32 weights; a draw may land beside the exact boundary but not beyond it.
        assert below - 2e-5 <= uniform_n[row].item() <= below + probs_nv[row, token].item() + 2e-5


def test_sample_survives_rows_without_a_finite_logit(kernels: CPUKernels) -> None:
    logits_nv = torch.full((2, 100), -torch.inf)
    logits_nv[1] = torch.nan
    tokens = kernels.sample(logits_nv, torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64))
    assert all(0 <= token < 100 for token in tokens.tolist())


def test_an_idle_pool_sleeps(kernels: CPUKernels) -> None:
    """Threads of an idle server must leave the cores to others: no CPU time goes by between two calls."""
    import time

    kernels.argmax(torch.randn(8, 1000))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15


def test_close_twice() -> None:
    pool = CPUKernels(2)
    pool.close()
    pool.close()
