"""Mamba-3: the chunked scan against the sequential one, and both against the closed formula in numpy.

Legend: B batch, S sequence, H heads, P head dim, G groups, N state, R MIMO rank, A rotation angles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.mamba3 import reference as ref
from megacpp_mcore.ops.testing import assert_parity
from tests.errors import raises
from tests.lanes import exhaustive_but
from tests.ops.mamba3_case import ORDER, Case, inputs, make_tensors, run, with_gradients
from tests.ops.saved_tensors import saved_tensors

FLOOR, EPS = 1e-4, 1e-5
Tensors = dict[str, torch.Tensor]

SISO = Case(37, H=6, P=4, G=3, N=8, R=1, mimo=False, out_norm=False)
MIMO = replace(SISO, R=3, mimo=True)
CASES = {
    "siso": SISO,
    "siso_full_rotation": replace(SISO, A=4),
    "mimo": MIMO,
    "mimo_full_rotation": replace(MIMO, R=2, A=4),
    "mimo_rank_1": replace(MIMO, R=1),
    "mimo_out_norm": replace(MIMO, out_norm=True),
    "siso_out_norm": replace(SISO, out_norm=True),
    "one_group": replace(MIMO, G=1, R=2),
    "group_per_head": replace(SISO, G=6),
    "odd_state": replace(SISO, N=7, A=3),
    "one_token": replace(MIMO, S=1, R=2),
    "one_token_siso": replace(SISO, S=1),
}


def draw(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    return {name: t.to(dtype) for name, t in make_tensors(replace(case, dtype=dtype), seed, "cpu").items()}


def outcome(case: Case, tensors: Tensors, **options: Any) -> Tensors:
    return with_gradients(ref.mamba3, case, tensors, **options)


def oracle(tensors: Tensors, case: Case) -> np.ndarray:
    """The whole mixer as one dense attention matrix per head, from the formulas alone, in numpy.

    The trapezoid is the product of two matrices (the decays, and the band of γ and β) and the rotation is a product of
    complex numbers that sees only differences of angles: neither is how the package computes them.
    """
    t = {name: tensor.numpy() for name, tensor in (tensors | inputs(case, tensors["u"])).items()}
    b_and_c = {name: t[name].transpose(1, 0, 3, 2, 4) for name in "bc"}
    t |= {name: t[name].swapaxes(0, 1) for name in ORDER if name not in "bc"} | b_and_c
    A, s = case.widths[-1], case
    softplus = lambda u: np.logaddexp(0.0, u)  # noqa: E731
    delta = softplus(t["dd_dt"] + t["dt_bias"])
    a = np.minimum(-softplus(t["dd_A"]), -FLOOR) * delta
    lam = 1 / (1 + np.exp(-t["trap"]))
    theta = np.cumsum(delta[..., None] * np.pi * np.tanh(t["angles"])[:, :, None, :], axis=1)
    normed = {
        name: t[name] / np.sqrt((t[name] ** 2).mean(-1, keepdims=True) + EPS) * t[f"{name}_norm_weight"] for name in ("b", "c")
    }
    first = np.arange(A) * (1 if s.mimo else 2)
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
    return out.swapaxes(0, 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ["sequential", "chunked"])
def test_mixer_is_the_closed_formula(name: str, method: str) -> None:
    case, tensors = CASES[name], draw(CASES[name])
    (out,) = run(ref.mamba3, case, tensors, method=method)
    assert out.is_contiguous()
    assert_parity(out, torch.from_numpy(oracle(tensors, case)), rms=1e-11, name=method)


@pytest.mark.parametrize("name", CASES)
def test_chunked_is_sequential_with_every_gradient(name: str) -> None:
    case, tensors = CASES[name], draw(CASES[name], seed=1)
    expected = outcome(case, tensors, method="sequential")
    actual = {size: outcome(case, tensors, chunk_size=size) for size in (1, 8, 37, 64)}
    for key, tensor in expected.items():
        if case.S == 1 and key == "dangles":
            continue  # Zero but for rounding: one token has nothing to turn against.
        if case.S > 1 or key != "ddd_A":  # One token has nothing to decay.
            assert tensor.abs().max() > 1e-6, f"{key} vanishes: this case would test nothing"
        for size, outputs in actual.items():
            assert_parity(outputs[key], tensor, rms=1e-9, name=f"{key} in chunks of {size}")


@pytest.mark.parametrize("case", [SISO, MIMO], ids=["siso", "mimo"])
def test_segments_change_nothing(case: Case) -> None:
    tensors = draw(case, seed=2)
    expected = outcome(case, tensors)
    for size in (1, 10, 37, 1000):
        for name, tensor in outcome(case, tensors, segment_size=size, chunk_size=4).items():
            assert_parity(tensor, expected[name], rms=1e-9, name=f"{name} in segments of {size}")


SHORT_HEADS = Case(2345, B=1, H=2, P=8, G=1, N=8, R=2, out_norm=False, dtype=torch.float32)
LONG = {"siso": replace(SHORT_HEADS, R=1, mimo=False), "mimo": SHORT_HEADS}
# Worst rows of float32 against float64, several times what token by token loses there. The gradients of the step and of
# the angles are sums of terms that cancel over all later tokens: float32 keeps few of their digits, however computed.
LONG_RMS = {"dangles": 5e-3, "ddd_dt": 2e-3, "ddd_A": 3e-4, "dtrap": 3e-4, "ddt_bias": 1e-4}
LONG_RMS_OTHERS = 5e-5
PEER_NAMES = ("out", "dx", "dz", "db", "dc")


@pytest.mark.parametrize(("name", "tokens"), exhaustive_but([("siso", 2345), ("mimo", 2345), ("mimo", 777)], ("mimo", 777)))
def test_long_odd_sequence(name: str, tokens: int) -> None:
    """Exact in float64; in float32 no worse than twice what token by token loses there."""
    case = replace(LONG[name], S=tokens)
    tensors = draw(case, seed=3, dtype=torch.float32)
    wide = {key: tensor.double() for key, tensor in tensors.items()}
    truth = outcome(case, wide, method="sequential")
    peer, actual, exact = outcome(case, tensors, method="sequential"), outcome(case, tensors), outcome(case, wide)
    for key, expected in truth.items():
        assert actual[key].dtype == torch.float32
        assert_parity(exact[key], expected, rms=1e-8, name=f"{key} in float64")
        assert_parity(actual[key], expected, rms=LONG_RMS.get(key, LONG_RMS_OTHERS), name=key)
        if key in PEER_NAMES:
            assert_parity(actual[key], expected, rms=1.0, max_abs_factor=2.0, dtype_peer=peer[key], name=key)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    """Under autocast: only the inputs and the output are rounded; the parameters stay float32, as the mixer stores them."""
    low = make_tensors(MIMO, seed=4, device="cpu")
    actual = with_gradients(torch.autocast("cpu", dtype=torch.bfloat16)(ref.mamba3), MIMO, low)
    wide = {name: tensor.double() for name, tensor in low.items()}
    for name, expected in outcome(MIMO, wide, method="sequential").items():
        rounded = name == "out" or name[1:] in ORDER or low[name[1:]].dtype == torch.bfloat16
        assert actual[name].dtype == (torch.bfloat16 if rounded else torch.float32)
        assert_parity(actual[name], expected.to(actual[name].dtype), rms=5e-3, name=name)


@pytest.mark.parametrize("method", ["sequential", "chunked"])
@pytest.mark.parametrize("case", [SISO, CASES["mimo_out_norm"]], ids=["siso", "mimo"])
@pytest.mark.parametrize("documents", [(), (9, 20, 8)])
@pytest.mark.parametrize("cut", [1, 16, 23])
def test_a_sequence_may_be_cut_anywhere(case: Case, documents: tuple[int, ...], cut: int, method: str) -> None:
    """Two calls that hand the state over are one call: the angle of the rotation goes along, and so do gradients."""
    case = replace(case, documents=documents, states=True)
    leaves = {name: tensor.requires_grad_() for name, tensor in draw(case, seed=7).items()}
    uncut = run(ref.mamba3, case, leaves)
    outputs, state = [], {}
    for tokens in (slice(0, cut), slice(cut, None)):
        seq_idx = None if case.seq_idx is None else case.seq_idx[:, tokens]
        part = leaves | {"u": leaves["u"][tokens]}
        out, *last = run(ref.mamba3, case, part, seq_idx=seq_idx, chunk_size=5, method=method, **state)
        state = {"initial_state": ref.Mamba3State(*last)}
        outputs.append(out)
    joined = [torch.cat(outputs), *last]
    cotangent = torch.randn(uncut[0].shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    gradients = [torch.autograd.grad(y[0], list(leaves.values()), cotangent) for y in (joined, uncut)]
    for actual, truth in zip((*joined, *gradients[0]), (*uncut, *gradients[1]), strict=True):
        assert_parity(actual, truth, rms=1e-9)
    assert run(ref.mamba3, replace(case, states=False), draw(replace(case, states=False)))[1:] == []


def test_extreme_decays_neither_overflow_nor_vanish() -> None:
    """A decay of e^−1000 forgets all before it, and the small decays after it keep their digits, in float32."""
    shapes = [(2, 32, 3, 4), (2, 32, 1, 3, 5), (2, 32, 1, 3, 5), *[(2, 32, 3)] * 3]
    x, b, c, adt, dt, trap = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    adt = torch.full_like(adt, -1e-3)
    adt[:, ::7] = -1000.0
    wide = (x, b, c, adt, dt.abs(), trap.sigmoid())
    truth, _ = ref.mamba3_scan_sequential(*wide)
    narrow = [tensor.float().requires_grad_() for tensor in wide]
    y, _ = ref.mamba3_scan_chunked(*narrow, chunk_size=16)
    assert_parity(y, truth, rms=1e-5, name="y")
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), narrow))


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
    case = Case(64, B=1, H=2, P=16, G=1, N=16, R=2, A=4)
    tensors = {name: tensor.requires_grad_() for name, tensor in draw(case).items()}
    saved = [tensor.numel() for tensor in saved_tensors(lambda: run(ref.mamba3, case, tensors))]
    per_token = case.B * case.S * case.H * case.N * case.P
    assert max(saved) <= case.B * case.S * case.R * case.H * 16 * case.R < per_token * case.R
    assert max(saved) < per_token


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank without mimo": ({"mimo_x": None, "mimo_z": None, "mimo_o": None}, "rank 3 .*mimo_"),
    "half a mimo": ({"mimo_z": None}, "mimo_z missing"),
    "groups": ({"b": torch.zeros(37, 2, 4, 3, 8), "c": torch.zeros(37, 2, 4, 3, 8)}, "4 groups .* 3"),
    "gate": ({"z": torch.zeros(37, 2, 6, 5)}, r"z has shape .* expected \(37, 2, 6, 4\)"),
    "norm weight": ({"c_norm_weight": torch.zeros(9)}, "c_norm_weight has shape"),
    "bias": ({"b_bias": torch.zeros(6, 8)}, "b_bias has shape"),
    "skip": ({"D": torch.zeros(6, 4)}, "D has shape"),
    "mix": ({"mimo_o": torch.zeros(6, 3, 5)}, "mimo_o has shape"),
    "out norm": ({"out_norm_weight": torch.zeros(6)}, "out_norm_weight has shape"),
    "lambda": ({"trap": torch.zeros(36, 2, 6)}, "trap has shape"),
    "angles": ({"angles": torch.zeros(37, 2, 5)}, "5 .*10"),
    "angles of another batch": ({"angles": torch.zeros(37, 1, 2)}, "dt has shape"),
    "empty": ({"x": torch.zeros(0, 2, 6, 4)}, "none empty"),
    "integers": ({"x": torch.zeros(37, 2, 6, 4, dtype=torch.int64)}, "floating-point"),
    "chunk": ({"chunk_size": 0}, "chunk_size is 0"),
    "segment": ({"segment_size": 0}, "segment_size is 0"),
    "method": ({"method": "fast"}, "method .fast."),
    "activation": ({"activation": "relu"}, "activation .relu."),
    "floor": ({"A_floor": 0.0}, "A_floor is 0.0"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        run(ref.mamba3, MIMO, draw(MIMO), **change)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("dt_bias", (1,), r"dt_bias has shape \(1,\)"),
        ("seq_idx", (1, 7), r"expected torch.int32 \[B, S\] = \[2, 5\]"),
        ("h", (1, 2, 16, 16), "initial_state.h has shape"),
        ("theta", (1, 2, 4), "initial_state.theta has shape"),
    ],
)
def test_what_a_kernel_would_read_beyond_is_refused(path: str, name: str, size: tuple[int, ...], message: str) -> None:
    op = pytest.importorskip(f"megacpp_mcore.ops.mamba3.{path}").mamba3
    case = Case(5, H=2, G=1, P=16, N=16, R=1, mimo=False, states=True)
    wrong = torch.zeros(size, dtype=torch.int32 if name == "seq_idx" else torch.float32)
    tensors, options = make_tensors(case, device="cpu"), {}
    (tensors if name in tensors else options)[name] = wrong
    with pytest.raises(ModelError, match=message):
        run(op, case, tensors, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"P": 24}, "head dim 24: .* 32"),
        ({"N": 66}, "state 66: .* 64"),
        ({"R": 3}, r"MIMO rank 3: .* \(1, 2, 4\).* 4"),
        ({"A": 9}, "9 .* 18.* 16.* 8"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_named_with_the_nearest(sizes: dict[str, int], message: str) -> None:
    op = pytest.importorskip("megacpp_mcore.ops.mamba3.triton").mamba3
    case = replace(Case(5, H=2, G=1, P=16, N=16, R=2), **sizes)
    with pytest.raises(ModelError, match=message):
        run(op, case, make_tensors(case, device="cpu"))


def test_more_rows_than_a_descriptor_numbers_are_refused() -> None:
    """Of a batch that takes no memory; one row may be as long as it likes, as it goes in blocks."""
    module = pytest.importorskip("megacpp_mcore.ops.mamba3.triton")
    case = Case(5, B=1, H=2, G=1, P=16, N=16, R=2)
    tensors = make_tensors(case, device="cpu")
    tensors["u"] = tensors["u"].expand(5, 5_000_000, -1)
    with raises(ModelError, "5000000 rows", "5 tokens", "2 heads", "rank 2", "32 bits", 4194303):
        run(module.mamba3, replace(case, B=5_000_000), tensors)
    for tokens, block in ((8192, 8192), (32_768, 8192), (10_000_000, 9344)):
        plan = module.Plan(tokens, 1, 112, 64, 8, 4, 64, 16, True, True, False, False, 1e-4, 1e-5)
        assert plan.block == block


@pytest.mark.parametrize(("pairing", "message"), [("pairs", "pairing .pairs."), ("half", "The state is 5.*half")])
def test_bad_pairing_is_named(pairing: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ref.mamba3_rotate(torch.zeros(2, 5, 1, 3, 5), torch.zeros(2, 5, 3, 1), pairing=pairing)
