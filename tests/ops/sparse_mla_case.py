"""Inputs of sparse MLA with awkward selections, and everything that comes out: output, gradients, sums of probabilities.

Legend: S queries, T = S keys, B batch, H heads, K width of a query or key, V of the latent value, N selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megacpp_mcore.ops.indexer.reference import causal_topk
from megacpp_mcore.ops.indexer.training import TargetSum
from megacpp_mcore.ops.testing import EARLY, assert_parity, query_gradient_terms, row_errors, worst_row

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is computed.

    Attributes:
        ragged: whether columns are shuffled, a tenth of them is −1, and some queries select nothing.
        popular: whether every query that selects anything selects key 0.
        strided: whether q, kv and the gradient of the output are parts of wider tensors.
        layers: how many layers, of other queries, add their probabilities to one sum.
    """

    S: int = 301
    B: int = 2
    H: int = 56
    K: int = 128
    V: int = 64
    N: int = 256
    dtype: torch.dtype = torch.bfloat16
    ragged: bool = False
    popular: bool = False
    strided: bool = False
    layers: int = 1

    @property
    def softmax_scale(self) -> float:
        return float(self.K**-0.5)


def draw(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """``q`` of each layer, ``kv``, ``do`` of each layer, and ``index``."""
    generator = torch.Generator(device).manual_seed(seed)
    S, B, H, K, V = case.S, case.B, case.H, case.K, case.V
    beside = 8 if case.strided else 0

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape[:-1], shape[-1] + 2 * beside, generator=generator, device=device).to(case.dtype)
        return drawn[..., beside : beside + shape[-1]]

    return {
        "q": [normal(S, B, H, K) for _ in range(case.layers)],
        "kv": normal(S, B, K),
        "do": [normal(S, B, H, V) for _ in range(case.layers)],
        "index": _index(case, generator, device),
    }


