"""Mamba-3: the chunked scan against the sequential one, and both against the closed formula in numpy.

Legend: B batch, S sequence, H heads, P head dim, G groups, N state, R MIMO rank, A rotation angles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.mamba3 import reference as ref
from megacpp_mcore.ops.testing import assert_parity
from tests.ops.saved_tensors import saved_tensors

FLOOR, EPS = 1e-4, 1e-5
INPUTS = ("x", "z", "b", "c", "dd_dt", "dd_A", "trap", "angles")


@dataclass(frozen=True)
class Shape:
    B: int = 2
    S: int = 37
    H: int = 6
    P: int = 4
    G: int = 3
    N: int = 8
    R: int = 1
    A: int = 2
    mimo: bool = False
    out_norm: bool = False


SISO = Shape()
MIMO = Shape(R=3, mimo=True)
SHAPES = {
    "siso": SISO,
    "siso_full_rotation": Shape(A=4),
    "mimo": MIMO,
    "mimo_full_rotation": Shape(R=2, A=4, mimo=True),
    "mimo_rank_1": Shape(R=1, mimo=True),
    "mimo_out_norm": Shape(R=3, mimo=True, out_norm=True),
    "siso_out_norm": Shape(out_norm=True),
    "one_group": Shape(G=1, R=2, mimo=True),
    "group_per_head": Shape(G=6),
    "odd_state": Shape(N=7, A=3),
    "one_token": Shape(S=1, R=2, mimo=True),
    "one_token_siso": Shape(S=1),
}


def make_tensors(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Every tensor that mamba3() takes, as leaves. Biases, weights and mixes are all away from their initial ones."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, mean: float = 0.0) -> torch.Tensor:
        return (mean + torch.randn(*size, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()

    s = shape
    tensors = {
        "x": draw(s.B, s.S, s.H, s.P),
        "z": draw(s.B, s.S, s.H, s.P),
        "b": draw(s.B, s.S, s.R, s.G, s.N),
        "c": draw(s.B, s.S, s.R, s.G, s.N),
        "dd_dt": draw(s.B, s.S, s.H),
        "dd_A": draw(s.B, s.S, s.H),
        "trap": draw(s.B, s.S, s.H),
        "angles": draw(s.B, s.S, s.A),
        "dt_bias": draw(s.H, mean=-2.0),
        "b_bias": draw(s.H, s.R, s.N, mean=1.0),
        "c_bias": draw(s.H, s.R, s.N, mean=1.0),
        "b_norm_weight": draw(s.N, mean=1.0),
        "c_norm_weight": draw(s.N, mean=1.0),
        "D": draw(s.H, mean=1.0),
    }
    if s.mimo:
        tensors |= {name: draw(s.H, s.R, s.P, mean=1.0) for name in ("mimo_x", "mimo_z", "mimo_o")}
    return tensors | ({"out_norm_weight": draw(s.H * s.P, mean=1.0)} if s.out_norm else {})


def run_with_state(tensors: dict[str, torch.Tensor], **options: Any) -> tuple[torch.Tensor, ref.Mamba3State | None]:
    """The mixer on ``[B, S, …]``, B and C by rank and then by group, as the oracle has them; ``[B, S, H, P]``."""
    keywords = {name: tensor for name, tensor in tensors.items() if name not in INPUTS}
    options = {"chunk_size": 16, "A_floor": FLOOR, "eps": EPS} | keywords | options
    rows = {name: tensors[name].transpose(0, 1) for name in INPUTS}
    rows |= {name: rows[name].transpose(2, 3) for name in ("b", "c")}
    out_SBHP, state = ref.mamba3(*rows.values(), **options)
    assert out_SBHP.is_contiguous()
    return out_SBHP.transpose(0, 1), state


def run(tensors: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    return run_with_state(tensors, **options)[0]


def with_gradients(
    tensors: dict[str, torch.Tensor], *, autocast: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """The output and the gradient of every tensor, for one random gradient of the output that every dtype can hold."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = run(tensors, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64).bfloat16()
    grads = torch.autograd.grad(out, list(tensors.values()), dout.to(out.dtype))
    return {"out": out} | {f"d{name}": grad for name, grad in zip(tensors, grads, strict=True)}


