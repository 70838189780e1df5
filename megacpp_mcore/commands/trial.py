"""Trains a few steps of ``nam56r_tiny`` on Megatron's mock data in another process, for ``doctor`` and ``compat``."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megacpp_mcore
from megacpp_mcore import settings
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.launch import plan
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import DEFAULT_MODEL_CLASS, Training


def train(
    steps: int,
    *,
    timeout_s: float,
    model_class: str = DEFAULT_MODEL_CLASS,
    device: str = "cpu",
    engine: bool = False,
    script: Sequence[str] = (),
    first_on_path: Sequence[str] = (),
    switches: Mapping[str, Any] | None = None,
    report_every_s: float = math.inf,
) -> tuple[list[dict[str, float]], list[str]]:
    """Train by ``megacpp-mcore launch``, on the CPU in fp32, on one GPU in bf16, without the file of ``MEGACPP_CONFIG``.

    Returns the figures of each recorded step, and how the process ended, in lines; no lines if it succeeded.

    Args:
        steps, timeout_s: how many, and the seconds after which the process is ended.
        model_class, device: ``gpt`` or ``hybrid``; ``cpu`` or ``cuda``.
        engine: whether layers are Transformer Engine's.
        script: the training script, found in the checkout of ``MEGATRON_LM``; by default the wheel's stock loop.
        first_on_path: folders from which to import first.
        switches: groups of a settings file to obey, such as ``{"vendors": {"flash4": False}}``.
        report_every_s: the seconds after which the last line of the process is printed to stderr, repeatedly.
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
    dropped = {settings.VARIABLE, *plan.OF_RANKS}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [*first_on_path, str(Path(megacpp_mcore.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory(prefix="megacpp-mcore-trial-") as folder:
        command = [sys.executable, "-m", "megacpp_mcore", "launch", "--device", device, "--verbose"]
        command += ["--observe", folder, "--", *script, *lower(Run(model, Layout(), training, model_class))]
        if switches is not None:
            environment[settings.VARIABLE] = str(Path(folder, "switches.json"))
            Path(folder, "switches.json").write_text(json.dumps({"model": model.name, **switches}))
        problem, lines = run_quietly(command, folder, timeout_s, environment, report_every_s)
        if problem:
            first = next((n for n, line in enumerate(lines) if line.startswith("error: ")), -1)
            return [], [problem, *lines[first:]]
        return [step.values() for step in read_steps(folder)], []


def run_quietly(
    command: Sequence[str],
    folder: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    report_every_s: float = math.inf,
) -> tuple[str, list[str]]:
    """Run a command in ``folder``; returns how it failed (empty: it did not) and its non-empty lines of stderr."""
    none, started = subprocess.DEVNULL, time.monotonic()
    # A file, not a pipe, which a process that is left behind would hold open.
    with (
        tempfile.NamedTemporaryFile() as errors,
        subprocess.Popen(command, cwd=folder, env=environment, stdin=none, stdout=none, stderr=errors) as process,
    ):

        def lines() -> list[str]:
            text = Path(errors.name).read_text(encoding="utf-8", errors="replace")
            return [line.strip() for line in text.splitlines() if line.strip()]

        try:
            while (left := started + timeout_s - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(left, report_every_s))
                    problem = f"died of signal {-status}" if status < 0 else f"ended with status {status}" if status else ""
                    return problem, lines()
                if left > report_every_s:
                    last = (lines() or ["no output yet"])[-1]
                    print(f"{time.monotonic() - started:.0f} s: {last}", file=sys.stderr, flush=True)
            return f"did not finish within {timeout_s:g} s", []
        finally:
            process.kill()
