"""The layout that a checkpoint states: written with a save, checked before a load."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.errors import CheckpointError
from tests.errors import raises
from tests.saved import write


def of(experts: str | None = None, **model: Any) -> SimpleNamespace:
    """The configuration of a model."""
    return SimpleNamespace(megacpp_model=model, **({} if experts is None else {"megacpp_experts": experts}))


def test_a_checkpoint_of_a_model_that_only_its_file_tells_apart_is_refused() -> None:
    metadata: dict[str, Any] = {}
    checkpoint_layout.mark_or_check(metadata, of(a_floor=1e-4))
    loaded = metadata | {"megacpp_loaded_from": "/old"}
    checkpoint_layout.mark_or_check(loaded, of(a_floor=1e-4))
    with raises(CheckpointError, "/old", "a_floor is 0.0001", 0.01, "MEGACPP_CONFIG"):
        checkpoint_layout.mark_or_check(loaded, of(a_floor=1e-2))
    anew = SimpleNamespace(no_load_optim=False, finetune=True, dist_ckpt_strictness="log_all")
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", anew):
        checkpoint_layout.mark_or_check(loaded, of(a_floor=1e-2))


def test_a_checkpoint_with_indexers_in_other_layers_is_refused(tmp_path: Path) -> None:
    name = "decoder.layers.{}.self_attention.core_attention.indexer.linear_wk.weight"
    metadata = Metadata({name.format(layer): BytesStorageMetadata() for layer in (4, 8)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = {"megacpp_loaded_from": str(tmp_path), "megacpp_layout": 2}

    def check(*full: int, **how: Any) -> None:
        run = SimpleNamespace(
            **{"no_load_optim": False, "finetune": False, "dist_ckpt_strictness": "assume_ok_unexpected"} | how
        )
        with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", run):
            checkpoint_layout.mark_or_check(loaded, SimpleNamespace(megacpp_full_layers={*full}))

    check(5, 9)
    check(5, finetune=True)  # drops one
    check(5, 12, dist_ckpt_strictness="log_all")
    for full, finetune in (((5,), False), ((), False), ((5, 9, 12), True)):
        with raises(CheckpointError, "[5, 9]", str(sorted(full)), "MEGACPP_CONFIG", "checkpoint schedule"):
            check(*full, finetune=finetune)


def test_a_vocabulary_padded_otherwise_is_refused() -> None:
    saved = {"args": SimpleNamespace(padded_vocab_size=384)}
    run = SimpleNamespace(padded_vocab_size=512, tensor_model_parallel_size=2, finetune=False)
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", run):
        with raises(CheckpointError, "/old", 384, 512, "--make-vocab-size-divisible-by 192"):
            checkpoint_layout.refuse_other_layout(saved, "/old")
        run.finetune = True
        checkpoint_layout.refuse_other_layout(saved, "/old")


def test_metadata_of_a_save_is_marked_and_that_of_a_load_is_checked() -> None:
    metadata: dict[str, Any] = {"dp_cp_group": None}
    checkpoint_layout.mark_or_check(metadata, of())
    assert metadata == {"dp_cp_group": None, "megacpp_layout": 2, "megacpp_model": {}}
    checkpoint_layout.mark_or_check(metadata, of("megacpp_mcore"))
    assert metadata["megacpp_experts"] == "megacpp_mcore"
    checkpoint_layout.mark_or_check(None, of())
    checkpoint_layout.mark_or_check({"megacpp_loaded_from": "/old", "megacpp_layout": 2}, of())
    for other in ({}, {"megacpp_layout": 3}):
        with raises(CheckpointError, "/old", f"megacpp_layout {other.get('megacpp_layout')}"):
            checkpoint_layout.mark_or_check({"megacpp_loaded_from": "/old", **other}, of())


def test_flat_state_in_the_order_of_other_experts_is_refused() -> None:
    loaded = {"megacpp_loaded_from": "/old", "megacpp_layout": 2}
    flat = loaded | {"distrib_optim_sharding_type": "dp_reshardable"}
    with pytest.raises(CheckpointError, match=r"backends: \{experts: stock\}.*\(--dist-ckpt-optim-fully-reshardable"):
        checkpoint_layout.mark_or_check(flat, of("megacpp_mcore"))
    checkpoint_layout.mark_or_check(flat, of("stock"))
    checkpoint_layout.mark_or_check(flat | {"megacpp_experts": "megacpp_mcore"}, of("megacpp_mcore"))
    checkpoint_layout.mark_or_check(loaded | {"distrib_optim_sharding_type": "fully_reshardable"}, of("megacpp_mcore"))
    without = SimpleNamespace(no_load_optim=True, finetune=False, dist_ckpt_strictness="log_all")
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", without):
        checkpoint_layout.mark_or_check(flat, of("megacpp_mcore"))


@pytest.mark.parametrize("ours", [False, True], ids=["another model", "ours"])
def test_a_gpt_model_says_its_layout(ours: bool) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_model as module

    from megacpp_mcore.patches import checkpoint_layout as patch
    from tests import stock

    model, metadata = GPTModel.__new__(GPTModel), {}  # of a real one, only what stock reads here
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(**{"megacpp_layout": 2} if ours else {})
    with (
        mock.patch.object(module.LanguageModule, "sharded_state_dict", return_value={"weight": 1}) as of_stock,
        stock.patched(patch.PATCH),
    ):
        assert model.sharded_state_dict(metadata=metadata) == {"weight": 1}
    of_stock.assert_called_once_with("", (), metadata)
    assert metadata == ({"megacpp_layout": 2, "megacpp_model": {}} if ours else {})


def test_a_folder_is_noted_where_its_metadata_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process with our specs; in any other, metadata is what was saved."""
    from megatron.core import dist_checkpointing

    from megacpp_mcore.patches import checkpoint_layout as patch
    from tests import stock

    folder, content = tmp_path / "old", {"singleton_local_shards": False}
    write(folder, {"weight": torch.ones(2)}, common={"content_metadata": content})
    with stock.patched(patch.PATCH):
        monkeypatch.delitem(sys.modules, "megacpp_mcore.layer_specs", raising=False)
        assert dist_checkpointing.load_content_metadata(str(folder)) == content
        monkeypatch.setitem(sys.modules, "megacpp_mcore.layer_specs", patch)
        state = dist_checkpointing.load_common_state_dict(str(folder))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=state)
    # and, of an optimizer that was not distributed, a format, which stock looks for where it loads into one that is
    noted = {
        "megacpp_loaded_from": str(folder),
        checkpoint_layout.FORMAT: checkpoint_layout.FULLY,
        checkpoint_layout.UNSHARDED: True,
    }
    assert metadata == {**content, **noted}
    assert dist_checkpointing.load_common_state_dict(str(folder))["content_metadata"] == content


