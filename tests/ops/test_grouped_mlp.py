"""grouped_mlp and routed_mlp against one token at a time, in fp64, and against Megatron's own experts.

Shape legend: T tokens, E experts, D model width, F expert width.
"""

from __future__ import annotations

import math

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp.reference import grouped_mlp, routed_mlp
from megacpp_mcore.ops.testing import assert_parity

COUNTS = {
    "even": [3, 3, 3, 3],
    "odd": [5, 1, 7, 2],
    "some without tokens": [0, 4, 0, 3],
    "all to the first": [9, 0, 0, 0],
    "all to the last": [0, 0, 0, 9],
    "one token": [0, 0, 1, 0],
    "no token": [0, 0, 0, 0],
}


def draw(counts, D=5, F=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    T, E = sum(counts), len(counts)
    shapes = ((T, D), (E, F, D), (E, D, F), (T,))
    x, w1, w2, probs = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    # Activations of about 1: where GELU underflows, fp32 and fp64 rightly disagree.
    tensors = (x, w1 / D**0.5, w2 / F**0.5, probs.sigmoid())
    return [t.to(dtype).requires_grad_() for t in tensors]


def gelu(x, activation):
    """Written out, so that the choice between the two forms is tested and not assumed."""
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def token_truth(x, counts, w1, w2, probs, activation="gelu"):
    expert_of = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = []
    for t, e in enumerate(expert_of):
        hidden = gelu(w1[e] @ x[t], activation)
        rows.append(w2[e] @ (hidden if probs is None else hidden * probs[t]))
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("case", [c for c in COUNTS if c != "no token"])
def test_matches_one_token_at_a_time(case, with_probs, activation):
    counts = COUNTS[case]
    x, w1, w2, probs = draw(counts)
    leaves = [x, w1, w2, *([probs] if with_probs else [])]
    arguments = (w1, w2, probs if with_probs else None)
    actual = grouped_mlp(x, torch.tensor(counts), *arguments, activation=activation)
    expected = token_truth(x, counts, *arguments, activation=activation)
    assert_parity(actual, expected, rms=1e-12, name="y")
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    have, want = torch.autograd.grad(actual, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent)
    for name, a, e in zip(("x", "w1", "w2", "probs"), have, want, strict=False):
        assert_parity(a, e, rms=1e-11, name=f"d{name}")


@pytest.mark.parametrize("case", COUNTS)
def test_experts_without_tokens_get_exact_zeros(case):
    counts = COUNTS[case]
    leaves = x, w1, w2, probs = draw(counts)
    y = grouped_mlp(x, torch.tensor(counts), w1, w2, probs)
    assert y.shape == x.shape
    dx, dw1, dw2, dprobs = torch.autograd.grad(y.sum(), leaves)  # raises if a leaf is not in the graph
    assert dx.shape == x.shape
    assert dprobs.shape == probs.shape
    for e, count in enumerate(counts):
        for gradient in (dw1[e], dw2[e]):
            if count:
                assert gradient.abs().sum() > 0
            else:
                assert torch.equal(gradient, torch.zeros_like(gradient))


def test_separate_weights_per_expert_also_get_zeros():
    x, w1, w2, probs = draw([0, 4])
    separate = [w.detach().clone().requires_grad_() for w in w1]
    y = grouped_mlp(x, torch.tensor([0, 4]), torch.stack(separate), w2, probs)
    gradients = torch.autograd.grad(y.sum(), separate)
    assert torch.equal(gradients[0], torch.zeros_like(gradients[0]))
    assert gradients[1].abs().sum() > 0


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_low_precision(dtype, rms):
    counts = [1000, 0, 1344, 1]  # 2345 tokens
    low = draw(counts, D=32, F=48, dtype=dtype)
    high = [t.detach().double().requires_grad_() for t in low]
    results = []
    for x, w1, w2, probs in (low, high):
        y = grouped_mlp(x, torch.tensor(counts), w1, w2, probs)
        cotangent = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        results.append((y, *torch.autograd.grad(y, (x, w1, w2, probs), cotangent.to(dtype).to(y.dtype))))
    for name, actual, expected in zip(("y", "dx", "dw1", "dw2", "dprobs"), *results, strict=True):
        assert actual.dtype == dtype
        if name in ("dw1", "dw2"):
            # One row an expert: GELU is flat near -0.75, where a single token leaves a hidden unit only rounding.
            live = [e for e, count in enumerate(counts) if count]
            actual, expected = actual[live].flatten(1), expected[live].flatten(1)
        assert_parity(actual, expected, rms=rms, name=name)


def test_gradcheck():
    counts = [2, 0, 1]
    x, w1, w2, probs = draw(counts, D=3, F=2)

    def run(*tensors):
        return grouped_mlp(tensors[0], torch.tensor(counts), *tensors[1:])

    assert torch.autograd.gradcheck(run, [x, w1, w2, probs])
    assert torch.autograd.gradcheck(lambda a, b, c: run(a, b, c, None), [x, w1, w2])


class BiasFreeLinear(torch.nn.Module):
    """A linear layer as Megatron calls one: it returns its output and a bias to add later, here none."""

    def __init__(self, weight):
        super().__init__()
        self.weight = [weight]  # in a list, so that it is not registered and stays the test's own leaf

    def forward(self, hidden):
        return hidden @ self.weight[0].T, None


def test_matches_megatron_experts():
    """Megatron's own expert MLP: where the probabilities enter, which GELU it is, how the weights lie."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    counts = [3, 0, 4]
    x, w1, w2, probs = draw(counts, D=8, F=6)
    expert = object.__new__(MLP)
    torch.nn.Module.__init__(expert)
    expert.config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=6, add_bias_linear=False
    )
    assert expert.config.activation_func is torch.nn.functional.gelu
    expert.activation_func = expert.config.activation_func
    rows = []
    for e, (tokens, prob) in enumerate(zip(x.split(counts), probs.split(counts), strict=True)):
        expert.linear_fc1, expert.linear_fc2 = BiasFreeLinear(w1[e]), BiasFreeLinear(w2[e])
        rows.append(expert.forward(tokens, prob)[0])
    assert_parity(grouped_mlp(x, torch.tensor(counts), w1, w2, probs), torch.cat(rows), rms=1e-12, name="y")


@pytest.mark.parametrize("damage", ["dropped row", "token at the wrong expert", "probability left out", "tanh", "sign"])
def test_parity_notices(damage):
    counts = [5, 1, 7, 2]
    x, w1, w2, probs = (t.detach() for t in draw(counts))
    expected = grouped_mlp(x, torch.tensor(counts), w1, w2, probs)
    wrong, rms = expected.clone(), 5e-3
    if damage == "dropped row":
        wrong[5] = 0
    elif damage == "token at the wrong expert":
        wrong = grouped_mlp(x, torch.tensor([4, 2, 7, 2]), w1, w2, probs)
    elif damage == "probability left out":
        probs[7] = 1.0
        wrong = grouped_mlp(x, torch.tensor(counts), w1, w2, probs)
    elif damage == "tanh":
        # The two GELUs differ by less than bf16 resolves; fp32's tolerance tells them apart.
        wrong, rms = grouped_mlp(x, torch.tensor(counts), w1, w2, probs, activation="gelu_tanh"), 1e-6
    else:
        wrong[14] *= -1
    with pytest.raises(AssertionError):
        assert_parity(wrong, expected, rms=rms, name="y")


def bad_calls():
    x, w1, w2, probs = (t.detach() for t in draw([2, 2]))
    counts = torch.tensor([2, 2])
    return {
        "too few counted": ((x, torch.tensor([2, 1]), w1, w2, probs), {}, "sum to T = 4"),
        "too many counted": ((x, torch.tensor([2, 3]), w1, w2, probs), {}, "sum to T = 4"),
        "negative": ((x, torch.tensor([5, -1]), w1, w2, probs), {}, "non-negative"),
        "float counts": ((x, counts.float(), w1, w2, probs), {}, "expected integers"),
        "counts of another length": ((x, torch.tensor([4]), w1, w2, probs), {}, r"\[E\] = \[2\]"),
        "w2 transposed": ((x, counts, w1, w2.transpose(1, 2), probs), {}, "out, in"),
        "w1 of another width": ((x[:, :4], counts, w1, w2, probs), {}, "same D"),
        "no expert": ((x, counts[:0], w1[:0], w2[:0], probs), {}, "at least one expert"),
        "probs of rank 2": ((x, counts, w1, w2, probs[:, None]), {}, "one for each row"),
        "integer weights": ((x, counts, w1.long(), w2, probs), {}, "floating-point"),
        "activation": ((x, counts, w1, w2, probs), {"activation": "relu"}, "gelu_tanh"),
    }


@pytest.mark.parametrize("case", bad_calls())
def test_refuses(case):
    arguments, options, message = bad_calls()[case]
    with pytest.raises(ModelError, match=message):
        grouped_mlp(*arguments, **options)


def draw_routed(T=9, E=5, topk=3, D=5, F=6, dtype=torch.float64):
    """Tokens, routing of which the last expert has no part, and what :func:`draw` has besides."""
    x, w1, w2, _ = draw([T] + [0] * (E - 1), D, F, dtype)
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(T, E - 1, dtype=torch.float64, generator=generator)
    routing = torch.zeros(T, E, dtype=torch.bool).scatter_(1, scores.topk(topk).indices, True)
    probs = torch.rand(T, E, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return x, routing, probs, w1, w2


def routed_truth(x, routing, probs, w1, w2, activation):
    return torch.stack(
        [
            sum(w2[e] @ (probs[t, e] * gelu(w1[e] @ x[t], activation)) for e in routing[t].nonzero()[:, 0])
            for t in range(len(x))
        ]
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("topk", [1, 3, 4])
def test_routed_matches_one_token_at_a_time(topk, activation):
    x, routing, probs, w1, w2 = draw_routed(topk=topk)
    leaves = (x, probs, w1, w2)
    actual = routed_mlp(x, routing, probs, w1, w2, topk=topk, activation=activation)
    expected = routed_truth(x, routing, probs, w1, w2, activation)
    assert_parity(actual, expected, rms=1e-12, name="y")
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    have, want = torch.autograd.grad(actual, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent)
    for name, a, e in zip(("x", "probs", "w1", "w2"), have, want, strict=True):
        assert_parity(a, e, rms=1e-11, name=f"d{name}")
    assert not have[1][~routing].count_nonzero()
    assert not any(gradient[-1].count_nonzero() for gradient in have[2:])


def test_routed_gradcheck():
    x, routing, probs, w1, w2 = draw_routed(T=3, E=3, topk=2, D=3, F=2)
    assert torch.autograd.gradcheck(lambda a, p, b, c: routed_mlp(a, routing, p, b, c, topk=2), [x, probs, w1, w2])


def bad_routed_calls():
    x, routing, probs, w1, w2 = (t.detach() for t in draw_routed())
    fewer, more = routing.clone(), routing.clone()
    fewer[4] = False
    more[2] = True
    return {
        "integers": ((x, routing.long(), probs, w1, w2), {}, r"torch\.int64 .* expected torch\.bool"),
        "experts first": ((x, routing.T, probs, w1, w2), {}, r"\[T, E\] = \[9, 5\]"),
        "probabilities of rows": ((x, routing, probs[:, 0], w1, w2), {}, "probs have shape"),
        "no expert": ((x, routing, probs, w1, w2), {"topk": 0}, "expected 1 to E = 5"),
        "another topk": ((x, routing, probs, w1, w2), {"topk": 2}, "9 of 9 tokens"),
        "dropped": ((x, fewer, probs, w1, w2), {}, "1 of 9 .* token 4 with 0"),
        "too many": ((x, more, probs, w1, w2), {}, "token 2 with 5"),
        "w2 transposed": ((x, routing, probs, w1, w2.transpose(1, 2)), {}, "out, in"),
        "activation": ((x, routing, probs, w1, w2), {"activation": "relu"}, "gelu_tanh"),
    }


@pytest.mark.parametrize("case", bad_routed_calls())
def test_routed_refuses(case):
    arguments, options, message = bad_routed_calls()[case]
    with pytest.raises(ModelError, match=message):
        routed_mlp(*arguments, **{"topk": 3} | options)
