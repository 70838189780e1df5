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
def test_a_kernel_s_compilation_and_tuning_are_told_and_other_hooks_still_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that another's hook has from a cache is not compiled."""
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    clock = Clock()
    clock.become(Phase.STEP)
    seen: list[str] = []
    hooks, bench = knobs.runtime, Autotuner._bench
    monkeypatch.setattr(hooks, "jit_cache_hook", lambda key: seen.append("before") or key == "cached")
    monkeypatch.setattr(hooks, "jit_post_compile_hook", lambda key: seen.append("after"))
    with compilation_timed(clock):
        assert not hooks.jit_cache_hook(key="new")
        assert clock.phase is Phase.JIT
        hooks.jit_post_compile_hook(key="new")
        assert clock.phase is Phase.STEP
        assert hooks.jit_cache_hook(key="cached")
        assert clock.phase is Phase.STEP
        assert Autotuner._bench is not bench
    assert seen == ["before", "after", "before"]
    hooks.jit_cache_hook(key="new")
    assert clock.phase is Phase.STEP
    assert Autotuner._bench is bench
