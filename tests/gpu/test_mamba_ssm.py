"""Mamba-3, reference and kernels, against mamba-ssm's own module and kernels (v2.3.2.post1), in bf16 as those want it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_mcore.bench.cases import peers
from megacpp_mcore.ops.mamba3 import reference, triton
from megacpp_mcore.ops.testing import assert_parity

pytest.importorskip("einops", reason="mamba-ssm's module needs einops")
if importlib.util.find_spec("mamba_ssm") is None:
    pytest.skip("mamba-ssm 2.3.2.post1 is not installed", allow_module_level=True)


mamba_module = peers.mamba3_source()

BATCH, WIDTH, STATE, HEAD_DIM = 2, 256, 64, 64
WORST_ROW = 3e-2
"""bf16: the module rounds B and C after their norm, and its kernels round between the steps of the scan."""


def make(groups: int, *, mimo: bool) -> Any:
    """A layer whose parameters are all away from their initial values."""
    torch.manual_seed(11)
    layer = mamba_module.Mamba3(
        WIDTH, d_state=STATE, headdim=HEAD_DIM, ngroups=groups, is_mimo=mimo, mimo_rank=4,
        chunk_size=16 if mimo else 64, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def by_op(mamba3: Callable[..., Any], layer: Any, u_BSD: torch.Tensor) -> torch.Tensor:
    """What ``layer`` computes, by the op ``mamba3`` between its two projections."""
    rank, groups = layer.mimo_rank, layer.num_bc_heads
    inner, bc, heads = layer.d_inner, STATE * groups * rank, layer.nheads
    z, x, b, c, dd_dt, dd_A, trap, angles = layer.in_proj(u_BSD.transpose(0, 1)).split(
        [inner, inner, bc, bc, heads, heads, heads, layer.num_rope_angles], dim=-1
    )
    mix = {name: getattr(layer, name) for name in ("mimo_x", "mimo_z", "mimo_o")} if layer.is_mimo else {}
    y_SBHP, _ = mamba3(
        x.unflatten(-1, (heads, HEAD_DIM)),
        z.unflatten(-1, (heads, HEAD_DIM)),
        b.unflatten(-1, (rank, groups, STATE)).transpose(2, 3),
        c.unflatten(-1, (rank, groups, STATE)).transpose(2, 3),
        dd_dt,
        dd_A,
        trap,
        angles,
        dt_bias=layer.dt_bias,
        b_bias=layer.B_bias,
        c_bias=layer.C_bias,
        b_norm_weight=layer.B_norm.weight,
        c_norm_weight=layer.C_norm.weight,
        D=layer.D,
        **mix,
        chunk_size=layer.chunk_size,
        A_floor=layer.A_floor,
        eps=1e-5,
    )
    return layer.out_proj(y_SBHP.flatten(2).transpose(0, 1))


def inputs(*, mimo: bool) -> torch.Tensor:
    """Hidden states; the backward pass of mamba-ssm's MIMO takes whole chunks only."""
    torch.manual_seed(12)
    return torch.randn(BATCH, 304 if mimo else 301, WIDTH, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("mamba3", [reference.mamba3, triton.mamba3], ids=["reference", "kernels"])
@pytest.mark.parametrize(("groups", "mimo"), [(1, False), (1, True), (8, True)], ids=["siso", "mimo", "mimo, 8 groups"])
def test_forward_and_gradients(mamba3: Callable[..., Any], groups: int, mimo: bool) -> None:
    if mimo:
        pytest.importorskip("tilelang", reason="mamba-ssm's MIMO kernels need tilelang")
    layer, weights_BSD = make(groups, mimo=mimo), inputs(mimo=mimo).flip(1)
    outcomes = []
    for compute in (layer, partial(by_op, mamba3, layer)):
        u_BSD = inputs(mimo=mimo).requires_grad_()
        layer.zero_grad()
        out = compute(u_BSD)
        out.backward(weights_BSD)
        gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        outcomes.append({"out": out.detach(), "u": u_BSD.grad, **gradients})
    peer, ours = outcomes
    assert ours.keys() == peer.keys()
    for name, value in ours.items():
        # A parameter's gradient is a sum over all tokens: as one row.
        tensor, other = (t.float() if name in ("out", "u") else t.float().flatten()[None] for t in (value, peer[name]))
        assert_parity(other, tensor.double(), rms=WORST_ROW, name=name)
