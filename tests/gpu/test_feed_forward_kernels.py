"""The feed-forward layer in FP8 on a Hopper GPU: operands, parity with fp64, the same bits, graphs, a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import fp8
from megacpp_mcore.ops.feed_forward import triton
from megacpp_mcore.ops.feed_forward.reference import feed_forward as reference
from tests.errors import raises
from tests.gpu import runs
from tests.gpu.device import assert_replays, assert_same_bits, hopper
from tests.ops.feed_forward_case import Case, draw, outcome
from tests.ops.outcomes import assert_same

pytestmark = [pytest.mark.usefixtures("poisoned"), hopper]

CASES = {
    "odd tokens": Case(T=2345, D=512, F=1040),
    "tiny": Case(T=48, D=128, F=512),
    "one token": Case(T=1, D=256, F=160),
    "seventeen tokens, narrow": Case(T=17, D=16, F=16),
    "nam56r": Case(T=8192, D=3584, F=18944),
}
QUANTIZED = (0.02, 0.1)
"""RMS error of all of a result: of each operand in E4M3 a value is off by 2.6 % (rms), and two products follow each other."""
ROW = 0.25
"""Of its worst row, at most, where there are enough values in a row: a row that is left out is off by 1."""


def _bf16(case: Case) -> Case:
    return replace(case, dtype=torch.bfloat16)


def _values(scaled: fp8.Scaled) -> torch.Tensor:
    scale = scaled.scale.double()
    return scaled.values.double() * (scale[:, None] if scale.dim() else scale)


@pytest.mark.parametrize("name", CASES)
def test_operands_are_divided_by_powers_of_two_and_their_transposes_are_the_same_numbers(name: str) -> None:
    inputs = draw(_bf16(CASES[name]), "cuda")
    dy, h = inputs["dy"].flatten(0, 1), inputs["x"].flatten(0, 1)
    slopes = h.double().requires_grad_()
    (slopes,) = torch.autograd.grad(gelu(slopes).sum(), slopes)
    made = {
        "itself": (triton.of_rows(dy), dy.double()),
        "activation": (triton.of_rows(h, activates=True), gelu(h.double())),
        "its gradient": (triton.of_rows(dy, h), dy.double() * slopes),
    }
    for rows, truth in made.values():
        assert (torch.frexp(rows.scale).mantissa == 0.5).all()
        largest = rows.values.float().abs().amax(1)
        assert (((largest >= 224) & (largest <= 448)) | (largest == 0)).all()
        least = truth.abs().amax(1, keepdim=True) * 2**-17 + 1e-6 * dy.double().abs().amax(1, keepdim=True)
        assert ((_values(rows) - truth).abs() <= truth.abs() / 15 + least).all()
        columns = triton.of_columns(rows)
        assert columns.values.shape == (truth.shape[1], -(-len(truth) // 16) * 16)
        assert columns.scale == rows.scale.max()
        assert not columns.values[:, len(truth) :].float().any()
        values = _values(columns)[:, : len(truth)].T
        normal = _values(rows).abs() >= float(columns.scale) * 2**-6
        assert torch.equal(values[normal], _values(rows)[normal])
        assert float((values - _values(rows)).abs().max()) <= float(columns.scale) * 2**-10
    left, right = (triton.of_columns(triton.of_rows(tensor)) for tensor in (dy, h))
    truth = _values(left) @ _values(right).T
    for fast, rms in ((False, 4e-3), (True, 4e-2)):
        assert float((triton.product(left, right, fast=fast).double() - truth).norm() / truth.norm()) < rms


@pytest.mark.parametrize("name", CASES)
def test_parity_with_fp64(name: str) -> None:
    case = _bf16(CASES[name])
    inputs = draw(case, "cuda")
    truth = outcome(reference, inputs, torch.float64)
    for dtype in (None, torch.float32, torch.bfloat16):
        tensors = outcome(triton.feed_forward, inputs, main_grad=dtype)
        if dtype is torch.bfloat16:  # in which sums of the buffer and small gradients round
            del tensors["dw1"], tensors["dw2"]
        for result, tensor in tensors.items():
            off = float((tensor.double() - truth[result]).norm() / truth[result].norm())
            assert QUANTIZED[0] * (tensor.numel() > 1000) <= off < QUANTIZED[1], (result, dtype, off)
        if min(case.T, case.D) > 100:
            assert_same(tensors, {key: truth[key] for key in tensors}, ROW)


def test_the_same_bits_each_time() -> None:
    inputs = draw(_bf16(CASES["nam56r"]), "cuda")
    assert_same_bits(lambda: outcome(triton.feed_forward, inputs), 3)


@pytest.mark.parametrize("name", ["odd tokens", "one token"])
def test_nothing_waits_and_a_graph_replays(name: str) -> None:
    """Weights that are not renewed before a replay: the graph quantises them."""
    case = _bf16(CASES[name])
    inputs, others = draw(case, "cuda"), draw(case, "cuda", seed=1)
    assert_replays(lambda: outcome(triton.feed_forward, inputs), [*inputs.values()], [*others.values()])


def test_two_steps_are_beside_those_in_bf16(corpus: str, tmp_path: Path) -> None:
    ours, stocks = (
        runs.two_steps(corpus, tmp_path / way, "feed_forward", way, "mtp_1 loss", fp8=receipt_line)
        for way, receipt_line in (("triton_fp8", "MTP feed-forward by triton_fp8"), ("stock", ""))
    )
    assert ours == pytest.approx(stocks, rel=1e-2)
    assert all(our != stock for our, stock in zip(ours, stocks, strict=True))


def test_no_token_at_all_and_one_gradient_alone() -> None:
    inputs = draw(_bf16(CASES["tiny"]), "cuda")
    none = inputs | {name: inputs[name][:0] for name in ("x", "dy")}
    empty = outcome(triton.feed_forward, none)
    assert empty["y"].shape == (0, 1, 128)
    assert not empty["dw1"].any()
    assert not empty["dw2"].any()
    full = outcome(triton.feed_forward, inputs)
    for leaf in ("x", "w1", "w2"):
        operands = {name: inputs[name].clone().requires_grad_(name == leaf) for name in ("x", "w1", "w2")}
        y = triton.feed_forward(operands["x"], operands["w1"], operands["w2"])
        (gradient,) = torch.autograd.grad(y, operands[leaf], inputs["dy"])
        assert torch.equal(gradient, full[f"d{leaf}"])


@pytest.mark.parametrize("name", ["x", "dy"])
def test_what_is_not_finite_stays_so(name: str) -> None:
    for wrong in (float("nan"), float("inf")):
        inputs = draw(_bf16(CASES["tiny"]), "cuda")
        inputs[name][3, 0, 5] = wrong
        tensors = outcome(triton.feed_forward, inputs)
        results = ("y", "dx", "dw1", "dw2") if name == "x" else ("dx", "dw1", "dw2")
        assert not any(bool(tensors[result].isfinite().all()) for result in results)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w1, w2: (x.half(), w1, w2), ("torch.float16",)),
        (lambda x, w1, w2: (x, w1[:40], w2[:, :40].contiguous()), ("128 and 40", "multiples of 16")),
        (lambda x, w1, w2: (x[..., :120], w1[:, :120].contiguous(), w2[:120]), ("120 and 512", "multiples of 16")),
        (lambda x, w1, w2: (x.cpu(), w1.cpu(), w2.cpu()), ("(9, 0)", "no GPU")),
        (lambda x, w1, w2: (x, w1, w1), ("(512, 128)", "[F, D]")),
    ],
)
def test_what_it_cannot_multiply_is_refused(change: Callable[..., Any], words: tuple[str, ...]) -> None:
    inputs = draw(_bf16(CASES["tiny"]), "cuda")
    with raises(ModelError, *words):
        triton.feed_forward(*change(inputs["x"], inputs["w1"], inputs["w2"]))
