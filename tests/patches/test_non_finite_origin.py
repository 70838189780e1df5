"""The patch non-finite-origin: a NaN or an infinity stops the run before the update, and rank, layer and family are named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from megacpp_mcore import patches
from megacpp_mcore.errors import NonFiniteError
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.patches import non_finite_origin
from tests import forks, stock
from tests.errors import raises
from tests.micro_batch import causal_mask, draw_tokens, losses_of
from tests.patches import non_finite
from tests.tiny_run import ROOT

OVERRIDES = {"seq_length": 32, "dsa": {"schedule": "-FF", "topk": 8}}
EXIT_FOR_ANOTHER_GPU = 16
"""Megatron's status after it has run a step again and saved a checkpoint."""


@pytest.fixture(autouse=True)
def nothing_is_examined_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that has a step run again would leave that to other tests' layers."""
    monkeypatch.setattr(non_finite_origin, "_examining", False)


def train(
    folder: Path,
    how: str,
    *words: str,
    processes: int = 1,
    layout: Layout | None = None,
    model_class: str = GPT,
    path: str = "",
) -> tuple[int, str, Path]:
    """Status and output of a training, and where it leaves what it found."""
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": OVERRIDES}))
    model = with_overrides(preset("nam56r_tiny"), OVERRIDES)
    sizes = {"global_batch_size": 1 if "every" in how else 2, "micro_batch_size": 1, "train_iters": 3}
    arguments = stock.words(model, *words, layout=layout, model_class=model_class, **sizes)
    script = [f"{path}/pretrain_gpt.py"] if path else []
    variables = {"PYTHONPATH": f"{path}:{ROOT}".strip(":"), "MEGACPP_CONFIG": str(folder / "config.yaml")}
    command = ["-m", "tests.patches.non_finite", how, str(folder / "found"), *script, *arguments]
    return *forks.run_ranks(command, processes, megatron=not path, **variables), folder / "found"


def stopped(folder: Path, how: str, *words: str, processes: int = 1, **options: Any) -> str:
    """The output of a training that ended with an error before any rank had updated a parameter."""
    status, output, path = train(folder, how, *words, processes=processes, **options)
    assert status != 0
    assert [path.with_name(f"found.{rank}").read_text() for rank in range(processes)] == ["True"] * processes
    return output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str, Path]:
    """A training whose first step was tried with everything, and whose second is spoilt: its folder, and what it came to."""
    folder = tmp_path_factory.mktemp("tried")
    return folder, *train(folder, "every M, activation, nan", *saving(folder))


@pytest.fixture(scope="module")
def tried(run: tuple[Path, int, str, Path]) -> dict[str, Any]:
    *_, output, path = run
    assert path.is_file(), output[-4000:]
    return dict(json.loads(path.read_text()))


def saving(folder: Path) -> tuple[str, ...]:
    return "--save", str(folder / "saved"), "--save-interval", "9"


def expected(mode: str, case: str, layer: int) -> str:
    place, kind, _ = case.split(", ")
    if mode == non_finite.UNCHECKED and kind == "activation":  # which is seen in the gradients' norm alone
        return "if the main loss is"
    name = {"MTP": "the MTP block (A)"}.get(place, f"layer {layer} ({place})" if place in "AMER" else f"the {place}")
    if "gradient" in kind:
        return f"went wrong in {name}: the gradients of "
    if place == "MTP":
        return f"a loss of MTP is not finite; if the main loss is, it began in the forward pass of {name} or"
    behind = "the output of every layer is finite: it began behind them, in the final norm, the output layer or the loss"
    others = {"embedding": "the output of the embedding is not finite", "output layer": behind}
    return others.get(place, f"the first layer whose output is not finite is {name}")


@pytest.mark.parametrize(("mode", "case"), non_finite.TRIED)
def test_the_run_stops_before_the_update_and_names_rank_layer_and_family(tried: dict[str, Any], mode: str, case: str) -> None:
    record = tried[f"{mode}: {case}"]
    assert record["unchanged"]
    assert "no parameter was updated; rank 0: " in record["said"]
    assert expected(mode, case, record["layer"]) in record["said"]


