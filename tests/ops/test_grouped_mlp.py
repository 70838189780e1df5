"""grouped_mlp and routed_mlp against one token at a time, in fp64, and against Megatron's own experts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.grouped_mlp.reference import grouped_mlp, routed_mlp
from megacpp_mcore.ops.testing import assert_parity
from tests.errors import raises
from tests.ops.grouped_mlp_case import Case, assert_same, draw, outcome, outcome_of_rows, sorted_rows

FP64 = {"dtype": torch.float64, "prob_dtype": torch.float64}
CASES = {
    "several experts": Case(T=9, D=5, F=6, E=5, topk=3, **FP64),
    "every expert": Case(T=4, D=5, F=6, E=4, topk=4, **FP64),
    "some without tokens": Case(T=7, D=5, F=6, E=6, topk=2, routing="lone", **FP64),
    "all to one": Case(T=9, D=5, F=6, E=4, topk=1, routing="same", **FP64),
    "one token": Case(T=1, D=5, F=6, E=4, topk=1, **FP64),
    "one of three ranks": Case(T=9, D=5, F=6, E=2, ranks=3, topk=3, **FP64),
}


def gelu(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Written out, so that the choice between the two forms is tested and not assumed."""
    if activation == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def token_by_token(x, routing, probs, w1, w2, *, topk, activation, exact=True):
    def one(t: int, e: torch.Tensor) -> torch.Tensor:
        return w2[e] @ (probs[t, e] * gelu(w1[e] @ x[t], activation))

    none = torch.zeros_like(x[0])
    return torch.stack([sum((one(t, e) for e in routing[t].nonzero()[:, 0]), none) for t in range(len(x))])


def row_by_row(x, counts, w1, w2, probs, *, activation):
    experts = torch.arange(len(counts)).repeat_interleave(counts)
    return torch.stack([w2[e] @ (gelu(w1[e] @ x[t], activation) * probs[t]) for t, e in enumerate(experts)])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", CASES)
def test_matches_one_token_at_a_time(name: str, activation: str) -> None:
    case = replace(CASES[name], activation=activation)
    inputs = draw(case)
    truth = outcome(token_by_token, case, inputs)
    assert_same(outcome(routed_mlp, case, inputs), truth, 1e-11, inputs["routing"])
    assert_same(outcome_of_rows(grouped_mlp, case, inputs), outcome_of_rows(row_by_row, case, inputs), 1e-11)


def test_without_probabilities_they_are_1() -> None:
    inputs = draw(CASES["several experts"])
    token, counts = sorted_rows(inputs)
    leaves = [inputs["x"][token], inputs["w1"], inputs["w2"]]
    results = []
    for probs in (None, torch.ones(len(token), dtype=torch.float64)):
        x, w1, w2 = operands = [leaf.detach().requires_grad_() for leaf in leaves]
        y = grouped_mlp(x, counts, w1, w2, probs)
        results.append([y, *torch.autograd.grad(y.sin().sum(), operands)])
    assert all(map(torch.equal, *results))


def test_no_token_gives_weights_gradients_of_zero() -> None:
    inputs = draw(CASES["several experts"])
    w1, w2 = weights = [inputs[name].requires_grad_() for name in ("w1", "w2")]
    y = grouped_mlp(inputs["x"][:0], torch.zeros(5, dtype=torch.int64), w1, w2, inputs["probs"][:0, 0])
    assert y.shape == (0, 5)
    assert not any(gradient.any() for gradient in torch.autograd.grad(y.sum(), weights))


