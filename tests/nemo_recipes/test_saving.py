"""A Bridge run claims its save folder and does not overwrite an existing checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.nemo_recipes.run import claim_save_folder, doubt_about
from tests.errors import raises


def config(save: Path | None, **checkpoint: Any) -> Any:
    defaults = {"load": None, "ckpt_step": None, "finetune": False, "pretrained_checkpoint": None}
    return SimpleNamespace(
        checkpoint=SimpleNamespace(save=save and str(save), **defaults | checkpoint),
        dist=SimpleNamespace(distributed_timeout_minutes=10),
    )


def test_a_run_claims_its_folder_unless_it_would_overwrite_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / checkpoint_folder.TRACKER).write_text("6")
    try:
        for options in ({}, {"load": str(tmp_path), "finetune": True}):
            with raises(CheckpointError, tmp_path, "iteration 6", f"--load {tmp_path}"):
                claim_save_folder(config(tmp_path, **options))
        claim_save_folder(config(None))
        assert checkpoint_folder._claimed is None
        claim_save_folder(config(tmp_path, load=str(tmp_path)))
        assert checkpoint_folder._claimed == str(tmp_path)
    finally:
        checkpoint_folder.release()


def test_another_users_checkpoint_is_said_to_need_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bridge's own loader unpickles what it finds."""
    resuming = config(None, load=str(tmp_path))
    assert doubt_about(resuming) is None
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    for named in ("load", "pretrained_checkpoint"):
        assert str(tmp_path) in str(doubt_about(config(None, **{named: str(tmp_path)})))
    for load in (None, "msc://bucket/saved", str(tmp_path / "none")):
        assert doubt_about(config(None, load=load)) is None
