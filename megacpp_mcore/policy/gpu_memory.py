"""Refuses a run whose states leave no room for a step on this process's GPU; says how much of the rest layers may use."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os

from megacpp_mcore.arguments.lowering import check_sizes
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import Layout, memory
from megacpp_mcore.model.run import NARROW, Run, words_of

logger = logging.getLogger(__name__)


def check_memory(run: Run) -> None:
    """Compare what a rank will hold with the memory of its GPU; imports torch, and starts CUDA.

    Raises:
        LaunchError: it does not fit; names the states, the GPU's memory, and the nearest layouts that fit.
        ArgumentMismatchError: the run's other arguments contradict the model that does not fit.
    """
    held = memory.states(run)
    if run.device != "cuda" or run.model is None or held is None:
        return
    import torch

    gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    usable = memory.usable(gpu.total_memory)
    if held.total <= usable:
        _warn_of_activations(run, gpu.total_memory)
        return
    origin = "" if run.settings is None else f" of {run.settings.path} (MEGACPP_CONFIG)"
    check_sizes(run.model, run.training.extra, origin, run.model_class)
    narrow = memory.states(dataclasses.replace(run, asked={**run.asked, **NARROW}).as_usual())
    alternatives = []
    if run.precision == "bf16" and not run.torch_fsdp and narrow is not None and narrow.total <= usable:
        words = " ".join(word for name, value in NARROW.items() for word in words_of(name, value))
        alternatives = [f"the same number with --use-distributed-optimizer {words} ({narrow.total / 1e9:.1f} GB each)"]
    alternatives += [
        f"{other.processes} GPUs, {_layout_words(other.layout) or 'replicas'} with --use-distributed-optimizer "
        f"({states.total / 1e9:.1f} GB each)"
        for other, states in itertools.islice(memory.fitting(run, gpu.total_memory), 3)
    ]
    fitting = "; ".join(alternatives)
    raise LaunchError(
        f"{run.model.name} has {held} of states on each of {run.processes} GPU{'s' * (run.processes > 1)}, and {gpu.name} "
        f"has {gpu.total_memory / 1e9:.1f} GB, of which 1/{memory.ROOM} must stay free for activations; "
        + (f"it fits on {fitting}" if fitting else "no layout of it fits on such GPUs: change the model")
    )


def _warn_of_activations(run: Run, gpu_bytes: int) -> None:
    """Log, on the first rank, that a step is estimated to need more than the GPU has, and the recompute that fits."""
    total = memory.estimate(run, gpu_bytes)
    if os.environ.get("RANK", "0") != "0" or total is None or total <= gpu_bytes:
        return
    fitting = next((choice for choice in memory.choices(run) if choice.total <= memory.usable(gpu_bytes)), None)
    advice = "more GPUs or shorter rows" if fitting is None else f"recompute {fitting.how} ({fitting.total / 1e9:.1f} GB)"
    _warn_once(
        f"a step is estimated to need {total / 1e9:.1f} GB of the GPU's {gpu_bytes / 1e9:.1f}; what fits: {advice}, see "
        f"`megacpp-mcore recipe memory`"
    )


_warn_once = functools.cache(logger.warning)


def mamba_keeps(run: Run | None) -> str | None:
    """Return what M layers of ``run`` may keep on this process's GPU (:func:`megacpp_mcore.model.memory.mamba_keeps`).

    None on a CPU, and without a run.
    """
    if run is None or run.device != "cuda":
        return None
    import torch

    gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    return memory.mamba_keeps(run, gpu.total_memory)


def _layout_words(layout: Layout) -> str:
    named = {"tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}
    words = [f"--{name}-model-parallel-size {size}" for name, size in named.items() if size > 1]
    return " ".join([*words, *["--sequence-parallel"] * layout.sequence_parallel])
