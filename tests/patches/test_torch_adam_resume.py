"""The patch torch-adam-resume: the distributed optimizer over PyTorch's Adam takes over another one's state."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_mcore.patches.torch_adam_resume import PATCH
from tests import stock
from tests.optimizers import accumulate, build, trained

pytestmark = pytest.mark.usefixtures("process")

DTYPES = {"a": "bfloat16", "b": "bfloat16"}


def distributed(optimizer: Any) -> Any:
    """The one DistributedOptimizer in a chain."""
    (found,) = optimizer.chained_optimizers
    return found


def hand_over(source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    """The state of one run's optimizer to another's, by the methods that every format goes through."""
    (model, optimizer), (other_model, other) = source, target
    given, taker = distributed(optimizer), distributed(other)
    taker.load_state_dict(given.state_dict())
    for parameter, its in zip(model.parameters(), other_model.parameters(), strict=True):
        its.data.copy_(parameter.data)
        found = given._get_main_param_and_optimizer_states(parameter)
        # No format keeps the count with a parameter.
        tensors = {name: value.clone() for name, value in found.items() if name != "step"}
        taker._set_main_param_and_optimizer_states(its, tensors)


def test_the_next_step_is_the_same() -> None:
    """A second step whose bias correction goes by a count of 2, in each parameter."""
    with stock.patched(PATCH):
        source, target = trained(DTYPES, distributed=True), build(DTYPES, distributed=True)
        hand_over(source, target)
        for model, optimizer in (source, target):
            accumulate(model, 7)
            optimizer.step()
        pairs = list(zip(source[0].parameters(), target[0].parameters(), strict=True))
        assert [own.main_param.tolist() for own, _ in pairs] == [its.main_param.tolist() for _, its in pairs]
        states = distributed(target[1]).optimizer.state.values()
        assert [float(state["step"]) for state in states] == [2.0] * len(pairs)


def test_upstream_fails_without_the_patch() -> None:
    with pytest.raises(AssertionError):
        distributed(build(DTYPES, distributed=True)[1]).state_dict()
    with pytest.raises(KeyError, match="step"):
        hand_over(trained(DTYPES, distributed=True), trained(DTYPES, distributed=True))
