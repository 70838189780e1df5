"""Linear cross-entropy in chunks of tokens: only one chunk's logits exist at a time, forward and backward.

Between the matrix products, each chunk's logits become losses and, in place, their own gradient. With a ``token_weight``, which
promises the gradient of the losses up to one common factor, the forward pass also computes the gradients for those
weights, and the backward pass multiplies them by that factor: three products. Without it the backward pass
recomputes the logits, four products, and is correct for any gradient of the losses.

Shape legend: N tokens (of the whole tensor-parallel group), C tokens of a chunk, H hidden width, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.linear_cross_entropy import eager
from megacpp_mcore.ops.linear_cross_entropy.reference import check_arguments
from megacpp_mcore.ops.main_grad import MainGrad, add_product_, check_main_grad

LOGIT_BYTES = {"cuda": 2**29, "cpu": 2**25}
"""Target size of a chunk's logits: on a GPU 4096 tokens × 65,536 in 16 bits; products of fewer tokens are slower."""

TOKENS = 128
"""Chunks are multiples of this many tokens, so that the products have whole tiles."""

COLUMNS = 64
"""Rows of logits are padded to a multiple of this many columns, for alignment; the padding is never read."""

ROUNDINGS = 2
"""Maximum number of chunks for which the gradient of a 16-bit weight may be accumulated in 16 bits."""

PROMISE = 1e-4
"""Relative tolerance for float32 rounding in the check that a loss's gradient is its weight times the factor."""


@dataclass(frozen=True)
class VocabShards:
    """Sharding of the vocabulary: rank r of ``group`` holds the r-th V rows of the whole weight.

    Attributes:
        group: the tensor-parallel process group; all of its ranks have the same labels, and the same hidden states unless
            sequence_parallel.
        sequence_parallel: axis 0 of hidden, and of its gradient, is sharded over the group too.
    """

    group: distributed.ProcessGroup
    sequence_parallel: bool = False


class TokenLosses(NamedTuple):
    """The losses, and each token's largest logit on this rank with its column; the latter two have no gradient."""

    loss: torch.Tensor
    top_logit: torch.Tensor
    top_column: torch.Tensor


@dataclass(frozen=True)
class _Options:
    """Non-differentiable arguments of a call."""

    logit_scale: float
    shards: VocabShards | None
    main_grad: MainGrad | None
    token_chunk: int | None
    grad_enabled: bool

    @property
    def group(self) -> distributed.ProcessGroup | None:
        """The tensor-parallel group, if any."""
        return None if self.shards is None else self.shards.group

    def first_column(self, vocab: int) -> int:
        """Return the vocabulary entry of this rank's row 0."""
        return 0 if self.shards is None else self.shards.group.rank() * vocab


