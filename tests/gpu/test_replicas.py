"""Two processes over NCCL, lowered as a recipe is, train as one: replicas with distributed optimizer and overlaps, or cut by
FSDP2, and experts divided over both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments.launch_flags import TORCH_FSDP
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.model.training import Training
from megacpp_mcore.policy.overlap import CONNECTIONS
from tests.distributed.comparing import differing_scalars
from tests.distributed.runs import read_scalars

ROOT = Path(__file__).parents[2]
ALONE = Layout()
STEPS, TOLERANCE, BF16_TOLERANCE = 6, 1e-5, 2e-2
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


def train(
    corpus: str, record: Path, processes: int, *extra: str, precision: str = "fp32", layout: Layout = ALONE
) -> dict[str, dict[int, float]]:
    """The scalars of every step, by name."""
    model = preset("nam56r_tiny")
    training = Training(
        precision=precision,
        # It multiplies fp32 as TF32.
        transformer_impl="local" if precision == "fp32" else "transformer_engine",
        data=("--data-path", corpus, "--split", "100,0,0"),
        tokenizer=tokenizer_words(model, data=corpus),
        micro_batch_size=2,
        global_batch_size=8,
        processes=processes,
        train_iters=STEPS,
        learning_rate=1e-3,
        extra=("--lr-warmup-iters", "1", *extra),
    )
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", "launch", "--device", "cuda"]
    words = lower(model, layout, training)
    assert ("--overlap-param-gather" in words) == (processes > 1 and TORCH_FSDP not in extra)
    done = subprocess.run(
        [*command, "--nproc", str(processes), "--observe", str(record), "--", *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in (plugin_config.VARIABLE, CONNECTIONS)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return read_scalars(record)


@pytest.fixture(scope="module")
def one(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    return train(corpus, tmp_path_factory.mktemp("one") / "observe", 1)


@pytest.mark.parametrize(
    "extra",
    [(), ("--ddp-bucket-size", "1"), (TORCH_FSDP,)],
    ids=["Megatron's buckets", "a bucket a parameter", "FSDP2"],
)
def test_two_replicas_train_as_one_process(
    one: dict[str, dict[int, float]], corpus: str, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    two = train(corpus, tmp_path / "observe", 2, *extra)
    assert len(two["lm loss"]) == STEPS
    differing = differing_scalars(one, two, TOLERANCE, SCALARS)
    assert not differing, "\n".join(differing)


def test_divided_experts_train_as_one_process(one: dict[str, dict[int, float]], corpus: str, tmp_path: Path) -> None:
    two = train(corpus, tmp_path / "observe", 2, layout=Layout(expert=2))
    assert len(two["lm loss"]) == STEPS
    differing = differing_scalars(one, two, TOLERANCE, SCALARS)
    assert not differing, "\n".join(differing)


def test_fsdp_in_bf16_with_transformer_engine(corpus: str, tmp_path: Path) -> None:
    """Blocks have parameters of two dtypes; gradients are summed over the replicas in bf16, without FSDP2 in fp32."""
    whole, cut = (
        train(corpus, tmp_path / f"observe {len(extra)}", 2, *extra, precision="bf16") for extra in ((), (TORCH_FSDP,))
    )
    assert len(cut["lm loss"]) == STEPS
    differing = differing_scalars(whole, cut, BF16_TOLERANCE, SCALARS)
    assert not differing, "\n".join(differing)
