"""E layers with our experts and router compared with stock's: same values, same gradients, and which one is chosen when.

Shape legend: S sequence, B batch, N experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training.models.dist_utils import _wrap_with_mp_wrapper

from megacpp_mcore.backends import STOCK, Candidate, Dispatcher, ProbeResult
from megacpp_mcore.backends.candidates import EXPERTS, OWN_EXPERTS
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.layer_specs import experts, parts
from megacpp_mcore.layer_specs.experts import StackedExperts, choose_experts, expert_layer_spec, expert_matrices
from megacpp_mcore.layer_specs.parts import parts_for
from megacpp_mcore.layer_specs.router import why_stock_router
from megacpp_mcore.model import preset
from megacpp_mcore.ops import add
from tests import micro_batch, stock
from tests.distributed.comparing import assert_same_bytes, differing_tensors
from tests.errors import raises

S, B = 32, 2
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8}}


@dataclass(frozen=True)
class Outcome:
    """What one micro-batch gave."""

    model: Any
    losses_BS: torch.Tensor
    gradients: Mapping[str, torch.Tensor]
    logged: Mapping[str, torch.Tensor]
    tokens_per_expert: torch.Tensor


def outcome(folder: Path, backends: Mapping[str, str], *words: str, is_packed: bool = False, **settings: Any) -> Outcome:
    """Losses of the same model, its gradients, and the matrices of each layer's experts as one tensor."""
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), folder, *words, backends=backends, **settings).train()
    stock.loss_scale(1.0)
    bias_N = torch.tensor([0.1, -0.05, 0.0, 0.2])
    routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    for router in routers:
        router.expert_bias += bias_N
    tokens, packing = micro_batch.draw_tokens(B, S), {}
    if is_packed:  # both samples in one row
        tokens, documents = micro_batch.draw_tokens(1, B * S), micro_batch.packed([S + 3, S - 3], tokens_per_sample=S)
        packing = {"packed_seq_params": documents, "position_ids": torch.arange(S).repeat(B)[None]}
    losses_BS = micro_batch.losses_of(model, tokens, **packing)
    losses_BS.mean().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if ".mlp.experts." not in name}
    for number, layer in enumerate(model.decoder.layers, 1):
        experts = getattr(layer.mlp, "experts", None)
        if isinstance(experts, StackedExperts):
            gradients |= {f"{number} first": experts.weight1.grad, f"{number} second": experts.weight2.grad}
        elif experts is not None:
            first, second = (torch.stack([matrix.grad for matrix in matrices]) for matrices in expert_matrices(experts))
            gradients |= {f"{number} first": first, f"{number} second": second}
    logged = {name: entry.values.clone() for name, entry in get_moe_metrics_tracker()._metrics.items()}
    counted = torch.stack([router.local_tokens_per_expert for router in routers])
    return Outcome(model, losses_BS.detach(), gradients, logged, counted)


@pytest.fixture(scope="module")
def truth(process: Path) -> Outcome:
    return outcome(process, {EXPERTS: STOCK, "router": STOCK})


def test_experts_are_stocks_bit_for_bit(process: Path, truth: Outcome) -> None:
    """Initial values, losses, and the gradient of every parameter, in fp32 on a CPU."""
    actual = outcome(process, {})
    experts, stock_experts = (trained.model.decoder.layers[1].mlp.experts for trained in (actual, truth))
    assert (type(experts).__name__, type(stock_experts).__name__) == ("StackedExperts", "SequentialMLP")
    assert actual.model.decoder.layers[1].mlp.token_dispatcher is None
    for index, expert in enumerate(stock_experts.local_experts):
        assert torch.equal(experts.weight1[index], expert.linear_fc1.weight)
        assert torch.equal(experts.weight2[index], expert.linear_fc2.weight)
        assert experts.weight1.allreduce is expert.linear_fc1.weight.allreduce
    assert torch.equal(actual.losses_BS, truth.losses_BS)
    assert_same_bytes(truth.gradients, actual.gradients)
    assert_same_bytes(truth.logged, actual.logged)


