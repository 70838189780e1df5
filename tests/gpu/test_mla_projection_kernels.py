"""The kernels between MLA's projections and its core attention on a GPU: parity with fp64, every gradient; CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.ops.mla_projection import reference, triton
from tests.gpu.device import replayed, without_waiting
from tests.ops.mla_projection_case import Case, assert_same, cases, outcome

pytestmark = pytest.mark.usefixtures("poisoned")

RMS = 5e-3

SIZES = {
    "all heads": (1024, 2, 56, torch.bfloat16),
    "odd length": (2345, 1, 56, torch.bfloat16),
    "half of the heads": (515, 2, 28, torch.bfloat16),
    "a quarter of them": (130, 3, 14, torch.bfloat16),
    "one token": (1, 1, 3, torch.bfloat16),
    "float16": (515, 2, 14, torch.float16),
}


@pytest.mark.parametrize(("S", "B", "H", "dtype"), SIZES.values(), ids=SIZES.keys())
def test_parity_with_fp64(S: int, B: int, H: int, dtype: torch.dtype) -> None:
    for case in cases(S, B, H, hidden=3584, dtype=dtype, device="cuda"):
        plain = outcome(getattr(reference, case.op), case)
        truth = outcome(getattr(reference, case.op), case, torch.float64)
        outputs = outcome(getattr(triton, case.op), case)
        assert_same(case, outputs, truth, plain, RMS)
        again = outcome(getattr(triton, case.op), case)
        assert all(torch.equal(again[name], tensor) for name, tensor in outputs.items()), case.name


def _everything(case: Case) -> list[torch.Tensor]:
    return list(outcome(getattr(triton, case.op), case).values())


def test_strides_change_no_bit() -> None:
    for case in cases(130, 2, 14, device="cuda"):
        if case.op in ("latents", "indexer_inputs"):  # products of PyTorch's, whose kernels may depend on strides
            continue
        expected = _everything(case)
        for beside in (8, 3):  # 3: rows not aligned to 16 bytes, which are copied
            leaves = {}
            for name, leaf in case.leaves.items():
                wide = torch.zeros(*leaf.shape[:-1], leaf.shape[-1] + beside, dtype=leaf.dtype, device="cuda")
                leaves[name] = wide[..., beside:].copy_(leaf) if "_SB" in name else leaf
            tensors = _everything(Case(case.name, case.op, leaves, case.others))
            assert all(map(torch.equal, tensors, expected)), (case.name, beside)


def test_a_graph_replays_and_nothing_waits() -> None:
    for first, second in zip(cases(257, 2, 28, device="cuda"), cases(258, 2, 28, device="cuda"), strict=True):
        others = {name: leaf[:257] if len(leaf) == 258 else leaf for name, leaf in second.leaves.items()}
        expected = _everything(Case(first.name, first.op, others, first.others))
        with without_waiting():
            _everything(first)
        tensors = replayed(lambda first=first: _everything(first), first.leaves.values(), others.values())
        assert all(map(torch.equal, tensors, expected)), first.name


def test_offsets_beyond_31_bits() -> None:
    """More than 2^31 values of queries: the last rows are those of a short sequence of the same rows."""
    S, B, H = 4500, 70, 56
    x_SBHX = torch.empty(S, B, H, 128, dtype=torch.bfloat16, device="cuda").normal_()
    assert x_SBHX.numel() > 2**31
    rotation_SR = reference.rotation_table(torch.rand(S, 64, device="cuda"))
    made = triton.project(x_SBHX, rotation_SR=rotation_SR)
    last = triton.project(x_SBHX[-5:].clone(), rotation_SR=rotation_SR[-5:].clone())
    assert torch.equal(made[-5:], last)
