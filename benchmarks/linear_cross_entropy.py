"""Time and peak memory of the output head's losses: stock Megatron, ours, and Liger where it is installed.

    python -m benchmarks.linear_cross_entropy --tokens 8192 --hidden 3584 --vocab 65536

One run holds everything that is compared. Each variant makes per-token losses and the gradients of hidden and weight for
random weights of the tokens; its parity with float64 is checked on the first buffer, and a variant that fails it gets no
time. Peak memory is counted from the inputs on, results included. The floor is three dense products: counted, from the
operations and from the bytes that have to move, and measured.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import BYTES_PER_SECOND, Table, device_name, median_ms, one_process, peak_bytes, versions

WORST_ROW = {"bfloat16": 5e-3, "float32": 2e-6}
"""The largest error of a row, relative to its norm; or half as much again as stock's, where that is more."""

Outcome = tuple[torch.Tensor, ...]
"""Losses, gradient of hidden, gradient of weight."""


@dataclass(frozen=True)
class Inputs:
    """One set of random inputs: N tokens, H hidden width, V vocabulary."""

    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    label_N: torch.Tensor
    cotangent_N: torch.Tensor


@dataclass(frozen=True)
class Variant:
    """One implementation of losses and gradients."""

    name: str
    run: Callable[[Inputs], Outcome]
    uniform: bool = False  # right for equal weights of all tokens only


def main() -> int:
    """Run the benchmark; returns 1 if a variant of ours fails parity."""
    args = _arguments()
    table = Table(args.output, COLUMNS)
    with one_process(args.device):
        buffers = _draw(args)
        variants = _variants(args, buffers[0])
        truth = _truth(buffers[0], args.device)
        rows: list[dict[str, Any]] = []
        failed = False
        for variant in variants:
            error = _errors(variant, buffers[0], truth)
            limit = [max(WORST_ROW[args.dtype], 1.5 * value) for value in (rows[0]["errors"] if rows else error)]
            right = all(value <= most for value, most in zip(error, limit, strict=True))
            failed |= not right and variant.name.startswith("ours")
            rows.append({"name": variant.name, "errors": error, **(_measure(variant, buffers, args) if right else {})})
        floor = _floor(args, buffers)
        _print(args, rows, floor)
        table.append(*_rows(args, rows, floor))
        return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--buffers", type=int, default=3, help="sets of random inputs to go round")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tflops", type=float, default=989.0, help="dense rate of the device for this dtype")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/linear_cross_entropy.csv"))
    return parser.parse_args()


def _draw(args: argparse.Namespace) -> list[Inputs]:
    dtype, generator = getattr(torch, args.dtype), torch.Generator(args.device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=args.device)

    weight_VH = (normal(args.vocab, args.hidden) * args.hidden**-0.5).to(dtype).requires_grad_()
    buffers = []
    for _ in range(args.buffers):
        label_N = torch.randint(args.vocab, (args.tokens,), generator=generator, device=args.device)
        hidden_NH = normal(args.tokens, args.hidden).to(dtype).requires_grad_()
        buffers.append(Inputs(hidden_NH, weight_VH, label_N, normal(args.tokens)))
    return buffers


def _variants(args: argparse.Namespace, inputs: Inputs) -> list[Variant]:
    stock, fused = _stock(args, inputs.weight_VH)
    variants = [Variant("stock", stock), Variant("stock, fused cross-entropy", fused)]
    variants += [
        Variant("ours", _ours),
        Variant("ours, main_grad", _ours_into(torch.zeros_like(inputs.weight_VH).float())),
    ]
    if importlib.util.find_spec("liger_kernel") is not None:
        variants.append(Variant("Liger (mean only)", _liger, uniform=True))
    return variants


