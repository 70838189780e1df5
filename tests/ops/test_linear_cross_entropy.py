"""Linear cross-entropy against torch's own in fp64: losses, gradients for unequal weights, memory, odd labels, errors.

Shape legend: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.linear_cross_entropy import chunked
from megacpp_mcore.ops.linear_cross_entropy import reference as truth
from megacpp_mcore.ops.linear_cross_entropy.chunked import linear_cross_entropy
from megacpp_mcore.ops.main_grad import MainGrad
from megacpp_mcore.ops.testing import assert_parity
from tests.dsa_layer import Recorder, elements

NAMES = ("hidden", "weight", "bias")
CHUNKS = (None, 1, 7, 1000)


def draw(N: int, V: int, H: int = 24, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """Hidden, weight and bias with gradients, labels, and a weight for each token."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((N, H), (V, H), (V,), (N,))]
    label = torch.randint(V, (N,), generator=generator)
    return [*(tensor.to(dtype).requires_grad_() for tensor in numbers[:3]), label, numbers[3]]


def eager(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """What everybody writes: all logits in the dtype of the weights, then torch's cross-entropy in at least fp32."""
    logit = torch.nn.functional.linear(hidden, weight, bias)
    logit = logit.to(torch.promote_types(logit.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logit, label, reduction="none")


def ours(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, label: torch.Tensor, **sizes: Any) -> Any:
    return linear_cross_entropy(hidden, weight, label, bias_V=bias, **sizes).loss


def reference(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return truth.linear_cross_entropy(hidden, weight, label, bias_V=bias)


def outcome(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor], **sizes: Any) -> list[torch.Tensor]:
    """Losses, and the gradients of hidden, weight and bias for the tokens' own weights."""
    *leaves, label, weight = inputs
    loss = op(*leaves, label, **sizes)
    return [loss, *torch.autograd.grad(loss, leaves, weight.to(loss.dtype))]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor], **limits: Any) -> None:
    peers = limits.pop("peers", [None] * len(actual))
    for name, tensor, want, peer in zip(("loss", *NAMES), actual, expected, peers, strict=True):
        if name == "loss":  # each token's is a row of its own; the bias is one, as its entries cancel
            tensor, want, peer = (tensor if tensor is None else tensor[:, None] for tensor in (tensor, want, peer))
        assert_parity(tensor, want, dtype_peer=peer, name=name, **limits)


