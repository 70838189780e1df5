"""The norm that a layer begins with, and the residual around the layer: on a GPU one function of both.

Stock's TransformerLayer takes a pair from that norm (megatron-core 0.19, ``transformer/transformer_layer.py``), and adds the
residual of the pair; both gradients then meet in one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.layer_specs.parts import backend_needs


def residual_norm(norm: Any, dispatcher: Dispatcher) -> Callable[..., torch.nn.Module]:
    """A builder, called as Megatron calls ``norm``; its module has the parameters and the checkpoint of ``norm``'s.

    Raises:
        BackendError: when called, if the op ``rms_norm`` is asked for by name and cannot run, or the run asks for something
            that stock alone can do.
    """
    return functools.partial(_build, norm, dispatcher)


def stock_alone(config: TransformerConfig) -> str | None:
    """What a run asks of these norms that only stock's can do, or None."""
    recomputed = config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ())
    offloaded = {"attn_norm", "mlp_norm"} & set(config.offload_modules or ())
    for asked, what in (
        (config.normalization != "RMSNorm", f"--normalization {config.normalization}"),
        (config.layernorm_zero_centered_gamma, "--apply-layernorm-1p"),
        (config.fp32_residual_connection, "--fp32-residual-connection"),
        (recomputed, "--recompute-modules layernorm, which frees what the norm returns"),
        (config.fine_grained_activation_offloading and offloaded, f"offloaded {', '.join(sorted(offloaded))}"),
    ):
        if asked:
            return what
    return None


def _build(norm: Any, dispatcher: Dispatcher, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
    module = norm(config=config, hidden_size=hidden_size, eps=eps)
    backend = dispatcher.request_or_stock("rms_norm", stock_alone(config), hidden=hidden_size, **backend_needs(config))
    if backend.observed != STOCK:
        module.__class__ = _with_residual(module.__class__)  # the parameters stay where checkpoints have them
    module.backend = backend
    return module


@functools.cache
def _with_residual(norm: Any) -> Any:
    """Subclass of a norm's class, of its name, that returns what the op ``rms_norm`` does."""

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[..., D] -> (normed, residual)``."""
        pair: tuple[torch.Tensor, torch.Tensor] = self.backend.fn(hidden, self.weight, self.eps)
        return pair

    return type(norm.__name__, (norm,), {"forward": forward, "__module__": norm.__module__})
