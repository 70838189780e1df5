"""No process outlives a training on a GPU, whoever writes its checkpoints; SIGTERM has it save first."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megacpp_mcore.model import preset
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.steps import read_steps
from tests.gpu import runs
from tests.leftovers import END_S, started

ASYNCHRONOUS = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("how", [(), ASYNCHRONOUS], ids=["synchronous", "asynchronous"])
def test_a_training_that_has_saved(corpus: str, tmp_path: Path, how: tuple[str, ...], sent: signal.Signals) -> None:
    saved = tmp_path / "saved"
    model = preset("nam56r_tiny")
    words = runs.words_of(
        model, *how, "--save", str(saved), "--save-interval", "2",
        corpus=corpus, precision="fp32", transformer_impl="local", train_iters=10_000,
    )  # fmt: skip
    with started([*runs.LAUNCH[3:], "--", *words], "successfully saved checkpoint") as training:
        os.kill(training.pid, sent)
        output, _ = training.communicate(timeout=END_S)  # as long as anything holds the output
        assert training.returncode == (0 if sent == signal.SIGTERM else -sent), output[-6000:]
    if sent == signal.SIGTERM:
        last = int((saved / "latest_checkpointed_iteration.txt").read_text())
        assert (receipts.read(saved / "observe")["status"], read_steps(saved / "observe")[-1].step) == ("stopped", last)
