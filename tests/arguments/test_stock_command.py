"""A run as a value: its shell, YAML and sbatch forms hand over the same words and environment, and a real shell agrees."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import overrides, stock_command
from megacpp_mcore.arguments.stock_command import BARE, DATA_VARIABLE, LAUNCH, WAYS, WHEEL, Slurm, StockCommand
from megacpp_mcore.commands import cli
from megacpp_mcore.errors import LaunchError, ModelError, PatternError
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.model import Model, preset
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.training import Training
from megacpp_mcore.util import flags, schema
from tests.errors import raises

ROOT = Path(__file__).parents[2]
MORE = ["--lr", "2 3"]
"""What is said when a file with the command is run."""
AWKWARD = "a b'c\"$(touch made)`touch made`\\!*#~ é"
RUN = StockCommand(
    recipe="nam56r", device="cuda", via=LAUNCH, script="pretrain_gpt.py", processes_per_node=2,
    env={"FIRST": AWKWARD, "SECOND": "2"},
    arguments=("--switch", "--data-path", DATA_VARIABLE, "--split", "1,0,0", "--other", AWKWARD, "*", "--spec", "a", "b"),
)  # fmt: skip

RECORDER = f"""#!{sys.executable}
import json, os, sys
record = {{"argv": sys.argv[1:], "env": {{name: os.environ.get(name) for name in ("FIRST", "SECOND")}}}}
open(os.environ["RECORD"], "w").write(json.dumps(record))
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin_config.VARIABLE, raising=False)


