"""Quantised weights are kept while they are those of their parameter, and no longer; by Megatron's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.ops.grouped_mlp import fp8
from tests import stock


@pytest.fixture(autouse=True)
def _copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy in place of what the kernel gives."""
    monkeypatch.setattr(fp8, "_scaled", lambda w: (w.detach().clone(),) * 4)
    fp8.forget()
    yield
    fp8.forget()


def kept(w: torch.Tensor) -> torch.Tensor:
    return fp8._kept(w)[0]


def test_made_once_and_gone_with_the_parameter() -> None:
    w, other = (torch.nn.Parameter(torch.randn(2, 3, 4)) for _ in range(2))
    assert kept(w) is kept(w)
    assert torch.equal(kept(other), other)
    del w
    assert len(fp8._quantized) == 1


@torch.no_grad()
def _in_place(w: torch.nn.Parameter, value: torch.Tensor) -> None:
    w.copy_(value)


def _loaded(w: torch.nn.Parameter, value: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.w = w
    module.load_state_dict({"w": value})


def _elsewhere(w: torch.nn.Parameter, value: torch.Tensor) -> None:
    w.data = value


def _behind_a_step(w: torch.nn.Parameter, value: torch.Tensor) -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    w.data.copy_(value)  # which no version counts


@pytest.mark.parametrize("change", [_in_place, _loaded, _elsewhere, _behind_a_step])
def test_changed_weights_are_quantised_anew(change: Callable[[torch.nn.Parameter, torch.Tensor], None]) -> None:
    w, value = torch.nn.Parameter(torch.randn(2, 3, 4)), torch.randn(2, 3, 4)
    kept(w)
    change(w, value)
    assert torch.equal(kept(w), value)


def test_an_evaluation_has_the_weights_of_its_time_and_keeps_none() -> None:
    w, average = torch.nn.Parameter(torch.randn(2, 3, 4)), torch.randn(2, 3, 4)
    trained, first = w.detach().clone(), kept(w)
    with torch.no_grad():
        w.data.copy_(average)
        assert torch.equal(kept(w), average)
        w.data.copy_(trained)
    assert kept(w) is first


@pytest.mark.parametrize("distributed", [False, True])
def test_every_step_of_megatrons_optimizers_ends_it(tmp_path: Path, distributed: bool) -> None:
    from tests.optimizers import accumulate, build

    with stock.one_process(tmp_path / "store"):
        model, optimizer = build({"w": "bfloat16"}, distributed=distributed)
        w = model.w_matrix
        for step in range(2):
            before, version = kept(w), w._version
            assert kept(w) is before
            accumulate(model, step)
            assert optimizer.step()[0]
            assert torch.equal(kept(w), w)
            assert not torch.equal(kept(w), before)
        assert w._version == version or not distributed  # which is why a version alone will not do
