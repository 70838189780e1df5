"""Time and peak memory of full MLA's core attention: stock Megatron, and with the patch mla-core-attention.

    python -m benchmarks.mla_core_attention --heads 56 --qk-width 128 --v-width 64 --batch 2 --length 4096

One run holds everything that is compared, called at the patch's seam with the same causal inputs. The outputs and gradients
on the first buffer are checked against float64, and a variant of ours that fails gets no time. Peak memory is that of
forward and backward, counted from the inputs on, results included. The floor is counted from the operations under the
causal mask and from the bytes that have to move.

Legend: S queries and keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measure import BYTES_PER_SECOND, Table, device_name, median_ms, one_process, peak_bytes, versions
from megacpp_mcore.patches.mla_core_attention import PATCH
from megacpp_mcore.patches.registry import Registry
from tests.parity.conditioning import EARLY, early_causal_terms

WORST_ROW = {"bfloat16": 5e-3, "float32": 4e-6}
"""The largest error of a row, relative to its norm; or half as much again as stock's, where that is more."""

Inputs = list[torch.Tensor]
"""q_SBHK, k_SBHK, v_SBHV, and the gradient of the output [S, B, H * V]."""

Run = Callable[[Inputs], torch.Tensor]

SPEED_UP = 4.0
"""What ours has to reach, forward and backward, at the default size on a GPU; where it does not, the run fails."""
SIZE = ("heads", "qk_width", "v_width", "batch", "length", "dtype", "device")


def main() -> int:
    """Run the benchmark; returns 1 if ours fails parity or misses the goal."""
    args = _arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("megacpp_mcore").setLevel(logging.INFO)
    table = Table(args.output, COLUMNS)
    registry = Registry([PATCH])
    with one_process(args.device):
        buffers = _draw(args)
        try:
            registry.apply([PATCH.name])  # stock's local module takes the widths only so
            attention = _attention(args)
            registry.revert()
            truth = _truth(buffers[0], attention.core_attention.softmax_scale)
            stock = _row("stock", attention, buffers, truth, args, None)
            registry.apply([PATCH.name])
            ours = _row("ours", attention, buffers, truth, args, stock)
        finally:
            registry.revert()
        rows, floor = [stock, ours], _floor(args)
        _print(args, rows, floor)
        table.append(*_rows(args, rows, floor))
        missed = _missed(args.goal, stock, ours)
        if missed:
            print(missed)
        return int("ms" not in ours or bool(missed))


def _missed(goal: float | None, stock: dict[str, Any], ours: dict[str, Any]) -> str:
    """By how much ours is below the goal; empty if it is not, or there is none."""
    if goal is None or "ms" not in ours:
        return ""
    gain = stock["ms"] / ours["ms"]
    return "" if gain >= goal else f"GOAL MISSED: forward and backward {gain:.2f}x as fast as stock, expected {goal:g}x"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=56)
    parser.add_argument("--qk-width", type=int, default=128)
    parser.add_argument("--v-width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--impl", choices=("transformer_engine", "local"), help="default: the former where it is there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--buffers", type=int, default=3, help="sets of random inputs to go round")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tflops", type=float, default=790.0, help="rate of large matrix products for this dtype")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/mla_core_attention.csv"))
    goal = f"speed-up below which the run fails; default: {SPEED_UP:g} at the default size on cuda, otherwise none"
    parser.add_argument("--goal", type=float, help=goal)
    args = parser.parse_args()
    if args.goal is None and all(getattr(args, name) == parser.get_default(name) for name in SIZE):
        args.goal = SPEED_UP
    if args.impl is None:
        engine = importlib.util.find_spec("transformer_engine") is not None and args.device == "cuda"
        args.impl = "transformer_engine" if engine else "local"
    return args


