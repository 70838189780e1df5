"""Sparse attention's three ops: the indexer's selection of keys, the gradient that trains it, absorbed attention to the keys.

Peers are stock's functions, with and without our patch, and its TileLang kernels. Its ``cudnn`` kernels are left out: their
forward is a branch of FlashMLA that has no wheels.

Legend: S queries and keys, B batch, H heads (the indexer's, or attention's), D indexer head width, K width of query and latent
key (latent and rotary part), V latent width, N selected keys.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.backends.support import Dim, Support
from megacpp_mcore.bench.cases.peers import lacking, patched
from megacpp_mcore.bench.catalog import OURS, PEER, Options
from megacpp_mcore.bench.problem import FORWARD, Call, Draw, Floor, Inputs, Problem, Tensors, Variant, on_leaves
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import causal_pairs, product, selected_pairs
from megacpp_mcore.ops.indexer.reference import causal_topk, indexer_loss, indexer_scores, select
from megacpp_mcore.ops.sparse_mla.reference import attend
from megacpp_mcore.ops.testing import EARLY, early_causal_terms

SELECTED = 1e-5
"""How far a selected key's score may be below the one it replaced: rounding of scores in float32."""
BEYOND_RELU = 5e-2
"""For gradients: among so many logits, some round to the other side of ReLU's step, where gradients jump."""
GRADIENT_LIMITS = {"loss": 1e-4, "dq": BEYOND_RELU, "dk": BEYOND_RELU, "dw": BEYOND_RELU}
GRADIENT = "gradient"

LIMITS = {"bfloat16": 5e-3, "float32": 4e-6}
UNFUSED, PATCH = "stock unfused", "dsa-sparse-attention"

CANCELS = {"dq": 2.0}
"""Factor by which a result may be off more because the mean over keys cancels in it; plain PyTorch in bf16 is off further."""

TILELANG = "stock TileLang"
_DIMS = {"qk_dim": Dim(one_of=(576,)), "v_dim": Dim(one_of=(512,)), "heads": Dim(one_of=(64, 128))}
TILELANG_SUPPORT = Support(devices=("cuda",), dtypes=("bfloat16",), dims=_DIMS | {"selected": Dim(multiple_of=64)})
"""What its kernels run without padding heads; stock runs attention unfused if they decline a call."""

QUERIES = 1024
"""Queries whose scores are drawn at a time, as all scores would be S × S numbers."""


def indexer(options: Options) -> Problem:
    """Check the selection against all scores."""
    B, S, H, D, N = options.sizes("B", "S", "indexer_heads", "indexer_dim", "topk")
    draw, run = Draw(options), on_leaves(N)

    @torch.no_grad()
    def stock(inputs: Inputs) -> torch.Tensor:
        from megatron.core.transformer.experimental_attention_variant.dsa import fused_qk_topk_naive

        return fused_qk_topk_naive(*inputs.leaves.values(), N, **_causal(inputs.leaves["q"]))[1]

    # Queries that select every key they see need no scores.
    scored = causal_pairs(S) - causal_pairs(min(N, S))
    moved = S * B * (H * D + D + H) * draw.itemsize + S * B * min(N, S) * 4
    floor = Floor(operations=2 * B * scored * H * (D + 1), moved=moved, dtype=options.dtype)
    inputs, peer = Inputs(_drawn(draw, options)), Variant(name="stock", side=PEER, runs={FORWARD: stock})
    variants = [peer, *Variant.candidates("indexer", options, run, work=FORWARD, dim=D, heads=H)]
    truth = {"selected": indexer_scores(*inputs.in_double().leaves.values())}
    return Problem(inputs, variants, {FORWARD: floor}, truth, SELECTED, rows=selected_scores, stock="stock")


def indexer_grad(options: Options) -> Problem:
    """Check the gradient of the indexer's loss against a given target; the truth is autograd's, over all keys."""
    B, S, H, D, N = options.sizes("B", "S", "indexer_heads", "indexer_dim", "topk")
    draw = Draw(options)
    inputs = Inputs(_drawn(draw, options))
    index_BSN = select(inputs.leaves["q"], inputs.leaves["k"], inputs.leaves["w"], N)
    target_BSN = draw.normal(*index_BSN.shape, dtype=torch.float32).exp().masked_fill(index_BSN < 0, 0.0)

    def run(fn: Call, inputs: Inputs) -> Any:
        loss, *gradients = fn(*inputs.leaves.values(), index_BSN, target_BSN, 1.0)
        return [loss[None], *gradients]

    double = list(inputs.in_double().leaves.values())
    true_loss = indexer_loss(indexer_scores(*double), index_BSN, target_BSN.double())
    truth = dict(zip(GRADIENT_LIMITS, (true_loss[None], *torch.autograd.grad(true_loss, double)), strict=True))
    moved = 2 * S * B * (H * D + D + H) * draw.itemsize + S * B * min(N, S) * 8
    works = {GRADIENT: Floor(6 * B * selected_pairs(S, N) * H * (D + 1), moved, options.dtype)}
    peer = Variant.missing("stock", "no peer: stock's function makes the target, too")
    variants = [peer, *Variant.candidates("indexer_grad", options, run, work=GRADIENT, dim=D, heads=H)]
    return Problem(inputs, variants, works, truth, GRADIENT_LIMITS, outputs=len(GRADIENT_LIMITS))


