"""One implementation of one op: what it is called, how fast it is, what it supports, and how it is loaded. No torch."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore import versions
from megacpp_mcore.backends import probes, vendor_switches
from megacpp_mcore.backends.probes import ProbeResult
from megacpp_mcore.backends.support import Support
from megacpp_mcore.errors import BackendError
from megacpp_mcore.util.nearest import nearest

STOCK = "stock"
"""The name of the candidate that is Megatron's own module, in ops that have one."""


class Speed(enum.IntEnum):
    """Speed class of a candidate: ``auto`` never falls back to a slower class silently."""

    REFERENCE = 0  # plain PyTorch, the truth of the op
    COMPILED = 1  # fused or compiled, on any device it names
    KERNEL = 2  # written for the device


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One implementation of one op.

    Attributes:
        name: the name users request, unique within the op.
        op: the op it implements.
        speed: its class.
        load: imports it and returns the callable.
        support: what it supports.
        requires: what this machine must have, of :data:`megacpp_mcore.backends.probes.REQUIREMENTS`, and the vendor of
            :data:`megacpp_mcore.backends.vendor_switches.NAMES` that must not be disabled.
        probe: an additional check, run once before use.
        auto: whether ``auto`` may take it for all that it supports, or only for some requests among those; False: it runs
            only if requested by name, because it is less accurate, or no benchmark row shows that it is faster.
        beyond: what later candidates also support, and run faster: ``auto`` takes this one for other requests only.
    """

    name: str
    op: str
    speed: Speed
    load: Callable[[], Callable[..., Any]]
    support: Support = field(default_factory=Support)
    requires: tuple[str, ...] = ()
    probe: Callable[[], ProbeResult] | None = None
    auto: Support | bool = True
    beyond: Support | None = None

    def __post_init__(self) -> None:
        valid = (*probes.REQUIREMENTS, *vendor_switches.NAMES)
        for name in self.requires:
            if name not in valid:
                raise BackendError(unknown(f"requirement of backend {self.name}", name, valid))

    def unproven(self, needs: Mapping[str, Any]) -> str | None:
        """Return why ``auto`` does not take it for a request that it supports, or None."""
        needed = {name: value for name, value in needs.items() if value is not None}
        if self.beyond is not None and self.beyond.lacking(needed) is None:
            return f"it is for calls that need {' or '.join(self.beyond.excluded)}"
        return self.auto.lacking(needs) if isinstance(self.auto, Support) else None

    def foreign(self, needs: Mapping[str, Any]) -> str | None:
        """Return why ``auto`` does not take it with this GPU and this Triton, or None; None if it is not for a GPU."""
        if needs.get("device") != "cuda":
            return None
        release = probes.triton_release() if probes.TRITON in self.requires else ""
        spilling = versions.TRITON.get(release, {}).get(self.op)
        if spilling and all(needs.get(name) == size for name, size in spilling.items()):
            sizes = ", ".join(f"{name} {size}" for name, size in spilling.items())
            return f"with Triton {release} its kernels spill registers at {sizes}"
        return self.support.foreign(probes.arch())

    def present(self) -> ProbeResult:
        """Return whether this machine meets its requirements; a probe that raises means no."""
        for name in self.requires:
            probed = probes.requirement(name)
            if not probed.ok:
                return probed
        try:
            return ProbeResult(True) if self.probe is None else self.probe()
        except Exception as error:
            return ProbeResult(False, f"its probe failed: {error!r}")


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name, with its nearest matches."""
    return f"there is no {kind} called {name!r}; {nearest(name, known)}"
