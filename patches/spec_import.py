"""spec-import: ``--spec`` accepts one dotted path, and a spec that cannot be imported ends the run.

Activate: applied by the launcher; or ``megacpp_mcore.patches.apply(["spec-import"])``.
Scope: every use of ``import_module``: ``--spec`` of the stock scripts, and ModuleSpecs that name their module by path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megacpp_mcore.errors import SpecImportError
from megacpp_mcore.patches.machinery.record import Function, Patch, edit


def spec_words(values: Sequence[str]) -> tuple[str, str]:
    """Return the module and attribute of a spec's words: ``["a.b.c"]`` and ``["a.b", "c"]`` are equivalent.

    Raises:
        SpecImportError: the words do not name a module and an attribute.
    """
    words = [values] if isinstance(values, str) else list(values)
    if all(isinstance(word, str) for word in words):
        if len(words) == 1 and "." in words[0]:
            words = words[0].rsplit(".", 1)
        if len(words) == 2 and all(words):
            return words[0], words[1]
    raise SpecImportError(
        f"--spec {' '.join(map(str, words))!r} names no module and attribute; "
        "expected one dotted word, --spec megacpp_mcore.PRESET, or two: --spec megacpp_mcore PRESET",
        code="spec-form",
    )


def import_named(module: str, attribute: str) -> Any:
    """Import ``module`` and return its ``attribute``, which may be a submodule or lazily resolved.

    Raises:
        SpecImportError: on any failure, with its cause.
    """
    try:
        # As upstream: with a fromlist, a submodule of that name is imported as well.
        imported = __import__(module, fromlist=[attribute])
    except Exception as error:  # worded as in Megatron's main, as some search for it
        cause = f"{type(error).__name__}: {error}"
        raise SpecImportError(f"Could not import module '{module}' for spec '{attribute}': {cause}") from error
    try:
        return getattr(imported, attribute)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise SpecImportError(f"Could not find spec '{attribute}' in module '{module}': {cause}") from error


@edit(
    "megatron.core.transformer.spec_utils:import_module",
    "e777a975aebe988f283b9075826d530badb4137e0d1daa1de46505d4cc8ab8ca",
    "1252ab9b9e1bd57524cdf6ccc91be943942bfa521a32696d459cdc422e013da2",
)
def _strict_import(original: Function, module_path: Sequence[str]) -> Any:
    return import_named(*spec_words(module_path))


PATCH = Patch(
    name="spec-import",
    fixes=(
        "--spec with one dotted word ends in 'not enough values to unpack'; a spec whose import fails is logged, "
        "None is returned and a stock GPT is trained instead"
    ),
    source="megatron-core 0.19.2, megatron/core/transformer/spec_utils.py",
    edits=(_strict_import,),
    seam="import_module is the one function that turns the words of a spec into an object, in every script and model family",
    leaves_alone=(
        "two words as before; which packages a spec may come from (the launcher's check); --spec local of BERT and of the "
        "attention backend, which never reach it"
    ),
    retire_when="upstream raises on a spec that cannot be imported, and takes one dotted word",
    cost="nothing",
)
