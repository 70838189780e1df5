"""The experiments: what the committed files ask for can be trained, and a run's row has what it left."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import pytest
import yaml
from megatron.core import package_info

from experiments import lengths, megatrons, starts, train
from experiments.curves import main as draw_curves
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.arguments.read import read
from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.model import Layout, memory, preset, with_overrides
from megacpp_mcore.model.flops import count
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import GPT, HYBRID, Training
from tests import forks, stock
from tests.observe.recorded import stepped, with_loss, write_start
from tests.trees import wheel_root

ROOT = Path(__file__).parents[2]
TWIN = 0.817e9
"""FLOPs of training a token of the twins."""
FILES = sorted((ROOT / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_arm_is_one_that_can_be_lowered(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    for name, part in content["arms"].items():
        arm = train._arm(content, name, part or {})
        model, layout = with_overrides(preset(content["model"]), arm.overrides), Layout(**arm.layout)
        training = {"processes": layout.processes, **arm.training, "extra": tuple(map(str, arm.words))}
        words = lower(Run(model, layout, Training(**training, data=("--mock-data",)), arm.model_class))
        assert words[-3] == "--spec"
        if arm.via == "stock":
            own = training.pop("extra")
            words = lower(Run(model, layout, Training(**training, data=("--mock-data",)), arm.model_class))
            assert_stock_trains(train.of_stock(words, model, own), arm.training["learning_rate"])
            continue
        # As on the machine that it is for, of H200 at most.
        states = memory.states(read(words, device="cuda", processes=training["processes"], model=model))
        assert states is not None
        assert states.total <= memory.usable(150_109_880_320)
        assert arm.via == "launch" or arm.recipe in RECIPES


def test_the_twins_take_the_same_work_a_token() -> None:
    content = yaml.safe_load((ROOT / "experiments/twins.yaml").read_text())
    arms = [train._arm(content, name, part or {}) for name, part in content["arms"].items()]
    models = {arm.name: with_overrides(preset(content["model"]), arm.overrides) for arm in arms if arm.via == "launch"}
    work = {name: count.step(model).training_per_token for name, model in models.items()}
    assert work.pop("nam56r") == pytest.approx(TWIN, rel=0.01)
    assert min(work.pop("prediction"), work.pop("full attention")) > 1.03 * TWIN  # which is what they are about
    assert work
    assert all(flops == pytest.approx(TWIN, rel=0.03) for flops in work.values())


def assert_stock_trains(words: list[str], rate: float) -> None:
    """Megatron takes what a stock arm says, on the CPU's layers, and counts what the file says."""
    from megatron.training.training import num_floating_point_operations

    of_gpus = {*train.OF_GPUS, "--bf16"}
    on_cpu = [{"transformer_engine": "local"}.get(word, word) for word in words if word not in of_gpus]
    vocabulary = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "32767"]
    arguments = stock.parse([*on_cpu, *vocabulary, "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"])
    assert arguments.lr == rate
    arguments.padded_vocab_size = 32768
    assert num_floating_point_operations(arguments, 1) / arguments.seq_length == pytest.approx(TWIN, rel=0.01)


