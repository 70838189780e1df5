"""MLA's ops: latents, absorbed queries, keys and values, what the indexer scores, and full MLA's core attention.

The core's peer is stock's module at its own seam, with and without the patch mla-core-attention.

Legend: S tokens, B batch, H heads, D hidden, Q and L ranks of the query's and the key's latent, K width of a query or key, of
which R is rotary and C content, V of a value, N heads of the indexer.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.bench.cases.peers import lacking, patched
from megacpp_mcore.bench.catalog import BOUND, OURS, PEER, Options
from megacpp_mcore.bench.problem import BOTH, Call, Draw, Floor, Inputs, Problem, Variant, on_leaves
from megacpp_mcore.errors import BenchmarkError
from megacpp_mcore.model.flops import Work, causal_pairs, product, selected_pairs
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.mla_projection import reference
from megacpp_mcore.ops.testing import EARLY, early_causal_terms

LIMITS = {"bfloat16": 5e-3, "float32": 4e-6}
PROJECTION_LIMITS = {"bfloat16": 5e-3, "float32": 2e-6}
"""The largest error of a row; plain PyTorch in bf16 is further off in the core."""

EPS = 1e-5

PATCH = "mla-core-attention"
PLAIN = "plain PyTorch"
"""In the dtype of the inputs: a kernel's allowed error is a multiple of this one's. It has no row."""


def mla(options: Options) -> Problem:
    """Compare every implementation on one set of queries, keys and values.

    With a size ``documents``, each row has that many of equal length, marked by their numbers, or packed for stock's seam; with
    ``window``, a query sees that many keys before its own.

    Raises:
        BenchmarkError: the documents do not fill the rows.
    """
    B, S, H, K, V = options.sizes("B", "S", "heads", "qk", "v")
    packed, documents = "documents" in options.shape, options.shape.get("documents", 1)
    window = options.shape.get("window")
    if S % documents:
        raise BenchmarkError(f"{documents} documents in a row of {S}; expected a number that divides it")
    draw, scale, length = Draw(options), K**-0.5, S // documents
    seq_idx_S = torch.arange(documents, device=options.device, dtype=torch.int32).repeat_interleave(length)
    leaves = draw.leaves(q=draw.normal(S, B, H, K), k=draw.normal(S, B, H, K), v=draw.normal(S, B, H, V))
    inputs = Inputs(leaves, {"o": draw.normal(S, B, H, V)})
    seq_idx = seq_idx_S.expand(B, S).contiguous() if packed else None
    needs: dict[str, Any] = {"qk_dim": K, "v_dim": V, "packed": packed} | ({} if window is None else {"window": window})
    attend = on_leaves(softmax_scale=scale, seq_idx=seq_idx, window=window)

    def norms(name: str, norm: torch.Tensor) -> torch.Tensor:
        """Return norms for errors; the gradient of a document's first queries cancels: they use the norm of its terms."""
        tensors = [*inputs.leaves.values(), *inputs.cotangents.values()]
        for start in range(0, S, length) if name == "dq" else ():
            document = [tensor[start : start + length] for tensor in tensors]
            norm[start : start + min(EARLY, length)] = early_causal_terms(document, scale)
        return norm

    # q, k, v, o and a float32 log-sum-exp a row; backward reads those and the gradient of o, and writes three gradients.
    forward = B * H * S * (draw.itemsize * (2 * K + 2 * V) + 4)
    backward = forward + B * H * S * draw.itemsize * (2 * K + 2 * V)
    pairs = causal_pairs(length) if window is None else selected_pairs(length, window + 1)
    work = product(B * H * documents * pairs * (K + V))  # two products under the mask
    stock = _stock(options, length if packed else None, window)
    ours = list(Variant.candidates("mla", options, attend, **needs))
    ordered = [v.deterministic() for v in ours if v.name == "flash4" and v.runs]
    graphs = [v.captured() for v in ours if v.name in ("sdpa", "triton", "flash4", "te") and v.runs]
    variants, limit = [*stock, *ours, *ordered, *graphs], LIMITS[options.dtype]
    works = Floor.pair(work, forward, forward + backward, options.dtype)
    truth = inputs.truth(partial(attend, mla_attention))
    problem = Problem(inputs, variants, works, truth, limit, yardstick=PLAIN, norms=norms, stock=stock[0].name)
    problem.check(Variant.of(PLAIN, BOUND, partial(attend, _plain)), BOTH)
    return problem


