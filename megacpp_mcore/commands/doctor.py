"""The command ``megacpp-mcore doctor``: checks which optional components are installed, work, and are genuine.

Every installed package is actually imported, in a process of its own with a time limit, so that one that crashes, hangs or
exits becomes a line in the report instead of ending it. If everything that training needs works, one step is trained.
Does not import torch itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import megacpp_mcore
from megacpp_mcore import settings, versions
from megacpp_mcore.backends import markdown, own_candidates, vendor_switches
from megacpp_mcore.backends.candidates import grouped_fp8_candidates, linear_cross_entropy_candidates
from megacpp_mcore.backends.probes import TRANSFORMER_ENGINE, te_disabled
from megacpp_mcore.commands import trial
from megacpp_mcore.errors import BackendError, CheckoutError, ConfigFileError, PatchError
from megacpp_mcore.launch.plan import CHECKOUT_VARIABLE
from megacpp_mcore.policy.values import TF32_DRIVER, TF32_TORCH
from megacpp_mcore.te import specs
from megacpp_mcore.util import host, te_imports

WORKS, OFF, ABSENT, BROKEN, IMPOSTOR = "works", "off", "absent", "broken", "impostor"
TIME_LIMIT_S = 180.0
"""For each package."""
STEP_LIMIT_S = {"cpu": 600.0, "cuda": 3600.0}
"""For the training step: with cold caches, Triton compiles a model's kernels one after another on one core."""
REPORT_EVERY_S = 30.0
STEP = "training step"
"""Name of the finding about the training step."""

_CUTE = "it needs apache-tvm-ffi >= 0.1.11, which the tilelang of the extra ssm excludes: use separate environments"
_TOKENIZER = "Megatron's HuggingFaceTokenizer needs it: `pip install megacpp-mcore[tokenizers]` (other tokenizers do without)"


@dataclass(frozen=True, kw_only=True)
class Component:
    """One component to examine.

    Attributes:
        module: the module whose presence means that it is installed.
        probe: Python statements that use it; they leave its version, where it states one, in ``version``. By default the
            module is imported together with torch.
        distributions: names it may be installed under, for the version of one that does not import; by default its own.
        versions: the supported range, where there is one.
        blocks: whether training fails when it is installed and does not work, although it is optional.
        advice: what to do in that case.
        if_absent: what is unavailable without it and how to get it; empty if not worth a line.
        genuine: a folder that the genuine package has, unlike another package of that name.
        impostor: what that other package is, and what to do.
        vendor: its name under ``vendors`` in the file of ``MEGACPP_CONFIG``, which may switch it off.
    """

    name: str
    module: str
    probe: str = ""
    distributions: tuple[str, ...] = ()
    required: bool = False
    versions: str = ""
    blocks: bool = False
    advice: str = ""
    if_absent: str = ""
    genuine: str = ""
    impostor: str = ""
    vendor: str = ""

    @property
    def is_needed(self) -> bool:
        """Whether training fails if it does not work."""
        return self.required or self.blocks


@dataclass(frozen=True)
class Finding:
    """The result for one component; ``blocks``: training would fail because of it.

    ``state`` is ``works``, ``off`` (it works but is switched off), ``absent``, ``broken`` or ``impostor``.
    """

    name: str
    state: str
    version: str | None = None
    reason: str = ""
    blocks: bool = False
    details: dict[str, Any] = field(default_factory=dict)


_PLAIN = "import torch\nimport {module}\nversion = getattr({module}, '__version__', None)"
_TORCH = """
import torch
version = torch.__version__
torch.zeros(2).add_(1).sum().item()
details["cuda"] = torch.version.cuda
details["gpus"] = [
    {"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
    for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
]
details["fp32_products"] = torch.backends.cuda.matmul.fp32_precision
"""
_MEGATRON = """
import megatron.core.package_info as package_info
version = package_info.__version__
details["file"] = package_info.__file__
import megatron.core.models.gpt.gpt_model, megatron.core.optimizer, megatron.training.arguments
"""
_TRITON = """
import triton
from megacpp_mcore.backends import probes
version = triton.__version__
details["note"] = (answer := probes.known_triton()).reason
if not answer.ok:
    raise SystemExit(answer.reason)
"""
_ENGINE = """
import torch
from megacpp_mcore.util import host
folder = host.loaded_from("libcudnn")
import transformer_engine.pytorch as te
te.Linear
import transformer_engine
version = transformer_engine.__version__
from transformer_engine.pytorch import utils
numbers = divmod(torch.backends.cudnn.version() or 0, 10000)
own, other = (numbers[0], *divmod(numbers[1], 100)), tuple(utils.get_cudnn_version())
if torch.version.cuda and own != other:
    details["note"] = (f"it loaded cuDNN {other}, torch uses {own}: its attention may run unfused; a launch sets "
                       f"CUDNN_HOME={folder or 'its folder'}; set it if you start a script yourself")
"""

