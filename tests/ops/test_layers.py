"""The layers of plain PyTorch against those of a Megatron run: the same weights, outputs, gradients and starting values.

Shape legend: S sequence, B batch, D hidden.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.huggingface.names import tensors
from megacpp_mcore.model import Model, preset, with_overrides
from megacpp_mcore.ops import layers
from tests import stock
from tests.errors import raises

S, B, D = 24, 2, 128
OVERRIDES = {"seq_length": S, "dsa": {"topk": 8, "distill": "own"}, "mtp": {"depth": 0}}
LAYERS = {"A": 5, "M": 3, "R": 12}
"""A layer of each family of nam56r_tiny, by its number; that of A selects keys."""


@pytest.fixture(scope="module")
def model() -> Model:
    return with_overrides(preset("nam56r_tiny"), OVERRIDES)


@pytest.fixture(scope="module")
def fresh(process: Path) -> Any:
    return stock.build(OVERRIDES, preset("nam56r_tiny"), process)


@pytest.fixture(scope="module")
def stirred(process: Path) -> Any:
    return stock.stirred(stock.build(OVERRIDES, preset("nam56r_tiny"), process))


def built(model: Model, letter: str) -> torch.nn.Module:
    """Our layer with the sizes of ``model``."""
    mla, dsa, ssm, rnn = model.mla, model.dsa, model.mamba3, model.m2rnn
    common: dict[str, Any] = {"eps": model.norm_eps, "depth": model.depth}
    if letter == "M":
        sizes = {name: getattr(ssm, name) for name in ("head_dim", "groups", "state", "mimo_rank", "expand", "a_floor")}
        return layers.Mamba3(D, **sizes, **common)
    if letter == "R":
        sizes = {"heads": model.recurrent_heads, "key_dim": rnn.key_dim, "value_dim": rnn.value_dim}
        return layers.M2RNN(D, **sizes, conv_kernel=rnn.conv_kernel, **common)
    return layers.SparseMLA(
        D, heads=model.heads, q_lora_rank=mla.q_lora_rank, kv_lora_rank=mla.kv_lora_rank, qk_nope_head_dim=mla.qk_head_dim,
        qk_rope_head_dim=mla.qk_pos_emb_head_dim, v_head_dim=mla.v_head_dim, topk=dsa.topk, index_heads=dsa.indexer_heads,
        index_head_dim=dsa.indexer_head_dim, rope_theta=model.rope_theta, **common,
    )  # fmt: skip


def by_export(state: dict[str, torch.Tensor], mixer: Any, model: Model, letter: str) -> dict[str, torch.Tensor]:
    """Tensors of Megatron's layer by the names that an export has for them."""
    state, prefixes = dict(state), [f"decoder.layers.{LAYERS[letter] - 1}.self_attention."]
    prefixes.append(f"model.layers.{LAYERS[letter] - 1}.mixer.")
    if letter != "A":
        rows = state.pop("in_proj.weight")
        state |= {f"in_proj.weight.{slot.part.name}": rows[slot.start : slot.start + slot.rows] for slot in mixer.in_proj.slots}
    return {
        tensor.name.removeprefix(prefixes[1]): state[tensor.key.removeprefix(prefixes[0])]
        for tensor in tensors(model)
        if tensor.name.startswith(prefixes[1])
    }


