"""One model in every layout: same losses and gradients, same checkpoints, and a refusal where it cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megacpp_mcore.model import preset
from megacpp_mcore.model.run import words_of
from megacpp_mcore.model.training import HYBRID
from tests import stock
from tests.distributed.comparing import SCALARS, assert_same_bytes, differing_runs, differing_scalars, tensors_of
from tests.distributed.runs import (
    COMPARED,
    LAYOUTS,
    MODEL,
    ONE,
    OVERRIDES,
    WARM_UP,
    Laboratory,
    launch,
    write_config,
)
from tests.lanes import exhaustive_but
from tests.saved import flip, tensors_in

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Relative: for losses and the gradient norm of each step, and for the norm of the first two gradients of each parameter."""

CASES: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in LAYOUTS if name != ONE]
CASES += [(name, ("--moe-token-dispatcher-type", "alltoall")) for name in ("EP 2", "TP 2 with SP, EP 4")]
# In the second virtual stage a Full layer and its Shared one are recomputed while other micro-batches pass.
CASES += [("PP 2 × VPP 2", stock.full_recompute())]
# Sums over all tokens, which Megatron does not average over the ranks.
CASES += [("CP 2", ("--calculate-per-token-loss",))]


@pytest.mark.parametrize(("name", "words"), exhaustive_but(CASES, ("PP 2 × VPP 2", ()), ("EP 2", ())))
def test_losses_gradient_norm_and_every_gradient_of_the_first_steps(
    laboratory: Laboratory, name: str, words: tuple[str, ...]
) -> None:
    expected, found = laboratory.compared(ONE), laboratory.compared(name, *words)
    assert differing_runs(expected, found, TOLERANCE, steps=COMPARED) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["CP 2", "CP 2, TP 2 with SP"])
def test_sequences_are_shared_on_hybrid_model_too(laboratory: Laboratory, name: str) -> None:
    found = laboratory.compared(name, model_class=HYBRID)
    assert differing_runs(laboratory.compared(ONE), found, TOLERANCE, steps=COMPARED) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "replicas"), [("EP 2", 1), ("TP 2 with SP", 2), ("PP 2 × VPP 2", 2), ("CP 2", 1), ("CP 2", 2)]
)
def test_a_distributed_optimizer_and_overlaps_change_nothing(laboratory: Laboratory, name: str, replicas: int) -> None:
    """With a bucket a parameter, one that is read before its gather has ended is that of the step before.

    Of EP 2 each process is a replica of all but the experts.
    """
    asked = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    words = [word for feature in asked for word in words_of(feature, True)]
    # Saved without the optimizer: megatron-core 0.19 cannot save a bucket so small that a rank has no part of it.
    words += ["--ddp-bucket-size", "1", "--no-save-optim"]
    found = laboratory.compared(name, *words, save_every=None, replicas=replicas)
    assert differing_scalars(laboratory.compared(ONE).scalars, found.scalars, TOLERANCE) == []


def test_what_is_compared_is_the_whole_model_at_work(laboratory: Laboratory) -> None:
    run = laboratory.compared(ONE)
    assert [name for name, value in tensors_of(run, COMPARED).items() if not value.norm() > 0] == []
    for name in (*SCALARS, "learning rate"):
        assert len(set(run.scalars[name].values())) == COMPARED, name
    assert (set(MODEL.layers), set(MODEL.roles)) == (set("AMER"), {None, "-", "F", "S"})


@pytest.mark.exhaustive
def test_a_stage_that_would_begin_with_a_shared_layer_is_refused(laboratory: Laboratory, tmp_path: Path) -> None:
    model = preset("nam56r_tiny")
    assert model.dsa.schedule == "-FS"
    words = stock.words(model, train_iters=1)
    words[words.index("--pipeline-model-parallel-size") + 1] = "2"
    status, output = launch(["--", *words], write_config(tmp_path / "model.yaml", {}), 2)
    assert status != 0
    assert "error: nam56r_tiny: with model chunks 1–6, 7–12, the first sparse layer of a chunk would be" in output
    assert "layer 9. " in output
    assert "adopt the promoted schedule '-FF'" in output
    # What every run prints once it has weights, and once it trains.
    for sign in ("number of parameters on", "iteration        1/"):
        assert sign in laboratory.compared(ONE).output
        assert sign not in output


