"""In bf16, with the parameters that stay in fp32: runs go on from their checkpoints bit for bit, in every format and layout.

Checkpoints are compared by name. The plain optimizer's and the distributed one's get their names in two different ways, and
training goes by neither; so that both of them hold the same under the same name says that it is the right one.
"""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from tests import stock
from tests.distributed.comparing import assert_same_bytes
from tests.distributed.runs import Run, launch, read_scalars, write_config

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

OVERRIDES = {"seq_length": 64}
MODEL = with_overrides(preset("nam56r_tiny"), OVERRIDES)
STEPS, HALF = 4, 2
FP32 = {"dt_bias", "D", "b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o", "A_log", "W"}
"""The last words of the names of the parameters that M and R layers keep in fp32."""

TORCH_DIST = ("--ckpt-format", "torch_dist")
PLAIN = TORCH_DIST
DISTRIBUTED = ("--use-distributed-optimizer",)
FULLY = (*DISTRIBUTED, *TORCH_DIST, "--dist-ckpt-optim-fully-reshardable")
BUCKETS = (*DISTRIBUTED, *TORCH_DIST)
OPTIMIZERS = {"plain": PLAIN, "distributed": FULLY}
MAIN = {"plain": "optimizer.state.fp32_param.", "distributed": "optimizer.state.param."}
"""Prefix, in the checkpoint of an optimizer, of the main parameters in fp32."""

ONE = Layout()
LAYOUTS = {
    "DP 2": (Layout(), 2),
    "EP 2": (Layout(expert=2), 2),
    "TP 2 with SP": (Layout(tensor=2, sequence_parallel=True), 2),
}


