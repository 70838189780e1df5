"""A run's receipt, written to the run's folder and read from there. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megacpp_mcore.observe.files import replace
from megacpp_mcore.observe.receipts import schema
from megacpp_mcore.observe.receipts.assembly import PARTS, RECEIPT, assemble, load


def write(run: str | os.PathLike[str]) -> Path:
    """Assemble the receipt of the run in folder ``run``, check it, and write it there.

    Raises:
        DataError: there are no parts, or what is there is damaged.
    """
    receipt = assemble(run)
    schema.validate(receipt, str(run))
    path = Path(run) / RECEIPT
    replace(path, json.dumps(receipt, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return path


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The receipt in a file, or of a run's folder; checked.

    Raises:
        DataError: there is none, or it is not as the schema says.
    """
    place = Path(path)
    if place.is_dir() and (place / PARTS).is_dir():
        receipt = assemble(place)
    else:
        receipt = load(
            place / RECEIPT if place.is_dir() else place, "a receipt, or the folder of a run that was observed"
        )
    schema.validate(receipt, str(path))
    return receipt
