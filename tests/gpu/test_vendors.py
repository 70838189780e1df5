"""Kernels of other packages on a GPU, each where it is installed: parity with float64, documents, no waits, CUDA graphs.

Shape legend: S queries and keys, B batch, H heads, N tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.backends.candidates import linear_cross_entropy_candidates
from megacpp_mcore.errors import BackendError
from megacpp_mcore.ops.grouped_mlp import quack, reference
from megacpp_mcore.ops.linear_cross_entropy import reduced
from megacpp_mcore.ops.mla import flash4
from megacpp_mcore.ops.packed.documents import other_documents
from megacpp_mcore.ops.testing import EARLY, assert_parity
from megacpp_mcore.util.probe import ProbeResult
from tests.gpu.device import assert_replays, replayed, without_waiting
from tests.gpu.test_grouped_mlp_kernels import CASES
from tests.gpu.test_mla_core_attention import assert_same, draw, eager, outcome, truth
from tests.ops import grouped_mlp_case as experts

HOW = {"softmax_scale": 128**-0.5, "causal": True}
attend = partial(flash4.attend, **HOW)


def require(found: ProbeResult) -> None:
    if not found.ok:
        pytest.skip(found.reason)


def lengths(*of_rows: Sequence[int]) -> torch.Tensor:
    """The number of each row's document, from the lengths of each row of the batch."""
    rows = [[number for number, length in enumerate(row) for _ in range(length)] for row in of_rows]
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(
    ("S", "B", "H", "of_rows"),
    [(1024, 1, 56, ()), (2345, 2, 3, ()), (130, 1, 3, ()), (1345, 1, 3, [(1, 127, 1, 900, 316)]), (512, 1, 3, [(300, 212)])],
)  # fmt: skip
def test_flash4_parity(S: int, B: int, H: int, of_rows: Sequence[tuple[int, ...]]) -> None:
    require(flash4.probe())
    inputs, seq_idx = draw(S, B, H), lengths(*of_rows) if of_rows else None
    masked = HOW if seq_idx is None else {**HOW, "attention_mask": other_documents(seq_idx)}
    outputs = outcome(attend, inputs, seq_idx=seq_idx)
    assert outputs[0].is_contiguous()
    assert_same(inputs, outputs, truth(inputs, **masked), outcome(eager, inputs, **masked), 5e-3, **masked)
    with without_waiting():
        outcome(attend, inputs, seq_idx=seq_idx)
    torch.use_deterministic_algorithms(True)
    try:
        first = outcome(attend, inputs, seq_idx=seq_idx)
        assert all(map(torch.equal, first, outcome(attend, inputs, seq_idx=seq_idx)))
    finally:
        torch.use_deterministic_algorithms(False)
    if S > 1000:
        return
    others = [tensor.detach().flip(0) for tensor in inputs]
    captured = replayed(lambda: outcome(attend, inputs, seq_idx=seq_idx), inputs, others)
    for actual, expected in zip(captured, outcome(attend, inputs, seq_idx=seq_idx), strict=True):
        assert_parity(actual, expected, rms=5e-3)


def test_flash4_of_one_key_for_all_heads() -> None:
    """As sparse layers attend in the dense warm-up: the value is a part of the key."""
    require(flash4.probe())
    q, k, _, do = draw(640, 1, 56)
    shared = k[:, :, :1].detach().requires_grad_()
    keys = shared.expand(-1, -1, 56, -1)
    grads, expected = (
        torch.autograd.grad(attend(q, key, key[..., :64]), (q, shared), do, retain_graph=True)
        for key in (keys, keys.contiguous())
    )
    for grad, expected_grad in zip(grads, expected, strict=True):
        assert_parity(grad[EARLY:], expected_grad[EARLY:].double(), rms=5e-3)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 1])
def test_quack_experts(name: str) -> None:
    require(quack.probe())
    case = CASES[name]
    inputs = experts.draw(case, "cuda")
    truth = experts.outcome(reference.routed_mlp, case, inputs, torch.float64)
    plain = experts.outcome(experts.eager, case, inputs)
    outputs = experts.outcome(quack.routed_mlp, case, inputs)
    experts.assert_same(outputs, truth, 5e-3, inputs["routing"], plain)
    for key, tensor in experts.outcome(quack.routed_mlp, case, inputs).items():
        assert torch.equal(tensor, outputs[key]), key
    added = experts.outcome_added(quack.routed_mlp, case, inputs)
    experts.assert_same(added, truth, 5e-3, inputs["routing"], plain)
    if name == "natural skew":
        both = inputs, experts.draw(case, "cuda", seed=1)
        operands = [[drawn[leaf] for leaf in (*experts.LEAVES, "dy", "routing")] for drawn in both]
        assert_replays(lambda: experts.outcome(quack.routed_mlp, case, inputs), *operands)


def test_quack_experts_by_name_and_by_auto() -> None:
    require(quack.probe())
    needs = {"device": "cuda", "dtype": torch.bfloat16, "deterministic": True, "capturable": True}
    dispatcher, sizes = Dispatcher({"routed_mlp": "quack"}), {"hidden": 3584, "experts": 16}
    assert dispatcher.request("routed_mlp", ffn=896, **sizes, **needs).fn is quack.routed_mlp
    automatic = Dispatcher()  # only at the sizes of its rows
    request = sizes | {"expert_ranks": 1} | needs
    assert automatic.request("routed_mlp", ffn=896, **request).observed == "quack"
    assert automatic.request("routed_mlp", ffn=896, **request | {"expert_ranks": 2, "experts": 8}).observed == "triton"
    assert automatic.request("routed_mlp", ffn=1024, **request).observed == "triton"
    with pytest.raises(BackendError, match=r"ffn 900 .* 8"):
        dispatcher.request("routed_mlp", ffn=900, **sizes, **needs)


@pytest.mark.parametrize("reduction", reduced.REDUCTIONS)
@pytest.mark.parametrize("candidate", linear_cross_entropy_candidates(), ids=lambda one: one.name)
def test_reduced_losses(candidate: object, reduction: str) -> None:
    require(candidate.present())
    generator = torch.Generator("cuda").manual_seed(3)
    hidden, weight = (torch.randn(n, 512, device="cuda", generator=generator) for n in (4104, 9216))
    leaves = [hidden.bfloat16().requires_grad_(), (weight * 512**-0.5).bfloat16().requires_grad_()]
    label = torch.randint(9216, (4104,), device="cuda", generator=generator)

    def run(fn: object, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        loss = fn(*leaves)
        return [loss.detach(), *torch.autograd.grad(loss * 3, leaves)]

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), label, reduction=reduction)

    outputs = run(lambda *given: candidate.load()(*given, label, reduction=reduction), leaves)
    expected = run(plain, [leaf.detach().double().requires_grad_() for leaf in leaves])
    peer = run(lambda h, w: torch.nn.functional.cross_entropy((h @ w.t()).float(), label, reduction=reduction), leaves)
    for name, *tensors in zip(("loss", "hidden", "weight"), outputs, expected, peer, strict=True):
        actual, exact, other = tensors
        assert_parity(actual, exact, rms=5e-3, dtype_peer=None if name == "loss" else other, name=name)
