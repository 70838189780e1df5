"""The values of the launch policy: environment variables and plans, each with its source and with what contradicts it.

What a user has set is not replaced here: it is reported, with a warning where it contradicts the run. No torch, and nothing is
changed. Conditions that Megatron checks are those of megatron-core 0.19.2 and ``training/arguments.py`` of core_v0.19.0.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megacpp_mcore.arguments.lowering import check_torch_fsdp
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model.families import FAMILIES
from megacpp_mcore.model.run import FEATURES, Run, usual_log_interval
from megacpp_mcore.model.training import Recompute
from megacpp_mcore.policy.overlap import CONNECTIONS
from megacpp_mcore.settings import ExperimentalTaxes, Observability, SpeedDefaults
from megacpp_mcore.util import host, te_imports

USER, RECIPE, DEFAULT = "user", "recipe", "default"
"""Source of a value: the user's argument, file or environment; the recipe; this package or the software it runs on."""

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"
TORCH_LOGS = "TORCH_LOGS"
TF32_DRIVER, TF32_TORCH = "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
FSDP_CONNECTIONS = "8"
"""The driver's own default number of hardware queues: Megatron refuses one queue under FSDP."""
_EXPANDABLE = "expandable_segments:True"
_TASKS = "SLURM_STEP_NUM_TASKS"


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of the policy: of an environment variable, or of a planned item.

    Attributes:
        value: what it will be; None: left unset.
        source: :data:`USER`, :data:`RECIPE` or :data:`DEFAULT`.
        warning: how the environment contradicts it, else empty.
        variable: whether it is an environment variable.
    """

    name: str
    value: str | None
    source: str
    note: str = ""
    warning: str = ""
    variable: bool = True


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Looks up environment variables, and who set them.

    Attributes:
        recipe: the variables that a recipe requests.
        launched: whether what is decided will be set; otherwise a default stays unset, and the note says what it would be.
    """

    environment: Mapping[str, str]
    recipe: Mapping[str, str]
    launched: bool

    def find(self, name: str, *, default: str | None = None, note: str = "", refused: str = "") -> Value:
        """Return the value of a variable: the user's, else the recipe's, else ``default`` (None: nothing is set), with a
        ``note``.

        ``refused`` is the warning if the user or the recipe has set it.
        """
        if name in self.environment:
            current, requested = self.environment[name], self.recipe.get(name)
            against = [refused]
            if requested is not None and requested != current:
                against = [f"the recipe asks for {requested}, the environment has {current}", refused]
            return Value(name=name, value=current, source=USER, note=note, warning="; ".join(filter(None, against)))
        if name in self.recipe:
            return Value(name=name, value=self.recipe[name], source=RECIPE, note=note, warning=refused)
        if default is not None and not self.launched:
            return Value(name=name, value=None, source=DEFAULT, note=f"the launcher would set {default}; {note}")
        return Value(name=name, value=default, source=DEFAULT, note=note)

    def asked(self, name: str) -> str | None:
        """Return the user's value, or else the recipe's."""
        return self.environment.get(name, self.recipe.get(name))


def connections(run: Run, lookup: Lookup) -> Value:
    """Decide the number of hardware queues: 1 preserves the order of launches, several let communication overlap."""
    requested = lookup.asked(CONNECTIONS)
    if run.device != "cuda":
        return lookup.find(CONNECTIONS, note="has no effect on a CPU; the CPU lane sets what Megatron insists on")
    if run.execution.fsdp:
        refused = "FSDP needs more than one queue, and Megatron stops; unset it" if requested == "1" else ""
        note = "FSDP gathers while it computes"
        return lookup.find(CONNECTIONS, default=FSDP_CONNECTIONS, note=note, refused=refused)
    if run.layout.tensor > 1 or run.layout.context > 1:
        # Megatron asserts it up to Hopper, but with overlapped MoE communication it only warns.
        note = "tensor and context parallelism rely on the order of launches (Hopper and older)"
        if run.execution.overlap_moe_a2a:
            both = f"{note}, overlapped MoE communication on many queues: the latter wins"
            return lookup.find(CONNECTIONS, default="32", note=both)
        refused = "" if requested in (None, "1") else f"Megatron stops unless it is 1 ({note})"
        return lookup.find(CONNECTIONS, default="1", note=note, refused=refused)
    if run.execution.overlap_moe_a2a or run.execution.overlap_shared_expert:
        refused = "MoE communication cannot overlap in one queue; set 32" if requested == "1" else ""
        note = "MoE communication overlaps computation"
        return lookup.find(CONNECTIONS, default="32", note=note, refused=refused)
    return lookup.find(CONNECTIONS, note="nothing in this layout depends on it; the driver's default is 8")