@pytest.mark.parametrize(("dtype", "rms"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_low_precision(dtype: torch.dtype, rms: float) -> None:
    case = Case(T=1173, D=32, F=48, E=6, topk=2, routing="lone", dtype=dtype, prob_dtype=dtype)
    inputs = draw(case)
    outputs = outcome_of_rows(grouped_mlp, case, inputs)
    assert {tensor.dtype for tensor in outputs.values()} == {dtype}
    # By expert: GELU is flat near -0.75, where the one token of the first leaves a hidden unit only rounding.
    assert_same(outputs, outcome_of_rows(grouped_mlp, case, inputs, torch.float64), rms)


class BiasFreeLinear(torch.nn.Module):
    """A linear layer as Megatron calls one: it returns its output and a bias to add later, here none."""

    def __init__(self, weight):
        super().__init__()
        self.weight = [weight]  # in a list, so that it is not registered and stays the test's own leaf

    def forward(self, hidden):
        return hidden @ self.weight[0].T, None


def test_matches_megatron_experts() -> None:
    """Megatron's own expert MLP: where the probabilities enter, which GELU it is, how the weights lie."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    inputs = draw(Case(T=7, D=8, F=6, E=3, topk=1, routing="lone", **FP64))
    token, counts = sorted_rows(inputs)
    x, w1, w2, probs = inputs["x"][token], inputs["w1"], inputs["w2"], torch.rand(7, dtype=torch.float64)
    expert = object.__new__(MLP)
    torch.nn.Module.__init__(expert)
    expert.config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=6, add_bias_linear=False
    )
    assert expert.config.activation_func is torch.nn.functional.gelu
    expert.activation_func = expert.config.activation_func
    rows = []
    for e, (tokens, prob) in enumerate(zip(x.split(counts.tolist()), probs.split(counts.tolist()), strict=True)):
        expert.linear_fc1, expert.linear_fc2 = BiasFreeLinear(w1[e]), BiasFreeLinear(w2[e])
        rows.append(expert.forward(tokens, prob)[0])
    assert_parity(grouped_mlp(x, counts, w1, w2, probs), torch.cat(rows), rms=1e-12, name="y")


COUNTS = torch.tensor([2, 2])
BAD_ROWS = {
    "too few counted": ({"counts": torch.tensor([2, 1])}, r"sum 3\).*T = 4"),
    "too many counted": ({"counts": torch.tensor([2, 3])}, r"sum 5\).*T = 4"),
    "negative": ({"counts": torch.tensor([5, -1])}, "non-negative"),
    "float counts": ({"counts": COUNTS.float()}, "expected integers"),
    "counts of another length": ({"counts": torch.tensor([4])}, r"\[E\] = \[2\]"),
    "w2 transposed": ({"w2": torch.zeros(2, 6, 5)}, "out, in"),
    "x of another width": ({"x": torch.zeros(4, 4)}, "same D"),
    "no expert": (
        {"counts": COUNTS[:0], "w1": torch.zeros(0, 6, 5), "w2": torch.zeros(0, 5, 6)},
        r"\(0, 6, 5\)",
    ),
    "probs of rank 2": ({"probs": torch.zeros(4, 1)}, r"probs .*\(4, 1\).* \[4\]"),
    "integer weights": ({"w1": torch.zeros(2, 6, 5, dtype=torch.int64)}, "floating-point"),
    "activation": ({"activation": "relu"}, "gelu_tanh"),
}


@pytest.mark.parametrize(("change", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_refuses(change: dict[str, object], message: str) -> None:
    good = {"x": torch.zeros(4, 5), "counts": COUNTS, "w1": torch.zeros(2, 6, 5), "w2": torch.zeros(2, 5, 6)}
    x, counts, w1, w2, probs, activation = (good | {"probs": torch.zeros(4), "activation": "gelu"} | change).values()
    with pytest.raises(ModelError, match=message):
        grouped_mlp(x, counts, w1, w2, probs, activation=activation)


ROUTING = torch.tensor([[True, True, False]] * 4)
BAD_TOKENS = {
    "integers": ({"routing": ROUTING.long()}, r"torch\.int64 .* expected torch\.bool"),
    "experts first": ({"routing": ROUTING.T}, r"\[T, E\] = \[4, 3\]"),
    "probabilities of rows": ({"probs": torch.zeros(4)}, "probs have shape"),
    "no expert": ({"topk": 0}, "topk is 0.*E = 3"),
    "another topk": ({"topk": 1}, "4 of 4 tokens"),
    "dropped": ({"routing": ROUTING & (torch.arange(4) != 2)[:, None]}, "1 of 4 .* 2 with 0"),
    "too many": ({"routing": ROUTING | (torch.arange(4) == 1)[:, None]}, "1 with 3"),
    "more than all ranks": ({"topk": 1, "exact": False}, "4 of 4 tokens .* topk = 1"),
}


@pytest.mark.parametrize(("change", "message"), BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_routed_refuses(change: dict[str, object], message: str) -> None:
    arguments = {"routing": ROUTING, "probs": torch.zeros(4, 3), "topk": 2, "exact": True} | change
    with pytest.raises(ModelError, match=message):
        routed_mlp(
            torch.zeros(4, 5), arguments["routing"], arguments["probs"], torch.zeros(3, 6, 5), torch.zeros(3, 5, 6),
            topk=arguments["topk"], exact=arguments["exact"],
        )  # fmt: skip


def test_fp8_needs_a_gpu_that_has_it() -> None:
    fp8 = pytest.importorskip("megacpp_mcore.ops.grouped_mlp.fp8")
    x, w1, w2 = torch.zeros(4, 5), torch.zeros(3, 6, 5), torch.zeros(3, 5, 6)
    for call in (
        lambda: fp8.routed_mlp(x, ROUTING, torch.zeros(4, 3), w1, w2, topk=2),
        lambda: fp8.grouped_mlp(x, torch.tensor([1, 1, 2]), w1, w2, None),
    ):
        with raises(ModelError, (9, 0), "cpu", "no GPU"):
            call()


def test_the_kernels_refuse() -> None:
    kernels = pytest.importorskip("megacpp_mcore.ops.grouped_mlp.triton")
    grouped, routed = kernels.grouped_mlp, kernels.routed_mlp
    inputs = draw(Case())
    x, routing, probs, w1, w2 = (inputs[name] for name in ("x", "routing", "probs", "w1", "w2"))
    counts, none = torch.tensor([25] * 8), torch.zeros(257, dtype=torch.int32)
    for call, message in (
        (lambda: routed(x.float(), routing, probs, w1.float(), w2.float(), topk=3), r"float32, .*torch\.bfloat16"),
        (lambda: grouped(x, counts, w1.half(), w2, None), r"torch\.bfloat16, torch\.float16"),
        (lambda: routed(x, routing, probs, w1[:, :90], w2[..., :90], topk=3), r"\[90, 64\].* 8"),
        (lambda: grouped(x, none, w1[:1].expand(257, -1, -1), w2[:1].expand(257, -1, -1), None), "257 experts.* 256"),
        (lambda: grouped(x, counts + 1, w1, w2, None), "T = 200"),
        (lambda: routed(x, routing.T, probs, w1, w2, topk=3), r"\[T, E\]"),
        (lambda: routed(x, routing, probs, w1, w2, topk=3, activation="relu"), "gelu_tanh"),
    ):
        with pytest.raises(ModelError, match=message):
            call()
