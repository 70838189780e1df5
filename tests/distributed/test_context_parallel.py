"""Sequences shared by two and four processes: losses and gradients of one process.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.model import Layout, preset
from tests import micro_batch, stock
from tests.distributed.comparing import differing_tensors
from tests.lanes import exhaustive_but

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""Relative, as in test_layouts."""

S, B = 64, 2
ALONE: Mapping[str, Any] = {"depth": 2, "seq_length": S, "mtp": {"depth": 0}}
SPARSE: Mapping[str, Any] = {"schedule": "FS", "topk": 16, "loss_coeff": 0.1}
WHOLE: Mapping[str, Any] = {
    "pattern": "AEMARA", "depth": 6, "seq_length": S, "dsa": {"topk": 16, "loss_coeff": 0.1}, "mtp": {"depth": 2},
}  # fmt: skip
LONG: Mapping[str, Any] = {
    "window_size": 20,
    "yarn": {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7},
}
MTP_W: Mapping[str, Any] = {"depth": 2, "attention": "W"}
CASES: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    # One group, which all ranks share.
    "M of rank 1": ({**ALONE, "pattern": "M", "mamba3": {"mimo_rank": 1, "groups": 1, "out_norm": True}}, ()),
    "A, in the dense warm-up": ({**ALONE, "pattern": "A", "dsa": {**SPARSE, "warmup_steps": 2}}, ()),
    # Ranks count unequally many tokens, of the main loss and of each depth.
    "MTP, packed, by token": (
        {**ALONE, "pattern": "A", "dsa": {"schedule": "-"}, "mtp": {"depth": 2}},
        ("--calculate-per-token-loss",),
    ),
    "whole, long": ({**WHOLE, "mla": LONG, "dsa": {**WHOLE["dsa"], "schedule": "WFS"}, "mtp": MTP_W}, ()),
    "whole, recomputed": (WHOLE, stock.full_recompute()),
    "whole, packed, projections recomputed": (WHOLE, stock.selective_recompute("mla_up_proj", "core_attn")),
}
"""Overrides of nam56r_tiny, and further words."""
DOCUMENTS = (5, 1, 25, 20, 13)
"""Of the row of a case that is packed: each in several chunks, or several in one; the last token of each is not counted."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What so many processes have found, by case."""

    @functools.cache
    def of(ranks: int) -> dict[str, Any]:
        found: dict[str, Any]
        found, *_ = stock.on_ranks("tests.distributed.test_context_parallel", ranks, tmp_path_factory.mktemp("sharing"))
        return found

    return of


@pytest.mark.parametrize("ranks", exhaustive_but([2, 4], 2))
@pytest.mark.parametrize("name", CASES)
def test_losses_and_every_gradient_are_those_of_one_process(
    results: Callable[[int], dict[str, Any]], name: str, ranks: int
) -> None:
    expected, found = results(1)[name], results(ranks)[name]
    assert [key for key, value in expected.items() if not value.norm() > 0] == []
    assert differing_tensors(expected, found, TOLERANCE) == []


# --- On each rank -------------------------------------------------------------------------------------------------------


def shared(tokens: torch.Tensor, lengths: tuple[int, ...] = ()) -> dict[str, Any]:
    """This rank's part of the inputs that go with ``tokens`` [B, S + 1], in one row if it holds documents of ``lengths``."""
    from megatron.core import mpu
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch, length = tokens.shape[0], tokens.shape[1] - 1
    inputs = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(batch, length)}
    inputs["loss_mask"][:, [end - 1 for end in itertools.accumulate(lengths)]] = 0
    inputs["position_ids"] = torch.arange(length).expand(batch, length)
    mine = {name: tensor.contiguous() for name, tensor in inputs.items()}
    return {
        **get_batch_on_this_cp_rank(mine, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()),
        "attention_mask": None,
        "packed_seq_params": micro_batch.packed(lengths) if lengths else None,
    }


def whole(part: torch.Tensor) -> torch.Tensor:
    """The whole of what each rank has the part ``[B, S / ranks, …]`` of, in the order of the sequence."""
    from megatron.core import mpu

    group = mpu.get_context_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=group)
    halves = [one.chunk(2, dim=1) for one in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim=1)


def trained(model: Any, ranks: int, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The loss of each token, and the gradient of every parameter, which is on every rank."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # As stock's schedules for one micro-batch: where a rank has a part of a mean, gradients are to be averaged later.
    for scaler in (DSAIndexerLossAutoScaler, MoEAuxLossAutoScaler):
        scaler.main_loss_backward_scale = torch.full((1,), float(ranks))
    inputs = shared(micro_batch.draw_tokens(1 if lengths else B, S), lengths)
    packs = SimpleNamespace(dataloader_inter_document_masking=True) if lengths else None
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", packs):
        losses = model(**inputs)
        counted = inputs["loss_mask"].sum()
        torch.distributed.all_reduce(counted)
        by_token = model.config.calculate_per_token_loss  # where gradients are summed, and divided in the end
        micro_batch.backward((losses * inputs["loss_mask"]).sum() * (1 if by_token else ranks / counted))
    found = micro_batch.gradients(model)
    for gradient in found.values():
        torch.distributed.all_reduce(gradient)
        gradient /= counted if by_token else ranks
    return {"losses": whole(losses.detach()), **found}


def main(folder: Path) -> dict[str, Any]:
    """What one rank has found, as all have, by case."""
    from megacpp_mcore.layer_specs import training_step

    ranks, results = int(os.environ["WORLD_SIZE"]), dict[str, Any]()
    (own := folder / os.environ["RANK"]).mkdir()
    training_step._of_bridge = 0  # the step of the dense warm-up, which no loop counts here
    with stock.one_process(folder / "store", tensor_model_parallel_size=1, context_parallel_size=ranks):
        for name, (overrides, words) in CASES.items():
            layout = Layout(context=ranks)
            model = stock.stirred(stock.build(overrides, preset("nam56r_tiny"), own, *words, layout=layout))
            results[name] = trained(model, ranks, DOCUMENTS if "packed" in name else ())
    return results
