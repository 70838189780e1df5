"""How large the terms are that cancel in an attention query's gradient: what rounding errors there are measured against.

Shape legend: S queries, T keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import torch

EARLY = 16
"""In the gradient of a query that sees this many keys or fewer the terms cancel, wholly where it sees one: what is left is
rounding, in whatever kernel, and has no meaning relative to the gradient."""


@torch.no_grad()
def query_gradient_terms(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    do_SBHV: torch.Tensor,
    softmax_scale: float,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Norms ``[S, B, H]``, float64, of ``scale · Σ_j p_j (do·v_j − Σ_i p_i do·v_i) k_j`` with all products of magnitudes.

    Args:
        hidden: bool, broadcastable to [B, H, S, T]; each query sees at least one key.
    """
    q, k, v, do = (tensor.detach().double() for tensor in (q_SBHK, k_TBHK, v_TBHV, do_SBHV))
    score_BHST = torch.einsum("sbhk,tbhk->bhst", q, k) * softmax_scale
    p_BHST = score_BHST.masked_fill(hidden, float("-inf")).softmax(-1)
    dp_BHST = torch.einsum("sbhv,tbhv->bhst", do.abs(), v.abs())
    ds_BHST = p_BHST * (dp_BHST + (p_BHST * dp_BHST).sum(-1, keepdim=True))
    return torch.einsum("bhst,tbhk->sbhk", ds_BHST, k.abs()).norm(dim=-1) * softmax_scale


def early_causal_terms(inputs: list[torch.Tensor], softmax_scale: float, queries: int = EARLY) -> torch.Tensor:
    """:func:`query_gradient_terms` of the first ``queries`` under a causal mask, for q, k, v and do of S = T."""
    q, k, v, do = (tensor[:queries] for tensor in inputs)
    hidden = ~torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    return query_gradient_terms(q, k, v, do, softmax_scale, hidden)
