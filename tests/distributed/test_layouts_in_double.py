"""One model in every layout, all in fp64: losses, gradients, parameters and Adam's state over many steps."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed.comparing import MOMENTUM, SCALARS, differing_scalars, differing_tensors, tensors_of
from tests.distributed.runs import COMPARED, MODEL, ONE, ROOT, Laboratory

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

TOLERANCE = 1e-10
"""Relative, as in test_layouts; what is seen is some 1e-12."""


LABORATORY = functools.partial(Laboratory, script=ROOT / "tests" / "distributed" / "double.py")


@pytest.mark.parametrize("name", ["EP 2", "TP 2 with SP"])  # where sums are taken in another order
def test_every_step_and_what_it_leaves(laboratory: Laboratory, name: str) -> None:
    one, other = laboratory.compared(ONE), laboratory.compared(name)
    assert all(len(one.scalars[scalar]) == COMPARED for scalar in SCALARS)
    assert differing_scalars(one.scalars, other.scalars, TOLERANCE) == []
    expected, found = tensors_of(one, COMPARED), tensors_of(other, COMPARED)
    moments = sum(value.numel() for key, value in found.items() if key.startswith(MOMENTUM))
    assert moments == sum(MODEL.parameters().values())
    assert differing_tensors(expected, found, TOLERANCE) == []
    kinds = {value.dtype for key, value in found.items() if key.startswith(("optimizer.state.", "decoder."))}
    assert kinds == {torch.float64}
