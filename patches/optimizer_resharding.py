"""optimizer-resharding: ``--dist-ckpt-optim-fully-reshardable`` saves each parameter's own state, and gathers nothing.

Upstream gathers all state of the distributed optimizer on every rank, without the padding between gradient buckets, and cuts
it by positions that count the padding: past the first bucket a parameter is saved with its neighbours' numbers. Here each
rank saves and loads its own part of a parameter where it lies in the whole tensor, as boxes that are views of the optimizer's
state: nothing is gathered or copied, for a save or for a load. Names, shapes and values in the checkpoint are upstream's
of a single bucket; what upstream saved so is loaded, and what it saved wrongly is refused.

Activate: applied by ``--spec megacpp_mcore nam56r`` and ``--spec megacpp_mcore nam56r_hybrid``; or
``megacpp_mcore.patches.apply(["optimizer-resharding"])``.
Scope: the fully reshardable format of the distributed optimizer.
Provenance: megatron-core 0.19.2 ``core/optimizer/distrib_optimizer.py``; mended upstream, gathering, by pull request 5077.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megacpp_mcore.checkpoints.layout import LOADED_FROM, UNSHARDED
from megacpp_mcore.errors import CheckpointError, ModelError
from megacpp_mcore.patches.machinery.registry import Edit, Patch

if TYPE_CHECKING:
    import torch

_MAIN, _STEP, _FOLDER = "param", "step", "folder"


def _in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``DistributedOptimizer.sharded_param_state_fully_reshardable``.

    A checkpoint of an optimizer that is not distributed has the main parameters of 16-bit ones under another name, and of fp32
    ones as the model's.
    """

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> Any:
        import torch  # late: patches can be listed and described without torch
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import (
            LocalNonpersistentObject,
            ShardedTensor,
            ShardedTensorFactory,
        )

        metadata = metadata or {}
        entries = {
            id(entry.data): entry
            for entry in nested_values(model_sharded_state_dict)
            if isinstance(entry, ShardedTensor | ShardedTensorFactory)
        }
        state: dict[Any, Any] = {_FOLDER: LocalNonpersistentObject(metadata.get(LOADED_FROM))} if is_loading else {}
        for index, parameter in enumerate(self.model_param_gbuf_map):
            owned = self._get_model_param_range_map(parameter)["param"]
            tensors = self._get_main_param_and_optimizer_states(parameter)
            state[index] = {}
            for name, flat in tensors.items():
                if name == _STEP or not isinstance(flat, torch.Tensor):
                    continue
                saved_as = name
                if name == _MAIN and metadata.get(UNSHARDED):
                    if parameter.dtype == torch.float32:
                        continue
                    saved_as = "fp32_param"
                boxes = _boxes_of(entries[id(parameter)], f"optimizer.state.{saved_as}.", flat.detach(), owned.start)
                replica = self.distributed_optimizer_instance_id
                state[index][name] = {
                    at: dataclasses.replace(box, replica_id=(*box.replica_id[:2], replica)) for at, box in boxes
                }
        return state

    return sharded_param_state_fully_reshardable


def _boxes_of(entry: Any, prefix: str, flat: torch.Tensor, start: int) -> Iterator[tuple[int, Any]]:
    """The ShardedTensors of a part of a parameter's state: views of ``flat``, which begins at its number ``start``, and where.

    No piece has the rows that fill up a projection: they are zero.

    Args:
        entry: ShardedTensor or ShardedTensorFactory of the parameter, which says where its pieces lie in the checkpoint.
        prefix: of the keys.

    Raises:
        ModelError: a piece is no contiguous part of the parameter.
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
                f"{piece.key} is no contiguous part of its parameter, of which a rank may hold any range of numbers; train "
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


def _from_boxes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``DistributedOptimizer.load_parameter_state_from_fully_reshardable(state_dict)``.

    Raises:
        CheckpointError: a main parameter does not round to the model's parameter, from the same checkpoint.
    """

    @functools.wraps(original)
    def load_parameter_state_from_fully_reshardable(self: Any, state_dict: Any) -> None:
        import torch
        from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

        with torch.no_grad():
            for index, parameter in enumerate(self.model_param_gbuf_map):
                tensors = self._get_main_param_and_optimizer_states(parameter)
                loaded = state_dict.get(index, {})
                for name in [name for name, one in tensors.items() if name != _STEP and isinstance(one, torch.Tensor)]:
                    parts = loaded.get(name, {})
                    if name == _MAIN and parameter.dtype == torch.float32 and not parts:
                        continue  # it is the model's own
                    tensors[name] = torch.zeros_like(tensors[name])
                    for at, part in parts.items():
                        tensors[name][at : at + part.numel()] = part.flatten()
                # The precision-aware optimizer has main parameters of 16 bits, or (int16) what the weights leave of them.
                is_fp32 = {tensors[_MAIN].dtype, self.config.main_params_dtype} == {torch.float32}
                if state_dict[_FOLDER] and is_fp32 and not self._is_distopt_quantized_param(parameter):
                    owned = self._get_model_param_range_map(parameter)["param"]
                    rounded = tensors[_MAIN].to(parameter.dtype)
                    if not torch.equal(rounded, parameter.detach().flatten()[owned.start : owned.end]):
                        raise CheckpointError(
                            f"the checkpoint {state_dict[_FOLDER]} has main parameters that are not those of its weights "
                            f"(one of shape {list(parameter.shape)}), as megatron-core 0.19 saves them by itself with several "
                            "gradient buckets; load it without the optimizer's state (--no-load-optim)"
                        )
                self._set_main_param_and_optimizer_states(parameter, tensors)
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer._sync_hdo_state_to_sub_optimizers()

    return load_parameter_state_from_fully_reshardable


PATCH = Patch(
    name="optimizer-resharding",
    fixes=(
        "with --dist-ckpt-optim-fully-reshardable and several gradient buckets, parameters past the first bucket are saved "
        "with the state of others, and the end of the last one with zeros; every rank holds the whole state in host memory"
    ),
    source="megatron-core 0.19.2, megatron/core/optimizer/distrib_optimizer.py",
    megatron_versions=">=0.19,<0.20",
    edits=(
        Edit.of(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable",
            "6df6392a0ebb4c79b632fccd59d2703ac0021f0a73ef9e87eb32d0b3bdfb23b0",
            _in_place,
        ),
        Edit.of(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_fully_reshardable",
            "ea3388fac4318b9fdac2561b6648ce480d4dfbe8d3caf9dc7aad2f9a782f1ec1",
            _from_boxes,
        ),
    ),
    seam="the two methods that turn this format's state into tensors of a checkpoint, and back",
    leaves_alone="every other format; names, shapes and values in a checkpoint; the training step",
    retire_when="upstream saves this format rightly, without holding the whole state on a rank",
    cost="nothing",
)
