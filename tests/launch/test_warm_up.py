"""What a warm-up of regions compiles, what it leaves behind (nothing), and what a compiled region promises.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.policy import EXPLICIT, SKIPPED, CompilePolicy
from tests.layer_specs import test_regions
from tests.layer_specs.test_regions import FAMILIES, REGIONS, B, Graphs, S, losses_BS

build = test_regions.build

TRUNK = {**test_regions.OVERRIDES, "mtp": {"depth": 0}}


def policy(**fields: Any) -> CompilePolicy:
    return CompilePolicy(**{"mode": "regional", "warm_up": EXPLICIT, "reason": "", "why": "static", **fields})


SKIPPED_MOE = {"warm_up": SKIPPED, "reason": "regional-moe", "why": "stalls"}


def train_stock(model: Any, chosen: CompilePolicy | None = None, **changes: Any) -> str:
    """What is said when stock Megatron has built ``model`` and is about to train it."""
    from megatron import training as package
    from megatron.training import training

    from megacpp_mcore.layer_specs import regions

    given = {"seq_length": S, "micro_batch_size": B, "dataloader_inter_document_masking": False}
    given |= {"tensor_model_parallel_size": 1, "sequence_parallel": False, **changes}
    said: list[str] = []
    built = ([model], None, None)
    with (
        mock.patch.object(training, "setup_model_and_optimizer", return_value=built),
        mock.patch.object(package, "get_args", return_value=Namespace(**given)),
    ):
        before = training.setup_model_and_optimizer
        with regions.before_training(chosen or policy(), said.append):
            assert training.setup_model_and_optimizer() is built
        assert training.setup_model_and_optimizer is before
    compiles, line = said
    names = ", ".join(sorted({each.name for each in regions._REGIONS.values()}))
    assert compiles == f"compile: regional compiles {names or 'nothing: the backends of this run have no region'}"
    return line


@pytest.mark.parametrize("recompute", [pytest.param([], marks=pytest.mark.exhaustive), FAMILIES])
def test_a_warm_up_compiles_all_and_leaves_no_trace(build: Callable[..., Any], recompute: list[str]) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    from megacpp_mcore.layer_specs.core_attention import SparseCoreAttention

    graphs, tracker = Graphs(), DSAIndexerLossLoggingHelper.tracker
    tracker.clear()
    model = build(compile="regional", backend=graphs, recompute=recompute, tiny=TRUNK)
    cores = [module for module in model.modules() if isinstance(module, SparseCoreAttention)]
    state, parameters = torch.get_rng_state(), {name: p.clone() for name, p in model.named_parameters()}
    said = train_stock(model)
    assert said.startswith("compile warm-up: explicit, before step 1: layers ")
    assert all(name in said for name in REGIONS)
    assert said.partition("(")[0].count(",") - 1 == len({"full A", "Full", "M", "R"}) - 1
    warmed = graphs.count
    assert warmed > 0
    assert not any(bool(value.any()) for value in tracker.values())  # where a loss would leave who reduces it
    assert {len(core.index_cache) for core in cores} == {0}
    assert all(core.training for core in cores)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, parameters[name]) for name, p in model.named_parameters())
    losses_BS(model, 1).mean().backward()
    assert graphs.count == warmed
    assert float(tracker["values"].sum()) > 0  # a step's loss is found there
    assert "(no regions)" in train_stock(model)  # named is what this one has compiled


@pytest.mark.parametrize(
    ("chosen", "changes", "says", "rows"),
    [
        (policy(), {}, "explicit, before step 1: layers none (no regions)", S),
        (policy(), {"sequence_parallel": True, "tensor_model_parallel_size": 2}, "explicit, before step 1", S // 2),
        (policy(), {"dataloader_inter_document_masking": True}, "skipped (packed)", None),
        (policy(**SKIPPED_MOE), {}, "skipped (regional-moe): stalls", None),
        (policy(**SKIPPED_MOE, precompile=True), {}, "(regional-moe): stalls; static regions precompiled: layers", S),
        (policy(warm_up=SKIPPED, reason="not-cuda", why="no GPU"), {}, "skipped (not-cuda): no GPU", None),
    ],
)
def test_a_warm_up_is_what_policy_and_run_say(
    process: Any, chosen: CompilePolicy, changes: dict[str, Any], says: str, rows: int | None
) -> None:
    from megacpp_mcore.layer_specs import regions

    layer = mock.Mock(spec=regions.RegionLayer, family="M", self_attention=mock.Mock(), layer_number=3)
    model = mock.Mock(modules=lambda: [] if "none" in says else [layer])
    with mock.patch.object(regions, "_run_layer") as run, mock.patch.dict(regions._REGIONS, clear=True):
        said = train_stock(model, chosen, **changes)
    assert says in said
    assert run.call_args_list == ([mock.call(layer, rows, B)] if rows and "none" not in says else [])


@pytest.mark.parametrize("words", [("--bf16", "--fp32-residual-connection"), ("--bf16",)])
def test_a_warm_up_hands_layers_the_dtype_of_the_residual_stream(
    build: Callable[..., Any], words: tuple[str, ...]
) -> None:
    layer = build(*words, compile="regional", backend=Graphs(), tiny=TRUNK).decoder.layers[2]
    seen: list[torch.dtype] = []
    layer.input_layernorm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    layer.self_attention.forward = lambda hidden_SBD, attention_mask: (
        hidden_SBD,
        None,
    )  # torch's own norm does not cast back
    assert "layers 3 " in train_stock(layer)
    assert set(seen) == {torch.float32 if len(words) == 2 else torch.bfloat16}


# --- a region -----------------------------------------------------------------------------------------------------------


def make_region(function: Callable[..., Any], backend: Any = "eager") -> Any:
    from megacpp_mcore.layer_specs.regions import Region

    return Region("test", function, backend)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


def test_a_part_that_cannot_be_traced_is_an_error(process: Any) -> None:
    from torch._dynamo.exc import Unsupported

    region = make_region(broken)
    with pytest.raises(Unsupported, match="graph_break"):
        region(torch.ones(3))
    assert region.graphs == 0


def test_a_region_counts_its_graphs_and_has_room_for_more_than_dynamo_gives(
    process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import config

    from megacpp_mcore.layer_specs import regions

    most = 8 + 4  # 8 is Dynamo's own limit
    assert most < regions.MAX_GRAPHS
    monkeypatch.setattr(regions, "MAX_GRAPHS", most)
    with config.patch(recompile_limit=8):
        graphs = Graphs()
        region, other = make_region(doubled, graphs), make_region(doubled)
        for _ in range(2):
            for rows in range(2, 2 + most):
                assert torch.equal(region(torch.ones(rows)), torch.full((rows,), 2.0))
        other(torch.ones(2))
        assert region.graphs == graphs.count == most
        assert other.graphs == 1
        with pytest.raises(ModelError, match=rf"region test .* {most} "):
            region(torch.ones(2 + most))
        assert torch.equal(region(torch.ones(2)), torch.full((2,), 2.0))  # those it has still run


def test_a_warm_up_compiles_what_selects_keys_whatever_the_step(build: Callable[..., Any]) -> None:
    """With steps of dense attention first: the indexer's region is there when they end, and nobody says the step yet."""
    model = build(compile="regional", backend=Graphs(), tiny={**TRUNK, "dsa": {**TRUNK["dsa"], "warmup_steps": 5}})
    assert "indexer score" in train_stock(model)


