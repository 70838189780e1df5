"""One-line errors, with what to do, for invalid input that Megatron or torch detects late.

Written against megatron-core 0.19.2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import os
import re
import shutil
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megacpp_mcore.errors import LaunchError, MegacppError
from megacpp_mcore.model.training import OF_MEGATRON
from megacpp_mcore.policy import ranks
from megacpp_mcore.util import console, flags
from megacpp_mcore.util.files import fullness, is_remote
from megacpp_mcore.util.nearest import suggestion
from megacpp_mcore.util.stand_in import stand_in

_UNWRITTEN = re.compile(r"Worker failure: .*")
"""Message of Megatron's writer, when it is not said that a disk or quota is full."""
_LOST = re.compile(
    r"(?s)(?:gloo|NCCL|torch\.distributed\.Dist).*?(?P<cause>Connection reset by peer|Broken pipe|ncclRemoteError"
    r"|(?:Connection closed by peer|(?:Read|Write) error) \[(?P<address>.+?)\])"
)
"""Messages of gloo, NCCL and TCPStore when another process is gone; gloo's has its address."""
_UNANSWERED = re.compile(r"gloo.*Timed out waiting (\d+)ms for (?:recv|send)")
"""Message of gloo when another process is slow, or is gone without closing its connection."""
_NOT_MET = re.compile(r"waiting for clients\. (\d+)/(\d+) clients joined")
"""Message of PyTorch's rendezvous when too few processes joined."""
_ARGUMENTS_READ = ("validate_args", "set_global_variables", "__post_init__")
"""Functions of Megatron that raise errors about the arguments; the last one, about its configurations."""
_OF_OPTIMIZERS = {"emerging_optimizers": "emerging-optimizers", "absl": "absl-py"}
"""Modules that Megatron's optimizers other than Adam and SGD import, and the packages to install for them."""
_OF_CHECKPOINTS = re.compile(r"latest_checkpointed_iteration\.txt|release|iter_\d+")
"""Names of entries in a checkpoint folder."""
_ONLY_WITH = {
    "--phase-transition-iterations": ("--train-samples",),
    "--loss-scale": ("--fp16", "--bf16", "--use-distributed-optimizer"),
}
"""Flags that Megatron ignores, or fails on once the model is built, unless one of these is given as well."""
_OTHER_SCHEDULE = re.compile(r"OptimizerParamScheduler: .* value (\S+) and checkpoint ?value (\S+) for (.*) do not")


def check_words(words: Sequence[str], *, here: bool) -> None:
    """Reject invalid arguments that Megatron would not reject as clearly; ``here``: they are for this machine.

    Raises:
        LaunchError: there is nothing to load, or no step to save at, to evaluate at or to train to; a loader is missing; or a
            flag has no effect without another.
    """
    given = flags.read(words)
    for flag, others in _ONLY_WITH.items():
        if flag in given and not given.keys() & {*others}:
            raise LaunchError(f"{flag} is for runs with {' or '.join(others)}; expected that, too: add it, or remove {flag}")
    counts = ("train-iters", "eval-interval", "save-interval")
    iterations, _, interval = (flags.whole(given, f"--{name}", LaunchError, 1) for name in counts)
    if "--persistent-save-interval" in given:  # the same by an older name
        interval = flags.whole(given, "--persistent-save-interval", LaunchError, 1)
    for unit, end in (("iters", iterations), ("samples", flags.whole(given, "--train-samples", LaunchError, 1))):
        warmup = flags.whole(given, f"--lr-warmup-{unit}", LaunchError, 0)
        decay = flags.whole(given, f"--lr-decay-{unit}", LaunchError, 1) or end
        if warmup and decay and warmup >= decay:
            raise LaunchError(
                f"--lr-warmup-{unit} is {warmup}, and the learning rate's schedule ends at {decay} (--lr-decay-{unit}, by "
                f"default --train-{unit}); expected a shorter warm-up: add --lr-warmup-{unit} {decay // 10}"
            )
    if flags.first(given, "--dataloader-type") == "external":
        raise LaunchError(
            "--dataloader-type external takes loaders from a custom script; expected single or cyclic, as both "
            "Megatron's scripts and the launcher give datasets"
        )
    save, load = (flags.first(given, f"--{name}") for name in ("save", "load"))
    if save and interval is None:
        raise LaunchError("--save has no --save-interval; add --save-interval N, the steps from one checkpoint to the next")
    if load is None or is_remote(load):
        return
    if match := re.fullmatch(r"(.*?)/?iter_0*(\d+)/?", load):
        raise LaunchError(
            f"--load {load} is one checkpoint; expected its folder: --load {match[1] or '.'} --ckpt-step {match[2]}"
        )
    starts_anew = save is not None and os.path.realpath(load) == os.path.realpath(save)  # a job's first time
    if here and not starts_anew and (problem := _unloadable(load, given)):
        raise LaunchError(
            f"--load {load} {problem}; expected the folder that --save named; its newest checkpoint is loaded "
            "(--ckpt-step N: another); to start from scratch, omit --load"
        )


