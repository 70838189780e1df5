"""Training runs for the layout tests: one small model of all four families, each ``megacpp-mcore launch`` a process a rank."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout, Model, preset, with_overrides
from megacpp_mcore.observe.steps import read_steps
from tests import forks, stock
from tests.saved import tensors_in

ROOT = Path(__file__).parents[2]
MICRO_BATCH, GLOBAL_BATCH = 2, 8
PADDED_TO = 128
MAIN, RESUMED, COMPARED = 4, 2, 3
"""Steps: of the run that all start from, at which it is resumed, and of the runs that are compared."""

OVERRIDES: Mapping[str, Any] = {
    # The stages of PP 2 × VPP 2 are AEM, EAA, ERA and MEA. The second holds a Full layer and its Shared one, so that the
    # index cache meets several micro-batches in flight; the third and fourth have Full layers of their own.
    "pattern": "AEMEAAERAMEA",
    "dsa": {"schedule": "-FSFF", "topk": 16, "loss_coeff": 0.1},
    "mamba3": {"groups": 4},  # one a rank of TP 4
    "mtp": {"depth": 2},
    "seq_length": 64,
}
MODEL = with_overrides(preset("nam56r_tiny"), OVERRIDES)
SMALL: Mapping[str, Any] = {"pattern": "AEMR", "depth": 4, "dsa": {"schedule": "F"}, "seq_length": 64}
"""A layer of each family, where more of them show nothing more."""

ONE = "PP 1"
LAYOUTS: Mapping[str, Layout] = {
    ONE: Layout(),
    "PP 2": Layout(pipeline=2),
    "PP 2 × VPP 2": Layout(pipeline=2, virtual=2),
    "EP 2": Layout(expert=2),
    "TP 2 with SP": Layout(tensor=2, sequence_parallel=True),
    "TP 4 with SP": Layout(tensor=4, sequence_parallel=True),
    "EP 4": Layout(expert=4),
    "TP 2 with SP, EP 4": Layout(tensor=2, sequence_parallel=True, expert=4),
    "PP 2 × VPP 2, EP 2": Layout(pipeline=2, virtual=2, expert=2),
    "CP 2": Layout(context=2),
    "CP 4": Layout(context=4),
    "CP 2, EP 2": Layout(context=2, expert=2),
    "CP 2, TP 2 with SP": Layout(context=2, tensor=2, sequence_parallel=True),
    "CP 2, PP 2 × VPP 2": Layout(context=2, pipeline=2, virtual=2),
}
"""Every layout that has to train as one process does. With two processes EP 2 is data-parallel 2, too."""

LEARNING_RATE = 1e-3
"""Large: after four steps, norms, decays and biases are far from the constants that they started as."""
WARM_UP = ("--lr-warmup-iters", "1")
"""Of size zero is the first step: from nothing, Adam would make a whole step of a gradient that is nothing but rounding
noise, and by the third step a near tie in the selection of keys tips over. One process with another micro-batch size does
not repeat itself then, either (in fp64 all layouts do).
"""


@dataclass(frozen=True)
class Run:
    """A run that has ended well: what it printed, where it saved, scalars by name and step, and what was trained."""

    output: str
    checkpoints: Path
    scalars: Mapping[str, Mapping[int, float]]
    model: Model

    def after(self, step: int) -> dict[str, dict[int, float]]:
        return {name: {at: one for at, one in values.items() if at > step} for name, values in self.scalars.items()}

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Every tensor of the checkpoint of ``step``, whole, by its name there: parameters, buffers, Adam's state."""
        return tensors_in(self.checkpoints / f"iter_{step:07d}")