# --- several segments ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_several_segments_compiled_are_as_several_plain_ones(build: Callable[..., Any]) -> None:
    """Segments of 12, 12 and 8 rows: a first, a middle and a shorter last one.

    The mean loss may differ by 1e-6 of itself, and a gradient by 1e-4 of its own norm.
    """
    from megacpp_mcore.layer_specs.mamba import Mamba3Mixer

    tokens = torch.randint(0, 256, (1, S + 1), generator=torch.Generator().manual_seed(5))
    results = []
    for mode in ("off", "regional"):
        model = build(compile=mode, backend="aot_eager", tiny={**test_regions.OVERRIDES, "mtp": {"depth": 1}})
        mixers = [module for module in model.modules() if isinstance(module, Mamba3Mixer)]
        assert mixers
        for mixer in mixers:
            scan = functools.partial(mixer.backend.fn, segment_size=12)
            mixer.backend = dataclasses.replace(mixer.backend, fn=scan)
        given = {"labels": tokens[:, 1:], "loss_mask": torch.ones(1, S)}
        loss = model(tokens[:, :-1], torch.arange(S)[None], None, **given)
        loss.mean().backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (plain, truth), (compiled, found) = results
    assert float(compiled.mean()) == pytest.approx(float(plain.mean()), rel=1e-6)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=0)
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        assert float((found[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-9, name
