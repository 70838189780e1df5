"""megacpp-mcore: the hybrid model NAM56R for stock Megatron-Core, as a plugin package.

``nam56r`` is what ``--spec megacpp_mcore nam56r`` names (for ``pretrain_gpt.py``), ``nam56r_hybrid`` its like for
``pretrain_hybrid.py``. They are resolved on first use, so that importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

__all__ = ["__version__", "nam56r", "nam56r_hybrid"]

_SPECS = {"nam56r": "megacpp_mcore.layer_specs.nam56r", "nam56r_hybrid": "megacpp_mcore.layer_specs.hybrid"}
"""Spec name to the module that defines it. No submodule of this package may share a name with a spec."""


def __getattr__(name: str) -> Any:
    if name not in _SPECS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_SPECS[name]), name)
    # Megatron looks the name up in vars(megacpp_mcore), which never asks __getattr__.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SPECS})
