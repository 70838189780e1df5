"""The patch dsa-index-cache on stock GPT models with DSA, compared with stock and with a reference that injects indices.

The reference is stock without sharing, recompute or overlap: Shared layers are given the indices that Full layers recorded.
Legend: B batch, S sequence, N top-k.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import ConfigFileError, ModelError
from megacpp_mcore.model import preset
from megacpp_mcore.ops.indexer.cache import Recomputed, Selection
from megacpp_mcore.patches.dsa_index_cache import PATCH
from megacpp_mcore.patches.machinery.registry import Registry
from tests import micro_batch, stock
from tests.distributed.comparing import assert_same_bytes, differing_tensors
from tests.dsa_layer import HIDDEN, dsa_attention, dsa_config, layer_inputs, run_layer
from tests.errors import raises
from tests.lanes import exhaustive_but

B, S, N, VOCAB, LAYERS = 2, 32, 8, 64, 6
TOLERANCE = 1e-6
"""Relative, of the norm of each gradient's difference; everything is fp32."""

RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
} | {
    name: {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    for name, method, layers in (
        ("full, layer by layer", "uniform", 1), ("full, two layers", "uniform", 2), ("full, some layers", "block", 4)
    )
}  # fmt: skip
PERIODIC = {"dsa_indexer_topk_freq": 3}
"""Upstream's own way to say FSSFSS."""
PATTERN, HYBRID_SOURCES = "D-DDDD", {"d3": "d1", "d5": "d4", "d6": "d4"}
"""A hybrid model's layers, and those of them that share when :data:`PERIODIC`."""
Schedule = Callable[[str], None]


def transformer_config(layers: int = LAYERS, **changes: Any) -> Any:
    """A stock configuration of a small DSA model."""
    off = ("bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    values = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "qk_layernorm": True, "dsa_indexer_topk": N}
    values |= {"experimental_attention_variant": "dsa", **dict.fromkeys(off, False)}
    return dsa_config(num_layers=layers, **values | changes)


def block_spec(config: Any, vp_stage: int | None = None) -> Any:
    """The stock spec of this rank's decoder layers, on CPU linears: upstream has it only for Transformer Engine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megacpp_mcore.layer_specs.parts import DuplicatedLinear

    class Provider(LocalSpecProvider):
        def linear(self) -> type:
            return ColumnParallelLinear

    with mock.patch.object(specs, "_get_backend_spec_provider", return_value=Provider()):
        spec = specs.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        indexer = layer.submodules.self_attention.submodules.core_attention.submodules.indexer.submodules
        indexer.linear_wq_b = indexer.linear_wk = indexer.linear_weights_proj = DuplicatedLinear
    return spec


def build(config: Any, vp_stage: int | None = None, **ends: bool) -> Any:
    """The stock GPTModel of this rank."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend

    spec = block_spec(config, vp_stage)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec_for_backend(config, spec, LocalSpecProvider(), vp_stage=vp_stage)
    model = GPTModel(config, spec, VOCAB, S, position_embedding_type="rope", mtp_block_spec=mtp, vp_stage=vp_stage, **ends)
    return with_weights_of_their_names(model)


def build_hybrid(config: Any) -> Any:
    """The stock HybridModel with DSA and dense layers, its modules those of :func:`block_spec`."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from megacpp_mcore.layer_specs.parts import TorchNorm

    parts = block_spec(transformer_config(layers=1)).layer_specs[0].submodules
    stack = stock.hybrid_stack(parts, "dsa_layer")
    with mock.patch.object(hybrid_block, "TENorm", TorchNorm):
        model = HybridModel(config, stack, VOCAB, S, hybrid_layer_pattern=PATTERN, position_embedding_type="rope")
    return with_weights_of_their_names(model)


def with_weights_of_their_names(model: Any) -> Any:
    """The model, to be trained, with weights that depend only on their names."""
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.1 * values if parameter.dim() == 1 else 0.3 * values)
    return model.train()


def named_parameters(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters under the names they have in the model that is not cut into stages."""
    first = model.decoder.layers[0].layer_number - 1

    def whole(name: str) -> str:
        return re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{int(m[1]) + first}", name)

    return [(whole(name), parameter) for name, parameter in model.named_parameters()]


def dsa_layers(model: Any) -> dict[str, Any]:
    """Every DSAttention of a model, by ``d`` (decoder) or ``m`` (MTP) and layer number."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    return {
        f"{'m' if name.startswith('mtp') else 'd'}{module.layer_number}": module
        for name, module in model.named_modules()
        if isinstance(module, DSAttention)
    }


@dataclass
class Spy:
    """Sees the indices that reach stock's sparse attention, by layer: in the ``first`` run and ``again``; can ``inject``.

    Their numbers, where there are any, come after them.
    """

    first: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    again: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    inject: Mapping[str, torch.Tensor] = field(default_factory=dict)
    backward: bool = False
    layer: str = ""

    def check(self, sources: Mapping[str, str], order: Sequence[int]) -> None:
        """Fail unless layers got their sources' indices: first runs by micro-batch, what was run again in ``order``."""
        for shared, full in sources.items():
            assert len(self.first[full]) == len(order)
            assert all(map(torch.equal, self.first[shared], self.first[full]))
            again = self.again.get(shared, [])
            assert len(again) in (0, len(order))
            assert all(torch.equal(index, self.first[full][number]) for number, index in zip(order, again, strict=False))

    @contextlib.contextmanager
    def watching(self, *models: Any) -> Iterator[Spy]:
        from megatron.core.tensor_parallel.random import CheckpointFunction
        from megatron.core.transformer.experimental_attention_variant import dsa

        for name, module in (item for model in models for item in dsa_layers(model).items()):
            module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "layer", name))
        attend, recompute = dsa._run_sparse_attention, CheckpointFunction.backward

        def spy(**kwargs: Any) -> Any:
            seen = self.again if self.backward else self.first
            index, length = kwargs["topk_indices"].detach(), kwargs["topk_length"]
            selected = index.clone() if length is None else torch.cat((index, length[..., None]), -1)
            seen.setdefault(self.layer, []).append(selected)
            if self.layer in self.inject:
                kwargs["topk_indices"] = self.inject[self.layer]
            return attend(**kwargs)

        def backward(*args: Any) -> Any:
            self.backward = True
            try:
                return recompute(*args)
            finally:
                self.backward = False

        with (
            mock.patch.object(dsa, "_run_sparse_attention", spy),
            mock.patch.object(CheckpointFunction, "backward", staticmethod(backward)),
        ):
            yield self


