"""The profiler ranges of stages, buckets and the optimizer: named while they run, and removed afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megacpp_mcore.observe.clock import Clock
from megacpp_mcore.observe.profile import ranges as profile_ranges
from megacpp_mcore.observe.profile.profiler import FamilyRanges, Profiler
from megacpp_mcore.observe.profile.ranges import Ranges, named
from tests.observe.recorded import a_step

BUCKETS = {
    "start_grad_sync": "gradients",
    "finish_grad_sync": "gradients",
    "start_param_sync": "optimizer",
    "finish_param_sync": "optimizer",
}
OPTIMIZER = {"step": "optimizer", "zero_grad": "optimizer"}


def noting(ranges: Ranges, *names: str) -> Any:
    """Return an object with functions of these names, which return the ranges that are open while they run."""
    return SimpleNamespace(**dict.fromkeys(names, lambda: [label for label, _ in ranges.open_now]))


def test_buckets_and_the_optimizer_have_their_ranges() -> None:
    ranges = Ranges()
    dense, experts, optimizer = noting(ranges, *BUCKETS), noting(ranges, *BUCKETS), noting(ranges, *OPTIMIZER)
    chunk = noting(ranges, "modules", "zero_grad_buffer")
    chunk.bucket_groups, chunk.expert_parallel_bucket_groups = [dense], [experts]
    chunk.config = noting(ranges, "finalize_model_grads_func")
    parts = [(dense, BUCKETS), (experts, BUCKETS), (optimizer, OPTIMIZER)]
    parts += [(chunk, {"zero_grad_buffer": "gradients"}), (chunk.config, {"finalize_model_grads_func": "gradients"})]
    with named(ranges, [chunk], optimizer):
        for part, labels in parts:
            assert {name: getattr(part, name)() for name in labels} == {name: [labels[name]] for name in labels}
    for part, labels in parts:
        assert [getattr(part, name)() for name in labels] == [[]] * len(labels)


def test_a_profiler_that_failed_leaves_no_window_open(tmp_path: Path) -> None:
    optimizer = noting(Ranges(), "step")
    step = optimizer.step
    profiler = Profiler(tmp_path, 0, 1, 2, Clock())
    profiler.on_model([torch.nn.Module()], optimizer)
    profiler.on_step_begin(1)
    assert torch.autograd._profiler_enabled()
    assert optimizer.step is not step
    profiler.on_end(LookupError())
    assert not torch.autograd._profiler_enabled()
    assert optimizer.step is step
    assert not list(tmp_path.iterdir())


def test_what_stages_send_has_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()

    def communicate(self: P2PCommunicator, *, tensor: int) -> tuple[int, list[str]]:
        return tensor, [label for label, _ in ranges.open_now]

    monkeypatch.setattr(P2PCommunicator, "_communicate", communicate)
    communicator = P2PCommunicator.__new__(P2PCommunicator)
    with named(ranges, [], None):
        assert communicator._communicate(tensor=7) == (7, ["pipeline"])
    assert communicator._communicate(tensor=8) == (8, [])


def test_megatron_has_the_functions_that_ranges_stand_in_for() -> None:
    """A function that is not there has no range, and no error: an optimizer or a bucket may lack it."""
    assert all(callable(getattr(_ParamAndGradBucketGroup, name)) for name in BUCKETS)
    assert all(callable(getattr(MegatronOptimizer, name)) for name in OPTIMIZER)
    assert callable(DistributedDataParallel.zero_grad_buffer)
    assert callable(P2PCommunicator._communicate)


def test_the_steps_of_megatrons_own_profile_have_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = mock.MagicMock()
    monkeypatch.setattr(profile_ranges, "named", opened)
    enter, leave = opened.return_value.__enter__, opened.return_value.__exit__
    for rank, ranks, expected in ((1, [], [3, 4]), (1, [0], []), (0, [0], [3, 4])):
        args = SimpleNamespace(profile=True, profile_ranks=ranks, profile_step_start=2, profile_step_end=4)
        listener = FamilyRanges(SimpleNamespace(arguments=lambda args=args: args), rank)  # type: ignore[arg-type]
        listener.on_model(["a chunk"], "an optimizer")
        during = []
        for number in range(1, 7):
            listener.on_step_begin(number)
            during += [number] * (enter.call_count - leave.call_count)
            listener.on_step(a_step(number))
        assert during == expected
        assert enter.call_count == leave.call_count
    listener.on_step_begin(3)
    listener.on_end(LookupError())  # the run ends in the window
    assert enter.call_count == leave.call_count == 3
    assert opened.call_args.args[1:] == (["a chunk"], "an optimizer")
