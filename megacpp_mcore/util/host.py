"""What this machine and its Python have: versions of distributions, the processor, and what git says of a folder."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import megacpp_mcore

CPU_FACTS = Path("/proc/cpuinfo")
"""Where Linux says which processor this is; :func:`platform.processor` is empty there."""


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None without one; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's model, or where the system does not say that, its architecture."""
    facts = CPU_FACTS.read_text(encoding="utf-8") if CPU_FACTS.exists() else ""
    models = (line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def own_git(*words: str) -> str | None:
    """What git prints in the checkout that tracks this package; None in a copy, which may lie in somebody else's repository."""
    root = Path(megacpp_mcore.__file__).resolve().parent
    return git(root, *words) if git(root, "ls-files", "--error-unmatch", "__init__.py") is not None else None


def git(folder: Path, *words: str) -> str | None:
    """What git prints in ``folder``; None if it fails or is not there."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