def causal_mask() -> torch.Tensor:
    return micro_batch.causal_mask(S).expand(B, 1, S, S)


def losses_of(model: Any, number: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The losses of micro-batch ``number``."""
    tokens = torch.randint(0, VOCAB, (B, S + 1), generator=torch.Generator().manual_seed(number))
    return micro_batch.losses_of(model, tokens, attention_mask=mask)


def forward(model: Any, number: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Their mean."""
    return losses_of(model, number, mask).mean()


def gradients(*models: Any) -> dict[str, torch.Tensor]:
    grads = {}
    for model in models:
        grads |= {name: p.grad.clone() for name, p in named_parameters(model) if p.grad is not None}
    return grads


def in_flight(model: Any, order: Sequence[int], mask: Callable[[], torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Gradients of two micro-batches that are both in flight; backward passes in ``order``."""
    model.zero_grad(set_to_none=True)
    losses = [forward(model, number, mask()) for number in range(2)]
    for number in order:
        losses[number].backward()
        losses[number] = None
    return gradients(model)


def reference_gradients(
    selections: Mapping[str, Sequence[torch.Tensor]],
    sources: Mapping[str, str],
    micro_batches: int,
    scale: float = 1.0,
    of: Callable[[Any], Any] = build,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """Unpatched stock without sharing, one micro-batch at a time; Shared layers get their Full layer's recorded indices."""
    model = of(transformer_config(**changes))
    spy = Spy()
    with spy.watching(model):
        for number in range(micro_batches):
            spy.inject = {shared: selections[full][number] for shared, full in sources.items()}
            (forward(model, number) * scale).backward()
    return gradients(model)


def differing(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], shared: Iterable[str] = ()
) -> list[str]:
    """One sentence for each gradient that is further off than :data:`TOLERANCE`; the layers ``shared`` have no indexer's."""
    parts = {name: re.match(r"([dm])\w+\.layers\.(\d+)\..*\.indexer\.", name) for name in expected}
    indexers = {name: f"{part[1]}{int(part[2]) + 1}" for name, part in parts.items() if part}
    dropped = {name: layer for name, layer in indexers.items() if layer in set(shared)}
    assert set(dropped.values()) == set(shared)
    assert actual.keys() == expected.keys() - dropped.keys()
    return differing_tensors({name: expected[name] for name in actual}, actual, TOLERANCE)


def check_sharing(
    patched: Registry,
    model: Any,
    sources: Mapping[str, str],
    order: Sequence[int] = (0, 1),
    mask: Callable[[], torch.Tensor | None] = lambda: None,
    **reference: Any,
) -> Spy:
    """Fail unless layers get their sources' indices, and the gradients of the reference; the patch is then reverted."""
    spy = Spy()
    with spy.watching(model):
        actual = in_flight(model, order, mask)
    spy.check(sources, order)
    patched.revert()
    assert differing(reference_gradients(spy.first, sources, 2, **reference), actual, sources) == []
    return spy


def sources_of(roles: str) -> dict[str, str]:
    """Shared layer to Full layer, by the names of :func:`dsa_layers`."""
    return {f"d{n}": f"d{roles.rindex('F', 0, n) + 1}" for n, role in enumerate(roles, start=1) if role == "S"}


@pytest.fixture
def patched(process: Path) -> Iterator[Registry]:
    """The patch, applied; no file."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    stock.restart_random()
    stock.loss_scale(1.0)
    DSAIndexerLossLoggingHelper.tracker.clear()
    # Made here, because the CPU lane makes no device tensors during a backward pass.
    DSAIndexerLossLoggingHelper.tracker["values"] = torch.zeros(LAYERS)
    with stock.patched(PATCH) as registry:
        yield registry


@pytest.fixture
def schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Schedule:
    """Writes the file that MEGACPP_CONFIG names."""

    def write(text: str) -> None:
        (tmp_path / "index.yaml").write_text(f"dsa_index_cache: {text}\n")
        monkeypatch.setenv("MEGACPP_CONFIG", str(tmp_path / "index.yaml"))

    return write


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(("how", "masked"), [("periodic", False), ("file", True)])
def test_two_micro_batches_in_flight(patched: Registry, schedule: Schedule, how: str, recompute: str, masked: bool) -> None:
    if how == "file":
        schedule("{schedule: FSSFSF}")
    roles, order = ("FSSFSS", (0, 1)) if how == "periodic" else ("FSSFSF", (1, 0))
    model = build(transformer_config(**RECOMPUTE[recompute], **(PERIODIC if how == "periodic" else {})))
    assert ["F" if layer.indexer is not None else "S" for layer in dsa_layers(model).values()] == list(roles)
    # A Full layer that serves no other may use stock's fused attention, which sharing would rule out.
    assert [layer.index_share for layer in dsa_layers(model).values()] == [True] * 5 + [roles[5] == "S"]
    sources = sources_of(roles)
    spy = check_sharing(patched, model, sources, order, causal_mask if masked else lambda: None)
    for index in (index for name in sources.values() for index in spy.first[name]):
        # Every index that a row can use is at or before the row, and rows with enough keys hold N different ones.
        assert index.shape == (B, S, N)
        valid = index[:, N:]
        assert (valid <= torch.arange(N, S)[None, :, None]).all()
        assert (valid.sort(dim=-1).values.diff(dim=-1) > 0).all()
    assert (sum(map(len, spy.again.values())) > 0) == (recompute != "none")
    # What is compared is a selection, and not the same one for two micro-batches or for two Full layers.
    assert N <= S / 4
    first, second = spy.first["d1"]
    assert not torch.equal(first.sort().values, second.sort().values)
    assert not torch.equal(spy.first["d1"][0].sort().values, spy.first["d4"][0].sort().values)


@pytest.mark.parametrize("recompute", exhaustive_but(["selective", "full, layer by layer"], "selective"))
def test_stock_is_wrong_without_a_mask_and_fails_with_one(process: None, recompute: str) -> None:
    """When this fails, upstream's own sharing has been repaired, and the patch may go."""
    model = build(transformer_config(**RECOMPUTE[recompute], **PERIODIC))
    spy = Spy()
    with spy.watching(model):
        actual = in_flight(model, (0, 1), lambda: None)
    expected = reference_gradients(spy.first, sources_of("FSSFSS"), 2)
    off = {name: float((actual[name] - expected[name]).norm() / expected[name].norm()) for name in actual}
    assert max(off.values()) > 1e-2
    # The first micro-batch's Shared layers were given the second one's indices.
    assert torch.equal(spy.again["d2"][0], spy.first["d1"][1])
    assert not torch.equal(spy.again["d2"][0], spy.first["d1"][0])
    with pytest.raises(RuntimeError, match="needs top-k indices from source computing layer"):
        in_flight(build(model.config), (0, 1), causal_mask)


@pytest.mark.parametrize(
    ("recompute", "masked"),
    [("none", False), ("selective", True), ("full, two layers", False), ("full, two layers", True)],
)
def test_layers_of_a_hybrid_model_share_in_their_micro_batch(patched: Registry, recompute: str, masked: bool) -> None:
    """Where stock shares, by its own layer numbers, and takes another micro-batch's indices under recompute, or fails."""
    model = build_hybrid(transformer_config(**RECOMPUTE[recompute], **PERIODIC))
    assert {name for name, layer in dsa_layers(model).items() if layer.indexer is None} == HYBRID_SOURCES.keys()
    assert sharding_of(model) == []
    mask = causal_mask if masked else lambda: None
    spy = check_sharing(patched, model, HYBRID_SOURCES, mask=mask, of=build_hybrid)
    assert (sum(map(len, spy.again.values())) > 0) == (recompute != "none")
    assert [len(cache) for cache in {layer._megacpp_index_cache for layer in dsa_layers(model).values()}] == [0]


@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Selection | None]]:
    """References to all micro-batches' indices of all Full layers, which keep none alive; garbage is not collected."""
    made: list[Callable[[], Selection | None]] = []
    begin = Selection.__init__

    def noted(self: Selection, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Selection, "__init__", noted)
    return made


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_indices_live_as_long_as_the_micro_batch(
    patched: Registry, selections: list[Callable[[], Selection | None]], recompute: str
) -> None:
    def live() -> int:
        return sum(selection() is not None for selection in selections)

    model = build(transformer_config(**RECOMPUTE[recompute], **PERIODIC))
    losses = [forward(model, number) for number in range(2)]
    # The Full layers that are recomputed, or whose Shared layers are.
    kept = 0 if recompute == "none" else 2
    assert live() == 2 * kept
    losses.pop(0).backward()
    assert live() == kept
    model.eval()
    with torch.no_grad():
        forward(model, 7)
    forward(model, 8)  # a graph that is never used
    model.train()
    assert live() == kept
    losses.pop().backward()
    assert live() == 0
    assert selections
    caches = {layer._megacpp_index_cache for layer in dsa_layers(model).values()}
    assert [len(cache) for cache in caches] == [0]


