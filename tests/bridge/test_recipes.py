"""Bridge recipes in an environment with Megatron-Bridge: what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.commands import doctor
from megacpp_mcore.model import flops
from megacpp_mcore.model.recipes import RECIPES
from tests import forks
from tests.bridge import factories, optimizers
from tests.bridge.processes import RUNNER, TINY, answer, outcomes

# What Bridge and stock say differently, and NAM56R's training does not depend on: model, optimizer, DDP.
HARMLESS = {
    # Weight shards of a parallelism that neither has, context parallelism, inference.
    "model": {
        "tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards", "cp_comm_type",
        "inference_sampling_seed", "inference_cuda_graph_scope",
    },
    # Muon, offload, and a barrier for timers.
    "optimizer": {"muon_momentum", "optimizer_offload_fraction", "barrier_with_L1_time"},
    "ddp": {"data_parallel_sharding_strategy"},  # of Megatron-FSDP
}  # fmt: skip
# FP8, which is off, and the generator of initial weights, whose flag is unset or False.
HARMLESS_UNUSED = {"fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"}


@pytest.mark.parametrize("name", [f"{TINY}_muon", "nam56r_quarter_pretrain_1gpu_h200_bf16"])
def test_a_recipe_says_to_bridge_what_it_says_to_the_command_line(bridge_python: Path, name: str) -> None:
    differing = answer(bridge_python, "tests.bridge.fields", name)
    assert differing.keys() == HARMLESS.keys()
    for section, fields in differing.items():
        rest = {key: pair for key, pair in fields.items() if key not in HARMLESS[section] | HARMLESS_UNUSED}
        rest = {key: pair for key, pair in rest.items() if set(pair) != {"None", "False"}}
        if RECIPES[name].run.training.optimizer == "adam" and section == "optimizer":
            assert rest.pop("muon_extra_scale_factor") == ["1.0", "None"]  # of another optimizer
        refused_by_bridge = section == "model" and RECIPES[name].run.training.cuda_graphs
        assert rest == ({"cuda_graph_impl": ["'local'", "'none'"]} if refused_by_bridge else {}), section


@pytest.fixture(scope="module")
def built(bridge_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of :mod:`tests.bridge.factories` on every recipe, built offline."""
    return answer(bridge_python, "tests.bridge.factories", str(tmp_path_factory.mktemp("factories")))


def test_every_recipe_is_built_offline_and_reads_back(built: dict[str, Any]) -> None:
    assert {name: facts["yaml"] for name, facts in built.items() if name in RECIPES} == dict.fromkeys(RECIPES, "read back")
    assert [name for name in RECIPES if not built[name]["same run"]] == []
    brought = {name: {"MEGACPP_CONFIG": str(chosen.settings)} for name, chosen in RECIPES.items() if chosen.settings}
    assert {name: built[name]["environment"] for name in RECIPES if built[name]["environment"]} == brought
    assert "without.yaml (MEGACPP_CONFIG) differs in backends or fp8 from" in built["without"]
    assert built["unknown"].startswith(f"no attribute '{TINY}_confg'; did you mean '{TINY}_config'")


def test_what_doctor_tries_of_bridge_works(bridge_python: Path) -> None:
    """Without the CPU lane, and without what runs import before."""
    (probe,) = (component.probe for component in doctor.COMPONENTS if component.name == "megatron-bridge")
    done = forks.run(["-c", probe], python=str(bridge_python))
    assert done.returncode == 0, done.stderr[-3000:]


def test_bridge_counts_the_audited_operations(built: dict[str, Any]) -> None:
    """Bridge's own FLOP count, the basis of its throughput, for every recipe's configuration, with padded vocabulary."""
    for name, chosen in RECIPES.items():
        vocabulary = chosen.model.vocab_size_padded(1)
        step = flops.step(chosen.model, factories.BATCH, vocab_size=vocabulary)
        assert built[name]["operations"] == step.total.training, name
        assert vocabulary == chosen.model.vocab_size or built[name]["operations"] != (
            flops.step(chosen.model, factories.BATCH, vocab_size=chosen.model.vocab_size).total.training
        )


