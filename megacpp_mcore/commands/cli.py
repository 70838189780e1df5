"""The command line ``megacpp-mcore``: passes each sub-command to its module; imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import megacpp_mcore
from megacpp_mcore.commands import bench, checkpoint, compat, data, doctor, kernels, patch, recipe, report, trained
from megacpp_mcore.errors import MegacppError
from megacpp_mcore.launch import launcher
from megacpp_mcore.launch import plan as launch_plan
from megacpp_mcore.util.nearest import suggestion

USER_ERROR = 2
INTERRUPTED = 130
_LAUNCHES = ("launch", "advise", "sample", "score")
"""Commands that run Megatron; what follows their first ``--`` is passed to it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 means that the request cannot be carried out."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        with contextlib.nullcontext() if args.command in _LAUNCHES else _without_others():
            status: int = args.run(args)
        if sys.stdout is not None:  # closed by the shell
            sys.stdout.flush()
        return status
    except MegacppError as error:
        if args.traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if args.command == "launch":
            raise  # an interrupted training run
        # The reader (head, less) has gone; Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if args.command in _LAUNCHES or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error}; expected room for what the command writes: free some, or write elsewhere", file=sys.stderr)
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USER_ERROR


@contextlib.contextmanager
def _without_others() -> Iterator[None]:
    """Silence other packages' warnings, mostly raised on import: they do not concern the command."""
    torch = logging.getLogger("torch.utils.cpp_extension")  # logs that there is a CUDA toolkit and no GPU
    level = torch.level
    with warnings.catch_warnings(action="ignore"):
        warnings.filterwarnings("default", module="megacpp_mcore")
        torch.setLevel(logging.ERROR)
        try:
            yield
        finally:
            torch.setLevel(level)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; what follows the first ``--`` of ``launch`` and the like becomes ``stock_command``."""
    parser = _parser()
    command = next((word for word in argv if not word.startswith("-")), None)
    head, tail = list(argv), []
    if command in (*_LAUNCHES, "recipe") and "--" in argv:
        head, tail = list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])
    args, unknown = parser.parse_known_args(head)
    if unknown and command == "launch":
        parser.error(
            f"unexpected arguments before --: {' '.join(unknown)}; Megatron's script and arguments go after it: "
            f"megacpp-mcore launch [OPTIONS] -- {unknown[0]} …"
        )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.stock_command = tail
    if tail and command == "recipe" and args.action != "emit":
        parser.error(f"unrecognized arguments: -- {' '.join(tail)}")
    return args


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest known names."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message}; {suggestion(message, _options(self))}see {self.prog} --help\n")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """List the options of a command and of all below it."""
    below = (action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [*parser._option_string_actions, *(name for group in below for sub in group for name in _options(sub))]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megacpp-mcore", description="The hybrid model NAM56R for stock Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megacpp-mcore {megacpp_mcore.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_launch(subparsers)
    for command in (doctor, recipe, data, patch, compat, report, bench, checkpoint, kernels):
        command.add_parser(subparsers)
        name = command.__name__.rpartition(".")[2]  # a sub-command is named after its module
        subparsers.choices[name].set_defaults(run=command.run)
    trained.add_parsers(subparsers)
    return parser


def _add_launch(subparsers: Any) -> None:
    words = "run a stock Megatron script, or the stock loop of the wheel"
    parser = subparsers.add_parser("launch", help=words, usage="%(prog)s [OPTIONS] -- [script.py] ARGUMENTS")
    add = parser.add_argument
    add("--device", choices=launch_plan.DEVICES, default="auto", help="auto uses the CPU when there is no GPU")
    add("--nproc", type=int, default=1, metavar="N", help="processes on this machine (default: 1)")
    package = f"a package that --spec may import from, besides {' and '.join(launch_plan.ALLOWED_SPEC_PREFIXES)}"
    add("--allow-spec-from", action="append", default=[], metavar="PACKAGE", help=package)
    add("--patch", action="append", default=[], metavar="NAME", help="apply a patch to the run (see `patch list`)")
    add("--verbose", action="store_true", help="leave Megatron's output on the console, not in a file")
    launcher.Recording.add_arguments(parser)
    parser.set_defaults(run=_launch)


def _launch(args: argparse.Namespace) -> int:
    return launcher.launch(
        args.stock_command,
        device=args.device,
        nproc=args.nproc,
        allowed_spec_prefixes=(*launch_plan.ALLOWED_SPEC_PREFIXES, *args.allow_spec_from),
        patches=args.patch,
        recording=launcher.Recording.read(args),
        verbose=args.verbose,
    )
