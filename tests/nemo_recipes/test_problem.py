"""What nemo_recipes decides without Megatron-Bridge: problems of an installation; processes, stages, policy of a run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore import policy, settings
from megacpp_mcore.errors import LaunchError, MegacppError, ModelError
from megacpp_mcore.model import Layout, memory
from megacpp_mcore.model.recipes import RECIPES, Recipe
from megacpp_mcore.model.run import NARROW
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.nemo_recipes import bridge, run
from megacpp_mcore.nemo_recipes import read_bridge as bridge_read
from tests.errors import raises

TINY, EIGHT = "nam56r_tiny_pretrain_1cpu_fp32", "nam56r_pretrain_8gpu_h200_bf16"

GOOD = {"megatron-bridge": "0.6.2", "megatron-core": "0.19.2", "nvidia-resiliency-ext": "0.7.0"}
MODULES = ("megatron.energon", "modelopt", "omegaconf", "hydra")

type Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretend that these versions are installed with :data:`GOOD` (None: not installed), and all modules but these."""

    def pretend(versions: dict[str, str | None] | None = None, *, without: tuple[str, ...] = ()) -> None:
        there = {**GOOD, **(versions or {})}
        monkeypatch.setattr(bridge.host, "version", there.get)
        monkeypatch.setattr(bridge, "_found", lambda module: module in MODULES and module not in without)

    return pretend


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"megatron-core": "0.19.0rc3"},
        {"megatron-core": "0.20.0.dev20261001"},
        {"megatron-bridge": "0.6.2+abc123"},
        {"nvidia-resiliency-ext": "0.6.0.dev1"},
    ],
)
def test_what_works_is_no_problem(install: Install, versions: dict[str, str | None]) -> None:
    install(versions)
    assert bridge.problem() is None


PROBLEMS = [
    ({"megatron-bridge": None}, "Megatron-Bridge is not installed"),
    ({"megatron-bridge": None, "megatron-core": "0.13.1"}, "Megatron-Bridge is not installed"),
    ({"megatron-core": None}, "megatron-core is not installed, expected 0.19 or later"),
    ({"megatron-core": "0.18.9rc1"}, "megatron-core is 0.18.9rc1, expected 0.19 or later"),
    ({"megatron-core": "from a checkout"}, "megatron-core is from a checkout, expected"),
    ({"megatron-bridge": "0.6.2rc1"}, "megatron-bridge is 0.6.2rc1, expected 0.6.2"),
    ({"megatron-bridge": "0.6.20"}, "megatron-bridge is 0.6.20, expected 0.6.2"),
    ({"nvidia-resiliency-ext": None}, "nvidia-resiliency-ext is not installed, expected 0.6 or later"),
    ({"nvidia-resiliency-ext": "0.5.1.dev7"}, "nvidia-resiliency-ext is 0.5.1.dev7, expected 0.6 or later"),
]


@pytest.mark.parametrize(("versions", "says"), PROBLEMS)
def test_each_problem_is_said_and_what_to_do(install: Install, versions: dict[str, str | None], says: str) -> None:
    install(versions)
    problem = bridge.problem()
    assert problem is not None
    assert says in problem
    assert bridge.INSTALLATION in problem
    with pytest.raises(LaunchError) as refused:
        bridge.prepare()
    assert str(refused.value) == problem


def overridden(**sizes: object) -> list[str]:
    return [f"model.{name}={value}" for name, value in sizes.items()]


def test_a_layout_is_the_recipes_with_what_the_overrides_say() -> None:
    eight = RECIPES[EIGHT]
    assert run.layout_of(eight, []) == Layout()
    assert run.layout_of(eight, ["train.train_iters=4"]) == Layout()
    words = overridden(tensor_model_parallel_size=2, sequence_parallel="true", expert_model_parallel_size=4)
    assert run.layout_of(eight, words) == Layout(tensor=2, expert=4, sequence_parallel=True)
    words = overridden(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3)
    assert run.layout_of(eight, words) == Layout(pipeline=2, virtual=3)
    # What Bridge refuses, or reads as no value, changes nothing here.
    words = overridden(expert_model_parallel_size="two", virtual_pipeline_model_parallel_size="null")
    assert run.layout_of(eight, words) == Layout()
    with pytest.raises(ModelError, match=r"pipeline, .*virtual"):
        run.layout_of(eight, overridden(virtual_pipeline_model_parallel_size=2))