def test_a_run_has_the_gpus_that_it_asks_for_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy: set[str] = set()
    begun: list[tuple[int, int, str]] = []  # the processes of a run, its GPUs, and its learning rate

    def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        gpus = env["CUDA_VISIBLE_DEVICES"].split(",")
        processes, rate = (command[command.index(flag) + 1] for flag in ("--nproc", "--lr"))
        begun.append((int(processes), len(gpus), rate))
        assert not busy.intersection(gpus)
        busy.update(gpus)
        time.sleep(0.05)
        busy.difference_update(gpus)
        return SimpleNamespace(returncode=1)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(train.subprocess, "run", run)
    monkeypatch.setattr(train, "tokenizer_words", lambda *_, **__: ())
    words = [str(ROOT / "experiments/gpus.yaml"), "--data", "corpus", "--output", str(tmp_path / "rows.csv")]
    assert train.main([*words, "--gpus", "8", "--folder", str(tmp_path / "runs")]) == 1  # as none trained
    arms = yaml.safe_load((ROOT / "experiments/gpus.yaml").read_text())["arms"].values()
    wanted = sorted(arm["training"]["processes"] for arm in arms)
    assert sorted((processes, gpus) for processes, gpus, _ in begun) == [(count, count) for count in wanted]
    # The first arms in the file run concurrently, before the one on 8.
    assert sorted(processes for processes, *_ in begun[:3]) == [1, 2, 4]
    begun.clear()
    swept = ["--folder", str(tmp_path / "swept"), "--arms", "one", "two", "--rates", "1e-3", "0.002"]
    assert train.main([*words, "--gpus", "2", *swept]) == 1
    assert sorted(rate for *_, rate in begun) == ["0.001", "0.001", "0.002", "0.002"]
    assert sorted(path.name for path in (tmp_path / "swept").iterdir())[1] == "01_one_at_0.002_1234"
    with pytest.raises(SystemExit, match="8 GPUs"):
        train.main([*words, "--gpus", "4", "--folder", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"'fuor'.*four"):
        train.main([*words, "--arms", "one", "fuor"])
    (tmp_path / "typo.yaml").write_text("model: nam56r\ntrainning: {}\narms: {one: {}}\n")
    with pytest.raises(SystemExit, match=r"'trainning'.*training"):
        train.main([str(tmp_path / "typo.yaml"), "--data", "corpus"])


def test_a_row_has_what_a_run_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], stdout: IO[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        with one_at_a_time:
            program = forks.start(command[3:], Path(stdout.name), env=env)  # behind python -W ignore
        return SimpleNamespace(returncode=program.wait(forks.PATIENCE_S))

    one_at_a_time = threading.Lock()
    monkeypatch.setattr(train, "subprocess", SimpleNamespace(run=run, STDOUT=None))
    (tmp_path / "texts").mkdir()
    for number, source in enumerate(find_stdlib_sources()[:20]):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(Path(source.path).read_bytes())
    (corpus,) = prepare([tmp_path / "texts"], str(tmp_path / "corpus"))
    training = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 3, "learning_rate": 1e-3}
    short = {"seq_length": 32, "dsa": {"topk": 8}, "mtp": {"depth": 0}}
    arms = {"one": {"overrides": short}}
    arms["no sharing"] = {"overrides": {**short, "dsa": {**short["dsa"], "schedule": "-FF"}}}
    file, output = tmp_path / "tiny.yaml", tmp_path / "rows.csv"
    file.write_text(
        yaml.safe_dump({"model": "nam56r_tiny", "probe": "layers", "training": training, "arms": arms}, sort_keys=False)
    )
    words = [str(file), "--data", corpus, "--device", "cpu", "--per-gpu", "2", "--window", "2"]
    monkeypatch.chdir(ROOT)
    here = dict.fromkeys((*train.PACKAGES, "commit"), "of this process")
    monkeypatch.setattr(train, "versions", lambda *_: here)
    folder = tmp_path / "runs"
    heldout, points = (tmp_path / "heldout", tmp_path / "curves.csv")
    (tmp_path / "short.txt").write_bytes((tmp_path / "texts" / "0.txt").read_bytes()[:200])  # of which all is evaluated
    prepare([tmp_path / "short.txt"], str(heldout))
    words += ["--heldout", str(heldout), "--curves", str(points), "--receipts", str(tmp_path / "receipts.jsonl")]
    failed = train.main([*words, "--folder", str(folder), "--output", str(output)])
    assert not failed, [path.read_text()[-2000:] for path in folder.glob("*/log")]
    rows = list(csv.DictReader(output.open()))
    assert sorted((row["arm"], row["steps"], row["window"]) for row in rows) == [
        ("no sharing", "3", "2"),
        ("one", "3", "2"),
    ]
    assert [float(row["apart"]) > 0 for row in rows] == [False, True]
    for row in rows:
        assert (row["megatron-core"], row["commit"]) == (package_info.__version__, "of this process")
        assert 4 < float(row["losses"].split()[0].removeprefix("lm_loss:")) < float(row["first_loss"]) + 1
        probe = dict(word.split(":") for word in row["probe"].split())
        assert float(probe["layers_apart"]) > 1
        assert 4 < float(row["losses"].split()[-1].removeprefix("heldout:")) < float(row["first_loss"]) + 1
        assert float(probe["busiest_expert"]) >= 1 >= float(probe["idlest_expert"])
    lines = map(json.loads, (tmp_path / "receipts.jsonl").read_text().splitlines())
    kept = {line["arm"]: (line["seed"], line["receipt"]["status"]) for line in lines}
    assert kept == {row["arm"]: (int(row["seed"]), "finished") for row in rows}
    logs = [path.read_text() for path in folder.glob("*/log")]
    assert [text.count("validation loss at iteration") for text in logs] == [1, 1]
    curves = list(csv.DictReader(points.open()))
    assert sorted((row["arm"], row["step"], row["tokens"]) for row in curves) == [
        ("no sharing", "3", "96"),
        ("one", "3", "96"),
    ]
    words = [str(points), str(tmp_path / "plot.svg"), "--from-step", "1"]
    assert draw_curves(words) == 0
    of_clocks = (tmp_path / "plot.svg").read_text()
    (tmp_path / "rows.csv").write_text("arm,step_ms\none,9e6\none,8e6\nno sharing,9e6\n")
    assert draw_curves([*words, "--rows", str(tmp_path / "rows.csv")]) == 0
    assert (tmp_path / "plot.svg").read_text() != of_clocks
    (tmp_path / "rows.csv").write_text("arm,step_ms\none,\n")
    with pytest.raises(SystemExit):
        draw_curves([*words, "--rows", str(tmp_path / "rows.csv")])
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(word in drawn for word in ("no sharing", "tokens, millions", "seconds"))
    with pytest.raises(SystemExit):
        draw_curves([str(points), str(tmp_path / "none.svg")])


