"""The patch adam-in-one-pass: the distributed optimizer's step is the kernel's where that does the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.ops import adam
from megacpp_mcore.patches import adam_in_one_pass as patch
from tests import stock

SIZES, COPIED = (64, 16, 32), 2
"""Of the main parameters; the first two are copies of 16-bit ones. The last is in a group of its own."""

MAKES = stock.makes(patch.PATCH)


class Quantised(torch.Tensor):
    """What holds no 16-bit elements."""


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's, as far as the patch looks at it; its own step must not run."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(self, mains: list[torch.Tensor]) -> None:
        shared = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True}
        parts = ((mains[:COPIED], 0.1), (mains[COPIED:], 0.0), ([], 0.0))
        super().__init__([{"params": some, "weight_decay": decay, "step": 3, **shared} for some, decay in parts], {})
        self.state |= {main: {name: torch.rand_like(main) for name in ("exp_avg", "exp_avg_sq")} for main in mains}
        self.capturable, self.master_weights, self.adam_w_mode = False, False, 1
        self.name_to_dtype_map = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
        self.stepped = 0

    def step(self) -> None:  # type: ignore[override]
        self.stepped += 1


class Optimizer:
    """An optimizer of one rank: the distributed one, with one bucket, or the plain one."""

    is_stub_optimizer = False

    def __init__(self, distributed: bool = True) -> None:
        self.buffer = torch.zeros(sum(SIZES[:COPIED]), dtype=torch.bfloat16)
        self.mains = [torch.randn(size) for size in SIZES]
        self.models: list[Any] = list(self.buffer.split(SIZES[:COPIED]))
        self.optimizer = FusedAdam(self.mains)
        self.config = SimpleNamespace(
            use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, reuse_grad_buf_for_mxfp8_param_ag=False
        )
        if not distributed:
            self.fp32_from_float16_groups, self.float16_groups = [self.mains[:COPIED]], [self.models]
        else:
            self.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
            self.shard_fp32_from_float16_groups, self.model_float16_groups = [self.mains[:COPIED]], [self.models]
            self.model_param_gbuf_map = dict.fromkeys(self.models, (0, None, 0))
            self.buffers = [SimpleNamespace(buckets=[SimpleNamespace(param_data=self.buffer)])]
        self.copied = 0

    def _get_model_param_range_map(self, model: object) -> dict[str, Any]:
        start = 0 if model is self.models[0] else SIZES[0]
        return {"gbuf_world_in_bucket": SimpleNamespace(start=start, end=start + SIZES[int(start > 0)])}

    def get_parameters(self) -> list[torch.Tensor]:
        return [main for group in self.optimizer.param_groups for main in group["params"]]

    def gradients(self) -> None:
        for main in self.mains:
            main.grad = torch.ones_like(main)

    def _copy_main_params_to_model_params(self) -> None:
        self.copied += 1

    def ready(self) -> bool:
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """The kernel's launches: addresses, step, factor, weight decay."""
    made: list[tuple[Any, ...]] = []

    def step(table: adam.Table, *, number: int, scale: Any, weight_decay: float, **_: Any) -> None:
        made.append((table.addresses, number, scale if scale is None else float(scale), weight_decay))

    monkeypatch.setattr(adam, "step", step)
    return made


def one_step(optimizer: Optimizer, *, clips: bool = True) -> list[float]:
    """Run the patched parts of a step as upstream does; returns by what upstream's own clipping was called."""
    clipped: list[float] = []

    def original(parameters: Any, max_norm: float, total_norm: Any, use_decoupled_grad: bool = False) -> None:
        clipped.append(max_norm)

    kind = "DistributedOptimizer" if hasattr(optimizer, "ddp_config") else "Float16OptimizerWithFloat16Params"
    copy = MAKES[f"{kind}._copy_model_grads_to_main_grads"](lambda self: self.gradients())
    step = MAKES["MixedPrecisionOptimizer.step_with_ready_grads"](lambda self: self.ready())
    clip: Callable[..., None] = MAKES["clip_grad_by_total_norm_fp32"](original)
    copy(optimizer)
    if clips:
        clip(optimizer.get_parameters(), max_norm=1.0, total_norm=torch.tensor([4.0 - 1e-6]), use_decoupled_grad=False)
    assert step(optimizer)
    return clipped


