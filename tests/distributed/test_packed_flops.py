"""The loop's FLOPs of packed rows: in every layout those of one process."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.runs import LAYOUTS, ONE, Laboratory
from tests.distributed.test_documents import PACKED, texts

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # in one process: tests/patches/test_hybrid_flops.py

STEPS = 2


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What the loop of a layout has counted after two steps from random weights, as its checkpoint says."""
    folder = tmp_path_factory.mktemp("flops")
    laboratory = Laboratory(folder, texts=texts(folder / "texts"), words=PACKED)

    @functools.cache
    def count(name: str) -> int:
        from megatron.core.dist_checkpointing import load_common_state_dict

        run = laboratory.run(name, LAYOUTS[name], STEPS, ["--no-save-optim"])
        found = load_common_state_dict(str(run.checkpoints / f"iter_{STEPS:07d}"))
        return found["num_floating_point_operations_so_far"]

    yield count
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["PP 2 × VPP 2", "PP 2", "TP 2 with SP", "EP 2"])
def test_packed_rows_are_the_same_work_in_every_layout(counted: Any, name: str) -> None:
    """Each virtual stage of a rank is told the documents of every micro-batch."""
    assert counted(name) == counted(ONE) > 0
