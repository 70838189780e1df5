"""non-finite-origin: a NaN or infinite loss or gradient stops the run before the update, and rank, layer and family are named.

Upstream checks the loss of every micro-batch and the norm of every gradient bucket (``--check-for-nan-in-loss-and-grad``, on
by default), and names the rank. In its default ``--rerun-mode validate_results`` it checks nothing in the first step of a
process, which then fills the parameters with NaN.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: NaN and infinity, found by upstream's own checks; those of the first step raise. Without the checks, the gradient norm.

On a GPU the host would wait for each loss and each bucket, twice. From the second step on, where upstream runs the step again
anyway, it reads all of them at once, before it decides on that; the layer behind a loss is then named as the step runs again.

Nothing is computed while values are finite. A layer (:func:`hold`) leaves weak references to its input and output, which live
as long as the backward pass needs them: when the loss is checked, they show the first layer whose output is not finite. When
gradients are checked they are gone, or in CUDA graphs overwritten, and the gradients themselves show where the backward pass,
which goes from the last layer to the first, went wrong. No collective is needed: other ranks may wait elsewhere. Where upstream
runs the step again, layers are examined as they run.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from megacpp_mcore.errors import NonFiniteError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

logger = logging.getLogger(__name__)

HELD = "held"
"""Attribute of a layer: weak references to its last input and output."""

LATER = "megacpp_later"
"""Attribute of the state machine: this step's checks that are still to be made, each with a copy of its value; None while they
are made."""

DEVICE = "cuda"
"""Where a value lies that the host reads later."""

_PARTS = {"embedding": "the embedding", "output_layer": "the output layer", "mtp": "the MTP block"}

_examining = False
"""Whether the step is run again to find where a value became non-finite."""


def hold(layer: Any, given: Any, made: Any) -> None:
    """Keep weak references to a layer's input and output; called by the layers after each forward pass."""
    global _examining
    vars(layer)[HELD] = (weakref.ref(given), weakref.ref(made))
    if _examining and not _finite(made):
        _examining = False
        began = "is the first that is not finite" if _finite(given) else "is not finite, and neither is its input"
        logger.error("megacpp-mcore: %s: as the step is run again, the output of %s %s", _rank(), _label(layer), began)


def _chunks() -> list[Any]:
    """Return the model chunks of this process in forward order."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    chunks = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), LanguageModule)]
    return sorted(chunks, key=lambda chunk: getattr(chunk, "vp_stage", None) or 0)


def _layers(chunk: Any) -> list[Any]:
    """Return the layers of a chunk in forward order."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    return [module for module in chunk.modules() if isinstance(module, BaseTransformerLayer)]


def _label(layer: Any) -> str:
    """Name a layer for messages."""
    where = _PARTS["mtp"] if layer.is_mtp_layer else f"layer {layer.layer_number}"
    return f"{where} ({getattr(layer, 'family', type(layer).__name__)})"


def _finite(tensor: Any) -> bool:
    return bool(tensor.isfinite().all())


def _alive(reference: weakref.ref[Any]) -> Any:
    """Return the tensor of a weak reference, or None; as torch.utils.weak.TensorWeakRef, which takes longer to make."""
    if (tensor := reference()) is not None:
        tensor._fix_weakref()
    return tensor


def _rank() -> str:
    """Return this rank and its pipeline stage."""
    import torch
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return f"rank {torch.distributed.get_rank()}" + (f", pipeline stage {stage + 1} of {stages}" if stages > 1 else "")


def origin(*, of_loss: bool) -> str:
    """Describe where on this rank a value first became NaN or infinite.

    Args:
        of_loss: whether the loss is not finite; otherwise a gradient.
    """
    import torch

    chunks = _chunks()
    with torch.no_grad():
        return f"{_rank()}: {_activation(chunks) if of_loss else _mtp_losses() or _gradient(chunks)}"


