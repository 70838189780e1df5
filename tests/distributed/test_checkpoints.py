"""Checkpoints: they move between layouts byte for byte, a resumed run repeats bit for bit, and experts start unequal."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.distributed.runs import COMPARED, MAIN, MODEL, ONE, RESUMED, Laboratory

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def assert_same_bytes(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Fail, with names, if two checkpoints hold other tensors, or one of them in other bytes."""
    assert found.keys() == expected.keys()
    assert expected, "nothing to compare"
    assert [name for name, value in expected.items() if value.dtype != found[name].dtype] == []
    assert [name for name, value in expected.items() if _bytes(value) != _bytes(found[name])] == []


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()


# Megatron keeps a second optimizer for the experts under EP, and under TP with uncut experts; without the distributed
# optimizer it loads the state of two into two only. There parameters and buffers alone can move.
@pytest.mark.parametrize(("name", "optimizer"), [("PP 2 × VPP 2", True), ("EP 2", False), ("TP 2 with SP", False)])
def test_a_checkpoint_of_any_layout_loads_in_one_process(laboratory: Laboratory, name: str, optimizer: bool) -> None:
    source = laboratory.compared(name)
    expected = source.tensors(COMPARED)
    if not optimizer:
        expected = {key: value for key, value in expected.items() if not key.startswith("optimizer.")}
    assert any(key.startswith("optimizer.") for key in expected) == optimizer
    assert_same_bytes(expected, laboratory.moved(source, ONE, optimizer=optimizer).tensors(COMPARED))


def test_a_resumed_run_repeats_the_uninterrupted_one(laboratory: Laboratory) -> None:
    whole, resumed = laboratory.main(), laboratory.resumed()
    later = range(RESUMED + 1, MAIN + 1)
    names = [name for name in whole.scalars if not name.endswith(("vs samples", "acceptance_rate"))]
    assert {"lm loss", "mtp_1 loss", "mtp_2 loss", "indexer loss", "grad-norm", "learning-rate"} <= set(names)
    for name in names:
        assert list(resumed.scalars[name]) == list(later), name
        assert [resumed.scalars[name][step] for step in later] == [whole.scalars[name][step] for step in later], name
    assert len({whole.scalars["lm loss"][step] for step in later}) == len(later)
    assert_same_bytes(whole.tensors(MAIN), resumed.tensors(MAIN))


def test_no_two_experts_start_equal_and_each_is_the_same_in_both_layouts(laboratory: Laboratory) -> None:
    untrained = laboratory.untrained("EP 2")
    assert untrained.scalars["learning-rate"] == {1: 0.0}
    # The first step of the other run is of size zero, too: if it were not, its experts would differ from these.
    one, two = laboratory.main().tensors(1), untrained.tensors(1)
    names = [name for name in two if ".experts.experts." in name]
    assert len(names) == 2 * len(MODEL.layer_numbers("E"))
    for matrix in ("linear_fc1", "linear_fc2"):
        for tensors in (one, two):
            experts = [expert for name in names if matrix in name for expert in tensors[name]]
            assert len(experts) == MODEL.moe.experts * len(MODEL.layer_numbers("E"))
            assert not any(torch.equal(a, b) for a, b in itertools.combinations(experts, 2))
            # Not a shifted or repeated stretch of one another, either.
            flat = torch.stack([expert.flatten() for expert in experts])
            assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.1
            assert ((flat.std(1) / flat.std(1).mean() - 1).abs() < 0.1).all()
    assert_same_bytes({name: one[name] for name in names}, {name: two[name] for name in names})
