"""Facts about this machine and its Python: versions of distributions, the processor, and git's view of a folder."""

from __future__ import annotations

import ctypes
import importlib.metadata
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import megacpp_mcore

_DISTRIBUTIONS = (
    "megatron-core", "torch", "transformer-engine", "triton", "mamba-ssm", "tilelang", "flash-attn", "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)  # fmt: skip
CPU_FACTS = Path("/proc/cpuinfo")
"""Linux's processor description; :func:`platform.processor` is empty there."""

DISABLING = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
"""Variables that turn torch.compile off when they are 1 (torch 2.11: ``_dynamo/eval_frame.py`` and ``_dynamo/config.py``)."""


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None without one; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of the software that a training uses, by distribution; imports torch."""
    import torch

    version_of = {"megacpp-mcore": megacpp_mcore.__version__, "python": platform.python_version()}
    version_of |= {name: installed for name in _DISTRIBUTIONS if (installed := version(name)) is not None}
    package = sys.modules.get("megatron.core.package_info")
    if package is not None:  # a checkout's, if one comes first on the path
        version_of["megatron-core"] = package.__version__
    if torch.version.cuda is not None:
        version_of["cuda"] = torch.version.cuda
    return version_of


def loaded_from(library: str) -> Path | None:
    """Return the folder from which this process has loaded the shared library ``lib…``; None if from none, or from several."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f"/{library}.so" in line}
    folders = {path.parent for path in paths if path.exists()}
    return folders.pop() if len(folders) == 1 else None


def processor() -> str:
    """Return the processor's model, or its architecture if the system does not name the model."""
    facts = CPU_FACTS.read_text(encoding="utf-8") if CPU_FACTS.exists() else ""
    models = (line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def own_git(*words: str) -> str | None:
    """Return git's output in the checkout that tracks this package; None for a copy, which may be in a foreign repository."""
    root = Path(megacpp_mcore.__file__).resolve().parent
    return git(root, *words) if git(root, "ls-files", "--error-unmatch", "__init__.py") is not None else None


def git(folder: Path, *words: str) -> str | None:
    """Return git's output in ``folder``; None if git fails or is missing."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def end_with_the_parent() -> None:
    """Have Linux kill this process when its parent exits; a parent killed by SIGKILL has no time to do so."""
    started_by = multiprocessing.parent_process()  # None: not by multiprocessing
    parent = os.getppid() if started_by is None else started_by.pid
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it was already gone
        os.kill(os.getpid(), signal.SIGKILL)
