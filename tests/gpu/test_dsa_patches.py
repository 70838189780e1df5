"""The patches of stock's DSA on a GPU: a real capture and replay, parity with stock, and peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.backends import observed
from megacpp_mcore.ops.indexer import triton as indexer
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.patches import dsa_graph_safety, dsa_indexer_memory
from tests import stock
from tests.dsa_layer import ONE_RANK, dsa_attention, dsa_config, layer_inputs, run_layer, stock_in_double
from tests.gpu.device import peak
from tests.patches import test_dsa_sparse_attention as sparse_attention
from tests.patches.test_dsa_graph_safety import packed
from tests.patches.test_dsa_indexer_memory import (
    assert_same_selection,
    dsa,
    loss_and_gradients,
    patched,
    selection,
)

ROOT = Path(__file__).parents[2]
PATCHES = {"dsa-graph-safety": dsa_graph_safety.PATCH, "dsa-indexer-memory": dsa_indexer_memory.PATCH}
TOKENS = 256


def layer(variant: str) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """A stock DSA layer on the GPU, its inputs and the options of its call."""
    torch.manual_seed(3)
    config = dsa_config(dsa_indexer_use_sparse_loss=variant != "dense", dsa_indexer_topk=32)
    options: dict[str, Any] = {}
    if variant == "packed":
        params = packed([0, 96, 96, TOKENS])
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "real_token_mask_q"):
            setattr(params, name, getattr(params, name).cuda())
        options = {"packed_seq_params": params}
    inputs = layer_inputs(TOKENS, 1 if options else 2, "cuda")
    return dsa_attention(config).cuda().train(), inputs, options


def graph_equals_eager(variant: str) -> None:
    """Capture a forward and backward pass of the layer, replay it on other numbers, and compare with eager mode.

    Raises:
        RuntimeError: it cannot be captured.
    """
    stock.loss_scale(1.0)
    scaler = dsa().DSAIndexerLossAutoScaler
    scaler.main_loss_backward_scale = scaler.main_loss_backward_scale.cuda()
    attention, inputs, options = layer(variant)
    leaves = [*inputs.values(), *attention.parameters()]

    def step() -> list[torch.Tensor]:
        output = run_layer(attention, inputs, **options)
        gradients = torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True)
        return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (11, 12):
        other = layer_inputs(TOKENS, inputs["x"].shape[1], "cuda", seed=seed)
        with torch.no_grad():
            for name, tensor in inputs.items():
                tensor.copy_(other[name])
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        eager = step()
        assert len(replayed) == len(eager) > 8
        for number, (actual, expected) in enumerate(zip(replayed, eager, strict=True)):
            assert expected.abs().sum() > 0
            assert_parity(actual, expected, rms=1e-5, name=f"tensor {number}, inputs {seed}")


def captured_in_a_process(variant: str, patches: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run :func:`graph_equals_eager` in a process of its own: a capture that fails leaves CUDA unusable."""
    code = f"""
import os, sys, torch, traceback
from megacpp_mcore.patches.machinery.registry import Registry
from tests.gpu.runs import process_groups
from tests.gpu.test_dsa_patches import PATCHES, graph_equals_eager
store = torch.distributed.FileStore({str(folder / "store")!r}, 1)
with process_groups(0, store=store, rank=0, world_size=1):
    Registry(PATCHES.values()).apply({list(patches)!r})
    try:
        graph_equals_eager({variant!r})
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # after a capture that failed nothing can be taken down in order
print("captured, replayed, equal")
"""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
        cwd=ROOT,
        timeout=300,
    )


@pytest.mark.parametrize("patches", [(), ("dsa-graph-safety",), ("dsa-graph-safety", "dsa-indexer-memory")], ids=str)
@pytest.mark.parametrize("variant", ["sparse", "dense", "packed"])
def test_a_patched_layer_is_captured_and_replayed_and_stocks_cannot_be(
    tmp_path: Path, variant: str, patches: tuple[str, ...]
) -> None:
    done = captured_in_a_process(variant, patches, tmp_path)
    assert (done.returncode == 0) == bool(patches), done.stderr
    assert ("captured, replayed, equal" in done.stdout) == bool(patches)
    assert patches or "captur" in done.stderr