@pytest.mark.parametrize(("N", "V"), [(1, 1), (1, 37), (13, 200), (23, 129)])
@pytest.mark.parametrize("are_weights_known", [False, True])
@pytest.mark.parametrize("token_chunk", CHUNKS)
def test_losses_and_gradients(N: int, V: int, token_chunk: int | None, are_weights_known: bool) -> None:
    inputs = draw(N, V)
    outputs = outcome(ours, inputs, token_chunk=token_chunk, token_weight=inputs[-1] * 3 if are_weights_known else None)
    statistics = linear_cross_entropy(inputs[0], inputs[1], inputs[3], bias_V=inputs[2], token_chunk=token_chunk)
    top, column = torch.nn.functional.linear(*inputs[:3]).max(-1)
    assert torch.equal(statistics.top_column, column)
    assert torch.allclose(statistics.top_logit, top, rtol=1e-12)
    assert not statistics.top_logit.requires_grad
    expected = outcome(eager, inputs)
    assert_same(outcome(reference, inputs), expected, rms=1e-12) if V > 1 else None
    if V == 1:  # nothing to choose from: all is zero but for rounding
        assert max(float(tensor.detach().abs().max()) for tensor in outputs) < 1e-13
        return
    assert_same(outputs, expected, rms=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_eager(dtype: torch.dtype) -> None:
    """2345 tokens, in chunks that do not divide anything; gradients as the backward and as the forward pass makes them."""
    low = draw(2345, 611, H=32, dtype=dtype)
    low[0], low[1] = ((tensor.detach() * 0.3).requires_grad_() for tensor in low[:2])  # logits of a common size
    high = [tensor.detach().double().requires_grad_() for tensor in low[:3]] + low[3:]
    peers, expected = outcome(eager, low), outcome(eager, high)
    rms = 1e-6 if dtype == torch.float32 else 5e-3
    for token_weight in (None, low[-1] * 4):
        for token_chunk in (1200, 200):  # the gradient of the weight summed up in 16 bits, and in float32
            outputs = outcome(ours, low, token_chunk=token_chunk, token_weight=token_weight)
            assert [tensor.dtype for tensor in outputs] == [torch.float32, dtype, dtype, dtype]
            assert_same(outputs, expected, rms=rms, peers=peers, max_abs_factor=2)


@pytest.mark.parametrize("token_chunk", [None, 7])
def test_tokens_of_weight_0_have_their_loss_and_no_gradient(token_chunk: int | None) -> None:
    """Whatever gradient arrives for them."""
    *leaves, label, _ = draw(13, 40)
    mask = (torch.arange(13) % 3 > 0).double()
    for op, sizes in ((truth.linear_cross_entropy, {}), (linear_cross_entropy, {"token_chunk": token_chunk})):
        results = []
        for token_weight, arriving in ((None, mask), (mask, mask), (mask, torch.ones(13)), (mask, mask / mask)):
            output = op(leaves[0], leaves[1], label, bias_V=leaves[2], token_weight=token_weight, **sizes)
            loss = getattr(output, "loss", output)
            results.append([loss.detach(), *torch.autograd.grad(loss, leaves, arriving.double())])
        assert float(results[0][1][mask == 0].abs().max()) == 0.0
        assert float(results[0][1][mask != 0].abs().amin(0).max()) > 0.0
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


BROKEN = {
    "one token": lambda weight: weight.index_fill(0, torch.tensor([4]), 7.0),
    "its sign": lambda weight: torch.cat((weight[:1], -weight[1:])),
    "one is forgotten": lambda weight: weight.index_fill(0, torch.tensor([4]), 0.0),
    "little": lambda weight: weight * (1 + 1e-3 * (torch.arange(len(weight)) % 2)),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_gradient_that_is_not_what_the_weights_promise_is_refused(broken: str) -> None:
    hidden, weight_VH, _, label, weight = draw(13, 40)
    loss = linear_cross_entropy(hidden, weight_VH, label, token_weight=weight).loss
    with pytest.raises(RuntimeError, match="token_weight"):
        loss.backward(BROKEN[broken](weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_factor_that_the_weights_are_multiplied_by(dtype: torch.dtype) -> None:
    """Tiny, none at all, as after an overflow; more than once; weights rounded on their way, and of any dtype."""
    hidden, weight_VH, _, label, weight = draw(13, 40, dtype=dtype)
    weight, leaves = weight.float(), (hidden, weight_VH)
    loss = linear_cross_entropy(hidden, weight_VH, label, token_weight=weight).loss
    plain = linear_cross_entropy(hidden, weight_VH, label).loss
    for factor in (1e-9, -3.0, 2.0**30, 0.0):
        gradients, expected = (torch.autograd.grad(y, leaves, weight * factor, retain_graph=True) for y in (loss, plain))
        for grad, want in zip(gradients, expected, strict=True):
            assert grad.dtype == dtype
            assert_parity(grad, want, rms=1e-6 if dtype == torch.float32 else 1e-2)
    for factor in (float("inf"), float("nan")):
        assert not any(bool(g.isfinite().any()) for g in torch.autograd.grad(loss, leaves, weight * factor, retain_graph=True))
    for scale in (1e-20, 3e19):  # their squares leave float32's range
        large = linear_cross_entropy(hidden, weight_VH, label, token_weight=weight * scale).loss
        grad, want = (torch.autograd.grad(y, hidden, weight * by, True)[0] for y, by in ((large, scale / 2), (plain, 0.5)))
        assert dtype != torch.float32 or assert_parity(grad / scale, want, rms=1e-5) is None
    none = linear_cross_entropy(hidden, weight_VH, label, token_weight=torch.zeros(13)).loss
    assert not any(bool(gradient.any()) for gradient in torch.autograd.grad(none, leaves, weight))
    mask = torch.arange(13) % 3 > 0
    for token_weight in (mask, mask.long(), mask * 5):
        counted = linear_cross_entropy(hidden, weight_VH, label, token_weight=token_weight).loss
        for grad, want in zip(
            torch.autograd.grad(counted, leaves, mask * 0.5),
            torch.autograd.grad(plain, leaves, mask * 0.5, True),
            strict=True,
        ):
            assert_parity(grad, want, rms=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("enabled", "dtype", "known", "forward", "backward"),
    [
        (True, torch.float32, True, 3, 0),
        (True, torch.float32, False, 1, 3),
        (True, torch.float16, True, 1, 3),  # which would lose small gradients before they are scaled
        (False, torch.float32, True, 1, 0),
    ],
)
def test_number_of_products(enabled: bool, dtype: torch.dtype, known: bool, forward: int, backward: int) -> None:
    """Without gradients, as in an evaluation and in the first pass of activation recompute, one."""
    hidden, weight_VH, _, label, weight = draw(13, 40, dtype=dtype)
    counts = []
    with torch.set_grad_enabled(enabled):
        with Products() as made:
            loss = linear_cross_entropy(hidden, weight_VH, label, token_weight=weight if known else None).loss
        counts.append(made.count)
    with Products() as made:
        if enabled:
            loss.backward(weight.float())
    assert [*counts, made.count] == [forward, backward]


class Products(TorchDispatchMode):
    """How many matrix products there are."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def test_logit_scale_is_a_factor_on_weight_and_bias() -> None:
    hidden, weight, bias, label, cotangent = draw(13, 50)
    for op in (linear_cross_entropy, truth.linear_cross_entropy):
        loss = op(hidden, weight, label, bias_V=bias, logit_scale=0.25)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
        expected = eager(hidden, weight * 0.25, bias * 0.25, label)
        gradients = torch.autograd.grad(loss, (hidden, weight, bias), cotangent)
        assert_same(
            [loss, *gradients], [expected, *torch.autograd.grad(expected, (hidden, weight, bias), cotangent)], rms=1e-12
        )


def test_labels_outside_of_the_vocabulary() -> None:
    """The loss is log-sum-exp less the maximum, its gradient the softmax's; other tokens do not notice."""
    inputs = draw(8, 30)
    inputs[3] = torch.tensor([-100, -1, 30, 10**6, 0, 29, 5, 5])
    outputs = outcome(ours, inputs, token_chunk=3)
    assert_same(outputs, outcome(reference, inputs), rms=1e-12)
    logit = torch.nn.functional.linear(*inputs[:3])
    assert torch.allclose(outputs[0][:4], (logit.logsumexp(-1) - logit.amax(-1))[:4])
    assert torch.allclose(outputs[0][4:], eager(*inputs[:3], inputs[3].clamp(0, 29))[4:])


def test_nan_reaches_the_loss() -> None:
    hidden, weight, bias, label, _ = draw(6, 20)
    with torch.no_grad():
        hidden[2, 0] = torch.nan
    loss = ours(hidden, weight, bias, label, token_chunk=4)
    assert torch.isnan(loss).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("are_weights_known", [False, True])
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_frozen_inputs(frozen: tuple[int, ...], are_weights_known: bool) -> None:
    inputs = draw(11, 30)
    expected = outcome(eager, inputs)[1:]
    leaves = [tensor.detach().clone().requires_grad_(index not in frozen) for index, tensor in enumerate(inputs[:3])]
    ours(*leaves, inputs[3], token_chunk=7, token_weight=inputs[4] if are_weights_known else None).backward(inputs[4])
    for index, leaf in enumerate(leaves):
        if index in frozen:
            assert leaf.grad is None
        else:
            assert torch.allclose(leaf.grad, expected[index], rtol=1e-10)


@pytest.mark.parametrize("are_weights_known", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to(wide: torch.dtype, are_weights_known: bool) -> None:
    hidden, weight, bias, label, cotangent = draw(50, 60, dtype=torch.bfloat16)
    _, _, expected, _ = outcome(ours, [hidden, weight, bias, label, cotangent])
    buffer, calls = torch.ones(60, 24, dtype=wide), []

    def placeholder() -> torch.Tensor:
        calls.append(buffer.clone())
        return torch.full_like(weight, 3.0)

    options = {"main_grad": MainGrad(buffer, placeholder), "token_chunk": 16}
    loss = ours(hidden, weight, bias, label, token_weight=cotangent if are_weights_known else None, **options)
    gradient = torch.autograd.grad(loss, weight, cotangent.float() / 3)[0]
    assert torch.equal(gradient, torch.full_like(weight, 3.0))
    assert len(calls) == 1
    assert torch.equal(calls[0], buffer)
    assert torch.allclose(buffer.float() - 1, expected.float() / 3, rtol=2e-2, atol=2e-2)
    # Once the weight is frozen nothing.
    ours(hidden, weight.detach(), bias, label, main_grad=MainGrad(buffer, placeholder)).sum().backward()
    assert len(calls) == 1
    assert torch.equal(calls[0], buffer)


@pytest.mark.parametrize("are_weights_known", [False, True])
def test_no_tensor_of_tokens_times_vocabulary(monkeypatch: pytest.MonkeyPatch, are_weights_known: bool) -> None:
    monkeypatch.setitem(chunked.LOGIT_BYTES, "cpu", 8 * 300 * 4)
    monkeypatch.setattr(chunked, "TOKENS", 4)
    inputs = draw(200, 300, H=12, dtype=torch.float32)
    with Recorder() as all_at_once:
        expected = outcome(eager, inputs)
    with Recorder() as in_chunks:
        outputs = outcome(ours, inputs, token_weight=inputs[-1] if are_weights_known else None)
    assert elements(all_at_once.largest) == 200 * 300
    assert elements(in_chunks.largest) == 300 * 12  # the weight
    assert_same(outputs, expected, rms=2e-6)


def test_uninitialised_memory_is_never_read() -> None:
    inputs = draw(37, 90, dtype=torch.float32)
    calls = [{"token_chunk": 5}, {"token_chunk": 5, "token_weight": inputs[-1]}]
    expected = [outcome(ours, inputs, **call) for call in calls]
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    try:
        assert torch.isnan(torch.empty(8)).all()
        outputs = [outcome(ours, inputs, **call) for call in calls]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for both in zip(outputs, expected, strict=True) for pair in zip(*both, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 6)}, r"expected \[..., H\] and \[V, H\]"),
        ({"hidden": torch.zeros(0, 5)}, r"\(0, 5\)"),
        ({"weight_VH": torch.zeros(5)}, r"expected \[..., H\] and \[V, H\]"),
        ({"hidden": torch.zeros(4, 5, dtype=torch.bfloat16)}, "torch.bfloat16 and torch.float32"),
        ({"label": torch.zeros(3, dtype=torch.int64)}, r"label has shape \(3,\)"),
        ({"label": torch.zeros(4)}, r"expected torch.int64"),
        ({"bias_V": torch.zeros(6)}, r"bias has shape \(6,\)"),
        ({"bias_V": torch.zeros(7, dtype=torch.float64)}, "torch.float64.*torch.float32"),
        ({"token_weight": torch.ones(5)}, r"token_weight has shape \(5,\), expected \(4,\)"),
        ({"token_weight": torch.ones(4, requires_grad=True)}, "token_weight .*gradient"),
        ({"token_chunk": 0}, "token_chunk is 0"),
        ({"main_grad": MainGrad(torch.zeros(7, 6), lambda: None)}, r"shape \(7, 6\)"),
        ({"main_grad": MainGrad(torch.zeros(5, 7).t(), lambda: None)}, r"strides \(1, 7\)"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    good = {"hidden": torch.zeros(4, 5), "weight_VH": torch.zeros(7, 5), "label": torch.zeros(4, dtype=torch.int64)}
    linear_cross_entropy(**good)
    with pytest.raises(ModelError, match=message):
        linear_cross_entropy(**{**good, **change})
    if not {"token_chunk", "main_grad"} & change.keys():
        with pytest.raises(ModelError, match=message):
            truth.linear_cross_entropy(**{**good, **change})
