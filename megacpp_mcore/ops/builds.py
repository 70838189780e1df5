"""Ahead-of-time kernel builds: a run records the specialisations of its Triton kernels; `build` compiles them without a GPU.

Kernels are compiled at first launch, one after another: half a minute of a cold start of ``nam56r``. What a kernel is
compiled for (Triton's own description, ``JITFunction.preload``) is known from an earlier start. With it, many processes can
fill Triton's cache in parallel, for an image, or while the model is built; launches then hit the cache. The same goes for the
C function that launches a kernel, for which Triton 3.6 runs the C compiler.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from megacpp_mcore.errors import DataError
from megacpp_mcore.util.host import end_with_the_parent

FILE = "kernels.jsonl"
"""File in the folder of a start, with one line per compiled kernel."""
_PACKAGE = "megacpp_mcore."


class Built(NamedTuple):
    """Build result of one kernel: its name, whether the cache had it, and the errors of the kernel and of the function that
    launches it, or empty strings."""

    kernel: str
    was_cached: bool
    error: str
    launcher_error: str = ""


def here() -> dict[str, Any]:
    """Return what a compiled kernel depends on besides its own description: the Triton version and this process's GPU."""
    import triton

    target = triton.runtime.driver.active.get_current_target()
    return {"triton": triton.__version__, "target": [target.backend, target.arch, target.warp_size]}


@contextlib.contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Within the context, append to ``path`` a line for each kernel of this package that Triton compiles or loads from cache.

    A kernel that cannot be described or written is skipped; launches never fail because of it.
    """
    from triton import JITFunction, knobs

    before, stock = knobs.runtime.jit_post_compile_hook, getattr(JITFunction, "_call_hook", None)
    if stock is None:  # a Triton version in which a failing description would fail the launch
        yield
        return

    def note(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # other Triton versions may describe kernels differently
            described = kwargs["compile"]["specialization_data"]
            if json.loads(described)["name"].startswith(_PACKAGE):
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**here(), "kernel": described}) + "\n")
        return before(*args, **kwargs) if before is not None else None

    def call(function: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(function, hook, *args, **kwargs)
        except Exception:  # with a hook, Triton serialises every package's kernels as JSON; not every constexpr can be
            if hook is not note or before is not None:  # raise as without recording
                raise
            return None

    with (
        mock.patch.object(JITFunction, "_call_hook", call),
        mock.patch.object(knobs.runtime, "jit_post_compile_hook", note),
    ):
        yield


def lines(run: str | os.PathLike[str], **known: object) -> list[str]:
    """Return the kernels with ``known`` values of :func:`here`, from the start of a recorded run that has most of them.

    A torn last line is skipped, and, with ``known`` values, every line that cannot be parsed.
    """
    described: list[str] = []
    for path in sorted(Path(run).glob(f"start_*/{FILE}")):
        with contextlib.suppress(OSError):
            written = dict.fromkeys(path.read_text(encoding="utf-8").split("\n")[:-1])
            described = max(described, [line for line in written if _has(line, known)], key=len)
    return described


def _has(line: str, known: Mapping[str, object]) -> bool:
    try:
        return not known or {**json.loads(line), **known} == json.loads(line)
    except (ValueError, TypeError):
        return False


def build(described: Sequence[str], jobs: int) -> list[Built]:
    """Compile kernels into Triton's cache in ``jobs`` processes; nothing touches a GPU.

    Args:
        described: from :func:`lines`.

    Raises:
        DataError: kernels of another Triton version or package, or malformed lines; or a process was killed.
    """
    import triton

    try:
        kernels = [json.loads(line) for line in described]
        versions, names = (
            {kernel["triton"] for kernel in kernels},
            {json.loads(kernel["kernel"])["name"] for kernel in kernels},
        )
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"a line of {FILE} was not written by a run ({type(error).__name__}: {error}); remove it") from error
    if foreign := {*versions} - {triton.__version__} or {name for name in names if not name.startswith(_PACKAGE)}:
        raise DataError(
            f"found kernels of {', '.join(sorted(foreign))}; expected those of {_PACKAGE}* by Triton "
            f"{triton.__version__}: record them again, by a run with --observe"
        )
    for module in {name.rpartition(".")[0] for name in names}:
        with contextlib.suppress(ImportError):  # which its kernels report
            importlib.import_module(module)
    context = multiprocessing.get_context("fork")  # of what has been imported
    try:
        with _linked(), concurrent.futures.ProcessPoolExecutor(jobs, context, end_with_the_parent) as pool:
            return list(pool.map(_build, described))
    except concurrent.futures.BrokenExecutor as error:
        raise DataError(
            f"one of {jobs} compiling processes ended abruptly, usually out of memory, else by a crash of Triton's compiler; "
            "run it again with fewer --jobs: kernels compiled so far are in the cache"
        ) from error


@contextlib.contextmanager
def _linked() -> Iterator[None]:
    """Within the context, Triton links what it compiles with a libcuda of empty functions: any host has that."""
    from triton.backends.nvidia import driver

    # Those that the driver calls: of a library of which nothing is used, a linker keeps no record (--as-needed).
    functions = {*re.findall(r"\bcu[A-Z]\w*(?=\()", inspect.getsource(driver))}
    source = "".join(f"void {function}(void) {{}}\n" for function in functions)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_LIBCUDA_PATH=folder):
        command = [os.environ.get("CC", "cc"), "-shared", "-x", "c", "-", "-o", f"{folder}/libcuda.so.1"]
        with contextlib.suppress(OSError):  # without a compiler, each launcher's error says so
            subprocess.run(
                [*command, "-Wl,-soname,libcuda.so.1"], input=source.encode(), check=False, stderr=subprocess.DEVNULL
            )
        yield


class _Target:
    """The part of a driver that Triton uses when it compiles for a GPU."""

    def __init__(self, target: Any) -> None:
        self.get_current_target = lambda: target

    def get_current_device(self) -> int:
        """Return the number of the device that compiled kernels belong to."""
        return 0


def _build(line: str) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget

    from megacpp_mcore.ops.triton_launch import DIRECT

    content: Mapping[str, Any] = json.loads(line)
    name = json.loads(content["kernel"])["name"]
    module, _, attribute = name.rpartition(".")
    hits: list[bool] = []
    driver = triton.runtime.driver
    driver.set_active(_Target(GPUTarget(*content["target"])))
    try:
        with mock.patch.object(triton.knobs.compilation, "listener", functools.partial(_listen, hits)):
            kernel = getattr(importlib.import_module(module), attribute).preload(content["kernel"])
    except Exception as error:  # a kernel that has changed since is compiled at launch
        return Built(name, False, _line(error))
    try:
        if DIRECT and content["target"][0] == "cuda":
            from triton.backends.nvidia.driver import CudaLauncher

            CudaLauncher(kernel.src, kernel.metadata)
    except ImportError:  # compiled and cached, but nothing to load it with: no driver here
        pass
    except Exception as error:  # then that is also compiled at launch
        return Built(name, all(hits), "", _line(error))
    return Built(name, all(hits), "")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _listen(hits: list[bool], *, cache_hit: bool, **_: Any) -> None:
    hits.append(cache_hit)


if __name__ == "__main__":
    end_with_the_parent()
    build(lines(sys.argv[1], **json.loads(sys.argv[2])), len(os.sched_getaffinity(0)))
