"""Layout version of the M and R layers in a checkpoint: written with every save, checked before every load.

It is stored in the checkpoint's content metadata, which Megatron provides for such versions and passes to
``sharded_state_dict`` before it saves or loads anything, in its own loop and in Megatron-Bridge. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.errors import CheckpointError

LAYOUT = 2
"""Layout 2: each part of a projection saved separately, biases and rank mixes as 1-D tensors (docs/model.md)."""
KEY = "megacpp_layout"
"""Key of the layout in the content metadata; a checkpoint without it has no layout that this version knows."""
EXPERTS_KEY = "megacpp_experts"
"""Key there of the saved model's ``experts`` backend; if absent, ``stock``."""
LOADED_FROM = "megacpp_loaded_from"
"""Key there under which the patch checkpoint-layout notes the folder of a checkpoint being loaded."""


def mark_or_check(metadata: dict[str, Any] | None, experts: str | None) -> None:
    """Mark the metadata of a checkpoint to be saved; check that of one to be loaded.

    Args:
        metadata: as passed to ``sharded_state_dict``; None if it is not called for a checkpoint.
        experts: the model's ``experts`` backend; None: it has no experts.

    Raises:
        CheckpointError: the checkpoint to be loaded has no layout or a different one, or distributed-optimizer state in the
            parameter order of a different ``experts`` backend; nothing has been loaded.
    """
    if metadata is None:
        return
    folder = metadata.get(LOADED_FROM)
    if folder is None:
        metadata[KEY] = LAYOUT
        if experts is not None:
            metadata[EXPERTS_KEY] = experts
        return
    found = metadata.get(KEY)
    if found != LAYOUT:
        raise CheckpointError(
            f"the checkpoint {folder} has {KEY} {found}, expected {LAYOUT}; load it with the version of megacpp-mcore that "
            "saved it"
        )
    saved = metadata.get(EXPERTS_KEY, "stock")
    flat = metadata.get("distrib_optim_sharding_type") == "dp_reshardable"
    if experts not in (None, saved) and flat and _loads_optimizer():
        # Flat buffers concatenate all parameters: ours and stock's have equal length but different order.
        raise CheckpointError(
            f"the checkpoint {folder} has the distributed optimizer's state in the order of the experts' parameters (backend "
            f"{saved}), which the run, with {experts}, has in another; write backends: {{experts: {saved}}}, or save it so "
            "once with --dist-ckpt-optim-fully-reshardable, or load without the optimizer's state (--no-load-optim)"
        )


def _loads_optimizer() -> bool:
    """Whether this process's stock script loads optimizer state; assumed if there is no stock script."""
    from megatron.training import global_vars

    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert
    return arguments is None or not (arguments.no_load_optim or arguments.finetune)


def check_version(prefix: str, version: int | None) -> None:
    """Check a mixer's part of a plain ``state_dict``, as saved by ``--ckpt-format torch``.

    Args:
        prefix: of the mixer's keys.
        version: the module version recorded by torch; None if the state was not read from such a file.

    Raises:
        CheckpointError: the layout differs.
    """
    if version is not None and version != LAYOUT:
        raise CheckpointError(
            f"the checkpoint holds {prefix}* in layout {version}, expected {LAYOUT}; load it with the version of megacpp-mcore "
            "that saved it"
        )
