"""Installs the CPU lane in this process and removes it; lists the Megatron arguments that a run on it needs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from megacpp_mcore.cpu import torch_cuda
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.util import flags
from megacpp_mcore.util.stand_in import environment

REQUIRED_ARGUMENTS: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--use-cpu-initialization",),
    ("--transformer-impl", "local"),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--num-workers", "0"),
)
"""The Megatron arguments that a CPU run requires, each a flag with its value, if any."""

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", _CONNECTIONS: "1"}
"""Environment variables set while the lane is installed: torch.compile would need a C++ compiler at run time, and Dynamo does
not trace the stand-ins; Megatron requires the other one for TP and CP, and on a CPU it has no effect."""

_installed: CpuLane | None = None


def missing_arguments(arguments: Sequence[str]) -> list[str]:
    """Return those of :data:`REQUIRED_ARGUMENTS` that are missing in ``arguments`` (Megatron's, without the script).

    ``--flag value`` and ``--flag=value`` count; a flag with a different value is reported together with that value.
    """
    options = flags.read(arguments)
    missing = []
    for flag, *values in REQUIRED_ARGUMENTS:
        if flag not in options:
            missing.append(" ".join((flag, *values)))
        elif values and flags.first(options, flag) != values[0]:
            missing.append(f"{flag} {values[0]} (found {flags.first(options, flag) or ''!r})")
    return missing


class CpuLane(contextlib.ExitStack):
    """An installed lane, which restores every original when it is closed or exited, in reverse order.

    If one cannot be restored, such as a torch function mode that is still active, the others still are.

    Attributes:
        messages: lines for the launcher to print, which name everything that was replaced: each by its own name, except some
            sixty functions of ``torch.cuda``, which are named by module.
    """

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def replace(self, message: str, owner: Any, **values: Any) -> None:
        """Set attributes of ``owner`` (a module or a class) while the lane is installed; ``message`` says what for."""
        self.enter_context(mock.patch.multiple(owner, create=True, **values))
        if message:
            place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
            self.messages.append(f"CPU lane: {', '.join(f'{place}.{name}' for name in values)} {message}")

    remove = contextlib.ExitStack.close


def install(connections: str = ENVIRONMENT[_CONNECTIONS]) -> CpuLane:
    """Install the lane in this process and return it; imports megatron-core.

    Args:
        connections: ``CUDA_DEVICE_MAX_CONNECTIONS`` while it is installed; FSDP2 refuses 1.

    Raises:
        LaunchError: if the lane is installed already, or if this process already uses a real GPU.
    """
    global _installed
    if _installed is not None:
        raise LaunchError(
            "the CPU lane is already installed in this process; remove() the first one before another", code="installed"
        )
    if torch.cuda.is_initialized():
        raise LaunchError(
            "this process already uses a real CUDA device, and the CPU lane would replace it; "
            "install the lane before any CUDA call, or run with --device cuda",
            code="cuda-in-use",
        )
    lane = _installed = CpuLane()
    lane.callback(_forget)
    try:
        values = ENVIRONMENT | {_CONNECTIONS: connections}
        lane.enter_context(environment(values))  # Dynamo reads its own when a function is decorated
        settings = ", ".join(f"{name}={value}" for name, value in values.items())
        if "torch._dynamo.config" in sys.modules:  # already imported: functions compiled so far check the configuration
            lane.enter_context(sys.modules["torch._dynamo.config"].patch(disable=True))
            settings += ", torch._dynamo.config.disable=True"
        lane.messages.append(f"CPU lane: {settings} (torch.compile runs its functions eagerly)")
        # Imports Megatron before the stand-ins, so that the names it copies from torch.cuda at import are the originals.
        from megacpp_mcore.cpu import megatron

        torch_cuda.install(lane)
        megatron.install(lane)
    except BaseException:
        lane.close()
        raise
    return lane


def _forget() -> None:
    global _installed
    _installed = None


def is_active() -> bool:
    """Return whether this thread's CUDA devices currently map to the CPU."""
    return isinstance(torch.overrides._get_current_function_mode(), torch_cuda.CpuDeviceMode)
