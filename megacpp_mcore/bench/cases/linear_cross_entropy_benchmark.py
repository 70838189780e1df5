"""The output head's losses and the gradients of hidden and weight: stock Megatron's, ours, and installed vendors'.

Legend: N tokens, H hidden width, V vocabulary. Besides the variants, the three dense products alone are timed: they are the
floor of everything that forms the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import cross_entropy

from megacpp_mcore.backends.candidates import linear_cross_entropy_candidates
from megacpp_mcore.bench.catalog import BOUND, OURS, PEER, Options
from megacpp_mcore.bench.problem import BOTH, PRECISIONS, Call, Draw, Floor, Inputs, Problem, Tensors, Variant, obstacle
from megacpp_mcore.model.flops import product
from megacpp_mcore.ops.linear_cross_entropy import chunked, reference
from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import PEER_RATIO, worst_row

LIMITS = {"bfloat16": 5e-3, "float32": 2e-6}
"""The largest error of a row; or one and a half times stock's, where that is more."""
STOCK = "stock"


def linear_cross_entropy(options: Options) -> Problem:
    """Compute in every variant per-token losses and both gradients for random weights of the tokens."""
    hidden, vocab = options.sizes("hidden", "vocab")
    tokens, draw = options.shape["B"] * options.shape["S"], Draw(options)
    weight_VH = draw.normal(vocab, hidden, scale=hidden**-0.5)
    hidden_NH, share_N = draw.normal(tokens, hidden), draw.normal(tokens, dtype=torch.float32)
    inputs = Inputs(
        leaves=draw.leaves(hidden=hidden_NH, weight=weight_VH),
        cotangents={"loss": share_N},
        fixed={"label": draw.integers(vocab, tokens)},
    )
    logit_NV = torch.empty(tokens, vocab, dtype=weight_VH.dtype, device=weight_VH.device).normal_()
    variants = [
        *_stock(hidden, vocab),
        *_reduced(options, inputs),
        Variant.of("reference", OURS, _called(reference.linear_cross_entropy)),
        Variant.of("chunked", OURS, _called(lambda *given: chunked.linear_cross_entropy(*given).loss)),
        _into("chunked, main_grad", weight_VH, None),
        _into("known weights, main_grad", weight_VH, share_N),
        Variant(name="three dense products", side=BOUND, runs={BOTH: partial(_products, logit_NV)}),
    ]
    moved = 3 * (hidden_NH.nbytes + weight_VH.nbytes)  # both are read in both passes, and their gradients written
    operations = product(tokens * hidden * vocab).training
    return Problem(
        inputs=inputs,
        variants=variants,
        # No forward pass by itself: some variants compute gradients in it.
        works={BOTH: Floor(operations=operations, moved=moved, precision=PRECISIONS[options.dtype])},
        truth=inputs.truth(_called(_dense)),
        limit=LIMITS[options.dtype],
        yardstick=STOCK,
    )


def _called(fn: Callable[..., torch.Tensor]) -> Call:
    return lambda inputs: fn(inputs.leaves["hidden"], inputs.leaves["weight"], inputs.fixed["label"])


def _dense(hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    return cross_entropy(hidden @ weight.t(), label, reduction=reduction)


def _stock(hidden: int, vocab: int) -> Iterator[Variant]:
    """Yield ColumnParallelLinear with each of Megatron's two cross-entropies."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, gradient_accumulation_fusion=False,
        use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    head = ColumnParallelLinear(
        hidden, vocab, config=config, init_method=torch.nn.init.zeros_, bias=False, skip_weight_param_allocation=True
    )
    group = parallel_state.get_tensor_model_parallel_group()

    def losses(loss_of: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
        logits, _ = head(inputs.leaves["hidden"][:, None], weight=inputs.leaves["weight"])
        return loss_of(logits, inputs.fixed["label"][:, None], tp_group=group)[:, 0]

    yield Variant.of(STOCK, PEER, partial(losses, vocab_parallel_cross_entropy))
    yield Variant.of("stock, fused cross-entropy", PEER, partial(losses, fused_vocab_parallel_cross_entropy))


def _into(name: str, weight_VH: torch.Tensor, known_N: torch.Tensor | None) -> Variant:
    """Accumulate as with fusion: the weight's gradient is added to an existing float32 buffer.

    The first run, which checks parity, starts with a zero buffer. Known weights are the gradients of the losses themselves.
    """
    buffer_VH = torch.zeros_like(weight_VH, dtype=torch.float32)

    def run(inputs: Inputs) -> Tensors:
        main_grad, leaves = MainGrad(buffer_VH, lambda: None), list(inputs.leaves.values())
        made = chunked.linear_cross_entropy(*leaves, inputs.fixed["label"], main_grad=main_grad, token_weight=known_N)
        grad_hidden, _ = torch.autograd.grad(made.loss, leaves, inputs.cotangents["loss"], allow_unused=True)
        return [made.loss.detach(), grad_hidden, buffer_VH]

    return Variant(name=name, side=OURS, runs={BOTH: run})


def _products(logit_NV: torch.Tensor, inputs: Inputs) -> None:
    """Multiply for logits, gradient of hidden, gradient of weight."""
    hidden, weight = (leaf.detach() for leaf in inputs.leaves.values())
    torch.mm(hidden, weight.t(), out=logit_NV)
    torch.mm(logit_NV, weight)
    torch.mm(logit_NV.t(), hidden)


def _reduced(options: Options, inputs: Inputs) -> Iterator[Variant]:
    """Yield the mean of the tokens' losses, ours and of vendors that return no more: less work than the other variants."""

    def mean(fn: Callable[..., torch.Tensor], inputs: Inputs) -> Tensors:
        loss, wanted = _called(fn)(inputs), list(inputs.leaves.values())
        return [loss.detach(), *torch.autograd.grad(loss, wanted)]

    sizes = {name: options.shape[name] for name in ("hidden", "vocab")}
    dense = partial(mean, partial(_dense, reduction="mean"))
    truth = dict(zip(inputs.names, dense(inputs.in_double()), strict=True))
    plain = zip(dense(inputs), truth.items(), strict=True)
    limit = max(LIMITS[options.dtype], *(PEER_RATIO * worst_row(have, want, name) for have, (name, want) in plain))
    for candidate in linear_cross_entropy_candidates():
        name, side = f"{candidate.name}, mean", OURS if candidate.name == "chunked" else PEER
        if reason := obstacle(candidate, options, **sizes):
            yield Variant.missing(name, reason, side)
        else:
            yield Variant(name=name, side=side, runs={BOTH: partial(mean, candidate.load())}, truth=truth, limit=limit)
