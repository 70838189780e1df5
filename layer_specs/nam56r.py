"""``--spec megacpp_mcore nam56r``, or another preset: assembles the layers of a pipeline or virtual stage of an A/M/E/R model.

Megatron's GPTModel calls the function below once per model chunk and gets that chunk's layer specs.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import log_single_rank
from megatron.training import global_vars, print_rank_0

from megacpp_mcore import cpu, patches, policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering
from megacpp_mcore.arguments.chunks import chunk_layers, model_chunks
from megacpp_mcore.arguments.read import RUN, layout_of, model_of, read
from megacpp_mcore.backends import Dispatcher, vendor_switches
from megacpp_mcore.checkpoints import folder as checkpoint_folder
from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.attention import full_attention, sparse_attention
from megacpp_mcore.layer_specs.documents import check_run
from megacpp_mcore.layer_specs.experts import choose_experts, expert_layer_spec
from megacpp_mcore.layer_specs.graphs import check_graphs, graph_plan
from megacpp_mcore.layer_specs.initial import set_start
from megacpp_mcore.layer_specs.layer_plan import layer_plan
from megacpp_mcore.layer_specs.mamba import Mamba3Mixer
from megacpp_mcore.layer_specs.mtp import mtp_block
from megacpp_mcore.layer_specs.norm import residual_norm
from megacpp_mcore.layer_specs.parts import Parts, compute_device, implementation, mixer_layer_spec, parts_for
from megacpp_mcore.layer_specs.recurrent import M2RNNMixer
from megacpp_mcore.model import DEFAULT, Model
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.families import EXPERTS
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.ops.indexer.cache import IndexCache
from megacpp_mcore.patches.dsa_index_cache import SAVED_LOSSES
from megacpp_mcore.policy import ranks
from megacpp_mcore.util import te_imports

logger = logging.getLogger(__name__)

LOSS_PATCH = "linear-cross-entropy"
"""Patch that saves time and memory on a GPU; applied there unless ``speed_defaults.linear_cross_entropy`` is false."""

ADAM_PATCH = "adam-in-one-pass"
"""Patch that saves time on a GPU; applied where ``speed_defaults.adam_in_one_pass`` is true."""


@dataclass
class HybridBlockSubmodules(TransformerBlockSubmodules):
    """TransformerBlockSubmodules with the MTP block's spec; None on chunks without it."""

    mtp: MultiTokenPredictionBlockSubmodules | None = None


def nam56r(config: Any, vp_stage: int | None = None, preset: str = DEFAULT) -> HybridBlockSubmodules:
    """Return the layer specs of one model chunk.

    Args:
        config: Megatron's ``GPTModelConfig`` (stock scripts) or a provider that is itself the TransformerConfig (Bridge).
        vp_stage: virtual pipeline stage, None without virtual stages.
        preset: the model, unless the file of ``MEGACPP_CONFIG`` or the provider names it.

    Raises:
        ArgumentMismatchError: the run's arguments contradict the model; nothing has been allocated.
        ConfigFileError: the file named by ``MEGACPP_CONFIG`` is invalid.
        ModelError: the layout cannot hold the model.
        LaunchError: the ranks of the run differ (:func:`megacpp_mcore.policy.ranks.compare`).
    """
    transformer = getattr(config, "transformer", config)
    sources = (transformer, config)
    settings = plugin_config.from_environment()
    if not vp_stage:  # once: between chunks a stage may wait for a later chunk of another stage, as for tied embeddings
        ranks.compare(settings)
    configure_engine(settings)
    model = model_of(sources, settings, preset)
    check_layout(model, transformer, model_chunks(transformer), settings)
    start(model, transformer, settings, f", layers {model.layers}")
    return block_submodules(model, transformer, chunk_layers(transformer, vp_stage), vp_stage, settings)