def oracle(tensors: dict[str, torch.Tensor], shape: Shape) -> np.ndarray:
    """The whole mixer as one dense attention matrix per head, from the formulas alone, in numpy.

    The trapezoid is the product of two matrices (the decays, and the band of γ and β) and the rotation is a product of
    complex numbers that sees only differences of angles: neither is how the package computes them.
    """
    t = {name: tensor.detach().double().numpy() for name, tensor in tensors.items()}
    s = shape
    softplus = lambda u: np.logaddexp(0.0, u)  # noqa: E731
    delta = softplus(t["dd_dt"] + t["dt_bias"])
    a = np.minimum(-softplus(t["dd_A"]), -FLOOR) * delta
    lam = 1 / (1 + np.exp(-t["trap"]))
    theta = np.cumsum(delta[..., None] * np.pi * np.tanh(t["angles"])[:, :, None, :], axis=1)
    normed = {
        name: t[name] / np.sqrt((t[name] ** 2).mean(-1, keepdims=True) + EPS) * t[f"{name}_norm_weight"]
        for name in ("b", "c")
    }
    first = np.arange(s.A) * (1 if s.mimo else 2)
    second = first + (s.N // 2 if s.mimo else 1)
    rest = np.setdiff1d(np.arange(s.N), np.concatenate([first, second]))
    ones = np.ones((s.H, s.R, s.P))
    mix_x, mix_z, mix_o = (t.get(name, ones) for name in ("mimo_x", "mimo_z", "mimo_o"))
    out = np.zeros((s.B, s.S, s.H, s.P))
    for batch in range(s.B):
        for head in range(s.H):
            group = head // (s.H // s.G)
            B = normed["b"][batch, :, :, group] + t["b_bias"][head]
            C = normed["c"][batch, :, :, group] + t["c_bias"][head]
            decays = np.zeros((s.S, s.S))
            band = np.zeros((s.S, s.S))
            for i in range(s.S):
                band[i, i] = lam[batch, i, head] * delta[batch, i, head]
                if i:
                    band[i, i - 1] = (1 - lam[batch, i, head]) * delta[batch, i, head] * np.exp(a[batch, i, head])
                for j in range(i + 1):
                    decays[i, j] = np.exp(a[batch, j + 1 : i + 1, head].sum())
            turn = np.exp(1j * (theta[batch, :, head][:, None] - theta[batch, :, head][None]))
            planes = np.einsum(
                "ira,jqa,ija->irjq",
                C[..., first] + 1j * C[..., second],
                (B[..., first] + 1j * B[..., second]).conj(),
                turn,
            )
            scores = planes.real + np.einsum("irn,jqn->irjq", C[..., rest], B[..., rest])
            V = t["x"][batch, :, head, None] * mix_x[head]
            y = np.einsum("irjq,ij,jqp->irp", scores, decays @ band, V) + t["D"][head] * V
            gate = t["z"][batch, :, head, None] * mix_z[head]
            out[batch, :, head] = (y * gate / (1 + np.exp(-gate)) * mix_o[head]).sum(1)
    if s.out_norm:
        out = out / np.sqrt((out**2).mean(-1, keepdims=True) + EPS) * t["out_norm_weight"].reshape(s.H, s.P)
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("method", ["sequential", "chunked"])
def test_mixer_is_the_closed_formula(shape: Shape, method: str) -> None:
    tensors = make_tensors(shape)
    expected = torch.from_numpy(oracle(tensors, shape))
    assert_parity(run(tensors, method=method), expected, rms=1e-11, name=method)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("chunk_size", [1, 8, 37, 64])
def test_chunked_is_sequential_with_every_gradient(shape: Shape, chunk_size: int) -> None:
    tensors = make_tensors(shape, seed=1)
    expected = with_gradients(tensors, method="sequential")
    actual = with_gradients(tensors, chunk_size=chunk_size)
    for name, tensor in expected.items():
        if shape.S == 1 and name == "dangles":
            continue  # Zero but for rounding: see test_angles_matter_only_between_tokens.
        if shape.S > 1 or name != "ddd_A":  # One token has nothing to decay.
            assert tensor.abs().max() > 1e-6, f"{name} vanishes: this case would test nothing"
        assert_parity(actual[name], tensor, rms=1e-9, name=name)


def test_angles_matter_only_between_tokens() -> None:
    """One token has nothing to turn against: the gradient of its angles vanishes, and only then."""
    for method in ("sequential", "chunked"):
        norms = [with_gradients(make_tensors(Shape(S=s)), method=method)["dangles"].norm() for s in (1, 2)]
        assert norms[0] < 1e-12
        assert norms[1] > 1e-3


@pytest.mark.parametrize("shape", [SISO, MIMO], ids=["siso", "mimo"])
@pytest.mark.parametrize("segment_size", [1, 10, 37, 1000])
def test_segments_change_nothing(shape: Shape, segment_size: int) -> None:
    tensors = make_tensors(shape, seed=2)
    expected = with_gradients(tensors)
    for name, tensor in with_gradients(tensors, segment_size=segment_size, chunk_size=4).items():
        assert_parity(tensor, expected[name], rms=1e-9, name=name)


LONG = {
    "siso": Shape(B=1, S=2345, H=2, P=8, G=1, N=8),
    "mimo": Shape(B=1, S=2345, H=2, P=8, G=1, N=8, R=2, mimo=True),
}
# Worst rows of float32 against float64, several times what token by token loses there. The gradients of the step and of
# the angles are sums of terms that cancel over all later tokens: float32 keeps few of their digits, however computed.
LONG_RMS = {"dangles": 5e-3, "ddd_dt": 2e-3, "ddd_A": 3e-4, "dtrap": 3e-4, "ddt_bias": 1e-4}
LONG_RMS_OTHERS = 5e-5
PEER_NAMES = ("out", "dx", "dz", "db", "dc")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=pytest.mark.exhaustive if name == "siso" else ())
        for name, shape in LONG.items()
    ],
)
def test_long_odd_sequence(shape: Shape) -> None:
    """2345 tokens: exact in float64; in float32 no worse than twice what token by token loses there."""
    tensors = make_tensors(shape, seed=3, dtype=torch.float32)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    truth = with_gradients(wide, method="sequential")
    peer = with_gradients(tensors, method="sequential")
    exact, actual = with_gradients(wide), with_gradients(tensors)
    for name, expected in truth.items():
        assert actual[name].dtype == torch.float32
        assert_parity(exact[name], expected, rms=1e-8, name=f"{name} in float64")
        assert_parity(actual[name], expected, rms=LONG_RMS.get(name, LONG_RMS_OTHERS), name=name)
        if name in PEER_NAMES:
            assert_parity(actual[name], expected, rms=1.0, max_abs_factor=2.0, dtype_peer=peer[name], name=name)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    """Only the inputs and the output are rounded; the parameters stay float32, as the mixer stores them."""
    tensors = make_tensors(MIMO, seed=4, dtype=torch.float32)
    low = {n: t.detach().bfloat16().requires_grad_() if n in INPUTS else t for n, t in tensors.items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in low.items()}
    actual = with_gradients(low, autocast=True)
    for name, expected in with_gradients(wide, method="sequential").items():
        rounded = name == "out" or name[1:] in INPUTS
        assert actual[name].dtype == (torch.bfloat16 if rounded else torch.float32)
        assert_parity(actual[name], expected.to(actual[name].dtype), rms=5e-3, name=name)


