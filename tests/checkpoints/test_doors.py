"""A training's checkpoint as 0.1.0 would have saved it: refused at the door, converted, and gone on with, to the bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.checkpoints import convert as checkpoint_convert
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe.steps import read_steps
from tests import forks
from tests.saved import as_saved_by_0_1_0, objects_in, tensors_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OVERRIDES: Mapping[str, Any] = {"seq_length": 32, "dsa": {"topk": 8}, "mamba3": {"out_norm": False}}
MODEL = with_overrides(preset("nam56r_tiny"), OVERRIDES)


def launch(folder: Path, name: str, *extra: str) -> tuple[int, dict[int, dict[str, float]], str]:
    """Train the model on mock data for four steps; the status, every step's losses and gradient norm, and the output."""
    config = folder / "model.yaml"
    config.write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": dict(OVERRIDES)}))
    training = Training(
        device="cpu",
        precision="fp32",
        transformer_impl="local",
        tokenizer=tokenizer_words(MODEL),
        data=("--mock-data",),
        global_batch_size=2,
        train_iters=4,
        extra=extra,
    )
    recorded = folder / f"{name}.steps"
    options = ["--device", "cpu", "--no-observe", "--record-steps", str(recorded)]
    done = forks.run(
        ["-m", "megacpp_mcore", "launch", *options, "--", *lower(MODEL, Layout(), training)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(config)},
    )
    read = {step.step: {**step.losses, "norm": step.grad_norm or 0.0} for step in read_steps(recorded)}
    return done.returncode, read, done.stdout + done.stderr


def test_refused_converted_and_gone_on_with(tmp_path: Path) -> None:
    """Four steps, saved after the second: what the converted checkpoint goes on with are the third and fourth."""
    status, whole, output = launch(tmp_path, "first", "--save", str(tmp_path / "saved"), "--save-interval", "2")
    assert status == 0, output[-4000:]
    iteration = "iter_0000002"
    as_saved_by_0_1_0(tmp_path / "saved" / iteration, tmp_path / "old" / iteration, MODEL)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("2")
    status, steps, output = launch(tmp_path, "refused", "--load", str(tmp_path / "old"), "--finetune")
    assert (status, steps) == (2, {})
    assert f"run `megacpp-mcore checkpoint convert {tmp_path}/old/{iteration} NEW`" in output
    done = checkpoint_convert.convert(tmp_path / "old", tmp_path / "new")
    assert done.layers == sum(layer in "MR" for layer in MODEL.layers)
    found, expected = (tensors_in(tmp_path / name / iteration) for name in ("new", "saved"))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert objects_in(tmp_path / "new" / iteration) == objects_in(tmp_path / "saved" / iteration)
    status, resumed, output = launch(tmp_path, "from new", "--load", str(tmp_path / "new"))
    assert status == 0, output[-4000:]
    assert list(resumed) == [3, 4]
    assert resumed == {step: whole[step] for step in resumed}
