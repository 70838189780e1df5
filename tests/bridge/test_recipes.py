"""Bridge recipes in an environment with Megatron-Bridge: what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.model import flops
from megacpp_mcore.model.recipes import RECIPES
from tests.bridge import factories
from tests.bridge.processes import TINY, answer, run

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
    folder = tmp_path_factory.mktemp("factories")
    return answer(bridge_python, "tests.bridge.factories", str(folder), fork=False, HF_HUB_OFFLINE="1")


def test_every_recipe_is_built_offline_and_reads_back(built: dict[str, Any]) -> None:
    assert {name: facts["yaml"] for name, facts in built.items() if name in RECIPES} == dict.fromkeys(
        RECIPES, "read back"
    )
    assert [name for name in RECIPES if not built[name]["same run"]] == []
    brought = {name: {"MEGACPP_CONFIG": str(chosen.settings)} for name, chosen in RECIPES.items() if chosen.settings}
    assert {name: built[name]["environment"] for name in RECIPES if built[name]["environment"]} == brought
    assert "without.yaml (MEGACPP_CONFIG) differs in backends or fp8 from" in built["without"]
    assert built["unknown"].startswith(f"no attribute '{TINY}_confg'; did you mean '{TINY}_config'")


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
    ("nam56r_tiny_pretrain_1cpu", [], f"there is no recipe 'nam56r_tiny_pretrain_1cpu'; did you mean '{TINY}'"),
    (TINY, [], "the recipe trains on real text and none is named; add dataset.data_path=PREFIX"),
    (TINY, ["train.train_itres=3"], "no 'train.train_itres'; did you mean 'train.train_iters'"),
    (TINY, ["trian.train_iters=3"], "no 'trian'; did you mean 'train'"),
    (TINY, ["+train.bogus=3"], "'+train.bogus=3' is not of the form KEY=VALUE"),
    (TINY, ["~train.train_iters"], "is not of the form KEY=VALUE"),
    (TINY, ["train.train_iters=abc"], "train.train_iters is 'abc'"),
    (TINY, ["train.train_iters=null"], "train.train_iters is 'null'; expected a whole number, 1 or more"),
    (TINY, ["train.micro_batch_size=0"], "train.micro_batch_size is '0'; expected a whole number, 1 or more"),
    (TINY, ["comm_overlap.tp_comm_overlap=true"], "sets a field of comm_overlap, which is None in this recipe"),
    (TINY, ["env_vars.NCCL_DEBUG=INFO"], "no 'env_vars.NCCL_DEBUG'"),
    (
        TINY,
        ["comm_overlap={tp_comm_overlap: true}"],
        "comm_overlap={'tp_comm_overlap': True} is a mapping for a whole section",
    ),
    (TINY, ["model.hidden_size=64", "dataset.data_path=text"], "hidden_size: found 64, expected"),
    (TINY, ["model.transformer_layer_spec=os.system"], "model.transformer_layer_spec"),
    (TINY, ["dataset.data_path=/nowhere/text"], "/nowhere/text"),
    (TINY, ["model.expert_model_parallel_size=2"], "pipeline 1 × expert 2, needs 2 processes, got 1"),
    (
        TINY,
        ["model.expert_model_parallel_size=two", "dataset.data_path=text"],
        "model.expert_model_parallel_size is 'two' (str)",
    ),
    (
        TINY,
        ["train.micro_batch_size=3", "dataset.data_path=text"],
        "batch of 8 is not a multiple of the micro-batch (3)",
    ),
    (
        TINY,
        ["model.parallel_output=false", "dataset.data_path=text"],
        "model.parallel_output is false; Megatron's loss",
    ),
    (TINY, ["model.num_query_groups=2"], "--num-query-groups configures attention that the model does not have"),
    (TINY, ["optimizer.optimizer=adamm"], "optimizer.optimizer is 'adamm'; did you mean 'adam'"),
    (
        TINY,
        ["optimizer=muon", "optimizer.use_distributed_optimizer=true"],
        "optimizer.use_distributed_optimizer: true, which",
    ),
    ("nam56r_pretrain_8gpu_h200_bf16", [], "needs 8 processes, got 1"),
    ("nam56r_pretrain_1gpu_h200_bf16", [], "needs 1 GPU on this host, and torch sees 0"),
]


def test_what_is_refused(bridge_python: Path) -> None:
    """All in one process without a visible GPU: each prints one sentence, exits with status 2 and leaves nothing behind."""
    commands = [["--recipe", recipe, *overrides] for recipe, overrides, _ in REFUSED]
    answers = answer(bridge_python, "tests.bridge.refusals", json.dumps(commands), CUDA_VISIBLE_DEVICES="")
    assert len(answers) == len(REFUSED)
    for (_, _, says), (status, error, replaced) in zip(REFUSED, answers, strict=True):
        assert status == 2, error
        assert says in error
        assert "Traceback" not in error[error.index("megacpp-mcore: ") :]
        assert replaced == []


def test_an_optimizer_that_bridge_cannot_cut_is_whole_and_known_to_the_experts(bridge_python: Path) -> None:
    answers = answer(bridge_python, "tests.bridge.optimizers")
    unsharded, cut = [False] * 5, [True] * 5
    assert answers["cut"] == {"adam": cut, "sgd": cut, "lion": unsharded, "muon": unsharded, "adaptive_muon": unsharded}
    says = answers["says"]
    assert says["as it is"] == "muon at 0.2"
    assert says["in Python, whole, scaled"] == "muon at 1.0"
    assert says["adam, not installed"] == "adam at None"
    assert says["cut by hand"].startswith("ddp.use_distributed_optimizer: true")
    assert says["gathered by hand"].startswith("optimizer.overlap_param_gather: true")
    assert "lion updates whole weights; set to false" in says["gathered by hand"]
    assert says["FSDP by hand"].startswith("dist.use_torch_fsdp2: true")
    assert says["in Python"].startswith(
        "ddp.use_distributed_optimizer, optimizer.use_distributed_optimizer, ddp.overlap"
    )
    assert says["in Python, whole"].startswith("optimizer.muon_extra_scale_factor is not set; set 0.2")
    assert says["unknown"].startswith("optimizer.optimizer is 'dist_muon'; did you mean 'muon'")
    assert "--use-precision-aware-optimizer, which only Adam does" in says["narrow"]
    assert says["not installed"].endswith("pip install emerging-optimizers absl-py")


def test_doctor_finds_bridge_working(bridge_python: Path) -> None:
    done = run(bridge_python, "megacpp_mcore", "doctor", "--json", fork=False)
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)["components"]}
    assert (findings["megatron-bridge"]["state"], findings["megatron-bridge"]["version"]) == ("works", "0.6.2")