def test_layout_and_training_plan_are_changed_in_the_words_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = run.changed(RECIPES[TINY], ["expert=2", "train_iters=4", "learning_rate=0.5"])
    assert chosen.run.layout == Layout(expert=2)
    training = chosen.run.training
    assert (training.processes, training.train_iters, training.learning_rate) == (2, 4, 0.5)
    assert run.changed(RECIPES[EIGHT], ["seed=7"]).processes == 8
    assert run.changed(RECIPES[EIGHT], []) == RECIPES[EIGHT]
    with raises(ModelError, "dsa.topk", "MEGACPP_CONFIG"):
        run.changed(RECIPES[TINY], ["dsa.topk=4"])
    with raises(LaunchError, "processes"):
        run.changed(RECIPES[TINY], ["processes=4"])
    monkeypatch.setenv("WORLD_SIZE", "3")
    with raises(LaunchError, "2", "3", "--nproc-per-node 2"):
        run.check_processes(chosen, chosen.run.layout)
    with raises(ModelError, "expert", "'two'"):
        run.run(TINY, ["expert=two"])
    for setting, override in (
        ("expert=2", "model.expert_model_parallel_size"),
        ("learning_rate=1", "optimizer.lr"),
        ("train_iters=3", "train.train_iters"),
    ):
        with raises(LaunchError, setting.partition("=")[0], override):
            run.run(TINY, [setting, f"{override}=4"])


@pytest.mark.parametrize(
    ("layout", "needed"),
    [
        (Layout(), 1),
        (Layout(expert=2), 2),
        (Layout(pipeline=2, expert=2), 4),
        (Layout(tensor=2, sequence_parallel=True, pipeline=2, expert=4), 8),
    ],
)
def test_processes_follow_the_layout_and_replicas_are_welcome(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, needed: int
) -> None:
    for started in range(1, 17):
        monkeypatch.setenv("WORLD_SIZE", str(started))
        if started % needed == 0:
            run.check_processes(RECIPES[TINY], layout)
            continue
        with raises(LaunchError, f"needs {needed} processes, got {started}", f"--nproc-per-node {needed}"):
            run.check_processes(RECIPES[TINY], layout)


def test_a_recipe_as_it_is_needs_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = RECIPES[EIGHT]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with raises(LaunchError, EIGHT, 8, 4):
        run.check_processes(eight, eight.run.layout)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with raises(LaunchError, EIGHT, "4 GPUs", 2):
        run.check_processes(eight, Layout(expert=4))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    run.check_processes(eight, Layout(expert=4))


@pytest.mark.parametrize("override", ["train.train_iters", "+train.new=1", "train.train_iters=abc", "train.train_iters=0"])
def test_an_override_that_no_configuration_takes_is_refused_without_bridge(override: str) -> None:
    """Importing Bridge takes a minute."""
    with pytest.raises(LaunchError, match=r"KEY=VALUE|1 or more"):
        run.run(TINY, [override])
    assert "megatron.bridge" not in sys.modules


def test_stages_are_looked_at_unless_an_override_draws_them(tmp_path: Path) -> None:
    tiny, stages = RECIPES[TINY], Layout(pipeline=2)
    by_class = {
        model_class: dataclasses.replace(tiny, run=dataclasses.replace(tiny.run, model_class=model_class))
        for model_class in (GPT, HYBRID)
    }
    with pytest.raises(ModelError, match="-FF"):
        run.check_stages(tiny, stages, [])
    cut = {
        GPT: "model.pipeline_model_parallel_layout=Et*9|t*3mL",
        HYBRID: "model.hybrid_layer_pattern=+EMEDEMED|EMG/+-",
    }
    for model_class, override in cut.items():
        run.check_stages(by_class[model_class], stages, [override])
    with raises(ModelError, "model.pipeline_model_parallel_layout=", "model.hybrid_layer_pattern="):
        run.check_stages(by_class[HYBRID], stages, [cut[GPT]])
    file = tmp_path / "settings.yaml"
    file.write_text("model: nam56r_tiny\noverrides: {dsa: {schedule: -FF}}\n")
    run.check_stages(run.with_own_model(tiny, settings.load(file)), stages, [])
    with pytest.raises(LaunchError, match=r"settings.yaml.* nam56r_tiny.* nam56r\b"):
        run.with_own_model(RECIPES[EIGHT], settings.load(file))
    for overrides in ([], [cut[HYBRID]]):
        with pytest.raises(ModelError, match="experts"):
            run.check_stages(tiny, Layout(expert=3), overrides)