# Importing does not prove that vendors' kernels work: on a GPU one call is run, and compared with plain PyTorch.
_DEEP_GEMM = """
import torch, deep_gemm
from megacpp_mcore.ops.grouped_fp8 import deep_gemm as adapter
version = getattr(deep_gemm, "__version__", None)
details["deep_gemm"] = adapter.record()
answer = adapter.probe()
if torch.cuda.is_available() and not answer.ok:
    raise SystemExit(answer.reason + "; no backend that auto takes needs it")
"""
_FLASH4 = """
import torch
from megacpp_mcore.ops.mla import flash4
from megacpp_mcore.util import te_imports
answer = flash4.probe()
if torch.cuda.is_available() and not answer.ok:
    raise SystemExit(answer.reason)
if torch.cuda.is_available() and te_imports.available().ok and not (engine := flash4.probe_engine()).ok:
    raise SystemExit(f"{engine.reason}, which picks this package up automatically: set NVTE_FLASH_ATTN_V4=0")
"""
_REDUCED = """
import torch
from megacpp_mcore.ops.linear_cross_entropy import reduced
answer = reduced.probe({name!r})
if torch.cuda.is_available() and not answer.ok:
    raise SystemExit(answer.reason)
"""

# Imported as the recipes do: that reports which of Bridge's many conditions is not met.
_BRIDGE = """
from megacpp_mcore.nemo_recipes import bridge
bridge.prepare()
import megatron.bridge.training.pretrain
"""

COMPONENTS: tuple[Component, ...] = (
    Component(name="torch", module="torch", probe=_TORCH, required=True, versions=versions.TORCH),
    Component(name="megatron-core", module="megatron.core", probe=_MEGATRON, required=True, versions=versions.MEGATRON_CORE),
    Component(name="triton", module="triton", probe=_TRITON),
    Component(name="transformer-engine", module=TRANSFORMER_ENGINE, probe=_ENGINE, blocks=True,
              distributions=("transformer-engine", "transformer-engine-cu13", "transformer-engine-cu12"),
              advice="a transformer-engine that does not import breaks megatron-core's own import; "
                     "install transformer-engine[pytorch], or uninstall every transformer-engine package"),
    Component(name="mamba-ssm", module="mamba_ssm", probe=_PLAIN.format(module="mamba_ssm.modules.mamba3")),
    Component(name="tilelang", module="tilelang"),
    Component(name="deep_gemm", module="deep_gemm", probe=_DEEP_GEMM, distributions=("sgl-deep-gemm", "deep-gemm"),
              genuine="include", impostor="no DeepGEMM: it has no CUDA sources to compile; run `pip uninstall deep-gemm` and "
                                          "install no other: no build of sgl-deep-gemm works with torch 2.11"),
    Component(name="flash-attn-4", module="flash_attn.cute", probe=_FLASH4, advice=_CUTE, vendor="flash4"),
    Component(name="quack-kernels", module="quack.linear_cross_entropy", probe=_REDUCED.format(name="quack"),
              vendor="quack"),
    Component(name="liger-kernel", module="liger_kernel.transformers", probe=_REDUCED.format(name="liger"),
              vendor="liger"),
    Component(name="transformers", module="transformers", advice=_TOKENIZER, if_absent=_TOKENIZER,
              probe="from transformers import AutoTokenizer\nimport transformers\nversion = transformers.__version__"),
    Component(name="apex: amp_C", module="amp_C", distributions=("apex",)),
    Component(name="apex: optimizers", module="apex", probe=_PLAIN.format(module="apex.optimizers"), distributions=("apex",),
              genuine="multi_tensor_apply",
              impostor="not NVIDIA's Apex: Megatron picks up any importable 'apex' and then fails on RMSNorm; "
                       "run `pip uninstall apex` (NVIDIA's is built from its source repository)"),
    Component(name="apex: fused_weight_gradient_mlp_cuda", module="fused_weight_gradient_mlp_cuda", distributions=("apex",)),
    Component(name="nvidia-resiliency-ext", module="nvidia_resiliency_ext", versions="!=0.4.1", blocks=True,
              advice="nvidia-resiliency-ext 0.4.1 breaks megatron-core's import; uninstall it, or use 0.5 or later"),
    Component(name="megatron-bridge", module="megatron.bridge", probe=_BRIDGE),
    Component(name="nemo-run", module="nemo_run"),
)  # fmt: skip

