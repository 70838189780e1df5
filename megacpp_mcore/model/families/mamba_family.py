"""M: the Mamba-3 mixer."""

from __future__ import annotations

import math
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
class Mamba3:
    """Mamba-3 mixer (arXiv 2603.15569; behaviour of mamba-ssm 2.3.2.post1 ``modules/mamba3.py``).

    Attributes:
        mimo_rank: rank R of the MIMO recurrence; 1 is SISO.
        chunk: tokens of a chunk in the reference, by which FLOPs are counted; the kernels use chunks of 64 / R.
        rope_fraction: fraction of the state that RoPE rotates.
        a_floor: the decay rate A is at most ``-a_floor``.
        out_norm: RMSNorm of each head between the scan and the output projection; False is the default of mamba-ssm's module,
            which writes more to the residual stream than all other layers together (docs/model.md).
        decay_activation: activation that makes the raw decay positive: ``softplus``, or ``heavy_tail`` as in newest upstream.
    """

    expand: int = 2
    head_dim: int = 64
    groups: int = 8
    state: int = 64
    mimo_rank: int = 4
    chunk: int = 16
    rope_fraction: float = 0.5
    a_floor: float = 1e-4
    out_norm: bool = True
    decay_activation: str = "softplus"

    def __post_init__(self) -> None:
        positive(self, "expand", "head_dim", "groups", "state", "mimo_rank", "chunk", "a_floor")
        if self.rope_fraction not in (0.5, 1.0):
            raise ModelError(f"Mamba3.rope_fraction is {self.rope_fraction}; expected 0.5 or 1.0")
        if self.decay_activation not in ("softplus", "heavy_tail"):
            raise ModelError(f"Mamba3.decay_activation is {self.decay_activation!r}; expected softplus or heavy_tail")
        divides("Mamba3.state", self.state, "4, for rotated pairs of half the state", 4, fixed=True)

    @property
    def angles(self) -> int:
        """Rotation angles per token: pairs of rotated state entries."""
        return int(self.state * self.rope_fraction) // 2


def inner_width(hidden_size: int, ssm: Mamba3) -> int:
    """Return the width of the mixer's inner stream."""
    return ssm.expand * hidden_size


def heads_of(hidden_size: int, ssm: Mamba3) -> int:
    """Return the number of heads."""
    return inner_width(hidden_size, ssm) // ssm.head_dim


def mamba_projections(tokens: int, hidden: int, heads: int, ssm: Mamba3) -> Work:
    """Count Mamba-3's input projections (z, x, B, C, step, decay, trapezoid, angles) and its output projection."""
    return product(tokens * hidden * (projected(hidden, ssm) + heads * ssm.head_dim))


def wide_width(hidden: int, ssm: Mamba3) -> int:
    """Return the width of the input projections of z, x, B and C."""
    return 2 * inner_width(hidden, ssm) + 2 * ssm.mimo_rank * ssm.groups * ssm.state


