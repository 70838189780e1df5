"""The grouped FP8 product: its truth, and what DeepGEMM's adapter does where DeepGEMM is not there or does not work."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megacpp_mcore.backends import Dispatcher, ProbeResult
from megacpp_mcore.backends.candidates import grouped_fp8_candidates
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.grouped_fp8 import deep_gemm, reference
from tests.errors import raises


def operands(rows: tuple[int, ...] = (128, 0, 256), outputs: int = 128, inputs: int = 256) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(rows), inputs, generator=generator)
    w = torch.randn(len(rows), outputs, inputs, generator=generator)
    return x, w, *reference.quantize_rows(x), *reference.quantize_blocks(w), torch.tensor(rows)


def test_the_product_is_that_of_the_values_within_what_fp8_rounds() -> None:
    x, w, *quantized = operands()
    product = reference.grouped_product(*quantized).double()
    expected = torch.cat([x[:128].double() @ w[0].double().T, x[128:].double() @ w[2].double().T])
    # Each operand of E4M3 is off by 2.6 % (rms), whatever the depth of the product.
    error = float((product - expected).norm() / expected.norm())
    assert 0.02 < error < 0.05
    scaled = [quantized[0], 2 * quantized[1], *quantized[2:]]
    assert torch.equal(reference.grouped_product(*scaled).double(), 2 * product)


def test_a_scale_belongs_to_its_block() -> None:
    x = torch.ones(128, 256)
    x[5, 130] = 1000.0
    values, scale = reference.quantize_rows(x)
    assert int((scale != scale[0, 0]).sum()) == 1
    assert float(scale[5, 1]) == pytest.approx(1000 / 448)
    assert float(values[5, 130]) == 448
    w = torch.ones(2, 256, 128)
    w[1, 140, 3] = 500.0
    _, scale = reference.quantize_blocks(w)
    assert (tuple(scale.shape), int((scale != scale[0, 0, 0]).sum())) == ((2, 2, 1), 1)
    assert float(scale[1, 1, 0]) == pytest.approx(500 / 448)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({4: torch.tensor([100, 28, 256])}, r"\[100, 28, 256\].* 128\b"),
        ({4: torch.tensor([128, 128, 256])}, r"\[128, 128, 256\].* 384$"),
        ({0: torch.ones(384, 256)}, "of torch.float8_e4m3fn"),
        ({1: torch.ones(384, 3)}, r"\(384, 3\).*\(384, 2\)"),
    ],
)
def test_operands_that_do_not_fit(change: dict[int, Any], said: str) -> None:
    arguments = list(operands()[2:])
    for place, value in change.items():
        arguments[place] = value
    for product in (reference.grouped_product, deep_gemm.grouped_product):
        with pytest.raises(ModelError, match=said):
            product(*arguments)


def test_auto_never_takes_what_its_probe_did_not_see_working(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"device": "cuda", "dtype": "float8_e4m3fn", "inputs": 256, "outputs": 128}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("megacpp_mcore.backends.probes.arch", lambda: "sm_90")
    failing = "a grouped call failed: Assertion error (csrc/apis/gemm.hpp:101)"
    ours = grouped_fp8_candidates()
    assert {candidate.name for candidate in ours} == {"deep_gemm", "reference"}
    for probed, observed in ((ProbeResult(False, failing), "reference"), (ProbeResult(True), "deep_gemm")):
        monkeypatch.setattr(deep_gemm, "probe", lambda probed=probed: probed)
        made = [dataclasses.replace(candidate, requires=()) for candidate in ours]
        chosen = Dispatcher(candidates=made).request("grouped_fp8", **needs)
        assert chosen.observed == observed
        assert (failing in chosen.reason) is (observed == "reference")


def test_deep_gemm_that_is_not_there() -> None:
    with raises(BackendError, "deep_gemm"):
        deep_gemm.grouped_product(*operands()[2:])
    assert deep_gemm.probe() == ProbeResult(False, "deep_gemm is not installed")