def _draw(args: argparse.Namespace) -> list[Inputs]:
    dtype, generator = getattr(torch, args.dtype), torch.Generator(args.device).manual_seed(1)
    shape = (args.length, args.batch, args.heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=args.device).to(dtype)

    widths = (args.qk_width, args.qk_width, args.v_width)
    buffers = []
    for _ in range(args.buffers):
        inputs = [normal(*shape, width).requires_grad_() for width in widths]
        buffers.append([*inputs, normal(*shape[:2], args.heads * args.v_width)])
    return buffers


def _attention(args: argparse.Namespace) -> Any:
    """What ``MultiLatentAttention._run_core_attention`` reads of its module: core attention, mask type, configuration."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=args.heads * args.v_width,
        num_attention_heads=args.heads,
        qk_head_dim=args.qk_width // 2,
        qk_pos_emb_head_dim=args.qk_width - args.qk_width // 2,
        v_head_dim=args.v_width,
        attention_dropout=0.0,
        bf16=args.dtype == "bfloat16",
        params_dtype=getattr(torch, args.dtype),
        masked_softmax_fusion=False,
    )
    core = (TEDotProductAttention if args.impl == "transformer_engine" else DotProductAttention)(
        config=config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=args.qk_width**-0.5,
        k_channels=args.qk_width,
        v_channels=args.v_width,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return SimpleNamespace(core_attention=core.train(), attn_mask_type=AttnMaskType.causal, config=config)


def _truth(inputs: Inputs, softmax_scale: float) -> list[torch.Tensor]:
    from megacpp_mcore.ops.mla.reference import mla_attention

    double = [tensor.detach().double() for tensor in inputs]
    leaves = [tensor.requires_grad_() for tensor in double[:3]]
    output = mla_attention(*leaves, softmax_scale=softmax_scale).flatten(2)
    return [output.detach(), *torch.autograd.grad(output, leaves, double[3])]


def _row(
    name: str,
    attention: Any,
    buffers: Sequence[Inputs],
    truth: list[torch.Tensor],
    args: argparse.Namespace,
    stock: dict[str, Any] | None,
) -> dict[str, Any]:
    """Errors, and times and memory if those are within what is allowed."""
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    def forward(inputs: Inputs) -> torch.Tensor:
        run: Any = MultiLatentAttention._run_core_attention
        return run(attention, *inputs[:3], None)

    def both(inputs: Inputs) -> list[torch.Tensor]:
        output = forward(inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs[:3], inputs[3])]

    errors = _errors(both(buffers[0]), truth, buffers[0], args.qk_width**-0.5)
    if stock is not None:
        limits = [max(WORST_ROW[args.dtype], 1.5 * error) for error in stock["errors"]]
        if not all(error <= limit for error, limit in zip(errors, limits, strict=True)):
            return {"name": name, "errors": errors}
    return {
        "name": name,
        "errors": errors,
        "forward_ms": median_ms(forward, buffers, args.device, warmup=args.warmup, repeats=args.repeats),
        "ms": median_ms(both, buffers, args.device, warmup=args.warmup, repeats=args.repeats),
        "peak": peak_bytes(both, buffers[0], args.device),
    }


def _errors(found: list[torch.Tensor], truth: list[torch.Tensor], inputs: Inputs, softmax_scale: float) -> list[float]:
    """The worst row's relative error in output and gradients of q, k and v; a tiny row counts as 1 % of the RMS.

    In the gradient of the first queries everything cancels: they are measured against the terms that do.
    """
    errors: list[float] = []
    for have, want in zip(found, truth, strict=True):
        rows, error = want.flatten(0, 2) if want.dim() > 3 else want.flatten(0, 1), (have.double() - want)
        norm = want.norm(dim=-1).clamp(min=0.01 * float(rows.norm(dim=-1).square().mean().sqrt()))
        if len(errors) == 1:  # dq
            heads = inputs[0].shape[2]
            do = inputs[3].unflatten(-1, (heads, -1))
            norm[:EARLY] = early_causal_terms([*inputs[:3], do], softmax_scale)
        errors.append(float((error.norm(dim=-1) / norm).max()))
    return errors


def _floor(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds by operations and by bytes: the forward pass has 2 products, backward 5 (one of them made again)."""
    K, V, size = args.qk_width, args.v_width, torch.finfo(getattr(torch, args.dtype)).bits // 8
    rows = args.length * args.batch * args.heads
    pairs = rows * (args.length + 1) / 2
    forward, backward = 2 * pairs * (K + V), 2 * pairs * (3 * K + 2 * V)
    # q, k, v, o and a float32 log-sum-exp a row; backward reads those and the gradient of o, and writes three gradients.
    forward_bytes = rows * (size * (2 * K + 2 * V) + 4)
    backward_bytes = forward_bytes + rows * size * (V + 2 * K + V)
    return {
        "forward_operations_ms": forward / (args.tflops * 1e12) * 1e3,
        "operations_ms": (forward + backward) / (args.tflops * 1e12) * 1e3,
        "forward_bytes_ms": forward_bytes / BYTES_PER_SECOND * 1e3,
        "bytes_ms": (forward_bytes + backward_bytes) / BYTES_PER_SECOND * 1e3,
    }


