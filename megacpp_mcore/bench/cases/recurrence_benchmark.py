"""The recurrences between two projections: Mamba-3, MIMO or SISO, heads normed, and M²RNN. Truths are computed token by token.

Peers are mamba-ssm's module without its projections, and the recurrence of M²RNN's authors where it is installed.

Legend: B batch, S sequence, H heads. Mamba-3: P head width, R MIMO rank, G groups, N state, A angles, X output of the input
projection. M²RNN: K key width, V value width; all heads read one head of queries and keys.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import lacking, mamba3_source
from megacpp_mcore.bench.catalog import PEER, Options
from megacpp_mcore.bench.problem import Call, Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model import Mamba3
from megacpp_mcore.model.flops import m2rnn_recurrence, mamba_scan
from megacpp_mcore.ops.m2rnn import reference as rnn
from megacpp_mcore.ops.mamba3 import reference as ssm
from megacpp_mcore.ops.slices import split

EPS = 1e-5

MIX = ("mimo_x", "mimo_z", "mimo_o")
THEIRS = {
    "dt_bias": "dt_bias", "b_bias": "B_bias", "c_bias": "C_bias", "b_norm_weight": "B_norm.weight",
    "c_norm_weight": "C_norm.weight", "D": "D", **{name: name for name in MIX},
}  # fmt: skip
"""The weights by mamba-ssm's names; the last three exist only in MIMO."""
MAMBA3_LIMITS = {"bfloat16": 1e-2, "float32": 2e-4}
SUMMED = {"db_bias": 3.0, "dc_bias": 2.0}
"""Factor by which some results may be off more: sums per head over all tokens, of tensor-core products of bf16 operands. The
norm of the output takes no notice of its scale, so the part of B's bias that scales it cancels in that sum: plain PyTorch with
its scan in bf16 is off by 3.3e-2 at rank 1 and by 3.4e-2 at rank 4 (B 2 × S 4096)."""
ONE_RANK = {"y": 1.5}
"""At rank 1 no sum over ranks evens out rounding: plain PyTorch in bf16 is off by 2.3e-2 in its worst row."""
ROUNDED = {"db_bias": 5e-2}
"""For mamba-ssm, which also rounds B and C after their norm, and between the steps of the scan; 3e-2 for the other results."""

M2RNN_LIMITS = {"bfloat16": 1e-2, "float32": 1e-4}
YARDSTICK = "reference"
"""Gradients of the convolutions' weights are sums over all tokens whose terms cancel: the bf16 reference is off by more."""
TAPS = 4
XMA_MODULE = "xma.layers"
XMA = "xma's recurrence (Triton) in the reference"
ROUNDED_STATE = 0.2
"""For that peer, which keeps the state in bf16 from token to token: gradients of weights, sums over all tokens whose terms
cancel, are off by 0.17 in their worst row, its output by 0.017."""


