"""FP8 scopes of a run: which layers' dense products use FP8 operands, with which scales, and who recomputes them.

A scope is one entry of Transformer Engine's ``autocast`` around a module of one layer, or around a group of layers. Scopes do
not nest: an inner one would silently change recipe and reduction. A group that includes a layer of the BF16 zone, the first and
last layers, is BF16 as a whole. Evaluation is BF16. Inside a scope, the indexer and other modules that must not be FP8 run with
it switched off (:data:`HELD`). Embeddings, heads, MTP's layer, R layers and routers are in no scope; M's projections only with
``blanket``, MTP's with ``mtp``.

``delayed`` scaling keeps a history of maxima for each tensor and rolls all of them at the end of each scope: its length is the
number of the process's scopes times :attr:`FP8.history`, and so covers that many micro-batches. ``current`` and ``block`` keep
nothing between calls. Source: Transformer Engine 2.17 to 2.20, ``pytorch/quantization.py``.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.te_imports import ALIGNMENT

RECIPES = {
    "delayed": ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    "mxfp8": ("MXFP8BlockScaling", "is_mxfp8_available"),
}
"""Each recipe's class, and the function that says whether this machine can run it."""

HELD = re.compile(r"indexer|router|(^|\.)gate$|lora_|adapter|linear_(q|kv)_(down|up)_proj")
"""Names of modules that stay in BF16 inside of a scope; products with MLA's narrow latents take less time, by estimate, than
quantising what is wide, and have an op of their own."""

BLOCK = 128
"""Rows and values of a tensor that ``block`` gathers in FP8 over a sequence-parallel group are multiples of this."""

_PRODUCTS = {
    "attention": "attention output projections",
    "shared_experts": "shared experts",
    "blanket": "Mamba output projections",
    "mtp": "MTP projection",
}
"""Each option of dense products, and its name in receipts."""
_HOPPER = 9


@dataclass(frozen=True, kw_only=True)
class FP8:
    """FP8 settings of dense products; each may be set under ``fp8``. For routed experts see docs/fp8.md.

    Attributes:
        recipe: ``delayed``, ``current``, ``block`` or ``mxfp8`` (Blackwell only); None: no FP8 here.
        attention: whether the output projections of A layers run in FP8.
        shared_experts: whether those of the shared experts of E layers do.
        blanket: whether the output projections of M layers do, too. Receipts record it.
        mtp: whether MTP's projection of hidden states and the next token's embedding does.
        first, last: how many layers at each end stay in BF16, at least 1.
        history: micro-batches that the maxima of ``delayed`` are kept for.
    """

    recipe: str | None = None
    attention: bool = True
    shared_experts: bool = True
    blanket: bool = False
    mtp: bool = False
    first: int = 1
    last: int = 1
    history: int = 16

    @property
    def on(self) -> tuple[str, ...]:
        """The options of dense products that are on, by which a family of layers, or MTP, has a scope."""
        return tuple(name for name in _PRODUCTS if getattr(self, name))

    @property
    def label(self) -> str:
        """The name in receipts."""
        if self.recipe is None:
            return "none"
        return f"{'blanket ' * self.blanket}{self.recipe}: {', '.join(_PRODUCTS[name] for name in self.on)}"


_active: list[str] = []
_counts: Counter[str] = Counter()


def counts() -> dict[str, int]:
    """Count scopes entered in this process so far, those of groups left in BF16, and those during a CUDA graph's capture."""
    return {name: _counts[name] for name in ("entered", "bf16", "captured")}


def is_active() -> bool:
    """Return whether an FP8 scope has been entered and not left."""
    return bool(_active)


