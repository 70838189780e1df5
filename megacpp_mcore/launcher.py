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
import ctypes
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore import config, lowering, policy
from megacpp_mcore.errors import CheckoutError, LaunchError, MegacppError, SpecImportError
from megacpp_mcore.observe import run as observation
from megacpp_mcore.patches import registry
from megacpp_mcore.patches.spec_import import import_named, spec_words

DEVICES = ("auto", "cpu", "cuda")
ALLOWED_SPEC_PREFIXES = ("megacpp_mcore", "megatron")
"""Packages a ``--spec`` may come from: importing a module runs it, so the list is opened on purpose only."""

CHECKOUT_VARIABLE = "MEGATRON_LM"
CHECKOUT_TAG = "core_v0.19.0"
CHECKOUT_ADVICE = (
    f"get a checkout with `git clone --branch {CHECKOUT_TAG} https://github.com/NVIDIA/Megatron-LM`, set "
    f"{CHECKOUT_VARIABLE}= to its folder, or leave the script out to use the stock loop of the installed wheel"
)

_STOCK_LOOP = "megacpp_mcore.pretrain"


@dataclass(frozen=True)
class Plan:
    """One launch, read and checked: what runs, with which arguments, where."""

    script: Path | None
    """The stock script, or None for the stock loop of the wheel."""
    arguments: tuple[str, ...]
    """Megatron's arguments, ``--spec`` as the two words Megatron wants."""
    spec: tuple[str, str] | None
    """Module and attribute named by ``--spec``."""
    device: str
    """``cpu`` or ``cuda``."""
    nproc: int
    """Processes to start; 1 is this one."""
    patches: tuple[str, ...] = ()
    """Patches to apply besides those that a launch applies anyway."""

    @property
    def has_own_spec(self) -> bool:
        """Whether the spec is one of this package."""
        return self.spec is not None and self.spec[0].partition(".")[0] == "megacpp_mcore"

    def describe(self, world_size: int) -> str:
        """Return the line that says what is about to run."""
        runs = f"{_STOCK_LOOP} (the wheel's stock loop)" if self.script is None else str(self.script)
        spec = "none (stock GPT)" if self.spec is None else ".".join(self.spec)
        return f"script {runs} | spec {spec} | device {self.device} | world size {world_size}"


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
            the current folder. Without a script the installed wheel's loop runs (:mod:`megacpp_mcore.pretrain`).
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
    if chosen.nproc > 1:
        return _run_processes(command, chosen, allowed_spec_prefixes, recording)
    return _run_here(chosen, recording)


