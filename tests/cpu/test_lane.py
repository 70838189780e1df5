"""The CPU lane: what it answers, that it is reversible, and that it gives every expert weights of its own."""

from __future__ import annotations

import itertools
import logging
import os
import platform
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore import cpu
from megacpp_mcore.backends import probes
from megacpp_mcore.errors import LaunchError
from tests.errors import raises


@pytest.fixture
def lane() -> Iterator[cpu.CpuLane]:
    installed = cpu.install()
    yield installed
    installed.remove()


@pytest.fixture
def world(tmp_path: Any) -> Iterator[Any]:
    """A gloo world of one process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def _replaceable() -> dict[str, Any]:
    """Everything that the lane may change, by identity."""
    from megatron.core.transformer.moe import experts, moe_utils
    from megatron.training import initialize

    state: dict[str, Any] = {}
    for module in (torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.distributed, experts, moe_utils):
        state.update({f"{module.__name__}.{name}": value for name, value in vars(module).items()})
    state["SequentialMLP"] = experts.SequentialMLP.__init__
    state["warm-up"] = initialize._warmup_jit_function
    state["DataLoader"] = torch.utils.data.DataLoader.__iter__
    state["mode"] = torch.overrides._get_current_function_mode()
    state["filters"] = tuple(logging.getLogger("megatron.core.tensor_parallel.random").filters)
    state["dynamo"] = torch._dynamo.config.disable
    # interned: os.environ makes a new string for every question
    state.update({name: sys.intern(os.environ.get(name, "unset")) for name in cpu.lane.ENVIRONMENT})
    return state


@pytest.fixture
def other_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Something else than the lane's value wherever this environment happens to hold that already; yields the GEMM."""
    from megatron.core.transformer.moe import moe_utils

    gemm = object()  # what Transformer Engine would bring
    monkeypatch.setattr(moe_utils, "te_general_gemm", gemm)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with torch._dynamo.config.patch(disable=False):
        yield gemm


def test_every_replacement_is_named_and_put_back(other_values: Any) -> None:
    cpu.install().remove()  # what torch imports on first use is imported now
    before = _replaceable()
    lane = cpu.install()
    during, messages = _replaceable(), "\n".join(lane.messages)
    lane.remove()
    after = _replaceable()

    gemm = "megatron.core.transformer.moe.moe_utils.te_general_gemm"
    dynamo, connections = "TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS"
    assert [before[name] for name in (gemm, "dynamo", dynamo, connections)] == [other_values, False, "0", "unset"]
    assert [during[name] for name in (gemm, "dynamo", dynamo, connections)] == [None, True, "1", "1"]
    changed = {name for name in during if during[name] is not before.get(name)}
    assert len(changed) > 60
    whole_modules = {"torch.cuda", "torch.cuda.random", "torch.cuda.nvtx"}
    named = {place if (place := what.rpartition(".")[0]) in whole_modules else what for what in changed}
    aliases = {
        "SequentialMLP": "SequentialMLP.__init__",
        "DataLoader": "DataLoader.__iter__",
        "warm-up": "initialize._warmup_jit_function",
        "mode": "CpuDeviceMode",
        "filters": "a filter of megatron.core.tensor_parallel.random",
        "dynamo": "torch._dynamo.config.disable=True",
    }
    assert {"torch.distributed.all_to_all_single", *whole_modules, *aliases} <= named
    assert [what for what in named if aliases.get(what, what) not in messages] == []
    assert "Tensor.record_stream" in during.keys() - before.keys()  # it is inherited
    assert [name for name in before if after.get(name) is not before[name]] == []
    assert after.keys() == before.keys()
    lane.remove()
    assert torch.cuda.is_available is before["torch.cuda.is_available"]


