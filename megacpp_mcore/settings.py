"""The configuration file named by ``MEGACPP_CONFIG``, with the options that Megatron has no flag for; every key is checked.

Its keys::

    model: nam56r_tiny            # a preset's name
    overrides:                    # values of the model that differ from the preset (see megacpp_mcore.model.Model)
      dsa: {schedule: "-FF"}
    backends:                     # op to backend name; other ops use "auto"
      mamba3: reference
    recompute: [experts, m]       # what the backward pass recomputes (see Recompute)
    max_documents: 512            # the most documents in a packed row; by default one per 16 tokens, at least 64
    speed_defaults: {expandable_segments: false}     # see SpeedDefaults
    experimental_taxes: {anomaly_detection: true}    # what costs speed; all off (see ExperimentalTaxes)
    observability: {policy: json}                    # see Observability
    transformer_engine: {attention: false}           # which features may be used (megacpp_mcore.util.te_imports.Features)
    vendors: {flash4: false}                         # other packages' kernels (megacpp_mcore.backends.vendor_switches.Vendors)
    checkpoints: {load_newest_whole: true}           # see Checkpoints
    fp8: {recipe: block}                             # dense GEMMs in FP8 (megacpp_mcore.te.fp8_scopes.FP8)

or, for a stock DSA model with the patch dsa-index-cache, only this key::

    dsa_index_cache: {schedule: FSSFSS}   # F (Full) or S (Shared) for each layer; tiled if shorter
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megacpp_mcore.backends import Dispatcher
from megacpp_mcore.backends.vendor_switches import Vendors
from megacpp_mcore.errors import ConfigFileError, LaunchError, MegacppError
from megacpp_mcore.model import Model, preset, with_overrides
from megacpp_mcore.model.pattern import FULL_INDEX, SHARED_INDEX
from megacpp_mcore.model.recipes import Recipe
from megacpp_mcore.model.training import RECOMPUTED, Recompute
from megacpp_mcore.te.fp8_scopes import FP8, RECIPES
from megacpp_mcore.util import schema
from megacpp_mcore.util.nearest import nearest
from megacpp_mcore.util.te_imports import Features

VARIABLE = "MEGACPP_CONFIG"
"""The environment variable that names the file."""

CONSOLES = ("progress", "stock")
"""Console output of a recorded run's steps."""

_INDEX_CACHE = "dsa_index_cache"


@dataclass(frozen=True, kw_only=True)
class SpeedDefaults:
    """Launch settings for speed; the defaults can be changed under ``speed_defaults``.

    Attributes:
        expandable_segments: whether the CUDA allocator uses expandable segments, which reduce fragmentation.
        cache_root: folder for the caches of compiled kernels (subfolders ``triton`` and ``inductor``); None: their defaults.
        linear_cross_entropy: whether, on GPUs, the patch of that name replaces Megatron's output layer and loss.
        adam_in_one_pass: whether, on GPUs, the patch of that name replaces Transformer Engine's Adam.
    """

    expandable_segments: bool = True
    cache_root: str | None = None
    linear_cross_entropy: bool = True
    adam_in_one_pass: bool = True


@dataclass(frozen=True, kw_only=True)
class ExperimentalTaxes:
    """Options that cost speed; off unless set under ``experimental_taxes``.

    Attributes:
        anomaly_detection: autograd checks every backward result for NaN and names the forward operation it belongs to.
        blocking_launches: the host waits for every kernel (``CUDA_LAUNCH_BLOCKING=1``), so errors surface where they occur.
    """

    anomaly_detection: bool = False
    blocking_launches: bool = False

    @property
    def on(self) -> tuple[str, ...]:
        """The names of the options that are on."""
        return tuple(option.name for option in dataclasses.fields(self) if getattr(self, option.name))


LONGEST_BEAT_S = 10.0
"""Upper limit in seconds on the heartbeat interval, and so on the error of a process's time of death."""


@dataclass(frozen=True, kw_only=True)
class Observability:
    """What a run reports and records; set under ``observability``.

    Attributes:
        policy: format of the launch policy printed at the start, ``text`` or ``json`` (one line).
        recompiles: whether torch logs why it recompiles a function.
        enabled: whether a run that saves checkpoints is recorded next to them, unless the launch says otherwise.
        interval: steps between readings of the counters on the GPU.
        heartbeat_s: seconds between heartbeats of a recorded process, at most :data:`LONGEST_BEAT_S`.
        profile: the first and last step to profile, such as ``10-14``; None: none.
        profile_trace: whether the profile's events are saved as well, for a trace viewer.
        console: ``progress``: one readable line a step, Megatron's output in a file; or ``stock``: only Megatron's output.
    """

    policy: str = "text"
    recompiles: bool = False
    enabled: bool = True
    interval: int = 10
    heartbeat_s: float = 1.0
    profile: str | None = None
    profile_trace: bool = False
    console: str = "progress"


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """How checkpoints are loaded; set under ``checkpoints``.

    Attributes:
        load_newest_whole: whether a run loads the newest whole checkpoint where the one to be loaded, or its tracker file, is
            damaged; otherwise it ends with an error that names both.
    """

    load_newest_whole: bool = False


