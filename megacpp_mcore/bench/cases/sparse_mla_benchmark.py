"""Absorbed attention to selected keys: the backends, stock's TileLang kernels, its unfused function with and without our patch.

Stock's ``cudnn`` kernels are no peer: their forward is a branch of FlashMLA of which there are no wheels.

Legend: S queries and keys, B batch, H heads, K width of query and latent key (latent and rotary part), V latent width, N
selected keys.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.backends.support import Dim, Support
from megacpp_mcore.bench.cases.peers import lacking, patched
from megacpp_mcore.bench.catalog import OURS, PEER, Options
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import product, selected_pairs
from megacpp_mcore.ops.indexer.reference import causal_topk
from megacpp_mcore.ops.sparse_mla.reference import attend
from megacpp_mcore.ops.testing import EARLY, early_causal_terms

LIMITS = {"bfloat16": 5e-3, "float32": 4e-6}
STOCK, PATCH = "stock unfused", "dsa-sparse-attention"

CANCELS = {"dq": 2.0}
"""Factor by which a result may be off more because the mean over keys cancels in it; plain PyTorch in bf16 is off further."""

TILELANG = "stock TileLang"
_DIMS = {"qk_dim": (576,), "v_dim": (512,), "heads": (64, 128)}
TILELANG_SUPPORT = Support(
    devices=("cuda",),
    dtypes=("bfloat16",),
    dims={name: Dim(one_of=sizes) for name, sizes in _DIMS.items()} | {"selected": Dim(multiple_of=64)},
)
"""What its kernels run without padding heads; stock attends unfused where they decline a call."""

QUERIES = 1024
"""Queries whose scores are drawn at a time, as all scores would be S × S numbers."""


def problem(options: Options) -> Problem:
    """Compare every implementation on one set of queries, latent keys and indices."""
    B, S, H, V, N = options.sizes("B", "S", "heads", "latent", "topk")
    K, draw = V + options.shape["rope"], Draw(options)
    index = []
    for start in range(0, S, QUERIES):
        score_BRT = draw.normal(B, min(QUERIES, S - start), S, dtype=torch.float32)
        index.append(causal_topk(score_BRT, N, first_row=start))
    index_BSN = torch.cat(index, dim=1)
    inputs = Inputs(
        leaves=draw.leaves(q=draw.normal(S, B, H, K), kv=draw.normal(S, B, K)),
        cotangents={"o": draw.normal(S, B, H, V)},
        fixed={"index": index_BSN, "stock's index": index_BSN.long()},
    )
    how = {"softmax_scale": K**-0.5, "value_dim": V}

    def run(fn: Any, inputs: Inputs) -> torch.Tensor:
        return fn(*inputs.leaves.values(), inputs.fixed["index"], **how)

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
    fixed = [one.deterministic() for one in ours if one.name == "triton" and one.runs]
    return Problem(
        inputs=inputs,
        variants=[
            Variant.of(STOCK, PEER, partial(_stock, **how)),
            _tilelang(options, K, V),
            Variant.of(f"patch {PATCH}", OURS, partial(_stock, **how), around=partial(patched, PATCH)),
            *ours,
            *fixed,
            *(one.captured() for one in (*ours, *fixed) if one.name.startswith("triton") and one.runs),
        ],
        works=Floor.pair(work, forward, 2 * forward + output + queries + keys, options.dtype),
        truth=inputs.truth(partial(run, attend)),
        limit=limits,
        norms=norms,
    )


def _stock(inputs: Inputs, *, softmax_scale: float, value_dim: int) -> torch.Tensor:
    from megatron.core.transformer.experimental_attention_variant import dsa

    q, kv = inputs.leaves.values()
    starts = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    ends = torch.arange(1, len(q) + 1, device=q.device)
    run: Any = dsa._unfused_absorbed_dsa_fn
    index = inputs.fixed["stock's index"]
    return run(q, kv.unsqueeze(2), index, softmax_scale, value_dim, varlen_starts=starts, varlen_ends=ends)


def _tilelang(options: Options, K: int, V: int) -> Variant:
    """Return stock's TileLang kernels, or why they cannot run here."""
    S, H, N = options.sizes("S", "heads", "topk")
    sizes = {"qk_dim": K, "v_dim": V, "heads": H, "selected": min(N, S)}
    if unfit := TILELANG_SUPPORT.lacking({"device": options.device, "dtype": options.dtype, **sizes}):
        return Variant.missing(TILELANG, f"not here: {unfit}")
    if reason := lacking(options.device, "tilelang", TILELANG):
        return Variant.missing(TILELANG, reason)
    return Variant.of(TILELANG, PEER, partial(_stock_tilelang, softmax_scale=K**-0.5, value_dim=V))


def _stock_tilelang(inputs: Inputs, *, softmax_scale: float, value_dim: int) -> torch.Tensor:
    """Call them as stock's layers do with ``dsa_kernel_backend`` "tilelang"."""
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    (q, kv), index = inputs.leaves.values(), inputs.fixed["index"]
    config: Any = SimpleNamespace(dsa_kernel_backend="tilelang")
    output: torch.Tensor | None = dsa_kernels.run_fused_absorbed_sparse_attention(
        config, q, kv.unsqueeze(2), index, softmax_scale, value_dim
    )
    if output is None:
        raise BenchmarkError("stock's TileLang kernels declined this call, which its layers would then run unfused")
    return output