def plan(
    command: Sequence[str],
    *,
    device: str = "auto",
    nproc: int = 1,
    allowed_spec_prefixes: Sequence[str] = ALLOWED_SPEC_PREFIXES,
    patches: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Plan:
    """Read and check a launch (see :func:`launch`) without starting anything.

    Raises:
        LaunchError, SpecImportError: it cannot be started as asked for.
    """
    words = list(command)
    script = None
    if words and words[0].endswith(".py"):
        script = find_script(words.pop(0), environment)
    elif words and not words[0].startswith("-"):
        raise LaunchError(
            f"the launch command starts with {words[0]!r}, which is neither a script (*.py) nor an argument (--…); "
            "name pretrain_gpt.py or pretrain_hybrid.py first, or give Megatron's arguments alone"
        )
    if nproc < 1:
        raise LaunchError(f"--nproc is {nproc}; expected the number of processes to start, 1 or more")
    _check_processes(environment)
    if nproc > 1 and "RANK" in environment:
        raise LaunchError(
            f"--nproc {nproc} was given to a process that torchrun has started (RANK={environment['RANK']}); "
            "leave --nproc out under torchrun, or start megacpp-mcore without torchrun"
        )
    _check_own_options(words)
    _check_arguments(words)
    _check_packed(script, words)
    arguments, spec = split_spec(words)
    if spec is not None:
        _check_allowed(spec, allowed_spec_prefixes)
        _check_host(script, spec, arguments)
        if spec[0].partition(".")[0] == "megacpp_mcore":
            config.from_environment()  # what is wrong in that file is said before Megatron starts
    resolved = _resolve_device(device)
    if resolved == "cpu":
        _check_cpu_arguments(arguments)
    else:
        _check_gpus(nproc, environment)
    registry.default().select(patches)  # refuses names that it does not know
    return Plan(script, tuple(arguments), spec, resolved, nproc, tuple(patches))


def _check_processes(environment: Mapping[str, str]) -> None:
    """Refuse half of what torchrun sets: a rank would be made up, and the others waited for."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in environment]
    if missing and environment.get("WORLD_SIZE", environment.get("RANK", "1")) != "1":
        raise LaunchError(
            f"the environment says that this is one of several processes, but does not hold {', '.join(missing)}; start "
            "them with torchrun or --nproc, or unset RANK and WORLD_SIZE"
        )


def _check_arguments(arguments: Sequence[str]) -> None:
    """Refuse what would give the run a ``--spec`` that this launcher has not seen."""
    for flag, source in (("--use-checkpoint-args", "a checkpoint"), ("--yaml-cfg", "a file")):
        if any(word == flag or word.startswith(flag + "=") for word in arguments):
            raise LaunchError(
                f"{flag} takes arguments from {source}, --spec among them, which would be imported unchecked; write the "
                "arguments out (`megacpp-mcore recipe emit … --as cli` prints them)"
            )


_OWN_OPTIONS = (
    "--observe",
    "--no-observe",
    "--record-steps",
    "--profile-tool",
    "--device",
    "--nproc",
    "--allow-spec-from",
)


def _check_own_options(arguments: Sequence[str]) -> None:
    """Refuse options of the launch behind the ``--``, which Megatron would refuse after a minute, below its whole usage."""
    for word, after in itertools.pairwise([*arguments, ""]):
        if word.partition("=")[0] in _OWN_OPTIONS or (word == "--profile" and re.fullmatch(r"\d+-\d+", after)):
            raise LaunchError(
                f"{word} is an option of the launch, and Megatron has no such argument; put it before the `--`, as in "
                f"`megacpp-mcore launch {word} … -- …`"
            )


def _check_packed(script: Path | None, words: Sequence[str]) -> None:
    """Refuse packed rows where a stock script's inner stages would wait for data that only the first and the last have.

    Seen on core_v0.19.0, ``pretrain_gpt.py``: ``is_dataset_built_on_rank`` and ``get_batch``.
    """
    if script is None or "--dataloader-inter-document-masking" not in words:
        return
    given = policy.read_flags(words)
    cut = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    stages = next(iter(given.get("--pipeline-model-parallel-size", ())), "1")
    marked = [
        " ".join(given.get(flag, ())).partition("/")[0].count("|")
        for flag in ("--pipeline-model-parallel-layout", "--hybrid-layer-pattern")
    ]
    if stages not in ("1", "2") or max(marked) > 1 or any(flag in given for flag in cut):
        raise LaunchError(
            f"{script.name} reads data for the first and the last pipeline chunk alone, and with "
            "--dataloader-inter-document-masking those between ask for it, too; leave the script out (the wheel's loop gives "
            "it to all), or take two stages without virtual ones"
        )


def find_script(word: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the full path of the script ``word``; raise CheckoutError, saying where it was looked for."""
    if os.path.dirname(word):
        candidates = [Path(word)]
    else:
        folders = [environment.get(CHECKOUT_VARIABLE), os.curdir]
        if folders[0] and not os.path.isdir(folders[0]):
            raise CheckoutError(f"{CHECKOUT_VARIABLE} is {folders[0]!r}, which is no folder; {CHECKOUT_ADVICE}")
        candidates = [Path(folder) / word for folder in folders if folder]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = ", ".join(str(candidate.absolute()) for candidate in candidates)
    state = "" if environment.get(CHECKOUT_VARIABLE) else f" ({CHECKOUT_VARIABLE} is not set)"
    raise CheckoutError(f"{word} was not found; looked for {looked}{state}; {CHECKOUT_ADVICE}")


def split_spec(arguments: Sequence[str]) -> tuple[list[str], tuple[str, str] | None]:
    """Return ``arguments`` with ``--spec a.b.c`` as ``--spec a.b c``, and the pair, or None when there is no spec.

    Megatron takes the two words only (megatron-core 0.19, ``core/transformer/spec_utils.py``). The last ``--spec`` counts.

    Raises:
        SpecImportError: the words name no module and attribute.
    """
    words = list(arguments)
    starts = [index for index, word in enumerate(words) if word == "--spec" or word.startswith("--spec=")]
    if not starts:
        return words, None
    start = starts[-1]
    end = start + 1
    if words[start] == "--spec":
        while end < len(words) and not words[end].startswith("-"):
            end += 1
        values = words[start + 1 : end]
    else:
        values = [words[start].removeprefix("--spec=")]
        if end < len(words) and not words[end].startswith("-"):
            raise SpecImportError(
                f"{words[start]} {words[end]} is two words of which = binds only the first; write --spec {values[0]} "
                f"{words[end]} for module and attribute, or --spec={values[0]} alone"
            )
    module, attribute = spec_words(values)
    return [*words[:start], "--spec", module, attribute, *words[end:]], (module, attribute)


def _check_allowed(spec: tuple[str, str], prefixes: Sequence[str]) -> None:
    module, attribute = spec
    if not any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes):
        raise SpecImportError(
            f"--spec {module}.{attribute} comes from a package that is not allowed; allowed are {', '.join(prefixes)}; "
            f"if you trust it, add --allow-spec-from {module.partition('.')[0]}"
        )


