"""Quantised weights are kept while they are those of their parameter, and no longer; by Megatron's own optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import quantised_weights
from tests import stock
from tests.errors import raises


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    quantised_weights.forget()
    yield
    quantised_weights.forget()


def copied(w: torch.Tensor, into: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...]:
    """A copy instead of a kernel's output."""
    return (w.detach().clone() if into is None else into[0].copy_(w),)


def kept(w: torch.Tensor) -> torch.Tensor:
    return quantised_weights.kept(w, copied)[0]


def test_made_once_and_gone_with_the_parameter() -> None:
    w, other = (torch.nn.Parameter(torch.randn(2, 3, 4)) for _ in range(2))
    assert kept(w) is kept(w)
    assert torch.equal(kept(other), other)
    del w
    assert len(quantised_weights._copies) == 1


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


def test_what_graphs_read_stays_in_its_place_and_is_renewed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a weight whose copy is renewed before replays; another one's is made anew, and in a capture."""
    w, other = (torch.nn.Parameter(torch.randn(2, 3, 4)) for _ in range(2))
    quantised_weights.renew_before_replays([w])
    first, of_other = kept(w), kept(other)
    place = first.data_ptr()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    w.data.add_(1)
    with torch.no_grad():
        other.add_(1)
    is_capturing = SimpleNamespace(is_current_stream_capturing=lambda: True)
    with monkeypatch.context() as capture:
        capture.setattr(torch, "cuda", is_capturing)
        capture.setattr(torch.Tensor, "is_cuda", True)
        assert kept(w) is first  # stale: a replay comes after it has been renewed
        assert kept(other) is not of_other
        assert torch.equal(kept(other), other)
    assert not torch.equal(first, w)
    quantised_weights.renew([w, other])
    assert torch.equal(first, w)
    with torch.no_grad():
        w.mul_(2)
    assert kept(w).data_ptr() == place
    assert torch.equal(first, w)


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


def test_a_captured_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would not say that weights have changed."""
    monkeypatch.setattr(quantised_weights, "_copies", {mock.Mock(is_cuda=True): None})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(ModelError, "--optimizer-cuda-graph"):
        quantised_weights.forget()
    monkeypatch.undo()  # before the fixture forgets