def _activation(chunks: Sequence[Any]) -> str:
    """Find the first layer whose output is not finite, of those still held."""
    unknown: list[str] = []
    for chunk in chunks:
        layers = [layer for layer in _layers(chunk) if HELD in vars(layer)]
        for layer in layers:
            label, (layer_input, output) = _label(layer), map(_alive, vars(layer)[HELD])
            if layer is layers[0] and layer_input is not None and not _finite(layer_input):
                if chunk.pre_process:
                    return f"the output of {_PARTS['embedding']} is not finite"
                before = f"the pipeline stage before it, which ends with layer {layer.layer_number - 1}"
                return f"the input of {label} is not finite: it comes from {before}"
            if output is None:
                unknown.append(label)
            elif _finite(output):
                unknown.clear()
            else:
                also = f" (those of {', '.join(unknown)} before it are no longer in memory)" if unknown else ""
                return f"the first layer whose output is not finite is {label}{also}"
    if unknown:
        return f"the outputs of {', '.join(unknown)} are no longer in memory, those of the layers before are finite"
    return "the output of every layer is finite: it began behind them, in the final norm, the output layer or the loss"


def _gradient(chunks: Sequence[Any]) -> str:
    """Describe where the backward pass went wrong, by the gradients of this rank."""
    from megatron.core.utils import to_local_if_dtensor

    wrong: dict[str, list[str]] = {}  # names of parameters by part of the model, in forward order
    for chunk in chunks:
        owners = {id(weight): _label(layer) for layer in _layers(chunk) for weight in layer.parameters()}
        for name, parameter in chunk.named_parameters():
            holders = (parameter, getattr(parameter, "main_param", None))
            gradients = (getattr(holder, kind, None) for kind in ("main_grad", "grad") for holder in holders)
            gradient = next((gradient for gradient in gradients if gradient is not None), None)
            if gradient is not None:
                part = owners.get(id(parameter)) or _PARTS.get(name.partition(".")[0], "the final norm")
                wrong.setdefault(part, []).extend([] if _finite(to_local_if_dtensor(gradient)) else [name])
    first = next((part for part in reversed(wrong) if wrong[part]), None)
    if first is None:
        return "every gradient on this rank is finite"
    caveat = ", unless the loss or the next pipeline stage gave it such a gradient" if first == [*wrong][-1] else ""
    return (
        f"the backward pass, which goes from the last layer to the first, went wrong in {first}: the gradients of "
        f"{len(wrong[first])} of its parameters are not finite, such as that of {wrong[first][0]}{caveat}"
    )