def start(
    model: Model, config: TransformerConfig, settings: plugin_config.PluginConfig | None, built: str, slots: str = ""
) -> None:
    """Do the setup before the layers of either model class, and store the run in :data:`~megacpp_mcore.arguments.read.RUN`.

    ``built`` and ``slots`` begin and end the log line: what the class is built from.
    """
    apply_patches(settings)
    setattr(config, RUN, announce_policy(model, config, settings))
    claim_save_folder(settings)
    prepare(model, config, settings)
    log_single_rank(
        logger,
        logging.INFO,
        f"megacpp-mcore: building {model.name}{built}, DSA schedule {model.dsa.schedule}, indexers distilled from "
        f"{model.dsa.distill} layers, {model.dsa.warmup_steps} steps of dense indexer warm-up{slots}",
    )


def dispatcher_of(settings: plugin_config.PluginConfig | None) -> Dispatcher:
    """Return a dispatcher for the backends that the run's configuration file requests."""
    return Dispatcher(None if settings is None else settings.backends)


def block_submodules(
    model: Model,
    config: TransformerConfig,
    layers: range,
    vp_stage: int | None,
    settings: plugin_config.PluginConfig | None,
) -> HybridBlockSubmodules:
    """Return the specs of the layers numbered ``layers`` (1-based), the final norm, and MTP where it belongs."""
    parts, dispatcher = parts_for(config), dispatcher_of(settings)
    # Also if this chunk has no E layer: its rank may be the one that writes the checkpoint's metadata.
    if EXPERTS in model.families:
        setattr(config, checkpoint_layout.EXPERTS_KEY, choose_experts(config, dispatcher).observed)
    sources = grammar.source_layers(model.roles)
    index_cache = IndexCache({shared: full for shared, full in sources.items() if shared in layers})
    plan, graphs = layer_plan(settings, config), graph_plan(model, config, dispatcher, settings)
    for line in graphs.describe() if not vp_stage else ():  # of all layers, once
        print_rank_0(f"megacpp-mcore: {line}")
    last = set(layers[-1:]) - {len(model.layers)}  # the final norm's input is not sent
    specs = []
    for number in layers:
        spec = layer_spec(model, config, number, parts, dispatcher, index_cache)
        specs.append(graphs.spec(plan.spec(spec, model.layers[number - 1]), number, sends=number in last))
    has_mtp = get_mtp_num_layers_to_build(config, vp_stage=vp_stage) > 0
    mtp = mtp_submodules(model, config, dispatcher, settings) if has_mtp else None
    return HybridBlockSubmodules(layer_specs=specs, layer_norm=parts.norm, mtp=mtp)


def mtp_submodules(
    model: Model, config: TransformerConfig, dispatcher: Dispatcher, settings: plugin_config.PluginConfig | None
) -> MultiTokenPredictionBlockSubmodules:
    """Return the MTP block's spec, recomputed or in CUDA graphs as the run requests."""
    block = layer_plan(settings, config).mtp(mtp_block(parts_for(config), dispatcher, model.window(model.mtp.attention)))
    return graph_plan(model, config, dispatcher, settings).mtp(block)


@dataclass(frozen=True)
class Asked:
    """Inputs of a family's spec: the run's model, configuration, parts and backends, and the layer's role."""

    model: Model
    config: TransformerConfig
    parts: Parts
    dispatcher: Dispatcher
    index_cache: IndexCache
    role: str | None

    def mixer(self, spec: ModuleSpec) -> ModuleSpec:
        """Return the layer whose attention slot holds ``spec``."""
        return mixer_layer_spec(residual_norm(self.parts, self.dispatcher), spec)

    def recurrence(self, mixer: type) -> ModuleSpec:
        """Return the layer of a recurrent ``mixer``."""
        params = {"model": self.model, "row_linear": self.parts.row_linear, "dispatcher": self.dispatcher}
        return self.mixer(ModuleSpec(module=mixer, params=params))


def _attention(layer: Asked) -> ModuleSpec:
    if layer.role not in grammar.SPARSE:
        return layer.mixer(full_attention(layer.parts, layer.dispatcher, layer.model.window(layer.role)))
    full = layer.role == grammar.FULL_INDEX
    return layer.mixer(sparse_attention(layer.parts, layer.dispatcher, layer.index_cache, layer.model.dsa, full=full))


SPECS: dict[str, Callable[[Asked], ModuleSpec]] = {
    "A": _attention,
    "E": lambda layer: expert_layer_spec(layer.config, layer.parts, layer.dispatcher),
    "M": lambda layer: layer.recurrence(Mamba3Mixer),
    "R": lambda layer: layer.recurrence(M2RNNMixer),
}
"""The spec of a layer of each of :data:`megacpp_mcore.model.families.FAMILIES`."""


