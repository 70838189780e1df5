"""Peak memory and time of the DSA indexer: stock Megatron's fallback, with and without the patch dsa-indexer-memory.

Three pieces of work: ``forward`` (scores and top-k), ``loss`` (forward with the KL loss), ``train`` (loss, and its backward
pass). Bytes are the peak above what was allocated before the call, so they hold outputs and temporaries; those computed are
the same counted by hand (:func:`stock_bytes`; :func:`our_bytes` is a bound). The floor is what no implementation can do
without: outputs for memory; for time the greater of inputs and outputs, and of the multiply-adds of causal pairs at the GPU's
rate for products of the inputs' dtype (both sides compute in float32). No ratio is given for a piece of work unless its
result (selection, loss, gradients) agrees with stock's in this run. Where stock runs out of memory there is nothing to agree
with: the row says so, and what the ratio is of.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.bench.cases.indexer import SELECTED, selected_scores
from megacpp_mcore.bench.cases.peers import patched
from megacpp_mcore.bench.parity import judged
from megacpp_mcore.bench.problem import PRECISIONS, Floor, Problem, Variant, Verdict
from megacpp_mcore.bench.registry import OURS, PEER, Options
from megacpp_mcore.bench.table import IS_STOCK, NO_STOCK
from megacpp_mcore.model.flops import causal_pairs, selected_pairs
from megacpp_mcore.ops.indexer.chunked import BLOCK_ELEMENTS
from megacpp_mcore.ops.testing import row_errors, worst_row

WORKS = {
    "forward": ("forward", True),
    **{
        f"{work}, {'sparse' if sparse else 'dense'} loss": (work, sparse)
        for sparse in (True, False)
        for work in ("loss", "train")
    },
}
"""What is measured, and whether its loss is that of selected keys alone."""
LIMITS = {"selected": SELECTED, "loss": 1e-4, "dq": 1e-2, "dw": 1e-2, "dk": 1e-2}
"""The largest error of a row."""
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
COEFFICIENT = 0.001
PATCH = "dsa-indexer-memory"
STOCK, PATCHED = "stock", f"patch {PATCH}"


@dataclass(frozen=True)
class Shape:
    """One size: sq = sk = S, batch B, H indexer heads of D, A attention heads of K (one key head), N selected keys."""

    S: int
    B: int
    H: int
    D: int
    A: int
    K: int
    N: int
    itemsize: int = 2

    @property
    def all_selected(self) -> int:
        """Queries of a row that have no more keys than are selected, and so need no scores for a selection."""
        return min(self.N, self.S)

    def inputs(self, work: str) -> int:
        """Bytes of the indexer's q, k and weights, of queries that need scores; with the loss, of attention's query and key."""
        queries = self.S - (self.all_selected if work == "forward" else 0)
        numbers = queries * (self.H * self.D + self.H) + (self.S * self.D if queries else 0)
        attention = self.S * (self.A * self.K + self.K) if work != "forward" else 0
        return self.B * (numbers + attention) * self.itemsize

    def outputs(self, work: str) -> int:
        """Bytes of the int64 indices, and of the gradients of q, k and weights."""
        gradients = self.S * self.B * (self.H * self.D + self.D + self.H) * self.itemsize
        return self.S * self.B * min(self.N, self.S) * 8 + (gradients if work == "train" else 0)

    def operations(self, work: str, sparse: bool) -> int:
        """Multiply-adds of causal pairs, two each, nothing computed twice.

        Scores: of all pairs, but without a loss of those queries alone that have more keys than are selected. The target's
        logits, and of the gradient two products (of q and of k): of the selected pairs, or for the dense loss of all.
        """
        causal = causal_pairs(self.S)
        scored = causal - (causal_pairs(self.all_selected) if work == "forward" else 0)
        reached = selected_pairs(self.S, self.N) if sparse else causal
        found = scored * self.H * self.D
        if work != "forward":
            found += reached * self.A * self.K
        if work == "train":
            found += 2 * reached * self.H * self.D
        return 2 * self.B * found


def stock_bytes(shape: Shape, work: str) -> int:
    """Peak of stock's temporaries, counted by hand, the largest tensors only.

    ``forward``: the product q·k and its ReLU, both [sq, b, h, sk] float32. With the loss: the attention scores, their masked
    copy, the difference from the row's maximum and its exponential, four [b, heads, sq, sk] float32 tensors (two indexer
    ones, if these are more), with index scores, selection mask and valid mask beside them.
    """
    pairs = 4 * shape.B * shape.S * shape.S
    forward = 2 * shape.H * pairs
    return forward if work == "forward" else max(forward, (4 * shape.A + 2) * pairs)


def our_bytes(shape: Shape, work: str, sparse: bool) -> int:
    """Bound of ours: three blocks, what is linear in S (float32 keys, gradient of k, the selection's scores), and outputs."""
    heads = max(shape.H, shape.A) if work != "forward" and not sparse else shape.H
    blocks = 3 * 4 * min(BLOCK_ELEMENTS, shape.B * heads * shape.S * shape.S)
    numbers = shape.D + shape.N + (shape.K if work != "forward" else 0) + (shape.D if work == "train" else 0)
    return blocks + 4 * shape.S * shape.B * numbers + shape.outputs(work)


def draw(shape: Shape, device: str, dtype: torch.dtype, seed: int) -> Any:
    """Random inputs, causal bounds and the leaves that get gradients."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)

    S, B, scale = shape.S, shape.B, (shape.H * shape.D) ** -0.5
    leaves = (normal(S, B, shape.H, shape.D), normal(S, B, shape.H) * scale, normal(S, B, shape.D))
    return SimpleNamespace(
        leaves=tuple(leaf.requires_grad_() for leaf in leaves),
        query=normal(S, B, shape.A, shape.K),
        key=normal(S, B, 1, shape.K).expand(-1, -1, shape.A, -1),
        bounds=(torch.zeros(S, dtype=torch.int64, device=device), torch.arange(1, S + 1, device=device)),
    )


def run(shape: Shape, inputs: Any, work: str, sparse: bool, relu: bool = True) -> tuple[Any, Any, Any]:
    """One call through the module, patched or not: ``(indices, loss or None, gradients of q, w and k or None)``."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    (q, w, k), (starts, ends) = inputs.leaves, inputs.bounds
    if work == "forward":
        with torch.no_grad():
            index = dsa.fused_qk_topk_naive(q, k, w, shape.N, varlen_starts=starts, varlen_ends=ends, use_relu=relu)[1]
        return index, None, None
    with torch.set_grad_enabled(work == "train"):
        index, loss = dsa.FusedDSAIndexerLoss.apply(
            q, w, k, inputs.query, inputs.key, shape.K**-0.5, shape.N, COEFFICIENT, None, sparse, ONE_RANK,
            starts, ends, None, None, False, relu,
        )  # fmt: skip
    return index, loss.detach(), torch.autograd.grad(loss, inputs.leaves) if work == "train" else None


def problem(options: Options) -> Problem:
    """Each piece of work, with the sparse and with the dense loss."""
    S, B, H, D, A, V, R, N = options.sizes(
        "S", "B", "indexer_heads", "indexer_dim", "heads", "latent", "rope", "topk"
    )  # fmt: skip
    dtype = getattr(torch, options.dtype)
    shape = Shape(S, B, H, D, A, V + R, N, dtype.itemsize)
    runs = {name: partial(run, shape, work=work, sparse=sparse) for name, (work, sparse) in WORKS.items()}
    works: dict[str, Floor] = {}
    computed: dict[tuple[str, str], int] = {}
    for name, (work, sparse) in WORKS.items():
        works[name] = Floor(
            operations=shape.operations(work, sparse),
            moved=shape.inputs(work) + shape.outputs(work),
            precision=PRECISIONS[options.dtype],
            result=shape.outputs(work),
        )
        computed |= {(STOCK, name): stock_bytes(shape, work), (PATCHED, name): our_bytes(shape, work, sparse)}
    return Problem(
        inputs=draw(shape, options.device, dtype, seed=0),
        variants=[
            Variant(name=STOCK, side=PEER, runs=runs),
            Variant(name=PATCHED, side=OURS, runs=runs, around=partial(patched, PATCH)),
        ],
        works=works,
        judge=AgainstStock(shape),
        stock=STOCK,
        computed=computed,
    )


class AgainstStock:
    """Agreement with what the unpatched module gives, where that fits into memory.

    Selections may differ in keys whose scores are equal but for rounding; gradients are compared where they do not. They are
    computed without ReLU: of so many logits some round to the other side of its step, where gradients jump.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._expected: dict[str, Any] = {}

    def prepare(self, inputs: Any) -> None:
        """Run stock, in the form that can be compared with."""
        for name in WORKS:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self._expected[name] = self._found(name, inputs, with_scores=True)
            gc.collect()  # what the traceback held

    def verdict(self, variant: Variant, work: str, inputs: Any) -> Verdict:
        """Compare what runs now; stock itself is run once and not compared with itself."""
        if variant.name == STOCK:
            variant.runs[work](inputs)
            return Verdict(True, IS_STOCK)
        if work not in self._expected:
            return Verdict(None, NO_STOCK)
        return judged(self._errors(work, inputs), LIMITS)

    def _found(self, name: str, inputs: Any, with_scores: bool = False) -> Any:
        """What the module gives; of ``forward`` all scores, where they are wanted."""
        from megatron.core.transformer.experimental_attention_variant import dsa

        work, sparse = WORKS[name]
        if work != "forward" or not with_scores:
            return run(self._shape, inputs, work, sparse, relu=work != "train")
        (q, w, k), (starts, ends) = inputs.leaves, inputs.bounds
        with torch.no_grad():
            return dsa.fused_qk_topk_naive(q, k, w, self._shape.N, varlen_starts=starts, varlen_ends=ends)[0]

    def _errors(self, name: str, inputs: Any) -> dict[str, float]:
        """The worst rows of what the patched module gives."""
        expected, (index, loss, gradients) = self._expected[name], self._found(name, inputs)
        if loss is None:
            try:
                found, best = selected_scores(index, expected)
                return {"selected": worst_row(found, best)}
            except AssertionError:
                return {"selected": float("inf")}
        errors = {"loss": worst_row(loss[None], expected[1][None])}
        if gradients is not None:
            same_SB = (index.sort(-1).values == expected[0].sort(-1).values).all(-1).T
            for leaf, have, want in zip("qwk", gradients, expected[2], strict=True):
                rows = row_errors(have, want)
                errors[f"d{leaf}"] = float((rows[same_SB] if leaf != "k" and WORKS[name][1] else rows).max())
        return errors
