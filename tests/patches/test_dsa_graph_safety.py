"""The patch dsa-graph-safety: the captured path never waits for the host, gives stock's bytes, and eager mode still checks.

No graph is captured here (tests/gpu does): ``torch.cuda.is_current_stream_capturing`` says that one is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.patches.dsa_graph_safety import PATCH, _rotary
from tests import micro_batch, stock
from tests.dsa_layer import DSA, dsa, dsa_attention, dsa_config, layer_inputs, run_layer
from tests.host_reads import host_reads
from tests.lanes import exhaustive_but

TOKENS = 24
CU_SEQLENS = exhaustive_but(([0, 24], [0, 8, 24], [0, 0, 4, 4, 24], [0, 4, 8, 12, 24]), [0, 4, 8, 12, 24])


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """The patch in what code sees of a capture, on a machine without a GPU; what a capture refuses fails."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(stock.patched(PATCH))
        for question in ("is_available", "is_initialized", "is_current_stream_capturing"):
            stack.enter_context(mock.patch.object(torch.cuda, question, return_value=True))
        waits = stack.enter_context(host_reads(copies=True))
        yield
        assert not waits


assert_same = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def packed(cu_seqlens: list[int]) -> Any:
    """A packed row with some rows that only fill up."""
    params = micro_batch.packed([end - start for start, end in itertools.pairwise(cu_seqlens)])
    params.real_token_mask_q = torch.arange(cu_seqlens[-1]) % 5 != 0
    return params


