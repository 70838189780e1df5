"""The output head's losses and the gradients of hidden and weight: stock Megatron, ours, and Liger where it is installed.

Legend: N tokens, H hidden width, V vocabulary. Beside the variants stand the three dense products alone, which are the floor
of everything that forms the logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megacpp_mcore.bench.cases.peers import lacking
from megacpp_mcore.bench.parity import AgainstTruth
from megacpp_mcore.bench.problem import (
    BOTH,
    BOUND,
    OURS,
    PEER,
    PRECISIONS,
    Draw,
    Floor,
    Inputs,
    Problem,
    Tensors,
    Variant,
    missing,
)
from megacpp_mcore.bench.registry import Options
from megacpp_mcore.model.flops import product

LIMITS = {"bfloat16": 5e-3, "float32": 2e-6}
"""The largest error of a row; or half as much again as stock's, where that is more."""
STOCK = "stock"


def problems(options: Options) -> Iterator[Problem]:
    """One problem; every variant makes per-token losses and both gradients for random weights of the tokens."""
    sizes = options.shape
    tokens, hidden, vocab = sizes["B"] * sizes["S"], sizes["hidden"], sizes["vocab"]
    draw = Draw(options)
    weight_VH = draw.normal(vocab, hidden, scale=hidden**-0.5).requires_grad_()

    def one() -> Inputs:
        leaves = {"hidden": draw.normal(tokens, hidden).requires_grad_(), "weight": weight_VH}
        cotangent_N = draw.normal(tokens, dtype=torch.float32)
        return Inputs(leaves=leaves, cotangents=(cotangent_N,), fixed={"label": draw.integers(vocab, tokens)})

    numbers = tokens * hidden + vocab * hidden
    # Hidden and weight are read in both passes, and their gradients written.
    floor = Floor(
        operations=product(tokens * hidden * vocab).training,
        moved=3 * numbers * draw.itemsize,
        precision=PRECISIONS[options.dtype],
    )
    yield Problem(
        shape=sizes,
        dtype=options.dtype,
        inputs=one(),
        variants=[
            *_stock(hidden, vocab, weight_VH),
            _liger(options),
            _variant("reference", OURS, _reference),
            _variant("chunked", OURS, _chunked),
            Variant(name="chunked, main_grad", side=OURS, runs={BOTH: _into(torch.zeros_like(weight_VH).float())}),
            Variant(name="three dense products", side=BOUND, runs={BOTH: _products(tokens, vocab, weight_VH)}),
        ],
        works={BOTH: floor},
        judge=AgainstTruth(_truth, ("loss", "dhidden", "dweight"), LIMITS[options.dtype], yardstick=STOCK),
    )


def _variant(name: str, side: str, losses: Callable[[Inputs], torch.Tensor]) -> Variant:
    """A loss has no forward pass of its own here: some variants make gradients in it."""

    def both(inputs: Inputs) -> Tensors:
        loss_N = losses(inputs)
        return [loss_N.detach(), *torch.autograd.grad(loss_N, list(inputs.leaves.values()), inputs.cotangents[0])]

    return Variant(name=name, side=side, runs={BOTH: both})


def _stock(hidden: int, vocab: int, weight_VH: torch.Tensor) -> list[Variant]:
    """ColumnParallelLinear with each of the two cross-entropies that Megatron has."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    head = ColumnParallelLinear(
        hidden, vocab, config=config, init_method=torch.nn.init.zeros_, bias=False, skip_weight_param_allocation=True
    )
    group = parallel_state.get_tensor_model_parallel_group()

    def losses(loss_of: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
        logits, _ = head(inputs.leaves["hidden"][:, None], weight=weight_VH)
        return loss_of(logits, inputs.fixed["label"][:, None], tp_group=group)[:, 0]

    return [
        _variant(STOCK, PEER, lambda inputs: losses(vocab_parallel_cross_entropy, inputs)),
        _variant("stock, fused cross-entropy", PEER, lambda inputs: losses(fused_vocab_parallel_cross_entropy, inputs)),
    ]


def _reference(inputs: Inputs) -> torch.Tensor:
    from megacpp_mcore.ops.linear_cross_entropy.reference import linear_cross_entropy

    return linear_cross_entropy(inputs.leaves["hidden"], inputs.leaves["weight"], inputs.fixed["label"])


def _chunked(inputs: Inputs) -> torch.Tensor:
    from megacpp_mcore.ops.linear_cross_entropy.chunked import linear_cross_entropy

    return linear_cross_entropy(inputs.leaves["hidden"], inputs.leaves["weight"], inputs.fixed["label"]).loss


def _into(buffer_VH: torch.Tensor) -> Callable[[Inputs], Tensors]:
    """As with fused accumulation: the weight's gradient is added to a float32 buffer that is there anyway.

    The first call, which is the check of parity, finds it zero.
    """
    from megacpp_mcore.ops.linear_cross_entropy.chunked import MainGrad, linear_cross_entropy

    def run(inputs: Inputs) -> Tensors:
        sink = MainGrad(buffer_VH, lambda: None)
        leaves = [inputs.leaves["hidden"], inputs.leaves["weight"]]
        loss = linear_cross_entropy(leaves[0], leaves[1], inputs.fixed["label"], main_grad=sink).loss
        grad_hidden, _ = torch.autograd.grad(loss, leaves, inputs.cotangents[0], allow_unused=True)
        return [loss.detach(), grad_hidden, buffer_VH]

    return run


def _products(tokens: int, vocab: int, weight_VH: torch.Tensor) -> Callable[[Inputs], None]:
    """Logits, gradient of hidden, gradient of weight."""
    weight = weight_VH.detach()
    logit_NV = torch.empty(tokens, vocab, dtype=weight.dtype, device=weight.device).normal_()

    def run(inputs: Inputs) -> None:
        hidden = inputs.leaves["hidden"].detach()
        torch.mm(hidden, weight.t(), out=logit_NV)
        torch.mm(logit_NV, weight)
        torch.mm(logit_NV.t(), hidden)

    return run


def _liger(options: Options) -> Variant:
    name = "Liger (mean only)"
    reason = "no peer here: Liger runs on a GPU alone" if options.device != "cuda" else lacking("liger_kernel")
    if reason:
        return missing(name, reason)
    functional: Any = importlib.import_module("liger_kernel.transformers.functional")

    def both(inputs: Inputs) -> Tensors:
        leaves = list(inputs.leaves.values())
        loss = functional.liger_fused_linear_cross_entropy(*leaves, inputs.fixed["label"], reduction="mean")
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    return Variant(name=name, side=PEER, runs={BOTH: both}, truth=lambda inputs: _truth(inputs, mean=True))


def _truth(inputs: Inputs, *, mean: bool = False) -> Tensors:
    double = inputs.in_double()
    leaves = list(double.leaves.values())
    logit_NV = leaves[0] @ leaves[1].t()
    loss = torch.nn.functional.cross_entropy(logit_NV, inputs.fixed["label"], reduction="mean" if mean else "none")
    return [loss.detach(), *torch.autograd.grad(loss, leaves, None if mean else double.cotangents)]
