"""Launches of Triton kernels that bypass its argument look-up, which takes the host longer than most kernels take the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
import triton
from triton.compiler import CompiledKernel

DIRECT = "3.6."
"""Triton versions whose compiled kernels are launched directly: the arguments of that call are not a public interface."""


class Plan(Protocol):
    """Sizes of a call and what follows from them, hashable: equal plans launch the same kernels."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Compile-time arguments of the kernels, by name."""

    def options(self, kernel: str) -> Mapping[str, int]:
        """Launch options of the kernel of this name."""

    def __hash__(self) -> int: ...


class Launcher[P: Plan]:
    """Launches kernels for the sizes of a plan.

    Repeated calls bypass Triton's look-up. Everything that Triton specialises a kernel for (types, alignments, integers)
    follows from the plan and from the tensors given here, which must be all inputs of the call: what the call allocates itself
    is aligned, and laid out as the plan says.
    """

    def __init__(self, plan: P, x: torch.Tensor, *others: torch.Tensor | None) -> None:
        alike = [None if t is None else (t.dtype, t.data_ptr() % 16, t.stride()) for t in (x, *others)]
        self.plan, self._device = plan, x.get_device()
        self._compiled = _compiled_before(plan, self._device, *alike)
        hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
        watched = any(getattr(hook, "calls", hook) for hook in hooks)
        is_current = self._device == torch.cuda.current_device() if x.is_cuda else False
        self._direct = triton.__version__.startswith(DIRECT) and is_current and not watched

    def __call__(self, kernel: Any, grid: tuple[int, int, int], *arguments: Any, **choices: Any) -> None:
        """Launch ``kernel``, whose compile-time arguments, the last ones, are sizes of the plan or ``choices``."""
        key = (kernel.__name__, *choices.values())
        if key in self._compiled and self._direct:
            compiled, constants = self._compiled[key]
            stream = triton.runtime.driver.active.get_current_stream(self._device)
            # Plain addresses: for a tensor, the launch would query the driver.
            given = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in arguments]
            compiled.run(
                *grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *given, *constants
            )  # fmt: skip
            return
        sizes = {**self.plan.sizes, **choices}
        named = {name: sizes[name] for name in kernel.arg_names[len(arguments) :]}
        made = kernel[grid](*arguments, **named, **self.plan.options(kernel.__name__))
        if isinstance(made, CompiledKernel):  # not under the interpreter
            self._compiled[key] = made, tuple(named.values())


@lru_cache(maxsize=128)
def _compiled_before(*alike: Any) -> dict[Any, tuple[CompiledKernel, tuple[Any, ...]]]:
    """The cache of kernels compiled by earlier calls with the same key."""
    return {}
