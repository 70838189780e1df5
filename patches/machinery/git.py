"""What git knows of a checkout: which tracked files differ from the last commit, and how; and the patches that git makes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_TIME_LIMIT_S = 120
_PLAIN = ("--no-color", "--no-ext-diff", "--no-textconv", "--text")


class GitUnavailable(Exception):
    """Git is not installed, or the folder is nothing that it tracks; the message says which."""


def modified(root: Path, file: str) -> list[str]:
    """Tracked files below ``root`` that differ from the last commit, as paths relative to it.

    Args:
        root: the checkout; it may be a folder of a larger repository.
        file: a file that must be tracked for the answer to mean anything.

    Raises:
        GitUnavailable: it cannot be known.
    """
    _git(root, "ls-files", "--error-unmatch", "--", file)
    # Not `git diff`, which writes the index anew.
    words = ("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", "--ignore-submodules", "--", ".")
    prefix = len(_git(root, "rev-parse", "--show-prefix").rstrip(b"\n"))
    _git(root, "rev-parse", "--verify", "HEAD")
    return [os.fsdecode(entry[len("XY ") + prefix :]) for entry in _git(root, *words).split(b"\0") if entry]


def is_committed(root: Path, file: str, content: bytes) -> bool:
    """Whether ``content`` would be, to git, the same as ``file`` in the last commit.

    Raises:
        GitUnavailable: it cannot be known.
    """
    ours = _git(root, "hash-object", "--stdin", "--path", file, given=content)
    return ours == _git(root, "rev-parse", f"HEAD:./{file}")


def difference(root: Path, file: Path) -> str:
    """What ``file`` has changed since the last commit, as ``git diff`` shows it; empty where it has changed nothing.

    Raises:
        GitUnavailable: it cannot be known.
    """
    _git(root, "ls-files", "--error-unmatch", "--", str(file))
    return _git(root, "diff", *_PLAIN, "HEAD", "--", str(file)).decode(errors="replace")


def patch_between(before: bytes, after: bytes, file: str) -> bytes:
    """A patch for ``git apply`` that makes ``after`` of the ``before`` of ``file``.

    Raises:
        GitUnavailable: git cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for side, content in (("a", before), ("b", after)):
            path = Path(folder, side, file)
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
        return _git(Path(folder), "diff", *_PLAIN, "--no-index", "--no-prefix", "a", "b", good=(0, 1))


def lock_file(root: Path) -> Path:
    """Where the lock of a checkout goes: git's folder, where no status shows it, or the root of what git does not track."""
    try:
        return root / os.fsdecode(_git(root, "rev-parse", "--git-path", "megacpp-mcore.lock").rstrip(b"\n"))
    except GitUnavailable:
        return root / ".megacpp-mcore.lock"


def _git(root: Path, *words: str, given: bytes | None = None, good: Sequence[int] = (0,)) -> bytes:
    # Variables such as GIT_DIR, which git sets for its hooks, would name another repository; and nothing is written.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    try:
        done = subprocess.run(
            command, input=given, env=environment, capture_output=True, timeout=_TIME_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GitUnavailable(f"git cannot be run: {error}") from error
    if done.returncode not in good:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitUnavailable(complaint[0] if complaint else f"git {words[0]} ended with status {done.returncode}")
    return done.stdout
