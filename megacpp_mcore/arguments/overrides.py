"""``KEY=VALUE`` overrides: parsed by the field types of model and training plan, and validated by these classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megacpp_mcore.errors import ModelError, PatternError
from megacpp_mcore.model import Model, with_overrides
from megacpp_mcore.model.training import Training
from megacpp_mcore.util import schema
from megacpp_mcore.util.nearest import nearest


def read(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values in ``words`` for keys of the model, and those for keys of the run.

    Raises:
        ModelError: a word is not KEY=VALUE, its key is unknown (nearest names are suggested) or repeated, or its value is not
            of the key's type.
    """
    of_model, of_training = dict(schema.plain_keys(Model)), dict(schema.plain_keys(Training))
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ModelError(f"{word!r} is not of the form KEY=VALUE; write for example {key or 'depth'}=12")
        hints = of_model | of_training
        if key not in hints:
            # A user may have left out the name of the part: topk matches both dsa.topk and moe.topk.
            longer = [name for name in hints if name.endswith(f".{key}")]
            raise ModelError(f"unknown key {key!r} in {word!r}; {nearest(key, hints, longer)}")
        if key in found:
            raise ModelError(f"{key} is given twice ({found[key]!r} and {text!r}); give it once")
        try:
            found[key] = schema.read(text, hints[key], word)
        except schema.SchemaError as error:
            raise ModelError(str(error)) from error
    model = {key: value for key, value in found.items() if key in of_model}
    return model, {key: value for key, value in found.items() if key in of_training}


def apply(model: Model, values: Mapping[str, Any]) -> Model:
    """``model`` with ``values`` (dotted keys), set all at once.

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
        given = ", ".join(f"{key}={value}" for key, value in values.items())
        raise type(error)(f"{model.name} with {given} is no model that can be built: {error}") from error


def differences(changed: Any, original: Any) -> dict[str, Any]:
    """The overrides with which :func:`megacpp_mcore.model.with_overrides` turns ``original`` into ``changed``."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(original):
        new, old = getattr(changed, field.name), getattr(original, field.name)
        if new != old:
            found[field.name] = differences(new, old) if dataclasses.is_dataclass(old) else new
    return found
