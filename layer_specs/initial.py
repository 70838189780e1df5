"""Weight initialization: a model's init rule, and initializers of the parameters that this package builds itself.

The fan-in rule (docs/model.md, "The start"): a matrix has standard deviation 1 / √(columns), one that writes to the residual
stream 1 / √(columns · 2 · depth). Megatron's modules use two init functions of the configuration, which see one rank's shard:
sufficient for matrices that tensor parallelism splits by rows. Those that write to the residual are split by columns, so they
are built with :func:`drawn_by_input_size`, which knows the unsharded width.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal, scaled_init_method_normal

from megacpp_mcore.model import Model
from megacpp_mcore.ops.initializers import Initializer, by_fan_in


def set_start(model: Model, config: TransformerConfig) -> None:
    """Set the weight initializers in Megatron's configuration; the embedding has its own flag.

    Args:
        model: whose init rule applies.
        config: of the run; modified.
    """
    start, depth = model.start, config.num_layers
    if start.std is not None:
        config.init_method = init_method_normal(start.std)
        # Set explicitly also for HybridModel, whose default for output projections is √2 wider.
        config.output_layer_init_method = scaled_init_method_normal(start.std, depth)
        return
    config.init_method = partial(by_fan_in)
    # Megatron initializes the head with the same init_method; the patch output-layer-fusion uses this one instead.
    config.init_method.for_output_layer = partial(by_fan_in, gain=start.head_gain)
    config.output_layer_init_method = partial(by_fan_in, gain=1 / math.sqrt(2 * depth))


@functools.cache
def drawn_by_input_size(linear: type) -> type:
    """Subclass of a Megatron linear layer whose fan-in initialization uses the unsharded input width ``fan_in``.

    It has the name and the call signature of ``linear``.
    """

    def __init__(self: Any, *sizes: int, init_method: Initializer, **options: Any) -> None:
        if isinstance(init_method, partial) and init_method.func is by_fan_in:
            init_method = partial(init_method, fan_in=sizes[-2])
        linear.__init__(self, *sizes, init_method=init_method, **options)  # type: ignore[misc]

    return type(linear.__name__, (linear,), {"__init__": __init__, "__module__": linear.__module__})


def filled(
    shape: tuple[int, ...], config: TransformerConfig, init: Initializer, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Make a tensor of ``shape``, initialized in fp32 on Megatron's init device, then cast to ``dtype`` (None: not cast)."""
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    tensor = torch.empty(shape, dtype=torch.float32, device=device)
    if config.perform_initialization:
        with torch.no_grad():
            init(tensor)
    return tensor if dtype is None else tensor.to(dtype)
