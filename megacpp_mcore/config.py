"""The one file of options that Megatron has no flag for, named by ``MEGACPP_CONFIG``; every key is checked.

Its keys::

    model: nam56r_tiny            # a preset's name
    overrides:                    # values of the model that differ from the preset (see megacpp_mcore.model.Model)
      dsa: {schedule: "-FF"}
    backends:                     # op to backend name; an op that is not named takes "auto"
      mamba3: reference
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.errors import BackendError, ConfigFileError, ModelError, PatternError
from megacpp_mcore.model import Model, preset, with_overrides

VARIABLE = "MEGACPP_CONFIG"
"""The environment variable that names the file."""

_KEYS = ("model", "overrides", "backends")


@dataclass(frozen=True)
class PluginConfig:
    """The checked content of the file.

    Attributes:
        path: where it was read from.
        preset: the name of the preset it starts from.
        model: the preset with the overrides applied.
        backends: op name to requested backend name.
    """

    path: Path
    preset: str
    model: Model
    backends: Mapping[str, str] = field(default_factory=dict)


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = "is given twice" if isinstance(key, str) else "is not a name"
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} {problem}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load(path: str | os.PathLike[str]) -> PluginConfig:
    """Read and check the file at ``path``.

    Raises:
        ConfigFileError: if it cannot be read, is not YAML, or holds a key or value that is not known.
    """
    file = Path(path)
    content = _read(file)
    if not isinstance(content, Mapping):
        raise ConfigFileError(f"{file}: found {type(content).__name__}; expected a mapping with {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigFileError(f"{file}: unknown key {key!r}; {hint}known: {', '.join(_KEYS)}")
    name = content.get("model")
    if not isinstance(name, str):
        raise ConfigFileError(f"{file}: 'model' is {name!r}; expected the name of a preset, such as nam56r_tiny")
    overrides = _mapping(file, content, "overrides")
    backends = _mapping(file, content, "backends")
    for op, backend in backends.items():
        if not isinstance(backend, str):
            raise ConfigFileError(f"{file}: backends.{op} is {backend!r}; expected the name of a backend, or auto")
    try:
        model = with_overrides(preset(name), overrides, where="overrides")
        Dispatcher(backends)  # refuses names of ops and backends that it does not know
    except (ModelError, PatternError, BackendError) as error:
        raise ConfigFileError(f"{file}: {error}") from error
    return PluginConfig(path=file, preset=name, model=model, backends=MappingProxyType(dict(backends)))


def from_environment() -> PluginConfig | None:
    """The file named by ``MEGACPP_CONFIG``, or None when the variable is unset or empty."""
    path = os.environ.get(VARIABLE)
    return load(path) if path else None


def _read(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{file}: cannot be read ({error}); {VARIABLE} has to name a YAML file") from error
    try:
        loader = _UniqueKeyLoader(text)  # raises on characters that YAML does not allow
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date or number that is none; brackets without end
        raise ConfigFileError(f"{file}: not valid YAML: {error}") from error


def _mapping(file: Path, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    if value is None:  # the key is not there, or nothing follows it
        return {}
    if not isinstance(value, Mapping):
        raise ConfigFileError(f"{file}: {key!r} is {value!r}; expected a mapping")
    return value