def wide_inputs(tokens: int, hidden: int, ssm: Mamba3, *, gradient: bool) -> Work:
    """Count the input projections of z, x, B and C; without ``gradient``, their backward pass has only the inputs' gradient."""
    total = product(tokens * hidden * wide_width(hidden, ssm))
    return total if gradient else Work(total.forward, total.backward // 2)


def mamba_scan(batch: int, sequence: int, heads: int, ssm: Mamba3) -> Work:
    """Count Mamba-3's chunked scan, and MIMO's sum over ranks at its end.

    A chunk of L tokens has M = L·R rows. Per head: ``C Bᵀ`` [M, M] over the state, its product with the values, the chunk's
    own contribution to the state, and the incoming state's contribution to each row.
    """
    rows, width = ssm.chunk * ssm.mimo_rank, ssm.head_dim
    chunks = batch * math.ceil(sequence / ssm.chunk)
    per_chunk = rows * rows * (ssm.state + width) + 2 * rows * ssm.state * width
    mixed = batch * sequence * ssm.mimo_rank * width if ssm.mimo_rank > 1 else 0
    return product(heads * (chunks * per_chunk + mixed))


def _parameters(shape: Shape, _: str | None, ssm: Mamba3) -> Count:
    hidden, inner, heads = shape.hidden_size, inner_width(shape.hidden_size, ssm), heads_of(shape.hidden_size, ssm)
    width = wide_width(hidden, ssm) + 3 * heads
    per_head = 2 * heads * ssm.mimo_rank * ssm.state + 2 * heads
    per_head += inner if ssm.out_norm else 0
    mimo = 3 * heads * ssm.mimo_rank * ssm.head_dim if ssm.mimo_rank > 1 else 0
    return Count(
        tensor=hidden * width + per_head + mimo + inner * hidden,
        whole=hidden + hidden * ssm.angles + 2 * ssm.state,
    )


def _work(shape: Shape, _: str | None, rows: Batch, ssm: Mamba3) -> dict[str, Work]:
    heads = heads_of(shape.hidden_size, ssm)
    return {
        "mamba_projections": mamba_projections(rows.tokens, shape.hidden_size, heads, ssm),
        "mamba_scan": mamba_scan(rows.rows, rows.length, heads, ssm),
    }


def projected(hidden_size: int, ssm: Mamba3) -> int:
    """Return the width of the input projections: z, x, B, C, step, decay, trapezoid, angles."""
    heads = heads_of(hidden_size, ssm)
    return wide_width(hidden_size, ssm) + 3 * heads + ssm.angles


def _kept(shape: Shape, _: str | None, ssm: Mamba3) -> tuple[int, int]:
    """Count the projections, the output, and a state every 128 tokens."""
    inner = inner_width(shape.hidden_size, ssm)
    return 2 * (projected(shape.hidden_size, ssm) + inner + inner * ssm.state // 128), 0


def _check(shape: Shape, ssm: Mamba3) -> None:
    divides(f"{shape.name}: Mamba-3 inner width", inner_width(shape.hidden_size, ssm), "Mamba3.head_dim", ssm.head_dim)
    divides(f"{shape.name}: Mamba-3 heads", heads_of(shape.hidden_size, ssm), "Mamba3.groups", ssm.groups)


def _check_layout(shape: Shape, tensor: int, _: int, ssm: Mamba3) -> None:
    divides(f"{shape.name}: Mamba-3 heads", heads_of(shape.hidden_size, ssm), "tensor parallelism", tensor)
    divides(f"{shape.name}: Mamba-3 groups", ssm.groups, "tensor parallelism", tensor)


def _no_context(shape: Shape, tensor: int, context: int, ssm: Mamba3) -> str:
    if context % (ssm.groups // tensor) == 0:  # each rank has heads of one group
        return not_shared("Mamba-3 heads", heads_of(shape.hidden_size, ssm), tensor, context)
    return not_shared("Mamba-3 groups", ssm.groups, tensor, context)


def _scoped(shape: Shape, _: str | None, tokens: int, ssm: Mamba3) -> tuple[str, Work]:
    """Count what is outside of a scope: all but the output projection."""
    heads = heads_of(shape.hidden_size, ssm)
    whole = mamba_projections(tokens, shape.hidden_size, heads, ssm)
    output = product(tokens * shape.hidden_size * heads * ssm.head_dim)
    return "mamba_projections", Work(whole.forward - output.forward, whole.backward - output.backward)


def _card(shape: Shape, ssm: Mamba3) -> dict[str, str]:
    return {
        "Mamba-3 heads": f"{heads_of(shape.hidden_size, ssm)} × {ssm.head_dim}",
        "Mamba-3 groups, state, rank": f"{ssm.groups}, {ssm.state}, {ssm.mimo_rank}",
    }


_WHY = "Mamba-3 takes the slot of Mamba-2, as a TransformerLayer: stock has no Mamba-3 mixer"
MAMBA = Family(
    letter="M",
    name="Mamba-3",
    part="M Mamba-3",
    group="mamba",
    fields=("mamba3",),
    slots=(Slot("M", "mamba_layer", "Mamba-2", False, _WHY),),
    parameters=_parameters,
    works=("mamba_projections", "mamba_scan"),
    kept=_kept,
    work=_work,
    check=_check,
    check_layout=_check_layout,
    no_context=_no_context,
    in_fp32="states of Mamba-3",
    recompute="m",
    recomputed=("mamba_projections", "mamba_scan"),
    fp8="blanket",
    scoped=_scoped,
    card=_card,
    papers=(("M", "state-space mixer with several inputs and outputs (MIMO)", "Mamba-3", "2603.15569"),),
)
