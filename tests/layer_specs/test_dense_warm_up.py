"""The dense warm-up of DSA's indexer: what it computes and trains, when it ends, and who says the step.

Legend: S queries and keys, B batch, H indexer heads, D indexer width, A attention heads, K absorbed width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import global_vars

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import steps
from megacpp_mcore.model import preset
from megacpp_mcore.ops.indexer import reference
from megacpp_mcore.ops.indexer.chunked import dense_grad
from megacpp_mcore.ops.packed.documents import other_documents
from megacpp_mcore.ops.sparse_mla.reference import dense_attention_target
from tests import stock

S, B, H, D, A, K = 24, 2, 3, 8, 4, 10
FULL, SHARED = 5, 9


@pytest.mark.parametrize("query_chunk", [None, 5])
@pytest.mark.parametrize("lengths", [None, (9, 1, 14)])
def test_the_gradients_are_those_of_the_reference(query_chunk: int | None, lengths: tuple[int, ...] | None) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, w, query, key = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((S, B, H, D), (S, B, D), (S, B, H), (S, B, A, K), (S, B, 1, K))
    )
    seq_idx, mask = None, None
    if lengths is not None:
        seq_idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
        mask = other_documents(seq_idx.expand(B, S).contiguous())
    trained = [tensor.clone().requires_grad_() for tensor in (q, k, w)]
    target = dense_attention_target(query, key.squeeze(2), softmax_scale=0.4, attention_mask=mask)
    loss = reference.indexer_loss_dense(reference.indexer_scores(*trained), target, attention_mask=mask)
    (3 * loss).backward()
    found = dense_grad(
        q, k, w, query, key,
        weight=torch.tensor(3 / (S * B), dtype=torch.float64), softmax_scale=0.4, seq_idx_S=seq_idx, query_chunk=query_chunk,
    )  # fmt: skip
    assert float(found[0].mean()) == pytest.approx(float(loss), rel=1e-9)
    for gradient, tensor in zip(found[1:], trained, strict=True):
        assert torch.allclose(gradient, tensor.grad, rtol=1e-8, atol=1e-12)


@pytest.fixture
def make(process: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def build(dsa: dict[str, Any], *words: str, step: int = 0) -> Any:
        overrides = {"seq_length": S, "dsa": {"loss_coeff": 0.1, **dsa}, "mtp": {"depth": 0}}
        monkeypatch.setattr(steps, "_assumed", step)
        return stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process, *words), 0.1)

    return build


def trained(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses, and the gradient of every parameter that has one."""
    from megatron.core.pipeline_parallel.schedules import custom_backward

    tokens = torch.randint(0, 256, (B, S + 1), generator=torch.Generator().manual_seed(3))
    losses = model(tokens[:, :-1], torch.arange(S).expand(B, S), None, labels=tokens[:, 1:])
    custom_backward(losses.mean(), None)
    return losses.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def of_the_indexer(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients.items() if ".indexer." in name}


def test_the_trunk_trains_as_with_every_key_selected(make: Callable[..., Any]) -> None:
    losses, gradients = trained(make({"topk": 4, "warmup_steps": 2}, step=1))
    expected, others = trained(make({"topk": S}))
    assert torch.allclose(losses, expected, rtol=1e-5)
    assert gradients.keys() == others.keys()
    for name in gradients.keys() - of_the_indexer(gradients).keys():
        assert float((gradients[name] - others[name]).norm()) <= 1e-4 * float(others[name].norm()) + 1e-9, name


def test_the_indexer_learns_its_own_layers_attention_over_every_key(make: Callable[..., Any]) -> None:
    """With every key selected the sparse loss is the dense one, for an indexer that learns from its own layer."""
    found = of_the_indexer(trained(make({"topk": 4, "warmup_steps": 2}))[1])
    expected = of_the_indexer(trained(make({"topk": S, "distill": "own"}))[1])
    assert len(found) == 5
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float(gradient.norm()) > 0
        assert float((found[name] - gradient).norm()) <= 1e-3 * float(gradient.norm()), name


def test_after_the_last_step_of_it_keys_are_selected(make: Callable[..., Any]) -> None:
    losses, gradients = trained(make({"topk": 4, "warmup_steps": 2}, step=2))
    expected, others = trained(make({"topk": 4}))
    assert torch.equal(losses, expected)
    assert all(torch.equal(gradients[name], others[name]) for name in others)
    assert not torch.allclose(losses, trained(make({"topk": 4, "warmup_steps": 2}, step=1))[0], rtol=1e-3)


def test_recompute_changes_nothing(make: Callable[..., Any]) -> None:
    losses, gradients = trained(make({"topk": 4, "warmup_steps": 2}))
    for words in (stock.full_recompute(), stock.selective_recompute("core_attn")):
        again, others = trained(make({"topk": 4, "warmup_steps": 2}, *words))
        assert torch.equal(losses, again)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            assert float((others[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()) + 1e-9, name


def test_documents_per_token_loss_and_the_factor_of_the_schedule(make: Callable[..., Any]) -> None:
    """Two documents in a packed row: the indexer's gradients, and what is logged, as with every key selected."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel.schedules import custom_backward
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Tracker

    lengths = torch.tensor([0, 9, S, S, S], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=S, max_seqlen_kv=S
    )
    found = []
    for dsa in ({"topk": 4, "warmup_steps": 2}, {"topk": S, "distill": "own"}):
        model = make(dsa, "--calculate-per-token-loss")
        stock.loss_scale(0.25)
        Tracker.tracker["values"].zero_()
        tokens = torch.randint(0, 256, (1, S + 1), generator=torch.Generator().manual_seed(3))
        positions = torch.arange(S)[None]
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:], packed_seq_params=packed)
        custom_backward(losses.mean(), None)
        gradients = {name: one.grad for name, one in model.named_parameters() if ".indexer." in name}
        found.append((losses.detach(), gradients, Tracker.tracker["values"].clone()))
    (losses, gradients, logged), (expected, others, shown) = found
    assert torch.allclose(losses, expected, rtol=1e-5)
    assert torch.allclose(logged, shown, rtol=1e-4)
    assert float(logged[FULL - 1]) > 0
    assert len(gradients) == 5
    for name, gradient in others.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-3 * float(gradient.norm()), name


def test_the_step_is_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def args(**given: int) -> None:
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", SimpleNamespace(**given))

    args(iteration=7)  # a script that only loads
    assert steps.ended(True) == steps.ended(False) == 7
    args(iteration=7, curr_iteration=9)
    assert (steps.ended(True), steps.ended(False)) == (9, 10)
    args(iteration=7, curr_iteration=0)  # a finished run that is evaluated once more: no step sets the number
    assert steps.ended(False) == 7
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    monkeypatch.setattr(steps, "_of_bridge", None)
    with pytest.raises(ModelError, match=r"dsa\.warmup_steps needs to know the training step"):
        steps.ended(True)
    with steps.assumed(3):
        assert steps.ended(True) == 3
    forward_step = steps.count_from(lambda state, *given: given)
    assert forward_step(SimpleNamespace(train_state=SimpleNamespace(step=11)), 1, 2) == (1, 2)
    assert steps.ended(True) == 11
