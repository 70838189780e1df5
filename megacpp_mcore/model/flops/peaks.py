"""Peak rates of devices, by CUDA device name and precision, from the vendor's datasheets; no torch.

An unknown device has no peak: a reason is returned instead, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megacpp_mcore.errors import ModelError

PRECISIONS = ("fp8", "bf16", "tf32", "fp32")
"""Precisions of matrix products, fastest first. ``fp32`` is without tensor cores, ``tf32`` is fp32 operands on them."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A named peak (``H200 SXM, bf16 dense``) in FLOP/s, or the reason why it is not known."""

    name: str
    flops_per_s: float | None = None
    reason: str | None = None


# Both datasheets give tensor-core rates "with sparsity" (fp8 3,958, bf16 1,979, tf32 989 TFLOP/s); dense is half of that.
# H100: NVIDIA H100 Tensor Core GPU datasheet, column H100 SXM. H200: NVIDIA H200 Tensor Core GPU datasheet, column H200 SXM.
_HOPPER_SXM = {"fp8": 1979.0, "bf16": 989.5, "tf32": 494.5, "fp32": 67.0}

DEVICES: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "NVIDIA H100 80GB HBM3": ("H100 SXM", _HOPPER_SXM),
    "NVIDIA H200": ("H200 SXM", _HOPPER_SXM),
}
"""Common name and dense TFLOP/s by precision, by the full ``torch.cuda.get_device_name``.

PCIe and NVL boards, and MIG slices, are different devices.
"""


def peak(device: str, precision: str) -> Peak:
    """Return the peak of ``device`` (CUDA's name) in ``precision``.

    Raises:
        ModelError: the precision is not one of :data:`PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise ModelError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    if device not in DEVICES:
        names = ", ".join(map(repr, DEVICES))
        return Peak(name=f"{device}, {precision}", reason=f"no datasheet peak is known of {device!r}; known: {names}")
    name, tflops = DEVICES[device]
    return Peak(name=f"{name}, {precision} dense", flops_per_s=tflops[precision] * 1e12)
