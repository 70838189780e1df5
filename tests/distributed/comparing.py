"""Two runs side by side: their scalars by step, and the tensors of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tests.distributed.runs import Run

SCALARS = (
    "lm loss", "mtp_1 loss", "mtp_2 loss", "indexer loss", "seq_load_balancing_loss", "z_loss", "grad norm",
)  # fmt: skip
MOMENTUM = "optimizer.state.exp_avg."
"""Prefix, in a checkpoint, of Adam's mean of the gradients: a weighted sum of those of all steps."""


def tensors_of(run: Run, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a run's checkpoint of ``step``, parameters and gradients with them; experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, value in run.tensors(step).items():
        if ".experts.experts." in name:
            found |= {f"{name}[{index}]": expert for index, expert in enumerate(value)}
        else:
            found[name] = value
    return found


def differing_runs(expected: Run, found: Run, tolerance: float, names: Sequence[str] = SCALARS, *, steps: int) -> list[str]:
    """One sentence for each scalar in all ``steps``, and each gradient of the first two, that is further off.

    Of the gradients Adam's mean is compared; the first step is of size zero (:data:`tests.distributed.runs.WARM_UP`).
    """
    assert all(len(run.scalars[name]) == steps for run in (expected, found) for name in names)
    first, same = (
        {name: value for name, value in tensors_of(run, 2).items() if name.startswith(MOMENTUM)} for run in (expected, found)
    )
    assert sum(value.numel() for value in first.values()) == sum(expected.model.parameters().values())
    off = differing_scalars(expected.scalars, found.scalars, tolerance, names)
    return off + differing_tensors(first, same, tolerance)


def differing_scalars(
    expected: Mapping[str, Mapping[int, float]],
    found: Mapping[str, Mapping[int, float]],
    tolerance: float,
    names: Sequence[str] = SCALARS,
) -> list[str]:
    """One sentence for each scalar of ``names`` and step that is further off, relatively, than ``tolerance``."""
    return [
        f"{name}, step {step}: {found[name][step]!r} instead of {value!r}"
        for name in names
        for step, value in expected[name].items()
        if not abs(found[name][step] - value) <= tolerance * abs(value)
    ]


def differing_tensors(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float) -> list[str]:
    """One sentence for each tensor whose difference has a norm of more than ``tolerance`` times its own."""
    assert found.keys() == expected.keys()
    off = {name: float((found[name] - value).norm()) for name, value in expected.items()}
    return [f"{name}: off by {error:.2e}" for name, error in off.items() if not error <= tolerance * expected[name].norm()]


def assert_same_bytes(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Fail, with names, if two checkpoints hold other tensors, or one of them in other bytes."""
    assert found.keys() == expected.keys()
    assert expected, "nothing to compare"
    kinds, theirs = ({name: (one.dtype, one.shape) for name, one in each.items()} for each in (found, expected))
    assert kinds == theirs
    assert [name for name, value in expected.items() if _bytes(value) != _bytes(found[name])] == []


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
