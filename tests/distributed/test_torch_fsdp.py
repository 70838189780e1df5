"""Two replicas whose weights FSDP2 cuts train as two whole ones do, and go on from a checkpoint with their optimizer."""

from __future__ import annotations

import pytest

from megacpp_mcore.arguments.lowering import TORCH_FSDP_FORMAT
from megacpp_mcore.model.run import TORCH_FSDP
from tests.distributed.comparing import differing_scalars
from tests.distributed.runs import LAYOUTS, MAIN, ONE, RESUMED, Laboratory, Run

pytestmark = pytest.mark.exhaustive


def trained(laboratory: Laboratory, name: str, words: tuple[str, ...], *extra: str) -> Run:
    """Two replicas; ``words`` are known to lowering."""
    laboratory.words = (*words, *(("--ckpt-format", TORCH_FSDP_FORMAT) if TORCH_FSDP in words else ()))
    warm_up = ("--lr-warmup-iters", "1")
    return laboratory.run(" ".join((name, *words)), LAYOUTS[ONE], MAIN, (*warm_up, *extra), replicas=2, save_every=RESUMED)


@pytest.mark.parametrize(("words", "tolerance"), [((), 1e-5), (("--bf16",), 5e-3)], ids=["fp32", "bf16"])
def test_fsdp_trains_as_ddp_does(laboratory: Laboratory, words: tuple[str, ...], tolerance: float) -> None:
    """In bf16 the blocks have parameters of two dtypes, and gradients are summed over replicas in bf16."""
    whole = trained(laboratory, "DDP", words, "--no-save-optim")
    cut = trained(laboratory, "FSDP2", (*words, TORCH_FSDP))
    assert len(cut.scalars["lm loss"]) == MAIN
    assert differing_scalars(whole.scalars, cut.scalars, tolerance) == []
    if not words:
        return
    load = ("--load", str(cut.checkpoints), "--ckpt-step", str(RESUMED))
    resumed = trained(laboratory, "resumed", (*words, TORCH_FSDP), *load)
    assert differing_scalars(cut.after(RESUMED), resumed.scalars, 0.0) == []


def test_fsdp_loads_the_weights_of_a_ddp_checkpoint(laboratory: Laboratory) -> None:
    """In Megatron's ``torch`` format, the one that it cuts for FSDP2; optimizer state stays behind."""
    start = trained(laboratory, "start", ("--ckpt-format", "torch"), "--no-save-optim")
    load = ("--load", str(start.checkpoints), "--auto-detect-ckpt-format")
    load += ("--finetune", "--no-load-optim", "--no-load-rng")
    whole = trained(laboratory, "DDP from DDP", (), *load, "--no-save-optim")
    cut = trained(laboratory, "FSDP2 from DDP", (TORCH_FSDP,), *load)
    assert len(cut.scalars["lm loss"]) == MAIN
    assert differing_scalars(whole.scalars, cut.scalars, 1e-5) == []
    # The first sample again, after so many steps on it.
    assert cut.scalars["lm loss"][1] < 0.99 * start.scalars["lm loss"][1]