@pytest.mark.parametrize("letter", LAYERS)
def test_a_layer_is_megatrons(stirred: Any, model: Model, letter: str) -> None:
    ours, megatron_layer = built(model, letter), stirred.decoder.layers[LAYERS[letter] - 1].self_attention
    ours.load_state_dict(by_export(dict(megatron_layer.named_parameters()), megatron_layer, model, letter))
    generator = torch.Generator().manual_seed(1)
    hidden, upstream = (torch.randn(B, S, D, generator=generator) for _ in range(2))
    our_hidden, stock_hidden = (hidden.clone().requires_grad_() for _ in range(2))
    megatron_layer.zero_grad()
    expected, bias = megatron_layer(stock_hidden.transpose(0, 1), None)
    assert bias is None
    (expected.transpose(0, 1) * upstream).sum().backward()
    output, extra = ours(our_hidden)
    objective = (output * upstream).sum()
    if letter == "A":  # there it is added by the backward pass
        objective = objective + megatron_layer.config.dsa_indexer_loss_coeff * extra
    objective.backward()
    torch.testing.assert_close(output, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_hidden.grad, stock_hidden.grad, rtol=1e-4, atol=1e-5)
    gradients = {name: weight.grad for name, weight in megatron_layer.named_parameters()}
    for name, gradient in by_export(gradients, megatron_layer, model, letter).items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(ours.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("letter", LAYERS)
def test_a_layer_starts_as_megatrons(fresh: Any, model: Model, letter: str) -> None:
    megatron_layer = fresh.decoder.layers[LAYERS[letter] - 1].self_attention
    torch.manual_seed(3)
    ours = built(model, letter).state_dict()
    expected = by_export(dict(megatron_layer.named_parameters()), megatron_layer, model, letter)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype == torch.float32
        if name == "dt_bias":
            assert bool(((step := torch.nn.functional.softplus(ours[name])) >= 9.9e-4).all() and (step <= 0.101).all())
        elif name == "A_log":
            assert bool((ours[name] >= 0).all() and (ours[name] <= math.log(16)).all())
        else:
            spread = float(value.std())
            assert ours[name].mean().item() == pytest.approx(value.mean().item(), abs=7 * spread / value.numel() ** 0.5)
            assert ours[name].std().item() == pytest.approx(spread, rel=0.2), name


@pytest.mark.parametrize("letter", LAYERS)
def test_documents_stay_apart(model: Model, letter: str) -> None:
    layer = built(model, letter)
    hidden = torch.randn(1, S, D, generator=torch.Generator().manual_seed(4))
    documents = (torch.arange(S) >= 10).int()[None]
    packed, _ = layer(hidden, documents)
    torch.testing.assert_close(packed[:, :10], layer(hidden[:, :10])[0], rtol=1e-5, atol=1e-6)
    if letter != "A":  # whose rotary angles count on, which only differences show
        torch.testing.assert_close(packed[:, 10:], layer(hidden[:, 10:])[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(packed[:, 10:], layer(hidden)[0][:, 10:])


@pytest.mark.parametrize("letter", "MR")
def test_a_state_continues_a_sequence(model: Model, letter: str) -> None:
    layer = built(model, letter)
    hidden = torch.randn(B, S, D, generator=torch.Generator().manual_seed(5))
    uncut, none = layer(hidden)
    first, state = layer(hidden[:, :9], return_state=True)
    second, _ = layer(hidden[:, 9:], state=state)
    assert none is None
    torch.testing.assert_close(torch.cat([first, second], dim=1), uncut, rtol=1e-5, atol=1e-6)


def test_the_loss_of_the_indexer(model: Model) -> None:
    layer = built(model, "A")
    hidden = torch.randn(B, S, D, generator=torch.Generator().manual_seed(6))
    out, loss = layer(hidden)
    loss.backward()
    trained = {name for name, weight in layer.named_parameters() if weight.grad is not None}
    assert trained == {name for name, _ in layer.named_parameters() if name.startswith("indexer.")}
    with torch.no_grad():
        again, nothing = layer(hidden)
    assert torch.equal(out, again)
    assert float(nothing) == 0


def test_what_has_to_stay_in_float32_does(model: Model) -> None:
    layer = built(model, "R")
    before = layer.A_log.detach().clone()
    layer.bfloat16()
    assert torch.equal(layer.A_log, before)
    assert {name for name, param in layer.named_parameters() if param.dtype == torch.float32} == set(layer.in_fp32)
    out, _ = layer(torch.randn(B, S, D, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert layer.double().A_log.dtype == torch.float64


def test_sizes_and_backends_are_refused_by_name() -> None:
    with raises(ModelError, "hidden_size is 200", "head_dim 64"):
        layers.Mamba3(100)
    with pytest.raises(BackendError, match="triton"):
        layers.M2RNN(32, heads=2, backend="triton")(torch.randn(1, 4, 32))
