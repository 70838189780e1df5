"""output-layer-fusion: gradient accumulation fusion of Transformer Engine's layers needs no Apex for the output layer, which
may have its own initializer.

Activate: applied by the spec; or ``megacpp_mcore.patches.apply(["output-layer-fusion"])``.
Scope: models built with ``gradient_accumulation_fusion`` where ``fused_weight_gradient_mlp_cuda`` cannot be imported.

Transformer Engine's layers accumulate a weight's gradient into the gradient buffer within the GEMM, with their own kernels.
The output layer of GPTModel and HybridModel is not one of them: it is Megatron's ColumnParallelLinear, which uses Apex's kernel
and raises without Apex, although it could run unfused. One flag controls both. RowParallelLinear, in local models, does not
even check, and fails in the backward pass.

The output layer uses the configuration's ``init_method``, like all layers. If that function has an attribute
``for_output_layer``, as set by a model's init rule, the output layer uses it instead.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit

_LAYERS = "megatron.core.tensor_parallel.layers"


@edit(
    f"{_LAYERS}:ColumnParallelLinear.__init__",
    "20dcfe25ca5aa94b75dfe6f1f94f3f8cd34fa348da362e21f3a9f8775a9039cd",
    "60d78260a5a9ba8fb9a68974fc65159401387f54fd36cc93c2e46161e04ba783",
)
def _without_apex(original: Function, self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
    """Replace a linear layer's ``__init__``: without a kernel, only this layer does without fusion."""
    own = getattr(kwargs.get("init_method"), "for_output_layer", None)
    # The models build only their output layer with this argument and without ``is_expert``.
    if own is not None and "skip_weight_param_allocation" in kwargs and "is_expert" not in kwargs:
        kwargs["init_method"] = own
    available = importlib.import_module(_LAYERS)._grad_accum_fusion_available
    # Not a copy: the configuration is the whole model's, and later changes have to reach this layer.
    fused = config.gradient_accumulation_fusion and available
    with mock.patch.object(config, "gradient_accumulation_fusion", fused):
        original(self, *args, config=config, **kwargs)


PATCH = Patch(
    name="output-layer-fusion",
    fixes=(
        "gradient accumulation fusion, which Transformer Engine's layers have by themselves, cannot be on without Apex: the "
        "output layer, which is not Transformer Engine's, raises RuntimeError"
    ),
    source="megatron-core 0.19.2, megatron/core/tensor_parallel/layers.py",
    edits=(
        _without_apex,
        Edit(
            f"{_LAYERS}:RowParallelLinear.__init__",
            (
                "18d5d22dd93914b264bc3fae97851d6c12a65b6e1768f59626a320926fb9638b",
                "5a5734bde5534544fa482940a1b900566bf85249027753b37c06742b4e5dd342",
            ),
            _without_apex.make,
        ),
    ),
    seam="the constructor reads the configuration once and stores the answer, which the forward pass uses",
    leaves_alone="models built without fusion; hosts with Apex; Transformer Engine's layers, which have kernels of their own",
    cost="nothing",
    gain="Transformer Engine's layers write no 16-bit weight gradients",
    retire_when="upstream's output layer falls back, or takes Transformer Engine's product",
)
