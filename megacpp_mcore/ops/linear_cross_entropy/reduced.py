"""Linear cross-entropy for your own code, with a reduction: ours, and those of Liger and quack, which return only a scalar.

No layer of the model uses these: Megatron multiplies the token losses by a mask after the model has returned them. Liger's
and quack's are for the benchmark that compares them.

Shape legend: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import vendors
from megacpp_mcore.ops.linear_cross_entropy.chunked import LOGIT_BYTES, TOKENS, chunk_tokens, linear_cross_entropy
from megacpp_mcore.ops.linear_cross_entropy.reference import check_arguments
from megacpp_mcore.util.probe import ProbeResult

REDUCTIONS = ("mean", "sum")


def chunked(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    label: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute as :func:`megacpp_mcore.ops.linear_cross_entropy`, by :mod:`~megacpp_mcore.ops.linear_cross_entropy.chunked`."""
    if reduction not in (*REDUCTIONS, "none"):
        raise ModelError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}, none")
    if not isinstance(ignore_index, int) or 0 <= ignore_index < len(weight_VH):
        raise ModelError(f"ignore_index is {ignore_index!r}, expected an integer outside of 0 to {len(weight_VH) - 1}")
    counted = label != ignore_index
    strange = counted & ((label < 0) | (label >= len(weight_VH)))
    if strange.is_cuda:
        torch._assert_async(~strange.any(), "a label is neither in the vocabulary nor ignore_index")
    elif bool(strange.any()):
        raise ModelError(
            f"found label {int(label[strange][0])}, expected 0 to {len(weight_VH) - 1}, or {ignore_index} (ignore_index)"
        )
    announced = None if reduction == "none" else counted.float()
    losses = linear_cross_entropy(
        hidden, weight_VH, label, bias_V=bias_V, logit_scale=logit_scale, token_weight=announced
    ).loss.masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def liger(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, label_N: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
    """Compute the same by Liger's kernels, in chunks of about as many logits as ours; synchronises the host.

    Raises:
        ModelError: shapes, dtypes or the reduction are not as described.
        BackendError: Liger cannot be imported.
    """
    _check(hidden_NH, weight_VH, label_N, reduction)
    (tokens, hidden), vocab = hidden_NH.shape, len(weight_VH)
    # Liger's chunks have N · H · C / V tokens.
    wanted = chunk_tokens(tokens, vocab, hidden_NH.dtype, hidden_NH.device) * vocab
    chunks = max(1, wanted // (tokens * hidden))
    loss: torch.Tensor = vendors.entry("liger")(hidden_NH, weight_VH, label_N, reduction=reduction, chunk_mem_const=chunks)
    return loss


def quack(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, label_N: torch.Tensor, *, reduction: str = "mean") -> torch.Tensor:
    """Compute the same by quack's kernels, in chunks of about as many logits as ours.

    Raises:
        ModelError: shapes, dtypes or the reduction are not as described.
        BackendError: quack cannot be imported.
    """
    _check(hidden_NH, weight_VH, label_N, reduction)
    chunk = LOGIT_BYTES["cuda"] // (len(weight_VH) * hidden_NH.itemsize) // TOKENS * TOKENS
    loss: torch.Tensor = vendors.entry("quack")(
        hidden_NH, weight_VH, label_N, reduction=reduction, chunk_size=max(chunk, TOKENS)
    )
    return loss


def _check(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, label_N: torch.Tensor, reduction: str) -> None:
    check_arguments(hidden_NH, weight_VH, label_N, None, None)
    if hidden_NH.dim() != 2 or label_N.shape != hidden_NH.shape[:1]:
        raise ModelError(
            f"hidden and label have shapes {tuple(hidden_NH.shape)} and {tuple(label_N.shape)}, expected [N, H] and [N]"
        )
    if reduction not in REDUCTIONS:
        raise ModelError(f"reduction is {reduction!r}, expected one of {', '.join(REDUCTIONS)}")


@functools.cache
def probe(name: str) -> ProbeResult:
    """Return whether one call of ``liger`` or ``quack`` agrees with plain PyTorch: run and compared once per process."""

    if not (probe := vendors.installed(name)).ok:
        return probe

    def leaves() -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)
        hidden, weight = (torch.randn(rows, 128, device="cuda", generator=generator) for rows in (256, 768))
        return [hidden.bfloat16(), weight.mul(128**-0.5).bfloat16()]

    def plain(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        label_N = torch.arange(256, device="cuda") * 3
        return torch.nn.functional.cross_entropy(hidden_NH @ weight_VH.t(), label_N)

    vendor: Callable[..., Any] = {"liger": liger, "quack": quack}[name]

    def call(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = vendor(hidden_NH, weight_VH, torch.arange(256, device="cuda") * 3)
        return loss

    return vendors.tried(f"a call of {name}'s linear cross-entropy", call, plain, leaves)
