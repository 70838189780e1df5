"""The rules of FP8 scopes: what they enter and what raises, without a GPU; what they compute is in tests/gpu/test_te.py.

In place of Transformer Engine's ``autocast`` stands a context manager that notes its arguments; nothing is computed in FP8.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import Linear, Module, ModuleDict

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.model import preset
from megacpp_mcore.te import fp8_scopes
from megacpp_mcore.te.fp8_scopes import FP8, Scopes
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.probe import ProbeResult
from tests import stock
from tests.errors import raises


class Engine(Module):
    """Stands where a linear layer of Transformer Engine does in a model."""

    def __init__(self, outputs: int = 32, inputs: int = 32, group: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(outputs, inputs))
        self._tp_group = group
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(bool(ENTERED) and ENTERED[-1]["enabled"])
        return x @ self.weight.T


ENTERED: list[dict[str, Any]] = []
NOTED: list[dict[str, Any]] = []


@contextlib.contextmanager
def autocast(**arguments: Any) -> Iterator[None]:
    ENTERED.append(arguments)
    NOTED.append(arguments)
    try:
        yield
    finally:
        ENTERED.pop()


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    recorded: dict[str, Any] = {
        "autocast": autocast,
        "TransformerEngineBaseModule": Engine,
        **{kind: SimpleNamespace for kind, _ in fp8_scopes.RECIPES.values()},
        **{asks: lambda return_reason: (True, "") for _, asks in fp8_scopes.RECIPES.values()},
    }

    def entry(name: str) -> Any:
        if name not in recorded:
            raise BackendError(f"Transformer Engine 2.16 has no {name}")
        return recorded[name]

    monkeypatch.setattr(te_imports, "entry", entry)
    monkeypatch.setattr(te_imports, "_installed", lambda: ProbeResult(True))
    NOTED.clear()
    return recorded


def scopes(recipe: str = "block", depth: int = 6, **values: Any) -> Scopes:
    return Scopes(FP8(recipe=recipe, **values), depth)


@pytest.mark.parametrize(("numbers", "is_fp8"), [((2, 3), True), ((1, 2), False), ((5, 6), False), ((4,), True)])
def test_a_group_that_touches_the_zone_is_bf16_whole(numbers: tuple[int, ...], is_fp8: bool) -> None:
    with scopes().group(numbers) as in_fp8:
        assert in_fp8 is is_fp8
    with scopes().group(numbers, training=False) as in_evaluation:
        assert not in_evaluation
    assert len(NOTED) == is_fp8
    assert [number for number in range(1, 7) if not scopes(first=2, last=3).in_zone(number)] == [3]


def test_a_scope_is_entered_once() -> None:
    both = scopes()
    with both.group((2, 3)):
        with (
            raises(ModelError, "layers 3", "layers 2, 3", code="nested-scope"),
            both.group([3]),
        ):
            pass
        with raises(ModelError, "layers 3", code="nested-scope"), scopes("current").group([3]):
            pass
    with both.group((3,)):  # and the first is left when it ends, by an error, too
        pass
    with pytest.raises(ZeroDivisionError), both.group((3,)):
        raise ZeroDivisionError
    with both.group((3,)):
        pass
    before = fp8_scopes.counts()["entered"]
    with both.group((3,)):
        pass
    assert fp8_scopes.counts()["entered"] == before + 1


@pytest.mark.parametrize("recipe", ["delayed", "block", "current"])
def test_delayed_scaling_is_recomputed_by_its_owner_alone(recipe: str) -> None:
    """Megatron's function runs the first forward pass without gradients, torch's the second in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    model, scope = Engine(), scopes(recipe)
    x = torch.ones(16, 32, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        with scope.group((3,)):
            return model(x)

    for reentrant in (True, False):
        refused = raises(ModelError, "layers 3", "te_checkpoint", code="recomputed-scope")
        with refused if recipe == "delayed" else contextlib.nullcontext():
            checkpoint(run, x, use_reentrant=reentrant).sum().backward()


def test_the_history_of_delayed_scaling_covers_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all scopes of the process, for the end of each rolls every history."""
    monkeypatch.setattr(fp8_scopes, "_counts", Counter())
    delayed, other_chunk = scopes("delayed", history=4), scopes("delayed", history=4)
    for number, chunk in ((2, delayed), (3, delayed), (4, other_chunk)):
        chunk.install(Layer(), number)
    other_chunk.install(Engine(), calls=2)
    assert delayed.recipe.amax_history_len == 20
    assert vars(scopes("block").recipe) == {}


class Layer(Module):
    """An attention layer: two projections, one of latents, and an indexer with one of its own."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        self.linear_proj = Engine(**sizes)
        self.linear_q = Engine()
        self.linear_kv_down_proj, self.indexer = Engine(), ModuleDict({"linear_wk": Engine()})
        self.norm, self.plain = torch.nn.LayerNorm(32), Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_proj(self.linear_q(x) + self.linear_kv_down_proj(x) + self.indexer["linear_wk"](x))


def test_a_layer_in_a_scope_and_what_is_held_in_bf16_inside() -> None:
    layer = Layer()
    assert scopes().install(layer, 3) == ("linear_proj", "linear_q")
    layer(torch.ones(16, 32))
    engines = {name: module.seen for name, module in layer.named_modules() if isinstance(module, Engine)}
    held = {name: [False] for name in ("linear_kv_down_proj", "indexer.linear_wk")}
    assert engines == {"linear_proj": [True], "linear_q": [True]} | held
    assert layer.linear_q.disable_parameter_transpose_cache, "or a weight would be quantised once for ever"
    layer.eval()
    layer(torch.ones(16, 32))
    assert layer.linear_q.seen == [True, False]
    in_the_zone = Layer()
    assert scopes().install(in_the_zone, 6) == ()
    assert "forward" not in vars(in_the_zone)
    with raises(ModelError, "layer 3", "Linear"):
        scopes().install(Linear(32, 32), 3)
    with raises(ModelError, "layer 3", "linear_proj is (40, 32)", "multiples of 16"):
        scopes().install(Layer(outputs=40), 3)


def test_the_projection_of_mtp_is_in_no_zone() -> None:
    projection = Engine()
    assert scopes(depth=2).install(projection, name="eh_proj") == ("eh_proj",)
    projection(torch.ones(16, 32))
    projection.eval()(torch.ones(16, 32))
    assert projection.seen == [True, False]
    with raises(ModelError, "MTP: eh_proj is (40, 32)", "multiples of 16"):
        scopes().install(Engine(outputs=40), name="eh_proj")


@pytest.mark.parametrize("name", ["linear_q_up_proj", "linear_kv_up_proj"])
def test_products_with_latents_are_in_bf16_where_megatron_repeats_them(name: str) -> None:
    """``--recompute-modules mla_up_proj`` does so outside of the scope."""
    from torch.utils.checkpoint import checkpoint

    class Latents(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear_proj(checkpoint(getattr(self, name), x, use_reentrant=True))

    selective = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    fp8_scopes.check_run(FP8(recipe="delayed"), SimpleNamespace(**CLEAN | selective))
    layer = Latents()
    layer.add_module(name, Engine())
    scopes("delayed").install(layer, 3)
    layer(torch.ones(16, 32, requires_grad=True)).sum().backward()
    assert (layer.linear_proj.seen, getattr(layer, name).seen) == ([True], [False, False])


def test_a_deep_copy_has_its_own_parameters() -> None:
    import copy

    layer = Layer()
    scopes().install(layer, 3)
    other = copy.deepcopy(layer)
    other(torch.ones(16, 32))
    assert (layer.linear_q.seen, other.linear_q.seen) == ([], [True])


@pytest.fixture
def four_ranks() -> Iterator[dict[str, Any]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    groups = {name: torch.distributed.new_group(ranks) for name, ranks in (("tp", [0, 1]), ("dp", [0, 2]), ("one", [0]))}
    yield groups | {"world": torch.distributed.group.WORLD}
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["dp", "world", None])
def test_maxima_are_reduced_over_the_owners_and_no_others(four_ranks: dict[str, Any], name: str | None) -> None:
    modules = [Engine(group=four_ranks["tp"]), Engine(group=four_ranks["tp"])]
    fp8_scopes.check_amax_group(four_ranks["tp"], modules, "layer 3")
    fp8_scopes.check_amax_group(four_ranks["one"], [Engine(group=four_ranks["one"])], "layer 3")
    with raises(ModelError, "layer 3", "ranks [0, 1]"):
        fp8_scopes.check_amax_group(name and four_ranks[name], modules, "layer 3")


@pytest.mark.parametrize("name", ["tp", "one"])
def test_the_scope_of_a_layer_reduces_over_its_tensor_parallel_group(four_ranks: dict[str, Any], name: str) -> None:
    """Of one rank, too: without a group Transformer Engine would reduce over all ranks."""
    layer = Layer(group=four_ranks[name])
    scopes().install(layer, 3)
    layer(torch.ones(16, 32))
    assert NOTED[0]["amax_reduction_group"] is four_ranks[name]
    other = Layer(group=four_ranks[name])
    other.linear_q._tp_group = four_ranks["dp"]
    with raises(ModelError, "layer 3", "ranks [0, "):
        scopes().install(other, 3)


CLEAN: dict[str, Any] = {
    "params_dtype": torch.bfloat16, "fp8": None, "fp4": None, "first_last_layers_bf16": False, "tp_only_amax_red": False,
    "transformer_impl": "transformer_engine", "moe_shared_expert_overlap": False, "recompute_granularity": None,
    "recompute_modules": None, "num_layers": 6, "sequence_parallel": False, "mtp_num_layers": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "asked", "value"),
    [
        ({"fp8": "hybrid"}, {}, "--fp8-format"),
        ({"fp4": "e2m1"}, {}, "--fp4-format"),
        ({"first_last_layers_bf16": True}, {}, "--first-last-layers-bf16"),
        ({"tp_only_amax_red": True}, {}, "--tp-only-amax-red"),
        ({"params_dtype": torch.float32}, {}, "torch.float32"),
        ({"transformer_impl": "local"}, {}, "--transformer-impl transformer_engine"),
        ({"moe_shared_expert_overlap": True}, {}, "--moe-shared-expert-overlap"),
        ({"recompute_granularity": "full"}, {"recipe": "delayed"}, "--recompute-granularity"),
        ({}, {"attention": False, "shared_experts": False}, "attention or shared_experts"),
        ({}, {"mtp": True}, "predicts one token"),
        ({"rows": 4100}, {}, "multiple of 16"),
        ({"fsdp2": True}, {"recipe": "delayed"}, "--use-torch-fsdp2"),
    ],
)  # fmt: skip
def test_flags_that_contradict_the_scopes(flags: dict[str, Any], asked: dict[str, Any], value: str) -> None:
    more = {"rows": flags.pop("rows", 4096), "fsdp2": flags.pop("fsdp2", False)}
    fp8_scopes.check_run(FP8(recipe="block"), SimpleNamespace(**CLEAN), rows=4096, fsdp2=True)
    fp8_scopes.check_run(FP8(recipe="block"), SimpleNamespace(**CLEAN | {"recompute_granularity": "full"}))
    with raises(ModelError, "fp8", value):
        fp8_scopes.check_run(FP8(**{"recipe": "block", **asked}), SimpleNamespace(**CLEAN | flags), **more)


def test_what_block_scales_cannot_be_gathered_in() -> None:
    cut = SimpleNamespace(**CLEAN | {"sequence_parallel": True})
    fp8_scopes.check_run(FP8(recipe="block"), cut, rows=256)
    fp8_scopes.check_run(FP8(recipe="current"), cut, rows=272)
    with raises(ModelError, 272, "multiple of 128"):
        fp8_scopes.check_run(FP8(recipe="block"), cut, rows=272)

    def installed(recipe: str, mode: str) -> tuple[str, ...]:
        layer = Layer(outputs=128)  # of 32 inputs
        layer.linear_proj.sequence_parallel, layer.linear_proj.parallel_mode = True, mode
        return scopes(recipe).install(layer, 3)

    assert installed("block", "row") == installed("current", "column") == ("linear_proj", "linear_q")
    with raises(ModelError, "layer 3", "linear_proj", 32, "current"):
        installed("block", "column")


def test_a_machine_that_cannot(entries: dict[str, Any]) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"),
    ):
        with raises(ModelError, "mxfp8", "NVIDIA H200", "block, current or delayed"):
            fp8_scopes.check_machine("mxfp8")
        fp8_scopes.check_machine("block")
    with raises(ModelError, "'e4m3'", "delayed, current, block, mxfp8"):
        fp8_scopes.check_machine("e4m3")
    entries["is_fp8_available"] = lambda return_reason: (False, "Device compute capability 8.9 or higher required")
    with raises(ModelError, "recipe is current", "Device compute capability 8.9"):
        fp8_scopes.check_machine("current")
    del entries["Float8BlockScaling"]
    with raises(BackendError, 2.16, "Float8BlockScaling"):
        fp8_scopes.check_machine("block")


