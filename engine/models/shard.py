"""Which part of a model one rank holds: arithmetic on the configuration, no tensors.

Tensor parallel ranks share every layer: each has some heads and some columns of the MLP, and what they compute is
added up (https://arxiv.org/abs/1909.08053). The vocabulary of embedding and head is divided likewise. Pipeline stages
have consecutive layers; the first has the embedding, the last the final norm and the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atom.engine.errors import ConfigError
from atom.engine.models.config import TransformerConfig

__all__ = ["Part", "Shard", "check_division"]


@dataclass(frozen=True, slots=True)
class Part:
    """`start : stop` of one dimension of a checkpoint's tensor."""

    dimension: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place. Ranks are numbered stage by stage."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        """As messages name the rank."""
        return f"worker {self.rank} (tp {self.tp_rank}/{self.tp_size}, pp {self.pp_rank}/{self.pp_size})"

    def layers(self, config: TransformerConfig) -> range:
        count = config.num_layers // self.pp_size
        return range(self.pp_rank * count, (self.pp_rank + 1) * count)

    def vocabulary_width(self, config: TransformerConfig) -> int:
        """Ids per rank; the last ones may have fewer."""
        return -(-config.vocab_size // self.tp_size)

    def vocabulary(self, config: TransformerConfig) -> range:
        """The ids whose rows of embedding and head this rank holds."""
        width = self.vocabulary_width(config)
        start = min(self.tp_rank * width, config.vocab_size)
        return range(start, min(start + width, config.vocab_size))

    def local_config(self, config: TransformerConfig) -> TransformerConfig:
        """Sizes of this rank's layers. A bias that is added to a sum belongs to the first rank alone; that of the
        MLP's output shares its switch with those of its input, see `engine/models/stage.py`."""
        return replace(
            config,
            num_layers=len(self.layers(config)),
            num_heads=config.num_heads // self.tp_size,
            num_kv_heads=max(1, config.num_kv_heads // self.tp_size),
            intermediate_size=config.intermediate_size // self.tp_size,
            o_bias=config.o_bias and self.tp_rank == 0,
        )

    def part(self, name: str, config: TransformerConfig) -> Part | None:
        """This rank's part of the tensor `name`; None: all of it."""
        if self.tp_size == 1:
            return None
        stem, _, suffix = name.rpartition(".")
        projection = stem.rpartition(".")[2]
        k = config.head_dim
        if projection == "q_proj":
            return _share(0, self.tp_rank, config.num_heads * k // self.tp_size)
        if projection in ("k_proj", "v_proj"):
            # With more ranks than kv heads, neighbours hold copies of one: they have its query heads between them.
            head = self.tp_rank * config.num_kv_heads // self.tp_size
            size = max(1, config.num_kv_heads // self.tp_size)
            return Part(0, head * k, (head + size) * k)
        if projection in ("gate_proj", "up_proj"):
            return _share(0, self.tp_rank, config.intermediate_size // self.tp_size)
        if projection in ("o_proj", "down_proj") and suffix == "weight":
            width = config.num_heads * k if projection == "o_proj" else config.intermediate_size
            return _share(1, self.tp_rank, width // self.tp_size)
        if projection in ("embed_tokens", "lm_head"):
            ids = self.vocabulary(config)
            return Part(0, ids.start, ids.stop)
        return None


def check_division(config: TransformerConfig, tp_size: int, pp_size: int) -> None:
    """Raise `ConfigError` naming the flag and the size that it does not divide."""
    flag, model = "--tensor-parallel-size", config.architecture
    for what, size in (("attention heads", config.num_heads), ("MLP columns", config.intermediate_size)):
        if size % tp_size:
            raise ConfigError(
                f"{flag} {tp_size} does not divide the {size} {what} of this {model}; {_divisors(config)} would"
            )
    if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
        raise ConfigError(
            f"{flag} {tp_size} neither divides the {config.num_kv_heads} key/value heads of this {model} nor is a "
            f"multiple of them; {_divisors(config)} would"
        )
    if not len(Shard(tp_size - 1, tp_size).vocabulary(config)):
        raise ConfigError(f"{flag} {tp_size} is too many for the vocabulary of {config.vocab_size} of this {model}")
    if config.num_layers % pp_size:
        fitting = ", ".join(
            str(size) for size in range(1, min(config.num_layers, 64) + 1) if not config.num_layers % size
        )
        raise ConfigError(
            f"--pipeline-parallel-size {pp_size} does not divide the {config.num_layers} layers of this {model}; "
            f"{fitting} would"
        )


def _share(dimension: int, rank: int, size: int) -> Part:
    return Part(dimension, rank * size, (rank + 1) * size)


def _divisors(config: TransformerConfig) -> str:
    """Tensor-parallel sizes that this model allows."""
    heads, groups = config.num_heads, config.num_kv_heads
    sizes = (size for size in range(1, heads + 1) if not (heads % size or config.intermediate_size % size))
    return ", ".join(str(size) for size in sizes if not groups % size or not size % groups)
