"""The command lines that run a launch under Nsight Systems or Nsight Compute, for the steps of a window. No torch.

``megacpp-mcore launch --profile-tool external`` opens NVTX ranges by block family and calls ``cudaProfilerStart`` and
``cudaProfilerStop`` at the window, which is what both are told to wait for. The options are those of Nsight Systems 2024.5
and Nsight Compute 2024.3.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.observe import run as observation
from megacpp_mcore.observe.profile.profiler import EXTERNAL, FOLDER
from megacpp_mcore.observe.profile.trace import PARTS, PREFIX
from megacpp_mcore.settings import parse_steps

NSYS, NCU = "nsys", "ncu"
TOOLS = (NSYS, NCU)

COUNTERS = (
    "gpu__time_duration.sum",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
)
"""Time, SMs at work, tensor pipes at work (an SM that is at work may do no tensor work at all), memory."""

KERNELS = 200
"""Kernels that Nsight Compute replays: it runs each several times, so that a whole step takes hours."""


def recipe(
    tool: str,
    command: Sequence[str],
    *,
    run: str,
    first: int,
    last: int,
    family: str | None = None,
    gpu_metrics: bool = False,
) -> str:
    """The lines of a shell that profile a launch.

    Args:
        tool: :data:`NSYS` or :data:`NCU`.
        command: what is given to ``megacpp-mcore launch``: its options, ``--``, and the script and its arguments.
        run: the run's folder.
        first, last: the window.
        family: a block family (``E``) or another range (``head``), to which Nsight Compute is limited.
        gpu_metrics: whether Nsight Systems samples the counters of the whole GPU, which takes the right to read them.

    Raises:
        LaunchError: an unknown tool or family, or a launch that asks for a profile itself, would refuse this one, or is for a
            CPU.
    """
    separator = command.index("--") if "--" in command else len(command)
    own, words = command[:separator], command[separator + 1 :]
    for word in own:
        if word.startswith("--profile") or word.startswith("--observe"):
            raise LaunchError(f"{word} is among the words of the launch; leave it out, the recipe gives it")
    steps = f"{first}-{last}"
    _refuse(own, words, run, steps)
    launch = ["megacpp-mcore", "launch", "--observe", run, "--profile", steps, "--profile-tool", EXTERNAL]
    output = str(PurePath(run, FOLDER, steps, tool))
    made = _NSYS_OR_NCU.get(tool)
    if made is None:
        raise LaunchError(f"the tool is {tool!r}; expected {' or '.join(TOOLS)}")
    lines = [
        f"mkdir -p {shlex.quote(str(PurePath(output).parent))}",
        _lines([*made(output, family, gpu_metrics), *launch, *command]),
        *_after(tool, output),
    ]
    return "\n".join(lines) + "\n"


def _refuse(own: Sequence[str], words: Sequence[str], run: str, steps: str) -> None:
    """Raise LaunchError where the printed launch could not run, or would have nothing to profile.

    Whether there is a GPU is known on the host of the launch alone; but arguments with all that a run on a CPU needs are for
    one, and what is left to the profilers there is nothing.
    """
    if not words:
        raise LaunchError(
            "no launch was given; expected, after a `--`, what follows the `--` of `megacpp-mcore launch`: [script.py] and "
            "Megatron's arguments"
        )
    observation.choose(words, observe=run, profile=steps)
    from megacpp_mcore import cpu

    if ("--device", "cpu") in itertools.pairwise(own) or "--device=cpu" in own or not cpu.missing_arguments(words):
        raise LaunchError(
            "the launch is one on a CPU, and nsys and ncu profile a GPU; expected arguments for one, as `megacpp-mcore recipe "
            "emit … --device cuda --as args` writes them, or profile it with `megacpp-mcore launch --profile`"
        )


def _nsys(output: str, family: str | None, gpu_metrics: bool) -> list[str]:
    words = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    words += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node"]
    if gpu_metrics:
        words.append("--gpu-metrics-devices=all")
    return [*words, f"--output={output}", "--force-overwrite=true"]


def _ncu(output: str, family: str | None, gpu_metrics: bool) -> list[str]:
    words = ["ncu", "--target-processes=all", "--profile-from-start=off", "--nvtx", f"--launch-count={KERNELS}"]
    if family is not None:
        words.append(f"--nvtx-include={_ranges(family)}")
    return [*words, f"--metrics={','.join(COUNTERS)}", f"--export={output}_%p", "--force-overwrite"]


def _ranges(family: str) -> str:
    """The ranges of a family, as Nsight Compute wants them: a name, or an expression for those that are numbered.

    The expression has to hold the point before the number: ``M`` alone is where ``MTP.1`` begins, too.
    """
    if family in PARTS:
        return f"{PREFIX}{family}/"
    if not _NUMBERED.fullmatch(family):
        raise LaunchError(
            f"the family is {family!r}; expected letters of layers (A, M, E, R, AE), MTP, {', '.join(PARTS)}"
        )
    return f"regex:{PREFIX}{family}[.].*/"


_NUMBERED = re.compile(r"[AMR][EF]?|[EF]|MTP|layer")
"""The labels that :func:`megacpp_mcore.observe.profile.ranges.family` gives, and the depths."""

_NSYS_OR_NCU = {NSYS: _nsys, NCU: _ncu}


def _after(tool: str, output: str) -> list[str]:
    if tool == NSYS:
        words = ["nsys", "stats", "--report=nvtx_gpu_proj_sum,cuda_gpu_kern_sum,nvtx_kern_sum", f"{output}.nsys-rep"]
        return [shlex.join(words)]
    return [f'for report in {shlex.quote(output)}_*.ncu-rep; do ncu --import "$report" --page raw --csv; done']


def _lines(words: Sequence[str]) -> str:
    """A command with an option a line."""
    quoted = [shlex.quote(word) for word in words]
    return " \\\n  ".join(_by_option(quoted))


def _by_option(words: Sequence[str]) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        if word.startswith("--") or word == "megacpp-mcore":
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return lines


def add_parser(subparsers: Any) -> None:
    """Add ``profile emit``."""
    parser = subparsers.add_parser("profile", help="command lines for Nsight Systems and Nsight Compute")
    inner = parser.add_subparsers(dest="profile_command", required=True, metavar="COMMAND")
    emit = inner.add_parser("emit", help="print the commands that profile a launch")
    emit.add_argument("--tool", choices=TOOLS, required=True)
    emit.add_argument("--steps", default="10-14", metavar="FIRST-LAST", help="the window (default: 10-14)")
    emit.add_argument("--observe", required=True, metavar="DIR", help="the run's folder")
    emit.add_argument(
        "--family", metavar="LETTER", help="of ncu: only kernels of this block family (A, M, E, R, MTP, head)"
    )
    emit.add_argument("--gpu-metrics", action="store_true", help="of nsys: sample the counters of the GPU, too")


def run(args: argparse.Namespace) -> int:
    """Print the recipe for the launch after ``--`` (:attr:`stock_command`)."""
    first, last = parse_steps(args.steps)
    words = ["--", *args.stock_command]
    text = recipe(
        args.tool,
        words,
        run=args.observe,
        first=first,
        last=last,
        family=args.family,
        gpu_metrics=args.gpu_metrics,
    )
    print(text, end="")
    return 0
