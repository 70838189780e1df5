"""``nemo megacpp pretrain recipe=NAME [python=PATH] [KEY=VALUE …]``: starts ``nemo_recipes.run`` through nemo-run.

nemo-run only submits; the job is ``python -m torch.distributed.run -m megacpp_mcore.nemo_recipes.run`` in another Python, the
one with Megatron-Bridge. Neither torch nor Bridge is imported here. Written against nemo-run 0.11.1, which finds this module
through the entry point group ``nemo_run.cli``, and reads the annotations of :func:`pretrain`, which must not be strings.
"""

import inspect
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import nemo_run as run

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model.recipes import RECIPES, Recipe, recipe

RENDEZVOUS_PORT = 29500
"""Rendezvous port of a multi-host job, on its first host."""

_RUNNER = "megacpp_mcore.nemo_recipes.run"
_CHECK = "from megacpp_mcore.nemo_recipes import bridge; import sys; sys.exit(bridge.problem())"


def choose(name: str, executor: run.Executor | None = None) -> Recipe:
    """Choose the recipe called ``name``; a model's name selects the first of its recipes that fits ``executor``.

    The order is that of :data:`megacpp_mcore.model.recipes.RECIPES`; without an executor, the first for the fewest processes.

    Raises:
        ModelError: unknown recipe; the nearest names are suggested.
        LaunchError: no recipe of the model is for as many processes as the executor starts.
    """
    candidates = sorted((r for r in RECIPES.values() if r.model.name == name), key=lambda r: r.processes)
    if not candidates:
        return recipe(name.removesuffix("_config"))
    if executor is None:
        return candidates[0]
    started = processes(executor)
    for candidate in candidates:
        if candidate.processes == started:
            return candidate
    raise LaunchError(
        f"{name} has no recipe for the {started} processes that the executor starts; it has "
        f"{', '.join(f'{candidate.name} ({candidate.processes})' for candidate in candidates)}: change the executor"
    )


def processes(executor: run.Executor) -> int:
    """Return the number of processes, one per GPU, that ``executor`` starts over all its hosts."""
    return int(executor.nnodes() * executor.nproc_per_node())


def check_executor(chosen: Recipe, executor: run.Executor) -> None:
    """Refuse an executor that cannot start ``chosen``.

    Raises:
        LaunchError: unsupported class, a launcher of its own, or the wrong number of processes.
    """
    kind = type(executor).__name__
    if not isinstance(executor, (run.LocalExecutor, run.SlurmExecutor)):
        raise LaunchError(f"the executor is a {kind}; expected a LocalExecutor or a SlurmExecutor")
    if executor.launcher is not None:
        raise LaunchError(f"the {kind} has the launcher {executor.launcher!r}; leave it out: the job starts torchrun itself")
    if isinstance(executor, run.LocalExecutor) and executor.nodes != 1:
        raise LaunchError(f"the LocalExecutor has {executor.nodes} nodes; expected 1, this machine")
    if isinstance(executor, run.SlurmExecutor) and executor.ntasks_per_node != 1:
        raise LaunchError(
            f"the SlurmExecutor has {executor.ntasks_per_node} tasks a node; expected ntasks_per_node=1, the torchrun of the "
            "node, and gpus_per_node for the number of processes"
        )
    if processes(executor) != chosen.processes:
        setting = "ntasks_per_node" if isinstance(executor, run.LocalExecutor) else "gpus_per_node"
        raise LaunchError(
            f"recipe {chosen.name} needs {chosen.processes} processes, but the {kind} starts {processes(executor)} "
            f"({executor.nnodes()} × {executor.nproc_per_node()}); change its nodes and {setting}"
        )


def check_python(python: str) -> None:
    """Refuse a Python on this machine that cannot run the recipes; runs it, without importing torch or Bridge.

    Raises:
        LaunchError: it is not a program, or reports something missing.
    """
    advice = "name the Python of an environment with Megatron-Bridge (`make bridge` prints one) by python="
    if shutil.which(python) is None:
        raise LaunchError(f"python={python} is not a program on this machine; {advice}")
    probe = subprocess.run([python, "-c", _CHECK], capture_output=True, text=True, check=False)
    if probe.returncode:
        last_line = probe.stderr.strip().splitlines()[-1:] or [f"it ended with status {probe.returncode}"]
        raise LaunchError(f"python={python} cannot run the recipes: {last_line[0]}; {advice}")


