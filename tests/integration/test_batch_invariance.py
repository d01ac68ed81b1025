"""Greedy output does not depend on how the work was cut: batch composition, chunking, prefix hits, preemption, overlap,
threads, or which kernels computed it.

The fused decoder promises more than that its output agrees: the same bits whatever the batch, so for it any difference
is a failure. Kernels that round by shape (torch, and attention in C under a torch model) may differ from it, but only
where the two best logits lie within rounding of each other; such places are counted and printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from atom.engine.engine_core import EngineCore
from atom.engine.envs import KernelChoice
from atom.engine.executors.cpu import CPUExecutor
from atom.engine.loading.weights import load_model
from atom.engine.messages import AddRequest
from atom.engine.models.decoder import DecoderLM
from atom.engine.models.dense_attention import DenseAttention
from atom.engine.sampling_params import SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny_config, write_checkpoint

BLOCK_SIZE = 4
MAX_LEN = 96
ROUNDING = 1e-3
"""Logits nearer than this may change places; those of the tiny models span about ±4."""


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Way:
    """One way to run a set of requests."""

    num_blocks: int = 400
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    prefix_caching: bool = True
    overlap: bool = True
    num_threads: int = 2
    kernels: KernelChoice = "auto"
    arrivals: tuple[int, ...] = ()
    """Steps to run before each request is added; missing ones arrive at once."""


@dataclass
class Run:
    outputs: dict[int, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    prefix_hits: int = 0
    steps: int = 0


def run(model: Path, requests: list[Request], way: Way, repeat: int = 1) -> Run:
    """All requests through a core of their own, `repeat` times in a row (the second time the prefixes are cached)."""
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_model_len=MAX_LEN),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=way.num_blocks, enable_prefix_caching=way.prefix_caching),
        scheduler=SchedulerConfig(
            max_num_seqs=way.max_num_seqs,
            max_num_batched_tokens=way.max_num_batched_tokens,
            overlap=way.overlap,
        ),
        executor="cpu",
        num_threads=way.num_threads,
    )
    core = EngineCore(config, CPUExecutor(config, kernels=way.kernels))
    result = Run()
    try:
        for round_ in range(repeat):
            _serve(core, requests, way, round_ * len(requests), result)
        stats = core.scheduler.stats()
        result.preemptions, result.prefix_hits = stats.num_preemptions_total, stats.prefix_cache_hits_total
        assert core.check_integrity()["used"] == 0
    finally:
        core.shutdown()
    return result


def _serve(core: EngineCore, requests: list[Request], way: Way, first_id: int, result: Run) -> None:
    def step() -> None:
        outputs = core.step()
        if outputs is not None:
            result.steps += 1
            for seq_id, token in zip(outputs.seq_ids, outputs.token_ids, strict=True):
                result.outputs.setdefault(seq_id, []).append(token)

    for i, request in enumerate(requests):
        for _ in range(way.arrivals[i] if i < len(way.arrivals) else 0):
            if core.has_work:
                step()
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        prompt = np.array(request.prompt, dtype="<i4").tobytes()
        core.add_request(AddRequest(first_id + i, str(i), prompt, params, 0))
    while core.has_work:
        step()


class Model:
    """A checkpoint with its plain model, which says what is right and how near the second choice is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plain: DecoderLM = load_model(ModelConfig(model=str(path)), dtype=torch.float32).model
        self.near_ties = 0
        self.tokens = 0

    def check(self, requests: list[Request], result: Run, exact: list[list[int]] | None = None) -> None:
        """Every token is the plain model's best after the tokens before it, or within rounding of it."""
        for seq_id, tokens in result.outputs.items():
            request = requests[seq_id % len(requests)]
            assert len(tokens) == request.max_tokens
            if exact is not None:
                assert tokens == exact[seq_id % len(requests)], f"request {seq_id}"
                continue
            known = [*request.prompt, *tokens]
            hidden = self.plain.forward(
                torch.tensor(known), torch.arange(len(known)), DenseAttention().step({0: len(known)})
            )
            logits = self.plain.compute_logits(hidden)[len(request.prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            best = logits.max(dim=-1)
            short = best.values - chosen
            assert (short <= ROUNDING).all(), f"request {seq_id}: a token {short.max():.4f} below the best"
            self.near_ties += int((best.indices != torch.tensor(tokens)).sum())
            self.tokens += len(tokens)


@pytest.fixture(scope="module", params=["llama", "qwen3-tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    config = {
        "llama": tiny_config(num_attention_heads=6, num_key_value_heads=2),
        "qwen3-tied": tiny_config("Qwen3ForCausalLM", head_dim=24, tie_word_embeddings=True),
    }[request.param]
    made = Model(write_checkpoint(tmp_path_factory.mktemp("models") / request.param, config))
    yield made
    print(
        f"\n{request.param}: {made.near_ties} of {made.tokens} tokens differ from the plain model, all within rounding"
    )


def requests_of(seed: int, count: int, shared: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB_SIZE, shared).tolist()
    return [
        Request((*prefix, *rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 40))).tolist()), int(rng.integers(1, 24)))
        for _ in range(count)
    ]


