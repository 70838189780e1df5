"""The patch mtp-shared-block, and the multi-token prediction that it makes: no leak, a trained trunk, decayed weights.

Legend: B batch, S sequence; depth k (from 1) of K.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore import patches
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.patches.mtp_shared_block import PATCH
from tests import micro_batch, stock
from tests.errors import raises
from tests.lanes import exhaustive_but

NAME = "mtp-shared-block"
B, S, K = 2, 16, 2
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": K}}
_roll = stock.makes(PATCH)["_roll_tensor_packed_seq"]


@pytest.fixture
def model(process: Path) -> Any:
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process)
    stock.loss_scale(1.0)
    return model.train()


@pytest.fixture
def tokens() -> torch.Tensor:
    return micro_batch.draw_tokens(B, S)


def run(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    return micro_batch.losses_of(model, tokens, attention_mask=micro_batch.causal_mask(S), **options)


@contextlib.contextmanager
def recorded(model: Any) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Labels and losses of the depths 1 … K, then of the main head."""
    depths: list[tuple[torch.Tensor, torch.Tensor]] = []
    compute = model.compute_language_model_loss

    def computed(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        losses = compute(labels, logits)
        if losses.requires_grad:
            losses.retain_grad()
        depths.append((labels.clone(), losses))
        return losses

    with mock.patch.object(model, "compute_language_model_loss", computed):
        yield depths
    assert len(depths) == K + 1


def test_depth_k_predicts_the_token_at_t_plus_k_plus_1(model: Any, tokens: torch.Tensor) -> None:
    """And what is logged of it is a plain mean."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    with recorded(model) as depths:
        run(model, tokens)
    assert torch.equal(depths[K][0], tokens[:, 1:])
    for k, (labels, _) in enumerate(depths[:K], 1):
        assert torch.equal(labels[:, : S - k], tokens[:, k + 1 :])
    means = torch.stack([losses[:, : S - k].mean().detach() for k, (_, losses) in enumerate(depths[:K], 1)])
    assert torch.allclose(MTPLossLoggingHelper.tracker["loss_values"], means, rtol=1e-5)


@pytest.mark.parametrize("changed", exhaustive_but([5, 9, S - 1], 9))
def test_no_depth_sees_the_token_it_predicts(model: Any, tokens: torch.Tensor, changed: int) -> None:
    """Another token at ``changed``, only in the inputs: position t of depth k may notice from t = changed − k on."""
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 101) % 256
    with torch.no_grad(), recorded(model) as before:
        run(model, tokens)
    with torch.no_grad(), recorded(model) as after:
        run(model, other, labels=tokens[:, 1:])
    for index, depth in enumerate([*range(1, K + 1), 0]):  # the main loss is depth 0: it predicts t + 1
        first = changed - depth  # the position before it is the one that predicts the changed token
        difference = (before[index][1] - after[index][1]).abs()
        assert float(difference[:, :first].max()) < 1e-5
        assert float(difference[:, first].min()) > 1e-4


def test_the_trunk_and_the_one_block_get_gradients_from_mtp_alone(model: Any, tokens: torch.Tensor) -> None:
    assert len(model.mtp.layers) == 1
    model.config.dsa_indexer_loss_coeff = 0.0
    model.config.moe_aux_loss_coeff, model.config.moe_z_loss_coeff = 0.0, None
    grads = {}
    for scale in (0.0, 1.0):
        stock.loss_scale(scale)
        model.zero_grad(set_to_none=True)
        (run(model, tokens) * 0.0).sum().backward()
        grads[scale] = {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." not in name}
    for name, gradient in grads[0.0].items():
        assert gradient is None or torch.count_nonzero(gradient) == 0, name
    trained = {name for name, gradient in grads[1.0].items() if gradient is not None and torch.count_nonzero(gradient)}
    for name in grads[1.0]:
        assert name in trained, name


def depth_gradients(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    with recorded(model) as depths:
        (run(model, tokens, loss_mask=mask) * 0.0).sum().backward()
    return [losses.grad for _, losses in depths[:K]]


@pytest.mark.parametrize("masked", exhaustive_but([False, True], True))
def test_each_depth_weighs_by_the_decay(model: Any, tokens: torch.Tensor, masked: bool) -> None:
    """λ·β^(k−1) / Σ β^(j−1), as gradients of the mean loss of each depth's tokens; without the patch: λ / K for every depth."""
    weights = with_overrides(preset("nam56r_tiny"), OVERRIDES).mtp.weights
    assert weights == pytest.approx((0.3 / 1.6, 0.3 * 0.6 / 1.6))
    mask = torch.ones(B, S)
    mask[0, 4:] -= float(masked)
    decayed = depth_gradients(model, tokens, mask)
    patches.revert([NAME])
    equal = depth_gradients(model, tokens, mask)
    patches.apply([NAME])
    del model.config.mtp_loss_decay  # as in a configuration of stock's
    assert all(map(torch.equal, depth_gradients(model, tokens, mask), equal))
    for k in range(1, K + 1):
        shifted = torch.zeros(B, S)  # the last tokens have nothing to predict
        shifted[:, : S - k] = mask[:, k:]
        per_token = shifted / shifted.sum()
        assert torch.allclose(decayed[k - 1], weights[k - 1] * per_token, rtol=1e-5, atol=0)
        assert torch.allclose(equal[k - 1], 0.3 / K * per_token, rtol=1e-5, atol=0)


@pytest.mark.parametrize("model_class", [GPT, HYBRID])
def test_no_call_of_the_block_is_marked_as_the_first_of_a_step(
    process: Path, monkeypatch: pytest.MonkeyPatch, model_class: str
) -> None:
    """Megatron marks Transformer Engine's layers so, and the gradient of a marked call replaces those of other depths."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    for kind in (ColumnParallelLinear, RowParallelLinear):
        monkeypatch.setattr(kind, "is_first_microbatch", True, raising=False)
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process, model_class=model_class)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "is_first_microbatch")}
    unmarked = {name for name, layer in layers.items() if getattr(layer, "disable_parameter_transpose_cache", False)}
    assert unmarked == {name for name in layers if name.startswith("mtp.")}
    assert {name.rpartition(".")[2] for name in unmarked} >= {"eh_proj", "linear_proj", "linear_fc1", "linear_fc2"}


@pytest.mark.parametrize(
    ("depths", "fused", "fsdp", "is_refused"),
    [(2, True, True, True), (1, True, True, False), (2, False, True, False), (2, True, False, False)],
)
def test_megatron_fsdp_is_refused_where_it_would_lose_a_depth(depths: int, fused: bool, fsdp: bool, is_refused: bool) -> None:
    from megacpp_mcore.layer_specs.mtp import check_gradients

    config: Any = SimpleNamespace(mtp_num_layers=depths, gradient_accumulation_fusion=fused)
    wanted = raises(ModelError, "2 depths", "--no-gradient-accumulation-fusion")
    with wanted if is_refused else contextlib.nullcontext():
        check_gradients(config, SimpleNamespace(use_megatron_fsdp=fsdp))
    check_gradients(config, None)


def test_what_would_lose_a_depth_is_refused_where_the_layer_is_built(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megacpp_mcore.layer_specs import mtp

    seen: list[Any] = []
    monkeypatch.setattr(mtp, "check_gradients", lambda config, arguments: seen.append((config.mtp_num_layers, arguments)))
    monkeypatch.setattr(mtp, "global_vars", SimpleNamespace(_GLOBAL_ARGS=(arguments := SimpleNamespace())))
    stock.build(OVERRIDES, preset("nam56r_tiny"), process)
    assert seen == [(OVERRIDES["mtp"]["depth"], arguments)]


@pytest.mark.parametrize(
    ("training", "gradients", "hybrid", "is_asked"),
    [
        (True, True, False, True),
        (False, True, False, True),
        (True, False, False, True),
        (False, False, False, False),
        (True, True, True, False),
    ],
)
def test_ranks_ask_each_other_only_where_all_do_and_a_loss_is_read(
    process: Path, monkeypatch: pytest.MonkeyPatch, *, training: bool, gradients: bool, hybrid: bool, is_asked: bool
) -> None:
    """Neither in evaluation, nor where ranks run unequal numbers of micro-batches and would wait for each other for ever."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import process_mtp_loss

    group = mock.Mock(**{"size.return_value": 2})
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", exchanged := mock.Mock())
    original, labels = mock.create_autospec(process_mtp_loss), torch.ones(1, S)
    config = SimpleNamespace(calculate_per_token_loss=True, mtp_num_layers=K, hybrid_context_parallel=hybrid)
    with torch.set_grad_enabled(gradients):
        stock.makes(PATCH)["process_mtp_loss"](original)(
            None, labels, None, None, None, None, training, computes := mock.Mock(), config
        )
    assert exchanged.called is is_asked
    assert (original.call_args.args[7] is not computes) is is_asked


def test_bounds_on_the_host_are_left_to_stock() -> None:
    """The kernel-side shift reads bounds where the tokens are."""
    calls = []

    def stocks(tensor: Any, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None) -> None:
        calls.append(tensor.device.type)

    bounds = SimpleNamespace(cu_seqlens_q=torch.tensor([0, S]))
    _roll(stocks)(torch.ones(1, S, device="meta"), -1, -1, bounds)
    assert calls == ["meta"]
    rolled, _ = _roll(stocks)(torch.ones(1, S), -1, -1, bounds)
    assert rolled.sum() == S - 1
    assert calls == ["meta"]


def test_the_sum_of_what_was_rolled_is_left_out_where_stock_leaves_it_out() -> None:
    """As MTP asks for its hidden states since NVIDIA/Megatron-LM#6566."""

    def stocks(
        tensor: Any, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None, return_sum: bool = True
    ) -> Any:
        raise AssertionError

    bounds = SimpleNamespace(cu_seqlens_q=torch.tensor([0, S]))
    for words, expected in (({}, S - 1), ({"return_sum": False}, None)):
        assert _roll(stocks)(torch.ones(1, S), -1, -1, bounds, **words)[1] == expected


def test_specs_that_bring_no_mtp_are_left_to_stock(process: Path) -> None:
    from megacpp_mcore.patches.mtp_shared_block import _block_spec

    replacement = _block_spec.make(original := mock.create_autospec(lambda config, spec, vp_stage=None: None))
    mtp_spec = replacement("config", spec := SimpleNamespace(layer_specs=[]), vp_stage=1)
    assert mtp_spec is original.return_value
    assert replacement("config", SimpleNamespace(mtp=None)) is None
    assert replacement("config", SimpleNamespace(mtp="ours")) == "ours"
    original.assert_called_once_with("config", spec, vp_stage=1)
