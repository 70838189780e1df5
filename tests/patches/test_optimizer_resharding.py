"""Parts of optimizer-resharding; tests/distributed/test_optimizer_state.py saves and loads."""

from __future__ import annotations

import functools
import math
import random
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megacpp_mcore.checkpoints import layout
from megacpp_mcore.checkpoints.layout import FLAT, FORMAT, LOADED_FROM, UNSHARDED
from megacpp_mcore.errors import CheckpointError
from megacpp_mcore.patches.optimizer_resharding import PATCH, boxes
from tests import stock
from tests.errors import raises

MAKES = stock.makes(PATCH)
_in_place = MAKES["DistributedOptimizer.sharded_param_state_fully_reshardable"]
_from_boxes = MAKES["DistributedOptimizer.load_parameter_state_from_fully_reshardable"]
_by_its_own_groups = MAKES["ChainedOptimizer.load_state_dict"]


def test_boxes_are_every_number_of_the_range_once_and_in_order() -> None:
    chosen = random.Random(0)
    most = 0
    for _ in range(3000):
        shape = tuple(chosen.randint(1, 5) for _ in range(chosen.randint(0, 4)))
        start = chosen.randrange(math.prod(shape))
        end = chosen.randint(start + 1, math.prod(shape))
        numbers = torch.arange(math.prod(shape)).view(shape)
        corners_and_sizes = list(boxes(shape, start, end))
        assert len(corners_and_sizes) <= max(1, 2 * len(shape) - 1)
        most = max(most, len(corners_and_sizes))
        cut = [
            numbers[tuple(slice(at, at + length) for at, length in zip(corner, size, strict=True))]
            for corner, size in corners_and_sizes
        ]
        assert [tuple(box.shape) for box in cut] == [size for _, size in corners_and_sizes]
        assert [number for box in cut for number in box.flatten().tolist()] == list(range(start, end))
    assert most == 7


RUN = {
    "finetune": False,
    "no_load_optim": False,
    "load": "of the run",
    "use_distributed_optimizer": True,
    "ckpt_step": None,
}


def _refuse(state: object, folder: str = "saved", **run: object) -> None:
    with mock.patch.object(layout, "_arguments", return_value=Namespace(**RUN | run)):
        layout.refuse_other_layout(state, folder)


@pytest.mark.parametrize("fmt", ["torch", "torch_dist"])
def test_an_argument_that_one_side_does_not_have_is_no_difference(fmt: str) -> None:
    """And the folder that is named is the one that was loaded, not the run's own: of a teacher or a pretrained model."""
    saved = Namespace(tensor_model_parallel_size=2, expert_model_parallel_size=1, ckpt_format=fmt)
    state = {"args": saved, "content_metadata": {LOADED_FROM: "of a teacher", FORMAT: FLAT}}
    _refuse(state, tensor_model_parallel_size=2)
    with raises(CheckpointError, "of a teacher", "tensor_model_parallel_size was 2", 4):
        _refuse(state, "of a teacher", tensor_model_parallel_size=4)
    _refuse(state, tensor_model_parallel_size=4, finetune=True)


def test_main_parameters_of_another_form_are_refused() -> None:
    """Both ways, in every format, and of a bf16 model only, whose remainders are none of another."""
    for saved, run in ((True, False), (False, True)):
        state = {"args": Namespace(use_precision_aware_optimizer=saved, bf16=True)}
        with raises(CheckpointError, "as remainders (--use-precision-aware-optimizer)", "whole", "--no-load-optim"):
            _refuse(state, use_precision_aware_optimizer=run, bf16=True)
        _refuse(state, use_precision_aware_optimizer=run, bf16=True, no_load_optim=True)
        _refuse(state, use_precision_aware_optimizer=saved, bf16=True)
    _refuse({"args": Namespace(bf16=False)}, use_precision_aware_optimizer=True, bf16=False)


@pytest.mark.parametrize(
    ("saved", "named"),
    [
        ({"use_precision_aware_optimizer": True}, "as remainders (--use-precision-aware-optimizer)"),
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size was 2"),
    ],
)
def test_a_load_that_takes_no_optimizer_is_refused_nothing_of_its_state(saved: dict[str, object], named: str) -> None:
    """As Megatron loads a teacher: ``load_checkpoint(model, None, None)``."""
    run = {"tensor_model_parallel_size": 1, "use_precision_aware_optimizer": False, "bf16": True}
    state = {"args": Namespace(**run | saved), "content_metadata": {LOADED_FROM: "saved", FORMAT: FLAT}}
    load_checkpoint = MAKES["load_checkpoint"](lambda *_: _refuse(state, **run))
    load_checkpoint([], None, None)
    with raises(CheckpointError, named):
        load_checkpoint([], object(), None)


