"""In bf16, with the parameters that stay in fp32: runs go on from their checkpoints bit for bit, in every format and layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch

from megacpp_mcore.model import Layout, memory
from megacpp_mcore.model import run as model_run
from megacpp_mcore.model.training import GPT, HYBRID, Training
from tests.distributed.comparing import assert_same_bytes
from tests.distributed.runs import Laboratory, Run

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

OVERRIDES = {"seq_length": 64}
STEPS, HALF = 4, 2
PLAIN = TORCH_DIST = ("--ckpt-format", "torch_dist")
DISTRIBUTED = ("--use-distributed-optimizer",)
FULLY = (*DISTRIBUTED, *TORCH_DIST, "--dist-ckpt-optim-fully-reshardable")
AWARE = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
OPTIMIZERS = {"plain": PLAIN, "distributed": FULLY, "precision-aware": (*FULLY, *AWARE)}
ONE = Layout()
LAYOUTS = {
    "DP 2": (Layout(), 2),
    "EP 2": (Layout(expert=2), 2),
    "TP 2 with SP": (Layout(tensor=2, sequence_parallel=True), 2),
}


class Runs(Laboratory):
    """Trains nam56r_tiny in bf16, each run once; all steps in one process, or those after a checkpoint."""

    def whole(self, optimizer: str) -> Run:
        """All steps in one process, saved at half and in the end."""
        return self.steps(f"whole {optimizer}", OPTIMIZERS[optimizer])

    def steps(
        self,
        name: str,
        words: Sequence[str],
        *,
        layout: Layout = ONE,
        processes: int = 1,
        model_class: str = GPT,
        load: Run | None = None,
        step: int = HALF,
    ) -> Run:
        """A run of all steps, or of those after ``step`` of ``load``, from whatever format that has."""
        from_: tuple[str, ...] = ()
        if load is not None:
            from_ = ("--load", str(load.checkpoints), "--ckpt-step", str(step), "--auto-detect-ckpt-format")
        every, replicas = (1 if model_class == HYBRID else HALF), processes // layout.processes
        return self.run(name, layout, STEPS, (*words, *from_), save_every=every, replicas=replicas, model_class=model_class)


LABORATORY = functools.partial(
    Runs,
    overrides=OVERRIDES,
    # Clipping is out of reach: a norm whose sum goes another way round would clip to other last digits.
    words=("--clip-grad", "1e6"),
    precision="bf16",
    micro_batch_size=1,
    global_batch_size=2,
)


def assert_goes_on(whole: Run, resumed: Run, first: int = HALF + 1) -> None:
    """Fail unless ``resumed`` repeats ``whole`` from step ``first`` on: scalars, and every tensor that is saved in the end."""
    assert {"lm loss", "mtp_1 loss", "grad norm"} <= resumed.scalars.keys(), resumed.output[-8000:]
    assert resumed.scalars == whole.after(first - 1)
    assert_same_bytes(whole.tensors(STEPS), resumed.tensors(STEPS))


def parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's own part of a checkpoint, as far as it is trained."""
    return {name: tensors[name] for name in (key.partition("exp_avg.")[2] for key in tensors) if name and name in tensors}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_goes_on(laboratory: Runs, optimizer: str) -> None:
    whole = laboratory.whole(optimizer)
    assert_goes_on(whole, laboratory.steps(f"resumed {optimizer}", OPTIMIZERS[optimizer], load=whole))


@pytest.mark.parametrize("words", [("--ckpt-format", "torch"), TORCH_DIST], ids=["torch", "buckets"])
def test_a_run_goes_on_from_formats_without_names(laboratory: Runs, words: tuple[str, ...]) -> None:
    """The first run ends there: of ``torch`` checkpoints upstream loads the last state whatever ``--ckpt-step`` says."""
    source = laboratory.steps(" ".join(words), (*DISTRIBUTED, *AWARE, *words, "--exit-interval", str(HALF)))
    resumed = laboratory.steps(f"from {' '.join(words)}", OPTIMIZERS["precision-aware"], load=source)
    assert_goes_on(laboratory.whole("precision-aware"), resumed)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_two_processes_goes_on(laboratory: Runs, name: str) -> None:
    layout, processes = LAYOUTS[name]
    whole = laboratory.steps(name, FULLY, layout=layout, processes=processes)
    assert_goes_on(whole, laboratory.steps(f"{name}, resumed", FULLY, layout=layout, processes=processes, load=whole))
    tensors, prefix = whole.tensors(STEPS), "optimizer.state.param."  # of the main parameters in fp32
    for key, value in parameters(tensors).items():
        assert torch.equal(tensors[prefix + key].to(value.dtype), value), key


def test_two_processes_train_what_one_does_and_go_on_with_its_checkpoint(laboratory: Runs) -> None:
    """DP 2 from the start, with either optimizer, and from one process's checkpoint: the sum of two gradients is the same."""
    one = laboratory.whole("distributed")
    from_one = laboratory.steps("DP 2 from DP 1", FULLY, processes=2, load=one)
    two, plain = laboratory.steps("DP 2", FULLY, processes=2), laboratory.steps("DP 2 plain", PLAIN, processes=2)
    overlapped = laboratory.steps("DP 2 overlapped", (*FULLY, "--overlap-grad-reduce", "--overlap-param-gather"), processes=2)
    for found in (two, plain, overlapped, from_one):
        assert_same_bytes(parameters(one.tensors(STEPS)), parameters(found.tensors(STEPS)))
    assert_same_bytes(one.tensors(STEPS), from_one.tensors(STEPS))


def test_states_of_16_bits_take_what_is_estimated(laboratory: Runs) -> None:
    """Weights apart, which are the model's; of nam56r_tiny, more is in fp32 than of nam56r."""
    whole = laboratory.whole("precision-aware")
    estimate = memory.states(model_run.Run(whole.model, training=Training(), asked=model_run.NARROW))
    assert estimate is not None
    found = sum(tensor.nbytes for name, tensor in whole.tensors(STEPS).items() if name.startswith("optimizer.state."))
    assert found == pytest.approx(estimate.main_weights + estimate.moments, rel=0.02)


def test_two_processes_go_on_with_the_remainders_of_one(laboratory: Runs) -> None:
    one, words = laboratory.whole("precision-aware"), OPTIMIZERS["precision-aware"]
    overlapped = (*words, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "20000")
    assert_same_bytes(
        one.tensors(STEPS), laboratory.steps("DP 2 of remainders", overlapped, processes=2, load=one).tensors(STEPS)
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_remainders_go_to_another_layout(laboratory: Runs, name: str) -> None:
    whole, (layout, processes) = laboratory.whole("precision-aware"), LAYOUTS[name]
    words = (*OPTIMIZERS["precision-aware"], "--load", str(whole.checkpoints))
    replicas = processes // layout.processes
    moved = laboratory.run(f"remainders to {name}", layout, STEPS, words, save_only=True, replicas=replicas)
    assert_same_bytes(whole.tensors(STEPS), moved.tensors(STEPS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_class_goes_on_with_the_others_checkpoint(laboratory: Runs, optimizer: str) -> None:
    words, whole = OPTIMIZERS[optimizer], laboratory.whole(optimizer)
    hybrid = laboratory.steps(f"hybrid {optimizer}", words, model_class=HYBRID, load=whole)
    assert_goes_on(whole, hybrid)
    back = laboratory.steps(f"back {optimizer}", words, load=hybrid, step=HALF + 1)
    assert_goes_on(whole, back, first=HALF + 2)
