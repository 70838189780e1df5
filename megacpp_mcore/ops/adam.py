"""Multi-tensor AdamW step in one Triton kernel, which also scales gradients and writes 16-bit weights.

The arithmetic is that of Transformer Engine's ``FusedAdam`` (2.20) in its AdamW mode, in float32. A gradient is scaled as it is
read, so clipping needs no separate pass, and a weight's 16-bit copy is written with it: 30 bytes per element instead of
42. Moments may be stored in bfloat16, and a weight as its bfloat16 copy plus a 16-bit remainder
(:func:`megacpp_mcore.ops.remainder_adam.joined`).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.triton_launch import launch

BLOCK = 2048
"""Elements per program."""


class Shard(NamedTuple):
    """One tensor's weight, gradient and moments, all of one size, and the weight's 16-bit copy, if any.

    The weight is float32 or, with a copy in bfloat16, the int16 remainder. Gradient and moments are float32 or
    bfloat16.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None


def addresses(shards: Sequence[Shard]) -> list[int]:
    """Return the addresses of the tensors, 0 for a missing copy."""
    return [0 if tensor is None else tensor.data_ptr() for shard in shards for tensor in shard]


class Table:
    """Device table of the shards' addresses and sizes: valid while :func:`addresses` of the shards returns ``addresses``.

    Raises:
        ModelError: a tensor differs in size from its shard's weight or in dtype from the other shards, or is not contiguous.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.addresses = addresses(shards)
        first, copies = shards[0], [shard.copy.dtype for shard in shards if shard.copy is not None]
        self.remainder = first.weight.dtype == torch.int16
        self.half = not self.remainder and copies[:1] == [torch.float16]
        dtypes = [tensor.dtype if tensor.dtype == torch.bfloat16 else torch.float32 for tensor in first[1:4]]
        wanted = (
            torch.int16 if self.remainder else torch.float32, *dtypes, torch.float16 if self.half else torch.bfloat16
        )  # fmt: skip
        for shard in shards:
            for name, tensor, dtype in zip(Shard._fields, shard, wanted, strict=True):
                if tensor is None and not self.remainder:
                    continue
                if tensor is None or not (
                    tensor.numel() == shard.weight.numel() and tensor.dtype == dtype and tensor.is_contiguous()
                ):
                    description = tensor if tensor is None else f"{tensor.dtype} of {tensor.numel()}, strides {tensor.stride()}"
                    raise ModelError(
                        f"{name} is {description}; expected a contiguous {dtype} of {shard.weight.numel()} elements"
                    )
        names = ("GRADIENT", "AVG", "AVG_SQ")
        kinds = (tl.bfloat16 if dtype == torch.bfloat16 else tl.float32 for dtype in dtypes)
        self.dtypes = dict(zip(names, kinds, strict=True))
        self.align = math.gcd(16, *self.addresses)
        device = first.weight.device
        sizes = [shard.weight.numel() for shard in shards]
        programs = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
        self.programs = int(programs.sum())
        self.places = torch.tensor(self.addresses, device=device).view(-1, len(Shard._fields))
        self.sizes = torch.tensor(sizes, device=device)
        self.first = (programs.cumsum(0) - programs).int().to(device)
        self.owner = torch.repeat_interleave(torch.arange(len(shards), dtype=torch.int32), programs).to(device)


def step(
    table: Table,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    number: int,
    scale: torch.Tensor | None = None,
) -> None:
    """Update weights, moments and copies in place by AdamW step ``number`` (from 1), with bias correction.

    Gradients are multiplied by ``scale``, a float32 scalar on the device, as they are read; they are not modified.
    """
    unbias = [1.0 / (1.0 - beta**number) for beta in betas]
    launch(
        adam, (table.programs,), table.places, table.sizes, table.first, table.owner, scale, float(lr), *map(float, betas),
        1.0 - betas[0], 1.0 - betas[1], float(eps), float(weight_decay), *unbias, HALF=table.half, REMAINDER=table.remainder,
        **table.dtypes, ALIGN=table.align, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _update(weight, gradient, exp_avg, exp_avg_sq, copy, place, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2,
            scale, mask, REMAINDER: tl.constexpr):  # fmt: skip
    """Update the elements of a block in place."""
    g = tl.load(gradient, mask=mask).to(tl.float32) * scale
    m = tl.load(exp_avg, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq, mask=mask).to(tl.float32)
    w = tl.load(weight, mask=mask)
    if REMAINDER:
        w = ((tl.load(copy, mask=mask).to(tl.int32) << 16) + w.to(tl.int32)).to(tl.float32, bitcast=True)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w - lr * (tl.div_rn(m * unbias1, tl.sqrt_rn(v * unbias2) + eps) + decay * w)
    tl.store(exp_avg, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
    if REMAINDER:
        bits = w.to(tl.int32, bitcast=True)
        upper = tl.where(w == w, (bits + 0x8000) >> 16, 0x7FC0)
        tl.store(copy, upper.to(tl.int16), mask=mask)
        tl.store(weight, (bits - (upper << 16)).to(tl.int16), mask=mask)
    else:
        tl.store(weight, w, mask=mask)
        if place != 0:
            tl.store(copy, w.to(copy.dtype.element_ty), mask=mask)


@triton.jit
def adam(places_ptr, sizes_ptr, first_ptr, owner_ptr, scale_ptr, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2,
         HALF: tl.constexpr, REMAINDER: tl.constexpr, GRADIENT: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr,
         ALIGN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Update BLOCK elements of one tensor; the grid concatenates the programs of all tensors."""
    program = tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = (program - tl.load(first_ptr + owner)).to(tl.int64) * BLOCK
    left = tl.load(sizes_ptr + owner) - start
    row = places_ptr + owner * 5
    element = tl.arange(0, BLOCK)
    WEIGHT: tl.constexpr = tl.int16 if REMAINDER else tl.float32
    COPY: tl.constexpr = tl.int16 if REMAINDER else (tl.float16 if HALF else tl.bfloat16)
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(WEIGHT)), ALIGN) + start + element
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(GRADIENT)), ALIGN) + start + element
    exp_avg = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(AVG)), ALIGN) + start + element
    exp_avg_sq = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(AVG_SQ)), ALIGN) + start + element
    place = tl.load(row + 4)
    copy = tl.multiple_of(place.to(tl.pointer_type(COPY)), ALIGN) + start + element
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    if left >= BLOCK:
        _update(
            weight, gradient, exp_avg, exp_avg_sq, copy, place, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2,
            scale, None, REMAINDER,
        )  # fmt: skip
    else:
        _update(
            weight, gradient, exp_avg, exp_avg_sq, copy, place, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2,
            scale, element < left, REMAINDER,
        )  # fmt: skip
