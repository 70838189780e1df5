"""checkpoint-layout: checkpoints of our model record the layout of their M and R layers; a different one is refused by name.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: distributed checkpoints of GPTModels with our spec (our stack on HybridModel does the same itself). Upstream handles
others; only their content metadata gets, when read in a process with our specs, a note of the folder.
"""

from __future__ import annotations

import sys
from typing import Any

from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

_SPECS = "megacpp_mcore.layer_specs"
"""If it is not imported, no model of this process is ours, and nothing would read the note."""


@edit(
    "megatron.core.dist_checkpointing.serialization:load_common_state_dict",
    "969bf1cc5ec110dbdf987b4082858aadcbe6c31d755c66c475d25785d4ff3117",
)
def _with_its_folder(original: Function, checkpoint_dir: Any) -> Any:
    """Replace ``load_common_state_dict(checkpoint_dir)``: notes the folder in the content metadata.

    Upstream creates fresh metadata for each save, so the note also distinguishes a load from a save: both call
    ``sharded_state_dict``.
    """
    state = original(checkpoint_dir)
    content = state.get("content_metadata")
    if content is not None and _SPECS in sys.modules:
        content[checkpoint_layout.LOADED_FROM] = str(checkpoint_dir)
        if checkpoint_layout.FORMAT not in content:  # which upstream reads where the run's optimizer is distributed
            content |= {checkpoint_layout.FORMAT: checkpoint_layout.FULLY, checkpoint_layout.UNSHARDED: True}
    return state


@edit(
    "megatron.core.models.gpt.gpt_model:GPTModel.sharded_state_dict",
    "f63bb4c2880c963c25d174a6f8c771a81c2c8a0bda19745ed407f72216f224b3",
)
def _marked_or_checked(
    original: Function,
    self: Any,
    prefix: str = "",
    sharded_offsets: tuple[Any, ...] = (),
    metadata: dict[str, Any] | None = None,
) -> Any:
    if hasattr(self.config, checkpoint_layout.KEY):
        checkpoint_layout.mark_or_check(metadata, self.config)
    return original(self, prefix, sharded_offsets, metadata)


PATCH = Patch(
    name="checkpoint-layout",
    fixes=(
        "a checkpoint does not say in which layout our M and R layers are: one of another ends in a missing key, "
        "or with `--dist-ckpt-strictness log_all` in a model that is partly random"
    ),
    source=(
        "megatron-core 0.19.2, megatron/core/dist_checkpointing/serialization.py and megatron/core/models/gpt/gpt_model.py"
    ),
    edits=(_with_its_folder, _marked_or_checked),
    seam=(
        "load_common_state_dict is what every load, of Megatron's loop and of Megatron-Bridge, reads first; the content "
        "metadata is what both hand to sharded_state_dict, from there at a load, and to the checkpoint at a save"
    ),
    leaves_alone="what is saved but for the one number, what is loaded, checkpoints of other models, and those saved by rank",
    retire_when="stock lets a spec write to the content metadata, and read it before a load",
    cost="nothing",
)
