"""nam56r_tiny in bf16 with Transformer Engine resumes from its checkpoint bit for bit, its fp32 parameters included."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megacpp_mcore.model import preset
from megacpp_mcore.observe.steps import read_steps
from tests.distributed.comparing import assert_same_bytes
from tests.gpu import runs
from tests.saved import tensors_in

STEPS, HALF = 6, 3
FULLY = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
OPTIMIZERS = {
    "plain": ("optimizer.state.fp32_param.", ()),
    "distributed": ("optimizer.state.param.", FULLY),
    "precision-aware": (
        "",
        (*FULLY, "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
    ),
}
"""Prefix of the main parameters in the checkpoint, and the words that ask for the optimizer."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)


@dataclass(frozen=True)
class Trained:
    """What a run left: the scalars of each step, and the tensors of its last checkpoint."""

    scalars: dict[int, dict[str, float]]
    tensors: dict[str, torch.Tensor]


def train(corpus: str, folder: Path, name: str, *extra: str) -> Trained:
    """All steps, or those after the checkpoint that ``extra`` names; saved at half and in the end."""
    record, saved = folder / f"{name}.observe", folder / name
    save = ("--ckpt-format", "torch_dist", "--save", str(saved), "--save-interval", str(HALF), "--deterministic-mode")
    words = runs.words_of(
        preset("nam56r_tiny"), *save, *extra,
        corpus=corpus, micro_batch_size=2, global_batch_size=4, train_iters=STEPS, learning_rate=1e-3,
    )  # fmt: skip
    runs.train(words, record)
    return Trained({step.step: step.values() for step in read_steps(record)}, tensors_in(saved / f"iter_{STEPS:07d}"))


def assert_main_parameters_are_the_models(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    """Fail unless each main parameter, rounded, is the model's parameter of its name, and some exist only in fp32."""
    mains = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
    assert len(mains) > 50
    assert [name for name, main in mains.items() if not torch.equal(main.to(tensors[name].dtype), tensors[name])] == []
    moments = {key.removeprefix("optimizer.state.exp_avg.") for key in tensors if ".exp_avg." in key}
    in_fp32 = {name for name in moments if tensors[name].dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in in_fp32} >= {"dt_bias", "b_bias", "mimo_o", "W"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_repeats_the_uninterrupted_one(corpus: str, tmp_path: Path, optimizer: str) -> None:
    prefix, words = OPTIMIZERS[optimizer]
    baseline = train(corpus, tmp_path, "whole", *words)
    load = ("--load", str(tmp_path / "whole"), "--ckpt-step", str(HALF))
    resumed = train(corpus, tmp_path, "resumed", *words, *load)
    assert list(baseline.scalars) == list(range(1, STEPS + 1))
    assert resumed.scalars == {step: baseline.scalars[step] for step in range(HALF + 1, STEPS + 1)}
    if prefix:
        assert_main_parameters_are_the_models(baseline.tensors, prefix)
    else:
        remainders = [t.dtype for name, t in baseline.tensors.items() if name.startswith("optimizer.state.remainder.")]
        assert {*remainders} == {torch.int16}
        assert len(remainders) > 50
    assert_same_bytes(baseline.tensors, resumed.tensors)