def check_machine(recipe: str) -> None:
    """Refuse a recipe that is unknown, that this Transformer Engine lacks, or that this GPU cannot run.

    Raises:
        ModelError: the recipe is unknown, or is not for this GPU.
        BackendError: Transformer Engine is not installed, or has no such recipe.
    """
    import torch

    if recipe not in RECIPES:
        raise ModelError(f"the FP8 recipe is {recipe!r}; expected {', '.join(RECIPES)}")
    kind, asks = RECIPES[recipe]
    if recipe == "mxfp8" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _HOPPER:
        raise ModelError(
            f"the FP8 recipe is mxfp8, and {torch.cuda.get_device_name()} is a Hopper, which has no products of blocks of 32 "
            "with scales of their own; use block, current or delayed"
        )
    te_imports.entry(kind)
    can, why = te_imports.entry(asks)(return_reason=True)
    if not can:
        raise ModelError(f"the FP8 recipe is {recipe}, which this machine cannot run: {why}; use BF16, or another GPU")


def check_run(fp8: FP8, config: Any, *, rows: int | None = None, fsdp2: bool = False) -> None:
    """Refuse settings that contradict the scopes, before anything is built.

    Args:
        fp8: the run's settings.
        config: Megatron's TransformerConfig.
        rows: of a micro-batch on this rank, where that is known.
        fsdp2: whether FSDP2 will shard the parameters.

    Raises:
        ModelError: one of Megatron's flags contradicts them, or a size does not fit.
    """
    import torch

    selective = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    full = config.recompute_granularity == "full"
    for conflict, what, remedy in (
        (not fp8.on, "no family of layers is named", "name attention or shared_experts"),
        (fp8.mtp and not config.mtp_num_layers, "mtp is on, and the model predicts one token", "leave mtp out"),
        (min(fp8.first, fp8.last) < 1, f"the BF16 zone is {fp8.first} and {fp8.last} layers", "keep 1 or more at each end"),
        (fp8.history < 1, f"the history is {fp8.history}", "keep 1 micro-batch or more"),
        (config.params_dtype != torch.bfloat16, f"parameters are {config.params_dtype}", "train in bf16"),
        (config.fp8, "--fp8-format wraps every layer in a scope of Megatron's", "leave it out"),
        (config.fp4, "--fp4-format wraps every layer in a scope of Megatron's", "leave it out"),
        (config.first_last_layers_bf16, "--first-last-layers-bf16 is about Megatron's scopes", "use fp8.first and fp8.last"),
        (config.tp_only_amax_red, "--tp-only-amax-red is about Megatron's scopes", "leave it out"),
        (config.transformer_impl != "transformer_engine" or te_imports.disabled(), "layers are not Transformer Engine's",
         "use --transformer-impl transformer_engine, and do not disable it"),
        (fp8.shared_experts and config.moe_shared_expert_overlap,
         "--moe-shared-expert-overlap runs the shared expert in parts, outside of its scope",
         "leave it out, or shared_experts"),
        (fp8.recipe == "delayed" and (full or bool(selective & {"moe", "shared_experts"})),
         "--recompute-granularity has Megatron repeat a scope whose scales have changed since",
         "use recompute: [a] of this package's file, which Transformer Engine carries out inside of the scope"),
        (fp8.recipe == "delayed" and fsdp2,
         "--use-torch-fsdp2 shards weights over ranks whose maxima are not reduced together", "use block or current"),
        (rows is not None and fp8.recipe == "block" and config.sequence_parallel and rows % BLOCK,
         f"a micro-batch has {rows} rows on a rank, which sequence parallelism would gather in BF16",
         f"expected a multiple of {BLOCK}, or use current"),
        (rows is not None and rows % ALIGNMENT, f"a micro-batch has {rows} rows on a rank", f"expected a multiple of "
         f"{ALIGNMENT}: change sequence length, micro-batch or tensor parallelism"),
    ):  # fmt: skip
        if conflict:
            raise ModelError(f"fp8: {{recipe: {fp8.recipe}}} is not possible: {what}; {remedy}")


