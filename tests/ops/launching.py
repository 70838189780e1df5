"""A Triton driver that launches nothing, with its real compiler: ``python -m tests.ops.launching [RECORD]``.

Launches kernels of :mod:`megacpp_mcore.ops.adam` as if on a GPU, recorded in RECORD, and prints for each, as JSON, whether
Triton's cache had it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from megacpp_mcore.ops import adam, builds


class Driver:
    """A GPU's, as far as launches need one: device -1, which PyTorch has tensors of a CPU on."""

    def __init__(self) -> None:
        self.device, self.stream = -1, 7
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What a compiled kernel calls for a launch; with a library to link, after compiling what the real driver does."""
        if "TRITON_LIBCUDA_PATH" in os.environ:
            with contextlib.suppress(ImportError):  # of the driver, when it is loaded
                CudaLauncher(source, metadata)
        return lambda *launched: self.launches.append((source, *launched))

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The number of the current device."""
        return self.device

    def get_current_stream(self, device: int) -> int:
        """The current stream."""
        assert device == self.device
        return self.stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What a kernel's size is compared with."""
        return {"max_shared_mem": 2**17}

    def load_binary(self, *kernel: Any) -> tuple[int, ...]:
        """Module, function, registers, spills, and most threads."""
        return (1, 2, 32, 0, 1024)


@triton.jit
def doubled(x):
    """A constexpr of :func:`of_another_package`."""
    return x * 2


@triton.jit
def of_another_package(x, function: triton.language.constexpr):
    """A kernel that Triton cannot describe in JSON."""
    triton.language.store(x, function(triton.language.load(x)))


def main(*record: str) -> None:
    """Launch two variants, and a kernel of another package."""
    triton.runtime.driver.set_active(Driver())
    cache_hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: cache_hits.append(cache_hit)  # type: ignore[assignment]
    table = adam.Table([adam.Shard(*(torch.zeros(64) for _ in range(4)), torch.zeros(64, dtype=torch.bfloat16))])
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "number": 1}
    with builds.recorded(Path(record[0])) if record else contextlib.nullcontext():
        for scale in (None, torch.ones(1)):
            adam.step(table, **options, scale=scale)
        of_another_package[(1,)](torch.zeros(64), doubled)
    print(json.dumps(cache_hits))


if __name__ == "__main__":
    main(*sys.argv[1:])
