"""What is observed of a GPU: its own rates, clock and power, and the overlap of selections that a CUDA graph makes."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.observe.indices import SAMPLED, IndexOverlap
from megacpp_mcore.ops.indexer.cache import IndexCache, Selection
from megacpp_mcore.util import card
from tests.observe.recorded import a_step


def test_the_rates_are_plausible_and_leave_nothing_behind() -> None:
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")  # libraries have their workspaces
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    state = torch.cuda.get_rng_state()
    rates = card.measure()
    assert 50 < rates["card.matmul_tflops_per_s"] < 2500
    assert 0.3e12 < rates["card.copy_bytes_per_s"] < 8e12
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_reserved() - reserved < 100e6  # cuBLAS's workspace at most
    assert torch.cuda.max_memory_allocated() - allocated < 100e6


def test_clock_and_power_are_read() -> None:
    pytest.importorskip("pynvml", reason="needs pynvml (nvidia-ml-py)")
    samples = card.Samples()
    samples.read = card.reader()
    samples.take()
    record = samples.record()
    assert 100 < record["card.sm_clock_mhz"] < 4000
    assert 10 < record["card.power_w"] < 2000


def test_a_replay_is_sampled() -> None:
    listener, cache = IndexOverlap(interval=1), IndexCache({})
    listener.watch(cache)
    indices = torch.arange(4 * SAMPLED, device="cuda", dtype=torch.int32).view(1, -1, 1)
    others, graph = indices.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.publish(5, Selection(indices + 0))
        cache.publish(9, Selection(others + 0))
    for number, shift in ((1, 0), (2, 1)):
        listener.on_step_begin(number)
        others.add_(shift)
        graph.replay()
        torch.cuda.synchronize()
        listener.on_step(a_step(number))
        assert listener.by_pair == {"5-9": 1.0 - shift}
    listener.on_end(None)
