"""R: the M²RNN mixer."""

from __future__ import annotations

from dataclasses import dataclass

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.families.base import (
    Batch,
    Count,
    Family,
    Shape,
    Slot,
    Work,
    divides,
    not_shared,
    positive,
    product,
)


@dataclass(frozen=True, kw_only=True)
class M2RNN:
    """M²RNN mixer (arXiv 2603.14360): a matrix-valued non-linear recurrence with one shared query/key head.

    Attributes:
        heads: None uses ``hidden_size // 80`` rounded down to a multiple of 4.
        checkpoint_every: tokens between states saved for the backward pass.
    """

    key_dim: int = 64
    value_dim: int = 16
    conv_kernel: int = 4
    heads: int | None = None
    checkpoint_every: int = 64

    def __post_init__(self) -> None:
        positive(self, "key_dim", "value_dim", "conv_kernel", "checkpoint_every")
        if self.heads is not None:
            positive(self, "heads")


def heads_of(hidden_size: int, rnn: M2RNN) -> int:
    """Return the number of heads."""
    return rnn.heads if rnn.heads is not None else hidden_size // 80 // 4 * 4


def m2rnn_projections(tokens: int, hidden: int, heads: int, key_dim: int, value_dim: int) -> Work:
    """Count M²RNN's input projections (one q and k, per head v, forget and output gate) and its output projection."""
    return product(tokens * hidden * (2 * key_dim + heads * (2 * value_dim + 1) + heads * value_dim))


def m2rnn_recurrence(tokens: int, heads: int, key_dim: int, value_dim: int) -> Work:
    """Count M²RNN's recurrence: ``h W`` and ``qᵀ h`` of each token; ``k vᵀ`` is an outer product without a sum."""
    return product(tokens * heads * key_dim * value_dim * (value_dim + 1))


def depthwise_convolution(tokens: int, channels: int, kernel: int) -> Work:
    """Count a causal depthwise convolution."""
    return product(tokens * channels * kernel)


def _parameters(shape: Shape, _: str | None, rnn: M2RNN) -> Count:
    hidden, heads = shape.hidden_size, heads_of(shape.hidden_size, rnn)
    values, shared = heads * rnn.value_dim, 2 * rnn.key_dim
    per_head = heads * (rnn.value_dim**2 + rnn.value_dim + 2)
    return Count(
        tensor=hidden * (2 * values + heads) + values * (rnn.conv_kernel + 1) + per_head + values * (1 + hidden),
        whole=hidden + shared * (hidden + rnn.conv_kernel + 1),
    )


def _work(shape: Shape, _: str | None, rows: Batch, rnn: M2RNN) -> dict[str, Work]:
    tokens, hidden, heads = rows.tokens, shape.hidden_size, heads_of(shape.hidden_size, rnn)
    return {
        "recurrent_projections": m2rnn_projections(tokens, hidden, heads, rnn.key_dim, rnn.value_dim),
        "convolution": depthwise_convolution(tokens, 2 * rnn.key_dim + heads * rnn.value_dim, rnn.conv_kernel),
        "recurrence": m2rnn_recurrence(tokens, heads, rnn.key_dim, rnn.value_dim),
    }


def _kept(shape: Shape, _: str | None, rnn: M2RNN) -> tuple[int, int]:
    """Count the projections, the convolved rows, two outputs, and a state in 32 bits every 64 tokens."""
    heads = heads_of(shape.hidden_size, rnn)
    values, shared = heads * rnn.value_dim, 2 * rnn.key_dim
    return 2 * (2 * shared + 5 * values + heads) + values * rnn.key_dim // 16, 0


def _check(shape: Shape, rnn: M2RNN) -> None:
    if heads_of(shape.hidden_size, rnn) < 1:
        raise ModelError(
            f"{shape.name}: hidden_size {shape.hidden_size} gives no M²RNN head (hidden_size // 80, down to a "
            "multiple of 4); set m2rnn.heads"
        )


def _check_layout(shape: Shape, tensor: int, _: int, rnn: M2RNN) -> None:
    divides(f"{shape.name}: M²RNN heads", heads_of(shape.hidden_size, rnn), "tensor parallelism", tensor)


def _no_context(shape: Shape, tensor: int, context: int, rnn: M2RNN) -> str:
    return not_shared("M²RNN heads", heads_of(shape.hidden_size, rnn), tensor, context)


def _card(shape: Shape, rnn: M2RNN) -> dict[str, str]:
    return {"M²RNN heads, keys, values": f"{heads_of(shape.hidden_size, rnn)}, {rnn.key_dim}, {rnn.value_dim}"}


_WHY = "M²RNN takes the slot of the gated delta net, as a TransformerLayer: stock has no M²RNN, and no symbol is free"
RECURRENT = Family(
    letter="R",
    name="M²RNN recurrent tail",
    part="R M²RNN",
    group="recurrent",
    fields=("m2rnn",),
    slots=(Slot("G", "gdn_layer", "gated delta net", False, _WHY),),
    parameters=_parameters,
    works=("recurrent_projections", "convolution", "recurrence"),
    work=_work,
    check=_check,
    check_layout=_check_layout,
    no_context=_no_context,
    in_fp32="states of M²RNN",
    without_tf32="M²RNN's recurrence",
    kept=_kept,
    recompute="r",
    recomputed=("recurrent_projections", "convolution", "recurrence"),
    card=_card,
    papers=(("R", "recurrence with a matrix state, not linear in it", "M²RNN", "2603.14360"),),
)
