"""Which other packages' kernels this process may use, as the file of ``MEGACPP_CONFIG`` says. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.util.probe import ProbeResult


@dataclass(frozen=True, kw_only=True)
class Vendors:
    """Whether the kernels of each package may be used; set under ``vendors``, by the names of the extras.

    Attributes:
        flash4, quack, liger: the packages of these extras (:mod:`megacpp_mcore.ops.vendors`).
    """

    flash4: bool = True
    quack: bool = True
    liger: bool = True


NAMES = tuple(field.name for field in dataclasses.fields(Vendors))

_switches: dict[str, Any] = {"vendors": Vendors(), "source": ""}


def configure(vendors: Vendors | None, source: str = "") -> None:
    """Set the switches of this process; ``source`` is the file they come from, for messages. None: the defaults."""
    _switches.update(vendors=vendors or Vendors(), source=source)


def allowed(name: str) -> ProbeResult:
    """Return whether the vendor ``name`` of :data:`NAMES` is switched on; it need not be installed."""
    if getattr(_switches["vendors"], name):
        return ProbeResult(True)
    return ProbeResult(False, f"disabled by the settings file (vendors: {{{name}: false}} in {_switches['source']})")
