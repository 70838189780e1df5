"""The backend dispatcher: per op its candidates, what was requested, what was observed, and why.

A candidate is one implementation of one op. ``probe`` answers, once a process, whether it can run on this machine;
``supports`` answers for one request (shapes, dtypes, options) whether it covers it. Every resolution is recorded for
the receipt of the run. A backend asked for by name runs, or the request fails with the reason; ``auto`` takes the
fastest that covers the request, and says so when that is slower than the best one that is present.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megacpp_mcore.errors import BackendError

logger = logging.getLogger(__name__)

AUTO = "auto"


class Speed(enum.IntEnum):
    """How fast a candidate is in kind: ``auto`` never goes down a class in silence."""

    REFERENCE = 0  # plain PyTorch, the truth of the op
    COMPILED = 1  # fused or compiled, on any device it names
    KERNEL = 2  # written for the device


@dataclass(frozen=True)
class ProbeResult:
    """Whether something can be used on this machine; ``reason`` says why not."""

    ok: bool
    reason: str = ""


def _available() -> ProbeResult:
    return ProbeResult(True)


def _covers_all(needs: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One implementation of one op.

    Attributes:
        name: what a user asks for, unique within the op.
        op: the op it implements.
        speed: its class.
        load: imports it and returns the callable.
        probe: whether it can run on this machine at all.
        supports: given the needs of one request, why it does not cover them, or ``None``.
    """

    name: str
    op: str
    speed: Speed
    load: Callable[[], Callable[..., Any]]
    probe: Callable[[], ProbeResult] = _available
    supports: Callable[[Mapping[str, Any]], str | None] = _covers_all


@dataclass(frozen=True)
class Resolution:
    """The answer to one request.

    Attributes:
        op, layer: what it is for; the layer is the 1-based global number, or ``None`` outside of layers.
        requested: a candidate's name, or ``auto``.
        observed: the candidate that runs.
        speed: its class.
        slower_than_best: whether a present candidate of a faster class was passed over.
        reason: why this one, with what was passed over.
        fn: the callable.
    """

    op: str
    layer: int | None
    requested: str
    observed: str
    speed: Speed
    slower_than_best: bool
    reason: str
    fn: Callable[..., Any]


