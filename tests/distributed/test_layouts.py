"""Every layout trains the same model: losses, gradient norm, every gradient and parameter; one checkpoint, fp32."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megacpp_mcore.model import preset
from tests.distributed.runs import COMPARED, LAYOUTS, MODEL, ONE, Laboratory, Run, execute, words_for, write_config

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]

TOLERANCE = 1e-5
"""Relative, for losses, gradient norm and gradients."""

SCALARS = (
    "lm loss",
    "mtp_1 loss",
    "mtp_2 loss",
    "indexer loss",
    "seq_load_balancing_loss",
    "z_loss",
    "grad-norm",
)
MOMENTUM = "optimizer.state.exp_avg."
"""Prefix, in a checkpoint, of Adam's mean of the gradients: a weighted sum of those of all steps."""

OTHERS = [name for name in LAYOUTS if name != ONE]


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint, parameters and gradients with them; experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, value in run.tensors(COMPARED).items():
        if ".experts.experts." in name:
            found |= {f"{name}[{index}]": expert for index, expert in enumerate(value)}
        else:
            found[name] = value
    return found


def differing_scalars(
    expected: Mapping[str, Mapping[int, float]], found: Mapping[str, Mapping[int, float]], tolerance: float = TOLERANCE
) -> list[str]:
    """One sentence for each scalar of :data:`SCALARS` and step that is further off than ``tolerance``."""
    return [
        f"{name}, step {step}: {found[name][step]!r} instead of {value!r}"
        for name in SCALARS
        for step, value in expected[name].items()
        if not abs(found[name][step] - value) <= tolerance * abs(value)
    ]


def differing_tensors(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float = TOLERANCE
) -> list[str]:
    """One sentence for each tensor whose difference has a norm of more than ``tolerance`` times its own."""
    assert found.keys() == expected.keys()
    off = {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}
    return [f"{name}: off by {ratio:.2e}" for name, ratio in off.items() if not ratio <= tolerance]


@pytest.mark.parametrize("name", OTHERS)
def test_losses_and_gradient_norm(laboratory: Laboratory, name: str) -> None:
    expected, found = laboratory.compared(ONE).scalars, laboratory.compared(name).scalars
    assert all(len(expected[scalar]) == len(found[scalar]) == COMPARED for scalar in SCALARS)
    assert differing_scalars(expected, found) == []


@pytest.mark.parametrize("name", OTHERS)
def test_every_gradient_and_parameter(laboratory: Laboratory, name: str) -> None:
    expected, found = tensors_of(laboratory.compared(ONE)), tensors_of(laboratory.compared(name))
    assert differing_tensors(expected, found) == []


def test_what_is_compared_is_the_whole_model_at_work(laboratory: Laboratory) -> None:
    run = laboratory.compared(ONE)
    tensors = run.tensors(COMPARED)
    trained = [name.removeprefix(MOMENTUM) for name in tensors if name.startswith(MOMENTUM)]
    assert sum(tensors[name].numel() for name in trained) == sum(MODEL.parameters().values())
    assert [name for name, value in tensors_of(run).items() if not value.norm() > 0] == []
    for name in SCALARS:
        values = [run.scalars[name][step] for step in range(1, COMPARED + 1)]
        assert min(values) > 0, name
        assert len(set(values)) == COMPARED, name
    assert set(MODEL.layers) == set("AMER")
    assert set(MODEL.roles) == {None, "-", "F", "S"}


def test_the_tolerance_fails_what_a_wrong_layout_does(laboratory: Laboratory) -> None:
    run = laboratory.compared(ONE)
    for name, value in tensors_of(run).items():
        wrong = {
            "not summed over two ranks": value / 2,
            "summed twice": value * 2,
            "of the other sign": -value,
            "scaled": value * (1 + 2 * TOLERANCE),
            "without its strongest entry": value.where(value.abs() < value.abs().max(), 0.0),
        }
        for what, tensor in wrong.items():
            (sentence,) = differing_tensors({name: value}, {name: tensor})
            assert sentence.startswith(f"{name}: "), what
    for name in SCALARS:
        values = {**run.scalars[name], COMPARED: run.scalars[name][COMPARED] * (1 + 2 * TOLERANCE)}
        (sentence,) = differing_scalars(run.scalars, {**run.scalars, name: values})
        assert sentence.startswith(f"{name}, step {COMPARED}: ")


def test_a_stage_that_would_begin_with_a_shared_layer_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    model = preset("nam56r_tiny")
    assert model.dsa.schedule == "-FS"
    words = words_for(model)
    words[words.index("--pipeline-model-parallel-size") + 1] = "2"
    command = [sys.executable, "-m", "megacpp_mcore", "launch", "--device", "cpu", "--nproc", "2", "--", *words]
    status, output = execute(command, write_config(tmp_path / "model.yaml", {}))
    assert status not in (0, None)
    assert "ModelError: nam56r_tiny: with model chunks 1–6, 7–12, the first sparse layer of a chunk would be" in output
    assert "layer 9. " in output
    assert "adopt the promoted schedule '-FF'" in output
    # What every run prints once it has weights, and once it trains.
    for sign in ("number of parameters on", "iteration        1/"):
        assert sign in laboratory.compared(ONE).output
        assert sign not in output
