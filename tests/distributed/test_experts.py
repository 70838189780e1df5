"""Our routed experts and stock's: one checkpoint, optimizer included."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megacpp_mcore.backends import STOCK
from megacpp_mcore.backends.candidates import EXPERTS, OWN_EXPERTS
from tests.distributed.comparing import differing_scalars, differing_tensors
from tests.distributed.runs import MAIN, RESUMED, Laboratory

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # the refusal: tests/checkpoints/test_layout.py

TOLERANCE = 1e-6
SMALL = {"pattern": "AE", "depth": 2, "dsa": {"schedule": "-"}, "mtp": {"depth": 0}, "seq_length": 64}


class Experts(Laboratory):
    """Runs whose experts are said."""

    def choose(self, experts: str) -> None:
        """Whose experts the next runs have."""
        options = yaml.safe_load(self.config.read_text())
        self.config.write_text(yaml.safe_dump({**options, "backends": {EXPERTS: experts}}))


@pytest.fixture
def laboratory(tmp_path: Path) -> Iterator[Experts]:
    yield Experts(tmp_path, overrides=SMALL, words=("--use-distributed-optimizer",))
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(("first", "then"), [(OWN_EXPERTS, STOCK), (STOCK, OWN_EXPERTS)])
def test_a_run_goes_on_with_the_others_experts(laboratory: Experts, first: str, then: str) -> None:
    """Losses, gradient norm, and every tensor of the last checkpoint; the norm alone is summed in another order."""
    laboratory.words += ("--dist-ckpt-optim-fully-reshardable",)
    laboratory.choose(first)
    whole = laboratory.main()
    laboratory.choose(then)
    resumed = laboratory.resumed()
    later = whole.after(RESUMED)
    assert {"lm loss", "z_loss", "grad norm"} < later.keys()
    assert differing_scalars(later, resumed.scalars, TOLERANCE, [*later]) == []
    assert differing_tensors(whole.tensors(MAIN), resumed.tensors(MAIN), TOLERANCE) == []
