"""A program: one case of an op's kernels under Triton's interpreter, on a CPU: ``python -m tests.ops.interpreted NAME``.

It fails unless every result of the case is right, mostly against float64. Run with TRITON_INTERPRET=1, which Triton reads as it
is imported. Float16 stands for bfloat16, whose products the interpreter gets wrong.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton.runtime import interpreter

from megacpp_mcore.ops import adam, embedding, fp8, slices
from megacpp_mcore.ops.feed_forward import reference as feed_forward_reference
from megacpp_mcore.ops.feed_forward import triton as feed_forward
from megacpp_mcore.ops.grouped_mlp import fp8 as grouped_fp8
from megacpp_mcore.ops.grouped_mlp import reference as experts
from megacpp_mcore.ops.grouped_mlp import triton as grouped
from megacpp_mcore.ops.indexer import chunked as indexer_chunks
from megacpp_mcore.ops.indexer import dense
from megacpp_mcore.ops.indexer import reference as indexer_reference
from megacpp_mcore.ops.indexer import triton as indexer
from megacpp_mcore.ops.linear_cross_entropy import eager
from megacpp_mcore.ops.linear_cross_entropy import triton as cross_entropy
from megacpp_mcore.ops.m2rnn import recurrence
from megacpp_mcore.ops.m2rnn import reference as m2rnn_reference
from megacpp_mcore.ops.m2rnn.triton import m2rnn
from megacpp_mcore.ops.mamba3 import reference as mamba3_reference
from megacpp_mcore.ops.mamba3 import triton as mamba3
from megacpp_mcore.ops.mamba3_projection import triton as mamba3_projection
from megacpp_mcore.ops.mla import triton as mla
from megacpp_mcore.ops.mla.reference import mla_attention as mla_reference
from megacpp_mcore.ops.mla_projection import reference as projection_reference
from megacpp_mcore.ops.mla_projection import triton as projection
from megacpp_mcore.ops.remainder_adam import _step as reference_step
from megacpp_mcore.ops.remainder_adam import joined, split
from megacpp_mcore.ops.rms_norm import triton as norm
from megacpp_mcore.ops.router import triton as router
from megacpp_mcore.ops.sparse_mla import triton as sparse_mla
from megacpp_mcore.ops.sparse_mla.reference import attend
from megacpp_mcore.ops.testing import assert_parity, worst_row
from tests.ops import (
    add_case,
    embedding_case,
    feed_forward_case,
    grouped_mlp_case,
    indexer_case,
    m2rnn_case,
    mamba3_case,
    mamba3_projection_case,
    mla_projection_case,
    outcomes,
    rms_norm_case,
    router_case,
    sparse_mla_case,
)
from tests.ops.outcomes import assert_same


def take_scalars_of_one_element() -> None:
    """The interpreter's loop bounds are arrays of one element, which NumPy 2.4 and later refuse as integers."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def keep_types() -> None:
    """Triton 3.9 interprets a product of a constant and a tensor as a constant, and repeats a boolean as integers."""
    multiply, repeat = tl.constexpr.__mul__, interpreter.InterpreterBuilder.create_splat

    def product(self: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, tl.tensor) else multiply(self, other)

    def repeated(self: Any, kind: Any, value: Any) -> Any:
        made = repeat(self, kind, value)
        made.data = made.data.astype(value.data.dtype, copy=False)
        return made

    tl.constexpr.__mul__ = product
    interpreter.InterpreterBuilder.create_splat = repeated


def check_launches() -> None:
    """Arguments at run time come first and by position, as :func:`~megacpp_mcore.ops.triton_launch.launch` needs them."""
    run = interpreter.InterpretedFunction.run

    def checked(kernel: Any, *args: Any, **named: Any) -> None:
        assert kernel.arg_names[len(args) :] == [*kernel.fn.__annotations__], kernel.fn
        run(kernel, *args, **named)

    interpreter.InterpretedFunction.run = checked


def strided(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, each keyword's numbers between NaNs: a kernel that takes a parameter for contiguous reads those."""

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return torch.stack([value, torch.full_like(value, torch.nan)], dim=-1)[..., 0]

    return lambda *args, **kwargs: op(*args, **{name: apart(value) for name, value in kwargs.items()})


def poison_new_memory(value: float = torch.nan) -> None:
    """What is read before it is written is NaN, or such a ``value``."""

    def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **how: Any) -> torch.Tensor:
            tensor = empty(*args, **how)
            return tensor.fill_(value) if tensor.is_floating_point() else tensor

        return made

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like")):
        setattr(owner, name, poisoned(getattr(owner, name)))


def grouped_mlp(rms: float, small_tiles: bool = False, **sizes: Any) -> None:
    """Of tokens and of rows, by PyTorch's own grouped products for a CPU; a token of too few or many experts is NaN."""
    case = grouped_mlp_case.Case(**sizes)
    grouped.DTYPES = (case.dtype,)
    if small_tiles:
        for tile in (grouped.FORWARD, grouped.BACKWARD, grouped.WEIGHTS):
            tile.update({"BM": 16, "BN": 8, "BK": 16} | ({"SPLIT": 2} if "SPLIT" in tile else {}))
    poison_new_memory()
    inputs = grouped_mlp_case.draw(case)
    routing, same = inputs["routing"], grouped_mlp_case.assert_same
    truth = grouped_mlp_case.outcome(experts.routed_mlp, case, inputs, torch.float64)
    same(grouped_mlp_case.outcome(grouped.routed_mlp, case, inputs), truth, rms, routing)
    rows = grouped_mlp_case.outcome_of_rows(experts.grouped_mlp, case, inputs, torch.float64)
    same(grouped_mlp_case.outcome_of_rows(grouped.grouped_mlp, case, inputs), rows, rms)
    for dtype in (torch.float32, case.dtype):
        same(grouped_mlp_case.outcome_added(grouped.routed_mlp, case, inputs, dtype), truth, rms, routing)
    if case.ranks > 1:
        return  # each token may have any number of a rank's experts
    routing[3], routing[-1] = True, False
    outputs = grouped_mlp_case.outcome(grouped.routed_mlp, case, inputs)
    for tensor in (outputs["y"], outputs["dx"]):
        assert tensor[[3, -1]].isnan().all()
        assert tensor.isfinite().any()


