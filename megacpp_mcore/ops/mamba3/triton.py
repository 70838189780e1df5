"""Mamba-3 by Triton kernels on a GPU, forward and backward: :func:`megacpp_mcore.ops.mamba3.reference.mamba3`.

Legend: B batch, S sequence, H heads, P head dim, G groups, N state, R MIMO rank, A rotation angles.

The sequence is split into segments. A first pass rotates B and C and computes each segment's contribution to the state, a
short second one passes the state from segment to segment, and a third scans all segments in parallel from the states before
them. Backward does the same in reverse for the gradient of the state. Saved for it: the inputs, the states and, at rank 1, the
tables and the gate's input; the rest is recomputed, per head, in the dtype of ``x``. :func:`mamba3_keep_scan` also saves those
two at other ranks, :func:`mamba3_keep_all` keys and queries as well. Long rows (:data:`BLOCK_BYTES`) are processed
in blocks of time, which adds float32 rounding at their boundaries. No sum depends on the order in which programs run: the
same inputs give the same bits, regardless of what is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from megacpp_mcore.backends import probes
from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import expect_shape, one_dtype
from megacpp_mcore.ops.mamba3 import kernels
from megacpp_mcore.ops.mamba3.reference import (
    Activation,
    Mamba3State,
    Pairing,
    check_mixer,
    mamba3_decay_and_gates,
    mamba3_rotate,
)
from megacpp_mcore.ops.packed.documents import check_seq_idx
from megacpp_mcore.ops.slices import aligned, eighths, empty_gradients, split_rows
from megacpp_mcore.ops.triton_launch import DIRECT, launch, options
from megacpp_mcore.util.nearest import nearest_number

ROWS = 64
"""Rows of a chunk, tokens × ranks: as many as one warp group's tensor-core product has."""

RANKS = (1, 2, 4)
"""Tested MIMO ranks. At 2 some kernels spill registers, up to 48 bytes at state 64 and 128 at 128, but the reference
takes 40 times as long; at 8 and 16 other kernels spill."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported dtypes; the last is for tests: it is slow."""

SEGMENT = 128
"""Minimum tokens between two stored states with several ranks; no segment is shorter than a chunk."""

SCRATCH_BYTES = 2**29
"""Maximum bytes of the keys in the backward pass, and of each of three more tensors, unless one batch row needs more."""

BLOCK_BYTES = 2**29
"""Maximum bytes of one batch row's keys: longer rows are computed in blocks of time, with state passing between them."""

COLUMNS = 32
"""Maximum columns of the state per program of ``rotate_bwd``, which holds its sums over heads in registers."""

HEADS = 16
"""Maximum heads of a group per program of ``rotate_bwd``."""


Keep = Literal["inputs", "scan", "all"]
"""What MIMO saves for backward: inputs and states; with ``scan`` also the tables and the gate's input; or everything."""


