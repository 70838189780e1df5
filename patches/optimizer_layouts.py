"""optimizer-layouts: optimizer state goes from one parallel layout, and kind of optimizer, to another, or is refused.

Tensors of the optimizer's state have the names of their parameters in every layout. The rest of it does not: with tensor or
expert parallelism the experts have an optimizer of their own, and a distributed optimizer's groups count Adam's steps, which a
plain one keeps beside them. The replacements give each optimizer of the run the groups of the checkpoint that are its own.
Flat buckets, and files cut by rank (``--ckpt-format torch``), are refused by a run that is cut in another way.

Activate: applied by ``--spec megacpp_mcore nam56r`` and ``--spec megacpp_mcore nam56r_hybrid``; or
``megacpp_mcore.patches.apply(["optimizer-layouts"])``. Needs ``checkpoint-layout`` and ``optimizer-resharding``.
Scope: loads whose optimizers are others than the checkpoint's; all others are left to upstream.
Provenance: megatron-core 0.19.2 ``core/optimizer/optimizer.py``, ``core/dist_checkpointing/serialization.py`` and
``training/checkpointing.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megacpp_mcore.checkpoints.layout import (
    FLAT,
    FORMAT,
    FULLY,
    LOADED_FROM,
    RESAVE,
    UNSHARDED,
    arguments,
    loads_optimizer,
    refuse_flat_state,
)
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches.machinery.registry import Edit, Patch

_EXPERT, _GROUPS = "is_expert_parallel", "param_groups"
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_OPTIMIZER, _TORCH = "use_distributed_optimizer", "torch"


def _differences(run: Any, saved: Any, names: tuple[str, ...]) -> str:
    """The arguments of ``names`` that both have and that differ, with both values; empty if none does."""
    known = (name for name in names if hasattr(run, name) and hasattr(saved, name))
    pairs = ((name, getattr(saved, name), getattr(run, name)) for name in known)
    return ", ".join(f"{name} was {old}, and the run's is {new}" for name, old, new in pairs if old != new)


def _has_optimizer(saved: Any) -> bool:
    """Whether optimizer state is loaded from a checkpoint with the arguments ``saved``."""
    return saved is not None and loads_optimizer() and not getattr(saved, "no_save_optim", False)


def _with_a_format(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``load_content_metadata(checkpoint_dir, *, preloaded_state_dict)``.

    Upstream reads the distributed optimizer's format where it loads into one, though the checkpoint may be of another; and its
    own refusal of another layout recommends a flag that does not help.
    """

    @functools.wraps(original)
    def load_content_metadata(checkpoint_dir: Any = None, *, preloaded_state_dict: Any = None) -> Any:
        content = original(checkpoint_dir, preloaded_state_dict=preloaded_state_dict)
        if content is None or LOADED_FROM not in content:
            return content
        run, saved = arguments(), (preloaded_state_dict or {}).get("args")
        if FORMAT not in content:
            content |= {FORMAT: FULLY, UNSHARDED: True}
        elif content[FORMAT] == FLAT and run and _has_optimizer(saved):
            different = _differences(run, saved, (*_LAYOUT, _OPTIMIZER))
            if different:
                refuse_flat_state(content[LOADED_FROM], different)
        return content

    return load_content_metadata


