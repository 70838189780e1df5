"""dataset-helpers: start-up runs no ``make`` if the compiled dataset helper already exists.

Activate: applied by the launcher; or ``megacpp_mcore.patches.apply(["dataset-helpers"])``.
Scope: ``compile_helpers``, and the start-up step of the training loop that calls it on one rank.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

logger = logging.getLogger(__name__)

HELPER = "megatron.core.datasets.helpers_cpp"
"""The extension module that ``megatron.core.datasets.helpers`` imports."""


def ready_helper(folder: Path) -> str | None:
    """Import the compiled helper and return its file, or None if none matches the source in ``folder``.

    The wheel ships the compiled helper but no Makefile. A checkout without a compiled helper uses that of another
    megatron-core on ``sys.path``, if it was compiled from the same source.

    Args:
        folder: ``megatron/core/datasets`` of the megatron-core in use.
    """
    if HELPER not in sys.modules and _outdated(folder):
        return None
    try:
        return str(importlib.import_module(HELPER).__file__)
    except ImportError:
        source = _read(folder / "helpers.cpp")
    relative = Path("megatron", "core", "datasets")
    for entry in sys.path:
        other = Path(entry, relative)
        if source is None or _read(other / "helpers.cpp") != source or _outdated(other):
            continue
        if (library := _library(other)) is not None:
            spec: Any = importlib.util.spec_from_file_location(HELPER, library)  # by its suffix: never None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[HELPER] = module
            return str(library)
    return None


def _outdated(folder: Path) -> bool:
    """Return whether ``make`` in ``folder`` would recompile its helper because the source is newer."""
    library = _library(folder)
    if library is None or not (folder / "Makefile").is_file():
        return False
    return library.stat().st_mtime < (folder / "helpers.cpp").stat().st_mtime


def _library(folder: Path) -> Path | None:
    files = (folder / f"helpers_cpp{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _datasets_folder() -> Path:
    from megatron.core.datasets import utils

    return Path(utils.__file__).resolve().parent


@edit("megatron.core.datasets.utils:compile_helpers", "84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63")
def _compile_if_missing(
    original: Function,
) -> None:
    folder = _datasets_folder()
    library = ready_helper(folder)
    if library is not None:
        logger.info("dataset helper: %s is compiled, make is not run", library)
    elif (folder / "Makefile").is_file():
        original()
    else:
        raise LaunchError(
            f"{HELPER} cannot be imported and {folder} has no Makefile to compile it with; reinstall megatron-core for "
            "this Python (pip install --force-reinstall --no-deps megatron-core), or use a Megatron-LM checkout"
        )


@edit(
    "megatron.training.initialize:_compile_dependencies",
    "6d4b2069952d6210042f79b51e54042213e8be164e1f02eaed2e7eca8c0f3b11",
)
def _ready_on_every_rank(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_compile_dependencies()``: upstream compiles on rank 0, but every rank imports the result."""
    ready_helper(_datasets_folder())
    return original(*args, **kwargs)


PATCH = Patch(
    name="dataset-helpers",
    fixes="start-up runs make in megatron/core/datasets and exits where there is no Makefile, as in the wheel",
    source="megatron-core 0.19.2, megatron/core/datasets/utils.py and megatron/training/initialize.py",
    edits=(_compile_if_missing, _ready_on_every_rank),
    seam=(
        "compile_helpers is the one place that runs make; _compile_dependencies is the one that every rank passes, "
        "before only rank 0 calls it"
    ),
    leaves_alone="make itself, wherever there is a Makefile and no compiled helper, or one older than its source",
    retire_when="the wheel's start-up no longer runs make, or upstream first looks for the compiled helper",
    cost="nothing",
)
