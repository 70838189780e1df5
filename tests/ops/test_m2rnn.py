"""M²RNN: the chunked function against the sequential one, and both against loops over single numbers in numpy.

Legend: B batch, S sequence, H heads, K key dim, V value dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from megacpp_mcore.backends.candidates import own_candidates
from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.m2rnn import reference as ref
from megacpp_mcore.ops.testing import assert_parity
from tests.errors import raises
from tests.ops import outcomes
from tests.ops.m2rnn_case import Case, draw, outcome
from tests.ops.saved_tensors import saved_tensors

NAMES = ("q", "k", "v", "W", "f", "h0")


@dataclass(frozen=True)
class Shape:
    B: int = 2
    S: int = 37
    H: int = 3
    K: int = 5
    V: int = 4
    q_heads: int = 3
    k_heads: int = 3


SHAPES = {
    "heads": Shape(),
    "one_key_head": Shape(q_heads=1, k_heads=1),
    "one_query_head": Shape(q_heads=1),
    "one_head": Shape(H=1, q_heads=1, k_heads=1),
    "one_token": Shape(S=1),
    "one_value": Shape(V=1, q_heads=1, k_heads=1),
}


def make_tensors(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Every input as a leaf; W is the identity it starts from plus noise, f spans (0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    s = shape
    tensors = {
        "q": draw(s.B, s.S, s.q_heads, s.K),
        "k": draw(s.B, s.S, s.k_heads, s.K),
        "v": draw(s.B, s.S, s.H, s.V),
        "W": torch.eye(s.V, dtype=torch.float64) + 0.3 * draw(s.H, s.V, s.V),
        "f": torch.sigmoid(draw(s.B, s.S, s.H) + 1),
        "h0": draw(s.B, s.H, s.K, s.V),
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def sequential(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return ref.m2rnn_sequential(*(tensors[name] for name in NAMES))


def chunked(tensors: dict[str, torch.Tensor], checkpoint_every: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return ref.m2rnn_chunked(*(tensors[name] for name in NAMES), checkpoint_every=checkpoint_every)


def with_gradients(
    compute: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Both outputs and every gradient, for random gradients of both outputs that every dtype can hold."""
    y, h_last = compute(tensors)
    generator = torch.Generator().manual_seed(99)
    cotangents = [torch.randn(t.shape, generator=generator).bfloat16().to(t.dtype) for t in (y, h_last)]
    return outcomes.with_gradients({"y": y, "h_last": h_last}, tensors, cotangents)


def by_single_numbers(tensors: dict[str, torch.Tensor], shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, W, f, h0 = (tensors[name].detach().numpy() for name in NAMES)
    y = np.zeros((shape.B, shape.S, shape.H, shape.V))
    last = np.zeros_like(h0)
    for b in range(shape.B):
        for head in range(shape.H):
            q_head, k_head = min(head, shape.q_heads - 1), min(head, shape.k_heads - 1)
            h = [[float(h0[b, head, i, j]) for j in range(shape.V)] for i in range(shape.K)]
            for t in range(shape.S):
                new = [[0.0] * shape.V for _ in range(shape.K)]
                forget = float(f[b, t, head])
                for i in range(shape.K):
                    for j in range(shape.V):
                        pre = float(k[b, t, k_head, i]) * float(v[b, t, head, j])
                        for m in range(shape.V):
                            pre += h[i][m] * float(W[head, m, j])
                        new[i][j] = forget * h[i][j] + (1 - forget) * math.tanh(pre)
                        y[b, t, head, j] += float(q[b, t, q_head, i]) * new[i][j]
                h = new
            last[b, head] = h
    return y, last


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("compute", [sequential, chunked])
def test_outputs_are_those_of_single_numbers(
    compute: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]], shape: Shape
) -> None:
    tensors = make_tensors(shape)
    y, h_last = compute(tensors)
    expected_y, expected_h = by_single_numbers(tensors, shape)
    assert_parity(y, torch.from_numpy(expected_y), rms=1e-12, name="y")
    assert_parity(h_last, torch.from_numpy(expected_h), rms=1e-12, name="h_last")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_chunked_is_sequential_with_every_gradient(shape: Shape) -> None:
    tensors = make_tensors(shape, seed=1)
    expected = with_gradients(sequential, tensors)
    actual = {every: with_gradients(partial(chunked, checkpoint_every=every), tensors) for every in (1, 8, 36, 37, 64)}
    for name, tensor in expected.items():
        assert tensor.abs().max() > 1e-6, f"{name} vanishes: this case would test nothing"
        for every, outputs in actual.items():
            assert_parity(outputs[name], tensor, rms=1e-10, name=f"{name}, a state every {every}")
    zeros = tensors | {"h0": torch.zeros_like(tensors["h0"])}
    states = zip(ref.m2rnn_chunked(*list(zeros.values())[:-1]), ref.m2rnn_sequential(*list(zeros.values())[:-1]),
                 chunked(zeros), sequential(zeros), strict=True)  # fmt: skip
    for short, step, full, truth in states:
        assert torch.equal(short, full)
        assert torch.equal(step, truth)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    """Forward and backward both under autocast: only the inputs and the results are rounded."""
    tensors = make_tensors(SHAPES["one_key_head"], seed=7, dtype=torch.float32)
    low = {n: t if n in ("W", "f", "h0") else t.detach().bfloat16().requires_grad_() for n, t in tensors.items()}
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in low.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(chunked, low)
    assert {name: tensor.dtype for name, tensor in actual.items() if tensor.dtype != torch.float32} == dict.fromkeys(
        ("y", "dq", "dk", "dv"), torch.bfloat16
    )
    for name, expected in with_gradients(sequential, wide).items():
        rms = 4e-3 if actual[name].dtype == torch.bfloat16 else 1e-5
        assert_parity(actual[name], expected, rms=rms, name=name)


