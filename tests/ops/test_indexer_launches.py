"""What is decided before a kernel of the indexer is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer import triton as fused
from tests.ops.indexer_case import draw


@pytest.mark.parametrize("batch", [1, 2, 7, 40])
@pytest.mark.parametrize("rows", [1, 64, 4096, 5000, 65536])
def test_chunks_hold_every_query_once(rows: int, batch: int) -> None:
    seen = torch.zeros(batch, rows, dtype=torch.int32)
    for part in fused.chunks(rows, batch):
        last = part.first + part.rows
        assert last <= part.width
        assert part.width % fused.KEYS == 0
        assert (part.batch.stop - part.batch.start) * part.rows * part.width <= fused.SCRATCH
        seen[part.batch, part.first : last] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"S": 0}, "0 queries|at least one key"),
        ({"dtype": torch.float32}, "torch.float32 and torch.float32"),
        ({"D": 128}, "head width is 128"),
        ({"H": 65}, "65 heads"),
    ],
)
def test_refuses(options: dict[str, Any], message: str) -> None:
    inputs = draw(**{"S": 4, "B": 1} | options)
    index_BSN = torch.zeros(1, len(inputs[0]), 1, dtype=torch.int32)
    with pytest.raises(ModelError, match=message):
        fused.indexer_grad(*inputs, index_BSN, index_BSN.float(), 1.0)
    if "H" not in options:
        with pytest.raises(ModelError, match=message):
            fused.select(*inputs, 1)


def test_refuses_queries_of_another_dtype_than_the_keys() -> None:
    q, k, w = draw(4)
    with pytest.raises(ModelError, match=r"torch.bfloat16 and torch.float16"):
        fused.select(q, k.half(), w, 1)
