"""Peak memory and time of the DSA indexer: stock Megatron's fallback, with and without the patch dsa-indexer-memory.

Pieces of work: ``forward`` (scores and top-k), ``loss`` (forward with the KL loss, of selected keys alone or of all), ``train``
(loss, and its backward pass). Bytes are the peak above what was allocated before the call, so they hold outputs and
temporaries; those computed are stock's, counted by hand (:func:`stock_bytes`). The floor is what
no implementation can do without: outputs for memory; for time the greater of inputs and outputs, and of the multiply-adds of
causal pairs at the GPU's rate for products of the inputs' dtype (both sides compute in float32). Where stock runs out of
memory there is nothing to agree with: the row says so, and what its ratio is of.

Legend: S queries and keys, B batch, H indexer heads of D, A attention heads of K (one key head), N selected keys.
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
from megacpp_mcore.bench.problem import PRECISIONS, Draw, Floor, Problem, Variant, Verdict
from megacpp_mcore.bench.registry import OURS, PEER, Options
from megacpp_mcore.bench.table import IS_STOCK, NO_STOCK
from megacpp_mcore.model.flops import causal_pairs, selected_pairs
from megacpp_mcore.ops.testing import row_errors, worst_row

WORKS = {
    "forward": ("forward", True),
    **{f"{work}, {kind} loss": (work, kind == "sparse") for kind in ("sparse", "dense") for work in ("loss", "train")},
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
    """One size, and what its pieces of work read, write and compute."""

    S: int
    B: int
    H: int
    D: int
    A: int
    K: int
    N: int
    itemsize: int = 2

    def inputs(self, work: str) -> int:
        """Bytes of the indexer's q, k and weights, of queries that need scores; with the loss, of attention's query and key."""
        queries = self.S - (min(self.N, self.S) if work == "forward" else 0)
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
        if work == "forward":
            return 2 * self.B * (causal - causal_pairs(min(self.N, self.S))) * self.H * self.D
        reached = selected_pairs(self.S, self.N) if sparse else causal
        scored = causal + (2 * reached if work == "train" else 0)
        return 2 * self.B * (scored * self.H * self.D + reached * self.A * self.K)


def stock_bytes(shape: Shape, work: str) -> int:
    """Peak of stock's temporaries, counted by hand, the largest tensors only.

    ``forward``: the product q·k and its ReLU, both [sq, b, h, sk] float32. With the loss: the attention scores, their masked
    copy, the difference from the row's maximum and its exponential, four [b, heads, sq, sk] float32 tensors (two indexer
    ones, if these are more), with index scores, selection mask and valid mask beside them.
    """
    pairs = 4 * shape.B * shape.S * shape.S
    forward = 2 * shape.H * pairs
    return forward if work == "forward" else max(forward, (4 * shape.A + 2) * pairs)


def draw(shape: Shape, options: Options) -> Any:
    """Random inputs, causal bounds and the leaves that get gradients."""
    S, B, drawn = shape.S, shape.B, Draw(options, seed=0)
    scale = (shape.H * shape.D) ** -0.5
    q, w = drawn.normal(S, B, shape.H, shape.D), drawn.normal(S, B, shape.H, scale=scale)
    leaves = drawn.leaves(q=q, w=w, k=drawn.normal(S, B, shape.D))
    starts, ends = torch.zeros(S, dtype=torch.int64), torch.arange(1, S + 1)
    return SimpleNamespace(
        leaves=tuple(leaves.values()),
        query=drawn.normal(S, B, shape.A, shape.K),
        key=drawn.normal(S, B, 1, shape.K).expand(-1, -1, shape.A, -1),
        bounds=(starts.to(options.device), ends.to(options.device)),
    )


def run(
    shape: Shape, inputs: Any, work: str, sparse: bool, relu: bool = True, with_scores: bool = False
) -> tuple[Any, Any, Any]:
    """One call through the module, patched or not.

    Returns:
        Indices (or of ``forward``, where they are wanted, all scores), the loss or None, the gradients of q, w and k or None.
    """
    from megatron.core.transformer.experimental_attention_variant import dsa

    (q, w, k), (starts, ends) = inputs.leaves, inputs.bounds
    if work == "forward":
        with torch.no_grad():
            bounds = {"varlen_starts": starts, "varlen_ends": ends}
            return (
                dsa.fused_qk_topk_naive(q, k, w, shape.N, use_relu=relu, **bounds)[0 if with_scores else 1],
                None,
                None,
            )
    with torch.set_grad_enabled(work == "train"):
        index, loss = dsa.FusedDSAIndexerLoss.apply(
            q, w, k, inputs.query, inputs.key, shape.K**-0.5, shape.N, COEFFICIENT, None, sparse, ONE_RANK,
            starts, ends, None, None, False, relu,
        )  # fmt: skip
    return index, loss.detach(), torch.autograd.grad(loss, inputs.leaves) if work == "train" else None


def problem(options: Options) -> Problem:
    """Each piece of work, with the sparse and with the dense loss."""
    S, B, H, D, A, N = options.sizes("S", "B", "indexer_heads", "indexer_dim", "heads", "topk")
    shape = Shape(S, B, H, D, A, sum(options.sizes("latent", "rope")), N, Draw(options).itemsize)
    inputs = draw(shape, options)
    runs = {name: partial(run, shape, work=work, sparse=sparse) for name, (work, sparse) in WORKS.items()}
    works = {
        name: Floor(
            operations=shape.operations(work, sparse),
            moved=shape.inputs(work) + shape.outputs(work),
            precision=PRECISIONS[options.dtype],
            result=shape.outputs(work),
        )
        for name, (work, sparse) in WORKS.items()
    }
    return Problem(
        inputs=inputs,
        variants=[
            Variant(name=STOCK, side=PEER, runs=runs),
            Variant(name=PATCHED, side=OURS, runs=runs, around=partial(patched, PATCH)),
        ],
        works=works,
        check=AgainstStock(shape, inputs),
        stock=STOCK,
        computed={(STOCK, name): stock_bytes(shape, work) for name, (work, _) in WORKS.items()},
    )


class AgainstStock:
    """Agreement with what the unpatched module gives, where that fits into memory.

    Selections may differ in keys whose scores are equal but for rounding; gradients are compared where they do not. They are
    computed without ReLU: of so many logits some round to the other side of its step, where gradients jump.
    """

    def __init__(self, shape: Shape, inputs: Any) -> None:
        self._shape = shape
        self._expected: dict[str, tuple[Any, Any, Any]] = {}
        for name, (work, sparse) in WORKS.items():
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self._expected[name] = run(shape, inputs, work, sparse, relu=work != "train", with_scores=True)
            gc.collect()  # what the traceback held

    def __call__(self, variant: Variant, name: str, inputs: Any) -> Verdict:
        """Compare what runs now; stock itself is run once and not compared with itself."""
        if variant.name == STOCK:
            variant.runs[name](inputs)
            return Verdict(True, IS_STOCK)
        if name not in self._expected:
            return Verdict(None, NO_STOCK)
        work, sparse = WORKS[name]
        index, loss, gradients = run(self._shape, inputs, work, sparse, relu=work != "train")
        expected, expected_loss, expected_gradients = self._expected[name]
        if loss is None:
            try:
                found, best = selected_scores(index, expected)
                return judged({"selected": worst_row(found, best)}, LIMITS)
            except AssertionError:
                return judged({"selected": float("inf")}, LIMITS)
        errors = {"loss": worst_row(loss[None], expected_loss[None])}
        if gradients is not None:
            same_SB = (index.sort(-1).values == expected.sort(-1).values).all(-1).T
            for leaf, have, want in zip("qwk", gradients, expected_gradients, strict=True):
                rows = row_errors(have, want)
                errors[f"d{leaf}"] = float((rows[same_SB] if leaf != "k" and sparse else rows).max())
        return judged(errors, LIMITS)
