"""sp-norm-gradients: a loop without ``finalize_model_grads_func`` gets complete norm gradients under sequence parallelism.

Activate: ``megacpp_mcore.patches.apply(["sp-norm-gradients"])``, before the loop fetches its schedule.
Scope: training calls of the three pipeline schedules whose configuration has no ``finalize_model_grads_func``.

Under sequence parallelism each tensor-parallel rank sees a shard of the sequence, so its gradient of a replicated
parameter (norms, router, biases after a row-parallel GEMM) is a partial sum. Upstream reduces these only in
``finalize_model_grads``. A schedule calls that through ``config.finalize_model_grads_func``, whose default
is None; ``megatron.training`` sets it, a custom loop may not, and for a model without Megatron's
DistributedDataParallel it cannot: ``finalize_model_grads`` needs the wrapper.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit, replacement

_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

_COMPLETE = "megacpp_gradients_complete"
"""Attribute of an unwrapped model chunk whose latest gradients a schedule has reduced and that were not finalized since."""


class _Undistributed:
    """Adapter that presents a model chunk without DistributedDataParallel to upstream's reduction."""

    ddp_config = SimpleNamespace(use_megatron_fsdp=False)

    def __init__(self, chunk: Any) -> None:
        self.named_parameters = chunk.named_parameters


@replacement
def _complete_gradients(original: Function, **arguments: Any) -> Any:
    """Replace a schedule, which is keyword-only."""
    if arguments.get("forward_only"):
        return original(**arguments)
    from megatron.core.utils import get_model_config

    model = arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    if config.finalize_model_grads_func is not None:
        _refuse_mixed(chunks)
        return original(**arguments)
    _take_complete(chunks)
    group = _tensor_group(arguments.get("pg_collection"))
    if group is None or group.size() == 1 or any(_reduces_itself(chunk) for chunk in chunks):
        return original(**arguments)
    return _run_and_sum(original, arguments, chunks, config, group)


def _run_and_sum(
    original: Callable[..., Any], arguments: dict[str, Any], chunks: Sequence[Any], config: Any, group: Any
) -> Any:
    """Run the schedule and reduce over ``group`` the gradients of this call only, not those of earlier calls."""
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "sp-norm-gradients: the schedule is being captured in a CUDA graph without config.finalize_model_grads_func; "
            "set it to megatron.core.distributed.finalize_model_grads, which is captured with it",
            code="captured",
        )
    before = _set_aside(chunks)
    try:
        result = original(**arguments)
        # Looked up by name: this is the replacement below, which passes on the chunks not reduced yet.
        reduce = importlib.import_module(_FINALIZE)._allreduce_non_tensor_model_parallel_grads
        reduce([chunk if hasattr(chunk, "ddp_config") else _Undistributed(chunk) for chunk in chunks], config, group)
    finally:
        for parameter, earlier in before:
            _gradient(parameter).add_(earlier)
    for chunk in chunks:
        vars(_innermost(chunk))[_COMPLETE] = True
    return result


@edit(
    f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
    "591de3cbdd75c68e6c5c99801bf85f7b10eab4a8bbd9d569977339b19b06a1e7",
)
def _reduce_once(original: Function, model: Sequence[Any], config: Any, tp_group: Any = None) -> None:
    """Skips what a schedule has already reduced, so that a loop that calls ``finalize_model_grads`` itself after the
    schedule gets the same gradients as without the patch.
    """
    complete = _take_complete(model)
    pending = [chunk for chunk, done in zip(model, complete, strict=True) if not done]
    if pending:
        original(pending, config, tp_group)


def _take_complete(chunks: Sequence[Any]) -> list[bool]:
    """Return whether each chunk's gradients were complete, which they no longer count as."""
    return [vars(_innermost(chunk)).pop(_COMPLETE, False) for chunk in chunks]


def _innermost(chunk: Any) -> Any:
    """``chunk`` without its DistributedDataParallel and Float16Module wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _tensor_group(groups: Any) -> Any:
    """Return the tensor-parallel group of one model; None for a pipeline of several models, each with its own group."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group() if groups is None else getattr(groups, "tp", None)


