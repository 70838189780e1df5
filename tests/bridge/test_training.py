"""Bridge recipes in an environment with Megatron-Bridge: what they train, from random weights and from checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.observe import events, goodput, receipts
from megacpp_mcore.observe.receipts.claims import compare as compare_receipts
from megacpp_mcore.observe.steps import read_steps
from tests import stock
from tests.bridge.processes import RUNNER, TINY, outcomes, run
from tests.distributed.comparing import assert_same_bytes
from tests.saved import tensors_in

STEPS, RESUMED = 4, 2
"""Steps of the run that all compare with, and the one whose checkpoint others go on from."""


def recipe_run(python: Path, corpus: str, folder: Path, *overrides: str, processes: int = 1, **how: Any) -> str:
    """The tiny recipe through our runner, under torchrun where there are several processes; its output."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"] * (processes > 1)
    words = [*start, "megacpp_mcore.nemo_recipes.run", "--recipe", TINY, f"dataset.data_path={corpus}", *overrides]
    done = run(python, *words, folder=folder, **how)
    return done.stdout + done.stderr


def losses(log: str) -> list[dict[str, float]]:
    """Return the losses and gradient norm of every step in ``log``, by name, with the printed precision."""
    lines = [line for line in log.splitlines() if re.search(r"iteration +\d+/", line)]
    named = [re.findall(r"\| ([\w ]+(?:loss|norm)): ([-\d.E+]+)", line) for line in lines]
    return [{name: float(value) for name, value in pairs if name != "loss scale"} for pairs in named]


def check_checkpoints(*folders: Path) -> None:
    """The same parameters and moments after the last step, bit for bit, under the same names."""
    first, second = (tensors_in(folder / f"iter_{STEPS:07d}") for folder in folders)
    assert any("optimizer" in name for name in first)
    assert_same_bytes(first, second)


