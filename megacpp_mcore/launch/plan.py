"""Reads a launch: the command as the user wrote it, checked before Megatron is imported; starts and changes nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering
from megacpp_mcore.errors import CheckoutError, LaunchError, SpecImportError
from megacpp_mcore.launch import refusals
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.patches import OF_NAM56R
from megacpp_mcore.patches.machinery import registry
from megacpp_mcore.patches.machinery.checkout import HOOKED_FILE, Checkout
from megacpp_mcore.patches.spec_import import spec_words
from megacpp_mcore.policy import ranks
from megacpp_mcore.util import flags
from megacpp_mcore.versions import CHECKOUT_TAG

DEVICES = ("auto", "cpu", "cuda")
ALLOWED_SPEC_PREFIXES = ("megacpp_mcore", "megatron")
"""Packages a ``--spec`` may come from: importing a module runs it, so the list is extended only on purpose."""

CHECKOUT_VARIABLE = "MEGATRON_LM"
CHECKOUT_ADVICE = (
    f"get a checkout with `git clone --branch {CHECKOUT_TAG} https://github.com/NVIDIA/Megatron-LM`, set "
    f"{CHECKOUT_VARIABLE}= to its folder, or leave the script out to use the stock loop of the installed wheel"
)

STOCK_LOOP = "megacpp_mcore.launch.pretrain"


@dataclass(frozen=True)
class Plan:
    """One launch, read and checked: what runs, with which arguments and settings, on which device."""

    script: Path | None
    arguments: tuple[str, ...]
    spec: tuple[str, str] | None
    device: str
    nproc: int
    patches: tuple[str, ...] = ()
    settings: plugin_config.PluginConfig | None = None

    @property
    def has_own_spec(self) -> bool:
        """Whether the spec is one of this package."""
        return self.spec is not None and self.spec[0].partition(".")[0] == "megacpp_mcore"

    @property
    def applied(self) -> tuple[str, ...]:
        """The patches that the launch applies whatever the layout: what its words need, and those that it names."""
        needed = {"dataset-helpers": True, "spec-import": self.spec is not None, "hybrid-flops": self.has_own_spec}
        needed |= {"exit-signal": "--exit-signal-handler" in self.arguments, "sample-indices": self.has_own_spec}
        return (*(name for name, is_needed in needed.items() if is_needed), *self.patches)

    def describe(self, world_size: int) -> str:
        """Return the line that says what is about to run."""
        runs = f"{STOCK_LOOP} (the wheel's stock loop)" if self.script is None else str(self.script)
        spec = "none (stock GPT)" if self.spec is None else ".".join(self.spec)
        return f"script {runs} | spec {spec} | device {self.device} | world size {world_size}"


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
        LaunchError, SpecImportError: it cannot be started as requested.
    """
    registry.default().select(patches)  # refuses unknown names
    words = list(command)
    script = None
    if words and words[0].endswith(".py"):
        script = find_script(words.pop(0), environment)
    elif words and not words[0].startswith("-"):
        raise LaunchError(
            f"the launch command starts with {words[0]!r}, which is neither a script (*.py) nor an argument (--…); "
            "name pretrain_gpt.py or pretrain_hybrid.py first, or pass only Megatron's arguments"
        )
    _check_ranks(environment, nproc)
    check_words(script, words)
    arguments, spec = split_spec(words)
    if spec is not None:
        _check_spec(script, spec, arguments, allowed_spec_prefixes)
    _check_supported(script, arguments, spec)
    resolved = _resolve_device(device, nproc, environment)
    chosen = Plan(script, tuple(arguments), spec, resolved, nproc, tuple(patches))
    if chosen.has_own_spec:
        chosen = dataclasses.replace(chosen, settings=plugin_config.from_environment())
    if chosen.device == "cpu":
        from megacpp_mcore import cpu

        if missing := cpu.missing_arguments(arguments):
            raise LaunchError(
                f"a run on --device cpu also needs: {'; '.join(missing)}; add them, or let "
                "`megacpp-mcore recipe emit … --device cpu` write the whole command"
            )
    _check_complete(script, arguments)
    return chosen