def allocator(run: Run, lookup: Lookup, speed: SpeedDefaults, *, given: bool) -> Value:
    """Decide how the CUDA allocator grows; ``given``: whether the file itself specifies it."""
    name = NEW_ALLOCATOR if NEW_ALLOCATOR in lookup.environment else ALLOCATOR
    if run.device != "cuda":
        return lookup.find(name, note="has no effect on a CPU")
    obstacle = _segments_obstacle(run, lookup, name)
    requested = lookup.asked(name) or ""
    refused = obstacle if _EXPANDABLE in requested else ""
    if given and speed.expandable_segments and requested and _EXPANDABLE not in requested:
        refused = f"speed_defaults asks for {_EXPANDABLE}, the environment has {requested}"
    default = _EXPANDABLE if speed.expandable_segments and not obstacle else None
    note = obstacle or "segments that grow keep fragmentation down"
    return lookup.find(name, default=default, note=note, refused=refused)


def _segments_obstacle(run: Run, lookup: Lookup, name: str) -> str:
    """Return why segments must not grow; empty when they may. Where Megatron itself stops, the text says so."""
    if run.execution.cuda_graph_impl == "none" or lookup.asked("NCCL_GRAPH_REGISTER") == "0":
        return ""
    if run.execution.cuda_graph_impl == "transformer_engine" and name == ALLOCATOR:
        return "Megatron stops with such CUDA graphs and expandable segments unless NCCL_GRAPH_REGISTER=0"
    return (
        "NCCL may register buffers of CUDA graphs in expandable segments, which can end in illegal memory access; Megatron "
        "does not check for it here; set NCCL_GRAPH_REGISTER=0"
    )


def nccl(run: Run, lookup: Lookup) -> Iterator[Value]:
    """Decide NCCL's settings; variables that pin its choices are only listed."""
    if run.device != "cuda":
        return
    several = run.processes > 1
    peers = several and lookup.asked("NCCL_P2P_DISABLE") == "1"
    through_host = "GPUs of one host then exchange through host memory; unset it" if peers else ""
    debug = "without it NCCL does not say why it stopped"
    multicast = "NVLink multicast; NCCL asks the host when it is unset"
    pinned = "it pins what NCCL chooses by size; figures are not comparable with those of runs without it"
    yield lookup.find("NCCL_DEBUG", default="WARN" if several else None, note=debug)
    yield lookup.find("NCCL_P2P_DISABLE", note="recommended unset", refused=through_host)
    yield lookup.find("NCCL_NVLS_ENABLE", note=multicast)
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        if lookup.asked(name) is not None:
            yield lookup.find(name, refused=pinned)


