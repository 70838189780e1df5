"""The comparison that every parity test uses: worst-row RMS ratio, and the largest error against plain PyTorch's."""

from __future__ import annotations

import torch

_PEER_RATIO = 1.5
"""How much worse than plain PyTorch at a 16-bit dtype the worst row may be, where that is looser than ``rms``."""

_SMALL_ROW = 1e-2
"""A row below this part of the typical row is measured against that part, not against itself: some rows are zero but
for rounding (the gradient of the first token's rotation angles is), and have no relative error."""


def assert_parity(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    rms: float,
    max_abs_factor: float | None = None,
    dtype_peer: torch.Tensor | None = None,
    name: str = "",
) -> None:
    """Fail unless every row of ``actual`` is that of ``expected``; a row is the last axis.

    Per row ``‖actual − expected‖ / max(‖expected‖, 1 % of the RMS of all row norms)``, and the worst row counts, so
    that neither one dropped row among thousands nor a wrong scale can hide. A tensor of zeros must be met exactly.

    Args:
        actual: what the path under test gave.
        expected: the truth, best in float64.
        rms: the largest ratio allowed.
        max_abs_factor: the largest single error allowed, as a multiple of that of ``dtype_peer``.
        dtype_peer: the same mathematics in plain PyTorch at the dtype of the path under test. Where that is a 16-bit
            one, the ratio allowed is 1.5 × the peer's if that is more than ``rms``.
        name: what is compared, for the message.

    Raises:
        AssertionError: it differs; the message names the row and the figures.
        ValueError: ``max_abs_factor`` without ``dtype_peer``, or nothing to compare.
    """
    if max_abs_factor is not None and dtype_peer is None:
        raise ValueError(
            "max_abs_factor compares with dtype_peer, which is missing: pass plain PyTorch at the same dtype."
        )
    if expected.numel() == 0:
        raise ValueError(f"{name or 'expected'} has shape {tuple(expected.shape)}: there is nothing to compare.")
    truth = expected.detach().double().cpu()
    error = _error(actual, truth, name or "actual")
    ratio = _row_ratios(error, truth)
    limit = rms
    if dtype_peer is not None:
        peer_error = _error(dtype_peer, truth, f"{name} (dtype_peer)")
        if dtype_peer.dtype in (torch.bfloat16, torch.float16):
            limit = max(rms, _PEER_RATIO * _row_ratios(peer_error, truth).max().item())
        if max_abs_factor is not None:
            largest, allowed = error.abs().max().item(), max_abs_factor * peer_error.abs().max().item()
            if not largest <= allowed:
                raise AssertionError(
                    f"{name}: largest error {largest:.3e}, allowed {allowed:.3e} ({max_abs_factor} × peer)"
                )
    worst = int(ratio.argmax())
    if not ratio[worst].item() <= limit:
        bad = int((ratio > limit).sum())
        row = (
            tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), truth.shape[:-1])) if truth.dim() > 1 else ()
        )
        raise AssertionError(
            f"{name}: row {row} differs by {ratio[worst].item():.3e} of its norm, allowed {limit:.3e} "
            f"({bad} of {ratio.numel()} rows are beyond it)"
        )


def worst_row(actual: torch.Tensor, expected: torch.Tensor, name: str = "") -> float:
    """The largest error of a row as a part of its norm, as :func:`assert_parity` measures it."""
    truth = expected.detach().double().cpu()
    return _row_ratios(_error(actual, truth, name or "actual"), truth).max().item()


def _error(actual: torch.Tensor, truth: torch.Tensor, name: str) -> torch.Tensor:
    """``actual − truth`` in float64, after refusing another shape and anything that is not finite."""
    if actual.shape != truth.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}")
    values = actual.detach().double().cpu()
    for what, tensor in (("it", values), ("the expected tensor", truth)):
        if not torch.isfinite(tensor).all():
            raise AssertionError(
                f"{name}: {what} holds {int((~torch.isfinite(tensor)).sum())} values that are not finite"
            )
    return values - truth


def _row_ratios(error: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The error of each row as a part of its norm, flat; infinite where the whole truth is 0 and the error is not."""
    columns = truth.shape[-1] if truth.dim() else 1
    error_norm = error.reshape(-1, columns).norm(dim=-1)
    truth_norm = truth.reshape(-1, columns).norm(dim=-1)
    truth_norm = truth_norm.clamp(min=_SMALL_ROW * truth_norm.square().mean().sqrt().item())
    return torch.where(error_norm == 0, torch.zeros_like(error_norm), error_norm / truth_norm)
