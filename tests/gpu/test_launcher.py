"""Launches that bypass Triton's look-up on a GPU: alignments, sizes and dtypes, streams, a CUDA graph, devices."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton

from megacpp_mcore.ops import triton_launch
from megacpp_mcore.ops.linear_cross_entropy.triton import SCALED, add_scaled
from megacpp_mcore.ops.triton_launch import launch
from tests.gpu.device import replayed


def twice(x: torch.Tensor) -> torch.Tensor:
    """2x, by a kernel, as far from 16 bytes as ``x``."""
    out = x.new_zeros(len(x) + 8)[x.storage_offset() % 8 :][: len(x)]
    factor = torch.full((1,), 2.0, device=x.device)
    launch(add_scaled, (triton.cdiv(len(x), SCALED),), out, x, factor, len(x), BLOCK=SCALED, BETA=True)
    return out


def drawn(size: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> torch.Tensor:
    return torch.randint(0, 100, (size,), device=device).to(dtype)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launch of what was launched before fails."""
    if not triton_launch.DIRECT:
        pytest.skip("Triton launches in this version")
    twice(drawn(1024))
    monkeypatch.delattr(type(add_scaled), "run")


def test_any_order_of_alignments_sizes_and_dtypes() -> None:
    cases = list(itertools.product((torch.float32, torch.bfloat16), (0, 1, 4), (1, 16, 999, 1024)))
    for dtype, first, size in [*cases, *reversed(cases), *cases]:
        x = drawn(2048, dtype)[first:][:size]
        assert torch.equal(twice(x), 2 * x)


@pytest.mark.usefixtures("direct")
def test_the_stream_is_the_current_one() -> None:
    x, side = drawn(1024), torch.cuda.Stream()
    assert torch.equal(twice(x), 2 * x)  # loads PyTorch's kernels, for which the driver waits for all streams
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2**30)
        doubled = twice(x)
        assert not side.query()
        side.synchronize()
    torch.cuda._sleep(2**30)
    with torch.cuda.stream(side):
        assert torch.equal(twice(x), 2 * x)  # which waits for this stream alone
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.equal(doubled, 2 * x)


@pytest.mark.usefixtures("direct")
def test_a_graph_replays() -> None:
    first, second = drawn(1024), drawn(1024)
    (doubled,) = replayed(lambda: [twice(first)], [first], [second])
    assert torch.equal(doubled, 2 * second)


def test_tensors_of_a_cpu_are_refused() -> None:
    x = drawn(1024)
    twice(x)
    with pytest.raises(ValueError, match="cpu tensor"):
        twice(x.cpu())
    assert torch.equal(twice(x), 2 * x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_by_turns() -> None:
    for device in (0, 1, 0, 1):
        with torch.cuda.device(device):
            x = drawn(1024, device=f"cuda:{device}")
            assert torch.equal(twice(x), 2 * x)
