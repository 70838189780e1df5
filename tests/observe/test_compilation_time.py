"""Compilation in a step is told to the clock, by torch.compile's callbacks and by Triton's hooks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler

from megacpp_mcore.observe.clock import Clock, Phase, compilation_timed

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_torch_compile_forward_and_deferred_backward_are_told() -> None:
    torch._dynamo.reset()
    clock = Clock()
    clock.become(Phase.STEP)
    phases: list[Phase] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        phases.append(clock.phase)
        return graph.forward

    with compilation_timed(clock):
        compiled = torch.compile(lambda x: (x * 2).sin().sum(), backend=backend)
        compiled(torch.ones(3, requires_grad=True)).backward()
        assert clock.phase is Phase.STEP
        compiled(torch.ones(3, requires_grad=True))
    assert phases == [Phase.COMPILE]
    taken = clock.take()
    assert taken[Phase.COMPILE] > 0
    assert callback_handler.start_callbacks == callback_handler.end_callbacks == []


@needs_triton
def test_a_kernel_s_compilation_and_tuning_are_told_and_other_hooks_still_called() -> None:
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    clock = Clock()
    clock.become(Phase.STEP)
    seen: list[str] = []
    bench = Autotuner._bench
    knobs.runtime.jit_cache_hook = lambda *args, **kwargs: seen.append("before")
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: seen.append("after")
    try:
        with compilation_timed(clock):
            assert not knobs.runtime.jit_cache_hook(key="k")
            assert clock.phase is Phase.JIT
            knobs.runtime.jit_post_compile_hook(key="k")
            assert clock.phase is Phase.STEP
            assert Autotuner._bench is not bench
        assert seen == ["before", "after"]
        knobs.runtime.jit_cache_hook(key="k")
        assert clock.phase is Phase.STEP
    finally:
        knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = None
    assert Autotuner._bench is bench


@needs_triton
def test_a_kernel_found_by_another_s_hook_is_not_compiled() -> None:
    from triton import knobs

    clock = Clock()
    clock.become(Phase.STEP)
    knobs.runtime.jit_cache_hook = lambda *args, **kwargs: True
    try:
        with compilation_timed(clock):
            assert knobs.runtime.jit_cache_hook(key="k") is True
            assert clock.phase is Phase.STEP
    finally:
        knobs.runtime.jit_cache_hook = None
