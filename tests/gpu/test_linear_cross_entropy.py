"""Linear cross-entropy on a GPU: parity with fp64, the peak memory promised, no wait for the device, CUDA graphs.

Shape legend: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_mcore.ops.linear_cross_entropy.chunked import VocabShards, linear_cross_entropy
from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import assert_parity
from tests.gpu.device import peak, replayed, without_waiting

ROOT = Path(__file__).parents[2]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw(N: int, H: int, V: int, dtype: torch.dtype) -> Inputs:
    """Hidden, weight, labels, and a weight for each token; logits have a standard deviation of about 1."""
    generator = torch.Generator("cuda").manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    label = torch.randint(V, (N,), generator=generator, device="cuda")
    hidden, weight = normal(N, H).to(dtype), (normal(V, H) * H**-0.5).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), label, normal(N)


def eager(hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    logit = torch.mm(hidden, weight.t())
    logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logit, label, reduction="none")


def outcome(op: Callable[..., torch.Tensor], inputs: Inputs, **options: Any) -> list[torch.Tensor]:
    hidden, weight, label, cotangent = inputs
    loss = op(hidden, weight, label, **options)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight), cotangent.to(loss.dtype))]


def ours(hidden: torch.Tensor, weight: torch.Tensor, label: torch.Tensor, **options: Any) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, label, **options).loss


def accumulated(inputs: Inputs, **options: Any) -> list[torch.Tensor]:
    """As :func:`outcome`, with the weight's gradient in a main_grad."""
    hidden, weight, label, cotangent = inputs
    buffer = torch.zeros(weight.shape, device="cuda")
    loss = ours(hidden, weight, label, main_grad=MainGrad(buffer, lambda: None), **options)
    grad_hidden, _ = torch.autograd.grad(loss, (hidden, weight), cotangent, allow_unused=True)
    return [loss.detach(), grad_hidden, buffer]


def in_float64(inputs: Inputs) -> Inputs:
    hidden, weight, label, cotangent = inputs
    return (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
        label,
        cotangent.double(),
    )


def assert_same(found: list[torch.Tensor], truth: list[torch.Tensor], peer: list[torch.Tensor], rms: float) -> None:
    # Where a few numbers are rounded in float32 the peer may be right by chance; in 16 bits, with many, that says something.
    factor = 2.0 if found[1].dtype != torch.float32 and len(found[0]) > 1 else None
    for name, actual, expected, other in zip(("loss", "hidden", "weight"), found, truth, peer, strict=True):
        rows = (tensor if tensor.dim() > 1 else tensor[:, None] for tensor in (actual, expected, other))
        actual, expected, other = rows
        assert_parity(actual, expected, rms=rms, dtype_peer=other, max_abs_factor=factor, name=name)


def masked(inputs: Inputs) -> tuple[Inputs, torch.Tensor]:
    """The inputs with the gradient that a loss mask and a factor for all tokens give, and that mask."""
    *others, cotangent = inputs
    mask = (cotangent > -1.3).float()
    return (*others, mask * 0.37), mask


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 5e-6), (torch.bfloat16, 5e-3), (torch.float16, 5e-3)])
@pytest.mark.parametrize(("N", "H", "V"), [(2345, 320, 9001), (1, 64, 5000), (4097, 512, 50257), (4096, 512, 16384)])
def test_parity(N: int, H: int, V: int, dtype: torch.dtype, rms: float) -> None:
    """Gradients as the backward pass makes them, and as the forward pass does; in one chunk and in several; the same twice."""
    inputs, mask = masked(draw(N, H, V, dtype))
    truth, peer = outcome(eager, in_float64(inputs)), outcome(eager, inputs)
    for weights in ({}, {"token_weight": mask}):
        for chunk in (None, 1000):
            options = {"token_chunk": chunk} | weights
            for run in (partial(outcome, ours), accumulated):
                outputs = run(inputs, **options)
                assert_same(outputs, truth, peer, rms)
                assert all(map(torch.equal, outputs, run(inputs, **options)))


@pytest.mark.parametrize("known", [False, True])
def test_vocabulary_over_ranks(known: bool, tmp_path: Path) -> None:
    """A group of one rank: statistics and gradient in two steps, with what ranks send each other in between."""
    inputs, mask = masked(draw(2345, 320, 9001, torch.bfloat16))
    options = {"token_weight": mask if known else None, "token_chunk": 1000}
    expected = outcome(ours, inputs, **options)
    distributed.init_process_group("nccl", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for sequence_parallel in (False, True):
            shards = VocabShards(distributed.group.WORLD, sequence_parallel)
            outputs = outcome(ours, inputs, shards=shards, **options)
            for out, ref in zip(outputs, expected, strict=True):
                assert_parity(out if out.dim() > 1 else out[:, None], ref if ref.dim() > 1 else ref[:, None], rms=4e-3)
    finally:
        distributed.destroy_process_group()


BROKEN_PROMISE = """
import torch
from tests.gpu.test_linear_cross_entropy import draw, ours
hidden, weight, label, cotangent = draw(64, 64, 512, torch.bfloat16)
ours(hidden, weight, label, token_weight=torch.ones(64, device="cuda")).backward(cotangent)
torch.cuda.synchronize()
"""


def test_a_gradient_that_is_not_what_the_weights_promise_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN_PROMISE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode != 0
    assert "is not token_weight times one factor" in ended.stderr


@pytest.mark.parametrize("known", [False, True])
def test_nothing_waits_for_the_device_and_a_graph_replays(known: bool) -> None:
    inputs, mask = masked(draw(512, 128, 3000, torch.bfloat16))
    others = [tensor.detach().flip(0) for tensor in inputs]
    options = {"token_weight": mask} if known else {}
    outcome(ours, inputs, **options)
    with without_waiting():
        outcome(ours, inputs, **options)
        accumulated(inputs, **options)
    captured = replayed(lambda: outcome(ours, inputs, **options), (*inputs, mask), (*others, mask.flip(0)))
    for actual, expected in zip(captured, outcome(ours, inputs, **options), strict=True):
        assert_parity(actual, expected, rms=5e-3)


def test_at_the_size_of_the_model() -> None:
    """8192 × 3584 × 65536 in bfloat16: memory held on top of inputs and main_grad, including the returned gradients."""
    inputs, mask = masked(draw(8192, 3584, 65536, torch.bfloat16))
    weights = {"token_weight": mask}
    outcome(ours, draw(64, 64, 64, torch.bfloat16))  # the libraries' workspaces
    buffer = 4 * 65536 * 3584
    assert peak(lambda: outcome(eager, inputs)) > 8192 * 65536 * (2 + 4)  # logits in bfloat16 and float32
    assert peak(lambda: outcome(ours, inputs)) <= 1.1e9
    assert peak(lambda: outcome(ours, inputs, **weights)) <= 1.7e9
    assert peak(lambda: accumulated(inputs)) - buffer <= 0.65e9
    assert peak(lambda: accumulated(inputs, **weights)) - buffer <= 1.2e9
    peer, truth = outcome(eager, inputs), outcome(eager, in_float64(inputs))
    for outputs in (
        outcome(ours, inputs),
        outcome(ours, inputs, **weights),
        accumulated(inputs),
        accumulated(inputs, **weights),
    ):
        assert_same(outputs, truth, peer, 5e-3)