def _check_host(script: Path | None, spec: tuple[str, str], arguments: Sequence[str]) -> None:
    """Refuse a spec of ours for a model (GPTModel or HybridModel) that the run does not build."""
    host = lowering.host_of(spec)
    if host is None:
        return
    other = next(candidate for candidate in lowering.SPECS if candidate != host)
    has_pattern = any(word.partition("=")[0] == "--hybrid-layer-pattern" for word in arguments)
    if script is not None and script.name == lowering.SCRIPTS[other]:
        raise SpecImportError(
            f"--spec {'.'.join(spec)} is for {lowering.SCRIPTS[host]}, and the script is {script.name}; name the other script, "
            f"or --spec {'.'.join(lowering.SPECS[other])}"
        )
    if has_pattern != (host == lowering.HYBRID):
        raise SpecImportError(
            f"--spec {'.'.join(spec)} {'needs' if not has_pattern else 'takes no'} --hybrid-layer-pattern, which makes the "
            f"model a HybridModel; {'add' if not has_pattern else 'leave out'} that, or name --spec "
            f"{'.'.join(lowering.SPECS[other])}"
        )


def _resolve_device(device: str) -> str:
    if device not in DEVICES:
        raise LaunchError(f"--device is {device!r}; expected one of {', '.join(DEVICES)}")
    if device == "cpu":
        return device
    import torch

    # Asks NVML. torch.cuda.is_available() asks the driver, which then reads CUDA_DEVICE_MAX_CONNECTIONS once and for all,
    # before the launch policy has set it.
    available = torch.cuda.device_count() > 0
    if device == "cuda" and not available:
        raise LaunchError("--device cuda was asked for, but torch sees no CUDA device; use --device cpu, or a GPU host")
    return "cuda" if available else "cpu"


def _check_gpus(nproc: int, environment: Mapping[str, str]) -> None:
    """Refuse more processes on this host than it has GPUs; torch would say "invalid device ordinal" in the last ones."""
    import torch

    needed, there = max(nproc, int(environment.get("LOCAL_WORLD_SIZE", "1"))), torch.cuda.device_count()
    if needed > there:
        raise LaunchError(
            f"the launch asks for {needed} GPUs on this host, one a process, and torch sees {there}; take a smaller layout "
            "(tensor, pipeline, expert), more hosts, or open CUDA_VISIBLE_DEVICES"
        )


def _check_cpu_arguments(arguments: Sequence[str]) -> None:
    from megacpp_mcore import cpu

    missing = cpu.missing_arguments(arguments)
    if missing:
        raise LaunchError(
            f"a run on --device cpu also needs: {'; '.join(missing)}; add them, or let "
            "`megacpp-mcore recipe emit … --device cpu` write the whole command"
        )


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
        run_id=f"megacpp-mcore-{os.getpid()}",
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
        with _environment(threads), tempfile.TemporaryDirectory(prefix="megacpp-mcore-") as logs:
            config.logs_specs = DefaultLogsSpecs(log_dir=logs)
            elastic_launch(config, sys.executable)("-m", "megacpp_mcore.launcher", *options, "--", *command)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Be one process of an ``--nproc`` launch: the options of :func:`launch`, ``--``, the command."""
    _end_with_the_parent()
    parser = argparse.ArgumentParser(prog="python -m megacpp_mcore.launcher")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--allow-spec-from", action="append", default=[])
    parser.add_argument("--patch", action="append", default=[])
    Recording.add_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        return launch(
            command,
            device=options.device,
            allowed_spec_prefixes=options.allow_spec_from or ALLOWED_SPEC_PREFIXES,
            patches=options.patch,
            recording=Recording.read(options),
        )
    except MegacppError as error:
        print(f"megacpp-mcore: {type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _end_with_the_parent() -> None:
    """Have Linux end this process when the one that started it is gone; SIGKILL leaves that one no time to do so."""
    if sys.platform == "linux":
        parent = os.getppid()
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os.kill(os.getpid(), signal.SIGKILL)


def _run_here(chosen: Plan, recording: Recording) -> int:
    """Run the script in this process; its exit goes through what records the run, so that a failure is known there."""
    entry = str(chosen.script) if chosen.script else _STOCK_LOOP
    with exit_status() as ended, contextlib.ExitStack() as stack:
        stack.enter_context(process_environment())
        stack.enter_context(_arguments([entry, *chosen.arguments]))
        say(chosen.describe(int(os.environ["WORLD_SIZE"])))
        settings = config.from_environment() if chosen.has_own_spec else None
        launched = _launch_policy(chosen, settings)
        stack.enter_context(policy.said())
        stack.enter_context(_environment(launched.environment()))
        if chosen.has_own_spec and os.environ["RANK"] == "0":
            _verify_data(chosen.arguments)
        if chosen.script is not None:
            stack.enter_context(_first_on_path(chosen.script.parent))
        if chosen.device == "cpu":
            stack.enter_context(cpu_lane())
        stack.enter_context(patches_of_the_run())
        _apply_patches(chosen)
        stack.enter_context(policy.active(settings))
        if launched.compile.mode == "regional":
            from megacpp_mcore import regional  # brings Megatron, which has to come from the script's checkout

            stack.enter_context(regional.before_training(launched.compile, say))
        stack.enter_context(_observed(chosen, recording, settings, launched))
        if chosen.spec is not None:
            import_named(*chosen.spec)
        _run_main(chosen.script)
        leave_process_group()
    return ended.status


def _observed(
    chosen: Plan, recording: Recording, settings: config.PluginConfig | None, launched: policy.LaunchPolicy
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
        say(line)
    return observation.observed(asked, launched)


def _launch_policy(chosen: Plan, settings: config.PluginConfig | None) -> policy.LaunchPolicy:
    """The policy of the run, printed on rank 0."""
    world_size = int(os.environ["WORLD_SIZE"])
    model = settings.model if settings is not None else None
    run = policy.Run.from_arguments(chosen.arguments, device=chosen.device, world_size=world_size, model=model)
    if chosen.device == "cuda":
        run = dataclasses.replace(run, tf32_products=policy.tf32_products())
    launched = policy.resolve(run, settings=settings, environment=os.environ)
    for line in launched.lines(settings):
        say(line)
    return launched


@contextlib.contextmanager
def patches_of_the_run() -> Iterator[None]:
    """Revert, in the end, the patches that were applied meanwhile, but for those of a checkout's hook, which acts once."""
    known = registry.default()
    before = {record["name"] for record in known.status() if record["state"] != "not applied"}
    try:
        yield
    finally:
        known.revert(
            record["name"]
            for record in known.status()
            if record["state"] == "applied" and record["name"] not in before and record["hook"] is None
        )


