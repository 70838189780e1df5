"""Bridge recipes in an environment with Megatron-Bridge: what they say, what they train, and what they refuse."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout
from megacpp_mcore.observe.steps import read_steps
from megacpp_mcore.recipe_command import tokenizer_words
from megacpp_mcore.recipes import RECIPES
from tests.checkpoints import tensors_in

ROOT = Path(__file__).parents[2]
TINY = "nam56r_tiny_pretrain_1cpu_fp32"
STEPS = 3

# What Bridge and stock say differently, and NAM56R's training does not depend on: model, optimizer, DDP.
HARMLESS = {
    # Weight shards of a parallelism that neither has, context parallelism, inference.
    "model": {
        "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards", "cp_comm_type",
        "inference_sampling_seed",
    },
    # Muon, offload, and a barrier for timers.
    "optimizer": {"muon_momentum", "optimizer_offload_fraction", "barrier_with_L1_time"},
    "ddp": {"data_parallel_sharding_strategy"},  # of Megatron-FSDP
}  # fmt: skip
# FP8, which is off, and the generator of initial weights, whose flag is unset or False.
HARMLESS_UNUSED = {"fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}


def run(python: Path, *words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-W", "ignore", "-m", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of a small dataset: a module of Python itself."""
    target = tmp_path_factory.mktemp("corpus") / "text"
    (prefix,) = prepare([argparse.__file__], str(target), progress=io.StringIO(), overwrite=True)
    return str(prefix)


@pytest.fixture(scope="module")
def trained(bridge_python: Path, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The tiny recipe, three steps through Bridge's own ``pretrain``: its checkpoint, and its log."""
    folder = tmp_path_factory.mktemp("bridge")
    done = run(
        bridge_python, "megacpp_mcore.nemo_recipes.run", "--recipe", TINY, f"train.train_iters={STEPS}",
        f"dataset.data_path={corpus}", f"checkpoint.save={folder}/saved", f"checkpoint.save_interval={STEPS}",
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder / "saved", done.stdout + done.stderr


def test_bridge_trains_what_the_command_line_trains(
    bridge_python: Path, trained: tuple[Path, str], corpus: str, tmp_path: Path
) -> None:
    """Losses of every step, and every parameter and moment of Adam's after the last, bit for bit."""
    chosen = RECIPES[TINY]
    training = Training(
        device="cpu",
        precision="fp32",
        transformer_impl="local",
        learning_rate=chosen.training.learning_rate,
        train_iters=STEPS,
        data=("--data-path", corpus, "--split", "100,0,0"),
        tokenizer=tokenizer_words(chosen.model, data=corpus),
        extra=("--ckpt-format", "torch_dist", "--save", str(tmp_path / "saved"), "--save-interval", str(STEPS)),
    )
    words = lower(chosen.model, Layout(), training)
    steps = tmp_path / "steps"
    done = run(bridge_python, "megacpp_mcore", "launch", "--record-steps", str(steps), "--device", "cpu", "--", *words)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    saved, log = trained
    printed = [float(loss) for loss in re.findall(r"lm loss: (\S+)", log)]
    assert printed == pytest.approx([step.losses["lm loss"] for step in read_steps(steps)], rel=1e-6)
    ours, theirs = (tensors_in(one / f"iter_{STEPS:07d}") for one in (saved, tmp_path / "saved"))
    assert {name for name in ours if "optimizer" in name}
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_bridge_logs_the_audited_operations(trained: tuple[Path, str]) -> None:
    """Its throughput is the audited count over its step time; the run takes back all that it replaced."""
    _, log = trained
    assert "GPT model" not in log
    for name in ("mtp-shared-block", "dsa-index-cache", "dataset-helpers"):
        assert f"patch {name} reverted" in log


@pytest.mark.parametrize("name", [TINY, "nam56r_quarter_pretrain_1gpu_h200_bf16"])
def test_a_recipe_says_to_bridge_what_it_says_to_the_command_line(bridge_python: Path, name: str) -> None:
    done = run(bridge_python, "tests.bridge.fields", name)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == HARMLESS.keys()
    for section, fields in found.items():
        rest = {key: pair for key, pair in fields.items() if key not in HARMLESS[section] | HARMLESS_UNUSED}
        rest = {key: pair for key, pair in rest.items() if set(pair) != {"None", "False"}}
        assert rest == {}, section


def test_every_recipe_is_built_offline_and_reads_back(bridge_python: Path, tmp_path: Path) -> None:
    done = run(bridge_python, "tests.bridge.factories", str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(RECIPES, "read back")


REFUSED = [
    ("nam56r_tiny_pretrain_1cpu", [], f"there is no recipe 'nam56r_tiny_pretrain_1cpu'; did you mean {TINY}"),
    (TINY, [], "the recipe trains on real text and none is named; add dataset.data_path=PREFIX"),
    (TINY, ["train.train_itres=3"], "no 'train.train_itres'; did you mean train.train_iters"),
    (TINY, ["trian.train_iters=3"], "no 'trian'; did you mean train"),
    (TINY, ["+train.bogus=3"], "'+train.bogus=3' is not of the form KEY=VALUE"),
    (TINY, ["~train.train_iters"], "is not of the form KEY=VALUE"),
    (TINY, ["train.train_iters=abc"], "train.train_iters='abc' is of type str; expected int"),
    (TINY, ["model.hidden_size=64", "dataset.data_path=text"], "hidden_size: found 64, expected"),
    (TINY, ["model.transformer_layer_spec=os.system"], "model.transformer_layer_spec"),
    (TINY, ["dataset.data_path=/nowhere/text"], "/nowhere/text"),
    ("nam56r_pretrain_8gpu_h200_bf16", [], "is for 8 processes, and 1 was started"),
    ("nam56r_pretrain_1gpu_h200_bf16", [], "needs 1 GPU on this host, and torch sees 0"),
]


def test_what_is_refused(bridge_python: Path) -> None:
    """All of them in one process, without a GPU to see: each is a sentence and status 2, and leaves nothing behind."""
    asked = [["--recipe", recipe, *overrides] for recipe, overrides, _ in REFUSED]
    done = run(bridge_python, "tests.bridge.refusals", json.dumps(asked), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == len(REFUSED)
    for (_, _, says), (status, error, replaced) in zip(REFUSED, answers, strict=True):
        assert status == 2, error
        assert says in error
        assert "Traceback" not in error[error.index("megacpp-mcore: ") :]
        assert replaced == []


def test_doctor_finds_bridge_working(bridge_python: Path) -> None:
    done = run(bridge_python, "megacpp_mcore", "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["components"]}
    assert (findings["megatron-bridge"]["state"], findings["megatron-bridge"]["version"]) == ("works", "0.6.2")