def alone(model: Model, requests: list[Request]) -> list[list[int]]:
    """Each request by itself, in one chunk, without overlap, on one thread: the fused decoder's answer."""
    way = Way(max_num_seqs=1, prefix_caching=False, overlap=False, num_threads=1)
    result = run(model.path, requests, way)
    model.check(requests, result)
    return [result.outputs[i] for i in range(len(requests))]


WAYS: dict[str, Way] = {
    "together": Way(),
    "together, three threads": Way(num_threads=3),
    "chunks of 7": Way(max_num_seqs=7, max_num_batched_tokens=7),
    "no overlap": Way(overlap=False),
    "no prefix cache": Way(prefix_caching=False),
    "pool that preempts": Way(num_blocks=26),
    "pool that preempts, chunks": Way(num_blocks=26, max_num_seqs=9, max_num_batched_tokens=11, overlap=False),
    "staggered": Way(arrivals=(0, 1, 0, 3, 2, 5, 1, 4)),
}


ROUNDING_KERNELS_WAYS = ("together", "chunks of 7", "pool that preempts, chunks")


@pytest.mark.parametrize(
    ("name", "kernels"),
    [(name, "auto") for name in WAYS]
    + [(name, kernels) for name in ROUNDING_KERNELS_WAYS for kernels in ("attention", "torch")],
)
def test_ways_to_run(model: Model, name: str, kernels: KernelChoice) -> None:
    requests = requests_of(1, 10, shared=17)
    way = Way(**{**{f: getattr(WAYS[name], f) for f in Way.__dataclass_fields__}, "kernels": kernels})
    result = run(model.path, requests, way, repeat=2)
    assert len(result.outputs) == 20
    if "preempts" in name:
        assert result.preemptions > 0
    if way.prefix_caching:
        assert result.prefix_hits > 0
    model.check(requests, result)
    if kernels == "auto" and _fused():
        model.check(requests, result, exact=alone(model, requests))


def _fused() -> bool:
    from atom.engine.kernels.bindings import CPUKernels, KernelsUnavailableError

    try:
        CPUKernels(1).close()
    except KernelsUnavailableError:
        return False
    return True


ways = st.builds(
    Way,
    num_blocks=st.integers(MAX_LEN // BLOCK_SIZE, 80),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 64),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
    num_threads=st.integers(1, 3),
    arrivals=st.lists(st.integers(0, 6), max_size=8).map(tuple),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, max_examples=15
)
@given(way=ways, seed=st.integers(0, 3), count=st.integers(1, 8), shared=st.sampled_from([0, 9, 20]))
def test_any_way_to_run(model: Model, way: Way, seed: int, count: int, shared: int) -> None:
    requests = requests_of(seed, count, shared)
    cache: dict[Any, list[list[int]]] = model.__dict__.setdefault("alone", {})
    key = (seed, count, shared)
    if key not in cache:
        cache[key] = alone(model, requests)
    result = run(model.path, requests, way)
    model.check(requests, result, exact=cache[key] if _fused() else None)
