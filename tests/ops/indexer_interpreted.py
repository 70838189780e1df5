"""The indexer's kernels under Triton's interpreter, on a CPU, in float16 against float64."""

from __future__ import annotations

import torch

from megacpp_mcore.ops.indexer import reference
from megacpp_mcore.ops.indexer import triton as fused
from tests.ops.indexer_case import assert_gradients, assert_selected, draw, draw_documents, draw_exact, draw_target

FP16 = torch.float16


def rows() -> None:
    """Rows that a program keeps: distinct scores, ties, documents, zeros alone, and NaN."""
    inputs, documents = draw(150, H=3, dtype=FP16), draw_documents(150, each=40)
    assert_selected(fused.select(*inputs, 37), inputs, 37)
    assert_selected(fused.select(*inputs, 37, documents), inputs, 37, documents)
    ties = draw_exact(150, H=3, dtype=FP16)
    for topk in (1, 20, 150, 200):
        assert torch.equal(fused.select(*ties, topk, documents), reference.select(*ties, topk, documents))
    q, k, w = ties
    assert torch.equal(fused.select(-q.abs(), k.abs(), w, 20), reference.select(-q.abs(), k.abs(), w, 20))
    k[[30, 31], 0, 0] = torch.tensor([float("nan"), float("inf")], dtype=FP16)
    assert torch.equal(fused.select(q, k, w, 2), reference.select(q, k, w, 2))


def pieces() -> None:
    """Rows that are read a block at a time, in several chunks and groups of the batch."""
    fused.SCRATCH, fused.TAKE_BEST = 64 * 256, fused.TAKE_BEST | {"BLOCK": 128}
    inputs, documents = draw_exact(200, B=3, H=3, dtype=FP16), draw_documents(200, B=3, each=100)
    assert len(list(fused.chunks(200, 3))) > 3
    for topk in (20, 199):
        assert torch.equal(fused.select(*inputs, topk, documents), reference.select(*inputs, topk, documents))


def gradient() -> None:
    """Selected keys at a time, all and some of them."""
    inputs = draw(40, H=3, dtype=FP16)
    index_BSN = reference.select(*inputs, 19, draw_documents(40))
    index_BSN[1, 5] = -1
    target_BSN = draw_target(index_BSN)
    launch = fused.learn
    for block, deterministic in ((32, False), (16, False), (16, True)):
        fused.learn = lambda *sizes, block=block: launch(*sizes) | {"BLOCK": block}
        torch.use_deterministic_algorithms(deterministic)
        found = fused.indexer_grad(*inputs, index_BSN, target_BSN, 700.0)
        assert_gradients(found, inputs, index_BSN, target_BSN, 700.0)
        assert torch.equal(found[1][7, 0], torch.zeros_like(found[1][7, 0]))
        assert torch.equal(found[1][5, 1], torch.zeros_like(found[1][5, 1]))


def main(name: str) -> None:
    """Fail unless every result is right."""
    {"rows": rows, "pieces": pieces, "gradient": gradient}[name]()
