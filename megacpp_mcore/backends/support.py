"""What a backend supports, as data that is matched against a request's needs and printed. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacpp_mcore.errors import BackendError
from megacpp_mcore.util.nearest import nearest_number

DEVICES = ("cpu", "cuda")
DTYPES = ("float64", "float32", "bfloat16", "float16")

_OPTIONS = {
    "packed": "it does not keep packed documents apart",
    "deterministic": "its gradients can differ from run to run",
    "capturable": "a CUDA graph cannot hold it (leave --cuda-graph-impl out)",
}
"""The yes/no needs, each with the reason for skipping a candidate without it."""


@dataclass(frozen=True, kw_only=True)
class Dim:
    """The supported sizes of one dimension."""

    multiple_of: int = 1
    largest: int | None = None
    one_of: tuple[int, ...] = ()

    def lacking(self, name: str, size: int) -> str | None:
        """Return why ``size`` is not supported, or None."""
        if self.one_of and size not in self.one_of:
            supported, nearest = ", ".join(map(str, self.one_of)), nearest_number(size, self.one_of)
            return f"{name} {size} is not one of {supported}; the nearest is {nearest}"
        if size % self.multiple_of:
            return f"{name} {size} is not a multiple of {self.multiple_of}"
        return f"{name} {size} > {self.largest}" if self.largest is not None and size > self.largest else None

    def __str__(self) -> str:
        words = [f"one of {', '.join(map(str, self.one_of))}"] if self.one_of else []
        words += [f"× {self.multiple_of}"] if self.multiple_of > 1 else []
        words += [f"≤ {self.largest}"] if self.largest is not None else []
        return " ".join(words) or "any"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a candidate supports.

    Attributes:
        devices: where it runs, of :data:`DEVICES`.
        archs: by GPU architecture, such as ``sm_90``, the worst compile result of its kernels there, empty where they
            fit and spill nothing; on all others it runs only if requested by name. Without any, the GPU does not matter.
        dtypes: of its inputs, of :data:`DTYPES`.
        dims: sizes of dimensions, by the names used in requests; other dimensions may have any size.
        combinations: allowed combinations of sizes by name, one of which a request has to match; empty: any.
        packed: whether it separates the documents of a packed row (THD).
        deterministic: whether equal inputs give bit-identical results, forward and backward.
        capturable: whether a CUDA graph can capture it.
    """

    devices: tuple[str, ...] = DEVICES
    archs: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    dims: Mapping[str, Dim] = field(default_factory=dict)
    combinations: tuple[Mapping[str, int], ...] = ()
    packed: bool = True
    deterministic: bool = True
    capturable: bool = True

    @property
    def excluded(self) -> tuple[str, ...]:
        """The needs it does not support at any size."""
        none = (name for name, dim in self.dims.items() if dim.largest == 0)
        return (*(name for name in _OPTIONS if not getattr(self, name)), *none)

    def is_for(self, device: str | None) -> bool:
        """Return whether it is meant for ``device`` at all; None: the request has no device."""
        return device is None or device in self.devices

    def foreign(self, arch: str | None) -> str | None:
        """Return why ``auto`` does not take it on a GPU of ``arch``, or None; None: there is no GPU."""
        if arch is None or not self.archs or self.archs.get(arch) == "":
            return None
        worst, fitting = self.archs.get(arch, "none was compiled for it"), self.as_record()["archs"]
        return f"its kernels are for {', '.join(fitting)}, and this GPU is {arch}: {worst}"

    def lacking(self, needs: Mapping[str, Any]) -> str | None:
        """Return why ``needs`` are not met, or None.

        Args:
            needs: ``device``, ``dtype`` (torch's name, with or without its prefix), ``packed``, ``deterministic``,
                ``capturable`` (whether it is needed; None: it may be), and sizes of dimensions; all may be left out.

        Raises:
            BackendError: unknown need.
        """
        reasons = [self._why_not(name, value) for name, value in needs.items()]
        unmet = "; ".join(reason for reason in reasons if reason)
        return unmet or self._why_not_combined(needs)

    def _why_not_combined(self, needs: Mapping[str, Any]) -> str | None:
        """Return why this combination of sizes is not supported, or None."""
        if not self.combinations or any(
            all(needs.get(name, size) == size for name, size in sizes.items()) for sizes in self.combinations
        ):
            return None
        names = [name for name in self.combinations[0] if name in needs]
        requested = ", ".join(f"{name} {needs[name]}" for name in names)
        expected = " or ".join(", ".join(f"{name} {sizes[name]}" for name in names) for sizes in self.combinations)
        return f"unsupported combination {requested}; supported: {expected}"

    def _why_not(self, name: str, value: Any) -> str | None:
        if name == "device":
            return None if self.is_for(value) else f"it runs on {' or '.join(self.devices)}, not on {value}"
        if name == "dtype":
            dtype = str(value).removeprefix("torch.")
            return None if dtype in self.dtypes else f"dtype {dtype} is not one of {', '.join(self.dtypes)}"
        if name in _OPTIONS:
            return _OPTIONS[name] if value is not False and not getattr(self, name) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return self.dims[name].lacking(name, value) if name in self.dims else None
        raise BackendError(
            f"a request needs {name}={value!r}; expected device, dtype, {', '.join(_OPTIONS)}, or the size of a dimension"
        )

    def as_record(self) -> dict[str, Any]:
        """Return the JSON-ready record, for a table."""
        return {
            "devices": list(self.devices),
            "archs": [name for name, worst in self.archs.items() if not worst],
            "dtypes": list(self.dtypes),
            "dims": {name: str(dim) for name, dim in self.dims.items()},
            **{name: getattr(self, name) for name in _OPTIONS},
        }
