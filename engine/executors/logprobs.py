"""Log probabilities: log-softmax of the model's raw logits, before bias, penalties, temperature and filters, as OpenAI
and vLLM define them. Of sampled tokens and of prompt tokens alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom.engine.messages import TokenLogprobs

__all__ = ["token_logprobs"]


def token_logprobs(logits_nv: torch.Tensor, chosen_n: torch.Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row the chosen token first, then the `num_top[row]` most likely ones in descending order.

    The rank of the chosen token is 1 + the number of tokens with a larger logit. `logits_nv` float32, `chosen_n` int64.
    """
    normalizer_n1 = logits_nv.logsumexp(dim=-1, keepdim=True)
    chosen_logit_n1 = logits_nv.gather(1, chosen_n[:, None])
    ranks = ((logits_nv > chosen_logit_n1).sum(dim=-1) + 1).tolist()
    chosen_ids = chosen_n.tolist()
    chosen_logprobs = (chosen_logit_n1 - normalizer_n1)[:, 0].tolist()
    width = min(max(num_top, default=0), logits_nv.shape[1])
    if width:
        values_nk, ids_nk = logits_nv.topk(width, dim=-1)
        top_logprobs, top_ids = (values_nk - normalizer_n1).tolist(), ids_nk.tolist()
    else:
        top_logprobs = top_ids = [[] for _ in chosen_ids]
    return [
        TokenLogprobs(
            token_ids=[chosen_ids[i], *top_ids[i][: num_top[i]]],
            logprobs=[chosen_logprobs[i], *top_logprobs[i][: num_top[i]]],
            rank=ranks[i],
        )
        for i in range(len(chosen_ids))
    ]
