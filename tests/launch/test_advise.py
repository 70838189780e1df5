"""The search for a DSA schedule: its rounds, that a schedule chosen is one that was built, and the command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.launch.schedule_search import Round, Schedules, advice, describe, search
from megacpp_mcore.layer_specs import training_step
from megacpp_mcore.model import preset
from tests import micro_batch, stock, tiny_run
from tests.errors import raises

S, B = 24, 2


def test_each_round_keeps_the_change_that_costs_least() -> None:
    cost = {5: 100.0, 9: 3.0, 13: 1.0, 17: 2.0}
    rounds = list(search([5, 9, 13, 17], lambda full: 10.0 + sum(cost[one] for one in set(cost) - full)))
    assert [one.became_shared for one in rounds] == [None, 13, 17, 9]
    assert [one.loss for one in rounds] == [10.0, 11.0, 13.0, 16.0]
    assert rounds[-1].full == {5}
    with raises(ModelError, "dsa.schedule"):
        list(search([], lambda full: 0.0))


def test_a_loss_that_is_no_number_is_refused() -> None:
    with raises(ModelError, "Full layers [5] is nan"):
        list(search([5, 9], lambda full: 1.0 if len(full) == 2 else float("nan")))


def test_a_checkpoint_of_the_dense_warm_up_is_refused(process: Path) -> None:
    overrides = {**OVERRIDES, "dsa": {"topk": 4, "schedule": "-FF", "warmup_steps": 2}}
    built = stock.build(overrides, preset("nam56r_tiny"), process)
    with (
        mock.patch.object(training_step, "_of_bridge", 1),
        raises(ModelError, "layer 5", "2 steps", "dsa.warmup_steps"),
    ):
        Schedules(built)
    with mock.patch.object(training_step, "_of_bridge", 2):
        assert Schedules(built).full == [5, 9]


OVERRIDES = {"seq_length": S, "dsa": {"topk": 4, "schedule": "-FF"}, "mtp": {"depth": 0}}


def build(process: Path, schedule: str) -> Any:
    overrides = {**OVERRIDES, "dsa": {"topk": 4, "schedule": schedule}}
    return stock.stirred(stock.build(overrides, preset("nam56r_tiny"), process)).eval()


def losses(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return micro_batch.losses_of(model, micro_batch.draw_tokens(B, S))


def test_a_schedule_that_is_chosen_is_the_model_that_is_built_with_it(process: Path) -> None:
    both, one = build(process, "-FF"), build(process, "-FS")
    one.load_state_dict({name: value for name, value in both.state_dict().items() if name in one.state_dict()})
    schedules = Schedules(both)
    assert (schedules.full, schedules.text(frozenset({5, 9})), schedules.text(frozenset({5}))) == ([5, 9], "-FF", "-FS")
    before = losses(both)
    with schedules.chosen(frozenset({5})):
        assert torch.equal(losses(both), losses(one))
    assert torch.equal(losses(both), before)
    assert not torch.equal(losses(one), before)


def test_the_advice_is_the_last_schedule_within_the_tolerance(process: Path) -> None:
    schedules = Schedules(build(process, "-FF"))
    rounds = [Round(frozenset({5, 9}), None, 2.0), Round(frozenset({5}), 9, 2.001)]
    found = " ".join(describe(schedules, rounds[1], 2.0).split())
    assert found == "-FS layer 9 Shared 2.001000 nats a token +0.0500%"
    assert advice(schedules, rounds, 1e-3) == "advised: --schedule=-FS, 1 of 2 indexers"
    assert "the schedule as it is" in advice(schedules, rounds, 1e-4)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [(), ("--bf16",)])
def test_a_checkpoint_is_searched(dtype: tuple[str, ...], data: Path, tmp_path: Path) -> None:
    words, saved = tiny_run.words(data, 2, *dtype), str(tmp_path / "saved")
    launch = ("megacpp_mcore", "launch", "--device", "cpu", "--no-observe", "--")
    tiny_run.start(launch, [*words, "--save", saved, "--save-interval", "2"], data).finish()
    search_ = ("megacpp_mcore", "advise", "index-cache", "--device", "cpu", "--heldout", str(data / "text"))
    said = tiny_run.start((*search_, "--tokens", "2000", "--"), [*words, "--load", saved], data).finish()
    assert len(re.findall(rf"^{tiny_run.SCHEDULE}  as it is ", said, re.MULTILINE)) == 1
    assert "advised: " in said