@pytest.mark.parametrize("distributed", [True, False])
def test_one_launch_a_group_clips_updates_and_copies(calls: list[tuple[Any, ...]], distributed: bool) -> None:
    optimizer = Optimizer(distributed)
    hooked: list[int] = []
    optimizer.optimizer.register_step_post_hook(lambda *_: hooked.append(len(calls)))
    assert one_step(optimizer) == []
    assert one_step(optimizer, clips=False) == []
    assert hooked == [2, 4]  # what is kept of weights until the next step is dropped by such a hook
    assert optimizer.optimizer.stepped == optimizer.copied == 0
    assert [call[1:] for call in calls] == [(4, 0.25, 0.1), (4, 0.25, 0.0), (5, None, 0.1), (5, None, 0.0)]
    assert [group["step"] for group in optimizer.optimizer.param_groups] == [5, 5, 5]  # an empty group counts, too
    first = optimizer.mains[0]
    moments = optimizer.optimizer.state[first]
    copy = optimizer.buffer.data_ptr()
    expected = [*(t.data_ptr() for t in (first, first.grad, moments["exp_avg"], moments["exp_avg_sq"])), copy]
    assert calls[2][0][:5] == expected
    assert calls[2][0][9] == copy + 2 * SIZES[0]
    assert calls[3][0][4] == 0  # an fp32 parameter is its own main parameter
    assert "step" not in vars(optimizer.optimizer)


def test_tensors_that_have_moved_are_found_again(calls: list[tuple[Any, ...]]) -> None:
    optimizer = Optimizer()
    one_step(optimizer)
    moments = optimizer.optimizer.state[optimizer.mains[2]]
    kept, moments["exp_avg"] = moments["exp_avg"], moments["exp_avg"].clone()
    one_step(optimizer)
    assert calls[1][0][2] == kept.data_ptr()
    assert calls[3][0][2] == moments["exp_avg"].data_ptr()


OTHERS: dict[str, Callable[[Any], Any]] = {
    "first step": lambda outer: outer.optimizer.state.clear(),
    "own main weights": lambda outer: setattr(outer.optimizer, "master_weights", True),
    "16-bit moments": lambda outer: setattr(outer.optimizer, "name_to_dtype_map", {"exp_avg": torch.bfloat16}),
    "FP8 parameters": lambda outer: setattr(outer.ddp_config, "fp8_param_gather", True),
    "quantised": lambda outer: setattr(outer.buffers[0].buckets[0], "param_data", outer.buffer.as_subclass(Quantised)),
    "no bias correction": lambda outer: outer.optimizer.param_groups[0].update(bias_correction=False),
    "Apex": lambda outer: setattr(type(outer.optimizer), "__module__", "apex.optimizers"),
    "PyTorch": lambda outer: setattr(type(outer.optimizer), "__module__", "torch.optim.adam"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_optimizers_are_upstreams(
    other: str, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedAdam, "__module__", FusedAdam.__module__)  # put back afterwards
    if other == "PyTorch":  # on a host without Triton
        monkeypatch.delattr("megacpp_mcore.ops.adam")
        monkeypatch.setitem(sys.modules, "megacpp_mcore.ops.adam", None)
    optimizer = Optimizer()
    OTHERS[other](optimizer)
    assert one_step(optimizer) == [1.0]
    assert (optimizer.optimizer.stepped, optimizer.copied, calls) == (1, 1, [])


def test_a_norm_group_of_its_own_is_clipped_in_place(calls: list[tuple[Any, ...]]) -> None:
    optimizer, clipped = Optimizer(), []
    optimizer.gradients()
    patch._owned.make(lambda self: None)(optimizer)
    clip = patch._later.make(lambda parameters, *_: clipped.append(len(parameters)))
    clip(optimizer.get_parameters()[:2], 1.0, torch.tensor([4.0]))
    clip(optimizer.get_parameters()[2:], 1.0, torch.tensor([2.0]))
    patch._in_one_pass.make(lambda self: self.ready())(optimizer)
    assert clipped == [2, 1]
    assert [call[2] for call in calls] == [None, None]
