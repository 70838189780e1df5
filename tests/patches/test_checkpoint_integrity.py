"""The patch checkpoint-integrity on Megatron's own functions: what a load refuses, what it never runs, what a save leaves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.checkpoints import integrity
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches import checkpoint_integrity as patch
from tests import forks, stock
from tests.errors import raises
from tests.lanes import exhaustive_but
from tests.saved import Code, write

TRACKER = checkpoint_folder.TRACKER


@pytest.fixture
def upstream(process: Path) -> ModuleType:
    """Megatron's module ``checkpointing``."""
    from megatron.training import checkpointing as module

    return module


@pytest.fixture
def checkpointing(upstream: ModuleType) -> Iterator[ModuleType]:
    """The same with the patch."""
    with stock.patched(patch.PATCH):
        yield upstream
    checkpoint_folder.load_newest_whole = False


def arguments(**changes: Any) -> Namespace:
    common = {"ckpt_step": None, "save": None, "non_persistent_ckpt_type": None, "non_persistent_global_ckpt_dir": None}
    common |= {"exit_on_missing_checkpoint": False, "auto_detect_ckpt_format": False, "use_dist_ckpt": True}
    common |= {"ckpt_assume_constant_structure": False, "stream_ckpt_dequant": True, "ckpt_fully_parallel_load": False}
    common |= {"ckpt_load_validate_sharding_integrity": False, "dist_ckpt_strictness": "assume_ok_unexpected"}
    return Namespace(**common | {"verify_integrity": False, "use_megatron_fsdp": False} | changes)


def saved(folder: Path, *iterations: int, common: Any = None, rng: Any = None) -> Path:
    for iteration in iterations:
        made = folder / f"iter_{iteration:07d}"
        content = {"iteration": iteration} if common is None else common
        write(made, {"weight": torch.full((64,), float(iteration))}, {"rng_state/shard_0_1": [rng]}, content)
        integrity.write_manifest(made)
        (folder / TRACKER).write_text(str(iteration))
    return folder


def load(checkpointing: ModuleType, folder: Path, args: Namespace) -> Any:
    """As ``load_checkpoint`` does: what all ranks share first, then what is sharded."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common, *_ = checkpointing._load_base_checkpoint(str(folder), args, rank0=True)
    wanted = {"rng": ShardedObject("rng_state", None, (1,), (0,))}
    state, *_ = checkpointing._load_base_checkpoint(str(folder), args, rank0=False, sharded_state_dict=wanted)
    return common, state


@pytest.mark.parametrize("strictness", ["assume_ok_unexpected", "raise_all"])
def test_remainders_that_megatron_saved_by_itself_are_refused_by_name(
    checkpointing: ModuleType, tmp_path: Path, strictness: str
) -> None:
    """As ``param``, beside other parameters' numbers, which nothing in them shows."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    main = {"optimizer.state.param.weight": torch.zeros(8, dtype=torch.int16)}
    write(tmp_path / "iter_0000006", main, {}, {"iteration": 6})
    (tmp_path / TRACKER).write_text("6")
    args = arguments(dist_ckpt_strictness=strictness)
    checkpointing._load_base_checkpoint(str(tmp_path), args, rank0=True)
    wanted = ShardedTensor.from_rank_offsets("optimizer.state.remainder.weight", torch.zeros(8, dtype=torch.int16))
    with raises(CheckpointError, str(tmp_path), "optimizer.state.remainder", "--no-load-optim", code="remainders"):
        checkpointing._load_base_checkpoint(str(tmp_path), args, rank0=False, sharded_state_dict={"its": wanted})


def test_a_distributed_checkpoint_is_refused_by_a_run_of_the_format_torch(checkpointing: ModuleType, tmp_path: Path) -> None:
    folder, args = saved(tmp_path, 6), arguments(use_dist_ckpt=False)
    checkpointing._load_base_checkpoint(str(folder), args, rank0=True)
    with raises(CheckpointError, str(folder), "--ckpt-format", "--auto-detect-ckpt-format", code="other-format"):
        checkpointing._load_base_checkpoint(str(folder), args, rank0=False)


