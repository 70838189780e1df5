"""Whether a module can be imported here, by a real import. No torch before something is probed."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class ProbeResult:
    """Whether something can be used on this machine; ``reason`` says why not."""

    ok: bool
    reason: str = ""


def probe_import(module: str) -> ProbeResult:
    """Import ``module`` (torch first: extensions link against it) and say why that failed, if it did."""
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return ProbeResult(False, f"{module.partition('.')[0]} is not installed")
        importlib.import_module("torch")
        importlib.import_module(module)
    except Exception as error:
        return ProbeResult(False, f"importing {module} failed: {error!r}")
    return ProbeResult(True)