def check_sources(chosen: Plan) -> None:
    """Compare the Megatron to be imported with the sources that the run's patches were written for.

    Raises:
        LaunchError: a patch does not fit.
        CheckoutError, PatchError: there is no Megatron, or it cannot be read.
    """
    folder = chosen.script and chosen.script.parent
    megatron = Checkout(folder) if folder and (folder / HOOKED_FILE).is_file() else Checkout.installed()
    names = [*chosen.applied, *(OF_NAM56R if chosen.has_own_spec else ())]
    if problems := megatron.unfit(names):
        requested = ", ".join(chosen.patches)
        raise LaunchError(
            f"megatron-core {megatron.version} in {megatron.root} is not one that this run's patches were written for: "
            f"{'; '.join(problems)}. `megacpp-mcore compat --checkout {megatron.root}` compares all of it; take a tested one "
            f"({CHECKOUT_TAG}){f', or leave out --patch {requested}' if requested else ''}",
            code="sources",
        )


def check_words(script: Path | None, words: Sequence[str], *, here: bool = True) -> None:
    """Reject invalid Megatron arguments, as far as the command line shows; ``here``: they are for this machine.

    Raises:
        LaunchError: they hide a spec, are the launch's own, or would end in an error or a hang later.
    """
    _check_arguments(words)
    refusals.check_words(words, here=here)
    _check_packed(script, words)


_TASKS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "1"),  # of the step: a batch script is one task of a job of many
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "1"),
    "PMI_SIZE": ("mpiexec", "1"),
    "MV2_COMM_WORLD_SIZE": ("mpirun_rsh", "1"),
    "JSM_NAMESPACE_SIZE": ("jsrun", "1"),
    "SLURM_PROCID": ("srun", "0"),
    "OMPI_COMM_WORLD_RANK": ("mpirun", "0"),
    "PMI_RANK": ("mpiexec", "0"),
    "PMIX_RANK": ("mpirun", "0"),
    "PALS_RANKID": ("mpiexec", "0"),
}
"""Variable with the number of tasks, or of this one, per launcher that sets none of torchrun's; its value in a single task."""
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, and torch and Megatron read, in a multi-process run."""
OF_RANKS = frozenset({*_TASKS, *_NEEDED})
"""Variables that a single-process run is started without."""


def _check_ranks(environment: Mapping[str, str], nproc: int) -> None:
    """Reject nested launches, and environments with an incomplete rank: it would train alone, or others would wait for it."""
    if nproc < 1:
        raise LaunchError(f"--nproc is {nproc}; expected the number of processes to start, 1 or more")
    for name, (launcher, alone) in _TASKS.items():
        if "WORLD_SIZE" not in environment and environment.get(name, alone) != alone:
            raise LaunchError(
                f"{launcher} started this as one of several tasks ({name}={environment[name]}), and each would "
                f"train by itself: start torchrun in one task per host, or set {', '.join(_NEEDED)} in every task; for tasks "
                "that should train independently, set WORLD_SIZE=1 RANK=0 LOCAL_RANK=0"
            )
    sizes = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
    given = {name: environment[name] for pair in sizes.items() for name in pair if name in environment}
    wrong = [f"{name}={text!r}" for name, text in given.items() if not text.isdecimal()]
    wrong = wrong or [
        f"{rank}={given[rank]} of {size}={given[size]}"
        for rank, size in sizes.items()
        if rank in given and size in given and int(given[rank]) >= int(given[size])
    ]
    if wrong:
        raise LaunchError(
            f"the environment says {', '.join(wrong)}; expected whole numbers, ranks from 0 and below their number: fix or "
            "unset them, or start the processes with torchrun or --nproc",
            code="ranks",
        )
    is_one = given.get("WORLD_SIZE") == "1" or not {"RANK", "WORLD_SIZE"} & given.keys()
    is_alone = is_one and given.get("LOCAL_RANK", "0") == "0"
    if not is_alone and (missing := [name for name in _NEEDED if not environment.get(name)]):
        raise LaunchError(
            f"the environment says that this is one of several processes, but does not hold {', '.join(missing)}; start "
            "them with torchrun or --nproc, set those for all of them, or unset RANK and WORLD_SIZE",
            code="ranks-missing",
        )
    if nproc > 1 and "RANK" in environment:
        raise LaunchError(
            f"--nproc {nproc} was passed to a process started by torchrun (RANK={environment['RANK']}); "
            "leave --nproc out under torchrun, or start megacpp-mcore without torchrun"
        )
    if nproc > 1:  # which get an address of their own
        return
    address, port = (environment.get(name) for name in _NEEDED[-2:])
    if port is not None and not (port.isdecimal() and (0 if is_alone else 1) <= int(port) < 1 << 16):
        raise LaunchError(
            f"MASTER_PORT is {port!r}; expected the port of rank 0's host, from 1 to 65535 (a process that trains alone: none)"
        )
    if is_alone and address is not None and not ranks.addresses(address):
        raise LaunchError(
            f"MASTER_ADDR is {address!r}, which cannot be resolved; expected the host of rank 0 (a process that trains "
            "alone: none)"
        )


_OWN_OPTIONS = ["--observe", "--no-observe", "--verbose", "--device", "--nproc", "--allow-spec-from", "--patch"]


def _check_arguments(arguments: Sequence[str]) -> None:
    """Reject arguments that would hide a ``--spec``, and launch options, which Megatron would reject a minute later."""
    for flag, source in (("--use-checkpoint-args", "a checkpoint"), ("--yaml-cfg", "a file")):
        if flag in flags.read(arguments):
            raise LaunchError(
                f"{flag} takes arguments from {source}, --spec among them, which would be imported unchecked; write the "
                "arguments out (`megacpp-mcore recipe emit … --as cli` prints them)"
            )
    for word, after in itertools.pairwise([*arguments, ""]):
        if word.partition("=")[0] in _OWN_OPTIONS or (word == "--profile" and re.fullmatch(r"\d+-\d+", after)):
            raise LaunchError(
                f"{word} is an option of the launch, and Megatron has no such argument; put it before the `--`, as in "
                f"`megacpp-mcore launch {word} … -- …`"
            )


UNSUPPORTED = ("--sft", "--hybrid-context-parallel", "--logits-load-dir", "--inprocess-restart", "--perform-rl-step")
"""Flags of Megatron that ``pretrain_gpt.py`` handles itself and the wheel's loop does not."""

