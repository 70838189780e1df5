"""The patch dsa-sparse-attention against the real stock function and layer: what is attended to, memory, and what is left.

Legend: S queries, T keys, B batch, H heads, N selected keys.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.backends import observed
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.patches import dsa_sparse_attention
from megacpp_mcore.patches.dsa_sparse_attention import PATCH
from tests import stock
from tests.dsa_layer import LATENT, ROPE, Recorder, dsa_attention, dsa_config, layer_inputs, run_layer, stock_in_double
from tests.patches.test_dsa_indexer_memory import SELECTIONS, dsa, selection

SCALE, HEADS = (LATENT + ROPE) ** -0.5, 5


@contextlib.contextmanager
def patched() -> Iterator[mock.Mock]:
    """The replacement in stock's place; gives the original, which counts its calls."""
    (edit,) = PATCH.edits
    name = edit.target.partition(":")[2]
    original = mock.create_autospec(getattr(dsa(), name), side_effect=getattr(dsa(), name))
    dsa_sparse_attention._log_once.cache_clear()
    observed.forget()
    with mock.patch.object(dsa(), name, edit.make(original)):
        yield original


def inputs(S: int, T: int, B: int = 2, N: int = 6, dtype: Any = torch.float32) -> tuple[torch.Tensor, ...]:
    """Queries, one head of keys, indices of which some are −1, and a gradient of the output."""
    generator = torch.Generator().manual_seed(S * 1000 + T)
    query, key, gradient = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((S, B, HEADS, LATENT + ROPE), (T, B, 1, LATENT + ROPE), (S, B, HEADS, LATENT))
    )
    index_BSN = torch.rand(B, S, T, generator=generator).topk(min(N, T), -1).indices
    index_BSN[:, ::3, -1] = -1
    return query.requires_grad_(), key.requires_grad_(), index_BSN, gradient


def doubled(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors)


def outcome(tensors: tuple[torch.Tensor, ...], **how: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of queries and keys."""
    query, key, index_BSN, gradient = tensors
    output = dsa()._unfused_absorbed_dsa_fn(query, key, index_BSN, SCALE, LATENT, **how)
    return [output.detach(), *torch.autograd.grad(output, (query, key), gradient.to(output.dtype))]


def apart(ours: torch.Tensor, stocks: torch.Tensor) -> float:
    """The norm of the difference, relative to that of ``stocks``."""
    return float((ours.double() - stocks.double()).norm() / stocks.double().norm())


@pytest.mark.parametrize("kind", [*SELECTIONS, "mask", "mask of each row"])
@pytest.mark.parametrize(("S", "T"), [(37, 37), (23, 41)])
def test_output_and_gradients_are_stocks(kind: str, S: int, T: int) -> None:
    tensors, how = inputs(S, T), selection(kind, S, T)
    with stock_in_double():
        expected = outcome(tensors, **how)
    with patched() as original:
        actual = outcome(tensors, **how)
    original.assert_not_called()
    for name, ours, stocks in zip(("output", "query", "key"), actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (stocks.shape, torch.float32)
        assert apart(ours, stocks) < 1e-5, name
    # Of a query that sees none of its keys, zeros; there are such.
    if kind in ("packed", "mask", "mask of each row"):
        assert (actual[0].abs().amax(-1) == 0).any()


def test_16_bits_are_computed_in_float32() -> None:
    tensors = inputs(61, 61, dtype=torch.bfloat16)
    with stock_in_double():
        expected = outcome(doubled(tensors))
    with patched():
        actual = outcome(tensors)
    for ours, stocks in zip(actual, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_parity(ours, stocks.float(), rms=5e-3)


def test_a_layer_of_stocks_trains_as_before_and_holds_no_scores_of_all_keys(tmp_path: Path) -> None:
    S = 96
    with stock.one_process(tmp_path / "store"):
        stock.loss_scale(1.0)
        torch.manual_seed(3)
        attention, tensors = dsa_attention(dsa_config()), layer_inputs(S, 2)
        leaves = [*tensors.values(), *attention.parameters()]

        def step() -> tuple[list[torch.Tensor], Recorder]:
            with Recorder() as recorder:
                output = run_layer(attention, tensors)
                gradients = torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
            return [output.detach(), *(grad for grad in gradients if grad is not None)], recorder

        expected, stocks = step()
        with patched() as original:
            actual, ours = step()
        original.assert_not_called()
    for tensor, other in zip(actual, expected, strict=True):
        assert apart(tensor, other) < 1e-5
    assert "aten::topk" in {name.partition(".")[0] for name in ours.operations}  # the indexer is stock's
    assert ours.peak_bytes < stocks.peak_bytes
    (note,) = observed.notes()
    assert (note["op"], note["observed"]) == ("sparse_mla", "reference")
    assert PATCH.name in note["reason"]


OUTSIDE: dict[str, Any] = {
    "float64": doubled,
    "float16": lambda tensors: (tensors[0].detach().half().requires_grad_(), *tensors[1:]),  # beside float32
}


@pytest.mark.parametrize("case", [*OUTSIDE, "autocast"])
def test_what_is_out_of_scope_is_stocks_and_the_log_says_so_once(case: str, caplog: pytest.LogCaptureFixture) -> None:
    tensors = OUTSIDE.get(case, lambda tensors: tensors)(inputs(17, 17))
    expected = outcome(tensors)
    with patched() as original, caplog.at_level(logging.WARNING), torch.autocast("cpu", enabled=case == "autocast"):
        calls = [outcome(tensors) for _ in range(2)]
    assert original.call_count == 2
    if case != "autocast":
        torch.testing.assert_close(calls, [expected] * 2, rtol=0, atol=0)
    assert len([record for record in caplog.records if PATCH.name in record.message and case in record.message]) == 1
    (note,) = observed.notes()
    assert (note["observed"], note["slower_than_best"]) == ("megatron", True)
