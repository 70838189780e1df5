"""Peak memory and time of the DSA indexer: stock Megatron's fallback, with and without the patch dsa-indexer-memory.

Pieces of work: ``forward`` (scores and top-k), ``loss`` (forward with the KL loss, over selected keys only or over all),
``train`` (loss and its backward pass). Bytes are the peak above what was allocated before the call, so they include outputs
and temporaries; computed bytes are stock's, counted by hand (:func:`stock_bytes`). The floor is a bound for every
implementation: for memory the outputs; for time the greater of moving inputs and outputs, and of the multiply-adds of
causal pairs at the GPU's rate for products of the inputs' dtype (stock computes in float32; so does the patch, but for the
16-bit products of the scores' kernel). Where stock runs out of memory there is nothing to agree with: the row says so, and
what its ratio is relative to.

Legend: S queries and keys, B batch, H indexer heads of D, A attention heads of K (one key head), N selected keys.
"""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from types import SimpleNamespace

import torch

from megacpp_mcore.bench.cases.indexer import SELECTED, selected_scores
from megacpp_mcore.bench.cases.peers import patched
from megacpp_mcore.bench.parity import judged
from megacpp_mcore.bench.problem import PRECISIONS, Draw, Floor, Inputs, Problem, Result, Variant
from megacpp_mcore.bench.registry import OURS, PEER, Options
from megacpp_mcore.bench.table import IS_STOCK, NO_STOCK
from megacpp_mcore.model.flops import causal_pairs, selected_pairs
from megacpp_mcore.ops.testing import row_errors, worst_row

WORKS = {
    "forward": ("forward", True),
    **{f"{work}, {kind} loss": (work, kind == "sparse") for kind in ("sparse", "dense") for work in ("loss", "train")},
}
"""The pieces of work, and whether each has the loss over selected keys only."""
LIMITS = {"selected": SELECTED, "loss": 1e-4, "dq": 1e-2, "dw": 1e-2, "dk": 1e-2}
"""The largest error of a row."""
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
COEFFICIENT = 0.001
PATCH = "dsa-indexer-memory"
STOCK, PATCHED = "stock", f"patch {PATCH}"


def floor(options: Options, name: str) -> Floor:
    """What a piece of work reads, writes and computes, each counted once.

    Scores are of causal pairs, two operations per multiply-add; without a loss, only queries with more keys than are selected
    count. The target's logits, and two products of the gradient (of q and of k), are of the selected pairs, or of all for the
    dense loss. Read are the indexer's q, k and weights, and with the loss attention's query and key; written are int64
    indices, and the gradients of q, k and weights.
    """
    S, B, H, D, A, N = options.sizes("S", "B", "indexer_heads", "indexer_dim", "heads", "topk")
    (work, sparse), K, itemsize = WORKS[name], sum(options.sizes("latent", "rope")), Draw(options).itemsize
    causal, N = causal_pairs(S), min(N, S)
    queries, attention = S, S * (A * K + K)
    if work == "forward":
        queries, attention = S - N, 0
        operations = (causal - causal_pairs(N)) * H * D
    else:
        reached = selected_pairs(S, N) if sparse else causal
        operations = (causal + (2 * reached if work == "train" else 0)) * H * D + reached * A * K
    read = B * (queries * (H * D + H) + (S * D if queries else 0) + attention) * itemsize
    gradients = S * B * (H * D + D + H) * itemsize if work == "train" else 0
    written = S * B * N * 8 + gradients
    return Floor(
        operations=2 * B * operations, moved=read + written, precision=PRECISIONS[options.dtype], result=written
    )


def stock_bytes(options: Options, work: str) -> int:
    """Peak of stock's temporaries, counted by hand, the largest tensors only.

    ``forward``: the product q·k and its ReLU, both [sq, b, h, sk] float32. With the loss: the attention scores, their masked
    copy, the difference from the row's maximum and its exponential, four [b, heads, sq, sk] float32 tensors (or two indexer
    tensors, if larger), plus index scores, selection mask and valid mask.
    """
    S, B, H, A = options.sizes("S", "B", "indexer_heads", "heads")
    pairs = 4 * B * S * S
    return 2 * H * pairs if work == "forward" else max(2 * H, 4 * A + 2) * pairs


