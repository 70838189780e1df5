"""One process of a training run whose scalars are written with every digit: ``recorder SCALARS -- LAUNCHER_ARGUMENTS``.

Megatron prints seven digits, and gives the numbers themselves to TensorBoard only. So its TensorBoard class is put in
place of the real one, with the three methods that Megatron calls: scalars go to a file, one JSON record a line.
All else is the launcher and the stock loop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class ScalarFile:
    """What Megatron uses of ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self, log_dir: str, max_queue: int) -> None:
        self._file = Path(log_dir)
        self._file.touch()

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        """Write one record; a float of Python is written so that it reads back the same."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "step": step, "value": float(value)}) + "\n")

    def add_text(self, name: str, text: str, global_step: int) -> None:
        """Megatron's arguments come this way; nobody compares them."""

    def flush(self) -> None:
        """Do nothing: each record is in the file already."""


def main() -> int:
    """Train as the words after ``--`` say; the records come from the last rank, as Megatron's logging does."""
    scalars, separator, *arguments = sys.argv[1:]
    if separator != "--":
        raise SystemExit("usage: python -m tests.distributed.recorder SCALARS -- LAUNCHER_ARGUMENTS")
    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = ScalarFile  # type: ignore[attr-defined]
    sys.modules[tensorboard.__name__] = tensorboard

    from megacpp_mcore import launcher

    return launcher.main([*arguments, "--tensorboard-dir", scalars])


if __name__ == "__main__":
    sys.exit(main())