@dataclass
class Runs:
    """Trains :data:`MODEL` in bf16 in ``folder``, each run once, on one small dataset."""

    folder: Path
    made: dict[str, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = write_config(self.folder / "model.yaml", OVERRIDES)
        (self.data,) = prepare([argparse.__file__], str(self.folder / "text"), progress=io.StringIO())

    def whole(self, optimizer: str) -> Run:
        """All steps in one process, saved at half and in the end."""
        return self.run(f"whole {optimizer}", OPTIMIZERS[optimizer])

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        layout: Layout = ONE,
        processes: int = 1,
        host: str = GPT,
        load: Run | None = None,
        step: int = HALF,
    ) -> Run:
        """A run of all steps, or of those after ``step`` of ``load``, from whatever format that has."""
        if name not in self.made:
            folder = self.folder / name
            folder.mkdir()
            save = ["--save", str(folder / "saved"), "--save-interval", "1" if host == HYBRID else str(HALF)]
            if load is not None:
                save += ["--load", str(load.checkpoints), "--ckpt-step", str(step), "--auto-detect-ckpt-format"]
            command = stock.words(
                MODEL,
                # Out of reach: a norm whose sum goes another way round would clip to other last digits.
                *("--clip-grad", "1e6", *words, *save),
                precision="bf16",
                data=("--data-path", self.data, "--split", "100,0,0", "--data-cache-path", str(self.folder / "cache")),
                layout=layout,
                host=host,
                global_batch_size=2,
                train_iters=STEPS,
                learning_rate=1e-3,
            )
            steps = folder / "observe"
            status, output = launch(["--observe", str(steps), "--", *command], self.config, processes)
            assert status == 0, f"run {name!r} ended with status {status}:\n{output[-8000:]}"
            self.made[name] = Run(output, folder / "saved", read_scalars(steps))
        return self.made[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("mixed")
    yield Runs(folder)
    shutil.rmtree(folder)


def assert_goes_on(whole: Run, resumed: Run, first: int = HALF + 1) -> None:
    """Fail unless ``resumed`` repeats ``whole`` from step ``first`` on: scalars, and every tensor that is saved in the end."""
    assert {"lm loss", "mtp_1 loss", "grad norm"} <= resumed.scalars.keys(), resumed.output[-8000:]
    for name, by_step in whole.scalars.items():
        assert resumed.scalars[name] == {step: by_step[step] for step in range(first, STEPS + 1)}, name
    assert_same_bytes(whole.tensors(STEPS), resumed.tensors(STEPS))


def parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's own part of a checkpoint, as far as it is trained."""
    return {
        name: tensors[name] for name in (key.partition("exp_avg.")[2] for key in tensors) if name and name in tensors
    }


def test_the_optimizer_of_a_checkpoint_has_each_parameter_under_its_name(runs: Runs) -> None:
    """Main parameters against the model's, and Adam's moments of the two optimizers against each other."""
    saved = {name: runs.whole(name).tensors(STEPS) for name in OPTIMIZERS}
    model = parameters(saved["plain"])
    in_fp32 = {name for name, value in model.items() if value.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in in_fp32} == FP32
    assert len(in_fp32) < len(model) / 2
    for optimizer, prefix in MAIN.items():
        mains = {name[len(prefix) :]: value for name, value in saved[optimizer].items() if name.startswith(prefix)}
        assert mains.keys() == (model.keys() - in_fp32 if optimizer == "plain" else model.keys())
        for name, main in mains.items():
            assert main.dtype == torch.float32
            assert torch.equal(main.to(model[name].dtype), model[name]), f"{optimizer}: {name}"
    for moment in ("exp_avg", "exp_avg_sq"):
        keys = [f"optimizer.state.{moment}.{name}" for name in model]
        assert_same_bytes({key: saved["plain"][key] for key in keys}, {key: saved["distributed"][key] for key in keys})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_goes_on(runs: Runs, optimizer: str) -> None:
    whole = runs.whole(optimizer)
    assert_goes_on(whole, runs.run(f"resumed {optimizer}", OPTIMIZERS[optimizer], load=whole))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("plain", ("--ckpt-format", "torch")),
        ("distributed", (*DISTRIBUTED, "--ckpt-format", "torch")),
        ("distributed", BUCKETS),
    ],
    ids=["plain-torch", "distributed-torch", "distributed-buckets"],
)
def test_a_run_goes_on_from_formats_without_names(runs: Runs, optimizer: str, words: tuple[str, ...]) -> None:
    """Saved without names, gone on with, and saved with names in the end.

    The first run ends where the second goes on: of ``torch`` checkpoints of the distributed optimizer, upstream loads the last
    one's state whatever ``--ckpt-step`` says.
    """
    source = runs.run(" ".join(words), (*words, "--exit-interval", str(HALF)))
    assert_goes_on(runs.whole(optimizer), runs.run(f"from {' '.join(words)}", OPTIMIZERS[optimizer], load=source))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_of_two_processes_goes_on(runs: Runs, name: str) -> None:
    layout, processes = LAYOUTS[name]
    whole = runs.run(name, FULLY, layout=layout, processes=processes)
    assert_goes_on(whole, runs.run(f"{name}, resumed", FULLY, layout=layout, processes=processes, load=whole))
    tensors, prefix = whole.tensors(STEPS), MAIN["distributed"]
    for key, value in parameters(tensors).items():
        assert torch.equal(tensors[prefix + key].to(value.dtype), value), key


def test_two_processes_train_what_one_does_and_go_on_with_its_checkpoint(runs: Runs) -> None:
    """DP 2 from the start, with either optimizer, and from one process's checkpoint: the sum of two gradients is the same."""
    one = runs.whole("distributed")
    from_one = runs.run("DP 2 from DP 1", FULLY, processes=2, load=one)
    two, plain = runs.run("DP 2", FULLY, processes=2), runs.run("DP 2 plain", PLAIN, processes=2)
    overlapped = runs.run("DP 2 overlapped", (*FULLY, "--overlap-grad-reduce", "--overlap-param-gather"), processes=2)
    for found in (two, plain, overlapped, from_one):
        assert_same_bytes(parameters(one.tensors(STEPS)), parameters(found.tensors(STEPS)))
    assert_same_bytes(one.tensors(STEPS), from_one.tensors(STEPS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_host_goes_on_with_the_others_checkpoint(runs: Runs, optimizer: str) -> None:
    words, whole = OPTIMIZERS[optimizer], runs.whole(optimizer)
    hybrid = runs.run(f"hybrid {optimizer}", words, host=HYBRID, load=whole)
    assert_goes_on(whole, hybrid)
    back = runs.run(f"back {optimizer}", words, load=hybrid, step=HALF + 1)
    assert_goes_on(whole, back, first=HALF + 2)