_PACKAGES = {
    "transformers": ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer", "GPT2BPETokenizer"),
    "sentencepiece": ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
    "tiktoken": ("TikTokenizer",),
}
"""What Megatron's tokenizers import, by ``--tokenizer-type``."""
_WRITERS = {"--tensorboard-dir": "tensorboard", "--wandb-project": "wandb"}
"""What Megatron's last rank imports for a flag; without the first it writes nothing, and says so in its log."""


def _check_supported(script: Path | None, arguments: Sequence[str], spec: Sequence[str] | None) -> None:
    """Reject what the loop does not support, what the layers would ignore, and what needs a package that is not installed."""
    given = flags.read(arguments)
    if lowering.preset_of(spec) is not None:  # first, as another script would not help
        lowering.check_unused(arguments)
    engine = flags.first(given, "--transformer-impl") != "local"
    fused = {"--bf16", "--fp16"} & given.keys() and "--no-masked-softmax-fusion" not in given
    of_stock = spec is None or spec[0].startswith("megatron.")
    if of_stock and (engine or fused) and "--reset-attention-mask" in given:
        raise LaunchError(
            "--reset-attention-mask makes a mask that neither Transformer Engine's causal attention (NVIDIA/Megatron-LM#2357) "
            "nor Megatron's fused softmax reads: tokens would attend to other documents; pass "
            "--dataloader-inter-document-masking instead, or --transformer-impl local --no-masked-softmax-fusion",
            code="mask-unread",
        )
    state = {"--no-save-optim": "--save" in given, "--no-load-optim": "--load" in given and "--finetune" not in given}
    missing = [flag for flag, is_needed in state.items() if is_needed and flag not in given]
    if missing and flags.first(given, "--optimizer") == "sgd" and flags.first(given, "--ckpt-format") in (None, "torch_dist"):
        raise LaunchError(
            "Megatron cannot load the state of --optimizer sgd from its torch_dist checkpoints, and a run with it could not be "
            f"resumed; add {' '.join(missing)}, or choose another optimizer",
            code="optimizer-state",
        )
    if unsupported := [flag for flag in UNSUPPORTED if flag in given and script is None]:
        raise LaunchError(
            f"the wheel's loop does not do {', '.join(unsupported)}; leave that out, or name the "
            f"{lowering.SCRIPTS[HYBRID if '--hybrid-layer-pattern' in given else GPT]} of a Megatron-LM checkout as the first "
            "word of the launch command",
            code="unsupported",
        )
    is_hybrid = script is not None and script.name != lowering.SCRIPTS[GPT] and "--hybrid-layer-pattern" in given
    if script is not None and "--fim-data" in given and (is_hybrid or script.name == lowering.SCRIPTS[HYBRID]):
        raise LaunchError(
            f"{script.name} has no dataset for --fim-data and would silently train without it; remove it, or omit the script: "
            "the wheel's loop supports it"
        )
    kind = flags.first(given, "--tokenizer-type")
    needed = {f"--tokenizer-type {kind}": package for package, kinds in _PACKAGES.items() if kind in kinds}
    needed |= {flag: package for flag, package in _WRITERS.items() if flag in given}
    for what, package in needed.items():
        if importlib.util.find_spec(package) is None:
            raise LaunchError(f"{what} needs the package {package}, which is not installed here: pip install {package}")
    refusals.check_installed(flags.first(given, "--optimizer") or "adam")


