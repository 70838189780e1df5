"""Norms by the op ``rms_norm``: a layer's input norm with its residual as one autograd function on a GPU; others without.

Stock's TransformerLayer accepts a pair from its input norm (megatron-core 0.19, ``transformer/transformer_layer.py``) and adds
the pair's residual, so that one kernel sums both gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.layer_specs.parts import Parts, backend_needs


def residual_norm(parts: Parts, dispatcher: Dispatcher) -> Callable[..., torch.nn.Module]:
    """Return a builder with the signature of ``parts.norm``; its module has stock's parameters and checkpoint keys.

    Raises:
        BackendError: when called, if the run names a backend of the op ``rms_norm`` that cannot run here, or that lacks a
            feature of stock's norm which the run requests.
    """
    return functools.partial(_build, parts, dispatcher, parts.residual_norm, True)


def plain_norm(parts: Parts, dispatcher: Dispatcher) -> Callable[..., torch.nn.Module]:
    """Return a builder like that of :func:`residual_norm`, for a norm without a residual."""
    return functools.partial(_build, parts, dispatcher, parts.norm, False)


def why_stock_norm(config: TransformerConfig) -> str | None:
    """Name the first requested feature that only stock's norms support, or None."""
    offloaded = {"attn_norm", "mlp_norm"} & set(config.offload_modules or ())
    for requested, feature in (
        (config.fp32_residual_connection, "--fp32-residual-connection"),
        (_recomputed(config), "--recompute-modules layernorm, which frees what the norm returns"),
        (config.fine_grained_activation_offloading and offloaded, f"offloaded {', '.join(sorted(offloaded))}"),
    ):
        if requested:
            return feature
    return None


def _recomputed(config: TransformerConfig) -> bool:
    return config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ())


def _build(
    parts: Parts,
    dispatcher: Dispatcher,
    stock: Any,
    has_residual: bool,
    config: TransformerConfig,
    hidden_size: int,
    eps: float,
) -> Any:
    backend = dispatcher.resolve_or_stock("rms_norm", why_stock_norm(config), hidden=hidden_size, **backend_needs(config))
    # A recompute would free the residual with the rest of what a fusing norm returns.
    norm = stock if backend.observed == STOCK and not _recomputed(config) else parts.norm
    module = norm(config=config, hidden_size=hidden_size, eps=eps)
    if backend.observed != STOCK:
        module.__class__ = _by_op(module.__class__, has_residual)  # parameters keep their checkpoint keys
        module.returns_residual = has_residual  # Megatron 0.20's norms have an attribute of their own
    module.backend = backend
    return module


@functools.cache
def _by_op(norm: Any, has_residual: bool) -> Any:
    """Subclass of a norm's class, with its name, that runs the op ``rms_norm`` and returns the pair or only the norm."""

    def pair(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize: ``[..., D] -> (normed, residual)``."""
        return self.backend.fn(hidden, self.weight, self.eps)

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize: ``[..., D] -> [..., D]``."""
        return pair(self, hidden)[0]

    members = {"forward": pair if has_residual else forward, "__module__": norm.__module__}
    return type(norm.__name__, (norm,), members)
