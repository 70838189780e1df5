"""Which edits of patches no test of the default lane needs: ``python -m tests.patches.mutants [PATCH …]``, some ten minutes.

Each edit is made to pass its original through, in a copy of the working tree, and the tests of its patch run there; status 1
if they pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megacpp_mcore.patches.machinery.registry import default

ROOT = Path(__file__).parents[2]
SMALL = "tests/patches/test_small_patches.py"
SUMS = "tests/distributed/test_tensor_parallel_sums.py"
TESTS = {
    "checkpoint-hosts": ["tests/e2e/test_hybrid_host.py"],
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


def survives(tree: Path, name: str, target: str) -> bool:
    """Whether the tests of a patch pass where an edit of it does nothing."""
    stem = name.replace("-", "_")
    file = tree / "patches" / f"{stem}.py"
    whole = file.read_text()
    file.write_text(whole + THROUGH.format(target=target))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [
            "-m",
            "not exhaustive and not gpu and not kernels",
            *TESTS.get(name, [f"tests/patches/test_{stem}.py"]),
        ]
        ended = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, timeout=600
        )
    finally:
        file.write_text(whole)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with status {ended.returncode}:\n{ended.stdout[-4000:]}{ended.stderr[-4000:]}")
    return ended.returncode == 0


def main(names: list[str]) -> int:
    left = []
    with tempfile.TemporaryDirectory(prefix="megacpp-mcore-mutants-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "build", "__pycache__"))
        for patch in default().select(names or None):
            for edit in patch.edits:
                begun = time.monotonic()
                passed = survives(tree, patch.name, edit.target)
                left += [edit.target] * passed
                word = "survives" if passed else "fails"
                print(f"{word} {patch.name} {edit.target} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{len(left)} survive")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