def selected_scores(index_BSN: torch.Tensor, score_BSS: torch.Tensor) -> Tensors:
    """Return the scores of the selected keys, best first, and the best that each query could select; both padded with 0.

    Args:
        index_BSN: selected keys, -1 for none.
        score_BSS: of all keys; those of the future are ignored.

    Raises:
        AssertionError: a key of the future, a duplicate key, or too few.
    """
    keys, topk = score_BSS.shape[-1], index_BSN.shape[-1]
    causal_SS = torch.ones(keys, keys, dtype=torch.bool, device=score_BSS.device).tril()
    best_BSN = score_BSS.masked_fill(~causal_SS, float("-inf")).topk(topk, dim=-1).values
    has_key = best_BSN > float("-inf")
    chosen = torch.zeros((*score_BSS.shape[:2], keys + 1), dtype=torch.bool, device=score_BSS.device)
    chosen = chosen.scatter_(2, torch.where(index_BSN < 0, keys, index_BSN).long(), True)[..., :keys]
    if bool((chosen & ~causal_SS).any()) or not torch.equal(chosen.sum(-1), has_key.sum(-1)):
        raise AssertionError("a key of the future is selected, one key twice, or too few")
    selected_BSN = score_BSS.masked_fill(~chosen, float("-inf")).topk(topk, dim=-1).values
    return [selected_BSN.masked_fill(~has_key, 0.0), best_BSN.masked_fill(~has_key, 0.0)]


def _drawn(draw: Draw, options: Options) -> dict[str, torch.Tensor]:
    B, S, H, D = options.sizes("B", "S", "indexer_heads", "indexer_dim")
    q, k = draw.normal(S, B, H, D), draw.normal(S, B, D)
    return {"q": q, "k": k, "w": draw.normal(S, B, H, scale=(H * D) ** -0.5)}


def _causal(q: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the range of keys that each query sees, as arguments of stock's functions."""
    starts = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    return {"varlen_starts": starts, "varlen_ends": torch.arange(1, len(q) + 1, device=q.device)}


def sparse_mla(options: Options) -> Problem:
    """Compare every implementation on one set of queries, latent keys and indices."""
    B, S, H, V, N = options.sizes("B", "S", "heads", "latent", "topk")
    K, draw = V + options.shape["rope"], Draw(options)
    scores = (draw.normal(B, min(QUERIES, S - row), S, dtype=torch.float32) for row in range(0, S, QUERIES))
    index_BSN = torch.cat([causal_topk(part, N, first_row=i * QUERIES) for i, part in enumerate(scores)], dim=1)
    leaves = draw.leaves(q=draw.normal(S, B, H, K), kv=draw.normal(S, B, K))
    inputs = Inputs(leaves, {"o": draw.normal(S, B, H, V)})
    how = {"softmax_scale": K**-0.5, "value_dim": V}
    run, stock = on_leaves(index_BSN, **how), partial(on_leaves(index_BSN.long(), K**-0.5, V), _stock_attention)

    def norms(name: str, norm: torch.Tensor) -> torch.Tensor:
        """Return norms for errors; the gradient of the first queries, which select all they see, cancels, as in ``mla``."""
        if name == "dq":
            (q, kv), early = inputs.leaves.values(), min(EARLY, N, S)
            shared = kv.unsqueeze(2).expand(-1, -1, H, -1)
            norm[:early] = early_causal_terms([q, shared, shared[..., :V], inputs.cotangents["o"]], K**-0.5, early)
        return norm

    limits = {name: LIMITS[options.dtype] * CANCELS.get(name, 1.0) for name in inputs.names}
    queries, keys, output = (S * B * width * draw.itemsize for width in (H * K, K, H * V))
    forward = queries + keys + S * B * min(N, S) * 4 + output
    work = product(B * selected_pairs(S, N) * H * (K + V))
    ours = list(Variant.candidates("sparse_mla", options, run, qk_dim=K, v_dim=V))
    fixed = [variant.deterministic() for variant in ours if variant.name == "triton" and variant.runs]
    sizes = {"qk_dim": K, "v_dim": V, "heads": H, "selected": min(N, S)}
    unfit = TILELANG_SUPPORT.lacking({"device": options.device, "dtype": options.dtype, **sizes})
    reason = f"not here: {unfit}" if unfit else lacking(options.device, "tilelang", TILELANG)
    variants = [
        Variant.of(UNFUSED, PEER, stock),
        Variant.of(TILELANG, PEER, partial(run, _stock_tilelang), absent=reason),
        Variant.of(f"patch {PATCH}", OURS, stock, around=partial(patched, PATCH)),
        *ours,
        *fixed,
        *(variant.captured() for variant in (*ours, *fixed) if variant.name.startswith("triton") and variant.runs),
    ]
    works = Floor.pair(work, forward, 2 * forward + output + queries + keys, options.dtype)
    return Problem(inputs, variants, works, inputs.truth(partial(run, attend)), limits, norms=norms)


def _stock_attention(q: torch.Tensor, kv: torch.Tensor, *index_scale_width: torch.Tensor | float) -> torch.Tensor:
    from megatron.core.transformer.experimental_attention_variant import dsa

    return dsa._unfused_absorbed_dsa_fn(q, kv.unsqueeze(2), *index_scale_width, **_causal(q))


def _stock_tilelang(
    q: torch.Tensor, kv: torch.Tensor, index: torch.Tensor, *, softmax_scale: float, value_dim: int
) -> torch.Tensor:
    """Call stock's TileLang kernels as its layers do with ``dsa_kernel_backend`` "tilelang"."""
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    run, config = dsa_kernels.run_fused_absorbed_sparse_attention, SimpleNamespace(dsa_kernel_backend="tilelang")
    output = run(config, q, kv.unsqueeze(2), index, softmax_scale, value_dim)
    if output is None:
        raise BenchmarkError("stock's TileLang kernels declined this call, which its layers would then run unfused")
    return output
