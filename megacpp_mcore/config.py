"""The one file of options that Megatron has no flag for, named by ``MEGACPP_CONFIG``; every key is checked.

Its keys::

    model: nam56r_tiny            # a preset's name
    overrides:                    # values of the model that differ from the preset (see megacpp_mcore.model.Model)
      dsa: {schedule: "-FF"}
    backends:                     # op to backend name; an op that is not named takes "auto"
      mamba3: reference

or, for a stock DSA model under the patch dsa-index-cache, this one alone::

    dsa_index_cache: {schedule: FSSFSS}   # F (Full) or S (Shared) for each layer; tiled when it is shorter
    dsa_index_cache: {full: [0, 3]}       # or the ordinals of the Full layers, from 0; all others are Shared
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
from megacpp_mcore.pattern import FULL_INDEX, SHARED_INDEX

VARIABLE = "MEGACPP_CONFIG"
"""The environment variable that names the file."""

_INDEX_CACHE = "dsa_index_cache"
_KEYS = ("model", "overrides", "backends", _INDEX_CACHE)


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


@dataclass(frozen=True)
class IndexSchedule:
    """Which layers of a stock DSA model run their indexer, as the file says it.

    Attributes:
        path: where it was read from.
        schedule: ``F`` or ``S`` for each layer, tiled when it is shorter; None when the file lists ``full``.
        full: the ordinals of the Full layers, from 0; None when the file gives a ``schedule``.
    """

    path: Path
    schedule: str | None = None
    full: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.schedule if self.schedule is not None else f"full: {list(self.full or ())}"

    def roles(self, layers: int) -> str:
        """``F`` (Full) or ``S`` (Shared), one for each of ``layers`` layers.

        Raises:
            ConfigFileError: if it is about more layers than that.
        """
        needed = len(self.schedule) if self.schedule is not None else 1 + max(self.full or (0,))
        if needed > layers:
            raise ConfigFileError(
                f"{self.path}: {_INDEX_CACHE} ({self}) names {needed} layers, the model has {layers}; give one entry a "
                "layer, or a shorter schedule that is tiled"
            )
        if self.schedule is not None:
            return "".join(self.schedule[i % len(self.schedule)] for i in range(layers))
        return "".join(FULL_INDEX if i in (self.full or ()) else SHARED_INDEX for i in range(layers))


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
    content = _known(file)
    if _INDEX_CACHE in content:
        raise ConfigFileError(
            f"{file}: {_INDEX_CACHE!r} is for stock DSA models, and stands alone in its file; a model of this package has "
            "its schedule in overrides: {dsa: {schedule: ...}}"
        )
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


def load_index_schedule(path: str | os.PathLike[str]) -> IndexSchedule | None:
    """Read and check the file at ``path``; None if it is about a model of this package and not about stock DSA.

    Raises:
        ConfigFileError: as :func:`load`, and if the schedule is not one.
    """
    file = Path(path)
    content = _known(file)
    if set(content) != {_INDEX_CACHE}:
        load(file)  # refuses one key next to the others
        return None
    value = content[_INDEX_CACHE]
    if not isinstance(value, Mapping) or set(value) not in ({"schedule"}, {"full"}):
        raise ConfigFileError(
            f"{file}: {_INDEX_CACHE!r} is {value!r}; expected {{schedule: FSSFSS}} or {{full: [0, 3]}}, one of the two"
        )
    if "schedule" in value:
        return IndexSchedule(file, schedule=_roles(file, value["schedule"]))
    return IndexSchedule(file, full=_ordinals(file, value["full"]))


def index_schedule_from_environment() -> IndexSchedule | None:
    """The stock DSA schedule in the file named by ``MEGACPP_CONFIG``; None without a file, or without one in it."""
    path = os.environ.get(VARIABLE)
    return load_index_schedule(path) if path else None


def _known(file: Path) -> Mapping[str, Any]:
    """The content of ``file``, a mapping with no other keys than those of :data:`_KEYS`."""
    content = _read(file)
    if not isinstance(content, Mapping):
        raise ConfigFileError(f"{file}: found {type(content).__name__}; expected a mapping with {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigFileError(f"{file}: unknown key {key!r}; {hint}known: {', '.join(_KEYS)}")
    return content


def _roles(file: Path, value: Any) -> str:
    """``value``, checked to be a string of ``F`` and ``S`` that begins with ``F``."""
    where = f"{file}: {_INDEX_CACHE}.schedule"
    if not isinstance(value, str) or not value:
        raise ConfigFileError(f"{where} is {value!r}; expected a text of 'F' (Full) and 'S' (Shared), such as FSSFSS")
    for position, character in enumerate(value, start=1):
        if character not in (FULL_INDEX, SHARED_INDEX):
            raise ConfigFileError(
                f"{where} {value!r}: character {character!r} at position {position} is not known; allowed are 'F' (Full: "
                "runs the indexer) and 'S' (Shared: attends to the indices of the nearest Full layer below)"
            )
    if value[0] != FULL_INDEX:
        raise ConfigFileError(f"{where} {value!r} begins with a Shared layer; the first layer has to be Full ('F')")
    return value


def _ordinals(file: Path, value: Any) -> tuple[int, ...]:
    """``value``, checked to be ascending ordinals from 0 on."""
    ordinals = tuple(value) if isinstance(value, list) else ()
    numbers = all(isinstance(ordinal, int) and not isinstance(ordinal, bool) for ordinal in ordinals)
    if not ordinals or not numbers or ordinals[0] != 0 or list(ordinals) != sorted(set(ordinals)):
        raise ConfigFileError(
            f"{file}: {_INDEX_CACHE}.full is {value!r}; expected the ordinals of the Full layers, ascending and beginning "
            "with 0 (the first layer has to be Full), such as [0, 3]"
        )
    return ordinals


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