def alone(number: int, **changes: Any) -> dict[str, torch.Tensor]:
    """Gradients of one micro-batch, of a model of its own that recomputes nothing."""
    model = build(transformer_config(**{**PERIODIC, **changes}))
    forward(model, number).backward()
    return gradients(model)


@pytest.mark.exhaustive
def test_two_models_of_one_configuration_and_an_evaluation_between(patched: Registry) -> None:
    config = transformer_config(**RECOMPUTE["full, layer by layer"], **PERIODIC)
    models = [build(config) for _ in range(2)]
    losses = [forward(model, number) for number, model in enumerate(models)]
    models[0].eval()
    with torch.no_grad():
        assert forward(models[0], 3).isfinite()
    models[0].train()
    for loss in losses:
        loss.backward()
    for number, model in enumerate(models):
        assert differing(alone(number), gradients(model)) == []
    assert [name for name in vars(config) if "topk_holder" in name] == []


@pytest.mark.parametrize(
    ("how", "recompute"),
    exhaustive_but(
        itertools.product(("periodic", "repeated", "file"), ("none", "full, layer by layer")),
        ("periodic", "full, layer by layer"),
    ),
)
def test_mtp_layers_share_among_themselves(patched: Registry, schedule: Schedule, how: str, recompute: str) -> None:
    """MTP layers are numbered from 1 like the trunk's, and run after all of them."""
    mtp = {"mtp_num_layers": 2, "mtp_use_repeated_layer": how == "repeated"}
    if how == "file":
        schedule("{schedule: FSSFSS}")
    model = build(transformer_config(**RECOMPUTE[recompute], **mtp, **({} if how == "file" else PERIODIC)))
    layers = dsa_layers(model)
    shared = [name for name, layer in layers.items() if layer.indexer is None]
    assert shared == ["d2", "d3", "d5", "d6"] + (["m2"] if how == "periodic" else [])
    sources = sources_of("FSSFSS") | ({"m2": "m1"} if how == "periodic" else {})
    spy = check_sharing(patched, model, sources, **mtp)
    assert len(spy.first["m1"]) == (4 if how == "repeated" else 2)


