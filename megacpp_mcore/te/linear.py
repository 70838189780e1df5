"""Replacement of dense linear layers by Transformer Engine's in a built model, with a list of exclusions and a report.

A whitelist of kinds, then a fixed list of exclusions by name and by role: layers that are too small to gain, shared with
another module, or owned by a wrapper stay unchanged. Parameters are moved, not copied: a replaced layer keeps its names,
values, attributes and checkpoints.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megacpp_mcore.errors import BackendError
from megacpp_mcore.util import te_imports
from megacpp_mcore.util.te_imports import ALIGNMENT

EXCLUDED: tuple[tuple[str, str], ...] = (
    (r"structure", "structure embedding"),
    (r"embedding|output_layer|lm_head", "token embedding or output head, which may be tied"),
    (r"(^|[._])mod_?router|depth_router", "router over depth (MoD)"),
    (r"router|(^|\.)gate$", "router of experts"),
    (r"(^|[._])(mhc|hyper_?connection)", "score projection of hyper-connections"),
    (r"n_?gram|engram", "projection of n-gram hashes"),
    (r"lora_|(^|[._])adapter", "adapter"),
    (r"indexer", "indexer, which selects keys"),
    (r"(^|[._])experts\.", "routed expert, whose products are grouped"),
)
"""Patterns of module names that stay, each with a description; searched in the whole dotted name."""

_OWNERS = ("LoRA", "Adapter", "Wrapper", "Parametrized")
"""Parts of class names of modules that own a linear layer inside of them."""


@dataclass(frozen=True)
class Decision:
    """Decision about one linear layer; ``why`` is empty if it is replaced."""

    name: str
    kind: str
    why: str = ""

    @property
    def swap(self) -> bool:
        """Whether it is replaced."""
        return not self.why


def plan(model: torch.nn.Module) -> list[Decision]:
    """List what :func:`replace` would do with each linear layer of ``model``, in module order. Changes nothing."""
    tied: dict[int, list[str]] = defaultdict(list)  # the names under which each parameter is found, by identity
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied[id(parameter)].append(name)
    return [
        Decision(name, type(module).__name__, _why_not(model, name, module, tied))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | ColumnParallelLinear | RowParallelLinear)
    ]


def replace(model: torch.nn.Module) -> list[Decision]:
    """Replace every layer that :func:`plan` names, in place.

    Returns:
        The plan that was carried out.

    Raises:
        BackendError: the feature is off, or Transformer Engine is not installed; nothing was changed.
    """
    if not (probe := te_imports.feature("linear")).ok:
        raise BackendError(f"linear layers cannot be replaced by Transformer Engine's: {probe.reason}")
    decisions = plan(model)
    replacements = {decision.name: _make(model.get_submodule(decision.name)) for decision in decisions if decision.swap}
    for name, module in replacements.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return decisions


def report(decisions: Sequence[Decision]) -> str:
    """Return one line: how many were replaced, and the names of the others by why they stay."""
    left: dict[str, list[str]] = defaultdict(list)
    for decision in decisions:
        if not decision.swap:
            left[decision.why].append(decision.name)
    swapped = sum(decision.swap for decision in decisions)
    return "; ".join([f"{swapped} of {len(decisions)} replaced", *(f"{', '.join(v)}: {k}" for k, v in left.items())])


def _why_not(model: torch.nn.Module, name: str, module: Any, tied: dict[int, list[str]]) -> str:
    for pattern, role in EXCLUDED:
        if re.search(pattern, name, re.IGNORECASE):
            return role
    if not name:
        return "the model itself"
    parts = name.split(".")[:-1]
    owners = (type(model.get_submodule(".".join(parts[:length]))).__name__ for length in range(len(parts) + 1))
    if owner := next((owner_class for owner_class in owners if any(part in owner_class for part in _OWNERS)), None):
        return f"owned by {owner}"
    if type(module).forward not in (torch.nn.Linear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward):
        return f"{type(module).__name__} has a forward pass of its own"
    if isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear:
        return f"{type(module).__name__} is a class of its own"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "hooks are registered on it"
    if module.weight is None:
        return "its weight is another module's"
    if others := [other for other in tied[id(module.weight)] if other != f"{name}.weight"]:
        return f"tied with {', '.join(others)}"
    if any(width % ALIGNMENT for width in module.weight.shape):
        return f"widths {tuple(module.weight.shape)} are not multiples of {ALIGNMENT}"
    if getattr(module, "gather_output", False) or not getattr(module, "input_is_parallel", True):
        return "it gathers its output or scatters its input, which Transformer Engine's does not"
    if getattr(module, "disable_grad_reduce", False):
        return "its input gradient is summed elsewhere, and Transformer Engine's sums it"
    return ""


def _make(module: Any) -> Any:
    """Make Transformer Engine's layer with the parameters of ``module``."""
    if isinstance(module, torch.nn.Linear):
        layer = te_imports.entry("Linear")(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
            device="meta",
        )
    else:
        is_column = isinstance(module, ColumnParallelLinear)
        layer = te_imports.entry("TEColumnParallelLinear" if is_column else "TERowParallelLinear")(
            module.input_size,
            module.output_size,
            config=module.config,
            init_method=lambda weight: None,
            bias=module.bias is not None,
            skip_bias_add=module.skip_bias_add,
            is_expert=module.is_expert,
            tp_group=module.tp_group,
            **({"gather_output": False} if is_column else {"input_is_parallel": True}),
        )
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None:
            layer.register_parameter(name, getattr(module, name))
    layer.train(module.training)
    return layer
