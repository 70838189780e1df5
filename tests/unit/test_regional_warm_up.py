"""What a warm-up of regions compiles, what it leaves behind (nothing), and what a compiled region promises.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore import cpu
from megacpp_mcore.errors import ModelError
from megacpp_mcore.policy import EXPLICIT, CompilePolicy
from tests.parity.compare import assert_parity
from tests.unit import test_regional
from tests.unit.test_regional import FAMILIES, REGIONS, B, Graphs, S, arguments_of, losses_BS

build = test_regional.build

TRUNK = {**test_regional.OVERRIDES, "mtp": {"depth": 0}}
POLICY = CompilePolicy(mode="regional", warm_up=EXPLICIT, reason="", why="static")
BF16_STREAM = ("--bf16", "--fp32-residual-connection")


@pytest.fixture
def tracker() -> Iterator[dict[str, Any]]:
    """Where Megatron collects the indexer losses that it logs."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    found = DSAIndexerLossLoggingHelper.tracker
    found.clear()
    yield found
    found.clear()


def cores(model: Any) -> list[Any]:
    from megacpp_mcore.layer_specs.attention import SparseCoreAttention

    return [module for module in model.modules() if isinstance(module, SparseCoreAttention)]


@pytest.mark.parametrize("recompute", [[], ["a"]])
def test_a_warm_up_leaves_no_trace(build: Callable[..., Any], tracker: dict[str, Any], recompute: list[str]) -> None:
    from megacpp_mcore import regional

    model = build(compile="regional", backend=Graphs(), recompute=recompute, tiny=TRUNK)
    caches = {core.index_cache for core in cores(model)}
    state, logged = torch.get_rng_state(), {name: value.clone() for name, value in tracker.items()}
    done = regional.warm_up([model], rows=S, batch=B)
    assert set(done.regions) == REGIONS
    assert tracker.keys() == logged.keys()  # which is where a loss would leave who reduces it
    assert not any(bool(value.any()) for value in tracker.values())
    assert len(caches) == 1
    assert [len(cache) for cache in caches] == [0]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(core.training for core in cores(model))
    losses_BS(model, 1).mean().backward()
    assert float(tracker["values"].sum()) > 0  # a step's loss is found there


def packed_losses(model: Any, lengths: list[int]) -> torch.Tensor:
    """The losses ``[1, B·S]`` of documents in one row, as ``--dataloader-inter-document-masking`` hands them to the model."""
    from megatron.core.packed_seq_params import PackedSeqParams

    rows = sum(lengths)
    tokens = torch.randint(0, 256, (1, rows + 1), generator=torch.Generator().manual_seed(3))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    told = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        tokens_per_sample=S,
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    given = {"labels": tokens[:, 1:], "loss_mask": torch.ones(1, rows), "packed_seq_params": told}
    return model(tokens[:, :-1], positions, None, **given)


@pytest.mark.parametrize("recompute", [[], ["m"]])
def test_a_batch_of_one_compiles_nothing_after_its_warm_up(build: Callable[..., Any], recompute: list[str]) -> None:
    """The embedding of one sample has other strides than the layers' outputs."""
    graphs = Graphs()
    model = build(compile="regional", backend=graphs, recompute=recompute, tiny=TRUNK)
    train_stock(model, tensor_model_parallel_size=1, micro_batch_size=1)
    warmed = graphs.count
    assert warmed > 0
    tokens = test_regional.tokens(1)[:1]
    given = {"labels": tokens[:, 1:], "loss_mask": torch.ones(1, S)}
    model(tokens[:, :-1], torch.arange(S)[None], None, **given).mean().backward()
    assert graphs.count == warmed


def train_stock(model: Any, **arguments: Any) -> list[str]:
    """What is said when stock Megatron has built ``model`` and is about to train it."""
    from megatron import training as package
    from megatron.training import training

    from megacpp_mcore import regional

    said: list[str] = []
    with (
        mock.patch.object(training, "setup_model_and_optimizer", return_value=([model], None, None)),
        mock.patch.object(package, "get_args", return_value=arguments_of(**arguments)),
        regional.before_training(POLICY, said.append),
    ):
        training.setup_model_and_optimizer()
    return said