@pytest.mark.parametrize("strides", [None, (3, 1)])
def test_keys_of_a_checkpoint_are_listed_whatever_the_torch_that_wrote_it(
    checkpointing: ModuleType, tmp_path: Path, strides: tuple[int, int] | None
) -> None:
    """torch 2.15 keeps strides with a tensor's properties, older ones do not: here both do, one after the other."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    write(tmp_path / "saved", {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}, {"rng_state/shard_0_1": [7]})
    metadata = FileSystemReader(tmp_path / "saved").read_metadata()
    vars(metadata.state_dict_metadata["weight"].properties)["strides"] = strides
    for metadata_or_none in (metadata, None):
        listed = TorchDistLoadShardedStrategy().load_tensors_metadata(tmp_path / "saved", metadata_or_none)
        assert {name: (tensor.global_shape, tensor.dtype) for name, tensor in listed.items()} == {
            "weight": ((2, 3), torch.bfloat16)
        }


@pytest.mark.parametrize("strictness", ["return_all", "return_unexpected"])
def test_keys_that_megatrons_loop_could_not_take_are_refused(
    checkpointing: ModuleType, tmp_path: Path, strictness: str
) -> None:
    """Before anything is read."""
    folder = saved(tmp_path / "saved", 3, rng=7)
    with (
        mock.patch.object(checkpoint_folder, "damages", side_effect=AssertionError),
        raises(CheckpointError, f"--dist-ckpt-strictness {strictness}", "log_all"),
    ):
        load(checkpointing, folder, arguments(dist_ckpt_strictness=strictness))


def test_what_only_a_newer_torch_can_read_is_refused_as_such(checkpointing: ModuleType, tmp_path: Path) -> None:
    """torch 2.15 added strides to a tensor's properties, and 2.11 unpacks as many of them as it has itself."""
    of_this_torch = TensorProperties.__getstate__
    with mock.patch.object(TensorProperties, "__getstate__", lambda self: (*of_this_torch(self), (1,))):
        folder = saved(tmp_path / "saved", 3)
    with raises(CheckpointError, str(folder), "newer torch", torch.__version__, code="none-whole"):
        load(checkpointing, folder, arguments())


def test_two_pickles_in_a_common_state_are_no_newer_torchs(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "common.pt", "w") as archive:
        for name in ("one", "other"):
            archive.writestr(f"{name}/data.pkl", pickle.dumps({}))
    with raises(CheckpointError, tmp_path / "common.pt", "too many values", "restore it from a copy"):
        integrity.read_common(tmp_path, Metadata({}, storage_data={}))


