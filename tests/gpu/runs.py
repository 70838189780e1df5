"""Megatron on a GPU for the tests: its process groups in this process, and trainings by ``megacpp-mcore launch`` in others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megacpp_mcore import patches
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.model import Layout, Model, preset
from megacpp_mcore.observe import receipts
from megacpp_mcore.observe.steps import read_steps
from megacpp_mcore.policy.overlap import CONNECTIONS
from tests import stock

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-W", "ignore", "-m")
ALONE = Layout()
LAUNCH = (*PYTHON, "megacpp_mcore", "launch", "--verbose", "--device", "cuda")


@contextlib.contextmanager
def process_groups(device: int, *, expert: int = 1, **how: Any) -> Iterator[None]:
    """Megatron's process groups on a GPU, everything of which is taken down again.

    Args:
        device: its number.
        expert: over how many processes experts are divided.
        how: they meet, as ``init_process_group`` names it; as torchrun says if left out.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", **how)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert)
    random.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.full((1,), 1.0, device="cuda")
    try:
        yield
    finally:
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        DSAIndexerLossLoggingHelper.tracker.clear()
        MTPLossLoggingHelper.tracker.clear()
        destroy_moe_metrics_tracker()
        random.get_cuda_rng_tracker().reset()
        patches.revert()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def words_of(model: Model, *extra: str, corpus: str | None = None, **training: Any) -> list[str]:
    """Megatron's arguments that train ``model``: on all of ``corpus``, or on mock data."""
    data = ("--mock-data",) if corpus is None else ("--data-path", corpus, "--split", "100,0,0")
    return stock.words(model, *extra, device="cuda", data=data, **training)


def train(words: Sequence[str], record: Path, processes: int = 1, **environment: str) -> None:
    """Train as ``words`` say, under a policy and a file that only ``environment`` chooses; recorded in ``record``."""
    inherited = {name: value for name, value in os.environ.items() if name not in (plugin_config.VARIABLE, CONNECTIONS)}
    done = subprocess.run(
        [*LAUNCH, "--nproc", str(processes), "--observe", str(record), "--", *words],
        cwd=ROOT, env=inherited | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def two_steps(corpus: str, record: Path, op: str, way: str, loss: str, *, fp8: str) -> list[float]:
    """The ``loss`` of each of two steps of nam56r_tiny on the backend ``way`` of ``op``, whose receipt says ``fp8`` or none."""
    file = record.with_suffix(".json")
    file.write_text(json.dumps({"model": "nam56r_tiny", "backends": {op: way}}))
    sizes = {"train_iters": 2, "learning_rate": 1e-3, "micro_batch_size": 2, "global_batch_size": 4}
    train(words_of(preset("nam56r_tiny"), corpus=corpus, **sizes), record, **{plugin_config.VARIABLE: str(file)})
    receipt = receipts.read(record)
    assert [record_["observed"] for record_ in receipt["backends"] if record_["op"] == op] == [way]
    assert receipt["precision"]["kernel_fp8"] == (fp8 or "none")
    assert ("fp8" in receipt["flops"]["by_precision"]) is bool(fp8)
    return [step.losses[loss] for step in read_steps(record)]