def _stock(options: Options, length: int | None, window: int | None) -> list[Variant]:
    """Return stock's module, with and without the patch, in packed documents of ``length`` tokens; None: in whole rows.

    The patch leaves a ``window`` to stock.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    B, H, K, V = options.sizes("B", "heads", "qk", "v")
    engine = not lacking(options.device)
    stock, patch = f"stock {'Transformer Engine' if engine or length else 'local'}", f"patch {PATCH}"
    if length and B > 1:
        reason = "not here: stock packs rows only at batch size 1"
        return [Variant.missing(stock, reason), Variant.missing(patch, reason, OURS)]
    config = MLATransformerConfig(
        num_layers=1, hidden_size=H * V, num_attention_heads=H, qk_head_dim=K // 2, qk_pos_emb_head_dim=K - K // 2,
        v_head_dim=V, attention_dropout=0.0, bf16=options.dtype == "bfloat16", params_dtype=getattr(torch, options.dtype),
        masked_softmax_fusion=False, window_size=None if window is None else (window, 0),
    )  # fmt: skip
    with patched(PATCH):  # without the patch, stock's local module does not accept these widths
        core = (TEDotProductAttention if engine else DotProductAttention)(
            config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
            softmax_scale=K**-0.5, k_channels=K, v_channels=V,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )  # fmt: skip
    attention = SimpleNamespace(core_attention=core.train(), attn_mask_type=AttnMaskType.causal, config=config)

    def seam(inputs: Inputs) -> torch.Tensor:
        """Attend as MultiLatentAttention does, for which ``attention`` stands in."""
        tensors, packed = list(inputs.leaves.values()), None
        if length:
            tensors = [leaf.squeeze(1) for leaf in tensors]
            ends = torch.arange(0, len(tensors[0]) + 1, length, device=options.device, dtype=torch.int32)
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=length, max_seqlen_kv=length
            )
        run = MultiLatentAttention._run_core_attention
        return run(attention, *tensors, None, packed_seq_params=packed).reshape(inputs.cotangents["o"].shape)

    absent = "no peer here: only Transformer Engine takes packed rows" if length and not engine else ""
    return [
        Variant.of(stock, PEER, seam, absent=absent),
        *([] if window else [Variant.of(patch, OURS, seam, around=partial(patched, PATCH))]),
    ]


def _plain(*q_k_v: torch.Tensor, softmax_scale: float, seq_idx: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """Attend with every step rounded to the dtype, one head at a time."""
    S = len(q_k_v[0])
    seen_BST = torch.ones(1, S, S, dtype=torch.bool, device=q_k_v[0].device).tril()
    if window is not None:
        seen_BST = seen_BST.triu(-window)
    if seq_idx is not None:
        seen_BST = seen_BST & (seq_idx[:, :, None] == seq_idx[:, None, :])

    def head(q_SBK: torch.Tensor, k_TBK: torch.Tensor, v_TBV: torch.Tensor) -> torch.Tensor:
        score_BST = torch.einsum("sbk,tbk->bst", q_SBK, k_TBK) * softmax_scale
        return torch.einsum("bst,tbv->sbv", score_BST.masked_fill(~seen_BST, float("-inf")).softmax(-1), v_TBV)

    heads = zip(*(tensor.unbind(2) for tensor in q_k_v), strict=True)
    return torch.stack([checkpoint(head, *qkv, use_reentrant=False, preserve_rng_state=False) for qkv in heads], dim=2)


def mla_latents(options: Options) -> Problem:
    """Apply both down-projections and norms of the latents."""
    (B, S, D), (Q, L, R) = options.sizes("B", "S", "hidden"), options.sizes("query_latent", "latent", "rope")
    draw = Draw(options)
    leaves = {
        "hidden_SBD": draw.normal(S, B, D),
        "q_down_QD": draw.normal(Q, D, scale=D**-0.5),
        "kv_down_XD": draw.normal(L + R, D, scale=D**-0.5),
        "q_norm_Q": 1 + draw.normal(Q, scale=0.1),
        "kv_norm_L": 1 + draw.normal(L, scale=0.1),
    }
    needs = {"query_latent_dim": Q, "latent_dim": L, "rope_dim": R}
    return _projection("mla_latents", "latents", options, leaves, {"eps": EPS}, product(S * B * D * (Q + L + R)), **needs)


def mla_projection(options: Options) -> Problem:
    """Compute queries that absorb the up-projection of keys, rotated."""
    (B, S, H), (K, L, R) = options.sizes("B", "S", "heads"), options.sizes("qk", "latent", "rope")
    draw = Draw(options)
    leaves = {"x_SBHX": draw.normal(S, B, H, K), "weight_HCK": draw.normal(H, K - R, L, scale=L**-0.5)}
    needs = {"content_dim": K - R, "latent_dim": L, "rope_dim": R}
    how = {"rotation_SR": _rotations(S, R, options.device)}
    return _projection("mla_projection", "project", options, leaves, how, product(S * B * H * (K - R) * L), **needs)


def mla_keys(options: Options) -> Problem:
    """Return keys and values of full MLA, from one projection and the rotary part that all heads share."""
    (B, S, H), (K, V, R) = options.sizes("B", "S", "heads"), options.sizes("qk", "v", "rope")
    draw = Draw(options)
    leaves = {"kv_SBHX": draw.normal(S, B, H, K - R + V), "rotary_SBR": draw.normal(S, B, R)}
    needs = {"content_dim": K - R, "v_dim": V, "rope_dim": R}
    how = {"rotation_SR": _rotations(S, R, options.device), "value_dim": V}
    rotation = 4 * S * B * R
    return _projection("mla_keys", "keys_and_values", options, leaves, how, Work(rotation, rotation), **needs)


def indexer_inputs(options: Options) -> Problem:
    """Compare queries, keys and head weights of the indexer; hidden states and latents get no gradient."""
    B, S, D, N, R, Q = options.sizes("B", "S", "hidden", "indexer_heads", "indexer_dim", "query_latent")
    draw = Draw(options)
    leaves = {
        "q_up_XQ": draw.normal(N * R, Q, scale=Q**-0.5),
        "k_down_RD": draw.normal(R, D, scale=D**-0.5),
        "k_norm_R": 1 + draw.normal(R, scale=0.1),
        "k_bias_R": draw.normal(R, scale=0.1),
        "w_down_ND": draw.normal(N, D, scale=D**-0.5),
    }
    how = {
        "hidden_SBD": draw.normal(S, B, D),
        "latent_SBQ": draw.normal(S, B, Q),
        "rotation_SR": _rotations(S, R, options.device),
        "eps": EPS,
        "scale": (N * R) ** -0.5,
    }
    forward = product(S * B * (Q * N * R + D * (R + N))).forward
    work = Work(forward, forward)  # one of the two operands gets a gradient
    return _projection("indexer_inputs", "indexer_inputs", options, leaves, how, work, rope_dim=R)


def _rotations(rows: int, width: int, device: str) -> torch.Tensor:
    half = torch.arange(width // 2, device=device) / (width // 2)
    return reference.rotation_table((torch.arange(rows, device=device)[:, None] * 500_000.0**-half).repeat(1, 2))


def _projection(
    op: str, name: str, options: Options, leaves: dict[str, torch.Tensor], how: dict[str, Any], work: Work, **needs: Any
) -> Problem:
    """Compare every backend of ``op`` with the reference ``name``, whose named arguments are leaves and all other inputs."""
    draw = Draw(options, seed=2)

    def call(fn: Call, inputs: Inputs) -> Any:
        dtype = next(iter(inputs.leaves.values())).dtype  # in float64 the other inputs are, too
        others = {key: t.to(dtype) if getattr(t, "dtype", 0) == draw.dtype else t for key, t in how.items()}
        return fn(**inputs.leaves, **others)

    truth, inputs_of_op = partial(call, getattr(reference, name)), draw.leaves(**leaves)
    returned = truth(Inputs(inputs_of_op))
    outputs = returned if isinstance(returned, tuple) else (returned,)
    inputs = Inputs(inputs_of_op, {f"output {i}": draw.normal(*output.shape) for i, output in enumerate(outputs)})
    tensors = [*leaves.values(), *(value for value in how.values() if isinstance(value, torch.Tensor))]
    read, written, gradients = (
        sum(tensor.numel() for tensor in group) * draw.itemsize for group in (tensors, outputs, leaves.values())
    )
    peer = Variant.missing("stock", "no peer: stock does this in some ten operations of PyTorch's")
    # The reference is the last backend, and comes first here: its errors are the yardstick.
    variants = [peer, *[*Variant.candidates(op, options, call, **needs)][::-1]]
    works = Floor.pair(work, read + written, read + 2 * written + gradients, options.dtype)
    limit = PROJECTION_LIMITS[options.dtype]
    return Problem(inputs, variants, works, inputs.truth(truth), limit, outputs=len(outputs), yardstick="reference")
