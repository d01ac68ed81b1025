"""min_p, top_k and top_p as one threshold per row. Shape legend: n rows, v vocabulary, k candidates.

In vLLM's order, each on what the one before left: min_p keeps tokens at least `min_p` times as likely as the most
likely one; top_k the k largest; top_p the smallest set of the largest whose share of the rest reaches p. Each keeps
every token at or above a logit, so the three are one threshold, and tokens that tie with the last one kept are kept as
well: the result does not depend on a sort's order. The same in C: `engine/kernels/cpu/filters.c`. Penalties:
`penalties.py`; the draw: `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from atom.engine.sampling_params import SamplingParams

__all__ = ["FilterParams", "filter_logits", "needs_filter"]

CANDIDATES: Final = 256
"""Largest logits looked at before sorting a whole row: nearly always enough for top_p, and 50 times cheaper."""


def needs_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True, slots=True)
class FilterParams:
    """The filters of a batch of rows as columns."""

    inv_temperature_n: torch.Tensor
    """float32"""
    min_p_n: torch.Tensor
    """float32; 0: off"""
    top_k_n: torch.Tensor
    """int64; 0: off"""
    top_p_n: torch.Tensor
    """float64; 1: off"""

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> FilterParams:
        return cls(
            torch.tensor([1.0 / p.temperature for p in params]),
            torch.tensor([p.min_p for p in params]),
            torch.tensor([max(p.top_k, 0) for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
        )


def filter_logits(logits_nv: torch.Tensor, params: FilterParams) -> None:
    """Scale by the temperature and set what is filtered out to -inf, in place. Float32."""
    logits_nv *= params.inv_temperature_n[:, None]
    vocab = logits_nv.shape[1]
    min_p_n1, top_k_n1, top_p_n1 = params.min_p_n[:, None], params.top_k_n[:, None], params.top_p_n[:, None]
    limited_n1 = (top_k_n1 > 0) & (top_k_n1 < vocab)
    any_top_k, any_top_p = bool(limited_n1.any()), bool((top_p_n1 < 1).any())
    largest_k = int(top_k_n1[limited_n1].max()) if any_top_k else 1
    width = min(vocab, max(largest_k, CANDIDATES if any_top_p else 1))
    sorted_nk = logits_nv.topk(width, dim=-1).values
    threshold_n1 = sorted_nk[:, :1] + min_p_n1.log()  # log(0) leaves no threshold
    if any_top_k:
        kth_n1 = sorted_nk.gather(1, (top_k_n1 - 1).clamp_(0, width - 1))
        threshold_n1 = torch.where(limited_n1, torch.maximum(threshold_n1, kth_n1), threshold_n1)
    logits_nv.masked_fill_(logits_nv < threshold_n1, -torch.inf)
    if any_top_p:
        sorted_nk = sorted_nk.masked_fill(sorted_nk < threshold_n1, -torch.inf)
        threshold_n1 = _top_p_threshold(logits_nv, sorted_nk, top_p_n1)
        logits_nv.masked_fill_(logits_nv < threshold_n1, -torch.inf)


def _top_p_threshold(logits_nv: torch.Tensor, sorted_nk: torch.Tensor, top_p_n1: torch.Tensor) -> torch.Tensor:
    """Logit of the last token of the smallest set that holds `top_p` of the probability; -inf where top_p is 1."""
    top_n1 = sorted_nk[:, :1]
    total_n1 = (logits_nv - top_n1).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    needed_n1 = top_p_n1 * total_n1
    threshold_n1, missing_n = _last_needed(sorted_nk, top_n1, needed_n1)
    missing_n &= (top_p_n1 < 1.0)[:, 0]
    if sorted_nk.shape[1] < logits_nv.shape[1] and bool(missing_n.any()):
        rows = missing_n.nonzero()[:, 0]
        full_nv = logits_nv[rows].sort(dim=-1, descending=True).values
        threshold_n1[rows] = _last_needed(full_nv, top_n1[rows], needed_n1[rows])[0]
    return threshold_n1.masked_fill_(top_p_n1 >= 1.0, -torch.inf)


def _last_needed(
    sorted_nk: torch.Tensor, top_n1: torch.Tensor, needed_n1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logit at which the running sum reaches `needed`, and the rows where it never does within the candidates."""
    mass_nk = (sorted_nk - top_n1).exp_().double().cumsum_(dim=-1)
    index_n1 = torch.searchsorted(mass_nk, needed_n1)
    missing_n = (index_n1 >= sorted_nk.shape[1])[:, 0]
    return sorted_nk.gather(1, index_n1.clamp_(max=sorted_nk.shape[1] - 1)), missing_n
