"""Mamba-3's input projection in FP8 on a Hopper GPU: operands, parity with fp64, the same bits, graphs, a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import fp8, quantised_weights
from megacpp_mcore.ops.mamba3_projection import triton
from tests.errors import raises
from tests.gpu import runs
from tests.gpu.device import assert_replays, assert_same_bits, hopper, replayed, without_waiting
from tests.ops.mamba3_projection_case import Case, draw, exact, outcome
from tests.ops.outcomes import assert_same

pytestmark = [pytest.mark.usefixtures("poisoned"), hopper]

CASES = {
    "odd tokens": Case(T=2345, D=512, rows=1040, narrow=88),
    "tiny": Case(T=48, D=128, rows=640, narrow=56),
    "one token": Case(T=1, D=256, rows=160, narrow=8),
    "seventeen tokens, narrow": Case(T=17, D=16, rows=16, narrow=8),
    "a tensor-parallel rank": Case(T=515, D=3584, rows=2304, narrow=48),
    "nam56r": Case(T=8192, D=3584, rows=18432, narrow=352),
}
BOTH = {"all in FP8": triton.project, "gradient in bf16": triton.project_gradient_bf16}
QUANTIZED = (0.02, 0.07)
"""RMS error of all of a result: of each of two operands in E4M3 a value is off by 2.6 % (rms)."""
ROUNDED = 0.01
"""And where no operand is in E4M3."""
ROW = 0.2
"""Of its worst row, at most, where there are enough values in a row: a row that is left out is off by 1."""


def _bf16(case: Case) -> Case:
    return replace(case, dtype=torch.bfloat16)


def _off(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def _values(scaled: fp8.Scaled) -> torch.Tensor:
    return scaled.values.double() * scaled.scale.double()[:, None]


@pytest.mark.parametrize("name", CASES)
def test_operands_are_scaled_to_the_largest_value_and_products_are_those_of_the_operands(name: str) -> None:
    case = _bf16(CASES[name])
    inputs = draw(case, "cuda")
    x, dy = (inputs[name].flatten(0, 1) for name in ("x", "dwide"))
    for tensor in (x, dy):
        rows, largest = triton.of_rows(tensor, with_maxima=True)
        assert largest is not None
        columns = triton.of_columns(tensor, largest)
        assert not columns.values[:, len(tensor) :].float().any()
        assert columns.values.shape[1] == -(-len(tensor) // 16) * 16
        for values in (_values(rows), _values(columns)[:, : len(tensor)].T):
            least = float(tensor.abs().amax()) * 2**-18  # half of E4M3's smallest, scaled
            assert ((values - tensor.double()).abs() <= tensor.double().abs() / 15 + least).all()
        assert (rows.values.float().abs().amax(1) == 448).all()
        for block in columns.values.float().abs().split(triton.BLOCK):
            assert block.amax() == 448
    left, largest_dy = triton.of_rows(dy, with_maxima=True)
    _, largest_x = triton.of_rows(x, with_maxima=True)
    assert largest_dy is not None
    assert largest_x is not None
    gradient = triton.of_columns(dy, largest_dy), triton.of_columns(x, largest_x)
    _, _, back, back_scale = (kept_pair[0] for kept_pair in fp8.kept(inputs["weight"], case.rows))
    for a, b in ((left, fp8.Scaled(back, back_scale)), gradient):
        truth = _values(a) @ _values(b).T
        assert _off(triton.product(a, b, fast=False), truth) < 4e-3
        assert _off(triton.product(a, b, fast=True), truth) < 4e-2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", BOTH)
def test_parity_with_fp64(name: str, way: str) -> None:
    case = _bf16(CASES[name])
    inputs = draw(case, "cuda")
    truth = outcome(exact, case, inputs, torch.float64)
    for dtype in (None, torch.float32, torch.bfloat16):
        outputs = outcome(BOTH[way], case, inputs, main_grad=dtype)
        if dtype is torch.bfloat16:  # in which sums of the buffer and small gradients round
            del outputs["dweight"]
        for result, tensor in outputs.items():
            in_fp8 = {"wide": True, "dx": True, "dweight": way == "all in FP8"}.get(result, False)
            least, most = QUANTIZED if in_fp8 else (0.0, ROUNDED)
            if result == "dweight" and in_fp8:  # its first rows are; of one token each value is one product
                tensor, expected = tensor[: case.rows], truth[result][: case.rows]
                assert _off(outputs[result][case.rows :], truth[result][case.rows :]) < ROUNDED
            else:
                expected = truth[result]
            assert least * (tensor.numel() > 1000) <= _off(tensor, expected) < most, (result, dtype)
        if min(case.T, case.D) > 100:
            assert_same(outputs, {key: truth[key] for key in outputs}, ROW)


@pytest.mark.parametrize("way", BOTH)
def test_the_same_bits_each_time(way: str) -> None:
    case = _bf16(CASES["nam56r"])
    inputs = draw(case, "cuda")
    assert_same_bits(lambda: outcome(BOTH[way], case, inputs), 3)


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("name", ["odd tokens", "one token"])
def test_nothing_waits_and_a_graph_replays(way: str, name: str) -> None:
    """Weights that are not renewed before a replay: the graph quantises them."""
    case = _bf16(CASES[name])
    inputs, others = draw(case, "cuda"), draw(case, "cuda", seed=1)
    assert_replays(lambda: outcome(BOTH[way], case, inputs), [*inputs.values()], [*others.values()])


def test_a_graph_reads_weights_that_are_renewed_once_a_step() -> None:
    case = _bf16(CASES["odd tokens"])
    inputs, others = draw(case, "cuda"), draw(case, "cuda", seed=1)
    weight = torch.nn.Parameter(inputs["weight"].clone())
    quantised_weights.renew_before_replays([weight])

    def run() -> list[torch.Tensor]:
        return [tensor.detach() for tensor in triton.project(inputs["x"], weight, None, case.rows)]

    run()
    stale = [tensor.clone() for tensor in replayed(run, [], [])]
    graph_reads = quantised_weights._copies[weight].made[0].data_ptr()
    weight.data.copy_(others["weight"])  # as the distributed optimizer does: no version counts it
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert torch.equal(captured[0], stale[0])  # nobody has renewed them
    with without_waiting():
        quantised_weights.renew([weight])
    graph.replay()
    expected = triton.project(inputs["x"], others["weight"], None, case.rows)
    assert all(torch.equal(replayed_tensor, other) for replayed_tensor, other in zip(captured, expected, strict=True))
    assert quantised_weights._copies[weight].made[0].data_ptr() == graph_reads


def test_two_steps_are_beside_those_in_bf16(corpus: str, tmp_path: Path) -> None:
    def losses(way: str, said: str) -> list[float]:
        return runs.two_steps(corpus, tmp_path / way, "mamba3_projection", way, "lm loss", fp8=said)

    in_bf16 = losses("torch", "")
    for way in ("triton_fp8", "triton_fp8_gradient_bf16"):
        in_fp8 = losses(way, f"Mamba input projections by {way}")
        assert in_fp8 == pytest.approx(in_bf16, rel=1e-2)
        assert in_fp8 != in_bf16


def test_no_token_at_all_and_one_gradient_alone() -> None:
    case = _bf16(CASES["tiny"])
    inputs = draw(case, "cuda")
    none = inputs | {name: inputs[name][:0] for name in ("x", "dwide", "dnarrow")}
    for op in BOTH.values():
        empty = outcome(op, case, none)
        assert empty["wide"].shape == (0, 1, case.rows)
        assert not empty["dweight"].any()
        full = outcome(op, case, inputs)
        for leaf in ("x", "weight"):
            operands = {name: inputs[name].clone().requires_grad_(name == leaf) for name in ("x", "weight")}
            outputs = op(operands["x"], operands["weight"], None, case.rows)
            (gradient,) = torch.autograd.grad(outputs, operands[leaf], [inputs["dwide"], inputs["dnarrow"]])
            assert torch.equal(gradient, full[f"d{leaf}"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w: (x.half(), w, 640), ("torch.float16",)),
        (lambda x, w: (x, w, 648), ("648 rows", "multiples of 16")),
        (lambda x, w: (x[..., :120], w[:, :120].contiguous(), 640), ("(696, 120)", "multiples of 16")),
        (lambda x, w: (x.cpu(), w.cpu(), 640), ("(9, 0)", "no GPU")),
    ],
)
def test_what_it_cannot_multiply_is_refused(change: Callable[..., Any], words: tuple[str, ...]) -> None:
    inputs = draw(_bf16(CASES["tiny"]), "cuda")
    x, weight, rows = change(inputs["x"], inputs["weight"])
    with raises(ModelError, *words):
        triton.project(x, weight, None, rows)
