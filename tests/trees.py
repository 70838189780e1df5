"""Copies of real Megatron trees to patch, of the installed wheel and of the checkout: git repositories with one commit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from megacpp_mcore.patches.machinery.record import Edit, Patch
from megacpp_mcore.patches.machinery.source_tree import SourceTree
from megacpp_mcore.patches.machinery.symbols import Refusal, digest

HOOKED = "megatron/core/__init__.py"
WORDS = dict.fromkeys(("fixes", "source", "seam", "leaves_alone", "retire_when"), "for a test")


def wheel_root() -> Path:
    """The folder that the installed megatron-core lies in."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[2]


def copy_sources(source: Path, target: Path) -> Path:
    """Copy Megatron's Python files with what Python compiled of them, and commit the former."""

    def not_python(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if not (n.endswith((".py", ".pyc")) or os.path.isdir(f"{folder}/{n}"))]

    for part in ("core", "training"):
        shutil.copytree(source / "megatron" / part, target / "megatron" / part, ignore=not_python)
    return _completed(source, target)


def copy_modules(source: Path, target: Path, modules: Iterable[str]) -> Path:
    """Copy the files of these modules, what makes a folder Megatron, and commit them: as good as all of it where no import
    is made, and quicker."""
    tree = SourceTree((source,))
    wanted = {"megatron.core", "megatron.core.package_info", *modules}
    parents = {module.rsplit(".", up)[0] for module in wanted for up in range(1, module.count("."))}
    for module in wanted | parents:
        try:
            file = tree.file(module)
        except Refusal:
            if module in wanted:
                raise
            continue  # a namespace package
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return _completed(source, target)


def _completed(source: Path, target: Path) -> Path:
    for name in ("pretrain_gpt.py", ".gitignore"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    if not (target / ".gitignore").exists():
        (target / ".gitignore").write_text("__pycache__\n*~\n")
    git(target, "init", "-q", "--template=")
    commit(target)
    return target


def link_copy(source: Path, target: Path) -> Path:
    """A cheap copy made of hard links: write to it only through :func:`edit`."""
    shutil.copytree(source / ".git", target / ".git")
    shutil.copytree(
        source, target, copy_function=os.link, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", "__pycache__")
    )
    # These are locked and rewritten by what is under test.
    for name in (HOOKED, "megatron/core/package_info.py"):
        edit(target / name, (target / name).read_bytes())
    return target


def edit(file: Path, content: bytes) -> None:
    """Give ``file`` new content without changing the other links to it."""
    mode = file.stat().st_mode
    file.unlink()
    file.write_bytes(content)
    file.chmod(mode)


def git(root: Path, *words: str, given: bytes | None = None) -> str:
    """What a git command prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "core.autocrlf=false", *words],
        cwd=root, env=environment, input=given, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip


def commit(root: Path) -> None:
    """Commit everything."""
    git(root, "add", "-A", "-f", ":!*/__pycache__/*")
    git(root, "commit", "-q", "--no-verify", "--allow-empty", "-m", "as it came")


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file of the tree but git's own and Python's caches."""
    files = {}
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in (".git", "__pycache__")]
        for file in (os.path.join(folder, name) for name in names if name not in (".git", "__pycache__")):
            if os.path.isfile(file):
                with open(file, "rb") as stream:
                    files[os.path.relpath(file, root)] = stream.read()
    return files


def patch_of(root: Path, name: str, *targets: str, **fields: object) -> Patch:
    """A patch with the fingerprints of the tree as it is."""
    tree = SourceTree((root,))
    edits = tuple(Edit(target, (digest(tree.texts(target)[0]),), lambda original: original) for target in targets)
    return Patch(**{"name": name, "edits": edits, **WORDS, **fields})  # type: ignore[arg-type]
