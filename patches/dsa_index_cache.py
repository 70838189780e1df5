"""dsa-index-cache: stock DSA shares top-k indices between layers with correct gradients, on a schedule of your choice.

Activate: ``megacpp_mcore.patches.apply(["dsa-index-cache"])`` before the model is built. The schedule is set by
    ``--dsa-indexer-topk-freq`` and ``--dsa-indexer-skip-topk-offset``, or, without these, by ``dsa_index_cache`` in the file
    named by ``MEGACPP_CONFIG``: ``{schedule: FSSFSS}``.
Scope: GPT models with ``--experimental-attention-variant dsa``, and DSA layers of HybridModel, which share as in stock, by
    layer number; without a schedule the model is stock's. The logged indexer loss becomes the mean over the layers that have
    one, for every model.
Provenance: megatron-core 0.19.2 ``core/transformer/experimental_attention_variant/dsa.py``; index cache arXiv 2603.12201.

Why a checkpointed function carries the indices: :mod:`megacpp_mcore.ops.indexer.cache`. Attributes of tensors would be lost,
as recompute passes a layer copies of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from inspect import BoundArguments
from typing import Any

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.pattern import FULL_INDEX, SHARED_INDEX, check_chunks, source_layers
from megacpp_mcore.ops.indexer.cache import IndexCache, Recomputed, Selection
from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, bound_replacement, edit, replacement

_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_CACHE = "_megacpp_index_cache"
"""Attribute of a DSAttention: the IndexCache of its sharing block, or None outside of one, where stock's holders are used."""
_HOLDERS = "_megacpp_index_holders"
"""Attribute of a DSAttention during its forward pass: the dicts of indices and lengths by layer that stock reads and writes."""
SAVED_LOSSES = "megacpp_saved_losses"
"""Key of the loss tracker: how many losses were added, as a one-element tensor, so that CUDA graphs can update it."""


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block whose layers are being built: the role of each layer, ``F`` or ``S``, and the cache they share.

    ``roles`` is empty where stock decides, by layer number, as the layers are built (HybridModel's); ``sources``: so far.
    """

    roles: str
    cache: IndexCache
    sources: dict[int, int] = dataclasses.field(default_factory=dict)


_BUILDING: ContextVar[_Block | None] = ContextVar("megacpp_dsa_block", default=None)


def _periodic(config: Any) -> bool:
    return (getattr(config, "dsa_indexer_topk_freq", None) or 1) > 1


def is_periodically_shared(config: Any, number: int) -> bool:
    """Return whether layer ``number`` reuses another layer's indices under upstream's own periodic schedule."""
    from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer

    return is_dsa_skip_topk_layer(number, config.dsa_indexer_skip_topk_offset or 0, config.dsa_indexer_topk_freq or 1)


def _periodic_roles(config: Any, layers: int) -> str:
    """Upstream's own schedule for layers 1 … ``layers``, one character each."""
    shared = (is_periodically_shared(config, number) for number in range(1, layers + 1))
    return "".join(SHARED_INDEX if skip else FULL_INDEX for skip in shared)


def _configured_schedule(config: Any) -> plugin_config.IndexSchedule | None:
    """Return the schedule of the configuration file, or None.

    Raises:
        ModelError: upstream's arguments set a schedule as well.
    """
    schedule = plugin_config.index_schedule_from_environment()
    if schedule is not None and _periodic(config):
        raise ModelError(
            f"{schedule.path} sets the index cache schedule {schedule.schedule!r}, and --dsa-indexer-topk-freq "
            f"{config.dsa_indexer_topk_freq} sets another; remove one of them"
        )
    return schedule


def _trunk_roles(config: Any) -> str | None:
    """``F`` or ``S`` for every layer of a DSA model's decoder; None without a schedule, and for other models."""
    if getattr(config, "experimental_attention_variant", None) != "dsa":
        return None
    schedule = _configured_schedule(config)
    if schedule is not None:
        return schedule.roles(config.num_layers)
    return _periodic_roles(config, config.num_layers) if _periodic(config) else None


def _refuse_split(config: Any, roles: str) -> None:
    """Raise ModelError, naming a schedule that works, if a model chunk would begin with a Shared layer."""
    from megacpp_mcore.arguments.chunks import model_chunks

    setting = "dsa_index_cache: {{schedule: {}}}"
    if _periodic(config):
        setting += f", instead of --dsa-indexer-topk-freq {config.dsa_indexer_topk_freq},"
    check_chunks(f"DSA schedule {roles!r}", tuple(roles), model_chunks(config), setting)


def _build_layers(describe: Callable[..., _Block | None]) -> Callable[[Function], Function]:
    """Make the replacement of a block's ``_build_layers``, or a stack's ``__init__``, which records what is being built."""

    @replacement
    def build(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _BUILDING.set(describe(self, *args, **kwargs))
        try:
            return original(self, *args, **kwargs)
        finally:
            _BUILDING.reset(token)

    return build


@edit(
    "megatron.core.models.hybrid.hybrid_block:HybridStack.__init__",
    "8f31e2dfaa3491fa9849cbf2825c9d42f089a49293ea832819c38290ca0db1e3",
    "911a0b5c3559e4915569bd8d4cae9159003a592633a2dc5eec1c92bfd2e47495",
    make=_build_layers,
)
def _hybrid_block(stack: Any, config: Any, *_: Any, **__: Any) -> _Block | None:
    """HybridModel's stacks, of the trunk or an MTP layer: which other layers there are does not matter."""
    return _Block("", IndexCache({})) if _periodic(config) else None


@edit(
    "megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
    "ecef5e2f6cc7d5b3fb4184b91da76e31718dbc76025949596f026dcf42a58c49",
    make=_build_layers,
)
def _trunk_block(block: Any, *_: Any, **__: Any) -> _Block | None:
    roles = _trunk_roles(block.config)
    if roles is None:
        return None
    _refuse_split(block.config, roles)
    if SHARED_INDEX in roles:
        # Layers without an indexer would leave holes in stacked checkpoint tensors (the field's spelling is upstream's).
        block.config.hetereogenous_dist_checkpoint = True
    return _Block(roles, IndexCache(source_layers(tuple(roles))))


@edit(
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock._build_layers",
    "139195b33e835bcae8a0130ed7e8bed6462d26c9cd28f05ce0b8286ccf7357cf",
    make=_build_layers,
)
def _mtp_block(block: Any, *_: Any, **__: Any) -> _Block | None:
    """MTP layers have their own numbering and their own cache; a schedule from the file covers only the trunk."""
    if block.mtp_layer_pattern is not None or _trunk_roles(block.config) is None:
        return None
    # A repeated layer is built once, so it has no other layer to share with.
    layers = 1 if block.config.mtp_use_repeated_layer else block.config.mtp_num_layers or 1
    roles = _periodic_roles(block.config, layers) if _periodic(block.config) else FULL_INDEX * layers
    return _Block(roles, IndexCache(source_layers(tuple(roles))))


@edit(
    "megatron.core.models.gpt.experimental_attention_variant_module_specs:_validate_dsa_index_share_pipeline_split",
    "6924e20aec7d8ad639ad61eaecd0e2ed6f1eb4b55f93ada20ca0b7ce2cfd70d4",
)
def _validate_split(original: Function, config: Any, local_layer_ids: Any) -> None:
    """Replace ``_validate_dsa_index_share_pipeline_split(config, local_layer_ids)``: the error names a usable one."""
    roles = _trunk_roles(config) if hasattr(config, "num_layers") else None  # more than stock reads
    if roles is not None:
        _refuse_split(config, roles)
    original(config, local_layer_ids)


@edit(
    f"{_DSA}:DSAttention.__init__",
    "c2427aa24ad258049e6a534a02babd7196adb91a43bea8b4a8d5f102e5b9f046",
    make=bound_replacement,
)
def _init(original: Function, bound: BoundArguments) -> None:
    """Replace ``DSAttention.__init__``: the schedule decides which layers have an indexer."""
    self = bound.arguments["self"]
    config, layer = bound.arguments["config"], bound.arguments["layer_number"]
    block = _BUILDING.get()
    if block is None or not block.roles:  # stock decides which layers share
        if (schedule := _configured_schedule(config)) is not None:
            raise ModelError(
                f"DSA layer {layer} is built outside of a GPT model's decoder and MTP blocks (HybridModel's, say), where "
                f"the schedule {schedule.schedule!r} of {schedule.path} is not followed; leave dsa_index_cache out, or "
                "share by --dsa-indexer-topk-freq",
                code="outside",
            )
        original(*bound.args, **bound.kwargs)
        if block is not None and self.skip_topk:
            block.sources[layer] = self.source_layer
            block.cache.assign(block.sources)
        setattr(self, _CACHE, block and block.cache)
        return
    shared = block.roles[layer - 1] == SHARED_INDEX
    if shared:
        from megatron.core.transformer.identity_op import IdentityOp

        without = dataclasses.replace(bound.arguments["submodules"], indexer=IdentityOp)  # draws no random numbers
        bound.arguments["submodules"] = without
    original(*bound.args, **bound.kwargs)
    if shared and self.indexer is not None:
        del self.indexer
        self.indexer = None
    sources = source_layers(tuple(block.roles))
    self.skip_topk = shared
    self.source_layer = sources.get(layer, layer)
    self.index_share = shared or layer in sources.values()
    setattr(self, _CACHE, block.cache)


@edit(f"{_DSA}:DSAttention.forward", "c2802527fc6d82eed5889b083c4981d28e88a6a624d5fca0b6562820a0afc393")
def _forward(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``DSAttention.forward``: reads the cached indices before it, or publishes them after it."""
    if self.index_share and not hasattr(self, _CACHE):
        raise ModelError(
            f"DSA layer {self.layer_number} was built before the patch dsa-index-cache was applied; apply it first",
            code="built-before",
        )
    cache: IndexCache | None = getattr(self, _CACHE, None)
    if not self.index_share or cache is None:
        return original(self, *args, **kwargs)
    index: dict[int, Any] = {}
    length: dict[int, Any] = {}
    if self.skip_topk:
        selection = cache.read(self.layer_number)
        index[self.source_layer], length[self.source_layer] = selection.index, selection.length
    setattr(self, _HOLDERS, (index, length))
    try:
        output = original(self, *args, **kwargs)
    finally:
        delattr(self, _HOLDERS)
    if not self.skip_topk:
        cache.publish(self.layer_number, Selection(index[self.layer_number], length.get(self.layer_number)))
    return output


def _holder(which: int) -> Callable[[Function], Function]:
    """Make the replacement of stock's holder of indices (0) or lengths (1): the current forward pass's, or stock's."""

    @replacement
    def holder(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        holders = getattr(self, _HOLDERS, None)
        return original(self, *args, **kwargs) if holders is None else holders[which]

    return holder


@edit(
    "megatron.core.tensor_parallel.random:CheckpointFunction.forward",
    "4bcf3f270c667ff12a3184b0d75be22a6038f2a357f9776d0f24b4fd760c65e9",
)
def _checkpoint_forward(original: Function, ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
    return original(ctx, Recomputed(run_function), *args)


@edit(
    "megatron.core.extensions.transformer_engine:te_checkpoint",
    "1de08e8bca5afd2dffd695355945ac16a2c33d8429f1dfb5f89975d3653976fd",
)
def _te_checkpoint(original: Function, forward_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``te_checkpoint(forward_func, …)``, which FP8 and FP4 recipes use instead of ``CheckpointFunction``."""
    from torch.nn import Module

    # Transformer Engine inspects a module for its own submodules; the modules Megatron passes contain no attention.
    function = forward_func if isinstance(forward_func, Module) else Recomputed(forward_func)
    return original(function, *args, **kwargs)


@edit(
    f"{_DSA}:DSAIndexerLossLoggingHelper.save_loss_to_tracker",
    "5d6f3323d6224f1c86d5c18f2912422fcdf1c6be18de1a73ed655761f096aa76",
    make=bound_replacement,
)
def _save_loss(original: Function, bound: BoundArguments) -> None:
    """Replace ``save_loss_to_tracker``: counts the losses."""
    original(*bound.args, **bound.kwargs)
    if bound.arguments["layer_number"] is not None:
        _saved_losses().add_(1)


def _saved_losses() -> Any:
    """Compute the count of losses in the tracker, created on first use; the tracker must already hold values."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    tracker = DSAIndexerLossLoggingHelper.tracker
    if SAVED_LOSSES not in tracker:
        tracker[SAVED_LOSSES] = tracker["values"].new_zeros(1)
    return tracker[SAVED_LOSSES]


@edit(
    f"{_DSA}:DSAIndexerLossLoggingHelper.track_indexer_metrics",
    "8948072aa98a7f347d17226a6ed7bad3253241dbe69e2eb12f80bf357bd0433d",
    make=bound_replacement,
)
def _track_metrics(original: Function, bound: BoundArguments) -> None:
    """Replace ``track_indexer_metrics``: the mean over recorded losses, where upstream divides by all layers.

    The count of losses already includes upstream's ``loss_scale``, one over the number of micro-batches.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    values = DSAIndexerLossLoggingHelper.tracker.get("values")
    if values is None:
        original(*bound.args, **bound.kwargs)
        return
    saved = _saved_losses()
    torch.distributed.all_reduce(saved, group=parallel_state.get_pipeline_model_parallel_group())
    bound.arguments["loss_scale"] = values.numel() / saved.clamp(min=1).squeeze(0)
    original(*bound.args, **bound.kwargs)
    saved.zero_()


PATCH = Patch(
    name="dsa-index-cache",
    fixes=(
        "recomputed DSA layers that share indices take another micro-batch's (without a mask) or fail (with one); their "
        "distributed checkpoints cannot be saved; schedules are periodic only; the logged indexer loss is averaged over layers "
        "without one"
    ),
    source="megatron-core 0.19.2, megatron/core/transformer/experimental_attention_variant/dsa.py, index_share",
    edits=(
        _init,
        _forward,
        Edit(
            f"{_DSA}:DSAttention._get_index_share_topk_holder",
            ("6e2683cd4b6d7fe259c7d41fd5b0ef7eadc507f8b2d1bebf8b790705d2a74c85",),
            _holder(0),
        ),
        Edit(
            f"{_DSA}:DSAttention._get_index_share_topk_length_holder",
            ("45ee7d12f65f1da328d7773e7749910111552efc69eee5a1f841e5304495e6c0",),
            _holder(1),
        ),
        _save_loss,
        _track_metrics,
        _trunk_block,
        _hybrid_block,
        _mtp_block,
        _validate_split,
        _checkpoint_forward,
        _te_checkpoint,
    ),
    seam=(
        "the two holders are all that stock's forward knows of sharing; a block's _build_layers, or a hybrid stack's __init__, "
        "is where its layers, and no others, are made; the function passed to a checkpoint is the only object that belongs to "
        "one micro-batch and sees both runs"
    ),
    leaves_alone=(
        "what the indexer computes and its loss; models without a schedule; which layers of HybridModel share, by stock's "
        "arguments (the schedule of a file is refused there); the logged loss per layer number, in which MTP layers count with "
        "the trunk's layers of their number"
    ),
    cost="8 × top-k bytes a token for each Full layer and micro-batch in flight, while layers are recomputed",
    gain=(
        "under recompute without a mask, two micro-batches in flight: gradients within 1e-6 of the right ones, stock's are off "
        "by more than 1e-2 (fp32, CPU)"
    ),
    retire_when="upstream keys shared indices by layer and micro-batch, takes a schedule, and averages over Full layers",
    upstream=(6793,),
)
