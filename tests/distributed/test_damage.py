"""A checkpoint of two processes is damaged: a restart continues bit for bit from the newest whole one, if its file says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megacpp_mcore import settings
from megacpp_mcore.model import Layout
from tests import forks, tiny_run
from tests.distributed.comparing import assert_same_bytes
from tests.saved import tensors_in


@pytest.mark.slow
def test_a_damaged_newest_one_is_passed_over_and_the_run_continues_bit_for_bit(tmp_path: Path) -> None:
    data, saved = tiny_run.make_data(tmp_path), tmp_path / "saved"
    with (options := data / "config.yaml").open("a") as file:
        file.write("checkpoints: {load_newest_whole: true}\n")
    words = tiny_run.words(data, 2, "--save-interval", "1", "--deterministic-mode", layout=Layout(expert=2))
    words += ["--save", str(saved), "--load", str(saved)]

    def train(*more: str) -> str:
        launch = ["-m", "megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--no-observe", "--", *words, *more]
        env = {"PYTHONPATH": str(tiny_run.ROOT), "OMP_NUM_THREADS": "1", settings.VARIABLE: str(options)}
        status, output = forks.run_ranks(launch, 2, env=os.environ | env)
        assert status == 0, output[-4000:]
        return output

    train("--async-save", "--async-strategy", "mcore")
    last = tensors_in(saved / "iter_0000002")
    shard = saved / "iter_0000002" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"loading the newest whole checkpoint, {saved}/iter_0000001" in train()
    assert_same_bytes(last, tensors_in(saved / "iter_0000002"))
