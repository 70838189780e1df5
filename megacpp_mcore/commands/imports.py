"""Suppresses warnings and log records of other packages' imports in a command's output; no torch.

Megatron, Transformer Engine and torch warn on import of what is not installed, and Python warns of strings in them. None of it
is about the command, and it comes before its answer. Only imports are quiet: what is warned of when something *runs*, and
every warning of this package, is shown. A training run is not a command in this sense: it shows all of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

PACKAGE = __name__.partition(".")[0]
_FOLDER = str(Path(__file__).parent)
_IMPORT_SYSTEM = "<frozen importlib."
"""How the file names of Python's own import system begin."""

LOGGING_ON_IMPORT = ("torch.utils.cpp_extension",)
"""Modules that log what others say by ``warnings`` when they are imported: that there is a CUDA toolkit and no GPU."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that suppresses warnings and log records of other packages' imports."""
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename.startswith(_FOLDER) or not _imports_another():
            shown(message, category, filename, lineno, file, line)

    def keep(record: logging.LogRecord) -> bool:
        return not _imports_another()

    loggers = [logging.getLogger(name) for name in LOGGING_ON_IMPORT]
    warnings.showwarning = show
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        warnings.showwarning = shown
        for logger in loggers:
            logger.removeFilter(keep)


def _imports_another() -> bool:
    """Whether the innermost running frame of this package, callers of this module aside, is an import."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] != PACKAGE:
        if frame.f_code.co_filename.startswith(_IMPORT_SYSTEM):
            return True
        frame = frame.f_back
    return False
