"""The launcher: reading a command, refusing what cannot work, and running a script as Python would."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.datasets import utils

from megacpp_mcore import cpu, patches
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.arguments.read import read
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.errors import (
    ArgumentMismatchError,
    CheckoutError,
    ConfigFileError,
    DataError,
    LaunchError,
    SpecImportError,
)
from megacpp_mcore.launch import launcher, scoring
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.model import Layout, memory, preset
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe import events
from megacpp_mcore.patches.machinery import registry
from tests import forks, stock
from tests.errors import raises
from tests.leftovers import END_S, is_running
from tests.trees import copy_modules, edit, wheel_root

TO_TRAIN = ["--mock-data", "--train-iters", "1", "--lr", "1", "--eval-interval", "1"]
CPU_ARGUMENTS = [*(word for words in cpu.lane.REQUIRED_ARGUMENTS for word in words), *TO_TRAIN]


def script_in(folder: Path, code: str = "raise AssertionError('must not run')\n", name: str = "pretrain_gpt.py") -> Path:
    script = folder / name
    script.write_text(code)
    return script


def plan(*command: str, environment: dict[str, str] | None = None, **options: Any) -> launch_plan.Plan:
    options.setdefault("device", "cpu")
    return launch_plan.plan(command, environment=environment or {}, **options)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--spec a.b.c --x 1", "--spec a.b c --x 1"),
        ("--spec=a.b.c --x 1", "--spec a.b c --x 1"),
        ("--spec a.b c --x 1", "--spec a.b c --x 1"),
        ("--x 1 --spec megacpp_mcore.nam56r", "--x 1 --spec megacpp_mcore nam56r"),
    ],
)
def test_spec_becomes_two_words(words: str, expected: str) -> None:
    arguments, spec = launch_plan.split_spec(words.split())
    assert arguments == expected.split()
    assert spec is not None
    assert list(spec) == arguments[arguments.index("--spec") + 1 :][:2]


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        ("--spec=", "spec-form", ["--spec ''", "--spec megacpp_mcore.PRESET"]),
        ("--spec --lr 1", "spec-form", ["--spec ''", "--spec megacpp_mcore.PRESET"]),
        ("--spec=a.b c", "spec-words", ["--spec=a.b c", "--spec a.b c"]),
    ],
)
def test_unreadable_spec_is_refused(words: str, code: str, values: list[str]) -> None:
    with raises(SpecImportError, *values, code=code):
        launch_plan.split_spec(words.split())


def test_script_is_looked_up_in_the_checkout_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, here = tmp_path / "checkout", tmp_path / "here"
    for folder in (checkout, here):
        folder.mkdir()
        (folder / "pretrain_gpt.py").touch()
    (here / "only_here.py").touch()
    monkeypatch.chdir(here)
    environment = {"MEGATRON_LM": str(checkout)}
    assert launch_plan.find_script("pretrain_gpt.py", environment) == checkout / "pretrain_gpt.py"
    assert launch_plan.find_script("only_here.py", environment) == here / "only_here.py"
    assert launch_plan.find_script("pretrain_gpt.py", {}) == here / "pretrain_gpt.py"
    assert launch_plan.find_script("../checkout/pretrain_gpt.py", {}) == checkout / "pretrain_gpt.py"


def test_missing_script_says_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkout").mkdir()
    for environment, said in (
        ({}, "MEGATRON_LM is not set"),
        ({"MEGATRON_LM": str(tmp_path / "checkout")}, "checkout/a.py"),
    ):
        with raises(CheckoutError, "git clone --branch core_v0.19.0", said, tmp_path / "a.py"):
            launch_plan.find_script("a.py", environment)


def test_a_checkout_that_is_not_there_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").touch()
    with pytest.raises(CheckoutError, match="MEGATRON_LM is '/no'"):
        launch_plan.find_script("pretrain_gpt.py", {"MEGATRON_LM": "/no"})


def test_sources_are_compared_before_megatron_is_imported(tmp_path: Path) -> None:
    """Of the checkout whose script is named, with the patches of the run: those of the model, and of --patch."""
    modules = {module for patch in registry.default().patches for module in patch.modules}
    tree = copy_modules(wheel_root(), tmp_path / "lm", modules)
    script = str(script_in(tree))
    own = [script, *CPU_ARGUMENTS, "--spec", "megacpp_mcore.nam56r"]
    launch_plan.check_sources(plan(*own))
    target = tree / "megatron/training/models/gpt.py"  # of mtp-shared-block, which NAM56R needs
    edit(target, target.read_bytes().replace(b"def mtp_block_spec(", b"def mtp_block_spec(  # an edit\n"))
    with raises(LaunchError, tree, "megatron-core 0.", "mtp_block_spec", "compat --checkout", code="sources") as refused:
        launcher.launch(own, device="cpu")
    assert "--patch" not in str(refused.value)
    with raises(LaunchError, "leave out --patch mtp-shared-block", code="sources"):
        launcher.launch([script, *CPU_ARGUMENTS], device="cpu", patches=["mtp-shared-block"])
    launch_plan.check_sources(plan(script, *CPU_ARGUMENTS))


def test_plan_of_a_whole_command(tmp_path: Path) -> None:
    script = script_in(tmp_path)
    chosen = plan(str(script), "--spec", "megacpp_mcore.nam56r", *CPU_ARGUMENTS)
    assert chosen == launch_plan.Plan(
        script, ("--spec", "megacpp_mcore", "nam56r", *CPU_ARGUMENTS), ("megacpp_mcore", "nam56r"), "cpu", 1
    )
    said = chosen.describe(world_size=4)
    assert str(script) in said
    assert "spec megacpp_mcore.nam56r | device cpu | world size 4" in said


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("--tokenizer-type TikTokenizer", "tiktoken"),
        ("--tokenizer-type Llama2Tokenizer", "sentencepiece"),
        ("--tokenizer-type SFTTokenizer", "transformers"),
        ("--tensorboard-dir runs", "tensorboard"),
        ("--wandb-project runs", "wandb"),
    ],
)
def test_what_needs_a_package_is_refused_without_it(monkeypatch: pytest.MonkeyPatch, words: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with raises(LaunchError, words.removesuffix(" runs"), f"pip install {package}"):
        plan(*words.split(), *CPU_ARGUMENTS)


def test_an_optimizer_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "emerging_optimizers" else real(name))
    for optimizer in ("adam", "sgd"):
        assert plan("--optimizer", optimizer, *CPU_ARGUMENTS).device == "cpu"
    with raises(LaunchError, "optimizer muon needs emerging_optimizers", "pip install emerging-optimizers"):
        plan("--optimizer", "muon", *CPU_ARGUMENTS)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    assert plan("--optimizer", "muon", *CPU_ARGUMENTS).device == "cpu"


@pytest.mark.parametrize("flag", ["--sft", "--mamba-state-dim=128"])
def test_what_our_layers_would_not_read_is_refused_on_a_script_too(tmp_path: Path, flag: str) -> None:
    script = script_in(tmp_path)
    assert plan(str(script), flag, *CPU_ARGUMENTS).spec is None  # stock's own
    for first in ([str(script)], []):  # the reason, rather than that the wheel's loop does not do it
        with pytest.raises(ArgumentMismatchError, match=flag.partition("=")[0]):
            plan(*first, flag, "--spec", "megacpp_mcore", "nam56r", *CPU_ARGUMENTS)


RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
RANKS |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environment",
    [
        RANKS,
        RANKS | {"SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "8", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},  # eight trials
        {"WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "0"},
        RANKS | {"MASTER_ADDR": "no.invalid"},  # as yet
    ],
)
def test_environments_of_a_job_that_are_whole(environment: dict[str, str]) -> None:
    assert plan(*CPU_ARGUMENTS, environment=environment).device == "cpu"


@pytest.mark.parametrize("spec", ["os.path", "megacpp_mcore_evil.spec", "torch.nn.Linear"])
def test_spec_outside_the_allow_list_is_refused(spec: str) -> None:
    with pytest.raises(SpecImportError, match="--allow-spec-from " + spec.split(".")[0]):
        plan("--spec", spec, *CPU_ARGUMENTS)
    assert plan("--spec", spec, *CPU_ARGUMENTS, allowed_spec_prefixes=[spec.rpartition(".")[0]]).spec is not None


def test_cpu_arguments_are_all_named_at_once() -> None:
    with raises(LaunchError, "megacpp-mcore recipe emit", *map(" ".join, cpu.lane.REQUIRED_ARGUMENTS)):
        plan("--lr", "1")


@pytest.mark.parametrize("name", ["pretrain_gpt.py", "pretrain_hybrid.py"])
def test_what_stock_would_miss_in_a_traceback_is_named_at_once(name: str, tmp_path: Path) -> None:
    script, bare = str(script_in(tmp_path, name=name)), CPU_ARGUMENTS[: -len(TO_TRAIN)]
    for first in ([], [script]):
        with raises(LaunchError, "--data-path PREFIX", "--mock-data", "--train-iters N", "--lr RATE", "--eval-interval N"):
            plan(*first, *bare)
        with raises(LaunchError, "without --data-path PREFIX, or --mock-data:"):
            plan(*first, *bare, *TO_TRAIN[1:], "--data-path")
        with raises(LaunchError, "without --lr RATE:"):
            plan(*first, *bare, "--train-data-path", "A", "--train-samples", "1", "--full-validation")
        for enough in (
            "--help",
            "--skip-train --mock-data",
            "--data-args-path F --train-samples 1 --lr 1 --eval-interval 1",
        ):
            assert plan(*first, *bare, *enough.split()).nproc == 1
    assert plan(str(script_in(tmp_path, name="own.py")), *bare).nproc == 1  # which may read what it likes


@pytest.mark.parametrize(
    ("environment", "code", "value"),
    [
        ({"WORLD_SIZE": "4"}, "ranks-missing", "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        *(({"RANK": rank}, "ranks-missing", "WORLD_SIZE, LOCAL_RANK") for rank in "013"),
        ({"LOCAL_RANK": "1"}, "ranks-missing", "RANK, WORLD_SIZE"),
        (RANKS | {"MASTER_ADDR": ""}, "ranks-missing", " MASTER_ADDR;"),
        (RANKS | {"MASTER_PORT": "0"}, "", "MASTER_PORT is '0'"),
        ({"MASTER_PORT": ""}, "", "MASTER_PORT is ''"),
        ({"MASTER_PORT": "99999"}, "", "MASTER_PORT is '99999'"),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "no.invalid"}, "", "MASTER_ADDR is 'no.invalid'"),
        ({"MASTER_ADDR": ""}, "", "MASTER_ADDR is ''"),
        ({"MASTER_ADDR": "x" * 64}, "", "x" * 64),
        (RANKS | {"RANK": "one", "LOCAL_RANK": ""}, "ranks", "RANK='one', LOCAL_RANK=''"),
        (RANKS | {"RANK": "2"}, "ranks", "RANK=2 of WORLD_SIZE=2"),
        (RANKS | {"LOCAL_WORLD_SIZE": "1"}, "ranks", "LOCAL_RANK=1 of LOCAL_WORLD_SIZE=1"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "", "srun started this as one of several tasks"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "", "SLURM_PROCID=1"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "RANK": "0"}, "", "OMPI_COMM_WORLD_SIZE=4"),
    ],
)
def test_an_environment_of_a_job_that_is_not_whole_is_refused(environment: dict[str, str], code: str, value: str) -> None:
    with raises(LaunchError, value, code=code):
        plan(environment=environment)


@pytest.mark.parametrize(
    ("words", "options", "code", "values"),
    [
        ("train", {}, "", ["'train'", "*.py"]),
        ("", {"device": "tpu"}, "", ["'tpu'", "auto, cpu, cuda"]),
        ("", {"nproc": 0}, "", ["--nproc is 0"]),
        ("", {"nproc": 2, "environment": RANKS}, "", ["--nproc 2", "torchrun"]),
        ("", {"nproc": 2, "environment": {"SLURM_STEP_NUM_TASKS": "2"}}, "", ["SLURM_STEP_NUM_TASKS=2"]),
        ("--optimizer sgd --save s --save-interval 1", {}, "optimizer-state", ["add --no-save-optim,"]),
        ("--hybrid-context-parallel --sft", {}, "unsupported", ["--sft, --hybrid-context-parallel;"]),
        ("--yaml-cfg=x.yaml", {}, "", ["--yaml-cfg", "--spec"]),
        ("--no-observe=1", {}, "", ["--no-observe=1", "`--`"]),
        ("--profile 10-14", {}, "", ["--profile", "`--`"]),
        ("--profile --profile-step-start 3 --use-checkpoint-args", {}, "", ["--use-checkpoint-args"]),
    ],
)
def test_what_cannot_work_is_refused(words: str, options: dict[str, Any], code: str, values: list[str]) -> None:
    with raises(LaunchError, *values, code=code):
        plan(*words.split(), **options)


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-model-parallel-size 4",
        "--pipeline-model-parallel-size=4",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL",
        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M|M|M|M/+-",
    ],
)
def test_packed_rows_on_inner_stages_of_a_stock_script_are_refused(words: str, tmp_path: Path) -> None:
    """Where stock ends in "'NoneType' object is not an iterator"; the wheel's loop trains so (tests/distributed)."""
    script = script_in(tmp_path)
    packed = [*words.split(), "--dataloader-inter-document-masking", *CPU_ARGUMENTS]
    with raises(LaunchError, "pretrain_gpt.py", "--dataloader-inter-document-masking", code="packed-inner-stages"):
        plan(str(script), *packed)
    assert plan(*packed).script is None
    assert plan(str(script), *words.split(), *CPU_ARGUMENTS).script == script
    two = ["--pipeline-model-parallel-size", "2", "--hybrid-layer-pattern", "M|M/+|-", *packed[len(words.split()) :]]
    assert plan(str(script), *two).script == script


