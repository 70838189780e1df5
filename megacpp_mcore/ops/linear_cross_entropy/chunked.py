"""Linear cross-entropy in chunks of the vocabulary: no tensor of tokens × vocabulary in either direction.

The forward pass keeps the log-sum-exp of each token, and the backward pass computes the logits once more: four matrix
products instead of three. With the gradient of each token's loss at hand it is then right for any weighting of the
tokens; the usual short cut, gradients already in the forward pass, presumes one weight for all.

Vocabulary chunks, not token chunks: each row of the weight gets its whole gradient from one product, rounded once, and
what is summed up in float32 is [N, H] in size, not [V, H].

Shape legend: N tokens (all of the tensor-parallel group's), H hidden width, V vocabulary of this rank, C one chunk of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.autograd.function import once_differentiable

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.linear_cross_entropy.reference import check_arguments

LOGIT_CHUNK_BYTES = 2**25
"""Wanted size of one [N, C] chunk of logits, in their own dtype: 2048 columns for 8192 tokens in 16 bits."""

MIN_VOCAB_CHUNK = 512
"""Fewer columns than this would make poor matrix products, however many the tokens."""

FLOAT_BLOCK_BYTES = 2**23
"""Wanted size of the float32 copy of some rows of a chunk; small enough for the L2 cache of a data-centre GPU."""


@dataclass(frozen=True)
class VocabShards:
    """How the vocabulary is spread: rank r of ``group`` holds the r-th V rows of the whole weight.

    Attributes:
        group: the tensor-parallel process group; hidden and label are the same on all of its ranks, unless
        sequence_parallel: axis 0 of hidden is spread over the group too, and so is that of its gradient.
    """

    group: distributed.ProcessGroup
    sequence_parallel: bool = False


@dataclass(frozen=True)
class MainGrad:
    """A buffer that the gradient of the weight is added to, in place of being returned.

    Attributes:
        buffer_VH: the buffer.
        placeholder: called once it was added to; what it returns is given to autograd as the weight's gradient.
    """

    buffer_VH: torch.Tensor
    placeholder: Callable[[], torch.Tensor | None]


class TokenLosses(NamedTuple):
    """The losses, and for each token the largest logit of this rank and its column; these two have no gradient."""

    loss: torch.Tensor
    top_logit: torch.Tensor
    top_column: torch.Tensor


@dataclass(frozen=True)
class _Options:
    """Everything about a call that is not differentiated."""

    logit_scale: float
    shards: VocabShards | None
    main_grad: MainGrad | None
    vocab_chunk: int | None
    token_block: int | None

    def first_column(self, vocab: int) -> int:
        """The vocabulary entry that this rank's row 0 belongs to."""
        return 0 if self.shards is None else self.shards.group.rank() * vocab

    def columns(self, tokens: int, weight_VH: torch.Tensor) -> list[slice]:
        """The chunks of the vocabulary."""
        fitting = LOGIT_CHUNK_BYTES // (tokens * weight_VH.element_size()) // 128 * 128
        return _slices(weight_VH.shape[0], self.vocab_chunk or max(fitting, MIN_VOCAB_CHUNK))

    def rows(self, tokens: int, columns: slice) -> list[slice]:
        """The blocks of tokens whose part of a chunk is handled in float32 at once."""
        return _slices(tokens, self.token_block or max(1, FLOAT_BLOCK_BYTES // 4 // (columns.stop - columns.start)))


def _slices(total: int, length: int) -> list[slice]:
    return [slice(first, min(first + length, total)) for first in range(0, total, length)]


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
    vocab_chunk: int | None = None,
    token_block: int | None = None,
) -> TokenLosses:
    """Cross-entropy of each token from hidden states, as ``reference.linear_cross_entropy`` defines it.

    Logits have the dtype of ``hidden``, as the product of a stock output layer has; maxima, sums of exponentials, losses
    and the softmax in the gradient are float32 (float64 inputs: float64). Differentiable once, in hidden, weight and
    bias, for any gradient of the losses. Nothing waits for the device, and no shape depends on a value, so that a CUDA
    graph can hold it.

    Communication and rounding are those of megatron-core 0.19 ``ColumnParallelLinear`` followed by
    ``vocab_parallel_cross_entropy``: hidden is gathered in both passes (sequence parallel), maximum, sum and label's
    logit are all-reduced, and the gradient of hidden is reduce-scattered or all-reduced in the dtype of hidden.

    Args:
        hidden: [..., H]; with ``shards.sequence_parallel`` this rank's part of axis 0.
        weight_VH: this rank's rows of the output projection, dtype of ``hidden``.
        label: int64, the leading shape of the whole ``hidden``; entries are those of the whole vocabulary.
        bias_V: added to the logits, or None.
        logit_scale: factor on the logits.
        token_weight: what the loss of each token will be multiplied by, up to one factor for all, or None: those of weight 0
            have no gradient. The four products here need no more of it.
        shards: the tensor-parallel group, or None for one rank.
        main_grad: where the gradient of the weight goes, or None to return it.
        vocab_chunk: columns in a chunk, or None to choose. It changes the memory needed, and results by rounding only.
        token_block: rows of a chunk to handle in float32 at once, or None to choose.

    Returns:
        Losses, largest logits and their columns, each in the shape of ``label``.

    Raises:
        ModelError: shapes, dtypes or chunk sizes are not as described.
    """
    check_arguments(hidden, weight_VH, label, bias_V, token_weight)
    _check_label(hidden, label, shards)
    for name, size in (("vocab_chunk", vocab_chunk), ("token_block", token_block)):
        if size is not None and size < 1:
            raise ModelError(f"{name} is {size}, expected a positive number (or None to choose it)")
    options = _Options(logit_scale, shards, main_grad, vocab_chunk, token_block)
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
        hidden_NH = _gathered(hidden, options.shards)
        column_N = label.reshape(-1) - options.first_column(weight_VH.shape[0])
        statistics = _Statistics(column_N, torch.promote_types(hidden.dtype, torch.float32))
        for columns in options.columns(len(column_N), weight_VH):
            logit_NC = _logits(hidden_NH, weight_VH, bias_V, columns, options.logit_scale)
            statistics.add(logit_NC, columns, options.rows(len(column_N), columns))
            del logit_NC  # before the next chunk is made
        loss_N, logsumexp_N = statistics.finish(weight_VH.shape[0], options.shards)
        outputs = tuple(out.view(label.shape) for out in (loss_N, statistics.peak_N, statistics.best_N))
        ctx.save_for_backward(hidden, weight_VH, bias_V, column_N, logsumexp_N, token_weight)
        ctx.options = options
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight_VH, bias_V, column_N, logsumexp_N, token_weight = ctx.saved_tensors
        options: _Options = ctx.options
        gradients = _Gradients(ctx.needs_input_grad, _gathered(hidden, options.shards), weight_VH, bias_V, options)
        grad_N = grad_loss.reshape(-1).to(logsumexp_N.dtype) * options.logit_scale
        if token_weight is not None:
            grad_N = grad_N.masked_fill_(token_weight.reshape(-1) == 0, 0.0)
        for columns in options.columns(len(column_N), weight_VH):
            logit_NC = _logits(gradients.hidden_NH, weight_VH, bias_V, columns, options.logit_scale)
            blocks = options.rows(len(column_N), columns)
            _logits_to_gradient(logit_NC, logsumexp_N, column_N - columns.start, grad_N, blocks)
            gradients.add(logit_NC, columns)
            del logit_NC
        return (*gradients.finish(hidden), None, None, None)


def _gathered(hidden: torch.Tensor, shards: VocabShards | None) -> torch.Tensor:
    """All tokens of the tensor-parallel group, as [N, H]."""
    if shards is not None and shards.sequence_parallel:
        whole = hidden.new_empty(hidden.shape[0] * shards.group.size(), *hidden.shape[1:])
        distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=shards.group)
        hidden = whole
    return hidden.reshape(-1, hidden.shape[-1])