def _stock(args: argparse.Namespace, weight_VH: torch.Tensor) -> tuple[Callable[[Inputs], Outcome], ...]:
    """ColumnParallelLinear with each of the two cross-entropies that Megatron has."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.hidden,
        num_attention_heads=1,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    head = ColumnParallelLinear(
        args.hidden, args.vocab, config=config, init_method=torch.nn.init.zeros_, bias=False, skip_weight_param_allocation=True
    )  # fmt: skip
    group = parallel_state.get_tensor_model_parallel_group()

    def run(inputs: Inputs, loss_of: Callable[..., torch.Tensor]) -> Outcome:
        logits, _ = head(inputs.hidden_NH[:, None], weight=weight_VH)
        loss = loss_of(logits, inputs.label_N[:, None], tp_group=group)
        return _with_gradients(loss[:, 0], inputs)

    return (
        lambda inputs: run(inputs, vocab_parallel_cross_entropy),
        lambda inputs: run(inputs, fused_vocab_parallel_cross_entropy),
    )


def _ours(inputs: Inputs) -> Outcome:
    from megacpp_mcore.ops.linear_cross_entropy.chunked import linear_cross_entropy

    return _with_gradients(linear_cross_entropy(inputs.hidden_NH, inputs.weight_VH, inputs.label_N).loss, inputs)


def _ours_into(buffer_VH: torch.Tensor) -> Callable[[Inputs], Outcome]:
    """As with fused accumulation: the weight's gradient is added to a float32 buffer that is there anyway.

    The first call, which is the check of parity, finds it zero.
    """
    from megacpp_mcore.ops.linear_cross_entropy.chunked import MainGrad, linear_cross_entropy

    def run(inputs: Inputs) -> Outcome:
        sink = MainGrad(buffer_VH, lambda: None)
        loss = linear_cross_entropy(inputs.hidden_NH, inputs.weight_VH, inputs.label_N, main_grad=sink).loss
        leaves = (inputs.hidden_NH, inputs.weight_VH)
        grad_hidden, _ = torch.autograd.grad(loss, leaves, inputs.cotangent_N, allow_unused=True)
        return loss.detach(), grad_hidden, buffer_VH

    return run


def _liger(inputs: Inputs) -> Outcome:
    functional = importlib.import_module("liger_kernel.transformers.functional")
    loss = functional.liger_fused_linear_cross_entropy(
        inputs.hidden_NH, inputs.weight_VH, inputs.label_N, reduction="mean"
    )
    return (loss.detach(), *torch.autograd.grad(loss, (inputs.hidden_NH, inputs.weight_VH)))


def _with_gradients(loss_N: torch.Tensor, inputs: Inputs) -> Outcome:
    leaves = (inputs.hidden_NH, inputs.weight_VH)
    return (loss_N.detach(), *torch.autograd.grad(loss_N, leaves, inputs.cotangent_N))


def _truth(inputs: Inputs, device: str) -> dict[bool, Outcome]:
    """In float64, for the tokens' own weights and (``True``) for the mean."""
    found: dict[bool, Outcome] = {}
    for uniform in (False, True):
        leaves = [tensor.detach().double().requires_grad_() for tensor in (inputs.hidden_NH, inputs.weight_VH)]
        logit = leaves[0] @ leaves[1].t()
        loss = torch.nn.functional.cross_entropy(logit, inputs.label_N, reduction="mean" if uniform else "none")
        del logit
        cotangent = None if uniform else inputs.cotangent_N.double()
        found[uniform] = (loss.detach(), *torch.autograd.grad(loss, leaves, cotangent))
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def _errors(variant: Variant, inputs: Inputs, truth: dict[bool, Outcome]) -> list[float]:
    """The worst row's relative error in losses and gradients of hidden and weight; a tiny row counts as 1 % of the RMS."""
    errors = []
    for have, want in zip(variant.run(inputs), truth[variant.uniform], strict=True):
        rows, error = want.reshape(len(want) if want.dim() else 1, -1), have.double().reshape(want.shape) - want
        norm = rows.norm(dim=1)
        norm = norm.clamp(min=0.01 * float(norm.square().mean().sqrt()))
        errors.append(float((error.reshape(rows.shape).norm(dim=1) / norm).max()))
    return errors


