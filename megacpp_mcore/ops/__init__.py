"""The ops as functions of plain PyTorch tensors: they need torch, and Triton on a GPU, but not Megatron.

Each function takes the fastest backend that supports the call: kernels on a GPU, plain PyTorch elsewhere. ``backend`` picks
another (``megacpp-mcore doctor --backends`` lists them). Under ``torch.use_deterministic_algorithms`` only backends with
bitwise reproducible gradients run. The letters after ``_`` in a tensor's name are its axes; inputs may be strided, so
``x.transpose(0, 1)`` turns batch-first tensors into ``[S, B, …]`` without a copy.

Legend: S sequence, T keys, B batch, H heads, P head width, G groups, R rank, N state of Mamba-3 or selected keys, A angles,
K width of queries and keys, V of values (of the loss: vocabulary), D model width, E experts, F expert width.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megacpp_mcore.backends import AUTO, Dispatcher

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megacpp_mcore.ops.m2rnn.reference import M2RNNState
    from megacpp_mcore.ops.mamba3.reference import Mamba3State

__all__ = ["index_select", "linear_cross_entropy", "m2rnn", "mamba3", "rms_norm", "routed_mlp", "sparse_mla"]


class _Named[**Given, Returned]:
    """A function that shares its name with a subpackage, and still has the subpackage's modules as attributes.

    ``from megacpp_mcore.ops.mamba3 import triton`` needs no attribute; ``import megacpp_mcore.ops.mamba3.triton as kernels``
    reads ``triton`` from whatever ``megacpp_mcore.ops.mamba3`` is bound to.
    """

    def __init__(self, function: Callable[Given, Returned]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        # Imported first: importing the subpackage binds its name in this module, once.
        self._package = importlib.import_module(f"{__name__}.{function.__name__}")

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Returned:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)

    def __reduce__(self) -> str:
        return self.__name__  # copied and pickled by name, like a function


@_Named
def mamba3(
    x_SBHP: Tensor, z_SBHP: Tensor, b_SBGRN: Tensor, c_SBGRN: Tensor, dd_dt_SBH: Tensor, dd_A_SBH: Tensor,
    trap_SBH: Tensor, angles_SBA: Tensor, *, chunk_size: int | None = None, A_floor: float = 1e-4, eps: float = 1e-5,
    seq_idx: Tensor | None = None, initial_state: Mamba3State | None = None, return_final_state: bool = False,
    backend: str = AUTO, **weights: Any,
) -> tuple[Tensor, Mamba3State | None]:  # fmt: skip
    """Run a Mamba-3 mixer between its projections: norms, rotation, scan, gate, ranks, norm of each head.

    Differentiable in all tensors. Kernels: bfloat16 and float16, P 64, N 64 or 128, R 1, 2 or 4; they are deterministic.

    Args:
        x_SBHP, z_SBHP, b_SBGRN, c_SBGRN, dd_dt_SBH, dd_A_SBH, trap_SBH, angles_SBA: parts of the input projection.
        chunk_size: tokens of a chunk in plain PyTorch; None: 64 / R.
        A_floor: the smallest decay rate.
        eps: of the norms.
        seq_idx: ``[B, S]``, the document number of each token; no state crosses documents. None: one document.
        initial_state: the final state of the call that this one continues.
        return_final_state: whether to return the state after the last token.
        backend: a name, or ``auto``.
        weights: ``dt_bias``, ``D``, ``b_bias``, ``c_bias``, ``b_norm_weight``, ``c_norm_weight``; for R > 1 also ``mimo_x``,
            ``mimo_z``, ``mimo_o``; optionally ``out_norm_weight`` and ``activation``. Shapes: see
            :func:`megacpp_mcore.ops.mamba3.reference.mamba3`.

    Returns:
        ``(out_SBHP, state)``: contiguous, in the dtype of ``x_SBHP``; the state, or None.

    Raises:
        ModelError: shapes or dtypes do not fit.
        BackendError: the named backend cannot run this.
    """
    rank, state = b_SBGRN.shape[-2:]
    sizes = {"head_dim": x_SBHP.shape[-1], "mimo_rank": rank, "state": state}
    run = backend_of("mamba3", backend, x_SBHP, seq_idx, **sizes)
    out_and_state: tuple[Tensor, Mamba3State | None] = run(
        x_SBHP, z_SBHP, b_SBGRN, c_SBGRN, dd_dt_SBH, dd_A_SBH, trap_SBH, angles_SBA, **weights,
        chunk_size=chunk_size or max(1, 64 // rank), A_floor=A_floor, eps=eps, seq_idx=seq_idx, initial_state=initial_state,
        return_final_state=return_final_state,
    )  # fmt: skip
    return out_and_state


@_Named
def m2rnn(
    q_SBK: Tensor, k_SBK: Tensor, v_SBHV: Tensor, g_SBHV: Tensor, x_f_SBH: Tensor, *, eps: float = 1e-5,
    checkpoint_every: int = 64, seq_idx: Tensor | None = None, initial_state: M2RNNState | None = None,
    return_final_state: bool = False, backend: str = AUTO, **weights: Tensor,
) -> tuple[Tensor, M2RNNState | None]:  # fmt: skip
    """Run an M²RNN mixer between its projections: convolutions, recurrence with a matrix state, gate, norm.

    Differentiable in all tensors. Kernels: bfloat16, K 64, V 16; they are deterministic.

    Args:
        q_SBK, k_SBK, v_SBHV, g_SBHV, x_f_SBH: parts of the input projection; all heads share queries and keys.
        eps: of the norm.
        checkpoint_every: tokens between two states saved for the backward pass.
        seq_idx, initial_state, return_final_state, backend: as for :func:`mamba3`.
        weights: ``qk_conv_weight``, ``qk_conv_bias``, ``v_conv_weight``, ``v_conv_bias``, ``W``, ``A_log``, ``dt_bias``, ``D``,
            ``norm_weight``. Shapes: see :func:`megacpp_mcore.ops.m2rnn.reference.m2rnn`.

    Returns:
        ``(out [S, B, H·V], state)``: contiguous, in the dtype of ``v_SBHV``; the state, or None.

    Raises:
        ModelError: shapes or dtypes do not fit.
        BackendError: the named backend cannot run this.
    """
    heads, width = v_SBHV.shape[2:]
    run = backend_of("m2rnn", backend, v_SBHV, seq_idx, key_dim=q_SBK.shape[-1], value_dim=width)
    out_and_state: tuple[Tensor, M2RNNState | None] = run(
        q_SBK, k_SBK, v_SBHV, g_SBHV, x_f_SBH, **weights, eps=eps, norm_width=heads * width, seq_idx=seq_idx,
        initial_state=initial_state, return_final_state=return_final_state, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    return out_and_state


@_Named
def sparse_mla(
    q_SBHK: Tensor, kv_TBK: Tensor, index_BSN: Tensor, *, softmax_scale: float, value_dim: int, backend: str = AUTO
) -> Tensor:
    """Attend to the selected keys only, in the absorbed multi-query form of MLA.

    Differentiable in ``q_SBHK`` and ``kv_TBK``. Kernels: bfloat16 and float16, (K, V) of (128, 64) or (576, 512).

    Args:
        q_SBHK: absorbed queries with their rotary part.
        kv_TBK: latent keys with their rotary part, one for all heads; their first ``value_dim`` columns are the values.
        index_BSN: int32, the keys of each query, as :func:`index_select` returns them; -1: none. No causal mask is added.
        softmax_scale: factor on q·k; it depends on the head width before absorption, so there is no default.
        value_dim: V.
        backend: a name, or ``auto``.

    Returns:
        ``out_SBHV``, in the dtype of ``q_SBHK``.

    Raises:
        ModelError: shapes or dtypes do not fit.
        BackendError: the named backend cannot run this.
    """
    run = backend_of("sparse_mla", backend, q_SBHK, qk_dim=q_SBHK.shape[-1], v_dim=value_dim)
    out_SBHV: Tensor = run(q_SBHK, kv_TBK, index_BSN, softmax_scale=softmax_scale, value_dim=value_dim)
    return out_SBHV


def index_select(
    q_SBHK: Tensor, k_SBK: Tensor, w_SBH: Tensor, topk: int, seq_idx_BS: Tensor | None = None, *, backend: str = AUTO
) -> Tensor:
    """Select the keys of each query by a DSA indexer's scores ``Σ_h w · relu(q·k)``, up to the query itself.

    The indices have no gradient: :func:`megacpp_mcore.ops.indexer.reference.indexer_grad` trains the indexer on the attention
    to the keys it selected. Deterministic, ties included: the lower key wins. Kernels: bfloat16 and float16, K 64.

    Args:
        q_SBHK: indexer queries, rotated.
        k_SBK: indexer keys, one for all heads, rotated.
        w_SBH: head weights, scale included.
        topk: keys of each query.
        seq_idx_BS: int32, the document number of each token; keys are limited to the query's document. None: one document.
        backend: a name, or ``auto``.

    Returns:
        ``index_BSN``, int32, ascending, then -1; N is the smaller of ``topk`` and S.

    Raises:
        ModelError: shapes or dtypes do not fit.
        BackendError: the named backend cannot run this.
    """
    run = backend_of("indexer", backend, q_SBHK, seq_idx_BS, dim=q_SBHK.shape[-1], heads=q_SBHK.shape[-2])
    index_BSN: Tensor = run(q_SBHK, k_SBK, w_SBH, topk, seq_idx_BS)
    return index_BSN


def routed_mlp(
    x_TD: Tensor, routing_TE: Tensor, probs_TE: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, *, topk: int,
    activation: str = "gelu", backend: str = AUTO,
) -> Tensor:  # fmt: skip
    """Run every token (T of them) through its experts: ``Σ_e (prob_e · act(x w1_eᵀ)) w2_eᵀ``.

    Differentiable in ``x_TD``, ``probs_TE`` and the weights; no token is dropped, and there is no host sync. Kernels:
    bfloat16, D and F multiples of 8; they are deterministic.

    Args:
        x_TD: tokens in any order.
        routing_TE: bool, the ``topk`` experts of each token.
        probs_TE: their probabilities; other entries are not read, and get a gradient of 0.
        w1_EFD, w2_EDF: the two matrices of each expert.
        topk: experts of a token.
        activation: ``gelu`` (erf) or ``gelu_tanh``.
        backend: a name, or ``auto``.

    Returns:
        ``out_TD``, in the dtype of ``x_TD``.

    Raises:
        ModelError: shapes or dtypes do not fit, or a token does not have ``topk`` experts.
        BackendError: the named backend cannot run this.
    """
    experts, ffn, hidden = w1_EFD.shape
    run = backend_of("routed_mlp", backend, x_TD, hidden=hidden, ffn=ffn, experts=experts, expert_ranks=1)
    out_TD: Tensor = run(x_TD, routing_TE, probs_TE, w1_EFD, w2_EDF, topk=topk, activation=activation)
    return out_TD


@_Named
def linear_cross_entropy(
    hidden: Tensor, weight_VD: Tensor, label: Tensor, *, bias_V: Tensor | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Compute ``cross_entropy(logit_scale · (hidden weightᵀ + bias), label)`` with the logits of one chunk of tokens at a time.

    Differentiable once, in ``hidden``, weight and bias; deterministic. There is one backend, with Triton kernels on a GPU.
    ``mean`` and ``sum`` compute the gradients in the forward pass, three matrix products; ``none`` needs four.

    Args:
        hidden: ``[…, D]``.
        weight_VD: the output projection, in the dtype of ``hidden``.
        label: int64 ``[…]``.
        bias_V: added to the logits.
        logit_scale: factor on the logits.
        ignore_index: a token with this label has loss 0 and no gradient, and is not counted by ``mean``.
        reduction: ``mean`` over the tokens that count (NaN without any, as in PyTorch), ``sum``, or ``none``.

    Returns:
        The loss, float32 (float64 for such inputs): a scalar, or ``[…]`` for ``none``.

    Raises:
        ModelError: shapes or dtypes do not fit; or, on the CPU, a label is neither in the vocabulary nor ``ignore_index``. On
            a GPU that is a device-side assertion, as in PyTorch.
    """
    from megacpp_mcore.ops.linear_cross_entropy.reduced import chunked

    return chunked(
        hidden, weight_VD, label, bias_V=bias_V, logit_scale=logit_scale, ignore_index=ignore_index, reduction=reduction
    )


