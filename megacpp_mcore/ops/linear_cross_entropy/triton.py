"""The steps of linear cross-entropy between and after its matrix products, as memory-bound Triton kernels.

Softmax: a program reads its row twice, for the maximum and the sum of exponentials, and to overwrite the logits by their
gradient. Only as many rows are in flight as saturate memory bandwidth, so that the second read hits the L2 cache.

Legend: C tokens of a chunk, V vocabulary of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megacpp_mcore.ops.assembly import LOG2E
from megacpp_mcore.ops.linear_cross_entropy.eager import Statistics
from megacpp_mcore.ops.triton_launch import launch

BLOCK = 8192
"""Logits that a program reads at a time."""

GROUP = 8
"""Neighbouring logits that share one running maximum: the 16 bytes that a thread loads at once."""

WARPS = 32
"""Warps: two such programs fill a multiprocessor, so 132 × 2 rows of 131 KB are in flight on an H200."""

SCALED = 2048
"""Elements per program of ``add_scaled``."""

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _load(row, column, V, stride):
    """Load logits in float32; −∞ beyond V, where a padded row may hold anything."""
    x = tl.load(row + column, mask=column < stride, other=0.0).to(tl.float32)
    return tl.where(column < V, x, float("-inf"))


@triton.jit
def softmax_rows(
    logit_CV,
    label_C,
    top_C,
    column_C,
    total_C,
    picked_C,
    logsumexp_C,
    weight_C,
    V,
    stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Process one row, ``stride`` from the next: statistics, unless its log-sum-exp is passed; gradient, if a weight is."""
    pid = tl.program_id(0)
    row = logit_CV + pid.to(tl.int64) * stride
    label = tl.load(label_C + pid)
    here = (label >= 0) & (label < V)
    label = tl.where(here, label, -1).to(tl.int32)
    starts, within = tl.arange(0, BLOCK // GROUP) * GROUP, tl.arange(0, GROUP)
    columns = starts[:, None] + within[None, :]
    if logsumexp_C is None:
        # Start at the lowest finite number: the difference of two −∞ is NaN.
        top = tl.full([BLOCK // GROUP], LOWEST, tl.float32)
        total, first_of_top = tl.zeros_like(top), tl.zeros_like(starts)
        for first in range(0, V, BLOCK):
            x = _load(row, first + columns, V, stride)
            peak = tl.maximum(top, tl.max(x, axis=1))
            total = total * _exp(top - peak) + tl.sum(_exp(x - peak[:, None]), axis=1)
            first_of_top = tl.where(peak > top, first, first_of_top)
            top = peak
        peak = tl.max(top, axis=0)
        total = tl.sum(total * _exp(top - peak), axis=0)
        # First column among ties: the first group that has the maximum, and the first column in it.
        group = tl.min(tl.where(top == peak, first_of_top + starts, V), axis=0)
        place = tl.min(tl.where(_load(row, group + within, V, stride) == peak, within, GROUP), axis=0)
        picked = tl.load(row + tl.maximum(label, 0)).to(tl.float32)
        tl.store(top_C + pid, peak)
        tl.store(column_C + pid, (group + place % GROUP).to(tl.int64))
        tl.store(total_C + pid, total)
        tl.store(picked_C + pid, tl.where(here, picked - peak, 0.0))
        logsumexp = peak + tl.log(total)
        tl.debug_barrier()  # all threads have read the row
    else:
        logsumexp = tl.load(logsumexp_C + pid)
    if weight_C is not None:
        weight = tl.load(weight_C + pid)
        for first in range(0, V, BLOCK):
            column = first + columns
            p = _exp(_load(row, column, V, stride) - logsumexp)
            p = tl.where(column == label, p - 1.0, p) * weight
            p = p.to(logit_CV.dtype.element_ty)
            tl.store(row + column, p, mask=column < stride, eviction_policy="evict_first")  # later rows need the cache


def statistics(logit_CV: torch.Tensor, label_C: torch.Tensor, weight_C: torch.Tensor | None) -> Statistics:
    """Compute as the eager function of this name, by Triton kernels."""
    statistics = Statistics(
        *(logit_CV.new_empty(len(logit_CV), dtype=dtype) for dtype in (torch.float32, torch.int64)),
        *(logit_CV.new_empty(len(logit_CV), dtype=torch.float32) for _ in range(2)),
    )
    _launch(logit_CV, label_C, *statistics, None, weight_C)
    return statistics


def gradient_(logit_CV: torch.Tensor, label_C: torch.Tensor, logsumexp_C: torch.Tensor, weight_C: torch.Tensor) -> None:
    """Compute as the eager function of this name, by Triton kernels."""
    _launch(logit_CV, label_C, None, None, None, None, logsumexp_C, weight_C)


def _launch(logit_CV: torch.Tensor, *tensors: torch.Tensor | None) -> None:
    rows, vocab = logit_CV.shape
    launch(softmax_rows, (rows,), logit_CV, *tensors, vocab, logit_CV.stride(0), BLOCK=BLOCK, GROUP=GROUP, num_warps=WARPS)


@triton.jit
def add_scaled(out, gradient, factor_1, size, BLOCK: tl.constexpr, BETA: tl.constexpr):
    """``out = BETA · out + factor · gradient``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gradient + at, mask=at < size).to(tl.float32) * tl.load(factor_1)
    if BETA:
        x += tl.load(out + at, mask=at < size).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=at < size)


def add_scaled_(out: torch.Tensor, gradient: torch.Tensor, factor_1: torch.Tensor, beta: float = 1.0) -> None:
    """Compute as the eager function of this name, by a Triton kernel, for contiguous tensors."""
    size = out.numel()
    launch(add_scaled, (triton.cdiv(size, SCALED),), out, gradient, factor_1, size, BLOCK=SCALED, BETA=beta != 0)
