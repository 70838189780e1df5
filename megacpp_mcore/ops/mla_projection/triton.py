"""The steps between MLA's projections and its core attention by Triton kernels on a GPU: the functions of
:mod:`megacpp_mcore.ops.mla_projection.reference`, one launch forward and one or two backward; the down-projections are one
PyTorch product.

Norms and rotations are computed in float32 and rounded once; operands of products have the dtype of the inputs, and float32
sums have a fixed reduction order.

Shape legend: as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.mla_projection import kernels
from megacpp_mcore.ops.mla_projection.reference import (
    check_indexer_inputs,
    check_keys,
    check_latents,
    check_projection,
)
from megacpp_mcore.ops.slices import aligned, eighths
from megacpp_mcore.ops.triton_launch import launch

WIDTHS = (64,)
"""Supported widths C, K, R and V."""

DTYPES = (torch.bfloat16, torch.float16)

PROJECT: dict[str, int] = {"TOKENS": 128, "num_warps": 4}
BACKWARD: dict[str, int] = {"TOKENS": 32, "num_warps": 4}
TILES = 16
"""Token tiles per program in the sum of a matrix's gradient."""

KEYS: dict[str, int] = {"TOKENS": 64, "num_warps": 4}
KEYS_BACKWARD: dict[str, int] = {"num_warps": 4}
ROWS, HEADS = 32, 8
"""Tile of the keys' gradient: tokens × heads, and its maximum number of heads."""

NORMS: dict[str, int] = {"ROWS": 32, "num_warps": 4}


