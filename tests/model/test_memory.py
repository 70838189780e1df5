"""What a rank holds: its parameters as stock builds them in every layout, their bytes as Megatron has them, and refusals."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore import policy, settings
from megacpp_mcore.arguments.lowering import lower
from megacpp_mcore.arguments.read import read
from megacpp_mcore.errors import ArgumentMismatchError, LaunchError
from megacpp_mcore.model import PRESETS, Layout, Model, memory, preset, with_overrides
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.run import NARROW, Run
from megacpp_mcore.model.training import GPT, HYBRID, Training
from tests import stock
from tests.errors import raises

ROOT = Path(__file__).parents[2]
H100, H200 = 85_017_493_504, 150_109_880_320
"""``total_memory`` of an NVIDIA H100 80GB HBM3 (81,079 MiB) and of an H200, as torch has it."""
STAGES = {"nam56r": "-FSF-FSF-FFS-", "nam56r_tiny": "-FF"}
"""Schedules that four model chunks can be cut by."""

EXPERTS, TENSORS = Layout(expert=8), Layout(tensor=2, expert=4, sequence_parallel=True)
PIPELINE = Layout(pipeline=2, virtual=2, expert=4)
PROCESSES = 8


def held(chunks: list[Any]) -> tuple[int, int]:
    """Parameters of built model chunks: those but routed experts, and routed experts; rows that only fill up do not count."""
    dense = experts = 0
    for chunk in chunks:
        padding = stock.padding(chunk)
        for name, parameter in chunk.named_parameters():
            count = parameter.numel() + padding.get(name, 0)
            if ".experts." in name and ".shared_experts." not in name:
                experts += count
            else:
                dense += count
    return dense, experts


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("nam56r_tiny", TENSORS),
        ("nam56r_tiny", PIPELINE),
        *(pytest.param("nam56r", layout, marks=pytest.mark.exhaustive) for layout in (EXPERTS, TENSORS, PIPELINE)),
    ],
    ids=str,
)
def test_the_count_of_a_rank_is_what_stock_builds(
    name: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole model, by its parts: tests/arguments/test_lowering.py."""
    overrides = {"dsa": {"schedule": STAGES[name]}} if layout.pipeline > 1 else {}
    model = with_overrides(preset(name), overrides)
    file = tmp_path / "megacpp.json"
    file.write_text(json.dumps({"model": name, "overrides": overrides}))
    monkeypatch.setenv(settings.VARIABLE, str(file))
    counts = []
    for stage in range(layout.pipeline):
        with stock.one_rank(stage * (PROCESSES // layout.pipeline), PROCESSES, layout):
            counts.append(held(stock.build_on_meta(model, layout, PROCESSES)))
    # Megatron's own layers, which are what a CPU has, cut the projections down to MLA's latents, too.
    mla, layers = model.mla, model.layers.count("A") + bool(model.mtp.depth)
    latents = layers * model.hidden_size * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    dense, experts = max(counts, key=sum)
    assert memory.process_parameters(Run(model, layout)) == (dense + latents - latents // layout.tensor, experts)


def test_muon_would_join_the_ranks_parts_of_what_is_cut_alone() -> None:
    """It does so along ``partition_dim``, regardless of other attributes (0.19.2, ``emerging_optimizers.py``)."""
    layout = Layout(tensor=2, sequence_parallel=True)
    with stock.one_rank(0, 2, layout):
        (chunk,) = stock.build_on_meta(preset("nam56r_tiny"), layout, 2)
    named = dict(chunk.named_parameters())
    cut = {name for name, param in named.items() if getattr(param, "tensor_model_parallel", False)}
    assert {name for name, param in named.items() if getattr(param, "partition_dim", -1) >= 0} == cut
    uncut = [param for name, param in named.items() if "shared_experts" in name or "eh_proj" in name]
    assert uncut
    assert all(param.partition_dim == -1 for param in uncut)


def states(
    model: Model, layout: Layout | None = None, processes: int = 1, precision: str = "bf16", **asked: bool | str
) -> memory.States:
    training = Training(processes=processes, precision=precision)
    needed = memory.states(Run(model, layout or Layout(), training, asked=asked))
    assert needed is not None
    return needed


@pytest.mark.parametrize("name", PRESETS)
def test_megatrons_bytes_of_a_parameter(name: str) -> None:
    """18 in bf16, or 6 and 12 divided by the replicas (docs of Megatron's distributed optimizer); 16 in fp32."""
    model = preset(name)
    parameters = sum(model.parameters().values())
    assert states(model).total == 18 * parameters
    assert states(model, processes=4).total == pytest.approx(9 * parameters, abs=9)
    assert states(model, processes=4, distributed_optimizer=False).total == 18 * parameters
    assert states(model, precision="fp32").total == 16 * parameters
    assert states(model, **NARROW).total == 12 * parameters
    assert states(model, processes=4, **NARROW).total == pytest.approx(7.5 * parameters, abs=9)
    assert states(model, precision_aware=True).total == 16 * parameters
    assert states(model, **NARROW | {"exp_avg": "fp8"}).total == 11 * parameters
    assert states(model, precision="fp32", **NARROW).total == 12 * parameters
    assert states(model, processes=4, torch_fsdp=True).total == pytest.approx(4 * parameters, abs=9)
    # Four ranks have a replica of all but the experts, and each has experts of its own.
    dense, experts = memory.process_parameters(Run(model, Layout(expert=4))) or (0, 0)
    assert dense + 4 * experts == parameters
    divided = states(model, Layout(expert=4))
    assert divided.total == pytest.approx(9 * dense + 18 * experts, abs=9)


def test_the_figure_of_nam56r_against_what_was_measured() -> None:
    assert str(states(preset("nam56r"))) == "81.0 GB (weights 9.0, gradients 18.0, main weights 18.0, moments 36.0)"
    with (ROOT / "experiments/results/quarter_h200.csv").open(newline="", encoding="utf-8") as file:
        peaks = {(row["model"], row["arm"]): int(row["peak_bytes"]) for row in csv.DictReader(file)}
    for model in ("nam56r", "nam56r_quarter"):
        above = peaks[model, "graphs"] - states(preset(model)).total
        assert 4.4e9 < above < 4.9e9  # what a step took besides
        assert above < H100 / memory.ROOM


def test_a_recipe_fits_the_gpus_it_is_for() -> None:
    for name, recipe in RECIPES.items():
        if recipe.run.device == "cuda":
            if recipe.run.training.optimizer != "adam":  # Muon keeps one moment, of a twin that fits
                assert memory.states(recipe.run) is None
                continue
            held = memory.states(recipe.run)
            assert held is not None
            assert held.total <= memory.usable(H100 if "_h100_" in name else H200), name


def test_the_figures_of_the_documentation() -> None:
    def figure(processes: int, layout: Layout, **how: Any) -> str:
        return f"{states(preset('nam56r'), layout, processes, **how).total / 1e9:.1f}"

    rows = {"1 GPU": figure(1, Layout()), "1 GPU, moments in bf16": figure(1, Layout(), **NARROW)}
    rows |= {"FSDP2 on 8": figure(8, Layout(), torch_fsdp=True)}
    rows |= {f"{count} replicas": figure(count, Layout()) for count in (2, 4, 8)}
    rows |= {f"`--expert {count}` on {count}": figure(count, Layout(expert=count)) for count in (2, 4, 8)}
    rows["`--tensor 2 --expert 4 --sequence-parallel` on 8"] = figure(8, TENSORS)
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert [f"| {name} | {size} |" for name, size in rows.items() if f"| {name} | {size} |" not in page] == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the GPU that torch sees."""

    def see(name: str, size: int) -> None:
        device = SimpleNamespace(name=name, total_memory=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)

    return see


def run_of(model: Model, layout: Layout, processes: int, *extra: str) -> Run:
    words = lower(Run(model, layout, Training(processes=processes, extra=extra)))
    return read(words, device="cuda", processes=processes)


def test_one_h100_is_refused_for_nam56r(gpu: Any) -> None:
    run = run_of(preset("nam56r"), Layout(), 1)
    gpu("NVIDIA H200", H200)
    policy.check_memory(run)
    gpu("NVIDIA H100 80GB HBM3", H100)
    with raises(LaunchError, "nam56r", "81.0 GB", "85.0 GB", "1/16", "2 GPUs", "54.0 GB", "47.2 GB", "49.1 GB") as refused:
        policy.check_memory(run)
    (words,) = re.findall(r"the same number with (.*) \(54\.0 GB each\)", str(refused.value))
    policy.check_memory(run_of(preset("nam56r"), Layout(), 1, *words.split()))
    on_cpu = Training(device="cpu", transformer_impl="local")
    policy.check_memory(dataclasses.replace(run, training=on_cpu))  # host memory is not checked


def test_a_step_that_is_estimated_too_large_is_warned_of(gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with what fits; not if recompute makes it fit, or covers Megatron modules or layers without an estimate."""
    gpu("NVIDIA H200", H200)
    for _ in range(2):
        policy.check_memory(run_of(preset("nam56r_long"), Layout(), 1))
    (record,) = caplog.records
    assert "need 192.5 GB of the GPU's 150.1; what fits: recompute ours a, m, mtp (136.6 GB)" in record.message
    caplog.clear()
    policy.check_memory(run_of(preset("nam56r"), Layout(), 1))
    policy.check_memory(run_of(preset("nam56r_long"), Layout(), 1, *stock.full_recompute()))
    policy.check_memory(run_of(preset("nam56r_long"), Layout(), 1, *stock.selective_recompute("moe")))
    policy.check_memory(run_of(preset("nam56r_long"), Layout(context=4), 4))
    chosen = settings.load(RECIPES["nam56r_long_pretrain_1gpu_h200_bf16"].settings)
    words = lower(Run(preset("nam56r_long")))
    policy.check_memory(read(words, device="cuda", processes=1, settings=chosen))
    gpu("smaller", 100 * 10**9)
    policy.check_memory(run_of(preset("nam56r_long"), Layout(), 1, *stock.full_recompute("block", 4)))
    assert caplog.records == []
    policy.check_memory(run_of(preset("nam56r_long"), Layout(), 1, *stock.full_recompute()))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("model_class", [GPT, HYBRID])
@pytest.mark.parametrize("name", sorted({*PRESETS} - {"nam56r"}))
def test_memory_is_not_advised_on_for_a_model_that_the_arguments_are_not_of(
    gpu: Any, tmp_path: Path, name: str, model_class: str
) -> None:
    gpu("NVIDIA H100 80GB HBM3", H100)
    *words, named = lower(Run(preset(name), model_class=model_class))
    spec = named.replace(name, "nam56r")
    with raises(ArgumentMismatchError, "contradict nam56r in ", f"are those of {name} (--spec megacpp_mcore {named})"):
        policy.check_memory(read([*words, spec], device="cuda", processes=1))
    file = tmp_path / "own.yaml"
    file.write_text("model: nam56r\n", encoding="utf-8")
    own = read([*words, spec], device="cuda", processes=1, settings=settings.load(file))
    with raises(ArgumentMismatchError, f"contradict nam56r of {file} (MEGACPP_CONFIG) in "):
        policy.check_memory(own)


@pytest.mark.parametrize(
    ("size", "processes", "micro_batch", "layout", "words", "kept"),
    [
        (H200, 1, 1, Layout(), "", "all"),
        (H200, 1, 2, Layout(), "", "all"),  # 132 GB are reserved
        (H200, 1, 2, Layout(), "fp8: {recipe: block}", "scan"),
        (H200, 1, 2, Layout(), "speed_defaults: {linear_cross_entropy: false}", "scan"),
        (H200, 8, 4, Layout(), "", "all"),
        (H200, 8, 4, Layout(), "overrides: {moe: {topk: 16}}", "scan"),
        (H200, 1, 4, Layout(), "", None),
        (H200, 4, 4, Layout(), "", "scan"),
        (H200, 4, 4, Layout(context=2), "", "all"),
        (H200, 4, 8, Layout(context=2), "", "scan"),
        (H100, 4, 1, Layout(), "", "all"),
        (H100, 4, 2, Layout(), "", None),
        (H200, 2, 2, Layout(pipeline=2, virtual=2), "", "all"),
        (H200, 2, 4, Layout(pipeline=2), "", "scan"),
        (H200, 2, 4, Layout(pipeline=2, virtual=2), "", None),  # five chunks of 13 layers at once, above two of 26
        (H100, 2, 2, Layout(pipeline=2), "", None),
    ],
    ids=str,
)
def test_what_mamba_keeps_follows_from_memory(
    gpu: Any, tmp_path: Path, size: int, processes: int, micro_batch: int, layout: Layout, words: str, kept: str | None
) -> None:
    gpu("a GPU", size)
    file = tmp_path / "own.yaml"
    file.write_text(f"model: nam56r\n{words}\n", encoding="utf-8")
    training = Training(processes=processes, micro_batch_size=micro_batch, global_batch_size=8 * processes)
    how = {"distributed_optimizer": True}
    own = settings.load(file)
    run = Run(own.model, layout, training, asked=how, settings=own)
    assert policy.mamba_keeps(run) == kept
    assert policy.mamba_keeps(None) is None
    on_cpu = Training(device="cpu", transformer_impl="local")
    assert policy.mamba_keeps(dataclasses.replace(run, training=on_cpu)) is None


def test_a_pipeline_holds_more_of_longer_groups_of_micro_batches() -> None:
    plan = Training(processes=2, micro_batch_size=2, global_batch_size=32)
    model = with_overrides(preset("nam56r"), {"dsa": {"schedule": "F"}})
    words = lower(Run(model, Layout(pipeline=2, virtual=2), plan, asked={"distributed_optimizer": True}))
    kept = []
    for longer in ([], ["--microbatch-group-size-per-virtual-pipeline-stage", "8"]):
        run = read([*words, *longer], device="cuda", processes=2, model=model)
        kept.append(memory.mamba_keeps(run, H200))
    assert kept == ["all", None]


@pytest.mark.parametrize(
    ("card", "size", "processes", "layout"),
    [
        ("A100 80 GB", 85 * 10**9, 2, Layout()),
        ("L40S", 47 * 10**9, 2, Layout(tensor=2, expert=2, sequence_parallel=True)),
        ("RTX 5090", 33 * 10**9, 4, Layout(expert=4)),
        ("RTX 4090", 25 * 10**9, 4, Layout(tensor=4, expert=4, sequence_parallel=True)),
    ],
)
def test_the_fewest_of_other_gpus_that_hold_the_states(gpu: Any, card: str, size: int, processes: int, layout: Layout) -> None:
    """As on the page of other GPUs; one is refused, with the figures of both."""
    gpu(card, size)
    with raises(LaunchError, "81.0 GB", card):
        policy.check_memory(run_of(preset("nam56r"), Layout(), 1))
    fewest, _ = next(memory.fitting(Run(preset("nam56r")), size))
    assert (fewest.processes, fewest.layout) == (processes, layout)


def test_what_is_offered_is_not_refused(gpu: Any) -> None:
    gpu("a small one", 25 * 10**9)
    with raises(LaunchError, "4 GPUs, --tensor-model-parallel-size 4 --expert"):
        policy.check_memory(run_of(preset("nam56r"), Layout(expert=4), 4))
    offered = list(memory.fitting(Run(preset("nam56r"), training=Training(processes=4)), 25 * 10**9))
    assert offered
    for other, held in offered:
        run = run_of(preset("nam56r"), other.layout, other.processes)
        assert memory.states(run) == held
        policy.check_memory(run)


def test_nothing_is_refused_whose_states_are_not_known(gpu: Any) -> None:
    gpu("a tiny one", 10**9)
    model = preset("nam56r")
    for words in (["--optimizer-cpu-offload"], ["--main-params-dtype", "fp16"], ["--optimizer", "sgd"]):
        policy.check_memory(run_of(model, Layout(), 1, *words))
    policy.check_memory(read(["--num-layers", "3"], device="cuda", processes=1))
    with raises(LaunchError, "no layout"):
        policy.check_memory(run_of(model, Layout(), 1))