def test_what_cannot_be_put_back_holds_up_nothing_else() -> None:
    before = _replaceable()
    lane = cpu.install()
    lane.callback(os.fstat, -1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        lane.remove()
    lane = cpu.install()
    with torch.overrides.BaseTorchFunctionMode():
        with raises(LaunchError, code="nested-mode"):
            lane.remove()
        during = _replaceable()
        assert {name for name in before if during[name] is not before[name]} == {"mode"}
    torch.overrides._pop_mode()  # for the tests that follow; a user starts the process anew


def test_a_failed_install_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from megacpp_mcore.cpu import megatron

    def fail(*_: Any) -> None:
        raise OSError("no")

    before = _replaceable()
    with monkeypatch.context() as context:
        context.setattr(megatron, "_seed_experts_by_global_index", fail)
        with pytest.raises(OSError, match="no"):
            cpu.install()
    after = _replaceable()
    assert [name for name in before if after[name] is not before[name]] == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with raises(LaunchError, code="cuda-in-use"):
        cpu.install()
    monkeypatch.undo()
    with cpu.install():  # neither has left a lane
        assert cpu.is_active()
        with raises(LaunchError, code="installed"):
            cpu.install()
    assert not cpu.is_active()


def test_devices_become_the_cpu_and_meta_stays(lane: cpu.CpuLane) -> None:
    for device in ("cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1), None, "cpu"):
        assert torch.empty(2, device=device).device.type == "cpu"
        assert torch.tensor([1.0], device=device).device.type == "cpu"
        assert torch.ones(2).to(device=device, dtype=torch.float64).device.type == "cpu"
        if device is not None:
            assert torch.ones(2).to(device, torch.float64).dtype == torch.float64
            assert torch.nn.Linear(2, 2).to(device).weight.device.type == "cpu"
    assert torch.empty(2, device="meta").device.type == "meta"
    with pytest.raises(NotImplementedError, match="meta"):
        torch.empty(2, device="meta").cuda()


def test_tensor_methods(lane: cpu.CpuLane) -> None:
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.cuda(torch.cuda.current_device(), non_blocking=True) is x
    assert x.pin_memory() is x
    assert torch.empty(2, pin_memory=True).shape == (2,)
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
    assert x.type(torch.float64).dtype == torch.float64
    assert not x.is_cuda
    x.record_stream(torch.cuda.current_stream())
    assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"


def test_device_questions(lane: cpu.CpuLane, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.get_device_capability() == (0, 0)
    assert probes.arch.__wrapped__() is None
    assert torch.cuda.get_device_properties(torch.device("cuda:0")).major == 0
    assert not torch.cuda.is_current_stream_capturing()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    monkeypatch.setenv("LOCAL_RANK", "3")
    torch.cuda.set_device(3)
    assert torch.cuda.current_device() == 3
    with torch.cuda.device(0):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.nvtx.range_push("range")
        torch.cuda.nvtx.range_pop()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc, which has malloc_trim")
def test_an_emptied_cache_gives_freed_memory_back(lane: cpu.CpuLane) -> None:
    """Blocks below glibc's threshold for mapping, every other one freed: the heap keeps them between those in use."""
    blocks = [torch.ones(1 << 14) for _ in range(4096)]  # 256 MiB, 64 KiB each
    del blocks[::2]
    before = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    assert before - torch.cuda.memory_allocated() > 64 << 20
    assert all(float(block.sum()) == 1 << 14 for block in blocks)


def test_memory_is_that_of_the_process(lane: cpu.CpuLane) -> None:
    stats = torch.cuda.memory_stats()
    allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    assert 1 << 20 < allocated < total
    assert free + allocated <= total + (64 << 20)
    assert peak >= allocated // 2
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] // 2 > 0


def test_streams_and_events(lane: cpu.CpuLane) -> None:
    side = torch.cuda.Stream(device=0)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="record"):
        start.elapsed_time(end)
    start.record()
    side.wait_event(side.record_event(end))
    assert start.elapsed_time(end) >= 0
    assert end.query()


def test_generator_is_the_one_that_dropout_uses(lane: cpu.CpuLane) -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(64))
    assert not torch.equal(first, torch.nn.functional.dropout(torch.ones(64)))
    torch.cuda.random.set_rng_state(state)
    assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64)))
    torch.cuda.set_rng_state_all([state])
    assert torch.equal(torch.cuda.default_generators[0].get_state(), torch.get_rng_state())


