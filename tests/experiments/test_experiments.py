"""The experiments: what the committed files ask for can be trained, and a run's row has what it left."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from experiments import train
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout, preset, with_overrides
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.training import Training

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_arm_is_one_that_can_be_lowered(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    for name, part in content["arms"].items():
        arm = train._arm(content, name, part or {})
        model, layout = with_overrides(preset(content["model"]), arm.overrides), Layout(**arm.layout)
        words = lower(
            model, layout, Training(**arm.training, data=("--mock-data",), processes=layout.processes), arm.host
        )
        assert words[-3] == "--spec" or arm.words
        assert arm.door == "launch" or arm.recipe in RECIPES


def test_a_row_has_what_a_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for number, source in enumerate(find_stdlib_sources()[:20]):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(Path(source.path).read_bytes())
    (corpus,) = prepare([tmp_path / "texts"], str(tmp_path / "corpus"))
    training = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 3, "learning_rate": 1e-3}
    arms = {"one": {}, "no sharing": {"overrides": {"dsa": {"schedule": "-FF"}}}}
    file, output = tmp_path / "tiny.yaml", tmp_path / "rows.csv"
    file.write_text(
        yaml.safe_dump({"model": "nam56r_tiny", "probe": "layers", "training": training, "arms": arms}, sort_keys=False)
    )
    words = [str(file), "--data", corpus, "--device", "cpu", "--per-gpu", "2", "--window", "2"]
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "runs"
    failed = train.main([*words, "--folder", str(folder), "--output", str(output)])
    assert not failed, [path.read_text()[-2000:] for path in folder.glob("*/log")]
    rows = list(csv.DictReader(output.open()))
    assert [(row["arm"], row["steps"], row["window"]) for row in rows] == [("one", "3", "2"), ("no sharing", "3", "2")]
    assert [float(row["apart"]) > 0 for row in rows] == [False, True]
    for row in rows:
        assert 4 < float(row["losses"].split()[0].removeprefix("lm_loss:")) < float(row["first_loss"]) + 1
        probe = dict(word.split(":") for word in row["probe"].split())
        assert float(probe["layers_apart"]) > 1
        assert float(probe["busiest_expert"]) >= 1 >= float(probe["idlest_expert"])
