"""Mamba-3 in plain PyTorch: the reference that this package's faster Mamba-3 paths are tested against; it can also train.

Source: Mamba-3 (arXiv 2603.15569); behaviour as in mamba-ssm v2.3.2.post1 (``mamba_ssm/modules/mamba3.py``, its tests).

Legend: B batch, S sequence, H heads, P head dim, G groups of B and C, N state, R MIMO rank (1 for SISO), A rotation
angles; inside the chunked scan also C chunks, L tokens of a chunk and M = L·R rows of a chunk.

The recurrence, per head, with ``a_t = A_t Δ_t < 0`` and ``V_{t,r} = x_t ⊙ mimo_x_r`` (``V_t = x_t`` for SISO)::

    h_t = exp(a_t) h_{t−1} + (1 − λ_t) Δ_t exp(a_t) Σ_r V_{t−1,r} ⊗ B_{t−1,r} + λ_t Δ_t Σ_r V_{t,r} ⊗ B_{t,r}
    y_{t,r} = h_t C_{t,r}

The second term has the same exp(a_t) as the state it is added to, so it may be added *before* the decay. The product
Σ_q V_{s,q} ⊗ B_{s,q} is then used twice: with ``γ_s = λ_s Δ_s`` by token s itself, and with

    w_s = γ_s + (1 − λ_{s+1}) Δ_{s+1}          (the second part is 0 for the last token)

by every later token, followed only by decays. In closed form, for all t::

    y_{t,r} = Σ_q γ_t (C_{t,r}·B_{t,q}) V_{t,q} + Σ_{s<t} exp(Σ_{k=s+1..t} a_k) w_s Σ_q (C_{t,r}·B_{s,q}) V_{s,q}

which is attention with a decay mask, and is what the chunked scan computes chunk by chunk. mamba-ssm's kernels use the same
shifted form.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import compute_dtype, expect_shape
from megacpp_mcore.ops.packed.documents import document_starts, segmented_cumsum
from megacpp_mcore.util.nearest import nearest_number

_expect = functools.partial(expect_shape, "Mamba-3")

Activation = Literal["softplus", "heavy_tail"]
Pairing = Literal["interleaved", "half"]
Method = Literal["chunked", "sequential"]


class ScanState(NamedTuple):
    """State that the scan carries from token to token: h, and the rotated B and the x of the trapezoid's pending term."""

    h_BHPN: torch.Tensor
    b_BRHN: torch.Tensor
    x_BHP: torch.Tensor


class Mamba3State(NamedTuple):
    """State that the mixer carries from token to token: that of the scan, and the accumulated rotation angle (radians)."""

    h_BHPN: torch.Tensor
    b_BRHN: torch.Tensor
    x_BHP: torch.Tensor
    theta_BHA: torch.Tensor


