"""Mamba-3's Triton kernels on a GPU against the reference in float64: outputs, states and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_mcore.ops.mamba3 import reference as ref
from megacpp_mcore.ops.mamba3 import triton as fused
from megacpp_mcore.ops.testing import assert_parity, row_norms, worst_row
from tests.gpu.device import assert_replays, assert_same_bits, peak
from tests.ops.mamba3_case import Case, inputs, make_tensors, run, with_gradients

pytestmark = pytest.mark.usefixtures("poisoned")

OVERALL = 1e-2
"""What a whole gradient may be off, as a part of its norm; single rows are measured against plain PyTorch's."""

CASES = {
    "aligned": Case(512),
    "odd": Case(2345, B=1, out_norm=False),
    "one_token": Case(1, states=True, out_norm=False),
    "documents": Case(301, documents=(100, 77, 124), states=True),
    "heads_of_tp2": Case(384, H=56, G=4),
    "heavy_tail": Case(130, activation="heavy_tail", states=True),
    "rank_2": Case(300, R=2),
    "mimo_of_rank_1": Case(256, R=1),
    "whole_rotation": Case(301, A=32, documents=(100, 201), B=1),
    "siso": Case(1000, R=1, mimo=False, out_norm=False),
    "siso_whole_rotation": Case(301, A=32, R=1, mimo=False, B=1),
    "siso_documents": Case(301, R=1, mimo=False, documents=(100, 77, 124), states=True),
    "siso_aligned": Case(256, R=1, mimo=False),
    "state_128": Case(301, N=128, B=1),
    "rank_2_state_128": Case(301, N=128, B=1, R=2),
    "siso_state_128": Case(301, N=128, B=1, R=1, mimo=False, documents=(100, 201)),
    "float16": Case(256, dtype=torch.float16),
}


def plain(case: Case, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Plain PyTorch with the scan at the dtype of the inputs; gates, angles, norms and the gate's sum in float32."""
    with monkeypatch.context() as patch:
        check = ref._check_scan

        def check_scan(*args: Any) -> torch.dtype:
            check(*args)
            return case.dtype

        patch.setattr(ref, "_check_scan", check_scan)
        return with_gradients(ref.mamba3, case, tensors, segment_size=None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_result_is_the_references(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors(case)
    truth = with_gradients(ref.mamba3, case, {name: t.double() for name, t in tensors.items()}, segment_size=256)
    peer = plain(case, tensors, monkeypatch)
    actual = with_gradients(fused.mamba3, case, tensors)
    off = []
    for name, expected in truth.items():
        overall = ((actual[name].double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        try:
            norms = row_norms(expected)
            if (name == "ddd_A" and case.documents) or (name == "dc" and case.out_norm and case.R == 1):
                # Next to nothing where terms cancel: the decay's at the last token of a document, and C's at the first
                # token, of whose one outer product the norm keeps no scale.
                norms = norms.clamp(min=0.1 * float(norms.square().mean().sqrt()))
            plain_result = peer[name].to(case.dtype)
            peers = worst_row(plain_result, expected, norms=norms)
            limit = OVERALL
            if name == "db_bias" and case.out_norm:  # the norm drops the scale, with which most of it cancels
                plains = (plain_result.double() - expected).norm() / expected.norm()
                limit = max(OVERALL, 1.5 * plains.item())
            rms = max(5e-3, 2.5 * peers)  # one draw of rounding; seen: 2.02
            assert_parity(actual[name], expected, rms=rms, name=name, norms=norms)
            assert overall <= limit, f"{name} is off by {overall:.1e} of its norm, allowed {limit:.1e}"
        except AssertionError as error:
            off.append(str(error))
    assert not off, "\n".join(off)


def test_rows_of_a_batch_go_back_alone_as_they_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["documents"]
    tensors = make_tensors(case)
    together = with_gradients(fused.mamba3, case, tensors)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", 0)
    for name, alone in with_gradients(fused.mamba3, case, tensors).items():
        if name.removeprefix("d") in tensors and name not in ("dh", "dtheta", "db_last", "dx_last"):
            assert_parity(alone, together[name], rms=1e-2, name=name)  # sums over the rows, in another order
        else:
            assert torch.equal(alone, together[name]), name


@pytest.mark.parametrize("kept", [fused.mamba3_keep_scan, fused.mamba3_keep_all], ids=["scan", "all"])
@pytest.mark.parametrize("name", ["aligned", "documents", "rank_2_state_128", "siso"])
def test_what_is_kept_for_backward_changes_no_bit(name: str, kept: Callable[..., Any]) -> None:
    tensors = make_tensors(CASES[name])
    recomputed = with_gradients(fused.mamba3, CASES[name], tensors)
    for key, tensor in with_gradients(kept, CASES[name], tensors).items():
        assert torch.equal(tensor, recomputed[key]), key


def test_the_same_inputs_give_the_same_bits() -> None:
    case = CASES["documents"]
    tensors = make_tensors(case, seed=1)
    assert_same_bits(lambda: with_gradients(fused.mamba3, case, tensors), 20)


def test_nan_stays_nan() -> None:
    case = Case(64, H=4, states=True)
    tensors = make_tensors(case)
    inputs(case, tensors["u"])["dd_A"][20, 0, 1] = float("nan")
    actual = with_gradients(fused.mamba3, case, tensors)
    for name, expected in with_gradients(ref.mamba3, case, tensors).items():
        nans, expected_nans = actual[name].isnan(), expected.isnan()
        if name.startswith("d"):  # of the whole chunk where the reference's are of the tokens before
            nans = nans & expected_nans
        assert torch.equal(nans, expected_nans), name


@pytest.mark.parametrize("op", [fused.mamba3, fused.mamba3_keep_all], ids=["recomputed", "kept"])
def test_a_cuda_graph_holds_it(op: Callable[..., Any]) -> None:
    """Forward and backward capture, and replay with other inputs what an eager call gives."""
    case = Case(384)
    tensors, others = make_tensors(case), make_tensors(case, seed=2)

    def both() -> list[torch.Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        (out,) = run(op, case, leaves)
        return [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

    assert_replays(both, list(tensors.values()), list(others.values()))


def test_memory_of_the_main_shape() -> None:
    """Less than 3 GiB above the inputs, gradients included, at 8192 tokens of NAM56R."""
    case = Case(4096, H=112, G=8)
    tensors = make_tensors(case)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}

    def both() -> None:
        (out,) = run(fused.mamba3, case, leaves)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    both()
    assert peak(both) < 3 * 2**30
