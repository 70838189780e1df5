"""Prepares a stock Megatron script (one-word spec, CPU lane, dataset helper) and runs it in this process.

The order matters and is the whole design:

1. :func:`plan` reads the command and refuses what cannot work, before Megatron is imported.
2. With ``--nproc N`` the same command is started N times through torchrun's Python API, and the rest happens there.
3. For a spec of ours the datasets are checked against their manifests. The script's folder goes first on ``sys.path``
   (so that a checkout's ``megatron`` is used), then the CPU lane is installed, then the spec is imported,
   then the script runs as ``__main__``. Everything that the lane or the launcher replaces is named in a printed line (the
   functions of torch.cuda by their module), and all of it is restored when the script ends, the run's patches included.

Written against megatron-core 0.19.2 and Megatron-LM core_v0.19.0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

from megacpp_mcore import policy
from megacpp_mcore.arguments.read import read
from megacpp_mcore.backends import Dispatcher, vendor_switches
from megacpp_mcore.backends.probes import known_triton, triton_release
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.launch import extensions, process, refusals
from megacpp_mcore.launch.plan import ALLOWED_SPEC_PREFIXES, STOCK_LOOP, Plan, check_sources, plan
from megacpp_mcore.observe import recording as observation
from megacpp_mcore.patches.machinery import registry
from megacpp_mcore.patches.spec_import import import_named
from megacpp_mcore.policy import ranks
from megacpp_mcore.policy.values import FSDP_CONNECTIONS
from megacpp_mcore.util import host
from megacpp_mcore.util.collectives import say
from megacpp_mcore.util.stand_in import environment, process_environment

_RUN_ID = "megacpp-mcore-"
"""Prefix of torchrun's run ids for processes that are children of a launch."""


@dataclass(frozen=True)
class Recording:
    """The recording options of a launch, as on the command line (:func:`megacpp_mcore.observe.recording.choose`)."""

    observe: str | None = None
    no_observe: bool = False
    profile: str | None = None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add an option for each attribute to the parser of a command."""
        parser.add_argument("--observe", metavar="DIR", help="record the run in DIR (default: beside its checkpoints)")
        parser.add_argument("--no-observe", action="store_true", help="record nothing of the run")
        steps = "profile these steps by block family, such as 10-14"
        parser.add_argument("--profile", metavar="FIRST-LAST", help=steps)

    @classmethod
    def read(cls, options: argparse.Namespace) -> Recording:
        """Read the options added by :meth:`add_arguments`."""
        return cls(options.observe, options.no_observe, options.profile)

    def words(self) -> list[str]:
        """Return the command-line options that would give this recording."""
        words = [] if self.observe is None else ["--observe", self.observe]
        words += ["--no-observe"] if self.no_observe else []
        return words if self.profile is None else [*words, "--profile", self.profile]


def launch(
    command: Sequence[str],
    *,
    device: str = "auto",
    nproc: int = 1,
    allowed_spec_prefixes: Sequence[str] = ALLOWED_SPEC_PREFIXES,
    patches: Sequence[str] = (),
    recording: Recording | None = None,
    verbose: bool = True,
) -> int:
    """Run a stock Megatron script, or the wheel's stock loop, and return its exit status.

    Args:
        command: ``[script.py] --megatron-argument …``. A bare script name is looked up in ``$MEGATRON_LM``, then in
            the current folder. Without a script the installed wheel's loop runs (:mod:`megacpp_mcore.launch.pretrain`).
        device: ``cpu`` installs the CPU lane (:mod:`megacpp_mcore.cpu`); ``auto`` does so when there is no GPU.
        nproc: processes to start on this host. Under torchrun, which has started them already, it must be 1.
        allowed_spec_prefixes: packages that a ``--spec`` may be imported from.
        patches: names of patches to apply, besides ``dataset-helpers``, ``spec-import`` where there is a spec, and
            ``hybrid-flops`` where it is one of ours; ``exit-signal`` with ``--exit-signal-handler``;
            ``masked-losses`` without a script, under context parallelism.
        recording: what is recorded of the run, and where.
        verbose: leave Megatron's output on the console; otherwise send it to a file and print the file's name.

    Raises:
        LaunchError, CheckoutError, SpecImportError, ConfigFileError, DataError, PatchError: what cannot work, before Megatron
            starts. What the script itself raises passes through; with ``nproc > 1`` it is the exit status of the first
            process that failed.
    """
    recording = recording or Recording()
    # Reject what the arguments show to be wrong, before torch is imported.
    observation.choose(command, **vars(recording))
    chosen = plan(command, device=device, nproc=nproc, allowed_spec_prefixes=allowed_spec_prefixes, patches=patches)
    if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_ID):
        host.end_with_the_parent()
    else:  # a launch that started this process has compared them
        check_sources(chosen)
    if chosen.nproc > 1:
        options = ["--device", chosen.device, *recording.words(), *["--verbose"] * verbose]
        options += [word for prefix in allowed_spec_prefixes for word in ("--allow-spec-from", prefix)]
        options += [word for name in chosen.patches for word in ("--patch", name)]
        return _run_processes(chosen.nproc, [*options, "--", *command])
    try:
        _run_here(chosen, recording, verbose)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # as the interpreter does
        return 1
    return 0


def launch_script(script: ModuleType, args: argparse.Namespace) -> int:
    """Launch a script of this package for a command that has the options it adds, and Megatron's arguments after ``--``."""
    options = script.add_options(argparse.ArgumentParser(add_help=False))._actions
    given = {one.dest: getattr(args, one.dest) for one in options}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    recording = Recording(no_observe=True)
    # Without training there are no gradients and no optimizer that would have to fit on the GPU.
    command = [str(script.__file__), *args.stock_command, "--skip-train", *words]
    nproc = getattr(args, "nproc", 1)
    return launch(command, device=args.device, nproc=nproc, recording=recording, verbose=False)