# The child searches the same paths as this process. Its answer goes to a file of its own: a package may print at any time.
_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
answer_file = sys.argv[2]
version, details = None, {{}}
{probe}
with open(answer_file, "w", encoding="utf-8") as file:
    json.dump({{"version": None if version is None else str(version), "details": details}}, file)
"""


def examine(components: Sequence[Component] = COMPONENTS, time_limit_s: float = TIME_LIMIT_S) -> list[Finding]:
    """Look for every component and try those that are installed."""
    version = platform.python_version()
    supported = SpecifierSet(versions.PYTHON).contains(version, prereleases=True)
    reason = "" if supported else f"Python {versions.PYTHON} is needed"
    python = Finding("python", WORKS if supported else BROKEN, version, reason, blocks=not supported)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return [python, *pool.map(lambda component: _examine(component, time_limit_s), components)]


def _examine(component: Component, time_limit_s: float) -> Finding:
    """Examine a component; a variable or the settings file may switch some off. An invalid variable is refused."""
    finding = _find_and_try(component, time_limit_s)
    print(f"examined {component.name}", file=sys.stderr, flush=True)  # progress: each takes seconds
    if component.vendor and not (switch := vendor_switches.allowed(component.vendor)).ok and finding.state in (WORKS, ABSENT):
        return replace(finding, state=OFF if finding.state == WORKS else ABSENT, reason=switch.reason)
    try:
        reason = te_disabled() if component.module == TRANSFORMER_ENGINE else ""
    except BackendError as error:
        return replace(finding, reason="; ".join(filter(None, (str(error), finding.reason))), blocks=True)
    if not reason or finding.state != WORKS:  # a broken one stays broken: Megatron imports it anyway
        return finding
    return replace(finding, state=OFF, reason=f"{reason}: layers are built from Megatron's local classes")


def _find_and_try(component: Component, time_limit_s: float) -> Finding:
    finding = partial(Finding, component.name)
    installed = next(filter(None, map(host.version, component.distributions or (component.name,))), None)
    try:
        folders = _find(component.module)
    except (Exception, SystemExit) as error:  # from the parent package, which has to be imported for this
        reason = f"{component.module} cannot be located ({type(error).__name__}: {error})"
        return finding(BROKEN, installed, reason, component.is_needed)
    if folders is None:
        reason = f"install {component.name}{component.versions}" if component.required else component.if_absent
        return finding(ABSENT, None, reason, component.required)
    if component.genuine and not any((folder / component.genuine).is_dir() for folder in folders):
        return finding(IMPOSTOR, installed, f"{folders[0]} is {component.impostor}", component.module == "apex")
    version, details, problem = _try(component.probe or _PLAIN.format(module=component.module), time_limit_s)
    version = version or installed
    if not problem and component.versions and not _in_range(version, component.versions):
        # Another Megatron version is fine if the patches match its sources.
        problem = f"{component.name}{component.versions} is needed"
        problem = _megatron()[1] if component.module == "megatron.core" else problem
    if not problem:
        return finding(WORKS, version, details.pop("note", ""), details=details)
    reason = f"{problem}; {component.advice}" if component.advice else problem
    return finding(BROKEN, version, reason, component.is_needed, details)


def _find(module: str) -> list[Path] | None:
    """Return the folders (or the file) of ``module``, without importing it; None when it is not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    return None if spec is None else [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]