_DATASETS = ("--data-path", "--data-args-path", "--train-data-path", "--valid-data-path", "--per-split-data-args-path")
_TO_TRAIN = {
    "--data-path PREFIX, or --mock-data": ("--mock-data", "--test-data-path", *_DATASETS),
    "--train-iters N": ("--train-iters", "--train-samples", "--skip-train"),
    "--lr RATE": ("--lr", "--skip-train"),
    "--eval-interval N (with --eval-iters 0 for no evaluation)": (
        "--eval-interval",
        "--full-validation",
        "--skip-train",
    ),
}
"""What to add if all of these flags are missing: Megatron would fail on a None once the model is built."""


def _check_complete(script: Path | None, arguments: Sequence[str]) -> None:
    """Reject a command without an argument that the wheel's loop, and so Megatron's scripts, need for training."""
    is_stock = script is None or script.name in lowering.SCRIPTS.values()
    if is_stock and not {"-h", "--help"}.intersection(arguments):
        given = {flag: words for flag, words in flags.read(arguments).items() if words or flag not in _DATASETS}
        if lacking := [what for what, named in _TO_TRAIN.items() if not given.keys() & {*named}]:
            raise LaunchError(
                f"Megatron's loop cannot train without {'; '.join(lacking)}: add that, or let "
                "`megacpp-mcore recipe emit` write the whole command"
            )


def _check_packed(script: Path | None, words: Sequence[str]) -> None:
    """Reject packed rows if a stock script's inner stages would wait for data that only the first and the last have.

    Seen on core_v0.19.0, ``pretrain_gpt.py``: ``is_dataset_built_on_rank`` and ``get_batch``.
    """
    if script is None or "--dataloader-inter-document-masking" not in words:
        return
    given = flags.read(words)
    cut = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
    stages = flags.first(given, "--pipeline-model-parallel-size") or "1"
    marked = [
        " ".join(given.get(flag, ())).partition("/")[0].count("|")
        for flag in ("--pipeline-model-parallel-layout", "--hybrid-layer-pattern")
    ]
    if stages not in ("1", "2") or max(marked) > 1 or any(flag in given for flag in cut):
        raise LaunchError(
            f"{script.name} loads data only on the first and last pipeline chunk, but "
            "--dataloader-inter-document-masking needs it on all of them; leave the script out (the wheel's loop gives "
            "it to all), or take two stages without virtual ones",
            code="packed-inner-stages",
        )


