"""The patch set: named, fingerprinted, reversible changes to stock Megatron; importing it changes nothing.

A patch is applied "by name" with ``megacpp_mcore.patches.apply([NAME])`` or ``megacpp-mcore launch --patch NAME``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

if not __name__.startswith("megacpp_mcore."):
    raise ImportError(
        f"this folder was imported as {__name__!r}; its name is 'megacpp_mcore.patches' "
        "(put the repository root on the path and import it through megacpp_mcore)"
    )

from megacpp_mcore.patches.machinery.registry import default  # below the check

OF_NAM56R = (
    "mtp-shared-block",
    "masked-losses",
    "dsa-index-cache",
    "checkpoint-hosts",
    "checkpoint-integrity",
    "checkpoint-layout",
    "mixed-precision-optimizer",
    "optimizer-resharding",
    "torch-adam-resume",
    "precision-aware-adam",
    "output-layer-fusion",
    "expert-counts",
    "moe-metrics",
    "torch-fsdp",
    "non-finite-origin",
    "embedding-gradient",
)
"""Patches that NAM56R requires; its specs apply them, no import does.

Two parts of dsa-index-cache matter here: the checkpoint functions, which let a recomputed sparse layer reuse its selection,
and the logged loss. The rest patches stock's DSAttention, and has no effect unless ``experimental_attention_variant`` is set.
"""


def apply(names: Iterable[str]) -> tuple[str, ...]:
    """Apply the named patches to this process; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.apply`."""
    return default().apply(names)


def revert(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Revert the named patches, or all; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.revert`."""
    return default().revert(names)


def verify() -> None:
    """Fail unless every applied patch is in place; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.verify`."""
    default().verify()


def status() -> list[dict[str, Any]]:
    """One JSON-ready record per patch; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.status`."""
    return default().status()
