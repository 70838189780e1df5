"""Which layers CUDA graphs hold, what a graph is given, and which runs are refused; the graphs themselves are in tests/gpu.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

from megacpp_mcore.backends.candidates import OWN_EXPERTS
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import graphs
from megacpp_mcore.model import Model, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID, Recompute
from megacpp_mcore.ops import quantised_weights
from megacpp_mcore.te.fp8_scopes import FP8
from megacpp_mcore.util.graph_reset import reset_graphs
from tests import micro_batch, stock
from tests.errors import raises

S, LENGTHS = 32, (5, 1, 14, 12)
HOST_READS = "the host reads how many rows each expert gets"


def run(**changes: Any) -> Any:
    """The configuration of a run on a GPU that asks for graphs."""
    flags = {"cuda_graph_impl": "local", "cuda_graph_modules": [], "transformer_impl": "transformer_engine"}
    sizes = {f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "expert")}
    sizes["context_parallel_size"] = 1
    settings = {**sizes, "moe_shared_expert_overlap": False, "moe_token_dispatcher_type": "allgather"}
    return SimpleNamespace(**{**flags, **settings, "recompute_granularity": None, "recompute_modules": None, **changes})


def plan(model: Model, recompute: Recompute | None = None, experts: str = OWN_EXPERTS, **changes: Any) -> graphs.GraphPlan:
    dispatcher: Any = None
    settings: Any = SimpleNamespace(recompute=recompute or Recompute())
    with mock.patch.object(graphs, "choose_experts", return_value=SimpleNamespace(observed=experts)):
        return graphs.graph_plan(model, run(**changes), dispatcher, settings)


def test_the_plan_names_what_is_captured_and_why_the_rest_is_not() -> None:
    quarter = preset("nam56r_quarter")
    assert plan(quarter).describe() == ["CUDA graphs (local) of layers A 1 5 9 13 MTP, E 2 4 6 8 10, M 3 7 11, R 12"]
    warming = with_overrides(quarter, {"dsa": {"warmup_steps": 7}, "mtp": {"depth": 0}})
    assert plan(warming, expert_model_parallel_size=2, moe_token_dispatcher_type="alltoall").describe() == [
        "CUDA graphs (local) of layers A 1, M 3 7 11, R 12",
        f"no CUDA graph of layers E 2 4 6 8 10: {HOST_READS}",
        "no CUDA graph of layers A 5 9 13: dense attention ends after dsa.warmup_steps (7), in the middle of a run",
    ]
    for why, others in (
        (HOST_READS, plan(quarter, experts="stock")),
        (HOST_READS, plan(quarter, moe_shared_expert_overlap=True)),
        ("recompute: experts", plan(quarter, Recompute(experts=True))),
        ("--cuda-graph-modules attn", plan(quarter, cuda_graph_modules=[CudaGraphModule.attn])),
    ):
        assert others.eager == dict.fromkeys((2, 4, 6, 8, 10), why)
    with mock.patch("atexit.register") as register:
        plan(quarter)
        assert not register.called
        plan(quarter, tensor_model_parallel_size=2)
        assert not plan(quarter, expert_model_parallel_size=2).eager
    assert register.mock_calls == [mock.call(reset_graphs)] * 2  # these graphs hold collectives
    without = plan(quarter, cuda_graph_impl="none")
    layer = SimpleNamespace()
    assert not without.describe()
    assert without.spec(layer, 1) is layer  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "recompute", "device", "values"),
    [
        ({"fp8": FP8(recipe="delayed")}, [], "cuda", ["recipe: delayed", "block or current"]),
        ({"cuda_graph_impl": "transformer_engine"}, [], "cuda", ["-impl transformer_engine", "--cuda-graph-impl local"]),
        ({"cuda_graph_impl": "full_iteration"}, [], "cuda", ["--cuda-graph-impl full_iteration", "--cuda-graph-impl local"]),
        ({}, [], "cpu", ["--cuda-graph-impl", "CPU"]),
        ({"cuda_graph_modules": [CudaGraphModule.moe_router, CudaGraphModule.attn]}, [], "cuda", ["attn moe_router"]),
        ({"transformer_impl": "local"}, [], "cuda", ["--transformer-impl transformer_engine"]),
        ({"context_parallel_size": 2}, [], "cuda", ["--context-parallel-size", "--cuda-graph-impl"]),
        ({}, ["m", "experts"], "cuda", ["recompute: m"]),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, [], "cuda", ["-modules core_attn"]),
    ],
)  # fmt: skip
def test_graphs_that_layers_cannot_be_given_are_refused(
    changes: dict[str, Any], recompute: list[str], device: str, values: list[str]
) -> None:
    fp8 = changes.pop("fp8", FP8())
    settings: Any = SimpleNamespace(recompute=Recompute(**dict.fromkeys(recompute, True)), fp8=fp8)
    with mock.patch.object(graphs, "compute_device", return_value=device), raises(ModelError, "nam56r", *values):
        graphs.check_graphs(preset("nam56r"), run(**changes), settings)


def test_a_pipeline_s_graphs_are_of_as_many_micro_batches_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = SimpleNamespace(recompute=Recompute(), fp8=FP8())
    monkeypatch.setattr(graphs, "compute_device", lambda: "cuda")
    monkeypatch.setattr(graphs.global_vars, "_GLOBAL_ARGS", SimpleNamespace(rampup_batch_size=[8, 8, 100]))
    graphs.check_graphs(preset("nam56r"), run(), settings)
    with raises(ModelError, "--rampup-batch-size", "--cuda-graph-impl"):
        graphs.check_graphs(preset("nam56r"), run(pipeline_model_parallel_size=2), settings)


def test_graphs_that_layers_can_be_given_are_not() -> None:
    settings: Any = SimpleNamespace(recompute=Recompute(experts=True), fp8=FP8(recipe="block"))
    with mock.patch.object(graphs, "compute_device", return_value="cuda"):
        graphs.check_graphs(preset("nam56r"), run(cuda_graph_modules=[CudaGraphModule.attn]), settings)
    graphs.check_graphs(preset("nam56r"), run(cuda_graph_impl="none", transformer_impl="local"), None)


class Recording:
    """Runs a layer as Megatron's manager does around a capture: discarded warm-up runs, then one that counts."""

    given: list[dict[str, Any]]

    def __init__(self, _: Any) -> None:
        pass

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert not args
        self.given.append(kwargs)
        hidden_SBD = torch.zeros_like(kwargs["hidden_states"]).requires_grad_()
        cuda_graphs._set_warmup_start()
        try:
            for _ in range(2):
                output, _ = torch.nn.Module.__call__(layer, **kwargs | {"hidden_states": hidden_SBD})
                torch.autograd.grad(output, hidden_SBD, torch.zeros_like(output))
        finally:
            cuda_graphs._set_warmup_end()
        return torch.nn.Module.__call__(layer, **kwargs)


