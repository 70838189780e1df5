"""One of two processes, the second without parameters; both load what the first refuses, errors go to FOLDER/RANK.json."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.training import checkpointing
from torch import distributed

from megacpp_mcore import patches
from megacpp_mcore.checkpoints.layout import FLAT, FORMAT, LOADED_FROM
from megacpp_mcore.errors import CheckpointError

KEY = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg"
ARGUMENTS = Namespace(
    ckpt_step=None, non_persistent_global_ckpt_dir=None, non_persistent_ckpt_type=None, non_persistent_save_interval=None,
    exit_on_missing_checkpoint=False, ckpt_format="torch_dist", auto_detect_ckpt_format=False, use_dist_ckpt=True,
    ckpt_assume_constant_structure=False, stream_ckpt_dequant=False, ckpt_fully_parallel_load=False,
    ckpt_load_validate_sharding_integrity=True, dist_ckpt_strictness="assume_ok_unexpected", verify_integrity=False,
    finetune=False, no_load_optim=False, no_load_rng=True, use_distributed_optimizer=False, fp16=False, bf16=True,
)  # fmt: skip


def bucket(size: int) -> dict[str, Any]:
    """A flat bucket, which the first rank has."""
    return {"bucket": ShardedTensor.from_rank_offsets(KEY, torch.zeros(size))} if distributed.get_rank() == 0 else {}


def loads_other_buckets(folder: Path) -> None:
    """A stage whose bucket is of another size, and one without an optimizer."""
    saved = folder / "iter_0000001"
    if distributed.get_rank() == 0:
        saved.mkdir()
    distributed.barrier()
    dist_checkpointing.save(bucket(8), str(saved))
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    state = {}
    if distributed.get_rank() == 0:
        inner = mock.Mock(config=None, model_chunks=[], is_stub_optimizer=False)
        inner.sharded_state_dict.return_value = bucket(12)
        metadata = {FORMAT: FLAT, LOADED_FROM: str(saved)}
        state["optimizer"] = ChainedOptimizer([inner]).sharded_state_dict({}, is_loading=True, metadata=metadata)
    content = {"content_metadata": {FORMAT: FLAT, LOADED_FROM: str(saved)}}
    with mock.patch.object(dist_checkpointing, "load_common_state_dict", return_value=content):
        checkpointing._load_base_checkpoint(str(folder), ARGUMENTS, rank0=True)
    checkpointing._load_base_checkpoint(str(folder), ARGUMENTS, sharded_state_dict=state)


def loads_wrong_main_parameters(folder: Path) -> None:
    """A stage whose main parameters are not those of its weights, and one without an optimizer."""
    inner = mock.Mock(config=None, model_chunks=[], is_stub_optimizer=False, param_groups=[])
    inner.load_state_dict.side_effect = CheckpointError("main parameters that are not those of its weights")
    optimizer = ChainedOptimizer([inner] if distributed.get_rank() == 0 else [])
    loaded = {"model": {}, "optimizer": {}, "iteration": 1}, "saved", False, checkpointing.CheckpointType.LEGACY
    arguments = vars(ARGUMENTS) | {"load": str(folder), "ckpt_format": "torch", "pretrained_checkpoint": None}
    with (
        mock.patch.object(checkpointing, "get_args", return_value=Namespace(**arguments)),
        mock.patch.object(checkpointing, "_load_base_checkpoint", return_value=loaded),
        mock.patch.object(checkpointing, "mpu", mock.MagicMock()),
    ):
        checkpointing.load_checkpoint([torch.nn.Module()], optimizer, None)


def refusal(load: Callable[[Path], None], folder: Path) -> str:
    try:
        load(folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def main() -> None:
    """Load in both ways, and write what came of it."""
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    patches.apply(["optimizer-resharding", "checkpoint-integrity"])
    ways = (loads_other_buckets, loads_wrong_main_parameters)
    found = {way.__name__: refusal(way, folder) for way in ways}
    (folder / f"{distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
