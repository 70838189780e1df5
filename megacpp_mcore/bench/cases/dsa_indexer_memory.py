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

import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import patched
from megacpp_mcore.bench.problem import OURS, PEER, PRECISIONS, Floor, Problem, Variant, Verdict
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.bench.table import GREEN, IS_STOCK, NO_STOCK
from megacpp_mcore.model.flops import causal_pairs, selected_pairs
from megacpp_mcore.ops.indexer.chunked import BLOCK_ELEMENTS

WORK = ("forward", "loss", "train")
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

    S, B = shape.S, shape.B
    leaves = (
        normal(S, B, shape.H, shape.D),
        normal(S, B, shape.H) * (shape.H * shape.D) ** -0.5,
        normal(S, B, shape.D),
    )
    return SimpleNamespace(
        leaves=tuple(leaf.requires_grad_() for leaf in leaves),
        query=normal(S, B, shape.A, shape.K),
        key=normal(S, B, 1, shape.K).expand(-1, -1, shape.A, -1),
        bounds=(torch.zeros(S, dtype=torch.int64, device=device), torch.arange(1, S + 1, device=device)),
    )


def run(shape: Shape, inputs: Any, work: str, sparse: bool, relu: bool = True) -> tuple[Any, Any, Any]:
    """One call through the module, patched or not: ``(indices, loss or None, gradients or None)``."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    q, w, k = inputs.leaves
    starts, ends = inputs.bounds
    if work == "forward":
        with torch.no_grad():
            scores, index = dsa.fused_qk_topk_naive(
                q, k, w, shape.N, varlen_starts=starts, varlen_ends=ends, use_relu=relu
            )
            del scores  # as DSAttention does
        return index, None, None
    scale = shape.K**-0.5
    with torch.set_grad_enabled(work == "train"):
        index, loss = dsa.FusedDSAIndexerLoss.apply(
            q, w, k, inputs.query, inputs.key, scale, shape.N, COEFFICIENT, None, sparse, ONE_RANK,
            starts, ends, None, None, False, relu,
        )  # fmt: skip
    return index, loss.detach(), torch.autograd.grad(loss, inputs.leaves) if work == "train" else None


def _piece(shape: Shape, work: str, sparse: bool, options: Options, inputs: Any) -> Problem:
    call = functools.partial(run, shape, work=work, sparse=sparse)
    name = work if work == "forward" else f"{work}, {'sparse' if sparse else 'dense'} loss"
    floor = Floor(
        operations=shape.operations(work, sparse),
        moved=shape.inputs(work) + shape.outputs(work),
        precision=PRECISIONS[options.dtype],
        result=shape.outputs(work),
    )
    return Problem(
        shape=options.shape,
        dtype=options.dtype,
        inputs=inputs,
        variants=[
            Variant(name=STOCK, side=PEER, runs={name: call}),
            Variant(name=PATCHED, side=OURS, runs={name: call}, around=functools.partial(patched, PATCH)),
        ],
        works={name: floor},
        judge=AgainstStock(shape, work, sparse),
        stock=STOCK,
        computed={STOCK: stock_bytes(shape, work), PATCHED: our_bytes(shape, work, sparse)},
    )


def problems(options: Options) -> Iterator[Problem]:
    """Each piece of work, with the sparse and with the dense loss."""
    sizes = options.shape
    dtype = getattr(torch, options.dtype)
    heads = (sizes["S"], sizes["B"], sizes["indexer_heads"], sizes["indexer_dim"], sizes["heads"])
    shape = Shape(*heads, sizes["latent"] + sizes["rope"], sizes["topk"], dtype.itemsize)
    inputs = draw(shape, options.device, dtype, seed=0)
    for sparse in (True, False):
        for work in WORK:
            if sparse or work != "forward":
                yield _piece(shape, work, sparse, options, inputs)


class AgainstStock:
    """Agreement with what the unpatched module gives, if that fits into memory."""

    def __init__(self, shape: Shape, work: str, sparse: bool) -> None:
        self._shape, self._work, self._sparse = shape, work, sparse
        self._expected: Any = None

    def prepare(self, inputs: Any) -> None:
        """Run stock, in the form that can be compared with."""
        try:
            self._expected = reference(self._shape, inputs, self._work, self._sparse)
            return
        except torch.cuda.OutOfMemoryError:
            pass  # the traceback holds tensors until here
        gc.collect()

    def verdict(self, variant: Variant, work: str, inputs: Any) -> Verdict:
        """Compare what runs now; stock itself is run once and not compared with itself."""
        if variant.name == STOCK:
            variant.runs[work](inputs)
            return Verdict(True, IS_STOCK)
        if self._expected is None:
            return Verdict(None, NO_STOCK)
        found = disagreement(self._shape, inputs, self._work, self._sparse, self._expected)
        return Verdict(not found, f"FAILS: {found}" if found else GREEN)


def reference(shape: Shape, inputs: Any, work: str, sparse: bool) -> Any:
    """What the unpatched module gives, to compare with; for ``forward`` with all scores, for ``train`` without ReLU.

    Some of so many logits round to the other side of ReLU's step, where gradients jump.
    """
    from megatron.core.transformer.experimental_attention_variant import dsa

    if work != "forward":
        return run(shape, inputs, work, sparse, relu=work == "loss")
    q, w, k = inputs.leaves
    starts, ends = inputs.bounds
    with torch.no_grad():
        return dsa.fused_qk_topk_naive(q, k, w, shape.N, varlen_starts=starts, varlen_ends=ends)


def disagreement(shape: Shape, inputs: Any, work: str, sparse: bool, expected: Any) -> str:
    """What the patched module gives differently, beyond rounding; empty if nothing.

    Selections may differ in keys whose scores equal the lowest selected one but for rounding. Gradients may by 1 % of a row's
    norm, in the worst row of those with the same selection.
    """
    found = run(shape, inputs, work, sparse, relu=work != "train")
    if work == "forward":
        score, index = expected
        return "" if _same_selection(score, index, found[0]) else "other keys are selected"
    if not torch.allclose(found[1], expected[1], rtol=1e-4, atol=0):
        return f"loss {found[1].item()} instead of {expected[1].item()}"
    if work == "loss":
        return ""
    same_BS = (found[0].sort(-1).values == expected[0].sort(-1).values).all(-1)
    for name, have, want in zip("qwk", found[2], expected[2], strict=True):
        error, norm = (have.double() - want.double()).norm(dim=-1), want.double().norm(dim=-1)
        ratio = error / norm.clamp_min(1e-2 * norm.square().mean().sqrt())
        if name != "k" and sparse:
            ratio = ratio[same_BS.T]
        if not float(ratio.max()) <= 1e-2:
            return f"gradient of {name}: worst row {float(ratio.max()):.1e} of its norm"
    return ""


def _same_selection(score: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor) -> bool:
    """Whether the same number of keys is selected, and each of ours scores at least the lowest of theirs, but for rounding."""
    if not torch.equal((ours >= 0).sum(-1), (theirs >= 0).sum(-1)):
        return False
    distinct = ours.sort(-1).values
    if bool(((distinct[..., 1:] == distinct[..., :-1]) & (distinct[..., 1:] >= 0)).any()):
        return False
    picked = [score.gather(-1, index.clamp_min(0)) for index in (ours, theirs)]
    mine, lowest = (values.masked_fill(theirs < 0, float("inf")).amin(-1) for values in picked)
    return bool((mine >= lowest - 1e-5 * lowest.abs() - 1e-6).all())