@pytest.mark.exhaustive
def test_without_a_schedule_the_model_is_stock(patched: Registry) -> None:
    stocks = in_flight(build(transformer_config()), (0, 1), lambda: None)
    layers = dsa_layers(build(transformer_config()))
    assert all(layer.indexer is not None and not layer.index_share for layer in layers.values())
    patched.revert()
    assert_same_bytes(in_flight(build(transformer_config()), (0, 1), lambda: None), stocks)


@pytest.mark.exhaustive
def test_shared_layers_have_no_indexer_and_draw_no_random_numbers(patched: Registry, schedule: Schedule) -> None:
    """The file's schedule builds what upstream's periodic one does, to the last parameter and random number."""

    def built(config: Any) -> tuple[set[str], torch.Tensor]:
        torch.manual_seed(5)
        return set(build(config).state_dict()), torch.get_rng_state()

    made = [built(transformer_config(**PERIODIC))]
    schedule("{schedule: FSS}")
    made.append(built(transformer_config()))
    patched.revert()
    made.append(built(transformer_config(**PERIODIC)))
    assert [keys for keys, _ in made] == [made[0][0]] * 3
    assert all(torch.equal(state, made[0][1]) for _, state in made)


def sharding_of(model: Any) -> list[str]:
    """What Megatron finds wrong with a distributed checkpoint of the model, before it writes one."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=groups)
    try:
        validate_sharding_integrity(determine_global_metadata(state)[1])
    except CheckpointingException as error:
        return [str(error)]
    return []


@pytest.mark.exhaustive
def test_checkpoints_have_no_holes(patched: Registry) -> None:
    assert sharding_of(build(transformer_config(**PERIODIC))) == []
    assert not transformer_config().hetereogenous_dist_checkpoint
    patched.revert()
    (problem,) = sharding_of(build(transformer_config(**PERIODIC)))
    assert "indexer" in problem


def test_logged_loss_is_the_mean_over_full_layers(patched: Registry) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Helper

    model = build(transformer_config(**RECOMPUTE["full, layer by layer"], **PERIODIC))
    for micro_batches in (2, 3):  # two iterations: the second one begins anew
        for number in range(micro_batches):
            forward(model, number).backward()
        values = Helper.tracker["values"].clone()
        assert values.nonzero().flatten().tolist() == [0, 3]
        logged: dict[str, torch.Tensor] = {}
        Helper.track_indexer_metrics(1 / micro_batches, 1, None, None, logged)
        assert logged["indexer loss"].item() == pytest.approx(values.sum().item() / (2 * micro_batches), rel=1e-6)
        assert not Helper.tracker["values"].any()
    patched.revert()
    Helper.tracker["values"].copy_(values)
    Helper.track_indexer_metrics(1 / 3, 1, None, None, of_stock := {})
    assert of_stock["indexer loss"].item() == pytest.approx(logged["indexer loss"].item() * 2 / LAYERS, rel=1e-6)
    Helper.tracker.clear()
    patched.apply([PATCH.name])
    Helper.track_indexer_metrics(1.0, 1, None, None, nothing := {})
    assert nothing == {}


@pytest.mark.exhaustive
def test_a_model_of_another_depth_begins_a_new_count(patched: Registry) -> None:
    """What an earlier model had logged, and nobody read, goes with the values and with their count."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper as Helper

    from megacpp_mcore.layer_specs.nam56r import prepare

    Helper.save_loss_to_tracker(torch.tensor(3.0), 1, LAYERS)
    config = transformer_config(layers=2 * LAYERS)
    prepare(preset("nam56r_tiny"), config, None)
    for layer, loss in ((2, 5.0), (2 * LAYERS, 7.0)):
        Helper.save_loss_to_tracker(torch.tensor(loss), layer, 2 * LAYERS)
    Helper.track_indexer_metrics(1.0, 1, None, None, logged := {})
    assert logged["indexer loss"].item() == pytest.approx(6.0)


