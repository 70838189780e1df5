"""One of four GPU processes is killed in the middle of a run over NCCL: the others end, and a restart continues bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from megacpp_mcore.model import Layout, preset
from tests.distributed.killing import PROCESSES, STEPS, Job, check_a_killed_run
from tests.gpu import runs

TIMEOUT_S = 180
"""NCCL's watchdog ends a process a minute after its collective began, and may take another to have written why."""

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.device_count() < PROCESSES,
        reason=f"{PROCESSES} GPUs are needed, and {torch.cuda.device_count()} seen",
    ),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
]


def job_of(corpus: str, folder: Path, name: str) -> Job:
    words = runs.words_of(
        preset("nam56r_tiny"), "--distributed-timeout-minutes", "1",
        corpus=corpus, layout=Layout(tensor=2, sequence_parallel=True, expert=2), processes=PROCESSES,
        train_iters=STEPS, learning_rate=1e-3,
    )  # fmt: skip
    words[words.index("--log-interval") + 1] = "1"
    return Job(folder, name, words, "cuda")


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nothing happens to."""
    job = job_of(corpus, tmp_path_factory.mktemp("whole"), "whole")
    job.finish()
    return job


@pytest.mark.parametrize("seed", range(5))
def test_the_others_end_and_a_restart_goes_on_bit_for_bit(whole: Job, corpus: str, tmp_path: Path, seed: int) -> None:
    check_a_killed_run(whole, job_of(corpus, tmp_path, "killed"), seed, TIMEOUT_S)
