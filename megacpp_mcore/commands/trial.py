"""Trains a few steps of ``nam56r_tiny`` on Megatron's mock data in another process, for ``doctor`` and ``compat``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megacpp_mcore
from megacpp_mcore import settings
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import DEFAULT_HOST, Training


def train(
    steps: int,
    *,
    timeout_s: float,
    host: str = DEFAULT_HOST,
    device: str = "cpu",
    engine: bool = False,
    script: Sequence[str] = (),
    first_on_path: Sequence[str] = (),
    switches: Mapping[str, Any] | None = None,
) -> tuple[list[dict[str, float]], list[str]]:
    """Train by ``megacpp-mcore launch``, on the CPU in fp32, on one GPU in bf16, without the file of ``MEGACPP_CONFIG``.

    Args:
        steps: how many.
        timeout_s: seconds after which the process is ended.
        host: ``gpt`` or ``hybrid``.
        device: ``cpu`` or ``cuda``.
        engine: whether layers are Transformer Engine's.
        script: the training script, found in the checkout of ``MEGATRON_LM``; by default the wheel's stock loop.
        first_on_path: folders from which to import first.
        switches: groups of a settings file to obey, such as ``{"vendors": {"flash4": False}}``.

    Returns:
        The figures of each recorded step, and how the process ended, in lines; no lines if it ended well.
    """
    from megacpp_mcore.data.tokenizer import tokenizer_words  # imports numpy, which the command line starts without
    from megacpp_mcore.observe.steps import read_steps

    model = preset("nam56r_tiny")
    training = Training(
        device=device,
        precision="fp32" if device == "cpu" else "bf16",
        transformer_impl="transformer_engine" if engine else "local",
        data=("--mock-data",),
        tokenizer=tokenizer_words(model),
        train_iters=steps,
        micro_batch_size=2,
        global_batch_size=4,
        learning_rate=1e-3,
    )
    environment = {name: value for name, value in os.environ.items() if name != settings.VARIABLE}
    paths = [*first_on_path, str(Path(megacpp_mcore.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory(prefix="megacpp-mcore-trial-") as folder:
        command = [
            sys.executable,
            "-m",
            "megacpp_mcore",
            "launch",
            "--device",
            device,
            "--verbose",
            "--observe",
            folder,
        ]
        command += ["--", *script, *lower(Run(model, Layout(), training, host))]
        if switches is not None:
            environment[settings.VARIABLE] = str(Path(folder, "switches.json"))
            Path(folder, "switches.json").write_text(json.dumps({"model": model.name, **switches}))
        # A file, not a pipe, which a process that is left behind would hold open.
        with Path(folder, "stderr").open("w+b") as errors:
            try:
                done = subprocess.run(
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=errors, check=False, timeout=timeout_s,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return [], [f"did not end in {timeout_s:g} s"]
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        if done.returncode:
            first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), -1)
            return [], [f"ended with status {done.returncode}", *lines[first:]]
        return [step.values() for step in read_steps(folder)], []