def shell(script: str, folder: Path, **variables: str) -> dict[str, Any]:
    """Return the call that ``torchrun`` or ``megacpp-mcore`` gets when bash runs ``script``; srun runs its own arguments."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("torchrun", "megacpp-mcore"):
        (tools / name).write_text(RECORDER)
    (tools / "srun").write_text('#!/bin/bash\n[ "$1" = --kill-on-bad-exit=1 ] && shift\nexec "$@"\n')
    (tools / "scontrol").write_text("#!/bin/bash\necho \"$*\" >> scontrol\nprintf 'first\\nsecond\\n'\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (folder / "script").write_text(script + "\n")
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "RECORD": str(folder / "record"), **variables}
    for options in (["-n"], []):
        command = ["bash", *options, "script", *MORE]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), script
    assert not (folder / "made").exists()
    record: dict[str, Any] = json.loads((folder / "record").read_text())
    return record


def resolved(command: StockCommand, prefix: str) -> list[str]:
    return [*(prefix if word == DATA_VARIABLE else word for word in command.arguments), *MORE]


def changed(**values: Any) -> StockCommand:
    return StockCommand(**{name: getattr(RUN, name) for name in RUN.__dataclass_fields__} | values)


LAUNCHED = ["-m", "megacpp_mcore", "launch", "--device"]
MEETING = ["--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-id", "nam56r", "--rdzv-endpoint", "here:1"]


@pytest.mark.parametrize(
    ("values", "head"),
    [
        ({}, ["--nproc-per-node", "2", *LAUNCHED, "cuda", "--", "pretrain_gpt.py"]),
        ({"device": "cpu"}, ["launch", "--device", "cpu", "--nproc", "2", "--", "pretrain_gpt.py"]),
        ({"via": WHEEL}, ["--nproc-per-node", "2", *LAUNCHED, "cuda", "--"]),
        ({"via": WHEEL, "device": "cpu"}, ["launch", "--device", "cpu", "--nproc", "2", "--"]),
        ({"via": BARE}, ["--nproc-per-node", "2", "/m n/pretrain_gpt.py"]),
        ({"nodes": 3}, [*MEETING, "--nproc-per-node", "2", *LAUNCHED, "cuda", "--", "pretrain_gpt.py"]),
        ({"nodes": 3, "via": BARE}, [*MEETING, "--nproc-per-node", "2", "/m n/pretrain_gpt.py"]),
        ({"nodes": 3, "device": "cpu"}, [*MEETING, "--nproc-per-node", "2", *LAUNCHED, "cpu", "--", "pretrain_gpt.py"]),
    ],
)
def test_a_shell_hands_the_command_over_word_by_word(values: dict[str, Any], head: list[str], tmp_path: Path) -> None:
    command = changed(**values)
    text = stock_command.as_cli(command)
    record = shell(text, tmp_path, DATA_PREFIX="x y", HEAD_NODE="here:1", MEGATRON_LM="/m n")
    flags = [word for word in command.arguments if word.startswith("--")]
    assert [line.split()[0] for line in text.splitlines()][-len(flags) - 1 : -1] == flags  # in a line each
    assert record["argv"] == [*head, *resolved(command, "x y")]
    assert record["env"] == dict(command.env)


@pytest.mark.parametrize("via", WAYS)
def test_a_batch_job_hands_the_same_words_over(via: str, tmp_path: Path) -> None:
    command = changed(via=via, nodes=2)
    script = stock_command.as_slurm(command, Slurm(partition="gpu", time="1-00:00:00", cpus_per_task=16))
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "41"}
    record = shell(script, tmp_path, DATA_PREFIX="x y", MEGATRON_LM="/m n", **job)
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "41", "--rdzv-endpoint", "first:20041"]
    launched = [*LAUNCHED, "cuda", "--"]
    program = {BARE: ["/m n/pretrain_gpt.py"], LAUNCH: [*launched, "pretrain_gpt.py"], WHEEL: launched}[via]
    assert record["argv"] == [*meeting, "--nproc-per-node", "2", *program, *resolved(command, "x y")]
    assert record["env"] == dict(command.env)
    requested = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in script.splitlines() if "#SBATCH" in line)
    assert requested == {
        **{"job-name": "nam56r", "partition": "gpu", "time": "1-00:00:00", "cpus-per-task": "16"},
        **{"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "2"},
    }
    assert (tmp_path / "scontrol").read_text() == "show hostnames n[1-2]\n"


WORDS = st.text(AWKWARD + "\u2028\ufeff\U0001f600-:{}[]&,|>%@?=null01", max_size=12).filter(
    lambda word: not word.startswith("--")
)
FLAGS = st.from_regex(r"--[a-z][a-z-]{0,8}", fullmatch=True)


@settings(max_examples=30)
@given(
    st.dictionaries(FLAGS, st.lists(WORDS, max_size=3), max_size=5),
    st.dictionaries(st.from_regex("[A-Z_]{1,8}", fullmatch=True), WORDS, max_size=3),
)
def test_yaml_and_shell_quoting_are_reversible(options: dict[str, list[str]], env: dict[str, str]) -> None:
    words = tuple(word for flag, values in options.items() for word in (flag, *values))
    command = changed(arguments=words, env=env)
    written = yaml.safe_load(stock_command.as_yaml(command))
    assert written["env"] == env
    values = (
        (flag, [] if value is True else [value] if isinstance(value, str) else value)
        for flag, value in written["arguments"].items()
    )
    assert [word for flag, value in values for word in (flag, *value)] == list(words)
    split = shlex.split(stock_command.as_cli(command).replace(" \\\n", " "))
    assert split[len(split) - len(words) - 1 :] == [*words, "$@"]


@pytest.mark.parametrize(("option", "value"), [("partition", "a b"), ("account", "a\n#SBATCH --uid=0")])
def test_batch_options_are_checked(option: str, value: str) -> None:
    with raises(LaunchError, f"--{option}", repr(value)):
        Slurm(**{option: value})


def emit(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert cli.main(["recipe", "emit", *words]) == status, words
    printed = capsys.readouterr()
    return printed.err if status else printed.out


@pytest.mark.parametrize("name", [*RECIPES, "nam52"])
def test_every_recipe_has_every_form_and_they_agree(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in RECIPES and RECIPES[name].settings:
        monkeypatch.setenv(plugin_config.VARIABLE, str(RECIPES[name].settings))
    options = [name, "--data", "a b"]
    written = yaml.safe_load(emit(capsys, *options, "--as", "yaml"))
    words = emit(capsys, *options, "--as", "args").splitlines()
    parsed = flags.read(words)
    assert {
        flag: () if value is True else (value,) if isinstance(value, str) else tuple(value)
        for flag, value in written["arguments"].items()
    } == parsed
    split = shlex.split(emit(capsys, *options, "--as", "cli").replace(" \\\n", " "))
    assert split[len(split) - len(words) - 1 :] == [*words, "$@"]
    plan = RECIPES.get(name)
    if plan is not None:
        assert written["processes_per_node"] == plan.processes
        assert parsed["--global-batch-size"] == (str(plan.run.training.global_batch_size),)
        assert parsed["--expert-model-parallel-size"] == (str(plan.run.layout.expert),)
    if plan is None or plan.run.training.device == "cuda":
        script = emit(capsys, *options, "--as", "slurm")
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0


def test_no_key_of_a_run_is_a_key_of_a_model() -> None:
    of_model, of_training = set(dict(schema.plain_keys(Model))), set(dict(schema.plain_keys(Training)))
    assert not of_model & of_training
    assert {"depth", "dsa.schedule", "m2rnn.heads", "rope_theta"} <= of_model
    assert of_training == {
        "device", "precision", "transformer_impl", "micro_batch_size", "global_batch_size", "processes", "cuda_graphs",
        "train_iters", "optimizer", "learning_rate", "seed", "weight_decay", "adam_beta2", "clip_grad",
    }  # fmt: skip


def test_overrides_and_their_differences_are_each_others_inverse() -> None:
    words = ["depth=24", "dsa.topk=64", "m2rnn.heads=none", "mtp.loss_scale=0.1", "mamba3.decay_activation=heavy_tail"]
    of_model, of_layout, of_run = overrides.read([*words, "learning_rate=1e-3", "tensor=2"])
    assert (of_layout, of_run) == ({"tensor": 2}, {"learning_rate": 1e-3})
    model = overrides.apply(preset("nam56r"), of_model)
    assert (model.depth, model.dsa.topk, model.m2rnn.heads, model.mtp.loss_scale) == (24, 64, None, 0.1)
    assert overrides.differences(model, preset("nam56r")) == {
        **{"depth": 24, "dsa": {"topk": 64}, "mtp": {"loss_scale": 0.1}},
        "mamba3": {"decay_activation": "heavy_tail"},
    }
    with raises(PatternError, "pattern=X"):
        overrides.apply(preset("nam56r"), {"pattern": "X"})
    with raises(ModelError, "nam56r", "mla.q_lora_rank=0"):
        overrides.apply(preset("nam56r"), {"mla.q_lora_rank": 0})


def test_the_file_of_a_changed_model_is_one_that_a_run_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a model.yaml"
    words = ["nam56r_tiny", "--set", "dsa.topk=8", "seed=7", "--settings", str(file), "--as", "yaml"]
    command = yaml.safe_load(emit(capsys, *words))
    assert command["env"] == {plugin_config.VARIABLE: str(file)}
    assert (command["arguments"]["--dsa-indexer-topk"], command["arguments"]["--seed"]) == ("8", "7")
    assert plugin_config.load(file).model.dsa.topk == 8
    assert yaml.safe_load(emit(capsys, *words)) == command  # the same content once more
    words[2] = "dsa.topk=16"
    before = file.read_text()
    assert "add --overwrite" in emit(capsys, *words, status=2)
    assert file.read_text() == before
    emit(capsys, *words, "--overwrite")
    assert plugin_config.load(file).model.dsa.topk == 16
    file.write_text(before)
    file.write_text(file.read_text() + "backends: {mamba3: reference}\n")
    monkeypatch.setenv(plugin_config.VARIABLE, str(file))  # changes on top of a file's
    second = tmp_path / "second.yaml"
    emit(capsys, "nam56r_tiny", "--set", "moe.topk=1", "--settings", str(second))
    loaded = plugin_config.load(second)
    assert (loaded.model.dsa.topk, loaded.model.moe.topk, dict(loaded.backends)) == (8, 1, {"mamba3": "reference"})


def test_show_takes_overrides_of_the_model_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe", "show", "nam56r_tiny", "--set", "mtp.depth=0"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["mtp"]["depth"], shown["parameters"]["mtp"]) == (0, 0)
    assert shown["hybrid_layer_pattern"] == "+EMEDEMEDEMG"
    assert cli.main(["recipe", "show", "nam56r_tiny", "--set", "seed=1"]) == 2
    assert "seed" in capsys.readouterr().err
    name = "nam56r_pretrain_8gpu_h200_bf16"
    assert cli.main(["recipe", "show", name]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["processes"], shown["layout"]["expert"], shown["model"]["name"]) == (8, 1, "nam56r")
    assert round(shown["model"]["states_bytes"]["total"] / 1e9, 1) == 33.8
    assert cli.main(["recipe", "show", "nam56r"]) == 0
    assert json.loads(capsys.readouterr().out)["states_bytes"]["total"] == 18 * sum(preset("nam56r").parameters().values())


def test_a_launch_on_more_gpus_than_there_are_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert launch_plan.plan(["--mock-data", "--skip-train"], device="cuda", nproc=2, environment={}).nproc == 2
    with pytest.raises(LaunchError, match=r"8 GPUs .* 2"):
        launch_plan.plan(["--x"], device="cuda", nproc=8, environment={})
    started = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    started |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match="4 GPUs"):
        launch_plan.plan(["--x"], device="cuda", environment=started)
