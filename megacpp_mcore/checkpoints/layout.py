"""The number of the layout in which a checkpoint holds M and R layers: written with every save, checked before every load.

It stands in the checkpoint's content metadata, which Megatron keeps for such versions and hands to ``sharded_state_dict``
before it saves or loads anything, in its own loop as in Megatron-Bridge. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.errors import CheckpointError

LAYOUT = 2
"""Each part of a projection by itself, biases and rank mixes with one axis (docs/model.md)."""
KEY = "megacpp_layout"
"""Its name in the content metadata; a checkpoint without one is in no layout that this version knows."""
EXPERTS_KEY = "megacpp_experts"
"""The name there of the backend ``experts`` of the model that was saved; absent, it was ``stock``."""
LOADED_FROM = "megacpp_loaded_from"
"""The name under which the patch checkpoint-layout notes there the folder of a checkpoint that is being loaded."""


def mark_or_check(metadata: dict[str, Any] | None, experts: str | None) -> None:
    """Mark the metadata of a checkpoint to be saved; check that of one to be loaded.

    Args:
        metadata: what ``sharded_state_dict`` is given; None where it is called for no checkpoint.
        experts: whose routed experts the model has; None: it has none.

    Raises:
        CheckpointError: the checkpoint to be loaded has no layout, or another; or the state of a distributed optimizer in the
            order of other experts' parameters; nothing has been loaded.
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
        # Flat buffers of all parameters one after another: ours and stock's are as long, and in another order.
        raise CheckpointError(
            f"the checkpoint {folder} has the distributed optimizer's state in the order of the experts' parameters (backend "
            f"{saved}), which the run, with {experts}, has in another; write backends: {{experts: {saved}}}, or save it so "
            "once with --dist-ckpt-optim-fully-reshardable, or load without the optimizer's state (--no-load-optim)"
        )


def _loads_optimizer() -> bool:
    """Whether the stock script of this process loads an optimizer's state; where none runs it is not known, and it does."""
    from megatron.training import global_vars

    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert
    return arguments is None or not (arguments.no_load_optim or arguments.finetune)


def check_version(prefix: str, version: int | None) -> None:
    """Check a mixer's part of a plain ``state_dict``, as ``--ckpt-format torch`` saves it.

    Args:
        prefix: of the mixer's keys.
        version: torch's own number of the module; None where the state was not read from such a file.

    Raises:
        CheckpointError: it is in another layout.
    """
    if version is not None and version != LAYOUT:
        raise CheckpointError(
            f"the checkpoint holds {prefix}* in layout {version}, expected {LAYOUT}; load it with the version of megacpp-mcore "
            "that saved it"
        )
