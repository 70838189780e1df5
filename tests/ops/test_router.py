"""The router's reference: ties, one way of every number, and what is refused."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.router.reference import route


def test_a_token_by_hand() -> None:
    logits_TE = torch.tensor([[0.0, 2.0, -1.0, 1.0], [3.0, 3.0, 3.0, 3.0]], dtype=torch.float64)
    bias_E = torch.tensor([0.5, 0.0, 0.0, 0.0])
    routed = route(logits_TE, bias_E, topk=2, batch=2)
    assert routed.routing_TE.tolist() == [[True, True, False, False]] * 2  # of equal ones the first
    assert routed.load_E.tolist() == [2.0, 2.0, 0.0, 0.0]
    assert routed.best_BE.tolist() == [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]]  # without the bias
    scores = logits_TE.sigmoid()
    assert torch.allclose(routed.probs_TE[0, :2], scores[0, :2] / scores[0, :2].sum())
    assert not routed.probs_TE[:, 2:].any()
    assert torch.allclose(routed.score_BE, scores / scores.sum(1, keepdim=True))
    assert torch.allclose(routed.squared, logits_TE.exp().sum(1).log().square().sum())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"topk": 1}, "topk is 1.* E = 4"),
        ({"topk": 5}, "topk is 5"),
        ({"batch": 4}, "6 tokens.* 4"),
        ({"logits": torch.zeros(6, 4, dtype=torch.bfloat16)}, "logits are torch.bfloat16"),
        ({"bias": torch.zeros(3)}, "bias is torch.float32 .3..*E. = .4."),
    ],
)
def test_bad_input(values: dict[str, torch.Tensor | int], says: str) -> None:
    arguments = {"logits": torch.zeros(6, 4), "bias": torch.zeros(4), "topk": 2, "batch": 2} | values
    with pytest.raises(ModelError, match=says):
        route(arguments["logits"], arguments["bias"], topk=arguments["topk"], batch=arguments["batch"])