def test_weights_that_graphs_read_quantised_are_renewed_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the method that stock calls next after the hooks that gather a layer's weights."""
    source = inspect.getsource(cuda_graphs.CudaGraphManager.__call__)
    assert re.search(r"call_ddp_preforward_hook\(module\)\n\s+runner = self.get_cudagraph_runner\(", source)
    calls: list[str] = []
    layer = torch.nn.Linear(4, 4)
    copies = lambda w, into: (w.detach().clone() if into is None else into[0].copy_(w),)  # noqa: E731
    quantised_weights.renew_before_replays([layer.weight])
    (made,) = quantised_weights.kept(layer.weight, copies)
    with torch.no_grad():
        layer.weight.mul_(2)
    monkeypatch.setattr(
        cuda_graphs.CudaGraphManager,
        "get_cudagraph_runner",
        lambda *args: calls.append(str(torch.equal(made, layer.weight))),
    )
    graphs.GraphManager.get_cudagraph_runner(graphs.GraphManager.__new__(graphs.GraphManager), layer, (), {}, True)
    assert calls == ["True"]


@pytest.fixture(scope="module")
def build(process: Path) -> Callable[..., Any]:
    """Builds equal models, with or without layers that are run as captured ones are, each once."""

    @functools.cache
    def make(*, captured: bool, model_class: str = GPT) -> Any:
        planned = plan(preset("nam56r_tiny")) if captured else graphs.GraphPlan()
        with (
            mock.patch("megacpp_mcore.layer_specs.nam56r.graph_plan", return_value=planned),
            mock.patch.object(graphs, "GraphManager", Recording),
        ):
            overrides = {"seq_length": S, "dsa": {"topk": 8}, "mtp": {"depth": 2}}
            model = stock.build(overrides, preset("nam56r_tiny"), process, model_class=model_class)
        for layer in model.decoder.layers:
            layer.config.cuda_graph_impl = "local" if captured else "none"
        return model.train()

    return make


@pytest.mark.parametrize(("model_class", "packed"), [(GPT, False), (GPT, True), (HYBRID, True)])
def test_a_captured_layer_is_given_tensors_and_what_surrounds_a_capture_leaves_no_trace(
    build: Callable[..., Any], model_class: str, packed: bool
) -> None:
    Recording.given = []
    stock.loss_scale(1.0)
    tokens = micro_batch.draw_tokens(1, S)
    documents = {"packed_seq_params": micro_batch.packed(LENGTHS, tokens_per_sample=S)} if packed else {}
    outcomes = []
    for captured in (False, True):
        model = build(captured=captured, model_class=model_class)
        DSAIndexerLossLoggingHelper.clean_loss_in_tracker()
        losses, gradients = micro_batch.outcome(model, tokens, **documents)
        logged = DSAIndexerLossLoggingHelper.tracker["values"].clone()
        outcomes.append([losses, logged, *gradients.values()])
    for plain, recorded in zip(*outcomes, strict=True):
        assert torch.equal(plain, recorded)
    assert len(Recording.given) == 12 + 2  # MTP at two depths
    for number, kwargs in enumerate(Recording.given, 1):
        arguments = {name: value for name, value in kwargs.items() if value is not None}
        assert arguments.pop("hidden_states").shape == (S, 1, 128)
        if packed and number in (2, 4, 6, 8, 10):
            assert arguments.pop("packed_seq_params") == PackedSeqParams(tokens_per_sample=S)
        elif packed:
            documents_BS = arguments.pop("attention_mask")
            assert (documents_BS.dtype, documents_BS.shape) == (torch.int32, (1, S))
        assert not arguments


def test_a_graph_is_for_training_alone(build: Callable[..., Any]) -> None:
    """In an evaluation it would count and log tokens."""
    layer = build(captured=True).decoder.layers[2]
    assert layer._should_call_local_cudagraph(hidden_states=None)
    with torch.no_grad():
        assert not layer._should_call_local_cudagraph(hidden_states=None)
    assert not layer.eval()._should_call_local_cudagraph(hidden_states=None)
    layer.train()
