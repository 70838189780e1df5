"""M²RNN between its two projections: the backends, and its authors' recurrence where it is installed.

Legend: B batch, S sequence, H heads, K key width, V value width. All heads read one head of queries and keys.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import lacking
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.flops import m2rnn_recurrence
from megacpp_mcore.ops.m2rnn.reference import m2rnn, m2rnn_sequential

LIMITS = {"bfloat16": 1e-2, "float32": 1e-4}
YARDSTICK = "reference"
"""Gradients of the convolutions' weights are sums over all tokens whose terms cancel: the bf16 reference is off by more."""
TAPS, EPS = 4, 1e-5
XMA_MODULE = "xma.layers"
XMA = "xma's recurrence (Triton) in the reference"
ROUNDED_STATE = 0.2
"""For that peer, which keeps the state in bf16 from token to token: gradients of weights, sums over all tokens whose terms
cancel, are off by 0.17 in their worst row, its output by 0.017."""


def problem(options: Options) -> Problem:
    """Compare every implementation on one output of the input projection; the truth is computed token by token."""
    B, S, H, K, V = options.sizes("B", "S", "rnn_heads", "key_dim", "value_dim")
    widths = [K, K, H * V, H * V, H]  # q, k, v, output gate, forget gate
    draw = Draw(options)
    normal32 = partial(draw.normal, dtype=torch.float32)
    # W shrinks: one that stretches makes the recurrence chaotic, and no two programs agree after some hundred tokens.
    inputs = Inputs(
        leaves=draw.leaves(
            u=draw.normal(S, B, sum(widths)),
            qk_conv_weight=draw.normal(2 * K, TAPS, scale=K**-0.25),
            qk_conv_bias=draw.normal(2 * K, scale=0.1),
            v_conv_weight=draw.normal(H * V, TAPS),
            v_conv_bias=draw.normal(H * V, scale=0.1),
            W=0.8 * torch.eye(V, device=options.device).repeat(H, 1, 1) + normal32(H, V, V, scale=0.02),
            A_log=normal32(H, scale=0.5) + 1.0,
            dt_bias=normal32(H, scale=0.5) - 4.0,
            D=normal32(H * V, scale=0.1) + 1.0,
            norm_weight=draw.normal(H * V, scale=0.1) + 1.0,
        ),
        cotangents={"y": draw.normal(S, B, H * V)},
    )

    def recur(fn: Any, inputs: Inputs) -> torch.Tensor:
        weights = dict(inputs.leaves)
        q, k, v, g, f = weights.pop("u").split(widths, dim=-1)
        v, g = (part.unflatten(-1, (H, V)) for part in (v, g))
        how = {"eps": EPS, "norm_width": H * V, "checkpoint_every": options.shape["checkpoint_every"]}
        return fn(q, k, v, g, f, **weights, **how)[0]

    if reason := lacking(options.device, XMA_MODULE, "xma"):
        peer = Variant.missing(XMA, reason)
    else:
        theirs = partial(_in_one_dtype, importlib.import_module(XMA_MODULE).m2rnn)
        peer = Variant.of(XMA, PEER, partial(recur, partial(m2rnn, recurrence=theirs)), limit=ROUNDED_STATE)
    ours = list(Variant.candidates("m2rnn", options, recur, key_dim=K, value_dim=V))
    graphs = [one.captured() for one in ours if one.runs and one.name == "triton"]
    values, given = (B * S * width * draw.itemsize for width in (H * V, sum(widths)))
    return Problem(
        inputs=inputs,
        variants=[peer, *sorted(ours, key=lambda one: one.name != YARDSTICK), *graphs],
        works=Floor.pair(m2rnn_recurrence(B * S, H, K, V), given + values, 3 * given + 2 * values, options.dtype),
        truth=inputs.truth(partial(recur, partial(m2rnn, recurrence=m2rnn_sequential))),
        limit=LIMITS[options.dtype],
        yardstick=YARDSTICK,
    )


def _in_one_dtype(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, W: torch.Tensor, f: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """Call kernels, which need all of their inputs in the dtype of the values; one document, from a state of zero."""
    return run(q, k, v, W.to(v.dtype), f.to(v.dtype))