def chunk_tokens(tokens: int, vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the tokens per chunk: about :data:`LOGIT_BYTES` of logits, spread evenly over the chunks."""
    count = -(-tokens * vocab * dtype.itemsize // LOGIT_BYTES.get(device.type, LOGIT_BYTES["cpu"]))
    return min(-(-tokens // (count * TOKENS)) * TOKENS, tokens)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    label: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    token_weight: torch.Tensor | None = None,
    shards: VocabShards | None = None,
    main_grad: MainGrad | None = None,
    token_chunk: int | None = None,
) -> TokenLosses:
    """Compute each token's cross-entropy from hidden states, as defined by ``reference.linear_cross_entropy``.

    Logits have the dtype of ``hidden``, as in a stock output layer; maxima, sums of exponentials, losses and the softmax in
    the gradient are float32 (float64 inputs: float64). Differentiable once, in hidden, weight and bias. The host never waits
    for the device and no shape depends on a value, so a CUDA graph can capture it; the same inputs give the same bits.

    Communication and rounding are those of megatron-core 0.19 ``ColumnParallelLinear`` followed by
    ``vocab_parallel_cross_entropy``: hidden is gathered (sequence parallel), maximum, sum and label's logit are
    all-reduced, and the gradient of hidden is reduce-scattered or all-reduced in the dtype of hidden.

    Args:
        hidden: [..., H]; with ``shards.sequence_parallel`` this rank's part of axis 0.
        weight_VH: this rank's rows of the output projection, dtype of ``hidden``.
        label: int64, the leading shape of the whole ``hidden``; entries are those of the whole vocabulary.
        bias_V: added to the logits, or None.
        logit_scale: factor on the logits.
        token_weight: the weight that each token's loss will be multiplied by, up to one common factor, or None. It is a
            promise: if gradients are enabled, backward fails with any other gradient, and also if the losses were rounded
            to 16 bits in between. float16, which cannot hold a gradient before the factor (the loss scale) is known, gets
            its gradients in the backward pass, without this check.
        shards: the tensor-parallel group, or None for one rank.
        main_grad: buffer for the gradient of the weight, or None to return it.
        token_chunk: tokens per chunk, or None to choose. It changes the memory needed, and results only by rounding.

    Returns:
        Losses, largest logits and their columns, each in the shape of ``label``.

    Raises:
        ModelError: shapes, dtypes or the chunk size are not as described.
        RuntimeError: in the backward pass, the gradient of the losses is not ``token_weight`` times one factor; on a GPU by a
            device-side assertion, after which the process can no longer use the GPU.
    """
    check_arguments(hidden, weight_VH, label, bias_V, token_weight)
    _check_label(hidden, label, shards)
    check_main_grad(weight_VH, main_grad)
    if token_chunk is not None and token_chunk < 1:
        raise ModelError(f"token_chunk is {token_chunk}, expected a positive number (or None to choose it)")
    options = _Options(logit_scale, shards, main_grad, token_chunk, torch.is_grad_enabled())
    return TokenLosses(*_LinearCrossEntropy.apply(hidden, weight_VH, bias_V, label, token_weight, options))


def _check_label(hidden: torch.Tensor, label: torch.Tensor, shards: VocabShards | None) -> None:
    expected = list(hidden.shape[:-1])
    if shards is not None and shards.sequence_parallel:
        if not expected:
            raise ModelError(f"hidden has shape {tuple(hidden.shape)}, expected a sequence axis before H to gather")
        expected[0] *= shards.group.size()
    if list(label.shape) != expected:
        raise ModelError(f"label has shape {tuple(label.shape)}, expected {tuple(expected)}: one for each token")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        label: torch.Tensor,
        token_weight: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        head, kernels = _Head(hidden, weight_VH, bias_V, options), _implementation(hidden.device, hidden.dtype)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weight_N = None if token_weight is None else token_weight.reshape(-1).to(dtype)
        factor_N = None
        is_differentiated = options.grad_enabled and any(ctx.needs_input_grad)
        if weight_N is not None and is_differentiated and hidden.dtype != torch.float16:
            factor_N = weight_N * options.logit_scale
        gradients = None if factor_N is None else _Gradients(ctx.needs_input_grad, head, in_forward=True)
        label_N = label.reshape(-1) - options.first_column(weight_VH.shape[0])
        loss_N, logsumexp_N, top_N = (torch.empty(len(label_N), dtype=dtype, device=label.device) for _ in range(3))
        column_N = torch.empty_like(label_N)
        for rows, logit_CV in head.chunks():
            label_C, factor_C = label_N[rows], None if factor_N is None else factor_N[rows]
            statistics = kernels.statistics(logit_CV, label_C, factor_C if options.group is None else None)
            top_N[rows], column_N[rows] = statistics.top, statistics.column
            loss_N[rows], logsumexp_N[rows] = statistics.losses(label_C, logit_CV.shape[1], options.group)
            if gradients is not None:
                if options.group is not None:
                    kernels.gradient_(logit_CV, label_C, logsumexp_N[rows], factor_C)
                gradients.add(logit_CV, rows)
        if gradients is None:
            ctx.save_for_backward(weight_N, hidden, weight_VH, bias_V, label_N, logsumexp_N)
        else:
            ctx.save_for_backward(weight_N, *gradients.finish(hidden))
        ctx.options, ctx.in_forward, ctx.dtype = options, gradients is not None, hidden.dtype
        outputs = tuple(out.view(label.shape) for out in (loss_N, top_N, column_N))
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight_N, *saved = ctx.saved_tensors
        options: _Options = ctx.options
        main_grad = options.main_grad if ctx.needs_input_grad[1] else None
        kernels = _implementation(grad_loss.device, ctx.dtype)
        grad_N = grad_loss.reshape(-1)
        if weight_N is not None:
            grad_N = grad_N.masked_fill(weight_N == 0, 0.0)
        if ctx.in_forward:
            factor_1 = _factor(grad_N, weight_N)
            if main_grad is not None:
                kernels.add_scaled_(main_grad.buffer, saved[1], factor_1)
                saved[1] = None
            gradients_out = [None if gradient is None else torch.empty_like(gradient, dtype=ctx.dtype) for gradient in saved]
            for out, gradient in zip(gradients_out, saved, strict=True):
                if out is not None:
                    kernels.add_scaled_(out, gradient, factor_1, beta=0.0)
        else:
            hidden, weight_VH, bias_V, label_N, logsumexp_N = saved
            head = _Head(hidden, weight_VH, bias_V, options)
            gradients = _Gradients(ctx.needs_input_grad, head, in_forward=False)
            for rows, logit_CV in head.chunks():
                factor_C = grad_N[rows] * options.logit_scale
                kernels.gradient_(logit_CV, label_N[rows], logsumexp_N[rows], factor_C)
                gradients.add(logit_CV, rows)
            gradients_out = [None if gradient is None else gradient.to(ctx.dtype) for gradient in gradients.finish(hidden)]
        if main_grad is not None:
            gradients_out[1] = main_grad.placeholder()
        return (*gradients_out, None, None, None)


def _factor(grad_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """Return the common factor, [1], between the gradient of the losses and the weights.

    It is not finite if any gradient is not, and makes the returned gradients non-finite too, as a loss-scale overflow does.

    Raises:
        RuntimeError: there is no such factor; on a GPU raised later, by a device-side assertion.
    """
    tiny = torch.finfo(weight_N.dtype).tiny
    largest_1 = weight_N.abs().amax(0, keepdim=True).clamp_(min=tiny)
    unit_N = weight_N / largest_1  # keeps the squares from underflow and overflow
    factor_1 = (grad_N * unit_N).sum(0, keepdim=True) / unit_N.square().sum(0, keepdim=True).clamp_(min=tiny) / largest_1
    promised_N = weight_N * factor_1
    is_kept = ((grad_N - promised_N).abs_() <= PROMISE * promised_N.abs()).all() | ~factor_1.isfinite()
    torch._assert_async(
        is_kept,
        "linear_cross_entropy: the gradient of the losses is not token_weight times one factor; pass the weights that the "
        "losses are multiplied by as token_weight, or None",
    )
    return factor_1


def _implementation(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the module for the steps between the products: Triton kernels on a GPU, eager for float64 and on a CPU."""
    if device.type != "cuda" or dtype == torch.float64:
        return eager
    from megacpp_mcore.ops.linear_cross_entropy import triton

    return triton


class _Head:
    """The output layer of one call, and its logits chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, options: _Options) -> None:
        self.hidden_NH = _gathered(hidden, options.shards)
        self.weight_VH, self.bias_V, self.options = weight_VH, bias_V, options
        tokens, vocab = len(self.hidden_NH), weight_VH.shape[0]
        chosen = options.token_chunk or chunk_tokens(tokens, vocab, hidden.dtype, hidden.device)
        self.chunk = min(chosen, tokens)

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each chunk's tokens and their logits [C, V], in a buffer that the next chunk overwrites."""
        tokens, vocab, scale = len(self.hidden_NH), self.weight_VH.shape[0], self.options.logit_scale
        padded_CV = self.hidden_NH.new_empty(self.chunk, -(-vocab // COLUMNS) * COLUMNS)
        if (
            padded_CV.device.type == "cpu"
        ):  # torch 2.14 multiplies stale memory by zero (bf16, odd vocabularies): it must not be NaN
            padded_CV[:, vocab:] = 0
        buffer_CV = padded_CV[:, :vocab]
        for first in range(0, tokens, self.chunk):
            rows = slice(first, min(first + self.chunk, tokens))
            logit_CV = buffer_CV[: rows.stop - first]
            bias_V, beta = (logit_CV, 0.0) if self.bias_V is None else (self.bias_V, scale)
            torch.addmm(bias_V, self.hidden_NH[rows], self.weight_VH.t(), beta=beta, alpha=scale, out=logit_CV)
            yield rows, logit_CV


def _gathered(hidden: torch.Tensor, shards: VocabShards | None) -> torch.Tensor:
    """All-gather the tokens of the tensor-parallel group, as [N, H]."""
    if shards is not None and shards.sequence_parallel:
        whole = hidden.new_empty(hidden.shape[0] * shards.group.size(), *hidden.shape[1:])
        distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=shards.group)
        hidden = whole
    return hidden.reshape(-1, hidden.shape[-1])


class _Gradients:
    """The requested gradients of hidden, weight and bias, accumulated chunk by chunk."""

    def __init__(self, needed: tuple[bool, ...], head: _Head, in_forward: bool) -> None:
        """``in_forward``: whether this is the forward pass, when the factor is unknown and main_grad must not be touched."""
        self.head, hidden_NH, options = head, head.hidden_NH, head.options
        for_hidden, for_weight, for_bias = needed[:3]
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        # Round once, after multiplying by the factor; gradients communicated between ranks are rounded before that, too.
        dtype = wide if in_forward and options.shards is None else hidden_NH.dtype
        self.grad_NH = hidden_NH.new_empty(hidden_NH.shape, dtype=dtype) if for_hidden else None
        self.is_own = in_forward or options.main_grad is None
        self.total_VH: torch.Tensor | None = None
        if for_weight and self.is_own:
            is_last_rounding = in_forward == (options.main_grad is not None)
            few = len(hidden_NH) <= ROUNDINGS * head.chunk
            dtype = hidden_NH.dtype if is_last_rounding and few else wide
            self.total_VH = hidden_NH.new_empty(head.weight_VH.shape, dtype=dtype)
        elif for_weight and options.main_grad is not None:
            self.total_VH = options.main_grad.buffer
        self.grad_V = None if head.bias_V is None or not for_bias else torch.zeros_like(head.bias_V, dtype=wide)

    def add(self, grad_CV: torch.Tensor, rows: slice) -> None:
        """Accumulate the contributions of the tokens ``rows`` from the gradient of their logits."""
        if self.grad_NH is not None:
            add_product_(self.grad_NH[rows], grad_CV, self.head.weight_VH, is_first=True)
        if self.total_VH is not None:
            is_first = self.is_own and rows.start == 0
            add_product_(self.total_VH, grad_CV.t(), self.head.hidden_NH[rows], is_first=is_first)
        if self.grad_V is not None:
            self.grad_V += grad_CV.sum(dim=0, dtype=self.grad_V.dtype)

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of ``hidden`` (this rank's part), weight and bias, perhaps in a wider dtype, or None."""
        return self._of_hidden(hidden), self.total_VH if self.is_own else None, self.grad_V

    def _of_hidden(self, hidden: torch.Tensor) -> torch.Tensor | None:
        shards, grad_NH = self.head.options.shards, self.grad_NH
        if grad_NH is None:
            return None
        if shards is not None and shards.sequence_parallel:
            grad = hidden.new_empty(hidden.shape)
            distributed.reduce_scatter_tensor(grad, grad_NH.view(-1, *hidden.shape[1:]), group=shards.group)
            return grad
        if shards is not None:
            distributed.all_reduce(grad_NH, group=shards.group)
        return grad_NH.view(hidden.shape)