def check_that_the_second_step_ran_again(folder: Path, status: int, output: str, path: Path, named: str) -> None:
    assert status == EXIT_FOR_ANOTHER_GPU, output[-4000:]
    assert path.with_name("found.0").read_text() == "True"
    assert f"step 2: the loss of the local forward pass is NaN; rank 0: {named}" in output
    assert "rank 0: as the step is run again, the output of layer 11 (M) is the first that is not finite" in output
    assert (folder / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_a_later_step_is_run_again_as_stock_does_and_examined(run: tuple[Path, int, str, Path]) -> None:
    check_that_the_second_step_ran_again(*run, "the first layer whose output is not finite is layer 11 (M)")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_with_checks_that_wait_a_later_step_is_run_again(tmp_path: Path) -> None:
    """Of several micro-batches."""
    ended = train(tmp_path, "late M, activation, nan", *saving(tmp_path))
    check_that_the_second_step_ran_again(tmp_path, *ended, "the layer is named as the step runs again")


@pytest.mark.slow
def test_pipeline_stages_tell_whose_value_it_was(tmp_path: Path) -> None:
    output = stopped(tmp_path, "embedding, activation, nan", processes=2, layout=Layout(pipeline=2))
    came = "the input of layer 7 (M) is not finite: it comes from the pipeline stage before it, which ends with layer 6"
    assert f"rank 1, pipeline stage 2 of 2: {came}" in output
    again = "as the step is run again, the output of layer 1 (A) is not finite, and neither is its input"
    assert f"rank 0, pipeline stage 1 of 2: {again}" in output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_gradient_is_named_before_buckets_are_reduced(tmp_path: Path) -> None:
    """With the rank that it is of: of two replicas, the other has none."""
    words = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16"]
    words += ["--ddp-bucket-size", "100000"]
    status, output, path = train(tmp_path, "first E, gradient, inf on rank 1", *words, processes=2)
    assert status != 0
    assert path.with_name("found.1").read_text() == "True"  # the end of this rank ends the other
    assert re.search(r"error: step 1: .* rank 1: .* went wrong in layer 10 \(E\)", output), output[-4000:]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["recomputed", "HybridModel"])
def test_recompute_and_the_other_host(tmp_path: Path, how: str) -> None:
    words, model_class = (stock.full_recompute(), GPT) if how == "recomputed" else ((), HYBRID)
    output = stopped(tmp_path, "first R, activation, nan", *words, model_class=model_class)
    assert "the first layer whose output is not finite is layer 12 (R)" in output, output[-4000:]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_stock_script_of_a_checkout(tmp_path: Path, megatron_lm: Path) -> None:
    output = stopped(tmp_path, "first M, activation, nan", path=str(megatron_lm))
    assert "the first layer whose output is not finite is layer 11 (M)" in output, output[-4000:]


