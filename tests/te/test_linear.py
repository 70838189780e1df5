"""Which linear layers the walker replaces, and which it leaves and why: plans, on models of plain modules and on ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch.nn import Embedding, Linear, Module, ModuleDict, Sequential

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.layer_specs.parts import scattering
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.te import linear
from tests import stock
from tests.distributed.test_tensor_parallel_sums import config_of
from tests.errors import raises


class LoRAWrapped(Module):
    """Owns a linear layer, and adds to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Linear(32, 32)
        self.lora_a, self.lora_b = Linear(32, 16), Linear(16, 32)


class OwnForward(Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


ROLES: dict[str, tuple[Module, str]] = {
    "qkv": (Linear(32, 96), ""),
    "fc1": (Linear(32, 128, bias=False), ""),
    "router": (Linear(32, 16), "router of experts"),
    "mod_router": (Linear(32, 16), "router over depth (MoD)"),
    "mhc_scores": (Linear(32, 16), "score projection of hyper-connections"),
    "ngram_hash_proj": (Linear(32, 32), "projection of n-gram hashes"),
    "structure_embedding_proj": (Linear(32, 32), "structure embedding"),
    "odd": (Linear(32, 40), "widths (40, 32) are not multiples of 16"),
    "own": (OwnForward(32, 32), "OwnForward has a forward pass of its own"),
    "one": (Linear(32, 32), "tied with layer.two.weight"),
    "two": (Linear(32, 32), "tied with layer.one.weight"),
    "hooked": (Linear(32, 32), "hooks are registered on it"),
    "parametrized": (torch.nn.utils.parametrizations.weight_norm(Linear(32, 32)), "ParametrizedLinear"),
}
"""Every role that the list of exclusions names, and why it is left."""


def test_the_pinned_list_on_a_model_with_every_role() -> None:
    layer = ModuleDict({name: module for name, (module, _) in ROLES.items()} | {"wrapped": LoRAWrapped()})
    model = ModuleDict({"word_embeddings": Embedding(64, 32), "lm_head": Linear(32, 64, bias=False), "layer": layer})
    model["lm_head"].weight = model["word_embeddings"].weight
    layer["two"].weight = layer["one"].weight
    layer["hooked"].register_forward_hook(lambda *_: None)
    planned = linear.plan(model)
    why = {decision.name: decision.why for decision in planned}
    expected = {f"layer.{name}": reason for name, (_, reason) in ROLES.items()} | {
        "lm_head": "token embedding or output head, which may be tied",
        "layer.wrapped.base": "owned by LoRAWrapped",
        **dict.fromkeys(("layer.wrapped.lora_a", "layer.wrapped.lora_b"), "adapter"),
    }
    assert why.keys() == expected.keys()
    assert [
        name for name, reason in expected.items() if not why[name].startswith(reason) or bool(why[name]) != bool(reason)
    ] == []
    report = linear.report(planned)
    assert report.startswith("2 of 17 replaced; ")
    assert "layer.wrapped.lora_a, layer.wrapped.lora_b: adapter" in report
    assert linear.report([]) == "0 of 0 replaced"
    (root,) = linear.plan(Linear(32, 32))
    assert root.why == "the model itself"


def test_nothing_is_replaced_without_the_feature_or_the_engine(configure: Callable[..., None]) -> None:
    model = Sequential(Linear(32, 32))
    kept = model[0]
    with raises(BackendError, "linear: false"):
        linear.replace(model)
    configure(linear=True)
    with raises(BackendError, "linear layers", "transformer_engine is"):
        linear.replace(model)
    assert model[0] is kept


def test_the_local_layers_of_the_model(tmp_path: Path) -> None:
    """Of nam56r_tiny the projections of A and M and the feed-forwards go; routers, indexers, experts and the head stay."""
    with stock.one_process(tmp_path / "store"):
        built = stock.build({}, preset("nam56r_tiny"), tmp_path)
        why = {layer.name: layer.why for layer in linear.plan(built)}
        # Why torchao, which converts only this class, has nothing to convert.
        assert not [name for name, module in built.named_modules() if isinstance(module, Linear)]
    swapped = {name.rpartition(".")[2] for name, reason in why.items() if not reason}
    assert {"linear_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "linear_fc2"} <= swapped
    for name, reason in why.items():
        if any(part in name for part in ("output_layer", "indexer", ".experts.")):
            assert reason, name


def test_layers_that_send_rows_beside_products_go_too(configure: Callable[..., None]) -> None:
    config = config_of(sequence_parallel=True)
    options = {"bias": False, "input_is_parallel": True, "skip_bias_add": False, "init_method": torch.nn.init.zeros_}
    why = []
    with stock.one_rank(0, 2, Layout(tensor=2, sequence_parallel=True)):
        for requested in (False, True):
            configure(linear=requested)
            why += linear.plan(Sequential(scattering(RowParallelLinear)(64, 32, config=config, **options)))
    assert [layer.why for layer in why] == ["RowParallelLinear has a forward pass of its own", ""]


def test_the_key_is_for_local_layers(tmp_path: Path) -> None:
    from megacpp_mcore.layer_specs.layer_plan import layer_plan
    from megacpp_mcore.settings import load

    file = tmp_path / "megacpp.yaml"
    file.write_text("model: nam56r_tiny\ntransformer_engine: {linear: true}\n")
    words = stock.words(preset("nam56r_tiny"))
    with stock.cpu_lane():
        config = stock.model_config(words).transformer
        assert layer_plan(load(file), config).linear
        config.transformer_impl = "transformer_engine"
        with raises(ModelError, "linear: true", "--transformer-impl transformer_engine"):
            layer_plan(load(file), config)