@pytest.mark.parametrize("recompute", [[], pytest.param(FAMILIES, marks=pytest.mark.exhaustive)])
def test_a_packed_run_compiles_nothing_after_its_warm_up(build: Callable[..., Any], recompute: list[str]) -> None:
    graphs = Graphs()
    model = build(compile="regional", backend=graphs, recompute=recompute, tiny=TRUNK)
    (said,) = train_stock(model, tensor_model_parallel_size=1, dataloader_inter_document_masking=True)
    assert all(name in said for name in REGIONS)
    warmed = graphs.count
    assert warmed > 0
    packed_losses(model, [5, 1, 26, 20, 12]).mean().backward()
    assert graphs.count == warmed
    losses_BS(model, 1).mean().backward()
    assert graphs.count > warmed  # the graphs of a run that is not packed are others


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({}, {"rows": S, "batch": B, "packed": False}),
        ({"sequence_parallel": True}, {"rows": S // 2, "batch": B, "packed": False}),
        ({"dataloader_inter_document_masking": True}, {"rows": S * B, "batch": 1, "packed": True}),
        (
            {"dataloader_inter_document_masking": True, "sequence_parallel": True},
            {"rows": S * B // 2, "batch": 1, "packed": True},
        ),
    ],
)
def test_a_warm_up_is_given_the_shapes_of_the_run(
    process: Any, arguments: dict[str, Any], shape: dict[str, Any]
) -> None:
    from megacpp_mcore import regional

    model, calls = object(), []

    def warm_up(models: Any, **given: Any) -> regional.WarmUp:
        calls.append((models, given))
        return regional.WarmUp(seconds=1.5, layers=(3,), regions=("norm",))

    with mock.patch.object(regional, "warm_up", warm_up):
        assert train_stock(model, **arguments) == ["compile warm-up: explicit, before step 1: layers 3 (norm): 1.5 s"]
    assert calls == [([model], shape)]


def test_a_packed_batch_of_several_rows_is_refused() -> None:
    from megacpp_mcore import regional

    with pytest.raises(ModelError, match="a batch of 2; expected 1, with the rows of all samples side by side"):
        regional.warm_up([], rows=S, batch=2, packed=True)


@pytest.mark.parametrize(("words", "dtype"), [(BF16_STREAM, torch.float32), (BF16_STREAM[:1], torch.bfloat16)])
def test_a_warm_up_hands_layers_the_dtype_of_the_residual_stream(
    build: Callable[..., Any], words: tuple[str, ...], dtype: torch.dtype
) -> None:
    from megacpp_mcore import regional

    model = build(*words, compile="regional", backend=Graphs(), tiny=TRUNK)
    norm = model.decoder.layers[1].pre_mlp_layernorm
    seen: list[torch.dtype] = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    done = regional.warm_up([model.decoder.layers[1]], rows=S, batch=B)
    assert done.layers == (2,)
    assert seen == [dtype]


# --- a region -----------------------------------------------------------------------------------------------------------


def make_region(function: Callable[..., Any], backend: Any = "eager") -> Any:
    from megacpp_mcore.regional import Region

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


def test_a_region_counts_its_graphs_and_has_room_for_more_than_dynamo_gives(process: Any) -> None:
    from torch._dynamo import config

    from megacpp_mcore import regional

    graphs, shapes = Graphs(), range(2, 2 + config.recompile_limit + 4)
    region, other = make_region(doubled, graphs), make_region(doubled)
    assert len(shapes) < regional.MAX_GRAPHS
    for _ in range(2):
        for rows in shapes:
            assert torch.equal(region(torch.ones(rows)), torch.full((rows,), 2.0))
    other(torch.ones(2))
    assert region.graphs == graphs.count == len(shapes)
    assert (other.graphs, region.calls) == (1, 2 * len(shapes))


def test_shapes_that_never_end_are_an_error(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import config

    from megacpp_mcore import regional

    most = config.recompile_limit + 1
    monkeypatch.setattr(regional, "MAX_GRAPHS", most)
    region = make_region(doubled)
    for rows in range(2, 2 + most):
        region(torch.ones(rows))
    with pytest.raises(ModelError, match=rf"test has {most} compiled graphs and was called with yet another shape"):
        region(torch.ones(2 + most))
    assert config.recompile_limit == most - 1
    assert torch.equal(region(torch.ones(2)), torch.full((2,), 2.0))  # those it has still run


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_what_does_not_compile_says_so(
    build: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
) -> None:
    from torch._dynamo import config

    from megacpp_mcore import regional

    assert cpu._installed is not None
    monkeypatch.setattr(cpu._installed, "dynamo_was_disabled", True)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv(variable, "1")
    graphs = Graphs()
    model = build(compile="regional", backend=graphs, tiny=TRUNK)
    disabled = variable == "TORCH_COMPILE_DISABLE"  # which torch reads once, when it is imported
    with config.patch(disable=disabled), caplog.at_level(logging.WARNING, logger=regional.logger.name):
        done = regional.warm_up([model], rows=S, batch=B)
    assert graphs.count == 0
    assert (done.regions, set(done.plain)) == ((), REGIONS)
    assert "(no regions; NOT compiled: indexer score, " in str(done)
    warnings = [record.getMessage() for record in caplog.records if "compiled nothing" in record.getMessage()]
    assert all("unset both variables, or write compile: off" in warning for warning in warnings)
    assert {name for name in REGIONS if any(f"region {name}: " in warning for warning in warnings)} == REGIONS
    assert len(warnings) == len(set(regional._REGIONS) & {key for key in regional._REGIONS if key[1] is graphs})


def test_a_warm_up_names_what_it_has_compiled_itself(build: Callable[..., Any]) -> None:
    from megacpp_mcore import regional

    model = build(compile="regional", backend=Graphs(), tiny=TRUNK)
    first, second = (regional.warm_up([model], rows=S, batch=B) for _ in range(2))
    assert (set(first.regions), first.plain) == (REGIONS, ())
    assert (second.regions, second.plain, second.layers) == ((), (), first.layers)


# --- copies -------------------------------------------------------------------------------------------------------------


def copied(module: Any) -> Any:
    """A deep copy that shares process groups, which torch cannot copy, and has its parameters set to others."""
    groups = [value for part in module.modules() for value in vars(part).values() if "ProcessGroup" in str(type(value))]
    found = copy.deepcopy(module, {id(group): group for group in groups})
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(0.5)
    return found


@pytest.mark.parametrize("compile", ["off", "regional"])
def test_a_copy_of_a_treated_module_runs_with_its_own_parameters(build: Callable[..., Any], compile: str) -> None:
    model = build(compile=compile, backend=Graphs(), recompute=FAMILIES, tiny=TRUNK)
    truth = build(tiny=TRUNK)
    x_SBD = torch.randn(S, B, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for number, name in ((3, "input_layernorm"), (3, "self_attention"), (12, "self_attention")):
        treated, plain = (getattr(each.decoder.layers[number - 1], name) for each in (model, truth))
        results = []
        for module in (treated, plain):
            mine = copied(module)
            output = mine(x_SBD) if name == "input_layernorm" else mine(x_SBD, attention_mask=None)[0]
            output.square().sum().backward()
            results.append([output, *(p.grad for p in mine.parameters())])
            assert all(p.grad is None for p in module.parameters())
        for found, expected in zip(*results, strict=True):
            assert_parity(found, expected, rms=1e-4)


# --- several segments ---------------------------------------------------------------------------------------------------


def cut_segments(model: Any, rows: int) -> None:
    """Make the segments of M layers ``rows`` long, for short sequences to have several."""
    from megacpp_mcore.layer_specs.mamba import Mamba3Mixer

    mixers = [module for module in model.modules() if isinstance(module, Mamba3Mixer)]
    assert mixers
    for mixer in mixers:
        scan = functools.partial(mixer.backend.fn, segment_size=rows)
        mixer.backend = dataclasses.replace(mixer.backend, fn=scan)


def check_as_off(
    build: Callable[..., Any], backend: Any, tiny: Any, rows: int, *, cut: int | None, of_gradients: float
) -> None:
    """The losses of each token and the gradients of a compiled model are those of the plain one.

    The mean loss may differ by 1e-6 of itself, and a gradient by ``of_gradients`` of its own norm.
    """
    tokens = torch.randint(0, 256, (1, rows + 1), generator=torch.Generator().manual_seed(5))
    results = []
    for mode in ("off", "regional"):
        model = build(compile=mode, backend=backend, tiny=tiny)
        if cut is not None:
            cut_segments(model, cut)
        given = {"labels": tokens[:, 1:], "loss_mask": torch.ones(1, rows)}
        loss = model(tokens[:, :-1], torch.arange(rows)[None], None, **given)
        loss.mean().backward()
        results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (plain, truth), (compiled, found) = results
    assert float(compiled.mean()) == pytest.approx(float(plain.mean()), rel=1e-6)
    torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=0)
    assert found.keys() == truth.keys()
    for name, gradient in truth.items():
        assert float((found[name] - gradient).norm()) <= of_gradients * float(gradient.norm()) + 1e-9, name


def test_several_segments_compiled_are_as_several_plain_ones(build: Callable[..., Any]) -> None:
    """Segments of 12, 12 and 8 rows: a first, a middle and a shorter last one."""
    check_as_off(build, "aot_eager", {**test_regional.OVERRIDES, "mtp": {"depth": 1}}, S, cut=12, of_gradients=1e-4)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_segments_of_1024_rows_compiled_are_as_plain_ones(build: Callable[..., Any]) -> None:
    """The segments of a real run, by the compiler of a real run: 1024, 1024 and 152 rows.

    Inductor adds in another order than torch: 2200 steps of R's recurrence were seen to make 1.6e-4 of it in a gradient.
    """
    if test_regional.compiler() is None:
        pytest.skip("no C++ compiler for Inductor on this machine")
    rows = 2200
    check_as_off(
        build,
        "inductor",
        {"seq_length": rows, "dsa": {"topk": 64}, "mtp": {"depth": 1}},
        rows,
        cut=None,
        of_gradients=1e-3,
    )
