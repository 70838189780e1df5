"""Another DSA schedule for a checkpoint: whose indexers go and come, and that training goes on with it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.core.dist_checkpointing.validation import save_integrity_manifest
from torch.distributed.checkpoint.api import CheckpointException

from megacpp_mcore.checkpoints import staging
from megacpp_mcore.commands import cli
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.observe.steps import read_steps
from tests import stock, tiny_run
from tests.saved import tensors_in, write

INDEXER = "decoder.layers.{}.self_attention.core_attention.indexer.linear_wk.weight"
OTHER = "decoder.layers.4.self_attention.linear_proj.weight"


def save(folder: Path, *layers: int) -> Path:
    """A checkpoint with an indexer in ``layers`` (1-based), whose values are the layer's number, and Adam's mean of each."""
    tensors = {OTHER: torch.ones(2, 3)}
    for layer in layers:
        name = INDEXER.format(layer - 1)
        tensors[name] = torch.full((2, 3), float(layer))
        tensors[f"optimizer.state.exp_avg.{name}"] = torch.full((2, 3), layer / 10)
    write(folder / "iter_0000030", tensors)
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    return folder


def command(folder: Path, schedule: str) -> list[str]:
    words = ["checkpoint", "schedule", str(folder / "old"), str(folder / "new"), "--model", "nam56r_tiny"]
    return [*words, f"--schedule={schedule}"]


def trained_with(schedule: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nam56r_tiny with another schedule, by the file that MEGACPP_CONFIG names."""
    (folder / "model.yaml").write_text(f"model: nam56r_tiny\noverrides: {{dsa: {{schedule: '{schedule}'}}}}\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(folder / "model.yaml"))


@pytest.mark.parametrize(
    ("before", "schedule", "after", "says"),
    [
        ("-FS", "-FF", {5: 5.0, 9: 5.0}, "lost their indexer: none; that became Full: 9 (as 5)"),
        ("-FF", "-FS", {5: 5.0}, "lost their indexer: 9; that became Full: none"),
        ("-FS", "-FS", {5: 5.0}, "lost their indexer: none; that became Full: none"),
        ("-FS", "WFS", {5: 5.0}, "lost their indexer: none; that became Full: none"),
        ("-FS", "-FW", {5: 5.0}, "lost their indexer: none; that became Full: none"),
        ("-FF", "FS-", {1: 5.0}, "lost their indexer: 5, 9; that became Full: 1 (as 5)"),
        ("-FF", "W-F", {9: 9.0}, "lost their indexer: 5; that became Full: none"),
    ],
)
def test_indexers_go_and_come(
    before: str,
    schedule: str,
    after: dict[int, float],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(tmp_path / "old", *((5, 9) if before == "-FF" else (5,)))
    trained_with(before, tmp_path, monkeypatch)
    assert cli.main(command(tmp_path, schedule)) == 0
    assert says in capsys.readouterr().out
    found = tensors_in(tmp_path / "new" / "iter_0000030")
    expected = {OTHER: 1.0}
    for layer, value in after.items():
        name = INDEXER.format(layer - 1)
        expected |= {name: value, f"optimizer.state.exp_avg.{name}": value / 10}
    assert {name: float(tensor.unique()) for name, tensor in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("present", "schedule", "says"),
    [
        ((5, 9), "-FF", "has indexers in layers [5, 9], and nam56r_tiny with the schedule -FS in [5]"),
        ((), "-FF", "has indexers in layers [], and nam56r_tiny"),
        ((5,), "-SF", "layer 5 is Shared"),
    ],
)
def test_what_cannot_be_is_refused(
    present: tuple[int, ...], schedule: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "old", *present)
    assert cli.main(command(tmp_path, schedule)) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_without_an_indexer_there_is_none_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "old")
    trained_with("-", tmp_path, monkeypatch)
    assert cli.main(command(tmp_path, "-F-")) == 2
    assert "layers [5] of nam56r_tiny are 'F' in the schedule -F-, and - has no indexer" in capsys.readouterr().err


def test_a_model_of_longer_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "old", 5)
    words = command(tmp_path, "")[:-1]
    assert cli.main([*words, "--to", "nam56r_tiny_long"]) == 0
    said = capsys.readouterr().out
    assert "lost their indexer: none; that became Full: none" in said
    assert f"emit nam56r_tiny_long -- --load {tmp_path / 'new'} --finetune" in said
    assert "rows of 1024 tokens" in said
    assert set(tensors_in(tmp_path / "new" / "iter_0000030")) == set(tensors_in(tmp_path / "old" / "iter_0000030"))
    words[3] = str(tmp_path / "newer")
    assert cli.main([*words, "--to", "nam56r_long"]) == 2
    assert "depth is 12 in nam56r_tiny, and 52 in nam56r_long" in capsys.readouterr().err
    file = tmp_path / "own.yaml"
    others = {"moe: {topk: 1}": "moe.topk is 1 ", "dsa: {indexer_heads: 8}": "dsa.indexer_heads is 8 "}
    for value, says in (others | {"rope_theta: 1000": "rope_theta is 1000.0 "}).items():
        file.write_text(f"model: nam56r_tiny\noverrides: {{{value}}}\n")
        monkeypatch.setenv("MEGACPP_CONFIG", str(file))
        assert cli.main([*words, "--to", "nam56r_tiny_long"]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "newer").exists()
    longer = tmp_path / "long.yaml"  # as the last of the files for the shorter one has it, too
    longer.write_text("model: nam56r_tiny_long\noverrides: {rope_theta: 1000, dsa: {schedule: WFF}}\n")
    assert cli.main([*words, "--to", str(longer)]) == 0
    said = capsys.readouterr().out
    assert "that became Full: 9 (as 5)" in said
    assert f"`MEGACPP_CONFIG={longer} megacpp-mcore recipe emit nam56r_tiny_long" in said


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says as it refuses; it leaves nothing of ``new``."""
    was = (folder / "new").exists()
    assert cli.main(command(folder, "-FF")) == 2
    assert (folder / "new").exists() == was
    assert not (folder / "new.partial").exists()
    return capsys.readouterr().err


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    assert f"{old} is not a checkpoint" in refused(tmp_path, capsys)
    old.mkdir()
    (old / "latest_checkpointed_iteration.txt").write_text("7")
    assert f"{old}/iter_0000007" in refused(tmp_path, capsys)
    (old / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    assert "in the format torch" in (says := refused(tmp_path, capsys))
    assert "--ckpt-convert-format torch_dist" in says


def test_a_folder_that_is_there_and_damage_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every other damage: test_folder.py."""
    folder = save(tmp_path / "old", 5) / "iter_0000030"
    (tmp_path / "new").mkdir()
    assert f"{tmp_path}/new already exists" in refused(tmp_path, capsys)
    (tmp_path / "new").rmdir()
    (data,) = folder.glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    assert f"{folder} is damaged: {data.name}: has {len(whole) // 2} bytes, of at least" in refused(tmp_path, capsys)
    data.write_bytes(whole)
    (folder / ".metadata").write_bytes(b"no pickle")
    assert f"{folder}/.metadata cannot be read" in refused(tmp_path, capsys)