def _in_range(version: str | None, supported: str) -> bool:
    try:
        return version is not None and SpecifierSet(supported).contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


def _try(probe: str, time_limit_s: float) -> tuple[str | None, dict[str, Any], str]:
    """Run ``probe`` in a child; returns its version, its details, and an error (empty when there was none)."""
    with tempfile.TemporaryDirectory(prefix="megacpp-mcore-doctor-") as folder:
        answer = Path(folder, "answer")
        command = [sys.executable, "-W", "ignore", "-c", _CHILD.format(probe=probe), json.dumps(sys.path), str(answer)]
        problem, lines = trial.run_quietly(command, os.curdir, time_limit_s)
        if problem:
            return None, {}, lines[-1] if lines and problem.startswith("ended") else f"it {problem}"
        try:
            answers = json.loads(answer.read_bytes())
            return answers["version"], answers["details"], ""
        except (OSError, ValueError, LookupError, TypeError):  # no answer was written, or only part of one
            return None, {}, "it exited with status 0 during the check"


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether no finding blocks training."""
    return not any(finding.blocks for finding in findings)


def as_json(findings: Sequence[Finding]) -> str:
    """Format the findings as JSON."""
    head = {"megacpp_mcore": megacpp_mcore.__version__, "platform": platform.platform(), "ok": is_healthy(findings)}
    return json.dumps(head | {"components": [asdict(finding) for finding in findings]}, indent=2)


def as_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as lines of text: one each, then the GPUs, then what blocks training."""
    yield f"megacpp-mcore {megacpp_mcore.__version__} on {platform.platform()}"
    yield ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.name:{width}}  {finding.state:8}  {finding.version or '-':24}  {finding.reason}".rstrip()
    yield ""
    gpus = [gpu for finding in findings for gpu in finding.details.get("gpus", ())]
    for index, gpu in enumerate(gpus):
        yield f"GPU {index}: {gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}"
    if not gpus:
        yield "no GPU: runs use the CPU lane (launch --device cpu)"
    tf32 = [f"{name}={os.environ[name]}" for name in (TF32_DRIVER, TF32_TORCH) if os.environ.get(name, "0") != "0"]
    if any(finding.details.get("fp32_products") == "tf32" for finding in findings):
        tf32.append("torch computes them in TF32")
    yield from (f"fp32 products on GPUs: {words}" for words in tf32)  # the launch policy judges them for a run
    if blocking := [finding.name for finding in findings if finding.blocks]:
        yield f"training would fail on: {', '.join(blocking)}"
    elif any((finding.name, finding.state) == (STEP, OFF) for finding in findings):
        yield "nothing was found that stands in the way of training; no step was trained"
    else:
        yield "nothing stands in the way of training"


