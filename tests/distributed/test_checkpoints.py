"""Checkpoints: they move between layouts byte for byte, a resumed run repeats bit for bit, and experts start unequal."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.distributed.runs import COMPARED, MAIN, MODEL, ONE, RESUMED, Laboratory


def assert_same_bytes(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Fail, with names, if two checkpoints hold other tensors, or one of them in other bytes."""
    assert found.keys() == expected.keys()
    assert expected, "nothing to compare"
    assert [name for name, value in expected.items() if value.dtype != found[name].dtype] == []
    assert [name for name, value in expected.items() if _bytes(value) != _bytes(found[name])] == []


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()


@pytest.mark.slow
def test_a_checkpoint_moves_between_layouts_byte_for_byte(laboratory: Laboratory) -> None:
    run = laboratory.compared("PP 2 × VPP 2")
    expected = run.tensors(COMPARED)
    assert any(name.startswith("optimizer.") for name in expected)
    for name in ("TP 2 with SP", ONE):
        run = laboratory.moved(run, name)
        assert_same_bytes(expected, run.tensors(COMPARED))


@pytest.mark.slow
def test_parameters_saved_under_expert_parallelism_load_in_one_process(laboratory: Laboratory) -> None:
    # Parameters and buffers only: under EP Megatron keeps a second optimizer for the experts, and without the distributed
    # optimizer it loads the state of two into two only.
    source = laboratory.compared("EP 2")
    expected = {name: value for name, value in source.tensors(COMPARED).items() if not name.startswith("optimizer.")}
    assert_same_bytes(expected, laboratory.moved(source, ONE, optimizer=False).tensors(COMPARED))


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_two_experts_start_equal_and_each_is_the_same_in_both_layouts(laboratory: Laboratory) -> None:
    runs = [laboratory.untrained(name) for name in (ONE, "EP 2")]
    assert [run.scalars["learning-rate"] for run in runs] == [{1: 0.0}, {1: 0.0}]
    one, two = (run.tensors(1) for run in runs)
    names = [name for name in one if ".experts.experts." in name]
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
