"""A checkpoint of two processes is damaged: a restart continues bit for bit from the newest whole one, if its file says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_mcore.model import Layout, preset, with_overrides
from tests import stock, tiny_run
from tests.distributed.comparing import assert_same_bytes
from tests.distributed.runs import SMALL, launch, write_config
from tests.saved import tensors_in


@pytest.mark.slow
def test_a_damaged_newest_one_is_passed_over_and_the_run_continues_bit_for_bit(tmp_path: Path) -> None:
    data, saved = str(tiny_run.make_data(tmp_path) / "text"), tmp_path / "saved"
    with (options := write_config(tmp_path / "model.yaml", SMALL)).open("a") as file:
        file.write("checkpoints: {load_newest_whole: true}\n")
    words = stock.words(
        with_overrides(preset("nam56r_tiny"), SMALL), "--save-interval", "1", "--deterministic-mode", "--save", str(saved),
        "--load", str(saved), data=("--data-path", data, "--split", "90,10,0"), layout=Layout(expert=2), global_batch_size=2,
        train_iters=2,
    )  # fmt: skip

    def train(*more: str) -> str:
        status, output = launch(["--no-observe", "--", *words, *more], options, 2)
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
