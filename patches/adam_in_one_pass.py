"""adam-in-one-pass: a 16-bit model's optimizer clips gradients, updates weights and writes their copies in one pass.

Upstream scales all gradients in memory, then runs Transformer Engine's ``FusedAdam``, then copies every weight: 42 bytes an
element. The kernel of :mod:`megacpp_mcore.ops.adam` moves 30.

Activate: applied by our specs on GPUs, unless ``speed_defaults.adam_in_one_pass`` is false, or by name.
Scope: Transformer Engine's Adam in float32, with the distributed optimizer or without, once moments exist (which the first
step makes), and of precision-aware-adam's the clipping; all other optimizers are left to upstream.

The gradients in memory stay unclipped. Weights differ from upstream's in the last bits, as the compilers fuse products and sums
differently; checkpoint contents are the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit

UPDATE = "megacpp_update"
"""Attribute of an optimizer: what its next step will do."""

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Optimizers by the id of their first main parameter, to which an attribute would be saved with it."""


class _Update:
    """What the step of one optimizer will do: the tables of its groups, and the factor of gradients once that is known."""

    def __init__(self, groups: list[list[Any]]) -> None:
        from megacpp_mcore.ops import adam

        self.tables = [adam.Table(shards) if shards else None for shards in groups]
        self.places = [table.addresses if table else [] for table in self.tables]
        self.count = sum(map(len, groups))
        self.scale: Any = None

    def run(self, inner: Any) -> None:
        """Step the inner optimizer."""
        from megacpp_mcore.ops import adam

        for group, table in zip(inner.param_groups, self.tables, strict=True):
            group["step"] = group.get("step", 0) + 1
            if table is not None:
                hyperparameters = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
                adam.step(table, **hyperparameters, number=group["step"], scale=self.scale)


def _update(optimizer: Any) -> _Update | None:
    """Return the update of the optimizer's next step if the kernel can do it, and store it for that step."""
    previous = vars(optimizer).get(UPDATE)
    update = None
    if _fits(optimizer):
        from megacpp_mcore.ops import adam  # Triton is installed with Transformer Engine

        copies = dict(_copies(optimizer))
        groups = [_shards(optimizer.optimizer, group, copies) for group in optimizer.optimizer.param_groups]
        places = [] if None in groups else [adam.addresses(shards) for shards in groups]
        if places:
            update = previous if previous and places == previous.places else _Update(groups)
            update.scale = None
    vars(optimizer)[UPDATE] = update
    return update


def _copies(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield the id of each main parameter that is a copy, and the 16-bit elements of which it is one."""
    if not _distributed(optimizer):
        for mains, models in zip(optimizer.fp32_from_float16_groups, optimizer.float16_groups, strict=True):
            yield from ((id(main), model.data) for main, model in zip(mains, models, strict=True))
        return
    for mains, models in zip(optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True):
        for main, model in zip(mains, models, strict=True):
            place = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[model]
            param_data = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
            yield id(main), param_data[place.start : place.end]


def _distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "shard_fp32_from_float16_groups")


def _shards(inner: Any, group: Any, copies: dict[int, Any]) -> Any:
    """Return a group's tensors; None where moments or a gradient are missing, or a copy is not plain (quantised, strided)."""
    import torch

    from megacpp_mcore.ops import adam

    shards = []
    for main in group["params"]:
        state, copy = inner.state.get(main, {}), copies.get(id(main))
        if main.grad is None or "exp_avg" not in state:
            return None
        if copy is not None and not (type(copy) is torch.Tensor and copy.is_contiguous()):
            return None
        shards.append(adam.Shard(main, main.grad, state["exp_avg"], state["exp_avg_sq"], copy))
    return shards


def _fits(optimizer: Any) -> bool:
    """Whether this is an optimizer whose step the kernel performs."""
    import torch

    inner: Any = getattr(optimizer, "optimizer", None)
    config, ddp, kind = optimizer.config, getattr(optimizer, "ddp_config", None), type(inner)
    if not (_distributed(optimizer) or hasattr(optimizer, "fp32_from_float16_groups")):
        return False
    if kind.__name__ != "FusedAdam" or not kind.__module__.startswith("transformer_engine."):
        return False
    others = (
        inner.capturable, inner.master_weights, not inner.adam_w_mode,
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8, config.reuse_grad_buf_for_mxfp8_param_ag,
        *(getattr(ddp, name, False) for name in ("use_megatron_fsdp", "fp8_param_gather", "fp4_param_gather")),
        *(dtype != torch.float32 for name, dtype in inner.name_to_dtype_map.items() if name != "master_param"),
        *(not group["bias_correction"] for group in inner.param_groups),
    )  # fmt: skip
    return not any(others)


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_model_grads_to_main_grads",
    "b14b52f057fb4a96a59401412be0c57de5ec7a8c75418050ddec8076d5a70959",
)
def _owned(original: Function, self: Any) -> None:
    """Replace an optimizer's ``_copy_model_grads_to_main_grads``: its first main parameter then identifies the optimizer."""
    original(self)
    if not self.is_stub_optimizer:
        for main in self.get_parameters()[:1]:
            _owners[id(main)] = self