def _apply_patches(chosen: Plan) -> None:
    """Apply what every launch needs, what a spec needs, and what was asked for; all or none."""
    names = ["dataset-helpers", *(["spec-import"] if chosen.spec else [])]
    names += ["hybrid-flops"] if chosen.has_own_spec else []
    say(f"patches: {', '.join(registry.default().apply([*names, *chosen.patches]).applied) or 'applied already'}")


def _verify_data(arguments: Sequence[str]) -> None:
    from megacpp_mcore.data.arguments import verify_arguments  # brings numpy, which --help does without

    say(verify_arguments(arguments))


def _run_main(script: Path | None) -> None:
    """Run ``script`` or the stock loop as ``__main__``; an exit without success goes on to the caller.

    Raises:
        SystemExit: the script exits with a status other than 0, or with a message.
    """
    try:
        if script is None:
            runpy.run_module(_STOCK_LOOP, run_name="__main__")
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


@dataclass
class Ended:
    """How a script ended: its exit status."""

    status: int = 0


@contextlib.contextmanager
def exit_status() -> Iterator[Ended]:
    """Turn a script's exit into a status; a message is printed, as the interpreter does."""
    ended = Ended()
    try:
        yield ended
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            ended.status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            ended.status = 1


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    """Put a script's folder first on ``sys.path``, as Python does, after checking that this can still take effect."""
    if (folder / "megatron").is_dir():
        for name in ("megatron.core", "megatron.training"):
            origin = getattr(sys.modules.get(name), "__file__", None)
            if origin is not None and folder not in Path(origin).resolve().parents:
                raise LaunchError(
                    f"{name} was already imported from {origin}, so that the script would not run on its own checkout "
                    f"{folder}; launch from a fresh process that has not imported megatron"
                )
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def cpu_lane() -> Iterator[None]:
    """The CPU lane for the duration, with a line for everything that it replaces."""
    from megacpp_mcore import cpu

    lane = cpu.install()
    try:
        for message in lane.messages:
            say(message)
        yield
    finally:
        lane.remove()


def leave_process_group() -> None:
    """End torch.distributed in order, which the stock scripts leave to the interpreter's exit."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def process_environment() -> contextlib.AbstractContextManager[None]:
    """For the duration, what torchrun sets, for this process alone where torchrun did not."""
    return _environment(_single_process_defaults())


def _single_process_defaults() -> dict[str, str]:
    """Return what torchrun would have set for one process, where it is unset.

    Nobody else has to know the port of its store, so that the kernel may choose it when it is bound: one that was free before
    may be taken by then.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    defaults |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    return {name: value for name, value in defaults.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that were unset, for the duration."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _arguments(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def say(message: str) -> None:
    """Print a line on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(f"megacpp-mcore: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
