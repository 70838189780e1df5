"""Training runs for the layout tests: one small model of all four families, fp32, real processes over gloo.

Every run is a subprocess: ``tests.distributed.recorder`` (the launcher, with scalars written in full) under torchrun
where there are several processes. What a run leaves is its scalars, its output and its checkpoints.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megacpp_mcore import lowering, recipe_command
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout, preset, with_overrides

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 180
MICRO_BATCH, GLOBAL_BATCH = 2, 8

OVERRIDES: Mapping[str, Any] = {
    # The stages of PP 2 × VPP 2 are AEM, EAA, ERA and MEA. The second holds a Full layer and its Shared one, so that the
    # index cache meets several micro-batches in flight; the third has a Full layer of its own.
    "pattern": "AEMEAAERAMEA",
    "dsa": {"schedule": "-FSFF", "topk": 16, "loss_coeff": 0.1},
    "mtp": {"depth": 2},
    "seq_length": 64,
    # Wide enough that scores differ, and selection with them.
    "init_std": 0.06,
}
MODEL = with_overrides(preset("nam56r_tiny"), OVERRIDES)


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        status: the exit status.
        output: standard output and error together.
        checkpoints: the folder that it saved to.
        scalars: what Megatron gave to TensorBoard, each name's values by step.
    """

    status: int
    output: str
    checkpoints: Path
    scalars: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Every tensor of the checkpoint of ``step``, whole, by its name there: parameters, buffers, Adam's state."""
        return read_checkpoint(self.checkpoints / f"iter_{step:07d}")

    def parameters(self, step: int) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the model in the checkpoint of ``step``."""
        return {name: value for name, value in self.tensors(step).items() if not name.startswith("optimizer.")}


class Laboratory:
    """Starts runs of :data:`MODEL` in a folder of its own, on one small dataset: a module of Python itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = write_config(folder / "model.yaml", OVERRIDES)
        (self.data,) = prepare([argparse.__file__], str(folder / "text"), progress=io.StringIO())

    def train(
        self,
        name: str,
        layout: Layout,
        *,
        steps: int,
        save_every: int | None = None,
        learning_rate: float = 1e-3,
        extra: Sequence[str] = (),
        processes: int | None = None,
    ) -> Run:
        """Train in ``layout`` and return what the run left; a run that fails is a failure here.

        Args:
            name: of the run, unique.
            layout: how the model is cut.
            steps: optimizer steps.
            save_every: steps between checkpoints; by default the last step is saved.
            learning_rate: constant.
            extra: further Megatron words.
            processes: how many; by default as many as the layout needs.
        """
        training = lowering.Training(
            device="cpu",
            precision="fp32",
            transformer_impl="local",
            data=("--data-path", self.data, "--split", "100,0,0", "--data-cache-path", str(self.folder / "cache")),
            tokenizer=recipe_command.tokenizer_words(MODEL),
            micro_batch_size=MICRO_BATCH,
            global_batch_size=GLOBAL_BATCH,
            train_iters=steps,
            learning_rate=learning_rate,
            extra=("--lr-decay-style", "constant", "--lr-warmup-iters", "0", *extra),  # the last word counts
        )
        words = lowering.lower(MODEL, layout, training)
        needed = max(layout.tensor, layout.expert) * layout.pipeline
        return self.start(name, [*words, "--save-interval", str(save_every or steps)], processes or needed)

    def start(self, name: str, words: Sequence[str], processes: int) -> Run:
        """Run the Megatron arguments ``words`` in ``processes`` processes, saving under ``name``."""
        folder = self.folder / name
        folder.mkdir()
        scalars = folder / "scalars.jsonl"
        arguments = [str(scalars), "--", "--device", "cpu", "--", *words]
        if "--save" not in words:
            arguments += ["--save", str(folder)]
        command = [sys.executable, "-m"]
        if processes > 1:
            command += ["torch.distributed.run", "--nproc-per-node", str(processes)]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m"]
        run = execute([*command, "tests.distributed.recorder", *arguments], self.config)
        assert run[0] == 0, f"run {name} ended with status {run[0]}:\n{run[1][-6000:]}"
        return Run(*run, checkpoints=folder, scalars=read_scalars(scalars))


def write_config(path: Path, overrides: Mapping[str, Any]) -> Path:
    """Write the file for ``MEGACPP_CONFIG``: nam56r_tiny with ``overrides``."""
    path.write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": dict(overrides)}), encoding="utf-8")
    return path


def execute(command: Sequence[str], config: Path) -> tuple[int, str]:
    """Run ``command`` from the repository's root; return status and output. Whatever it started ends with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGACPP_CONFIG": str(config)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} was still running after {TIMEOUT_SECONDS} s:\n{output[-6000:]}") from None
    return process.returncode, output


def read_scalars(file: Path) -> dict[str, dict[int, float]]:
    """The records of :mod:`tests.distributed.recorder`, by name and step."""
    scalars: dict[str, dict[int, float]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        scalars.setdefault(record["name"], {})[record["step"]] = record["value"]
    return scalars


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a ``torch_dist`` checkpoint, whole, whatever layout it was saved in."""
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors
