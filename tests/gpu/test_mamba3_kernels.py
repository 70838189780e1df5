"""Mamba-3's Triton kernels on a GPU against the reference in float64: outputs, states and every gradient.

Legend: B batch, S sequence, H heads, P head dim, G groups, N state, R MIMO rank, A rotation angles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megacpp_mcore.ops.mamba3 import fused
from megacpp_mcore.ops.mamba3 import reference as ref
from tests.gpu.device import peak, replayed, without_waiting
from tests.parity.compare import assert_parity

pytestmark = pytest.mark.gpu

NAMES = ("z", "x", "b", "c", "dd_dt", "dd_A", "trap", "angles")
DEVICE = "cuda"
OVERALL = 1e-2
"""What a whole gradient may be off, as a part of its norm; single rows are measured against plain PyTorch's."""


@dataclass(frozen=True)
class Case:
    S: int
    B: int = 2
    H: int = 28
    G: int = 2
    R: int = 4
    N: int = 64
    P: int = 64
    mimo: bool = True
    out_norm: bool = False
    states: bool = False
    documents: tuple[int, ...] = ()
    activation: str = "softplus"
    dtype: torch.dtype = torch.bfloat16

    @property
    def widths(self) -> list[int]:
        values = self.G * self.R * self.N
        return [self.H * self.P, self.H * self.P, values, values, self.H, self.H, self.H, self.N // 4]


CASES = {
    "aligned": Case(512),
    "odd": Case(2345, B=1),
    "one_token": Case(1),
    "documents": Case(301, documents=(100, 77, 124), out_norm=True, states=True),
    "heads_of_tp2": Case(384, H=56, G=4),
    "heavy_tail": Case(130, activation="heavy_tail", states=True),
    "rank_2": Case(300, R=2),
    "mimo_of_rank_1": Case(256, R=1),
    "siso": Case(1000, R=1, mimo=False),
    "siso_documents": Case(301, R=1, mimo=False, documents=(100, 77, 124), states=True, out_norm=True),
    "state_128": Case(301, N=128, B=1),
    "siso_state_128": Case(301, N=128, B=1, R=1, mimo=False, documents=(100, 201)),
    "float16": Case(256, dtype=torch.float16),
}


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel leaves unwritten shows as NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **options: Any) -> torch.Tensor:
            tensor = make(*args, **options)
            if tensor.is_cuda and not tensor.requires_grad:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**31))
            return tensor

        return made

    monkeypatch.setattr(fused.torch, "empty", poisoned(empty))
    monkeypatch.setattr(fused.torch, "empty_like", poisoned(empty_like))


def make_tensors(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """What a projection gives as one tensor ``u``, the parameters away from their initial values, and the entering state."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, mean: float = 0.0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (mean + scale * torch.randn(*size, generator=generator)).to(DEVICE, dtype)

    width = sum((part + 7) // 8 * 8 for part in case.widths)
    H, R, N, P = case.H, case.R, case.N, case.P
    tensors = {
        "u": draw(case.S, case.B, width, dtype=case.dtype),
        "dt_bias": draw(H, mean=-4.0, scale=0.5),
        "D": draw(H, mean=1.0, scale=0.2),
        "b_bias": draw(H, R, N, mean=1.0, scale=0.2),
        "c_bias": draw(H, R, N, mean=1.0, scale=0.2),
        "b_norm_weight": draw(N, mean=1.0, scale=0.2, dtype=case.dtype),
        "c_norm_weight": draw(N, mean=1.0, scale=0.2, dtype=case.dtype),
    }
    if case.mimo:
        means = {"mimo_x": 1 / R, "mimo_z": 1.0, "mimo_o": 1 / R}
        tensors |= {name: draw(H, R, P, mean=mean, scale=0.2) for name, mean in means.items()}
    if case.out_norm:
        tensors["out_norm_weight"] = draw(H * P, mean=1.0, scale=0.2)
    if case.states:
        B, A = case.B, case.widths[-1]
        tensors |= {"h": draw(B, H, P, N), "b_last": draw(B, R, H, N), "x_last": draw(B, H, P), "theta": draw(B, H, A)}
    return tensors


def run(op: Callable[..., Any], case: Case, tensors: dict[str, torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The output and, where a state goes in, the last state."""
    starts = [0]
    for part in case.widths:
        starts.append(starts[-1] + (part + 7) // 8 * 8)
    parts = {
        name: tensors["u"][..., start : start + part]
        for name, start, part in zip(NAMES, starts[:-1], case.widths, strict=True)
    }
    rows = {name: parts[name].unflatten(-1, (case.H, case.P)) for name in "xz"}
    rows |= {name: parts[name].unflatten(-1, (case.G, case.R, case.N)) for name in "bc"}
    inputs = [rows.get(name, parts[name]) for name in ("x", "z", "b", "c", "dd_dt", "dd_A", "trap", "angles")]
    weights = {
        name: t for name, t in tensors.items() if name not in ("u", "h", "b_last", "x_last", "theta")
    }  # fmt: skip
    seq_idx = None
    if case.documents:
        numbers = torch.repeat_interleave(torch.arange(len(case.documents)), torch.tensor(case.documents))
        seq_idx = torch.stack([numbers, torch.zeros_like(numbers)])[: case.B].to(DEVICE, torch.int32)
    state = ref.Mamba3State(*(tensors[n] for n in ("h", "b_last", "x_last", "theta"))) if case.states else None
    out, last = op(
        *inputs, **weights, chunk_size=16, A_floor=1e-4, eps=1e-5, activation=case.activation, seq_idx=seq_idx,
        initial_state=state, return_final_state=case.states, **options,
    )  # fmt: skip
    return [out, *(last or ())]


def with_gradients(
    op: Callable[..., Any], case: Case, tensors: dict[str, torch.Tensor], **options: Any
) -> dict[str, torch.Tensor]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    results = run(op, case, leaves, **options)
    generator = torch.Generator().manual_seed(99)
    given = [torch.randn(t.shape, generator=generator).to(case.dtype).to(t.device, t.dtype) for t in results]
    gradients = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), given), strict=True))
    named = dict(zip(("out", "h", "b", "x", "theta"), results, strict=False))
    start = 0
    for name, part in zip(NAMES, case.widths, strict=True):
        named[f"d{name}"] = gradients["u"][..., start : start + part]
        start += (part + 7) // 8 * 8
    return named | {f"d{name}": t for name, t in gradients.items() if name != "u"}