def test_a_link_is_written_under_its_own_name_and_other_names_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker file names iterations, and Megatron exits with status 0 where it cannot read one."""
    folder = save(tmp_path / "old", 5) / "iter_0000030"
    stored = folder.rename(tmp_path / "stored")
    folder.symlink_to(stored)
    assert cli.main(command(tmp_path, "-FF")) == 0
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "30"
    assert tensors_in(tmp_path / "new" / "iter_0000030")
    words = ["checkpoint", "schedule", str(stored), str(tmp_path / "other"), "--model", "nam56r_tiny", "--schedule=-FF"]
    assert cli.main(words) == 2
    assert "is called 'stored'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "old", 5)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging, "flush_to_disk", interrupted)
        assert cli.main(command(tmp_path, "-FF")) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
    assert cli.main(command(tmp_path, "-FF")) == 0


def test_flat_buckets_have_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
    write(tmp_path / "old" / "iter_0000030", {bucket: torch.zeros(9)})
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("30")
    says = refused(tmp_path, capsys)
    assert f"flat buckets ({bucket})" in says
    assert "--dist-ckpt-optim-fully-reshardable" in says
    assert "--no-save-optim" in says


def test_the_other_files_come_along(tmp_path: Path) -> None:
    """Objects, Bridge's files, a tokenizer; the old checkpoint stays as it is."""
    from megatron.core.dist_checkpointing import load_common_state_dict
    from megatron.core.dist_checkpointing.validation import verify_integrity_manifest

    folder, content = tmp_path / "old" / "iter_0000030", {"megacpp_layout": 2}
    indexer = INDEXER.format(4)
    tensors = {indexer: torch.ones(2, 3, dtype=torch.bfloat16), OTHER: torch.ones(2)}
    write(folder, tensors, {"rng_state/shard_0.0_1.1": [[{"seed": 7}]]}, {"iteration": 30, "content_metadata": content})
    (folder / "train_state.pt").write_bytes(b"bridge")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    save_integrity_manifest(str(folder))
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    words = ["checkpoint", "schedule", str(folder), str(tmp_path / "new"), "--model", "nam56r_tiny", "--schedule=-FF"]
    assert cli.main(words) == 0
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    new = tmp_path / "new" / "iter_0000030"
    assert tensors_in(new)[INDEXER.format(8)].dtype == torch.bfloat16
    assert load_common_state_dict(str(new)) == {"iteration": 30, "content_metadata": content}
    for path in ("iter_0000030/train_state.pt", "latest_train_state.pt"):
        assert (tmp_path / "new" / path).read_bytes() == b"bridge"
    assert (new / "tokenizer" / "vocab.json").read_text() == "{}"
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "30"
    verify_integrity_manifest(str(new))