def add_parser(subparsers: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = subparsers.add_parser("doctor", help="list versions, GPUs, what works and what does not")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    backends = "list the backends of every op: what each covers, and whether it runs here"
    parser.add_argument("--backends", action="store_true", help=backends)
    untried = "skip the training step of nam56r_tiny (seconds on a CPU; on a GPU its kernels are compiled first)"
    parser.add_argument("--no-step", action="store_false", dest="step", help=untried)
    limits = f"{TIME_LIMIT_S:g}, and {STEP_LIMIT_S['cpu']:g} on a CPU or {STEP_LIMIT_S['cuda']:g} on a GPU"
    slow = f"seconds one package may take to import, and the step to be trained (default: {limits})"
    parser.add_argument("--time-limit", type=float, metavar="S", help=slow)


def _megatron(folder: str | None = None) -> tuple[str | None, str]:
    """Return the version of a checkout (default: the installed Megatron) and why patches do not fit it, or an empty reason."""
    from megacpp_mcore.patches.machinery.checkout import Checkout

    try:
        checkout = Checkout(folder) if folder else Checkout.installed()
    except (CheckoutError, PatchError) as error:
        return None, str(error)
    names = [patch.name for patch in checkout.registry.patches if patch.unfit(checkout.tree)]
    command = f"`megacpp-mcore compat --checkout {checkout.root}`"
    reason = f"{', '.join(names)}: written for other sources; {command} shows what differs" if names else ""
    return checkout.version, reason


def _checkout() -> Finding | None:
    """Examine the checkout that ``MEGATRON_LM`` names, whose scripts ``launch`` runs."""
    if not (folder := os.environ.get(CHECKOUT_VARIABLE)):
        return None
    version, problem = _megatron(folder)
    if problem:
        return Finding(CHECKOUT_VARIABLE, BROKEN, version, problem, blocks=True)
    from megacpp_mcore.patches.machinery import drift
    from megacpp_mcore.patches.machinery.checkout import Checkout

    report = drift.examine(Checkout(folder))
    return Finding(CHECKOUT_VARIABLE, WORKS, version, f"{report['head'] or 'no commits'}; `compat`: {report['verdict']}")


def _step(findings: Sequence[Finding], time_limit_s: float | None) -> Finding:
    """Train a step on the device that ``launch`` takes here, with the checkout's script if ``MEGATRON_LM`` is set."""
    states = {finding.name: finding for finding in findings}
    device = "cuda" if states["torch"].details.get("gpus") else "cpu"
    engine = device == "cuda" and states["transformer-engine"].state == WORKS
    script = ["pretrain_hybrid.py"] if os.environ.get(CHECKOUT_VARIABLE) else []
    switches = {
        "transformer_engine": asdict(te_imports.features()),
        "vendors": {name: vendor_switches.allowed(name).ok for name in vendor_switches.NAMES},
    }
    limit = STEP_LIMIT_S[device] if time_limit_s is None else time_limit_s
    first = "; its kernels are compiled first, if they are not cached" if device == "cuda" else ""
    print(f"training a step of nam56r_tiny (at most {limit:g} s){first}", file=sys.stderr, flush=True)
    how: dict[str, Any] = {"device": device, "engine": engine, "script": script, "switches": switches}
    steps, problems = trial.train(1, timeout_s=limit, report_every_s=REPORT_EVERY_S, **how)
    loss = steps[0].get("lm loss", math.nan) if steps else math.nan
    if not problems and not math.isfinite(loss):
        problems = [f"lm loss is {loss} of {len(steps)} recorded steps"]
    words = f"nam56r_tiny on {device}, {'Transformer Engine' if engine else 'local'} layers"
    reason = f"{words}: {' '.join(problems) or f'lm loss {loss:g}'}"
    details = {"device": device, "figures": steps[0] if steps else {}}
    return Finding(STEP, BROKEN if problems else WORKS, None, reason, bool(problems), details)


def _configure() -> None:
    """Apply the switches in the file of ``MEGACPP_CONFIG``, if set."""
    file = None if settings.index_schedule_from_environment() is not None else settings.from_environment()
    if file is not None:
        te_imports.configure(file.transformer_engine, str(file.path))
        vendor_switches.configure(file.vendors, str(file.path))


def run(args: argparse.Namespace) -> int:
    """Print the findings, or the backends; returns 1 when a finding would make training fail."""
    unreadable = None
    try:
        _configure()
    except ConfigFileError as error:
        if args.backends:
            raise
        unreadable = Finding(settings.VARIABLE, BROKEN, reason=str(error), blocks=True)
    if args.backends:
        listed = [*own_candidates(), *grouped_fp8_candidates(), *linear_cross_entropy_candidates()]
        installed = host.version("transformer-engine") or "(not installed)"
        engine = f"features of Transformer Engine {installed}:\n{specs.text()}"
        print(json.dumps(markdown.rows(listed), indent=2) if args.json else f"{markdown.text(listed)}\n\n{engine}")
        return 0
    findings = [*examine(time_limit_s=args.time_limit or TIME_LIMIT_S), *filter(None, (_checkout(), unreadable))]
    if blocking := [finding.name for finding in findings if finding.blocks]:
        findings.append(Finding(STEP, OFF, reason=f"not trained, because of {', '.join(blocking)}"))
    else:
        without = Finding(STEP, OFF, reason="not trained, as --no-step says")
        findings.append(_step(findings, args.time_limit) if args.step else without)
    print(as_json(findings) if args.json else "\n".join(as_text(findings)))
    return 0 if is_healthy(findings) else 1