def stages(pipeline: int, virtual: int | None = None, ends: tuple[int | None, int | None] = (None, None)) -> dict[str, Any]:
    """Fields of a pipeline; ``ends``: layers of its first and of its last stage."""
    cut = {"pipeline_model_parallel_size": pipeline, "virtual_pipeline_model_parallel_size": virtual}
    return cut | {f"num_layers_in_{which}_pipeline_stage": end for which, end in zip(("first", "last"), ends, strict=True)}


NOT_FITTING: list[tuple[str | None, dict[str, Any], list[str]]] = [
    (None, PERIODIC | stages(3), ["1–2, 3–4, 5–6", "layers 3, 5", "{schedule: FSFFFS}", "--dsa-indexer-topk-freq 3"]),
    (None, PERIODIC | stages(2, virtual=3), ["1–1, 2–2", "layers 2, 3, 5, 6", "FFFFFF"]),
    ("{schedule: FSSSFS}", stages(2), ["'FSSSFS'", "layer 4", "{schedule: FSSFFS}"]),
    ("{schedule: FSS}", stages(3, ends=(1, 3)), ["1–1, 2–3, 4–6", "layer 2.", "{schedule: FFSFSS}"]),
    ("{schedule: FSSFSSF}", {}, ["names 7 layers, the model has 6"]),
    ("{schedule: FSSSSSF}", {}, ["(FSSSSSF)", "names 7 layers, the model has 6"]),
    ("{schedule: FSS}", PERIODIC, ["'FSS'", "--dsa-indexer-topk-freq 3"]),
    ("{schedule: FXS}", {}, ["index.yaml", "{'schedule': 'FXS'}", "expected {schedule: FSSFSS}"]),
]