@pytest.fixture(scope="module")
def trained(bridge_python: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The tiny recipe through Bridge's own ``pretrain``: the folder of its checkpoints, and its log."""
    folder = tmp_path_factory.mktemp("bridge")
    log = recipe_run(
        bridge_python, corpus, folder, f"train.train_iters={STEPS}", f"checkpoint.save={folder}/saved",
        f"checkpoint.save_interval={RESUMED}", megatron=False,
    )  # fmt: skip
    return folder, log


@pytest.fixture(scope="module")
def launched(bridge_python: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe by the command line, in the same environment: the folder of its checkpoints and steps."""
    folder = tmp_path_factory.mktemp("command_line")
    chosen = RECIPES[TINY]
    words = stock.words(
        chosen.model,
        *("--ckpt-format", "torch_dist", "--save", str(folder / "saved"), "--save-interval", str(STEPS)),
        data=("--data-path", corpus, "--split", "100,0,0"),
        tokenizer=tokenizer_words(chosen.model, data=corpus),
        learning_rate=chosen.run.training.learning_rate,
        train_iters=STEPS,
    )
    run(bridge_python, "megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--", *words)
    return folder


def test_bridge_trains_what_the_command_line_trains(trained: tuple[Path, str], launched: Path) -> None:
    """Every loss, gradient norm and learning rate of every step, and every parameter and moment of Adam's, bit for bit."""
    folder, log = trained
    recorded = read_steps(folder / "saved" / "observe")
    values = [step.values() for step in recorded]

    def compared(steps: list[dict[str, float]]) -> list[dict[str, float]]:
        """Without the experts' losses: Bridge's loop counts the layers by which it divides them (the patch moe-metrics)."""
        experts = ("balancing_loss", "z_loss")
        return [{name: value for name, value in step.items() if not name.endswith(experts)} for step in steps]

    assert compared(values) == compared([step.values() for step in read_steps(launched / "saved" / "observe")])
    assert [step.step for step in recorded] == list(range(1, STEPS + 1))
    assert {"lm loss", "mtp_1 loss", "indexer loss", "z_loss", "grad norm", "learning rate"} <= set(values[0])
    assert [step.tokens for step in recorded] == [number * recorded[0].tokens for number in range(1, STEPS + 1)]
    printed = [step["lm loss"] for step in losses(log)]
    assert printed == pytest.approx([step.losses["lm loss"] for step in recorded], rel=1e-6)
    check_checkpoints(folder / "saved", launched / "saved")


def test_the_receipts_of_both_entry_points_differ_on_no_line(trained: tuple[Path, str], launched: Path) -> None:
    by_bridge, by_command = (receipts.read(folder / "saved" / "observe") for folder in (trained[0], launched))
    lines = compare_receipts(by_command, by_bridge).lines
    assert [line.describe() for line in lines if line.same is not True] == []
    assert by_bridge["status"] == "finished"
    assert by_bridge["data"] == by_command["data"]
    assert by_bridge["overlap"] == by_command["overlap"] != []
    applied, others = ({patch["name"] for patch in receipt["patches"]} for receipt in (by_bridge, by_command))
    # Those mend what Bridge does not call, but for its copy of a class that exit-signal mends.
    assert applied == others - {"exit-signal", "hybrid-flops", "spec-import"}
    assert by_bridge["flops"] == by_command["flops"]
    assert by_bridge["backends"] == by_command["backends"] != []
    assert by_bridge["routing"]["layers"] == by_command["routing"]["layers"]


def test_the_goodput_of_a_bridge_run_sums_to_its_wall_time(trained: tuple[Path, str]) -> None:
    run_folder = trained[0] / "saved" / "observe"
    totals = goodput.of_rank(events.read(run_folder)[0])
    (start,) = events.read(run_folder)[0]
    assert totals.wall_ns == sum(totals.nanoseconds.values()) == start.ended_ns - start.began_ns
    assert (totals.starts, totals.steps, totals.steps_lost, start.how) == (1, STEPS, 0, "finished")
    spent = {name for name, nanoseconds in totals.nanoseconds.items() if nanoseconds}
    assert spent == {"productive", "startup", "data", "checkpoint_save", "idle"}


def test_a_run_takes_back_what_it_replaced(trained: tuple[Path, str]) -> None:
    _, log = trained
    for name in ("mtp-shared-block", "dsa-index-cache", "dataset-helpers"):
        assert f"patch {name} reverted" in log


def test_a_run_goes_on_from_its_checkpoint_alone(bridge_python: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """From ``run_config.yaml`` and its tensors: the same steps, parameters and moments, bit for bit."""
    folder, log = trained
    words = (str(folder / "saved"), str(RESUMED), str(tmp_path))
    done = run(bridge_python, "tests.bridge.resumed", *words, folder=tmp_path)
    assert f"saved in {folder}/saved" in done.stdout
    assert losses(done.stdout + done.stderr) == losses(log)[RESUMED:]
    check_checkpoints(tmp_path, folder / "saved")


def test_the_other_class_goes_on_from_its_checkpoint(
    bridge_python: Path, trained: tuple[Path, str], corpus: str, tmp_path: Path
) -> None:
    """The same steps, parameters and moments, bit for bit, under the same names."""
    folder, log = trained
    other = recipe_run(
        bridge_python, corpus, tmp_path, "--model-class", "gpt", f"train.train_iters={STEPS}",
        f"checkpoint.load={folder}/saved", f"checkpoint.ckpt_step={RESUMED}", f"checkpoint.save={tmp_path}/saved",
    )  # fmt: skip
    assert "building nam56r_tiny on HybridModel" in log
    assert "building nam56r_tiny, layers" in other
    assert losses(other) == losses(log)[RESUMED:]
    check_checkpoints(tmp_path / "saved", folder / "saved")


@pytest.mark.exhaustive
def test_two_pipeline_stages_go_on_as_one_process_does(
    bridge_python: Path, trained: tuple[Path, str], corpus: str, tmp_path: Path
) -> None:
    """With Adam's moments. The stages keep the Shared layer (9) on the stage of its Full layer (5)."""
    folder, log = trained
    cut = recipe_run(
        bridge_python, corpus, tmp_path, f"train.train_iters={STEPS}", f"checkpoint.load={folder}/saved",
        f"checkpoint.ckpt_step={RESUMED}", "model.pipeline_model_parallel_size=2",
        "model.hybrid_layer_pattern=+EMEDEMED|EMG/+-", "--observe", f"{tmp_path}/observed", processes=2,
    )  # fmt: skip
    check_equal(cut, losses(log)[RESUMED:])
    assert cut.count("megacpp-mcore: launch policy:") == 1
    single, split = read_steps(folder / "saved" / "observe")[RESUMED:], read_steps(tmp_path / "observed")
    assert [step.resumed_at for step in split] == [RESUMED] * len(single)
    for step, reference in zip(split, single, strict=True):
        assert step.losses == pytest.approx(reference.losses, rel=1e-5)
    receipt = receipts.read(tmp_path / "observed")
    assert receipt["ranks"] == {"expected": 2, "found": [0, 1]}
    assert (receipt["parallelism"]["pipeline"], receipt["parallelism"]["data"]) == (2, 1)
    assert goodput.of_rank(events.read(tmp_path / "observed")[1]).nanoseconds["checkpoint_load"] > 0


def check_equal(log: str, expected: list[dict[str, float]]) -> None:
    """Losses and gradient norms of every step, within 1e-5."""
    logged = losses(log)
    assert len(logged) == len(expected)
    for step, reference in zip(logged, expected, strict=True):
        assert {"lm loss", "mtp_1 loss", "grad norm"} <= step.keys()
        # Megatron prints three decimals of the norm.
        assert step.pop("grad norm") == pytest.approx(reference.pop("grad norm"), rel=1e-5, abs=1.1e-3)
        assert step == pytest.approx(reference, rel=1e-5)


@pytest.mark.exhaustive
def test_experts_on_two_processes_train_as_on_one(
    bridge_python: Path, trained: tuple[Path, str], corpus: str, tmp_path: Path
) -> None:
    """From weights only: Megatron cannot reload experts' Adam moments at another expert-parallel size."""
    folder, _ = trained
    # The first step has size zero: without moments, Adam would take a full step on gradients that are rounding noise.
    words = [
        f"checkpoint.pretrained_checkpoint={folder}/saved", "train.train_iters=3", "scheduler.lr_warmup_iters=1",
        "optimizer.lr=1e-3",
    ]  # fmt: skip
    single = recipe_run(bridge_python, corpus, tmp_path, *words)
    split = recipe_run(bridge_python, corpus, tmp_path, *words, "model.expert_model_parallel_size=2", processes=2)
    check_equal(split, losses(single))
    assert len({step["lm loss"] for step in losses(single)}) == 3
    # Bridge prints the values that are not Megatron's defaults, as allgather is.
    assert [re.findall(r"moe_token_dispatcher_type: '?(\w+)", log)[:1] for log in (single, split)] == [["alltoall"], []]


def test_a_checkpoint_that_is_not_there_is_no_beginning_and_one_that_is_there_is_not_overwritten(
    bridge_python: Path, trained: tuple[Path, str], corpus: str, tmp_path: Path
) -> None:
    """Bridge alone would silently start from random weights; here it does so only if allowed."""
    saved, empty = trained[0] / "saved", tmp_path / "empty"
    empty.mkdir()
    common = f"--recipe {TINY} --no-observe dataset.data_path={corpus} train.train_iters=1 train.global_batch_size=1".split()
    keys = (f"load={tmp_path}/nowhere", f"load={empty}", f"pretrained_checkpoint={empty}", f"save={saved}")
    commands = [[*common, f"checkpoint.{key}"] for key in keys]
    commands.append([*commands[1], "checkpoint.exit_on_missing_checkpoint=false"])
    *refused, (status, output, _) = outcomes(bridge_python, RUNNER, commands, folder=tmp_path)
    assert [(code, replaced) for code, _, replaced in refused] == [(2, [])] * len(keys)
    *lacking, overwritten = (error for _, error, _ in refused)
    for key, error in zip(keys[:-1], lacking, strict=True):
        assert f"there is no checkpoint to load in checkpoint.{key}" in error
        assert "checkpoint.exit_on_missing_checkpoint=false" in error
    assert f"{saved} has a checkpoint of iteration {STEPS}, and this run, which starts at iteration 0" in overwritten
    assert (status, len(losses(output))) == (0, 1)
