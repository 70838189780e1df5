"""M²RNN between its two projections: the backends, and its authors' recurrence where it is installed.

Legend: B batch, S sequence, H heads, K key width, V value width. One head of queries and keys is read by all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import lacking
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    PEER,
    Draw,
    Inputs,
    Problem,
    Tensors,
    candidates,
    differentiable,
    floors,
    missing,
)
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model.flops import m2rnn_recurrence

LIMITS = {"bfloat16": 1e-2, "float32": 1e-4}
YARDSTICK = "reference"
"""Gradients of the convolutions' weights are sums over all tokens of what cancels: the reference in bf16 is off by more."""
LEAVES = (
    "u", "qk_conv_weight", "qk_conv_bias", "v_conv_weight", "v_conv_bias", "W", "A_log", "dt_bias", "D", "norm_weight",
)  # fmt: skip
TAPS, EPS = 4, 1e-5
ROUNDED_STATE = 5e-2
"""For a peer that keeps the state in bf16 from token to token."""


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    sizes = options.shape
    B, S, H, K, V = (sizes[name] for name in ("B", "S", "rnn_heads", "key_dim", "value_dim"))
    draw = Draw(options)
    widths = _widths(sizes)

    def one() -> Inputs:
        # W shrinks: one that stretches makes the recurrence chaotic, and no two programs agree after some hundred tokens.
        leaves = {
            "u": draw.normal(S, B, sum(widths)),
            "qk_conv_weight": draw.normal(2 * K, TAPS, scale=K**-0.25),
            "qk_conv_bias": draw.normal(2 * K, scale=0.1),
            "v_conv_weight": draw.normal(H * V, TAPS),
            "v_conv_bias": draw.normal(H * V, scale=0.1),
            "W": 0.8 * torch.eye(V, device=options.device).repeat(H, 1, 1)
            + draw.normal(H, V, V, scale=0.02, dtype=torch.float32),
            "A_log": draw.normal(H, scale=0.5, dtype=torch.float32) + 1.0,
            "dt_bias": draw.normal(H, scale=0.5, dtype=torch.float32) - 4.0,
            "D": draw.normal(H * V, scale=0.1, dtype=torch.float32) + 1.0,
            "norm_weight": draw.normal(H * V, scale=0.1) + 1.0,
        }
        for leaf in leaves.values():
            leaf.requires_grad_()
        return Inputs(leaves=leaves, cotangents=(draw.normal(S, B, H * V),))

    call = partial(_call, sizes)
    ours = candidates("m2rnn", call, device=options.device, dtype=options.dtype, key_dim=K, value_dim=V)
    values = B * S * H * V * draw.itemsize
    inputs = B * S * sum(widths) * draw.itemsize
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=one(),
        variants=[_peer(options, call), *sorted(ours, key=lambda one: one.name != YARDSTICK)],
        works=floors(m2rnn_recurrence(B * S, H, K, V), inputs + values, 3 * inputs + 2 * values, options.dtype),
        judge=AgainstTruth(
            partial(_truth, sizes),
            ("y", *(f"d{name}" for name in LEAVES)),
            LIMITS[options.dtype],
            yardstick=YARDSTICK,
        ),
    )


def _widths(sizes: Mapping[str, int]) -> list[int]:
    """Of the parts that the input projection gives: q, k, v, output gate, forget gate."""
    H, K, V = (sizes[name] for name in ("rnn_heads", "key_dim", "value_dim"))
    return [K, K, H * V, H * V, H]


def _call(sizes: Mapping[str, int], fn: Any, inputs: Inputs) -> Tensors:
    H, V = sizes["rnn_heads"], sizes["value_dim"]
    weights = dict(inputs.leaves)
    q, k, v, g, f = weights.pop("u").split(_widths(sizes), dim=-1)
    v, g = (part.unflatten(-1, (H, V)) for part in (v, g))
    options = {"eps": EPS, "norm_width": H * V, "checkpoint_every": sizes["checkpoint_every"]}
    return [fn(q, k, v, g, f, **weights, **options)[0]]


def _truth(sizes: Mapping[str, int], inputs: Inputs) -> Tensors:
    """Token by token, in float64."""
    from megacpp_mcore.ops.m2rnn.reference import m2rnn, m2rnn_sequential

    double = inputs.in_double()
    (output,) = _call(sizes, partial(m2rnn, recurrence=m2rnn_sequential), double)
    return [output, *torch.autograd.grad(output, list(double.leaves.values()), double.cotangents)]


def _peer(options: Options, call: Callable[..., Tensors]) -> Any:
    from megacpp_mcore.ops.m2rnn.reference import m2rnn

    name = "xma's recurrence (Triton) in the reference"
    reason = "no peer here: xma runs on a GPU alone" if options.device != "cuda" else lacking("xma.functional", "xma")
    if reason:
        return missing(name, reason)
    run = importlib.import_module("xma.functional").m2rnn
    theirs = partial(call, partial(m2rnn, recurrence=partial(_in_one_dtype, run)))
    return differentiable(name, PEER, theirs, limit=ROUNDED_STATE)


def _in_one_dtype(
    run: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, W: torch.Tensor, f: torch.Tensor, *_: Any, **__: Any
) -> Any:
    """The kernels take all of their inputs in the dtype of the values; one document, from a state of zero."""
    return run(q, k, v, W.to(v.dtype), f.to(v.dtype))