def find_script(word: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the full path of the script ``word``; raise CheckoutError, listing where it was searched for."""
    checkout = environment.get(CHECKOUT_VARIABLE)
    if os.path.dirname(word):
        candidates = [Path(word)]
    else:
        if checkout and not os.path.isdir(checkout):
            raise CheckoutError(f"{CHECKOUT_VARIABLE} is {checkout!r}, not a directory; {CHECKOUT_ADVICE}")
        candidates = [Path(folder) / word for folder in (checkout, os.curdir) if folder]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = ", ".join(str(candidate.absolute()) for candidate in candidates)
    state = "" if checkout else f" ({CHECKOUT_VARIABLE} is not set)"
    raise CheckoutError(f"{word} was not found; looked for {looked}{state}; {CHECKOUT_ADVICE}")


def split_spec(arguments: Sequence[str]) -> tuple[list[str], tuple[str, str] | None]:
    """Return ``arguments`` with ``--spec a.b.c`` as ``--spec a.b c``, and the pair, or None when there is no spec.

    Megatron accepts only two words (megatron-core 0.19, ``core/transformer/spec_utils.py``). The last ``--spec`` counts.

    Raises:
        SpecImportError: the words do not name a module and an attribute.
    """
    words = list(arguments)
    starts = [index for index, word in enumerate(words) if word.partition("=")[0] == "--spec"]
    if not starts:
        return words, None
    start = starts[-1]
    end = next((index for index in range(start + 1, len(words)) if words[index].startswith("-")), len(words))
    _, equals, value = words[start].partition("=")
    if equals and end > start + 1:
        raise SpecImportError(
            f"{words[start]} {words[start + 1]} is two words, but = binds only the first; write --spec {value} "
            f"{words[start + 1]} for module and attribute, or only --spec={value}",
            code="spec-words",
        )
    module, attribute = spec_words([value] if equals else words[start + 1 : end])
    return [*words[:start], "--spec", module, attribute, *words[end:]], (module, attribute)


def _check_spec(script: Path | None, spec: tuple[str, str], arguments: Sequence[str], allowed: Sequence[str]) -> None:
    """Reject a spec from a package that is not allowed, and one of ours for a model that the run does not build."""
    module, name = spec[0], ".".join(spec)
    if not any(module == prefix or module.startswith(prefix + ".") for prefix in allowed):
        raise SpecImportError(
            f"--spec {name} comes from a package that is not allowed; allowed are {', '.join(allowed)}; "
            f"if you trust it, add --allow-spec-from {module.partition('.')[0]}",
            code="spec-not-allowed",
        )
    if lowering.preset_of(spec) is None:
        return
    has_pattern = "--hybrid-layer-pattern" in flags.read(arguments)
    if name.endswith("_hybrid") and not has_pattern:
        raise SpecImportError(
            f"--spec {name} names a HybridModel, which needs --hybrid-layer-pattern; add that (`megacpp-mcore recipe emit` "
            f"prints it), or name {name.removesuffix('_hybrid')}"
        )
    host, other = (HYBRID, GPT) if has_pattern else (GPT, HYBRID)
    if script is not None and script.name == lowering.SCRIPTS[other]:
        needs, do = ("takes no", "leave out") if has_pattern else ("needs", "add")
        raise SpecImportError(
            f"--spec {name}: {script.name} {needs} --hybrid-layer-pattern, which makes the model a HybridModel; {do} that "
            f"(`megacpp-mcore recipe emit` prints it), or name {lowering.SCRIPTS[host]}"
        )


def _resolve_device(device: str, nproc: int, environment: Mapping[str, str]) -> str:
    """Return ``cpu``, or ``cuda`` if each process has a GPU: torch would raise "invalid device ordinal" in the last ones."""
    if device not in DEVICES:
        raise LaunchError(f"--device is {device!r}; expected one of {', '.join(DEVICES)}")
    if device == "cpu":
        return device
    import torch

    # Queries NVML. torch.cuda.is_available() would initialise the driver, which reads CUDA_DEVICE_MAX_CONNECTIONS only once,
    # before the launch policy has set it.
    there, needed = torch.cuda.device_count(), max(nproc, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    if device == "cuda" and there == 0:
        raise LaunchError("--device cuda, but torch sees no CUDA device; use --device cpu, or a GPU host")
    if there and needed > there:
        raise LaunchError(
            f"the launch asks for {needed} GPUs on this host, one per process, but torch sees {there}; take a smaller layout "
            "(tensor, pipeline, expert), more hosts, or extend CUDA_VISIBLE_DEVICES"
        )
    return "cuda" if there else "cpu"
