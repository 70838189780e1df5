"""checkpoint-integrity: a damaged checkpoint is refused by the name of the file, and no checkpoint's code is run.

Activate: applied by ``--spec megacpp_mcore nam56r`` and ``--spec megacpp_mcore nam56r_hybrid``; or
``megacpp_mcore.patches.apply(["checkpoint-integrity"])``.
Scope: manifests: distributed checkpoints in the format torch_dist. Tracker files and unpickling: every load of Megatron's loop.
Provenance: megatron-core 0.19.2 ``training/checkpointing.py`` and ``core/dist_checkpointing``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from megacpp_mcore.checkpoints.layout import RESAVE, refuse_other_layout
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches.machinery.registry import Edit, Patch
from megacpp_mcore.util.files import is_remote
from megacpp_mcore.util.stand_in import environment

_PLAIN_DATA = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""Read by every ``torch.load``: objects are restored by torch's allow-list, to which Megatron adds its own classes."""

_checked: tuple[str, int | None, int | None] | None = None
"""The folder that was checked last, ``--ckpt-step``, and the iteration to be loaded: None if the tracker file names it."""


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``_load_base_checkpoint(load_dir, args, rank0, …)``, which a load calls with ``rank0``, then without."""

    @functools.wraps(original)
    def _load_base_checkpoint(load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
        global _checked
        from megatron.training import checkpointing

        from megacpp_mcore.checkpoints.folder import choose, read_tracker

        step = chosen = getattr(args, "ckpt_step", None)
        if load_dir is not None and not is_remote(load_dir):
            if rank0 or _checked is None or _checked[:2] != (load_dir, step):
                _checked = load_dir, step, choose(Path(load_dir), step)
            chosen = _checked[2]
        tracker_of = checkpointing.get_checkpoint_tracker_filename

        def unless_chosen(folder: Any) -> Any:
            """Without a file, as Megatron would read it nevertheless, and end the run if it is damaged."""
            return "" if chosen and folder == load_dir else tracker_of(folder)

        try:
            with (
                environment(_PLAIN_DATA),
                # For this load alone: another one, of a teacher, has iterations of its own.
                mock.patch.object(args, "ckpt_step", chosen, create=True),
                mock.patch.object(checkpointing, "get_checkpoint_tracker_filename", unless_chosen),
            ):
                loaded = original(load_dir, args, rank0, *rest, **kwargs)
        except SystemExit as end:  # Megatron's, with status 0
            if getattr(args, "exit_on_missing_checkpoint", False) and not chosen and not read_tracker(Path(load_dir)):
                raise CheckpointError(
                    f"there is no checkpoint in {load_dir}; expected one (--exit-on-missing-checkpoint): name the folder of a "
                    "run that has saved, or leave that flag out to start anew"
                ) from end
            raise CheckpointError(
                f"Megatron loaded no checkpoint from {load_dir}; its reason is printed above (in the format torch, a run of "
                f"another layout lacks files: {RESAVE})"
            ) from end
        except BaseException as error:  # torch's CheckpointException is no Exception
            error.add_note(f"while loading the checkpoint in {load_dir}")
            raise
        finally:
            if not rank0:
                _checked = None
        refuse_other_layout(loaded[0])
        return loaded

    return _load_base_checkpoint


def _with_manifest(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``save(sharded_state_dict, checkpoint_dir, …, verify_integrity)``: with a manifest.

    Not in object storage, from which rank 0 would read back all that was saved.
    """

    @functools.wraps(original)
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_remote(checkpoint_dir):
            kwargs["verify_integrity"] = True
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return save


def _by_digests_of_writers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``save_integrity_manifest(checkpoint_dir)``, which hashes all files, one after the other."""

    @functools.wraps(original)
    def save_integrity_manifest(checkpoint_dir: str) -> None:
        from megacpp_mcore.checkpoints.integrity import write_manifest

        if is_remote(checkpoint_dir):
            original(checkpoint_dir)
        else:
            write_manifest(Path(checkpoint_dir))

    return save_integrity_manifest


def _digested(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of ``write_preloaded_data(transform_list, local_proc_idx, write_bucket, …)``, which writes one file."""

    @functools.wraps(original)
    def write_preloaded_data(
        transform_list: Any, local_proc_idx: int, write_bucket: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from megacpp_mcore.checkpoints.integrity import digested

        with digested(Path(write_bucket[0])):
            return original(transform_list, local_proc_idx, write_bucket, *args, **kwargs)

    return write_preloaded_data


PATCH = Patch(
    name="checkpoint-integrity",
    fixes=(
        "damaged checkpoints and tracker files: some train on with other values, some end the run with status 0, most end it "
        "with a traceback that names no file; code in a checkpoint's metadata or objects is run"
    ),
    source=(
        "megatron-core 0.19.2, megatron/training/checkpointing.py and megatron/core/dist_checkpointing (--verify-integrity, by "
        "which rank 0 alone hashes all files after a save and before a load)"
    ),
    megatron_versions=">=0.19,<0.20",
    edits=(
        Edit.of(
            "megatron.training.checkpointing:_load_base_checkpoint",
            "9a7e9e8de2428c6711170829f8830e1dec323ca23bdbeeb41092a0c84e8c8632",
            _checking,
        ),
        Edit.of(
            "megatron.core.dist_checkpointing.serialization:save",
            "e9626ecdf679a00130eb10820d769ee90e0168d8c7ff3298d981f98f6998c4e3",
            _with_manifest,
        ),
        Edit.of(
            "megatron.core.dist_checkpointing.validation:save_integrity_manifest",
            "a3a6bf7ad7a66b8eb7011d756b2287555064f376d9db6dc8b8297ede408a84ad",
            _by_digests_of_writers,
        ),
        Edit.of(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
            "d6182c03ee672d1a8751c7dc6d27fee22e2bce89be41cbffa9bf4b3c84eedbd6",
            _digested,
        ),
    ),
    seam=(
        "_load_base_checkpoint is where Megatron's loop reads the tracker file and everything in a checkpoint, on all ranks; "
        "write_preloaded_data writes every file of tensors, also in the process of an async save, and save_integrity_manifest "
        "runs once all files are there, before the tracker file names them"
    ),
    leaves_alone=(
        "what is saved and loaded; other formats' files; checkpoints in object storage; Megatron's own --verify-integrity, "
        "which checks the same manifest"
    ),
    retire_when="upstream checks every file on all ranks before it unpickles any, and names the newest whole checkpoint",
    cost="not measured",
)
