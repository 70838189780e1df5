"""``--spec megacpp_mcore nam56r``, or another preset: an A/M/E/R model on HybridModel, for ``pretrain_hybrid.py``.

For ``pretrain_gpt.py`` the same name builds a GPTModel (:class:`Spec`). The layers are those of GPTModel
(:mod:`megacpp_mcore.layer_specs.nam56r`), in the slots assigned by :mod:`megacpp_mcore.model.hybrid`, and every parameter has
the same name and place as there. So checkpoints of either class, optimizer state included, load in the other unconverted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.hybrid import hybrid_layer_allocation
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import global_vars

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments.read import RUN, model_of
from megacpp_mcore.checkpoints import layout as checkpoint_layout
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs import nam56r as gpt
from megacpp_mcore.layer_specs.mtp import RepeatedLayer
from megacpp_mcore.layer_specs.parts import parts_for
from megacpp_mcore.model import DEFAULT, Model, hybrid
from megacpp_mcore.model.training import HYBRID
from megacpp_mcore.policy import ranks


class NumberedLayer:
    """Slot module that selects a layer's spec by its number: Megatron has one spec per slot, for Full and Shared layers alike.

    Every layer has the stack's configuration, as in GPTModel: what is set on it later reaches all layers. Megatron would give
    each a copy (NVIDIA/Megatron-LM#6313). Calling this class returns the module built from a spec; it is never instantiated.
    """

    def __new__(
        cls, *, specs: Mapping[int, ModuleSpec], of_stack: TransformerConfig, layer_number: int, **arguments: Any
    ) -> Any:
        """Build ``specs[layer_number]``; HybridStack's layer numbers already count over all pipeline stages."""
        arguments |= {"config": of_stack, "add_layer_offset": False}
        return build_module(specs[layer_number], layer_number=layer_number, **arguments)


class NAM56RStack(HybridStack):
    """Stock HybridStack that looks up the run's model, fills every slot with our specs, and can have a final norm without TE.

    Stock builds Transformer Engine's final norm whatever ``transformer_impl`` is; that is switched off, and this class adds
    the norm of GPTModel, under GPTModel's name.

    Args:
        config: Megatron's TransformerConfig (stock scripts), or a provider that is one and has the model's fields (Bridge).
        submodules: from :data:`nam56r_hybrid`; ignored, since the specs are built for the layers of this chunk.
        layer_type_list: the symbols of this chunk's layers; or
        layer_config_list: a copy of ``config`` for each layer, with a class per symbol. The copies predate what is set on
            ``config`` here, and are not used.
        pp_layer_offset: how many layers come before it.
        preset: the model, unless the file of ``MEGACPP_CONFIG`` or the provider names it.

    Raises:
        ArgumentMismatchError, ConfigFileError, ModelError: as GPTModel's callable; no layer has been built.
    """

    has_keys_of_gpt_model = True  # read by the patch checkpoint-hosts

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        layer_type_list: Sequence[str] | None = None,
        pp_layer_offset: int = 0,
        post_layer_norm: bool = True,
        post_process: bool = True,
        preset: str = DEFAULT,
        layer_config_list: Sequence[TransformerConfig] = (),
        **arguments: Any,
    ) -> None:
        symbols = layer_type_list or [_symbol(layer_config) for layer_config in layer_config_list]
        layers = range(pp_layer_offset + 1, pp_layer_offset + len(symbols) + 1)
        super().__init__(
            config,
            _slots(config, layers, "".join(symbols), preset),
            layer_type_list=list(symbols),
            pp_layer_offset=pp_layer_offset,
            post_layer_norm=False,
            post_process=post_process,
            **arguments,
        )
        self.post_layer_norm = post_layer_norm
        if post_process and post_layer_norm:
            self.final_layernorm = parts_for(config).norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    @property
    def final_norm(self) -> Any:
        """The final norm under the name stock's ``forward`` uses; the module itself is named as in GPTModel."""
        return self.final_layernorm

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """As the stock method, after marking the checkpoint's layout (save) or checking it (load)."""
        checkpoint_layout.mark_or_check(metadata, self.config)
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)