@pytest.mark.parametrize("name", ["pretrain_hybrid.py", "pretrain_mamba.py"])
def test_text_that_pretrain_hybrid_would_not_cut_up_is_refused(tmp_path: Path, name: str) -> None:
    """It has no dataset for it, nor have those that run it; the wheel's loop has, with either model class."""
    words = ["--hybrid-layer-pattern", "M", "--fim-data", *CPU_ARGUMENTS]
    script = script_in(tmp_path, name=name)
    with raises(LaunchError, name, "--fim-data"):
        plan(str(script), *words)
    assert plan(*words).script is None


def test_a_mask_that_stock_attention_does_not_read_is_refused() -> None:
    """Transformer Engine's attention and the fused softmax are causal whatever mask they get; a spec's may be others."""
    local = ("--transformer-impl", "local", "--bf16")
    for extra in (
        (),
        ("--transformer-impl", "transformer_engine"),
        ("--transformer-impl", "inference_optimized"),
        local,
        ("--spec", "megatron.core.models.hybrid", "x"),
    ):
        with raises(LaunchError, "--reset-attention-mask", "--dataloader-inter-document-masking", code="mask-unread"):
            plan("--reset-attention-mask", *extra)
    launch_plan._check_supported(None, ["--reset-attention-mask", *local, "--no-masked-softmax-fusion"], None)
    assert plan("--reset-attention-mask", *CPU_ARGUMENTS).spec is None
    launch_plan._check_supported(None, ["--reset-attention-mask"], ("our_specs", "block"))


