"""Probes of this machine's backend requirements, each by a real import, once per process. No torch at import."""

from __future__ import annotations

import functools
import importlib

from megacpp_mcore.backends import vendor_switches
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.probe import ProbeResult, probe_import
from megacpp_mcore.util.te_imports import DISABLE_TE, TRANSFORMER_ENGINE
from megacpp_mcore.util.te_imports import disabled as te_disabled
from megacpp_mcore.versions import TRITON as TRITON_RELEASES
from megacpp_mcore.versions import TRITON_DIRECT

__all__ = [
    "APEX_PARTS", "CUDA", "DISABLE_TE", "REQUIREMENTS", "TRANSFORMER_ENGINE", "TRITON", "ProbeResult", "apex_parts",
    "known_triton", "probe_import", "requirement", "te_disabled", "triton_release",
]  # fmt: skip

TRITON = "triton"
CUDA = "cuda"

APEX_PARTS = ("amp_C", "apex.optimizers", "fused_weight_gradient_mlp_cuda")
"""Modules of NVIDIA Apex built from source with its extensions; other packages named apex lack them."""


def requirement(name: str) -> ProbeResult:
    """Return whether the requirement ``name`` works here and is not disabled; for a vendor, only whether it is not disabled."""
    if name in vendor_switches.NAMES:
        return vendor_switches.allowed(name)
    if name == TRANSFORMER_ENGINE and te_disabled():
        return ProbeResult(False, te_disabled())
    return _probed(name)


@functools.cache
def _probed(name: str) -> ProbeResult:
    return REQUIREMENTS[name]()


@functools.cache
def apex_parts() -> dict[str, ProbeResult]:
    """Return which parts of NVIDIA Apex work here, each by a real import, run once.

    An unrelated package named ``apex`` is not imported: without ``amp_C`` it is not NVIDIA's.
    """
    parts = {part: probe_import(part) for part in ("amp_C", "fused_weight_gradient_mlp_cuda")}
    if parts["amp_C"].ok:
        parts["apex.optimizers"] = probe_import("apex.optimizers")
    else:
        parts["apex.optimizers"] = ProbeResult(False, "it needs amp_C")
    return {part: parts[part] for part in APEX_PARTS}


@functools.cache
def triton_release() -> str:
    """Return the release of the installed Triton, such as ``3.6``; empty without one."""
    return ".".join(importlib.import_module("triton").__version__.split(".")[:2]) if probe_import("triton").ok else ""


def known_triton() -> ProbeResult:
    """Return whether the kernels were compiled with the installed Triton, and if so, any caveat."""
    if not (imported := probe_import("triton")).ok:
        return imported
    release, releases = triton_release(), ", ".join(TRITON_RELEASES)
    if release not in TRITON_RELEASES:
        return ProbeResult(False, f"the kernels were not compiled with Triton {release}, but with {releases}")
    ran = release == TRITON_DIRECT
    return ProbeResult(True, "" if ran else f"kernels compile with it; on GPUs they ran with Triton {TRITON_DIRECT} only")


def _triton() -> ProbeResult:
    """Return whether Triton is of a known release and has a driver here, which importing does not show: it compiles one."""
    probed = known_triton()
    if not probed.ok:
        return probed
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_target()
    except Exception as error:
        return ProbeResult(False, f"triton has no driver for this machine: {error}")
    return ProbeResult(True)


def _cuda() -> ProbeResult:
    is_there = importlib.import_module("torch").cuda.is_available()
    return ProbeResult(is_there, "" if is_there else "torch sees no CUDA device")


@functools.cache
def arch() -> str | None:
    """Return this GPU's architecture, such as ``sm_90``; None without a GPU, also where the CPU lane stands in for one.

    For AMD GPUs it is ``gfx942`` and the like, since their capability numbers would be mistaken for NVIDIA's.
    """
    torch = importlib.import_module("torch")
    cuda = torch.cuda
    if torch.version.hip is not None and cuda.is_available():
        return str(cuda.get_device_properties().gcnArchName).partition(":")[0]
    major, minor = cuda.get_device_capability() if cuda.is_available() else (0, 0)
    return f"sm_{major}{minor}" if major else None


def hopper() -> ProbeResult:
    """Return whether the GPU has compute capability 9.0, the only one with row-scaled grouped FP8 GEMMs in PyTorch 2.11.

    Row-scaled products of one matrix, which other GPUs have, were compared there, too.
    """
    capability = importlib.import_module("torch").cuda.get_device_capability()
    return ProbeResult(capability == (9, 0), "" if capability == (9, 0) else f"the GPU is {capability}, not Hopper (9, 0)")


REQUIREMENTS = {TRANSFORMER_ENGINE: te_imports.available, TRITON: _triton, CUDA: _cuda}
"""The requirements that a candidate may have, by name."""