def _logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, columns: slice, scale: float
) -> torch.Tensor:
    logit_NC = torch.mm(hidden_NH, weight_VH[columns].t())
    if bias_V is not None:
        logit_NC += bias_V[columns]
    if scale != 1.0:
        logit_NC *= scale
    return logit_NC


class _Statistics:
    """Running maximum, its column, sum of exponentials below it, and the label's logit, of each token."""

    def __init__(self, column_N: torch.Tensor, dtype: torch.dtype) -> None:
        self.column_N = column_N
        # The lowest finite number and not -inf: the difference of two -inf is NaN, should a whole chunk be masked.
        self.peak_N = torch.full(column_N.shape, torch.finfo(dtype).min, dtype=dtype, device=column_N.device)
        self.best_N = torch.zeros_like(column_N)
        self.total_N = torch.zeros_like(self.peak_N)
        self.picked_N = torch.zeros_like(self.peak_N)

    def add(self, logit_NC: torch.Tensor, columns: slice, blocks: list[slice]) -> None:
        """Take in the logits of ``columns``."""
        top_N, index_N = logit_NC.max(dim=-1)
        peak_N = torch.maximum(self.peak_N, top_N.to(self.peak_N.dtype))
        self.best_N = torch.where(peak_N > self.peak_N, index_N + columns.start, self.best_N)
        added_N = torch.empty_like(self.total_N)
        for rows in blocks:  # nothing but what makes a chunk of wide numbers: the host launches each of these
            torch.sum((logit_NC[rows] - peak_N[rows, None]).exp_(), dim=-1, out=added_N[rows])
        self.total_N.mul_((self.peak_N - peak_N).exp_()).add_(added_N)
        self.peak_N = peak_N
        local_N, here_N = _position(self.column_N - columns.start, logit_NC.shape[1])
        picked_N = logit_NC.gather(1, local_N[:, None])[:, 0].to(self.picked_N.dtype)
        self.picked_N = torch.where(here_N, picked_N, self.picked_N)

    def finish(self, vocab: int, shards: VocabShards | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and log-sum-exp over the whole vocabulary of each token."""
        peak_N = self.peak_N
        if shards is not None:
            peak_N = self.peak_N.clone()
            distributed.all_reduce(peak_N, op=distributed.ReduceOp.MAX, group=shards.group)
        # Relative to the maximum, so that a label that no rank holds leaves 0 behind, as it does in stock Megatron.
        _, here_N = _position(self.column_N, vocab)
        picked_N = torch.where(here_N, self.picked_N - peak_N, 0.0)
        total_N = self.total_N * (self.peak_N - peak_N).exp_()
        if shards is not None:
            both = torch.stack((picked_N, total_N))
            distributed.all_reduce(both, group=shards.group)
            picked_N, total_N = both
        log_total_N = total_N.log()
        return log_total_N - picked_N, log_total_N + peak_N


def _position(column_N: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's place among ``width`` columns, a valid one in any case, and whether it lies there."""
    return column_N.clamp(0, width - 1), (column_N >= 0) & (column_N < width)


def _logits_to_gradient(
    logit_NC: torch.Tensor,
    logsumexp_N: torch.Tensor,
    column_N: torch.Tensor,
    grad_N: torch.Tensor,
    blocks: list[slice],
) -> None:
    """Replace the logits by their gradient ``grad · (softmax − onehot(label))``."""
    local_N, here_N = _position(column_N, logit_NC.shape[1])
    picked_N = logit_NC.gather(1, local_N[:, None])[:, 0]
    # The label's entry whole, and rounded once, after the others have been written.
    at_label_N = grad_N * ((picked_N - logsumexp_N).exp_() - here_N.to(grad_N.dtype))
    for rows in blocks:
        softmax_RC = (logit_NC[rows] - logsumexp_N[rows, None]).exp_()
        torch.mul(softmax_RC, grad_N[rows, None], out=logit_NC[rows])
    logit_NC.scatter_(1, local_N[:, None], at_label_N.to(logit_NC.dtype)[:, None])


class _Gradients:
    """The gradients of hidden, weight and bias that are asked for, built up chunk by chunk."""

    def __init__(
        self,
        needed: tuple[bool, ...],
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        options: _Options,
    ) -> None:
        self.hidden_NH, self.weight_VH, self.options = hidden_NH, weight_VH, options
        for_hidden, for_weight, for_bias = needed[:3]
        self.main_grad = options.main_grad if for_weight else None
        self.grad_weight_VH = torch.empty_like(weight_VH) if for_weight and self.main_grad is None else None
        self.grad_bias_V = torch.empty_like(bias_V) if bias_V is not None and for_bias else None
        # Two blocks, so that the first float32 one can go as soon as it is rounded.
        tokens, width = hidden_NH.shape
        self.rows = _slices(tokens, -(-tokens // 2)) if for_hidden else []
        self.dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        self.blocks = [hidden_NH.new_zeros(rows.stop - rows.start, width, dtype=self.dtype) for rows in self.rows]

    def add(self, grad_NC: torch.Tensor, columns: slice) -> None:
        """Take in the gradient of the logits of ``columns``."""
        for rows, block in zip(self.rows, self.blocks, strict=True):
            _add_product(block, grad_NC[rows], self.weight_VH[columns])
        if self.main_grad is not None:
            _add_product(self.main_grad.buffer_VH[columns], grad_NC.t(), self.hidden_NH)
        elif self.grad_weight_VH is not None:
            torch.mm(grad_NC.t(), self.hidden_NH, out=self.grad_weight_VH[columns])
        if self.grad_bias_V is not None:
            self.grad_bias_V[columns] = grad_NC.sum(dim=0, dtype=self.dtype)

    def finish(self, hidden: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients of hidden (of this rank's part), weight and bias."""
        grad_weight = self.grad_weight_VH if self.main_grad is None else self.main_grad.placeholder()
        return self._of_hidden(hidden), grad_weight, self.grad_bias_V

    def _of_hidden(self, hidden: torch.Tensor) -> torch.Tensor | None:
        if not self.blocks:
            return None
        for index in range(len(self.blocks)):
            self.blocks[index] = self.blocks[index].to(hidden.dtype)
        grad_NH = self.blocks[0] if len(self.blocks) == 1 else torch.cat(self.blocks)
        self.blocks.clear()
        shards = self.options.shards
        if shards is None:
            return grad_NH.view(hidden.shape)
        if shards.sequence_parallel:
            grad = hidden.new_empty(hidden.shape)
            distributed.reduce_scatter_tensor(grad, grad_NH.view(-1, *hidden.shape[1:]), group=shards.group)
            return grad
        distributed.all_reduce(grad_NH, group=shards.group)
        return grad_NH.view(hidden.shape)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, where the total may be wider than its operands."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # rounds nothing in between
    else:
        total += torch.mm(left, right)
