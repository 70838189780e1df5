"""The patch adam-in-one-pass on Megatron's optimizers: the step is the kernel's where that does the same.

Transformer Engine's Adam and the kernel are stood in for: neither runs without a GPU (tests/gpu/test_adam.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.ops import adam
from megacpp_mcore.patches.adam_in_one_pass import PATCH
from tests import stock
from tests.optimizers import accumulate, build

pytestmark = pytest.mark.usefixtures("process")

NORM = 4.0 - 1e-6


class Quantised(torch.Tensor):
    """What holds no 16-bit elements."""


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's after three steps, as far as the patch looks at it; its own step does nothing."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        more = {"step": 3, "bias_correction": True}
        typed = [{**group, **more, "weight_decay": 0.1 * group["wd_mult"]} for group in groups]
        super().__init__([torch.zeros(())], {})
        self.param_groups = [*typed, {**typed[0], "params": []}]  # whose tensors are views, as Megatron sets them
        mains = [main for group in groups for main in group["params"]]
        self.state |= {main: {name: torch.rand_like(main) for name in ("exp_avg", "exp_avg_sq")} for main in mains}
        self.capturable, self.master_weights, self.adam_w_mode = False, False, 1
        self.name_to_dtype_map = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)
        self.stepped = 0

    def step(self) -> None:  # type: ignore[override]
        self.stepped += 1


@pytest.fixture
def optimizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's, distributed or not, around a :class:`FusedAdam`; with its ``model``, and a count of copies to that."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as megatrons

    distributed = getattr(request, "param", True)
    model, built = build({"a": "bfloat16", "b": "bfloat16", "c": "float32"}, distributed=distributed, clip_grad=1.0)
    (member,) = getattr(built, "chained_optimizers", [built])
    member.model, member.optimizer = model, FusedAdam(member.optimizer.param_groups)
    monkeypatch.setattr(type(member), "_copy_main_params_to_model_params", mock.Mock())
    monkeypatch.setattr(megatrons, "get_grad_norm_fp32", lambda *_, **__: torch.tensor([NORM]))  # as on a GPU
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", clip_grads.multi_tensor_scale_impl)
    return member


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The kernel's launches: addresses, step, factor, weight decay."""
    made: list[tuple[Any, ...]] = []

    def step(table: adam.Table, *, number: int, scale: Any, weight_decay: float, **_: Any) -> None:
        made.append((table.addresses, number, scale if scale is None else float(scale), weight_decay))

    monkeypatch.setattr(adam, "step", step)
    return made


def train(optimizer: Any) -> bool:
    """A patched step; whether it clipped the gradients in memory, as upstream does."""
    accumulate(optimizer.model, 6)
    before = [parameter.main_grad.clone() for parameter in optimizer.model.parameters()]
    with stock.patched(PATCH):
        assert optimizer.step()[0]
    return not any(
        torch.equal(parameter.main_grad, grad) for parameter, grad in zip(optimizer.model.parameters(), before, strict=True)
    )


def addresses(optimizer: Any, group: dict[str, Any]) -> list[int]:
    """Of a group's main parameters, gradients, moments, and 16-bit elements."""
    models = [parameter for parameter in optimizer.model.parameters() if parameter.dtype == torch.bfloat16]
    copies = {parameter.main_param.data_ptr(): parameter.data_ptr() for parameter in models}
    places = []
    for main in group["params"]:
        moments = optimizer.optimizer.state[main].values()
        places += [tensor.data_ptr() for tensor in (main, main.grad, *moments)]
        places.append(copies.get(main.data_ptr(), 0))  # an fp32 parameter is its own main parameter
    return places


@pytest.mark.parametrize("optimizer", [True, False], indirect=True, ids=["distributed", "plain"])
def test_one_launch_a_group_clips_updates_and_copies(optimizer: Any, calls: list[tuple[Any, ...]]) -> None:
    inner, hooked = optimizer.optimizer, list[int]()
    inner.register_step_post_hook(lambda *_: hooked.append(len(calls)))
    for clip in (1.0, 0.0):
        optimizer.config.clip_grad = clip
        assert not train(optimizer)
    assert hooked == [2, 4]  # what is kept of weights until the next step is dropped by such a hook
    assert inner.stepped == optimizer._copy_main_params_to_model_params.call_count == 0
    first, second, empty = inner.param_groups
    decays = first["weight_decay"], second["weight_decay"]
    assert decays[0] != decays[1]
    assert [call[1:] for call in calls] == [(*step, decay) for step in ((4, 0.25), (5, None)) for decay in decays]
    assert first["step"] == second["step"] == empty["step"] == 5
    assert [places for places, *_ in calls[2:]] == [addresses(optimizer, group) for group in (first, second)]
    assert "step" not in vars(inner)


def test_tensors_that_have_moved_are_found_again(optimizer: Any, calls: list[tuple[Any, ...]]) -> None:
    train(optimizer)
    group = optimizer.optimizer.param_groups[0]
    moments = optimizer.optimizer.state[group["params"][0]]
    kept, moments["exp_avg"] = moments["exp_avg"], moments["exp_avg"].clone()
    train(optimizer)
    assert calls[0][0][2] == kept.data_ptr()
    assert calls[2][0] == addresses(optimizer, group)


def quantise(outer: Any) -> None:
    for bucket in (bucket for buffer in outer.buffers for bucket in buffer.buckets):
        bucket.param_data = bucket.param_data.as_subclass(Quantised)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "first step": lambda outer: outer.optimizer.state.clear(),
    "own main weights": lambda outer: setattr(outer.optimizer, "master_weights", True),
    "16-bit moments": lambda outer: setattr(outer.optimizer, "name_to_dtype_map", {"exp_avg": torch.bfloat16}),
    "FP8 parameters": lambda outer: setattr(outer.ddp_config, "fp8_param_gather", True),
    "quantised": quantise,
    "no bias correction": lambda outer: outer.optimizer.param_groups[0].update(bias_correction=False),
    "Apex": lambda outer: setattr(type(outer.optimizer), "__module__", "apex.optimizers"),
    "PyTorch": lambda outer: setattr(type(outer.optimizer), "__module__", "torch.optim.adam"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_optimizers_are_upstreams(
    optimizer: Any, calls: list[tuple[Any, ...]], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedAdam, "__module__", FusedAdam.__module__)  # put back afterwards
    if other == "PyTorch":  # on a host without Triton
        monkeypatch.delattr("megacpp_mcore.ops.adam")
        monkeypatch.setitem(sys.modules, "megacpp_mcore.ops.adam", None)
    OTHERS[other](optimizer)
    assert train(optimizer)
    assert (optimizer.optimizer.stepped, optimizer._copy_main_params_to_model_params.call_count, calls) == (1, 1, [])


def test_a_norm_group_of_its_own_is_clipped_in_place(optimizer: Any, calls: list[tuple[Any, ...]]) -> None:
    clipped: list[int] = []
    clip = stock.makes(PATCH)["clip_grad_by_total_norm_fp32"](lambda parameters, *_: clipped.append(len(parameters)))
    accumulate(optimizer.model, 6)
    with stock.patched(PATCH):
        optimizer.prepare_grads()
        for parameters in (optimizer.get_parameters()[:2], optimizer.get_parameters()[2:]):
            clip(parameters, 1.0, torch.tensor([NORM]))
        optimizer.step_with_ready_grads()
    assert clipped == [2, 4]
    assert [call[2] for call in calls] == [None, None]