def layer_spec(
    model: Model,
    config: TransformerConfig,
    number: int,
    parts: Parts,
    dispatcher: Dispatcher,
    index_cache: IndexCache,
) -> ModuleSpec:
    """Return the spec of trunk layer ``number`` (1-based)."""
    role = model.roles[number - 1]
    return SPECS[model.layers[number - 1]](Asked(model, config, parts, dispatcher, index_cache, role))


def configure_engine(settings: plugin_config.PluginConfig | None) -> None:
    """Set which Transformer Engine features and vendor kernels this process may use, from the run's configuration file."""
    if settings is None:
        te_imports.configure(None)
        vendor_switches.configure(None)
    else:
        te_imports.configure(settings.transformer_engine, str(settings.path))
        vendor_switches.configure(settings.vendors, str(settings.path))


def announce_policy(model: Model, config: TransformerConfig, settings: plugin_config.PluginConfig | None) -> Run:
    """Print a stock script's launch policy, once and on rank 0, unless our launcher has; refuse what does not fit this GPU.

    Returns:
        The run; without a stock script, and so without a command line, only its model, layout and settings.

    Raises:
        LaunchError: as :func:`megacpp_mcore.policy.check_memory`.
    """
    if global_vars._GLOBAL_ARGS is None:  # no stock script runs; get_args() would assert
        return Run(model, layout_of(config), model_class=HYBRID if config.is_hybrid_model else GPT, settings=settings)
    lowering.check_unused(sys.argv[1:])
    if config.is_hybrid_model:
        lowering.check_overwritten(model, sys.argv[1:])
    device, processes = "cpu" if cpu.is_active() else "cuda", torch.distributed.get_world_size()
    run = read(sys.argv[1:], device=device, processes=processes, model=model, settings=settings)
    # The layout may come from a file or a checkpoint; how it is executed is still up to the arguments.
    run = dataclasses.replace(run, layout=layout_of(config)).carried_out(dataclasses.asdict(run.execution))
    policy.check_memory(run)
    policy.announce(
        run,
        environment=os.environ,
        say=lambda line: print_rank_0(f"megacpp-mcore: {line}"),
        tf32_products=policy.tf32_products(),
    )
    return run


def claim_save_folder(settings: plugin_config.PluginConfig | None) -> None:
    """Refuse a stock script's run whose ``--save`` folder another run writes to, or has checkpoints that it would overwrite.

    Raises:
        CheckpointError: as :func:`megacpp_mcore.checkpoints.folder.claim`.
    """
    checkpoint_folder.load_newest_whole = settings is not None and settings.checkpoints.load_newest_whole
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs
    if arguments is not None and arguments.save and not arguments.skip_train:
        checkpoint_folder.claim(
            arguments.save, arguments.load, arguments.ckpt_step, finetune=arguments.finetune,
            timeout_minutes=arguments.distributed_timeout_minutes,
        )  # fmt: skip


def apply_patches(settings: plugin_config.PluginConfig | None) -> None:
    """Apply the patches that the model requires, and on a GPU :data:`LOSS_PATCH` and :data:`ADAM_PATCH` as requested."""
    speed = settings.speed_defaults if settings is not None else plugin_config.SpeedDefaults()
    on_gpu = compute_device() == "cuda"
    optional = ((speed.linear_cross_entropy, LOSS_PATCH), (speed.adam_in_one_pass, ADAM_PATCH))
    patches.apply((*patches.OF_NAM56R, *(name for enabled, name in optional if enabled and on_gpu)))