@_Named
def rms_norm(x: Tensor, weight_D: Tensor, eps: float = 1e-5, *, backend: str = AUTO) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm to the input of a residual branch: ``(x / sqrt(mean(x²) + eps) · weight, x)``.

    Use the returned ``x`` as the residual: one kernel then adds both gradients of ``x``. Differentiable in both inputs;
    deterministic. Kernels: bfloat16, float16 and float32, D up to 8192.

    Args:
        x: ``[…, D]``.
        weight_D: scale of each channel.
        eps: added to the mean square.
        backend: a name, or ``auto``.

    Raises:
        ModelError: shapes or dtypes do not fit.
        BackendError: the named backend cannot run this.
    """
    normed_and_sum: tuple[Tensor, Tensor] = backend_of("rms_norm", backend, x, hidden=x.shape[-1])(x, weight_D, eps)
    return normed_and_sum


def backend_of(op: str, name: str, like: Tensor, seq_idx: Tensor | None = None, **sizes: int) -> Callable[..., Any]:
    """Return the function that runs ``op`` on tensors such as ``like``."""
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    return _chosen(op, name, like.device.type, like.dtype, seq_idx is not None, deterministic, tuple(sizes.items()))


@functools.cache
def _chosen(
    op: str, name: str, device: str, dtype: torch.dtype, packed: bool, deterministic: bool, sizes: tuple[tuple[str, int], ...]
) -> Callable[..., Any]:  # fmt: skip
    needs: dict[str, Any] = {"device": device, "dtype": dtype, "packed": packed, "deterministic": deterministic}
    return _dispatcher().request(op, name, **needs, **dict(sizes)).fn


@functools.cache
def _dispatcher() -> Dispatcher:
    return Dispatcher()
