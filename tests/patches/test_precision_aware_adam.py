"""The patch precision-aware-adam: what states are kept in, exact main parameters, and resumes bit for bit."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.remainder_adam import PrecisionAwareAdam, joined, split
from megacpp_mcore.patches import adam_in_one_pass, mixed_precision_optimizer, optimizer_resharding, torch_adam_resume
from megacpp_mcore.patches.precision_aware_adam import PATCH
from tests import stock
from tests.errors import raises
from tests.optimizers import accumulate, build, take_over

pytestmark = pytest.mark.usefixtures("process")

MIXED = {"a": "bfloat16", "b": "float32", "c": "bfloat16", "d": "float32"}
PATCHES = (PATCH, mixed_precision_optimizer.PATCH, optimizer_resharding.PATCH, torch_adam_resume.PATCH)
AWARE = {"use_precision_aware_optimizer": True, "decoupled_weight_decay": True}
NARROW = AWARE | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def one_of(settings: dict[str, Any], steps: int = 0) -> tuple[Any, Any]:
    """A model and its distributed optimizer, after so many steps."""
    model, optimizer = build(MIXED, distributed=True, **settings)
    for step in range(steps):
        accumulate(model, step)
        optimizer.step()
    (member,) = optimizer.chained_optimizers
    return model, member


def mains(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """The fp32 main parameters, from whatever keeps them."""
    fp32 = []
    for parameter in model.parameters():
        main = optimizer._get_main_param_and_optimizer_states(parameter)["param"]
        fp32.append(joined(parameter.detach().flatten(), main) if main.dtype == torch.int16 else main.detach().float())
    return fp32


def assert_same(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [torch.equal(weight, other) for weight, other in zip(actual, wanted, strict=True)] == [True] * len(wanted)


def test_a_weight_and_its_remainder_are_the_main_parameter() -> None:
    every = torch.arange(2**16, dtype=torch.int32)
    bits = torch.cat([(every << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    weights = bits.view(torch.float32)
    weights = weights[weights.abs() < 3e38]
    copy, rest = split(weights)
    assert (copy.dtype, rest.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(joined(copy, rest).view(torch.int32), weights.view(torch.int32))
    worst = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert all(part.isnan().all() for part in (split(worst)[0], joined(*split(worst))))
    ties = weights.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(copy[~ties], weights[~ties].bfloat16())
    assert ((copy.double() - weights.double()).abs() <= (weights.bfloat16().double() - weights.double()).abs()).all()


@pytest.mark.parametrize("settings", [AWARE, NARROW], ids=["fp32", "bf16"])
def test_what_states_are_kept_in(settings: dict[str, Any]) -> None:
    moments = settings.get("exp_avg_dtype", torch.float32)
    with stock.patched(*PATCHES):
        model, optimizer = one_of(settings, 1)
        for parameter in model.parameters():
            states = optimizer._get_main_param_and_optimizer_states(parameter)
            main = torch.int16 if parameter.dtype == torch.bfloat16 else torch.float32
            assert {name: state.dtype for name, state in states.items()} == {
                "param": main, "exp_avg": moments, "exp_avg_sq": moments
            }  # fmt: skip
            if parameter.dtype == torch.float32:  # of which upstream keeps a copy that no step changes
                assert states["param"].data_ptr() == parameter.data_ptr()


def test_main_parameters_are_those_of_an_optimizer_in_fp32() -> None:
    with stock.patched(*PATCHES):
        with_remainders = mains(*one_of(AWARE, 5))
        without_remainders = mains(*one_of(AWARE | {"store_param_remainders": False}, 5))
        assert_same(with_remainders, without_remainders)
    with stock.patched(mixed_precision_optimizer.PATCH):
        stocks = mains(*one_of({"decoupled_weight_decay": True}, 5))
    torch.testing.assert_close(with_remainders, stocks, rtol=0, atol=1e-6)


def test_gradients_are_scaled_by_the_step_where_adam_is_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import optimizer as megatrons

    norm, weights = megatrons.get_grad_norm_fp32, []
    for more in ((), (adam_in_one_pass.PATCH,)):
        if more:  # on GPUs the norm stays there
            monkeypatch.setattr(megatrons, "get_grad_norm_fp32", lambda *of, **how: torch.tensor([norm(*of, **how)]))
        with stock.patched(*PATCHES, *more):
            model, optimizer = one_of(AWARE | {"clip_grad": 0.25}, 2)
            before = [parameter.main_grad.clone() for parameter in model.parameters()]
            accumulate(model, 1)
            assert [
                torch.equal(param.main_grad, clipped) for param, clipped in zip(model.parameters(), before, strict=True)
            ] == [bool(more)] * len(before)
            weights.append(mains(model, optimizer))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("format_", ["dp_reshardable", "dp_zero", "fully_reshardable"])
@pytest.mark.parametrize("settings", [AWARE, NARROW], ids=["fp32", "bf16"])
def test_a_run_goes_on_bit_for_bit(settings: dict[str, Any], format_: str) -> None:
    with stock.patched(*PATCHES):
        (model, saved_optimizer), (other, taker) = one_of(settings, 3), one_of(settings)
        for parameter, its in zip(model.parameters(), other.parameters(), strict=True):
            its.data.copy_(parameter.data)
        take_over(saved_optimizer, taker, format_)
        assert_same(mains(other, taker), mains(model, saved_optimizer))
        for trained, optimizer in ((model, saved_optimizer), (other, taker)):
            accumulate(trained, 7)
            optimizer.step()
        assert_same(mains(other, taker), mains(model, saved_optimizer))
        assert {group["step"] for group in taker.optimizer.param_groups} == {4}


def test_the_first_step_begins_at_the_weights_of_that_time() -> None:
    """States are made before a checkpoint's weights are loaded without them."""
    weight = torch.ones(4).half()
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "remainders": False}
    optimizer = PrecisionAwareAdam([weight], **options, dtypes=(torch.float32, torch.float32))
    optimizer.load_state_dict(optimizer.state_dict())
    weight.fill_(5.0)
    vars(weight)["decoupled_grad"] = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["master_param"], torch.full((4,), 4.999))


