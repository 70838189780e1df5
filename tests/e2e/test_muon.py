"""The recipe with Muon, as Megatron reads it, and trained on the CPU where emerging-optimizers is installed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.model.recipes import RECIPES
from tests import stock, tiny_run

RUN = RECIPES["nam56r_tiny_pretrain_1cpu_fp32_muon"].run


def test_megatron_reads_an_optimizer_at_adamws_learning_rate() -> None:
    text = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "260")
    arguments = stock.parse(list(lower(dataclasses.replace(RUN, training=dataclasses.replace(RUN.training, data=text)))))
    assert (arguments.optimizer, arguments.muon_scalar_optimizer, arguments.lr) == ("muon", "adam", 4e-3)
    assert (arguments.muon_scale_mode, arguments.muon_extra_scale_factor) == ("spectral", 0.2)


@pytest.mark.slow
def test_it_trains(data: Path) -> None:
    pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs emerging-optimizers and absl-py")
    words = tiny_run.words(data, 6, "--optimizer", "muon", "--muon-extra-scale-factor", "0.2")
    program = ("megacpp_mcore", "launch", "--device", "cpu", "--verbose", "--")
    output = tiny_run.start(program, words, data).finish()
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", output)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