def described(chosen: Recipe, **changes: Any) -> Any:
    """Return the part of Bridge's configuration that :func:`read` reads: the recipe's, with ``changes`` of the model."""
    layout, off = chosen.run.layout, ("sequence_parallel", "use_cpu_initialization", "tp_comm_overlap", "bf16", "fp16")
    off += ("overlap_moe_expert_parallel_comm", "moe_shared_expert_overlap")
    unset = ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "recompute_granularity")
    model = dict.fromkeys(off, False) | dict.fromkeys((*unset, "recompute_modules", "fp8"))
    model |= {f"{name}_model_parallel_size": getattr(layout, name) for name in ("tensor", "pipeline", "expert")}
    model |= {
        "context_parallel_size": 1, "gradient_accumulation_fusion": True, "moe_permute_fusion": True,
        "transformer_impl": "transformer_engine", "moe_token_dispatcher_type": "alltoall",
        "te_precision_config_file": chosen.run.training.plan.file, "cuda_graph_impl": "none", "cuda_graph_modules": "full",
    }  # fmt: skip
    ddp = {
        "use_distributed_optimizer": False, "overlap_grad_reduce": True, "overlap_param_gather": False,
        "bucket_size": None, "num_buckets": None, "grad_reduce_in_fp32": True,
    }  # fmt: skip
    return SimpleNamespace(
        model=SimpleNamespace(**model | changes),
        ddp=SimpleNamespace(**ddp),
        optimizer=SimpleNamespace(
            use_distributed_optimizer=True,
            optimizer="adam",
            use_precision_aware_optimizer=True,
            **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16),
            main_params_dtype=torch.float32,
            optimizer_cpu_offload=False,
            **{name: getattr(chosen.run.training, name) for name in ("weight_decay", "adam_beta2", "clip_grad")},
            lr=chosen.run.training.learning_rate,
        ),
        train=SimpleNamespace(manual_gc=True, micro_batch_size=2, global_batch_size=64, train_iters=1000),
        rng=SimpleNamespace(seed=1234),
        logger=SimpleNamespace(log_interval=10),
        dist=SimpleNamespace(use_megatron_fsdp=False, use_torch_fsdp2=False),
        env_vars={"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": 1},
        mixed_precision=SimpleNamespace(bf16=True, fp16=False, fp8="e4m3", grad_reduce_in_fp32=False),
    )


@pytest.fixture
def _no_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the mixed-precision configuration unchanged, without importing Bridge."""
    monkeypatch.setattr(bridge_read, "mixed_precision", lambda config: config.mixed_precision)


@pytest.mark.usefixtures("_no_bridge")
@pytest.mark.parametrize(("value", "error"), [(None, LaunchError), (-1.0, ModelError)])
def test_a_value_that_no_plan_has_is_named_as_bridge_names_it(value: float | None, error: type[MegacppError]) -> None:
    config = described(RECIPES[TINY])
    config.optimizer.lr = value
    with pytest.raises(error, match=r"^optimizer\.lr is"):
        bridge_read.read(RECIPES[TINY].run, config, 1)


@pytest.mark.usefixtures("_no_bridge")
def test_the_policy_reads_bridges_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    eight = RECIPES[EIGHT]
    as_read = bridge_read.read(eight.run, described(eight, moe_shared_expert_overlap=True), 8)
    how = as_read.execution
    assert (as_read.device, as_read.processes, as_read.layout, as_read.replicas) == ("cuda", 8, Layout(), 8)
    assert (as_read.precision, how.fp8, how.grad_bytes) == ("bf16", "e4m3", 2)
    assert (how.distributed_optimizer, how.overlap_grad_reduce, how.overlap_shared_expert) == (True, True, True)
    assert (how.cuda_graph_impl, how.cuda_graph_scope) == ("none", ())
    assert as_read.model == eight.model
    assert memory.states(as_read) == memory.states(dataclasses.replace(eight.run, asked={"grad_bytes": 2, **NARROW}))
    graphs = described(eight, cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn", "mlp"])
    assert bridge_read.read(eight.run, graphs, 8).execution.cuda_graph_scope == ("attn", "mlp")
    captured = bridge_read.read(eight.run, described(eight, cuda_graph_impl="local"), 8)
    assert captured.execution.cuda_graph_scope == ("full",)


@pytest.mark.usefixtures("_no_bridge")
def test_each_value_of_the_policy_has_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    eight = RECIPES[EIGHT]
    overrides = ["model.recompute_granularity=full"]
    config = described(eight, recompute_granularity="full")
    setup = run.launch_policy(bridge_read.read(eight.run, config, 8), config, overrides, {"NCCL_DEBUG": "WARN"})
    sources = {name: setup.value(name).source for name in ("recompute", "precision", "CUDA graphs", "NCCL_P2P_DISABLE")}
    assert sources == {
        "recompute": policy.USER,
        "precision": policy.RECIPE,
        "CUDA graphs": policy.DEFAULT,
        "NCCL_P2P_DISABLE": policy.RECIPE,
    }
    assert (setup.value("NCCL_DEBUG").value, setup.value("NCCL_DEBUG").source) == ("WARN", policy.USER)
    assert "the recipe asks for INFO, the environment has WARN" in setup.value("NCCL_DEBUG").warning
    assert setup.environment()["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_DEBUG" not in setup.environment()
    assert [overlap.name for overlap in setup.overlaps if overlap.possible] == ["gradient reduce"]
