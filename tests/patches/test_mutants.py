"""Every edit of a patch is needed by a test of the default lane: made to pass its original through, some test fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacpp_mcore.patches.machinery.registry import default

ROOT = Path(__file__).parents[2]
SMALL = "tests/patches/test_small_patches.py"
SUMS = "tests/distributed/test_tensor_parallel_sums.py"
TESTS = {
    "checkpoint-hosts": ["tests/e2e/test_hybrid_model.py"],
    "checkpoint-layout": ["tests/checkpoints/test_layout.py"],
    "torch-adam-resume": ["tests/patches/test_mixed_precision_optimizer.py"],
    "tensor-parallel-sums": [SUMS],
    "masked-losses": [SUMS, "tests/patches/test_masked_losses.py"],
    "own-groups": [SUMS],
    "sp-norm-gradients": [SMALL, "tests/distributed/test_sp_norm_gradients.py"],
} | {
    name: [SMALL]
    for name in (
        "dataset-helpers",
        "exit-signal",
        "expert-counts",
        "moe-recompute-memory",
        "output-layer-fusion",
        "spec-import",
    )
}
"""Where they are not in the file of the patch's name."""
THROUGH = """
import functools as _functools

def _through(original):
    if isinstance(original, type):
        names = {{"__module__": original.__module__, "__qualname__": original.__qualname__}}
        return type(original.__name__, (original,), names)
    return _functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))

for _edit in PATCH.edits:
    if _edit.target == {target!r}:
        object.__setattr__(_edit, "make", _through)
"""


EDITS = [(patch.name, edit.target) for patch in default().patches for edit in patch.edits]


def files_of(name: str) -> list[str]:
    """The files with the tests of a patch."""
    return TESTS.get(name, [f"tests/patches/test_{name.replace('-', '_')}.py"])


def test_every_patch_has_tests() -> None:
    assert TESTS.keys() <= {name for name, _ in EDITS}
    assert [(name, file) for name, _ in EDITS for file in files_of(name) if not (ROOT / file).is_file()] == []


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree."""
    ignored = shutil.ignore_patterns(".git", "build", "__pycache__")
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("mutants") / "tree", symlinks=True, ignore=ignored))


def run(tree: Path, files: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The default lane's tests of ``files`` in ``tree``, until one fails."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not exhaustive and not gpu and not kernels", *files]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", dict(EDITS))
def test_no_edit_can_go_unnoticed(name: str, tree: Path) -> None:
    file = tree / "patches" / f"{name.replace('-', '_')}.py"
    source, files = file.read_text(), files_of(name)
    done = run(tree, files)
    assert done.returncode == pytest.ExitCode.OK, done.stdout[-4000:] + done.stderr[-4000:]
    unnoticed = {}
    try:
        for target in [target for patch, target in EDITS if patch == name]:
            file.write_text(source + THROUGH.format(target=target))
            done = run(tree, files)
            if done.returncode != pytest.ExitCode.TESTS_FAILED:
                unnoticed[target] = done.stdout[-4000:] + done.stderr[-4000:]
    finally:
        file.write_text(source)
    assert unnoticed == {}
