"""Megatron's own count: the named differences from ours sum up to what its function returns, on both hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import PRESETS, Layout, Model, flops, preset, with_overrides
from megacpp_mcore.model.flops import stock as flops_stock
from megacpp_mcore.model.training import GPT, HYBRID, Training
from tests import stock


@pytest.fixture(scope="module")
def upstream() -> Iterator[Callable[..., float]]:
    """``num_floating_point_operations`` as Megatron has it, of a batch of a model on a host."""
    with stock.cpu_lane():
        count = import_module("megatron.training.training").num_floating_point_operations

        def of(model: Model, batch: int, host: str, **changes: Any) -> float:
            training = Training(
                device="cpu", precision="fp32", transformer_impl="local", tokenizer=tokenizer_words(model),
                data=("--mock-data",),
            )  # fmt: skip
            args = stock.parse(list(lower(model, Layout(), training, host)))
            args.padded_vocab_size = model.vocab_size_padded(1)
            vars(args).update(changes)
            return float(count(args, batch))

        yield of


@pytest.mark.parametrize("host", [GPT, HYBRID])
@pytest.mark.parametrize("name", PRESETS)
def test_ours_and_the_differences_are_megatrons_figure(name: str, host: str, upstream: Callable[..., float]) -> None:
    model = preset(name)
    found = flops_stock.differences(model, 3, host=host)
    ours = flops.step(model, 3).total.training
    theirs = ours + sum(each.flops for each in found)
    assert theirs == upstream(model, 3, host)
    assert theirs != ours
    assert len({each.reason for each in found}) == len(found) > 4
    assert all(each.flops for each in found)


@pytest.mark.parametrize(
    "overrides",
    [
        {"pattern": "AMER"},  # the last layer is no E layer
        {"mtp": {"depth": 0}},
        {"dsa": {"schedule": "-", "loss_coeff": 0.0}},
        {"pattern": "AM", "depth": 6},
        {"pattern": "AE", "depth": 4, "dsa": {"schedule": "FS"}},
    ],
)
@pytest.mark.parametrize("host", [GPT, HYBRID])
def test_other_models(overrides: dict[str, Any], host: str, upstream: Callable[..., float]) -> None:
    model = with_overrides(preset("nam56r_tiny"), overrides)
    found = flops_stock.differences(model, 2, host=host)
    assert flops.step(model, 2).total.training + sum(each.flops for each in found) == upstream(model, 2, host)


def test_another_length_and_vocabulary(upstream: Callable[..., float]) -> None:
    model, sizes = preset("nam56r_quarter"), {"seq_length": 1024, "vocab_size": 70_000}
    found = flops_stock.differences(model, 2, **sizes)
    theirs = upstream(model, 2, GPT, seq_length=1024, padded_vocab_size=70_000)
    assert flops.step(model, 2, **sizes).total.training + sum(each.flops for each in found) == theirs


def test_what_makes_the_difference_for_nam56r() -> None:
    """The three largest: a dense feed-forward part, then attention, in layers that have none, and no Mamba-3 at all."""
    found = sorted(flops_stock.differences(preset("nam56r")), key=lambda each: -abs(each.flops))
    assert [each.reason for each in found[:3]] == [
        "30 A, M and R layers counted with a dense feed-forward part",
        "39 M, E and R layers counted as MLA attention",
        "mamba projections not counted",
    ]


def test_there_are_two_hosts() -> None:
    with pytest.raises(ModelError, match="host is 'bert'; expected gpt or hybrid"):
        flops_stock.differences(preset("nam52"), host="bert")
