"""Absorbed attention to selected keys: the backends, and stock's unfused function.

Legend: S queries and keys, B batch, H heads, K width of query and latent key (latent and rotary part), N selected keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.conditioning import EARLY, early_causal_terms
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import PEER, Draw, Inputs, Problem, Tensors, candidates, differentiable, floors
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model.flops import product, selected_pairs

LIMITS = {"bfloat16": 5e-3, "float32": 4e-6}
STOCK = "stock unfused"


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    from megacpp_mcore.ops.indexer.reference import causal_topk

    sizes = options.shape
    B, S, H, V, N = (sizes[name] for name in ("B", "S", "heads", "latent", "topk"))
    K = V + sizes["rope"]
    draw = Draw(options)
    how = {"softmax_scale": K**-0.5, "value_dim": V}

    def one() -> Inputs:
        index_BSN = causal_topk(draw.normal(B, S, S, dtype=torch.float32), N)
        leaves = {"q": draw.normal(S, B, H, K).requires_grad_(), "kv": draw.normal(S, B, K).requires_grad_()}
        fixed = {"index": index_BSN, "stock's index": index_BSN.long()}
        return Inputs(leaves=leaves, cotangents=(draw.normal(S, B, H, V),), fixed=fixed)

    def call(fn: Any, inputs: Inputs) -> Tensors:
        return [fn(*inputs.leaves.values(), inputs.fixed["index"], **how)]

    rows = S * B
    queries, keys, index = rows * H * K * draw.itemsize, rows * K * draw.itemsize, rows * min(N, S) * 4
    output = rows * H * V * draw.itemsize
    forward = queries + keys + index + output
    work = product(B * selected_pairs(S, N) * H * (K + V))
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=one(),
        variants=[
            differentiable(STOCK, PEER, partial(_stock, **how)),
            *candidates("sparse_mla", call, device=options.device, dtype=options.dtype, qk_dim=K, v_dim=V),
        ],
        works=floors(work, forward, 2 * forward + output + queries + keys, options.dtype),
        judge=AgainstTruth(
            partial(_truth, how),
            ("o", "dq", "dkv"),
            LIMITS[options.dtype],
            yardstick=STOCK,
            norms=partial(_norms, K**-0.5, V, min(EARLY, N, S)),
        ),
        stock=STOCK,
    )


def _truth(how: dict[str, Any], inputs: Inputs) -> Tensors:
    from megacpp_mcore.ops.sparse_mla.reference import attend

    double = inputs.in_double()
    output = attend(double.leaves["q"], double.leaves["kv"], double.fixed["index"], **how)
    return [output, *torch.autograd.grad(output, list(double.leaves.values()), double.cotangents)]


def _norms(scale: float, value_dim: int, queries: int, name: str, norm: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """In the gradient of the first ``queries``, which select all that they may see, everything cancels: as for ``mla``."""
    if name == "dq":
        q, kv = inputs.leaves.values()
        shared = kv.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
        norm = norm.clone()
        norm[:queries] = early_causal_terms([q, shared, shared[..., :value_dim], *inputs.cotangents], scale, queries)
    return norm


def _stock(inputs: Inputs, *, softmax_scale: float, value_dim: int) -> Tensors:
    from megatron.core.transformer.experimental_attention_variant import dsa

    q, kv = inputs.leaves.values()
    starts = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    ends = torch.arange(1, len(q) + 1, device=q.device)
    run: Any = dsa._unfused_absorbed_dsa_fn
    index = inputs.fixed["stock's index"]
    return [run(q, kv.unsqueeze(2), index, softmax_scale, value_dim, varlen_starts=starts, varlen_ends=ends)]