def _box(name: str, state: torch.Tensor, replica: Any = 0, is_loading: bool = False) -> ShardedTensor:
    """The one box of a state of a parameter with six numbers."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    optimizer = mock.Mock(model_param_gbuf_map={parameter: None}, distributed_optimizer_instance_id=5)
    optimizer._get_main_param_and_optimizer_states.return_value = {name: state}
    optimizer._get_model_param_range_map.return_value = {"param": Namespace(start=0, end=6)}
    entry = ShardedTensor.from_rank_offsets("weight", parameter, replica_id=replica)
    (box,) = _in_place(mock.Mock(__name__="save"))(optimizer, {"weight": entry}, is_loading, {})[0][name].values()
    return box


def test_remainders_have_a_name_of_their_own() -> None:
    for dtype, name in ((torch.int16, "remainder"), (torch.float32, "param")):
        box = _box("param", torch.zeros(6, dtype=dtype))
        assert (box.key, box.dtype) == (f"optimizer.state.{name}.weight", dtype)


def test_what_stock_loads_is_left_to_it() -> None:
    """A checkpoint without an optimizer, none at all, and one of a model that is not ours."""
    without = Namespace(tensor_model_parallel_size=2, no_save_optim=True)
    others = {"args": Namespace(tensor_model_parallel_size=2), "content_metadata": {FORMAT: FLAT}}
    ours = {"args": without, "content_metadata": {LOADED_FROM: "saved", FORMAT: FLAT}}
    for state in (None, {}, {"args": None}, ours, others):
        _refuse(state, tensor_model_parallel_size=4)


def test_a_step_whose_optimizer_megatron_would_not_load(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    saved = {"args": Namespace(ckpt_format="torch")}
    with raises(CheckpointError, "--ckpt-step is 3", "step, 6", "write 3"):
        _refuse(saved, str(tmp_path), ckpt_step=3)
    _refuse(saved, str(tmp_path), ckpt_step=6)
    _refuse(saved, str(tmp_path), ckpt_step=3, use_distributed_optimizer=False)


def _load(held: torch.dtype, main: torch.dtype, **saved_from: str) -> mock.Mock:
    """Load main parameters of another value than the weights' into an optimizer that keeps them as ``held``, for ``main``."""
    parameter = torch.ones(4, dtype=torch.bfloat16)
    optimizer = mock.Mock(model_param_gbuf_map={parameter: None}, config=Namespace(main_params_dtype=main))
    optimizer._get_main_param_and_optimizer_states.return_value = {"param": torch.zeros(4, dtype=held)}
    optimizer._get_model_param_range_map.return_value = {"param": Namespace(start=0, end=4)}
    optimizer._is_distopt_quantized_param.return_value = False
    saved = {**saved_from, 0: {"param": {0: torch.full((4,), 7, dtype=held)}}}
    _from_boxes(mock.Mock(__name__="load"))(optimizer, saved)
    return optimizer


def test_main_parameters_are_compared_with_weights_only_where_they_are_fp32() -> None:
    """Others of the precision-aware optimizer are none that the weights were rounded from."""
    for held, main in ((torch.int16, torch.float32), (torch.float32, torch.float16)):
        _, tensors = _load(held, main, folder="saved/iter_0000003")._set_main_param_and_optimizer_states.call_args.args
        assert tensors["param"].tolist() == [7] * 4
    with raises(CheckpointError, "saved/iter_0000003", "shape [4]", code="main-parameters"):
        _load(torch.float32, torch.float32, folder="saved/iter_0000003")
    _load(torch.float32, torch.float32)  # into a state that was built for a save


@pytest.mark.parametrize(("replica", "expected"), [(1, 5), ((0, 2, 1), (0, 2, 5))])
def test_a_saved_box_is_a_copy_and_of_its_own_replica(replica: Any, expected: Any) -> None:
    """The process of an async save shares host memory with the run; views are for loads."""
    flat = torch.arange(6.0)
    for is_loading in (False, True):
        box = _box("exp_avg", flat, replica, is_loading)
        assert box.replica_id == expected
        assert box.data.flatten().tolist() == flat.tolist()
        assert (box.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()) == is_loading


def _chained(inner: Any) -> Any:
    """Megatron's optimizer around one of its own, with the patched load."""
    with mock.patch.object(ChainedOptimizer, "__init__", return_value=None):
        chained = ChainedOptimizer([])
    chained.chained_optimizers = [inner]
    return functools.partial(_by_its_own_groups(ChainedOptimizer.load_state_dict), chained)


def test_a_load_names_main_parameters_as_the_distributed_optimizer_saves_them() -> None:
    """Also into a plain optimizer, unless that one's kind has saved the checkpoint."""
    saved, own = "optimizer.state.param.weight", "optimizer.state.fp32_param.weight"
    for is_loading, metadata, expected in (
        (True, {LOADED_FROM: "saved"}, saved),
        (True, {LOADED_FROM: "saved", UNSHARDED: True}, own),
        (True, {}, own),
        (False, {LOADED_FROM: "saved"}, own),
    ):
        entry = ShardedTensor.from_rank_offsets(own, torch.zeros(2))
        state = MAKES["ChainedOptimizer.sharded_state_dict"](lambda *_, entry=entry, **__: {"a": [entry]})
        state(None, {}, is_loading, metadata=metadata)
        assert entry.key == expected