def _mtp_losses() -> str:
    """Report a loss of MTP that is not finite, as upstream does not check them; empty if all are finite."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    losses = MTPLossLoggingHelper.tracker.get("loss_values")
    if losses is None or _finite(losses):
        return ""
    where = f"the forward pass of {_PARTS['mtp']} (A) or of the output layer behind it"
    return f"a loss of MTP is not finite; if the main loss is, it began in {where}"


@edit(
    "megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
    "d62c830f2a335bd9b34d23db394ce3bf8776282fcf0e46c65758ca899a0e39df",
)
def _naming(
    original: Function,
    self: Any,
    result: Any,
    rejection_func: Callable[[Any], bool],
    message: str,
    *rest: Any,
    **kwargs: Any,
) -> None:
    import torch

    global _examining
    if rejection_func not in (torch.isnan, torch.isinf) or not kwargs.get("fatal", True):
        _check_waiting(self)  # else the step would be repeated for one that fails without stopping the run
        original(self, result, rejection_func, message, *rest, **kwargs)
        return
    of_loss = "grad" not in message
    late = vars(self).setdefault(LATER, [])
    if late is not None and _can_wait(self, result):
        # A copy, as losses are divided in place.
        copied = late[-1][1] if late and late[-1][0]() is result else result.detach().clone()
        late.append((weakref.ref(result), copied, rejection_func, message, rest, kwargs))
        if not of_loss:
            self.has_checked_gradients = True
        return
    unchecked = self.state.name == "INITIAL_RUN" and not self.first_iteration_complete
    if self.mode.value == "validate_results" and unchecked and rejection_func(result):
        where = f"no parameter was updated; {origin(of_loss=of_loss)}"
        raise NonFiniteError(f"step {self.current_iteration}: {message} ({float(result)}); {where}")
    before = self.rerun_requested
    is_checked = self.state.name == "INITIAL_RUN" and not before
    try:
        original(self, result, rejection_func, message, *rest, **kwargs)
    except RuntimeError as error:
        if "Unexpected result" not in str(error):
            raise
        raise NonFiniteError(f"{error}; no parameter was updated; {origin(of_loss=of_loss)}") from error
    if self.rerun_requested and not before:
        # What the layers made is gone by the time of a late check, or overwritten in CUDA graphs.
        is_gone = late is None and of_loss
        place = f"{_rank()}: the layer is named as the step runs again" if is_gone else origin(of_loss=of_loss)
        logger.error("megacpp-mcore: step %d: %s; %s", self.current_iteration, message, place)
        _examining = True
    if not of_loss and (is_checked or self.mode.value == "disabled") and self.mode.value != "report_stats":
        self.has_checked_gradients = True


def _can_wait(machine: Any, result: Any) -> bool:
    """Return whether a check may be made at the end of the step: one that fails there makes the step run again."""
    return bool(
        getattr(getattr(result, "device", None), "type", "") == DEVICE
        and machine.mode.value == "validate_results"
        and machine.state.name == "INITIAL_RUN"
        and machine.first_iteration_complete
        and not (machine.rerun_requested or machine.error_injector.should_inject_errors)
    )


def _check_waiting(machine: Any) -> None:
    """Make the checks that wait, in their order, if one fails."""
    import torch

    late = vars(machine).pop(LATER, None)
    if late and machine.state.name == "INITIAL_RUN":
        values = {id(value): value.reshape(-1).float() for _, value, *_ in late}
        if not _finite(torch.cat([*values.values()])):
            vars(machine)[LATER] = None
            for _, value, rejection_func, message, rest, kwargs in late:
                machine.validate_result(value, rejection_func, message, *rest, **kwargs)
            del vars(machine)[LATER]


@edit(
    "megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward",
    "eec0cc6e9bea33bdfed893e67de5e74ef8c236e2889ff3caa6f2b9ab71650bfe",
)
def _at_once(original: Function, self: Any, data_iterator: Any) -> Any:
    """Replace ``RerunStateMachine.should_run_forward_backward``, which first makes the checks that waited."""
    _check_waiting(self)
    if self.state.name == "NOT_RUNNING_YET":
        self.has_checked_gradients = False
    return original(self, data_iterator)


@edit(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
    "de6fc1395f560bcde36a1bd5001cd4802ee4672b810987b7d3f7142dcd8fc754",
)
def _finite_norm(original: Function, self: Any) -> Any:
    """Replace ``ChainedOptimizer.get_grad_norm``: raises where nothing has checked the gradients before.

    A norm in the device's memory is read only then: the host would wait.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    norm = original(self)
    in_memory = hasattr(norm, "item")
    if norm is None or (in_memory and getattr(get_rerun_state_machine(), "has_checked_gradients", False)):
        return norm
    value = float(norm)
    skips = any(math.isfinite(optimizer.config.grad_norm_skip_threshold) for optimizer in self.chained_optimizers)
    if math.isnan(value) or (math.isinf(value) and not skips):
        raise NonFiniteError(f"the gradient norm is {value}; no parameter was updated; {origin(of_loss=False)}")
    return norm


PATCH = Patch(
    name="non-finite-origin",
    fixes=(
        "a NaN stops the run without its layer; in the first step of a process, or with --no-check-for-nan-in-loss-and-grad, "
        "it reaches every parameter, and the next checkpoint"
    ),
    source="megatron-core 0.19.2, megatron/core/rerun_state_machine.py, megatron/core/optimizer/optimizer.py",
    edits=(_naming, _at_once, _finite_norm),
    seam=(
        "every check of a loss or of gradients ends in validate_result; should_run_forward_backward decides whether to run the "
        "step again; every step of every optimizer computes the gradient norm first"
    ),
    leaves_alone=(
        "other checks (spiky losses, large gradients); the second run of a step whose values are not finite, its checkpoint "
        "and exit status; fp16, whose loss scaler skips such steps; the threshold above which steps are skipped"
    ),
    retire_when="upstream checks the first step, and names the layer",
    gain="gaps of 20 ms between kernels a step of `nam56r` on one H200",
    cost="a microsecond of the host for a layer; under FSDP2, or without the checks, the host reads the gradient norm",
)