@pytest.mark.slow
def test_a_trained_model_goes_on_with_longer_rows(tmp_path: Path) -> None:
    """From step 0, its indexer in the dense warm-up."""
    (prefix,) = prepare([Path(cli.__file__)], str(tmp_path / "text"))
    text, steps = ("--data-path", str(prefix), "--split", "100,0,0"), {}
    long = {"dsa": {"warmup_steps": 1}, "seq_length": 384}
    # Shorter rows than the presets', but those of the second longer than the window, which is as long as a row was.
    for name, extra, overrides in (
        ("nam56r_tiny", ("--save", str(tmp_path / "old"), "--save-interval", "2"), {"seq_length": 128}),
        ("nam56r_tiny_long", ("--load", str(tmp_path / "new"), "--finetune"), long),
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": name, "overrides": overrides}))
        model = with_overrides(preset(name), overrides)
        words = stock.words(model, *extra, data=text, global_batch_size=1, train_iters=2)
        launch = ("megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--observe", str(tmp_path / name), "--")
        output = tiny_run.start(launch, words, tmp_path).finish()
        steps[name] = [(step.step, step.losses["lm loss"]) for step in read_steps(tmp_path / name)]
        if name == "nam56r_tiny":
            words = ["checkpoint", "schedule", str(tmp_path / "old"), str(tmp_path / "new"), "--model", name]
            assert cli.main([*words, "--to", "nam56r_tiny_long"]) == 0
    assert "DSA schedule WFS" in output
    assert "1 steps of dense indexer warm-up" in output
    assert [[step for step, _ in found] for found in steps.values()] == [[1, 2], [1, 2]]
    assert steps["nam56r_tiny_long"][0][1] < steps["nam56r_tiny"][0][1]  # which has seen nothing yet


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "second"), [("-FS", "-FF"), ("-FF", "-FS")])
def test_training_goes_on(first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer state included; the losses of the next step are those of the schedule before, but for the selections."""
    (prefix,) = prepare([Path(cli.__file__)], str(tmp_path / "text"))
    text, steps = ("--data-path", str(prefix), "--split", "100,0,0"), {}
    for schedule, load in ((first, None), (first, "old"), (second, "new")):
        overrides = {"dsa": {"schedule": schedule, "topk": 512}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": "nam56r_tiny", "overrides": overrides}))
        model = with_overrides(preset("nam56r_tiny"), overrides)
        words = stock.words(model, data=text, global_batch_size=2, train_iters=4)
        words += ["--exit-interval", "2"] if load is None else []
        words += ["--load", str(tmp_path / load)] if load else ["--save", str(tmp_path / "old"), "--save-interval", "2"]
        record = tmp_path / f"steps of {load}"
        launch = ("megacpp_mcore", "launch", "--verbose", "--device", "cpu", "--observe", str(record), "--")
        output = tiny_run.start(launch, words, tmp_path).finish()
        assert re.search(r"iteration +\d+/", output)
        steps[load] = {step.step: step.losses["lm loss"] for step in read_steps(record)}
        if load is None:
            trained_with(first, tmp_path, monkeypatch)
            assert cli.main(command(tmp_path, second)) == 0
    assert list(steps["new"]) == list(steps["old"]) == [3, 4]
    assert steps["new"] == pytest.approx(steps["old"], rel=1e-5)  # every key is selected, whoever selects


POS = "unexpected pos 704 vs 598"  # torch's, as it closes what could not be written


@pytest.mark.parametrize(
    ("said", "behind", "named"),
    [
        ("other", "", ""),
        (POS, "", POS),
        (POS, "No space left on device", "No space left on device"),
        (POS, "File too large", "File too large"),
    ],
)
def test_a_disk_that_fills_while_torch_saves_is_named(said: str, behind: str, named: str, tmp_path: Path) -> None:
    """CheckpointException is no Exception, and what filled the disk is behind the error that a rank has."""
    error = RuntimeError(said)
    error.__context__ = OSError(28, behind)
    failed = CheckpointException("write", {0: (error, traceback.StackSummary())})
    with (
        pytest.raises(CheckpointError if named else CheckpointException, match=named or said),
        staging.new_folder(tmp_path / "new"),
    ):
        raise failed
    assert not list(tmp_path.iterdir())
