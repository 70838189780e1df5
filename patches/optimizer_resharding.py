"""optimizer-resharding: optimizer state moves between parallel layouts and kinds of optimizer.

With ``--dist-ckpt-optim-fully-reshardable`` upstream gathers all state of the distributed optimizer on every rank, without the
padding between gradient buckets, and shards it by positions that count the padding: past the first bucket a parameter is saved
with its neighbours' numbers. Here each rank saves and loads its own part of a parameter where it lies in the whole tensor, in
boxes. Names, shapes and values in the checkpoint are upstream's of a single bucket, but for the remainders of the
precision-aware optimizer, which have a name of their own; what upstream saved so is loaded, and what it saved wrongly is
refused where that shows: fp32 main parameters do not round to 16-bit weights.

What is not a tensor differs between layouts: with tensor or expert parallelism the experts have their own optimizer, and a
distributed optimizer's groups count Adam's steps, which a plain one keeps next to them. Each optimizer of the run gets its own
groups of the checkpoint.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name. Between kinds of
optimizer it needs ``checkpoint-layout``.
Scope: the fully reshardable format of the distributed optimizer, and loads whose optimizers differ from the checkpoint's.
Upstream fixes the buckets, still gathering, in pull request 5077.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megacpp_mcore.checkpoints.layout import FULLY, LOADED_FROM, REMAINDER, UNSHARDED, load_into
from megacpp_mcore.errors import CheckpointError, ModelError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit
from megacpp_mcore.util.collectives import gathered

if TYPE_CHECKING:
    import torch

_MAIN, _STEP, _FOLDER = "param", "step", "folder"
_EXPERT, _GROUPS = "is_expert_parallel", "param_groups"

_refusals: list[str] | None = None
"""What this rank's optimizer refuses of the checkpoint that Megatron's loop is loading; None outside of its load."""


@edit(
    "megatron.training.checkpointing:load_checkpoint",
    "4f03d48a79382b8c4c8f9b745b5dca700b2110a01426dd685219e8f4e958d55d",
    "06adc6c285a834dcc405e64b8a915059367a7f4ad4566ced8679ea7f2712ce5c",
)
def _refused_together(original: Function, ddp_model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``load_checkpoint(ddp_model, optimizer, …)``: what one rank's optimizer refuses, all ranks refuse.

    A rank that raised by itself would leave the others in the load's barrier; those without trainable parameters load nothing.
    """
    global _refusals
    refusals = _refusals = []
    try:
        with load_into(optimizer):
            loaded = original(ddp_model, optimizer, *args, **kwargs)
    finally:
        _refusals = None
    if refusals := [refusal for of_rank in gathered(refusals) for refusal in of_rank]:
        raise CheckpointError(refusals[0])
    return loaded


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
    "6df6392a0ebb4c79b632fccd59d2703ac0021f0a73ef9e87eb32d0b3bdfb23b0",
    "9991f93a86e76fcedc262627d743bfaf58ecf1a0f006cf46a0c53153daf85c40",
)
def _in_place(
    original: Function,
    self: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> Any:
    """Return boxes.

    A checkpoint of an optimizer that is not distributed has the main parameters of 16-bit ones under another name, and of fp32
    ones as the model's.
    """
    import torch  # late: patches can be listed and described without torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    metadata = metadata or {}
    entries = {id(entry.data): entry for entry in nested_values(model_sharded_state_dict) if isinstance(entry, ShardedBase)}
    state: dict[Any, Any] = {_FOLDER: LocalNonpersistentObject(metadata.get(LOADED_FROM))} if is_loading else {}
    for index, parameter in enumerate(self.model_param_gbuf_map):
        owned = self._get_model_param_range_map(parameter)["param"]
        tensors = self._get_main_param_and_optimizer_states(parameter)
        state[index] = {}
        for name, flat in tensors.items():
            is_other = name == _MAIN and metadata.get(UNSHARDED)
            if name == _STEP or (is_other and parameter.dtype == torch.float32):
                continue
            # Whole main parameters are never of 16 bits: no run may mistake one for the other.
            named = f"optimizer.state.{'fp32_param' if is_other else name}"
            prefix = f"{REMAINDER if flat.dtype == torch.int16 else named}."
            replica = self.distributed_optimizer_instance_id
            placed = _boxes_of(entries[id(parameter)], prefix, flat.detach(), owned.start)
            state[index][name] = {at: _owned(box, replica, is_loading) for at, box in placed}
    return state


def _owned(box: Any, replica: int, is_loading: bool) -> Any:
    """Make a box of this rank's own: a data-parallel group's ranks have different ones; only their groups are replicas."""
    # The process of an async save shares host memory, which the next step changes.
    data = box.data.clone() if box.data.is_cpu and not is_loading else box.data
    others = box.replica_id[:2] if isinstance(box.replica_id, tuple) else ()
    return dataclasses.replace(box, data=data, replica_id=(*others, replica) if others else replica)


def _boxes_of(entry: Any, prefix: str, flat: torch.Tensor, start: int) -> Iterator[tuple[int, Any]]:
    """Yield ShardedTensors of a part of a parameter's state, views of ``flat``, which begins at number ``start``, with offsets.

    No piece has the rows that fill up a projection: they are zero.

    Args:
        entry: ShardedTensor or ShardedTensorFactory of the parameter, which defines where its pieces lie in the checkpoint.
        prefix: of the keys.

    Raises:
        ModelError: a piece is not a contiguous part of the parameter.
    """
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    # Without memory, so that a piece's offset in it is its place in the parameter.
    blank = torch.empty(entry.data.shape, dtype=flat.dtype, device="meta")
    key = prefix + entry.key
    if isinstance(entry, ShardedTensorFactory):
        pieces = list(nested_values(dataclasses.replace(entry, key=key, data=blank).build()))
    else:
        pieces = [dataclasses.replace(entry, key=key, data=blank, dtype=blank.dtype)]
    for piece in pieces:
        if not (piece.data is blank or piece.data._base is blank) or not piece.data.is_contiguous():
            raise ModelError(
                f"{piece.key} is not a contiguous part of its parameter, of which a rank may hold any range of numbers; train "
                "without --dist-ckpt-optim-fully-reshardable"
            )
        shape, at = (1,) * piece.prepend_axis_num + piece.local_shape, piece.data.storage_offset()
        first, last = max(start, at), min(start + flat.numel(), at + piece.data.numel())
        for corner, size in boxes(shape, first - at, last - at) if first < last else ():
            count = math.prod(size)
            box = dataclasses.replace(
                piece,
                data=flat[first - start : first - start + count].view(size),
                local_shape=size,
                global_offset=tuple(map(sum, zip(piece.global_offset, corner, strict=True))),
                axis_fragmentations=None,
                prepend_axis_num=0,
            )
            yield first - start, box
            first += count


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the numbers from ``start`` to ``end`` of a tensor into boxes, in order: the corner and the shape of each.

    Numbers are counted row by row; of N axes there are at most 2 N - 1 boxes.
    """
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    head_end = min(end, -(-start // row) * row)
    tail_start = max(head_end, end // row * row)
    for first, last in ((start, head_end), (head_end, tail_start), (tail_start, end)):
        index = first // row
        if first < last and first % row == last % row == 0:
            yield (index, *[0] * (len(shape) - 1)), ((last - first) // row, *shape[1:])
        elif first < last:
            for corner, size in boxes(shape[1:], first - index * row, last - index * row):
                yield (index, *corner), (1, *size)


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_fully_reshardable",
    "ea3388fac4318b9fdac2561b6648ce480d4dfbe8d3caf9dc7aad2f9a782f1ec1",
)
def _from_boxes(original: Function, self: Any, state_dict: Any) -> None:
    """Replace ``DistributedOptimizer.load_parameter_state_from_fully_reshardable(state_dict)``.

    Raises:
        CheckpointError: a main parameter does not round to the model's parameter, from the same checkpoint.
    """
    import torch
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    with torch.no_grad():
        for index, parameter in enumerate(self.model_param_gbuf_map):
            tensors = self._get_main_param_and_optimizer_states(parameter)
            loaded = state_dict.get(index, {})
            for name in tensors.keys() - {_STEP}:
                parts = loaded.get(name, {})
                if name == _MAIN and parameter.dtype == torch.float32 and not parts:
                    continue  # it is the model's own
                tensors[name] = torch.zeros_like(tensors[name])
                for at, part in parts.items():
                    tensors[name][at : at + part.numel()] = part.flatten()
            # The precision-aware optimizer has main parameters of 16 bits, or (int16) what the weights leave of them.
            is_fp32 = {tensors[_MAIN].dtype, self.config.main_params_dtype} == {torch.float32}
            if state_dict.get(_FOLDER) and is_fp32 and not self._is_distopt_quantized_param(parameter):
                owned = self._get_model_param_range_map(parameter)["param"]
                rounded = tensors[_MAIN].to(parameter.dtype)
                if not torch.equal(rounded, parameter.detach().flatten()[owned.start : owned.end]):
                    raise CheckpointError(
                        f"the checkpoint {state_dict[_FOLDER]} has main parameters that are not those of its weights "
                        f"(one of shape {list(parameter.shape)}), as megatron-core 0.19 saves them by itself with several "
                        "gradient buckets; load it without the optimizer's state (--no-load-optim)",
                        code="main-parameters",
                    )
            self._set_main_param_and_optimizer_states(parameter, tensors)
    if isinstance(self.optimizer, HybridDeviceOptimizer):
        self.optimizer._sync_hdo_state_to_sub_optimizers()


@edit(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.sharded_state_dict",
    "03ff27201c5bf5e4f58b48d05dd15d2af7e6377313cb4f702aae2e1171d29600",
)
def _by_saved_names(
    original: Function, self: Any, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
) -> Any:
    """Replace ``ChainedOptimizer.sharded_state_dict``: at a load, names of the checkpoint's kind of optimizer."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    state = original(self, model_sharded_state_dict, is_loading, **kwargs)
    metadata = kwargs.get("metadata") or {}
    if is_loading and LOADED_FROM in metadata and not metadata.get(UNSHARDED):
        for entry in nested_values(state):
            if isinstance(entry, ShardedBase):
                entry.key = entry.key.replace("optimizer.state.fp32_param.", "optimizer.state.param.")
    return state


@edit(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
    "403774c7dde1d5460414ceec11ca3d6946e1eff7a9713a51aff30ac61425df4c",
)
def _by_its_own_groups(original: Function, self: Any, state_dict: Any) -> None:
    optimizers = self.chained_optimizers
    saved: list[dict[str, Any]] = []
    try:
        if isinstance(state_dict, dict) and optimizers:
            parts = [state_dict.get(index, {}) for index in range(max(len(optimizers), len(state_dict)))]
            states = [state_dict] if len(optimizers) == 1 else parts[: len(optimizers)]
            saved = [part for part in (state_dict, *parts) if _groups(part)]  # none of Megatron-FSDP
            _take_rates(optimizers, saved)
            if saved and not all(map(_is_of_its_kind, optimizers, states)):
                states = [_state(optimizer, state, saved) for optimizer, state in zip(optimizers, states, strict=True)]
                state_dict = states[0] if len(states) == 1 else dict(enumerate(states))
        try:
            original(self, state_dict)
        except (KeyError, ValueError):  # of groups that the checkpoint does not have, as tuples of values
            for group in _own_groups(optimizers) if saved else ():
                _matching(group, saved)
            raise
    except CheckpointError as error:
        if _refusals is None:
            raise
        _refusals.append(str(error))


def _is_of_its_kind(optimizer: Any, state: dict[str, Any]) -> bool:
    """Return whether a loaded state has the groups of an optimizer such as this one.

    The format torch names no format of a distributed optimizer's tensors, and has them in a file of their own.
    """
    names_format, inner = "param_state_sharding_type" in state, state.get("optimizer", state)
    is_of_file = _is_distributed(optimizer) and not ("param_state" in state or inner.get("state"))
    return bool(_groups(state)) and (_is_distributed(optimizer) == names_format or is_of_file)


def _is_distributed(optimizer: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(optimizer, DistributedOptimizer)


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of a part of a checkpoint; none where only the run's own numbers of parameters are."""
    groups: list[dict[str, Any]] = state.get("optimizer", state).get(_GROUPS, [])
    return groups if all("lr" in group for group in groups) else []


def _state(optimizer: Any, state: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of one optimizer of the run.

    Args:
        state: what was loaded for it by its own structure: tensors.
        saved: the checkpoint's optimizers: groups, and Adam's count of steps.
    """
    import torch
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    from megacpp_mcore.ops.remainder_adam import PrecisionAwareAdam

    numbers = [group["params"] for group in optimizer.optimizer.state_dict()[_GROUPS]]
    groups = [
        {**_matching(group, saved), _EXPERT: group.get(_EXPERT), "params": own}
        for group, own in zip(optimizer.optimizer.param_groups, numbers, strict=True)
    ]
    inners = [part.get("optimizer", part) for part in saved]
    steps = [inner.get("state", {}).get("common_step") for inner in inners]
    steps += [group.get("step") for inner in inners for group in inner[_GROUPS]]
    step = next((float(step) for step in steps if step is not None), 0.0)
    counts = isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW | PrecisionAwareAdam)
    rest = next(({"grad_scaler": part["grad_scaler"]} for part in saved if "grad_scaler" in part), {})
    if _is_distributed(optimizer):
        if counts:
            groups = [group | {"step": step} for group in groups]
        return {**state, "optimizer": {_GROUPS: groups}, "param_state_sharding_type": FULLY, **rest}
    is_mixed = isinstance(optimizer, MixedPrecisionOptimizer)
    tensors = dict((state.get("optimizer", {}) if is_mixed else state).get("state", {}))
    if counts:
        for group in groups:
            group.pop("step", None)
        tensors["common_step"] = torch.tensor(step)
    inner = {"state": tensors, _GROUPS: groups}
    return {**state, "optimizer": inner, **rest} if is_mixed else inner


def _own_groups(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    inners = [getattr(optimizer, "optimizer", None) for optimizer in optimizers]  # None: without trainable parameters
    return [group for inner in inners for group in getattr(inner, "param_groups", ())]


def _take_rates(optimizers: Sequence[Any], saved: list[dict[str, Any]]) -> None:
    """Give the checkpoint's groups the run's learning rates where --override-opt_param-scheduler says so.

    Megatron's schedule follows the flag, but groups are found by their rates, too. Those of several rates stay as they are.
    """
    from megatron.core.optimizer.optimizer import param_group_identifier_keys
    from megatron.training import global_vars

    if not getattr(global_vars._GLOBAL_ARGS, "override_opt_param_scheduler", False):
        return
    ours = _own_groups(optimizers)
    rates = ("max_lr", "min_lr")
    names = [name for name in param_group_identifier_keys if name not in (*rates, _EXPERT)]
    for theirs in (group for part in saved for group in _groups(part)):
        alike = [_named(group, rates) for group in ours if _named(group, names) == _named(theirs, names)]
        if alike and all(found == alike[0] for found in alike):
            theirs.update(alike[0])


def _matching(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the checkpoint's group that trains as ``group`` does; of the experts' own, for the experts' own."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    names = [name for name in param_group_identifier_keys if name != _EXPERT]
    settings = _named(group, names)
    matches = [saved_group for part in saved for saved_group in _groups(part) if _named(saved_group, names) == settings]
    if not matches:
        others = [_named(saved_group, names) for part in saved for saved_group in _groups(part)]
        nearest = min(others, key=lambda other: sum(other[name] != settings[name] for name in names))
        differ = [
            f"{name} is {nearest[name]} in the checkpoint and {settings[name]} in the run"
            for name in names
            if nearest[name] != settings[name]
        ]
        raise CheckpointError(
            f"the checkpoint's optimizer has no such group of parameters as the run's: {', '.join(differ)}; train "
            "with its settings, or load without the optimizer's state (--no-load-optim)"
        )
    return next((saved_group for saved_group in matches if saved_group.get(_EXPERT) == group.get(_EXPERT)), matches[0])


def _named(group: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return these values of a group; NeMo writes ``wd_mult`` and ``lr_mult`` with ``pre_`` before them."""
    return {name: group.get(name, group.get(f"pre_{name}")) for name in names}


PATCH = Patch(
    name="optimizer-resharding",
    fixes=(
        "with --dist-ckpt-optim-fully-reshardable and several gradient buckets, parameters past the first bucket are saved "
        "with the state of others, and the end of the last one with zeros; every rank holds the whole state in host memory. "
        "State cannot be loaded where the experts have an optimizer of their own and had none ('Expected 2 entries in state "
        "dict, but got 4', KeyError: 'optimizer'), nor into another kind of optimizer"
    ),
    source="megatron-core 0.19.2, megatron/core/optimizer/distrib_optimizer.py and optimizer.py",
    edits=(_in_place, _from_boxes, _by_saved_names, _by_its_own_groups, _refused_together),
    seam=(
        "two methods turn this format's state into tensors of a checkpoint, and back; two of ChainedOptimizer, which every run "
        "has, are where the structure of the optimizers meets that of the checkpoint; load_checkpoint is where "
        "every rank comes back from the load of its optimizer"
    ),
    leaves_alone="every other format; names, shapes and values in a checkpoint; loads by the same structure; Megatron-FSDP",
    retire_when="upstream saves this format rightly and in parts, and loads groups whatever the optimizers' number and kind",
    upstream=(5077,),
    cost="a copy of a rank's part while it is saved, of state in host memory only",
)
