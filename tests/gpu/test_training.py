"""nam56r_tiny trains on a GPU through the stock loop, with Megatron's own layers and with Transformer Engine's."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, "-W", "ignore", "-m", "megacpp_mcore", "data", "corpus", "--output", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder / "stdlib_train"


def _train(corpus: Path, folder: Path, *options: str) -> dict[str, str]:
    output = folder / "train.csv"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.train", "nam56r_tiny", "--data", str(corpus)]
    command += ["--steps", str(STEPS), "--warmup", "2", "--micro-batch-size", "4", "--global-batch-size", "8"]
    done = subprocess.run(
        [*command, "--lr", "4e-3", "--output", str(output), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with output.open() as source:
        (row,) = csv.DictReader(source)
    return row


@pytest.mark.parametrize(("impl", "precision"), [("local", "fp32"), ("local", "bf16"), ("transformer_engine", "bf16")])
def test_tiny_trains(corpus: Path, tmp_path: Path, impl: str, precision: str) -> None:
    row = _train(corpus, tmp_path, "--impl", impl, "--precision", precision)
    assert float(row["first_loss"]) == pytest.approx(5.95, abs=0.25)  # uniform over 384 padded ids is ln 384 = 5.95
    assert float(row["last_loss"]) < 0.75 * float(row["first_loss"])
