"""Lowering against the real Megatron parser, the check of a run against the model, and the meta build of every preset."""

from __future__ import annotations

import dataclasses
import itertools
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megacpp_mcore.arguments import lowering
from megacpp_mcore.arguments.lowering import GPT, HYBRID, lower, mismatches, model_arguments
from megacpp_mcore.arguments.read import read
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.errors import ArgumentMismatchError, ModelError
from megacpp_mcore.model import PRESETS, Layout, Model, preset, with_overrides
from megacpp_mcore.model.run import BUCKET_ELEMENTS, FEATURES, FIELDS, NARROW, TORCH_FSDP, Run, words_of
from megacpp_mcore.model.training import OPTIMIZERS, Training
from tests import stock
from tests.errors import raises
from tests.lanes import exhaustive_but

NOT_THE_MODELS = Path(__file__).parents[1] / "golden" / "fields_not_the_models.txt"
"""Fields of MLATransformerConfig (0.19.1 and 0.19.2) about the machine, the run, precision, or parts NAM56R does not have."""


def matching(model: Model) -> SimpleNamespace:
    """Return a configuration that matches ``model``."""
    fields = {argument.field: argument.expected for argument in model_arguments(model)}
    return SimpleNamespace(**fields, vocab_size=model.vocab_size)


def other(value: Any) -> Any:
    """Return another value of the kind of ``value``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [1 - value[0], *value[1:]]
    if isinstance(value, str):
        return value + "x"
    return 1 if value is None else value + 1


@pytest.mark.parametrize(("steps", "rising"), [(1, 0), (3, 1), (20, 10), (99, 49), (100, 50), (500, 50), (1000, 100)])
def test_a_short_run_warms_up_over_as_many_steps_as_it_has_room_for(steps: int, rising: int) -> None:
    words = lower(Run(preset("nam56r_tiny"), Layout(), Training(train_iters=steps)))
    assert words[words.index("--lr-warmup-iters") + 1] == str(rising)
    assert rising < steps  # Megatron refuses another


@pytest.mark.parametrize(
    ("expert", "training", "by"),
    [
        (1, {}, "alltoall"),
        (8, {}, "allgather"),
        (16, {}, "alltoall"),
        (8, {"precision": "bf16_te_fp8_experts"}, "alltoall"),
        (8, {"extra": ("--moe-shared-expert-overlap",)}, "alltoall"),
    ],
)
def test_few_ranks_of_experts_gather_tokens(expert: int, training: dict[str, Any], by: str) -> None:
    words = lower(Run(preset("nam56r"), Layout(expert=expert), Training(**training)))
    assert words[words.index("--moe-token-dispatcher-type") + 1] == by


@pytest.mark.parametrize("name", PRESETS)
def test_each_single_contradiction_is_the_one_that_is_listed(name: str) -> None:
    model = preset(name)
    assert mismatches(model, [matching(model)]) == []
    for argument in model_arguments(model):
        source = matching(model)
        changed = other(argument.expected)
        setattr(source, argument.field, changed)
        (problem,) = mismatches(model, [source])
        assert problem.startswith(f"{argument.field}: found {changed!r}, expected {argument.expected!r}")
        assert f"({argument.remedy})" in problem


def test_each_missing_field_is_listed() -> None:
    model = preset("nam56r_tiny")
    for argument in model_arguments(model):
        source = matching(model)
        delattr(source, argument.field)
        (problem,) = mismatches(model, [source])
        assert problem == f"{argument.field}: not configured; expected {argument.expected!r} ({argument.remedy})"
    assert len(mismatches(model, [])) == len(model_arguments(model)) + 1  # and the vocabulary


def test_the_vocabulary_may_be_padded_and_no_other() -> None:
    model = preset("nam56r_tiny")
    source = matching(model)
    for vocab_size in (260, 384):
        source.vocab_size = vocab_size
        assert mismatches(model, [source]) == []
    source.tensor_model_parallel_size = 2
    source.vocab_size = 512
    assert mismatches(model, [source]) == []
    source.vocab_size = 384
    (problem,) = mismatches(model, [source])
    assert problem.startswith("vocab_size: found 384, expected 260, or 512 with padding")


def test_every_field_of_megatrons_configuration_is_asked_for_or_known_not_to_be_the_models() -> None:
    """Of a field that a new Megatron brings, read whether it changes the model: then ask for it in lowering, or list it.

    Those of its parallel configuration say how the same model is spread and run.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields, spread = ({field.name for field in dataclasses.fields(of)} for of in (MLATransformerConfig, ModelParallelConfig))
    requested = {argument.field for model in PRESETS.values() for argument in model_arguments(model)}
    words = NOT_THE_MODELS.read_text().split()
    listed = {word.lstrip("+-") for word in words}
    other = "+" if {word[1:] for word in words if word[0] == "-"} <= fields else "-"  # since 0.20, or until 0.19
    assert requested & (listed | spread) == listed & spread == set()
    assert sorted(fields - requested - listed - spread) == []
    assert sorted(listed - fields) == sorted(word[1:] for word in words if word[0] == other)