REFUSED = [
    ("nam56r_tiny_pretrain_1cpu", "", f"there is no recipe 'nam56r_tiny_pretrain_1cpu'; did you mean '{TINY}'"),
    (TINY, "", "the recipe trains on real text and none is named; add dataset.data_path=PREFIX"),
    (TINY, "train.train_itres=3", "no 'train.train_itres'; did you mean 'train.train_iters'"),
    (TINY, "trian.train_iters=3", "no 'trian'; did you mean 'train'"),
    (TINY, "train.train_iters=null", "train.train_iters is 'null'; expected a whole number, 1 or more"),
    (TINY, "comm_overlap.tp_comm_overlap=true", "sets a field of comm_overlap, which is None in this recipe"),
    (TINY, "env_vars.NCCL_DEBUG=INFO", "no 'env_vars.NCCL_DEBUG'"),
    (TINY, "comm_overlap={tp_comm_overlap:true}", "comm_overlap={'tp_comm_overlap': True} is a mapping for"),
    (TINY, "model.hidden_size=64 dataset.data_path=text", "hidden_size: found 64, expected"),
    (TINY, "model.transformer_layer_spec=os.system", "model.transformer_layer_spec"),
    (TINY, "dataset.data_path=/nowhere/text", "/nowhere/text"),
    (TINY, "model.expert_model_parallel_size=2", "pipeline 1 × expert 2, needs 2 processes, got 1"),
    (TINY, "model.expert_model_parallel_size=two dataset.data_path=text", "expert_model_parallel_size is 'two' (str)"),
    (TINY, "train.micro_batch_size=3 dataset.data_path=text", "batch of 8 is not a multiple of the micro-batch (3)"),
    (TINY, "model.parallel_output=false dataset.data_path=text", "model.parallel_output is false; Megatron's loss"),
    (TINY, "model.num_query_groups=2", "--num-query-groups configures attention that the model does not have"),
    (TINY, "optimizer.optimizer=adamm", "optimizer.optimizer is 'adamm'; did you mean 'adam'"),
    (TINY, "optimizer=muon optimizer.use_distributed_optimizer=true", "use_distributed_optimizer: true, which"),
    (TINY, "--observe here --no-observe dataset.data_path=CORPUS", "--observe here and --no-observe were both given"),
    (TINY, "--profile 2-3 dataset.data_path=CORPUS", "steps 2-3 are to be profiled, and nothing is recorded"),
    (
        TINY,
        "logger.skip_train_metrics_log=true --observe here dataset.data_path=CORPUS",
        "skip_train_metrics_log is true",
    ),
    ("nam56r_pretrain_8gpu_h200_bf16", "", "needs 8 processes, got 1"),
    ("nam56r_pretrain_1gpu_h200_bf16", "", "needs 1 GPU on this host, and torch sees 0"),
]


def test_what_is_refused(bridge_python: Path, corpus: str, tmp_path: Path) -> None:
    """All in one process without a visible GPU: each prints one sentence, exits with status 2 and leaves nothing behind."""
    commands = [["--recipe", name, *words.replace("CORPUS", corpus).split()] for name, words, _ in REFUSED]
    answers = outcomes(bridge_python, RUNNER, commands, folder=tmp_path, CUDA_VISIBLE_DEVICES="")
    for (_, _, says), (status, output, replaced) in zip(REFUSED, answers, strict=True):
        assert (status, replaced) == (2, []), output
        assert says in output
        assert "Traceback" not in output[output.index("megacpp-mcore: ") :]


MUON = {"optimizer.optimizer": "muon"}
UNCUT = MUON | dict.fromkeys(optimizers.CUT, False)
OPTIMIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("muon", {}, "muon at 0.2"),
    ("adam", UNCUT | {"optimizer.muon_extra_scale_factor": 1.0}, "muon at 1.0"),
    ("adam", {"installed": False}, "adam at None"),
    ("muon", {"installed": False}, "pip install emerging-optimizers absl-py"),
    ("muon", {"ddp.use_distributed_optimizer": True}, "ddp.use_distributed_optimizer: true"),
    ("lion", {"optimizer.overlap_param_gather": True}, "lion updates whole weights; set to false"),
    ("muon", {"dist.use_torch_fsdp2": True}, "dist.use_torch_fsdp2: true"),
    ("adam", MUON, "ddp.use_distributed_optimizer, optimizer.use_distributed_optimizer, ddp.overlap"),
    ("adam", UNCUT, "optimizer.muon_extra_scale_factor is not set; set 0.2"),
    ("adam", {"optimizer.optimizer": "dist_muon"}, "optimizer.optimizer is 'dist_muon'; did you mean 'muon'"),
    (
        "muon",
        {"optimizer.use_precision_aware_optimizer": True},
        "--use-precision-aware-optimizer, which only Adam does",
    ),
]
"""Optimizer of the recipe, keys set in Python, and what is said."""


def test_an_optimizer_that_bridge_cannot_cut_is_whole_and_known_to_the_experts(bridge_python: Path) -> None:
    asked = json.dumps([case for *case, _ in OPTIMIZERS])
    answers = answer(bridge_python, "tests.bridge.optimizers", asked)
    unsharded, cut = [False] * 5, [True] * 5
    assert answers["cut"] == {"adam": cut, "sgd": cut, "lion": unsharded, "muon": unsharded, "adaptive_muon": unsharded}
    for (*case, says), said in zip(OPTIMIZERS, answers["says"], strict=True):
        assert says in said, case
