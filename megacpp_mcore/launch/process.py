"""Temporary state of a training process, restored afterwards: environment, CPU lane, patches, threads, ``sys.path``."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import inspect
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.observe.events import Step
from megacpp_mcore.observe.live import line
from megacpp_mcore.ops import builds
from megacpp_mcore.patches.machinery import registry
from megacpp_mcore.util import console
from megacpp_mcore.util.collectives import say
from megacpp_mcore.util.graph_reset import reset_graphs
from megacpp_mcore.util.stand_in import stand_in


@contextlib.contextmanager
def revert_patches_on_exit() -> Iterator[None]:
    """Revert, at the end, the patches applied in the context, except those applied once by a checkout's hook."""
    known = registry.default()
    before = {row["name"] for row in known.status() if row["state"] != "not applied"}
    try:
        yield
    finally:
        applied = [row["name"] for row in known.status() if row["state"] == "applied" and row["hook"] is None]
        known.revert(name for name in applied if name not in before)


@contextlib.contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Put a script's folder first on ``sys.path``, as Python does, after checking that this can still take effect."""
    if (folder / "megatron").is_dir():
        for name in ("megatron.core", "megatron.training"):
            origin = getattr(sys.modules.get(name), "__file__", None)
            if origin is not None and folder not in Path(origin).resolve().parents:
                raise LaunchError(
                    f"{name} was already imported from {origin}, so that the script would not run on its own checkout "
                    f"{folder}; launch from a fresh process that has not imported megatron",
                    code="imported",
                )
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def cpu_lane(**options: str) -> Iterator[None]:
    """Install the CPU lane for the duration, printing a line for everything it replaces; ``options`` go to its ``install``."""
    from megacpp_mcore import cpu

    with cpu.install(**options) as lane:
        for message in lane.messages:
            print(f"megacpp-mcore: {message}")
        say("CPU lane: torch.cuda, and what Megatron calls of it, are answered by the CPU")
        yield


@contextlib.contextmanager
def quiet(folder: Path | None) -> Iterator[Path]:
    """Within the context, send this process's output to a file in ``folder`` (None: a temporary folder), and yield the file.

    Raises:
        LaunchError: the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = folder or Path(tempfile.mkdtemp(prefix="megacpp-mcore_"))
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"megatron_rank_{int(os.environ['RANK']):05d}.log"
            stack.enter_context(console.redirected(file))
        except OSError as error:
            is_no_folder = error.errno in (errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # mkdir of a link: the first
            hint = (
                "expected a folder, not a broken or circular link" if is_no_folder else "name a folder that can be written to"
            )
            raise LaunchError(f"{folder or 'TMPDIR'} cannot be written to: {error}; {hint} (--observe, --save)") from error
        rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
        if rank in (0, last):  # Megatron prints its lines of steps on the last one
            whose = f" of rank {rank}" if last else ""
            console.say(f"megacpp-mcore: Megatron's output{whose} is in {file}; --verbose leaves it on the console")
        yield file


@contextlib.contextmanager
def logged_steps() -> Iterator[None]:
    """Until the context ends, print a line for each step that Megatron's own loop logs on the last rank, unrecorded.

    Losses are read only for the first step and for steps that Megatron logs, where it synchronises anyway.
    """
    from megatron.training import get_args, training

    first: Step | None = None

    def log(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal first
        result, options = stock(*args, **kwargs), get_args()
        given = inspect.signature(stock).bind(*args, **kwargs).arguments
        number = given["iteration"]
        if options.rank == options.world_size - 1 and (number % options.log_interval == 0 or first is None):
            losses = {name: float(value) for name, value in given["loss_dict"].items()}
            norm, rate = (given[name] if given[name] is None else float(given[name]) for name in ("grad_norm", "learning_rate"))
            step = Step(number, 0, time.time(), 0, losses, norm, rate, bool(given["skipped_iter"]))
            first = first or step
            console.say(line(step, options.train_iters, first))
        return result

    with stand_in(training, "training_log", log):
        yield


def nothing_left() -> str:
    """Return a message if a finished training run had no step left to train; empty otherwise."""
    from megatron.training import get_args

    try:
        args = get_args()
    except AssertionError:  # nobody has parsed any
        return ""
    done, wanted = getattr(args, "iteration", None) or 0, args.train_iters or 0
    if args.skip_train or not wanted or done < wanted:
        return ""
    return f"no step was left: the checkpoint in {args.load} is of iteration {done}, and --train-iters is {wanted}"


def leave_process_group() -> None:
    """Shut down torch.distributed cleanly, which the stock scripts leave to the interpreter's exit."""
    import torch

    if torch.distributed.is_initialized():
        reset_graphs()
        torch.distributed.destroy_process_group()


def children_end_with_it() -> contextlib.AbstractContextManager[Any]:
    """Within the context, make processes started by ``multiprocessing`` end with this process, even after a SIGKILL.

    Megatron's first save starts a process for its writers' results, and asynchronous saves start writers; only a parent that
    exits cleanly ends them.
    """

    def start(stock: Callable[[BaseProcess], None], child: Any) -> None:
        has_target = child._target is not None  # else a subclass overrides run()
        if has_target:
            child._target = functools.partial(_run_until_orphaned, child._target)
        stock(child)
        if has_target:
            child._popen.terminate = child._popen.kill  # it ignores SIGTERM

    return stand_in(BaseProcess, "start", start)


def _run_until_orphaned(target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call ``target`` in a child process; SIGKILL the process when its parent is gone."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
    # A scheduler sends SIGTERM to all processes of a job: the final save still needs the writers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    target(*args, **kwargs)


@contextlib.contextmanager
def kernels_built(folder: Path) -> Iterator[None]:
    """Compile the kernels of earlier starts of the run in ``folder``, in other processes, while this one starts.

    They fill Triton's cache (:mod:`megacpp_mcore.ops.builds`) with kernels for this Triton version and GPU type; a kernel that
    fails there is compiled at its launch. They end with this process, even after a SIGKILL.
    """
    described: list[str] = []
    with contextlib.suppress(Exception):  # without Triton, or a driver for it, no kernels are launched
        described = builds.lines(folder, **(here := builds.here()))
    if not described:
        yield
        return
    say(f"kernels: {len(described)} of earlier starts are compiled in the background, unless cached")
    command, none = [sys.executable, "-m", builds.__name__, str(folder), json.dumps(here)], subprocess.DEVNULL
    with subprocess.Popen(command, stdin=none, stdout=none, stderr=none) as building:
        try:
            yield
        finally:
            building.kill()
