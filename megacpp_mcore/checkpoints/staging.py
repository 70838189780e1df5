"""A new folder that is either complete or does not exist."""

from __future__ import annotations

import contextlib
import os
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.util.files import flush_to_disk, fullness


@contextlib.contextmanager
def new_folder(new: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``new`` that becomes it at the end, flushed to disk; after an error nothing is left.

    Raises:
        CheckpointError: ``new`` exists, another process is writing it or was killed while doing so, or it cannot be written.
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
        # safetensors and torch raise their own, chained errors for a full disk; CheckpointException holds those of ranks.
        errors = [error, *(failure for failure, _ in getattr(error, "failures", {}).values())]
        full_disk = fullness("".join(line for failure in errors for line in traceback.format_exception(failure)))
        if not isinstance(error, OSError) and not full_disk:
            raise
        raise CheckpointError(f"{new} cannot be written: {error if full_disk is None else full_disk}") from error
