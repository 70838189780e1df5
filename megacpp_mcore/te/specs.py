"""Feature to class: the class behind each enabled feature of Transformer Engine, None where it is off or unavailable."""

from __future__ import annotations

from megacpp_mcore.util import te_imports

CLASSES = {
    "attention": ("attention", "DotProductAttention"),
    "block_qkv": ("block", "LayerNormLinear"),
    "block_attention": ("block", "DotProductAttention"),
    "block_output": ("block", "Linear"),
    "block_feed_forward": ("block", "LayerNormMLP"),
    "linear": ("linear", "Linear"),
    "experts": ("experts", "GroupedLinear"),
}
"""Each slot with its feature and entry point (:data:`megacpp_mcore.util.te_imports.ENTRIES`)."""


def specs() -> dict[str, type | None]:
    """Return every slot of :data:`CLASSES` with its class; None: use another class there."""
    return {
        slot: te_imports.entry(name) if te_imports.feature(feature).ok else None for slot, (feature, name) in CLASSES.items()
    }


def text() -> str:
    """Return a human-readable line per slot: the class, or why there is none."""
    classes, lines = specs(), []
    for slot, (feature, name) in CLASSES.items():
        description = name if classes[slot] is not None else f"none: {te_imports.feature(feature).reason}"
        lines.append(f"{slot:20}{description}")
    return "\n".join(lines)