def _by_the_names_there(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``ChainedOptimizer.sharded_state_dict``: at a load, names of the checkpoint's kind of optimizer.

    Raises:
        CheckpointError: the checkpoint has flat buckets, and they are others than the run's.
    """

    @functools.wraps(original)
    def sharded_state_dict(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        import torch  # late: patches can be listed and described without torch
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedBase

        state = original(self, model_sharded_state_dict, is_loading, **kwargs)
        metadata = kwargs.get("metadata") or {}
        if not is_loading or LOADED_FROM not in metadata:
            return state
        entries = [entry for entry in nested_values(state) if isinstance(entry, ShardedBase)]
        if metadata.get(FORMAT) == FLAT:
            found: list[str] = [""] * torch.distributed.get_world_size()
            # All ranks refuse together: those of a stage whose own buckets are the same would wait for the others.
            torch.distributed.all_gather_object(found, _other_buckets(metadata[LOADED_FROM], entries))
            if any(found):
                refuse_flat_state(metadata[LOADED_FROM], next(filter(None, found)))
        elif not metadata.get(UNSHARDED):
            for entry in entries:
                entry.key = entry.key.replace("optimizer.state.fp32_param.", "optimizer.state.param.")
        return state

    return sharded_state_dict


def _other_buckets(folder: str, entries: list[Any]) -> str:
    """How a tensor of the run's optimizer differs from the checkpoint's; empty if none does."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader  # also of object storage

    stored = _get_filesystem_reader(folder).read_metadata().state_dict_metadata
    for entry in entries:
        if isinstance(entry, ShardedTensor):
            size = getattr(stored.get(entry.key), "size", None)
            if size != entry.global_shape:
                return f"{entry.key} has the shape {size and list(size)}, and the run's {list(entry.global_shape)}"
    return ""


def _by_its_own_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``ChainedOptimizer.load_state_dict(state_dict)``."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        optimizers = self.chained_optimizers
        if not isinstance(state_dict, dict) or not optimizers:
            return original(self, state_dict)
        states = (
            [state_dict] if len(optimizers) == 1 else [state_dict.get(index, {}) for index in range(len(optimizers))]
        )
        if all(map(_is_of_its_kind, optimizers, states)):
            return original(self, state_dict)
        parts = (state_dict, *(state_dict.get(index, {}) for index in range(len(state_dict))))
        saved = [part for part in parts if _groups(part)]
        given = [_state(optimizer, state, saved) for optimizer, state in zip(optimizers, states, strict=True)]
        return original(self, given[0] if len(given) == 1 else dict(enumerate(given)))

    return load_state_dict


def _is_of_its_kind(optimizer: Any, state: dict[str, Any]) -> bool:
    """Whether a loaded state has the groups of an optimizer such as this one."""
    return bool(_groups(state)) and _is_distributed(optimizer) == ("param_state_sharding_type" in state)


def _is_distributed(optimizer: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(optimizer, DistributedOptimizer)


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of a part of a checkpoint; none where only the run's own numbers of parameters are."""
    groups: list[dict[str, Any]] = state.get("optimizer", state).get(_GROUPS, [])
    return groups if all("lr" in group for group in groups) else []


def _state(optimizer: Any, state: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of one optimizer of the run.

    Args:
        state: what was loaded for it by its own structure: tensors.
        saved: the checkpoint's optimizers: groups, and Adam's count of steps.
    """
    import torch
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    steps = [step for part in saved for step in _steps(part)]
    numbers = [group["params"] for group in optimizer.optimizer.state_dict()[_GROUPS]]
    groups = [
        {**_matching(group, saved), _EXPERT: group.get(_EXPERT), "params": own}
        for group, own in zip(optimizer.optimizer.param_groups, numbers, strict=True)
    ]
    counts = isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)
    rest = next(({"grad_scaler": part["grad_scaler"]} for part in saved if "grad_scaler" in part), {})
    if _is_distributed(optimizer):
        if counts:
            groups = [group | {"step": float(steps[0])} for group in groups]
        return {**state, "optimizer": {_GROUPS: groups}, "param_state_sharding_type": FULLY, **rest}
    is_mixed = isinstance(optimizer, MixedPrecisionOptimizer)
    tensors = dict((state.get("optimizer", {}) if is_mixed else state).get("state", {}))
    if counts:
        for group in groups:
            group.pop("step", None)
        tensors["common_step"] = torch.tensor(float(steps[0]))
    inner = {"state": tensors, _GROUPS: groups}
    return {**state, "optimizer": inner, **rest} if is_mixed else inner


def _steps(part: dict[str, Any]) -> Iterator[Any]:
    inner = part.get("optimizer", part)
    if "common_step" in inner.get("state", {}):
        yield inner["state"]["common_step"]
    yield from (group["step"] for group in inner[_GROUPS] if group.get("step") is not None)


def _matching(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The checkpoint's group that trains as ``group`` does; of the experts' own, if there is one, for the experts' own."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    names = [name for name in param_group_identifier_keys if name != _EXPERT]
    found = [one for part in saved for one in _groups(part) if all(one.get(name) == group.get(name) for name in names)]
    if not found:
        wanted = {name: group.get(name) for name in names}
        raise CheckpointError(
            f"the checkpoint's optimizer has no group of parameters like {wanted}; train "
            "with its settings, or load without the optimizer's state (--no-load-optim)"
        )
    return next((one for one in found if one.get(_EXPERT) == group.get(_EXPERT)), found[0])


def _in_its_own_layout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``check_checkpoint_args(checkpoint_args, skip_args)``: files in the format ``torch`` are as the run is.

    With ``--ckpt-step`` upstream loads another step's optimizer.

    Raises:
        CheckpointError: the run's layout or optimizer is another, or so is the step.
    """

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *rest: Any, **kwargs: Any) -> None:
        from megatron.training import checkpointing

        run = arguments()
        if getattr(checkpoint_args, "ckpt_format", None) == _TORCH:
            optimizer = (_OPTIMIZER,) if _has_optimizer(checkpoint_args) else ()
            if different := _differences(run, checkpoint_args, (*_LAYOUT, *optimizer)):
                raise CheckpointError(
                    f"the checkpoint {run.load} is in the format torch, which only a run of the same layout and optimizer can "
                    f"load: {different}; {RESAVE}"
                )
            if optimizer and run.use_distributed_optimizer and run.ckpt_step:
                last, _ = checkpointing.read_metadata(checkpointing.get_checkpoint_tracker_filename(run.load))
                if last != run.ckpt_step:
                    raise CheckpointError(
                        f"--ckpt-step is {run.ckpt_step}, and of {run.load}, in the format torch, Megatron loads the "
                        f"distributed optimizer's state of the last step, {last}; write {run.ckpt_step} in its "
                        "latest_checkpointed_iteration.txt, or load without the optimizer's state (--no-load-optim)"
                    )
        original(checkpoint_args, *rest, **kwargs)

    return check_checkpoint_args


PATCH = Patch(
    name="optimizer-layouts",
    fixes=(
        "optimizer state cannot be loaded where the experts have an optimizer of their own and had none ('Expected 2 entries "
        "in state dict, but got 4', KeyError: 'optimizer'), nor into another kind of optimizer; flat buckets of another layout "
        "end in 'Global shape mismatch', and files in the format torch without a word of what to do"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/optimizer/optimizer.py, megatron/core/dist_checkpointing/serialization.py, "
        "megatron/training/checkpointing.py"
    ),
    megatron_versions=">=0.19,<0.20",
    edits=(
        Edit.of(
            "megatron.core.dist_checkpointing.serialization:load_content_metadata",
            "06ea7b8736315a3e4fa39f539435f289ffb8d4dfa5ac3975a1adfef95f1d5963",
            _with_a_format,
        ),
        Edit.of(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
            "03ff27201c5bf5e4f58b48d05dd15d2af7e6377313cb4f702aae2e1171d29600",
            _by_the_names_there,
        ),
        Edit.of(
            "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
            "403774c7dde1d5460414ceec11ca3d6946e1eff7a9713a51aff30ac61425df4c",
            _by_its_own_groups,
        ),
        Edit.of(
            "megatron.training.checkpointing:check_checkpoint_args",
            "4c636308e56b642531dc43763bb28de8b3abec685f019612808e6044f2d0810c",
            _in_its_own_layout,
        ),
    ),
    seam=(
        "ChainedOptimizer is what every run's optimizer is, and its two methods are where the structure of the optimizers "
        "meets that of the checkpoint; load_content_metadata is read before upstream's own refusals, and "
        "check_checkpoint_args right after a file in the format torch"
    ),
    leaves_alone="what is saved; loads by the same structure; Megatron-FSDP",
    retire_when="upstream loads groups of parameters whatever the optimizers' number and kind, and refuses the rest by name",
    cost="nothing",
)