def _print(args: argparse.Namespace, rows: Sequence[dict[str, Any]], floor: dict[str, float]) -> None:
    print(
        f"B {args.batch} x S {args.length}, {args.heads} heads, {args.qk_width}/{args.v_width}, causal, {args.dtype}, "
        f"{args.impl}, {device_name(args.device)}"
    )
    print(f"{'':<8}{'forward ms':>12}{'both ms':>10}{'speed-up':>10}{'peak MB':>10}   worst row: o, dq, dk, dv")
    for row in rows:
        errors = ", ".join(f"{error:.1e}" for error in row["errors"])
        if "ms" not in row:
            print(f"{row['name']:<8}{'PARITY FAILS, not timed':>42}   {errors}")
            continue
        peak = "-" if row["peak"] is None else f"{row['peak'] / 1e6:.1f}"
        gain = f"{rows[0]['ms'] / row['ms']:.2f}x"
        print(f"{row['name']:<8}{row['forward_ms']:>12.3f}{row['ms']:>10.3f}{gain:>10}{peak:>10}   {errors}")
    print(
        f"floor: forward {floor['forward_operations_ms']:.3f}, both {floor['operations_ms']:.3f} ms by operations at "
        f"{args.tflops:g} TFLOP/s; {floor['forward_bytes_ms']:.3f} and {floor['bytes_ms']:.3f} ms by bytes at 4.2 TB/s"
    )


COLUMNS = (
    "variant", "implementation", "device", "batch", "length", "heads", "qk_width", "v_width", "dtype",
    "forward_ms", "forward_backward_ms", "peak_bytes", "worst_row_o", "worst_row_dq", "worst_row_dk", "worst_row_dv",
    "floor_forward_operations_ms", "floor_operations_ms", "floor_forward_bytes_ms", "floor_bytes_ms",
    "torch", "megatron-core", "transformer-engine", "commit", "cudnn",
)  # fmt: skip


def _rows(args: argparse.Namespace, rows: Sequence[dict[str, Any]], floor: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "variant": row["name"],
            "implementation": args.impl,
            "device": device_name(args.device),
            "batch": args.batch,
            "length": args.length,
            "heads": args.heads,
            "qk_width": args.qk_width,
            "v_width": args.v_width,
            "dtype": args.dtype,
            "forward_ms": f"{row['forward_ms']:.4f}" if "ms" in row else "",
            "forward_backward_ms": f"{row['ms']:.4f}" if "ms" in row else "",
            "peak_bytes": row["peak"] if row.get("peak") is not None else "",
            **{
                f"worst_row_{name}": f"{error:.2e}"
                for name, error in zip(("o", "dq", "dk", "dv"), row["errors"], strict=True)
            },
            **{f"floor_{name}": f"{value:.4f}" for name, value in floor.items()},
            **versions("transformer-engine"),
            "cudnn": torch.backends.cudnn.version() if args.device == "cuda" else "",
        }
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
