"""Makes a stock Megatron script ready (one-word spec, CPU lane, dataset helper) and runs it in this process.

The order matters and is the whole design:

1. :func:`plan` reads the command and refuses what cannot work, before Megatron is imported.
2. With ``--nproc N`` the same command is started N times through torchrun's Python API, and the rest happens there.
3. For a spec of ours the datasets are checked against their manifests. The script's folder goes first on ``sys.path``
   (so a checkout's ``megatron`` is the one that is used), then the CPU lane is installed, then the spec is imported,
   then the script runs as ``__main__``. Everything that the lane or the launcher replaces is named in a printed line (the
   functions of torch.cuda by their module), and all of it is taken back when the script ends, with the run's patches.

Written against megatron-core 0.19.2 and Megatron-LM core_v0.19.0.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore import policy
from megacpp_mcore import settings as plugin_config
from megacpp_mcore.launch import process
from megacpp_mcore.launch.plan import ALLOWED_SPEC_PREFIXES, STOCK_LOOP, Plan, plan
from megacpp_mcore.observe import run as observation
from megacpp_mcore.patches.machinery import registry
from megacpp_mcore.patches.spec_import import import_named

_RUN_ID = "megacpp-mcore-"
"""What torchrun calls the runs whose processes are children of a launch."""


@dataclass(frozen=True)
class Recording:
    """What a launch is told to record.

    Attributes:
        observe: the run's folder; by default beside the checkpoints that it saves (:func:`megacpp_mcore.observe.run.choose`).
        off: whether nothing is to be recorded there.
        steps: a file to append every step's losses to (:mod:`megacpp_mcore.observe.steps`).
        profile: the first and the last step to profile, such as ``10-14``.
        profile_tool: ``torch`` or ``external`` (:mod:`megacpp_mcore.observe.profile`).
    """

    observe: str | None = None
    off: bool = False
    steps: str | None = None
    profile: str | None = None
    profile_tool: str | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the options that say it to the parser of a command."""
        parser.add_argument("--observe", metavar="DIR", help="record the run in DIR (default: beside its checkpoints)")
        parser.add_argument("--no-observe", action="store_true", help="record nothing of the run")
        parser.add_argument(
            "--record-steps",
            metavar="FILE",
            help="append every step's losses to FILE, unrounded, one line of JSON each",
        )
        parser.add_argument(
            "--profile", metavar="FIRST-LAST", help="profile these steps by block family, such as 10-14"
        )
        parser.add_argument(
            "--profile-tool", choices=("torch", "external"), help="external: only mark the steps, for nsys or ncu"
        )

    @classmethod
    def read(cls, options: argparse.Namespace) -> Recording:
        """What the options of :meth:`add_arguments` say."""
        return cls(options.observe, options.no_observe, options.record_steps, options.profile, options.profile_tool)

    def words(self) -> list[str]:
        """The options that say the same."""
        given = {
            "--observe": self.observe,
            "--record-steps": self.steps,
            "--profile": self.profile,
            "--profile-tool": self.profile_tool,
        }
        words = [word for flag, value in given.items() if value is not None for word in (flag, value)]
        return [*(["--no-observe"] if self.off else []), *words]


def launch(
    command: Sequence[str],
    *,
    device: str = "auto",
    nproc: int = 1,
    allowed_spec_prefixes: Sequence[str] = ALLOWED_SPEC_PREFIXES,
    patches: Sequence[str] = (),
    recording: Recording | None = None,
) -> int:
    """Run a stock Megatron script, or the wheel's stock loop, and return its exit status.

    Args:
        command: ``[script.py] --megatron-argument …``. A bare script name is looked up in ``$MEGATRON_LM``, then in
            the current folder. Without a script the installed wheel's loop runs (:mod:`megacpp_mcore.launch.pretrain`).
        device: ``cpu`` installs the CPU lane (:mod:`megacpp_mcore.cpu`); ``auto`` does so when there is no GPU.
        nproc: processes to start on this host. Under torchrun, which has started them already, it must be 1.
        allowed_spec_prefixes: packages that a ``--spec`` may be imported from.
        patches: names of patches to apply, besides ``dataset-helpers``, ``spec-import`` where there is a spec, and
            ``hybrid-flops`` where it is one of ours.
        recording: what is recorded of the run, and where.

    Raises:
        LaunchError, CheckoutError, SpecImportError, ConfigFileError, DataError, PatchError: what cannot work, before Megatron
            starts. What the script itself raises passes through; with ``nproc > 1`` it is the exit status of the first
            process that failed.
    """
    chosen = plan(command, device=device, nproc=nproc, allowed_spec_prefixes=allowed_spec_prefixes, patches=patches)
    recording = recording or Recording()
    if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID):
        process.end_with_the_parent()
    if chosen.nproc > 1:
        return _run_processes(command, chosen, allowed_spec_prefixes, recording)
    return _run_here(chosen, recording)


