"""The launch policy as a whole: assembled, printed once, and set. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import Recompute
from megacpp_mcore.policy import values as policy_values
from megacpp_mcore.policy.overlap import Overlap, overlap_contract
from megacpp_mcore.policy.values import RECIPE, USER, Value
from megacpp_mcore.settings import ExperimentalTaxes, Observability, PluginConfig, SpeedDefaults

COMPILED = {"mode": "off", "warm_up": "skipped", "reason": "kernels replace what was compiled", "precompile": False}
"""What is compiled before step 1, as receipts record it: nothing.

GPU runs compute with Triton's or a vendor's kernels, which a graph of Inductor does not replace; so a file that requests
``regional`` is refused (:mod:`megacpp_mcore.settings`).
"""


@dataclass(frozen=True, kw_only=True)
class LaunchPolicy:
    """Everything a run is started with except the model.

    Attributes:
        overlaps: which communication can be hidden.
        taxes: the experimental taxes that the file requests.
        launched: whether the launcher has started the script; otherwise nothing was set, and only the environment's taxes
            apply.
    """

    values: tuple[Value, ...]
    overlaps: tuple[Overlap, ...]
    taxes: tuple[str, ...]
    launched: bool = True

    def environment(self) -> dict[str, str]:
        """Return the variables to set before torch and NCCL start: those with a value that the user has not set."""
        return {
            value.name: value.value
            for value in self.values
            if value.variable and value.value is not None and value.source != USER
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What contradicts the run, one sentence each."""
        return tuple(f"{value.name}: {value.warning}" for value in self.values if value.warning)

    def value(self, name: str) -> Value:
        """Return the value called ``name``; KeyError when there is none."""
        return {value.name: value for value in self.values}[name]

    def as_json(self) -> str:
        """Return one line of JSON, with all fields."""
        return json.dumps(dataclasses.asdict(self) | {"compile": COMPILED}, ensure_ascii=False)

    def describe(self) -> str:
        """Format lines of text: values with their sources, overlaps, compile policy, warnings last."""
        bare = " of a script that `megacpp-mcore launch` did not start, so that nothing was set for it"
        lines = [f"launch policy{'' if self.launched else bare}:"]
        for value in self.values:
            note = f"; {value.note}" if value.note else ""
            lines.append(f"  {value.name} = {'(unset)' if value.value is None else value.value} ({value.source}{note})")
        for overlap in self.overlaps:
            lines.append(f"  {'overlap' if overlap.possible else 'no overlap'} of {overlap.name}: {overlap.reason}")
        lines.append(f"  compile = {COMPILED['mode']}: {COMPILED['reason']}")
        unpaid = "" if self.launched or not self.taxes else " (requested; only `megacpp-mcore launch` applies them)"
        lines.append(f"  experimental taxes = {', '.join(self.taxes) or 'none'}{unpaid}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def lines(self, settings: PluginConfig | None) -> list[str]:
        """Return the lines to print, per the file's ``observability.policy``: those of the text, or one of JSON."""
        if settings is not None and settings.observability.policy == "json":
            return [f"launch policy: {self.as_json()}"]
        return self.describe().splitlines()


def resolve(
    run: Run,
    *,
    environment: Mapping[str, str],
    recipe: Mapping[str, str] | None = None,
    from_recipe: bool = False,
    launched: bool = True,
    tf32_products: bool = False,
) -> LaunchPolicy:
    """Decide the policy of ``run`` in the process's ``environment``.

    Args:
        recipe: environment variables that a recipe requests.
        from_recipe: whether the run's arguments are a recipe's and not the user's.
        launched: whether what is decided here will be set; otherwise the run has its environment as it is.
        tf32_products: as :func:`megacpp_mcore.policy.values.tf32_products` returns it.

    Raises:
        LaunchError: the run's settings contradict it (:func:`megacpp_mcore.policy.values.check`).
    """
    settings = run.settings
    speed = settings.speed_defaults if settings else SpeedDefaults()
    taxes = settings.experimental_taxes if settings else ExperimentalTaxes()
    observability = settings.observability if settings else Observability()
    families = settings.recompute if settings else Recompute()
    configured = settings.given if settings else frozenset()
    lookup = policy_values.Lookup(environment=environment, recipe=recipe or {}, launched=launched)
    policy_values.check(run, lookup)
    connections = policy_values.connections(run, lookup)
    arguments = RECIPE if from_recipe else USER
    return LaunchPolicy(
        values=(
            connections,
            policy_values.allocator(run, lookup, speed, given="speed_defaults.expandable_segments" in configured),
            *policy_values.nccl(run, lookup),
            *policy_values.lone_tasks(lookup),
            *policy_values.interfaces(run, lookup),
            *policy_values.caches(run, lookup, speed),
            *policy_values.cudnn(run, lookup),
            policy_values.blocking(lookup, taxes),
            *policy_values.compile_switches(lookup),
            *policy_values.logs(lookup, observability),
            policy_values.recompute(run, families, given="recompute" in configured, arguments=arguments),
            policy_values.graphs(run, arguments),
            policy_values.precision(run, arguments),
            *policy_values.tf32(run, lookup, products=tf32_products),
            *policy_values.flags(run, arguments),
        ),
        overlaps=tuple(overlap_contract(run, connections.value)),
        taxes=taxes.on,
        launched=launched,
    )


_announced = False


def announced() -> contextlib.AbstractContextManager[Any]:
    """Within the context, treat this process's policy as printed: :func:`announce` prints nothing."""
    return mock.patch(f"{__name__}._announced", True)


def announce(run: Run, *, environment: Mapping[str, str], say: Callable[[str], None], tf32_products: bool = False) -> None:
    """Print the policy of a run that the launcher has not started, by ``say``, line by line, once per process."""
    global _announced
    if _announced:
        return
    _announced = True
    policy = resolve(run, environment=environment, launched=False, tf32_products=tf32_products)
    for line in policy.lines(run.settings):
        say(line)


@contextlib.contextmanager
def active(settings: PluginConfig | None) -> Iterator[None]:
    """Within the context, apply the file's settings that need code, not an environment variable; imports torch for any.

    These are ``experimental_taxes.anomaly_detection`` and ``observability.recompiles``.
    """
    with contextlib.ExitStack() as stack:
        if settings is not None and settings.experimental_taxes.anomaly_detection:
            import torch

            before = torch.is_anomaly_enabled()
            torch.autograd.set_detect_anomaly(True)
            stack.callback(torch.autograd.set_detect_anomaly, before)
        if settings is not None and settings.observability.recompiles:
            import torch._logging

            torch._logging.set_logs(recompiles=True)
            stack.callback(torch._logging.set_logs)
        yield