class Scopes:
    """The FP8 scopes of a model's layers.

    Args:
        fp8: the run's settings; its recipe is not None.
        depth: layers of the whole model, of which the ends are the BF16 zone.
    """

    def __init__(self, fp8: FP8, depth: int) -> None:
        self.fp8, self.depth = fp8, depth

    def in_zone(self, number: int) -> bool:
        """Return whether layer ``number`` (from 1, over all pipeline stages) stays in BF16."""
        return number <= self.fp8.first or number > self.depth - self.fp8.last

    @functools.cached_property
    def recipe(self) -> Any:
        """Transformer Engine's recipe, made at the first entry, when all scopes are known."""
        kind = te_imports.entry(RECIPES[str(self.fp8.recipe)][0])
        return kind(amax_history_len=self.fp8.history * max(1, _counts["installed"])) if self.keeps_state else kind()

    @property
    def keeps_state(self) -> bool:
        """Whether scales depend on earlier calls, so that recompute has to restore them."""
        return self.fp8.recipe == "delayed"

    @contextlib.contextmanager
    def group(self, numbers: Iterable[int], *, amax_group: Any = None, training: bool = True) -> Iterator[bool]:
        """Enter a scope around layers ``numbers``; yields whether it is FP8: not with one in the BF16 zone, nor in evaluation.

        Args:
            numbers: of the layers, from 1 over all pipeline stages; none is MTP, behind them.
            amax_group: the ranks over which maxima are reduced (:func:`check_amax_group`).
            training: whether the layers are in training.

        Raises:
            ModelError: a scope is entered inside another, or delayed scaling is recomputed by other means than Transformer
                Engine's.
        """
        import torch

        numbers = tuple(numbers)
        name = f"layers {', '.join(map(str, numbers))}" if numbers else "MTP"
        if _active:
            raise ModelError(
                f"the FP8 scope of {name} was entered inside of that of {_active[-1]}; enter one scope, around the group",
                code="nested-scope",
            )
        if not training or any(map(self.in_zone, numbers)):
            _counts["bf16"] += 1
            yield False
            return
        if self.keeps_state and (not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1):
            raise ModelError(
                f"the FP8 scope of {name} was entered by a recompute, under delayed scaling, whose scales it would change; "
                "recompute is Transformer Engine's then (te_checkpoint inside of the scope), or take a recipe without history",
                code="recomputed-scope",
            )
        _active.append(name)
        try:
            _counts["entered"] += 1
            _counts["captured"] += torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            with te_imports.entry("autocast")(enabled=True, recipe=self.recipe, amax_reduction_group=amax_group):
                yield True
        finally:
            _active.pop()

    def install(self, module: Any, *number: int, calls: int = 1, name: str = "") -> tuple[str, ...]:
        """Have every call of ``module`` run in a scope; its held modules run in BF16 inside of it.

        Args:
            module: of a layer, or of MTP.
            number: of the layer; none is MTP.
            calls: of the module in a micro-batch.
            name: of the module, where it is a linear layer itself.

        Returns:
            Names of the linear layers in FP8; none in the zone, where nothing is changed.

        Raises:
            ModelError: it has no module of Transformer Engine, or a width is not a multiple of 16.
        """
        if any(map(self.in_zone, number)):
            return ()
        where = f"layer {number[0]}" if number else "MTP"
        kind = te_imports.entry("TransformerEngineBaseModule")
        linears = {
            name: layer
            for name, layer in module.named_modules(prefix=name)
            if isinstance(layer, kind) and any(weight.dim() == 2 for weight in layer.parameters(recurse=False))
        }
        inside = {name: layer for name, layer in linears.items() if not HELD.search(name)}
        if not inside:
            raise ModelError(f"{where}: {type(module).__name__} has no linear layer of Transformer Engine to run in FP8")
        _check_widths(where, inside)
        if self.fp8.recipe == "block":
            _check_gathers(where, inside)
        group = next((group for group in map(_tensor_parallel, inside.values()) if group is not None), None)
        check_amax_group(group, inside.values(), where)
        for name, layer in linears.items():
            if name in inside:
                # Megatron marks a step's first micro-batch only under its own FP8; without that, and without this, Transformer
                # Engine would reuse the first quantised copy of the weight forever.
                layer.disable_parameter_transpose_cache = True
            else:
                _bind(layer, lambda _: te_imports.entry("autocast")(enabled=False))
        _bind(module, lambda self_: self.group(number, amax_group=group, training=self_.training))
        _counts["installed"] += calls
        return tuple(inside)


