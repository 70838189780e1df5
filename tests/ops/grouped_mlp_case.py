"""Routed experts' inputs at sizes and routings of choice, and what an implementation makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megacpp_mcore.ops.grouped_mlp.reference import ACTIVATIONS
from megacpp_mcore.ops.testing import assert_parity
from tests.ops.outcomes import added, leaves, main_grads, with_gradients

LEAVES = ("x", "probs", "w1", "w2")


@dataclass(frozen=True)
class Case:
    """Sizes, and how tokens choose: ``even`` scores, ``skewed`` ones, all the ``same`` experts, or one ``lone`` token apart.

    Of several ``ranks`` each has E experts, and this is the first, at which a token has ``topk`` or fewer.
    """

    T: int = 200
    D: int = 64
    F: int = 96
    E: int = 8
    topk: int = 3
    ranks: int = 1
    routing: str = "even"
    activation: str = "gelu"
    dtype: torch.dtype = torch.bfloat16
    prob_dtype: torch.dtype = torch.float32


def draw(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """``x``, ``routing``, ``probs`` (of random numbers where nothing is routed), ``w1``, ``w2`` and ``dy``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    experts = case.E * case.ranks
    score_TE = normal(case.T, experts)
    if case.routing == "skewed":
        score_TE += 0.5 * normal(experts)
    elif case.routing in ("same", "lone"):
        score_TE[:, experts - case.topk :] += 100
    routing = torch.zeros(case.T, experts, dtype=torch.bool)
    routing.scatter_(1, score_TE.topk(case.topk).indices, True)
    if case.routing == "lone":  # the first expert has only the last token, those between have none
        routing[-1, experts - 1], routing[-1, 0] = False, True
    tensors = {
        "x": normal(case.T, case.D),
        "w1": normal(case.E, case.F, case.D) / case.D**0.5,
        "w2": normal(case.E, case.D, case.F) / case.F**0.5,
        "dy": normal(case.T, case.D),
    }
    drawn = {name: tensor.to(device, case.dtype) for name, tensor in tensors.items()}
    probs = torch.rand(case.T, case.E, generator=generator).to(device, case.prob_dtype)
    return drawn | {"probs": probs, "routing": routing[:, : case.E].contiguous().to(device)}


def outcome(
    fn: Callable[..., torch.Tensor], case: Case, inputs: dict[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The output of ``routed_mlp`` and every gradient, of inputs in ``dtype`` if given."""
    own = leaves({name: inputs[name] for name in LEAVES}, dtype)
    x, probs, w1, w2 = own.values()
    fewer = {"exact": False} if case.ranks > 1 else {}
    y = fn(x, inputs["routing"], probs, w1, w2, topk=min(case.topk, case.E), activation=case.activation, **fewer)
    return with_gradients({"y": y}, own, [inputs["dy"]])


def outcome_added(
    fn: Callable[..., torch.Tensor], case: Case, inputs: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """:func:`outcome`, gradients of weights by what they add to buffers of ``dtype``; autograd has to get placeholders."""
    buffers = main_grads({name: inputs[name] for name in ("w1", "w2")}, dtype)
    return added(outcome(functools.partial(fn, main_grads=list(buffers.values())), case, inputs), buffers)


def sorted_rows(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token each row is of, and the rows of each expert."""
    routing_ET = inputs["routing"].T
    return routing_ET.nonzero()[:, 1], routing_ET.sum(1)


def outcome_of_rows(
    fn: Callable[..., torch.Tensor], case: Case, inputs: dict[str, torch.Tensor], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The same of ``grouped_mlp``, on the rows that tokens become."""
    token, counts = sorted_rows(inputs)
    tensors = {
        "x": inputs["x"][token], "probs": inputs["probs"].T[inputs["routing"].T], "w1": inputs["w1"], "w2": inputs["w2"],
    }  # fmt: skip
    own = leaves(tensors, dtype)
    x, probs, w1, w2 = own.values()
    y = fn(x, counts, w1, w2, probs, activation=case.activation)
    return with_gradients({"y": y}, own, [inputs["dy"][token.flip(0)]])


def eager(
    x: torch.Tensor,
    routing: torch.Tensor,
    probs: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    topk: int,
    activation: str,
    exact: bool = True,
) -> torch.Tensor:
    """``routed_mlp`` in the inputs' own dtype: what rounding alone costs."""
    y = torch.zeros_like(x)
    for expert, tokens in enumerate(routing.T):
        rows = tokens.nonzero()[:, 0]
        a = ACTIVATIONS[activation](x[rows] @ w1[expert].T) * probs[rows, expert, None]
        y = y.index_add(0, rows, a.to(x.dtype) @ w2[expert].T)
    return y


def eager_rows(
    x: torch.Tensor, counts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, probs: torch.Tensor, *, activation: str
) -> torch.Tensor:
    """The same for ``grouped_mlp``: rows are tokens of one expert."""
    expert = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
    routing = torch.nn.functional.one_hot(expert, len(counts)).bool()
    return eager(x, routing, probs[:, None] * routing, w1, w2, topk=1, activation=activation)


def assert_same(
    found: dict[str, torch.Tensor],
    truth: dict[str, torch.Tensor],
    rms: float,
    routing: torch.Tensor | None = None,
    plain: dict[str, torch.Tensor] | None = None,
) -> None:
    """By rows of tokens, by expert for weights. An expert without rows has gradients of zero, as have probabilities not used.

    With what ``plain`` PyTorch gives at the same dtype, the largest error is compared, too.
    """
    for name, expected in truth.items():
        actual, peer = found[name], (plain or {}).get(name)
        if name in ("dw1", "dw2"):
            used = expected.flatten(1).count_nonzero(1) > 0
            assert not actual[~used].count_nonzero(), name
            actual, expected = actual[used].flatten(1), expected[used].flatten(1)
            peer = None if peer is None else peer[used].flatten(1)
        elif name == "dprobs":  # all as one: each is a sum of products, of which some are small by chance
            assert routing is None or not actual[~routing].count_nonzero(), name
            actual, expected = actual.flatten(), expected.flatten()
            peer = None if peer is None else peer.flatten()
        assert_parity(actual, expected, rms=rms, max_abs_factor=2 if peer is not None else None, dtype_peer=peer, name=name)
