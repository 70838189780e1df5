"""The input projections of M and R: alignment in every preset and layout, padding, and what a checkpoint holds of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import mamba, recurrent
from megacpp_mcore.layer_specs.projection import ALIGNMENT, Part, inexact_rows, slots
from megacpp_mcore.model import PRESETS, Layout, preset
from tests import stock
from tests.errors import raises

KINDS = {"M": (3, mamba.projection_parts), "R": (12, recurrent.projection_parts)}
"""A layer of nam56r_tiny, and its parts."""


@pytest.fixture(scope="module")
def built(process: Path) -> Any:
    return stock.build({}, preset("nam56r_tiny"), process)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_can_be_read_in_16_bytes(name: str, tensor: int, kind: str) -> None:
    model = PRESETS[name]
    if kind not in model.layers:
        return
    heads = model.mamba_heads if kind == "M" else model.recurrent_heads
    if heads % tensor or (kind == "M" and model.mamba3.groups % tensor):
        with raises(ModelError, f"tensor parallelism ({tensor})"):
            model.check_divisible(Layout(tensor=tensor, sequence_parallel=True))
        return
    parts = KINDS[kind][1](model)
    unaligned = {False: {"dt", "A", "trap"}, True: set()}
    for replicated in (False, True):
        placed, rows = slots(tuple(part for part in parts if part.replicated is replicated), tensor)
        assert rows % ALIGNMENT == 0
        for slot in placed:
            assert slot.start % ALIGNMENT == 0 or slot.part.name in unaligned[replicated] - {"dt"}
            assert slot.rows * (1 if replicated else tensor) == slot.part.rows
        ends = [0, *(slot.start + slot.rows for slot in placed)]
        assert all(0 <= slot.start - end < ALIGNMENT for slot, end in zip(placed, ends, strict=False))


def test_a_part_that_cannot_be_cut_is_named() -> None:
    with raises(ModelError, "projection of v", "10 rows", "parallelism 4"):
        slots((Part("v", 10),), 4)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_products_with_their_rows_and_padding_gets_no_gradient(built: Any, kind: str) -> None:
    projection = built.decoder.layers[KINDS[kind][0] - 1].self_attention.in_proj
    hidden_SBD = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(1))
    projection.weight.grad = None
    parts = projection(hidden_SBD)
    padding = torch.ones(len(projection.weight), dtype=torch.bool)
    for slot in projection.slots:
        rows = projection.weight[slot.start : slot.start + slot.rows]
        torch.testing.assert_close(parts[slot.part.name], hidden_SBD @ rows.T)
        padding[slot.start : slot.start + slot.rows] = False
        assert rows.any()
    assert not projection.weight[padding].any()
    sum(part.square().sum() for part in parts.values()).backward()
    gradient, projection.weight.grad = projection.weight.grad, None
    assert not gradient[padding].any()
    assert bool(gradient[~padding].any(-1).all())
    assert int(padding.sum()) == 4  # nam56r_tiny has 4 angles and 4 forget gates


@pytest.mark.parametrize(("name", "tensor", "expected"), [
    ("nam56r", 1, 18432), ("nam56r", 2, 9216), ("nam56r", 4, 4608), ("nam56r", 8, 2304), ("nam56r_tiny", 1, 640),
])  # fmt: skip
def test_what_steers_the_recurrence_is_behind_the_wide_parts(name: str, tensor: int, expected: int) -> None:
    parts = mamba.projection_parts(preset(name))
    assert inexact_rows(parts, tensor) == expected
    assert [part.name for part in parts if part.exact] == ["dt", "A", "trap", "angles"]
    of_r = recurrent.projection_parts(preset(name))
    assert inexact_rows(of_r, 1) == slots(of_r, 1)[1]


def test_a_backend_may_give_the_wide_parts_and_the_rest_apart(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    projection = built.decoder.layers[2].self_attention.in_proj
    assert (projection.backend.op, projection.backend.observed) == ("mamba3_projection", "torch")
    hidden_SBD = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(1))

    def apart(x: torch.Tensor, weight: torch.Tensor, main_grad: Any, rows: int) -> tuple[torch.Tensor, ...]:
        assert (main_grad, rows) == (None, 640)
        return tuple(torch.nn.functional.linear(x, some) for some in (weight[:rows], weight[rows:]))

    both = []
    for fn in (projection.backend.fn, apart):
        monkeypatch.setattr(projection, "backend", SimpleNamespace(fn=fn))
        parts = projection(hidden_SBD)
        total = sum((part.sin() * number).sum() for number, part in enumerate(parts.values(), 1))
        both.append([*parts.values(), *torch.autograd.grad(total, projection.weight)])
    assert [*parts] == ["z", "x", "B", "C", "dt", "A", "trap", "angles"]
    for tensor, other in zip(*both, strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_gradient_is_added_to_main_grad(built: Any, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    projection = built.decoder.layers[2].self_attention.in_proj
    monkeypatch.setattr(projection.config, "gradient_accumulation_fusion", fused)
    weight, hidden_SBD = projection.weight, torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(1))
    weight.grad = None
    rows = torch.cat([hidden_SBD @ weight[slot.start : slot.start + slot.rows].T for slot in projection.slots], dim=-1)
    (expected,) = torch.autograd.grad(rows.sin().sum(), weight)
    for name, value in (("main_grad", torch.ones_like(weight)), ("grad_added_to_main_grad", False)):
        monkeypatch.setattr(weight, name, value, raising=False)
    torch.cat(list(projection(hidden_SBD).values()), dim=-1).sin().sum().backward()
    grad, weight.grad = weight.grad, None
    assert weight.grad_added_to_main_grad is fused
    assert fused or torch.allclose(grad, expected, atol=1e-5)
    torch.testing.assert_close(weight.main_grad, 1 + expected if fused else torch.ones_like(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_parts_without_padding_and_gives_them_back(built: Any, kind: str) -> None:
    projection = built.decoder.layers[KINDS[kind][0] - 1].self_attention.in_proj
    (factory,) = projection.sharded_state_dict("p.").values()
    assert isinstance(factory, ShardedTensorFactory)
    assert factory.data is projection.weight
    tensors = factory.build()
    parts = KINDS[kind][1](preset("nam56r_tiny"))
    assert {tensor.key: tensor.global_shape for tensor in tensors} == {
        f"p.weight.{part.name}": (part.rows, 128) for part in parts
    }
    assert torch.equal(factory.merge_fn([tensor.data for tensor in tensors]), projection.weight)
    moments = torch.randn_like(projection.weight)
    sharded = factory.build_fn("optimizer.state.exp_avg.p.weight", moments, (0, 0, 0), None)
    assert {tensor.key for tensor in sharded} == {f"optimizer.state.exp_avg.p.weight.{part.name}" for part in parts}