def _index(case: Case, generator: torch.Generator, device: str) -> torch.Tensor:
    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    S, B = case.S, case.B
    score_BST = uniform(B, S, S)
    if case.popular:
        score_BST[..., 0] = 2.0
    index_BSN = causal_topk(score_BST, case.N)
    if case.ragged:
        index_BSN = index_BSN.gather(-1, uniform(*index_BSN.shape).argsort(-1))
        lost = uniform(*index_BSN.shape) < 0.1
        if case.popular:
            lost &= index_BSN != 0
        index_BSN = index_BSN.masked_fill(lost, -1)
        index_BSN[:, S // 3 :: 7] = -1
    return index_BSN


def outcome(fn: Callable[..., Any], case: Case, inputs: dict[str, Any], dtype: torch.dtype | None = None) -> Tensors:
    """Outputs and gradients by name, of a call of ``fn`` for each layer; ``dtype``: what all inputs are cast to first."""

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(dtype or x.dtype).requires_grad_()

    qs, kv, sink = [leaf(q) for q in inputs["q"]], leaf(inputs["kv"]), TargetSum(case.layers)
    how = {"softmax_scale": case.softmax_scale, "value_dim": case.V, "sink": sink}
    outputs = [fn(q, kv, inputs["index"], **how) for q in qs]
    grads = torch.autograd.grad(outputs, [kv, *qs], [do.to(kv.dtype) for do in inputs["do"]])
    tensors = {"dkv": grads[0], "p": sink.take()}
    for number, (o, dq) in enumerate(zip(outputs, grads[1:], strict=True)):
        tensors |= {f"o{number}": o.detach(), f"dq{number}": dq}
    return tensors


def eager(
    q_SBHK: torch.Tensor,
    kv_TBK: torch.Tensor,
    index_BSN: torch.Tensor,
    *,
    softmax_scale: float,
    value_dim: int,
    sink: TargetSum,
) -> torch.Tensor:
    """Plain PyTorch in the dtype of its inputs; the gradient of a key is summed over queries in float32."""
    batch = torch.arange(kv_TBK.shape[1], device=kv_TBK.device)[:, None, None]
    kv_BSNK = kv_TBK.float()[index_BSN.clamp_min(0).long(), batch].to(kv_TBK.dtype)
    hidden_BSHN = (index_BSN < 0).unsqueeze(2)
    score_BSHN = torch.einsum("sbhk,bsnk->bshn", q_SBHK, kv_BSNK) * softmax_scale
    p_BSHN = score_BSHN.masked_fill(hidden_BSHN, -1e4).softmax(-1).masked_fill(hidden_BSHN, 0.0)
    with torch.no_grad():
        sink.accumulator(index_BSN).add_(p_BSHN.float().sum(2))
    return torch.einsum("bshn,bsnv->sbhv", p_BSHN, kv_BSNK[..., :value_dim])


def assert_same(case: Case, inputs: dict[str, Any], found: Tensors, truth: Tensors, peer: Tensors, rms: float) -> None:
    """Every result is the truth's. Terms cancel in the gradient of a query with few keys: errors are relative to them."""
    seen_SB = (inputs["index"] >= 0).sum(-1).T
    few_SB = (seen_SB > 0) & (seen_SB <= EARLY)
    failures = []
    for name, expected in truth.items():
        actual, other, limit = found[name], peer[name], rms
        print(f"{name}: worst row {worst_row(actual, expected):.1e}, plain PyTorch {worst_row(other, expected):.1e}")
        if name == "p":
            assert actual.dtype == torch.promote_types(case.dtype, torch.float32)
            other, limit = other.to(actual.dtype), rms if actual.dtype == torch.float64 else max(1e-5, rms / 500)
        elif name.startswith("dq") and few_SB.any():
            terms_SBH = _terms(case, inputs, int(name[2:]))
            errors = row_errors(actual, expected, name, norms=terms_SBH.clamp_min(1e-30))[few_SB]
            if not float(errors.max()) <= rms:
                failures.append(f"{name} of queries that select few keys: {float(errors.max()):.1e} of the terms")
            actual, expected, other = (tensor[~few_SB] for tensor in (actual, expected, other))
        factor = 2.0 if name != "p" and other.dtype.itemsize == 2 else None
        try:
            if expected.numel():
                assert_parity(actual, expected, rms=limit, dtype_peer=other, max_abs_factor=factor, name=name)
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, "\n".join(failures)


def assert_same_sums(case: Case, inputs: dict[str, Any], fn: Callable[..., Any], truth: Tensors, rms: float) -> None:
    """The sums of probabilities that ``fn`` computes by themselves are the truth's."""
    how = {"softmax_scale": case.softmax_scale, "value_dim": case.V}
    sums = sum(fn(q.detach(), inputs["kv"].detach(), inputs["index"], **how) for q in inputs["q"])
    assert_parity(sums, truth["p"], rms=max(1e-5, rms / 500), name="sums")


def _terms(case: Case, inputs: dict[str, Any], layer: int) -> torch.Tensor:
    """The size of the terms in dq, one query at a time instead of a batch of keys as large as the scores."""
    index_BSN, kv_TBK = inputs["index"], inputs["kv"]
    sizes = torch.zeros(case.S, case.B, case.H, dtype=torch.float64, device=kv_TBK.device)
    for b, s in ((index_BSN >= 0).sum(-1).clamp_max(EARLY + 1) % (EARLY + 1)).nonzero().tolist():
        keys = index_BSN[b, s][index_BSN[b, s] >= 0].long()
        k = kv_TBK[keys, b][:, None, None].expand(-1, 1, case.H, -1)
        q, do = (inputs[name][layer][s : s + 1, b : b + 1] for name in ("q", "do"))
        hidden = torch.zeros(len(keys), dtype=torch.bool, device=k.device)
        sizes[s, b] = query_gradient_terms(q, k, k[..., : case.V], do, case.softmax_scale, hidden)[0, 0]
    return sizes
