"""Quantised tensors are known by their type, refused by ops that take none, and counted where they dequantise themselves."""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.observe.receipts import claims
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.te import quantized
from tests.errors import raises


class QuantizedTensorStorage(torch.Tensor):
    """Like a quantised tensor of Transformer Engine: a payload whose dtype reads as bfloat16."""

    @quantized.counting
    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Float8Tensor(QuantizedTensorStorage):
    @quantized.counting
    def dequantize(self) -> torch.Tensor:
        return super().dequantize()


def payload() -> torch.Tensor:
    return torch.ones(4, 1, 2, 16, dtype=torch.bfloat16).as_subclass(Float8Tensor)


def test_the_type_tells_and_the_dtype_does_not() -> None:
    assert payload().dtype == torch.bfloat16
    assert quantized.is_quantized(payload())
    assert quantized.is_quantized(torch.ones(2).to(torch.float8_e4m3fn))
    assert not quantized.is_quantized(torch.nn.Parameter(torch.ones(2)))
    kind = type("Float8TrainingTensor", (torch.Tensor,), {"__module__": "torchao.float8.float8_training_tensor"})
    assert quantized.is_quantized(torch.ones(2).as_subclass(kind))
    assert not quantized.is_quantized(torch.ones(2).as_subclass(type("Plain", (torch.Tensor,), {})))


def test_an_op_refuses_it() -> None:
    plain = torch.ones(4, 1, 2, 16)
    with raises(ModelError, "k_TBHK", "Float8Tensor of torch.bfloat16"):
        mla_attention(plain, payload(), plain, softmax_scale=1.0)


def test_a_seeded_dequantisation_is_counted_once_and_disqualifies() -> None:
    before = quantized._counted["calls"]
    payload().dequantize()  # which calls its base's
    assert quantized._counted["calls"] == before + 1
    assert quantized.count() is None  # nobody watches where there is no Transformer Engine
    for times, evidence in ((None, ""), (0, ""), (3, "a quantised tensor was dequantised 3 times")):
        norm = {
            "op": "norm",
            "layers": "1",
            "requested": "auto",
            "observed": "x",
            "slower_than_best": False,
            "reason": "",
        }
        values = {"backends": [norm], "precision.dequantised": times}
        assert claims._fallen_back(claims.Case(values, (), {}, None)) == evidence
