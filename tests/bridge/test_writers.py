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
    return sorted(events, key=lambda path: path.stat().st_mtime_ns), sorted(histories, key=lambda path: path.parent.name)


def scalars(python: Path, *places: Path) -> list[Scalars]:
    """Read the scalars in ``places``."""
    done = run(python, "tests.bridge.events", *map(str, places))
    tables = map(json.loads, done.stdout.splitlines()[-len(places) :])
    return [{name: {int(step): x for step, x in values.items()} for name, values in of.items()} for of in tables]


def recorded(folder: Path, resumed_at: int) -> Start:
    """Return the steps and metrics that one start recorded, including steps that a later start repeated."""
    starts = [start for rank in events.read(folder).values() for start in rank if start.metrics]
    (start,) = (start for start in starts if start.resumed_at == resumed_at)
    return start.steps, start.metrics


def single(value: float) -> float:
    """``value`` in single precision, in which TensorBoard keeps everything."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def ours(logged: list[dict[str, Any]]) -> Scalars:
    """Our scalars by name and step."""
    by_name: Scalars = {}
    for row in logged:
        for name in live.SCALARS:
            if (value := row[name]) is not None:
                by_name.setdefault(f"{live.TAG}{name}", {})[row["step"]] = value
    return by_name


def megatrons(steps: list[Step]) -> Scalars:
    """Return the Megatron scalars that steps record, in the single precision in which Megatron logs them."""
    by_name = {name: {step.step: step.losses[name] for step in steps} for name in steps[0].losses}
    by_name["grad-norm"] = {step.step: step.grad_norm or 0.0 for step in steps}
    by_name["learning-rate"] = {step.step: step.learning_rate or 0.0 for step in steps}
    assert {"lm loss", "mtp_1 loss", "indexer loss", "z_loss"} <= set(by_name)
    return {name: {step: single(value) for step, value in values.items()} for name, values in by_name.items()}


def check(written: Scalars, start: Start, *, rounded: bool) -> None:
    """Check that exactly our scalars, and Megatron's, were written at their steps."""
    steps, logged = start
    numbers = [step.step for step in steps]
    assert [row["step"] for row in logged] == numbers
    wanted = {
        name: {step: single(value) if rounded else value for step, value in values.items()}
        for name, values in ours(logged).items()
    }
    assert {name: values for name, values in written.items() if name.startswith(live.TAG)} == wanted
    expected = megatrons(steps)
    assert {name: written[name] for name in expected if name in written} == expected
    assert list(written["batch-size"]) == list(written["loss-scale"]) == numbers


@pytest.fixture(scope="module")
def stock(bridge_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two command-line starts, the second of which resumes before the last checkpoint."""
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
    """Each of the two starts has its own file; the second repeats steps under the same numbers."""
    events, histories = files(stock)
    assert (len(events), len(histories)) == (2, 2)
    starts = [recorded(stock / "saved" / "observe", resumed_at) for resumed_at in (0, RESUMED)]
    assert [[step.step for step in steps] for steps, _ in starts] == [[1, 2, 3, 4], [3, 4, 5]]
    tables = scalars(bridge_python, *events, *histories)
    for start, by_tensorboard, by_wandb in zip(starts, tables[:2], tables[2:], strict=True):
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
