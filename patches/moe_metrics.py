"""moe-metrics: logged MoE losses are means over the layers that have experts, whatever multi-token prediction is.

Activate: applied by the spec; or ``megacpp_mcore.patches.apply(["moe-metrics"])``.
Scope: Megatron's loop. Other loops, which count for themselves, are left as they are.

The loop sums each loss over the layers and divides by a count of its own. In 0.19 that includes every depth of multi-token
prediction, with experts or without, and of a hybrid pattern those experts twice. The count also is the size of the tensor of a
pipeline stage without experts, and is not that of the others. Since #6748 upstream counts the layers. Such a stage has the sum
over the pipeline, but only routers say over which ranks to reduce: if it is the last, which prints, the share of one rank of
tensor or context parallelism was logged.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import BoundArguments
from typing import Any

from megacpp_mcore.arguments import lowering
from megacpp_mcore.patches.machinery.record import Function, Patch, bound_replacement, edit

_TRACKER = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker"

_REDUCED: Mapping[str, Mapping[str, str | bool]] = {
    "load_balancing_loss": {"reduce_group": "tp_cp"},
    "seq_load_balancing_loss": {"reduce_group": "tp_cp"},
    "global_load_balancing_loss": {"reduce_group": "tp_dp_cp", "needs_dp_avg": False},
    "z_loss": {"avg_group": "tp_dp_cp"},
}
"""How stock's ``TopKRouter`` has each loss reduced: the fields of ``MetricEntry``, groups by their names in a collection."""


@edit(
    f"{_TRACKER}.report",
    "31e50d1660362909c9ed3be4a3efcdca55667805156e60606c50e1c07c041d6f",
    "8f925732d42405e895820d7b7a3ce9f8b22c52ad199bfdd015aa1a31741451f0",
    make=bound_replacement,
)
def _counted(original: Function, bound: BoundArguments) -> Any:
    """Replace ``MoEMetricsTracker.report``."""
    is_mended = "num_moe_layers" in bound.signature.parameters
    run: Any = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    is_loop = run is not None and bound.arguments.get("force_initialize")
    if is_loop and (count := contributors(run, is_mended=is_mended)):
        # The tensors have an element for each layer, as routers make them; a list of layers is taken as it is.
        layers = run.num_layers + (run.mtp_num_layers or 0)
        bound.arguments |= {"num_layers": layers, "moe_layer_freq": [1] * count, "mtp_num_layers": None}
        if is_mended:
            bound.arguments["num_moe_layers"] = count
        _reduce_alike(bound.arguments, layers)
    return original(*bound.args, **bound.kwargs)


def _reduce_alike(arguments: Mapping[str, Any], layers: int) -> None:
    """Give a stage whose layers recorded nothing the ranks over which the others reduce; ``arguments`` are of ``report``."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    tracker, names = arguments["self"], arguments.get("track_names") or ()
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp_cp", "tp_dp_cp"])
    for name in set(names) & _REDUCED.keys():
        tracker.ensure_initialized(name, layers)
        entry = tracker.metrics[name]
        if entry.reduce_group is None and entry.avg_group is None:
            for field, value in _REDUCED[name].items():
                setattr(entry, field, getattr(groups, value) if isinstance(value, str) else value)


def contributors(args: Any, *, is_mended: bool) -> int:
    """Return how many layers add to a logged loss in a run with Megatron's ``args``.

    Args:
        is_mended: the layers of a hybrid MTP block know that they are MTP's (#6748), and add the mean over repeated depths.
    """
    depths = args.mtp_num_layers or 0
    repeated = min(depths, 1) if args.mtp_use_repeated_layer else depths
    if args.hybrid_layer_pattern is not None:
        trunk, *blocks = args.hybrid_layer_pattern.split("/")
        of_block = blocks[0].count("E") if blocks else 0
        return int(trunk.count("E") + of_block * (repeated if is_mended else depths))
    placed = args.moe_layer_freq
    if not isinstance(placed, list):
        placed = [number % (placed or 1) == 0 for number in range(args.num_layers)]
    # Our own MTP block is dense; stock's is as the last layer.
    is_ours = lowering.preset_of(getattr(args, "spec", None)) is not None
    return sum(map(bool, placed)) + (repeated if placed[-1] and not is_ours else 0)


@edit(f"{_TRACKER}.record", "f14cfa4dd21e1b6d2816389b7986c08aaa15d5712f2536a708b624d3f74c9c0e", make=bound_replacement)
def _within(original: Function, bound: BoundArguments) -> Any:
    """Replace ``MoEMetricsTracker.record``: a layer past the end of the tensor adds to the last element.

    A layer of MTP is numbered after the trunk, within its block, and the tensor has one element for each depth (#7172).
    """
    if (number := bound.arguments["layer_number"]) is not None:
        bound.arguments["layer_number"] = min(number, bound.arguments["num_layers"])
    return original(*bound.args, **bound.kwargs)


PATCH = Patch(
    name="moe-metrics",
    fixes=(
        "with multi-token prediction the log's MoE losses are too small: by the share of depths without experts, or of depths "
        "that repeat one layer; in hybrid models pipeline stages with and without experts wait for each other, a last stage "
        "without experts logs the share of one of its ranks, and since 0.20 an expert layer behind another one in an MTP "
        "block ends in IndexError"
    ),
    source="megatron-core 0.19.2, megatron/core/transformer/moe/moe_logging.py and megatron/training/training.py",
    edits=(_counted, _within),
    seam="the tracker's two methods: what layers add, and the one report of a step, which gets the counts",
    leaves_alone="the losses that are trained; values by layer; the loop's other metrics; loops without Megatron's arguments",
    cost="one small all-reduce a step more",
    retire_when="upstream counts the layers that have added",
    upstream=(6748, 7172),
)
