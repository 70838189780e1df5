"""The patch embedding-gradient: every use of the table adds to ``main_grad``, of which one returns a placeholder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.model import preset
from megacpp_mcore.ops import embedding
from megacpp_mcore.patches import embedding_gradient as patch
from tests import stock
from tests.micro_batch import causal_mask, draw_tokens, losses_of

OVERRIDES = {"seq_length": 32, "dsa": {"schedule": "-FF", "topk": 8}, "mtp": {"depth": 2}}


def add_by_pytorch(total_VD: torch.Tensor, token_BS: torch.Tensor, gradient_BSD: torch.Tensor) -> None:
    total_VD.index_put_((token_BS,), gradient_BSD.to(total_VD.dtype), accumulate=True)


def test_the_trunk_and_every_depth_of_mtp_add_to_the_buffer(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process)
    assert model.config.mtp_num_layers > 1
    weight: Any = model.embedding.word_embeddings.weight

    def backward() -> None:
        losses_of(model, draw_tokens(2, 32, 1), attention_mask=causal_mask(32)).mean().backward()

    backward()
    truth, weight.grad = weight.grad, None
    monkeypatch.setattr(patch, "DEVICE", "cpu")
    monkeypatch.setattr(embedding, "add_gradient", add_by_pytorch)
    placeholders: list[Any] = []
    original = patch.placeholder
    monkeypatch.setattr(patch, "placeholder", lambda weight: placeholders.append(original(weight)) or placeholders[-1])
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(truth), False
    model.config.gradient_accumulation_fusion = True
    backward()
    assert len(placeholders) == 1
    assert placeholders[0].shape == weight.grad.shape
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad - 1, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": {"zero_out_wgrad": True}},
        {"weight": {"data": torch.zeros(8, 24)}},
        {"weight": {"__fsdp_param__": True}},
        {"config": {"gradient_accumulation_fusion": False}},
        {"config": {"pipeline_model_parallel_size": 2}},
        {"layer": {"gtp_remat_size": 2}},
        {"layer": {"tp_group": SimpleNamespace(size=lambda: 2)}},
    ],
    ids=lambda change: next(iter(*change.values())),
)
def test_other_tables_are_left_to_upstream(change: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "DEVICE", "cpu")
    weight: Any = torch.nn.Parameter(torch.randn(8, 16))
    weight.main_grad = torch.zeros(8, 16)
    config = SimpleNamespace(gradient_accumulation_fusion=True, pipeline_model_parallel_size=1)
    layer = SimpleNamespace(weight=weight, config=config, gtp_remat_size=1, tp_group=SimpleNamespace(size=lambda: 1))
    token = torch.zeros(1, 3, dtype=torch.long)
    assert patch._fits(layer, token)
    with torch.no_grad():
        assert not patch._fits(layer, token)
    assert not patch._fits(layer, token[0])
    for holder, values in change.items():
        for name, value in values.items():
            setattr({"weight": weight, "config": config, "layer": layer}[holder], name, value)
    assert not patch._fits(layer, token)