UNUSED = 1e6


def as_fp8(op: Any) -> None:
    """Small tiles; scaled numbers stay float32: the interpreter rounds some wrongly to E4M3, whose products need a GPU."""
    op.DTYPES, fp8.E4M3, fp8.CAPABILITY = (torch.float32,), torch.float32, "no GPU"
    fp8.WEIGHTS.update({"BN": 32, "BW": 16})
    fp8.LARGEST_OF.update({"PARTS": 4, "BLOCK": 64})
    fp8.LARGEST_ROW.update({"PARTS": 8, "BLOCK": 16})
    poison_new_memory(UNUSED)  # a maximum leaves NaN out


def check_operands(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.is_contiguous()
    assert right.t().is_contiguous()
    assert not any(width % 16 for width in (left.shape[1], *right.shape))


def experts_in_fp8(ranks: int = 1) -> None:
    """Fail unless the kernels of FP8 scale each row to E4M3's largest value, and results are right but for its rounding."""
    case = grouped_mlp_case.Case(T=37, D=48, F=32, ranks=ranks, dtype=torch.float32)
    as_fp8(grouped)
    grouped_fp8.ELEMENTS = 32  # parts of a row
    grouped_fp8.TRANSPOSED.update({"BP": 32, "BW": 16})
    grouped_fp8.WEIGHT_GRADIENT.update({"BM": 32, "BN": 16, "BK": 16})
    products = []

    def product(
        left: torch.Tensor,
        right: torch.Tensor,
        left_scale: torch.Tensor,
        right_scale: torch.Tensor,
        *,
        offs: Any,
        **_: Any,
    ) -> torch.Tensor:
        """``torch._scaled_grouped_mm`` of rows and of a stack of matrices."""
        ends, groups = [0, *offs.tolist()], []
        products.append(right.dim())
        largest = left[: ends[-1]].abs().amax(-1)
        torch.testing.assert_close(largest, torch.full_like(largest, 448.0))
        torch.testing.assert_close(right.abs().amax((1, 2)), torch.full((len(right),), 448.0))
        for expert, (start, end) in enumerate(itertools.pairwise(ends)):
            rows = left[start:end] * left_scale[start:end, None]
            groups.append(rows @ (right[expert] * right_scale[expert]))
        unused = torch.full((len(left) - ends[-1], right.shape[2]), UNUSED)
        return torch.cat([*groups, unused])

    def transposed(*operands: Any) -> Any:
        made = transpose(*operands)
        columns.append(float(made.values_WP[:, : made.end_P[-1]].abs().max()))
        return made

    columns: list[float] = []
    transpose, grouped_fp8.transposed = grouped_fp8.transposed, transposed
    torch._scaled_grouped_mm = product
    inputs = grouped_mlp_case.draw(case)
    truth = grouped_mlp_case.outcome(experts.routed_mlp, case, inputs, torch.float64)
    grouped_mlp_case.assert_same(grouped_mlp_case.outcome(grouped_fp8.routed_mlp, case, inputs), truth, 2e-6, inputs["routing"])
    rows = grouped_mlp_case.outcome_of_rows(experts.grouped_mlp, case, inputs, torch.float64)
    grouped_mlp_case.assert_same(grouped_mlp_case.outcome_of_rows(grouped_fp8.grouped_mlp, case, inputs), rows, 2e-6)
    assert products == [3] * 8  # of tokens and of rows, four each
    assert columns == pytest.approx([448.0] * 8)  # operands of two kernels' products each
    for dtype in (torch.float32, torch.float64):
        added = grouped_mlp_case.outcome_added(grouped_fp8.routed_mlp, case, inputs, dtype)
        grouped_mlp_case.assert_same(added, truth, 2e-6, inputs["routing"])


def mamba3_projection_in_fp8(**sizes: int) -> None:
    """Fail unless operands are scaled to E4M3's largest value and results are right but for its rounding."""
    case = mamba3_projection_case.Case(**sizes)
    as_fp8(mamba3_projection)
    mamba3_projection.BLOCK, mamba3_projection.WIDEST = 32, 32 * 32
    mamba3_projection.COLUMNS.update({"BP": 32, "BW": 16})
    products = []

    def product(left: torch.Tensor, right: torch.Tensor, **how: Any) -> torch.Tensor:
        """``torch._scaled_mm`` with a scale per row of the left and per column of the right."""
        check_operands(left, right)
        assert how["scale_a"].shape == (len(left), 1)
        assert how["scale_b"].shape == (1, right.shape[1])
        of_tokens = left.shape[0] == case.T
        for operand in (left,) if of_tokens else (left, right.t()):
            largest = operand.abs().amax(-1)
            if not of_tokens:  # blocks of columns
                largest = torch.stack([block.amax() for block in largest.split(mamba3_projection.BLOCK)])
            torch.testing.assert_close(largest, torch.full_like(largest, 448.0))
        products.append((of_tokens, how["use_fast_accum"]))
        return (left * how["scale_a"]) @ (right * how["scale_b"])

    torch._scaled_mm = product
    inputs = mamba3_projection_case.draw(case)
    truth = mamba3_projection_case.outcome(mamba3_projection_case.exact, case, inputs, torch.float64)
    for op, of_gradient in ((mamba3_projection.project, 1), (mamba3_projection.project_gradient_bf16, 0)):
        for dtype in (None, torch.float32, torch.float64):  # of main_grad
            products.clear()
            outputs = mamba3_projection_case.outcome(op, case, inputs, main_grad=dtype)
            assert_same(outputs, truth, 2e-6)
            assert products == [(True, True), (True, False)] + [(False, False)] * of_gradient, products


def feed_forward_in_fp8(**sizes: int) -> None:
    """Fail unless operands are divided by powers of two to fit E4M3, and results are right but for its rounding."""
    case = feed_forward_case.Case(**sizes)
    as_fp8(feed_forward)
    feed_forward.TRANSPOSED.update({"BP": 32, "BW": 16})
    products = []

    def product(left: torch.Tensor, right: torch.Tensor, **how: Any) -> torch.Tensor:
        """``torch._scaled_mm`` with a scale per row of the left and per column of the right, or with one of each."""
        check_operands(left, right)
        shapes = how["scale_a"].shape, how["scale_b"].shape
        by_row = shapes == ((len(left), 1), (1, right.shape[1]))
        assert by_row or shapes == ((), ())
        for operand, scale in ((left, how["scale_a"]), (right.t(), how["scale_b"])):
            if by_row and operand is not left:  # a weight
                continue
            mantissa, _ = torch.frexp(scale)
            assert bool((mantissa == 0.5).all())
            largest = operand.abs().amax(-1, keepdim=True) if by_row else operand.abs().amax()
            empty = (scale < 1e-30) & (largest == 0)  # a row of zeros
            assert bool((empty | ((largest > 223.9) & (largest <= 448))).all())
        products.append((by_row, how["use_fast_accum"]))
        return (left * how["scale_a"]) @ (right * how["scale_b"])

    torch._scaled_mm = product
    inputs = feed_forward_case.draw(case)
    truth = feed_forward_case.outcome(feed_forward_reference.feed_forward, inputs, torch.float64)
    for dtype in (None, torch.float32, torch.float64):  # of main_grad
        products.clear()
        outputs = feed_forward_case.outcome(feed_forward.feed_forward, inputs, main_grad=dtype)
        assert_same(outputs, truth, 1e-5)  # the error function is within 1.5e-7
        assert products == [(True, True)] * 2 + [(True, False)] * 2 + [(False, False)] * 2, products
    added = feed_forward_case.outcome(feed_forward_reference.feed_forward, inputs, torch.float64, torch.float64)
    assert_same(added, truth, 1e-12)


def indexer_rows() -> None:
    """Rows that a program keeps: distinct scores, ties, documents, only zeros, and NaN."""
    inputs, documents = indexer_case.draw(80, H=3, dtype=torch.float16), indexer_case.draw_documents(80, each=30)
    indexer_case.assert_selected(indexer.select(*inputs, 37), inputs, 37)
    indexer_case.assert_selected(indexer.select(*inputs, 37, documents), inputs, 37, documents)
    ties, documents = indexer_case.draw_exact(80, B=1, H=3, dtype=torch.float16), documents[:1]
    for topk in (1, 20, 80, 100):
        assert torch.equal(indexer.select(*ties, topk, documents), indexer_reference.select(*ties, topk, documents))
    q, k, w = ties
    assert torch.equal(indexer.select(-q.abs(), k.abs(), w, 20), indexer_reference.select(-q.abs(), k.abs(), w, 20))
    k[[30, 31], 0, 0] = torch.tensor([float("nan"), float("inf")], dtype=torch.float16)
    assert torch.equal(indexer.select(q, k, w, 2), indexer_reference.select(q, k, w, 2))
    k[[33, 36, 39, 61], :, 0] = float("nan")  # more keys of the highest rank than are selected
    for topk in (1, 2, 4):
        assert torch.equal(indexer.select(q, k, w, topk, documents), indexer_reference.select(q, k, w, topk, documents))


def indexer_pieces() -> None:
    """Rows that are read a block at a time, in several chunks and groups of the batch."""
    indexer.SCRATCH, indexer.TAKE_BEST = 2 * 64 * 128, indexer.TAKE_BEST | {"BLOCK": 64}
    inputs = indexer_case.draw_exact(100, B=3, H=3, dtype=torch.float16)
    documents = indexer_case.draw_documents(100, B=3, each=50)
    assert len(list(indexer.chunks(100, 3))) > 3
    for topk in (20, 99):
        expected = indexer_reference.select(*inputs, topk, documents)
        for first in (0, 64, 75):
            q, k, w = inputs[0][first:], inputs[1], inputs[2][first:]
            assert torch.equal(indexer.select(q, k, w, topk, documents, first_row=first), expected[:, first:])


def indexer_long_rows() -> None:
    """Rows of which only the scores between the bounds are read on: these, ties, only zeros, and NaN, as in short ones."""
    indexer.LONG_ROW, indexer.TAKE_BEST = 0, indexer.TAKE_BEST | {"BLOCK": 64, "NEAR": 16}
    indexer_rows()


def indexer_all_keys(D: int = 64) -> None:
    """Scores of more and of fewer keys than queries."""
    for S, T in ((70, 150), (150, 70), (1, 1), (64, 128)):
        indexer_case.check_all_keys(indexer.score_all, S, T, 3, D, torch.float16)
    indexer_case.check_not_finite(indexer.score_all, D, torch.float16)


def indexer_by_chunks(D: int = 64) -> None:
    """Selections and scores are plain PyTorch's, whatever the rule; inputs that the kernel does not take are PyTorch's."""
    runs_kernels, calls = indexer_chunks._runs_kernels, []
    score_all = indexer.score_all
    indexer.score_all = lambda *args: calls.append(args[0].shape) or score_all(*args)
    for S, T in ((90, 140), (140, 90)):
        made = indexer_chunks.Indexer(*indexer_case.draw_exact(S, H=3, D=D, T=T, dtype=torch.float16))
        query, key, _ = indexer_case.draw(S, H=2, D=8, T=T)
        attention, weight_BS = indexer_chunks.Attention(query, key[:, :, None], 0.3), torch.ones(2, S)
        for name, rule in indexer_case.draw_rules(S, T).items():
            for block, number in ((2**24, 1), (2 * T * 30, -(-S // 30))):
                indexer_chunks.BLOCK_ELEMENTS = block
                both = []
                for kernel in (False, True):
                    indexer_chunks._runs_kernels = lambda device, kernel=kernel: kernel
                    assert made.by_kernel == kernel
                    calls.clear()
                    both.append((*indexer_chunks.select(made, 20, rule), indexer_chunks.indexer_scores(made, rule)))
                    assert len(calls) == 2 * number * kernel, (calls, name)
                    if rule is not None:
                        both[-1] += tuple(indexer_chunks.dense_backward(made, attention, rule, weight_BS))
                for plain, ours in zip(*both, strict=True):
                    assert plain.dtype == ours.dtype
                    assert torch.equal(plain, ours), (S, T, name)
    indexer_chunks._runs_kernels = lambda device: True
    q, k, w = (tensor.float() for tensor in indexer_case.draw(9, H=3, D=D))
    half, other = (q.half(), k.half(), w.half()), (q[..., :32], k[..., :32], w)
    assert indexer_chunks.Indexer(*half[:2], w).by_kernel
    for qkw in ((q, k, w), (*half[:2], w.double()), (half[0], k.bfloat16(), w), [tensor.half() for tensor in other]):
        assert not indexer_chunks.Indexer(*qkw).by_kernel
    assert not indexer_chunks.Indexer(*half, relu=False).by_kernel
    indexer_chunks._runs_kernels = runs_kernels
    assert not indexer_chunks.Indexer(*half).by_kernel  # on a CPU


def indexer_learns() -> None:
    """The sparse loss and its gradients by kernels are plain PyTorch's, but for an additive mask and many key heads, which are
    PyTorch's alone."""
    sparse_mla.WIDTHS, sparse_mla.kernels.KEYS = ((32, 16),), 16
    sparse_mla.SUMS["KEYS"] = 16
    S, T = 50, 90
    made = indexer_chunks.Indexer(*indexer_case.draw(S, H=3, T=T, dtype=torch.float16))
    query, key, _ = indexer_case.draw(S, H=5, D=32, T=T, dtype=torch.float16)
    attention = indexer_chunks.Attention(query, key[:, :, None], 0.2)
    rules = indexer_case.draw_rules(S, T)
    rules["causal"] = indexer_chunks.KeyRule.causal(S, T, torch.device("cpu"))
    weight, rows_BS = torch.tensor(700.0), (torch.arange(2 * S) % 7 > 0).view(2, S).float()
    grad, called = indexer.indexer_grad, []
    indexer.indexer_grad = lambda *args: called.append(None) or grad(*args)
    for name, rule in rules.items():
        if rule is None:
            continue
        both = []
        for kernel in (False, True):
            indexer_chunks._runs_kernels = lambda device, kernel=kernel: kernel
            assert attention.by_kernel(rule) == (kernel and name != "additive")
            best_BSN, index_BSN = indexer_chunks.select(made, 20, rule)
            loss_BS = indexer_chunks.sparse_divergence(attention, best_BSN, index_BSN, rule)
            loss_inputs, backward = (made, attention, index_BSN, rule, weight), indexer_chunks.sparse_backward
            both.append([loss_BS, *backward(*loss_inputs), *backward(*loss_inputs, rows_BS)])
        for number, (plain, ours) in enumerate(zip(*both, strict=True)):
            assert plain.dtype == ours.dtype
            assert_parity(ours, plain.double(), rms=1e-4 if number == 0 else 5e-3, name=f"{name}, {number}")
    assert len(called) == 4
    assert not indexer_chunks.Attention(query, key[:, :, None].expand(-1, -1, 5, -1), 0.2).by_kernel(rules["causal"])


def indexer_learns_densely() -> None:
    """The dense target, loss and gradients by kernels are plain PyTorch's, in several chunks whose tiles are not full."""
    for D, (V, W) in ((64, (32, 0)), (128, (32, 16))):
        sparse_mla.WIDTHS = ((V + W, V),)
        dense.HALVES, tile = {V + W: (V, W)}, {"QUERIES": 16, "KEYS": 32, "num_warps": 4}
        dense.SUMS[V + W] = dense.TARGETS[V + W] = dense.LEARN[D] = tile
        S, T = 50, 90
        made = indexer_chunks.Indexer(*indexer_case.draw(S, H=5, D=D, T=T, dtype=torch.float16))
        query, key, _ = indexer_case.draw(S, H=3, D=V + W, T=T, dtype=torch.float16)
        attention = indexer_chunks.Attention(query, key[:, :, None], 0.2)
        rules = indexer_case.draw_rules(S, T)
        causal = indexer_chunks.KeyRule.causal(S, T, torch.device("cpu"))
        weight_BS = (torch.arange(2 * S) % 7).view(2, S) * 70.0  # far from float16's smallest
        for rule in (rules["within"], causal):
            both = []
            for kernel in (False, True):
                indexer_chunks._runs_kernels = lambda device, kernel=kernel: kernel
                loss_BS = indexer_chunks.dense_divergence(made, attention, (None, rule), query_chunk=23)
                both.append([loss_BS, *indexer_chunks.dense_backward(made, attention, rule, weight_BS, query_chunk=23)])
            for number, (plain, ours) in enumerate(zip(*both, strict=True)):
                assert plain.dtype == ours.dtype
                assert ours.isfinite().all()
                assert_parity(ours, plain.double(), rms=1e-4 if number < 2 else 5e-3, name=f"{D}, {number}")
        q, k, w = made.q_SBHD.clone(), made.k_TBD, made.w_SBH
        q[7, 0, 1, 3] = float("nan")
        _, dq, dw, dk = indexer_chunks.dense_backward(indexer_chunks.Indexer(q, k, w), attention, causal, weight_BS)
        assert dq[7, 0].isnan().all()
        assert dw[7, 0].isnan().all()
        assert dk[:8, 0].isnan().any(-1).all()
        assert dq[:, 1].isfinite().all()
        q, k = made.q_SBHD.abs(), made.k_TBD.clone()
        k[5, 1, 3] = -float("inf")  # so are its logits, which have no part in a score
        _, _, dw, _ = indexer_chunks.dense_backward(indexer_chunks.Indexer(q, k, w), attention, causal, weight_BS)
        assert dw.isfinite().all()


def indexer_gradient() -> None:
    """Selected keys at a time, all and some of them."""
    inputs = indexer_case.draw(40, H=3, dtype=torch.float16)
    index_BSN = indexer_reference.select(*inputs, 19, indexer_case.draw_documents(40))
    index_BSN[1, 5] = -1
    target_BSN = indexer_case.draw_target(index_BSN)
    launch = indexer.learn
    for block, deterministic in ((32, False), (16, False), (16, True)):
        indexer.learn = lambda *sizes, block=block: launch(*sizes) | {"BLOCK": block}
        torch.use_deterministic_algorithms(deterministic)
        gradients = indexer.indexer_grad(*inputs, index_BSN, target_BSN, 700.0)
        indexer_case.assert_gradients(gradients, inputs, index_BSN, target_BSN, 700.0)
        assert torch.equal(gradients[1][7, 0], torch.zeros_like(gradients[1][7, 0]))
        assert torch.equal(gradients[1][5, 1], torch.zeros_like(gradients[1][5, 1]))


V = 1003
LABELS = [0, 1002, 5, -1, V, 2**40, 7, 640]


def logit_rows(dtype: torch.dtype) -> torch.Tensor:
    """Logits in padded rows that begin and end with NaN: equal largest ones, −∞ in all of a block, far apart."""
    padded = torch.full((len(LABELS), 1024), torch.nan, dtype=dtype)
    logit_CV = padded[:, :V]
    logit_CV.copy_(torch.randn(logit_CV.shape, generator=torch.Generator().manual_seed(1)) * 3)
    logit_CV[1, [130, 129, 900]] = 50.0
    logit_CV[2, 6:600] = -torch.inf
    logit_CV[6] *= 1000
    return logit_CV


def linear_cross_entropy() -> None:
    """Statistics, gradients, and what lies beyond the rows, against plain PyTorch."""
    cross_entropy.BLOCK = 256
    label_C = torch.tensor(LABELS)
    weight_C = torch.tensor([1.0, 0.0, -0.3, 2.0, 1.0, 1.0, 0.5, 1.0])
    for dtype, rms in ((torch.float32, 1e-6), (torch.float16, 5e-4)):
        outcomes = []
        for module in (eager, cross_entropy):
            at_once, later = logit_rows(dtype), logit_rows(dtype)
            statistics = module.statistics(at_once, label_C, weight_C)
            again = module.statistics(later, label_C, None)
            assert all(map(torch.equal, statistics, again))
            assert torch.equal(later, logit_rows(dtype))
            logsumexp_C = statistics.top + statistics.total.log()
            module.gradient_(later, label_C, logsumexp_C, weight_C)
            outcomes.append((statistics, at_once, later))
        (stock, *expected), (ours, *actual) = outcomes
        assert torch.equal(stock.column, ours.column), (stock.column, ours.column)
        assert torch.equal(stock.top, ours.top)
        for name in ("total", "picked"):
            assert_parity(getattr(ours, name)[:, None], getattr(stock, name)[:, None], rms=1e-6, name=name)
        for name, output, reference in zip(("at once", "later"), actual, expected, strict=True):
            assert_parity(output, reference, rms=rms, name=name)
    gradient, total = torch.randn(5, 1000).half(), torch.randn(5, 1000)
    for beta in (0.0, 1.0):
        scaled, reference = total.clone(), total.clone()
        for module, out in ((cross_entropy, scaled), (eager, reference)):
            module.add_scaled_(out, gradient, torch.tensor([0.3]), beta)
        assert_parity(scaled, reference, rms=1e-6)


def recurrent_mixer(rms: float, part: tl.dtype, **how: Any) -> None:
    """M²RNN's: products in float32, or in float16 and backward in two pieces."""
    case = m2rnn_case.Case(B=1, S=11, H=1, K=16, dtype=torch.float32, state=True, **how)
    recurrence.products = lambda dtype: {"PART": part}
    if part == tl.float32:
        recurrence.CANDIDATES = torch.float32
    else:
        recurrence.PIECE = case.checkpoint_every
    inputs, outcome = m2rnn_case.draw(case), m2rnn_case.outcome
    truth = outcome(m2rnn_reference.m2rnn, case, inputs, torch.float64)
    assert_near(outcome(strided(m2rnn), case, inputs), truth, outcome(m2rnn_reference.m2rnn, case, inputs), rms)


def recurrent_mixer_of_small_steps() -> None:
    """M²RNN's forget gate where rounding loses 1 next to e^-15, the step."""
    case = m2rnn_case.Case(B=1, S=11, H=1, K=16, dtype=torch.float32, state=True)
    recurrence.products = lambda dtype: {"PART": tl.float32}
    recurrence.CANDIDATES = torch.float32
    inputs = m2rnn_case.draw(case)
    with torch.no_grad():
        inputs["leaves"]["u"][..., -5] = 0.0  # x_f
        inputs["leaves"]["dt_bias"].fill_(-15.0)
        inputs["leaves"]["A_log"].fill_(6.0)
        inputs["leaves"]["h0"].zero_()
    outcome = m2rnn_case.outcome
    truth = outcome(m2rnn_reference.m2rnn, case, inputs, torch.float64)
    ours = outcome(m2rnn, case, inputs)
    for name in ("h", "dA_log", "ddt_bias"):
        assert worst_row(ours[name], truth[name], name) < 2e-3, (name, worst_row(ours[name], truth[name], name))


def mamba3_mixer(tokens: int, block: int | None = None, **sizes: Any) -> None:
    """Segments, batches and groups in parts; under activation recompute."""
    mamba3.SEGMENT = 32  # so that few tokens make several segments
    mamba3.SCRATCH_BYTES = 0  # one row of the batch goes back at a time
    mamba3.HEADS = 4  # so that programs share a group of eight
    if block is not None:
        mamba3.Plan.block = block
    case = mamba3_case.Case(tokens, **{"B": 1, "H": 2, "G": 1, "P": 16, "N": 16, "dtype": torch.float32} | sizes)
    tensors, outcome = mamba3_case.make_tensors(case, device="cpu"), mamba3_case.with_gradients
    double = {key: tensor.double() for key, tensor in tensors.items()}
    truth = outcome(mamba3_reference.mamba3, case, double, method="sequential")
    plain = outcome(mamba3_reference.mamba3, case, tensors)
    recomputed = partial(checkpoint, mamba3.mamba3, use_reentrant=False)
    outputs = outcome(strided(recomputed), case, tensors)
    assert_near(outputs, truth, plain, 5e-4)
    for kept in (mamba3.mamba3_keep_scan, mamba3.mamba3_keep_all) if case.R > 1 else ():
        for key, tensor in outcome(kept, case, tensors).items():
            assert torch.equal(tensor, outputs[key]), key


def adam_steps() -> None:
    """Tensors of several blocks, of part of one, with and without a copy, with and without a factor, against PyTorch's."""
    draw = torch.Generator().manual_seed(0)

    def shard(size: int, copied: bool) -> adam.Shard:
        weight, gradient = (torch.randn(size, generator=draw) for _ in range(2))
        return adam.Shard(weight, gradient, torch.zeros(size), torch.zeros(size), weight.half() if copied else None)

    shards = [shard(2 * adam.BLOCK + 1, True), shard(64, False), shard(adam.BLOCK, True)]
    truth = [shard.weight.double() for shard in shards]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    plain, table = torch.optim.AdamW(truth, **options), adam.Table(shards)
    for number, factor in enumerate((0.3, None, 0.7), start=1):
        for fused, weight in zip(shards, truth, strict=True):
            fused.gradient.normal_(generator=draw)
            weight.grad = fused.gradient.double() * (factor or 1.0)
        plain.step()
        adam.step(table, **options, number=number, scale=None if factor is None else torch.tensor([factor]))
    for fused, weight in zip(shards, truth, strict=True):
        torch.testing.assert_close(fused.weight.double(), weight, rtol=0, atol=1e-6)
        assert fused.copy is None or torch.equal(fused.copy, fused.weight.half())


def adam_in_16_bits() -> None:
    """Remainders, moments and gradients in 16 bits against PyTorch's step of the same; addresses that are on two bytes only.

    The interpreter truncates what it stores in bfloat16, a GPU rounds it: a moment of three steps may be three last bits off.
    """
    draw, narrow = torch.Generator().manual_seed(0), torch.bfloat16
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for offset, gradient, avg, error in ((0, FP32, narrow, 2e-4), (1, narrow, FP32, 1e-6)):
        weights = [torch.randn(size, generator=draw) for size in (2 * adam.BLOCK + 1, 64)]
        kinds: tuple[list[adam.Shard], ...] = ([], [])
        for shards, weight in itertools.product(kinds, weights):
            copy, (upper, rest) = torch.empty(weight.numel() + offset, dtype=narrow)[offset:], split(weight)
            moments = [torch.zeros_like(weight, dtype=avg) for _ in range(2)]
            shards.append(adam.Shard(rest, torch.empty_like(weight, dtype=gradient), *moments, copy.copy_(upper)))
        table = adam.Table(kinds[0])
        assert table.align == (2 if offset else 16)
        for number, factor in enumerate((0.3, None, 0.7), start=1):
            scale = None if factor is None else torch.tensor([factor])
            for fused, reference in zip(*kinds, strict=True):
                reference.gradient.copy_(fused.gradient.normal_(generator=draw))
                reference_step(*reference, **options, number=number, scale=scale)
            adam.step(table, **options, number=number, scale=scale)
        for fused, reference in zip(*kinds, strict=True):
            assert fused.copy is not None
            assert reference.copy is not None
            joined_weight, expected = (joined(shard.copy, shard.weight) for shard in (fused, reference))
            torch.testing.assert_close(joined_weight, expected, rtol=0, atol=error)
            assert all(map(torch.equal, split(joined_weight), (fused.copy, fused.weight)))
            for name in ("exp_avg", "exp_avg_sq"):
                bound = {"rtol": 3 * 2**-7, "atol": 1e-3} if avg == narrow else {"rtol": 1e-6, "atol": 1e-7}
                torch.testing.assert_close(getattr(fused, name), getattr(reference, name), **bound)


def sums_of_three() -> None:
    """More than a program has, and less."""
    for shape in ((3, 5, 137), (2, 2, 8), (0, 2, 8)):
        for dtype in (FP32, FP16):
            add_case.compared("cpu", dtype, shape)


def embeddings() -> None:
    """Sequence and batch in either order, widths of several tiles and of part of one, both dtypes of the buffer."""
    embedding.LAUNCH.update(COLUMNS=32, MANY=8, FEW=2)
    sizes = {"B": 2, "S": 37, "V": 120, "D": 80, "dtype": FP16}
    for transposed, total in ((True, FP32), (False, FP32), (True, FP16)):
        embedding_case.compared("cpu", **sizes, total=total, transposed=transposed)


def assert_near(
    outputs: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], rms: float
) -> None:
    """Every result is right, or not much further off than plain PyTorch's in float32."""
    for name, tensor in outputs.items():
        assert_parity(tensor, truth[name], rms=max(rms, 4 * worst_row(plain[name], truth[name])), name=name)


def mla_projection(dtype: torch.dtype, rms: float) -> None:
    """Rows that fill no tile, and heads that fill none."""
    width = 16
    projection.WIDTHS, projection.DTYPES, projection.TILES = (width,), (dtype,), 2
    for launch in (projection.PROJECT, projection.BACKWARD, projection.KEYS):
        launch["TOKENS"] = 16
    projection.NORMS["ROWS"], projection.ROWS = 16, 16
    outcome = mla_projection_case.outcome
    for case in mla_projection_case.cases(S=37, B=2, H=11, width=width, hidden=24, indexer_heads=3, dtype=dtype):
        plain, ours = (getattr(module, case.op) for module in (projection_reference, projection))
        truth = outcome(plain, case, torch.float64)
        mla_projection_case.assert_same(case, outcome(ours, case), truth, outcome(plain, case), rms)
    for case in mla_projection_case.cases(S=5, B=1, H=2, width=width, hidden=24, indexer_heads=3, dtype=dtype):
        if case.op in ("latents", "indexer_inputs"):
            for tensors in (case.leaves, case.others):  # the strides of an embedding's output at a micro-batch of 1
                if "hidden_SBD" in tensors:
                    tensors["hidden_SBD"] = tensors["hidden_SBD"].as_strided((5, 1, 24), (24, 5 * 24, 1))
            with Products() as products:
                outcome(getattr(projection, case.op), case)
            assert "aten::mm" in products.names, products.names
            assert "aten::bmm" not in products.names, products.names


class Products(TorchDispatchMode):
    """The products that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def sparse_attention(rms: float, wide: bool = False, **sizes: Any) -> None:
    """By sums of floats and by sums of integers; the kernels for wide latents, in several chunks of queries."""
    case = sparse_mla_case.Case(**{"S": 37, "H": 3, "K": 32, "V": 16, "N": 20} | sizes)
    sparse_mla.WIDTHS, sparse_mla.DTYPES = ((case.K, case.V),), (case.dtype,)
    sparse_mla.WIDE = sparse_mla.WIDTHS if wide else ()
    sparse_mla.kernels.KEYS = 16
    for launch in (*sparse_mla.NARROW_LAUNCHES, *sparse_mla.WIDE_LAUNCHES):
        launch["KEYS"] = 16
    if wide:
        poison_new_memory()
        sparse_mla.kernels.KEYS, sparse_mla.wide.TILE = 32, tl.constexpr(32)
        sparse_mla.QUERIES["KEYS"] = 32
    sparse_mla.GRADIENTS["W"] = 16
    sparse_mla.SCRATCH = 2**14 * case.dtype.itemsize
    sparse_mla.kernels.FEW = sparse_mla.wide.FEW = tl.constexpr(12)  # of 20 keys
    sparse_mla.wide.SPAN = tl.constexpr(16)
    inputs, outcome = sparse_mla_case.draw(case), sparse_mla_case.outcome
    truth, plain = outcome(attend, case, inputs, torch.float64), outcome(sparse_mla_case.eager, case, inputs)
    sparse_mla_case.assert_same_sums(case, inputs, sparse_mla.summed_probabilities, truth, rms)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        sparse_mla_case.assert_same(case, inputs, outcome(sparse_mla.attend, case, inputs), truth, plain, rms)


def core_attention(dtype: torch.dtype, rms: float) -> None:
    """Documents of one row and of many tiles, windows, both; keys and values of one projection, whose gradients are."""
    mla.WIDTHS, mla.DTYPES = ((32, 16),), (dtype,)
    for launched in mla.LAUNCHES:
        launched |= {"ROWS": 16} | ({"KEYS": 16} if "KEYS" in launched else {})
    mla.QUERIES["ROWS"] = mla.KEYS["KEYS"] = 32  # as on a GPU
    poison_new_memory()
    draw = torch.Generator().manual_seed(0)
    for S, B, documents, window in (
        (90, 2, None, None), (1, 1, None, None), (49, 1, 0.5, None), (80, 2, 0.04, None), (77, 1, 0.02, 9), (64, 1, None, 20),
        (20, 1, 0.1, 0), (40, 1, 0.05, 2**40),
    ):  # fmt: skip
        projected = torch.randn(S, B, 2, 48, generator=draw).to(dtype)
        q, (k, v) = torch.randn(S, B, 2, 40, generator=draw).to(dtype)[..., 8:], slices.split(projected, (32, 16))
        do, seq_idx = torch.randn(S, B, 2, 16, generator=draw).to(dtype), None
        if documents is not None:
            starts = torch.rand(B, S, generator=draw) < documents
            seq_idx = torch.where(starts[:, :1], 5, 3).int() + starts.cumsum(1).int()  # rows begin with any number
            mla.attend(q, k, v, softmax_scale=0.3, seq_idx=seq_idx, window=1)  # is not what the next call is of
        outputs, again, truth = (
            outcomes.with_gradients({"o": op(*own.values(), softmax_scale=0.3, seq_idx=seq_idx, window=window)}, own, [do])
            for op, kind in ((mla.attend, dtype), (mla.attend, dtype), (mla_reference, torch.float64))
            for own in [outcomes.leaves({"q": q, "k": k, "v": v}, kind)]
        )
        for name, expected in truth.items():
            off = float((outputs[name].double() - expected).norm() / expected.norm().maximum(do.double().norm()))
            assert off < rms, (S, B, documents, window, name, off)
            assert torch.equal(outputs[name], again[name])


def route() -> None:
    """All sizes."""
    for case in router_case.CASES:
        router_case.compared(router.route, case, torch.device("cpu"))


def norms(dtype: torch.dtype, rms: float) -> None:
    """More rows than programs, in all ways."""
    for case in rms_norm_case.CASES:
        rms_norm_case.compared(norm.rms_norm, case, dtype, rms, "cpu")


FP16, FP32 = torch.float16, torch.float32
TOKENS = {"T": 37, "D": 40, "F": 24}
AWKWARD: dict[str, Any] = {"ragged": True, "popular": True, "strided": True, "layers": 2}
PROGRAMS: dict[str, Callable[[], None]] = {
    "grouped_mlp": partial(grouped_mlp, 3e-6, **TOKENS, dtype=FP32),
    "grouped_mlp, one of four ranks": partial(
        grouped_mlp, 3e-6, small_tiles=True, T=70, D=8, F=16, E=3, ranks=4, topk=4, routing="skewed", dtype=FP32
    ),
    "grouped_mlp, FP8": experts_in_fp8,
    "grouped_mlp, FP8, one of four ranks": partial(experts_in_fp8, ranks=4),
    "mamba3_projection, FP8": partial(mamba3_projection_in_fp8, T=37),
    "mamba3_projection, FP8, one token": partial(mamba3_projection_in_fp8, T=1, D=16, rows=16, narrow=8),
    "feed_forward, FP8": partial(feed_forward_in_fp8, T=37),
    "feed_forward, FP8, one token": partial(feed_forward_in_fp8, T=1, D=16, F=16),
    "feed_forward, FP8, wide": partial(feed_forward_in_fp8, T=70, D=144, F=1040),
    "indexer, rows": indexer_rows,
    "indexer, pieces": indexer_pieces,
    "indexer, long rows": indexer_long_rows,
    "indexer, gradient": indexer_gradient,
    "indexer, all keys": indexer_all_keys,
    "indexer, chunks": indexer_by_chunks,
    "indexer, learns": indexer_learns,
    "indexer, learns densely": indexer_learns_densely,
    "linear_cross_entropy": linear_cross_entropy,
    "m2rnn": partial(recurrent_mixer, 3e-6, tl.float32, documents=True, ranks=2),
    "m2rnn, in parts": partial(recurrent_mixer, 4e-3, tl.float16, checkpoint_every=8),
    "m2rnn, small steps": recurrent_mixer_of_small_steps,
    "adam": adam_steps,
    "adam, 16 bits": adam_in_16_bits,
    "add": sums_of_three,
    "embedding": embeddings,
    "mamba3": partial(mamba3_mixer, 37, H=8, N=32, out_norm=False),  # nothing of the projection is padding
    "mamba3, documents": partial(mamba3_mixer, 70, B=2, documents=(9, 20, 41), states=True),
    "mamba3, in blocks": partial(mamba3_mixer, 75, block=32, B=2, documents=(9, 23, 43), states=True),
    "mamba3, rank 2": partial(mamba3_mixer, 70, G=2, R=2, activation="heavy_tail", states=True),
    "mamba3, SISO, documents": partial(mamba3_mixer, 130, R=1, mimo=False, documents=(50, 80), states=True),
    "mla": partial(core_attention, FP32, 2e-6),
    "mla, float16": partial(core_attention, FP16, 2e-3),
    "mla_projection": partial(mla_projection, FP32, 3e-6),
    "rms_norm": partial(norms, FP32, 2e-6),
    "router": route,
    "sparse_mla": partial(sparse_attention, 4e-6, dtype=FP32, **AWKWARD),
    "sparse_mla, wide": partial(sparse_attention, 4e-6, wide=True, S=29, K=48, V=32, dtype=FP32, **AWKWARD),
    "sparse_mla, wide, float16": partial(sparse_attention, 2e-3, wide=True, K=48, V=32, dtype=FP16, ragged=True),
}
"""One small case for each path of the kernels; other sizes, dtypes and counts of heads are in tests/gpu."""


if __name__ == "__main__":
    take_scalars_of_one_element()
    keep_types()
    check_launches()
    PROGRAMS[sys.argv[1]]()
