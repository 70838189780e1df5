"""The console of a training process: our own lines, warnings and errors; everything else that it prints goes to a file."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from megacpp_mcore.util.stand_in import stand_in

TAIL_LINES = 15
"""Lines of the file that are shown when the process fails."""

_USUAL = ("Overriding default arguments for tokenizer_type:", "Transformer Engine and Apex are not installed.")
"""Prefixes of Megatron's warnings that have nothing to do with the command line."""

_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET)
"""Errors of writing to a pipe, a terminal or a connection that nobody reads any more."""

_stdout: TextIO | None = None
"""The console while :func:`redirected` is active."""
_text: TextIO | None = None
"""Where text goes while :func:`text_alone` is active."""


def say(message: str, end: str = "\n", *, is_text: bool = False) -> None:
    """Print a line on the console, also while the output goes to a file; with another ``end``, a part of one.

    Within :func:`text_alone`, only what ``is_text`` is on stdout.
    A console whose reader has gone (``head``, a closed terminal) ends no run: nothing more is printed there. Megatron's own
    prints, which go there only with ``--verbose``, still fail.
    """
    shown = (_text if is_text else None) or _stdout or sys.stdout
    try:
        print(message, end=end, file=shown, flush=True)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        with contextlib.suppress(io.UnsupportedOperation), open(os.devnull, "w") as nowhere:  # of a stream without a file
            os.dup2(nowhere.fileno(), shown.fileno())


@contextlib.contextmanager
def text_alone() -> Iterator[None]:
    """Until the context ends, only text said as such is on stdout; what else Python code prints there is on stderr."""
    with mock.patch(f"{__name__}._text", sys.stdout), contextlib.redirect_stdout(sys.stderr):
        yield


def is_alone() -> bool:
    """Whether the console has only our own lines, as everything else goes to a file."""
    return _stdout is not None


@contextlib.contextmanager
def redirected(file: Path) -> Iterator[None]:
    """Until the context ends, append to ``file`` what Python code prints or logs, except :func:`say` and our warnings.

    Warnings of Megatron's training code, about arguments that it ignores or changes, are on the console as well.
    What C and C++ libraries write, such as the last words of an aborted process, stays there: the redirection is of
    ``sys.stdout``, ``sys.stderr`` and torch's log handlers.
    """
    # Left open: log handlers that Megatron makes meanwhile keep it for the rest of the process.
    log = file.open("a", buffering=1, encoding="utf-8", errors="replace")
    with contextlib.ExitStack() as stack:
        for handler in logging.getLogger("torch").handlers:
            if isinstance(handler, logging.StreamHandler) and (before := handler.setStream(log)) is not None:
                stack.callback(setattr, handler, "stream", before)  # setStream flushes, which a full disk fails again
        handler = logging.StreamHandler(sys.stderr)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(logging.Formatter("megacpp-mcore: %(levelname)s: %(message)s"))
        ours = logging.getLogger("megacpp_mcore")
        ours.addHandler(handler)
        stack.callback(ours.removeHandler, handler)

        def shown(write: Any, message: Warning | str, category: type[Warning], filename: str, *more: Any, **named: Any) -> None:
            write(message, category, filename, *more, **named)
            is_megatrons = category is UserWarning and "/megatron/training/" in Path(filename).as_posix()
            if is_megatrons and os.environ.get("RANK", "0") == "0" and not str(message).startswith(_USUAL):
                say(f"Megatron: {message}")

        stack.enter_context(stand_in(warnings, "showwarning", shown))
        stack.enter_context(mock.patch(f"{__name__}._stdout", sys.stdout))
        stack.enter_context(contextlib.redirect_stdout(log))
        stack.enter_context(contextlib.redirect_stderr(log))
        yield


def tail(file: Path) -> str:
    """Return the last lines of ``file``, with its name."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        return f"the last lines of {file}:\n{''.join(deque(lines, TAIL_LINES))}"