def latents(
    hidden_SBD: torch.Tensor,
    q_down_QD: torch.Tensor,
    kv_down_XD: torch.Tensor,
    q_norm_Q: torch.Tensor,
    kv_norm_L: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the reference's :func:`latents` with one product for both projections.

    Raises:
        ModelError: as in the reference, and as in :func:`project`.
    """
    check_latents(hidden_SBD, q_down_QD, kv_down_XD, q_norm_Q, kv_norm_L)
    _check(hidden_SBD, len(q_norm_Q), len(kv_norm_L), len(kv_down_XD) - len(kv_norm_L))
    q_SBQ, kv_SBL, rotary_SBR = _Latents.apply(
        hidden_SBD, q_down_QD, kv_down_XD, q_norm_Q.contiguous(), kv_norm_L.contiguous(), eps
    )
    return q_SBQ, kv_SBL, rotary_SBR


def project(
    x_SBHX: torch.Tensor,
    *,
    weight_HCK: torch.Tensor | None = None,
    rotation_SR: torch.Tensor | None = None,
    interleaved: bool = True,
) -> torch.Tensor:
    """Compute the reference's :func:`project`. Saved for backward: the weight and rotation, and x only if there is a weight.

    Raises:
        ModelError: as in the reference; or a dtype not in :data:`DTYPES`, or a width not in :data:`WIDTHS`.
    """
    check_projection(x_SBHX, weight_HCK, rotation_SR)
    rotary = 0 if rotation_SR is None else rotation_SR.shape[1]
    content = x_SBHX.shape[3] - rotary
    _check(x_SBHX, content, rotary, 0 if weight_HCK is None else weight_HCK.shape[2])
    rotation_SR = None if rotation_SR is None else rotation_SR.contiguous()
    y_SBHX: torch.Tensor = _Project.apply(x_SBHX, weight_HCK, rotation_SR, interleaved)
    return y_SBHX


def keys_and_values(
    kv_SBHX: torch.Tensor,
    rotary_SBR: torch.Tensor,
    *,
    rotation_SR: torch.Tensor,
    value_dim: int,
    interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the reference's :func:`keys_and_values`. Only the rotations are saved for backward.

    Raises:
        ModelError: as in the reference, and as in :func:`project`.
    """
    check_keys(kv_SBHX, rotary_SBR, rotation_SR, value_dim)
    _check(kv_SBHX, kv_SBHX.shape[3] - value_dim, rotary_SBR.shape[2], value_dim)
    k_SBHK, v_SBHV = _KeysAndValues.apply(kv_SBHX, rotary_SBR, rotation_SR.contiguous(), value_dim, interleaved)
    return k_SBHK, v_SBHV


def indexer_inputs(
    hidden_SBD: torch.Tensor,
    latent_SBQ: torch.Tensor,
    q_up_XQ: torch.Tensor,
    k_down_RD: torch.Tensor,
    k_norm_R: torch.Tensor,
    k_bias_R: torch.Tensor,
    w_down_ND: torch.Tensor,
    *,
    rotation_SR: torch.Tensor,
    eps: float,
    scale: float,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the reference's :func:`indexer_inputs` with one product for keys and head weights.

    Raises:
        ModelError: as in the reference, and as in :func:`project`.
    """
    tensors = (hidden_SBD, latent_SBQ, q_up_XQ, k_down_RD, k_norm_R, k_bias_R, w_down_ND)
    check_indexer_inputs(*tensors, rotation_SR)
    _check(hidden_SBD, len(k_norm_R))
    norms = k_norm_R.contiguous(), k_bias_R.contiguous()
    q_SBNR, k_SBR, w_SBN = _IndexerInputs.apply(
        *tensors[:4], *norms, w_down_ND, rotation_SR.contiguous(), eps, scale, interleaved
    )
    return q_SBNR, k_SBR, w_SBN


class _Latents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SBD: torch.Tensor,
        q_down_QD: torch.Tensor,
        kv_down_XD: torch.Tensor,
        q_norm_Q: torch.Tensor,
        kv_norm_L: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        S, B, _ = hidden_SBD.shape
        down = torch.cat([q_down_QD, kv_down_XD])
        x_SBX = _product(hidden_SBD, down)
        Q, L = len(q_norm_Q), len(kv_norm_L)
        q_SBQ, kv_SBL = hidden_SBD.new_empty(S, B, Q), hidden_SBD.new_empty(S, B, L)
        ctx.how, ctx.eps = {"Q": Q, "L": L, "R": len(down) - Q - L, **NORMS}, eps
        launch(
            kernels.norms, (triton.cdiv(S * B, NORMS["ROWS"]),), x_SBX, q_norm_Q, kv_norm_L, q_SBQ, kv_SBL, eps, S * B,
            **ctx.how,
        )  # fmt: skip
        ctx.save_for_backward(hidden_SBD, down, q_norm_Q, kv_norm_L, x_SBX)
        return q_SBQ, kv_SBL, x_SBX[..., Q + L :]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq_SBQ: torch.Tensor, dkv_SBL: torch.Tensor, dr_SBR: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_SBD, down, q_norm_Q, kv_norm_L, x_SBX = ctx.saved_tensors
        (S, B, D), Q, L = hidden_SBD.shape, ctx.how["Q"], ctx.how["L"]
        tiles = triton.cdiv(S * B, NORMS["ROWS"])
        dx_SBX, dr_SBR = x_SBX.new_empty(x_SBX.shape), aligned(dr_SBR)
        dw = x_SBX.new_empty(tiles, Q + L, dtype=torch.float32)
        launch(
            kernels.norms_backward, (tiles,), x_SBX, q_norm_Q, kv_norm_L, dq_SBQ.contiguous(), dkv_SBL.contiguous(), dr_SBR,
            dx_SBX, dw, ctx.eps, S * B, B, *eighths(dr_SBR), **ctx.how,
        )  # fmt: skip
        dx_TX = dx_SBX.view(S * B, -1)
        d_down = dx_TX.T @ hidden_SBD.reshape(S * B, D)
        dq_norm_Q, dkv_norm_L = dw.sum(0).to(q_norm_Q.dtype).split([Q, L])
        return (dx_TX @ down).view(S, B, D), d_down[:Q], d_down[Q:], dq_norm_Q, dkv_norm_L, None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBHX: torch.Tensor,
        weight_HCK: torch.Tensor | None,
        rotation_SR: torch.Tensor | None,
        interleaved: bool,
    ) -> torch.Tensor:
        x_SBHX, weight, how = aligned(x_SBHX), *_matrices(weight_HCK)
        R = 0 if rotation_SR is None else rotation_SR.shape[1]
        C = x_SBHX.shape[3] - R
        ctx.how = {"C": C, "K": C if weight is None else weight.shape[2], "R": R, "INTERLEAVED": interleaved, **how}
        ctx.save_for_backward(None if weight is None else x_SBHX, weight, rotation_SR)
        return _projected(x_SBHX, weight, rotation_SR, ctx.how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SBHX: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_SBHX, weight, rotation_SR = ctx.saved_tensors
        dx_SBHX, dw = _projected_back(x_SBHX, weight, rotation_SR, aligned(dy_SBHX), ctx.how)
        return dx_SBHX, None if dw is None else dw.sum(0).to(dx_SBHX.dtype), None, None


def _projected(
    x_SBHX: torch.Tensor, weight: torch.Tensor | None, rotation_SR: torch.Tensor | None, how: dict[str, Any]
) -> torch.Tensor:
    S, B, H, _ = x_SBHX.shape
    y_SBHX = x_SBHX.new_empty(S, B, H, how["K"] + how["R"])
    launch(
        kernels.project, (H, triton.cdiv(S, PROJECT["TOKENS"]), B), x_SBHX, weight, rotation_SR, y_SBHX, S, *eighths(x_SBHX, 3),
        *_steps(weight), **how, **PROJECT,
    )  # fmt: skip
    return y_SBHX


def _projected_back(
    x_SBHX: torch.Tensor | None,
    weight: torch.Tensor | None,
    rotation_SR: torch.Tensor | None,
    dy_SBHX: torch.Tensor,
    how: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradient of x, and partial sums of the weight's."""
    S, B, H, _ = dy_SBHX.shape
    C, K = how["C"], how["K"]
    tiles = 1 if weight is None else TILES
    pieces = triton.cdiv(S, tiles * BACKWARD["TOKENS"])
    dx_SBHX = dy_SBHX.new_empty(S, B, H, C + how["R"])
    dw = None if weight is None else dy_SBHX.new_empty(B * pieces, H, C, K, dtype=torch.float32)
    launch(
        kernels.project_backward, (H, pieces, B), x_SBHX, weight, rotation_SR, dy_SBHX, dx_SBHX, dw, S,
        *((0, 0, 0) if x_SBHX is None else eighths(x_SBHX, 3)), *_steps(weight), *eighths(dy_SBHX, 3),
        **how, TILES=tiles, **BACKWARD,
    )  # fmt: skip
    return dx_SBHX, dw


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kv_SBHX: torch.Tensor,
        rotary_SBR: torch.Tensor,
        rotation_SR: torch.Tensor,
        value_dim: int,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (S, B, H, X), R = kv_SBHX.shape, rotary_SBR.shape[2]
        kv_SBHX, rotary_SBR = aligned(kv_SBHX), aligned(rotary_SBR)
        k_SBHK, v_SBHV = kv_SBHX.new_empty(S, B, H, X - value_dim + R), kv_SBHX.new_empty(S, B, H, value_dim)
        ctx.how = {"C": X - value_dim, "R": R, "V": value_dim, "INTERLEAVED": interleaved}
        launch(
            kernels.keys_and_values, (H, triton.cdiv(S, KEYS["TOKENS"]), B), kv_SBHX, rotary_SBR, rotation_SR, k_SBHK, v_SBHV,
            S, *eighths(kv_SBHX, 3), *eighths(rotary_SBR), **ctx.how, **KEYS,
        )  # fmt: skip
        ctx.save_for_backward(rotation_SR)
        return k_SBHK, v_SBHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_SBHK: torch.Tensor, dv_SBHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rotation_SR,) = ctx.saved_tensors
        (S, B, H, _), dk_SBHK, dv_SBHV = dk_SBHK.shape, aligned(dk_SBHK), aligned(dv_SBHV)
        C, R, V = ctx.how["C"], ctx.how["R"], ctx.how["V"]
        dkv_SBHX, dr_SBR = dk_SBHK.new_empty(S, B, H, C + V), dk_SBHK.new_empty(S, B, R)
        heads = min(HEADS, triton.next_power_of_2(H))
        tokens = ROWS // heads
        launch(
            kernels.keys_and_values_backward, (triton.cdiv(S, tokens), B), dk_SBHK, dv_SBHV, rotation_SR, dkv_SBHX, dr_SBR, S,
            H, *eighths(dk_SBHK, 3), *eighths(dv_SBHV, 3), **ctx.how, TOKENS=tokens, HEADS=heads, **KEYS_BACKWARD,
        )  # fmt: skip
        return dkv_SBHX, dr_SBR, None, None, None


class _IndexerInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SBD: torch.Tensor,
        latent_SBQ: torch.Tensor,
        q_up_XQ: torch.Tensor,
        k_down_RD: torch.Tensor,
        k_norm_R: torch.Tensor,
        k_bias_R: torch.Tensor,
        w_down_ND: torch.Tensor,
        rotation_SR: torch.Tensor,
        eps: float,
        scale: float,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (S, B, _), R, N = hidden_SBD.shape, len(k_norm_R), len(w_down_ND)
        ctx.whole = {"C": 0, "K": 0, "R": R, "INTERLEAVED": interleaved, "TRANSPOSED": False}
        ctx.how = {"R": R, "N": N, "HEADS": triton.next_power_of_2(N), "INTERLEAVED": interleaved, **NORMS}
        ctx.numbers = (eps, scale, S * B, B)
        q_SBNR = _projected(_product(latent_SBQ, q_up_XQ).view(S, B, N, R), None, rotation_SR, ctx.whole)
        x_SBX = _product(hidden_SBD, torch.cat([k_down_RD, w_down_ND]))
        k_SBR, w_SBN = x_SBX.new_empty(S, B, R), x_SBX.new_empty(S, B, N)
        launch(
            kernels.indexer_keys, (triton.cdiv(S * B, NORMS["ROWS"]),), x_SBX, k_norm_R, k_bias_R, rotation_SR, k_SBR, w_SBN,
            *ctx.numbers, **ctx.how,
        )  # fmt: skip
        ctx.save_for_backward(hidden_SBD, latent_SBQ, x_SBX, k_norm_R, rotation_SR)
        return q_SBNR, k_SBR, w_SBN

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq_SBNR: torch.Tensor, dk_SBR: torch.Tensor, dw_SBN: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_SBD, latent_SBQ, x_SBX, k_norm_R, rotation_SR = ctx.saved_tensors
        T, R = ctx.numbers[2], len(k_norm_R)
        tiles = triton.cdiv(T, NORMS["ROWS"])
        dx_SBX, dnorm = torch.empty_like(x_SBX), x_SBX.new_empty(tiles, 2, R, dtype=torch.float32)
        launch(
            kernels.indexer_keys_backward, (tiles,), x_SBX, k_norm_R, rotation_SR, dk_SBR.contiguous(), dw_SBN.contiguous(),
            dx_SBX, dnorm, *ctx.numbers, **ctx.how,
        )  # fmt: skip
        dq_SBNR, _ = _projected_back(None, None, rotation_SR, aligned(dq_SBNR), ctx.whole)
        d_down = dx_SBX.view(T, -1).T @ hidden_SBD.reshape(T, -1)
        d_up = dq_SBNR.view(T, -1).T @ latent_SBQ.reshape(T, -1)
        dk_norm_R, dk_bias_R = dnorm.sum(0).to(k_norm_R.dtype)
        return None, None, d_up, d_down[:R], dk_norm_R, dk_bias_R, d_down[R:], None, None, None, None


def _product(x_SBD: torch.Tensor, weight_XD: torch.Tensor) -> torch.Tensor:
    """Compute x · weightᵀ as one product of S·B rows: at B = 1, with an embedding's strides, ``linear`` runs S products."""
    S, B, D = x_SBD.shape
    return (x_SBD.reshape(S * B, D) @ weight_XD.T).view(S, B, len(weight_XD))


def _matrices(weight_HCK: torch.Tensor | None) -> tuple[torch.Tensor | None, dict[str, bool]]:
    """Return the matrices in a layout that the kernels support, and whether their columns (not rows) are contiguous."""
    if weight_HCK is None:
        return None, {"TRANSPOSED": False}
    by_columns = weight_HCK.stride(1) == 1 and weight_HCK.stride(2) != 1
    return aligned(weight_HCK.mT).mT if by_columns else aligned(weight_HCK), {"TRANSPOSED": by_columns}


def _steps(weight_HCK: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of the matrices and of their rows (or columns), in units of 8 elements."""
    if weight_HCK is None:
        return 0, 0
    across, row, column = weight_HCK.stride()
    return across // 8, max(row, column) // 8


def _check(x: torch.Tensor, *widths: int) -> None:
    """Raise ModelError for widths and dtypes that the kernels were not built and tested for."""
    if not len(x):
        raise ModelError("there are 0 tokens, expected at least one; do not call the op for an empty sequence")
    if x.dtype not in DTYPES or any(width not in (0, *WIDTHS) for width in widths):
        raise ModelError(
            f"the kernels of MLA's projections got {x.dtype} and widths {widths}; they take one of {DTYPES} and widths "
            f"of {WIDTHS}: use the reference"
        )