def _measure(variant: Variant, buffers: Sequence[Inputs], args: argparse.Namespace) -> dict[str, Any]:
    ms = median_ms(variant.run, buffers, args.device, warmup=args.warmup, repeats=args.repeats)
    return {"ms": ms, "peak": peak_bytes(variant.run, buffers[0], args.device)}


def _floor(args: argparse.Namespace, buffers: Sequence[Inputs]) -> dict[str, float]:
    """Milliseconds of the three products: logits, gradient of hidden, gradient of weight."""
    size = buffers[0].hidden_NH.element_size()
    tensors = args.tokens * args.hidden + args.vocab * args.hidden
    weight = buffers[0].weight_VH.detach()
    logit = torch.empty(args.tokens, args.vocab, dtype=weight.dtype, device=args.device).normal_()

    def products(inputs: Inputs) -> None:
        hidden = inputs.hidden_NH.detach()
        torch.mm(hidden, weight.t(), out=logit)
        torch.mm(logit, weight)
        torch.mm(logit.t(), hidden)

    return {
        "operations_ms": 6 * args.tokens * args.hidden * args.vocab / (args.tflops * 1e12) * 1e3,
        # Read in both passes and written once, as gradients.
        "bytes_ms": 3 * tensors * size / BYTES_PER_SECOND * 1e3,
        "products_ms": median_ms(products, buffers, args.device, warmup=args.warmup, repeats=args.repeats),
    }


def _print(args: argparse.Namespace, rows: Sequence[dict[str, Any]], floor: dict[str, float]) -> None:
    print(
        f"{args.tokens} × {args.hidden} × {args.vocab}, {args.dtype}, {device_name(args.device)}; forward and backward"
    )
    print(f"{'':<28}{'ms':>10}{'of stock':>10}{'peak MB':>10}{'of stock':>10}   worst row: loss, dhidden, dweight")
    for row in rows:
        errors = ", ".join(f"{error:.1e}" for error in row["errors"])
        if "ms" not in row:
            print(f"{row['name']:<28}{'PARITY FAILS, not timed':>40}   {errors}")
            continue
        print(
            f"{row['name']:<28}{row['ms']:>10.2f}{_part(row, rows[0], 'ms'):>10}{_megabytes(row):>10}"
            f"{_part(row, rows[0], 'peak'):>10}   {errors}"
        )
    print(
        f"floor of three products: {floor['operations_ms']:.2f} ms by operations at {args.tflops:g} TFLOP/s, "
        f"{floor['bytes_ms']:.2f} ms by bytes at 4.2 TB/s, {floor['products_ms']:.2f} ms measured"
    )


def _part(row: dict[str, Any], stock: dict[str, Any], key: str) -> str:
    return f"{row[key] / stock[key]:.3f}" if row.get(key) is not None and stock.get(key) else "-"


def _megabytes(row: dict[str, Any]) -> str:
    return "-" if row.get("peak") is None else f"{row['peak'] / 1e6:.1f}"


COLUMNS = (
    "variant", "device", "tokens", "hidden", "vocab", "dtype", "ms", "peak_bytes",
    "worst_row_loss", "worst_row_grad_hidden", "worst_row_grad_weight",
    "floor_operations_ms", "floor_bytes_ms", "floor_products_ms", "torch", "megatron-core", "commit",
)  # fmt: skip


def _rows(args: argparse.Namespace, rows: Sequence[dict[str, Any]], floor: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "variant": row["name"],
            "device": device_name(args.device),
            "tokens": args.tokens,
            "hidden": args.hidden,
            "vocab": args.vocab,
            "dtype": args.dtype,
            "ms": f"{row['ms']:.3f}" if "ms" in row else "",
            "peak_bytes": row["peak"] if row.get("peak") is not None else "",
            **{
                f"worst_row_{name}": f"{error:.2e}"
                for name, error in zip(("loss", "grad_hidden", "grad_weight"), row["errors"], strict=True)
            },
            **{f"floor_{name}": f"{value:.3f}" for name, value in floor.items()},
            **versions(),
        }
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
