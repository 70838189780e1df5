"""The profiler ranges of stages, buckets and the optimizer: named while they run, and removed afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


class Seen:
    """Functions that note the ranges that are open while they run."""

    def __init__(self, ranges: Ranges, *names: str) -> None:
        self.open: dict[str, list[str]] = {}
        for name in names:
            setattr(self, name, functools.partial(self._run, ranges, name))

    def _run(self, ranges: Ranges, name: str, *values: int) -> int:
        self.open[name] = [label for label, _ in ranges.open_now]
        return sum(values)


def run_all(of: Any, names: Any) -> None:
    """Call the functions ``names`` of an object; each returns what it returns without a range."""
    for name in names:
        assert getattr(of, name)(2, 3) == 5


def test_buckets_and_the_optimizer_have_their_ranges() -> None:
    ranges = Ranges()
    dense, experts, optimizer = Seen(ranges, *BUCKETS), Seen(ranges, *BUCKETS), Seen(ranges, *OPTIMIZER)
    chunk: Any = torch.nn.Module()
    chunk.bucket_groups, chunk.expert_parallel_bucket_groups = [dense], [experts]
    chunk.zero_grad_buffer = (cleared := Seen(ranges, "zero_grad_buffer")).__dict__["zero_grad_buffer"]
    chunk.config = Seen(ranges, "finalize_model_grads_func")
    with named(ranges, [chunk], optimizer):
        run_all(dense, BUCKETS)
        run_all(experts, BUCKETS)
        run_all(optimizer, OPTIMIZER)
        run_all(chunk, ["zero_grad_buffer"])
        run_all(chunk.config, ["finalize_model_grads_func"])
    assert dense.open == experts.open == {name: [label] for name, label in BUCKETS.items()}
    assert optimizer.open == {name: [label] for name, label in OPTIMIZER.items()}
    assert cleared.open == {"zero_grad_buffer": ["gradients"]}
    assert chunk.config.open == {"finalize_model_grads_func": ["gradients"]}
    for seen in (dense, experts):
        run_all(seen, BUCKETS)
        assert seen.open == {name: [] for name in BUCKETS}


def test_a_profiler_that_failed_leaves_no_window_open(tmp_path: Path) -> None:
    chunk: Any = torch.nn.Module()
    optimizer: Any = SimpleNamespace(step=(step := Seen(Ranges(), "step")).__dict__["step"])
    profiler = Profiler(tmp_path, 0, 1, 2, Clock())
    profiler.on_model([chunk], optimizer)
    profiler.on_step_begin(1)
    assert torch.autograd._profiler_enabled()
    assert optimizer.step is not step.__dict__["step"]
    profiler.on_end(LookupError())
    assert not torch.autograd._profiler_enabled()
    assert optimizer.step is step.__dict__["step"]
    assert not list(tmp_path.iterdir())


def test_what_stages_send_has_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    sent: list[list[str]] = []

    def communicate(self: P2PCommunicator, *, tensor: int) -> int:
        sent.append([label for label, _ in ranges.open_now])
        return tensor

    monkeypatch.setattr(P2PCommunicator, "_communicate", communicate)
    communicator = P2PCommunicator.__new__(P2PCommunicator)
    with named(ranges, [], None):
        assert communicator._communicate(tensor=7) == 7
    assert communicator._communicate(tensor=8) == 8
    assert sent == [["pipeline"], []]
    assert P2PCommunicator._communicate is communicate


def test_megatron_has_the_functions_that_ranges_stand_in_for() -> None:
    """A function that is not there has no range, and no error: an optimizer or a bucket may lack it."""
    assert all(callable(getattr(_ParamAndGradBucketGroup, name)) for name in BUCKETS)
    assert all(callable(getattr(MegatronOptimizer, name)) for name in OPTIMIZER)
    assert callable(DistributedDataParallel.zero_grad_buffer)
    assert callable(P2PCommunicator._communicate)


def test_the_steps_of_megatrons_own_profile_have_the_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def opened(*what: Any) -> Iterator[None]:
        assert what[1:] == (["a chunk"], "an optimizer")
        seen.append("open")
        yield
        seen.append("closed")

    monkeypatch.setattr(profile_ranges, "named", opened)
    args = SimpleNamespace(profile=True, profile_ranks=[], profile_step_start=2, profile_step_end=4)
    for rank, ranks, there in ((1, [], True), (1, [0], False), (0, [0], True)):
        args.profile_ranks = ranks
        listener = FamilyRanges(SimpleNamespace(arguments=lambda: args), rank)  # type: ignore[arg-type]
        listener.on_model(["a chunk"], "an optimizer")
        during = {}
        for number in range(1, 7):
            listener.on_step_begin(number)
            during[number] = seen[-1:]
            listener.on_step(a_step(number))
        listener.on_end(None)
        assert [number for number, what in during.items() if what == ["open"]] == ([3, 4] if there else [])
        assert seen == (["open", "closed"] if there else [])
        seen.clear()