@pytest.mark.parametrize(
    "shape", [Shape(B=1, S=5, H=2, P=2, G=1, N=4), Shape(B=1, S=5, H=2, P=2, G=2, N=4, A=1, R=2, mimo=True)]
)
def test_gradcheck(shape: Shape) -> None:
    tensors = make_tensors(shape, seed=5)

    def compute(*values: torch.Tensor) -> torch.Tensor:
        return run(dict(zip(tensors, values, strict=True)), chunk_size=2)

    assert torch.autograd.gradcheck(compute, tuple(tensors.values()), atol=1e-6, rtol=1e-5)


def scan_inputs(S: int, R: int, mimo: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = {"x_BSHP": draw(2, S, 3, 4), "b_BSRHN": draw(2, S, R, 3, 5), "c_BSRHN": draw(2, S, R, 3, 5)}
    inputs |= {"adt_BSH": -draw(2, S, 3).abs(), "dt_BSH": draw(2, S, 3).abs(), "trap_BSH": draw(2, S, 3).sigmoid()}
    return inputs | ({"mimo_x_HRP": draw(3, R, 4)} if mimo else {})


def slice_tokens(inputs: dict[str, torch.Tensor], tokens: slice) -> dict[str, torch.Tensor]:
    return {name: tensor if name == "mimo_x_HRP" else tensor[:, tokens] for name, tensor in inputs.items()}


SCANS: dict[str, Callable[..., tuple[torch.Tensor, ref.ScanState]]] = {
    "sequential": ref.mamba3_scan_sequential,
    "chunked": lambda **inputs: ref.mamba3_scan_chunked(**inputs, chunk_size=4),
}


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS.keys())
@pytest.mark.parametrize(("R", "mimo"), [(1, False), (2, True)], ids=["siso", "mimo"])
@pytest.mark.parametrize("cut", [1, 4, 7, 12])
def test_a_sequence_may_be_cut_anywhere(scan: Callable[..., Any], R: int, mimo: bool, cut: int) -> None:
    """Two calls that hand the state over are one call, with the gradient through the state."""
    inputs = scan_inputs(13, R, mimo)
    whole, last = ref.mamba3_scan_sequential(**inputs)
    first, state = scan(**slice_tokens(inputs, slice(0, cut)))
    second, end = scan(**slice_tokens(inputs, slice(cut, None)), initial_state=state)
    joined = torch.cat((first, second), dim=1)
    assert_parity(joined, whole, rms=1e-12, name="y")
    for name in ref.ScanState._fields:
        assert_parity(getattr(end, name), getattr(last, name), rms=1e-12, name=name)
    leaves = [inputs[name] for name in ("x_BSHP", "b_BSRHN", "c_BSRHN")]
    dy = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, leaves, dy)
    for actual, truth in zip(torch.autograd.grad(joined, leaves, dy), expected, strict=True):
        assert_parity(actual, truth, rms=1e-11, name="gradient")


