"""A run's receipt, written to the run's folder and read from there. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.observe import goodput, kinds
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

    Of a folder none of whose parts can be read, it is the one that was written there last, which says so.

    Raises:
        DataError: there is none, or it is not as the schema says.
    """
    place = Path(path)
    expected = "a receipt, or the folder of a run that was observed"
    if not place.is_dir():
        receipt = load(place, expected, "name the folder of its run, from whose parts it is assembled again")
    elif any((place / name).is_dir() for name in (PARTS, goodput.FOLDER)):
        try:
            receipt = assemble(place)
        except DataError as error:
            return _written(place, error)
    else:
        receipt = load(place / RECEIPT, expected)
    schema.validate(receipt, str(path))
    return receipt


def _written(run: Path, why: DataError) -> dict[str, Any]:
    """The receipt as it was written in the folder, from which none can be assembled.

    Raises:
        DataError: ``why`` none can be assembled; the one that was written is not there, or is none either.
    """
    try:
        receipt = load(run / RECEIPT, "a receipt")
        schema.validate(receipt, str(run / RECEIPT))
    except DataError:
        raise why from None
    note = f"this is {RECEIPT} as it was written last, for none can be assembled from the parts: {why}"
    receipt["notes"].append(kinds.printable(note))
    return receipt