class SharedMTPLayer(RepeatedLayer):
    """The MTP layer of GPTModel, instead of the stack of stock layers that HybridModel builds from the pattern.

    Raises:
        ModelError: the MTP pattern is not :data:`megacpp_mcore.model.hybrid.MTP_BLOCK`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mtp_layer_pattern: str | None = None,
        hybrid_submodules: HybridStackSubmodules | None = None,
        **arguments: Any,
    ) -> None:
        if mtp_layer_pattern != hybrid.MTP_BLOCK:
            raise ModelError(f"the MTP pattern is {mtp_layer_pattern!r}; NAM56R's is {hybrid.MTP_BLOCK!r}, write that")
        run = getattr(config, RUN)  # HybridModel builds its decoder first
        (spec,) = gpt.mtp_submodules(run.model, config, gpt.dispatcher_of(run.settings), run.settings).layer_specs
        super().__init__(config, spec.submodules, **arguments, **(spec.params or {}))


class Spec:
    """The object that ``--spec megacpp_mcore PRESET`` names, for either model class.

    HybridModel builds its stack from it, as from a ModuleSpec. It is not a ModuleSpec, as GPTModel's builder would not call it.
    """

    module = NAM56RStack
    submodules = HybridStackSubmodules(
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(module=SharedMTPLayer)]),
        )
    )

    def __init__(self, preset: str) -> None:
        self.params = {"preset": preset}

    def __call__(self, config: Any, vp_stage: int | None = None) -> gpt.HybridBlockSubmodules:
        """Return the layer specs of one chunk of a GPTModel (:func:`megacpp_mcore.layer_specs.nam56r.nam56r`)."""
        return gpt.nam56r(config, vp_stage, **self.params)


nam56r_hybrid = Spec(DEFAULT)
"""HybridModel's stack spec of :data:`~megacpp_mcore.model.DEFAULT`, or of the model of ``MEGACPP_CONFIG``."""


def _described(config: TransformerConfig) -> tuple[tuple[Any, ...], str | None]:
    """Return the run's configuration objects and hybrid pattern: a provider's, or Megatron's arguments under a script."""
    arguments = global_vars._GLOBAL_ARGS  # None where no stock script runs; get_args() would assert
    if hasattr(config, "hybrid_layer_pattern") or arguments is None:
        return (config,), getattr(config, "hybrid_layer_pattern", None)
    from megatron.training.argument_utils import hybrid_config_from_args

    return (config, hybrid_config_from_args(arguments, config)), arguments.hybrid_layer_pattern


def _symbol(config: TransformerConfig) -> str:
    """Return the symbol of the layer that Megatron made a configuration for; raise ModelError if there is none."""
    classes: dict[str, type] = hybrid_layer_allocation.LAYER_SYMBOL_TO_CONFIG_CLASS
    for symbol, its_class in classes.items():
        if isinstance(config, its_class):
            return symbol
    raise ModelError(
        f"HybridModel gives a layer the configuration {type(config).__name__}, which belongs to no pattern symbol; expected "
        f"one of {', '.join(its_class.__name__ for its_class in classes.values())}"
    )


def _slots(config: TransformerConfig, layers: range, symbols: str, preset: str) -> HybridStackSubmodules:
    """Run all checks, then return the spec of each slot for the model chunk of layers ``layers`` (1-based)."""
    settings = plugin_config.from_environment()
    gpt.configure_engine(settings)
    sources, text = _described(config)
    model = model_of(sources, settings, preset, HYBRID)
    chunks = _chunks(model, config, text)
    if layers in chunks[: config.pipeline_model_parallel_size]:  # once, as in GPTModel
        ranks.compare(settings)
    gpt.check_layout(model, config, chunks, settings)
    expected = hybrid.plan(model).symbols[layers.start - 1 : layers.stop - 1]
    if layers not in chunks or symbols != expected:  # NumberedLayer selects by number, not by symbol
        raise ModelError(
            f"{model.name}: HybridModel would build {symbols!r} as layers {layers.start}–{layers.stop - 1}, which are "
            f"{expected!r} of the stages {', '.join(f'{chunk.start}–{chunk.stop - 1}' for chunk in chunks)}; give it the "
            "run's own --hybrid-layer-pattern, and neither first nor last stages of their own"
        )
    slots = "\n  ".join(["", *hybrid.plan(model).describe()])
    gpt.start(model, config, settings, f" on HybridModel, pattern {text}", slots)
    virtual = chunks.index(layers) // config.pipeline_model_parallel_size
    vp_stage = None if config.virtual_pipeline_model_parallel_size is None else virtual
    block = gpt.block_submodules(model, config, layers, vp_stage, settings)
    # Each slot is called only for layers of its own symbol, so all slots can share the specs of every layer.
    specs = dict(zip(layers, block.layer_specs or (), strict=True))
    slot = ModuleSpec(module=NumberedLayer, params={"specs": specs, "of_stack": config})
    return HybridStackSubmodules(**{slot_.attribute: slot for slot_ in hybrid.slots() if slot_.attribute is not None})


def _chunks(model: Model, config: TransformerConfig, text: str | None) -> tuple[range, ...]:
    """Return the layer numbers of every model chunk, from the stages marked in the run's pattern.

    Raises:
        ModelError: the pattern leaves the split into stages to Megatron, or splits differently from the model's own pattern.
    """
    chunks = hybrid.chunks(text or "")
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if len(chunks) != stages:
        raise ModelError(
            f"{model.name}: the hybrid pattern {text!r} marks {len(chunks)} stages, but the run has {stages} model chunks; "
            "mark the stages with '|'"
        )
    own = hybrid.plan(model).text
    if "|" in own and text != own:
        raise ModelError(
            f"{model.name}: the pattern {model.pattern!r} marks other stages than the run's {text!r}; pass "
            f"--hybrid-layer-pattern '{own}'"
        )
    return chunks
