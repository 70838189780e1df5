"""The record of one patch (description and edits), and its checks against the files of a Megatron tree."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.patches.machinery.source_tree import SourceTree
from megacpp_mcore.patches.machinery.symbols import Refusal, digest
from megacpp_mcore.util.stand_in import standing_in
from megacpp_mcore.versions import MEGATRON_CORE

NOT_MEASURED = "not measured"
Function = Callable[..., Any]


def replacement(body: Function) -> Callable[[Function], Function]:
    """Make the ``make`` of an :class:`Edit` of a ``body`` that is called with the original, then a call's own arguments."""
    return functools.partial(standing_in, run=body)


def bound_replacement(body: Function) -> Callable[[Function], Function]:
    """As :func:`replacement`, of a ``body`` that is called with the original and the arguments, bound to its parameters."""

    @functools.wraps(body)
    def make(original: Function) -> Function:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return body(original, signature.bind(*args, **kwargs))

        return replaced

    return make


def named_replacement(known: str) -> Callable[[Function], Callable[[Function], Function]]:
    """As :func:`replacement`, of a ``body`` that replaces its target and leaves some calls to it.

    The body is called with the call to the original, itself without arguments, and all arguments by name, defaults included.

    Args:
        known: the names, separated by spaces, of all parameters that the body uses or may ignore.

    Raises:
        Refusal: when made: ``target changed``, the target has a parameter that the body would ignore.
    """

    def of(body: Function) -> Callable[[Function], Function]:
        @functools.wraps(body)
        def make(original: Function) -> Function:
            signature = inspect.signature(original)
            if unknown := [name for name in signature.parameters if name not in known.split()]:
                place = f"{original.__module__}:{original.__qualname__}"
                raise Refusal(
                    "target changed",
                    f"{place} has parameters that its replacement would ignore: {', '.join(unknown)}; leave the patch out",
                )

            @functools.wraps(original)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                return body(functools.partial(original, *args, **kwargs), SimpleNamespace(**bound.arguments))

            return replaced

        return make

    return of


@dataclass(frozen=True)
class Edit:
    """One changed symbol of a patch.

    Attributes:
        target: ``module:attr`` or ``module:Class.attr``, defined there and not inherited.
        fingerprints: the SHA-256 of each source of the target that the replacement was written for, whatever its version.
        make: called with the original, returns the replacement. For a static or class method it gets the plain function, and
            the result is wrapped accordingly. It must return a new object on each call, import nothing from Megatron (the hook
            calls it during imports), and access the original only through its argument.
        until: the SHA-256 of each source of the target that has upstream's own fix: such a target is left as it is.
    """

    target: str
    fingerprints: tuple[str, ...]
    make: Callable[[Any], Any]
    until: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module that defines the target."""
        return self.target.partition(":")[0]

    def accepts(self, sha256: str) -> bool:
        """Return whether a source with this fingerprint is one that the edit is for, or one that has upstream's fix."""
        return sha256 in self.fingerprints + self.until

    def check(self, texts: Sequence[str], version: str) -> str:
        """Return the fingerprint of the accepted one of the target's definitions (several under ``if`` or ``try``).

        Raises:
            Refusal: ``target changed``, none is; ``version`` is for the message.
        """
        digests = [digest(text) for text in texts]
        if accepted := next(filter(self.accepts, digests), None):
            return accepted
        raise Refusal(
            "target changed",
            f"the source of {self.target} in megatron-core {version} has SHA-256 {digests[0]}, expected "
            f"{' or '.join(self.fingerprints)}: it is not the code this patch was written for (a local edit, or a "
            "version that was not tested); review the target (`megacpp-mcore compat`) and add its fingerprint, or leave the "
            "patch out",
            texts[0],
        )


def edit(
    target: str, *fingerprints: str, until: tuple[str, ...] = (), make: Callable[[Function], Any] = replacement
) -> Callable[[Function], Edit]:
    """Turn the decorated function into the :class:`Edit` of ``target``; ``make`` turns it into the edit's ``make``."""
    return lambda body: Edit(target, fingerprints, make(body), until)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The record of one patch: description and edits.

    Attributes:
        name: lower-case words joined by ``-``.
        fixes: what goes wrong without the patch.
        source: upstream issue, or file and version, that it fixes.
        edits: the symbols it replaces.
        seam: why it acts at these symbols and not elsewhere.
        leaves_alone: what it deliberately does not touch.
        retire_when: the upstream change that makes it obsolete.
        cost: its cost in time, memory or capability.
        gain: its measured benefit (with a figure), or ``not measured``.
        upstream: pull requests of NVIDIA/Megatron-LM with the same fix, by number.
    """

    name: str
    fixes: str
    source: str
    edits: tuple[Edit, ...]
    seam: str
    leaves_alone: str
    retire_when: str
    cost: str = NOT_MEASURED
    gain: str = NOT_MEASURED
    upstream: tuple[int, ...] = ()

    @functools.cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules that define its targets, each once."""
        return tuple(dict.fromkeys(edit.module for edit in self.edits))

    def problems(self, tree: SourceTree) -> dict[Edit, Refusal]:
        """Everything that prevents applying this patch to the Megatron of ``tree``."""
        version, refusals = tree.version(), {}
        for edit in self.edits:
            try:
                edit.check(tree.texts(edit.target), version)
            except Refusal as refusal:
                refusals[edit] = refusal
        return refusals

    def unfit(self, tree: SourceTree) -> list[str]:
        """Return :meth:`problems` as text, each with the patch's name."""
        return [f"{self.name}: {refusal}" for refusal in self.problems(tree).values()]

    def describe(self) -> dict[str, Any]:
        """Return the record without its code, ready for JSON."""
        named = [field.name for field in fields(self) if field.name not in ("edits", "upstream")]
        words = {name: getattr(self, name) for name in named} | {"megatron_versions": MEGATRON_CORE}
        return words | {"upstream": list(self.upstream), "targets": [edit.target for edit in self.edits]}
