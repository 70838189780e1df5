"""The launch policy: sources, contradictions, the order of reasons against a warm-up, and what may be called overlap."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_mcore import config, policy
from megacpp_mcore.errors import ConfigFileError
from megacpp_mcore.lowering import Training, lower
from megacpp_mcore.model import Layout, preset
from megacpp_mcore.policy import (
    DEFAULT,
    EXPLICIT,
    RECIPE,
    SKIPPED,
    USER,
    Run,
    compile_policy,
    overlap_contract,
    resolve,
)

GPU = Run(device="cuda", world_size=8, precision="bf16", parameters=4_500_000_000, has_moe=True)


def settings(folder: Path, text: str) -> config.PluginConfig:
    file = folder / "megacpp.yaml"
    file.write_text("model: nam56r_tiny\n" + text)
    return config.load(file)


# --- the run ------------------------------------------------------------------------------------------------------------


def test_a_run_is_read_from_megatrons_arguments() -> None:
    model = preset("nam56r")
    layout = Layout(tensor=2, pipeline=1, expert=2, sequence_parallel=True)
    words = lower(model, layout, Training(extra=("--overlap-grad-reduce", "--use-distributed-optimizer")))
    run = Run.from_arguments(words, device="cuda", world_size=8)
    assert (run.tensor, run.pipeline, run.expert, run.sequence_parallel) == (2, 1, 2, True)
    assert (run.replicas, run.has_moe, run.precision) == (4, True, "bf16")
    assert (run.overlap_grad_reduce, run.distributed_optimizer, run.overlap_param_gather) == (True, True, False)
    assert run.parameters == sum(model.parameters().values())  # the preset, told from depth, width and heads
    assert Run.from_arguments(["--num-layers", "3"], device="cpu", world_size=1).parameters is None


def test_both_spellings_of_a_value_and_several_values() -> None:
    words = [
        "--cuda-graph-impl=local",
        "--cuda-graph-modules",
        "attn",
        "mlp",
        "--ddp-bucket-size",
        "7",
        "--fp8-format",
        "e4m3",
    ]
    run = Run.from_arguments(words, device="cuda", world_size=1)
    assert (run.cuda_graph_impl, run.cuda_graph_scope) == ("local", ("attn", "mlp"))
    assert (run.bucket_elements, run.fp8) == (7, "e4m3")


# --- compile ------------------------------------------------------------------------------------------------------------


def expected_reason(mode: str, asked: bool, device: str, fsdp: bool, moe: bool) -> str:
    if mode == "off" or not asked:
        return "user-disabled"
    if device != "cuda":
        return "not-cuda"
    if fsdp:
        return "fsdp-eager"
    return "regional-moe" if moe else ""


def test_every_combination_gives_the_first_reason() -> None:
    seen = set()
    for mode, asked, device, fsdp, moe, ahead in itertools.product(
        ("off", "regional"), (True, False), ("cuda", "cpu"), (True, False), (True, False), (True, False)
    ):
        found = compile_policy(mode=mode, device=device, has_moe=moe, fsdp=fsdp, warm_up_asked=asked, precompile=ahead)
        reason = expected_reason(mode, asked, device, fsdp, moe)
        assert found.reason == reason
        assert found.warm_up == (SKIPPED if reason else EXPLICIT)
        assert found.precompile == (ahead and reason == "regional-moe")
        assert found.why
        seen.add(reason)
    assert seen == {"", *policy.REASONS}
    assert policy.REASONS == ("user-disabled", "not-cuda", "fsdp-eager", "regional-moe")


def test_who_disables_dynamo_disables_the_warm_up_and_is_told(tmp_path: Path) -> None:
    dense = dataclasses.replace(GPU, has_moe=False)
    asked = settings(tmp_path, "compile: regional\n")
    assert resolve(dense, settings=asked, environment={}).compile.warm_up == EXPLICIT
    disabled = resolve(dense, settings=asked, environment={"TORCHDYNAMO_DISABLE": "1"})
    assert disabled.compile.reason == "user-disabled"
    assert any("nothing will be compiled" in warning for warning in disabled.warnings)
    turned_off = settings(tmp_path, "compile: regional\nspeed_defaults: {compile_warmup: false}\n")
    assert resolve(dense, settings=turned_off, environment={}).compile.reason == "user-disabled"


# --- sources and contradictions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "default", "set_to", "warns"),
    [
        ({}, None, "1", None),
        ({"tensor": 2}, "1", "8", "Megatron stops unless it is 1"),
        ({"context": 2}, "1", "32", "Megatron stops unless it is 1"),
        ({"tensor": 2}, "1", "1", None),
        ({"fsdp": True}, None, "1", "unset it"),
        ({"fsdp": True, "tensor": 2}, None, "8", None),
        ({"overlap_moe_a2a": True, "expert": 8}, "32", "1", "cannot overlap in one queue"),
        ({"overlap_moe_a2a": True, "expert": 8, "tensor": 2}, "32", "1", None),
        ({"device": "cpu"}, None, "1", None),
    ],
)
def test_connections(changes: dict[str, object], default: str | None, set_to: str, warns: str | None) -> None:
    run = dataclasses.replace(GPU, **changes)
    ours = resolve(run, environment={}).value(policy.CONNECTIONS)
    assert (ours.value, ours.source, ours.warning) == (default, DEFAULT, "")
    theirs = resolve(run, environment={policy.CONNECTIONS: set_to}).value(policy.CONNECTIONS)
    assert (theirs.value, theirs.source) == (set_to, USER)
    assert (warns is None and not theirs.warning) or (warns is not None and warns in theirs.warning)


def test_only_what_nobody_has_set_is_set() -> None:
    run = dataclasses.replace(GPU, tensor=2)
    ours = resolve(run, environment={}).environment()
    assert ours == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
    }
    assert resolve(run, environment=ours).environment() == {}
    assert resolve(Run(device="cpu"), environment={}).environment() == {}


def test_a_recipes_variables_count_unless_the_user_has_set_others() -> None:
    recipe = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_DEBUG": "INFO"}
    both = resolve(GPU, environment={"NCCL_DEBUG": "TRACE"}, recipe=recipe, from_recipe=True)
    assert (both.value("CUDA_DEVICE_MAX_CONNECTIONS").value, both.value("CUDA_DEVICE_MAX_CONNECTIONS").source) == (
        "8",
        RECIPE,
    )
    assert both.environment()["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert both.warnings == ("NCCL_DEBUG: the recipe asks for INFO, the environment has TRACE",)
    assert "NCCL_DEBUG" not in both.environment()


def test_the_allocator() -> None:
    name = policy.ALLOCATOR
    graphs = dataclasses.replace(GPU, cuda_graph_impl="local")
    assert resolve(graphs, environment={}).value(name).value is None
    assert resolve(graphs, environment={"NCCL_GRAPH_REGISTER": "0"}).value(name).value == "expandable_segments:True"
    clash = resolve(graphs, environment={name: "expandable_segments:True"}).value(name)
    assert "NCCL_GRAPH_REGISTER=0" in clash.warning
    buffers = dataclasses.replace(GPU, nccl_user_buffers=True)
    assert resolve(buffers, environment={}).value(name).value is None
    assert "user buffers" in resolve(buffers, environment={name: "expandable_segments:True"}).value(name).warning
    renamed = resolve(GPU, environment={"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert (renamed.value("PYTORCH_ALLOC_CONF").source, renamed.environment().get(name)) == (USER, None)


def test_speed_defaults_are_the_users_word(tmp_path: Path) -> None:
    name = policy.ALLOCATOR
    asked = settings(tmp_path, "speed_defaults: {expandable_segments: true, cache_root: /caches}\n")
    found = resolve(GPU, settings=asked, environment={name: "max_split_size_mb:64", "TRITON_CACHE_DIR": "/elsewhere"})
    assert len(found.warnings) == 2
    assert "speed_defaults asks for expandable_segments:True" in found.value(name).warning
    assert "asks for /caches/triton" in found.value("TRITON_CACHE_DIR").warning
    assert found.environment()["TORCHINDUCTOR_CACHE_DIR"] == "/caches/inductor"
    without = settings(tmp_path, "speed_defaults: {expandable_segments: false}\n")
    assert name not in resolve(GPU, settings=without, environment={}).environment()


def test_nccl() -> None:
    found = resolve(GPU, environment={"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring"})
    assert "unset it" in found.value("NCCL_P2P_DISABLE").warning
    assert "not comparable" in found.value("NCCL_ALGO").warning
    alone = dataclasses.replace(GPU, world_size=1)
    assert resolve(alone, environment={"NCCL_P2P_DISABLE": "1"}).warnings == ()
    assert "NCCL_DEBUG" not in resolve(alone, environment={}).environment()


def test_plans_and_their_sources(tmp_path: Path) -> None:
    words = ["--bf16", "--recompute-granularity", "selective", "--recompute-modules", "shared_experts"]
    run = Run.from_arguments(words, device="cuda", world_size=1)
    families = settings(tmp_path, "recompute: [r_recurrence, a]\n")
    found = resolve(run, settings=families, environment={})
    assert found.value("recompute").value == "a, r_recurrence; Megatron's selective (shared_experts)"
    assert found.value("recompute").source == USER
    assert (found.value("precision").value, found.value("precision").source) == ("bf16", USER)
    assert (found.value("CUDA graphs").value, found.value("CUDA graphs").source) == ("none", DEFAULT)
    assert resolve(run, environment={}, from_recipe=True).value("precision").source == RECIPE
    assert resolve(Run(device="cpu"), environment={}).value("recompute").value == "nothing"


def test_taxes(tmp_path: Path) -> None:
    assert resolve(GPU, environment={}).taxes == ()
    on = settings(tmp_path, "experimental_taxes: {blocking_launches: true, anomaly_detection: true}\n")
    found = resolve(GPU, settings=on, environment={})
    assert found.taxes == ("anomaly_detection", "blocking_launches")
    assert found.environment()["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "asks for 1" in resolve(GPU, settings=on, environment={"CUDA_LAUNCH_BLOCKING": "0"}).warnings[0]
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


# --- overlap ------------------------------------------------------------------------------------------------------------

ALL = dataclasses.replace(
    GPU,
    tensor=2,
    expert=4,
    sequence_parallel=True,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    overlap_moe_a2a=True,
    overlap_shared_expert=True,
    tp_comm_overlap=True,
)


def possible(run: Run, connections: str | None) -> dict[str, str]:
    return {one.name: one.reason for one in overlap_contract(run, connections) if one.possible}


def reasons(run: Run, connections: str | None) -> dict[str, str]:
    return {one.name: one.reason for one in overlap_contract(run, connections) if not one.possible}


def test_no_setting_of_connections_lets_everything_overlap() -> None:
    many, one = possible(ALL, "32"), possible(ALL, "1")
    assert set(many) == {"gradient reduce", "parameter gather", "MoE all-to-all", "shared expert"}
    assert set(one) == {"gradient reduce", "parameter gather", "tensor-parallel"}
    assert "=1, which keeps" in reasons(ALL, None)["tensor-parallel"]
    assert "one queue" in reasons(ALL, "1")["MoE all-to-all"]


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"overlap_grad_reduce": False}, "gradient reduce", "not asked for (--overlap-grad-reduce)"),
        ({"world_size": 2}, "gradient reduce", "one data-parallel replica"),
        ({"bucket_elements": 1_000_000}, "gradient reduce", "3.8 MiB is below 32 MiB"),
        ({"bucket_elements": 3_000_000_000}, "gradient reduce", "one bucket of 3000000000 elements"),
        ({"num_buckets": 1}, "gradient reduce", "one bucket of"),
        ({"num_buckets": 1000}, "gradient reduce", "below 32 MiB"),
        ({"parameters": None}, "gradient reduce", "not known"),
        ({"distributed_optimizer": False}, "parameter gather", "--use-distributed-optimizer"),
        ({"overlap_grad_reduce": False}, "parameter gather", "needs --overlap-grad-reduce"),
        ({"expert": 1}, "MoE all-to-all", "not cut"),
        ({"expert": 1}, "shared expert", "not cut"),
        ({"sequence_parallel": False}, "tensor-parallel", "--sequence-parallel"),
        ({"transformer_impl": "local"}, "tensor-parallel", "Transformer Engine's"),
        ({"device": "cpu"}, "tensor-parallel", "no streams"),
        ({"device": "cpu"}, "gradient reduce", "no streams"),
    ],
)
def test_what_stands_against_an_overlap_is_said(changes: dict[str, object], name: str, reason: str) -> None:
    assert reason in reasons(dataclasses.replace(ALL, **changes), "1")[name]


def test_the_size_of_a_bucket_counts_its_dtype() -> None:
    whole = dataclasses.replace(ALL, bucket_elements=10_000_000)
    assert "gradient reduce" in possible(whole, "1")
    assert "19.1 MiB" in reasons(dataclasses.replace(whole, grad_bytes=2), "1")["gradient reduce"]


# --- the text, the file, the launch -------------------------------------------------------------------------------------


def test_text_and_json_say_the_same(tmp_path: Path) -> None:
    found = resolve(ALL, settings=settings(tmp_path, "compile: regional\n"), environment={"CUDA_LAUNCH_BLOCKING": "1"})
    text, read = found.describe(), json.loads(found.as_json())
    assert "CUDA_DEVICE_MAX_CONNECTIONS = 32 (default" in text
    assert "warm-up skipped (regional-moe)" in text
    assert text.splitlines()[-1].startswith("  warning: CUDA_LAUNCH_BLOCKING: ")
    assert read["compile"]["reason"] == "regional-moe"
    for each in found.values:
        assert f"  {each.name} = " in text
        assert dataclasses.asdict(each) in read["values"]
    assert [one["name"] for one in read["overlaps"]] == [one.name for one in found.overlaps]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("compile: full\n", ["'compile' is 'full'", "expected off or regional"]),
        ("compile: true\n", ["'compile' is True"]),
        ("recompute: experts\n", ["'recompute' is 'experts'", "a list of different names"]),
        ("recompute: [m, m]\n", ["a list of different names"]),
        ("recompute: [expert]\n", ["recompute names 'expert'", "did you mean 'experts'"]),
        ("experimental_taxes: {anomaly_detektion: true}\n", ["unknown key", "did you mean 'anomaly_detection'"]),
        ("experimental_taxes: {anomaly_detection: 1}\n", ["anomaly_detection is 1", "true or false"]),
        ("experimental_taxes: [anomaly_detection]\n", ["expected a mapping"]),
        ("speed_defaults: {cache_root: here}\n", ["cache_root is 'here'", "full path"]),
        ("observability: {policy: xml}\n", ["policy is 'xml'", "text or json"]),
        ("observability: {polcy: text}\n", ["unknown key 'polcy'", "did you mean 'policy'"]),
    ],
)  # fmt: skip
def test_wrong_groups_are_refused(tmp_path: Path, text: str, names: list[str]) -> None:
    with pytest.raises(ConfigFileError) as raised:
        settings(tmp_path, text)
    assert all(name in str(raised.value) for name in names)


def test_groups_are_read(tmp_path: Path) -> None:
    nothing = settings(tmp_path, "")
    assert (nothing.compile, nothing.recompute.on, nothing.experimental_taxes.on) == ("off", (), ())
    assert nothing.given == frozenset()
    assert settings(tmp_path, "compile: off\n").compile == "off"
    full = settings(tmp_path, "compile: regional\nrecompute: [m]\nobservability: {policy: json}\n")
    assert (full.compile, full.recompute.on, full.observability.policy) == ("regional", ("m",), "json")
    assert full.given == {"compile", "recompute", "observability.policy"}


def test_neither_torch_nor_megatron_is_imported() -> None:
    code = "import sys, megacpp_mcore.policy; print([n for n in ('torch', 'megatron', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_launch_prints_its_policy_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megacpp_mcore import cpu, launcher

    script = tmp_path / "nothing.py"
    script.write_text("")
    arguments = [word for words in cpu.REQUIRED_ARGUMENTS for word in words]
    assert launcher.launch([str(script), *arguments, "--bf16"], device="cpu") == 0
    printed = capsys.readouterr().out
    assert printed.count("megacpp-mcore: launch policy:") == 1
    assert "megacpp-mcore:   precision = bf16 (user" in printed
    assert "megacpp-mcore:   compile = off; warm-up skipped (user-disabled): nothing is compiled" in printed
