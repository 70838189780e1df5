"""``KEY=VALUE`` overrides: parsed by the field types of model, layout and training plan, and validated by these classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model import Layout, Model, with_overrides
from megacpp_mcore.model.training import Training
from megacpp_mcore.util import schema
from megacpp_mcore.util.nearest import nearest


class Overrides(NamedTuple):
    """Values by key: of the model (dotted keys), of the layout, and of the training plan."""

    model: dict[str, Any]
    layout: dict[str, Any]
    training: dict[str, Any]


_KINDS = (Model, Layout, Training)
_HINTS = [dict(schema.plain_keys(kind)) for kind in _KINDS]


def is_ours(word: str) -> bool:
    """Return whether ``word`` sets a key of the model, the layout or the training plan."""
    return any(word.partition("=")[0] in hints for hints in _HINTS)


def read(words: Sequence[str]) -> Overrides:
    """Read the values in ``words``.

    Raises:
        ModelError: a word is not KEY=VALUE, its key is unknown (nearest names are suggested) or repeated, or its value is not
            of the key's type.
    """
    hints_by_key = {key: hint for hints in _HINTS for key, hint in hints.items()}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ModelError(f"{word!r} is not of the form KEY=VALUE; write for example {key or 'depth'}=12")
        if key not in hints_by_key:
            # The user may have omitted the part's name: topk matches both dsa.topk and moe.topk.
            longer = [name for name in hints_by_key if name.endswith(f".{key}")]
            raise ModelError(f"unknown key {key!r} in {word!r}; {nearest(key, hints_by_key, longer)}")
        if key in values:
            raise ModelError(f"{key} is given twice ({values[key]!r} and {text!r}); give it once")
        try:
            values[key] = schema.read(text, hints_by_key[key], word)
        except schema.SchemaError as error:
            raise ModelError(str(error)) from error
    return Overrides(*({key: value for key, value in values.items() if key in hints} for hints in _HINTS))


def apply(model: Model, values: Mapping[str, Any]) -> Model:
    """Return ``model`` with ``values`` (dotted keys), set all at once.

    Raises:
        ModelError, PatternError: the result is not a valid model; the message names the overrides.
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parts, last = key.split(".")
        inner = nested
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    try:
        return with_overrides(model, nested)
    except (ModelError, PatternError) as error:
        overrides = ", ".join(f"{key}={value}" for key, value in values.items())
        raise type(error)(f"{model.name} with {overrides} cannot be built: {error}") from error


def differences(changed: Any, original: Any) -> dict[str, Any]:
    """Return the overrides with which :func:`megacpp_mcore.model.with_overrides` turns ``original`` into ``changed``."""
    overrides: dict[str, Any] = {}
    for field in dataclasses.fields(original):
        new, old = getattr(changed, field.name), getattr(original, field.name)
        if new != old:
            overrides[field.name] = differences(new, old) if dataclasses.is_dataclass(old) else new
    return overrides