def lone_tasks(lookup: Lookup) -> Iterator[Value]:
    """List Slurm's number of tasks if each of them trains by itself, as under torchrun without ``--nnodes``."""
    world, local, tasks = (lookup.environment.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", _TASKS))
    if world == local and tasks not in ("1", world):
        yield lookup.find(_TASKS, refused="each of these tasks trains by itself; for one run, give torchrun --nnodes")


def interfaces(run: Run, lookup: Lookup) -> Iterator[Value]:
    """Decide over which network hosts reach each other: sets nothing, and lists nothing if all processes are on one host."""
    world, local = (lookup.environment.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not (world.isdecimal() and local.isdecimal() and int(world) > int(local)):
        return
    by_default = "the network interface to other hosts; if unset, the library chooses: gloo the one of this host's name"
    for name in ("GLOO_SOCKET_IFNAME",) if run.device == "cpu" else ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        yield lookup.find(name, note=by_default, refused=_no_interface(lookup.asked(name)))
    if run.device != "cpu" and lookup.asked("NCCL_IB_DISABLE") == "1":
        yield lookup.find("NCCL_IB_DISABLE", refused="hosts then exchange through sockets; unset it")


def _no_interface(requested: str | None) -> str:
    """Return why the ``requested`` interfaces, names or prefixes, reach no other host; empty if one may."""
    if not requested or requested.startswith("^"):
        return ""
    here = [name for _, name in socket.if_nameindex()]
    wanted = requested.removeprefix("=").split(",")
    if not any(name.startswith(prefix.partition(":")[0]) for prefix in wanted for name in here):
        return f"this host has no such interface; it has {', '.join(here)}"
    return "no other host is reached by the loopback interface" if wanted == ["lo"] else ""


def triton_cache(home: str | None) -> str:
    """Return Triton's own default folder of compiled kernels; ``home``: TRITON_HOME, if it is set."""
    return os.path.join(home or os.path.expanduser("~"), ".triton", "cache")


def caches(run: Run, lookup: Lookup, speed: SpeedDefaults) -> Iterator[Value]:
    """Decide the folders of compiled kernels.

    Where ``TRITON_CACHE_DIR`` is not set, PyTorch sets it to a temporary folder of each GPU with the first kernel that Inductor
    makes (torch 2.11, ``_inductor/runtime/triton_heuristics.py``): every rank would compile all later ones again.
    """
    shared = triton_cache(lookup.asked("TRITON_HOME")) if run.device == "cuda" else None
    in_temporary = "functions that Inductor has compiled; by default in the temporary folder"
    rows: tuple[tuple[str, str, str | None, str], ...] = (
        ("TRITON_CACHE_DIR", "triton", shared, "kernels that Triton has compiled, by all ranks of a host"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor", None, in_temporary),
    )
    if speed.cache_root or lookup.asked("DG_JIT_CACHE_DIR") is not None:
        rows += (("DG_JIT_CACHE_DIR", "deep_gemm", None, "kernels that DeepGEMM has compiled; by default ~/.deep_gemm"),)
    for name, folder, default, note in rows:
        wanted = f"{speed.cache_root}/{folder}" if speed.cache_root else None
        requested = lookup.asked(name)
        refused = f"speed_defaults.cache_root asks for {wanted}" if wanted and requested not in (None, wanted) else ""
        yield lookup.find(name, default=wanted or default, note=note, refused=refused)


def cudnn(run: Run, lookup: Lookup) -> Iterator[Value]:
    """Decide which cuDNN Transformer Engine loads, where it is installed: torch's, which has to be imported."""
    if run.device == "cuda" and host.version("transformer-engine") is not None:
        default = te_imports.cudnn_home(lookup.environment).get(te_imports.CUDNN_HOME)
        note = "with another cuDNN than torch's, Transformer Engine's attention is unfused"
        yield lookup.find(te_imports.CUDNN_HOME, default=default, note=note)


def blocking(lookup: Lookup, taxes: ExperimentalTaxes) -> Value:
    """Decide whether the host waits for every kernel, which is an experimental tax."""
    name = "CUDA_LAUNCH_BLOCKING"
    on = lookup.asked(name) == "1"
    refused = ""
    if on and not taxes.blocking_launches:
        refused = "the host waits for every kernel, and experimental_taxes.blocking_launches is off; unset it"
    elif taxes.blocking_launches and lookup.asked(name) not in (None, "1"):
        refused = "experimental_taxes.blocking_launches asks for 1"
    default = "1" if taxes.blocking_launches else None
    return lookup.find(name, default=default, note="1 makes every launch wait", refused=refused)


def compile_switches(lookup: Lookup) -> Iterator[Value]:
    """List the variables that turn torch.compile off."""
    for name in host.DISABLING:
        if lookup.environment.get(name) == "1":
            yield Value(name=name, value="1", source=USER, note="torch.compile does nothing")


def logs(lookup: Lookup, observability: Observability) -> Iterator[Value]:
    """List TORCH_LOGS if it overrides ``observability.recompiles``: torch then takes no other log setting."""
    if not (lookup.launched and observability.recompiles and TORCH_LOGS in lookup.environment):
        return
    if "recompiles" not in (word.strip().removeprefix("+") for word in lookup.environment[TORCH_LOGS].split(",")):
        refused = "observability.recompiles is on, but torch reads only this variable; add recompiles, or unset it"
        yield lookup.find(TORCH_LOGS, note="what torch logs", refused=refused)


def tf32_products() -> bool:
    """Return whether torch computes fp32 products on a GPU in TF32, as set by the environment or a program; imports torch."""
    import torch

    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def check(run: Run, lookup: Lookup) -> None:
    """Refuse a layout of another number of processes, and settings that would silently change a run on GPUs.

    Raises:
        LaunchError: the number of processes; TF32 forced on ops whose products have to be in fp32; or all expert-parallel ranks
            would start with the same experts.
        ModelError: FSDP2 does not support the run's layout.
    """
    if run.training.processes % (least := run.layout.processes):
        sizes = {name: getattr(run.layout, name) for name in ("tensor", "pipeline", "context", "expert")}
        words = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise LaunchError(
            f"parallelism {words} needs {least} processes or a multiple, got {run.training.processes}: start as many "
            "(launch --nproc, torchrun --nproc-per-node), or change the layout"
        )
    check_torch_fsdp(run)
    if run.device != "cuda":
        return
    if lookup.environment.get(TF32_DRIVER) == "1" and (ops := _in_fp32(run)):
        raise LaunchError(
            f"{TF32_DRIVER}=1 makes cuBLAS round the operands of every fp32 product to TF32, "
            f"whatever a program sets, and {ops} need fp32; unset it, or set it to 0"
        )
    if run.execution.cpu_initialization and run.layout.expert > 1:
        raise LaunchError(
            f"--use-cpu-initialization on GPUs with expert parallelism {run.layout.expert}: all ranks draw the same numbers on "
            "their CPUs, and every expert-parallel rank would start with the same experts; leave the flag out"
        )


def _in_fp32(run: Run) -> str:
    """Return what a run's layers compute in fp32, as a list in words; empty when nothing."""
    kept = [FAMILIES[letter].in_fp32 for letter in run.families if FAMILIES[letter].in_fp32]
    return " and ".join(filter(None, (", ".join(kept[:-1]), *kept[-1:])))


def tf32(run: Run, lookup: Lookup, *, products: bool) -> Iterator[Value]:
    """List what sets fp32 products to TF32; some families have none. ``products``: :func:`tf32_products`."""
    if run.device != "cuda":
        return
    without = filter(None, (FAMILIES[letter].without_tf32 for letter in run.families))
    exact = "".join(f"{name} is not affected; " for name in without)
    note = f"{exact}TF32 keeps 10 bits of a mantissa: exact for operands that were bf16, not for fp32 ones"
    for name in (TF32_DRIVER, TF32_TORCH):
        if (requested := lookup.asked(name)) is not None:
            yield lookup.find(name, note="fp32 products in TF32", refused="" if requested == "0" else note)
    if products and lookup.asked(TF32_TORCH) in (None, "0"):
        backend = "torch.backends.cuda.matmul.fp32_precision"
        yield Value(name=backend, value="tf32", source=USER, warning=note, variable=False)


def flags(run: Run, arguments: str) -> Iterator[Value]:
    """List the flags that change speed but not results, whether they are on, and why; overlaps have their own contract."""
    for feature in FEATURES:
        if feature.field.startswith("overlap"):
            continue
        on, obstacle = getattr(run.execution, feature.field), feature.obstacle(run)
        note = obstacle if obstacle and not on else feature.reason
        source = arguments if feature.field in run.given else DEFAULT
        yield Value(name=feature.name, value="on" if on else "off", source=source, note=note, variable=False)
    usual, interval = usual_log_interval(run), run.execution.log_interval
    note = "before each line all ranks wait for each other" if run.processes > 1 else "a line delays no other rank"
    source = arguments if "log_interval" in run.given else DEFAULT
    if interval < usual:
        note += f"; {usual} is usual on several GPUs"
    yield Value(name="log interval", value=str(interval), source=source, note=note, variable=False)


def recompute(run: Run, families: Recompute, *, given: bool, arguments: str) -> Value:
    """Describe what the backward pass recomputes; ``arguments``: the source of the arguments' values."""
    stock = run.execution.recompute_granularity
    if stock == "selective":
        stock = f"selective ({', '.join(run.execution.recompute_modules) or 'core_attn'})"
    plan = "; ".join(filter(None, (", ".join(families.on), f"Megatron's {stock}" if stock else "")))
    source = USER if given else arguments if stock else DEFAULT
    return Value(name="recompute", value=plan or "nothing", source=source, variable=False)


def graphs(run: Run, arguments: str) -> Value:
    """Describe the CUDA graphs; ``arguments``: the source of the arguments' values."""
    scope = f" over {', '.join(run.execution.cuda_graph_scope)}" if run.execution.cuda_graph_scope else ""
    source = arguments if "cuda_graph_impl" in run.given else DEFAULT
    return Value(name="CUDA graphs", value=run.execution.cuda_graph_impl + scope, source=source, variable=False)


def precision(run: Run, arguments: str) -> Value:
    """Describe the precision: the run's dtype, or the four fields of its plan where kernels run in FP8."""
    plan, fp8, file = run.training.plan, run.execution.fp8, run.execution.precision_file
    text = run.precision + (f", FP8 {fp8}" if fp8 else "")
    if plan.file is not None:
        text += f", kernel-local FP8 {plan.kernel_fp8}, dispatch {plan.dispatch}, checkpoint owner {plan.checkpoint_owner}"
    if file is not None:
        text += f", and what {file} says of single modules"
    kept = _in_fp32(run)
    note = f"{kept} in fp32" if kept and run.precision != "fp32" else ""
    source = arguments if "precision" in run.given else DEFAULT
    return Value(name="precision", value=text, source=source, note=note, variable=False)