@pytest.mark.parametrize("shape", [SISO, SHAPES["mimo_out_norm"]], ids=["siso", "mimo"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cut", [1, 16, 23])
def test_a_mixer_may_be_cut_anywhere(shape: Shape, documents: bool, cut: int) -> None:
    """Two calls that hand the state over are one call: the angle of the rotation goes along, and so do gradients."""
    tensors = make_tensors(shape, seed=7)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 20, 8])).expand(2, -1).to(torch.int32)
    whole, last = run_with_state(tensors, return_final_state=True, seq_idx=numbers if documents else None)
    assert run_with_state(tensors)[1] is None
    outputs, state = [], None
    for tokens in (slice(0, cut), slice(cut, None)):
        part = tensors | {name: tensors[name][:, tokens] for name in INPUTS}
        seq_idx = numbers[:, tokens] if documents else None
        out, state = run_with_state(part, return_final_state=True, initial_state=state, seq_idx=seq_idx, chunk_size=5)
        outputs.append(out)
    assert state is not None
    assert last is not None
    joined = torch.cat(outputs, dim=1)
    assert_parity(joined, whole, rms=1e-11, name="out")
    for name in ref.Mamba3State._fields:
        assert_parity(getattr(state, name), getattr(last, name), rms=1e-11, name=name)
    given = torch.randn(whole.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    expected = torch.autograd.grad(whole, list(tensors.values()), given)
    for name, actual, truth in zip(
        tensors, torch.autograd.grad(joined, list(tensors.values()), given), expected, strict=True
    ):
        assert_parity(actual, truth, rms=1e-9, name=f"d{name}")


def test_extreme_decays_neither_overflow_nor_vanish() -> None:
    """A decay of e^−1000 forgets all before it, and the small decays after it keep their digits, in float32."""
    inputs = {name: tensor.detach() for name, tensor in scan_inputs(32, 1, False).items()}
    inputs["adt_BSH"] = torch.full_like(inputs["adt_BSH"], -1e-3)
    inputs["adt_BSH"][:, ::7] = -1000.0
    truth, _ = ref.mamba3_scan_sequential(**inputs)
    narrow = {name: tensor.float().requires_grad_() for name, tensor in inputs.items()}
    y, _ = ref.mamba3_scan_chunked(**narrow, chunk_size=16)
    assert_parity(y, truth, rms=1e-5, name="y")
    for name, grad in zip(narrow, torch.autograd.grad(y.sum(), list(narrow.values())), strict=True):
        assert torch.isfinite(grad).all(), name


@pytest.mark.parametrize(("pairing", "planes"), [("interleaved", [(0, 1), (2, 3)]), ("half", [(0, 4), (1, 5)])])
def test_rotation_turns_the_named_planes_only(pairing: ref.Pairing, planes: list[tuple[int, int]]) -> None:
    x = torch.randn(1, 1, 2, 1, 8, dtype=torch.float64)
    theta = torch.tensor([0.3, 1.7], dtype=torch.float64).reshape(1, 1, 1, 2)
    expected = x.clone()
    for (i, j), angle in zip(planes, (0.3, 1.7), strict=True):
        turned = torch.complex(x[..., i], x[..., j]) * np.exp(1j * angle)
        expected[..., i], expected[..., j] = turned.real, turned.imag
    torch.testing.assert_close(ref.mamba3_rotate(x, theta, pairing=pairing), expected)


def test_angles_accumulate_modulo_a_turn() -> None:
    angles, dt = torch.randn(1, 4000, 2, dtype=torch.float64), torch.rand(1, 4000, 3, dtype=torch.float64)
    expected = (dt[..., None] * np.pi * torch.tanh(angles)[:, :, None]).cumsum(1)
    theta = ref.mamba3_angles(angles.float(), dt.float())
    assert theta.dtype == torch.float32
    assert ((theta >= 0) & (theta <= 2 * np.pi)).all()
    # float32 rounds the inputs; what must not grow with the length is the error of the sum on top of that.
    exact = (dt.float().double()[..., None] * np.pi * torch.tanh(angles.float().double())[:, :, None]).cumsum(1)
    assert (torch.sin(theta.double()) - torch.sin(exact)).abs().max() < 1e-6
    assert (torch.cos(ref.mamba3_angles(angles, dt)) - torch.cos(expected)).abs().max() < 1e-10


def test_gates() -> None:
    u = torch.tensor([[[-3.0, 0.0, 2.0]]], dtype=torch.float64, requires_grad=True)
    zero, bias = torch.zeros_like(u), torch.zeros(3, dtype=torch.float64)
    adt, dt, lam = ref.mamba3_decay_and_gates(zero, u, u, bias, A_floor=FLOOR)
    torch.testing.assert_close(dt, torch.full_like(dt, float(np.log(2))))
    torch.testing.assert_close(adt, -F.softplus(u) * dt)
    torch.testing.assert_close(lam, torch.sigmoid(u))
    heavy, _, _ = ref.mamba3_decay_and_gates(zero, u, u, bias, A_floor=FLOOR, activation="heavy_tail")
    torch.testing.assert_close(heavy / dt, torch.tensor([[[-0.25, -1.0, -3.0]]], dtype=torch.float64))
    (slope,) = torch.autograd.grad((heavy / dt).sum(), u)
    torch.testing.assert_close(slope, torch.tensor([[[-1 / 16, -1.0, -1.0]]], dtype=torch.float64))
    floored, _, _ = ref.mamba3_decay_and_gates(zero, u - 100, u, bias, A_floor=0.5)
    torch.testing.assert_close(floored, -0.5 * dt)
    narrow = ref.mamba3_decay_and_gates(zero.bfloat16(), u.bfloat16(), u.bfloat16(), bias.float(), A_floor=FLOOR)
    assert {t.dtype for t in narrow} == {torch.float32}


def test_only_one_state_per_chunk_is_kept() -> None:
    """No tensor with a state per token, [B, S, H, N, P] or larger, is saved for the backward pass."""
    shape = Shape(B=1, S=64, H=2, P=16, G=1, N=16, R=2, A=4, mimo=True)
    saved = [tensor.numel() for tensor in saved_tensors(lambda: run(make_tensors(shape), chunk_size=16))]
    per_token = shape.B * shape.S * shape.H * shape.N * shape.P
    assert max(saved) <= shape.B * shape.S * shape.R * shape.H * 16 * shape.R < per_token * shape.R
    assert max(saved) < per_token


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank without mimo": ({"mimo_x": None, "mimo_z": None, "mimo_o": None}, "SISO needs rank 1"),
    "half a mimo": ({"mimo_z": None}, "mimo_z missing"),
    "groups": ({"b": torch.zeros(2, 37, 3, 4, 8), "c": torch.zeros(2, 37, 3, 4, 8)}, "do not divide into 4 groups"),
    "gate": ({"z": torch.zeros(2, 37, 6, 5)}, r"z has shape .* expected \(37, 2, 6, 4\)"),
    "norm weight": ({"c_norm_weight": torch.zeros(9)}, "c_norm_weight has shape"),
    "bias": ({"b_bias": torch.zeros(6, 8)}, "b_bias has shape"),
    "skip": ({"D": torch.zeros(6, 4)}, "D has shape"),
    "mix": ({"mimo_o": torch.zeros(6, 3, 5)}, "mimo_o has shape"),
    "out norm": ({"out_norm_weight": torch.zeros(6)}, "out_norm_weight has shape"),
    "step bias": ({"dt_bias": torch.zeros(5)}, "dt_bias has shape"),
    "lambda": ({"trap": torch.zeros(2, 36, 6)}, "trap has shape"),
    "angles": ({"angles": torch.zeros(2, 37, 5)}, "need a state of at least 10"),
    "angles of another batch": ({"angles": torch.zeros(1, 37, 2)}, "dt has shape"),
    "empty": ({"x": torch.zeros(2, 0, 6, 4)}, "none empty"),
    "integers": ({"x": torch.zeros(2, 37, 6, 4, dtype=torch.int64)}, "floating-point"),
    "chunk": ({"chunk_size": 0}, "chunk_size is 0"),
    "segment": ({"segment_size": 0}, "segment_size is 0"),
    "method": ({"method": "fast"}, "Unknown method 'fast'"),
    "activation": ({"activation": "relu"}, "Unknown activation 'relu'"),
    "floor": ({"A_floor": 0.0}, "A_floor is 0.0"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run(make_tensors(MIMO) | change)


def test_bad_scan_input_is_named() -> None:
    inputs = scan_inputs(5, 1, False)
    _, state = ref.mamba3_scan_sequential(**inputs)
    with pytest.raises(ModelError, match=r"initial_state\.h has shape"):
        ref.mamba3_scan_sequential(**inputs, initial_state=state._replace(h_BHPN=state.h_BHPN[:1]))
    with pytest.raises(ModelError, match="Unknown pairing 'pairs'"):
        ref.mamba3_rotate(inputs["b_BSRHN"], torch.zeros(2, 5, 3, 1), pairing="pairs")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="needs an even state"):
        ref.mamba3_rotate(inputs["b_BSRHN"], torch.zeros(2, 5, 3, 1), pairing="half")


def drop_a_row(t: torch.Tensor) -> torch.Tensor:
    row = int(torch.randint(t[..., 0].numel(), (), generator=torch.Generator().manual_seed(7)))
    return torch.cat(
        (t.reshape(-1, t.shape[-1])[:row], torch.zeros(1, t.shape[-1]), t.reshape(-1, t.shape[-1])[row + 1 :])
    ).view_as(t)


def flip_a_sign(t: torch.Tensor) -> torch.Tensor:
    signs = torch.ones(t.numel(), dtype=t.dtype)
    signs[int(torch.randint(t.numel(), (), generator=torch.Generator().manual_seed(8)))] = -1
    return t * signs.view_as(t)


FAULTS = {"dropped row": drop_a_row, "scale": lambda t: 1.5 * t, "flipped sign": flip_a_sign, "negated": lambda t: -t}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("rms", [1e-6, 5e-3])
def test_the_tolerances_bite(fault: Callable[[torch.Tensor], torch.Tensor], rms: float) -> None:
    """One fault in the output of 2345 tokens fails the comparison, at the tolerances of float32 and of bfloat16."""
    with torch.no_grad():
        truth = run(make_tensors(LONG["siso"]))
    assert_parity(truth.clone(), truth, rms=rms)
    with pytest.raises(AssertionError, match="of its norm"):
        assert_parity(fault(truth), truth, rms=rms, name="y")
    with pytest.raises(AssertionError, match="largest error"):
        assert_parity(fault(truth), truth, rms=10.0, max_abs_factor=2.0, dtype_peer=truth.float(), name="y")


def test_the_comparison_refuses_what_it_cannot_compare() -> None:
    truth = torch.ones(3, 4)
    with pytest.raises(AssertionError, match="shape"):
        assert_parity(torch.ones(4, 3), truth, rms=1.0)
    for poison in (float("nan"), float("inf")):
        with pytest.raises(AssertionError, match="not finite"):
            assert_parity(torch.where(torch.eye(3, 4) > 0, poison, truth), truth, rms=1e9)
    with pytest.raises(AssertionError, match="inf of its norm"):
        assert_parity(1e-30 * truth, torch.zeros(3, 4), rms=1e9)
    assert_parity(torch.zeros(3, 4), torch.zeros(3, 4), rms=0.0)
    with pytest.raises(ValueError, match="dtype_peer"):
        assert_parity(truth, truth, rms=1.0, max_abs_factor=2.0)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_parity(torch.ones(0, 4), torch.ones(0, 4), rms=1.0)


def test_a_16_bit_peer_raises_the_limit_and_a_32_bit_one_does_not() -> None:
    truth = torch.ones(2, 4)
    assert_parity(1.011 * truth, truth, rms=5e-3, dtype_peer=(1.01 * truth).bfloat16())
    for peer in (1.01 * truth, truth.bfloat16()):
        with pytest.raises(AssertionError, match="of its norm"):
            assert_parity(1.011 * truth, truth, rms=5e-3, dtype_peer=peer)
