"""Which linear layers the walker replaces, and which it leaves and why: plans, on models of plain modules and on ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Embedding, Linear, Module, ModuleDict, Sequential

from megacpp_mcore.errors import BackendError, ConfigFileError, ModelError
from megacpp_mcore.model import preset
from megacpp_mcore.te import linear
from megacpp_mcore.util import te_imports
from tests import stock
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


def stand_in() -> ModuleDict:
    """A model with every role that the list of exclusions names."""
    model = ModuleDict(
        {
            "word_embeddings": Embedding(64, 32),
            "lm_head": Linear(32, 64, bias=False),
            "layer": ModuleDict(
                {
                    "qkv": Linear(32, 96),
                    "router": Linear(32, 16),
                    "mod_router": Linear(32, 16),
                    "mhc_scores": Linear(32, 16),
                    "ngram_hash_proj": Linear(32, 32),
                    "structure_embedding_proj": Linear(32, 32),
                    "wrapped": LoRAWrapped(),
                    "odd": Linear(32, 40),
                    "own": OwnForward(32, 32),
                    "one": Linear(32, 32),
                    "two": Linear(32, 32),
                    "hooked": Linear(32, 32),
                    "parametrized": torch.nn.utils.parametrizations.weight_norm(Linear(32, 32)),
                    "fc1": Linear(32, 128, bias=False),
                }
            ),
        }
    )
    layer = model["layer"]
    model["lm_head"].weight = model["word_embeddings"].weight
    layer["two"].weight = layer["one"].weight
    layer["hooked"].register_forward_hook(lambda *_: None)
    return model


def test_the_pinned_list_on_a_model_with_every_role() -> None:
    why = {one.name: one.why for one in linear.plan(stand_in())}
    assert {name for name, reason in why.items() if not reason} == {"layer.qkv", "layer.fc1"}
    expected = {
        "lm_head": "token embedding or output head, which may be tied",
        "layer.router": "router of experts",
        "layer.mod_router": "router over depth (MoD)",
        "layer.mhc_scores": "score projection of hyper-connections",
        "layer.ngram_hash_proj": "projection of n-gram hashes",
        "layer.structure_embedding_proj": "structure embedding",
        "layer.wrapped.base": "owned by LoRAWrapped",
        "layer.wrapped.lora_a": "adapter",
        "layer.odd": "widths (40, 32) are not multiples of 16",
        "layer.own": "OwnForward has a forward pass of its own",
        "layer.one": "tied with layer.two.weight",
        "layer.two": "tied with layer.one.weight",
        "layer.hooked": "hooks are registered on it",
    }
    assert {name: why[name] for name in expected} == expected
    assert why["layer.parametrized"].startswith("ParametrizedLinear")
    assert set(why) == {*expected, "layer.qkv", "layer.fc1", "layer.wrapped.lora_b", "layer.parametrized"}


def test_the_report_names_what_stays_by_reason() -> None:
    said = linear.report(linear.plan(stand_in()))
    assert said.startswith("2 of 17 replaced; ")
    assert "layer.one: tied with layer.two.weight" in said
    assert "layer.wrapped.lora_a, layer.wrapped.lora_b: adapter" in said
    assert linear.report([]) == "0 of 0 replaced"
    (root,) = linear.plan(Linear(32, 32))
    assert root.why == "the model itself"


def test_nothing_is_replaced_without_the_feature_or_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sequential(Linear(32, 32))
    kept = model[0]
    with raises(BackendError, "linear: false"):
        linear.replace(model)
    te_imports.configure(te_imports.Features(linear=True), "a file")
    try:
        with raises(BackendError, "linear layers", "transformer_engine is"):
            linear.replace(model)
    finally:
        te_imports.configure(None)
    assert model[0] is kept


def test_the_local_layers_of_the_model(tmp_path: Path) -> None:
    """Of nam56r_tiny the projections of A and M and the feed-forwards go; routers, indexers, experts and the head stay."""
    with stock.one_process(tmp_path / "store"):
        built = stock.build({}, preset("nam56r_tiny"), tmp_path)
        why = {one.name: one.why for one in linear.plan(built)}
        # Why torchao, which converts this class alone, has nothing to convert.
        assert not [name for name, module in built.named_modules() if isinstance(module, Linear)]
    swapped = {name.rpartition(".")[2] for name, reason in why.items() if not reason}
    assert {"linear_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_fc1", "linear_fc2"} <= swapped
    for name, reason in why.items():
        if any(part in name for part in ("output_layer", "indexer", ".experts.")):
            assert reason, name


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
    file.write_text("model: nam56r_tiny\ntransformer_engine: {linear: 3}\n")
    with pytest.raises(ConfigFileError):
        load(file)