def test_flags_without_an_effect_are_megatrons_and_refused() -> None:
    from megatron.training.arguments import add_megatron_arguments

    megatrons = {flag for action in add_megatron_arguments(ArgumentParser())._actions for flag in action.option_strings}
    flags = {flag for unused in lowering._UNUSED for flag in unused}
    since_main = {flag for flag in flags if flag.startswith("--gdp-")}
    assert len(since_main) == 3
    assert flags - megatrons in (set(), since_main)  # those of 0.20 as one
    for flag in flags:
        with raises(ArgumentMismatchError, flag):
            lowering.check_unused(["--seed", "1", f"{flag}=1"])
    with raises(ArgumentMismatchError, "--mamba-state-dim", "--openai-gelu"):
        lowering.check_unused(["--openai-gelu", "--mamba-state-dim", "128"])
    with raises(ArgumentMismatchError, "--reset-position-ids"):
        lowering.check_unused(["--reset-position-ids"])
    for other in ("--reset-attention-mask", "--dataloader-inter-document-masking"):
        lowering.check_unused(["--reset-position-ids", other])
    for name in PRESETS:
        lowering.check_unused(lower(Run(preset(name), Layout(), Training())))


def test_what_megatron_would_overwrite_by_the_pattern_is_refused() -> None:
    model = preset("nam56r_tiny")
    lowering.check_overwritten(model, ["--mtp-num-layers", str(model.mtp.depth), "--num-layers", str(model.depth)])
    words = ["--mtp-num-layers", "3", "--num-layers=52", "--experimental-attention-variant", "gated_delta_net"]
    with raises(ArgumentMismatchError, "--mtp-num-layers", 3, model.mtp.depth, "--num-layers", 52, "gated_delta_net"):
        lowering.check_overwritten(model, words)


@pytest.mark.parametrize(
    "values", [{"device": "tpu"}, {"precision": "fp16"}, {"transformer_impl": "apex"}, {"optimizer": "adamm"}]
)
def test_training_plans_that_are_not_known(values: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=rf"Training\.{next(iter(values))} is '{next(iter(values.values()))}'"):
        Training(**values)
    with pytest.raises(ModelError, match=r"CPU .*Transformer Engine"):
        Training(device="cpu")


def test_an_optimizer_has_its_scale_and_moments_that_it_can_have() -> None:
    scale = ("--muon-extra-scale-factor", "0.2")
    for optimizer in OPTIMIZERS:
        words = lower(Run(preset("nam56r"), training=Training(optimizer=optimizer)))
        assert (words[words.index(scale[0]) :][:2] == scale) if "muon" in optimizer else scale[0] not in words
        if optimizer != "adam":
            with raises(ModelError, f"optimizer {optimizer}", "--use-precision-aware-optimizer"):
                lower(Run(preset("nam56r"), training=Training(optimizer=optimizer), asked=NARROW))
    with raises(ModelError, "'dist_muon'; did you mean 'muon'?"):
        Training(optimizer="dist_muon")


