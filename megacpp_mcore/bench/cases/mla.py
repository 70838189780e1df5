"""Full MLA's core attention: the backends, and stock's module at its own seam with and without the patch mla-core-attention.

Legend: S queries and keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import patched, with_engine
from megacpp_mcore.bench.conditioning import EARLY, early_causal_terms
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    OURS,
    PEER,
    Draw,
    Inputs,
    Problem,
    Tensors,
    candidates,
    differentiable,
    floors,
)
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model.flops import causal_pairs, product

LIMITS = {"bfloat16": 5e-3, "float32": 4e-6}
"""The largest error of a row; stock in bf16 is further off, and is the yardstick."""

PATCH = "mla-core-attention"


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    sizes = options.shape
    B, S, H, K, V = (sizes[name] for name in ("B", "S", "heads", "qk", "v"))
    scale, draw = K**-0.5, Draw(options)
    widths = {"q": K, "k": K, "v": V}
    leaves = {name: draw.normal(S, B, H, width).requires_grad_() for name, width in widths.items()}

    def call(fn: Any, inputs: Inputs) -> Tensors:
        return [fn(*inputs.leaves.values(), softmax_scale=scale)]

    needs = {"device": options.device, "dtype": options.dtype, "qk_dim": K, "v_dim": V}
    engine = with_engine(options.device)
    stock = f"stock {'Transformer Engine' if engine else 'local'}"
    attention = stock_core(options, engine)
    seam = partial(_at_the_seam, attention)
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=Inputs(leaves=leaves, cotangents=(draw.normal(S, B, H, V),)),
        variants=[
            differentiable(stock, PEER, seam),
            differentiable(f"patch {PATCH}", OURS, seam, around=partial(patched, PATCH)),
            *candidates("mla", call, **needs),
        ],
        works=_floors(B * H, S, K, V, draw.itemsize, options.dtype),
        judge=AgainstTruth(
            partial(_truth, scale),
            ("o", "dq", "dk", "dv"),
            LIMITS[options.dtype],
            yardstick=stock,
            norms=partial(_norms, scale),
        ),
        stock=stock,
    )  # fmt: skip


def _truth(scale: float, inputs: Inputs) -> Tensors:
    from megacpp_mcore.ops.mla.reference import mla_attention

    double = inputs.in_double()
    output = mla_attention(*double.leaves.values(), softmax_scale=scale)
    return [output, *torch.autograd.grad(output, list(double.leaves.values()), double.cotangents)]


def _norms(scale: float, name: str, norm: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """In the gradient of the first queries everything cancels: they are measured against the terms that do."""
    if name == "dq":
        norm = norm.clone()
        norm[:EARLY] = early_causal_terms([*inputs.leaves.values(), *inputs.cotangents], scale)
    return norm


def _floors(rows: int, S: int, K: int, V: int, size: int, dtype: str) -> Any:
    """Forward has 2 products under the causal mask; its backward twice that, as :mod:`megacpp_mcore.model.flops` counts."""
    forward = rows * S * (size * (2 * K + 2 * V) + 4)  # q, k, v, o and a float32 log-sum-exp a row
    backward = forward + rows * S * size * (V + 2 * K + V)  # those, the gradient of o, and three gradients
    return floors(product(rows * causal_pairs(S) * (K + V)), forward, forward + backward, dtype)


def _at_the_seam(attention: Any, inputs: Inputs) -> Tensors:
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    run: Any = MultiLatentAttention._run_core_attention
    q, k, v = inputs.leaves.values()
    return [run(attention, q, k, v, None).view(inputs.cotangents[0].shape)]


def stock_core(options: Options, engine: bool) -> Any:
    """What ``MultiLatentAttention._run_core_attention`` reads of its module: core attention, mask type, configuration."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    H, K, V = (options.shape[name] for name in ("heads", "qk", "v"))
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=H * V,
        num_attention_heads=H,
        qk_head_dim=K // 2,
        qk_pos_emb_head_dim=K - K // 2,
        v_head_dim=V,
        attention_dropout=0.0,
        bf16=options.dtype == "bfloat16",
        params_dtype=getattr(torch, options.dtype),
        masked_softmax_fusion=False,
    )
    with patched(PATCH):  # stock's local module takes the widths only so
        core = (TEDotProductAttention if engine else DotProductAttention)(
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=K**-0.5,
            k_channels=K,
            v_channels=V,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    return SimpleNamespace(core_attention=core.train(), attn_mask_type=AttnMaskType.causal, config=config)
