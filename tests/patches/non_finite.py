"""A training one of whose values is NaN or infinite: ``python -m tests.patches.non_finite HOW FILE ARGUMENTS``.

HOW is a case that spoils steps from the second on, after ``first`` from the first on, after ``late`` with checks that wait as
on a GPU, before ``on rank N`` there alone; FILE.RANK gets whether no parameter has changed. After ``every`` the first step is
tried with all of :data:`TRIED` before, and what each raised goes to FILE. The launcher's device is DEVICE.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megacpp_mcore.errors import NonFiniteError
from megacpp_mcore.patches import non_finite_origin

FIRST, DISABLED, UNCHECKED = "first step", "rerun disabled", "unchecked"
OUTSIDE = ("embedding", "MTP", "output layer")
TRIED = (
    [(FIRST, f"{place}, activation, nan") for place in (*"AMER", *OUTSIDE)]
    + [(FIRST, f"{place}, gradient, nan") for place in ("M", *OUTSIDE)]
    + [(FIRST, case) for case in ("E, activation, inf", "output layer, gradient, inf")]
    + [(DISABLED, case) for case in ("M, activation, nan", "E, gradient, nan", "A, layer gradient, nan")]
    + [(UNCHECKED, case) for case in ("R, gradient, nan", "embedding, gradient, inf", "A, activation, nan")]
)


def target(chunks: list[Any], place: str) -> tuple[Any, int]:
    """The module whose output is spoilt, and its layer's number."""
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(chunks):
        if place == "embedding" and chunk.pre_process:
            return chunk.embedding, 0
        if place == "output layer" and chunk.post_process:
            return chunk.output_layer, 0
        if place == "MTP" and getattr(chunk, "mtp", None) is not None:
            return chunk.mtp.layers[0].mtp_model_layer.self_attention, 0
        for layer in reversed(chunk.decoder.layers):
            if getattr(layer, "family", "") == place:
                return layer.mlp if place == "E" else layer.self_attention, layer.layer_number
    return None, 0


@contextlib.contextmanager
def spoilt(chunks: list[Any], case: str) -> Iterator[int]:
    """Within, one number of a module's output, of its (or of a layer's output's) gradient or of its weights is not finite."""
    place, kind, value = case.split(", ")
    module, number = target(chunks, place)
    if module is not None and kind == "weight":
        next(module.parameters()).detach().view(-1)[0] = float(value)

    from megacpp_mcore.layer_specs import layer_plan

    def poisoned(tensor: torch.Tensor) -> torch.Tensor:
        poison = torch.zeros_like(tensor)
        poison.view(-1)[0] = float(value)
        return tensor + poison

    def hook(_: Any, __: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if kind == "activation":
            first = poisoned(first)
        elif kind == "gradient" and first.requires_grad:
            first.register_hook(poisoned)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    def hold(layer: Any, inputs: torch.Tensor, made: torch.Tensor) -> None:
        if layer.layer_number == number and kind == "layer gradient":
            made.register_hook(poisoned)
        non_finite_origin.hold(layer, inputs, made)

    handle = module.register_forward_hook(hook) if module is not None else contextlib.nullcontext()
    with handle, mock.patch.object(layer_plan, "hold", hold):
        yield number


def parameters(chunks: list[Any]) -> list[torch.Tensor]:
    return [parameter.detach().nan_to_num() for chunk in chunks for parameter in chunk.parameters()]


def unchanged(before: list[torch.Tensor], chunks: list[Any]) -> bool:
    return all(torch.equal(param, other) for param, other in zip(before, parameters(chunks), strict=True))


def try_every(step: Callable[[], Any], chunks: list[Any]) -> dict[str, Any]:
    """What the step raised in each mode and case, the spoilt layer's number, and whether no parameter has changed."""
    from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import get_args

    machine, outcomes = get_rerun_state_machine(), {}
    for mode, case in TRIED:
        machine.mode = RerunMode.DISABLED if mode == DISABLED else RerunMode.VALIDATE_RESULTS
        get_args().check_for_nan_in_loss_and_grad = mode != UNCHECKED
        machine.has_checked_gradients = False
        for chunk in chunks:
            chunk.ddp_config.check_for_nan_in_grad = mode != UNCHECKED
        before = parameters(chunks)
        message = "nothing"
        with spoilt(chunks, case) as number:
            try:
                step()
            except NonFiniteError as error:
                message = str(error)
        outcomes[f"{mode}: {case}"] = {"said": message, "layer": number, "unchanged": unchanged(before, chunks)}
        machine.state, machine.first_iteration_complete = RerunState.NOT_RUNNING_YET, False
        machine.current_iteration = 0
        MTPLossLoggingHelper.tracker.clear()
    machine.mode, get_args().check_for_nan_in_loss_and_grad = RerunMode.VALIDATE_RESULTS, True
    return outcomes


def main(how: str, file: Path, words: list[str]) -> None:
    from megatron.training import training

    from megacpp_mcore.commands.cli import main as launch

    stock, calls = training.train_step, []
    if how.startswith("late "):
        non_finite_origin.DEVICE, how = "cpu", how.removeprefix("late ")

    def train_step(forward_step: Any, iterator: Any, chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(None)

        def step() -> Any:
            return stock(forward_step, iterator, chunks, *args, **kwargs)

        if len(calls) == 1 and "first" not in how:
            if "every" in how:
                file.write_text(json.dumps(try_every(step, chunks)))
            loss = step()
            assert all(math.isfinite(float(value)) for value in loss[0].values())
            return loss
        case, _, rank = how.removeprefix("first ").removeprefix("every ").partition(" on rank ")
        with spoilt(chunks, case) if rank in ("", os.environ.get("RANK")) else contextlib.nullcontext():
            before = parameters(chunks)
            try:
                return step()
            finally:
                file.with_name(f"{file.name}.{os.environ.get('RANK', '0')}").write_text(str(unchanged(before, chunks)))

    training.train_step = train_step
    sys.exit(launch(["launch", "--verbose", "--device", os.environ.get("DEVICE", "cpu"), "--no-observe", "--", *words]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