LAYOUTS = {
    "one": Layout(),
    "tp2-sp": Layout(tensor=2, sequence_parallel=True),
    "pp2": Layout(pipeline=2),
    "pp2-vpp2": Layout(pipeline=2, virtual=2),
    "tp2-pp2-ep4": Layout(tensor=2, pipeline=2, expert=4, sequence_parallel=True),
}
PIPELINED = {"dsa": {"schedule": "-FF"}}
"""A schedule of nam56r_tiny that is legal in every layout."""


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_lowered_is_accepted_and_describes_the_model(process: Path, layout: Layout, device: str) -> None:
    from megacpp_mcore.arguments.chunks import model_chunks
    from megacpp_mcore.layer_specs import nam56r

    model = with_overrides(preset("nam56r_tiny"), PIPELINED)
    words = stock.words(model, device=device, layout=layout, transformer_impl="local")
    config = stock.model_config(words, layout.processes)
    assert mismatches(model, [config.transformer, config]) == []
    assert config.transformer_layer_spec.params == {"preset": "nam56r_tiny"}
    chunks = model_chunks(config.transformer)
    assert chunks == model.chunks(layout)
    nam56r.check_layout(model, config.transformer, chunks)


@pytest.mark.parametrize(("model_class", "precision"), [(GPT, "bf16"), (HYBRID, "fp32")])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_launch_flags_of_gpus_pass_megatrons_validation(
    process: Path, layout: Layout, precision: str, model_class: str
) -> None:
    """With two data-parallel replicas every flag is on, in each layout; what Megatron then has is what was asked for."""
    model = with_overrides(preset("nam56r_tiny"), PIPELINED)
    options = {"tokenizer": tokenizer_words(model), "data": ("--mock-data",), "precision": precision}
    processes = 2 * layout.processes
    words = lower(Run(model, layout, Training(processes=processes, **options), model_class))
    how = read(words, device="cuda", processes=processes, model=model).execution
    with stock.gpu_host():
        arguments = stock.parse(words, processes)
    on = ("gradient_accumulation_fusion", "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    assert [name for name in (*on, "moe_permute_fusion", "manual_gc") if not getattr(arguments, name)] == []
    assert (arguments.manual_gc_interval, arguments.log_interval) == (100, 10)
    assert (arguments.ddp_bucket_size, how.bucket_elements) == (BUCKET_ELEMENTS, BUCKET_ELEMENTS)
    alike = (
        "gradient_accumulation_fusion",
        "overlap_grad_reduce",
        "moe_permute_fusion",
        "manual_gc",
        "cuda_graph_impl",
    )
    assert [getattr(how, name) for name in alike] == [getattr(arguments, name) for name in alike]
    assert how.moe_dispatcher == arguments.moe_token_dispatcher_type


def launch_words(layout: Layout | None = None, model: Model | None = None, **training: Any) -> set[str]:
    """Return the flags of a run that change only its speed."""
    named = {word for flag in FEATURES for on in (True, False) for word in words_of(flag.field, on) if word.startswith("--")}
    return set(lower(Run(model or preset("nam56r_tiny"), layout or Layout(), Training(**training)))) & named


def test_graphs_are_asked_for_where_they_were_measured() -> None:
    staged = with_overrides(preset("nam56r"), {"dsa": {"schedule": "-FSS-FSF-FSS-"}})
    here, plain, own = preset("nam56r"), Training(cuda_graphs=True), {"cuda_graphs": True}
    graphs = ("--cuda-graph-impl", "local")
    for model, layout in (
        (here, Layout()),
        (here, Layout(expert=4)),
        (here, Layout(tensor=2, sequence_parallel=True)),
        (staged, Layout(pipeline=2)),
    ):
        for model_class in (GPT, HYBRID):
            words = lower(Run(model, layout, dataclasses.replace(plain, global_batch_size=16), model_class))
            assert words[words.index(graphs[0]) :][:2] == graphs
    for model, layout, training, model_class in (
        (here, Layout(), Training(), GPT),
        (staged, Layout(pipeline=2, expert=2), plain, GPT),
        (staged, Layout(pipeline=2), Training(global_batch_size=17, processes=2, **own), GPT),
        (here, Layout(context=2), plain, HYBRID),
        (here, Layout(), Training(transformer_impl="local", **own), GPT),
        (here, Layout(), Training(precision="fp32", **own), GPT),
        *((here, Layout(), Training(optimizer=name, **own), GPT) for name in OPTIMIZERS if name != "adam"),
        (here, Layout(), Training(precision="bf16_te_fp8_experts", **own), GPT),
        (here, Layout(), Training(extra=(TORCH_FSDP,), **own), GPT),
    ):
        assert graphs[0] not in lower(Run(model, layout, training, model_class))


def test_a_launch_flag_is_left_out_where_its_obstacle_stands() -> None:
    single = {"--moe-permute-fusion", "--manual-gc", "--manual-gc-interval"}
    sharded = {"--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"}
    replicas = sharded | {"--overlap-grad-reduce", "--overlap-param-gather"}
    assert launch_words() == single
    assert launch_words(processes=2) == launch_words(Layout(expert=2)) == single | replicas
    # Both processes hold a part of the one replica.
    assert launch_words(Layout(tensor=2, sequence_parallel=True)) == single
    off = {"--no-gradient-accumulation-fusion"}
    local = {"--manual-gc", "--manual-gc-interval"} | off
    assert launch_words(transformer_impl="local") == local
    assert launch_words(processes=8, device="cpu", transformer_impl="local", precision="fp32") == off
    untrained = with_overrides(preset("nam56r_tiny"), {"dsa": {"loss_coeff": 0.0}})
    assert launch_words(processes=2, model=untrained) == single | sharded
    dense = with_overrides(preset("nam56r_tiny"), {"pattern": "AMR", "depth": 3, "dsa": {"schedule": "-"}})
    assert "--moe-permute-fusion" not in launch_words(model=dense)


def test_buckets_are_larger_where_reductions_are_hidden_and_nobody_asks_for_others() -> None:
    model, size = preset("nam56r_tiny"), "--ddp-bucket-size"
    assert size in lower(Run(model, Layout(), Training(processes=2)))
    assert size not in lower(Run(model, Layout(), Training()))
    many = Training(processes=128, global_batch_size=128)  # for which Megatron has 128 million
    assert size not in lower(Run(model, Layout(), many))
    assert size not in lower(Run(model, Layout(), Training(processes=2, extra=("--ddp-num-buckets", "8"))))


def test_every_flag_and_every_remedy_is_one_of_megatron(process: Path) -> None:
    from megatron.training.arguments import add_megatron_arguments

    megatrons = add_megatron_arguments(ArgumentParser(allow_abbrev=False))._option_string_actions
    words: set[str] = set()
    for model in PRESETS.values():
        for argument in model_arguments(model):
            words.update(argument.words, argument.remedy.split())
        for layout in LAYOUTS.values():
            with_schedule = with_overrides(model, {"dsa": {"schedule": "F"}, "depth": 12 if model.depth == 13 else model.depth})
            for training in (Training(), Training(device="cpu", transformer_impl="local", precision="fp32")):
                words.update(lower(Run(with_schedule, layout, training)))
    for field in FIELDS.values():
        words.update(field.metadata.get("words", field.metadata.get("names", ())))
    flags = {word for word in words if word.startswith("--")}
    assert len(flags) > 60
    assert sorted(flags - megatrons.keys()) == []


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (["--num-layers", "13"], {"num_layers", "moe_layer_freq"}),
        (["--hidden-size", "256"], {"hidden_size", "kv_channels"}),
        (["--max-position-embeddings", "512"], {"seq_length"}),
        (["--swiglu"], {"gated_linear_unit", "activation_func"}),
        (["--squared-relu"], {"activation_func"}),
        (["--apply-layernorm-1p"], {"layernorm_zero_centered_gamma"}),
        (["--window-size", "(8,0)"], {"window_size"}),
        (["--moe-expert-capacity-factor", "1.0", "--moe-router-topk", "1"], {"moe_expert_capacity_factor", "moe_router_topk"}),
        (["-", "--disable-bias-linear"], {"add_bias_linear"}),
        (["-", "--untie-embeddings-and-output-weights"], {"share_embeddings_and_output_weights"}),
        (["-", "--no-dsa-indexer-rotate-activation"], {"dsa_indexer_rotate_activation"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else "".join(value),
)  # fmt: skip
def test_contradictions_of_real_runs(process: Path, changes: list[str], fields: set[str]) -> None:
    """By flags whose fields are several, or have other names or values."""
    model = preset("nam56r_tiny")
    words = stock.words(model)
    if changes[0] == "-":
        words.remove(changes[1])
    else:
        words += changes  # the last one counts
    if "--num-layers" in changes:
        words += ["--moe-layer-freq", "[" + ",".join("0101010101010") + "]"]
    config = stock.model_config(words)
    assert {line.split(":")[0] for line in mismatches(model, [config.transformer, config])} == fields


@pytest.mark.parametrize(
    ("pattern", "layout", "text"),
    [
        ("AEMEA|EMEAEMR", Layout(pipeline=2), "Et*5|t*7mL"),
        ("AEM|E|AEMEAE|MR", Layout(pipeline=2, virtual=2), "Et*3|t*1|t*6|t*2mL"),
        ("AEM|E|AEMEAE|MR", Layout(pipeline=4), "Et*3|t*1|t*6|t*2mL"),
    ],
)
def test_marked_stages_are_the_chunks_that_megatron_cuts(process: Path, pattern: str, layout: Layout, text: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from megacpp_mcore.arguments.chunks import chunk_layers, model_chunks
    from megacpp_mcore.layer_specs import nam56r

    model = with_overrides(preset("nam56r_tiny"), {"pattern": pattern, **PIPELINED})
    words = stock.words(model, layout=layout)
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == text
    parsed = PipelineParallelLayerLayout(text, layout.pipeline)
    parsed.validate_layer_layout(model.depth, model.mtp.depth)
    assert parsed.virtual_pipeline_model_parallel_size == layout.virtual
    config = stock.model_config(words, layout.pipeline).transformer
    chunks = model_chunks(config)
    assert chunks == model.chunks(layout)
    size = config.virtual_pipeline_model_parallel_size
    with mock.patch.object(parallel_state, "get_virtual_pipeline_model_parallel_world_size", return_value=size):
        for vp_stage, rank in itertools.product(range(layout.virtual), range(layout.pipeline)):
            indices = config.pipeline_model_parallel_layout.get_layer_id_list(LayerType.decoder, vp_stage, rank)
            assert list(chunk_layers(config, vp_stage, rank)) == [1 + index for index in indices]
    nam56r.check_layout(model, config, chunks)


@pytest.mark.parametrize(
    ("stages", "of_run", "of_model", "says"),
    [
        # Other stages than the pattern marks, and those that cannot hold the model.
        (2, PIPELINED, {"pattern": "AEMEA|EMEAEMR", **PIPELINED}, r".* 1–6, 7–12; .*'Et\*5\|t\*7mL'"),
        (3, {}, {}, r"layer 9\b.*'-FF'"),
    ],
)
def test_a_run_that_cuts_stages_in_which_the_model_is_not_is_refused(
    process: Path, stages: int, of_run: dict[str, Any], of_model: dict[str, Any], says: str
) -> None:
    from megacpp_mcore.arguments.chunks import model_chunks
    from megacpp_mcore.layer_specs import nam56r

    run, model = (with_overrides(preset("nam56r_tiny"), overrides) for overrides in (of_run, of_model))
    words = [*stock.words(run), "--pipeline-model-parallel-size", str(stages)]
    config = stock.model_config(words, stages).transformer
    with pytest.raises(ModelError, match=says):
        nam56r.check_layout(model, config, model_chunks(config))


@pytest.mark.parametrize("name", exhaustive_but(PRESETS, "nam56r", "nam56r_tiny", "nam56r_tiny_long", "nam52"))
def test_every_preset_builds_on_meta_as_it_is_counted(process: Path, name: str) -> None:
    model = preset(name)
    (built,) = stock.build_on_meta(model)
    assert {parameter.device.type for parameter in built.parameters()} == {"meta"}
    layers = built.decoder.layers
    assert [layer.layer_number for layer in layers] == list(range(1, model.depth + 1))
    assert "".join(map(stock.family, layers)) == model.layers
    assert list(map(role_of, layers)) == list(model.roles)
    assert stock.parameters_by_part(built) == model.parameters()
    assert len(built.mtp.layers) == 1
    assert built.decoder.final_layernorm is not None


def role_of(layer: Any) -> str | None:
    from megacpp_mcore.layer_specs.core_attention import MLACoreAttention, SparseCoreAttention

    core = getattr(layer.self_attention, "core_attention", None)
    if core is None:
        return None
    if isinstance(core, SparseCoreAttention):
        return "S" if core.indexer is None else "F"
    assert isinstance(core, MLACoreAttention)
    return "-" if core.window is None else "W"