_GROUPS: Mapping[str, type] = {
    "speed_defaults": SpeedDefaults, "experimental_taxes": ExperimentalTaxes, "observability": Observability,
    "transformer_engine": Features, "vendors": Vendors, "checkpoints": Checkpoints, "fp8": FP8,
}  # fmt: skip
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "cache_root": (lambda path: path is None or os.path.isabs(path), "the full path of a folder, or null"),
    "heartbeat_s": (lambda seconds: bool(seconds <= LONGEST_BEAT_S), f"at most {LONGEST_BEAT_S:g} seconds"),
    "recipe": (lambda recipe: recipe is None or recipe in RECIPES, f"{', '.join(RECIPES)} or null"),
    "policy": (lambda form: form in ("text", "json"), "text or json"),
    "console": (lambda form: form in CONSOLES, " or ".join(CONSOLES)),
}
"""What a key of a group has to satisfy in addition to its type, and that in words."""
_KEYS = ("model", "overrides", "backends", _INDEX_CACHE, "compile", "recompute", "max_documents", *_GROUPS)


@dataclass(frozen=True)
class PluginConfig:
    """The checked content of the file.

    Attributes:
        preset: name of the preset that the model is based on.
        model: the preset with the overrides applied.
        backends: op name to requested backend name.
        recompute: what is recomputed in the backward pass.
        max_documents: the most documents that a packed row may hold; None: a default from its length.
        given: the options set in the file, as ``group.key``, or ``recompute``.
    """

    path: Path
    preset: str
    model: Model
    backends: Mapping[str, str] = field(default_factory=dict)
    recompute: Recompute = field(default_factory=Recompute)
    max_documents: int | None = None
    speed_defaults: SpeedDefaults = SpeedDefaults()
    experimental_taxes: ExperimentalTaxes = ExperimentalTaxes()
    observability: Observability = Observability()
    transformer_engine: Features = field(default_factory=Features)
    vendors: Vendors = field(default_factory=Vendors)
    checkpoints: Checkpoints = Checkpoints()
    fp8: FP8 = field(default_factory=FP8)
    given: frozenset[str] = frozenset()