def task(chosen: Recipe, executor: run.Executor, overrides: Sequence[str] = (), python: str = "python") -> run.Script:
    """Return the script that ``executor`` runs on each of its hosts: torchrun with the processes of the recipe ``chosen``.

    ``overrides`` are ``section.key=value``, as for ``nemo_recipes.run``; ``python`` is that with Megatron-Bridge, on the
    machine that trains.

    Raises:
        LaunchError: an override has another form, or as :func:`check_executor`.
    """
    check_executor(chosen, executor)
    for override in overrides:
        if "=" not in override or override.startswith("-"):
            raise LaunchError(f"{override!r} is not of the form KEY=VALUE, for instance train.train_iters=20")
    if "python" not in python:
        raise LaunchError(f"python={python} is not called python, which nemo-run requires of a program that takes -m")
    hosts = executor.nnodes()
    start = ["--nnodes", str(hosts), "--nproc-per-node", str(chosen.processes // hosts)]
    words = ["-m", _RUNNER, "--recipe", chosen.name, *overrides]
    # Both schedulers expand macros $name, so a dollar is doubled; Slurm's joins words with blanks.
    if isinstance(executor, run.SlurmExecutor):
        quoted: Callable[[str], str] = shlex.quote
        head = f"$${run.SlurmExecutor.HEAD_NODE_IP_VAR}:{RENDEZVOUS_PORT}"
        start += ["--rdzv-backend", "c10d", "--rdzv-id", "$$SLURM_JOB_ID", "--rdzv-endpoint", head]
    else:
        quoted = str
        start += ["--standalone"]
    return run.Script(
        path="torch.distributed.run",
        m=True,
        entrypoint=quoted(python),
        args=[*start, *(quoted(word).replace("$", "$$") for word in words)],
    )


class PretrainContext(run.cli.RunContext):
    """nemo-run's context of a command, which passes other arguments (``train.train_iters=20``) to the recipe's runner."""

    def parse_fn(self, fn: Callable[..., Any], args: list[str], **default_kwargs: Any) -> run.Partial:
        """Parse our arguments as nemo-run does, and keep the others as overrides.

        Raises:
            ModelError, LaunchError: the job cannot be submitted.
        """
        if self.dryrun:
            self.skip_confirmation = True
        ours = set(inspect.signature(fn).parameters) - {"ctx", "overrides"}
        own = [word for word in args if word.partition("=")[0] in ours]
        partial = super().parse_fn(fn, own, **default_kwargs)
        partial.overrides = tuple(word for word in args if word not in own)
        if not getattr(partial, "recipe", ""):
            raise LaunchError(f"no recipe is named; add recipe=NAME, one of {', '.join(RECIPES)}")
        plan(partial.recipe, partial.python, partial.overrides, self.executor)
        return partial


def plan(
    name: str, python: str = "python", overrides: Sequence[str] = (), executor: run.Executor | None = None
) -> tuple[str, run.Script, run.Executor]:
    """Return the recipe's name, the script to run, and the executor: this machine by default.

    Raises:
        ModelError, LaunchError: the job cannot be submitted; nothing has been.
    """
    chosen = choose(name, executor)
    if executor is None:
        executor = run.LocalExecutor(ntasks_per_node=chosen.processes)
    script = task(chosen, executor, overrides, python)
    if isinstance(executor, run.LocalExecutor):
        check_python(python)
    return chosen.name, script, executor


@run.cli.entrypoint(namespace="megacpp", type="experiment", run_ctx_cls=PretrainContext)
def pretrain(ctx: run.cli.RunContext, recipe: str, python: str = "python", overrides: Sequence[str] = ()) -> None:
    """Train a recipe of NAM56R with Megatron-Bridge, here or where run.executor says.

    Args:
        ctx: nemo-run's, which says where, and whether anything is submitted.
        recipe: a recipe, or a model, for its recipe with as many processes as the executor starts.
        python: the Python of an environment with Megatron-Bridge, on the machine that trains.
        overrides: every other KEY=VALUE, passed on to the recipe.
    """
    name, script, ctx.executor = plan(recipe, python, overrides, ctx.executor)
    with run.Experiment(name) as experiment:
        experiment.add(script, executor=ctx.executor, name=name, tail_logs=True)
        ctx.launch(experiment)
    if not (ctx.dryrun or ctx.detach):
        check_ended_well(experiment)


def check_ended_well(experiment: run.Experiment) -> None:
    """Raise LaunchError unless every job of ``experiment`` succeeded; nemo-run itself exits successfully either way."""
    for job in experiment.jobs:
        if job.state.name != "SUCCEEDED":
            raise LaunchError(f"job {job.id} ended as {job.state.name}; its log is under {job.executor.job_dir}")