@dataclass(frozen=True)
class Plan:
    """Sizes of one call, and what is derived from them."""

    S: int
    B: int
    H: int
    P: int
    G: int
    R: int
    N: int
    A: int
    mimo: bool
    norm: bool
    packed: bool
    heavy: bool
    A_floor: float
    eps: float
    keep: Keep = "inputs"

    @cached_property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return ROWS // self.R

    @cached_property
    def segment(self) -> int:
        """Tokens of a segment; at rank 1 one chunk, as its state is no larger than its keys."""
        return self.chunk if self.R == 1 else max(SEGMENT, self.chunk)

    @cached_property
    def segments(self) -> int:
        """Number of segments."""
        return -(-self.S // self.segment)

    @cached_property
    def padded(self) -> int:
        """S, rounded up to whole segments."""
        return self.segments * self.segment

    @cached_property
    def planes(self) -> int:
        """A, rounded up to a power of two."""
        return triton.next_power_of_2(self.A)

    @cached_property
    def grid(self) -> tuple[int, int, int]:
        """One program per head and segment."""
        return self.H, self.segments, self.B

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """Compile-time arguments of kernels, by name."""
        return {name: getattr(self, name) for name in "HGRPNA"} | {
            "AP": self.planes,
            "PN": self.P * self.N,
            "L": self.chunk,
            "T": self.segment,
            "CHUNKS": self.segment // self.chunk,
            "NSEG": self.segments,
            "MIMO": self.mimo,
            "NORM": self.norm,
            "PACKED": self.packed,
            "HEAVY": self.heavy,
            "EVEN": self.S % self.chunk == 0 and self.padded == self.S,
            "COLUMNS": min(self.N, COLUMNS),
            "PARTS": self.parts,
            "SHARES": self.shares,
        }

    @property
    def saves_tables(self) -> bool:
        """Whether the tables and the gate's input are saved for backward: at rank 1 they are no larger than the output."""
        return self.R == 1 or self.keep != "inputs"

    @property
    def saves_rows(self) -> bool:
        """Whether keys and queries are saved, too; at rank 1 backward recomputes them in a pass that it needs anyway."""
        return self.R > 1 and self.keep == "all"

    @property
    def batches(self) -> list[slice]:
        """Slices of batch rows that the backward pass processes at a time."""
        rows = max(1, SCRATCH_BYTES // (2 * self.H * self.padded * self.R * max(self.N, self.P)))
        return [slice(first, min(first + rows, self.B)) for first in range(0, self.B, rows)]

    @property
    def block(self) -> int:
        """Tokens of a block of time: all tokens, or equal blocks of whole segments."""
        most = BLOCK_BYTES // (2 * self.H * self.R * max(self.N, self.P) * self.segment)
        return -(-self.segments // -(-self.segments // max(1, most))) * self.segment

    @cached_property
    def part_sizes(self) -> list[int]:
        """Sizes of each segment's partial gradients of dt_bias, D, mimo_x, mimo_z, mimo_o and the output's norm."""
        mix = self.H * self.R * self.P if self.mimo else 0
        return [self.H, self.H, mix, mix, mix, self.H * self.P if self.norm else 0]

    @cached_property
    def parts(self) -> int:
        """Programs of ``rotate_bwd`` that share the state axis of a chunk."""
        return -(-self.N // COLUMNS)

    @cached_property
    def shares(self) -> int:
        """Programs of ``rotate_bwd`` that share a group's heads, in equal parts."""
        heads = self.H // self.G
        return next(shares for shares in range(-(-heads // HEADS), heads + 1) if heads % shares == 0)

    @property
    def key_parts(self) -> tuple[dict[str, bool], ...]:
        """What each launch of ``chunk_scan_bwd_keys`` computes: at state 128, and with newer versions of Triton, registers
        suffice for only half of it."""
        if self.R == 1 or (DIRECT and self.N <= 64):
            return ({"KEYS": True, "VALUES": True, "QUERIES": self.R == 1},)
        return ({"KEYS": True, "VALUES": False, "QUERIES": False}, {"KEYS": False, "VALUES": True, "QUERIES": False})

    def options(self, kernel: str) -> dict[str, Any]:
        """Launch options of a kernel."""
        tuned = {"num_warps": 4, "num_stages": 1}
        if kernel == "rotate_bwd":
            tuned["num_warps"] = 1  # its sums stay in a warp
        elif kernel in ("angle_totals", "tables_fwd", "tables_bwd"):
            tuned["num_warps"] = max(1, self.segment // 32)  # one token per thread
        elif kernel == "chunk_state_fwd" and self.R > 1:
            # Three programs per multiprocessor, or two.
            tuned |= {"maxnreg": 168} if self.N <= 64 else {"num_warps": 8, "maxnreg": 128}
        elif kernel == "gate_bwd" and self.R != 2:
            tuned["maxnreg"] = 96 if self.norm else 80  # five programs per multiprocessor, or six
        elif kernel in ("chunk_scan_fwd", "chunk_scan_bwd_queries", "chunk_scan_bwd_keys"):
            tuned["num_stages"] = 2  # prefetch the next chunk's rows
            if (kernel == "chunk_scan_bwd_keys" and self.R == 1) or (
                kernel != "chunk_scan_bwd_keys" and self.N <= 64 and self.R == 4
            ):
                tuned["maxnreg"] = 168  # three programs per multiprocessor; in the other cases it would spill
        return options(f"{kernel}, {self.N}", tuned, probes.arch())

    @cached_property
    def constants(self) -> dict[str, dict[str, Any]]:
        """Per kernel, the compile-time arguments that are sizes, and the launch options."""
        names = {name: kernel.fn.__annotations__ for name, kernel in vars(kernels).items() if hasattr(kernel, "fn")}
        return {
            kernel: {name: self.sizes[name] for name in taken if name in self.sizes} | self.options(kernel)
            for kernel, taken in names.items()
        }

    def launch(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **choices: Any) -> None:
        """Launch ``kernel`` with sizes and ``choices`` as its compile-time arguments."""
        launch(kernel, grid, *arguments, **(self.constants[kernel.__name__] | choices))


_plan = lru_cache(maxsize=128)(Plan)
"""Plans are cached: one per set of sizes."""


class _Parameters(NamedTuple):
    """Parameters of the scan, with an interleaved state; in the dtype of the tables, except D (float32) and the weight of
    the output norm, if any (its own dtype); ``biases`` [2, H, R, N] are those of B and C."""

    biases: torch.Tensor
    mimo_x: torch.Tensor
    mimo_z: torch.Tensor
    mimo_o: torch.Tensor
    D: torch.Tensor
    out_norm: torch.Tensor | None


class _Tables(NamedTuple):
    """The tables of :mod:`kernels`; ``normed`` [2, B, G, R, SP, N] are B and C, normed."""

    normed: torch.Tensor
    la: torch.Tensor
    w: torch.Tensor
    gamma: torch.Tensor
    cos_sin: torch.Tensor
    theta_BHA: torch.Tensor


def mamba3(
    x_SBHP: torch.Tensor,
    z_SBHP: torch.Tensor,
    b_SBGRN: torch.Tensor,
    c_SBGRN: torch.Tensor,
    dd_dt_SBH: torch.Tensor,
    dd_A_SBH: torch.Tensor,
    trap_SBH: torch.Tensor,
    angles_SBA: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    D: torch.Tensor,
    b_bias: torch.Tensor,
    c_bias: torch.Tensor,
    b_norm_weight: torch.Tensor,
    c_norm_weight: torch.Tensor,
    mimo_x: torch.Tensor | None = None,
    mimo_z: torch.Tensor | None = None,
    mimo_o: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    chunk_size: int,
    A_floor: float,
    eps: float,
    activation: Activation = "softplus",
    seq_idx: torch.Tensor | None = None,
    initial_state: Mamba3State | None = None,
    return_final_state: bool = False,
    keep: Keep = "inputs",
) -> tuple[torch.Tensor, Mamba3State | None]:
    """Compute as the reference's ``mamba3``, with its arguments and results; the kernels choose the chunk size.

    The first eight inputs have one dtype, bfloat16 or float16 (float32 in tests of the kernels), and may be strided views;
    sums, decays, angles and the state inside a segment are float32, operands of matrix products have the inputs' dtype.

    Raises:
        ModelError: shapes do not fit, or the kernels do not support a size or dtype.
    """
    del chunk_size
    check_mixer(
        x_SBHP, z_SBHP, b_SBGRN, c_SBGRN, b_bias, c_bias, b_norm_weight, c_norm_weight, D, mimo_x, mimo_z, mimo_o,
        out_norm_weight,
    )  # fmt: skip
    S, B, H, P = x_SBHP.shape
    expect_shape("Mamba-3", "dt_bias", dt_bias, "H", (H,))
    if seq_idx is not None:
        check_seq_idx(seq_idx, batch=B, rows=S)
    G, R, N = b_SBGRN.shape[2:]
    A = angles_SBA.shape[-1]
    plan = _plan(
        S, B, H, P, G, R, N, A, mimo_x is not None, out_norm_weight is not None, seq_idx is not None,
        activation == "heavy_tail", A_floor, eps, keep,
    )  # fmt: skip
    rows = (x_SBHP, z_SBHP, b_SBGRN, c_SBGRN, dd_dt_SBH, dd_A_SBH, trap_SBH, angles_SBA)
    _check_kernels(plan, activation, *rows)
    if plan.block < S:
        how: dict[str, Any] = {
            "dt_bias": dt_bias, "D": D, "b_bias": b_bias, "c_bias": c_bias, "b_norm_weight": b_norm_weight,
            "c_norm_weight": c_norm_weight, "mimo_x": mimo_x, "mimo_z": mimo_z, "mimo_o": mimo_o,
            "out_norm_weight": out_norm_weight, "A_floor": A_floor, "eps": eps, "activation": activation, "keep": keep,
        }  # fmt: skip
        return _in_blocks(plan.block, rows, seq_idx, initial_state, return_final_state, how)
    starts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if initial_state is not None:
        starts = _initial_state(
            plan, initial_state, dd_dt_SBH[:1], dd_A_SBH[:1], trap_SBH[:1], dt_bias, mimo_x, activation
        )  # fmt: skip
    out_SBHP, h_BHPN, theta_BHA = _Scan.apply(
        plan, return_final_state, x_SBHP, z_SBHP, b_SBGRN, c_SBGRN, dd_dt_SBH, dd_A_SBH, trap_SBH, angles_SBA,
        dt_bias.contiguous(), D, b_bias, c_bias, b_norm_weight.contiguous(), c_norm_weight.contiguous(),
        mimo_x, mimo_z, mimo_o, out_norm_weight,
        None if seq_idx is None else seq_idx.contiguous(), *starts,
    )  # fmt: skip
    if not return_final_state:
        return out_SBHP, None
    last = b_SBGRN[-1].float()
    normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + eps) * b_norm_weight.float()
    keys_BRHN = (normed.repeat_interleave(H // G, dim=1) + b_bias.float()).transpose(1, 2)
    pairing: Pairing = "half" if plan.mimo else "interleaved"
    rotated = mamba3_rotate(keys_BRHN.unsqueeze(1), theta_BHA.unsqueeze(1), pairing=pairing).squeeze(1)
    return out_SBHP, Mamba3State(_to_model(h_BHPN, plan), rotated, x_SBHP[-1].float(), theta_BHA)


def _in_blocks(
    block: int,
    rows: Sequence[torch.Tensor],
    seq_idx_BS: torch.Tensor | None,
    state: Mamba3State | None,
    final: bool,
    how: Mapping[str, Any],
) -> tuple[torch.Tensor, Mamba3State | None]:
    """Compute :func:`mamba3` in blocks of ``block`` tokens of time, forward and, by autograd, backward."""
    count, outs = len(rows[0]), []
    for first, parts in zip(range(0, count, block), split_rows(rows, block), strict=True):
        end = min(first + block, count)
        seq_idx = None if seq_idx_BS is None else seq_idx_BS[:, first:end]
        if seq_idx_BS is not None and first and state is not None:
            is_new = seq_idx_BS[:, first] != seq_idx_BS[:, first - 1]
            state = Mamba3State(*(t.masked_fill(is_new.view(-1, *[1] * (t.dim() - 1)), 0) for t in state))
        is_passed = final or end < count
        of_block: Any = partial(mamba3, seq_idx=seq_idx, initial_state=state, return_final_state=is_passed, **how)
        out_SBHP, state = of_block(*parts, chunk_size=0)
        outs.append(out_SBHP)
    return torch.cat(outs), state


mamba3_keep_scan = partial(mamba3, keep="scan")
"""As :func:`mamba3`; backward does not recompute the scan, for H·R·P more elements per token, and tables."""
mamba3_keep_all = partial(mamba3, keep="all")
"""As :func:`mamba3`; backward recomputes nothing, for H·R·(P + 2·N) more elements per token, and tables."""


def _check_kernels(plan: Plan, activation: str, *inputs: torch.Tensor) -> None:
    """Raise ModelError for sizes and dtypes that the kernels do not support.

    They accept more than the dispatcher uses on a GPU, which is what they are compiled and tested for; the
    rest is for Triton's interpreter.
    """
    S, B, H, A = plan.S, plan.B, plan.H, plan.A
    shapes = {"dd_dt": (S, B, H), "dd_A": (S, B, H), "trap": (S, B, H), "angles": (S, B, A)}
    for (name, shape), tensor in zip(shapes.items(), inputs[4:], strict=True):
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}, to match the other inputs.")
    if activation not in ("softplus", "heavy_tail"):
        raise ModelError(f"Unknown activation {activation!r}; use 'softplus' or 'heavy_tail'.")
    if not plan.A_floor > 0:
        raise ModelError(f"A_floor is {plan.A_floor}; expected a positive number such as 1e-4.")
    if 2 * A > plan.N:
        raise ModelError(f"{A} rotation angles need a state of at least {2 * A}, found {plan.N}, which takes {plan.N // 2}.")
    if plan.R not in RANKS:
        fitting = nearest_number(plan.R, RANKS)
        raise ModelError(f"MIMO rank {plan.R}: the Triton kernels take one of {RANKS}; the nearest is {fitting}.")
    for name, size in (("head dim", plan.P), ("state", plan.N)):
        if size < 16 or size & (size - 1):
            fitting = nearest_number(size, (16 << power for power in range(size.bit_length())))
            raise ModelError(f"{name} {size}: the Triton kernels take powers of two from 16 on; the nearest is {fitting}.")
    most = (2**31 - 1) // (plan.H * plan.R * min(plan.padded, plan.block))
    if most < plan.B:
        raise ModelError(
            f"{plan.B} rows of {S} tokens have more than 2^31 rows of {plan.H} heads and rank {plan.R}, which the kernels' "
            f"descriptors number in 32 bits; the nearest micro-batch is {most}."
        )
    dtype = one_dtype("Mamba-3", **dict(zip(("x", "z", "b", "c", *shapes), inputs, strict=True)))
    if dtype not in DTYPES:
        raise ModelError(f"Mamba-3's inputs are {dtype}; its kernels take one of {DTYPES}: cast them, or use the reference")


def _per_token(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the strides of tokens and of batch rows."""
    return tensor.stride(0), tensor.stride(1)


def _to_kernels(t: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Reorder a state axis from the model's layout to the kernels', in which a plane's columns are adjacent."""
    return t.unflatten(-1, (2, plan.N // 2)).transpose(-1, -2).flatten(-2) if plan.mimo else t


def _to_model(t: torch.Tensor, plan: Plan) -> torch.Tensor:
    return t.unflatten(-1, (plan.N // 2, 2)).transpose(-1, -2).flatten(-2) if plan.mimo else t


def _table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float16 for bfloat16: tables hold numbers of magnitude 1, for which float16 has three more bits."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def _initial_state(
    plan: Plan,
    state: Mamba3State,
    dd_dt: torch.Tensor,
    dd_A: torch.Tensor,
    trap: torch.Tensor,
    dt_bias: torch.Tensor,
    mimo_x: torch.Tensor | None,
    activation: Activation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the state before the first token, including that token's trapezoid term, and θ before it; by autograd."""
    B, H, R, P, N = plan.B, plan.H, plan.R, plan.P, plan.N
    shapes = {
        "h": ("BHPN", (B, H, P, N)),
        "b": ("BRHN", (B, R, H, N)),
        "x": ("BHP", (B, H, P)),
        "theta": ("BHA", (B, H, plan.A)),
    }
    for (name, (axes, shape)), tensor in zip(shapes.items(), state, strict=True):
        expect_shape("Mamba-3", f"initial_state.{name}", tensor, axes, shape)
    dd_dt, dd_A, trap = (t.float().transpose(0, 1) for t in (dd_dt, dd_A, trap))
    _, dt, lam = mamba3_decay_and_gates(dd_dt, dd_A, trap, dt_bias.float(), A_floor=plan.A_floor, activation=activation)
    v_BRHP = state.x_BHP.float().unsqueeze(1)
    if mimo_x is not None:
        v_BRHP = v_BRHP * mimo_x.float().transpose(0, 1)
    added_BHPN = torch.einsum("brhp,brhn->bhpn", v_BRHP, state.b_BRHN.float())
    h_BHPN = state.h_BHPN.float() + ((1 - lam) * dt)[:, 0, :, None, None] * added_BHPN
    return _to_kernels(h_BHPN, plan).contiguous(), state.theta_BHA.float().remainder(2 * math.pi).contiguous()


def _parameters(
    plan: Plan,
    dtype: torch.dtype,
    D: torch.Tensor,
    b_bias: torch.Tensor,
    c_bias: torch.Tensor,
    mix: Sequence[torch.Tensor | None],
    out_norm: torch.Tensor | None,
) -> _Parameters:
    tables = _table_dtype(dtype)
    biases = torch.empty(2, plan.H, plan.R, plan.N, dtype=tables, device=D.device)
    for to, bias in zip(biases, (b_bias, c_bias), strict=True):
        to.copy_(_to_kernels(bias, plan))
    x, z, o = (biases if t is None else t.to(tables).contiguous() for t in mix)  # unused with SISO: any pointer works
    return _Parameters(biases, x, z, o, D.float().contiguous(), None if out_norm is None else out_norm.contiguous())


def _tables(
    plan: Plan,
    b: torch.Tensor,
    c: torch.Tensor,
    gates: Sequence[torch.Tensor],
    dt_bias: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    seq_idx: torch.Tensor,
    initial_theta: torch.Tensor | None,
    *,
    final: bool,
) -> _Tables:
    """Run the kernels that compute the tables."""
    device, dtype = b.device, _table_dtype(b.dtype)
    B, H, G, R, N, A, SP = plan.B, plan.H, plan.G, plan.R, plan.N, plan.A, plan.padded
    normed = torch.empty(2, B, G, R, SP, N, device=device, dtype=dtype)
    plan.launch(
        kernels.norm_fwd, (triton.cdiv(SP, 32), G * R, 2 * B), b, c, *weights, normed, *eighths(b), b.stride(2), b.stride(3),
        plan.S, SP, B, plan.eps, ROWS=32,
    )  # fmt: skip
    dd_dt, dd_A, trap, angles = gates
    segments = plan.segments
    totals = torch.empty(B, H, segments, A, device=device)
    carries = torch.empty_like(totals)
    restarts = torch.empty(B, segments, device=device, dtype=torch.int32)
    plan.launch(
        kernels.angle_totals, plan.grid, dd_dt, dt_bias, angles, seq_idx, totals, restarts, *_per_token(dd_dt),
        *_per_token(angles), plan.S, segments,
    )  # fmt: skip
    plan.launch(
        kernels.angle_carries, (H, B, 1), totals, restarts, totals if initial_theta is None else initial_theta, carries,
        BLOCK=32, INITIAL=initial_theta is not None,
    )  # fmt: skip
    la, w, gamma = torch.empty(3, B, H, SP, device=device).unbind()
    cos_sin = torch.empty(B, H, SP, 2 * A, device=device, dtype=dtype)
    theta = torch.empty(B, H, A, device=device)
    plan.launch(
        kernels.tables_fwd, plan.grid, dd_dt, dd_A, trap, angles, dt_bias, seq_idx, carries, la, w, gamma, cos_sin, theta,
        *_per_token(dd_dt), *_per_token(dd_A), *_per_token(trap), *_per_token(angles), plan.S, SP, segments, plan.A_floor,
        FINAL=final,
    )  # fmt: skip
    return _Tables(normed, la, w, gamma, cos_sin, theta)


def _state_passing(
    plan: Plan, states: torch.Tensor, decays: torch.Tensor, initial: torch.Tensor | None, *, reverse: bool
) -> torch.Tensor:
    """Scan states over segments in place; return the final one, [B, H, P, N] float32."""
    elements = plan.P * plan.N
    block = min(1024, elements)
    final = torch.empty(plan.B, plan.H, plan.P, plan.N, device=states.device)
    plan.launch(
        kernels.state_passing, (elements // block, plan.H, plan.B), states, decays, final if initial is None else initial,
        final, BLOCK=block, REVERSE=reverse, INITIAL=initial is not None,
    )  # fmt: skip
    return final


class _Scan(torch.autograd.Function):
    """From the projections to the gated, normed output, the last state (in the kernels' layout) and the last angle."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, final: bool, *inputs: Any) -> tuple[torch.Tensor, ...]:
        x, z, b, c, *gates = inputs[:8]
        dt_bias, D, b_bias, c_bias, b_norm, c_norm, *mix, out_norm, seq_idx, h0, theta0 = inputs[8:]
        x, z = aligned(x, 2), aligned(z, 2)
        b, c = aligned(b, 1), aligned(c, 1)
        if b.stride() != c.stride():
            b, c = b.contiguous(), c.contiguous()
        gates = [t if t.stride(-1) == 1 else t.contiguous() for t in gates]
        documents = gates[0] if seq_idx is None else seq_idx
        parameters = _parameters(plan, x.dtype, D, b_bias, c_bias, mix, out_norm)
        tables = _tables(plan, b, c, gates, dt_bias, (b_norm, c_norm), documents, theta0, final=final)
        keys, queries = _empty_rows(plan, x, plan.N), _empty_rows(plan, x, plan.N)
        states = torch.empty(plan.B, plan.H, plan.segments + 1, plan.P, plan.N, device=x.device, dtype=x.dtype)
        decays = torch.empty(plan.B, plan.H, plan.segments, device=x.device)
        _chunk_state(plan, x, parameters, tables, keys, queries, states, decays)
        h = _state_passing(plan, states, decays, h0, reverse=False)
        out = torch.empty(plan.S, plan.B, plan.H, plan.P, device=x.device, dtype=x.dtype)
        ungated = _empty_rows(plan, x, plan.P) if plan.saves_tables else None
        _chunk_scan(plan, x, z, keys, queries, parameters, tables, states, out, ungated)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if not final:
            ctx.mark_non_differentiable(h, tables.theta_BHA)
        ctx.save_for_backward(
            x, z, b, c, *gates, dt_bias, b_norm, c_norm, *parameters, seq_idx, theta0, states,
            *((*tables, ungated) if plan.saves_tables else ()), *((keys, queries) if plan.saves_rows else ()),
        )  # fmt: skip
        weights = (dt_bias, D, b_bias, c_bias, b_norm, c_norm, *mix, out_norm)
        ctx.dtypes = [None if t is None else t.dtype for t in weights]
        return out, h, tables.theta_BHA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return _backward(ctx, *gradients)


def _empty_rows(plan: Plan, like: torch.Tensor, width: int) -> torch.Tensor:
    """Allocate rows of ``width``, one per head, token and rank."""
    return torch.empty(plan.B, plan.H, plan.padded * plan.R, width, device=like.device, dtype=like.dtype)


def _chunks(rows: torch.Tensor) -> TensorDescriptor[torch.Tensor]:
    """Make a TMA descriptor for rows, a chunk at a time."""
    width = rows.shape[-1]
    return TensorDescriptor(rows, [rows.numel() // width, width], [width, 1], [ROWS, width])


def _tokens(plan: Plan, values_SBHP: torch.Tensor) -> TensorDescriptor[torch.Tensor]:
    """Make a TMA descriptor for values, a chunk's tokens of one head at a time."""
    return TensorDescriptor(values_SBHP, [*values_SBHP.shape], [*values_SBHP.stride()], [plan.chunk, 1, 1, plan.P])


def _chunk_state(
    plan: Plan,
    x: torch.Tensor,
    parameters: _Parameters,
    tables: _Tables,
    keys: torch.Tensor,
    queries: torch.Tensor,
    states: torch.Tensor,
    decays: torch.Tensor,
    *,
    back: bool = False,
) -> None:
    """Compute keys, queries and the segments' contributions to the state; with ``back``, to the state's gradient, with ``x``
    the gradient of the scan's output."""
    normed, biases = tables.normed.unbind(), parameters.biases.unbind()
    rows = (keys, queries)
    if back:
        normed, biases, rows = normed[::-1], biases[::-1], rows[::-1]
    plan.launch(
        kernels.chunk_state_fwd, plan.grid, x, *normed, *biases, parameters.mimo_x, tables.cos_sin, tables.la, tables.w, *rows,
        states, decays, *eighths(x, 3), plan.padded if back else plan.S, plan.padded, plan.segments,
        MIMO=plan.mimo and not back, BACKWARD=back,
    )  # fmt: skip


def _chunk_scan(
    plan: Plan,
    x: torch.Tensor,
    z: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    parameters: _Parameters,
    tables: _Tables,
    states: torch.Tensor,
    gated: torch.Tensor | None,
    ungated: torch.Tensor | None,
) -> None:
    """Compute the scan's output after gate and norm, before them, or both: those with a tensor to write to."""
    plan.launch(
        kernels.chunk_scan_fwd, plan.grid, _tokens(plan, x), z, _chunks(keys), _chunks(queries), parameters.mimo_x,
        parameters.mimo_z, parameters.mimo_o, parameters.D, parameters.out_norm, tables.la, tables.w, tables.gamma, states,
        gated, None if ungated is None else _chunks(ungated), *eighths(z), plan.S, plan.padded, plan.segments, plan.B, plan.eps,
        RAW=ungated is not None, GATED=gated is not None, NORM=plan.norm and gated is not None,
    )  # fmt: skip


def _backward(ctx: Any, dout: torch.Tensor | None, dh: torch.Tensor | None, dtheta: torch.Tensor | None) -> tuple[Any, ...]:
    plan: Plan = ctx.plan
    saved = ctx.saved_tensors  # read once: each access unpacks what a checkpoint or an offload has packed
    inputs, dt_bias, norms, parameters = saved[:8], saved[8], saved[9:11], _Parameters(*saved[11:17])
    seq_idx, theta0, states, *saved_tables = saved[17:]
    dout = inputs[0].new_zeros(inputs[0].shape) if dout is None else aligned(dout, 2)
    gradients = empty_gradients(*inputs)
    if gradients[2].stride() != gradients[3].stride():
        gradients[2:4] = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs[2:4])
    of_batches = []
    for rows in plan.batches:
        some = plan if rows.stop - rows.start == plan.B else replace(plan, B=rows.stop - rows.start)
        of_rows: list[Any] = [inputs, gradients, dout, saved_tables, seq_idx, theta0, states, dh, dtheta]
        if some is not plan:
            by_token = ([t[:, rows] for t in inputs], [t[:, rows] for t in gradients], dout[:, rows])
            of_tables = [saved_tables[0][:, rows], *(t[rows] for t in saved_tables[1:])] if saved_tables else []
            of_rows = [*by_token, of_tables, *(None if t is None else t[rows] for t in of_rows[4:])]
        of_batches.append(_backward_of_rows(some, parameters, dt_bias, norms, *of_rows))
    *sums, dh0, dtheta0 = zip(*of_batches, strict=True)
    of_segments, of_biases, of_norms = (reduce(torch.add, parts) for parts in sums)
    ddt_bias, dD, *mixes, dout_norm = of_segments.split(plan.part_sizes)
    mixes = [t.view(-1, plan.R, plan.P) for t in mixes]
    summed = [
        None if dtype is None else part.to(dtype)
        for part, dtype in zip((ddt_bias, dD, *of_biases, *of_norms, *mixes, dout_norm), ctx.dtypes, strict=True)
    ]
    starts = (None, None) if theta0 is None else (torch.cat(dh0), torch.cat(dtheta0))
    return None, None, *gradients, *summed, None, *starts


def _backward_of_rows(
    plan: Plan,
    parameters: _Parameters,
    dt_bias: torch.Tensor,
    norms: tuple[torch.Tensor, ...],
    inputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    dout: torch.Tensor,
    saved: list[torch.Tensor],
    seq_idx: torch.Tensor | None,
    theta0: torch.Tensor | None,
    states: Any,
    dh: torch.Tensor | None,
    dtheta: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Write the gradients of some batch rows; return, in float32, their contributions to the parameters' gradients (dt_bias,
    D, mimo_x, mimo_z, mimo_o and the output norm, concatenated; the two biases; the norm weights of B and C), and the
    gradients of the state and the angle before the first token."""
    x, z, b, c, *gates = inputs
    dd_dt, dd_A, trap, angles = gates
    dx, dz, db, dc, ddd_dt, ddd_A, dtrap, dangles = gradients
    documents = dd_dt if seq_idx is None else seq_idx
    S, B, H, G, R, P, N, A, SP = plan.S, plan.B, plan.H, plan.G, plan.R, plan.P, plan.N, plan.A, plan.padded
    segments, device = plan.segments, x.device
    seq_idx, theta0, dh, dtheta = (None if t is None else t.contiguous() for t in (seq_idx, theta0, dh, dtheta))
    rows = saved[7:] if saved else ()
    if saved:
        tables, ungated = _Tables(*saved[:6]), saved[6]
    else:
        tables = _tables(plan, b, c, gates, dt_bias, norms, documents, theta0, final=False)
    parts = torch.empty(B * segments, sum(plan.part_sizes), device=device)
    ddt_bias, dD, dmimo_x, dmimo_z, dmimo_o, dout_norm = parts.split(plan.part_sizes, dim=1)

    do = _empty_rows(plan, x, P)
    keys, queries = rows or (_empty_rows(plan, x, N), _empty_rows(plan, x, N))
    if R > 1 and not rows:
        plan.launch(kernels.rotate_fwd, plan.grid, *tables.normed, *parameters.biases, tables.cos_sin, keys, queries, SP)
    if not saved:
        ungated = do  # a tile is read before its gradient is written
        _chunk_scan(plan, x, z, keys, queries, parameters, tables, states, None, ungated)
    plan.launch(
        kernels.gate_bwd, plan.grid, x, z, dout, parameters.mimo_x, parameters.mimo_z, parameters.mimo_o, parameters.out_norm,
        ungated, do, dz, dmimo_z, dmimo_o, dD, dout_norm, *eighths(x), *eighths(z), *eighths(dout), *eighths(dz),
        parts.stride(0), S, SP, segments, plan.eps,
    )  # fmt: skip
    dstates = torch.empty_like(states)
    decays = torch.empty(B, H, segments, device=device)
    if R == 1:
        by_token = do.view(B, H, SP, P).permute(2, 0, 1, 3)
        _chunk_state(plan, by_token, parameters, tables, keys, queries, dstates, decays, back=True)
    else:
        plan.launch(kernels.chunk_state_bwd, plan.grid, queries, do, tables.la, tables.w, dstates, decays, SP, segments)
    dh0 = _state_passing(plan, dstates, decays, dh, reverse=True)

    chunks_of = [_chunks(t) for t in (keys, queries, do)]
    dkeys = _empty_rows(plan, x, N)
    boundary_value = torch.empty(B, H, segments + 1, device=device)
    boundary_angle = torch.empty(B, H, segments + 1, A, device=device)
    dgamma = torch.empty(B, H, SP, device=device)
    # The last kernel that reads ``do`` overwrites it, each chunk after reading it.
    dqueries = do if N == P else _empty_rows(plan, x, N)
    for part in plan.key_parts:
        plan.launch(
            kernels.chunk_scan_bwd_keys, plan.grid, x, *chunks_of, parameters.mimo_x, parameters.D, tables.la, tables.w,
            tables.gamma, states, dstates, _chunks(dkeys), _chunks(dqueries) if part["QUERIES"] else None, dx, dmimo_x, dgamma,
            *eighths(x), *eighths(dx), parts.stride(0), S, SP, segments, **part,
        )  # fmt: skip
    if plan.R > 1:
        plan.launch(
            kernels.chunk_scan_bwd_queries, plan.grid, _tokens(plan, x), chunks_of[0], chunks_of[2], parameters.mimo_x,
            tables.la, tables.w, tables.gamma, states, _chunks(dqueries), SP, segments,
        )  # fmt: skip
    plan.launch(kernels.boundary_gradients, (H, segments + 1, B), states, dstates, boundary_value, boundary_angle, segments + 1)
    del do, chunks_of, keys, queries

    dnormed = torch.empty(plan.shares, 2, B, G, R, SP, N, device=device)
    dbiases = torch.empty(2, B * (SP // plan.chunk), H, R, N, device=device)
    values, drotations = torch.empty(2, plan.parts, B, H, SP, device=device), torch.empty(2, B, H, SP, A, device=device)
    plan.launch(
        kernels.rotate_bwd, (SP // plan.chunk, plan.shares * G * plan.parts, 2 * B), *tables.normed, parameters.biases, dkeys,
        dqueries, tables.cos_sin, dnormed, dbiases, values, drotations, SP, B,
    )  # fmt: skip
    del dkeys, dqueries
    tiles = triton.cdiv(SP, 32)
    dnorms = torch.empty(2, B * G * R * tiles, N, device=device)
    plan.launch(
        kernels.norm_bwd, (tiles, G * R, 2 * B), b, c, *norms, dnormed, db, dc, dnorms, *eighths(b), b.stride(2), b.stride(3),
        *eighths(db), db.stride(2), db.stride(3), S, SP, B, plan.eps, ROWS=32,
    )  # fmt: skip

    if dh is not None:
        # Consumers of the final state are not rotated with the tokens: subtract their part of the last boundary's gradient.
        dtheta = (0.0 if dtheta is None else dtheta) - boundary_angle[:, :, -1]
    dangle_heads = torch.empty(B, H, SP, A, device=device)
    dtheta0 = torch.empty(B, H, A, device=device)
    plan.launch(
        kernels.tables_bwd, plan.grid, dd_dt, dd_A, trap, angles, dt_bias, documents, tables.w, tables.gamma, values, dgamma,
        drotations, boundary_value, boundary_angle, dtheta0 if dtheta is None else dtheta, ddd_dt, ddd_A, dtrap,
        dangle_heads, ddt_bias, dtheta0, *(stride for t in (*gates, ddd_dt, ddd_A, dtrap) for stride in _per_token(t)),
        parts.stride(0), S, SP, segments, plan.A_floor, FINAL=dtheta is not None, INITIAL=theta0 is not None,
    )  # fmt: skip
    plan.launch(
        kernels.angles_bwd, (triton.cdiv(S, 8), B, 1), angles, dangle_heads, dangles, *_per_token(angles), *_per_token(dangles),
        S, SP, TOKENS=8, HEADS=16,
    )  # fmt: skip
    return parts.sum(0), _to_model(dbiases.sum(1), plan), dnorms.sum(1), dh0, dtheta0