@pytest.mark.parametrize(
    ("how", "words", "recompute"),
    [("packed", (), []), ("layers", stock.full_recompute(), []), ("experts", (), ["experts"])],
)
def test_sums_of_three_are_stocks_bit_for_bit(
    process: Path,
    truth: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    words: tuple[str, ...],
    recompute: list[str],
) -> None:
    """As on a GPU, with PyTorch's additions: the shared expert is added with the residual, gradients of the readers at once."""
    is_packed = how == "packed"
    if is_packed:
        truth = outcome(process, {EXPERTS: STOCK, "router": STOCK}, is_packed=True)
    sums = []
    monkeypatch.setattr(add, "_added", lambda a, b, c: sums.append(None) or (a + b) + c)
    on_a_gpu = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(experts.ExpertsLayer, "adds_three", on_a_gpu, raising=False)
    actual = outcome(process, {"router": STOCK}, *words, recompute=recompute, is_packed=is_packed)
    layers = [layer.mlp for layer in actual.model.decoder.layers if hasattr(layer.mlp, "router")]
    assert len(sums) == len(layers)
    assert not any(layer._readers or layer._shared is not None for layer in layers)
    assert torch.equal(actual.losses_BS, truth.losses_BS)
    assert differing_tensors(truth.gradients, actual.gradients, 0.0) == []


def test_the_router_is_stocks_to_rounding(process: Path, truth: Outcome) -> None:
    """Its decisions to the last bit: tokens that go to other experts are counted."""
    actual = outcome(process, {"router": "reference"})
    assert type(actual.model.decoder.layers[1].mlp.router).__name__ == "Router"
    assert torch.equal(actual.tokens_per_expert, truth.tokens_per_expert)
    torch.testing.assert_close(actual.losses_BS, truth.losses_BS, rtol=1e-6, atol=0)
    assert actual.logged.keys() == truth.logged.keys() >= {"z_loss", "seq_load_balancing_loss"}
    for name, values in truth.logged.items():
        torch.testing.assert_close(actual.logged[name], values, rtol=2e-6, atol=0, msg=name)
    assert differing_tensors(truth.gradients, actual.gradients, 2e-6) == []


def test_an_evaluation_counts_and_logs_nothing(process: Path) -> None:
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process, backends={"router": "reference"}).eval()
    moe = model.decoder.layers[1].mlp
    with torch.no_grad():
        moe(torch.randn(S, B, 128, generator=torch.Generator().manual_seed(0)))
    assert not get_moe_metrics_tracker()._metrics
    assert not moe.router.local_tokens_per_expert.any()


def test_a_16_bit_model_counts_in_fp32(process: Path) -> None:
    """By the patch expert-counts, which the spec applies."""
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process, precision="bf16")
    _wrap_with_mp_wrapper([model], model.config, Float16Module)
    routers = [layer.mlp.router for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    assert {router.local_tokens_per_expert.dtype for router in routers} == {torch.float32}


def test_gradients_are_added_where_stocks_would_be(process: Path) -> None:
    """Into ``main_grad`` where the run fuses accumulation; the hooks of data parallelism, if any, see the flag."""
    layer = stock.build(OVERRIDES, preset("nam56r_tiny"), process).train().decoder.layers[1].mlp
    weights = list(layer.experts.parameters())
    hidden = torch.randn(S, B, 128, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(layer(hidden)[0].square().sum(), weights)
    for fused, flagged in ((True, False), (True, True), (False, True)):
        layer.experts.config.gradient_accumulation_fusion = fused
        for weight in weights:
            weight.grad, weight.main_grad = None, torch.ones_like(weight)
            if flagged:
                weight.grad_added_to_main_grad = False
        layer(hidden)[0].square().sum().backward()
        for weight, gradient in zip(weights, expected, strict=True):
            assert getattr(weight, "grad_added_to_main_grad", None) is (fused if flagged else None)
            assert (weight.grad is not None) is flagged
            assert torch.equal(weight.main_grad, 1 + gradient if fused else torch.ones_like(weight))
            assert fused or torch.equal(weight.grad, gradient)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("quant_recipe", object(), "FP8 experts"),
        ("use_transformer_engine_op_fuser", True, "--use-transformer-engine-op-fuser"),
        ("save_tokens_per_expert_interval", 5, "--save-tokens-per-expert-interval"),
    ],
)
def test_what_stock_alone_can_do_is_stocks_and_the_reason(
    config: Any, field: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_experts(config, Dispatcher()).observed == OWN_EXPERTS
    if hasattr(config, field):
        setattr(config, field, value)
    else:
        arguments = SimpleNamespace(optimizer="adam", **{field: value})
        monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", arguments)
    chosen = choose_experts(config, Dispatcher())
    assert (chosen.requested, chosen.observed) == ("auto", STOCK)
    assert says in chosen.reason
    assert choose_experts(config, Dispatcher({EXPERTS: STOCK})).reason == "requested by name"
    with raises(BackendError, f"experts: {OWN_EXPERTS}", says, code="stock-only"):
        choose_experts(config, Dispatcher({EXPERTS: OWN_EXPERTS}))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_moe_experts", 512, "experts 512 > 256"),
        ("moe_ffn_hidden_size", 900, "ffn 900 is not a multiple of 8"),
        ("params_dtype", torch.float32, "dtype float32 is not one of bfloat16"),
    ],
)
def test_on_a_gpu_stocks_run_where_ours_have_no_kernel(
    config: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, says: str
) -> None:
    """And not our reference, unless it or our experts are asked for by name."""
    for module in (experts, parts):
        monkeypatch.setattr(module, "compute_device", lambda: "cuda")
    monkeypatch.setattr(Candidate, "present", lambda self: ProbeResult(True, "taken to be there"))
    config.params_dtype = torch.bfloat16
    assert experts.choose_experts(config, Dispatcher()).observed == OWN_EXPERTS
    setattr(config, field, value)
    chosen = experts.choose_experts(config, dispatcher := Dispatcher())
    assert chosen.observed == STOCK
    assert "routed_mlp: triton: " in chosen.reason
    assert says in chosen.reason
    assert [record["op"] for record in dispatcher.observed_backends()] == [EXPERTS]
    for requests in ({EXPERTS: OWN_EXPERTS}, {"routed_mlp": "reference"}):
        assert experts.choose_experts(config, Dispatcher(requests)).observed == OWN_EXPERTS


