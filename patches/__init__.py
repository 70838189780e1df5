"""The patch set: named, fingerprinted, reversible changes to stock Megatron; importing it changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

if not __name__.startswith("megacpp_mcore."):
    raise ImportError(
        f"this folder was imported as {__name__!r}; its name is 'megacpp_mcore.patches' "
        "(put the repository root on the path and import it through megacpp_mcore)"
    )


def apply(names: Iterable[str]) -> tuple[str, ...]:
    """Apply the named patches to this process; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.apply`."""
    from megacpp_mcore.patches.machinery.registry import default

    return default().apply(names)


def revert(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Revert the named patches, or all; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.revert`."""
    from megacpp_mcore.patches.machinery.registry import default

    return default().revert(names)


def verify() -> None:
    """Fail unless every applied patch is in place; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.verify`."""
    from megacpp_mcore.patches.machinery.registry import default

    default().verify()


def status() -> list[dict[str, Any]]:
    """One JSON-ready record per patch; see :meth:`megacpp_mcore.patches.machinery.registry.Registry.status`."""
    from megacpp_mcore.patches.machinery.registry import default

    return default().status()
