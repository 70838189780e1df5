"""mixed-precision-optimizer: an optimizer with both fp32 and bf16 parameters saves and loads each parameter's own state.

The M and R layers keep some parameters in fp32 under ``Float16Module``. Upstream numbers an optimizer's parameters as if they
had one dtype: without ``--use-distributed-optimizer`` it counts only the 16-bit ones, with it the numbers do not match the
order it then uses. Training does not use these numbers; saving and loading do. In two formats it also loads in place, with
grad enabled, into views of the model's fp32 parameters, which PyTorch does not allow.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: optimizers that hold both dtypes; all others are left to upstream.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit

if TYPE_CHECKING:
    import torch


@edit(
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.sharded_state_dict",
    "9c7488e7734f2cae432498fb24f5333451a08aed27888570d80fbe04a6912d04",
    until=("ab3a71ce72c93120a13da5fe6dcb32d6482b69e617fb2ceb0120a06bc1f866fa",),  # NVIDIA/Megatron-LM#5929
)
def _with_every_parameter_numbered(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return states numbered by every parameter.

    The original runs on a view of the optimizer whose parallel lists of model and main parameters include the fp32 ones, in the
    order of the inner optimizer, to which the numbers refer. An fp32 parameter is its own main parameter and is saved with the
    model, so it is then removed from the fp32 copies to save.
    """
    if self.is_stub_optimizer or not any(self.fp32_from_fp32_groups):
        return original(self, *args, **kwargs)
    view = copy.copy(self)
    view.fp32_from_float16_groups = [group["params"] for group in self.optimizer.param_groups]
    view.float16_groups = [
        _model_parameters(mains, copies, models)
        for mains, copies, models in zip(
            view.fp32_from_float16_groups, self.fp32_from_float16_groups, self.float16_groups, strict=True
        )
    ]
    state = original(view, *args, **kwargs)
    state["fp32_from_fp16_params"] = [
        [sharded for sharded, main, model in zip(group, mains, models, strict=True) if main is not model]
        for group, mains, models in zip(
            state["fp32_from_fp16_params"], view.fp32_from_float16_groups, view.float16_groups, strict=True
        )
    ]
    return state


def _model_parameters(
    mains: Sequence[torch.Tensor], copies: Sequence[torch.Tensor], models: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the model's parameter for each of ``mains``: the one in ``models`` of which it is a copy, or itself."""
    model_of = {id(main): model for main, model in zip(copies, models, strict=True)}
    return [model_of.get(id(main), main) for main in mains]


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_optimizer_group_ranges",
    "c0ccc7598123b0872ed6122810b0c746e4ff8583990c6bc6f77846290c208a43",
)
def _fp32_first(original: Function, cls: Any, param_groups: Any, gbuf_ranges: Any) -> Any:
    """Return numbers of parameters as upstream's next step creates each group's main parameters: fp32 parameters first."""
    import torch  # late: patches can be listed and described without torch

    index_of, group_ranges = original(cls, param_groups, gbuf_ranges)
    for group_index, group_range in enumerate(group_ranges):
        group_range["params"].sort(key=lambda parameter: parameter.dtype != torch.float32)
        for order, parameter in enumerate(group_range["params"]):
            index_of[parameter] = (group_index, order)
    return index_of, group_ranges


@edit(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_reshardable",
    "79cddb4c716f13c2706a4b1324e5c63071ca0e716ee940949d705f775526a221",
)
def _without_gradients(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a ``DistributedOptimizer.load_parameter_state_from_…``: under ``no_grad``, as upstream's other loaders."""
    import torch

    with torch.no_grad():
        return original(self, *args, **kwargs)


PATCH = Patch(
    name="mixed-precision-optimizer",
    fixes=(
        "an optimizer of fp32 and bf16 parameters cannot be saved ('Optimizer shape … does not match model shape', or an "
        "assertion of two sizes) or, where sizes agree, is saved with states under wrong names; in two formats ('a view of a "
        "leaf Variable …') it cannot be loaded"
    ),
    source="megatron-core 0.19.2, megatron/core/optimizer/{optimizer,distrib_optimizer}.py",
    edits=(
        _with_every_parameter_numbered,
        _fp32_first,
        _without_gradients,
        Edit(
            "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
            ("94daa9892b6ba8865f44133f4dc32e19053591879fb3bfb90f28a7bad57b77df",),
            _without_gradients.make,
        ),
    ),
    seam=(
        "sharded_state_dict is the one place that pairs numbers with the plain optimizer's model parameters; "
        "_build_optimizer_group_ranges makes the one map from parameters to numbers that every format of the distributed "
        "optimizer saves and loads by; the two load methods are those that upstream has not put under no_grad"
    ),
    leaves_alone=(
        "optimizers whose parameters are of one kind; the training step, which uses neither number; keys, shards and "
        "formats; Megatron-FSDP"
    ),
    retire_when="upstream numbers all parameters of a mixed optimizer in the order in which it keeps them, and loads them",
    cost="nothing",
)
