"""What the tests of ops on a GPU ask of the device: peak memory, no waiting, and a CUDA graph's replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch

from megacpp_mcore.ops.fp8 import CAPABILITY

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != CAPABILITY, reason="FP8 needs Hopper"
)


def peak(run: Callable[[], object]) -> int:
    """Peak bytes above what was allocated before the call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, anything that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(
    run: Callable[[], Sequence[torch.Tensor]], inputs: Iterable[torch.Tensor], others: Iterable[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """What a CUDA graph of ``run`` gives once ``inputs``, with which it was captured, hold the values of ``others``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for tensor, value in zip(inputs, others, strict=True):
            tensor.copy_(value)
    graph.replay()
    return captured


def assert_replays(
    run: Callable[[], dict[str, torch.Tensor] | Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    unordered: str = "",
) -> None:
    """Fail unless ``run`` never synchronizes and its graph replays other values with equal results (but for ``unordered``)."""

    def tensors() -> list[torch.Tensor]:
        outputs = run()
        return list(outputs.values() if isinstance(outputs, dict) else outputs)

    names = list(outputs) if isinstance(outputs := run(), dict) else range(len(outputs))  # compiles
    with without_waiting():
        run()
    captured = [tensor.clone() for tensor in replayed(tensors, inputs, others)]
    for name, replay, tensor in zip(names, captured, tensors(), strict=True):  # inputs hold the others' values now
        assert name == unordered or torch.equal(replay, tensor), name


def assert_same_bits(run: Callable[[], dict[str, torch.Tensor]], times: int) -> dict[str, torch.Tensor]:
    """Fail unless ``run`` gives the same bits each time; return them."""
    first = run()
    for _ in range(times):
        for name, tensor in run().items():
            assert torch.equal(tensor, first[name]), name
    return first