def test_megatron_fsdp_loads_its_own_form() -> None:
    """Groups by the parameters' names, and none in the form of other optimizers."""
    weight = torch.nn.Parameter(torch.zeros(2))
    inner = object.__new__(DistributedOptimizer)
    inner.ddp_config = Namespace(use_megatron_fsdp=True)
    inner.optimizer = mock.Mock(param_groups=[{"params": [weight], "lr": 1.0}])
    inner.optimizer.state_dict.return_value = {"param_groups": [{"params": [0]}]}
    inner._param_name = lambda parameter: "weight"
    state = {"state": {"weight": {"exp_avg": weight}}, "param_to_group_meta": {"weight": {"lr": 3.0}}}
    _chained(inner)(state)
    (loaded,), _ = inner.optimizer.load_state_dict.call_args
    assert loaded["param_groups"] == [{"params": ["weight"], "lr": 3.0}]
    assert loaded["state"]["weight"]["exp_avg"] is weight


GROUP = {"lr": 1.0, "pre_wd_mult": 0.0, "pre_lr_mult": 1.0, "is_expert_parallel": False}


def test_the_file_format_is_loaded_as_it_is() -> None:
    """In the format torch a distributed optimizer's state has only groups; its tensors are in another file."""
    inner = mock.Mock(spec=DistributedOptimizer)
    state = {"optimizer": {"param_groups": [GROUP | {"step": 3}]}}
    _chained(inner)(state)
    assert inner.load_state_dict.call_args.args[0] is state


def test_a_rate_that_the_run_overrides_is_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between optimizers of one kind as well, of which Megatron says KeyError."""
    ours = [{"params": [torch.nn.Parameter(torch.zeros(2))], "wd_mult": 0.0, "lr_mult": 1.0, "max_lr": 1e-3}]
    inner = mock.Mock(spec=DistributedOptimizer, optimizer=torch.optim.Adam(ours))
    state = {"optimizer": {"param_groups": [GROUP | {"max_lr": 3e-4}]}, "param_state_sharding_type": "x"}
    inner.load_state_dict.side_effect = KeyError
    with raises(CheckpointError, "max_lr is 0.0003 in the checkpoint and 0.001 in the run"):
        _chained(inner)(state)
    inner.load_state_dict.side_effect = None
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", mock.Mock(override_opt_param_scheduler=True))
    _chained(inner)(state)
    assert inner.load_state_dict.call_args.args[0]["optimizer"]["param_groups"][0]["max_lr"] == 1e-3


def test_groups_of_another_kind_match_by_the_names_of_nemo() -> None:
    """A distributed optimizer loads a plain one's state, whose multipliers NeMo calls pre_wd_mult and pre_lr_mult."""
    weight = torch.nn.Parameter(torch.zeros(2))
    ours = [{"params": [weight], "wd_mult": 0.0, "lr_mult": 1.0, "is_expert_parallel": False}]
    inner = mock.Mock(spec=DistributedOptimizer, optimizer=torch.optim.Adam(ours))
    tensors = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [GROUP | {"params": [0]}]}
    _chained(inner)({"optimizer": tensors, "param_state": {}})
    (group,) = inner.load_state_dict.call_args.args[0]["optimizer"]["param_groups"]
    assert (group["lr"], group["pre_wd_mult"], group["step"]) == (1.0, 0.0, 3.0)
    ours[0]["wd_mult"] = 1.0
    inner.optimizer = torch.optim.Adam(ours)
    with raises(CheckpointError, "wd_mult is 0.0 in the checkpoint and 1.0 in the run"):
        _chained(inner)({"optimizer": tensors, "param_state": {}})
    ours[0] |= {"wd_mult": 0.0, "max_lr": 1e-3}
    inner.optimizer = torch.optim.Adam(ours)
    with raises(CheckpointError, "max_lr is None in the checkpoint and 0.001 in the run"):
        _chained(inner)({"optimizer": tensors, "param_state": {}})
    ours[0] |= {"wd_mult": 1.0, "max_lr": None}
    inner.optimizer = torch.optim.Adam(ours)
    ended: list[None] = []  # inside of Megatron's load, which other ranks are in as well, it is refused at the end
    with raises(CheckpointError, "wd_mult is 0.0 in the checkpoint and 1.0 in the run"):
        MAKES["load_checkpoint"](lambda *_: ended.append(_chained(inner)({"optimizer": tensors, "param_state": {}})))(
            [], object()
        )
    assert ended == [None]
