"""precision-aware-adam: ``--use-precision-aware-optimizer`` trains, saves and loads parameters of two dtypes, also on a CPU.

Upstream's is Transformer Engine's ``FusedAdam``, which saves a copy of an fp32 parameter from before the first step, expands
16-bit moments to fp32 to save them, and needs a GPU. The distributed optimizer is given
:class:`megacpp_mcore.ops.remainder_adam.PrecisionAwareAdam` instead, whose states are saved as they are kept.

Activate: applied by ``--spec megacpp_mcore nam56r`` (with either model class), or by name.
Scope: ``--use-precision-aware-optimizer`` with the distributed optimizer. Upstream's stays, for parameters of one dtype, where
states are offloaded or kept in dtypes that ours does not have, and under Megatron-FSDP.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

from megacpp_mcore.errors import ModelError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit

_MODULE = "megatron.core.optimizer"


@edit(
    "megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
    "8d06c93753e4514352b1a4b8ab31a968b95ad18d13c8789d3442ed5ec95ef4d4",
    "d837d5eda5bf0b7057892a0f4acdd20ae99afdb263f06450d48ba05155da9f09",
)
def _without_transformer_engine(original: Function, self: Any) -> None:
    """Replace ``OptimizerConfig.__post_init__``: Transformer Engine is not needed, and remainders are kept without it."""
    remainders = self.store_param_remainders
    try:
        original(self)
    except RuntimeError:  # upstream's last check
        if not self.use_precision_aware_optimizer or self.optimizer_cpu_offload:
            raise
    self.store_param_remainders = remainders


@edit(
    f"{_MODULE}:_get_megatron_optimizer_based_on_param_groups",
    "6a29af7290de3f2dbc8aa3e4aa17d98de0de5fbf010923df552845ad96d387ea",
    "e819524c3039c495c447778776a9fd15d9299c5e256c379addd7a8de207359d5",
)
def _with_own_adam(original: Function, config: Any, model_chunks: Any, param_groups: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``_get_megatron_optimizer_based_on_param_groups(config, model_chunks, param_groups, …)``.

    Raises:
        ModelError: what the optimizer is to keep, or how it is to step, is not supported.
    """
    module = importlib.import_module(_MODULE)
    if (
        not config.use_precision_aware_optimizer
        or not param_groups
        or any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in model_chunks)
        # With a recipe of FP8 other than delayed, Megatron keeps main parameters itself.
        or not (config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or module.USING_PYTORCH_OPTIMIZER)
    ):
        return original(config, model_chunks, param_groups, *args, **kwargs)
    from megacpp_mcore.ops.remainder_adam import PrecisionAwareAdam

    if (obstacle := _obstacle(config)) is not None:
        dtypes = {str(parameter.dtype) for group in param_groups for parameter in group["params"]}
        if len(dtypes) > 1 or (module.USING_PYTORCH_OPTIMIZER and not config.optimizer_cpu_offload):
            raise ModelError(
                f"{obstacle}; the parameters are {' and '.join(sorted(dtypes))}: more than one dtype, or anything "
                "without Transformer Engine, needs what is expected"
            )
        return original(config, model_chunks, param_groups, *args, **kwargs)

    def adam(*, params: Any, lr: Any, betas: Any, eps: float, weight_decay: float, **_: Any) -> PrecisionAwareAdam:
        dtypes = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
        remainders = config.bf16 and config.store_param_remainders
        how = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return PrecisionAwareAdam(params, **how, dtypes=dtypes, remainders=remainders)

    with mock.patch.multiple(module, Adam=adam, USING_PYTORCH_OPTIMIZER=False):
        return original(config, model_chunks, param_groups, *args, **kwargs)


def _obstacle(config: Any) -> str | None:
    """Return what the configuration requests that :class:`PrecisionAwareAdam` does not support."""
    import torch

    for name, supported in (
        ("optimizer_cpu_offload", (False,)),
        ("use_distributed_optimizer", (True,)),
        ("main_params_dtype", (torch.float32,)),
        ("exp_avg_dtype", (torch.float32, torch.bfloat16)),
        ("exp_avg_sq_dtype", (torch.float32, torch.bfloat16)),
        ("decoupled_weight_decay", (True,)),
        ("optimizer_cuda_graph", (False,)),
        ("use_precision_aware_optimizer_no_fp8_or_ds_fp8", (True,)),
    ):
        if (configured := getattr(config, name)) not in supported:
            return f"{name} is {configured}, with --use-precision-aware-optimizer expected {' or '.join(map(str, supported))}"
    return None


PATCH = Patch(
    name="precision-aware-adam",
    fixes=(
        "--use-precision-aware-optimizer saves fp32 parameters of a bf16 model as they were before the first step, expands "
        "16-bit moments to fp32 to save them, and ends without Transformer Engine"
    ),
    source="megatron-core 0.19.2, megatron/core/optimizer/optimizer_config.py and megatron/core/optimizer/__init__.py",
    edits=(_without_transformer_engine, _with_own_adam),
    seam=(
        "the configuration's check is where upstream requires Transformer Engine; "
        "_get_megatron_optimizer_based_on_param_groups "
        "makes the inner optimizer, which the distributed one knows by four methods"
    ),
    leaves_alone=(
        "runs without --use-precision-aware-optimizer; Megatron-FSDP; of parameters of one dtype, offloaded states and moments "
        "in fp16 and FP8; what the distributed optimizer does with states"
    ),
    retire_when="Transformer Engine's Adam steps and saves parameters of two dtypes, without copies of states in fp32",
    cost="of parameters of two dtypes, moments in fp16 and FP8 and main parameters in fp16 are refused",
    gain="with moments in bf16, 6 bytes a parameter of optimizer state instead of 12",
)