def test_the_error_names_the_file_and_a_file_without_recipe_asks_for_nothing() -> None:
    config = SimpleNamespace(**CLEAN)
    assert fp8_scopes.scopes_of(FP8(), config) is None
    with raises(ModelError, "run.yaml", "FP8(recipe=None", "delayed, current, block, mxfp8"):
        fp8_scopes.scopes_of(FP8(blanket=True), config, source="run.yaml")
    with raises(ModelError, "run.yaml", "--fp8-format"):
        fp8_scopes.scopes_of(FP8(recipe="block"), SimpleNamespace(**CLEAN | {"fp8": "e4m3"}), source="run.yaml")
    made = fp8_scopes.scopes_of(FP8(recipe="block"), config)
    assert made is not None
    assert (made.depth, FP8(recipe="block").on) == (6, ("attention", "shared_experts"))
    assert FP8(recipe="block").label == "block: attention output projections, shared experts"
    blanket = FP8(recipe="delayed", blanket=True)
    assert blanket.on == ("attention", "shared_experts", "blanket")
    assert blanket.label == "blanket delayed: attention output projections, shared experts, Mamba output projections"


def test_the_run_of_a_stock_script_is_refused_before_a_layer_is_built(tmp_path: Path) -> None:
    from megacpp_mcore.layer_specs.layer_plan import layer_plan
    from megacpp_mcore.settings import load

    file = tmp_path / "megacpp.yaml"
    file.write_text("model: nam56r_tiny\nfp8: {recipe: block}\n")
    with stock.cpu_lane():
        config = stock.model_config(stock.words(preset("nam56r_tiny"))).transformer
        with raises(ModelError, "megacpp.yaml", "torch.float32"):
            layer_plan(load(file), config)