@pytest.mark.parametrize(("kept", "wanted"), [(torch.int16, torch.float32), (torch.float32, torch.int16)])
def test_flat_remainders_are_no_whole_main_parameters(tmp_path: Path, kept: torch.dtype, wanted: torch.dtype) -> None:
    """Of one shape, which Megatron would load as numbers."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.param"
    torch.distributed.checkpoint.save({key: torch.zeros(8, dtype=kept)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint_layout.refuse_other_buckets(
        str(tmp_path), {"its": ShardedTensor.from_rank_offsets(key, torch.zeros(8, dtype=kept))}
    )
    with raises(CheckpointError, str(kept), str(wanted), "--no-load-optim"):
        checkpoint_layout.refuse_other_buckets(
            str(tmp_path), {"its": ShardedTensor.from_rank_offsets(key, torch.zeros(8, dtype=wanted))}
        )


@pytest.mark.parametrize(
    ("other", "is_rest"),
    [
        ({}, True),
        ({"bf16": False}, False),
        ({"optimizer_cpu_offload": True}, False),
        ({"use_megatron_fsdp": True}, False),
        ({"main_params_dtype": torch.float16}, False),
        ({"main_params_dtype": torch.float32, "fp8_recipe": "delayed"}, True),
        ({"fp8_recipe": "tensorwise"}, False),
    ],
)
def test_what_main_parameters_are_kept_as(other: dict[str, Any], is_rest: bool) -> None:
    """As Megatron decides it: offloaded ones, and those beside FP8 of other recipes, are whole."""
    args = SimpleNamespace(**{"use_precision_aware_optimizer": True, "bf16": True, **other})
    assert checkpoint_layout._keeps(args).startswith("as remainders") is is_rest
