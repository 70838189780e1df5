"""Trains through the launcher with a data set that stalls once, and notes how long every checkpoint took to save.

python -m tests.observe.stalled SAMPLE SECONDS NOTES -- MEGATRON ARGUMENTS
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    sample, seconds, notes = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    from megacpp_mcore.launch import launcher, process

    with process.cpu_lane():  # Megatron is imported below
        from megatron.core.datasets.gpt_dataset import GPTDataset
        from megatron.training import training

    read, save, count = GPTDataset.__getitem__, training.save_checkpoint, itertools.count()

    @functools.wraps(read)
    def stalled(self: Any, index: int | None) -> Any:
        if next(count) == sample:
            time.sleep(seconds)
        return read(self, index)

    @functools.wraps(save)
    def noted(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = save(*args, **kwargs)
        with notes.open("a") as stream:
            stream.write(f"{time.monotonic() - began}\n")
        return result

    GPTDataset.__getitem__, training.save_checkpoint = stalled, noted
    return launcher.launch(sys.argv[sys.argv.index("--") + 1 :], device="cpu")


if __name__ == "__main__":
    sys.exit(main())
