"""The folder that a Bridge run saves in is its own, and what is in there is not overwritten."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.nemo_recipes.run import claim_save_folder
from tests.errors import raises


def config(save: Path | None, **checkpoint: Any) -> Any:
    defaults = {"load": None, "ckpt_step": None, "finetune": False}
    return SimpleNamespace(
        checkpoint=SimpleNamespace(save=save and str(save), **defaults | checkpoint),
        dist=SimpleNamespace(distributed_timeout_minutes=10),
    )


def test_a_run_claims_its_folder_unless_it_would_overwrite_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / checkpoint_folder.TRACKER).write_text("6")
    try:
        for given in ({}, {"load": str(tmp_path), "finetune": True}):
            with raises(CheckpointError, tmp_path, "iteration 6", f"--load {tmp_path}"):
                claim_save_folder(config(tmp_path, **given))
        claim_save_folder(config(None))
        assert checkpoint_folder._claimed is None
        claim_save_folder(config(tmp_path, load=str(tmp_path)))
        assert checkpoint_folder._claimed == str(tmp_path)
    finally:
        checkpoint_folder.release()