@dataclass(frozen=True)
class IndexSchedule:
    """Which layers of a stock DSA model run their indexer, according to the file.

    Attributes:
        schedule: ``F`` or ``S`` for each layer, tiled if shorter.
    """

    path: Path
    schedule: str

    def roles(self, layers: int) -> str:
        """Return ``F`` (Full) or ``S`` (Shared), one for each of ``layers`` layers.

        Raises:
            ConfigFileError: the schedule has more layers than that.
        """
        if len(self.schedule) > layers:
            raise ConfigFileError(
                f"{self.path}: {_INDEX_CACHE} ({self.schedule}) names {len(self.schedule)} layers, the model has {layers}; "
                "give one entry a layer, or a shorter schedule that is tiled"
            )
        return "".join(self.schedule[i % len(self.schedule)] for i in range(layers))


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
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
        ConfigFileError: the file cannot be read, is not YAML, or has an unknown key or value.
    """
    file = Path(path)
    with _named(file):
        content = _read_mapping(file)
        if _INDEX_CACHE in content:
            raise ConfigFileError(
                f"{_INDEX_CACHE!r} is for stock DSA models, and has to be the only key; a model of this package has its "
                "schedule in overrides: {dsa: {schedule: ...}}"
            )
        name = content.get("model")
        if not isinstance(name, str):
            raise ConfigFileError(f"'model' is {name!r}; expected the name of a preset, such as nam56r_tiny")
        backends = _mapping(content, "backends")
        for op, backend in backends.items():
            if not isinstance(backend, str):
                raise ConfigFileError(f"backends.{op} is {backend!r}; expected the name of a backend, or auto")
        Dispatcher(backends)  # refuses unknown ops and backends
        if (mode := content.get("compile", "off")) not in ("off", False):  # YAML reads off as false
            none = ", and there is nothing to compile: kernels replace the regions on GPUs" if mode == "regional" else ""
            raise ConfigFileError(f"'compile' is {mode!r}{none}; write off, or leave it out")
        documents = content.get("max_documents")
        if documents is not None and (type(documents) is not int or documents < 1):
            raise ConfigFileError(f"'max_documents' is {documents!r}; expected a whole number above 0")
        configured = {f"{key}.{name}" for key in _GROUPS for name in _mapping(content, key)}
        return PluginConfig(
            path=file,
            preset=name,
            model=with_overrides(preset(name), _mapping(content, "overrides"), where="overrides"),
            backends=MappingProxyType(dict(backends)),
            recompute=_recompute(content),
            max_documents=documents,
            **{key: _group(content, key, kind) for key, kind in _GROUPS.items()},
            given=frozenset(configured | ({"recompute"} & content.keys())),
        )


def from_environment() -> PluginConfig | None:
    """Read the file named by ``MEGACPP_CONFIG``; None when the variable is unset or empty."""
    path = os.environ.get(VARIABLE)
    return load(path) if path else None


def of_recipe(chosen: Recipe, found: PluginConfig | None = None) -> PluginConfig | None:
    """Return the settings of a run of ``chosen``: ``found``, or those that ``MEGACPP_CONFIG`` names, else the recipe's own.

    Raises:
        ConfigFileError: the file lacks what the recipe's own switches on.
    """
    found = found or from_environment()
    if chosen.settings is None:
        return found
    own = load(chosen.settings)
    if found is None or found.preset != own.preset:
        return own
    if found.fp8 != own.fp8 or not own.backends.items() <= found.backends.items():
        raise ConfigFileError(
            f"{found.path} ({VARIABLE}) differs in backends or fp8 from {chosen.settings}, which recipe {chosen.name} needs; "
            "copy them into it, or choose the recipe in bf16"
        )
    return found


def load_index_schedule(path: str | os.PathLike[str]) -> IndexSchedule | None:
    """Read and check the file at ``path``; None if it describes a model of this package rather than stock DSA.

    Raises:
        ConfigFileError: as :func:`load`, or the schedule is invalid.
    """
    file = Path(path)
    with _named(file):
        content = _read_mapping(file)
        if set(content) == {_INDEX_CACHE}:
            value = content[_INDEX_CACHE]
            schedule = value.get("schedule") if isinstance(value, Mapping) and len(value) == 1 else None
            roles = f"{FULL_INDEX}[{FULL_INDEX}{SHARED_INDEX}]*"
            if not isinstance(schedule, str) or not re.fullmatch(roles, schedule):
                raise ConfigFileError(
                    f"{_INDEX_CACHE!r} is {value!r}; expected {{schedule: FSSFSS}}, with 'F' (Full: runs the indexer) or 'S' "
                    "(Shared: attends to the indices of the nearest Full layer below) for each layer, the first one Full"
                )
            return IndexSchedule(file, schedule)
    load(file)  # refuses dsa_index_cache together with other keys
    return None


def index_schedule_from_environment() -> IndexSchedule | None:
    """Read the stock DSA schedule in the file named by ``MEGACPP_CONFIG``; None without a file, or without one in it."""
    path = os.environ.get(VARIABLE)
    return load_index_schedule(path) if path else None


@contextlib.contextmanager
def _named(file: Path) -> Iterator[None]:
    """Within the context, put the name of ``file`` before every error about its content."""
    try:
        yield
    except (MegacppError, schema.SchemaError) as error:
        raise ConfigFileError(f"{file}: {error}") from error


def _read_mapping(file: Path) -> Mapping[str, Any]:
    """Read ``file``, a mapping whose keys are all in :data:`_KEYS`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"cannot be read ({error}); {VARIABLE} has to name a YAML file") from error
    try:
        content = _UniqueKeyLoader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bad dates or numbers; endless brackets
        raise ConfigFileError(f"not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise ConfigFileError(f"found {type(content).__name__}; expected a mapping with {', '.join(_KEYS)}")
    for key in content:
        if key not in _KEYS:
            raise ConfigFileError(f"unknown key {key!r}; {nearest(key, _KEYS)}")
    return content


def _recompute(content: Mapping[str, Any]) -> Recompute:
    """Return the families that the file lists under ``recompute``."""
    value = content.get("recompute")
    value = [] if value is None else value
    if not isinstance(value, list) or len(value) != len({str(name) for name in value}):
        raise ConfigFileError(f"'recompute' is {value!r}; expected a list of different names, of {', '.join(RECOMPUTED)}")
    for name in value:
        if name not in RECOMPUTED:
            raise ConfigFileError(f"recompute names {name!r}; {nearest(name, RECOMPUTED)}")
    return Recompute(**dict.fromkeys(value, True))


def _group(content: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return the group ``key`` of the file as a ``kind``, whose fields are its keys."""
    values = _mapping(content, key)
    group = schema.replace(kind(), values, key)
    for name, value in values.items():
        fits, expected = _VALUES.get(name, (lambda _: True, ""))
        if type(value) in (int, float) and not value > 0:
            raise ConfigFileError(f"{key}.{name} is {value!r}; expected a number above 0")
        if not fits(value):
            raise ConfigFileError(f"{key}.{name} is {value!r}; expected {expected}")
        if name == "profile" and value is not None:
            try:
                parse_steps(str(value))
            except LaunchError as error:
                raise ConfigFileError(f"{key}.{name}: {error}") from error
    return group


def parse_steps(text: str) -> tuple[int, int]:
    """Parse ``10-14`` as the first and the last step to profile.

    Raises:
        LaunchError: ``text`` has another form.
    """
    match = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise LaunchError(f"the steps to profile are {text!r}; expected the first and the last, such as 10-14")
    return first, last


def _mapping(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    if value is None:  # the key is missing or has no value
        return {}
    if not isinstance(value, Mapping):
        raise ConfigFileError(f"{key!r} is {value!r}; expected a mapping")
    return value