def test_megatron_rng_tracker_is_real(lane: cpu.CpuLane, caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("one", 1)
    tracker.add("two", 2)
    saved = {name: state.clone() for name, state in tracker.get_states().items()}
    torch.manual_seed(0)
    outside = torch.get_rng_state()

    def draw(name: str) -> torch.Tensor:
        with tracker.fork(name):
            return torch.rand(8, device="cuda")

    with caplog.at_level(logging.WARNING):
        first = [draw("one"), draw("two"), draw("one")]
    assert caplog.records == []
    assert torch.equal(torch.get_rng_state(), outside)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    tracker.set_states(saved)
    assert all(torch.equal(a, b) for a, b in zip(first, [draw("one"), draw("two"), draw("one")], strict=True))


def test_a_data_loader_and_stocks_warm_up_leave_the_generator_alone(lane: cpu.CpuLane) -> None:
    """The warm-up draws inputs as large as the micro-batch, and the weights do not notice."""
    from megatron.training import initialize

    data, before = torch.utils.data.TensorDataset(torch.arange(2.0)), torch.get_rng_state()
    assert [float(batch) for (batch,) in torch.utils.data.DataLoader(data, num_workers=0, pin_memory=True)] == [0, 1]
    assert torch.equal(torch.get_rng_state(), before)
    sizes = {"ffn_hidden_size": 4, "hidden_size": 4, "seq_length": 2, "micro_batch_size": 2}
    kind = {"bf16": False, "fp16": False, "swiglu": False, "sequence_parallel": False}
    layout = {"tensor_model_parallel_size": 1, "context_parallel_size": 1}
    arguments = SimpleNamespace(**sizes, **kind, **layout)
    with mock.patch.object(initialize, "get_args", return_value=arguments):
        initialize._warmup_jit_function(tp_size=1)
        assert torch.equal(torch.get_rng_state(), before)
        initialize._warmup_jit_function.__wrapped__(tp_size=1)
        assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_all_to_all_takes_split_sizes_of_any_kind(world: Any, lane: cpu.CpuLane, kind: Any) -> None:
    received = torch.empty(4)
    sizes = kind([4])
    torch.distributed.all_to_all_single(received, torch.arange(4.0), sizes, sizes, group=world)
    assert received.tolist() == [0.0, 1.0, 2.0, 3.0]


def _experts(world: Any, ep_rank: int, ep_size: int) -> list[torch.Tensor]:
    """The first-layer weights of this rank's part of four experts, built by stock Megatron after a fixed seed."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 8,
    }
    config = TransformerConfig(**sizes, add_bias_linear=False, use_cpu_initialization=True)
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    ep = SimpleNamespace(rank=lambda: ep_rank, size=lambda: ep_size)
    groups = SimpleNamespace(ep=ep, expt_tp=world, expt_dp=world)
    torch.manual_seed(11)
    layer = SequentialMLP(4 // ep_size, config, submodules, pg_collection=groups)
    return [expert.linear_fc1.weight.detach() for expert in layer.local_experts] + [torch.rand(3)]


def test_experts_differ_and_do_not_depend_on_the_layout(world: Any, lane: cpu.CpuLane) -> None:
    (*unsharded, after), (*first, after_first), (*second, after_second) = (
        _experts(world, *place) for place in ((0, 1), (0, 2), (1, 2))
    )
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(unsharded, 2))
    sharded = [*first, *second, after_first, after_second]
    assert all(torch.equal(a, b) for a, b in zip([*unsharded, after, after], sharded, strict=True))


def test_stock_megatron_gives_every_rank_the_same_experts(world: Any) -> None:
    """The reason for the replacement; when this fails, upstream has mended it and the lane can drop its own."""
    assert all(torch.equal(a, b) for a, b in zip(_experts(world, 0, 2), _experts(world, 1, 2), strict=True))


def test_arguments_are_read_in_both_forms() -> None:
    assert cpu.missing_arguments([word for words in cpu.lane.REQUIRED_ARGUMENTS for word in words]) == []
    flags = [words[0] for words in cpu.lane.REQUIRED_ARGUMENTS if len(words) == 1]
    arguments = [*flags, "--distributed-backend=gloo", "--transformer-impl", "transformer_engine", "--num-workers=0"]
    assert cpu.missing_arguments(arguments) == ["--transformer-impl local (found 'transformer_engine')"]
