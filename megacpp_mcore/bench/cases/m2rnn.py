"""The M²RNN recurrence: the backends, and its authors' Triton kernels where they are installed.

Legend: B batch, S sequence, H heads, K key width, V value width. One head of queries and keys is read by all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
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
from megacpp_mcore.observe.flops import m2rnn_recurrence

LIMITS = {"bfloat16": 1e-2, "float32": 1e-4}
ROUNDED_STATE = 5e-2
"""For a peer that keeps the state in bf16 from token to token."""


def problems(options: Options) -> Iterator[Problem]:
    """One problem."""
    sizes = options.shape
    B, S, H, K, V = (sizes[name] for name in ("B", "S", "rnn_heads", "key_dim", "value_dim"))
    draw = Draw(options)

    def one() -> Inputs:
        # W shrinks: one that stretches makes the recurrence chaotic, and no two programs agree after some hundred tokens.
        leaves = {
            "q": draw.normal(B, S, 1, K),
            "k": draw.normal(B, S, 1, K, scale=K**-0.5),
            "v": draw.normal(B, S, H, V),
            "W": 0.8 * torch.eye(V, device=options.device).repeat(H, 1, 1)
            + draw.normal(H, V, V, scale=0.02, dtype=torch.float32),
            "f": torch.sigmoid(draw.normal(B, S, H, dtype=torch.float32) + 2.0),
        }
        for leaf in leaves.values():
            leaf.requires_grad_()
        return Inputs(leaves=leaves, cotangents=(draw.normal(B, S, H, V),))

    def call(fn: Any, inputs: Inputs) -> Tensors:
        return [fn(*inputs.leaves.values(), checkpoint_every=sizes["checkpoint_every"])[0]]

    values, forget = B * S * H * V * draw.itemsize, B * S * H * 4
    inputs = 2 * B * S * K * draw.itemsize + values + forget + H * V * V * 4
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        sets=[one() for _ in range(options.sets)],
        variants=[
            _peer(options),
            *candidates("m2rnn", call, device=options.device, dtype=options.dtype, key_dim=K, value_dim=V),
        ],
        works=floors(m2rnn_recurrence(B * S, H, K, V), inputs + values, 3 * inputs + 2 * values, options.dtype),
        judge=AgainstTruth(_truth, ("y", "dq", "dk", "dv", "dW", "df"), LIMITS[options.dtype]),
    )


def _truth(inputs: Inputs) -> Tensors:
    """Token by token, in float64."""
    from megacpp_mcore.ops.m2rnn.reference import m2rnn_sequential

    double = inputs.in_double()
    output, _ = m2rnn_sequential(*double.leaves.values())
    return [output, *torch.autograd.grad(output, list(double.leaves.values()), double.cotangents)]


def _peer(options: Options) -> Any:
    name = "xma (Triton)"
    reason = "no peer here: xma runs on a GPU alone" if options.device != "cuda" else lacking("xma.functional", "xma")
    if reason:
        return missing(name, reason)
    run = importlib.import_module("xma.functional").m2rnn
    return differentiable(name, PEER, partial(_in_one_dtype, run), limit=ROUNDED_STATE)


def _in_one_dtype(run: Any, inputs: Inputs) -> Tensors:
    """The kernels take all of their inputs in the dtype of the values."""
    q, k, v, W, f = inputs.leaves.values()
    return [run(q, k, v, W.to(v.dtype), f.to(v.dtype))[0]]