def memory_of(folder: Path, run: Run, settings: dict[str, Any]) -> dict[str, float]:
    """Return the cells of a launch of ``run`` that reserved 120.06 GB on an H200."""
    (folder / "arguments.json").write_text(json.dumps(lower(run)))
    (folder / "megacpp.json").write_text(json.dumps({"model": run.model.name, **settings}))
    held = {"kind": "CUDA allocator", "reserved_peak_bytes": 120_060_000_000}
    receipt = {"memory": held, "parallelism": {"world_size": run.training.processes}}
    cells = dict(word.split(":") for word in train._memory(folder, receipt).split())
    return {name: float(gigabytes) for name, gigabytes in cells.items()}


def test_a_row_has_the_memory_of_a_gpu_and_what_its_profile_says(tmp_path: Path) -> None:
    """Of a launch on two H200s: what its allocator reserved, with the estimate of its own recompute; the rank with the most."""
    run = Run(preset("nam56r_long"), Layout(context=2), Training(processes=2, data=("--mock-data",)))
    nothing, scans = (memory_of(tmp_path, run, {"recompute": recompute}) for recompute in ([], ["m"]))
    assert nothing["reserved_gb"] == scans["reserved_gb"] == 120.1
    by_way = {str(way.how): way.total / 1e9 for way in memory.choices(run)}
    # M layers keep their scan's rows where there is room (docs/model.md), unless they are recomputed.
    assert nothing["estimated_gb"] == pytest.approx(by_way["none"] + 13 * 74e3 * 16384 / 1e9, rel=0.01)
    assert scans["estimated_gb"] < by_way["none"]
    assert train._memory(tmp_path, {"memory": {"kind": "resident set", "reserved_peak_bytes": 1}}) == ""
    for rank, exposed in (("", 4_000_000), ("rank_00001", 6_000_000)):
        folder = tmp_path / "run" / "profile" / "16-17" / rank
        folder.mkdir(parents=True)
        gathered = {"calls": 4, "ns": 9_000_000, "exposed_ns": exposed}
        table = {
            "steps": [16, 17],
            "collectives": {"AllGather": gathered},
            "families": {"M": {"total_ns": 5 * exposed}},
        }
        (folder / "table.json").write_text(json.dumps(table))
    assert train._profiled(tmp_path) == "AllGather_exposed_ms:3.0 M_ms:15.0"


with (ROOT / "experiments/results/nam56r_h200.csv").open(newline="") as file:
    ESTIMATED = [row for row in csv.DictReader(file) if "reserved_gb" in row["probe"]]


@pytest.mark.parametrize("row", ESTIMATED, ids=lambda row: f"{row['arm']}, {row['commit']}")
def test_the_estimate_is_what_the_rows_of_an_h200_reserved(row: dict[str, str], tmp_path: Path) -> None:
    """In bf16 and in FP8, whose copies of weights leave parts of blocks unused, in graphs."""
    content = yaml.safe_load((ROOT / "experiments/nam56r.yaml").read_text())
    arm = train._arm(content, row["arm"], content["arms"][row["arm"]])
    plan = Training(data=("--mock-data",), extra=tuple(map(str, arm.words)), **arm.training)
    reserved = float(dict(word.split(":") for word in row["probe"].split())["reserved_gb"])
    cells = memory_of(tmp_path, Run(preset(row["model"]), Layout(), plan), dict(arm.settings))
    assert cells["estimated_gb"] == pytest.approx(reserved, rel=0.02)