@pytest.mark.parametrize("where", ["metadata", "common", "object", "torch"])
def test_no_code_in_a_checkpoint_is_run(
    checkpointing: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    made = tmp_path / "made by the checkpoint"
    evil = Code(made)
    folder = saved(tmp_path / "saved", 3, common=evil if where == "common" else None, rng=evil if where == "object" else 7)
    if where == "torch":
        shutil.rmtree(folder / "iter_0000003")
        (folder / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
        torch.save({"iteration": evil}, folder / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt")
    if where == "metadata":
        (folder / "iter_0000003" / ".metadata").write_bytes(pickle.dumps(evil))
        integrity.write_manifest(folder / "iter_0000003")
    # Megatron's own call asks for everything, and with this variable torch would, too, by default.
    with (
        mock.patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"),
        pytest.raises(BaseException) as refused,  # noqa: PT011
    ):
        load(checkpointing, folder, arguments())
    assert "posix.mkdir" in str(refused.value) + capsys.readouterr().out  # of the format torch, Megatron prints the error
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


@pytest.mark.parametrize("tracker", ["6", None])
def test_the_newest_whole_one_is_loaded(checkpointing: ModuleType, tmp_path: Path, tracker: str | None) -> None:
    folder = saved(tmp_path / "saved", 3, 6)
    (folder / "iter_0000006" / "__0_0.distcp").write_bytes(b"")
    (folder / TRACKER).unlink()
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
        with raises(CheckpointError, "iter_0000006", "__0_0.distcp", f"{folder}/iter_0000003", code="damaged"):
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

    with mock.patch.dict(os.environ), mock.patch.object(checkpointing, "_get_non_persistent_iteration", reads):
        before = dict(os.environ)
        load(checkpointing, saved(tmp_path / "saved", 3, rng=[7]), arguments())
        assert dict(os.environ) == before | {"SET_BY_A_LIBRARY": "1"}


def test_no_checkpoint_is_an_error_where_the_run_insists_on_one(checkpointing: ModuleType, tmp_path: Path) -> None:
    """Stock ends with status 0, as if it had trained."""
    with raises(CheckpointError, tmp_path, "--exit-on-missing-checkpoint", code="missing"):
        checkpointing._load_base_checkpoint(str(tmp_path), arguments(exit_on_missing_checkpoint=True), rank0=True)
    assert checkpointing._load_base_checkpoint(str(tmp_path), arguments(), rank0=True)[0] is None


def test_folders_that_were_swapped_are_refused(checkpointing: ModuleType, tmp_path: Path) -> None:
    folder = saved(tmp_path / "iter_0000004" / "saved", 3, 5)
    assert load(checkpointing, folder, arguments())
    (folder / "iter_0000005").rename(folder / "iter_0000007")
    (folder / "iter_0000003").rename(folder / "iter_0000005")
    with raises(CheckpointError, folder / "iter_0000005", "iteration 3 ", "expected 5", code="another-iteration"):
        load(checkpointing, folder, arguments())


def test_a_checkpoint_without_both_of_its_small_files_is_named(tmp_path: Path) -> None:
    made = saved(tmp_path / "saved", 3) / "iter_0000003"
    for name in (integrity.CONFIG, integrity.MANIFEST):
        (made / name).unlink()
    assert integrity.damages(made) == [f"{integrity.CONFIG}: not found"]
    of_torch = tmp_path / "torch" / "iter_0000003"
    (of_torch / "mp_rank_00").mkdir(parents=True)
    assert integrity.damages(of_torch) == ["mp_rank_00: has no file of a checkpoint (.pt)"]


@pytest.mark.parametrize("is_torch", [True, False])
def test_what_ended_in_status_0_is_an_error(
    checkpointing: ModuleType, tmp_path: Path, is_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a missing checkpoint, and without the reason of another format."""
    folder = saved(tmp_path / "saved", 3)
    if is_torch:
        shutil.rmtree(folder / "iter_0000003")
        (folder / "iter_0000003" / "mp_rank_01").mkdir(parents=True)
        torch.save({}, folder / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt")
    else:
        monkeypatch.setattr(checkpointing, "_get_checkpoint_format", mock.Mock(side_effect=SystemExit))
    with raises(CheckpointError, folder, code="not-loaded") as refused:
        checkpointing._load_base_checkpoint(str(folder), arguments(exit_on_missing_checkpoint=True), rank0=True)
    assert ("format torch" in str(refused.value)) is is_torch


def test_before_ranks_are_connected_files_are_not_hashed(
    checkpointing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would hash all of them by itself, and again in the load that follows, which checks everything."""
    folder, hashed = saved(tmp_path / "saved", 3, 6, rng=[7]), mock.Mock(wraps=integrity.sha256_of)
    monkeypatch.setattr(integrity, "sha256_of", hashed)
    with monkeypatch.context() as alone:
        alone.setattr(torch.distributed, "is_initialized", lambda: False)
        assert checkpointing._load_base_checkpoint(str(folder), arguments(), rank0=True)[0]["iteration"] == 6
        assert not hashed.called
        assert patch._checked is None
        (folder / TRACKER).write_text("no number")
        with raises(CheckpointError, "'no number'", "iter_0000006", code="damaged"):
            checkpointing._load_base_checkpoint(str(folder), arguments(), rank0=True)
        (folder / TRACKER).write_text("6")
        (folder / "iter_0000006" / ".metadata").write_bytes(b"")
        with raises(CheckpointError, "iter_0000006/.metadata", f"{folder}/iter_0000003", code="damaged"):
            checkpointing._load_base_checkpoint(str(folder), arguments(), rank0=True)
        assert not hashed.called
    (folder / TRACKER).write_text("3")
    load(checkpointing, folder, arguments())
    assert hashed.call_count == 3


def test_a_load_that_failed_is_checked_anew(checkpointing: ModuleType, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", 3, rng=[7])
    with (
        mock.patch.object(checkpointing.dist_checkpointing, "load_common_state_dict", side_effect=RuntimeError("failed")),
        pytest.raises(RuntimeError, match="failed"),
    ):
        checkpointing._load_base_checkpoint(str(folder), arguments(), rank0=True)
    (folder / "iter_0000003" / "__0_0.distcp").write_bytes(b"")
    with raises(CheckpointError, "iter_0000003", "__0_0.distcp", code="none-whole"):
        checkpointing._load_base_checkpoint(str(folder), arguments(), rank0=False, sharded_state_dict={})


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A folder with checkpoints of iterations 3 and 6, and the folder of its non-persistent one of iteration 8."""
    folder = saved(tmp_path / "saved", 3, 6, rng=[7])
    return folder, saved(folder / "non_persistent", 8, rng=[8])


@pytest.mark.parametrize("own_folder", [False, True])
def test_a_non_persistent_checkpoint_is_loaded_where_it_is_newer(
    checkpointing: ModuleType, both: tuple[Path, Path], tmp_path: Path, own_folder: bool
) -> None:
    """Also where the other one is damaged, which nothing reads."""
    folder, temporary = both
    args = arguments(non_persistent_ckpt_type="global")
    if own_folder:
        args.non_persistent_global_ckpt_dir = str(temporary.rename(tmp_path / "own"))
    (folder / "iter_0000006" / "__0_0.distcp").write_bytes(b"")
    with mock.patch.object(checkpoint_folder, "damages", wraps=integrity.damages) as checked:
        common, state = load(checkpointing, folder, args)
    assert (common["iteration"], state["rng"], checked.call_count) == (8, [8], 1)
    (folder / TRACKER).write_text("9")
    with raises(CheckpointError, "iter_0000009", ".metadata", code="damaged"):
        load(checkpointing, folder, args)


def test_a_damaged_non_persistent_checkpoint_is_refused(checkpointing: ModuleType, both: tuple[Path, Path]) -> None:
    folder, temporary = both
    args = arguments(non_persistent_ckpt_type="global")
    (temporary / "iter_0000008" / "__0_0.distcp").write_bytes(b"")
    with raises(CheckpointError, f"{temporary}/iter_0000008", "__0_0.distcp", f"remove {temporary}", code="damaged"):
        load(checkpointing, folder, args)
    checkpoint_folder.load_newest_whole = True
    common, state = load(checkpointing, folder, args)
    assert (common["iteration"], state["rng"]) == (6, [7])
    (folder / TRACKER).unlink()
    with raises(CheckpointError, "iter_0000008", code="damaged"):  # Megatron would start from scratch
        load(checkpointing, folder, args)


def test_a_local_checkpoint_is_left_to_its_manager(checkpointing: ModuleType, both: tuple[Path, Path]) -> None:
    folder, _ = both
    (folder / "iter_0000006" / "__0_0.distcp").write_bytes(b"")
    manager = mock.Mock()
    manager.find_latest.return_value = 9
    manager.load.return_value = mock.Mock(to_state_dict=mock.Mock(return_value={"iteration": 9})), "name"
    args = arguments(non_persistent_ckpt_type="local", non_persistent_local_ckpt_algo="atomic")
    for rank0 in (True, False):
        state, *_ = checkpointing._load_base_checkpoint(
            str(folder), args, rank0=rank0, checkpointing_context={"local_checkpoint_manager": manager}
        )
        assert state == {"iteration": 9}
    assert manager.find_latest.call_count == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("is_async", exhaustive_but([False, True], True))
def test_a_save_has_a_manifest_of_digests_that_were_computed_while_it_was_written(
    checkpointing: ModuleType, tmp_path: Path, is_async: bool
) -> None:
    """Asynchronously by a process of its own, which is spawned and in which no patch is applied."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    folder = tmp_path / "saved"
    stock_manifest = dist_checkpointing.validation.verify_integrity_manifest
    with mock.patch.object(integrity, "sha256_of", wraps=integrity.sha256_of) as late:
        weight = ShardedTensor.from_rank_offsets("weight", torch.ones(1000), replica_id=0)
        folder.mkdir()
        state = {"weight": weight, "iteration": 3}
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=is_async, async_strategy="mcore")
        if is_async:
            worker = multiprocessing.get_context("spawn").Process(target=request.async_fn, args=request.async_fn_args)
            worker.start()
            worker.join(forks.PATIENCE_S)
            assert (worker.exitcode, late.call_count) == (0, 0)
            for finish in request.finalize_fns:
                finish()
        assert {call.args[0].name for call in late.call_args_list} == {".metadata", "metadata.json"}
        stock_manifest(str(folder))
    assert not integrity.damages(folder)
    assert {path.name for path in folder.iterdir()} == {".metadata", "metadata.json", "integrity.json", "__0_0.distcp"}


def test_a_format_without_manifest_gets_no_digests(checkpointing: ModuleType, tmp_path: Path) -> None:
    """Megatron's loop saves torch_dcp by the same writer, and nothing would take them."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    writer = FileSystemWriterAsync(tmp_path)
    assert writer.get_save_function_and_args() == (None, None, [])
    writer.write_buckets = [(tmp_path / "shard", "shard", ([], []))]
    assert writer.get_save_function_and_args()[0].func is FileSystemWriterAsync.write_preloaded_data_multithread


@pytest.mark.parametrize(("folder", "has_manifest"), [("saved", True), ("msc://bucket/saved", False)])
def test_object_storage_is_not_read_back(folder: str, has_manifest: bool) -> None:
    save = mock.Mock(__name__="save")
    patch._with_manifest.make(save)({}, folder, content_metadata={})
    assert save.call_args.kwargs.get("verify_integrity", False) is has_manifest
