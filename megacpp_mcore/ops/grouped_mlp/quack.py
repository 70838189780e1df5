"""Routed experts by quack's grouped products (the package quack-kernels, written in NVIDIA's CuTe DSL), where it is installed.

They gather the tokens and fuse the epilogues, as the products of :mod:`megacpp_mcore.ops.grouped_mlp.triton` do; that module's
kernels still place the tokens and sum each token's rows. The first call compiles six kernels, some seconds each.

Legend: T tokens, E experts, K experts per token, R rows (T × K), D model width, F expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megacpp_mcore.ops import vendors
from megacpp_mcore.ops.grouped_mlp import reference, triton
from megacpp_mcore.ops.grouped_mlp.triton import Products, Rows
from megacpp_mcore.util.probe import ProbeResult

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_tanh": "gelu_tanh_approx"}
"""quack's names for the reference's activations."""

WIDTH = 224
"""Columns of a tile, where it divides a product's columns: at 896 on an H200, 13 % faster than quack's own choice, 192."""


class Side(NamedTuple):
    """An operand's rows, and where each expert's rows begin, followed by the end of the last: ``[E + 1]``."""

    values_RF: torch.Tensor
    start_E: torch.Tensor


@functools.cache
def _activate(activation: str) -> Callable[..., Any]:
    """Return a grouped product with two outputs: the product, and its activation times the row's probability."""
    act = vendors.entry(f"quack_{activation}")

    def both(acc: Any, prob: Any) -> Mapping[str, Any]:
        return {"D": acc, "a": act(acc) * prob}

    column = vendors.entry("quack_column")("prob")
    product: Callable[..., Any] = vendors.entry("quack_epilogue")(outputs=("a",), ops={"prob": column})(both)
    return product


@functools.cache
def _whole_tile() -> Any:
    tile = {"tile_m": 128, "tile_n": WIDTH, "cluster_m": 2, "cluster_n": 1}
    return vendors.entry("quack_tile")(**tile, pingpong=False, is_dynamic_persistent=False)


def _tile(columns: int) -> Any:
    """Return the tile of a product with this many columns; None: quack's own choice."""
    return None if columns % WIDTH else _whole_tile()


def _starts(rows: Rows) -> torch.Tensor:
    return torch.nn.functional.pad(rows.end_E, (1, 0))


def _hidden(x: torch.Tensor, rows: Rows, weights: Sequence[torch.Tensor], activation: str) -> tuple[tuple[torch.Tensor], Side]:
    (w1_EFD, _), start_E = weights, _starts(rows)
    h_RF = x.new_empty((x if rows.token_R is None else rows.token_R).shape[0], w1_EFD.shape[1])
    a_RF = torch.empty_like(h_RF)
    if h_RF.numel():
        _activate(activation)(
            x, w1_EFD.mT, None, out={"D": h_RF, "a": a_RF}, store_d=True, tuned=False, config=_tile(h_RF.shape[1]),
            cu_seqlens_m=start_E, A_idx=rows.token_R, prob=rows.prob_R,
        )  # fmt: skip
    return (h_RF,), Side(a_RF, start_E)


def _output(left: Side, weights: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    return _of_rows(left, weights[1].mT)


def _hidden_gradient(
    dy: torch.Tensor, rows: Rows, weights: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], activation: str
) -> tuple[Side, Side, torch.Tensor, Side]:
    (h_RF,), start_E = saved, _starts(rows)
    dh_RF, a_RF, dprob_R = vendors.entry("quack_backward")(
        dy, weights[1], PreAct=h_RF, activation=ACTIVATIONS[activation], colvec_scale=rows.prob_R, colvec_reduce=True,
        cu_seqlens_m=start_E, A_idx=rows.token_R, dynamic_scheduler=False, tuned=False, config=_tile(h_RF.shape[1]),
    )  # fmt: skip
    left = Side(dh_RF, start_E)
    return Side(a_RF, start_E), left, dprob_R.view(1, -1), left


def _input_gradient(left: Side, weights: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    return _of_rows(left, weights[0])


def _of_rows(left: Side, right: torch.Tensor) -> torch.Tensor:
    """Multiply rows by their experts' matrices."""
    product = left.values_RF.new_empty(left.values_RF.shape[0], right.shape[2])
    return _product(left.values_RF, right, product, cu_seqlens_m=left.start_E)


def _weight_gradient(
    x: torch.Tensor, rows: Rows, other: Side, *, tokens_left: bool, total: torch.Tensor | None
) -> torch.Tensor:
    E, (R, F), D = rows.end_E.shape[0], other.values_RF.shape, x.shape[1]
    if total is not None and total.data_ptr() % 16:  # its tiles are written by TMA
        return total.add_(_weight_gradient(x, rows, other, tokens_left=tokens_left, total=None))
    new = x.new_empty if R else x.new_zeros
    dw = new((E, D, F) if tokens_left else (E, F, D)) if total is None else total
    how = {"cu_seqlens_k": other.start_E, "A_idx": rows.token_R, "add_to_output": total is not None}
    _product(x.T, other.values_RF, dw if tokens_left else dw.mT, **how)
    return dw


def _product(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, **how: Any) -> torch.Tensor:
    if left.numel():
        vendors.entry("quack_product")(left, right, product, config=_tile(right.shape[-1]), **how)
    return product


QUACK = Products(8, triton.BF16.weights, _hidden, _output, _hidden_gradient, _input_gradient, _weight_gradient)

routed_mlp = functools.partial(triton.routed_mlp, products=QUACK)
"""The op with quack's products. It also raises BackendError where quack cannot be imported."""


@functools.cache
def probe() -> ProbeResult:
    """Return whether one call agrees with the reference: run and compared once per process."""
    if not (probe := vendors.installed("quack")).ok:
        return probe
    T, E, D, F = 96, 3, 128, 128

    def leaves() -> list[torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)
        shapes = ((T, D), 1.0), ((E, F, D), D**-0.5), ((E, D, F), F**-0.5)
        return [(torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16() for shape, scale in shapes]

    def call(routed: Callable[..., torch.Tensor], x_TD: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        token_T1 = torch.arange(T, device="cuda")[:, None]
        routing_TE = torch.arange(E, device="cuda") != token_T1 % E
        return routed(x_TD, routing_TE, (token_T1 + 1) / T * routing_TE, *weights, topk=E - 1)

    ours, truth = (functools.partial(call, routed) for routed in (routed_mlp, reference.routed_mlp))
    return vendors.tried("a call of quack's grouped products", ours, truth, leaves)
