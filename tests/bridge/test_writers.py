"""What a recorded run leaves in files of TensorBoard and W&B themselves, which are real here; W&B is offline."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.observe import events, live
from megacpp_mcore.observe.events import Step
from tests import tiny_run
from tests.bridge.processes import ROOT, TINY, run

STEPS, ENDED, RESUMED = 5, 4, 2
"""All steps, those of the first start, and the one whose checkpoint the second start goes on from."""
RUN_ID = "same"
DOCUMENTED = set(re.findall(r"`(observe/\w+)`", (ROOT / "docs" / "observe.md").read_text()))
Scalars = dict[str, dict[int, float]]
Start = tuple[list[Step], list[dict[str, Any]]]


def offline(folder: Path) -> dict[str, str]:
    """W&B's environment variables of a run that sends nothing, and keeps everything in ``folder``."""
    places = {f"WANDB_{name}_DIR": str(folder / "wandb" / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    return {"WANDB_MODE": "offline", "WANDB_RUN_ID": RUN_ID, "WANDB_ERROR_REPORTING": "false", **places}


def settings(folder: Path, options: str) -> dict[str, str]:
    """The variable that names a file of ``options``, which is written, with readings of routing every other step."""
    path = folder / "settings.yaml"
    path.write_text(f"{options}observability: {{interval: 2}}\n")
    return {"MEGACPP_CONFIG": str(path)}


def files(folder: Path) -> tuple[list[Path], list[Path]]:
    """TensorBoard's and W&B's files in ``folder``, a start each, in the order of the starts."""
    events, histories = (folder / "events").glob("events.*"), (folder / "wandb").rglob(f"run-{RUN_ID}.wandb")
    return sorted(events, key=lambda path: path.stat().st_mtime_ns), sorted(
        histories, key=lambda path: path.parent.name
    )


def scalars(python: Path, *places: Path) -> list[Scalars]:
    """What is in ``places``."""
    done = run(python, "tests.bridge.events", *map(str, places))
    found = map(json.loads, done.stdout.splitlines()[-len(places) :])
    return [{name: {int(step): one for step, one in values.items()} for name, values in of.items()} for of in found]


def recorded(folder: Path, resumed_at: int) -> Start:
    """What one start recorded of each of its steps in the run's folder, steps that a later start did again among them."""
    starts = [one for rank in events.read(folder).values() for one in rank if one.metrics]
    (start,) = (one for one in starts if one.resumed_at == resumed_at)
    return start.steps, start.metrics


def single(value: float) -> float:
    """``value`` in single precision, in which TensorBoard keeps everything."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def ours(logged: list[dict[str, Any]]) -> Scalars:
    """Our scalars by name and step."""
    found: Scalars = {}
    for one in logged:
        for name in live.SCALARS:
            if (value := one[name]) is not None:
                found.setdefault(f"{live.TAG}{name}", {})[one["step"]] = value
    return found


def megatrons(steps: list[Step]) -> Scalars:
    """Those of Megatron's scalars that a step is a record of, in the single precision that Megatron logs them in."""
    found = {name: {step.step: step.losses[name] for step in steps} for name in steps[0].losses}
    found["grad-norm"] = {step.step: step.grad_norm or 0.0 for step in steps}
    found["learning-rate"] = {step.step: step.learning_rate or 0.0 for step in steps}
    assert {"lm loss", "mtp_1 loss", "indexer loss", "z_loss"} <= set(found)
    return {name: {step: single(value) for step, value in values.items()} for name, values in found.items()}


def check(found: Scalars, start: Start, *, rounded: bool) -> None:
    """Every scalar of ours and nothing else of that name, and Megatron's, each at its steps."""
    steps, logged = start
    numbers = [step.step for step in steps]
    assert [one["step"] for one in logged] == numbers
    wanted = {
        name: {step: single(value) if rounded else value for step, value in values.items()}
        for name, values in ours(logged).items()
    }
    assert {name: values for name, values in found.items() if name.startswith(live.TAG)} == wanted
    theirs = megatrons(steps)
    assert {name: found[name] for name in theirs if name in found} == theirs
    assert list(found["batch-size"]) == list(found["loss-scale"]) == numbers


@pytest.fixture(scope="module")
def stock(bridge_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two starts by the command line, the second from an earlier checkpoint than the last; the folder of all they left."""
    folder = tmp_path_factory.mktemp("stock")
    data = tiny_run.make_data(folder)
    environment = offline(folder) | settings(folder, (data / "config.yaml").read_text())
    for more in (["--exit-interval", str(ENDED)], ["--load", str(folder / "saved"), "--ckpt-step", str(RESUMED)]):
        words = tiny_run.words(
            data, STEPS, "--ckpt-format", "torch_dist", "--save", str(folder / "saved"), "--save-interval", str(RESUMED),
            "--tensorboard-dir", str(folder / "events"), "--wandb-project", "project", "--wandb-exp-name", "name",
            "--wandb-save-dir", str(folder), *more,
        )  # fmt: skip
        launch = ["megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--"]
        run(bridge_python, *launch, *words, folder=folder, **environment)
    return folder


def test_both_writers_have_every_scalar_at_its_step(bridge_python: Path, stock: Path) -> None:
    """Of both starts, which are a file each; the second does steps again, and keeps their numbers."""
    events, histories = files(stock)
    assert (len(events), len(histories)) == (2, 2)
    starts = [recorded(stock / "saved" / "observe", resumed_at) for resumed_at in (0, RESUMED)]
    assert [[step.step for step in steps] for steps, _ in starts] == [[1, 2, 3, 4], [3, 4, 5]]
    found = scalars(bridge_python, *events, *histories)
    for start, by_tensorboard, by_wandb in zip(starts, found[:2], found[2:], strict=True):
        check(by_tensorboard, start, rounded=True)
        check(by_wandb, start, rounded=False)
        assert set(ours(start[1])) == DOCUMENTED - {f"{live.TAG}mfu"}  # for a CPU, no peak is known


def test_so_they_have_of_bridges_loop(bridge_python: Path, corpus: str, tmp_path: Path) -> None:
    run(
        bridge_python, "megacpp_mcore.nemo_recipes.run", "--recipe", TINY, f"dataset.data_path={corpus}",
        "train.train_iters=3", "train.global_batch_size=2", "--observe", str(tmp_path / "run"),
        f"logger.tensorboard_dir={tmp_path}/events", "logger.wandb_project=project", "logger.wandb_exp_name=name",
        f"logger.wandb_save_dir={tmp_path}",
        folder=tmp_path, **offline(tmp_path), **settings(tmp_path, "model: nam56r_tiny\n"),
    )  # fmt: skip
    (events,), (history,) = files(tmp_path)
    start = recorded(tmp_path / "run", 0)
    by_tensorboard, by_wandb = scalars(bridge_python, events, history)
    check(by_tensorboard, start, rounded=True)
    check(by_wandb, start, rounded=False)
