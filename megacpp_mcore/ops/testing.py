"""The parity criterion that tests and benchmarks share: the distance of each row from a float64 truth.

A row is the last axis. Its error is ``‖actual − expected‖ / max(‖expected‖, 1 % of the RMS of all rows' norms)``, and the worst
row counts, so that neither one dropped row among thousands nor a wrong scale can hide.
"""

from __future__ import annotations

import torch

PEER_RATIO = 1.5
"""How much worse than plain PyTorch at a 16-bit dtype the worst row may be, if that is looser than ``rms``."""

SMALL_ROW = 1e-2
"""A row smaller than this fraction of the typical row is measured against that fraction, not against itself: some rows are
zero except for rounding (as the gradient of the first token's rotation angles), and have no relative error."""


def row_norms(expected: torch.Tensor) -> torch.Tensor:
    """Compute the denominators of the errors of ``expected``'s rows: float64, of its shape without the last axis."""
    norms = expected.detach().double().norm(dim=-1) if expected.dim() else expected.detach().double().abs()
    return norms.clamp(min=SMALL_ROW * float(norms.square().mean().sqrt()))


def row_errors(actual: torch.Tensor, expected: torch.Tensor, name: str = "", norms: torch.Tensor | None = None) -> torch.Tensor:
    """Compute each row's error, of ``expected``'s shape without the last axis; infinite where only the truth is zero.

    Args:
        actual: the result of the path under test.
        expected: the truth, best in float64.
        name: what is compared, for the message.
        norms: replaces :func:`row_norms`.

    Raises:
        AssertionError: shapes differ, or a value is not finite.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name or 'actual'}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    values, truth = actual.detach().to(expected.device).double(), expected.detach().double()
    for what, tensor in (("it", values), ("the expected tensor", truth)):
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise AssertionError(f"{name or 'actual'}: {what} holds {count} values that are not finite")
    error = (values - truth).norm(dim=-1) if truth.dim() else (values - truth).abs()
    against = row_norms(truth) if norms is None else norms
    return torch.where(error == 0, torch.zeros_like(error), error / against)


def worst_row(actual: torch.Tensor, expected: torch.Tensor, name: str = "", norms: torch.Tensor | None = None) -> float:
    """Return the largest of :func:`row_errors`."""
    return float(row_errors(actual, expected, name, norms).max())


def assert_parity(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    rms: float,
    max_abs_factor: float | None = None,
    dtype_peer: torch.Tensor | None = None,
    name: str = "",
    norms: torch.Tensor | None = None,
) -> None:
    """Fail unless every row of ``actual`` matches ``expected``; a tensor of zeros must match exactly.

    Args:
        actual: the result of the path under test.
        expected: the truth, best in float64.
        rms: the largest error of a row allowed.
        max_abs_factor: the largest single error allowed, as a multiple of that of ``dtype_peer``.
        dtype_peer: the same mathematics in plain PyTorch at the dtype of the path under test. Where that is a 16-bit
            one, :data:`PEER_RATIO` × the peer's error is allowed if that is more than ``rms``.
        name: what is compared, for the message.
        norms: replaces :func:`row_norms`, also for the peer.

    Raises:
        AssertionError: it differs; the message names the row and the figures.
        ValueError: ``max_abs_factor`` without ``dtype_peer``, or nothing to compare.
    """
    if max_abs_factor is not None and dtype_peer is None:
        raise ValueError("max_abs_factor compares with dtype_peer, which is missing: pass plain PyTorch at the same dtype.")
    if expected.numel() == 0:
        raise ValueError(f"{name or 'expected'} has shape {tuple(expected.shape)}: there is nothing to compare.")
    errors, limit = row_errors(actual, expected, name, norms).flatten(), rms
    if dtype_peer is not None:
        peers_worst = worst_row(dtype_peer, expected, f"{name} (dtype_peer)", norms)
        if dtype_peer.dtype in (torch.bfloat16, torch.float16):
            limit = max(rms, PEER_RATIO * peers_worst)
        if max_abs_factor is not None:
            largest, peers = (
                float((tensor.double().to(expected.device) - expected.double()).abs().max()) for tensor in (actual, dtype_peer)
            )
            if not largest <= max_abs_factor * peers:
                raise AssertionError(
                    f"{name}: largest error {largest:.3e}, allowed {max_abs_factor * peers:.3e} ({max_abs_factor} × peer)"
                )
    worst = int(errors.argmax())
    if not float(errors[worst]) <= limit:
        rows = expected.shape[:-1]
        row = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), rows)) if rows else ()
        raise AssertionError(
            f"{name}: row {row} differs by {float(errors[worst]):.3e} of its norm, allowed {limit:.3e} "
            f"({int((errors > limit).sum())} of {errors.numel()} rows are beyond it)"
        )


EARLY = 16
"""In the gradient of a query that sees this many keys or fewer the terms cancel, entirely with one key: the rest is
rounding, in any kernel, and is meaningless relative to the gradient."""


@torch.no_grad()
def query_gradient_terms(
    q_SBHK: torch.Tensor,
    k_TBHK: torch.Tensor,
    v_TBHV: torch.Tensor,
    do_SBHV: torch.Tensor,
    softmax_scale: float,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Magnitude of the terms that cancel in a query's gradient: norms ``[S, B, H]``, float64.

    The norms of ``scale · Σ_j p_j (do·v_j − Σ_i p_i do·v_i) k_j`` with all factors replaced by magnitudes. Legend: S queries,
    T keys, B batch, H heads, K query-key width, V value width; ``do`` is the gradient of the output.

    Args:
        hidden: bool, broadcastable to [B, H, S, T]; each query sees at least one key.
    """
    q, k, v, do = (tensor.detach().double() for tensor in (q_SBHK, k_TBHK, v_TBHV, do_SBHV))
    score_BHST = torch.einsum("sbhk,tbhk->bhst", q, k) * softmax_scale
    p_BHST = score_BHST.masked_fill(hidden, float("-inf")).softmax(-1)
    dp_BHST = torch.einsum("sbhv,tbhv->bhst", do.abs(), v.abs())
    ds_BHST = p_BHST * (dp_BHST + (p_BHST * dp_BHST).sum(-1, keepdim=True))
    return torch.einsum("bhst,tbhk->sbhk", ds_BHST, k.abs()).norm(dim=-1) * softmax_scale


def early_causal_terms(inputs: list[torch.Tensor], softmax_scale: float, queries: int = EARLY) -> torch.Tensor:
    """:func:`query_gradient_terms` of the first ``queries`` under a causal mask, for q, k, v and do of S = T."""
    q, k, v, do = (tensor[:queries] for tensor in inputs)
    hidden = ~torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    return query_gradient_terms(q, k, v, do, softmax_scale, hidden)
