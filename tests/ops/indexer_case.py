"""Inputs of the indexer's ops, and what a selection of keys and a gradient are held to.

Shape legend: S queries, T keys (as many, if not said), B batch, H indexer heads, D indexer head width, N selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from megacpp_mcore.ops.indexer.chunked import KeyRule
from megacpp_mcore.ops.indexer.reference import causal_topk, indexer_grad, indexer_scores, score_block
from megacpp_mcore.ops.testing import assert_parity, worst_row

NEAR = 1e-5
"""How far, relative to the largest score of a query, two scores may be apart for rounding to exchange them."""

Tensors = list[torch.Tensor]


def draw(
    S: int,
    B: int = 2,
    H: int = 32,
    D: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    seed: int = 0,
    exact: bool = False,
    T: int | None = None,
) -> Tensors:
    """q, k and w, normally distributed; or ``exact``: so that scores are small multiples of 1/4, of which many are equal, and
    which no summation rounds."""
    generator = torch.Generator(device).manual_seed(seed)
    shapes, bounds = ((S, B, H, D), (T or S, B, D), (S, B, H)), ((-1, 2), (-1, 2), (-2, 3))
    if exact:
        sides = zip(bounds, shapes, strict=True)
        q, k, w = (torch.randint(*ends, shape, generator=generator, device=device) for ends, shape in sides)
    else:
        q, k, w = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return [tensor.to(dtype) for tensor in (q, k, w / 4 if exact else w * (H * D) ** -0.5)]


draw_exact = partial(draw, exact=True)


def as_one_projection(inputs: Tensors) -> Tensors:
    """The same q and w as columns of one matrix with unaligned rows, and k as columns of another."""
    q, k, w = inputs
    wide = pad(torch.cat([q.flatten(2), w], dim=2), (0, 3))[..., :-3]
    heads, width = q.shape[2:]
    return [
        wide[..., : heads * width].unflatten(2, (heads, width)),
        pad(k, (0, 5))[..., :-5],
        wide[..., heads * width :],
    ]


def assert_scored(score_BRT: torch.Tensor, inputs: Tensors) -> None:
    """Fail unless these are the scores of all keys in float64 but for rounding, NaN and infinities those of the reference."""
    q, k, w = inputs
    plain_BRT, truth_BRT = score_block(q, k.float(), w), score_block(q.double(), k.double(), w.double())
    finite = truth_BRT.isfinite()
    torch.testing.assert_close(score_BRT[~finite], plain_BRT[~finite], rtol=0, atol=0, equal_nan=True)
    top = truth_BRT.where(finite, 0.0).abs().amax()
    assert bool(((score_BRT - truth_BRT).abs() <= NEAR * top)[finite].all())


def check_all_keys(
    score_all: Callable[..., Any], S: int, T: int, H: int, D: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Fail unless scores of some queries, strided or not, are right, and nothing else of their buffer is written."""
    first, end = S // 3, S - S // 4
    for exact in (False, True):
        q, k, w = inputs = draw(S, H=H, D=D, T=T, dtype=dtype, device=device, exact=exact)
        part = [q[first:end], k, w[first:end]]
        for qkw in (inputs, as_one_projection(inputs), [q, k, w.float()]):
            buffer = torch.full((2, end - first + 2, T), float("nan"), device=device)
            score_all(buffer[:, 1:-1], *qkw, first)
            assert_scored(buffer[:, 1:-1], part)
            assert bool(buffer[:, [0, -1]].isnan().all())
            assert not exact or torch.equal(buffer[:, 1:-1], score_block(q[first:end], k.float(), w[first:end]))