def draw(options: Options) -> Inputs:
    """Random inputs with causal bounds; the indexer's inputs get gradients."""
    S, B, H, D, A = options.sizes("S", "B", "indexer_heads", "indexer_dim", "heads")
    K, drawn = sum(options.sizes("latent", "rope")), Draw(options, seed=0)
    q, w = drawn.normal(S, B, H, D), drawn.normal(S, B, H, scale=(H * D) ** -0.5)
    leaves = drawn.leaves(q=q, w=w, k=drawn.normal(S, B, D))
    starts, ends = torch.zeros(S, dtype=torch.int64), torch.arange(1, S + 1)
    return Inputs(
        leaves=leaves,
        fixed={
            "query": drawn.normal(S, B, A, K),
            "key": drawn.normal(S, B, 1, K).expand(-1, -1, A, -1),
            "bounds": (starts.to(options.device), ends.to(options.device)),
            "topk": options.shape["topk"],
        },
    )


def run(inputs: Inputs, name: str, relu: bool = True, with_scores: bool = False) -> dict[str, torch.Tensor]:
    """Call the module, patched or not: returns its indices (or all scores of ``forward``), the loss, the gradients."""
    from megatron.core.transformer.experimental_attention_variant import dsa

    (work, sparse), leaves = WORKS[name], [*inputs.leaves.values()]
    (q, w, k), (query, key, (starts, ends), topk) = leaves, inputs.fixed.values()
    if work == "forward":
        with torch.no_grad():
            made = dsa.fused_qk_topk_naive(q, k, w, topk, use_relu=relu, varlen_starts=starts, varlen_ends=ends)
            return {"index": made[0 if with_scores else 1]}
    with torch.set_grad_enabled(work == "train"):
        index, loss = dsa.FusedDSAIndexerLoss.apply(
            q, w, k, query, key, query.shape[-1] ** -0.5, topk, COEFFICIENT, None, sparse, ONE_RANK,
            starts, ends, None, None, False, relu,
        )  # fmt: skip
    gradients = torch.autograd.grad(loss, leaves) if work == "train" else ()
    return {"index": index, "loss": loss.detach()[None], **dict(zip(("dq", "dw", "dk"), gradients, strict=False))}


def problem(options: Options) -> Problem:
    """Each piece of work, with the sparse and with the dense loss."""
    inputs, runs = draw(options), {name: partial(run, name=name) for name in WORKS}
    return Problem(
        inputs=inputs,
        variants=[
            Variant(name=STOCK, side=PEER, runs=runs),
            Variant(name=PATCHED, side=OURS, runs=runs, around=partial(patched, PATCH)),
        ],
        works={name: floor(options, name) for name in WORKS},
        check=AgainstStock(inputs),
        stock=STOCK,
        computed={(STOCK, name): stock_bytes(options, work) for name, (work, _) in WORKS.items()},
    )


class AgainstStock:
    """Agreement with the unpatched module's results, where that fits into memory.

    Selections may differ in keys whose scores are equal up to rounding; gradients are compared where they do not. They are
    computed without ReLU: among so many logits, some round to the other side of its step, where gradients jump. Then scores are
    PyTorch's; those of the kernel are in ``forward`` and ``loss``.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._expected: dict[str, dict[str, torch.Tensor]] = {}
        for name, (work, _) in WORKS.items():
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self._expected[name] = run(inputs, name, relu=work != "train", with_scores=True)
            gc.collect()  # frees what the traceback held

    def __call__(self, variant: Variant, name: str, inputs: Inputs) -> Result:
        """Compare the variant now running; stock itself is run once and not compared with itself."""
        if variant.name == STOCK:
            variant.runs[name](inputs)
            return Result(True, IS_STOCK)
        if name not in self._expected:
            return Result(None, NO_STOCK)
        work, sparse = WORKS[name]
        found, expected = run(inputs, name, relu=work != "train"), self._expected[name]
        if work == "forward":
            try:
                chosen, best = selected_scores(found["index"], expected["index"])
                return judged({"selected": worst_row(chosen, best)}, LIMITS)
            except AssertionError:
                return judged({"selected": float("inf")}, LIMITS)
        index, true_index = found.pop("index"), expected["index"]
        same_SB = (index.sort(-1).values == true_index.sort(-1).values).all(-1).T
        errors = {}
        for result, have in found.items():
            rows = row_errors(have, expected[result])
            errors[result] = float((rows[same_SB] if result in ("dq", "dw") and sparse else rows).max())
        return judged(errors, LIMITS)