def _run_processes(
    command: Sequence[str], chosen: Plan, allowed_spec_prefixes: Sequence[str], recording: Recording
) -> int:
    """Start ``chosen.nproc`` processes of this module through torchrun; return 0 or the first failure's status."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=chosen.nproc,
        run_id=f"{_RUN_ID}{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    options = ["--device", chosen.device]
    for prefix in allowed_spec_prefixes:
        options += ["--allow-spec-from", prefix]
    for name in chosen.patches:
        options += ["--patch", name]
    options += recording.words()
    # As torchrun does: N processes with a thread for every core each would fight over the cores.
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    try:
        with process.environment(threads), tempfile.TemporaryDirectory(prefix="megacpp-mcore-") as logs:
            config.logs_specs = DefaultLogsSpecs(log_dir=logs)
            elastic_launch(config, sys.executable)("-m", "megacpp_mcore", "launch", *options, "--", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"megacpp-mcore: rank {rank} failed first, with exit status {failure.exitcode}", file=sys.stderr)
        return _exit_status(failure.exitcode)
    except SignalException as interruption:
        return _exit_status(-int(interruption.sigval))
    return 0


def _exit_status(code: int) -> int:
    """Return the shell's number for a process that ended with ``code`` (negative: by that signal)."""
    return code if code >= 0 else 128 - code


def _run_here(chosen: Plan, recording: Recording) -> int:
    """Run the script in this process; its exit goes through what records the run, so that a failure is known there."""
    entry = str(chosen.script) if chosen.script else STOCK_LOOP
    with process.exit_status() as ended, contextlib.ExitStack() as stack:
        stack.enter_context(process.process_environment())
        stack.enter_context(process.arguments([entry, *chosen.arguments]))
        process.say(chosen.describe(int(os.environ["WORLD_SIZE"])))
        settings = plugin_config.from_environment() if chosen.has_own_spec else None
        launched = _launch_policy(chosen, settings)
        stack.enter_context(policy.said())
        stack.enter_context(process.environment(launched.environment()))
        if chosen.has_own_spec:
            sys.argv += _verified_data(chosen.arguments)
        if chosen.script is not None:
            stack.enter_context(process.first_on_path(chosen.script.parent))
        if chosen.device == "cpu":
            stack.enter_context(process.cpu_lane())
        stack.enter_context(process.patches_of_the_run())
        _apply_patches(chosen)
        stack.enter_context(policy.active(settings))
        if launched.compile.mode == "regional":
            # This brings Megatron, which has to come from the script's checkout.
            from megacpp_mcore.layer_specs import regions

            stack.enter_context(regions.before_training(launched.compile, process.say))
        stack.enter_context(_observed(chosen, recording, settings, launched))
        if chosen.spec is not None:
            import_named(*chosen.spec)
        _run_main(chosen.script)
        process.leave_process_group()
    return ended.status


def _observed(
    chosen: Plan, recording: Recording, settings: plugin_config.PluginConfig | None, launched: policy.LaunchPolicy
) -> contextlib.AbstractContextManager[None]:
    """Record the run as it is asked for; the loop that is wrapped has to be the script's own Megatron."""
    asked = observation.choose(
        chosen.arguments,
        observe=recording.observe,
        off=recording.off,
        record_steps=recording.steps,
        profile=recording.profile,
        profile_tool=recording.profile_tool,
        settings=settings,
    )
    for line in asked.describe():
        process.say(line)
    return observation.observed(asked, launched)


def _launch_policy(chosen: Plan, settings: plugin_config.PluginConfig | None) -> policy.LaunchPolicy:
    """The policy of the run, printed on rank 0."""
    world_size = int(os.environ["WORLD_SIZE"])
    model = settings.model if settings is not None else None
    run = policy.Run.from_arguments(chosen.arguments, device=chosen.device, world_size=world_size, model=model)
    if chosen.device == "cuda":
        run = dataclasses.replace(run, tf32_products=policy.tf32_products())
    launched = policy.resolve(run, settings=settings, environment=os.environ)
    for line in launched.lines(settings):
        process.say(line)
    return launched


def _apply_patches(chosen: Plan) -> None:
    """Apply what every launch needs, what a spec needs, and what was asked for; all or none."""
    names = ["dataset-helpers", *(["spec-import"] if chosen.spec else [])]
    names += ["hybrid-flops"] if chosen.has_own_spec else []
    process.say(
        f"patches: {', '.join(registry.default().apply([*names, *chosen.patches]).applied) or 'applied already'}"
    )


def _verified_data(arguments: Sequence[str]) -> list[str]:
    """Check the datasets that are named, on rank 0; return the words that have Megatron cache what it indexes of just these."""
    from megacpp_mcore.data.arguments import cache_words, verify_arguments  # brings numpy, which --help does without

    line = verify_arguments(arguments) if os.environ["RANK"] == "0" else ""
    words = cache_words(arguments)
    process.say(f"{line}; its indices are cached in {words[1]}" if words else line)
    return words


def _run_main(script: Path | None) -> None:
    """Run ``script`` or the stock loop as ``__main__``; an exit without success goes on to the caller.

    Raises:
        SystemExit: the script exits with a status other than 0, or with a message.
    """
    try:
        if script is None:
            runpy.run_module(STOCK_LOOP, run_name="__main__")
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
