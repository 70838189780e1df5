"""A new folder that is either complete or not there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.util.files import flush_to_disk

_FULL = re.compile(r"No space left on device|Disk quota exceeded")


@contextlib.contextmanager
def new_folder(new: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``new`` that becomes it at the end, flushed to disk; after an error nothing is left.

    Raises:
        CheckpointError: ``new`` exists, another process is writing it or was killed at that, or it cannot be written.
    """
    new = Path(os.path.abspath(new))
    unfinished = new.with_name(f"{new.name}.partial")
    try:
        if os.path.lexists(new):
            raise FileExistsError(f"{new} already exists")
        unfinished.mkdir(parents=True)
    except FileExistsError as error:
        existing = new if os.path.lexists(new) else unfinished
        raise CheckpointError(f"{existing} already exists; name a new folder, or delete it") from error
    except OSError as error:
        raise CheckpointError(f"{unfinished} cannot be created: {error}; name a folder that can be written") from error
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            flush_to_disk(path)
        unfinished.rename(new)
        flush_to_disk(new.parent)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        # safetensors and torch have errors of their own for a full disk, one behind another.
        said = _FULL.search("".join(traceback.format_exception(error)))
        if not isinstance(error, OSError) and not (said and isinstance(error, Exception)):
            raise
        raise CheckpointError(f"{new} cannot be written: {error if said is None else said[0]}") from error