def plain(case: Case, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Plain PyTorch with the scan at the dtype of the inputs; gates, angles, norms and the gate's sum in float32."""
    with monkeypatch.context() as patch:
        check = ref._check_scan

        def check_scan(*args: Any) -> torch.dtype:
            check(*args)
            return case.dtype

        patch.setattr(ref, "_check_scan", check_scan)
        return with_gradients(ref.mamba3, case, tensors, segment_size=None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_result_is_the_references(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors(case)
    truth = with_gradients(ref.mamba3, case, {name: t.double() for name, t in tensors.items()}, segment_size=256)
    peer = plain(case, tensors, monkeypatch)
    actual = with_gradients(fused.mamba3, case, tensors)
    off = []
    for name, expected in truth.items():
        overall = ((actual[name].double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        if case.S == 1 and name in ("dangles", "ddd_A", "dtheta"):
            assert actual[name].isfinite().all()  # Zero but for rounding: one token turns against nothing.
            continue
        try:
            assert_parity(actual[name], expected, rms=5e-3, dtype_peer=peer[name].to(case.dtype), name=name)
            assert overall <= OVERALL, f"{name} is off by {overall:.1e} of its norm"
        except AssertionError as error:
            off.append(str(error))
    assert not off, "\n".join(off)


def test_the_same_inputs_give_the_same_bits() -> None:
    case = CASES["documents"]
    tensors = make_tensors(case, seed=1)
    first = with_gradients(fused.mamba3, case, tensors)
    for _ in range(20):
        for name, again in with_gradients(fused.mamba3, case, tensors).items():
            assert torch.equal(first[name], again), name


def test_a_cuda_graph_holds_it() -> None:
    """Forward and backward capture, and replay with other inputs what an eager call gives."""
    case = Case(384)
    tensors, others = make_tensors(case), make_tensors(case, seed=2)

    def both() -> list[torch.Tensor]:
        return list(with_gradients_of(tensors))

    def with_gradients_of(given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        (out,) = run(fused.mamba3, case, leaves)
        return [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]

    expected = [t.clone() for t in with_gradients_of(others)]
    with without_waiting():
        both()
    for actual, wanted in zip(replayed(both, tensors.values(), others.values()), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_memory_of_the_main_shape() -> None:
    """Less than 3 GiB above inputs and gradients at 8192 tokens of NAM56R."""
    case = Case(4096, H=112, G=8)
    tensors = make_tensors(case)
    leaves = {name: t.requires_grad_() for name, t in tensors.items()}

    def both() -> None:
        (out,) = run(fused.mamba3, case, leaves)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    both()
    assert peak(both) < 3.5 * 2**30