def mamba3(options: Options) -> Problem:
    """Compare every implementation on one output of the input projection; the truth is computed token by token."""
    B, S, H, P, R, G, N = options.sizes("B", "S", "mamba_heads", "head_dim", "rank", "groups", "state")
    chunk, draw = options.shape["chunk"], Draw(options)
    widths = [H * P, H * P, G * R * N, G * R * N, H, H, H, N // 4]  # z, x, B, C, step, decay, trapezoid, angles

    def weight(*shape: int, around: float = 1.0) -> torch.Tensor:
        return draw.normal(*shape, scale=0.1, dtype=torch.float32) + around

    leaves = {"u": draw.normal(B, S, sum(widths))}
    leaves |= {"dt_bias": weight(H, around=-4.0), "b_bias": weight(H, R, N), "c_bias": weight(H, R, N)}
    leaves |= {"b_norm_weight": weight(N).to(draw.dtype), "c_norm_weight": weight(N).to(draw.dtype), "D": weight(H)}
    if R > 1:
        leaves |= {name: weight(H, R, P, around=1.0 if name == "mimo_z" else 1 / R) for name in MIX}
    leaves["out_norm_weight"] = weight(H * P).to(draw.dtype)
    inputs = Inputs(draw.leaves(**leaves), {"y": draw.normal(B, S, H, P)})

    def scan(fn: Call, inputs: Inputs) -> torch.Tensor:
        weights = dict(inputs.leaves)
        z, x, b, c, *rest = split(weights.pop("u").transpose(0, 1), widths)
        z, x = (part.unflatten(-1, (H, P)) for part in (z, x))
        b, c = (part.unflatten(-1, (R, G, N)).transpose(2, 3) for part in (b, c))  # mamba-ssm has them rank by rank
        return fn(x, z, b, c, *rest, **weights, chunk_size=chunk, A_floor=1e-4, eps=EPS)[0].transpose(0, 1)

    sizes = Mamba3(head_dim=P, groups=G, state=N, mimo_rank=R, chunk=chunk, rope_fraction=0.5)
    given_bytes, moved = (B * S * width * draw.itemsize for width in (sum(widths), sum(widths) + H * P))
    wider = SUMMED | (ONE_RANK if R == 1 else {})
    ours = list(Variant.candidates("mamba3", options, scan, head_dim=P, mimo_rank=R, state=N))
    graphs = [variant.captured() for variant in ours if variant.runs and variant.name == "triton"]
    truth = partial(ssm.mamba3, method="sequential", segment_size=256)  # which keeps few states
    variants = [_mamba_ssm(options, inputs), *ours, *graphs]
    works = Floor.pair(mamba_scan(B, S, H, sizes), moved, 2 * moved + given_bytes, options.dtype)
    limit = {name: MAMBA3_LIMITS[options.dtype] * wider.get(name, 1.0) for name in inputs.names}
    return Problem(inputs, variants, works, inputs.truth(partial(scan, truth)), limit)


def _mamba_ssm(options: Options, inputs: Inputs) -> Variant:
    """Return mamba-ssm's Mamba-3 without its projections, or why it cannot run here."""
    H, P, R, G, N = options.sizes("mamba_heads", "head_dim", "rank", "groups", "state")
    name = f"mamba-ssm {'MIMO' if R > 1 else 'SISO, 4 warps'}"
    if options.device != "cuda":
        return Variant.missing(name, "no peer here: mamba-ssm runs only on a GPU")
    try:
        source = mamba3_source()
    except Exception as error:
        return Variant.missing(name, f"no peer installed: mamba-ssm ({type(error).__name__}: {error})")
    if R > 1 and source.mamba3_mimo_combined is None:
        return Variant.missing(name, "no peer installed: mamba-ssm's MIMO kernels (they need tilelang)")
    module = source.Mamba3(
        H * P // 2, expand=2, d_state=N, headdim=P, ngroups=G, chunk_size=options.shape["chunk"], is_mimo=R > 1, mimo_rank=R,
        device=options.device, dtype=getattr(torch, options.dtype),
    )  # fmt: skip
    module.in_proj = module.out_proj = torch.nn.Identity()
    norm_weight = torch.empty_like(inputs.leaves["out_norm_weight"], requires_grad=True)
    parameters = {leaf: module.get_parameter(peer_name) for leaf, peer_name in THEIRS.items() if leaf in inputs.leaves}
    weights = inputs.copied_to(parameters | {"out_norm_weight": norm_weight})

    def call(inputs: Inputs) -> torch.Tensor:
        by_head = module(inputs.leaves["u"]).view(inputs.cotangents["y"].shape)
        return torch.nn.functional.rms_norm(by_head, (P,), eps=EPS) * norm_weight.view(H, P)  # as ours norms its output

    return Variant.of(name, PEER, call, weights, limit=dict.fromkeys(inputs.names, 3e-2) | ROUNDED)


def m2rnn(options: Options) -> Problem:
    """Compare every implementation on one output of the input projection; the truth is computed token by token."""
    B, S, H, K, V = options.sizes("B", "S", "rnn_heads", "key_dim", "value_dim")
    widths = [K, K, H * V, H * V, H]  # q, k, v, output gate, forget gate
    draw = Draw(options)
    normal32 = partial(draw.normal, dtype=torch.float32)
    # W shrinks: one that stretches makes the recurrence chaotic, and no two programs agree after some hundred tokens.
    leaves = draw.leaves(
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
    )
    inputs = Inputs(leaves, {"y": draw.normal(S, B, H * V)})

    def recur(fn: Call, inputs: Inputs) -> torch.Tensor:
        weights = dict(inputs.leaves)
        q, k, v, g, f = weights.pop("u").split(widths, dim=-1)
        v, g = (part.unflatten(-1, (H, V)) for part in (v, g))
        how = {"eps": EPS, "norm_width": H * V, "checkpoint_every": options.shape["checkpoint_every"]}
        return fn(q, k, v, g, f, **weights, **how)[0]

    def theirs(q: Any, k: Any, v: torch.Tensor, W: torch.Tensor, f: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Give kernels all of their inputs in the dtype of the values; one document, from a state of zero."""
        return importlib.import_module(XMA_MODULE).m2rnn(q, k, v, W.to(v.dtype), f.to(v.dtype))

    reason, call = lacking(options.device, XMA_MODULE, "xma"), partial(recur, partial(rnn.m2rnn, recurrence=theirs))
    peer = Variant.of(XMA, PEER, call, limit=ROUNDED_STATE, absent=reason)
    ours = list(Variant.candidates("m2rnn", options, recur, key_dim=K, value_dim=V))
    graphs = [variant.captured() for variant in ours if variant.runs and variant.name == "triton"]
    v_bytes, u_bytes = (B * S * width * draw.itemsize for width in (H * V, sum(widths)))
    variants = [peer, *sorted(ours, key=lambda variant: variant.name != YARDSTICK), *graphs]
    works = Floor.pair(m2rnn_recurrence(B * S, H, K, V), u_bytes + v_bytes, 3 * u_bytes + 2 * v_bytes, options.dtype)
    truth = inputs.truth(partial(recur, partial(rnn.m2rnn, recurrence=rnn.m2rnn_sequential)))
    return Problem(inputs, variants, works, truth, M2RNN_LIMITS[options.dtype], yardstick=YARDSTICK)
