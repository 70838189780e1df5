"""The launch policy: sources, contradictions, the order of reasons against a warm-up, and what may be called overlap."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore import policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.arguments.read import read as read_run
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model import Layout, Model, preset, with_overrides
from megacpp_mcore.model import run as runs
from megacpp_mcore.model.precision import EXPERTS_FILE, FP8_EXPERTS
from megacpp_mcore.model.run import FIELDS, Run
from megacpp_mcore.model.training import Training
from megacpp_mcore.observe.receipts import facts as receipt_facts
from megacpp_mcore.policy import DEFAULT, RECIPE, USER, overlap_contract, resolve

TURN_COMPILE_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
CPU = Run(training=Training(device="cpu", precision="fp32", transformer_impl="local"))
PLAIN: dict[str, Any] = dict.fromkeys((feature.field for feature in runs.FEATURES), False) | {"bucket_elements": None}
GPU = Run(preset("nam56r"), training=Training(processes=8), asked=PLAIN)
"""Eight replicas without a feature of :data:`megacpp_mcore.model.run.FEATURES`."""


def but(run: Run, model: Model | None = None, **changes: Any) -> Run:
    """Return ``run`` with changed fields of its layout, training or execution."""
    of_layout, of_training = ({field.name for field in dataclasses.fields(kind)} for kind in (Layout, Training))
    layout = {name: value for name, value in changes.items() if name in of_layout}
    execution = {name: value for name, value in changes.items() if name in FIELDS}
    training = {name: value for name, value in changes.items() if name in of_training}
    assert changes.keys() == layout.keys() | execution.keys() | training.keys()
    return dataclasses.replace(
        run,
        model=model or run.model,
        layout=dataclasses.replace(run.layout, **layout),
        training=dataclasses.replace(run.training, **training),
        asked={**run.asked, **execution},
    )


def by(run: Run, file: plugin_config.PluginConfig) -> Run:
    """Return ``run`` with the settings of ``file``."""
    return dataclasses.replace(run, settings=file)


def settings(folder: Path, text: str) -> plugin_config.PluginConfig:
    file = folder / "megacpp.yaml"
    file.write_text("model: nam56r_tiny\n" + text)
    return plugin_config.load(file)


def read(*words: str, world_size: int = 8) -> Run:
    return read_run(words, device="cuda", processes=world_size)


def test_spellings_of_values_and_replicas() -> None:
    graphs = ("--cuda-graph-impl=local", "--cuda-graph-modules", "attn", "mlp")
    run = read(*graphs, "--ddp-bucket-size", "7", "--fp8-format", "e4m3").execution
    assert (run.cuda_graph_impl, run.cuda_graph_scope) == ("local", ("attn", "mlp"))
    assert (run.bucket_elements, run.fp8) == (7, "e4m3")
    older = read("--enable-cuda-graph", "--recompute-activations").execution
    assert (older.cuda_graph_impl, older.recompute_granularity) == ("local", "selective")
    assert [read(flag).execution.fsdp for flag in ("--use-megatron-fsdp", "--use-torch-fsdp2", "--bf16")] == [
        True,
        True,
        False,
    ]
    sizes = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "3", "--context-parallel-size", "4")
    assert read(*sizes, world_size=120).replicas == 20


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--tensor-model-parallel-size", "two"), ("--expert-model-parallel-size", "0"), ("--ddp-bucket-size", "40e6")],
)
def test_a_size_that_is_none_is_refused_in_a_sentence(flag: str, text: str) -> None:
    with pytest.raises(LaunchError, match=f"{flag} is {text!r}.* 1 "):
        read(flag, text)


@pytest.mark.parametrize(
    ("words", "processes", "message"),
    [
        ("--tensor-model-parallel-size 3", 1, "tensor 3 .* 1"),
        ("--tensor-model-parallel-size 4", 1, "tensor 4 .*4 processes.* 1:"),
        ("--expert-model-parallel-size 4", 1, "expert 4 .*4 processes.* 1:"),
        ("--tensor-model-parallel-size 4", 4, None),
        ("--expert-model-parallel-size 4", 4, None),
        ("--pipeline-model-parallel-size 2 --context-parallel-size 3", 8, "pipeline 2 × context 3 .*6 .* 8"),
        ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 8, None),
    ],
)
def test_a_layout_of_another_number_of_processes_is_refused(words: str, processes: int, message: str | None) -> None:
    run = read(*words.split(), world_size=processes)
    with nullcontext() if message is None else pytest.raises(LaunchError, match=message):
        resolve(run, environment={})


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("", 4),
        ("--bf16", 4),
        ("--bf16 --grad-reduce-in-bf16", 2),
        ("--bf16 --main-grads-dtype bf16", 2),
        ("--bf16 --main-grads-dtype fp32", 4),
        ("--bf16 --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32", 4),
        ("--fp16", 2),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 4),
        ("--grad-reduce-in-bf16", 4),
        ("--main-grads-dtype bf16", 4),
    ],
)
def test_the_bytes_of_a_gradient_are_megatrons(words: str, size: int) -> None:
    assert read(*words.split()).execution.grad_bytes == size


@pytest.mark.parametrize("name", TURN_COMPILE_OFF)
def test_who_disables_dynamo_is_listed(name: str) -> None:
    dense = but(dataclasses.replace(GPU, model=None), experts=False)
    assert resolve(dense, environment={name: "1"}).value(name).value == "1"
    for run, environment in ((dense, {name: "0"}), (dense, {name: "1"}), (GPU, {})):
        text = resolve(run, environment=environment).describe()
        assert "compile = off: kernels replace what was compiled\n" in text
        assert "user-disabled" not in text
        assert resolve(run, environment=environment).warnings == ()


@pytest.mark.parametrize(
    ("changes", "default", "set_to", "warns"),
    [
        ({}, None, "1", None),
        ({"tensor": 2}, "1", "8", "Megatron stops unless it is 1"),
        ({"context": 2}, "1", "32", "Megatron stops unless it is 1"),
        ({"tensor": 2}, "1", "1", None),
        ({"megatron_fsdp": True}, "8", "1", "unset it"),
        ({"megatron_fsdp": True, "tensor": 2}, "8", "8", None),
        ({"overlap_moe_a2a": True, "expert": 8}, "32", "1", "cannot overlap in one queue"),
        ({"overlap_moe_a2a": True, "expert": 8, "tensor": 2}, "32", "1", None),
        ({"device": "cpu", "transformer_impl": "local"}, None, "1", None),
    ],
)
def test_connections(changes: dict[str, Any], default: str | None, set_to: str, warns: str | None) -> None:
    run = but(GPU, **changes)
    usual = resolve(run, environment={}).value(policy.CONNECTIONS)
    assert (usual.value, usual.source, usual.warning) == (default, DEFAULT, "")
    by_user = resolve(run, environment={policy.CONNECTIONS: set_to}).value(policy.CONNECTIONS)
    assert (by_user.value, by_user.source) == (set_to, USER)
    assert by_user.warning == "" if warns is None else warns in by_user.warning


def test_only_what_nobody_has_set_is_set() -> None:
    run = but(GPU, tensor=2)
    ours = resolve(run, environment={}).environment()
    assert ours == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
        "TRITON_CACHE_DIR": os.path.expanduser("~/.triton/cache"),
    }
    assert resolve(run, environment=ours).environment() == {}
    assert resolve(CPU, environment={}).environment() == {}


def test_the_allocator() -> None:
    name = policy.ALLOCATOR
    environment = {name: "expandable_segments:True"}
    for impl in ("local", "full_iteration", "transformer_engine"):
        graphs = but(GPU, cuda_graph_impl=impl)
        assert resolve(graphs, environment={}).value(name).value is None
        assert resolve(graphs, environment={"NCCL_GRAPH_REGISTER": "0"}).value(name).value == "expandable_segments:True"
        assert "NCCL_GRAPH_REGISTER=0" in resolve(graphs, environment=environment).value(name).warning
        assert resolve(graphs, environment=environment | {"NCCL_GRAPH_REGISTER": "0"}).value(name).warning == ""
    renamed = resolve(GPU, environment={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert (renamed.value("PYTORCH_ALLOC_CONF").source, renamed.environment().get(name)) == (USER, None)


def test_speed_defaults_are_the_users_word(tmp_path: Path) -> None:
    name = policy.ALLOCATOR
    file = settings(tmp_path, "speed_defaults: {expandable_segments: true, cache_root: /caches}\n")
    resolved = resolve(by(GPU, file), environment={name: "max_split_size_mb:64", "TRITON_CACHE_DIR": "/elsewhere"})
    assert len(resolved.warnings) == 2
    assert "speed_defaults asks for expandable_segments:True" in resolved.value(name).warning
    assert "asks for /caches/triton" in resolved.value("TRITON_CACHE_DIR").warning
    assert resolved.environment()["TORCHINDUCTOR_CACHE_DIR"] == "/caches/inductor"
    without = settings(tmp_path, "speed_defaults: {expandable_segments: false}\n")
    assert name not in resolve(by(GPU, without), environment={}).environment()


def test_transformer_engine_loads_torchs_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch")  # which loads its cuDNN
    name, installed = "CUDNN_HOME", importlib.metadata.version
    assert name not in resolve(GPU, environment={}).environment()  # without it
    monkeypatch.setattr(importlib.metadata, "version", lambda of: "2.20" if of == "transformer-engine" else installed(of))
    folder = Path(resolve(GPU, environment={}).environment()[name])
    assert any(folder.glob("libcudnn.so*"))
    assert name not in resolve(CPU, environment={}).environment()
    for set_before in (name, "CUDNN_PATH"):
        assert name not in resolve(GPU, environment={set_before: "/mine"}).environment()


def test_the_ranks_of_a_host_share_a_cache_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TRITON_CACHE_DIR"
    monkeypatch.setenv("HOME", "/home/someone")
    assert resolve(GPU, environment={}).environment()[name] == "/home/someone/.triton/cache"
    assert resolve(GPU, environment={"TRITON_HOME": "/shared"}).environment()[name] == "/shared/.triton/cache"
    assert name not in resolve(GPU, environment={name: "/mine"}).environment()
    assert name not in resolve(CPU, environment={}).environment()


def test_nccl() -> None:
    resolved = resolve(GPU, environment={"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"})
    assert "unset it" in resolved.value("NCCL_P2P_DISABLE").warning
    assert "not comparable" in resolved.value("NCCL_ALGO").warning
    alone = but(GPU, processes=1)
    assert resolve(alone, environment={"NCCL_P2P_DISABLE": "1"}).warnings == ()
    assert "NCCL_DEBUG" not in resolve(alone, environment={}).environment()


def test_interfaces_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    two = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    one = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    for whole in (one, one | {"SLURM_STEP_NUM_TASKS": "8"}):
        assert resolve(GPU, environment=whole).warnings == ()
    (alone,) = resolve(GPU, environment=one | {"SLURM_STEP_NUM_TASKS": "2"}).warnings
    assert "--nnodes" in alone
    resolved = resolve(GPU, environment=two)
    assert resolved.value("NCCL_SOCKET_IFNAME").value is resolved.value("GLOO_SOCKET_IFNAME").value is None
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & resolved.environment().keys()
    for good in ("eth", "=ib0", "^docker", "ib0:1,eth0"):
        assert resolve(GPU, environment={**two, "NCCL_SOCKET_IFNAME": good}).warnings == ()
    (bad,) = resolve(CPU, environment={**two, "GLOO_SOCKET_IFNAME": "eth7"}).warnings
    assert "no such interface; it has lo, eth0, ib0" in bad
    (bad,) = resolve(GPU, environment={**two, "NCCL_SOCKET_IFNAME": "lo"}).warnings
    assert "loopback" in bad
    (bad,) = resolve(GPU, environment={**two, "NCCL_IB_DISABLE": "1"}).warnings
    assert "sockets" in bad


def test_plans_and_their_sources(tmp_path: Path) -> None:
    words = ["--bf16", "--recompute-granularity", "selective", "--recompute-modules", "shared_experts"]
    run = read_run(words, device="cuda", processes=1)
    families = settings(tmp_path, "recompute: [r, a]\n")
    resolved = resolve(by(run, families), environment={})
    assert resolved.value("recompute").value == "a, r; Megatron's selective (shared_experts)"
    assert resolved.value("recompute").source == USER
    assert (resolved.value("precision").value, resolved.value("precision").source) == ("bf16", USER)
    assert (resolved.value("CUDA graphs").value, resolved.value("CUDA graphs").source) == ("none", DEFAULT)
    assert resolve(run, environment={}, from_recipe=True).value("precision").source == RECIPE
    assert resolve(CPU, environment={}).value("recompute").value == "nothing"


def test_fp8_experts_are_printed_as_their_plan(tmp_path: Path) -> None:
    words = lower(Run(preset("nam56r"), Layout(), Training(precision=FP8_EXPERTS)))
    plan = resolve(read(*words), environment={}).value("precision")
    assert plan.value == "bf16, kernel-local FP8 experts, dispatch refuse, checkpoint owner megatron"
    assert (plan.source, plan.note[:9]) == (USER, "selection")
    copied, other = tmp_path / "copied.yaml", tmp_path / "other.yaml"
    copied.write_text("# the same\n" + EXPERTS_FILE.read_text())
    other.write_text("matchers: {}\n")

    def printed(file: Path) -> str | None:
        return resolve(read("--bf16", f"--te-precision-config-file={file}"), environment={}).value("precision").value

    assert printed(copied) == plan.value
    assert printed(other) == f"bf16, and what {other} says of single modules"
    assert printed(tmp_path / "none.yaml") == f"bf16, and what {tmp_path / 'none.yaml'} says of single modules"


@pytest.mark.parametrize(
    ("text", "warns"),
    [("+dynamo", True), ("", True), ("dynamo, recompiles", False), ("+recompiles", False), (None, False)],
)
def test_torch_logs_that_keep_recompiles_from_being_heard(tmp_path: Path, text: str | None, warns: bool) -> None:
    environment = {} if text is None else {"TORCH_LOGS": text}
    file = settings(tmp_path, "observability: {recompiles: true}\n")
    resolved = resolve(by(GPU, file), environment=environment)
    assert [warning.partition(":")[0] for warning in resolved.warnings] == ["TORCH_LOGS"] * warns
    assert "TORCH_LOGS" not in resolved.environment()
    assert resolve(GPU, environment=environment).warnings == ()
    assert resolve(by(GPU, file), environment=environment, launched=False).warnings == ()


def test_taxes(tmp_path: Path) -> None:
    assert resolve(GPU, environment={}).taxes == ()
    on = settings(tmp_path, "experimental_taxes: {blocking_launches: true, anomaly_detection: true}\n")
    resolved = resolve(by(GPU, on), environment={})
    assert resolved.taxes == ("anomaly_detection", "blocking_launches")
    assert receipt_facts.at_start(resolved).values["experimental_taxes"] == ["anomaly_detection", "blocking_launches"]
    assert resolved.environment()["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "asks for 1" in resolve(by(GPU, on), environment={"CUDA_LAUNCH_BLOCKING": "0"}).warnings[0]
    assert "is off; unset it" in resolve(GPU, environment={"CUDA_LAUNCH_BLOCKING": "1"}).warnings[0]


def test_taxes_are_paid_for_the_duration(tmp_path: Path) -> None:
    import torch

    with policy.active(settings(tmp_path, "experimental_taxes: {anomaly_detection: true}\n")):
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()
    with policy.active(settings(tmp_path, "observability: {recompiles: true}\n")):
        assert torch._logging._internal.log_state.is_artifact_enabled("recompiles")
        assert not torch.is_anomaly_enabled()
    assert not torch._logging._internal.log_state.is_artifact_enabled("recompiles")


ALL = but(
    GPU, with_overrides(preset("nam56r"), {"mtp": {"depth": 1}}), tensor=2, expert=4, sequence_parallel=True,
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, overlap_moe_a2a=True,
    overlap_shared_expert=True, tp_comm_overlap=True,
)  # fmt: skip


def possible(run: Run, connections: str | None) -> dict[str, str]:
    return {overlap.name: overlap.reason for overlap in overlap_contract(run, connections) if overlap.possible}


def reasons(run: Run, connections: str | None) -> dict[str, str]:
    return {overlap.name: overlap.reason for overlap in overlap_contract(run, connections) if not overlap.possible}


def test_no_setting_of_connections_lets_everything_overlap() -> None:
    single = possible(ALL, "1")
    for left_out, name in (("overlap_shared_expert", "MoE all-to-all"), ("overlap_moe_a2a", "shared expert")):
        change: dict[str, Any] = {left_out: False}
        several = possible(but(ALL, **change), "32")
        assert set(several) == {"gradient reduce", "parameter gather", name}
    assert set(single) == {"gradient reduce", "parameter gather", "tensor-parallel"}
    assert "=1, which keeps" in reasons(ALL, None)["tensor-parallel"]
    assert "one queue" in reasons(ALL, "1")["MoE all-to-all"]


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"overlap_grad_reduce": False}, "gradient reduce", "not asked for (--overlap-grad-reduce)"),
        ({"processes": 4, "tensor": 4}, "gradient reduce", "one data-parallel replica"),
        ({"bucket_elements": 1_000_000}, "gradient reduce", "3.8 MiB is below 32 MiB"),
        ({"bucket_elements": 3_000_000_000}, "gradient reduce", "one bucket of 3000000000 elements"),
        ({"num_buckets": 1}, "gradient reduce", "one bucket of"),
        ({"num_buckets": 1000}, "gradient reduce", "below 32 MiB"),
        ({"own_stages": True}, "gradient reduce", "not known"),
        ({"distributed_optimizer": False}, "parameter gather", "--use-distributed-optimizer"),
        ({"overlap_grad_reduce": False}, "parameter gather", "needs --overlap-grad-reduce"),
        ({"expert": 1}, "MoE all-to-all", "not sharded"),
        ({}, "MoE all-to-all", "refuses --overlap-moe-expert-parallel-comm with --moe-shared-expert-overlap"),
        ({}, "shared expert", "refuses --overlap-moe-expert-parallel-comm with --moe-shared-expert-overlap"),
        ({"moe_dispatcher": "allgather"}, "MoE all-to-all", "needs --moe-token-dispatcher-type alltoall or flex"),
        ({"precision": "fp32"}, "MoE all-to-all", "Megatron refuses it in fp32"),
        ({"recompute_granularity": "full"}, "MoE all-to-all", "recomputed experts"),
        ({"recompute_modules": ("moe",)}, "MoE all-to-all", "recomputed experts"),
        ({"model": preset("nam56r")}, "MoE all-to-all", "more than one MTP depth, got 2"),
        ({"sequence_parallel": False}, "tensor-parallel", "--sequence-parallel"),
        ({"transformer_impl": "local"}, "tensor-parallel", "Transformer Engine's"),
        ({"device": "cpu", "transformer_impl": "local"}, "tensor-parallel", "no streams"),
        ({"device": "cpu", "transformer_impl": "local"}, "gradient reduce", "no streams"),
    ],
)
def test_what_stands_against_an_overlap_is_said(changes: dict[str, Any], name: str, reason: str) -> None:
    assert reason in reasons(but(ALL, **changes), "1")[name]


def test_a_script_that_nobody_launched_is_told_what_is_not_set(tmp_path: Path) -> None:
    file = settings(tmp_path, "experimental_taxes: {anomaly_detection: true}\n")
    run = but(ALL, overlap_moe_a2a=False, overlap_shared_expert=False)
    environment = {"NCCL_DEBUG": "INFO"}
    bare = resolve(by(run, file), environment=environment, launched=False)
    assert bare.environment() == {}
    assert (bare.value("NCCL_DEBUG").value, bare.value("NCCL_DEBUG").source) == ("INFO", USER)
    text = bare.describe()
    assert text.splitlines()[0] == (
        "launch policy of a script that `megacpp-mcore launch` did not start, so that nothing was set for it:"
    )
    assert "  PYTORCH_CUDA_ALLOC_CONF = (unset) (default; the launcher would set expandable_segments:True; " in text
    assert "anomaly_detection (requested; only `megacpp-mcore launch` applies them)" in text
    # What depends on a variable is judged by its actual value, not by the one the launcher would set.
    assert "tensor-parallel" not in {overlap.name for overlap in bare.overlaps if overlap.possible}
    launched = resolve(by(run, file), environment=environment)
    assert "tensor-parallel" in {overlap.name for overlap in launched.overlaps if overlap.possible}
    assert "(requested" not in launched.describe()


def test_the_policy_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.launch, "_announced", False)
    lines: list[str] = []
    as_json = settings(tmp_path, "observability: {policy: json}\n")
    with policy.announced():  # the launcher's own words
        policy.announce(GPU, environment={}, say=lines.append)
    assert lines == []
    for _ in range(2):  # a chunk each
        policy.announce(by(GPU, as_json), environment={}, say=lines.append)
    (line,) = lines
    assert json.loads(line.removeprefix("launch policy: "))["launched"] is False


def flag_lines(*words: str, world_size: int = 2) -> dict[str, policy.Value]:
    run = read_run(words, device="cuda", processes=world_size)
    return {line.name: line for line in resolve(run, environment={}).values}


def test_the_policy_says_of_every_flag_whether_it_is_on_and_why() -> None:
    model = preset("nam56r_tiny")
    several = flag_lines(*lower(Run(model, Layout(), Training(processes=2))))
    for flag in runs.FEATURES:
        if not flag.name.startswith("overlapped"):  # the overlaps have a contract
            assert (several[flag.name].value, several[flag.name].note) == ("on", flag.reason)
    assert (several["log interval"].value, several["log interval"].source) == ("10", USER)
    assert several["distributed optimizer"].source == USER
    assert several["gradient accumulation fusion"].source == DEFAULT  # on unless it is switched off
    single = flag_lines(*lower(Run(model, Layout(), Training())), world_size=1)
    assert (single["distributed optimizer"].value, single["log interval"].value) == ("off", "1")
    assert single["distributed optimizer"].note == "there is one data-parallel replica"
    bare = flag_lines("--log-interval", "1", "--no-gradient-accumulation-fusion")
    assert (bare["gradient accumulation fusion"].value, bare["manual garbage collection"].value) == ("off", "off")
    assert bare["log interval"].note.endswith("10 is usual on several GPUs")


def test_tf32_that_nothing_can_undo_is_refused_where_products_have_to_be_exact() -> None:
    with pytest.raises(LaunchError, match=r"NVIDIA_TF32_OVERRIDE=1.*router, .*M²RNN"):
        resolve(GPU, environment={"NVIDIA_TF32_OVERRIDE": "1"})
    for harmless in ({"NVIDIA_TF32_OVERRIDE": "0"}, {}):
        assert resolve(GPU, environment=harmless).warnings == ()
    stock_model = resolve(dataclasses.replace(GPU, model=None), environment={"NVIDIA_TF32_OVERRIDE": "1"})
    assert [warning.split(":")[0] for warning in stock_model.warnings] == ["NVIDIA_TF32_OVERRIDE"]
    assert "NVIDIA_TF32_OVERRIDE" not in str(resolve(CPU, environment={"NVIDIA_TF32_OVERRIDE": "1"}).values)


def test_tf32_that_torch_was_set_to_is_named() -> None:
    (by_program,) = resolve(GPU, environment={}, tf32_products=True).warnings
    assert by_program.startswith("torch.backends.cuda.matmul.fp32_precision: M²RNN's recurrence is not affected")
    (by_environment,) = resolve(GPU, environment={"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, tf32_products=True).warnings
    assert by_environment.startswith("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: M²RNN's recurrence")


def test_a_layout_from_elsewhere_leaves_how_a_run_is_carried_out() -> None:
    """As the spec does if a file or a checkpoint has a different layout than the arguments."""
    parsed = read("--spec", "megacpp_mcore", "nam56r", "--bf16", "--pipeline-model-parallel-size", "2", world_size=2)
    run = dataclasses.replace(parsed, layout=Layout()).carried_out(dataclasses.asdict(parsed.execution))
    assert (run.replicas, run.execution) == (2, parsed.execution)


def test_equal_experts_on_all_ranks_are_refused() -> None:
    words = ("--use-cpu-initialization", "--expert-model-parallel-size", "4")
    with pytest.raises(LaunchError, match=r"parallelism 4: .*"):
        resolve(read(*words), environment={})
    resolve(read("--use-cpu-initialization"), environment={})
    resolve(but(read(*words), device="cpu", transformer_impl="local"), environment={})  # the lane seeds experts by their number
