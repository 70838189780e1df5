"""Git queries on a checkout: which tracked files differ from the last commit, and how; and patches made by git."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import subprocess
from pathlib import Path

_LOG = ("log", "--no-patch", "--no-color", "--no-ext-diff", "--no-textconv", "--text", "--format=%h %cs %s")
"""One line per commit; no diff command that a checkout's configuration names is run."""


class GitUnavailable(Exception):
    """Git is not installed, or does not track the folder; the message says which."""


def modified(root: Path, file: str) -> list[str]:
    """Tracked files below ``root`` that differ from the last commit, as paths relative to it.

    Contents are compared here, byte for byte except for line ends: git itself would run the filters of ``.git/config``.

    The checkout may be a folder of a larger repository; ``file`` must be tracked for the answer to mean anything.

    Raises:
        GitUnavailable: git cannot answer.
    """
    run(root, "ls-files", "--error-unmatch", "--", file)
    staged = run(root, "diff-index", "--cached", "--name-only", "--no-renames", "--relative", "-z", "HEAD", "--", ".")
    names = {name for name in staged.split(b"\0") if name}
    for entry in run(root, "ls-files", "--stage", "-t", "-z", "--", ".").split(b"\0")[:-1]:
        (tag, mode, blob, _), name = entry.partition(b"\t")[0].split(), entry.partition(b"\t")[2]
        # Not what a sparse checkout leaves out (S), and not submodules.
        if tag != b"S" and mode != b"160000" and not _holds(root / os.fsdecode(name), mode, blob.decode()):
            names.add(name)
    return sorted(map(os.fsdecode, names))


def _holds(path: Path, mode: bytes, blob: str) -> bool:
    """Return whether a file's content, or a symbolic link's target, is that of git's ``blob``."""
    is_link = mode == b"120000"
    if path.is_symlink() != is_link or not (is_link or path.is_file()):
        return False
    try:
        content = os.fsencode(path.readlink()) if is_link else path.read_bytes()
    except OSError:
        return False  # it is reported, and only counts below ``megatron/``
    function = hashlib.sha1 if len(blob) == 40 else hashlib.sha256
    contents = (content, content.replace(b"\r\n", b"\n"))
    return blob in [function(b"blob %d\0" % len(it) + it, usedforsecurity=False).hexdigest() for it in contents]


def difference(root: Path, file: Path) -> str:
    """Show changes of ``file`` since the last commit, as ``git diff`` does; empty if there are none.

    Raises:
        GitUnavailable: git cannot answer.
    """
    name = os.path.relpath(file, root)
    before = run(root, "cat-file", "blob", f"HEAD:./{name}")
    return patch_between(before, file.read_bytes(), name).decode(errors="replace")


def patch_between(before: bytes, after: bytes, file: str) -> bytes:
    """Make a patch for ``git apply`` that turns ``file`` from ``before`` into ``after``, which end in a newline."""
    old, new = f"a/{file}".encode(), f"b/{file}".encode()
    lines = [io.BytesIO(content).readlines() for content in (before, after)]
    changes = b"".join(difflib.diff_bytes(difflib.unified_diff, lines[0], lines[1], old, new))
    return b"diff --git %s %s\n%s" % (old, new, changes) if changes else b""


def commit(root: Path, name: str, file: str) -> str:
    """Return the hash of the commit that ``name`` (a tag, branch or hash) stands for, if ``root`` is where ``file`` is tracked.

    Raises:
        GitUnavailable: git cannot answer, or has no such commit; if the clone is shallow, the message says so.
    """
    run(root, "ls-files", "--error-unmatch", "--", file)
    try:
        return run(root, "rev-parse", "--verify", f"{name}^{{commit}}").decode().strip()
    except GitUnavailable as error:
        shallow = run(root, "rev-parse", "--is-shallow-repository").strip() == b"true"
        fetch = f"git -C {root} fetch {'--unshallow ' if shallow else ''}--tags https://github.com/NVIDIA/Megatron-LM"
        clone = "a shallow clone" if shallow else "a clone"
        raise GitUnavailable(f"{root} is {clone} without {name}; run `{fetch}`") from error


def log(root: Path, *words: str) -> list[str]:
    """List commits, newest first: a line of hash, date and subject each, or in another format that ``words`` have.

    Raises:
        GitUnavailable: git cannot answer.
    """
    return run(root, *_LOG, *words).decode(errors="replace").splitlines()


def write_sources(root: Path, commit: str, below: str, folder: Path) -> None:
    """Write the Python files of a commit below the path ``below`` into ``folder``, as committed: no filter runs.

    Raises:
        GitUnavailable: git cannot answer, or a partial clone lacks the files.
    """
    entries = run(root, "ls-tree", "-r", "-z", commit, "--", below).split(b"\0")[:-1]
    blobs = {name: entry.split()[2] for entry, _, name in (line.partition(b"\t") for line in entries) if name[-3:] == b".py"}
    try:
        answer = io.BytesIO(run(root, "cat-file", "--batch", given=b"".join(blob + b"\n" for blob in blobs.values())))
        for name in blobs:
            size = int(answer.readline().split()[-1])  # a word if the blob is missing
            path = folder / os.fsdecode(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(answer.read(size))
            answer.readline()
    except (GitUnavailable, ValueError) as error:
        incomplete = f"{root} lacks files of {commit[:10]}, as a partial clone does; clone it without --filter"
        raise GitUnavailable(incomplete) from error


def run(root: Path, *words: str, given: bytes | None = None) -> bytes:
    """Return what a git command prints.

    Raises:
        GitUnavailable: git cannot be run, or fails; the message is its own.
    """
    # Variables such as GIT_DIR, which git sets for its hooks, would select another repository; and nothing is written.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    # Nor does anything run that a checkout's configuration names, to watch files or to fetch what a partial clone lacks.
    environment |= {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(root), *words]
    try:
        done = subprocess.run(command, env=environment, input=given, capture_output=True, check=False)
    except OSError as error:
        raise GitUnavailable(f"git cannot be run: {error}") from error
    if done.returncode:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        raise GitUnavailable(complaint[0] if complaint else f"git {words[0]} ended with status {done.returncode}")
    return done.stdout