def _unloadable(load: str, given: flags.Flags) -> str | None:
    """Return why nothing can be loaded from ``load``, where Megatron would silently start from scratch; None if it can."""
    if not os.path.lexists(load):
        return "does not exist"
    if os.path.isfile(load):
        return "is a file"
    if {"--pretrained-checkpoint", "--non-persistent-ckpt-type"} & given.keys():  # loaded in its place
        return None
    with contextlib.suppress(OSError):
        if not any(_OF_CHECKPOINTS.fullmatch(name) for name in os.listdir(load)):
            return "holds no checkpoint"
    return None


def check_installed(optimizer: str) -> None:
    """Reject an optimizer with packages that are not installed; Megatron would only do so once the model is built.

    Raises:
        LaunchError: names what to install.
    """
    lacking = [name for name in _OF_OPTIMIZERS if importlib.util.find_spec(name) is None]
    if optimizer not in OF_MEGATRON and lacking:
        raise LaunchError(
            f"the optimizer {optimizer} needs {' and '.join(lacking)}, not installed here: pip install "
            f"{' '.join(_OF_OPTIMIZERS[name] for name in lacking)}"
        )


@contextlib.contextmanager
def in_one_line(log: Path | None) -> Iterator[None]:
    """Within the context, raise LaunchErrors for Megatron's errors about arguments, a port in use, a full disk or a schedule.

    Any other failure shows the end of ``log``, where the process's output goes.
    """
    with stand_in(argparse.ArgumentParser, "error", _refuse_words):
        try:
            yield
        except MegacppError:
            raise
        except BaseException as error:
            if why := _explained(error):
                raise LaunchError(why) from error
            if log is not None and not (isinstance(error, SystemExit) and not error.code):
                console.say(console.tail(log))
            raise


def _refuse_words(stock: Callable[..., Any], parser: argparse.ArgumentParser, message: str) -> None:
    near = suggestion(message, parser._option_string_actions)
    raise LaunchError(f"{message}; {near}megatron/training/arguments.py has Megatron's arguments")


def _explained(error: BaseException) -> str | None:
    """Return an explanation of ``error`` for users; None if its traceback suffices."""
    text = "".join(traceback.format_exception(error))
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in text:
        return f"the port {where} is in use by another program; choose a free MASTER_PORT (torchrun --master-port), or end it"
    if match := _OTHER_SCHEDULE.search(text):
        return (
            f"the learning rate's schedule of the checkpoint has {match[3]} {match[2]}, and the run's {match[1]}; add "
            "--override-opt_param-scheduler to follow the run's, or --use-checkpoint-opt_param-scheduler"
        )
    if match := _NOT_MET.search(text):
        return (
            f"{match[1]} of {match[2]} processes came to {where} in time; the others have ended, as their own output says, or "
            "were not started with this address, or cannot reach it"
        )
    if len(ranks.hosts) > 1 and isinstance(error, RuntimeError):
        message = "".join(traceback.format_exception_only(error))  # TCPStore says no more than "Broken pipe"
        rank, size, host = os.environ.get("RANK"), len(ranks.hosts), socket.gethostname()
        if match := _LOST.search(message):
            return (
                f"rank {rank} of {size} on {host} has lost its connection to {ranks.peers(match['address'])} "
                f"({match['cause']}): a process there has ended (its own output says why), or that host cannot be reached; "
                "start all again with --load"
            )
        if match := _UNANSWERED.search(message):
            return (
                f"another rank did not answer rank {rank} of {size} on {host} in {int(match[1]) / 1000:g} s; it may be slow, "
                "for example building indices or saving: raise --distributed-timeout-minutes; or it has ended, and "
                "its own output says why"
            )
    save = flags.first(flags.read(sys.argv), "--save") if "checkpointing" in text else None  # not a cache elsewhere
    said = fullness(text) or next(iter(_UNWRITTEN.findall(text)), None)
    if save and said:
        from megacpp_mcore.checkpoints.folder import TRACKER  # imports torch

        is_first = not (Path(save) / TRACKER).exists()
        others = "no checkpoint there is complete yet" if is_first else "the checkpoints before it are whole"
        with contextlib.suppress(OSError):
            save += f", where {shutil.disk_usage(save).free / 1e9:.3g} GB are free"
        return (
            f"a checkpoint could not be written in full to --save {save} ({said}); make room, or name another folder, and "
            f"start again{'' if is_first else ' with --load'}: {others}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"what the run writes does not fit ({error}): make room, or name other folders: --observe for its record and "
            "log, --data-cache-path and TRITON_CACHE_DIR for caches"
        )
    if isinstance(error, OSError) and isinstance(error.filename, str):
        path = Path(error.filename)
        for flag, words in flags.read(sys.argv).items():
            if named := [word for word in words if word and Path(word) in (path, *path.parents)]:
                return f"{flag} {named[0]}: {error}; correct that path, or the permissions there"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, Exception) and any(
        frame.name in _ARGUMENTS_READ and "/megatron/" in frame.filename for frame in frames
    ):
        # Many assertions have no message: their condition is the message.
        return f"Megatron refuses the run's arguments: {' '.join(str(error).split()) or frames[-1].line}"
    return None
