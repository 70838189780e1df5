"""One process of four is killed in the middle of a run: the others end by themselves, and a restart goes on bit for bit."""

from __future__ import annotations

import pytest

from megacpp_mcore.model import Layout
from tests.distributed.killing import STEPS, Job, check_a_killed_run
from tests.distributed.runs import Laboratory

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

LAYOUT = Layout(pipeline=2, expert=2)
TIMEOUT_S = 60
"""In which the others have to end. They find a closed connection at once; Megatron's own timeout is ten minutes."""


def job_of(laboratory: Laboratory, name: str) -> Job:
    words = laboratory.training_words(LAYOUT, train_iters=STEPS, learning_rate=1e-3)
    return Job(laboratory.folder, name, words, "cpu", MEGACPP_CONFIG=str(laboratory.config))


@pytest.fixture(scope="module")
def whole(laboratory: Laboratory) -> Job:
    """A run that nothing happens to."""
    job = job_of(laboratory, "whole")
    job.finish()
    return job


@pytest.mark.parametrize("seed", range(20))
def test_the_others_end_and_a_restart_goes_on_bit_for_bit(laboratory: Laboratory, whole: Job, seed: int) -> None:
    check_a_killed_run(whole, job_of(laboratory, f"killed {seed}"), seed, TIMEOUT_S)