def test_without_the_flag_nothing_is_asked_of_a_chunk() -> None:
    make = stock.makes(PATCH)["_get_megatron_optimizer_based_on_param_groups"](lambda *args: args)
    config = types.SimpleNamespace(use_precision_aware_optimizer=False)
    assert make(config, [torch.nn.Linear(2, 2)], [{}])[0] is config


def test_states_of_the_inner_optimizer_are_loaded_as_they_are() -> None:
    weights = [torch.randn(8), torch.randn(8).bfloat16()]
    options = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "remainders": True}
    dtypes = (torch.float32, torch.bfloat16)
    adam, other = (PrecisionAwareAdam([weight.clone() for weight in weights], **options, dtypes=dtypes) for _ in "ab")
    for param in adam.param_groups[0]["params"]:
        param.decoupled_grad = torch.randn(8).to(param.dtype)
    adam.step()
    other.load_state_dict(adam.state_dict())
    for param, loaded in zip(adam.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        for name, value in adam.state[param].items():
            assert value.dtype == other.state[loaded][name].dtype
            assert torch.equal(value, other.state[loaded][name])
    assert other.state[other.param_groups[0]["params"][1]]["exp_avg"].dtype == torch.float32  # of a bf16 parameter


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"main_params_dtype": torch.float16}, ["main_params_dtype is torch.float16", "torch.float32"]),
        ({"exp_avg_dtype": torch.uint8}, ["exp_avg_dtype is torch.uint8", "torch.float32 or torch.bfloat16"]),
        ({"decoupled_weight_decay": False}, ["decoupled_weight_decay is False"]),
        ({"optimizer_cpu_offload": True}, ["optimizer_cpu_offload is True", "torch.bfloat16 and torch.float32"]),
    ],
)
def test_what_cannot_be_kept_is_refused(settings: dict[str, Any], values: list[str]) -> None:
    with stock.patched(*PATCHES), raises(ModelError, *values):
        one_of(AWARE | settings)


def test_what_cannot_be_kept_of_one_dtype_is_left_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Transformer Engine; here upstream makes PyTorch's Adam instead."""
    from megatron.core import optimizer as module

    narrow = AWARE | {"exp_avg_dtype": torch.float16}
    with stock.patched(*PATCHES):
        with raises(ModelError, "exp_avg_dtype is torch.float16", "torch.bfloat16"):
            build(dict.fromkeys("ab", "bfloat16"), distributed=True, **narrow)
        made = mock.Mock(side_effect=lambda params, **_: torch.optim.SGD(params, lr=1.0))
        monkeypatch.setattr(module, "USING_PYTORCH_OPTIMIZER", False)
        monkeypatch.setattr(module, "Adam", made)
        build(dict.fromkeys("ab", "bfloat16"), distributed=True, **narrow)
    assert [call.kwargs["exp_avg_dtype"] for call in made.call_args_list] == [torch.float16]


def test_upstream_needs_transformer_engine() -> None:
    with pytest.raises(RuntimeError, match="requires FusedAdam from TransformerEngine"):
        one_of(AWARE)
    with stock.patched(*PATCHES):
        one_of(AWARE)
