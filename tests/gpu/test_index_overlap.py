"""The overlap of selections that a CUDA graph makes when it is replayed."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.observe.indices import SAMPLED, IndexOverlap
from megacpp_mcore.ops.indexer.cache import IndexCache, Selection
from tests.observe.recorded import a_step

pytestmark = pytest.mark.gpu


def test_a_replay_is_sampled() -> None:
    listener, cache = IndexOverlap(interval=1), IndexCache({})
    listener.watch(cache)
    one = torch.arange(4 * SAMPLED, device="cuda", dtype=torch.int32).view(1, -1, 1)
    other, graph = one.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.publish(5, Selection(one + 0))
        cache.publish(9, Selection(other + 0))
    for number, shift in ((1, 0), (2, 1)):
        listener.on_step_begin(number)
        other.add_(shift)
        graph.replay()
        torch.cuda.synchronize()
        listener.on_step(a_step(number))
        assert listener.by_pair == {"5-9": 1.0 - shift}
    listener.on_end(None)