def _check_widths(where: str, modules: dict[str, Any]) -> None:
    """Raise ModelError for a matrix with rows or columns, on this rank, that are not a multiple of 16."""
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 2 and any(width % ALIGNMENT for width in parameter.shape):
                raise ModelError(
                    f"{where}: {name} is {tuple(parameter.shape)} on a rank, and an FP8 product needs multiples of "
                    f"{ALIGNMENT}; change the width or the tensor parallelism, or leave the family out of fp8"
                )


def _check_gathers(where: str, modules: dict[str, Any]) -> None:
    """Raise ModelError for a tensor that ``block`` would gather over a sequence-parallel group in BF16, then quantise anew.

    These are the inputs of column-parallel layers and the output gradients of row-parallel ones (Transformer Engine 2.20,
    ``distributed.py``, ``_start_all_gather_fp8_blockwise``), of a width that is not a multiple of :data:`BLOCK`.
    """
    for name, module in modules.items():
        if getattr(module, "sequence_parallel", False):
            outputs, inputs = module.weight.shape
            if (width := inputs if module.parallel_mode == "column" else outputs) % BLOCK:
                raise ModelError(
                    f"{where}: {name} gathers {width} values a row, which the FP8 recipe block does in BF16 if that is "
                    f"not a multiple of {BLOCK}; use current, or leave the family out of fp8"
                )


def owners(module: Any) -> frozenset[int]:
    """Return the ranks that hold, by tensor parallelism, a shard of the module's weights, or a copy for their sequence part."""
    import torch

    if not torch.distributed.is_initialized():
        return frozenset((0,))
    ranks = {torch.distributed.get_rank()}
    group = _tensor_parallel(module)
    if group is not None:
        ranks.update(torch.distributed.get_process_group_ranks(group))
    return frozenset(ranks)


def _tensor_parallel(module: Any) -> Any:
    return getattr(module, "_tp_group", None) or getattr(module, "tp_group", None)


def check_amax_group(group: Any, modules: Iterable[Any], where: str) -> None:
    """Refuse a group for the maxima other than the ranks that own the weights of ``modules``.

    None is every rank to Transformer Engine (2.17 to 2.20, ``FP8GlobalStateManager.reduce_and_update_fp8_tensors``).

    Raises:
        ModelError: it is another; the message names both.
    """
    import torch

    expected: frozenset[int] = frozenset().union(*map(owners, modules))
    if group is None:
        reduced = frozenset(range(torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1))
    else:
        reduced = frozenset(torch.distributed.get_process_group_ranks(group))
    if reduced != expected:
        raise ModelError(
            f"{where}: maxima would be reduced over ranks {sorted(reduced)}, and the weights are owned by ranks "
            f"{sorted(expected)}; pass the group of the owners, or the scales are of other tensors"
        )


def _bind(module: Any, scope: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> None:
    """Run the module's current forward pass in ``scope`` of the module; a deep copy enters its own scope."""
    function = module.forward.__func__

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with scope(self):
            return function(self, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def scopes_of(fp8: FP8, config: Any, *, source: str = "", **run: Any) -> Scopes | None:
    """Return the scopes of a run, checked against machine and flags (``run``: as :func:`check_run`); None without FP8.

    Raises:
        ModelError, BackendError: as :func:`check_run` and :func:`check_machine`; ``source`` is named.
    """
    if fp8.recipe is None:
        if fp8 != FP8():
            raise ModelError(f"{source}: fp8 has no recipe, and {fp8} requests FP8; name one of {', '.join(RECIPES)}")
        return None
    try:
        check_run(fp8, config, **run)
        check_machine(fp8.recipe)
    except (ModelError, BackendError) as error:
        raise type(error)(f"{source}: {error}") from error
    return Scopes(fp8, config.num_layers)
