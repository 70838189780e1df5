"""A corpus available on every machine: the sources of the running Python's standard library."""

from __future__ import annotations

import contextlib
import platform
import sysconfig
from pathlib import Path

from megacpp_mcore.data.manifest import verify
from megacpp_mcore.data.prepare import Plan, carry_out
from megacpp_mcore.data.sources import LEFT_OUT, Source, make_source, walk_files
from megacpp_mcore.errors import DataError

_LEFT_OUT = (
    *LEFT_OUT,
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings", "site-packages", "dist-packages"),
    *("_sysconfigdata*", "config-*"),
)
STDLIB_SPLIT = "train=0.95,heldout=0.05"


def find_stdlib_sources() -> list[Source]:
    """Return the ``.py`` files of the standard library, about 9 MB, sorted by path relative to it.

    Excluded: tests, IDLE, lib2to3, bundled and installed packages; ``encodings``, because its generated tables are so
    similar that training on some would leak the held-out ones; and the ``_sysconfigdata`` modules and ``config-*``
    folders, which describe one build. The same Python release gives the same corpus on every machine, except for a
    distributor's changes.

    Raises:
        DataError: this Python has no standard library in files, or a folder of it cannot be listed.
    """
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(make_source(path, path.relative_to(root).as_posix()) for path in walk_files(root, ("*.py",), _LEFT_OUT))
    if not sources:
        raise DataError(f"{root} holds no .py file; expected the sources of the standard library: use another Python")
    return sources


def prepare_stdlib_corpus(output_prefix: str, *, workers: int = 1, overwrite: bool = False) -> tuple[str, str]:
    """Prepare the standard library as byte datasets, split by file, and return the train and held-out prefixes.

    An existing corpus that is complete and from this Python release is kept.

    Raises:
        DataError: as :func:`megacpp_mcore.data.prepare.prepare` does.
    """
    command = f"megacpp-mcore data corpus --output DIR  # Python {platform.python_version()}"
    prefixes = f"{output_prefix}_train", f"{output_prefix}_heldout"
    with contextlib.suppress(DataError):  # none, or a damaged one, which is rejected below
        if not overwrite and all(verify(prefix).command == command for prefix in prefixes):
            return prefixes
    plan = Plan(
        output=output_prefix,
        sources=find_stdlib_sources(),
        command=command,
        split=STDLIB_SPLIT,
        overwrite=overwrite,
    )
    train, heldout = carry_out(plan, workers)
    return train, heldout