def test_what_does_not_fit_is_refused(patched: Registry, schedule: Schedule, monkeypatch: Any) -> None:
    """As the spec is made and, where it was made otherwise, as the block is built from it."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.transformer.transformer_block import TransformerBlock

    patched.revert()
    made = []
    with mock.patch.object(specs, "_validate_dsa_index_share_pipeline_split"):
        for text, changes, words in NOT_FITTING:
            config = transformer_config(**changes, pipeline_dtype=torch.float32)
            stage = 0 if config.virtual_pipeline_model_parallel_size else None
            made.append((text, words, config, stage, block_spec(config, stage)))
    patched.apply([PATCH.name])
    for text, words, config, stage, spec in made:
        monkeypatch.delenv("MEGACPP_CONFIG", raising=False)
        if text is not None:
            schedule(text)
        for refuse in (partial(block_spec, config, stage), partial(TransformerBlock, config, spec, vp_stage=stage)):
            with pytest.raises((ModelError, ConfigFileError)) as error:
                refuse()
            assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.exhaustive
def test_what_the_patch_cannot_know_is_refused(patched: Registry, schedule: Schedule) -> None:
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention

    model = build(transformer_config(**PERIODIC))
    layers = dsa_layers(model)
    with raises(ModelError, "layer 2", "layer 1", code="not-published"):
        model.decoder.layers[1](torch.randn(S, B, HIDDEN), None)
    spec = block_spec(transformer_config()).layer_specs[0].submodules.self_attention.submodules.core_attention

    def bare(config: Any) -> Any:
        from megatron.core.transformer.enums import AttnMaskType

        return DSAttention(config, spec.submodules, 1, AttnMaskType.causal, "self")

    assert bare(transformer_config()).indexer is not None
    schedule("{schedule: FSSSSS}")
    with raises(ModelError, "DSA layer 1", "'FSSSSS'", code="outside"):
        bare(transformer_config())
    patched.revert()
    before = build(transformer_config(**PERIODIC))
    patched.apply([PATCH.name])
    with raises(ModelError, "DSA layer 1", "dsa-index-cache", code="built-before"):
        forward(before, 0)
    assert layers["d1"].index_share


def test_layers_share_lengths_in_their_micro_batch(patched: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which only fused kernels give; here one that makes up a number for every layer and micro-batch stands in for them."""
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels

    def topk(*, q: torch.Tensor, index_topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        length = q.double().sum().abs().mul(1000).int()
        return torch.zeros(B, S, index_topk, dtype=torch.int32), length.expand(B, S)

    monkeypatch.setattr(dsa_kernels, "_load_backend", lambda config: SimpleNamespace(run_fused_qk_topk=topk))
    config = transformer_config(**RECOMPUTE["full, two layers"], **PERIODIC, dsa_indexer_loss_coeff=0.0)
    config.dsa_kernel_backend = "cudnn"  # which is not installed
    model, spy = build(config), Spy()
    with spy.watching(model):
        in_flight(model, (0, 1), causal_mask)
    spy.check(sources_of("FSSFSS"), (0, 1))
    assert len({int(numbers[0, 0, -1]) for layer in ("d1", "d4") for numbers in spy.first[layer]}) == 4
    assert sum(map(len, spy.again.values())) == 2 * LAYERS


def test_transformer_engine_checkpoint_is_handed_a_function_that_remembers(
    patched: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 recipes recompute through it; what Transformer Engine does with the function is not run here."""
    from megatron.core.extensions import transformer_engine as extension

    handed: list[Any] = []
    distributed = SimpleNamespace(checkpoint=lambda function, *args, **kwargs: handed.append((function, args, kwargs)))
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(distributed=distributed))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", distributed)
    monkeypatch.setattr(extension, "HAVE_TE", True)
    monkeypatch.setattr(extension, "is_te_min_version", lambda version: True)
    module = torch.nn.Linear(1, 1)
    extension.te_checkpoint(max, False, None, None, 2, 3)
    extension.te_checkpoint(module, False, None, None, 2)
    (function, args, _), (kept, _, _) = handed
    assert isinstance(function, Recomputed)
    assert function(*args) == 3
    assert kept is module


def shared_outside_of_gpt() -> list[torch.Tensor]:
    """Of a Full layer and of its Shared one, and the gradients of their queries."""
    stock.restart_random()
    config, tensors = dsa_config(num_layers=2, dsa_indexer_topk_freq=2), []
    for number in (1, 2):
        attention, inputs = dsa_attention(config, number), layer_inputs(24, 2, seed=number)
        assert (attention.indexer is None, attention.source_layer) == (number == 2, 1)
        tensors.append(run_layer(attention, inputs))
        tensors.append(torch.autograd.grad(tensors[-1].sum(), inputs["query"])[0])
    return tensors


def test_layers_share_as_in_stock(process: Path) -> None:
    expected = shared_outside_of_gpt()
    with stock.patched(PATCH):
        assert all(map(torch.equal, shared_outside_of_gpt(), expected))


@pytest.mark.parametrize("packed", [False, True])
def test_indices_are_where_stock_keeps_them(process: Path, packed: bool) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    with stock.patched(PATCH):
        attention = dsa_attention(dsa_config(num_layers=2, dsa_indexer_topk_freq=2), 2)
        mask, documents = torch.empty(1), PackedSeqParams(qkv_format="thd")
        arguments = (documents if packed else None, mask)
        for holder, name in (
            (attention._get_index_share_topk_holder(*arguments), attention._HOLDER_ATTR),
            (attention._get_index_share_topk_length_holder(*arguments), attention._LENGTH_HOLDER_ATTR),
        ):
            assert holder is getattr(documents if packed else mask, name)


def test_a_configuration_of_what_stock_reads_is_checked_by_stock(process: Path) -> None:
    """It has no ``num_layers``."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    config = SimpleNamespace(experimental_attention_variant="dsa", dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=1)
    with stock.patched(PATCH):
        specs._validate_dsa_index_share_pipeline_split(config, [0, 1, 2, 3])
        with pytest.raises(RuntimeError, match="pipeline split is invalid"):
            specs._validate_dsa_index_share_pipeline_split(config, [1, 2, 3, 4])
