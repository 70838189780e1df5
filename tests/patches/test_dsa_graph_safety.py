"""The patch dsa-graph-safety: the captured path never waits for the host, gives stock's bytes, and eager mode still checks.

No graph is captured here (tests/gpu does): ``torch.cuda.is_current_stream_capturing`` says that one is.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.patches.dsa_graph_safety import PATCH
from tests import stock
from tests.dsa_layer import DSA, Recorder, dsa_attention, dsa_config, layer_inputs, run_layer

pytestmark = pytest.mark.exhaustive

TOKENS = 24
CU_SEQLENS = ([0, 24], [0, 8, 24], [0, 0, 4, 4, 24], [0, 4, 8, 12, 24])


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """What code in a capture sees, on a machine without a GPU."""
    with contextlib.ExitStack() as answers:
        for question in ("is_available", "is_initialized", "is_current_stream_capturing"):
            answers.enter_context(mock.patch.object(torch.cuda, question, return_value=True))
        yield


class HostRecorder(Recorder):
    """Records which operations would wait for a GPU, or copy from the host to it: a capture refuses both."""

    WAIT = frozenset(
        f"aten::{name}"
        for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "lift_fresh", "_unique2")
    )
    """``lift_fresh`` is what ``torch.tensor(number, device=…)`` shows of its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[str] = set()
        self._methods = contextlib.ExitStack()

    def __enter__(self) -> Any:
        for name in ("tolist", "numpy", "cpu"):  # on a CPU tensor these are no operations
            self._methods.enter_context(mock.patch.object(torch.Tensor, name, self._noting(name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.close()

    def _noting(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.waits.add(name)
            return method(tensor, *args, **kwargs)

        return noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in self.WAIT:
            self.waits.add(name)
        if name in ("aten::index.Tensor", "aten::index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.waits.add("boolean index")
        if name.startswith("aten::repeat_interleave") and (kwargs or {}).get("output_size") is None:
            self.waits.add("repeat_interleave without output_size")
        return super().__torch_dispatch__(func, types, args, kwargs)


def dsa() -> Any:
    return importlib.import_module(DSA)


# --- a whole stock layer -----------------------------------------------------------------------------------------------


def packed(cu_seqlens: list[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
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
    "mask": ({}, {"attention_mask": True, "attn_mask_type": None}),
    "packed": ({}, {"packed_seq_params": [0, 8, 8, 24]}),
}
NEEDS_NOTHING = {"loss per token", "no loss"}
"""Variants that stock's own code can be captured in."""


def layer_results(variant: str, recorder: Any = None) -> list[torch.Tensor]:
    """Output and gradients of a stock DSA layer, forward and backward under ``recorder``."""
    overrides, options = VARIANTS[variant]
    options = dict(options)
    batch = 2
    if "packed_seq_params" in options:
        options["packed_seq_params"], batch = packed(options["packed_seq_params"]), 1
    if "attention_mask" in options:
        options["attention_mask"] = hidden(batch)
    torch.manual_seed(3)
    attention = dsa_attention(dsa_config(**overrides)).train()
    inputs = layer_inputs(TOKENS, batch)
    run_layer(attention, inputs, **options)  # rotary table and loss log, as any warm-up before a capture makes them
    leaves = [*inputs.values(), *attention.parameters()]
    with recorder or contextlib.nullcontext():
        output = run_layer(attention, inputs, **options)
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
    return [output, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_layer_never_waits_and_gives_stocks_bytes(process: Path, variant: str) -> None:
    stock.loss_scale(1.0)
    seen = HostRecorder()
    expected = layer_results(variant, seen)
    assert bool(seen.waits) == (variant not in NEEDS_NOTHING), seen.waits
    captured = HostRecorder()
    with stock.patched(PATCH), capture():
        results = layer_results(variant, captured)
    assert captured.waits == set()
    assert len(captured.operations) > 30
    assert len(results) == len(expected)
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_unset_loss_scale_is_one_and_is_not_kept(process: Path) -> None:
    scaler = dsa().DSAIndexerLossAutoScaler

    def gradient(recorder: Recorder) -> torch.Tensor:
        activation, loss = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        with recorder, mock.patch.object(scaler, "main_loss_backward_scale", None):
            scaler.apply(activation, loss).sum().backward()
            kept.append(scaler.main_loss_backward_scale)
        assert torch.equal(activation.grad, torch.ones(3))
        return loss.grad

    kept: list[Any] = []
    stock_recorder, captured, eager = HostRecorder(), HostRecorder(), HostRecorder()
    expected = gradient(stock_recorder)
    with stock.patched(PATCH):
        with capture():
            assert torch.equal(gradient(captured), expected)
        assert torch.equal(gradient(eager), expected)
        with capture(), mock.patch.object(scaler, "main_loss_backward_scale", torch.tensor(0.25)):
            loss = torch.tensor(2.0, requires_grad=True)
            scaler.apply(torch.ones(3, requires_grad=True), loss).sum().backward()
            assert float(loss.grad) == 0.25
    assert stock_recorder.waits == eager.waits == {"aten::lift_fresh"}
    assert captured.waits == set()
    assert [scale is None for scale in kept] == [False, True, False]


# --- context parallelism and packed sequences --------------------------------------------------------------------------


@contextlib.contextmanager
def ranks_with(lengths: list[int]) -> Iterator[Any]:
    """A group of ranks whose sequences have these lengths."""

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
        recorder = HostRecorder()
        with ranks_with([8, 6]) as gathered, capture(), recorder:
            validate(8, 8)
            validate(8, 16)
            assert gathered.call_count == 0
            with pytest.raises(RuntimeError, match="key length 9 for cp_size=2"):
                validate(8, 9)
        assert recorder.waits == set()
        with ranks_with([8, 8]):
            validate(8, 16)


@pytest.mark.parametrize("cu_seqlens", CU_SEQLENS, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("padding", [0, 4, None])
def test_packed_positions_are_stocks(process: Path, cu_seqlens: list[int], cp_size: int, padding: int | None) -> None:
    """``padding``: rows behind the last sequence; None: none, and the caller says so."""
    bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
    size = 24 // cp_size + (padding or 0)
    module = importlib.import_module(f"{DSA}_layout")

    def positions(rank: int) -> torch.Tensor:
        return module.build_packed_allgather_cp_local_positions(
            bounds, cp_size, rank, torch.device("cpu"), size, cu_seqlens_cover_output=padding is None
        )

    def order() -> Any:
        return module.build_packed_allgather_cp_query_positions_and_key_reorder(
            bounds, bounds, cp_size, 0, torch.device("cpu"), size, size, size * cp_size
        )

    expected, expected_order = [positions(rank) for rank in range(cp_size)], order()
    recorder = HostRecorder()
    with stock.patched(PATCH), capture(), recorder:
        ours, ours_order = [positions(rank) for rank in range(cp_size)], order()
    for have, want in zip([*ours, *ours_order], [*expected, *expected_order], strict=True):
        assert have.dtype == want.dtype
        assert torch.equal(have, want)
    assert recorder.waits == set()


@pytest.mark.parametrize("cu_seqlens", CU_SEQLENS, ids=str)
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("table", [24, 20], ids=["whole batch", "longest sequence"])
def test_packed_rotation_is_stocks(
    process: Path, cu_seqlens: list[int], cp_size: int, interleaved: bool, table: int
) -> None:
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

    seen, captured = HostRecorder(), HostRecorder()
    with seen:
        expected = [rotated(rank) for rank in range(cp_size)]
    assert seen.waits == {"aten::_local_scalar_dense", "tolist"}
    with stock.patched(PATCH), capture(), captured:
        ours = [rotated(rank) for rank in range(cp_size)]
    assert captured.waits == set()
    for have, want in zip(ours, expected, strict=True):
        assert torch.equal(have, want)