class Laboratory:
    """Trains one model in a folder of its own, on one small dataset, by ``script`` or the wheel's own loop."""

    def __init__(
        self,
        folder: Path,
        *,
        script: Path | None = None,
        overrides: Mapping[str, Any] = OVERRIDES,
        texts: Sequence[str] = (argparse.__file__,),
        words: Sequence[str] = (),
        **training: Any,
    ) -> None:
        self.folder, self.script, self.words = folder, script, tuple(words)
        sizes = {"micro_batch_size": MICRO_BATCH, "global_batch_size": GLOBAL_BATCH, "learning_rate": LEARNING_RATE}
        self.training = sizes | training
        self.model = with_overrides(preset("nam56r_tiny"), overrides)
        self.config = write_config(folder / "model.yaml", overrides)
        (self.data,) = prepare(texts, str(folder / "text"))
        self._runs: dict[str, Run] = {}

    def main(self) -> Run:
        """The run that the others start from: one process from random weights."""
        return self.run("main", LAYOUTS[ONE], MAIN, WARM_UP, save_every=RESUMED, micro_batch_size=GLOBAL_BATCH)

    def resumed(self) -> Run:
        """:meth:`main` once more from its checkpoint of step :data:`RESUMED`, in a new process."""
        load = ["--load", str(self.main().checkpoints), "--ckpt-step", str(RESUMED)]
        return self.run("resumed", LAYOUTS[ONE], MAIN, [*WARM_UP, *load], micro_batch_size=GLOBAL_BATCH)

    def compared(self, name: str, *words: str, save_every: int | None = 2, replicas: int = 1, **training: Any) -> Run:
        """:data:`COMPARED` steps in layout ``name`` from the last checkpoint of :meth:`main`, from the first sample on."""
        load = ["--load", str(self.main().checkpoints), "--finetune", "--no-load-optim", "--no-load-rng"]
        label, words = " ".join((name, *words, *map(str, training.values()))), (*WARM_UP, *load, *words)
        return self.run(label, LAYOUTS[name], COMPARED, words, save_every=save_every, replicas=replicas, **training)

    def untrained(self, name: str) -> Run:
        """The model that layout ``name`` starts with when it loads nothing, saved after one step of size zero."""
        return self.run(f"untrained {name}", LAYOUTS[name], 1, ["--no-save-optim"], learning_rate=0.0)

    def moved(self, source: Run, name: str) -> Run:
        """The last checkpoint of ``source`` loaded in layout ``name`` and saved again as it is."""
        extra = [*WARM_UP, "--load", str(source.checkpoints)]
        label = f"{source.checkpoints.parent.name} to {name}"
        return self.run(label, LAYOUTS[name], COMPARED, extra, save_only=True)

    def run(
        self,
        name: str,
        layout: Layout,
        steps: int,
        extra: Sequence[str],
        *,
        save_every: int | None = None,
        save_only: bool = False,
        replicas: int = 1,
        **training: Any,
    ) -> Run:
        """The run of that name, made once: ``steps`` in ``layout``, in as many copies as there are ``replicas``."""
        if name not in self._runs:
            folder = self.folder / name
            folder.mkdir()
            if save_only:  # Megatron's own way to load, save and leave
                saved, save = folder / "torch_dist", ["--ckpt-convert-format", "torch_dist"]
                save += ["--ckpt-convert-save", str(folder)]
            else:
                saved = folder / "checkpoints"
                save = ["--save", str(saved), "--save-interval", str(save_every or steps)]
            words = [*self.training_words(layout, train_iters=steps, **training), *save, *extra]
            self._runs[name] = self._run(name, folder, saved, words, layout.processes * replicas)
        return self._runs[name]

    def training_words(self, layout: Layout, **training: Any) -> list[str]:
        """Megatron's arguments of a run in ``layout``, but for where it saves."""
        words = stock.words(
            self.model,
            # Megatron multiplies by TP: without this, TP 2 would have more padding logits in its softmax.
            *("--make-vocab-size-divisible-by", str(PADDED_TO // layout.tensor)),
            data=("--data-path", self.data, "--split", "100,0,0", "--data-cache-path", str(self.folder / "cache")),
            layout=layout,
            **self.training | training,
        )
        if "--reset-attention-mask" in self.words:  # which Megatron then has to make
            words.remove("--no-create-attention-mask-in-dataloader")
        return [*words, *self.words]  # a plan with them would also save optimizer state by parameter

    def _run(self, name: str, folder: Path, saved: Path, words: Sequence[str], processes: int) -> Run:
        recorded = folder / "observe"
        options = ["--observe", str(recorded), "--"]
        options += [] if self.script is None else [str(self.script)]
        status, output = launch([*options, *words], self.config, processes)
        assert status == 0, f"run {name!r} ended with status {status}:\n{output[-30000:]}"
        return Run(output, saved, read_scalars(recorded), self.model)


def write_config(path: Path, overrides: Mapping[str, Any]) -> Path:
    """Write the file for ``MEGACPP_CONFIG``: nam56r_tiny with ``overrides``; Megatron's own lines are read from the output."""
    options = {"model": "nam56r_tiny", "overrides": dict(overrides), "observability": {"console": "stock"}}
    path.write_text(yaml.safe_dump(options), encoding="utf-8")
    return path


def launch(words: Sequence[str], config: Path, processes: int = 1) -> tuple[int, str]:
    """``megacpp-mcore launch --device cpu`` with ``words``, in as many processes as torchrun would start; status and output."""
    command = ["-m", "megacpp_mcore", "launch", "--verbose", "--device", "cpu", *words]
    wheel = not any(word.endswith(".py") for word in words)  # a script brings the Megatron of its checkout
    return forks.run_ranks(command, processes, megatron=wheel, MEGACPP_CONFIG=str(config))


def read_scalars(run: Path) -> dict[str, dict[int, float]]:
    """What a run recorded of its steps, by name and step; nothing where no step was trained."""
    scalars: dict[str, dict[int, float]] = {}
    for step in read_steps(run):
        for name, value in step.values().items():
            scalars.setdefault(name, {})[step.step] = value
    return scalars
