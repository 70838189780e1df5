"""Sparse MLA's kernels on a GPU: parity with fp64, every gradient; the same bits; no wait for the device; CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.sparse_mla import triton as launch
from megacpp_mcore.ops.sparse_mla.reference import attend as reference
from megacpp_mcore.ops.sparse_mla.triton import attend
from tests.gpu.device import assert_replays, assert_same_bits, peak
from tests.ops.sparse_mla_case import Case, assert_same, assert_same_sums, draw, eager, outcome

pytestmark = pytest.mark.usefixtures("poisoned")

RMS = 5e-3

CASES = {
    "all heads": Case(S=1024),
    "odd length": Case(S=2345, B=1),
    "half of the heads": Case(S=515, H=28),
    "a quarter of them": Case(S=515, H=14),
    "three heads": Case(S=130, H=3, B=3),
    "more heads than a launch takes": Case(S=300, H=100, N=64),
    "ragged": Case(S=777, ragged=True),
    "ragged, popular, strided, two layers": Case(S=515, ragged=True, popular=True, strided=True, layers=2),
    "64 keys": Case(S=515, N=64, H=28, popular=True),
    "20 keys": Case(S=515, N=20, ragged=True, layers=2),
    "fewer queries than columns": Case(S=100),
    "one token": Case(S=1, B=1, H=3),
    "float16": Case(S=515, dtype=torch.float16, ragged=True, strided=True),
    "float16, few heads": Case(S=515, H=14, dtype=torch.float16, popular=True),
}
DEEPSEEK = {"K": 576, "V": 512}
"""Its widths, which have kernels of their own."""

WIDE_CASES = {
    "64 heads, 2048 keys": Case(S=257, H=64, N=2048, **DEEPSEEK),
    "128 heads": Case(S=257, H=128, N=128, **DEEPSEEK),
    "128 heads, float16, ragged, strided": Case(
        S=257, B=1, H=128, N=200, dtype=torch.float16, ragged=True, strided=True, **DEEPSEEK
    ),
    "56 heads, ragged, popular, two layers": Case(S=515, H=56, ragged=True, popular=True, layers=2, **DEEPSEEK),
    "32 heads": Case(S=300, H=32, N=64, B=3, popular=True, **DEEPSEEK),
    "16 heads": Case(S=300, H=16, ragged=True, **DEEPSEEK),
    "three heads beyond a launch": Case(S=130, H=67, N=20, ragged=True, **DEEPSEEK),
    "one token": Case(S=1, B=1, H=3, **DEEPSEEK),
}
WIDE = Case(S=4096, popular=True)


@contextlib.contextmanager
def ordered(wanted: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of some hundred queries, the last one not full, of the kernels that take queries so."""
    monkeypatch.setattr(launch, "SCRATCH", 2**23)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("case", [*CASES.values(), *WIDE_CASES.values()], ids=[*CASES, *map("wide, {}".format, WIDE_CASES)])
def test_parity_with_fp64(case: Case) -> None:
    inputs = draw(case, "cuda")
    truth, plain = outcome(reference, case, inputs, torch.float64), outcome(eager, case, inputs)
    assert_same_sums(case, inputs, launch.summed_probabilities, truth, RMS)
    for deterministic in (False, True):
        with ordered(deterministic):
            outputs = outcome(attend, case, inputs)
        assert {name: tensor.dtype for name, tensor in outputs.items()} == {
            name: torch.float32 if name == "p" else case.dtype for name in truth
        }
        assert outputs["o0"].is_contiguous()
        assert_same(case, inputs, outputs, truth, plain, RMS)
        blind_SB = (inputs["index"] < 0).all(-1).T
        assert not any(outputs[name][blind_SB].count_nonzero() for name in ("o0", "dq0"))
        assert not outputs["p"][inputs["index"] < 0].count_nonzero()


@pytest.mark.parametrize("case", [WIDE, Case(S=1024, H=128, N=512, popular=True, **DEEPSEEK)], ids=["narrow", "wide"])
def test_the_same_bits_each_time(case: Case) -> None:
    inputs = draw(case, "cuda")
    with ordered():
        first = assert_same_bits(lambda: outcome(attend, case, inputs), 20)
    for name, tensor in outcome(attend, case, inputs).items():  # float sums of the keys' gradient have no fixed order
        assert torch.equal(tensor, first[name]) or name == "dkv", name


@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_integer_sums_are_to_scale(size: float) -> None:
    case = Case(S=515)
    inputs = draw(case, "cuda")
    inputs["do"] = [do * size for do in inputs["do"]]
    truth, plain = outcome(reference, case, inputs, torch.float64), outcome(eager, case, inputs)
    with ordered():
        assert_same(case, inputs, outcome(attend, case, inputs), truth, plain, RMS)


