"""The gradient of the indexer's loss over every key, in chunks, against autograd's of the formula, in fp64.

Legend: S queries and keys, B batch, H indexer heads, D indexer width, A attention heads, K absorbed width.
"""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops.indexer import reference
from megacpp_mcore.ops.indexer.chunked import dense_grad

S, B, H, D, A, K = 24, 2, 3, 8, 4, 10


@pytest.mark.parametrize("query_chunk", [None, 5])
@pytest.mark.parametrize("lengths", [None, (9, 1, 14)])
def test_the_gradients_are_those_of_the_formula(query_chunk: int | None, lengths: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, w, query, key = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((S, B, H, D), (S, B, D), (S, B, H), (S, B, A, K), (S, B, 1, K))
    )
    seq_idx, seen_ST = None, torch.ones(S, S, dtype=torch.bool).tril()
    if lengths is not None:
        seq_idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
        seen_ST = seen_ST & (seq_idx[:, None] == seq_idx)
    trained = [tensor.clone().requires_grad_() for tensor in (q, k, w)]
    attended_BAST = 0.4 * torch.einsum("sbak,tbk->bast", query, key.squeeze(2))
    target = attended_BAST.masked_fill(~seen_ST, -torch.inf).softmax(-1).mean(1)
    score = reference.indexer_scores(*trained).masked_fill(~seen_ST, -torch.inf)
    log_ratio = (target.log() - score.log_softmax(-1)).masked_fill(~seen_ST, 0.0)
    loss = (target * log_ratio).sum(-1).mean()
    (3 * loss).backward()
    found = dense_grad(
        q, k, w, query, key,
        weight=torch.tensor(3 / (S * B), dtype=torch.float64), softmax_scale=0.4, seq_idx_S=seq_idx, query_chunk=query_chunk,
    )  # fmt: skip
    assert float(found[0].mean()) == pytest.approx(float(loss), rel=1e-9)
    for gradient, tensor in zip(found[1:], trained, strict=True):
        assert torch.allclose(gradient, tensor.grad, rtol=1e-8, atol=1e-12)
