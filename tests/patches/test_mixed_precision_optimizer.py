"""Patches: mixed-precision-optimizer, each state under its parameter's name, and torch-adam-resume, Adam's count of steps."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from megacpp_mcore.patches import torch_adam_resume
from megacpp_mcore.patches.machinery.registry import fingerprint
from megacpp_mcore.patches.mixed_precision_optimizer import PATCH
from tests import stock
from tests.lanes import exhaustive_but
from tests.optimizers import accumulate, build, take_over, trained

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.usefixtures("process")

KINDS = ("plain", "distributed")
MAIN = {"plain": "fp32_param", "distributed": "param"}
"""What upstream calls main parameters in the checkpoint."""
MIXED = {"a": "bfloat16", "b": "float32", "c": "bfloat16", "d": "float32", "e": "bfloat16"}


def saved(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """What the optimizer's sharded state dict has, by key."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    own = model.state_dict(keep_vars=True)
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = optimizer.sharded_state_dict(make_sharded_tensors_for_checkpoint(own, "", {}), metadata=metadata)
    sharded = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    assert len({value.key for value in sharded}) == len(sharded)
    return {value.key: value.data for value in sharded}


def expected(model: Any, optimizer: Any, kind: str) -> dict[str, torch.Tensor]:
    """The same from the parameters themselves and the inner optimizer's state, by no number."""
    import torch

    inner = [wrapper.optimizer for wrapper in getattr(optimizer, "chained_optimizers", [optimizer])]
    mains = {
        main.data_ptr(): (main, adam.state[main]) for adam in inner for group in adam.param_groups for main in group["params"]
    }
    tensors = {}
    for name, parameter in model.named_parameters():
        in_fp32 = parameter.dtype == torch.float32
        main, state = mains[(parameter if in_fp32 else parameter.main_param).data_ptr()]
        if not in_fp32 or kind != "plain":  # which is its own main parameter, and among the model's
            tensors[f"optimizer.state.{MAIN[kind]}.{name}"] = main
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.state.{moment}.{name}"] = state[moment]
    return tensors


def assert_same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if actual[key].flatten().tolist() != value.flatten().tolist()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_state_has_its_parameters_name(kind: str) -> None:
    """Upstream's plain optimizer cannot be saved; its distributed one says nothing where all sizes are the same."""
    model, optimizer = trained(MIXED, distributed=kind == "distributed")
    is_mended = kind == "plain" and any(fingerprint(edit.target) in edit.until for edit in PATCH.edits)
    with contextlib.nullcontext() if is_mended else pytest.raises((AssertionError, KeyError, ValueError)):
        assert_same(saved(model, optimizer), expected(model, optimizer, kind))
    with stock.patched(PATCH):
        model, optimizer = trained(MIXED, distributed=kind == "distributed")
        assert_same(saved(model, optimizer), expected(model, optimizer, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", exhaustive_but(["bfloat16", "float32"], "bfloat16"))
def test_parameters_of_one_kind_are_upstreams(dtype: str, kind: str) -> None:
    states = []
    for patches in ((), (PATCH,)):
        with stock.patched(*patches):
            kinds = dict.fromkeys("abc", dtype)
            model, optimizer = trained(kinds, distributed=kind == "distributed", bf16=dtype == "bfloat16")
            tensors, numbers = saved(model, optimizer), []
            if kind == "distributed":
                order = {id(parameter): name for name, parameter in model.named_parameters()}
                (inner,) = getattr(optimizer, "chained_optimizers", [optimizer])
                numbers = [(order[id(param)], number) for param, number in inner.model_param_group_index_map.items()]
            states.append((list(tensors), numbers))
            assert len(tensors) == 6 * (3 if kind == "distributed" or dtype == "bfloat16" else 2)
    assert states[0] == states[1]


FORMATS = ("dp_reshardable", "dp_zero")
"""The two formats that keep no names, as upstream's methods are called."""


def taken_over(format_: str) -> tuple[list[Any], list[Any]]:
    """The main parameters of a trained optimizer, and those of another one that has loaded its state in a format."""
    source, target = trained(MIXED, distributed=True), build(MIXED, distributed=True)
    (giver,), (taker,) = source[1].chained_optimizers, target[1].chained_optimizers
    take_over(giver, taker, format_)
    names = [
        [inner._get_main_param_and_optimizer_states(parameter)["param"].tolist() for parameter in model.parameters()]
        for model, inner in ((source[0], giver), (target[0], taker))
    ]
    return names[0], names[1]


@pytest.mark.parametrize("format_", FORMATS)
def test_fp32_parameters_are_loaded_without_gradients(format_: str) -> None:
    """Upstream, where only the numbers of the states are patched, loads them with gradients."""
    with stock.patched(PATCH, torch_adam_resume.PATCH):
        expected_mains, mains = taken_over(format_)
        assert mains == expected_mains
        assert mains != [parameter.flatten().tolist() for parameter in build(MIXED, distributed=True)[0].parameters()]
    numbered = dataclasses.replace(PATCH, edits=PATCH.edits[:2])
    with (
        stock.patched(numbered, torch_adam_resume.PATCH),
        pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"),
    ):
        taken_over(format_)


DTYPES = {"a": "bfloat16", "b": "bfloat16"}


def distributed(optimizer: Any) -> Any:
    """The one DistributedOptimizer in a chain."""
    (member,) = optimizer.chained_optimizers
    return member


def hand_over(source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    """The state of one run's optimizer to another's, by the methods that every format goes through."""
    (model, optimizer), (other_model, other) = source, target
    giver, taker = distributed(optimizer), distributed(other)
    taker.load_state_dict(giver.state_dict())
    for parameter, its in zip(model.parameters(), other_model.parameters(), strict=True):
        its.data.copy_(parameter.data)
        param_states = giver._get_main_param_and_optimizer_states(parameter)
        # No format keeps the count with a parameter.
        tensors = {name: value.clone() for name, value in param_states.items() if name != "step"}
        taker._set_main_param_and_optimizer_states(its, tensors)


def test_the_next_step_is_the_same() -> None:
    """A second step whose bias correction goes by a count of 2, in each parameter."""
    with stock.patched(torch_adam_resume.PATCH):
        source, target = trained(DTYPES, distributed=True), build(DTYPES, distributed=True)
        hand_over(source, target)
        for model, optimizer in (source, target):
            accumulate(model, 7)
            optimizer.step()
        pairs = list(zip(source[0].parameters(), target[0].parameters(), strict=True))
        assert [own.main_param.tolist() for own, _ in pairs] == [its.main_param.tolist() for _, its in pairs]
        states = distributed(target[1]).optimizer.state.values()
        assert [float(state["step"]) for state in states] == [2.0] * len(pairs)


def test_what_is_read_before_the_first_step_changes_no_step() -> None:
    """A load reads the state of an optimizer that has taken none."""
    with stock.patched(torch_adam_resume.PATCH):
        stepped = []
        for is_read in (False, True):
            model, optimizer = build(DTYPES, distributed=True)
            if is_read:
                groups = distributed(optimizer).state_dict()["optimizer"]["param_groups"]
                assert {group["step"] for group in groups} == {0.0}
            accumulate(model, 7)
            optimizer.step()
            stepped.append([parameter.main_param.tolist() for parameter in model.parameters()])
        assert stepped[0] == stepped[1]


def test_upstream_fails_without_the_patch() -> None:
    with pytest.raises(AssertionError):
        distributed(build(DTYPES, distributed=True)[1]).state_dict()
    with pytest.raises(KeyError, match="step"):
        hand_over(trained(DTYPES, distributed=True), trained(DTYPES, distributed=True))