def prepare(model: Model, config: TransformerConfig, settings: plugin_config.PluginConfig | None) -> None:
    """Set the fields of Megatron's configuration that a hybrid model needs and no flag sets.

    The backward pass runs in the thread that calls it: launching from PyTorch's own GPU thread costs more CPU time.
    """
    torch.autograd.set_multithreading_enabled(False)
    set_start(model, config)
    # Heterogeneous layers do not share one stacked checkpoint tensor (the field's spelling is upstream's).
    config.hetereogenous_dist_checkpoint = True
    # Read by the patch checkpoint-layout: checkpoints of this model record the layout number.
    setattr(config, checkpoint_layout.KEY, checkpoint_layout.LAYOUT)
    setattr(config, checkpoint_layout.MODEL_KEY, checkpoint_layout.recorded(model))
    full = {number for number, role in enumerate(model.roles, 1) if role == grammar.FULL_INDEX}
    setattr(config, checkpoint_layout.FULL_KEY, full)
    # Read by the patch mtp-shared-block, which scales each depth's gradient.
    config.mtp_loss_decay = model.mtp.loss_decay
    if model.mla.yarn:  # no flag sets these
        for name in checkpoint_layout.YARN:
            setattr(config, name, getattr(model.mla.yarn, name))
    # Read by the code that packs documents and by the layers (megacpp_mcore.layer_specs.documents).
    config.max_documents = settings.max_documents if settings is not None else None
    if grammar.FULL_INDEX in model.roles:
        # Without this the schedules leave the indexer's loss unscaled, num_microbatches times too large.
        config.experimental_attention_variant_loss_scale_func = DSAIndexerLossAutoScaler.set_loss_scale
        # Ranks that hold tracker values all-reduce them over the pipeline: a stage without a Full layer has to participate.
        tracker = DSAIndexerLossLoggingHelper.tracker
        if "values" not in tracker or tracker["values"].numel() != config.num_layers:  # left by a model built earlier
            tracker["values"] = torch.zeros(config.num_layers, device=torch.cuda.current_device())
            tracker.pop(SAVED_LOSSES, None)  # count of the losses in the old values


def check_layout(
    model: Model,
    config: TransformerConfig,
    chunks: tuple[range, ...],
    settings: plugin_config.PluginConfig | None = None,
) -> None:
    """Refuse a run whose parallel layout does not fit ``model``; ``chunks`` are the stages as Megatron actually splits them.

    Raises:
        ModelError: the layout does not fit, or the run requests a feature that the model's layers lack.
    """
    layout = layout_of(config)
    for requested, what in (
        (config.fp8, "--fp8-format, which wraps every layer in FP8,"),
        (config.fp4, "--fp4-format, which wraps every layer in FP4,"),
        (config.delay_wgrad_compute, "--delay-wgrad-compute"),
        (
            config.overlap_moe_expert_parallel_comm,
            "--overlap-moe-expert-parallel-comm, whose schedule needs stock's layers,",
        ),
        (config.expert_tensor_parallel_size not in (None, 1), "--expert-tensor-parallel-size above 1"),
        (
            config.context_parallel_size > 1 and hasattr(config, "megacpp_preset"),
            "context_parallel_size above 1 under Megatron-Bridge",
        ),
        # Megatron 0.20's, and changes of the model.
        (getattr(config, "mtp_hsm", False), "--mtp-hsm"),
        (getattr(config, "enable_mhc_connections", False), "--enable-mhc-connections"),
    ):
        if requested:
            raise ModelError(f"{model.name}: {what} is not supported yet; leave it out")
    model.check_divisible(layout)
    if implementation(config) == "local":  # its latent projections are split over TP; Transformer Engine's are not
        for what, width in (
            ("q_lora_rank", model.mla.q_lora_rank),
            ("kv_lora_rank + qk_pos_emb_head_dim", model.mla.kv_lora_rank + model.mla.qk_pos_emb_head_dim),
        ):
            if width % layout.tensor:
                raise ModelError(
                    f"{model.name}: {what} ({width}) is not a multiple of tensor parallelism ({layout.tensor}), which "
                    "--transformer-impl local needs"
                )
    if grammar.parse(model.pattern).staged and chunks != model.chunks(layout):
        raise ModelError(
            f"{model.name}: the pattern {model.pattern!r} marks other stages than the run's "
            f"{', '.join(f'{chunk.start}–{chunk.stop - 1}' for chunk in chunks)}; pass --pipeline-model-parallel-layout "
            f"{lowering.pipeline_layout(grammar.parse(model.pattern).stages, model.mtp.depth)!r}"
        )
    grammar.check_chunks(model.name, model.roles, chunks)
    check_graphs(model, config, settings)
    check_run(config)