def _reduces_itself(chunk: Any) -> bool:
    """Return whether the gradients are still being reduced when a schedule ends, or are sharded."""
    ddp = getattr(chunk, "ddp_config", None)
    return ddp is not None and (ddp.overlap_grad_reduce or ddp.use_megatron_fsdp)


def _candidates(chunks: Sequence[Any]) -> Iterator[Any]:
    """Parameters whose gradients upstream's reduction may touch, and a few more: replicated ones and all norms."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            replicated = getattr(parameter, "sequence_parallel", False)
            replicated = replicated or getattr(parameter, "average_gradients_across_tp_domain", False)
            if parameter.requires_grad and (replicated or "layernorm" in name):
                yield parameter


def _gradient(parameter: Any) -> Any:
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def _set_aside(chunks: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Zero the candidates' gradients in place; returns each parameter with its previous gradient."""
    before = []
    for parameter in _candidates(chunks):
        gradient = _gradient(parameter)
        if gradient is not None:
            before.append((parameter, gradient.clone()))
            gradient.zero_()
    return before


def _refuse_mixed(chunks: Sequence[Any]) -> None:
    """Refuse to finalize gradients that contain sums of an earlier call.

    Raises:
        LaunchError: earlier gradients have not been cleared.
    """
    summed = [chunk for chunk in chunks if _COMPLETE in vars(_innermost(chunk))]
    gradients = [_gradient(parameter) for parameter in _candidates(summed)]
    if any(gradient is not None and gradient.any() for gradient in gradients):
        raise LaunchError(
            "sp-norm-gradients: gradients of a call without config.finalize_model_grads_func are still there, and this call "
            "has one: it would sum them over tensor parallelism again; set it for all calls, or zero the gradients between",
            code="gradients-left",
        )
    _take_complete(summed)


def _schedule(name: str, sha256: tuple[str, ...]) -> Edit:
    return Edit(f"{_SCHEDULES}:{name}", sha256, _complete_gradients)


PATCH = Patch(
    name="sp-norm-gradients",
    fixes=(
        "under sequence parallelism a loop whose config has no finalize_model_grads_func trains norms, QK norms, routers and "
        "row-parallel biases with each rank's part of the gradient, and the replicas drift apart"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/pipeline_parallel/schedules.py and "
        "megatron/core/distributed/finalize_model_grads.py"
    ),
    edits=(
        _schedule(
            "forward_backward_no_pipelining",
            (
                "b52848b05720fd6189d615e7ae6d4253a3dc3a2497e8c4b60fc3f986c02461e5",
                "231430dc89b2e243511fc8fa4bba24f3b1a2a1cd5a19466d24c4e16c8ca2652d",
            ),
        ),
        _schedule(
            "forward_backward_pipelining_with_interleaving",
            (
                "091263d1c27eb4389812e94f4fe82f18f3ca15bf64311c66053c900256a8644a",
                "f772f7d344effa684c520f9bc2d114e5c74679ebd9be90f3d2418b98d6621ddb",
            ),
        ),
        _schedule(
            "forward_backward_pipelining_without_interleaving",
            (
                "772d6b7d81825e7ae4822c9ad4f6185a4755b3f666b43c280d9575f5e5a0c61e",
                "b2582d25713c12dca77546e87ff56de7ce96031a5c532714dc98f3d30843797b",
            ),
        ),
        _reduce_once,
    ),
    seam=(
        "the three schedules are where upstream decides whether gradients are finalized; its own reduction, which applies the "
        "rule of what is summed and what averaged, is called there, and skips what was summed when it is called again"
    ),
    leaves_alone=(
        "loops with finalize_model_grads_func (megatron.training always has one); data parallelism, shared embeddings, expert "
        "bias and per-token scaling, which only finalize_model_grads does; DistributedDataParallel with overlapped "
        "reduction and Megatron-FSDP, whose gradients are under way when a schedule ends; pipelines of several models; "
        "a loop that calls backward itself, or sums these gradients by hand: do not apply it there"
    ),
    retire_when="the schedules finalize gradients by default, or refuse sequence parallelism without it",
    cost="one all-reduce of the norms' gradients a schedule call, and a copy of these gradients while it runs",
)