@pytest.mark.parametrize("available", [True, False])
def test_device_auto_and_cuda(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(available))
    assert plan(*CPU_ARGUMENTS, device="auto").device == ("cuda" if available else "cpu")
    if available:
        assert plan(*TO_TRAIN, device="cuda").device == "cuda"
    else:
        with pytest.raises(LaunchError, match="--device cpu"):
            plan(device="cuda")


@pytest.mark.parametrize(
    ("total_memory", "said"),
    [(85_017_493_504, "2 GPUs, "), (47_810_805_760, "2 GPUs, --tensor"), (25_282_281_472, "4 GPUs, --tensor")],
    ids=["H100", "L40S", "4090"],
)
def test_a_gpu_that_cannot_hold_the_states_is_refused_before_megatron(
    total_memory: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=total_memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    words = lower(Run(preset("nam56r"), Layout(), Training(data=("--data-path", "there is none"))))
    with pytest.raises(LaunchError, match=rf"^nam56r .* 81.0 GB .* {total_memory / 1e9:.1f} GB, .* {said}"):
        launcher.launch(words, device="cuda")


RECORD = """
import json, os, sys
import torch
from megatron.core.datasets import utils
facts = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "cuda": torch.cuda.is_available(),
    "rank": os.environ["RANK"], "port": os.environ["MASTER_PORT"], "sibling": __import__("sibling").VALUE,
}
utils.compile_helpers()
json.dump(facts, open(sys.argv[1], "w"))
"""


def test_a_script_runs_as_python_would_and_all_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sibling.py").write_text("VALUE = 3\n")
    script, facts_file = tmp_path / "record.py", str(tmp_path / "facts.json")
    script.write_text(RECORD)
    before = dict(os.environ), list(sys.path), list(sys.argv), torch.cuda.is_available, utils.compile_helpers

    assert launcher.launch([str(script), facts_file, *CPU_ARGUMENTS], device="cpu") == 0

    facts = json.loads(Path(facts_file).read_text())
    assert facts.pop("argv") == [str(script), facts_file, *CPU_ARGUMENTS]
    assert facts.pop("port") == "0"  # for the kernel to choose, when it is bound
    assert facts == {"path": str(tmp_path), "name": "__main__", "cuda": True, "rank": "0", "sibling": 3}
    assert before == (dict(os.environ), sys.path, sys.argv, torch.cuda.is_available, utils.compile_helpers)
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"megacpp-mcore: script {script} | spec none (stock GPT) | device cpu | world size 1"
    assert [line for line in rest if line == "megacpp-mcore: patches: dataset-helpers"] != []
    assert all(line.startswith("megacpp-mcore: ") for line in rest)


@pytest.mark.parametrize(
    ("statement", "status", "how"),
    [("sys.exit(3)", 3, "SystemExit"), ("sys.exit()", 0, "finished"), ("sys.exit('why')", 1, "SystemExit")],
)
def test_exit_status_passes_through_and_is_recorded(statement: str, status: int, how: str, tmp_path: Path) -> None:
    script = script_in(tmp_path, f"import sys\n{statement}\n")
    recording = launcher.Recording(observe=str(tmp_path / "run"))
    assert launcher.launch([str(script), *CPU_ARGUMENTS], device="cpu", recording=recording) == status
    assert [start.how for start in events.read(tmp_path / "run")[0]] == [how]


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """The prefix of a dataset whose tokens are not what was prepared."""
    (tmp_path / "text.txt").write_text("some text to train on")
    (prefix,) = prepare([str(tmp_path / "text.txt")], str(tmp_path / "data"))
    with open(prefix + ".bin", "r+b") as file:
        file.write(b"\x7f")
    return prefix


def test_data_is_checked_once_per_host(damaged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 9 is the first of the second host, which may have a damaged copy of what rank 0 sees."""
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launcher._verified_data(["--data-path", damaged], 260)[0] == "--data-cache-path"
    monkeypatch.setenv("LOCAL_RANK", "0")
    with raises(DataError, damaged + ".bin"):
        launcher._verified_data(["--data-path", damaged], 260)


def test_damaged_data_stops_a_spec_of_ours_before_the_script_runs(damaged: str, tmp_path: Path) -> None:
    tokens = tokenizer_words(preset("nam56r_tiny"))
    words = ["--spec", "megacpp_mcore", "nam56r", *tokens, *CPU_ARGUMENTS]
    words[words.index("--mock-data")] = f"--data-path={damaged}"
    with raises(DataError, damaged + ".bin"):
        launcher.launch([str(script_in(tmp_path)), *words], device="cpu")


@pytest.mark.parametrize(
    ("allowed", "code", "values"),
    [([], "spec-not-allowed", ["our_specs.block"]), (["our_specs"], "", ["no_such_module_at_all"])],
)
def test_a_spec_that_is_not_allowed_or_cannot_be_imported_stops_the_run(
    allowed: list[str],
    code: str,
    values: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where Megatron would log the second and train a stock GPT."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "our_specs.py").write_text("print('imported')\nimport no_such_module_at_all\n")
    script = script_in(tmp_path)
    words = [str(script), "--spec", "our_specs.block", *CPU_ARGUMENTS]
    with raises(SpecImportError, *values, code=code):
        launcher.launch(words, device="cpu", allowed_spec_prefixes=allowed)
    assert ("imported\n" in capsys.readouterr().out) is bool(allowed)


def test_patches_and_process_group_of_a_run_end_with_it(tmp_path: Path) -> None:
    def applied() -> list[str]:
        return [record["name"] for record in patches.status() if record["state"] != "not applied"]

    script = script_in(
        tmp_path,
        "import torch\nfrom megacpp_mcore import patches\ntorch.distributed.init_process_group('gloo')\n"
        "assert patches.apply(['mtp-shared-block'])\n"
        "states = {record['name']: record['state'] for record in patches.status()}\n"
        "assert states['sp-norm-gradients'] == states['dataset-helpers'] == 'applied'\n"
        "assert states['hybrid-flops'] == states['spec-import'] == 'not applied'\n",
    )
    patches.apply(["output-layer-fusion"])  # stays applied, asked for or not
    try:
        asked = ["sp-norm-gradients", "output-layer-fusion"]
        assert launcher.launch([str(script), *CPU_ARGUMENTS], device="cpu", patches=asked) == 0
        assert applied() == ["output-layer-fusion"]
    finally:
        patches.revert(["output-layer-fusion"])
    assert not torch.distributed.is_initialized()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of signals are put back, which torchrun's agent leaves its own of in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_what_every_process_of_a_launch_is_given_and_the_status_of_the_first_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "my_spec.py").write_text("block = 1\n")
    script = script_in(
        tmp_path,
        "import os, pathlib, sys, time\n"
        "found = [os.environ[name] for name in ('OMP_NUM_THREADS', 'WORLD_SIZE')] + ['my_spec' in sys.modules]\n"
        "here = pathlib.Path(__file__)\n"
        "here.with_name('pid' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "here.with_name(os.environ['RANK']).write_text(repr(found))\n"
        "while not here.with_name('0').exists(): time.sleep(0.05)\n"
        "sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(300)\n",
    )
    words = [str(script), "--spec", "my_spec.block", *CPU_ARGUMENTS]
    fork = partial(forks.start, output=tmp_path / "output")
    with_torch = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen"
    monkeypatch.setattr(with_torch, lambda args, env, **_: fork(args[1:], env=env))
    started = time.monotonic()
    assert launcher.launch(words, device="cpu", nproc=2, allowed_spec_prefixes=["my_spec"]) == 7
    assert time.monotonic() - started < 250
    assert "rank 1 failed first, with exit status 7" in capfd.readouterr().err
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["['1', '2', True]"] * 2
    assert [pid for pid in (int((tmp_path / f"pid{rank}").read_text()) for rank in "01") if is_running(pid)] == []
    assert list((tmp_path / "temporary").glob("*torchelastic*")) == []
    assert list((tmp_path / "temporary").glob("megacpp-mcore-*")) == []


def test_a_checkout_that_would_be_shadowed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    script = script_in(tmp_path)
    with raises(LaunchError, megatron.core.__file__, code="imported"):
        launcher.launch([str(script), *CPU_ARGUMENTS], device="cpu")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_launch(tmp_path: Path, sent: signal.Signals) -> None:
    script = script_in(
        tmp_path,
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(120)\n",
    )
    call = f"import sys\nfrom megacpp_mcore.launch.launcher import launch\nsys.exit(launch({[str(script), *CPU_ARGUMENTS]}, "
    parent = forks.start(["-c", call + "device='cpu', nproc=2))"], tmp_path / "output")
    files = [tmp_path / "0", tmp_path / "1"]
    forks.wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    os.kill(parent.pid, sent)
    assert parent.wait(END_S) == (128 + signal.SIGINT if sent == signal.SIGINT else -signal.SIGKILL)
    left = [int(file.read_text()) for file in files]
    forks.wait_until(lambda: not any(map(is_running, left)), within_s=END_S)


def test_a_wrong_options_file_is_said_before_megatron_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "options.yaml").write_text("modle: nam56r_tiny\n")
    monkeypatch.setenv("MEGACPP_CONFIG", str(tmp_path / "options.yaml"))
    with raises(ConfigFileError, "options.yaml", "'modle'"):
        plan("--spec", "megacpp_mcore.nam56r", *CPU_ARGUMENTS)
    assert plan("--spec", "megatron.core.spec", *CPU_ARGUMENTS).spec is not None


def test_a_name_of_the_other_class_needs_its_pattern() -> None:
    words = ["--spec", "megacpp_mcore", "nam56r_hybrid", *CPU_ARGUMENTS]
    with raises(SpecImportError, "nam56r_hybrid", "--hybrid-layer-pattern"):
        plan(*words)
    assert plan("--hybrid-layer-pattern", "M", *words).spec == ("megacpp_mcore", "nam56r_hybrid")


def test_what_does_not_train_needs_no_memory_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of a recipe for several GPUs, as a command that only loads the model has them on one."""
    begun: list[list[str]] = []
    monkeypatch.setattr(launcher, "launch", lambda words, **_: begun.append(words) or 0)
    words = stock.words(preset("nam56r"), device="cuda")
    given = scoring.add_options(argparse.ArgumentParser()).parse_args(["--heldout", "text", "--tokens", "3"])
    given.stock_command, given.device = words, "cuda"
    assert launcher.launch_script(scoring, given) == 0
    assert begun[0][-3:] == ["--heldout=text", "--tokens=3", "--batch=8"]
    assert memory.states(read(given.stock_command, device="cuda", processes=1, model=preset("nam56r"))) is not None
    assert memory.states(read(begun[0][1:], device="cuda", processes=1, model=preset("nam56r"))) is None