def test_layers_keep_no_activation_alive(process: Path) -> None:
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process)
    loss = losses_of(model, draw_tokens(2, 32, 1), attention_mask=causal_mask(32)).mean()
    held = [vars(layer)[non_finite_origin.HELD] for layer in (*model.decoder.layers, model.mtp.layers[0].mtp_model_layer)]
    assert all(reference() is not None for inputs, outputs in held for reference in (inputs, outputs))
    loss.backward()
    del loss
    assert not any(reference() is not None for inputs, outputs in held for reference in (inputs, outputs))


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_checks_on_a_gpu_wait_for_the_end_of_the_step(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are read at once; where one fails, all are made, in order, of what the values were."""
    monkeypatch.setattr(non_finite_origin, "DEVICE", "cpu")
    machine, made, read = machine_in_a_later_step(), [], []
    monkeypatch.setattr(non_finite_origin, "_finite", lambda tensor: read.append(tensor) or tensor.isfinite().all())
    check = non_finite_origin._naming.make(lambda self, result, *rest, **kwargs: made.append((float(result), *rest)))
    machine.validate_result = check.__get__(machine)
    for message in ("of a loss", "of a grad"):
        result = torch.full((), value if "loss" in message else 2.0)
        for rejection in (torch.isnan, torch.isinf):
            machine.validate_result(result, rejection, message, tolerance=0.0, fatal=True)
        result /= 4
    assert (made, machine.has_checked_gradients) == ([], True)
    decide = non_finite_origin._at_once.make(lambda self, iterator: iterator)
    assert decide(machine, "iterator") == "iterator"
    assert len(read) == 1
    assert len(read[0]) == 2
    rejections = (torch.isnan, torch.isinf)
    expected = [(number, by, f"of a {what}") for number, what in ((value, "loss"), (2.0, "grad")) for by in rejections]
    assert str(made) == str([] if value == 1.0 else expected)
    made.clear()
    decide(machine, "iterator")
    assert (made, len(read)) == ([], 1)


@pytest.mark.parametrize("losses", [(float("nan"), 100.0), (100.0, float("nan"))], ids=["before", "after"])
def test_a_spike_beside_it_hides_no_value_that_is_not_finite(
    losses: tuple[float, float], monkeypatch: pytest.MonkeyPatch, process: Path
) -> None:
    """The step is repeated for only one check: the spike's, which stops nothing, if that comes first."""
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    monkeypatch.setattr(non_finite_origin, "DEVICE", "cpu")
    for name in ("_save_state", "_restore_state"):
        monkeypatch.setattr(RerunStateMachine, name, lambda self: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    patches.apply(["non-finite-origin"])
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    try:
        for values in ((1.0, 1.0), (1.0, 1.0), losses):
            while machine.should_run_forward_backward(None):
                for value in values:
                    for rejection in (torch.isnan, torch.isinf):
                        machine.validate_result(torch.tensor(value), rejection, "in loss", fatal=True)
                    machine.validate_result(torch.tensor(value), lambda loss: loss > 10, "a spike", fatal=False)
                machine.validate_result(torch.tensor(sum(values)), torch.isnan, "in grad", fatal=True)
            checkpoint, exits, status = machine.should_checkpoint_and_exit()
    finally:
        patches.revert(["non-finite-origin"])
    if losses[0] == 100.0:
        assert not exits
        assert not machine.has_checked_gradients  # so that the norm is read before the update
    else:
        assert (checkpoint, exits, status) == (True, True, EXIT_FOR_ANOTHER_GPU)


@pytest.mark.parametrize(
    "change",
    [
        {"first_iteration_complete": False},
        {"rerun_requested": True},
        {"mode": SimpleNamespace(value="disabled")},
        {"state": SimpleNamespace(name="RERUNNING_IN_PLACE")},
        {"error_injector": SimpleNamespace(should_inject_errors=True)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_check_waits_where_nothing_runs_the_step_again(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(non_finite_origin, "DEVICE", "cpu")
    assert non_finite_origin._can_wait(machine_in_a_later_step(), torch.ones(()))
    assert not non_finite_origin._can_wait(machine_in_a_later_step(**change), torch.ones(()))


def machine_in_a_later_step(**change: Any) -> Any:
    """What the checks ask of Megatron's state machine."""
    state = {
        "mode": SimpleNamespace(value="validate_results"), "state": SimpleNamespace(name="INITIAL_RUN"),
        "first_iteration_complete": True, "rerun_requested": False, "current_iteration": 1,
        "error_injector": SimpleNamespace(should_inject_errors=False),
    }  # fmt: skip
    return SimpleNamespace(**state | change)


class OnDevice:
    """A gradient norm that counts how often the host reads it."""

    def __init__(self, value: float) -> None:
        self.value, self.read = value, 0

    def item(self) -> float:
        return float(self)

    def __float__(self) -> float:
        self.read += 1
        return self.value


def norm_of(value: Any, *, checked: bool, threshold: float = float("inf")) -> Any:
    """What a step's optimizer has for the gradient norm."""
    replaced: Callable[..., Any] = non_finite_origin._finite_norm.make(lambda self: value)
    optimizer = SimpleNamespace(config=SimpleNamespace(grad_norm_skip_threshold=threshold))
    machine = SimpleNamespace(has_checked_gradients=checked)
    with mock.patch("megatron.core.rerun_state_machine.get_rerun_state_machine", return_value=machine):
        return replaced(SimpleNamespace(chained_optimizers=[optimizer]))


def test_the_host_reads_a_norm_on_the_device_only_if_nothing_has_checked_the_gradients(process: Path) -> None:
    checked, unchecked = OnDevice(1.0), OnDevice(1.0)
    assert norm_of(checked, checked=True) is checked
    assert norm_of(unchecked, checked=False) is unchecked
    assert (checked.read, unchecked.read) == (0, 1)
    with raises(NonFiniteError, "norm is nan", "rank 0"):
        norm_of(OnDevice(float("nan")), checked=False)


def test_an_infinite_norm_is_left_to_the_threshold_above_which_stock_skips(process: Path) -> None:
    assert norm_of(float("inf"), checked=True, threshold=10.0) == float("inf")
    with pytest.raises(NonFiniteError):
        norm_of(float("nan"), checked=True, threshold=10.0)
    with pytest.raises(NonFiniteError):
        norm_of(float("inf"), checked=True)


def test_a_gradient_is_named_by_gradients_alone(process: Path) -> None:
    """CUDA graphs keep a layer's output, and write gradients where it was."""
    model = stock.build(OVERRIDES, preset("nam56r_tiny"), process)
    losses = losses_of(model, draw_tokens(2, 32, 1), attention_mask=causal_mask(32))
    vars(model.decoder.layers[1])[non_finite_origin.HELD][1]().detach().fill_(float("nan"))
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, float("nan") if name.startswith("decoder.layers.4.") else 1.0)
    with mock.patch.object(non_finite_origin, "_chunks", return_value=[model]):
        assert "went wrong in layer 5 (A): the gradients of " in non_finite_origin.origin(of_loss=False)
        assert "whose output is not finite is layer 2 (E)" in non_finite_origin.origin(of_loss=True)
        model.zero_grad()
        assert non_finite_origin.origin(of_loss=False).endswith("every gradient on this rank is finite")
    assert losses is not None  # which keeps the outputs