def on_gpu(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same on the GPU; an expanded key stays expanded."""
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    if "key" in moved and tensors["key"].stride(2) == 0:
        moved["key"] = moved["key"][:, :, :1].expand_as(moved["key"])
    return moved


def drawn(S: int, width: int = 64) -> Any:
    """bf16, one sequence, 32 indexer heads of ``width``, 14 attention heads of 128."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    inputs = SimpleNamespace(q=draw(S, 1, 32, width), k=draw(S, 1, width), weights=draw(S, 1, 32) / 45)
    inputs.query, inputs.key = draw(S, 1, 14, 128), draw(S, 1, 1, 128).expand(-1, -1, 14, -1)
    return inputs


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", ["none", "packed", "mask"])
def test_16_bit_inputs_go_to_the_kernels(kind: str, width: int) -> None:
    """Selection, scores and losses are stock's; notes say what kernels computed."""
    inputs, options = drawn(700, width), on_gpu(selection(kind, 700, 700, 1))

    def results() -> tuple[torch.Tensor, ...]:
        score, index = dsa().fused_qk_topk_naive(inputs.q, inputs.k, inputs.weights, 64, **options)
        losses = [loss_and_gradients(inputs, 64, sparse, **options)[1] for sparse in (True, False)]
        return score + 0, index, *losses

    observed.forget()
    score, index, *losses = results()
    with patched(), mock.patch.object(indexer, "score_all", wraps=indexer.score_all) as scored:
        ours_score, ours, *ours_losses = results()
    assert scored.call_count >= 6  # index, scores, and for each loss the selection; dense, also its two passes
    torch.testing.assert_close(ours_score, score, rtol=1e-5, atol=1e-5)
    assert_same_selection(ours, index, score)
    torch.testing.assert_close(ours_losses, losses, rtol=1e-4, atol=0)
    notes = {note["reason"] for note in observed.notes() if note["op"] == "indexer"}
    parts, plain = ["scores"], kind == "mask"
    if not plain:
        parts += ["scores, targets", "scores, targets, gradients", "targets, gradients" if width == 64 else "targets"]
    expected = {f"{part} by Triton kernels, the rest in PyTorch" for part in parts}
    expected |= {"all in PyTorch"} if plain else set()
    assert notes == {f"the patch dsa-indexer-memory, {how}" for how in expected}


@pytest.mark.parametrize("sparse", [True, False])
def test_peak_memory_on_a_gpu(sparse: bool) -> None:
    """sq 4096: the peak above what was there before.

    Gradients are compared without ReLU: of its hundreds of millions of logits some do round to the other side.
    """
    S = 4096
    inputs, bounds = drawn(S), on_gpu(selection("bounds", S, S))

    def work() -> None:
        loss_and_gradients(inputs, 256, sparse, ONE_RANK, **bounds)

    peak(work)  # cuBLAS takes its workspace
    stocks = peak(work)
    expected = loss_and_gradients(inputs, 256, sparse, use_relu=False, **bounds)
    score = dsa().fused_qk_topk_naive(inputs.q, inputs.k, inputs.weights, 256, use_relu=False, **bounds)[0]
    with patched():
        ours = peak(work)
        results = loss_and_gradients(inputs, 256, sparse, index=expected[0], use_relu=False, **bounds)
    assert stocks > 10 * ours, (stocks, ours)
    assert_same_selection(results[0], expected[0], score)
    torch.testing.assert_close(results[1], expected[1], rtol=1e-4, atol=0)
    for name, grad, expected_grad in zip("qwk", results[2], expected[2], strict=True):
        assert_parity(grad, expected_grad, rms=1e-2, name=f"grad {name}")


@pytest.mark.parametrize(("widths", "heads"), [((128, 64), 14), ((576, 512), 64)], ids=str)
def test_sparse_attention_runs_by_kernels(widths: tuple[int, int], heads: int) -> None:
    """Output and gradients are stock's in float64, as far as bf16 goes, and no scores of all keys are held."""
    (S, B, N), (K, V) = (1025, 2, 64), widths
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    query, key, gradient = (
        draw(S, B, heads, K).requires_grad_(),
        draw(S, B, 1, K).requires_grad_(),
        draw(S, B, heads, V),
    )
    score_BST = torch.rand(B, S, S, generator=generator, device="cuda")  # some of the selected keys lie ahead
    tensors = query, key, score_BST.topk(N).indices, gradient

    def run() -> list[torch.Tensor]:
        output = dsa()._unfused_absorbed_dsa_fn(*tensors[:3], K**-0.5, V)
        return [output.detach(), *torch.autograd.grad(output, tensors[:2], gradient.to(output.dtype))]

    with stock_in_double():
        expected = run()
    stocks = peak(run)
    with sparse_attention.patched() as original:
        actual = run()
        ours = peak(run)
    original.assert_not_called()
    (note,) = observed.notes()
    assert note["observed"] == "triton"
    assert stocks > 10 * ours, (stocks, ours)
    for name, tensor, other in zip(("output", "query", "key"), actual, expected, strict=True):
        first = S // 2 if name == "query" else 0  # of queries that see few keys the gradient cancels
        seen = other[first:].abs().amax(-1) > 0
        assert_parity(tensor[first:][seen], other[first:][seen], rms=2e-2, name=name)
        assert (tensor[first:][~seen] == 0).all()