def mamba3_decay_and_gates(
    dd_dt_BSH: torch.Tensor,
    dd_A_BSH: torch.Tensor,
    trap_BSH: torch.Tensor,
    dt_bias_H: torch.Tensor,
    *,
    A_floor: float,
    activation: Activation = "softplus",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn the three per-head projections into the decay, the step and the trapezoid's weight.

    ``A = min(−activation(dd_A), −A_floor)``, ``Δ = softplus(dd_dt + dt_bias)``, ``λ = sigmoid(trap)``.

    Args:
        dd_dt_BSH: projection for the step Δ.
        dd_A_BSH: projection for the decay rate A.
        trap_BSH: projection for λ, the weight of the current token relative to the previous one.
        dt_bias_H: learned bias of the step.
        A_floor: the smallest decay rate allowed, > 0.
        activation: ``softplus`` (v2.3.2.post1), or ``heavy_tail`` (newer upstream): 1 + u for u ≥ 0, 1 / (1 − u) below.

    Returns:
        ``(adt_BSH, dt_BSH, trap_BSH)``: A·Δ (negative), Δ and λ, in float32, or float64 if an input is float64.

    Raises:
        ModelError: shapes that do not fit, a floor that is not positive, or an unknown activation.
    """
    batch, sequence, heads = _dims("dd_dt", dd_dt_BSH, "BSH")
    _expect("dd_A", dd_A_BSH, "BSH", (batch, sequence, heads))
    _expect("trap", trap_BSH, "BSH", (batch, sequence, heads))
    _expect("dt_bias", dt_bias_H, "H", (heads,))
    if not A_floor > 0:
        raise ModelError(f"A_floor is {A_floor}; expected a positive number such as 1e-4, or the state would never decay.")
    dtype = compute_dtype(dd_dt_BSH, dd_A_BSH, trap_BSH, dt_bias_H)
    rate_BSH = torch.clamp(-_rate(dd_A_BSH.to(dtype), activation), max=-A_floor)
    dt_BSH = F.softplus(dd_dt_BSH.to(dtype) + dt_bias_H.to(dtype))
    return rate_BSH * dt_BSH, dt_BSH, torch.sigmoid(trap_BSH.to(dtype))


def mamba3_angles(
    angles_BSA: torch.Tensor,
    dt_BSH: torch.Tensor,
    seq_idx_BS: torch.Tensor | None = None,
    initial_BHA: torch.Tensor | None = None,
) -> torch.Tensor:
    """Accumulate the rotation angles: ``θ_t = θ_{t−1} + Δ_t · π · tanh(angle_t)``, 0 before a document's first token.

    The sum runs in float64: after thousands of tokens the error of a float32 sum exceeds the parity tolerance.

    Args:
        angles_BSA: the angle projection, shared by all heads.
        dt_BSH: the step Δ.
        seq_idx_BS: the document number of each token (:mod:`megacpp_mcore.ops.packed.documents`); None: one document.
        initial_BHA: the angle before the first token; None: 0.

    Returns:
        ``theta_BSHA`` in radians, in [0, 2π), in float32, or float64 when an input is float64.

    Raises:
        ModelError: shapes that do not fit.
    """
    batch, sequence, angles = _dims("angles", angles_BSA, "BSA")
    _, _, heads = _dims("dt", dt_BSH, "BSH")
    _expect("dt", dt_BSH, "BSH", (batch, sequence, heads))
    turn_BSA = math.pi * torch.tanh(angles_BSA.double())
    turn_BSHA = dt_BSH.double().unsqueeze(-1) * turn_BSA.unsqueeze(2)
    if initial_BHA is not None:
        _expect("initial_state.theta", initial_BHA, "BHA", (batch, heads, angles))
        turn_BSHA = torch.cat((turn_BSHA[:, :1] + initial_BHA.double().unsqueeze(1), turn_BSHA[:, 1:]), dim=1)
    if seq_idx_BS is None:
        theta_BSHA = torch.cumsum(turn_BSHA, dim=1)
    else:
        theta_BSHA = segmented_cumsum(turn_BSHA, document_starts(seq_idx_BS, batch=batch, rows=sequence))
    return torch.remainder(theta_BSHA, 2 * math.pi).to(compute_dtype(angles_BSA, dt_BSH))


def mamba3_rotate(x_BSRHN: torch.Tensor, theta_BSHA: torch.Tensor, *, pairing: Pairing) -> torch.Tensor:
    """Rotate the first A planes of the state axis by θ, the same for every rank; the rest is unchanged.

    Args:
        x_BSRHN: B or C, normed and biased.
        theta_BSHA: angles in radians, A ≤ N / 2.
        pairing: which two states form plane i: ``interleaved`` (2i, 2i + 1), used by SISO, or ``half``
            (i, i + N / 2), used by MIMO.

    Returns:
        The rotated tensor, shaped like ``x_BSRHN``, in the wider of the two dtypes.

    Raises:
        ModelError: shapes that do not fit, an odd state with ``half``, more planes than the state has, unknown pairing.
    """
    batch, sequence, _, heads, state = _dims("x", x_BSRHN, "BSRHN")
    planes = _dims("theta", theta_BSHA, "BSHA")[-1]
    _expect("theta", theta_BSHA, "BSHA", (batch, sequence, heads, planes))
    if 2 * planes > state:
        raise ModelError(f"{planes} rotation angles need a state of at least {2 * planes}, found {state}; lower the fraction.")
    cos, sin = torch.cos(theta_BSHA).unsqueeze(2), torch.sin(theta_BSHA).unsqueeze(2)
    if pairing == "interleaved":
        first, second = x_BSRHN[..., : 2 * planes].unflatten(-1, (planes, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
        return torch.cat((turned, x_BSRHN[..., 2 * planes :].to(turned.dtype)), dim=-1)
    if pairing == "half":
        if state % 2:
            raise ModelError(f"The state is {state}; pairing 'half' joins i with i + N/2 and needs an even state.")
        middle = state // 2
        first, second = x_BSRHN[..., :planes], x_BSRHN[..., middle : middle + planes]
        turned_first, turned_second = first * cos - second * sin, first * sin + second * cos
        kept_first, kept_second = x_BSRHN[..., planes:middle], x_BSRHN[..., middle + planes :]
        dtype = turned_first.dtype
        return torch.cat((turned_first, kept_first.to(dtype), turned_second, kept_second.to(dtype)), dim=-1)
    raise ModelError(f"Unknown pairing {pairing!r}; use 'interleaved' (SISO) or 'half' (MIMO).")


def mamba3_scan_sequential(
    x_BSHP: torch.Tensor,
    b_BSRHN: torch.Tensor,
    c_BSRHN: torch.Tensor,
    adt_BSH: torch.Tensor,
    dt_BSH: torch.Tensor,
    trap_BSH: torch.Tensor,
    *,
    mimo_x_HRP: torch.Tensor | None = None,
    initial_state: ScanState | None = None,
) -> tuple[torch.Tensor, ScanState]:
    """Run the recurrence of the module's docstring token by token: the reference.

    Args:
        x_BSHP: the input.
        b_BSRHN: B, rotated, one per head.
        c_BSRHN: C, rotated, one per head.
        adt_BSH: A·Δ, the logarithm of the decay; −∞ for a token that must not see earlier tokens.
        dt_BSH: the step Δ.
        trap_BSH: λ in [0, 1].
        mimo_x_HRP: the MIMO input mix; None for SISO (R = 1).
        initial_state: what an earlier call returned; None starts from zero.

    Returns:
        ``(y_BSRHP, final_state)`` in float32, or float64 when an input is float64; y without the D term.

    Raises:
        ModelError: shapes that do not fit.
    """
    dtype = _check_scan(x_BSHP, b_BSRHN, c_BSRHN, adt_BSH, dt_BSH, trap_BSH, mimo_x_HRP, initial_state)
    x, b, c, adt, dt, lam = (t.to(dtype) for t in (x_BSHP, b_BSRHN, c_BSRHN, adt_BSH, dt_BSH, trap_BSH))
    v_BSRHP = _values(x, mimo_x_HRP)
    h_BHPN, previous_BHPN = _initial_terms(x, b, mimo_x_HRP, initial_state)
    outputs = []
    for t in range(x.shape[1]):
        alpha, beta, gamma = _coefficients(adt[:, t], dt[:, t], lam[:, t])
        current_BHPN = torch.einsum("brhp,brhn->bhpn", v_BSRHP[:, t], b[:, t])
        h_BHPN = alpha * h_BHPN + beta * previous_BHPN + gamma * current_BHPN
        outputs.append(torch.einsum("bhpn,brhn->brhp", h_BHPN, c[:, t]))
        previous_BHPN = current_BHPN
    return torch.stack(outputs, dim=1), ScanState(h_BHPN, b[:, -1], x[:, -1])


def mamba3_scan_chunked(
    x_BSHP: torch.Tensor,
    b_BSRHN: torch.Tensor,
    c_BSRHN: torch.Tensor,
    adt_BSH: torch.Tensor,
    dt_BSH: torch.Tensor,
    trap_BSH: torch.Tensor,
    *,
    chunk_size: int,
    mimo_x_HRP: torch.Tensor | None = None,
    initial_state: ScanState | None = None,
) -> tuple[torch.Tensor, ScanState]:
    """Compute what :func:`mamba3_scan_sequential` does, as matrix products over chunks of ``chunk_size`` tokens.

    Saves one state per chunk, never one per token. Any length: the last chunk is padded with tokens that decay nothing
    and add nothing. Every exponent is a sum of log decays between two tokens, hence ≤ 0: nothing can overflow.

    Args:
        x_BSHP: the input.
        b_BSRHN: B, rotated, one per head.
        c_BSRHN: C, rotated, one per head.
        adt_BSH: A·Δ, the logarithm of the decay; −∞ for a token that must not see earlier tokens.
        dt_BSH: the step Δ.
        trap_BSH: λ in [0, 1].
        chunk_size: tokens of a chunk, ≥ 1; 64 / R is the usual choice.
        mimo_x_HRP: the MIMO input mix; None for SISO (R = 1).
        initial_state: what an earlier call returned; None starts from zero.

    Returns:
        ``(y_BSRHP, final_state)`` in float32, or float64 when an input is float64; y without the D term.

    Raises:
        ModelError: shapes that do not fit, or a chunk size below 1.
    """
    dtype = _check_scan(x_BSHP, b_BSRHN, c_BSRHN, adt_BSH, dt_BSH, trap_BSH, mimo_x_HRP, initial_state)
    if chunk_size < 1:
        raise ModelError(f"chunk_size is {chunk_size}; expected at least 1 (64 for SISO, 64 / rank for MIMO).")
    x, b, c, adt, dt, lam = (t.to(dtype) for t in (x_BSHP, b_BSRHN, c_BSRHN, adt_BSH, dt_BSH, trap_BSH))
    sequence, rank = x.shape[1], b.shape[2]
    own_BSH = lam * dt
    pending_BSH = (1 - lam) * dt
    later_BSH = own_BSH + F.pad(pending_BSH[:, 1:], (0, 0, 0, 1))
    h_BHPN, previous_BHPN = _initial_terms(x, b, mimo_x_HRP, initial_state)
    h_BHPN = h_BHPN + pending_BSH[:, 0, :, None, None] * previous_BHPN

    v_BCHMP, b_BCHMN, c_BCHMN = (_chunk_rows(t, chunk_size) for t in (_values(x, mimo_x_HRP), b, c))
    adt_BCHL, own_BCHL, later_BCHL = (_chunk_tokens(t, chunk_size) for t in (adt, own_BSH, later_BSH))
    segments_BCHLL = _segment_sums(adt_BCHL)
    mask_BCHLL = torch.exp(segments_BCHLL) * later_BCHL.unsqueeze(-2)
    mask_BCHLL = mask_BCHLL.tril(-1) + torch.diag_embed(own_BCHL)
    y_BCHMP = _inside_chunks(v_BCHMP, b_BCHMN, c_BCHMN, mask_BCHLL, rank)

    to_end_BCHL = torch.exp(segments_BCHLL[..., -1, :]) * later_BCHL
    added_BCHPN = v_BCHMP.mT @ (b_BCHMN * to_end_BCHL.repeat_interleave(rank, dim=-1).unsqueeze(-1))
    entering_BCHPN, h_BHPN = _pass_states(h_BHPN, added_BCHPN, adt_BCHL.sum(-1))
    from_start_BCHM = torch.exp(adt_BCHL.cumsum(-1)).repeat_interleave(rank, dim=-1)
    y_BCHMP = y_BCHMP + (c_BCHMN @ entering_BCHPN.mT) * from_start_BCHM.unsqueeze(-1)
    y_BSRHP = y_BCHMP.unflatten(3, (chunk_size, rank)).permute(0, 1, 3, 4, 2, 5).flatten(1, 2)[:, :sequence]
    return y_BSRHP, ScanState(h_BHPN, b[:, -1], x[:, -1])


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
    method: Method = "chunked",
    segment_size: int | None = 1024,
) -> tuple[torch.Tensor, Mamba3State | None]:
    """Run a Mamba-3 mixer from the input projection to the output projection, both excluded.

    B and C: RMSNorm over the state, a copy of each group for its H / G heads, the head's bias, the rotation
    (``interleaved`` for SISO, ``half`` for MIMO). Then the scan, ``+ D ⊙ V``, the gate ``SiLU(z ⊙ mimo_z)``, the mix
    ``Σ_r y_r ⊙ mimo_o_r``, and the RMSNorm of each head. All in float32 (float64 if an input is float64), regardless of
    autocast.

    Args:
        x_SBHP: the input. This and the next seven may be strided views of one tensor.
        z_SBHP: the gate, before SiLU.
        b_SBGRN: B from the projection, before the norm; head h reads group h // (H / G).
        c_SBGRN: C from the projection, before the norm.
        dd_dt_SBH: projection for Δ.
        dd_A_SBH: projection for A.
        trap_SBH: projection for λ.
        angles_SBA: projection for the rotary angles, shared by all heads.
        dt_bias: [H].
        D: [H], the skip.
        b_bias: [H, R, N], added after the norm and before the rotation.
        c_bias: [H, R, N], the same for C.
        b_norm_weight: [N].
        c_norm_weight: [N].
        mimo_x: [H, R, P]; None (with the next two) means SISO.
        mimo_z: [H, R, P].
        mimo_o: [H, R, P].
        out_norm_weight: [H·P], of an RMSNorm over the P values of each head after the mix; None: no norm, the default of
            mamba-ssm's module.
        chunk_size: tokens of a chunk (``method="chunked"``).
        A_floor: the smallest decay rate.
        eps: of the norms.
        activation: of the decay rate, see :func:`mamba3_decay_and_gates`.
        seq_idx: [B, S], the document number of each token (:mod:`megacpp_mcore.ops.packed.documents`): state, trapezoid
            and rotation are reset where it changes. None: one document.
        initial_state: final state of an earlier call, if the first row continues its last document; None: zero.
        return_final_state: whether to return the state after the last row.
        method: ``chunked`` or ``sequential``.
        segment_size: None saves all activations for the backward pass; a number of tokens saves only the states between
            segments of that length and recomputes the rest, which divides the memory by about S / segment_size.

    Returns:
        ``(out_SBHP, final_state)``: the output, contiguous and in the dtype of ``x_SBHP``; the state, or None.

    Raises:
        ModelError: shapes do not fit (see also the functions above), only some of ``mimo_*`` are passed, or SISO has a rank
            above 1.
    """
    weights = (b_bias, c_bias, b_norm_weight, c_norm_weight, D, mimo_x, mimo_z, mimo_o, out_norm_weight)
    check_mixer(x_SBHP, z_SBHP, b_SBGRN, c_SBGRN, *weights)
    tokens = (x_SBHP, z_SBHP, dd_dt_SBH, dd_A_SBH, trap_SBH, angles_SBA)
    x, z, dd_dt, dd_A, trap, angles = (t.transpose(0, 1) for t in tokens)
    b, c = (t.permute(1, 0, 3, 2, 4) for t in (b_SBGRN, c_SBGRN))
    if method not in ("chunked", "sequential"):
        raise ModelError(f"Unknown method {method!r}; use 'chunked' or 'sequential'.")
    batch, sequence = x.shape[:2]
    if segment_size is not None and segment_size < 1:
        raise ModelError(f"segment_size is {segment_size}; expected at least 1 token, or None to save everything.")

    dtype = compute_dtype(*tokens, b, c, dt_bias, *(weight for weight in weights if weight is not None))
    mixer = _Mixer(*weights, eps, method, chunk_size, dtype)
    state = None if initial_state is None else ScanState(*initial_state[:3])
    with torch.autocast(x.device.type, enabled=False):
        adt, dt, trap = mamba3_decay_and_gates(dd_dt, dd_A, trap, dt_bias, A_floor=A_floor, activation=activation)
        if seq_idx is not None:
            # A decay of exp(−∞) = 0 also removes the previous token's trapezoid term, which joins the state before the decay.
            adt = adt.masked_fill(document_starts(seq_idx, batch=batch, rows=sequence).unsqueeze(-1), -math.inf)
        theta = mamba3_angles(angles, dt, seq_idx, None if initial_state is None else initial_state.theta_BHA)
        rows = (x, z, b, c, adt, dt, trap, theta)
        if segment_size is None or sequence <= segment_size:
            out_BSHP, state = mix_segment(mixer, state, *rows)
        else:
            outputs = []
            for start in range(0, sequence, segment_size):
                pieces = (t[:, start : start + segment_size] for t in rows)
                out, state = checkpoint(mix_segment, mixer, state, *pieces, use_reentrant=False, preserve_rng_state=False)
                outputs.append(out.to(x_SBHP.dtype))
            out_BSHP = torch.cat(outputs, dim=1)
    final_state = Mamba3State(*state, theta[:, -1]) if return_final_state and state is not None else None
    return out_BSHP.to(x_SBHP.dtype).transpose(0, 1).contiguous(), final_state


class _Mixer(NamedTuple):
    """The arguments of :func:`mamba3` that all tokens share, and the compute dtype."""

    b_bias_HRN: torch.Tensor
    c_bias_HRN: torch.Tensor
    b_norm_weight_N: torch.Tensor
    c_norm_weight_N: torch.Tensor
    D_H: torch.Tensor
    mimo_x_HRP: torch.Tensor | None
    mimo_z_HRP: torch.Tensor | None
    mimo_o_HRP: torch.Tensor | None
    out_norm_weight_C: torch.Tensor | None
    eps: float
    method: Method
    chunk_size: int
    dtype: torch.dtype


def mix_segment(
    mixer: _Mixer,
    state: ScanState | None,
    x_BSHP: torch.Tensor,
    z_BSHP: torch.Tensor,
    b_BSRGN: torch.Tensor,
    c_BSRGN: torch.Tensor,
    adt_BSH: torch.Tensor,
    dt_BSH: torch.Tensor,
    trap_BSH: torch.Tensor,
    theta_BSHA: torch.Tensor,
) -> tuple[torch.Tensor, ScanState]:
    """Mix consecutive tokens from the state before them; return their output and the state after them."""
    pairing: Pairing = "interleaved" if mixer.mimo_x_HRP is None else "half"
    b = _norm_and_bias(b_BSRGN, mixer.b_norm_weight_N, mixer.b_bias_HRN, mixer.eps, mixer.dtype)
    c = _norm_and_bias(c_BSRGN, mixer.c_norm_weight_N, mixer.c_bias_HRN, mixer.eps, mixer.dtype)
    b_BSRHN, c_BSRHN = (mamba3_rotate(t, theta_BSHA, pairing=pairing) for t in (b, c))
    x = x_BSHP.to(mixer.dtype)
    scanned = (x, b_BSRHN, c_BSRHN, adt_BSH, dt_BSH, trap_BSH)
    if mixer.method == "chunked":
        y, state = mamba3_scan_chunked(*scanned, chunk_size=mixer.chunk_size, mimo_x_HRP=mixer.mimo_x_HRP, initial_state=state)
    else:
        y, state = mamba3_scan_sequential(*scanned, mimo_x_HRP=mixer.mimo_x_HRP, initial_state=state)
    mix = (mixer.mimo_x_HRP, mixer.mimo_z_HRP, mixer.mimo_o_HRP)
    out = _skip_gate_mix(y, x, z_BSHP.to(mixer.dtype), mixer.D_H.to(mixer.dtype), *mix)
    if mixer.out_norm_weight_C is not None:
        weight_HP = mixer.out_norm_weight_C.to(mixer.dtype).view(out.shape[2:])
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + mixer.eps) * weight_HP
    return out, state


def _rate(u: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Map the projection of A to a positive rate."""
    if activation == "softplus":
        return F.softplus(u)
    if activation == "heavy_tail":
        # The clamp keeps the unused branch away from its pole at 1, where 0 · inf would make the gradient NaN.
        return torch.where(u < 0, torch.reciprocal(1 - u.clamp(max=0)), 1 + u)
    raise ModelError(f"Unknown activation {activation!r}; use 'softplus' (mamba-ssm v2.3.2.post1) or 'heavy_tail'.")


def _coefficients(
    adt_BH: torch.Tensor, dt_BH: torch.Tensor, trap_BH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return α, β and γ of one step, shaped to multiply a [B, H, P, N] state."""
    adt, dt, lam = (t[:, :, None, None] for t in (adt_BH, dt_BH, trap_BH))
    alpha = torch.exp(adt)
    return alpha, (1 - lam) * dt * alpha, lam * dt


def _values(x_BSHP: torch.Tensor, mimo_x_HRP: torch.Tensor | None) -> torch.Tensor:
    """Compute V_r = x ⊙ mimo_x_r as [B, S, R, H, P]; x itself with R = 1 for SISO."""
    if mimo_x_HRP is None:
        return x_BSHP.unsqueeze(2)
    return x_BSHP.unsqueeze(2) * mimo_x_HRP.to(x_BSHP.dtype).transpose(0, 1)


def _initial_terms(
    x_BSHP: torch.Tensor, b_BSRHN: torch.Tensor, mimo_x_HRP: torch.Tensor | None, state: ScanState | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the state before the first token, and Σ_r V_r ⊗ B_r of the token before it, both [B, H, P, N]."""
    if state is None:
        batch, _, heads, head_dim = x_BSHP.shape
        zero_BHPN = x_BSHP.new_zeros(batch, heads, head_dim, b_BSRHN.shape[-1])
        return zero_BHPN, zero_BHPN
    h_BHPN, b_BRHN, x_BHP = (t.to(x_BSHP.dtype) for t in state)
    v_BRHP = _values(x_BHP.unsqueeze(1), mimo_x_HRP).squeeze(1)
    return h_BHPN, torch.einsum("brhp,brhn->bhpn", v_BRHP, b_BRHN)


def _chunk_rows(t_BSRHX: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Reshape [B, S, R, H, X] to [B, C, H, L·R, X], the last chunk padded with zeros."""
    padding = -t_BSRHX.shape[1] % chunk_size
    padded = F.pad(t_BSRHX, (0, 0, 0, 0, 0, 0, 0, padding))
    return padded.unflatten(1, (-1, chunk_size)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


def _chunk_tokens(t_BSH: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Reshape [B, S, H] to [B, C, H, L], the last chunk padded with zeros."""
    padding = -t_BSH.shape[1] % chunk_size
    return F.pad(t_BSH, (0, 0, 0, padding)).unflatten(1, (-1, chunk_size)).transpose(2, 3)


def _segment_sums(adt_BCHL: torch.Tensor) -> torch.Tensor:
    """Compute Σ_{k=s+1..t} a_k at [t, s] for s ≤ t, and 0 above the diagonal.

    Each column is summed separately: the difference of two running sums would lose small decays after a large one.
    """
    tokens = adt_BCHL.shape[-1]
    columns = adt_BCHL.unsqueeze(-1).expand(*adt_BCHL.shape, tokens)
    return columns.tril(-1).cumsum(-2).tril(-1)


def _inside_chunks(
    v_BCHMP: torch.Tensor, b_BCHMN: torch.Tensor, c_BCHMN: torch.Tensor, mask_BCHLL: torch.Tensor, rank: int
) -> torch.Tensor:
    """Compute the intra-chunk contributions: (C Bᵀ ⊙ mask) V, all pairs of ranks."""
    tokens = mask_BCHLL.shape[-1]
    scores = (c_BCHMN @ b_BCHMN.mT).unflatten(-1, (tokens, rank)).unflatten(-3, (tokens, rank))
    weighted = scores * mask_BCHLL[..., :, None, :, None]
    return weighted.flatten(-4, -3).flatten(-2) @ v_BCHMP


def _pass_states(h_BHPN: torch.Tensor, added_BCHPN: torch.Tensor, decay_BCH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass the state from chunk to chunk; return the state before each chunk, and the one after the last."""
    keep_BCH11 = torch.exp(decay_BCH)[..., None, None]
    entering = []
    for chunk in range(added_BCHPN.shape[1]):
        entering.append(h_BHPN)
        h_BHPN = torch.addcmul(added_BCHPN[:, chunk], keep_BCH11[:, chunk], h_BHPN)
    return torch.stack(entering, dim=1), h_BHPN


def _norm_and_bias(
    t_BSRGN: torch.Tensor, weight_N: torch.Tensor, bias_HRN: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Apply RMSNorm over the state, copy each group to its heads (head h reads group h // (H / G)), and add the heads' bias."""
    t = t_BSRGN.to(dtype)
    normed = t * torch.rsqrt(t.square().mean(-1, keepdim=True) + eps) * weight_N.to(dtype)
    heads_per_group = bias_HRN.shape[0] // t.shape[3]
    return normed.repeat_interleave(heads_per_group, dim=3) + bias_HRN.to(dtype).transpose(0, 1)


def _skip_gate_mix(
    y_BSRHP: torch.Tensor,
    x_BSHP: torch.Tensor,
    z_BSHP: torch.Tensor,
    D_H: torch.Tensor,
    mimo_x_HRP: torch.Tensor | None,
    mimo_z_HRP: torch.Tensor | None,
    mimo_o_HRP: torch.Tensor | None,
) -> torch.Tensor:
    """Compute (y + D ⊙ V) ⊙ SiLU(z ⊙ mimo_z), summed over the ranks with mimo_o."""
    gated = torch.addcmul(y_BSRHP, D_H.unsqueeze(-1), _values(x_BSHP, mimo_x_HRP)) * F.silu(_values(z_BSHP, mimo_z_HRP))
    if mimo_o_HRP is None:
        return gated.squeeze(2)
    return torch.einsum("bsrhp,hrp->bshp", gated, mimo_o_HRP.to(gated.dtype))


def _dims(name: str, tensor: torch.Tensor, axes: str) -> tuple[int, ...]:
    """Return the shape of a tensor, which must have one non-empty axis per letter."""
    if tensor.dim() != len(axes) or 0 in tensor.shape:
        raise ModelError(f"{name} has shape {tuple(tensor.shape)}; expected {len(axes)} axes [{', '.join(axes)}], none empty.")
    return tuple(tensor.shape)


def _check_scan(
    x_BSHP: torch.Tensor,
    b_BSRHN: torch.Tensor,
    c_BSRHN: torch.Tensor,
    adt_BSH: torch.Tensor,
    dt_BSH: torch.Tensor,
    trap_BSH: torch.Tensor,
    mimo_x_HRP: torch.Tensor | None,
    state: ScanState | None,
) -> torch.dtype:
    """Check that shapes fit, and return the dtype to compute in."""
    batch, sequence, heads, head_dim = _dims("x", x_BSHP, "BSHP")
    rank, n = (_dims("b", b_BSRHN, "BSRHN")[axis] for axis in (2, 4))
    for name, tensor in (("b", b_BSRHN), ("c", c_BSRHN)):
        _expect(name, tensor, "BSRHN", (batch, sequence, rank, heads, n))
    for name, tensor in (("adt", adt_BSH), ("dt", dt_BSH), ("trap", trap_BSH)):
        _expect(name, tensor, "BSH", (batch, sequence, heads))
    if mimo_x_HRP is not None:
        _expect("mimo_x", mimo_x_HRP, "HRP", (heads, rank, head_dim))
    elif rank != 1:
        raise ModelError(f"b and c have rank {rank} without mimo_x; SISO needs rank 1: pass mimo_x [H, R, P].")
    if state is not None:
        _expect("initial_state.h", state.h_BHPN, "BHPN", (batch, heads, head_dim, n))
        _expect("initial_state.b", state.b_BRHN, "BRHN", (batch, rank, heads, n))
        _expect("initial_state.x", state.x_BHP, "BHP", (batch, heads, head_dim))
    return compute_dtype(x_BSHP, b_BSRHN, c_BSRHN, adt_BSH, dt_BSH, trap_BSH)


def check_mixer(
    x_SBHP: torch.Tensor,
    z_SBHP: torch.Tensor,
    b_SBGRN: torch.Tensor,
    c_SBGRN: torch.Tensor,
    b_bias_HRN: torch.Tensor,
    c_bias_HRN: torch.Tensor,
    b_norm_weight_N: torch.Tensor,
    c_norm_weight_N: torch.Tensor,
    D_H: torch.Tensor,
    mimo_x_HRP: torch.Tensor | None,
    mimo_z_HRP: torch.Tensor | None,
    mimo_o_HRP: torch.Tensor | None,
    out_norm_weight_C: torch.Tensor | None,
) -> None:
    """Check what the scan's own checks do not cover: the gate, groups, norms, biases, and an incomplete set of ``mimo_*``."""
    sequence, batch, heads, head_dim = _dims("x", x_SBHP, "SBHP")
    _, _, groups, rank, n = _dims("b", b_SBGRN, "SBGRN")
    _expect("z", z_SBHP, "SBHP", (sequence, batch, heads, head_dim))
    if heads % groups:
        fitting = nearest_number(groups, (number for number in range(1, heads + 1) if heads % number == 0))
        raise ModelError(f"{heads} heads do not divide into {groups} groups of B and C; the nearest is {fitting}.")
    for name, tensor in (("b", b_SBGRN), ("c", c_SBGRN)):
        _expect(name, tensor, "SBGRN", (sequence, batch, groups, rank, n))
    for name, tensor in (("b_bias", b_bias_HRN), ("c_bias", c_bias_HRN)):
        _expect(name, tensor, "HRN", (heads, rank, n))
    for name, tensor in (("b_norm_weight", b_norm_weight_N), ("c_norm_weight", c_norm_weight_N)):
        _expect(name, tensor, "N", (n,))
    _expect("D", D_H, "H", (heads,))
    if out_norm_weight_C is not None:
        _expect("out_norm_weight", out_norm_weight_C, "C", (heads * head_dim,))
    mixes = {"mimo_x": mimo_x_HRP, "mimo_z": mimo_z_HRP, "mimo_o": mimo_o_HRP}
    missing = [name for name, tensor in mixes.items() if tensor is None]
    if missing and len(missing) < len(mixes):
        raise ModelError(f"{', '.join(missing)} missing; MIMO needs mimo_x, mimo_z and mimo_o, SISO none of them.")
    if missing and rank != 1:
        raise ModelError(f"b and c have rank {rank} without mimo_*; SISO needs rank 1: pass mimo_x, mimo_z and mimo_o.")
    for name, mix in mixes.items():
        if mix is not None:
            _expect(name, mix, "HRP", (heads, rank, head_dim))