def _run_processes(nproc: int, words: Sequence[str]) -> int:
    """Start ``nproc`` processes of this package's ``launch`` through torchrun; return 0 or the first failure's status."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # As torchrun does: N processes with one thread per core each would compete for the cores.
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    with environment(threads), tempfile.TemporaryDirectory(prefix="megacpp-mcore-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"{_RUN_ID}{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "megacpp_mcore", "launch", *words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(f"megacpp-mcore: rank {rank} failed first, with exit status {failure.exitcode}", file=sys.stderr)
            # The shell's number for a process ended by a signal, which Python reports as a negative number.
            return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        except SignalException as interruption:
            return 128 + int(interruption.sigval)
    return 0


def _run_here(chosen: Plan, recording: Recording, verbose: bool) -> None:
    """Run the script in this process; its exit passes through the recording, which thus records a failure."""
    if sys.flags.optimize:
        raise LaunchError(
            "Python runs with -O or PYTHONOPTIMIZE, without the assertions by which Megatron checks a run; leave it out"
        )
    entry = str(chosen.script) if chosen.script else STOCK_LOOP
    with contextlib.ExitStack() as stack:
        stack.enter_context(process_environment())
        stack.enter_context(mock.patch.object(sys, "argv", [entry, *chosen.arguments]))
        say(chosen.describe(int(os.environ["WORLD_SIZE"])))
        with refusals.in_one_line(None):
            checked = stack.enter_context(ranks.met(chosen.arguments))
        with checked():
            _prepare(stack, chosen, recording, verbose)
        try:
            if chosen.script is None:
                runpy.run_module(STOCK_LOOP, run_name="__main__")
            else:
                runpy.run_path(entry, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        else:
            if line := process.nothing_left():
                say(line)
        process.leave_process_group()


def _prepare(stack: contextlib.ExitStack, chosen: Plan, recording: Recording, verbose: bool) -> None:
    """Check the run, and set this process up for it until ``stack`` ends."""
    import torch

    from megacpp_mcore.checkpoints.folder import release as release_folder

    settings = chosen.settings
    if settings is not None:
        vendor_switches.configure(settings.vendors, str(settings.path))
        Dispatcher(settings.backends).check_named()
    processes, on_gpus = int(os.environ["WORLD_SIZE"]), chosen.device == "cuda"
    run = read(chosen.arguments, device=chosen.device, processes=processes, settings=settings)
    tf32 = on_gpus and policy.tf32_products()
    launched = policy.resolve(run, environment=os.environ, tf32_products=tf32)
    for line in launched.lines(settings):
        say(line)
    if on_gpus and (about_triton := known_triton().reason):
        say(f"Triton {triton_release()}: {about_triton}")
    stack.enter_context(policy.announced())
    stack.enter_context(environment(launched.environment()))
    policy.check_memory(run)  # starts CUDA, which reads the environment once
    if chosen.has_own_spec:
        sys.argv += _verified_data(chosen.arguments, None if run.model is None else run.model.vocab_size)
    observed = observation.choose(chosen.arguments, settings=settings, **vars(recording))
    say(observed.describe())
    if on_gpus and observed.folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        stack.enter_context(process.kernels_built(observed.folder))
    quiet = not verbose and observed.details.console != "stock" and not {"-h", "--help"}.intersection(chosen.arguments)
    log = stack.enter_context(process.quiet(observed.folder)) if quiet else None
    if chosen.script is not None:
        stack.enter_context(process.first_on_path(chosen.script.parent))
    if chosen.device == "cpu":
        queues = {"connections": FSDP_CONNECTIONS} if run.torch_fsdp else {}
        stack.enter_context(process.cpu_lane(**queues))
    stack.enter_context(process.children_end_with_it())
    stack.enter_context(extensions.stale_locks_removed())
    stack.enter_context(process.revert_patches_on_exit())
    stack.callback(release_folder)
    needed = {"masked-losses": chosen.script is None and run.layout.context > 1}
    needed["precision-aware-adam"] = chosen.has_own_spec and run.execution.precision_aware
    names = [name for name, is_needed in needed.items() if is_needed]
    applied = registry.default().apply([*chosen.applied, *names])
    say(f"patches: {', '.join(applied) or 'applied already'}")
    stack.enter_context(policy.active(settings))
    # At its end it restores which threads run backward passes: building a model changes that for this thread.
    stack.enter_context(torch.autograd.set_multithreading_enabled(True))
    stack.enter_context(observation.observed(observed, launched))
    if quiet and observed.folder is None:
        stack.enter_context(process.logged_steps())
    stack.enter_context(ranks.compared_early(settings))
    stack.enter_context(refusals.in_one_line(log))
    if chosen.spec is not None:
        import_named(*chosen.spec)


def _verified_data(arguments: Sequence[str], vocab_size: int | None) -> list[str]:
    """Check the datasets once per host (hosts may have copies); return the arguments that give Megatron their cache folder."""
    from megacpp_mcore.data.arguments import cache_words, verify_arguments  # imports numpy, which --help does without

    line = verify_arguments(arguments, vocab_size) if os.environ.get("LOCAL_RANK", "0") == "0" else ""
    words = cache_words(arguments)
    say(f"{line}; its indices are cached in {words[1]}" if words else line)
    return words
