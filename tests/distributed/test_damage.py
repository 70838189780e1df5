"""A checkpoint of two processes is damaged: a restart names the file, or continues bit for bit from the newest whole one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megacpp_mcore import settings
from megacpp_mcore.model import Layout
from tests import forks, tiny_run
from tests.distributed.comparing import assert_same_bytes
from tests.saved import tensors_in

pytestmark = pytest.mark.slow

STEPS = 3
ASYNC = ("--async-save", "--async-strategy", "mcore")


def train(data: Path, saved: Path, *words: str, whole: bool = False) -> tuple[int, str]:
    """Two processes that save to ``saved``, and continue from there; ``whole``: their file asks for the newest whole one."""
    options = data / "config.yaml"
    if whole:
        options = data / "whole.yaml"
        options.write_text((data / "config.yaml").read_text() + "checkpoints: {load_newest_whole: true}\n")
    stock = tiny_run.words(data, STEPS, "--save-interval", "1", *words, "--deterministic-mode", layout=Layout(expert=2))
    launch = ["-m", "megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--no-observe", "--", *stock]
    launch += ["--save", str(saved), "--load", str(saved)]
    env = {"PYTHONPATH": str(tiny_run.ROOT), "OMP_NUM_THREADS": "1", settings.VARIABLE: str(options)}
    return forks.run_ranks(launch, 2, env=os.environ | env)


def test_the_file_is_named_and_the_newest_whole_one_continues_bit_for_bit(tmp_path: Path) -> None:
    data, saved = tiny_run.make_data(tmp_path), tmp_path / "saved"
    status, output = train(data, saved, *ASYNC)
    assert status == 0, output[-4000:]
    last = tensors_in(saved / "iter_0000003")
    shutil.rmtree(saved / "iter_0000003")
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    shard = saved / "iter_0000002" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    status, output = train(data, saved)
    assert status == 2, output[-4000:]
    assert f"error: the checkpoint {saved}/iter_0000002 is damaged: __1_0.distcp: its content is not what was" in output
    assert f"the newest whole checkpoint is {saved}/iter_0000001: " in output

    status, output = train(data, saved, whole=True)
    assert status == 0, output[-4000:]
    assert f"loading the newest whole checkpoint, {saved}/iter_0000001" in output
    assert_same_bytes(last, tensors_in(saved / "iter_0000003"))