def check_not_finite(score_all: Callable[..., Any], D: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Fail unless NaN and infinities of each input are those of the reference."""
    nan, inf = float("nan"), float("inf")
    q, k, w = draw(70, H=3, D=D, T=150, dtype=dtype, device=device)
    k[[30, 31, 149], 0, 0] = torch.tensor([nan, inf, -inf], dtype=dtype, device=device)
    q[9, 1, 2, 5], q[11, 0, 1], w[13, 0, 2], w[20, 1, 1], w[40] = -inf, 0.0, nan, inf, 0.0
    score = torch.empty(2, 70, 150, device=device)
    score_all(score, q, k, w, 0)
    assert_scored(score, [q, k, w])
    assert bool(score.isnan().any())
    assert bool((score == inf).any())


def draw_rules(S: int, T: int, B: int = 2, device: str = "cpu") -> dict[str, KeyRule | None]:
    """One of each kind; some queries see no key."""
    generator = torch.Generator(device).manual_seed(3)
    starts = torch.arange(S, device=device) // 40 * 20
    ends, position = starts + torch.arange(S, device=device) % 50, torch.randperm(T, generator=generator, device=device)
    mask = torch.randn(B, S, T, generator=generator, device=device) / 4
    hidden = torch.rand(B, S, T, generator=generator, device=device) < 0.3
    hidden[:, S // 2] = True
    return {
        "none": None,
        "within": KeyRule.within(starts, ends, position),
        "additive": KeyRule.additive(mask.masked_fill(hidden, float("-inf"))),
    }


def draw_documents(S: int, B: int = 2, device: str = "cpu", each: int = 60) -> torch.Tensor:
    """Numbers of documents ``[B, S]`` of about ``each`` rows."""
    generator = torch.Generator(device).manual_seed(11)
    starts = torch.rand(B, S, generator=generator, device=device) < 1 / each
    return (2 * starts.cumsum(1)).int()


def draw_target(index_BSN: torch.Tensor) -> torch.Tensor:
    """A target that nobody may read where there is no key, and of which query 7 has none."""
    generator = torch.Generator(index_BSN.device).manual_seed(5)
    target = torch.randn(index_BSN.shape, generator=generator, device=index_BSN.device).exp()
    target[0, 7] = 0.0
    return target.masked_fill(index_BSN < 0, float("nan"))


def assert_selected(index_BSN: torch.Tensor, inputs: Tensors, topk: int, seq_idx_BS: torch.Tensor | None = None) -> None:
    """Fail unless the selection is that of the scores in float64, but for keys whose scores are :data:`NEAR` each other."""
    score_BSS = indexer_scores(*(tensor.double() for tensor in inputs))
    expected_BSN = causal_topk(score_BSS, topk, seq_idx_BS)
    assert index_BSN.dtype == torch.int32
    assert index_BSN.shape == expected_BSN.shape
    assert torch.equal(index_BSN >= 0, expected_BSN >= 0), "a query has another number of keys"
    keys = score_BSS.shape[-1]
    in_order = index_BSN.masked_fill(index_BSN < 0, keys).diff(dim=-1)
    assert bool(((in_order > 0) | (index_BSN[..., 1:] < 0)).all()), "keys are out of order"
    selected, wanted = (_chosen(index, keys) for index in (index_BSN, expected_BSN))
    exchanged = selected != wanted
    print(f"{int(exchanged.sum()) // 2} of {int(wanted.sum())} keys are exchanged")
    top = score_BSS.abs().amax(-1)
    for chosen in (selected, wanted):
        # Keys that only one selection has: all their scores are near each other.
        rows = score_BSS.masked_fill(~(exchanged & chosen), 0.0)
        other = score_BSS.masked_fill(~(exchanged & ~chosen), 0.0)
        count = (exchanged & chosen).sum(-1)
        assert bool(((rows.sum(-1) - other.sum(-1)).abs() <= NEAR * top * count.clamp_min(1)).all()), (
            "a better key was passed over"
        )


def _chosen(index_BSN: torch.Tensor, keys: int) -> torch.Tensor:
    chosen = torch.zeros((*index_BSN.shape[:2], keys + 1), dtype=torch.bool, device=index_BSN.device)
    return chosen.scatter_(2, torch.where(index_BSN < 0, keys, index_BSN).long(), True)[..., :keys]


def assert_gradients(
    found: tuple[torch.Tensor, ...], inputs: Tensors, index_BSN: torch.Tensor, target_BSN: torch.Tensor, factor: float
) -> None:
    """Fail unless loss and gradients are those of the reference in float64.

    A query that selects one key has no gradient but rounding: those of q and w are compared for the others. Beside
    the reference, which computes in float32, the kernel's products have factors of 16 bits: three times the rounding of its
    result is allowed.
    """
    double = [tensor.double() for tensor in inputs]
    truth = indexer_grad(*double, index_BSN, target_BSN.double(), factor)
    plain = indexer_grad(*inputs, index_BSN, target_BSN, factor)
    several = ((index_BSN >= 0).sum(-1) > 1).T
    for name, actual, want, peer in zip(("loss", "dq", "dk", "dw"), found, truth, plain, strict=True):
        assert actual.dtype == peer.dtype
        if name in ("dq", "dw"):
            assert bool(actual[~several].isfinite().all())
            actual, want, peer = actual[several], want[several], peer[several]
        if actual.dim() == 0:
            actual, want, peer = actual[None], want[None], peer[None]
        rms = 1e-5 if name == "loss" else 5e-3
        print(f"{name}: worst row {worst_row(actual, want):.1e}, the reference's {worst_row(peer, want):.1e}")
        assert_parity(actual, want, rms=max(rms, 3 * worst_row(peer, want)), dtype_peer=peer, name=name)
