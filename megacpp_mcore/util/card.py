"""This process's GPU: its own rates before the first step, its clock and power while it trains. No torch at import."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from statistics import median
from typing import Any

SIZE = 8192
"""Rows and columns of the matrices that are multiplied and copied."""
SECONDS = 1.0
"""How long each of the two is repeated."""
REASONS = (
    "idle", "application clocks", "software power cap", "hardware slowdown", "sync boost", "software thermal",
    "hardware thermal", "hardware power brake", "display clocks",
)  # fmt: skip
"""NVML's reasons for a lower clock, by bit (``nvmlClocksEventReasons``, NVML 12)."""
_SAMPLES = 4096
_Read = Callable[[], tuple[int, float, int]]


def measure() -> dict[str, float]:
    """Measure the rates of bf16 products of :data:`SIZE` and of copies, bytes read and written.

    It leaves no memory reserved, and resets the allocator's peaks: a run's are those of its steps.
    """
    import torch

    generator = torch.Generator("cuda").manual_seed(1)  # leaves the run's own random numbers unchanged
    with torch.no_grad():
        matrices = [torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]

        def copy() -> None:
            for i in range(3):  # together larger than the L2 cache
                matrices[i].copy_(matrices[i - 1])

        products = 2 * SIZE**3 / _seconds(lambda: torch.mm(*matrices[:2], out=matrices[2])) / 1e12
        copies = 3 * 2 * matrices[0].nbytes / _seconds(copy)
        matrices.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"card.matmul_tflops_per_s": products, "card.copy_bytes_per_s": copies}


def _seconds(work: Callable[[], object]) -> float:
    import torch

    def run(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    run(3)
    return run(max(3, round(SECONDS / run(10))))


def reader() -> _Read:
    """Return a function that reads this process's GPU: SM clock (MHz), power (W), and the bits of :data:`REASONS`.

    Raises:
        ImportError, pynvml.NVMLError: pynvml is not installed, or does not answer.
    """
    import pynvml  # type: ignore[import-not-found]
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return lambda: (
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    )


class Samples:
    """Samples of the GPU's clock and power, the last few thousand; a thread takes them, so that no step waits for NVML.

    ``read`` reads one; None: nothing is sampled.
    """

    def __init__(self) -> None:
        self.read: _Read | None = None
        self._taken: deque[tuple[int, float, int]] = deque(maxlen=_SAMPLES)

    def take(self) -> None:
        """Take a sample; after an error no more are taken."""
        if self.read is not None:
            try:
                self._taken.append(self.read())
            except Exception:
                self.read = None

    def record(self) -> dict[str, Any]:
        """Return the fields of a receipt: medians, and the share of samples by reason; empty before a sample."""
        if not (taken := list(self._taken)):
            return {}
        clocks, powers, bits = zip(*taken, strict=True)
        reasons = Counter(name for mask in bits for bit, name in enumerate(REASONS) if mask >> bit & 1)
        shares = {name: count / len(taken) for name, count in reasons.items()}
        return {"card.sm_clock_mhz": median(clocks), "card.power_w": median(powers), "card.throttled": shares}
