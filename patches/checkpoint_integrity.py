"""checkpoint-integrity: a damaged checkpoint is refused by the name of the file, and no checkpoint's code is run.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: manifests: distributed checkpoints in the format torch_dist. Tracker files and unpickling: every load of Megatron's loop.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore.checkpoints.layout import REMAINDER, RESAVE, flat_folder, refuse_other_buckets, refuse_other_layout
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit
from megacpp_mcore.util.files import is_remote
from megacpp_mcore.util.stand_in import environment, stand_in

_PLAIN_DATA = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""Read by every ``torch.load``: objects are restored by torch's allow-list, to which Megatron adds its own classes."""

_checked: tuple[tuple[Any, int | None], int, int | None] | None = None
"""Set by the load with ``rank0``: its folder and ``--ckpt-step``; what is loaded, as :func:`_check` returns it."""

_has_manifest = False
"""Whether what is being saved gets a manifest, which takes the digests; formats that write their files themselves have none."""

_flat: str | None = None
"""The folder of the checkpoint that the load with ``rank0`` read, if its optimizer state is in flat buckets."""


@edit(
    "megatron.training.checkpointing:_load_base_checkpoint",
    "9a7e9e8de2428c6711170829f8830e1dec323ca23bdbeeb41092a0c84e8c8632",
    "9a3c6812a389c72c9d72d493bea4cf4450ee30b160d820f0e2095480544d82b2",
)
def _checking(original: Function, load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
    """Replace ``_load_base_checkpoint(load_dir, args, rank0, …)``, which a load calls with ``rank0``, then without."""
    global _checked, _flat
    from megatron.training import checkpointing
    from torch import distributed

    strictness = getattr(args, "dist_ckpt_strictness", None)
    if strictness in ("return_unexpected", "return_all"):
        raise CheckpointError(
            f"--dist-ckpt-strictness {strictness} returns keys with what is loaded, a pair that Megatron's loop does not "
            "accept; use log_unexpected or log_all, which print the keys"
        )
    of_load = load_dir, getattr(args, "ckpt_step", None)
    is_checked = not rank0 and _checked is not None and _checked[0] == of_load
    checked, _checked = _checked if is_checked else None, None
    flat, _flat = None if rank0 else _flat, None

    def check_first(stock: Any, folder: Any, *context: Any) -> int:
        """Replace the lookup of the newest non-persistent iteration, which comes before a tracker file is read."""
        nonlocal checked
        checked = checked or (of_load, *_check(load_dir, args, folder, stock(folder, *context)))
        args.ckpt_step = checked[2]
        return checked[1]

    def unless_chosen(stock: Any, folder: Any) -> Any:
        """Return no file if a step was chosen: Megatron would still read it, and end the run if it is damaged."""
        return "" if args.ckpt_step and folder == load_dir else stock(folder)

    try:
        with (
            environment(_PLAIN_DATA),
            # For this load only: another one, of a teacher, has iterations of its own.
            mock.patch.multiple(args, create=True, ckpt_step=of_load[1], exit_on_missing_checkpoint=False),
            stand_in(checkpointing, "_get_non_persistent_iteration", check_first),
            stand_in(checkpointing, "get_checkpoint_tracker_filename", unless_chosen),
        ):
            if flat:
                refuse_other_buckets(flat, kwargs.get("sharded_state_dict") or {})
            loaded = original(load_dir, args, rank0, *rest, **kwargs)
    except SystemExit as end:  # Megatron's, with status 0
        is_torch = any(Path(str(load_dir)).glob("*/mp_rank_*"))
        reason = f" (if this rank never had a file, the run has another layout: {RESAVE})" if is_torch else ""
        raise CheckpointError(
            f"Megatron loaded no checkpoint from {load_dir}; its reason is printed above{reason}", code="not-loaded"
        ) from end
    except BaseException as error:  # torch's CheckpointException is not an Exception
        # The message of raise_all names all keys that only one side has, the others the first that is missing.
        text = str(error)
        if text.startswith("Detected load from a distributed checkpoint"):
            raise CheckpointError(
                f"the checkpoint in {load_dir} is in the format torch_dist, and --ckpt-format says torch: "
                "leave that flag out, or add --auto-detect-ckpt-format, which loads torch_dist and saves torch",
                code="other-format",
            ) from error
        if f"{REMAINDER}." in text and ("optimizer.state.param." in text or "Unexpected keys" not in text):
            raise CheckpointError(
                f"the checkpoint in {load_dir} lacks {REMAINDER}, what weights leave of main parameters: Megatron by "
                "itself saves it (--use-precision-aware-optimizer --dist-ckpt-optim-fully-reshardable) as main parameters, "
                "and with several gradient buckets as another parameter's; load it without the optimizer's state "
                "(--no-load-optim), from which main parameters begin as the weights",
                code="remainders",
            ) from error
        error.add_note(f"while loading the checkpoint in {load_dir}")
        raise
    if loaded[0] is None and getattr(args, "exit_on_missing_checkpoint", False):  # Megatron exits with status 0
        raise CheckpointError(
            f"there is no checkpoint in {load_dir}; expected one (--exit-on-missing-checkpoint): name the folder of a "
            "run that has saved, or remove that flag to start from scratch",
            code="missing",
        )
    _refuse_other_iteration(*loaded[:2])
    refuse_other_layout(loaded[0], load_dir)
    _flat = flat_folder(loaded[0]) if rank0 else None
    _checked = checked if rank0 and distributed.is_initialized() else None
    return loaded


def _refuse_other_iteration(state: Any, folder: Any) -> None:
    """Refuse a checkpoint whose folder name and content differ in the iteration: folders were renamed, or swapped."""
    named = re.match(r"(?:.*/)?iter_(\d+)(?:/|$)", str(folder))  # the last of such names
    step = state.get("iteration") if isinstance(state, Mapping) else None
    if named and isinstance(step, int) and step != int(named[1]):
        raise CheckpointError(
            f"{folder} is of iteration {step} by its content; expected {int(named[1])}: rename the folders as they were saved",
            code="another-iteration",
        )


def _check(load_dir: Any, args: Any, non_persistent_dir: Any, iteration: int) -> tuple[int, int | None]:
    """Check what Megatron is about to load; without digests before torch.distributed is initialized, as ranks are on their own.

    Returns:
        The iteration of the non-persistent checkpoint to load; -1 for the persistent one; and what :func:`choose` returns.
    """
    from torch import distributed

    from megacpp_mcore.checkpoints.folder import choose, choose_non_persistent

    step, by_digests = args.ckpt_step, distributed.is_initialized()
    load = None if load_dir is None or is_remote(load_dir) else Path(load_dir)
    is_checked = args.non_persistent_ckpt_type == "global" and not is_remote(non_persistent_dir)
    folder = Path(non_persistent_dir) if is_checked else None
    if choose_non_persistent(folder, iteration, load, step, by_digests=by_digests):
        return iteration, step
    return -1, choose(load, step, by_digests=by_digests) if load else step


@edit(
    "megatron.core.dist_checkpointing.serialization:save",
    "e9626ecdf679a00130eb10820d769ee90e0168d8c7ff3298d981f98f6998c4e3",
)
def _with_manifest(original: Function, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``save(sharded_state_dict, checkpoint_dir, …, verify_integrity)``: with a manifest.

    Not in object storage, from which rank 0 would read back all that was saved.
    """
    global _has_manifest
    if is_remote(checkpoint_dir):
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    _has_manifest = True
    try:
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs | {"verify_integrity": True})
    finally:
        _has_manifest = False


@edit(
    "megatron.core.dist_checkpointing.validation:save_integrity_manifest",
    "a3a6bf7ad7a66b8eb7011d756b2287555064f376d9db6dc8b8297ede408a84ad",
)
def _by_digests_of_writers(original: Function, checkpoint_dir: str) -> None:
    """Replace ``save_integrity_manifest(checkpoint_dir)``, which hashes all files, one after the other."""
    from megacpp_mcore.checkpoints.integrity import write_manifest

    if is_remote(checkpoint_dir):
        original(checkpoint_dir)
    else:
        write_manifest(Path(checkpoint_dir))


@edit(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.get_save_function_and_args",
    "91b193455aa9c1418a55f9f89eae8086721d4f294306ade696b942fd888dff56",
)
def _digested(original: Function, self: Any) -> Any:
    """Replace ``get_save_function_and_args(self)``, whose function writes this rank's files, here or in a worker's process."""
    from megacpp_mcore.checkpoints.integrity import save_with_digests

    save, preload, arguments = original(self)
    is_digested = _has_manifest and save is not None
    return functools.partial(save_with_digests, save) if is_digested else save, preload, arguments


@edit(
    "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata",
    "be79bb1bfc40a756b1ba4e88bdcaffb44e80a7ad2ab9263e4ec8057fb82e02f8",
)
def _without_strides(original: Function, self: Any, checkpoint_dir: Any, metadata: Any = None) -> Any:
    """Replace ``load_tensors_metadata(self, checkpoint_dir, metadata)``, which makes of each stored tensor an empty one.

    It passes all of a tensor's properties to ``torch.empty``, which does not accept the strides that torch 2.15 keeps among
    them. No tensor is read by strides.
    """
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    if metadata is None:
        metadata = _get_filesystem_reader(checkpoint_dir).read_metadata()
    for stored in metadata.state_dict_metadata.values():
        if hasattr(stored, "properties"):  # a tensor, no object
            vars(stored.properties).pop("strides", None)
    return original(self, checkpoint_dir, metadata)


PATCH = Patch(
    name="checkpoint-integrity",
    fixes=(
        "damaged checkpoints and tracker files: some train on with other values, some end the run with status 0, most end it "
        "with a traceback that names no file; code in a checkpoint's metadata or objects is run; with torch 2.15 every "
        "`--dist-ckpt-strictness` that lists a checkpoint's keys ends in a TypeError of torch.empty"
    ),
    source=(
        "megatron-core 0.19.2, megatron/training/checkpointing.py and megatron/core/dist_checkpointing (--verify-integrity, by "
        "which only rank 0 hashes all files after a save and before a load)"
    ),
    edits=(_checking, _with_manifest, _by_digests_of_writers, _digested, _without_strides),
    seam=(
        "_load_base_checkpoint is where Megatron's loop reads the tracker file and everything in a checkpoint, on all ranks; "
        "what get_save_function_and_args returns writes every file of tensors, also in the worker's process of an async save; "
        "save_integrity_manifest runs on rank 0 once all files are there, before the tracker file names them"
    ),
    leaves_alone=(
        "what is saved and loaded; other formats' files; checkpoints in object storage; Megatron's own --verify-integrity, "
        "which checks the same manifest"
    ),
    retire_when=(
        "upstream checks every file on all ranks before it unpickles any, names the newest whole checkpoint, and lists the "
        "keys of one that torch 2.15 wrote"
    ),
    cost="five saves of 10 GB took 10.8 to 12.5 s without digests (median 11.0), 10.5 to 12.8 s with them (11.2), in turn, on "
    "16 cores; a thread per writer, in an async save the worker's, hashes what was written, at 0.8 s of a core per GB",
)
