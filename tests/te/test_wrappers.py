"""What the wrappers refuse before they reach Transformer Engine, and how a QKV weight is cut; parity: tests/gpu/test_te.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.backends import Dispatcher, probes
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.grouped_mlp import te as experts
from megacpp_mcore.ops.mla import flash4
from megacpp_mcore.te import block, dot_product
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.probe import ProbeResult
from tests.errors import raises


@pytest.fixture
def there(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is installed; a refused call may reach none of its entry points."""
    monkeypatch.setattr(te_imports, "entry", lambda name: pytest.fail(f"{name} was reached"))


@pytest.mark.parametrize("need", ["attention_mask", "seq_idx"])
def test_attention_refuses_what_it_cannot_do(there: None, need: str) -> None:
    qkv = [torch.zeros(4, 1, 2, 8) for _ in range(3)]
    with raises(BackendError, need):
        dot_product.attend(*qkv, softmax_scale=1.0, **{need: torch.zeros(1, 4)})
    assert dot_product.lacking(seq_idx=None, attention_mask=None, softcap=0.0) is None
    assert dot_product.lacking(softcap=50.0, seq_idx=torch.zeros(1), selected=torch.zeros(1)).count(";") == 2
    with raises(ModelError, "rope", "attention_mask"):
        dot_product.lacking(rope=1)


@pytest.mark.parametrize(
    ("q", "k", "v", "value"),
    [
        ((4, 1, 3, 8), (4, 1, 2, 8), (4, 1, 2, 8), "q, k, v"),
        ((4, 1, 2, 8), (4, 1, 2, 4), (4, 1, 2, 8), "q, k, v"),
        ((4, 2, 2, 8), (4, 1, 2, 8), (4, 1, 2, 8), "q, k, v"),
        ((4, 1, 2, 8), (5, 1, 2, 8), (5, 1, 2, 8), "4 causal queries and 5 keys"),
    ],
)
def test_shapes_of_attention(there: None, q: Any, k: Any, v: Any, value: str) -> None:
    with raises(ModelError, value):
        dot_product.attend(torch.zeros(q), torch.zeros(k), torch.zeros(v), softmax_scale=1.0)
    with raises(ModelError, "window", "-1"):
        dot_product.attend(*[torch.zeros(4, 1, 2, 8)] * 3, softmax_scale=1.0, window=-1)
    first = [torch.zeros(shape).permute(1, 2, 0, 3) for shape in (q, k, v)]
    with raises(ModelError, value):
        dot_product.attend_heads_first(*first, softmax_scale=1.0)


def test_the_dispatcher_goes_on_where_attention_does_not_cover(
    installed: None, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_probed", lambda name: ProbeResult(True))
    monkeypatch.setattr(flash4, "_engine_runs", lambda: ProbeResult(True))
    needs = {"device": "cuda", "dtype": "bfloat16", "qk_dim": 128, "v_dim": 64}
    assert Dispatcher({"mla": "te"}).request("mla", **needs).fn is dot_product.attend
    narrower = Dispatcher().request("mla", **needs | {"qk_dim": 64})
    assert narrower.observed == "sdpa"  # never by itself where ours covers the call
    assert Dispatcher({"mla": "te"}).request("mla", window=4095, **needs).fn is dot_product.attend
    with raises(BackendError, "'te'", "op mla", "packed documents", code="cannot-run"):
        Dispatcher({"mla": "te"}).request("mla", packed=True, **needs)
    off = ProbeResult(False, "a causal call of Transformer Engine's attention is off by 1 of what plain PyTorch gives")
    monkeypatch.setattr(flash4, "_engine_runs", lambda: off)
    with raises(BackendError, "'te'", "op mla", "off by 1", code="cannot-run"):
        Dispatcher({"mla": "te"}).request("mla", **needs)
    configure(attention=False)
    with raises(BackendError, "'te'", "op mla", "attention: false", code="cannot-run"):
        Dispatcher({"mla": "te"}).request("mla", **needs)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"hidden": 30, "heads": 4}, ["hidden 30", "heads 4"]),
        ({"hidden": 32, "heads": 4, "groups": 3}, ["heads 4", "groups 3"]),
        ({"hidden": 32, "heads": 4, "activation": "gelu_fast"}, ["'gelu_fast'", "gelu_tanh, relu"]),
    ],
)
def test_a_block_that_cannot_be(there: None, arguments: dict[str, Any], values: list[str]) -> None:
    with raises(ModelError, *values):
        block.Block(ffn=64, **arguments)


def test_experts_refuse_what_does_not_fit(there: None) -> None:
    """As the reference does, before anything is permuted or multiplied."""
    x, w1, w2 = torch.zeros(4, 8), torch.zeros(2, 6, 8), torch.zeros(2, 8, 6)
    with raises(ModelError, "tokens_per_expert is [3, 2]", "sum 5"):
        experts.grouped_mlp(x, torch.tensor([3, 2]), w1, w2, None)
    with raises(ModelError, "activation is 'swiglu'"):
        experts.grouped_mlp(x, torch.tensor([2, 2]), w1, w2, None, activation="swiglu")
    routing, probs = torch.ones(4, 2, dtype=torch.bool), torch.ones(4, 2)
    with raises(ModelError, "4 of 4", "topk = 1"):
        experts.routed_mlp(x, routing, probs, w1, w2, topk=1)
    with raises(ModelError, "x", "no tokens"):
        experts.routed_mlp(x[:0], routing[:0], probs[:0], w1, w2, topk=2)


def test_experts_refuse_delayed_scaling(there: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose maxima are the module's, of which all layers of equal sizes have one."""
    recipe = SimpleNamespace(delayed=lambda: True)
    scope = SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=lambda: recipe)
    monkeypatch.setattr(te_imports, "entry", {"FP8GlobalStateManager": scope}.__getitem__)
    with raises(ModelError, "delayed", "block or current"):
        experts.grouped_mlp(torch.zeros(4, 8), torch.tensor([2, 2]), torch.zeros(2, 6, 8), torch.zeros(2, 8, 6), None)


def test_the_engines_experts_are_chosen_by_name_alone(
    installed: None, configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_probed", lambda name: ProbeResult(True))
    needs = {"device": "cuda", "dtype": "float32", "hidden": 64, "ffn": 64, "experts": 4}
    for op in ("grouped_mlp", "routed_mlp"):
        assert Dispatcher({op: "te"}).request(op, **needs).fn is getattr(experts, op)
        assert Dispatcher().request(op, **needs).observed == "reference"
    configure(permute=False)
    assert Dispatcher({"grouped_mlp": "te"}).request("grouped_mlp", **needs).observed == "te"
    with raises(BackendError, "'te'", "op routed_mlp", "permute: false", code="cannot-run"):
        Dispatcher({"routed_mlp": "te"}).request("routed_mlp", **needs)


def test_without_transformer_engine_each_says_why() -> None:
    x, counts, w = torch.zeros(4, 8), torch.tensor([4]), torch.zeros(1, 8, 8)
    routing = torch.ones(4, 1, dtype=torch.bool)
    for what, call in (
        ("experts", lambda: experts.grouped_mlp(x, counts, w, w, None)),
        ("experts", lambda: experts.routed_mlp(x, routing, torch.ones(4, 1), w, w, topk=1)),
        ("blocks", lambda: block.Block(32, 4, 64)),
        ("DotProductAttention", lambda: dot_product.attend(*[torch.zeros(4, 1, 2, 8)] * 3, softmax_scale=1.0)),
    ):
        with raises(BackendError, what, "transformer_engine"):
            call()