def hidden(batch: int) -> torch.Tensor:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return ~causal | (torch.rand(batch, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.3)


VARIANTS = {
    "sparse loss": ({}, {}),
    "dense loss": ({"dsa_indexer_use_sparse_loss": False}, {}),
    "loss per token": ({"calculate_per_token_loss": True}, {}),
    "no loss": ({"dsa_indexer_loss_coeff": 0.0}, {}),
    "mask": ({}, {"attention_mask": hidden, "attn_mask_type": None}),
    "packed": ({}, {"packed_seq_params": lambda batch: packed([0, 8, 8, 24])}),
}
NEEDS_NOTHING = {"loss per token", "no loss"}
"""Variants that stock's own code can be captured in."""


@pytest.mark.parametrize("variant", exhaustive_but(VARIANTS, "sparse loss"))
def test_a_captured_layer_never_waits_and_gives_stocks_bytes(process: Path, variant: str) -> None:
    stock.loss_scale(1.0)
    overrides, makers = VARIANTS[variant]
    batch = 1 if variant == "packed" else 2
    options = {name: make(batch) if callable(make) else make for name, make in makers.items()}

    def results(scope: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
        torch.manual_seed(3)
        attention, inputs = dsa_attention(dsa_config(**overrides)).train(), layer_inputs(TOKENS, batch)
        run_layer(attention, inputs, **options)  # rotary table and loss log, as any warm-up before a capture makes them
        leaves = [*inputs.values(), *attention.parameters()]
        with scope:
            output = run_layer(attention, inputs, **options)
            gradients = torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
        return [output, *(gradient for gradient in gradients if gradient is not None)]

    with host_reads(copies=True) as waits:
        stocks = results(contextlib.nullcontext())
    assert bool(waits) == (variant not in NEEDS_NOTHING), waits
    assert_same(results(captured()), stocks)


def test_an_unset_loss_scale_is_one_and_is_not_kept(process: Path) -> None:
    scaler = dsa().DSAIndexerLossAutoScaler
    inputs = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)

    def gradients(scale: torch.Tensor | None, scope: contextlib.AbstractContextManager[Any]) -> Any:
        """Of activation and loss; and whether a scale was left behind."""
        with mock.patch.object(scaler, "main_loss_backward_scale", scale):
            with scope:
                grads = torch.autograd.grad(scaler.apply(*inputs).sum(), inputs)
            return [gradient.tolist() for gradient in grads], scaler.main_loss_backward_scale is not None

    with host_reads(copies=True) as waits:
        assert gradients(None, contextlib.nullcontext()) == ([[1.0] * 3, 1.0], True)
    assert waits
    assert gradients(None, captured()) == ([[1.0] * 3, 1.0], False)
    assert gradients(torch.tensor(0.25), captured()) == ([[1.0] * 3, 0.25], True)
    with stock.patched(PATCH):
        assert gradients(None, contextlib.nullcontext()) == ([[1.0] * 3, 1.0], True)


@contextlib.contextmanager
def ranks_with(lengths: list[int]) -> Iterator[Any]:
    def gather(into: list[torch.Tensor], local: torch.Tensor, group: Any) -> None:
        for tensor, length in zip(into, lengths, strict=True):
            tensor.fill_(length)

    with (
        mock.patch.object(torch.distributed, "all_gather", side_effect=gather) as gathered,
        mock.patch.object(dsa(), "get_pg_size", return_value=len(lengths)),
    ):
        yield gathered


def validate(query_rows: int, key_rows: int) -> None:
    dsa()._validate_nonpacked_cp_uniform_length(query_rows, key_rows, 2, "group", torch.device("cpu"))


def test_lengths_of_other_ranks_are_checked_in_eager_mode_only(process: Path) -> None:
    with stock.patched(PATCH):
        with ranks_with([8, 6]) as gathered:
            with pytest.raises(RuntimeError, match=r"per-rank lengths \[8, 6\]"):
                validate(8, 8)
            assert gathered.call_count == 1
        with ranks_with([8, 8]):
            validate(8, 16)
    with ranks_with([8, 6]) as gathered, captured():
        validate(8, 8)
        validate(8, 16)
        assert gathered.call_count == 0
        with pytest.raises(RuntimeError, match="key length 9 for cp_size=2"):
            validate(8, 9)


@pytest.mark.parametrize("cu_seqlens", CU_SEQLENS, ids=str)
@pytest.mark.parametrize("cp_size", exhaustive_but([1, 2], 2))
@pytest.mark.parametrize("padding", exhaustive_but([0, 4, None], 4))
def test_packed_positions_are_stocks(process: Path, cu_seqlens: list[int], cp_size: int, padding: int | None) -> None:
    """``padding``: rows behind the last sequence; None: none, as the caller asserts."""
    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    size = 24 // cp_size + (padding or 0)
    module = importlib.import_module(f"{DSA}_layout")

    def positions(rank: int) -> torch.Tensor:
        return module.build_packed_allgather_cp_local_positions(
            bounds, cp_size, rank, torch.device("cpu"), size, cu_seqlens_cover_output=padding is None
        )

    def both() -> list[torch.Tensor]:
        order = module.build_packed_allgather_cp_query_positions_and_key_reorder(
            bounds, bounds, cp_size, 0, torch.device("cpu"), size, size, size * cp_size
        )
        return [*(positions(rank) for rank in range(cp_size)), *order]

    stocks = both()
    with captured():
        ours = both()
    assert_same(ours, stocks)


@pytest.mark.parametrize("cu_seqlens", CU_SEQLENS, ids=str)
@pytest.mark.parametrize("cp_size", exhaustive_but([1, 2], 2))
@pytest.mark.parametrize("interleaved", exhaustive_but([True, False], True))
@pytest.mark.parametrize("table", exhaustive_but([24, 20], 24))
def test_packed_rotation_is_stocks(process: Path, cu_seqlens: list[int], cp_size: int, interleaved: bool, table: int) -> None:
    from megatron.core.models.common.embeddings import rope_utils

    if table == 20 and len(cu_seqlens) == 2:
        table = 32  # the one sequence has 24 rows
    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    rows, frequencies = torch.randn(24 // cp_size, 3, 8), torch.randn(table, 1, 1, 8)

    def rotated(rank: int) -> torch.Tensor:
        group = SimpleNamespace(size=lambda: cp_size, rank=lambda: rank)
        return rope_utils._apply_rotary_pos_emb_thd(
            rows, bounds, frequencies, mla_rotary_interleaved=interleaved, mscale=1.25, cp_group=group
        )

    with host_reads() as waits:
        stocks = [rotated(rank) for rank in range(cp_size)]
    assert waits
    with captured():
        ours = [rotated(rank) for rank in range(cp_size)]
    assert_same(ours, stocks)


def test_a_rotation_is_passed_on_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parameters that NVIDIA/Megatron-LM#5944 added; where the longest length is passed, stock reads nothing."""
    from megatron.core.models.common.embeddings import rope_utils

    def stocks(
        t: Any, cu_seqlens: Any, freqs: Any, mscale: Any = 1.0, inverse: Any = False, cp_group: Any = None,
        multi_latent_attention: Any = None, max_seqlen: Any = None,
    ) -> str:  # fmt: skip
        return "stock"

    group, seen = SimpleNamespace(size=lambda: 1, rank=lambda: 0), []
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", lambda t, freqs, **rotation: seen.append(rotation) or t)
    call = functools.partial(_rotary.make(stocks), torch.ones(4, 1, 8), torch.tensor([0, 4]), torch.ones(4, 1, 1, 8))
    with captured():
        assert call(inverse=True, cp_group=group).shape == (4, 1, 8)
        assert call(inverse=True, cp_group=group, max_seqlen=4) == "stock"
    assert seen == [{"mscale": 1.0, "inverse": True}]
