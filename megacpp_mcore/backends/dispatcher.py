"""Chooses a backend for each op of each layer, and records which one was requested and which one runs.

A backend requested by name runs, or the request fails with the reason. One exception: ``MEGACPP_DISABLE_TE`` turns a
request for a Transformer Engine backend into the best other one, and the record says so. ``auto`` selects the first of the
highest speed class that supports the request, other packages' kernels only at sizes where rows show them faster; if its speed
class is below one made for the same device, a warning is logged once and recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.backends import candidates as own
from megacpp_mcore.backends import probes
from megacpp_mcore.backends.candidate import STOCK, Candidate, Speed, unknown
from megacpp_mcore.backends.probes import ProbeResult
from megacpp_mcore.errors import BackendError

logger = logging.getLogger(__name__)

AUTO = "auto"

CHOSEN_ELSEWHERE = {
    "linear": "--transformer-impl",
    "norm": "--transformer-impl",
    "loss": "the patch linear-cross-entropy",
    "optimizer": "--optimizer, and by what Megatron can import",
    "cuda_graph": "--cuda-graph-impl",
}
"""Ops that receipts name but the dispatcher does not choose for, and what does."""


@dataclass(frozen=True)
class Resolution:
    """The backend chosen for one request, and why.

    Attributes:
        op, layer: what it is for; the layer is the 1-based global number, or ``None`` outside layers.
        requested: a candidate's name, or ``auto``.
        observed: the candidate that runs.
        speed: its class.
        slower_than_best: whether a candidate of a faster class, made for this device, was passed over.
        reason: why this one, with what was passed over.
        fn: the callable; None in a record of what the dispatcher did not choose.
    """

    op: str
    layer: int | None
    requested: str
    observed: str
    speed: Speed
    slower_than_best: bool
    reason: str
    fn: Any = None

    def as_record(self) -> dict[str, Any]:
        """Return the JSON-ready record, as in receipts."""
        record = vars(self) | {"speed": self.speed.name.lower()}
        del record["fn"]
        return record


class Dispatcher:
    """Chooses among candidates and records each choice.

    Args:
        requests: op to the requested name, as in ``MEGACPP_CONFIG``; missing ops are ``auto``.
        candidates: all implementations, with unique names per op; by default those of this package.

    Raises:
        BackendError: a request names an op or a candidate that does not exist, or two candidates share a name.
    """

    def __init__(self, requests: Mapping[str, str] | None = None, candidates: Iterable[Candidate] | None = None) -> None:
        self._candidates: dict[str, dict[str, Candidate]] = {}
        for candidate in own.own_candidates() if candidates is None else candidates:
            of_op = self._candidates.setdefault(candidate.op, {})
            if candidate.name in of_op or candidate.name == AUTO:
                raise BackendError(
                    f"op {candidate.op}: the name {candidate.name!r} is taken; names must be unique", code="taken"
                )
            of_op[candidate.name] = candidate
        self._requests = dict(requests or {})
        for op, name in self._requests.items():
            self._known(op, name)
        self._probes: dict[tuple[str, str], ProbeResult] = {}
        self._resolutions: dict[tuple[Any, ...], Resolution] = {}
        self._lock = threading.RLock()

    def request(self, op: str, name: str | None = None, *, layer: int | None = None, **needs: Any) -> Resolution:
        """Resolve ``op`` for ``layer``: by ``name``, else by the mapping, else ``auto``.

        Args:
            op: the op.
            name: a candidate's name or ``auto``; ``None`` leaves it to the dispatcher's ``requests``.
            layer: the 1-based global layer number it is for.
            needs: what the candidate has to support (:meth:`megacpp_mcore.backends.support.Support.lacking`).

        Raises:
            BackendError: the op or name is unknown, the named candidate cannot run or does not support the needs, or no
                candidate does; with the reasons.
        """
        requested = name or self._requests.get(op, AUTO)
        self._known(op, requested)
        key = (op, layer, requested, *sorted((need, repr(value)) for need, value in needs.items()))
        with self._lock:
            if key not in self._resolutions:
                self._resolutions[key] = self._resolve(op, requested, layer, needs)
            return self._resolutions[key]

    def resolve_or_stock(self, op: str, stock_reason: str | None, **needs: Any) -> Resolution:
        """Resolve ``op`` like :meth:`request`, but to stock if the run requests a feature that only stock has.

        Args:
            op: an op that has the candidate :data:`STOCK`.
            stock_reason: that feature, for the reason; None: no such feature.
            needs: as in :meth:`request`.

        Raises:
            BackendError: as :meth:`request`, or the run requests both another candidate by name and such a feature.
        """
        requested = self._requests.get(op, AUTO)
        if stock_reason is None or requested == STOCK:
            return self.request(op, **needs)
        if requested != AUTO:
            raise BackendError(
                f"backends: {{{op}: {requested}}} conflicts with {stock_reason}, which only Megatron's implementation "
                "supports; remove one of them",
                code="stock-only",
            )
        with self._lock:
            resolution = self._by_name(op, STOCK, None, needs)
            reason = f"only Megatron's implementation supports {stock_reason}"
            resolution = dataclasses.replace(resolution, requested=AUTO, reason=reason)
            return self._resolutions.setdefault((op, stock_reason), resolution)

    def request_in_place(self, op: str, taken: str, better: str | None, reason: str, **needs: Any) -> Resolution:
        """Resolve ``op`` like :meth:`request`; if ``auto`` takes ``taken``, take ``better`` (None: keep it) for ``reason``."""
        with self._lock:
            resolution = self.request(op, **needs)
            if better is None or resolution.requested != AUTO or resolution.observed != taken:
                return resolution
            key = next(key for key, resolved in self._resolutions.items() if resolved is resolution)
            layer = needs.pop("layer", None)
            replacement = self._by_name(op, better, layer, needs)
            self._resolutions[key] = dataclasses.replace(replacement, requested=AUTO, reason=reason)
            return self._resolutions[key]

    def check_named(self) -> None:
        """Refuse, before anything is built, a backend requested by name whose requirements this machine does not meet.

        A layer's needs, and probes that run the backend, are checked when the layer is built.

        Raises:
            BackendError: as :meth:`request`.
        """
        for op, name in self._requests.items():
            requires = () if name == AUTO else self._candidates[op][name].requires
            if probes.TRANSFORMER_ENGINE in requires and probes.te_disabled():
                continue
            for requirement in requires:
                if not (probed := probes.requirement(requirement)).ok:
                    raise self._cannot_run(op, name, "", probed.reason)

    def is_automatic(self, op: str) -> bool:
        """Return whether no backend of ``op`` was requested by name."""
        return self._requests.get(op, AUTO) == AUTO

    def without_kernel(self, op: str, **needs: Any) -> str | None:
        """Return why no kernel that ``auto`` may choose runs ``op``; None if one does. Resolves nothing."""
        reasons = []
        for candidate in self._candidates[op].values():
            if not candidate.auto or candidate.unproven(needs) or candidate.speed != Speed.KERNEL:
                continue
            reason = candidate.foreign(needs)
            if reason is None:
                with self._lock:
                    present = self._probe(candidate)
                reason = candidate.support.lacking(needs) if present.ok else present.reason
            if reason is None:
                return None
            reasons.append(f"{candidate.name}: {reason}")
        return "; ".join(reasons) or "it has none"

    def observed_backends(self) -> list[dict[str, Any]]:
        """Return one JSON-ready record per resolution so far, in order."""
        with self._lock:
            return [resolution.as_record() for resolution in self._resolutions.values()]

    def _known(self, op: str, name: str) -> None:
        if op not in self._candidates and op in CHOSEN_ELSEWHERE:
            raise BackendError(
                f"op {op} is not chosen by name: {CHOSEN_ELSEWHERE[op]} decides; leave it out", code="not-by-name"
            )
        if op not in self._candidates:
            raise BackendError(unknown("op", op, self._candidates))
        if name != AUTO and name not in self._candidates[op]:
            raise BackendError(unknown(f"backend for op {op}", name, [AUTO, *self._candidates[op]]))

    def _probe(self, candidate: Candidate) -> ProbeResult:
        key = (candidate.op, candidate.name)
        if key not in self._probes:
            self._probes[key] = candidate.present()
        return self._probes[key]

    def _resolve(self, op: str, requested: str, layer: int | None, needs: Mapping[str, Any]) -> Resolution:
        if requested == AUTO:
            return self._automatic(op, requested, layer, needs)
        if probes.TRANSFORMER_ENGINE in self._candidates[op][requested].requires and probes.te_disabled():
            resolution = self._automatic(op, requested, layer, needs)
            _warn_once(f"op {op}: requested {requested}, running {resolution.observed}: {probes.te_disabled()}")
            return resolution
        return self._by_name(op, requested, layer, needs)

    def _by_name(self, op: str, name: str, layer: int | None, needs: Mapping[str, Any]) -> Resolution:
        candidate, where = self._candidates[op][name], "" if layer is None else f" in layer {layer}"
        present = self._probe(candidate)
        if lacking := candidate.support.lacking(needs) if present.ok else present.reason:
            raise self._cannot_run(op, name, where, lacking)
        try:
            fn = candidate.load()
        except Exception as error:
            raise self._cannot_run(op, name, where, f"loading it failed: {error!r}") from error
        return Resolution(op, layer, name, name, candidate.speed, False, "requested by name", fn)

    def _cannot_run(self, op: str, name: str, where: str, lacking: str) -> BackendError:
        others = [AUTO, *(other for other in self._candidates[op] if other != name)]
        return BackendError(
            f"backend {name!r} cannot run op {op}{where}: {lacking}; choose one of {', '.join(others)}",
            code="cannot-run",
        )

    def _automatic(self, op: str, requested: str, layer: int | None, needs: Mapping[str, Any]) -> Resolution:
        passed_over: list[str] = []
        best: Speed | None = None  # among candidates made for this device, usable here or not
        for candidate in sorted(self._candidates[op].values(), key=lambda candidate: -candidate.speed):
            if not candidate.auto:
                continue
            if not candidate.support.is_for(needs.get("device")):
                passed_over.append(f"{candidate.name} is for {' or '.join(candidate.support.devices)}")
                continue
            if (unproven := candidate.unproven(needs)) is not None:  # before its probe, which may compile kernels
                passed_over.append(f"{candidate.name} was not measured to be faster here: {unproven}")
                continue
            best = candidate.speed if best is None else best
            foreign = candidate.foreign(needs)
            if foreign is not None:  # before its probe, too
                passed_over.append(f"{candidate.name}: {foreign}")
                continue
            present = self._probe(candidate)
            if not present.ok:
                passed_over.append(f"{candidate.name} is not available: {present.reason}")
                continue
            lacking = candidate.support.lacking(needs)
            if lacking is not None:
                passed_over.append(f"{candidate.name} does not support this call: {lacking}")
                continue
            try:
                fn = candidate.load()
            except Exception as error:
                passed_over.append(f"{candidate.name} did not load: {error!r}")
                continue
            slower = candidate.speed < best
            reason = "; ".join(passed_over) or "fastest available"
            if slower and requested == AUTO:
                _warn_once(f"op {op} runs on {candidate.name}, slower than the best for this device: {reason}")
            return Resolution(op, layer, requested, candidate.name, candidate.speed, slower, reason, fn)
        raise BackendError(f"no backend can run op {op}: {'; '.join(passed_over)}", code="none-runs")


@functools.cache
def _warn_once(message: str) -> None:
    """Warn once per process, since every model chunk has its own dispatcher."""
    logger.warning(message)
