"""Mamba-3's kernels under Triton's interpreter, on a CPU, in float32 against float64."""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from megacpp_mcore.ops.mamba3 import reference as ref
from megacpp_mcore.ops.mamba3 import triton as fused
from megacpp_mcore.ops.testing import assert_parity, worst_row
from tests.ops.mamba3_case import Case, make_tensors, with_gradients

SMALL = {"B": 1, "H": 2, "G": 1, "P": 16, "N": 16, "dtype": torch.float32}
CASES = {
    "mimo": Case(37, **SMALL | {"H": 8, "N": 32}),  # nothing of the projection is padding
    "mimo_documents": Case(70, **SMALL | {"B": 2}, documents=(9, 20, 41), states=True, out_norm=True),
    "rank_2": Case(70, **SMALL | {"G": 2}, R=2, activation="heavy_tail", states=True),
    "siso": Case(66, **SMALL, R=1, mimo=False),
    "siso_documents": Case(130, **SMALL, R=1, mimo=False, documents=(50, 80), states=True),
}


def main(name: str) -> None:
    """Fail unless every output, state and gradient is right, or not much further off than plain PyTorch's in float32."""
    fused.SEGMENT = 32  # so that few tokens make several segments
    fused.SCRATCH_BYTES = 0  # one row of the batch goes back at a time
    fused.HEADS = 4  # so that programs share a group of eight
    case = CASES[name]
    tensors = make_tensors(case, device="cpu")
    truth = with_gradients(ref.mamba3, case, {key: t.double() for key, t in tensors.items()}, method="sequential")
    plain = with_gradients(ref.mamba3, case, tensors)
    recomputed = partial(checkpoint, fused.mamba3, use_reentrant=False)
    for key, actual in with_gradients(recomputed, case, tensors).items():
        assert_parity(actual, truth[key], rms=max(5e-4, 4 * worst_row(plain[key], truth[key])), name=key)