def test_starts_are_timed_to_their_second_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one record, of which the first start is a real one; what has caches of its own starts with none."""
    output, folder = tmp_path / "rows.csv", tmp_path / "starts"
    caches = []

    def run(command: list[str], stdout: IO[str], env: dict[str, str], **_: object) -> SimpleNamespace:
        caches.append(env["TRITON_CACHE_DIR"])
        if (number := len(caches)) > 1:
            now = time.time()
            steps = stepped(now + 1, 1, startup=0.5), stepped(now + number, 2)
            write_start(folder / "run", number, 0, *map(with_loss, steps), began=now)
            return SimpleNamespace(returncode=0)
        program = forks.start(command[3:], Path(stdout.name), env=env, megatron=True)
        return SimpleNamespace(returncode=program.wait(forks.PATIENCE_S))

    monkeypatch.setattr(starts, "subprocess", SimpleNamespace(run=run, STDOUT=None))
    monkeypatch.setattr(starts, "STARTS", ("second, cold", "kernels built, cold", "warm"))
    monkeypatch.setattr(starts, "STEPS", 2)
    recipe = RECIPES["nam56r_tiny_pretrain_1cpu_fp32"]
    training = dataclasses.replace(recipe.run.training, micro_batch_size=1, global_batch_size=1)
    small = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, training=training))
    monkeypatch.setattr(starts, "RECIPES", {small.name: small})
    monkeypatch.chdir(ROOT)
    (tmp_path / "text.txt").write_bytes(Path(__file__).read_bytes())
    (corpus,) = prepare([tmp_path / "text.txt"], str(tmp_path / "corpus"))
    words = [small.name, "--data", corpus, "--folder", str(folder), "--output", str(output)]
    assert starts.main(words) == 0
    rows = list(csv.DictReader(output.open()))
    assert [row["start"] for row in rows] == ["second, cold", "kernels built, cold", "warm"]
    assert len({(row["startup_s"], row["first_s"], row["second_s"]) for row in rows}) > 1  # of each start its own
    for row in rows:
        assert 0 < float(row["startup_s"]) < float(row["first_s"]) < float(row["second_s"])
    assert caches[0] != caches[1] == caches[2]
    with pytest.raises(FileExistsError):
        starts.main(words)


def test_a_plot_by_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs take half of their milliseconds' tokens each; a small family is among the others."""
    table, columns = tmp_path / "rows.csv", ("arm", "tokens_per_s", "step_ms", "probe")
    row = {"arm": "two 64k context 2", "tokens_per_s": "32768", "step_ms": "2000"}
    row["probe"] = "AllGather_exposed_ms:9 A_ms:1310.72 M_ms:655.36 norm_ms:6.5536"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows([row, row | {"arm": "32k", "probe": ""}])
    assert lengths.microseconds(row) == pytest.approx({"A": 40.0, "M": 20.0, "other": 0.2})
    assert lengths.main([str(table), str(tmp_path / "plot.svg")]) == 0
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(word in drawn for word in ("2 GPUs, context 2", "1 GPU<", "two 64k context 2", "other"))
    table.write_text(table.read_text().replace("32k", "long"))
    with pytest.raises(SystemExit):
        lengths.main([str(table), str(tmp_path / "none.svg")])
    assert "the arm 'long' has no length; expected names such as 32k" in capsys.readouterr().err


def test_more_gpus_than_are_visible_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(SystemExit):
        train.main([str(ROOT / "experiments/gpus.yaml"), "--data", "corpus", "--gpus", "4"])
    assert "CUDA_VISIBLE_DEVICES=2,3" in capsys.readouterr().err


def test_a_megatron_has_a_row_of_what_compat_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing part fails the script."""
    output = tmp_path / "rows.csv"
    report = {"verdict": "fits", "patches": [{"targets": [{"state": "equal"}, {"state": "code"}]}]}
    run = mock.Mock(return_value=SimpleNamespace(returncode=0, stdout=json.dumps(report)))
    monkeypatch.setattr(megatrons, "subprocess", SimpleNamespace(run=run, DEVNULL=None, PIPE=None))
    monkeypatch.setattr(sys, "argv", ["megatrons", "this", "--parts", "compat", "--output", str(output)])
    assert megatrons.main() == 0
    assert run.call_args.args[0][1:] == ["-m", "megacpp_mcore", "compat", "--json", "--checkout", str(wheel_root())]
    monkeypatch.setattr(megatrons.trial, "train", lambda *_, **__: ([], ["died of signal 9", "no more"]))
    monkeypatch.setattr(sys, "argv", ["megatrons", "this", "--parts", "steps", "--output", str(output)])
    assert megatrons.main() == 1
    with output.open(newline="") as text:
        compared, *trained = csv.DictReader(text)
    assert compared["found"] == "fits: 1 of 2 targets equal"
    assert [row["found"] for row in trained] == [f"{model_class}: died of signal 9; no more" for model_class in (GPT, HYBRID)]
    assert [row["status"] for row in (compared, *trained)] == ["0", "1", "1"]