class Dispatcher:
    """Chooses among candidates and keeps the record of what was chosen.

    Args:
        requests: op to the name asked for, as in ``MEGACPP_CONFIG``; ops that it leaves out are ``auto``.
        candidates: all implementations; those of one op need different names. By default the ones of this package.

    Raises:
        BackendError: a request names an op or a candidate that does not exist, or two candidates share a name.
    """

    def __init__(
        self, requests: Mapping[str, str] | None = None, candidates: Iterable[Candidate] | None = None
    ) -> None:
        self._candidates: dict[str, dict[str, Candidate]] = {}
        for candidate in own_candidates() if candidates is None else candidates:
            of_op = self._candidates.setdefault(candidate.op, {})
            if candidate.name in of_op or candidate.name == AUTO:
                raise BackendError(f"op {candidate.op}: the name {candidate.name!r} is taken; names must be unique")
            of_op[candidate.name] = candidate
        self._requests = dict(requests or {})
        for op, name in self._requests.items():
            self._known(op, name)
        self._probes: dict[tuple[str, str], ProbeResult] = {}
        self._resolutions: dict[tuple[Any, ...], Resolution] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()

    def request(self, op: str, name: str | None = None, *, layer: int | None = None, **needs: Any) -> Resolution:
        """Resolve ``op`` for ``layer``: by ``name``, else by what the mapping asks for, else ``auto``.

        Args:
            op: the op.
            name: a candidate's name or ``auto``; ``None`` leaves it to the mapping given to the dispatcher.
            layer: the 1-based global layer number it is for.
            needs: what the candidate has to cover (dtype, head dims, device, …), passed to its ``supports``.

        Raises:
            BackendError: the op or name is unknown, the named candidate cannot run or does not cover the needs, or
                nothing covers them; with the reasons.
        """
        requested = name or self._requests.get(op, AUTO)
        self._known(op, requested)
        key = (op, layer, requested, *sorted((need, repr(value)) for need, value in needs.items()))
        with self._lock:
            if key not in self._resolutions:
                resolve = self._automatic if requested == AUTO else self._by_name
                self._resolutions[key] = resolve(op, requested, layer, needs)
            return self._resolutions[key]

    def observed_backends(self) -> list[dict[str, Any]]:
        """One JSON-ready record a resolution so far, in the order in which they were made."""
        with self._lock:
            return [
                {
                    "op": made.op,
                    "layer": made.layer,
                    "requested": made.requested,
                    "observed": made.observed,
                    "speed": made.speed.name.lower(),
                    "slower_than_best": made.slower_than_best,
                    "reason": made.reason,
                }
                for made in self._resolutions.values()
            ]

    def _known(self, op: str, name: str) -> None:
        if op not in self._candidates:
            raise BackendError(_unknown("op", op, self._candidates))
        if name != AUTO and name not in self._candidates[op]:
            raise BackendError(_unknown(f"backend for op {op}", name, [AUTO, *self._candidates[op]]))

    def _probe(self, candidate: Candidate) -> ProbeResult:
        key = (candidate.op, candidate.name)
        if key not in self._probes:
            try:
                self._probes[key] = candidate.probe()
            except Exception as error:
                self._probes[key] = ProbeResult(False, f"its probe failed: {error!r}")
        return self._probes[key]

    def _by_name(self, op: str, name: str, layer: int | None, needs: Mapping[str, Any]) -> Resolution:
        candidate = self._candidates[op][name]
        present = self._probe(candidate)
        lacking = candidate.supports(needs) if present.ok else present.reason
        if not lacking:
            try:
                fn = candidate.load()
                return Resolution(op, layer, name, name, candidate.speed, False, "asked for by name", fn)
            except Exception as error:
                lacking = f"loading it failed: {error!r}"
                cause: Exception | None = error
        else:
            cause = None
        where = "" if layer is None else f" in layer {layer}"
        raise BackendError(
            f"backend {name!r} was asked for by name for op {op}{where} and cannot run: {lacking}; "
            f"ask for another one of {', '.join([AUTO, *self._candidates[op]])}"
        ) from cause

    def _automatic(self, op: str, requested: str, layer: int | None, needs: Mapping[str, Any]) -> Resolution:
        passed_over: list[str] = []
        best_present: Speed | None = None
        for candidate in sorted(self._candidates[op].values(), key=lambda one: -one.speed):
            present = self._probe(candidate)
            if not present.ok:
                passed_over.append(f"{candidate.name} is not there: {present.reason}")
                continue
            best_present = candidate.speed if best_present is None else best_present
            lacking = candidate.supports(needs)
            if lacking is not None:
                passed_over.append(f"{candidate.name} does not cover this: {lacking}")
                continue
            try:
                fn = candidate.load()
            except Exception as error:
                passed_over.append(f"{candidate.name} did not load: {error!r}")
                continue
            slower = candidate.speed < best_present
            reason = "; ".join(passed_over) or "the fastest there is"
            if slower:
                self._warn_once(f"op {op} runs on {candidate.name}, slower than what is present: {reason}")
            return Resolution(op, layer, requested, candidate.name, candidate.speed, slower, reason, fn)
        raise BackendError(f"no backend can run op {op}: {'; '.join(passed_over)}")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def own_candidates() -> tuple[Candidate, ...]:
    """The implementations in this package; none is imported before it is chosen."""
    return tuple(
        Candidate(name="reference", op=op, speed=Speed.REFERENCE, load=functools.partial(_load, path))
        for op, path in _REFERENCES.items()
    )


_REFERENCES = {
    "mla": "megacpp_mcore.ops.mla.reference:mla_attention",
    "sparse_mla": "megacpp_mcore.ops.sparse_mla.reference:sparse_mla_attention",
    "indexer": "megacpp_mcore.ops.indexer.reference:indexer_scores",
    "mamba3": "megacpp_mcore.ops.mamba3.reference:mamba3",
    "m2rnn": "megacpp_mcore.ops.m2rnn.reference:m2rnn_chunked",
}

APEX_PARTS = ("amp_C", "apex.optimizers", "fused_weight_gradient_mlp_cuda")
"""What NVIDIA Apex brings when built from source with its extensions; nothing else that is called apex has them."""


@functools.cache
def apex_parts() -> dict[str, ProbeResult]:
    """Which parts of NVIDIA Apex work here, each by a real import, run once.

    A package of another origin that is called ``apex`` is not imported: without ``amp_C`` its parts are not NVIDIA's.
    """
    found = {part: probe_import(part) for part in ("amp_C", "fused_weight_gradient_mlp_cuda")}
    if found["amp_C"].ok:
        found["apex.optimizers"] = probe_import("apex.optimizers")
    else:
        found["apex.optimizers"] = ProbeResult(False, "it needs amp_C")
    return {part: found[part] for part in APEX_PARTS}


def probe_import(module: str) -> ProbeResult:
    """Import ``module`` (torch first: extensions link against it) and say why that failed, if it did."""
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return ProbeResult(False, f"{module.partition('.')[0]} is not installed")
        importlib.import_module("torch")
        importlib.import_module(module)
    except Exception as error:
        return ProbeResult(False, f"importing {module} failed: {error!r}")
    return ProbeResult(True)


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(names)}"
    return f"there is no {kind} called {name!r}; {hint}"
