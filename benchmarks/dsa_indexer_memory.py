"""Peak memory and time of the DSA indexer, stock Megatron's fallback against the patch dsa-indexer-memory, in one run.

    python -m benchmarks.dsa_indexer_memory --sq 4096 16384 --output benchmarks/results/dsa_indexer_memory_h200.csv

Three pieces of work: ``forward`` (scores and top-k), ``loss`` (forward with the KL loss), ``train`` (loss, and its backward
pass). Bytes are the peak above what was allocated before the call, so they hold outputs and temporaries; ``computed`` are
the same counted by hand (:func:`stock_bytes`; :func:`our_bytes` is a bound). The floor is what no implementation can do
without: outputs for memory; for time the greater of multiply-adds at the GPU's float32 rate, counted as ``--tflops``, and of
inputs and outputs at ``--tbytes``. No ratio is printed for a piece of work unless its result (selection, loss, gradients)
agrees with stock's in this run. Where stock runs out of memory there is nothing to agree with: the row says so, and what
the ratio is of.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measure import Table, device_name, median_ms, peak_bytes, versions
from megacpp_mcore.ops.indexer.chunked import BLOCK_ELEMENTS
from megacpp_mcore.patches.dsa_indexer_memory import PATCH
from megacpp_mcore.patches.registry import Registry

WORK = ("forward", "loss", "train")
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
COEFFICIENT = 0.001
TIMES_LESS = 20.0
"""What the patch has to save, in every piece of work at :data:`GOAL_LENGTH` and the default shape, or the run fails."""
GOAL_LENGTH = 16384
SHAPE = ("batch", "heads", "dim", "attention_heads", "latent", "rope", "topk", "device")


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
    def inputs(self) -> int:
        """Bytes of the indexer's q, k and weights and of the attention's query and key."""
        numbers = self.H * self.D + self.D + self.H + self.A * self.K + self.K
        return self.S * self.B * numbers * self.itemsize

    def outputs(self, work: str) -> int:
        """Bytes of the int64 indices, and of the gradients of q, k and weights."""
        gradients = self.S * self.B * (self.H * self.D + self.D + self.H) * self.itemsize
        return self.S * self.B * self.N * 8 + (gradients if work == "train" else 0)

    def operations(self, work: str, sparse: bool) -> int:
        """Multiply-adds, two each: scores, the target's logits, and of the gradient three products as large as the scores."""
        keys = self.N if sparse else self.S
        score, row = 2 * self.S * self.B * self.S * self.H * self.D, 2 * self.S * self.B * keys
        target, gradient = row * self.A * self.K, 3 * row * self.H * self.D
        return score + (target if work != "forward" else 0) + (target + gradient if work == "train" else 0)


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


@dataclass(frozen=True)
class Measured:
    """Peak bytes above what was there (None: not measurable here), and median milliseconds."""

    peak: int | None
    ms: float


def measure(call: Callable[[Any], Any], sets: list[Any], device: str, repeat: int) -> Measured | None:
    """Warm up, then time ``repeat`` calls over rotating inputs; None where the GPU runs out of memory."""

    def whole() -> Measured:
        call(sets[0])
        peak = peak_bytes(call, sets[-1], device)
        return Measured(peak, median_ms(call, sets, device, warmup=0, repeats=repeat))

    return _unless_out_of_memory(whole)


