"""The patch moe-metrics: what Megatron's loop logs of MoE losses is the mean over the layers that have experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacpp_mcore.patches.moe_metrics import PATCH, contributors
from tests import stock


def arguments(**changes: Any) -> SimpleNamespace:
    common = {"num_layers": 4, "mtp_num_layers": 2, "mtp_use_repeated_layer": False, "hybrid_layer_pattern": None}
    return SimpleNamespace(**(common | {"moe_layer_freq": [0, 1, 1, 0], "spec": None} | changes))


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 2),
        ({"moe_layer_freq": [0, 1, 0, 1]}, 4),
        ({"moe_layer_freq": [0, 1, 0, 1], "mtp_use_repeated_layer": True}, 3),
        ({"moe_layer_freq": [0, 1, 0, 1], "spec": ["megacpp_mcore", "nam56r"]}, 2),
        ({"moe_layer_freq": 1, "mtp_num_layers": None}, 4),
        ({"moe_layer_freq": 3, "mtp_num_layers": 1}, 3),
        ({"moe_layer_freq": None}, 6),
        ({"hybrid_layer_pattern": "M*|ME/+-/+-"}, 1),
        ({"hybrid_layer_pattern": "M*ME/+E/+E"}, 3),
        ({"hybrid_layer_pattern": "M*ME/+E/+E", "mtp_use_repeated_layer": True}, 2),
    ],
)
def test_layers_that_add_to_a_loss(changes: dict[str, Any], count: int) -> None:
    assert contributors(arguments(**changes), is_mended=True) == count
    of_repeated = {"hybrid_layer_pattern", "mtp_use_repeated_layer"} <= changes.keys()
    assert contributors(arguments(**changes), is_mended=False) == count + of_repeated


def logged(args: SimpleNamespace, values: dict[int, float]) -> float:
    """What a step of Megatron's loop logs of a loss that layers recorded, as routers and ``training_log`` call the tracker."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    from megatron.training import global_vars

    tracker, total = MoEMetricsTracker(), {}
    size = args.num_layers + args.mtp_num_layers
    for number, value in values.items():
        tracker.record("z_loss", torch.tensor(value), number, size)
    layers = args.hybrid_layer_pattern.count("E") if args.hybrid_layer_pattern else args.num_layers
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        tracker.report(
            loss_scale=1.0, iteration=1, force_initialize=True, track_names=["z_loss", "seq_load_balancing_loss"],
            num_layers=layers, moe_layer_freq=args.moe_layer_freq, mtp_num_layers=args.mtp_num_layers, total_loss_dict=total,
        )  # fmt: skip
    assert {len(entry.values) for entry in tracker.metrics.values()} == {size}
    return float(total["z_loss"])


def test_a_logged_loss_is_the_mean_over_the_layers_with_experts(process: Path) -> None:
    dense_depths, values = arguments(), {2: 3.0, 3: 5.0}
    assert logged(dense_depths, values) == 2.0  # stock: over two layers and two depths without experts
    repeated, of_repeated = (
        arguments(moe_layer_freq=[0, 1, 0, 1], mtp_use_repeated_layer=True),
        {2: 3.0, 4: 5.0, 5: 4.0},
    )
    assert logged(repeated, of_repeated) == 3.0  # stock: over four, though both depths are one layer
    with stock.patched(PATCH):
        assert logged(dense_depths, values) == 4.0
        assert logged(repeated, of_repeated) == 4.0
        hybrid = arguments(hybrid_layer_pattern="M*EE/+-/+-", moe_layer_freq=1)
        assert logged(hybrid, {3: 3.0, 4: 5.0}) == 4.0
    with pytest.raises(AssertionError):  # stock's tensors of a stage without experts have another size than routers'
        logged(hybrid, {3: 3.0, 4: 5.0})


def test_a_layer_within_an_mtp_block_has_a_place(process: Path) -> None:
    """The second layer of the block of a depth, which is numbered 4 + 2 of 5."""
    args = arguments(hybrid_layer_pattern="M*ME/+E", mtp_num_layers=1)
    with pytest.raises(IndexError):
        logged(args, {4: 3.0, 6: 5.0})
    with stock.patched(PATCH):
        assert logged(args, {4: 3.0, 6: 5.0}) == 4.0


def test_loops_with_counts_of_their_own_are_left_alone(process: Path) -> None:
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    with stock.patched(PATCH):
        tracker, total = MoEMetricsTracker(), {}
        tracker.record("z_loss", torch.tensor(8.0), 1, 4)
        tracker.report(loss_scale=1.0, iteration=1, num_layers=4, total_loss_dict=total)
    assert float(total["z_loss"]) == 2.0


def test_a_stage_without_experts_reduces_as_the_others(process: Path) -> None:
    """Stock leaves it at the sum over the pipeline."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
    from megatron.training import global_vars

    args, names = arguments(), ["seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"]

    def reductions() -> list[tuple[Any, Any]]:
        with (
            mock.patch.object(global_vars, "_GLOBAL_ARGS", args),
            mock.patch.object(torch.distributed, "all_reduce") as reduced,
        ):
            MoEMetricsTracker().report(
                loss_scale=1.0, iteration=1, force_initialize=True, track_names=names, num_layers=4, moe_layer_freq=1
            )
        return [(call.kwargs["group"], call.kwargs.get("op", torch.distributed.ReduceOp.SUM)) for call in reduced.mock_calls]

    added, mean = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG
    stages = (parallel_state.get_pipeline_model_parallel_group(), added)
    replicas = (reductions()[1][0], mean)
    assert reductions() == [stages, replicas] * 3
    with stock.patched(PATCH):
        tensor = parallel_state.get_tensor_and_context_parallel_group()
        every = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        assert reductions() == [
            *(stages, (tensor, added), replicas),
            *(stages, (every, added)),
            *(stages, (every, mean), replicas),
        ]
