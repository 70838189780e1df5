"""megacpp-mcore: the hybrid model NAM56R for stock Megatron-Core, as a plugin package.

``nam56r`` is what ``--spec megacpp_mcore nam56r`` names, for ``pretrain_hybrid.py`` and ``pretrain_gpt.py``, and so for each
preset (``nam56r_hybrid`` is the same). They are resolved on first use, so that importing this package imports neither torch
nor Megatron.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

__version__ = "0.2.0"

if os.path.isfile(os.path.join(os.path.dirname(__file__), "patches")):
    raise ImportError(
        f"{os.path.dirname(__file__)}: expected layer_specs, nemo_recipes and patches to be symbolic links to folders, found "
        "files; git or an archive tool that writes no links made this copy: in a clone on Linux or WSL, `git config "
        "core.symlinks true && git checkout -- megacpp_mcore`"
    )

__all__ = ["__version__", "nam56r", "nam56r_hybrid"]


def __getattr__(name: str) -> Any:
    # Asked for submodules, too, before they are imported: none may share a name with a spec.
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    lowering = importlib.import_module("megacpp_mcore.arguments.lowering")
    named = lowering.preset_of([__name__, name])
    if named is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has __version__, {', '.join(lowering.SPECS)}")
    # Megatron looks the name up in vars(megacpp_mcore), which never asks __getattr__.
    globals()[name] = importlib.import_module("megacpp_mcore.layer_specs.hybrid_model").Spec(named)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
