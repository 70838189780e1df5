"""One step of AdamW on many float32 tensors by one Triton kernel, which also scales gradients and writes 16-bit copies.

The arithmetic is that of Transformer Engine's ``FusedAdam`` (2.20) in its AdamW mode. A gradient is scaled as it is read, so
that clipping needs no pass of its own, and a weight's 16-bit copy is written with it: 30 bytes an element in place of 42.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.triton_launch import launch

BLOCK = 2048
"""Elements of a program."""


class Shard(NamedTuple):
    """One tensor's weight, gradient and moments, float32 of one size, and the weight in 16 bits, if there is such a copy."""

    weight: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None


def addresses(shards: Sequence[Shard]) -> list[int]:
    """Return where the tensors are, 0 for a copy that there is not."""
    return [0 if tensor is None else tensor.data_ptr() for shard in shards for tensor in shard]


class Table:
    """Where the kernel finds the tensors of some shards: valid while :func:`addresses` of them gives ``addresses``.

    Raises:
        ModelError: tensors of a shard that differ in size, have another dtype, are not contiguous or not on 16 bytes, or
            copies of two dtypes.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.addresses = addresses(shards)
        for shard in shards:
            for name, tensor in zip(Shard._fields, shard, strict=True):
                wanted = torch.float32 if name != "copy" else (tensor if tensor is None else tensor.dtype)
                if tensor is not None and not (
                    tensor.numel() == shard.weight.numel()
                    and tensor.dtype == wanted
                    and tensor.is_contiguous()
                    and tensor.data_ptr() % 16 == 0
                ):
                    raise ModelError(
                        f"{name} is {tensor.dtype} of {tensor.numel()} elements, strides {tensor.stride()}; expected a "
                        f"contiguous {wanted} of {shard.weight.numel()} on 16 bytes"
                    )
        kinds = {shard.copy.dtype for shard in shards if shard.copy is not None}
        if len(kinds) > 1 or not kinds <= {torch.bfloat16, torch.float16}:
            raise ModelError(f"copies are {kinds}; expected one of 16 bits")
        self.half = torch.float16 in kinds
        device = shards[0].weight.device
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
    """Update weights, moments and copies in place by step ``number``, from 1 on, of AdamW with bias correction.

    Gradients, which stay as they are, count ``scale`` times, a float32 scalar on the device.
    """
    unbias = [1.0 / (1.0 - beta**number) for beta in betas]
    launch(
        adam, (table.programs,), table.places, table.sizes, table.first, table.owner, scale, float(lr), *map(float, betas),
        1.0 - betas[0], 1.0 - betas[1], float(eps), float(weight_decay), *unbias, HALF=table.half, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _update(weight, gradient, exp_avg, exp_avg_sq, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2, scale,
            mask, MASKED: tl.constexpr):  # fmt: skip
    """Update the elements of a block in place; return the weights."""
    if MASKED:
        w, g = tl.load(weight, mask=mask), tl.load(gradient, mask=mask)
        m, v = tl.load(exp_avg, mask=mask), tl.load(exp_avg_sq, mask=mask)
    else:
        w, g, m, v = tl.load(weight), tl.load(gradient), tl.load(exp_avg), tl.load(exp_avg_sq)
    g = g * scale
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = w - lr * (tl.div_rn(m * unbias1, tl.sqrt_rn(v * unbias2) + eps) + decay * w)
    if MASKED:
        tl.store(weight, w, mask=mask)
        tl.store(exp_avg, m, mask=mask)
        tl.store(exp_avg_sq, v, mask=mask)
    else:
        tl.store(weight, w)
        tl.store(exp_avg, m)
        tl.store(exp_avg_sq, v)
    return w


@triton.jit
def adam(places_ptr, sizes_ptr, first_ptr, owner_ptr, scale_ptr, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2,
         HALF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Update BLOCK elements of one tensor: programs of all tensors, one after another."""
    program = tl.program_id(0)
    owner = tl.load(owner_ptr + program)
    start = (program - tl.load(first_ptr + owner)).to(tl.int64) * BLOCK
    left = tl.load(sizes_ptr + owner) - start
    row = places_ptr + owner * 5
    element = tl.arange(0, BLOCK)
    weight = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + start + element
    gradient = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16) + start + element
    exp_avg = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + start + element
    exp_avg_sq = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + start + element
    place = tl.load(row + 4)
    KIND: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    copy = tl.multiple_of(place.to(tl.pointer_type(KIND)), 16) + start + element
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    mask = element < left
    if left >= BLOCK:
        w = _update(
            weight, gradient, exp_avg, exp_avg_sq, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2, scale,
            mask, False,
        )  # fmt: skip
        if place != 0:
            tl.store(copy, w.to(KIND))
    else:
        w = _update(
            weight, gradient, exp_avg, exp_avg_sq, lr, beta1, beta2, rest1, rest2, eps, decay, unbias1, unbias2, scale,
            mask, True,
        )  # fmt: skip
        if place != 0:
            tl.store(copy, w.to(KIND), mask=mask)