def test_strides_change_no_bit() -> None:
    case = Case(S=515, strided=True)
    inputs = draw(case, "cuda")
    with ordered():
        expected = outcome(attend, case, inputs)
        for odd in (8, 3):  # 3: rows that begin at no multiple of 16 bytes, which are copied
            wide = torch.zeros(case.S, case.B, case.H, case.K + odd, dtype=case.dtype, device="cuda")
            wide[..., odd:] = inputs["q"][0]
            leaves = [
                wide[..., odd:].requires_grad_(),
                inputs["kv"].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
            ]
            o = attend(*leaves, inputs["index"], softmax_scale=case.softmax_scale, value_dim=case.V)
            dq, dkv = torch.autograd.grad(o, leaves, inputs["do"][0])
            for name, tensor in (("o0", o), ("dq0", dq), ("dkv", dkv)):
                assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("widths", [{}, DEEPSEEK], ids=["narrow", "wide"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nan_stays_nan(deterministic: bool, widths: dict[str, int]) -> None:
    case = Case(S=300, N=20, H=14, **widths)
    inputs = draw(case, "cuda")
    inputs["kv"][7, 0, 100] = float("nan")
    with ordered(deterministic):
        outputs = outcome(attend, case, inputs)
    hit_SB = (inputs["index"] == 7).any(-1).T.clone()
    hit_SB[:, 1] = False
    assert hit_SB.any()
    for name in ("o0", "dq0"):
        assert torch.isnan(outputs[name][hit_SB]).all()
        assert torch.isfinite(outputs[name][~hit_SB]).all()
    assert torch.isnan(outputs["dkv"][7, 0]).all()


@pytest.mark.parametrize("widths", [{}, DEEPSEEK], ids=["narrow", "wide"])
def test_very_negative_scores(widths: dict[str, int]) -> None:
    """Log-sum-exps far below the log of the least float, with columns that select nothing."""
    case = Case(S=200, ragged=True, H=14, **widths)
    inputs = draw(case, "cuda")
    inputs["q"][0].mul_(0.1)[..., 0] = 30.0
    inputs["kv"].mul_(0.1)[..., 0] = -30 * case.K**0.5
    truth, plain = outcome(reference, case, inputs, torch.float64), outcome(eager, case, inputs)
    outputs = outcome(attend, case, inputs)
    assert all(torch.isfinite(tensor).all() for tensor in outputs.values())
    assert_same(case, inputs, {"o0": outputs["o0"]}, {"o0": truth["o0"]}, plain, RMS)


def test_offsets_beyond_31_bits() -> None:
    """The last queries of a long row attend as they do alone."""
    case = Case(S=65_536 * 5, B=1, N=64)
    q, do = (torch.randn(case.S, 1, 56, width, device="cuda", dtype=torch.bfloat16) for width in (128, 64))
    assert q.numel() > 2**31
    kv = torch.randn(case.S, 1, 128, device="cuda", dtype=torch.bfloat16)
    index = torch.randint(case.S // 64, (1, case.S, 64), device="cuda", dtype=torch.int32)
    index = index * 64 + torch.arange(64, device="cuda", dtype=torch.int32)
    last = slice(-130, None)
    outputs = []
    for rows in (slice(None), last):
        leaf = q[rows].detach().requires_grad_()
        o = attend(leaf, kv, index[:, rows], softmax_scale=0.1, value_dim=64)
        (dq,) = torch.autograd.grad(o, [leaf], do[rows])
        outputs.append((o[last].detach(), dq[last]))
    for in_row, alone in zip(*outputs, strict=True):
        assert torch.isfinite(alone).all()
        assert torch.equal(in_row, alone)


@pytest.mark.parametrize("case", [WIDE, Case(S=2048, H=128, N=2048, **DEEPSEEK)], ids=["narrow", "wide"])
def test_nothing_is_gathered(case: Case) -> None:
    """For wide latents a chunk of scores is held with the gradients, no more than :data:`launch.SCRATCH`."""
    inputs = draw(case, "cuda")
    outcome(attend, case, inputs)
    q, kv, do = inputs["q"][0], inputs["kv"], inputs["do"][0]
    leaves = [q.requires_grad_(), kv.requires_grad_()]

    def run() -> object:
        o = attend(*leaves, inputs["index"], softmax_scale=0.1, value_dim=case.V, sink=TargetSum())
        return torch.autograd.grad(o, leaves, do)

    small = case.B * case.S * (4 * case.H + 4 * case.N + 10 * case.K)  # lse, sums, and the keys' gradients
    small += launch.SCRATCH if case.V == 512 else 0
    assert peak(run) < 1.02 * (do.nbytes + q.nbytes + small)


@pytest.mark.parametrize("widths", [{}, DEEPSEEK], ids=["narrow", "wide"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_waits_and_a_graph_replays(deterministic: bool, widths: dict[str, int]) -> None:
    case = Case(S=515, ragged=True, **widths)
    inputs, others = draw(case, "cuda"), draw(case, "cuda", seed=1)
    tensors = [[*drawn["q"], drawn["kv"], *drawn["do"]] for drawn in (inputs, others)]
    with ordered(deterministic):
        assert_replays(lambda: outcome(attend, case, inputs), *tensors, unordered="" if deterministic else "dkv")