def _unless_out_of_memory(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        pass  # the traceback holds tensors until here
    gc.collect()
    torch.cuda.empty_cache()
    return None


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


def main() -> int:
    """Run all sizes and print the table; 1 if something disagrees, or the goal is missed."""
    args = _arguments()
    table = Table(args.output, COLUMNS)
    registry, rows = Registry([PATCH]), []
    print("  ".join(f"{name:>14}" for name in PRINTED), flush=True)
    for S in args.sq:
        shape = Shape(S, args.batch, args.heads, args.dim, args.attention_heads, args.latent + args.rope, args.topk)
        sets = [draw(shape, args.device, torch.bfloat16, seed) for seed in range(args.sets)]
        for work, sparse in (
            (work, sparse) for sparse in (True, False) for work in WORK if sparse or work != "forward"
        ):
            rows += compare(shape, sets, work, sparse, registry, args)
    table.append(*rows)
    failed = missed(rows, args.goal, args.goal_lengths)
    print(*failed, sep="\n", end="\n" if failed else "")
    return int(any(row["parity"] not in (_AGREES, _NO_STOCK) for row in rows) or bool(failed))


def missed(rows: list[dict[str, Any]], goal: float | None, lengths: list[int]) -> list[str]:
    """One line for each piece of work at ``lengths`` whose peak is not ``goal`` times less than stock's.

    Where stock ran out of memory, than its computed bytes.
    """
    found = []
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        if goal is None or ours["sq"] not in lengths:
            continue
        theirs = stock["computed_bytes"] if stock["peak_bytes"] == _OUT_OF_MEMORY else stock["peak_bytes"]
        if ours["peak_bytes"] == _OUT_OF_MEMORY or theirs < goal * ours["peak_bytes"]:
            found.append(
                f"GOAL MISSED: sq {ours['sq']}, {ours['work']}, loss {ours['loss']}: {ours['peak_bytes']} bytes, expected "
                f"at least {goal:g}x less than {theirs}"
            )
    return found


def compare(
    shape: Shape, sets: list[Any], work: str, sparse: bool, registry: Registry, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Check, measure and print one piece of work: a row for stock and one for the patched module."""
    call = functools.partial(run, shape, work=work, sparse=sparse)
    expected = _unless_out_of_memory(lambda: reference(shape, sets[0], work, sparse))
    theirs = measure(call, sets, args.device, args.repeat)
    registry.apply([PATCH.name])
    try:
        found = _NO_STOCK if expected is None else disagreement(shape, sets[0], work, sparse, expected) or _AGREES
        del expected
        ours = measure(call, sets, args.device, args.repeat)
    finally:
        registry.revert()
    operations = shape.operations(work, sparse) / (args.tflops * 1e12)
    floor_ms = 1e3 * max(operations, (shape.inputs + shape.outputs(work)) / (args.tbytes * 1e12))
    common = {
        "sq": shape.S,
        "work": work,
        "loss": "-" if work == "forward" else "sparse" if sparse else "dense",
        "floor_bytes": shape.outputs(work),
        "floor_ms": f"{floor_ms:.3f}",
        "parity": found,
        **{name: getattr(shape, name) for name in "BHDAKN"},
        "input_bytes": shape.inputs,
        "gpu": device_name(args.device),
        **versions(),
    }
    rows = []
    for who, measured, computed in (
        ("stock", theirs, stock_bytes(shape, work)),
        ("patched", ours, our_bytes(shape, work, sparse)),
    ):
        rows.append(
            common
            | {
                "who": who,
                "peak_bytes": _OUT_OF_MEMORY if measured is None else measured.peak or "",
                "computed_bytes": computed,
                "ms": "" if measured is None else f"{measured.ms:.3f}",
                "less": _ratio(theirs, ours, computed=stock_bytes(shape, work), parity=found)
                if who == "patched"
                else "",
            }
        )
        print("  ".join(f"{rows[-1][name]!s:>14}" for name in PRINTED), flush=True)
    return rows


PRINTED = (
    "sq", "work", "loss", "who", "peak_bytes", "computed_bytes", "floor_bytes", "ms", "floor_ms", "less", "parity",
)  # fmt: skip
COLUMNS = (*PRINTED, *"BHDAKN", "input_bytes", "gpu", "torch", "megatron-core", "commit")
_AGREES, _NO_STOCK, _OUT_OF_MEMORY = "agrees", "no stock to compare with", "out of memory"


def _ratio(theirs: Measured | None, ours: Measured | None, *, computed: int, parity: str) -> str:
    """How many times less memory; of stock's computed bytes where stock itself ran out of memory."""
    if ours is None or ours.peak is None or parity not in (_AGREES, _NO_STOCK):
        return ""
    if theirs is None:
        return f"{computed / ours.peak:.0f}x of computed"
    return f"{(theirs.peak or 0) / ours.peak:.1f}x" if parity == _AGREES else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sq", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32, help="indexer heads")
    parser.add_argument("--dim", type=int, default=64, help="indexer head width")
    parser.add_argument("--attention-heads", type=int, default=56)
    parser.add_argument("--latent", type=int, default=64, help="kv_lora_rank")
    parser.add_argument("--rope", type=int, default=64, help="qk_pos_emb_head_dim")
    parser.add_argument("--topk", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sets", type=int, default=2, help="input sets to rotate over")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tflops", type=float, default=67.0, help="float32 rate of the GPU, for the floor (H200: 67)")
    parser.add_argument("--tbytes", type=float, default=4.2, help="memory bandwidth in TB/s, for the floor")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/dsa_indexer_memory.csv"))
    goal = f"times less memory below which the run fails, at every --sq; default: {TIMES_LESS:g} at {GOAL_LENGTH} with the "
    parser.add_argument("--goal", type=float, help=f"{goal}default shape on cuda, otherwise none")
    args = parser.parse_args()
    if args.goal is not None and args.device != "cuda":
        parser.error("--goal is about peak memory, which is measured with --device cuda")
    args.goal_lengths = [GOAL_LENGTH] if args.goal is None else args.sq
    if args.goal is None and all(getattr(args, name) == parser.get_default(name) for name in SHAPE):
        args.goal = TIMES_LESS
    return args


if __name__ == "__main__":
    sys.exit(main())