@pytest.mark.parametrize(
    ("fields", "asked", "values"),
    [
        (
            {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"},
            "routed_mlp",
            ["grouped_mlp", "--moe-token-dispatcher-type allgather"],
        ),
        (
            {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
            "grouped_mlp",
            ["routed_mlp", "--moe-token-dispatcher-type alltoall"],
        ),
        ({"moe_shared_expert_overlap": True, "expert_model_parallel_size": 2}, "routed_mlp", ["name grouped_mlp"]),
        ({}, "grouped_mlp", ["name routed_mlp"]),
        ({"use_transformer_engine_op_fuser": True}, "routed_mlp", ["--use-transformer-engine-op-fuser"]),
    ],
)
def test_a_backend_by_name_of_an_op_that_does_not_run(
    config: Any, fields: dict[str, Any], asked: str, values: list[str]
) -> None:
    vars(config).update(fields)
    with raises(BackendError, asked, *values):
        choose_experts(config, Dispatcher({asked: "triton_fp8"}))
    if "op_fuser" not in str(fields):
        both = Dispatcher(dict.fromkeys(("routed_mlp", "grouped_mlp"), "triton_fp8"))
        assert choose_experts(config, both).observed == OWN_EXPERTS


def test_an_optimizer_that_wants_matrices_has_stocks(config: Any) -> None:
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", SimpleNamespace(optimizer="muon")):
        assert "--optimizer muon" in choose_experts(config, Dispatcher()).reason
    config.megacpp_optimizer = "muon"  # as Bridge's recipes say it, which has no arguments
    with mock.patch("megatron.training.global_vars._GLOBAL_ARGS", None):
        assert "--optimizer muon" in choose_experts(config, Dispatcher()).reason


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("moe_router_topk", 1, "--moe-router-topk 1"), ("moe_router_fusion", True, "--moe-router-fusion")],
)
def test_a_router_that_stock_alone_has(config: Any, field: str, value: Any, says: str) -> None:
    assert why_stock_router(config) is None
    setattr(config, field, value)
    assert says in str(why_stock_router(config))


def test_a_dispatcher_that_is_not_installed_is_named(config: Any) -> None:
    config.moe_token_dispatcher_type = "flex"
    with raises(ModelError, "flex", "deep_ep", "--moe-token-dispatcher-type alltoall"):
        expert_layer_spec(config, parts_for(config), Dispatcher())