def test_the_precision_of_the_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, float32 products are exact whatever the process allows; outside it keeps what it allowed, also after an error."""
    before = torch.backends.cuda.matmul.fp32_precision
    tensors = make_tensors(Shape(), dtype=torch.float32)
    seen: list[str] = []
    run_chunk = ref._run_chunk

    def watch(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        if len(seen) == 3:
            raise RuntimeError("stop")
        return run_chunk(*args)

    monkeypatch.setattr(ref, "_run_chunk", watch)
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        y, _ = chunked(tensors)
        y.sum().backward()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        with pytest.raises(RuntimeError, match="stop"):
            chunked(tensors)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert seen == ["ieee"] * 3


def test_few_states_are_saved() -> None:
    """One state in 64 tokens, and of the rest only the inputs, the broadcast key head as the one head it is."""
    shape = Shape(B=1, S=256, H=4, K=16, V=8, q_heads=1, k_heads=1)
    tensors = make_tensors(shape)
    saved = saved_tensors(lambda: chunked(tensors, 64))
    states = shape.S // 64 * shape.B * shape.H * shape.K * shape.V
    inputs = sum(tensor.numel() for name, tensor in tensors.items() if name != "h0")
    assert sum(tensor.numel() for tensor in saved) == inputs + states


def test_the_forget_gate() -> None:
    x = torch.tensor([[[-2.0, 0.0, 3.0]]], dtype=torch.float64, requires_grad=True)
    A_log = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    expected = [
        math.exp(-math.exp(a) * math.log1p(math.exp(u + b)))
        for u, a, b in zip((-2.0, 0.0, 3.0), (0.0, 1.0, -1.0), (0.5, 0.0, -0.5), strict=True)
    ]
    f = ref.m2rnn_forget_gate(x, A_log, bias)
    torch.testing.assert_close(f, torch.tensor([[expected]], dtype=torch.float64))
    assert torch.autograd.gradcheck(ref.m2rnn_forget_gate, (x, A_log, bias))
    assert ref.m2rnn_forget_gate(x.bfloat16(), A_log.float(), bias.float()).dtype == torch.float32


@pytest.mark.parametrize("compute", [sequential, chunked])
def test_bad_input_of_the_recurrence_is_named(
    compute: Callable[[dict[str, torch.Tensor]], object],
) -> None:
    tensors = make_tensors(Shape())
    sizes = {"k": (2, 37, 2, 5), "q": (2, 37, 5), "W": (3, 4, 5), "f": (2, 37), "h0": (2, 3, 4, 5)}
    for name, size in sizes.items():
        with pytest.raises(ModelError, match=f"{name} has shape"):
            compute(tensors | {name: torch.zeros(size)})
    with pytest.raises(ModelError, match="no axis empty"):
        compute(tensors | {"v": torch.zeros(2, 0, 3, 4)})
    with pytest.raises(ModelError, match="checkpoint_every is 0"):
        chunked(tensors, 0)
    with pytest.raises(ModelError, match="floating-point"):
        chunked(tensors | {"f": torch.zeros(2, 37, 3, dtype=torch.int64)})
    with pytest.raises(ModelError, match="A_log has shape"):
        ref.m2rnn_forget_gate(torch.zeros(2, 37, 3), torch.zeros(4), torch.zeros(3))


@pytest.mark.parametrize(("K", "V", "nearest"), [(8, 16, 16), (40, 16, 32), (48, 8, 64), (128, 16, 64)])
def test_widths_that_the_kernels_do_not_take_are_named_with_the_nearest(K: int, V: int, nearest: int) -> None:
    triton = pytest.importorskip("megacpp_mcore.ops.m2rnn.triton")
    (kernels,) = (candidate for candidate in own_candidates() if (candidate.op, candidate.name) == ("m2rnn", "triton"))
    (taken,) = kernels.support.dims["key_dim"].one_of
    with pytest.raises(ModelError, match=r"torch\.float32"):
        outcome(triton.m2rnn, Case(B=1, S=3, H=2, dtype=torch.float32), draw(Case(B=1, S=3, H=2, dtype=torch.float32)))
    case = Case(B=1, S=3, H=2, K=K, V=V)
    with raises(ModelError, f"key dim {K}", taken, nearest, "16:"):
        outcome(triton.m2rnn, case, draw(case))


MIXER: dict[str, tuple[int, ...]] = {
    "W": (1, 16, 16), "A_log": (1,), "dt_bias": (1,), "qk_conv_bias": (3,), "v_conv_weight": (3, 4), "D": (16,),
    "norm_weight": (3,), "q": (3, 64), "x_f": (3, 1, 1), "seq_idx": (1, 2), "h0": (1, 1, 64, 16), "window0": (1, 2, 160),
}  # fmt: skip


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_an_empty_sequence_is_refused_and_dtypes_are_named(path: str) -> None:
    op, case = pytest.importorskip(f"megacpp_mcore.ops.m2rnn.{path}").m2rnn, Case(B=1, S=1, H=2)
    inputs = draw(case)
    if path == "triton":
        with raises(ModelError, "q float32, k bfloat16, v bfloat16, g bfloat16, x_f bfloat16"):
            outcome(lambda q, *others, **how: op(q.float(), *others, **how), case, inputs)
    inputs["leaves"]["u"] = inputs["leaves"]["u"][:0]
    with raises(ModelError, (0, 1, 64), "q"):
        outcome(op, case, inputs)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("name", MIXER)
def test_what_a_kernel_would_read_beyond_is_refused(path: str, name: str) -> None:
    op = pytest.importorskip(f"megacpp_mcore.ops.m2rnn.{path}").m2rnn
    case = Case(B=1, S=3, H=2, state=True, dtype=torch.float32)
    inputs, wrong = draw(case), torch.zeros(MIXER[name])
    if name in inputs["leaves"]:
        inputs["leaves"][name] = wrong
    elif name == "seq_idx":
        inputs["seq_idx"] = wrong.int()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, x_f: torch.Tensor, **how: object):
        return op(wrong if name == "q" else q, k, v, g, wrong if name == "x_f" else x_f, **how)

    argument = {"h0": "initial_state.h", "window0": "initial_state.window"}.get(name, name)
    with pytest.raises(ModelError, match=f"^{argument} (has shape|is torch.int32)"):
        outcome(call, case, inputs)


def test_the_last_rows_of_another_document_are_not_handed_on() -> None:
    """Whichever document is last: rows of others are zeros for the convolution of a later call, also those from before."""
    rows_BSC, before_BTC = torch.arange(1.0, 5.0).view(1, 4, 1), torch.full((1, 3, 1), 9.0)
    seq_idx_BS = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    assert ref.last_window(rows_BSC, 3, None, None).flatten().tolist() == [2, 3, 4]
    assert ref.last_window(rows_BSC, 3, seq_idx_BS, None).flatten().tolist() == [0, 3, 4]
    short = ref.last_window(rows_BSC[:, 1:3], 3, seq_idx_BS[:, 1:3], before_BTC)
    assert short.flatten().tolist() == [0, 0, 3]
    same = ref.last_window(rows_BSC[:, :2], 3, seq_idx_BS[:, :2], before_BTC)
    assert same.flatten().tolist() == [9, 1, 2]
