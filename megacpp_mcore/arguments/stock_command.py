"""One run of a stock script as a value, with environment and arguments separate: rendered as shell, YAML or sbatch.

A shell that runs :func:`as_cli` or :func:`as_slurm` passes the script exactly :attr:`StockCommand.arguments`. The only shell
variable allowed as an argument is :data:`DATA_VARIABLE`; every other word is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import yaml

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.util import flags

DATA_VARIABLE = "${DATA_PREFIX:?set it to the prefix of a prepared dataset}"
"""Placeholder for a dataset prefix that is not known yet; the shell stops if the variable is unset."""

LAUNCH, WHEEL, BARE = "launch", "wheel", "bare"
WAYS = (LAUNCH, WHEEL, BARE)
"""How processes train: the stock script under ``megacpp-mcore launch``, which checks the run before it starts and prints its
launch policy; the installed wheel's loop, under the same, without a script; the bare stock script."""

_HEAD_NODE = '"${HEAD_NODE:?set it to HOST:PORT of the first node}"'
_CHECKOUT = '"${MEGATRON_LM:?set it to the folder of a Megatron-LM checkout}"'
_SAFE = re.compile(r"[A-Za-z0-9_.,:+@%/-]+")


@dataclass(frozen=True, kw_only=True)
class StockCommand:
    """A run of a stock script: program, environment and arguments.

    Attributes:
        recipe: name of the model that it trains.
        via: one of :data:`WAYS`.
        processes_per_node: processes per host, each with its own GPU on ``cuda``.
        env: environment variables of every process.
        arguments: the words after the script's name.

    Raises:
        LaunchError: the bare script is to run on the CPU.
    """

    recipe: str
    device: str
    via: str
    script: str
    nodes: int = 1
    processes_per_node: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device == "cpu" and self.via == BARE:
            raise LaunchError("a run on the CPU needs the CPU lane, which the bare script does not have; use launch")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Slurm options of a batch job; None leaves an option to the cluster, and sbatch validates the others.

    Raises:
        LaunchError: a value cannot be written in a ``#SBATCH`` line.
    """

    job_name: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus_per_task: int | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for name, value in self.given():
            if not _SAFE.fullmatch(str(value)):
                raise LaunchError(
                    f"--{name} is {value!r}; expected one word of letters, digits and _.,:+@%/-, as in an #SBATCH line"
                )

    def given(self) -> list[tuple[str, Any]]:
        """Return the options that are set: sbatch's names and the values."""
        pairs = ((option.name.replace("_", "-"), getattr(self, option.name)) for option in fields(self))
        return [(name, value) for name, value in pairs if value is not None]


def as_args(command: StockCommand) -> str:
    """Write only the arguments, one word per line, for ``mapfile -t``.

    Raises:
        LaunchError: a word is the dataset variable, which only a shell resolves, or contains a line break.
    """
    if DATA_VARIABLE in command.arguments:
        raise LaunchError(
            "recipe emit --as args prints words for a program, but there is no dataset prefix to put among them; "
            "add --data PREFIX (--as cli leaves it to the shell variable DATA_PREFIX)"
        )
    broken = [word for word in command.arguments if "\n" in word]
    if broken:
        raise LaunchError(f"{broken[0]!r} contains a line break, and --as args prints one word per line; use --as yaml")
    return "\n".join(command.arguments)


def as_cli(command: StockCommand) -> str:
    """Format one shell command: the environment through ``env``, one variable per line, the program, one argument per line.

    On GPUs the program is torchrun, on the CPU our launcher, which starts the processes itself. Arguments passed to a script
    that holds the command follow the command's own.
    """
    environment = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    head = ["env", *(f"  {pair}" for pair in environment)] if environment else []
    if command.device == "cpu" and command.nodes == 1:
        words = ["megacpp-mcore", "launch", "--device", "cpu", "--nproc", str(command.processes_per_node), "--"]
    else:
        words = _torchrun(command, str(command.nodes), shlex.quote(command.recipe), _HEAD_NODE)
    return " \\\n".join(
        [*head, " ".join([*words, *_script(command)]), *(f"  {line}" for line in _argument_lines(command)), '  "$@"']
    )


def _torchrun(command: StockCommand, nodes: str, job: str, head_node: str) -> list[str]:
    """Return torchrun's words before the script; ``nodes``, ``job`` and ``head_node`` are shell text."""
    words = ["torchrun"]
    if nodes != "1":
        words += ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", job, "--rdzv-endpoint", head_node]
    words += ["--nproc-per-node", str(command.processes_per_node)]
    if command.via != BARE:
        words += ["-m", "megacpp_mcore", "launch", "--device", command.device, "--"]
    return words


def _script(command: StockCommand) -> list[str]:
    """Return the script as shell text; none for the wheel's loop. Our launcher looks it up in ``MEGATRON_LM`` itself."""
    name = shlex.quote(command.script)
    return {LAUNCH: [name], WHEEL: [], BARE: [f"{_CHECKOUT}/{name}"]}[command.via]


def _argument_lines(command: StockCommand) -> list[str]:
    """Return each flag with the words that follow it, as shell text."""
    options = flags.read(command.arguments)
    return [
        " ".join([flag, *(f'"{word}"' if word == DATA_VARIABLE else shlex.quote(word) for word in words)])
        for flag, words in options.items()
    ]


def as_slurm(command: StockCommand, slurm: Slurm) -> str:
    """Write a complete sbatch script: srun starts one torchrun per node, with rendezvous on the job's first node.

    Raises:
        LaunchError: the run is on the CPU.
    """
    if command.device != "cuda":
        raise LaunchError(f"--as slurm writes a job for GPUs, and {command.recipe} runs on the CPU; add --device cuda")
    options = dict((slurm if slurm.job_name else replace(slurm, job_name=command.recipe)).given())
    layout = {"nodes": command.nodes, "ntasks-per-node": 1, "gpus-per-node": command.processes_per_node}
    run = _torchrun(command, '"$SLURM_JOB_NUM_NODES"', '"$SLURM_JOB_ID"', '"$head_node:$head_port"')
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{name}={value}" for name, value in (options | layout).items()),
        "set -euo pipefail",
        "",
        "# environment",
        *(f"export {name}={shlex.quote(value)}" for name, value in command.env.items()),
        "",
        "# the first node, where the processes of all nodes meet",
        'read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "head_port=$((20000 + SLURM_JOB_ID % 20000))",
        "",
        "arguments=(",
        *(f"  {line}" for line in _argument_lines(command)),
        ")",
        "",
        " ".join(["srun", "--kill-on-bad-exit=1", *run, *_script(command), '"${arguments[@]}"', '"$@"']),
    ]
    return "\n".join(lines)


def as_yaml(command: StockCommand) -> str:
    """Write the run as YAML, with ``env`` and ``arguments`` as mappings (flag to its value, its list of values, or true)."""
    options = flags.read(command.arguments)
    arguments = {flag: True if not words else words[0] if len(words) == 1 else list(words) for flag, words in options.items()}
    content = {attribute.name: getattr(command, attribute.name) for attribute in fields(command)}
    content |= {"env": dict(command.env), "arguments": arguments}
    return yaml.safe_dump(content, sort_keys=False, width=1000, allow_unicode=True).rstrip("\n")