@pytest.mark.parametrize(
    "name", exhaustive_but(["PP 2 × VPP 2", "CP 2", "EP 2", "TP 2 with SP", "TP 4 with SP"], "PP 2 × VPP 2")
)
def test_a_checkpoint_of_any_layout_loads_in_one_process(laboratory: Laboratory, name: str) -> None:
    source = laboratory.compared(name)
    expected = source.tensors(COMPARED)
    assert any(key.startswith("optimizer.") for key in expected)
    assert_same_bytes(expected, laboratory.moved(source, ONE).tensors(COMPARED))


@pytest.mark.exhaustive
def test_weights_and_optimizer_state_move_from_layout_to_layout(laboratory: Laboratory) -> None:
    """Of four processes each, and back into one, byte for byte."""
    run = laboratory.compared(ONE)
    expected = run.tensors(COMPARED)
    for name in ("TP 2 with SP, EP 4", "PP 2 × VPP 2, EP 2", "CP 4", "EP 4", "TP 4 with SP", "CP 2, TP 2 with SP", ONE):
        run = laboratory.moved(run, name)
        assert_same_bytes(expected, run.tensors(COMPARED))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["TP 2 with SP", "PP 2 × VPP 2", "CP 2"])
def test_the_dense_warm_up_of_the_indexer(name: str, tmp_path: Path) -> None:
    """Two of four steps; the third selects by what was learned."""
    overrides = {**OVERRIDES, "dsa": {**OVERRIDES["dsa"], "warmup_steps": 2}}
    warmed = Laboratory(tmp_path, overrides=overrides)
    expected, found = warmed.compared(ONE).scalars, warmed.compared(name).scalars
    assert differing_scalars(expected, found, TOLERANCE) == []
    assert all(expected["indexer loss"][step] > 0 for step in range(1, COMPARED + 1))


def test_a_damaged_newest_checkpoint_is_refused_or_passed_over_and_the_run_repeats_bit_for_bit(
    laboratory: Laboratory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processes, which end as a whole where it is refused: from the newest whole one, if their file says so."""
    run, saved = laboratory.compared("EP 2"), tmp_path / "saved"
    shutil.copytree(run.checkpoints, saved)
    flip(saved / f"iter_{COMPARED:07d}" / "__1_0.distcp", at=100)
    options = write_config(tmp_path / "model.yaml", OVERRIDES)
    words = laboratory.training_words(LAYOUTS["EP 2"], train_iters=COMPARED)
    words += [*WARM_UP, "--save", str(saved), "--load", str(saved), "--save-interval", "1"]
    with monkeypatch.context() as patch:
        patch.setenv("WHOLE_END", "1")
        status, output = launch(["--no-observe", "--", *words], options, 2)
    assert status != 0
    assert f"iteration{COMPARED:9}/" not in output
    assert f"error: the checkpoint {saved}/iter_{COMPARED:07d} is damaged: __1_0.distcp" in output, output[-4000:]
    with options.open("a") as file:
        file.write("checkpoints: {load_newest_whole: true}\n")
    status, output = launch(["--no-observe", "--", *words], options, 2)
    assert status == 0, output[-4000:]
    assert f"iteration{COMPARED:9}/" in output
    assert f"loading the newest whole checkpoint, {saved}/iter_{COMPARED - 1:07d}" in output
    assert_same_bytes(run.tensors(COMPARED), tensors_in(saved / f"iter_{COMPARED:07d}"))


@pytest.mark.exhaustive
def test_no_two_experts_start_equal_and_each_is_the_same_in_both_layouts(laboratory: Laboratory) -> None:
    untrained = [laboratory.untrained(name) for name in (ONE, "EP 2")]
    assert [run.scalars["learning rate"] for run in untrained] == [{1: 0.0}] * 2
    one, two = (run.tensors(1) for run in untrained)
    names = [name for name in two if ".experts.experts." in name]
    assert len(names) == 2 * len(MODEL.layer_numbers("E"))
    for matrix in ("linear_fc1", "linear_fc2"):
        experts = torch.stack([expert.flatten() for name in names if matrix in name for expert in one[name]])
        assert len(experts) == MODEL.moe.experts * len(MODEL.layer_numbers("E"))
        # None is another's copy or near copy, or of another scale.
        assert torch.corrcoef(experts).fill_diagonal_(0).abs().max() < 0.1
        assert ((experts.std(1) / experts.std(1).mean() - 1).abs() < 0.1).all()
    assert_same_bytes({name: one[name] for name in names}, {name: two[name] for name in names})
