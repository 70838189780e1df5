"""Two replicas over NCCL, lowered as a recipe is, with distributed optimizer and overlaps, train as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.model.training import Training
from tests.distributed.comparing import differing_scalars
from tests.distributed.runs import read_scalars

ROOT = Path(__file__).parents[2]
STEPS, TOLERANCE = 6, 1e-5
SCALARS = ("lm loss", "mtp_1 loss", "seq_load_balancing_loss", "z_loss", "grad norm")
"""Of the indexer's loss, some 1e-7, less than that part is the same once a near tie in the selection of keys tips over."""

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"two GPUs are needed, and {torch.cuda.device_count()} seen"
    ),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", "data", "corpus", "--output", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return str(folder / "stdlib_train")


def train(corpus: str, record: Path, processes: int, *extra: str) -> dict[str, dict[int, float]]:
    """The scalars of every step, by name; fp32."""
    model = preset("nam56r_tiny")
    training = Training(
        precision="fp32",
        transformer_impl="local",  # Transformer Engine multiplies fp32 as TF32
        data=("--data-path", corpus, "--split", "100,0,0"),
        tokenizer=tokenizer_words(model, data=corpus),
        micro_batch_size=2,
        global_batch_size=8,
        processes=processes,
        train_iters=STEPS,
        learning_rate=1e-3,
        extra=("--lr-warmup-iters", "1", *extra),
    )
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", "launch", "--device", "cuda", "--no-observe"]
    words = lower(model, Layout(), training)
    assert ("--overlap-param-gather" in words) == (processes > 1)
    done = subprocess.run(
        [*command, "--nproc", str(processes), "--record-steps", str(record), "--", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != plugin_config.VARIABLE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return read_scalars(record)


@pytest.mark.parametrize("extra", [(), ("--ddp-bucket-size", "1")], ids=["Megatron's buckets", "a bucket a parameter"])
def test_two_replicas_train_as_one_process(corpus: str, tmp_path: Path, extra: tuple[str, ...]) -> None:
    one, two = (train(corpus, tmp_path / f"{processes}.jsonl", processes, *extra) for processes in (1, 2))
    assert len(two["lm loss"]) == STEPS
    differing = differing_scalars(one, two, TOLERANCE, SCALARS)
    assert not differing, "\n".join(differing)
