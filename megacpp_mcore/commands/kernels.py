"""``megacpp-mcore kernels build``: compile the Triton kernels of a recorded run ahead, without a GPU."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from megacpp_mcore.errors import DataError
from megacpp_mcore.ops import builds
from megacpp_mcore.util.flags import positive


def add_parser(subparsers: Any) -> None:
    """Add ``kernels`` to the command line."""
    parser = subparsers.add_parser("kernels", help="compile the kernels of a recorded run ahead, without a GPU")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    build = actions.add_parser("build", help="compile them into Triton's cache (TRITON_CACHE_DIR), side by side")
    build.add_argument("folder", metavar="RUN", help="the folder that a run was recorded in (--observe)")
    build.add_argument("--jobs", type=positive, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")


def run(args: argparse.Namespace) -> int:
    """Run ``kernels build``; return 1 if a kernel could not be compiled."""
    described = builds.lines(args.folder)
    if not described:
        raise DataError(
            f"{args.folder} has no start_*/{builds.FILE}; expected the folder of a run that was recorded on a GPU (--observe)"
        )
    import triton

    described = builds.lines(args.folder, triton=triton.__version__) or described  # other versions are refused, by name
    began = time.monotonic()
    built = builds.build(described, args.jobs)
    failed = [result for result in built if result.error]
    cached = sum(result.was_cached for result in built)
    print(
        f"{len(built) - cached - len(failed)} kernels compiled, {cached} were in the cache, {len(failed)} failed; "
        f"{time.monotonic() - began:.1f} s"
    )
    for result in failed:
        print(f"{result.kernel}: {result.error}")
    if errors := [result.launcher_error for result in built if result.launcher_error]:
        print(f"{len(errors)} of them will still run the C compiler at their first launch: {errors[0]}")
    return int(bool(failed))
