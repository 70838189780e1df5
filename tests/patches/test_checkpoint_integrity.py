"""The patch checkpoint-integrity on Megatron's own functions: what a load refuses, what it never runs, what a save leaves."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.checkpoints import integrity
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches import checkpoint_integrity as patch
from tests import stock
from tests.saved import write

TRACKER = checkpoint_folder.TRACKER


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[ModuleType]:
    """Megatron's module ``checkpointing``."""
    with stock.one_process(tmp_path / "store"):
        from megatron.training import checkpointing as module

        yield module


@pytest.fixture
def checkpointing(upstream: ModuleType) -> Iterator[ModuleType]:
    """The same with the patch."""
    with stock.patched(patch.PATCH):
        yield upstream
    checkpoint_folder.load_newest_whole = False


def arguments(**given: Any) -> Namespace:
    common = {"ckpt_step": None, "save": None, "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None}
    common |= {"exit_on_missing_checkpoint": False, "auto_detect_ckpt_format": False, "use_dist_ckpt": True}
    common |= {"ckpt_assume_constant_structure": False, "stream_ckpt_dequant": True, "ckpt_fully_parallel_load": False}
    common |= {"ckpt_load_validate_sharding_integrity": False, "dist_ckpt_strictness": "assume_ok_unexpected"}
    return Namespace(**common | {"verify_integrity": False, "use_megatron_fsdp": False} | given)


def saved(folder: Path, *iterations: int, common: Any = None, rng: Any = None) -> Path:
    for iteration in iterations:
        made = folder / f"iter_{iteration:07d}"
        content = {"iteration": iteration} if common is None else common
        write(made, {"weight": torch.full((64,), float(iteration))}, {"rng_state/shard_0_1": [rng]}, content)
        integrity.write_manifest(made)
        (folder / TRACKER).write_text(str(iteration))
    return folder


class Code:
    """What a pickle can do."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def load(checkpointing: ModuleType, folder: Path, args: Namespace) -> Any:
    """As ``load_checkpoint`` does: what all ranks share first, then what is sharded."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common, *_ = checkpointing._load_base_checkpoint(str(folder), args, rank0=True)
    wanted = {"rng": ShardedObject("rng_state", None, (1,), (0,))}
    state, *_ = checkpointing._load_base_checkpoint(str(folder), args, rank0=False, sharded_state_dict=wanted)
    return common, state


@pytest.mark.parametrize("where", ["metadata", "common", "object"])
def test_no_code_in_a_checkpoint_is_run(checkpointing: ModuleType, tmp_path: Path, where: str) -> None:
    made = tmp_path / "made by the checkpoint"
    evil = Code(made)
    folder = saved(
        tmp_path / "saved", 3, common=evil if where == "common" else None, rng=evil if where == "object" else 7
    )
    if where == "metadata":
        (folder / "iter_0000003" / ".metadata").write_bytes(pickle.dumps(evil))
        integrity.write_manifest(folder / "iter_0000003")
    # Megatron's own call asks for everything, and with this variable torch would, too, where nobody says.
    with (
        mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"),
        pytest.raises(BaseException, match=r"posix\.mkdir") as refused,
    ):
        load(checkpointing, folder, arguments())
    assert str(folder) in "".join([str(refused.value), *getattr(refused.value, "__notes__", ())])
    assert not made.exists()


def test_upstream_runs_it(upstream: ModuleType, tmp_path: Path) -> None:
    """The fault itself: not worth its part of the patch once this test fails."""
    made = tmp_path / "made by the checkpoint"
    load(upstream, saved(tmp_path / "saved", 3, rng=Code(made)), arguments())
    assert made.exists()


def test_what_is_whole_is_loaded_and_checked_once(checkpointing: ModuleType, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", 3, rng=[7])
    with mock.patch.object(checkpoint_folder, "damages", wraps=integrity.damages) as checked:
        for count in (1, 2):
            common, state = load(checkpointing, folder, arguments())
            assert (common["iteration"], state["rng"]) == (3, [7])
            assert checked.call_count == count


@pytest.mark.parametrize("tracker", ["6", "no number", "", None])
def test_the_newest_whole_one_is_loaded(checkpointing: ModuleType, tmp_path: Path, tracker: str | None) -> None:
    folder = saved(tmp_path / "saved", 3, 6)
    (folder / "iter_0000006" / "__0_0.distcp").write_bytes(b"")
    (folder / TRACKER).unlink()
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
        with pytest.raises(CheckpointError, match=f"the newest whole checkpoint is {folder}/iter_0000003"):
            load(checkpointing, folder, arguments())
        checkpoint_folder.load_newest_whole = True
    args = arguments()
    common, _ = load(checkpointing, folder, args)
    assert common["iteration"] == 3
    assert args.ckpt_step is None  # else a teacher would be loaded at that iteration, too


def test_variables_that_a_load_sets_stay(checkpointing: ModuleType, tmp_path: Path) -> None:
    def reads(*_: Any) -> int:
        os.environ["SET_BY_A_LIBRARY"] = "1"
        return -1

    with (
        mock.patch.dict(os.environ),
        mock.patch.object(checkpointing, "_get_non_persistent_iteration", reads),
    ):
        before = dict(os.environ)
        load(checkpointing, saved(tmp_path / "saved", 3, rng=[7]), arguments())
        assert dict(os.environ) == before | {"SET_BY_A_LIBRARY": "1"}


def test_no_checkpoint_is_an_error_where_the_run_insists_on_one(checkpointing: ModuleType, tmp_path: Path) -> None:
    """Stock ends with status 0, as if it had trained."""
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in {tmp_path}; expected"):
        checkpointing._load_base_checkpoint(str(tmp_path), arguments(exit_on_missing_checkpoint=True), rank0=True)
    assert checkpointing._load_base_checkpoint(str(tmp_path), arguments(), rank0=True)[0] is None


def test_a_save_has_a_manifest_of_digests_that_were_computed_while_it_was_written(
    checkpointing: ModuleType, tmp_path: Path
) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    folder = tmp_path / "saved"
    stock_manifest = dist_checkpointing.validation.verify_integrity_manifest
    with mock.patch.object(integrity, "sha256_of", wraps=integrity.sha256_of) as late:
        weight = ShardedTensor.from_rank_offsets("weight", torch.ones(1000), replica_id=0)
        folder.mkdir()
        dist_checkpointing.save({"weight": weight, "iteration": 3}, str(folder))
        assert {call.args[0].name for call in late.call_args_list} == {".metadata", "metadata.json"}
        stock_manifest(str(folder))
    assert not integrity.damages(folder)
    assert {path.name for path in folder.iterdir()} == {".metadata", "metadata.json", "integrity.json", "__0_0.distcp"}


@pytest.mark.parametrize(("folder", "has_manifest"), [("saved", True), ("msc://bucket/saved", False)])
def test_object_storage_is_not_read_back(folder: str, has_manifest: bool) -> None:
    save = mock.Mock(__name__="save")
    patch._with_manifest(save)({}, folder, content_metadata={})
    assert save.call_args.kwargs.get("verify_integrity", False) is has_manifest
