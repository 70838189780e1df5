"""Imported by the hook line in a checkout; as users' files contain that line, this module must keep its name."""

from __future__ import annotations

from collections.abc import Sequence

from megacpp_mcore.patches.machinery.registry import default


def install(file: str, names: Sequence[str], *, version: str, seal: str = "") -> None:
    """See :meth:`megacpp_mcore.patches.machinery.registry.Registry.install`; older copies wrote a seal into the line."""
    default().install(file, names, version=version)
