"""The grouped FP8 product by DeepGEMM, and its probe.

DeepGEMM compiles each shape on its first call and caches it in a folder (``DG_JIT_CACHE_DIR``, by default ``~/.deep_gemm``).
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from megacpp_mcore.errors import BackendError
from megacpp_mcore.ops.grouped_fp8 import reference
from megacpp_mcore.util.probe import ProbeResult, probe_import

SEEN_WORKING: tuple[str, ...] = ()
"""Versions of DeepGEMM and torch with which a grouped call returned the right values; none so far.

sgl-deep-gemm 0.2.1 imports with torch 2.11, and its grouped calls fail an assertion; 0.2.2 and later do not import there."""

CACHE, NVRTC = "DG_JIT_CACHE_DIR", "DG_JIT_USE_NVRTC"

_TOLERANCE = 1e-2
"""RMS: both sides multiply the same E4M3 values; only the rounding of sums, and of the output to bf16 (1.7e-3), differs."""


def grouped_product(
    x_TI: torch.Tensor, x_scale_Ti: torch.Tensor, w_EOI: torch.Tensor, w_scale_Eoi: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """Compute :func:`megacpp_mcore.ops.grouped_fp8.reference.grouped_product` by DeepGEMM's contiguous grouped kernel.

    Raises:
        ModelError: as in the reference.
        BackendError: DeepGEMM does not import, or its call fails.
    """
    counts = reference.check(x_TI, x_scale_Ti, w_EOI, w_scale_Eoi, counts_E)
    probe = probe_import("deep_gemm")
    if not probe.ok:
        raise BackendError(f"DeepGEMM cannot be used: {probe.reason}")
    experts = torch.arange(len(counts), device=x_TI.device, dtype=torch.int32)
    index_T = experts.repeat_interleave(torch.tensor(counts, device=x_TI.device))
    y_TO = torch.empty(x_TI.shape[0], w_EOI.shape[1], device=x_TI.device, dtype=torch.bfloat16)
    try:
        call = importlib.import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous
        call((x_TI, x_scale_Ti), (w_EOI, w_scale_Eoi), y_TO, index_T)
    except Exception as error:
        raise BackendError(f"DeepGEMM's grouped call failed: {error}") from error
    return y_TO


@functools.cache
def probe() -> ProbeResult:
    """Return whether one grouped call on this machine agrees with plain PyTorch: run and compared once per process."""
    probe = probe_import("deep_gemm")
    if not probe.ok:
        return probe
    if not torch.cuda.is_available():
        return ProbeResult(False, "torch sees no CUDA device")
    try:
        operands = _operands(256, 256, (128, 0, 256))
        ours, truth = grouped_product(*operands).double(), reference.grouped_product(*operands).double()
        torch.cuda.synchronize()
    except Exception as error:
        return ProbeResult(False, f"a grouped call failed: {error}".replace("\n", " "))
    off = float((ours - truth).norm() / truth.norm())
    if not off < _TOLERANCE:  # also True for NaN
        return ProbeResult(False, f"a grouped call differs from plain PyTorch by {off:.2g} (RMS)")
    return ProbeResult(True)


def record() -> dict[str, Any]:
    """Return settings that a run's figures depend on: folder of compiled kernels, use of NVRTC, and versions known to work."""
    return {
        "cache": os.environ.get(CACHE) or os.path.expanduser("~/.deep_gemm"),
        "nvrtc": os.environ.get(NVRTC, "0") == "1",
        "seen_working": list(SEEN_WORKING) or "none",
    }


def _operands(outputs: int, inputs: int, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(7)
    x_TI = torch.randn(sum(rows), inputs, device="cuda", generator=generator)
    w_EOI = torch.randn(len(rows), outputs, inputs, device="cuda", generator=generator)
    counts = torch.tensor(list(rows))
    return *reference.quantize_rows(x_TI), *reference.quantize_blocks(w_EOI), counts