@edit(
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    "cf07b488fb76a8ae90ba0809d1fbd36e05dcccf24b4644af1621a8b616c01784",
)
def _later(original: Function, parameters: Any, max_norm: Any, total_norm: Any, use_decoupled_grad: bool = False) -> None:
    """Replace ``clip_grad_by_total_norm_fp32``: leaves the factor to the step if the kernel performs it."""
    from megacpp_mcore.ops.remainder_adam import PrecisionAwareAdam

    owner = _owners.get(id(parameters[0])) if isinstance(parameters, list) and parameters else None
    update: Any = None
    if owner is not None and hasattr(total_norm, "clamp_max_"):
        update = owner.optimizer if isinstance(owner.optimizer, PrecisionAwareAdam) else _update(owner)
    if update is None or len(parameters) != update.count:
        original(parameters, max_norm, total_norm, use_decoupled_grad)
    else:
        update.scale = (max_norm / (total_norm + 1.0e-6)).clamp_max_(1.0)


@edit(
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step_with_ready_grads",
    "34fc101b433f15152faaee79c84877978eb797ed2537d19cb564e558ce6f4446",
)
def _in_one_pass(original: Function, self: Any) -> Any:
    """Replace ``MixedPrecisionOptimizer.step_with_ready_grads``: the kernel steps, and nothing is copied after it."""
    update = vars(self).get(UPDATE)
    if update is None or update.scale is None:
        update = _update(self)
    if update is None:
        return original(self)
    from torch.optim import Optimizer

    # With the hooks of PyTorch's optimizers, which drop what is kept between steps.
    vars(self.optimizer)["step"] = functools.partial(Optimizer.profile_hook_step(update.run), self.optimizer)
    vars(self)["_copy_main_params_to_model_params"] = lambda: None
    try:
        return original(self)
    finally:
        update.scale = None
        del vars(self.optimizer)["step"], vars(self)["_copy_main_params_to_model_params"]


PATCH = Patch(
    name="adam-in-one-pass",
    fixes="the optimizer reads and writes gradients to clip them, and reads every weight again to copy it to 16 bits",
    source="megatron-core 0.19.2, megatron/core/optimizer/{optimizer,distrib_optimizer,clip_grads}.py",
    edits=(
        _owned,
        Edit(
            "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
            ("62f27803e9dae4c8389e5e838330ac74193db020557eceef1578bc5c586f3872",),
            _owned.make,
        ),
        _later,
        _in_one_pass,
    ),
    seam=(
        "the clipping and the step are what uses the gradients once they are in place; the first of "
        "the three methods that a step calls records whose parameters are clipped"
    ),
    leaves_alone=(
        "other optimizers; a run's first step; clipping by a norm group of its own; the norm, counts of zeros, skipped steps, "
        "all-gathers, and what is saved"
    ),
    retire_when="Transformer Engine's Adam takes a factor for the gradients and writes 16-bit copies",
    cost="gradients in memory stay unclipped after a step",
    gain="16 ms of the optimizer's 59, and 1 % of a step, of `nam56r` on one H200",
)
