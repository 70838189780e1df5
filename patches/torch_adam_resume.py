"""torch-adam-resume: the distributed optimizer can load a checkpoint with PyTorch's own Adam, as used on a CPU.

Without Transformer Engine and Apex, upstream's Adam is ``torch.optim.Adam(W)``, which counts steps in one tensor per parameter.
Upstream reads that count before it exists, assigns one shared tensor to all parameters, which each of them then increments, and
expects it in each parameter's checkpoint state.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: ``--use-distributed-optimizer`` with PyTorch's Adam; all other optimizers are left to upstream.
Provenance: megatron-core 0.19.2 ``core/optimizer/distrib_optimizer.py``; PyTorch 2.11 ``torch/optim/adam.py``.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, edit

STEP = "step"


def is_torch_adam(optimizer: Any) -> bool:
    """Return whether this is PyTorch's own Adam."""
    import torch  # late: patches can be listed and described without torch

    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


def begin(adam: Any) -> None:
    """Give PyTorch's Adam the state that it makes in its first step."""
    import torch

    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
        adam.state[parameter] = {STEP: torch.tensor(0.0), **moments}


def _counts_by_itself(optimizer: Any) -> bool:
    """Return whether the inner optimizer of a DistributedOptimizer is PyTorch's Adam, without Megatron-FSDP."""
    return not optimizer.ddp_config.use_megatron_fsdp and is_torch_adam(optimizer.optimizer)


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
    "fe621ae6a622b58752df0330a2a30056dda222d73f22dc6bce6a5d1ac2bfa3d8",
)
def _from_the_first_step_on(original: Function, self: Any) -> Any:
    """Replace ``DistributedOptimizer.state_dict()``: before the first step it creates Adam's initial state."""
    if _counts_by_itself(self) and not self.optimizer.state:
        begin(self.optimizer)
    return original(self)


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
    "7e5f988b86b485012fe3031b4960e8624d3b6e8db12a49367ffeae5777de029f",
)
def _with_counts_of_their_own(original: Function, self: Any, state_dict: Any) -> Any:
    """Replace ``DistributedOptimizer.load_state_dict(state_dict)``: each parameter gets its own step tensor."""
    loaded = original(self, state_dict)
    if _counts_by_itself(self):
        for state in self.optimizer.state.values():
            state[STEP] = state[STEP].clone()
    return loaded


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    "40cab784659711a8e7cdd5a0d84e60de0e1a2fa648316d4d697af83725311b4b",
)
def _without_the_count(original: Function, self: Any, model_param: Any, tensors: Any) -> Any:
    """Leave out the step count, which is loaded with the parameter groups; upstream skips entries that are not tensors."""
    return original(self, model_param, {**tensors, STEP: None} if _counts_by_itself(self) else tensors)


PATCH = Patch(
    name="torch-adam-resume",
    fixes=(
        "without Transformer Engine and Apex, as on a CPU, no checkpoint of the distributed optimizer can be loaded "
        "('assert len(steps) == 1', or KeyError: 'step'), and all parameters would share one count of steps"
    ),
    source="megatron-core 0.19.2, megatron/core/optimizer/distrib_optimizer.py",
    edits=(_from_the_first_step_on, _with_counts_of_their_own, _without_the_count),
    seam=(
        "state_dict and load_state_dict are the two places that read and write the count; every format passes a parameter's "
        "tensors to _set_main_param_and_optimizer_states"
    ),
    leaves_alone="Transformer Engine's and Apex's Adam, SGD, offloading to the CPU, Megatron-FSDP; what is saved, and how",
    retire_when="upstream loads a checkpoint of its distributed optimizer with PyTorch's Adam",
    cost="nothing",
)
