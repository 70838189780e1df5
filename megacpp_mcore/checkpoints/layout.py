"""Layout version of the M and R layers in a checkpoint: written with every save, checked before every load.

It is stored in the checkpoint's content metadata, which Megatron provides for such versions and passes to
``sharded_state_dict`` before it saves or loads anything, in its own loop and in Megatron-Bridge. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.model import Model
from megacpp_mcore.model.families.attention_family import FULL_ATTENTION, WINDOWED
from megacpp_mcore.util.collectives import gathered

LAYOUT = 2
"""Layout 2: each part of a projection saved separately, biases and rank mixes as 1-D tensors (docs/model.md)."""
KEY = "megacpp_layout"
"""Key of the layout in the content metadata; a checkpoint without it has no layout that this version knows."""
EXPERTS_KEY = "megacpp_experts"
"""Key there of the saved model's ``experts`` backend; if absent, ``stock``."""
MODEL_KEY = "megacpp_model"
"""Key there of settings, by name, that change the forward pass but show in no Megatron argument, parameter name or shape."""
FULL_KEY = "megacpp_full_layers"
"""Name in a model's configuration of the set of its Full layers, 1-based: those with an indexer."""
INDEXER = re.compile(r"(?P<stem>.*\bdecoder\.layers\.)(?P<layer>\d+)(?P<rest>\.self_attention\.core_attention\.indexer\..*)")
"""Names in a checkpoint of an indexer's parameters and their optimizer state."""
LOADED_FROM = "megacpp_loaded_from"
"""Key there under which the patch checkpoint-layout notes the folder of a checkpoint being loaded."""
FORMAT = "distrib_optim_sharding_type"
"""Megatron's key there of the distributed optimizer's format; none if the optimizer was not distributed."""
FULLY, FLAT = "fully_reshardable", "dp_reshardable"
UNSHARDED = "megacpp_unsharded_optimizer"
"""Key there under which that patch notes that the checkpoint's optimizer was not distributed."""
REMAINDER = "optimizer.state.remainder"
"""Prefix, in the fully reshardable format, of what main parameters add to 16-bit weights; Megatron's is that of ``param``."""
RESAVE = (
    "load it once as it was saved, by the version that saved it, and save it for every layout "
    "(--dist-ckpt-optim-fully-reshardable --ckpt-convert-format torch_dist --ckpt-convert-save NEW, then name NEW/torch_dist)"
)
"""What to do with a checkpoint that is sharded like its run."""
YARN = ("original_max_position_embeddings", "beta_fast", "beta_slow")
"""YaRN settings that are in Megatron's configuration but in no argument."""
_SIZES = tuple(f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline", "expert"))

_without_optimizer = False


def load_into(optimizer: Any) -> AbstractContextManager[Any]:
    """While Megatron's loop loads a checkpoint without an ``optimizer``, as a teacher's, refuse nothing for its state."""
    return mock.patch(f"{__name__}._without_optimizer", optimizer is None)


def recorded(model: Model) -> dict[str, Any]:
    """Return the settings of ``model`` that change the forward pass but show in no Megatron argument and no parameter."""
    full_attention = [number for number, role in enumerate(model.roles, 1) if role == FULL_ATTENTION]
    ssm, yarn, record = model.mamba3, model.mla.yarn, {}
    if model.mtp.depth and model.mtp.attention == WINDOWED:
        record["mtp.attention"] = WINDOWED
    if yarn:
        record |= {f"mla.yarn.{name}": getattr(yarn, name) for name in YARN}
    return record | {
        "mamba3.decay_activation": ssm.decay_activation,
        "mamba3.a_floor": ssm.a_floor,
        "layers of full attention": full_attention,
    }


def mark_or_check(metadata: dict[str, Any] | None, config: Any) -> None:
    """Mark the metadata of a checkpoint to be saved; check that of one to be loaded.

    Args:
        metadata: as passed to ``sharded_state_dict``; None if it is not called for a checkpoint.
        config: the model's; has, under :data:`EXPERTS_KEY`, its ``experts`` backend, if it has experts, and what else is
            recorded under :data:`MODEL_KEY`; and its Full layers under :data:`FULL_KEY`.

    Raises:
        CheckpointError: the checkpoint to be loaded has no layout or a different one, is of another model or has indexers in
            other layers, unless only its weights are loaded (``--finetune``), lacks an indexer, or has distributed-optimizer
            state in the parameter order of a different ``experts`` backend; nothing has been loaded.
    """
    if metadata is None:
        return
    experts, model = getattr(config, EXPERTS_KEY, None), getattr(config, MODEL_KEY, {})
    folder = metadata.get(LOADED_FROM)
    if folder is None:
        metadata |= {KEY: LAYOUT, MODEL_KEY: model}
        if experts is not None:
            metadata[EXPERTS_KEY] = experts
        return
    layout = metadata.get(KEY)
    if layout != LAYOUT:
        raise CheckpointError(
            f"the checkpoint {folder} has {KEY} {layout}, expected {LAYOUT}; load it with the version of megacpp-mcore that "
            "saved it"
        )
    saved_model = metadata.get(MODEL_KEY, {})  # none before 0.2.0
    args = _arguments()
    continues = args is None or not args.finetune
    for name in {**saved_model, **model} if saved_model and continues else ():
        if saved_model.get(name) != model.get(name):
            raise CheckpointError(
                f"the checkpoint {folder} is of a model whose {name} is {saved_model.get(name)}, and the run's is "
                f"{model.get(name)}; no argument of Megatron's shows it: name in MEGACPP_CONFIG the file that it was trained "
                "with, or load only its weights into this model (--finetune)"
            )
    if args is None or args.dist_ckpt_strictness == "assume_ok_unexpected":
        _check_indexers(Path(folder), getattr(config, FULL_KEY, None), continues)
    saved = metadata.get(EXPERTS_KEY, "stock")
    if (
        experts not in (None, saved)
        and metadata.get(FORMAT) == FLAT
        and not _without_optimizer
        and (args is None or not (args.no_load_optim or args.finetune))
    ):
        # Flat buffers concatenate all parameters: ours and stock's have equal length but different order.
        refuse_flat_state(
            folder, f"its experts are the backend {saved}, and the run's {experts} (backends: {{experts: {saved}}})"
        )


def indexed(names: Iterable[str]) -> set[int]:
    """Return the layers, 1-based, whose indexers are among the ``names`` in a checkpoint."""
    return {int(match["layer"]) + 1 for match in map(INDEXER.fullmatch, names) if match}


def _check_indexers(folder: Path, full: set[int] | None, continues: bool) -> None:
    """Check that a checkpoint has the indexers of a model's Full layers and, if its training continues, no others."""
    from megacpp_mcore.checkpoints.integrity import METADATA, read_metadata  # imports torch

    if full is None or not (folder / METADATA).is_file():  # of another format, or in an object store
        return
    found = indexed(read_metadata(folder).state_dict_metadata)
    if full - found or (continues and found - full):
        raise CheckpointError(
            f"the checkpoint {folder} has indexers in layers {sorted(found)}, and the run's schedule in {sorted(full)}; no "
            "argument of Megatron's shows it: name in MEGACPP_CONFIG the file that it was trained with, or rewrite it by "
            "`megacpp-mcore checkpoint schedule`"
        )


def refuse_other_layout(state: Any, folder: str) -> None:
    """Refuse the checkpoint that Megatron's loop has read, if only a run sharded like the saved one can load it exactly.

    Args:
        state: has the saved run's arguments and, in the format torch_dist, the content metadata.
        folder: the one being loaded; for a teacher or a pretrained model it is not ``--load``.

    Raises:
        CheckpointError: its vocabulary is padded to another size, the state is of another layout or kind of optimizer, or with
            ``--ckpt-step`` would be of another step; or main parameters are whole in one and remainders in the other.
    """
    run, saved = _arguments(), (state or {}).get("args")
    if run is None or saved is None or run.finetune:
        return
    before, padded = (getattr(args, "padded_vocab_size", None) for args in (saved, run))
    if before and padded and before != padded:
        raise CheckpointError(
            f"the checkpoint {folder} has a vocabulary padded to {before} tokens, and the run pads it to {padded}; the loss "
            f"counts all; add --make-vocab-size-divisible-by {before // run.tensor_model_parallel_size}"
        )
    is_torch = getattr(saved, "ckpt_format", None) == "torch"
    has_optimizer = not (_without_optimizer or run.no_load_optim or getattr(saved, "no_save_optim", False))
    if has_optimizer and (old := _keeps(saved)) != (new := _keeps(run)):
        raise CheckpointError(
            f"the checkpoint {folder} has main parameters {old}, and the run keeps them {new}; train as it was saved, or load "
            "without the optimizer's state (--no-load-optim), from which main parameters begin as the weights"
        )
    names = (*_SIZES, "use_distributed_optimizer") if has_optimizer else _SIZES
    pairs = [(name, getattr(saved, name), getattr(run, name)) for name in names if hasattr(saved, name) and hasattr(run, name)]
    if different := ", ".join(f"{name} was {old}, and the run's is {new}" for name, old, new in pairs if old != new):
        if is_torch:
            raise CheckpointError(
                f"the checkpoint {folder} is in the format torch, which only a run of the same layout and optimizer can "
                f"load: {different}; {RESAVE}"
            )
        if has_optimizer and (flat := flat_folder(state)):
            refuse_flat_state(flat, different)
    if is_torch and has_optimizer and run.use_distributed_optimizer and run.ckpt_step:
        from megacpp_mcore.checkpoints.folder import TRACKER, read_tracker  # imports torch

        if (last := read_tracker(Path(folder))) != str(run.ckpt_step):
            raise CheckpointError(
                f"--ckpt-step is {run.ckpt_step}, and of {folder}, in the format torch, Megatron loads the distributed "
                f"optimizer's state of the last step, {last}; write {run.ckpt_step} in its {TRACKER}, or load without the "
                "optimizer's state (--no-load-optim)"
            )


def _keeps(args: Any) -> str:
    """Describe how a run's or checkpoint's optimizer keeps the main parameters of a bf16 model."""
    as_remainders = getattr(args, "use_precision_aware_optimizer", False) and getattr(args, "bf16", False)
    for name, excluded in (
        ("optimizer_cpu_offload", (True,)),
        ("use_megatron_fsdp", (True,)),
        ("main_params_dtype", ("fp16", "torch.float16")),
        ("fp8_recipe", ("tensorwise", "mxfp8", "blockwise", "custom")),
    ):
        as_remainders = as_remainders and str(getattr(args, name, None)) not in map(str, excluded)
    return "as remainders (--use-precision-aware-optimizer)" if as_remainders else "whole"


def flat_folder(state: Any) -> str | None:
    """Return the folder of a checkpoint with flat buckets, from the common state that Megatron has read; else None."""
    content = (state or {}).get("content_metadata") or {}
    return content.get(LOADED_FROM) if content.get(FORMAT) == FLAT else None


def refuse_other_buckets(folder: str, sharded_state_dict: Any) -> None:
    """Refuse a checkpoint whose flat buckets differ from the run's; every rank has to call this.

    Raises:
        CheckpointError: a bucket of any rank differs. A stage without trainable parameters refuses, too.
    """
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader  # also of object storage

    diff = ""
    try:
        stored = _get_filesystem_reader(folder).read_metadata().state_dict_metadata
        for entry in nested_values(sharded_state_dict):
            if isinstance(entry, ShardedTensor) and "optimizer.distributed.dp_group_idx_" in entry.key:
                size = getattr(stored.get(entry.key), "size", None)
                if size != entry.global_shape:
                    diff = f"{entry.key} has the shape {size and list(size)}, and the run's {list(entry.global_shape)}"
                elif (kept := stored[entry.key].properties.dtype) != entry.dtype and torch.int16 in (kept, entry.dtype):
                    diff = f"{entry.key} is {kept}, and the run's {entry.dtype}: remainders and whole main parameters"
    except Exception as error:
        diff = f"reading its metadata failed with {type(error).__name__}: {error}"
    if different := list(filter(None, gathered(diff))):
        refuse_flat_state(folder, different[0])


def refuse_flat_state(folder: str, difference: str) -> NoReturn:
    """Refuse the distributed optimizer's state in Megatron's default format, for a run sharded unlike the saved one.

    Raises:
        CheckpointError: always, with the remedy.
    """
    raise CheckpointError(
        f"the checkpoint {folder} has the distributed optimizer's state as flat buckets, which only a run of the same layout, "
        f"buckets, optimizer and experts can load: {difference}; {RESAVE}, or load without the optimizer's state "
        "(--no-load-optim)"
    )


def _arguments() -> Any:
    """Return the stock script's arguments; None without one, where get_args() would assert."""
    from megatron.training import global_vars

    return global_vars._GLOBAL_ARGS


def check_version(prefix: str, version: int | None) -> None:
    """Check a mixer's part, keys under ``prefix``, of a plain ``state_dict``, as saved by ``--ckpt-format torch``.

    ``version`` is the module version recorded by torch; None if the state was not read from such a file.

    Raises:
        CheckpointError: the layout differs.
    """
    if version is not None and version != LAYOUT:
        raise CheckpointError(
            f"the checkpoint holds {prefix}* in layout {version}, expected {LAYOUT}; load it with the version of megacpp-mcore "
            "that saved it"
        )
