"""The patch masked-losses on one rank: where it asks the others, and with what; its figures are in ``tests/distributed``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.patches.masked_losses import PATCH
from tests import stock


@pytest.fixture
def exchanged(process: Path, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    from megatron.core import parallel_state

    two = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda check_initialized=True: two)
    monkeypatch.setattr(torch.distributed, "all_reduce", exchanged := mock.Mock())
    return exchanged


def calc(output: torch.Tensor, *, is_data: bool = False) -> tuple[torch.Tensor, list[Any]]:
    """The loss of a micro-batch whose loss function returns a count on the CPU, and what is stored of it."""
    from megatron.core.pipeline_parallel import schedules

    def function(output: torch.Tensor, **_: Any) -> Any:
        return output * 1.0, torch.tensor(3), {"lm loss": output.detach()}

    stored: list[Any] = []
    config = SimpleNamespace(calculate_per_token_loss=False, timers=None)
    loss, _ = schedules.forward_step_calc_loss(
        SimpleNamespace(), output, function, config, None, is_data, 1, stored, cp_group_size=2, is_last_stage=True
    )
    return loss, stored


def test_the_count_is_exchanged_where_the_loss_is(exchanged: mock.Mock) -> None:
    """NCCL sums no tensors of the host."""
    with stock.patched(PATCH):
        calc(torch.ones((), device="meta"))
    (call,) = exchanged.call_args_list
    assert call.args[0].device.type == "meta"


@pytest.mark.parametrize("is_data", [False, True])
def test_ranks_do_not_ask_each_other_where_no_loss_is_read(exchanged: mock.Mock, is_data: bool) -> None:
    """In evaluation, and for data that is no loss: only on the last rank, which would wait for the others forever."""
    with torch.set_grad_enabled(is_data):
        expected = calc(torch.ones(()), is_data=is_data)
        with stock.patched(PATCH):
            assert calc(torch.ones(()), is_data=is_data) == expected
    assert not exchanged.called


def test_one_rank_and_callers_without_groups_are_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Megatron's own tests: no process groups, or a configuration that has no field for losses by token."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    def found(group: Any, config: Any, output: Any) -> Any:
        monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda check_initialized=True: group)
        rest = (SimpleNamespace(), torch.ones(()), lambda x: output, config, None, False, 2, [])
        return schedules.forward_step_calc_loss(*rest, cp_group_size=4, is_last_stage=True)[0]

    with stock.patched(PATCH):
        three = (torch.tensor(8.0), torch.tensor(4), {})
        assert found(None, SimpleNamespace(calculate_per_token_loss=False, timers=None), three) == 1
        lone_group = SimpleNamespace(size=lambda: 1)
        assert found(lone_group, SimpleNamespace(timers=None), (torch.tensor(8.0), {})) == 16
