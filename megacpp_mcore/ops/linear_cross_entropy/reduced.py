"""Linear cross-entropy reduced to one number: ours, and those of Liger and quack, which return nothing else.

No layer of the model uses these: Megatron multiplies the losses of tokens by a mask after the model has returned them.
They are for your own code that needs a mean or a sum, and for the benchmark that compares them.

Shape legend: N tokens, H hidden width, V vocabulary. Labels are entries of the vocabulary; there is no ignore index.
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
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, label_N: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """Reduce the loss of :mod:`~megacpp_mcore.ops.linear_cross_entropy.chunked`, in three products.

    Raises:
        ModelError: shapes, dtypes or the reduction are not as described.
    """
    _check(hidden_NH, weight_VH, label_N, reduction)
    ones = torch.ones(label_N.shape, device=label_N.device)
    loss_N = linear_cross_entropy(hidden_NH, weight_VH, label_N, token_weight=ones).loss
    return loss_N.mean() if reduction == "mean" else loss_N.sum()


def liger(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, label_N: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """Compute the same by Liger's kernels, in chunks of about as many logits as ours; the host waits for the device.

    Raises:
        ModelError: as :func:`chunked`.
        BackendError: Liger cannot be imported.
    """
    _check(hidden_NH, weight_VH, label_N, reduction)
    (tokens, hidden), vocab = hidden_NH.shape, len(weight_VH)
    # Its chunks have N · H · C / V tokens.
    wanted = chunk_tokens(tokens, vocab, hidden_NH.dtype, hidden_NH.device) * vocab
    chunks = max(1, wanted // (tokens * hidden))
    loss: torch.Tensor = vendors.entry("liger")(
        hidden_NH, weight_VH, label_N, reduction=reduction, chunk_mem_const=chunks
    )
    return loss


def quack(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, label_N: torch.Tensor, *, reduction: str = "mean"
) -> torch.Tensor:
    """Compute the same by quack's kernels, in chunks of about as many logits as ours.

    Raises:
        ModelError: as :func:`chunked`.
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

    if not (found := vendors.installed(name)).ok:
        return found

    def leaves() -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)
        hidden, weight = (torch.randn(rows, 128, device="cuda", generator=generator) for rows in (256, 768))
        return [hidden.bfloat16(), weight.mul(128**-0.5).bfloat16()]

    def plain(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        label_N = torch.arange(256, device="cuda") * 3
        return torch.nn.functional.cross_entropy(hidden_NH @ weight_VH.t(), label_N)

    vendor: Callable[..., Any] = {"liger": liger, "quack": quack}[name]

    def call(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = vendor(hidden_NH, weight_VH, torch.arange(256, device="cuda") * 3)
        return found

    return vendors.tried(f"a call of {name}'s linear cross-entropy", call, plain, leaves)
