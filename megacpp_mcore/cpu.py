"""The CPU lane: a stand-in for ``torch.cuda``, so that stock Megatron trains on a laptop and in CI.

Megatron asks for a GPU in some three hundred places. While the lane is installed those questions are answered by the
CPU; Megatron's own code is what runs. What the answers mean:

* ``torch.cuda.is_available()`` is True (Megatron refuses to start otherwise) and ``device_count()`` is the number of
  processes of this host. Tensors stay CPU tensors: ``.device`` and ``.is_cuda`` tell the truth, and every
  ``device="cuda"``, ``device=<int>`` and ``.cuda()`` becomes the CPU. Only ``Tensor.type()`` answers with the
  ``torch.cuda`` name, which Megatron's optimizers compare with.
* The generator of each device *is* the CPU generator. Megatron's tracker of model-parallel states is the real one, so
  dropout, initialisation and the states kept in checkpoints behave as on a GPU, and a resumed run repeats exactly.
* There is one stream and all work on it is done at once: streams and events keep order by doing nothing, events
  measure wall-clock time, and the memory figures are those of the process (resident set).
* ``get_device_capability()`` is (0, 0): whatever asks for a GPU generation is refused as on one that is too old.

Two more replacements make layouts comparable on gloo: see :func:`_accept_any_split_sizes` and
:func:`_seed_experts_by_global_index`. Nothing is replaced before :func:`install`, :attr:`CpuLane.messages` names what
was, and :meth:`CpuLane.remove` puts every original back. Checked with torch 2.11 and megatron-core 0.19.2.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.policy.compile import disabled_by
from megacpp_mcore.util import flags

REQUIRED_ARGUMENTS: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--use-cpu-initialization",),
    ("--transformer-impl", "local"),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
    ("--num-workers", "0"),
)
"""The Megatron arguments without which a CPU run cannot work, each a flag with its value, if it takes one."""

ENVIRONMENT = {
    # torch.compile would need a C++ compiler at run time, and Dynamo does not trace the stand-ins.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron insists on this one for TP and CP on GPUs older than Blackwell; it means nothing to a CPU.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""What the lane sets in the environment while it is installed."""

_RNG_LOGGER = "megatron.core.tensor_parallel.random"
_RNG_WARNING = "CPU RNG state changed within GPU RNG context"

_installed: CpuLane | None = None


def missing_arguments(arguments: Sequence[str]) -> list[str]:
    """Return those of :data:`REQUIRED_ARGUMENTS` that ``arguments`` (Megatron's, without the script) does not hold.

    ``--flag value`` and ``--flag=value`` count; a flag with another value is reported together with what was found.
    """
    given = flags.read(arguments)
    missing = []
    for flag, *values in REQUIRED_ARGUMENTS:
        if flag not in given:
            missing.append(" ".join((flag, *values)))
        elif values and flags.first(given, flag) != values[0]:
            missing.append(f"{flag} {values[0]} (found {flags.first(given, flag) or ''!r})")
    return missing


@dataclass
class CpuLane:
    """An installed lane: what it replaced, and how to take it back.

    Attributes:
        messages: the lines for the launcher to print. Each thing that was replaced is named in one of them: by its own name,
            or, for the some sixty of ``torch.cuda``, by its module's.
        replaced: the names of all of it.
        dynamo_was_disabled: whether torch.compile was off before.
    """

    messages: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    dynamo_was_disabled: bool = field(default_factory=lambda: bool(disabled_by(os.environ)))
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set attribute ``name`` of ``owner`` (a module or a class) to ``value`` until :meth:`remove`."""
        place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        self._stack.enter_context(mock.patch.object(owner, name, value, create=True))
        self.replaced.append(f"{place}.{name}")

    def on_remove(self, what: str, action: Callable[..., None], *arguments: Any) -> None:
        """Have ``action``, which takes back the replacement of ``what``, run by :meth:`remove`."""
        self._stack.callback(action, *arguments)
        self.replaced.append(what)

    def remove(self) -> None:
        """Put every original back, in reverse order; one that cannot be put back does not keep the others from it.

        Raises:
            LaunchError: another torch function mode is still active.
        """
        global _installed
        if _installed is self:
            _installed = None
        self._stack.close()


def install() -> CpuLane:
    """Install the lane in this process and return it; imports megatron-core.

    Raises:
        LaunchError: if the lane is installed already, or if this process already uses a real GPU.
    """
    global _installed
    if _installed is not None:
        raise LaunchError("the CPU lane is already installed in this process; remove() the first one before another")
    if torch.cuda.is_initialized():
        raise LaunchError(
            "this process already uses a real CUDA device, and the CPU lane would answer in its place; "
            "install the lane before any CUDA call, or run with --device cuda"
        )
    lane = _installed = CpuLane()
    try:
        _disable_dynamo(lane)
        # Imported before the stand-ins, so that the names of torch.cuda that Megatron copies at import are the originals.
        from megatron.core.transformer.moe import experts, moe_utils
        from megatron.training import initialize

        _stand_in_for_torch_cuda(lane)
        _send_devices_to_cpu(lane)
        _accept_any_split_sizes(lane)
        _keep_loaders_off_the_generator(lane)
        _keep_the_warm_up_off_the_generator(lane, initialize)
        _quiet_shared_generator_warning(lane)
        _seed_experts_by_global_index(lane, experts)
        _keep_the_router_off_transformer_engine(lane, moe_utils)
    except BaseException:
        lane.remove()
        raise
    return lane


def _disable_dynamo(lane: CpuLane) -> None:
    """Set the environment, of which Dynamo reads its part when a function is decorated."""
    for name, value in ENVIRONMENT.items():
        lane.on_remove(name, _set_variable, name, os.environ.get(name))
        os.environ[name] = value
    settings = ", ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    if "torch._dynamo.config" in sys.modules:  # imported before: what is compiled by now asks the configuration
        patch = sys.modules["torch._dynamo.config"].patch(disable=True)
        patch.__enter__()
        lane.on_remove("torch._dynamo.config.disable", patch.__exit__, None, None, None)
        settings += ", torch._dynamo.config.disable=True"
    lane.messages.append(f"CPU lane: {settings} (torch.compile runs its functions eagerly)")


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def stepping_aside() -> Iterator[None]:
    """For the duration, no part of an installed lane that Dynamo cannot trace: for functions of CPU tensors alone.

    Does nothing without a lane, nor where another torch function mode is active, and leaves Dynamo disabled where it was so
    before the lane.
    """
    mode = torch.overrides._get_current_function_mode()
    if _installed is None or _installed.dynamo_was_disabled or not isinstance(mode, CpuDeviceMode):
        yield
        return
    from torch._dynamo import config as dynamo

    variable = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    no_gpu = mock.patch.object(torch.cuda, "is_available", bool)  # which says no
    try:
        with no_gpu, dynamo.patch(disable=False), torch.overrides._pop_mode_temporarily():
            yield
    finally:
        _set_variable("TORCHDYNAMO_DISABLE", variable)


class Stream:
    """The one stream of the stand-in: what is put on it has already been done."""

    cuda_stream = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, stream: Any) -> None:
        """Order after ``stream``: already so."""

    def wait_event(self, event: Any) -> None:
        """Order after ``event``: already so."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (or a new one) now and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the stream: nothing is pending."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """A point in wall-clock time, for what measures with ``elapsed_time`` (milliseconds)."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Order after the event: already so."""

    def synchronize(self) -> None:
        """Wait for the event: it has happened."""

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of them was not recorded, as torch has it.
        """
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("elapsed_time needs two recorded events; call record() on both first")
        return (end_event._seconds - self._seconds) * 1e3


class _DeviceContext(contextlib.AbstractContextManager[None]):
    """``torch.cuda.device(...)``: one device, so nothing to change."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __exit__(self, *_: object) -> None:
        return None


def _stand_in_for_torch_cuda(lane: CpuLane) -> None:
    groups = (_device_functions(), _stream_functions(), _memory_functions())
    for name, value in itertools.chain.from_iterable(group.items() for group in groups):
        lane.replace(torch.cuda, name, value)
    for name, value in _generator_functions().items():
        # Megatron uses both torch.cuda.get_rng_state and torch.cuda.random.get_rng_state.
        lane.replace(torch.cuda, name, value)
        lane.replace(torch.cuda.random, name, value)
    lane.replace(torch.cuda, "default_generators", (torch.default_generator,) * _local_world_size())
    for name in ("range_push", "range_pop", "mark"):
        lane.replace(torch.cuda.nvtx, name, _nothing)
    lane.messages.append("CPU lane: torch.cuda, torch.cuda.random and torch.cuda.nvtx are answered by the CPU")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _device_functions() -> dict[str, Any]:
    current = [int(os.environ.get("LOCAL_RANK", "0"))]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None:
            current[0] = index

    properties = SimpleNamespace(
        name="CPU stand-in for CUDA",
        major=0,
        minor=0,
        total_memory=_host_memory(),
        multi_processor_count=os.cpu_count() or 1,
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "device_count": _local_world_size,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": _DeviceContext,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "synchronize": _nothing,
        "ipc_collect": _nothing,
    }


def _stream_functions() -> dict[str, Any]:
    default = Stream()
    current = [default]

    @contextlib.contextmanager
    def stream(entered: Stream | None) -> Iterator[None]:
        before = current[0]
        current[0] = entered or before
        try:
            yield
        finally:
            current[0] = before

    def set_stream(chosen: Stream | None) -> None:
        current[0] = chosen or current[0]

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "set_stream": set_stream,
        "current_stream": lambda device=None: current[0],
        "default_stream": lambda device=None: default,
        "is_current_stream_capturing": lambda: False,
    }


def _memory_functions() -> dict[str, Any]:
    def memory_stats(device: Any = None) -> dict[str, int]:
        stats = {}
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            stats[f"{kind}.all.current"] = _resident_bytes()
            stats[f"{kind}.all.peak"] = _peak_resident_bytes()
        # The host's allocator keeps no count of blocks.
        stats["allocation.all.current"] = stats["allocation.all.peak"] = 0
        return stats

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return _host_memory() - _resident_bytes(), _host_memory()

    def empty_cache() -> None:
        # glibc keeps what was freed between blocks still in use: after some steps several times what the step needs.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    current = dict.fromkeys(
        ("memory_allocated", "memory_reserved", "device_memory_used"), lambda device=None: _resident_bytes()
    )
    peak = dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda device=None: _peak_resident_bytes())
    unneeded = ("reset_peak_memory_stats", "reset_max_memory_allocated")
    return {
        **current,
        **peak,
        **dict.fromkeys(unneeded, _nothing),
        "empty_cache": empty_cache,
        "memory_stats": memory_stats,
        "mem_get_info": mem_get_info,
    }


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _peak_resident_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux: the peak is all that the standard library tells
        return _peak_resident_bytes()


def _generator_functions() -> dict[str, Any]:
    generator = torch.default_generator

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
        # The devices of one host share the generator; all states of a saved list are the same one.
        for state in new_states:
            generator.set_state(state)

    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(_local_world_size())],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": set_rng_state_all,
    }


def _cpu_for(device: Any) -> Any:
    """Return the CPU for whatever names a CUDA device, and anything else unchanged."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.Tensor.to(tensor, *(_cpu_for(arg) for arg in args[:1]), *args[1:], **_rewrite(kwargs))


def _tensor_cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return torch.Tensor.to(tensor, device=torch.device("cpu"), **kwargs)


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        return torch.Tensor.type(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return torch.Tensor.type(tensor, dtype, **kwargs)


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _tensor_to,
    torch.Tensor.cuda: _tensor_cuda,
    torch.Tensor.type: _tensor_type,
    torch.Tensor.pin_memory: _itself,
}


def _rewrite(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _cpu_for(kwargs["device"])}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return kwargs


class CpuDeviceMode(TorchFunctionMode):
    """Sends to the CPU every torch call of this thread that names a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, or its stand-in, with CUDA devices replaced."""
        kwargs = kwargs or {}
        method = _METHODS.get(func)
        if method is not None:
            return method(*args, **kwargs)
        return func(*args, **_rewrite(kwargs))


def _send_devices_to_cpu(lane: CpuLane) -> None:
    mode = CpuDeviceMode()
    mode.__enter__()

    def leave() -> None:
        if torch.overrides._get_current_function_mode() is not mode:
            raise LaunchError(
                "another torch function mode was entered after the CPU lane and is still active; leave it before the lane"
            )
        mode.__exit__(None, None, None)

    lane.on_remove(f"{__name__}.{CpuDeviceMode.__name__}", leave)
    # A mode is off while it answers a call, and torch.autograd.backward is one: a checkpoint's inner backward pass.
    stock_backward = torch.autograd._engine_run_backward

    @functools.wraps(stock_backward)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if torch.overrides._get_current_function_mode() is mode else mode:
            return stock_backward(*args, **kwargs)

    lane.replace(torch.autograd, "_engine_run_backward", run_backward)
    # Its argument must be a real stream before a mode is asked.
    lane.replace(torch.Tensor, "record_stream", _nothing)
    lane.messages.append(
        f"CPU lane: {__name__}.{CpuDeviceMode.__name__} sends CUDA devices named in torch calls to the CPU, "
        "inside torch.autograd._engine_run_backward, too; torch.Tensor.record_stream does nothing"
    )


def _accept_any_split_sizes(lane: CpuLane) -> None:
    """Let ``all_to_all_single`` take its split sizes as arrays or tensors: gloo's binding wants lists of ints."""
    stock = torch.distributed.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    @functools.wraps(stock)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return stock(output, input, as_list(output_split_sizes), as_list(input_split_sizes), group, async_op)

    lane.replace(torch.distributed, "all_to_all_single", all_to_all_single)
    lane.messages.append(
        "CPU lane: torch.distributed.all_to_all_single takes split sizes of any kind (gloo wants lists)"
    )


def _keep_loaders_off_the_generator(lane: CpuLane) -> None:
    """Keep the draw with which a DataLoader iterator starts from moving the generator that dropout uses.

    A resumed run makes its iterators after it has restored the generator, an uninterrupted one before it trains. With
    a GPU that draw moves only the host's generator; here the two are one, and a resumed run would not repeat.
    """
    loader = torch.utils.data.DataLoader
    stock = loader.__iter__

    @functools.wraps(stock)
    def iterate(self: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return stock(self)

    lane.replace(loader, "__iter__", iterate)
    lane.messages.append(
        f"CPU lane: {loader.__module__}.{loader.__qualname__}.__iter__ does not move the generator (resumed runs repeat)"
    )


def _keep_the_warm_up_off_the_generator(lane: CpuLane, initialize: Any) -> None:
    """Keep the random inputs of Megatron's fused functions, which it runs once to compile them, out of the weights.

    They are as large as micro-batch, sequence and tensor parallelism make them, and drawn after seeding and before the model
    is built. With a GPU they move only the device's generator; here the two are one, and another micro-batch would be
    another model (megatron-core 0.19, ``training/initialize.py``).
    """
    stock = initialize._warmup_jit_function

    @functools.wraps(stock)
    def warm_up(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return stock(*args, **kwargs)

    lane.replace(initialize, "_warmup_jit_function", warm_up)
    lane.messages.append(
        f"CPU lane: {initialize.__name__}._warmup_jit_function does not move the generator (weights do not depend on batches)"
    )


def _quiet_shared_generator_warning(lane: CpuLane) -> None:
    """Drop the tracker's warning about CPU state changes: the two generators are one here, so every fork would warn."""
    logger = logging.getLogger(_RNG_LOGGER)

    def keep(record: logging.LogRecord) -> bool:
        return record.getMessage() != _RNG_WARNING

    logger.addFilter(keep)
    lane.on_remove(f"a filter of {_RNG_LOGGER}", logger.removeFilter, keep)
    lane.messages.append(f"CPU lane: a filter of {_RNG_LOGGER} drops its warning of {_RNG_WARNING!r}")


def _seed_experts_by_global_index(lane: CpuLane, experts: Any) -> None:
    """Give every expert of a ``SequentialMLP`` a seed of its own, made from its global index.

    With ``--use-cpu-initialization`` Megatron draws all weights from one stream that is the same on every
    expert-parallel rank, so that each rank would get the *same* experts. Here a layer draws one number from that
    stream and each expert is drawn from a generator seeded with it plus the expert's global index: experts differ
    from one another, and EP 1 and EP 2 start from the same model (megatron-core 0.19, ``transformer/moe/experts.py``).
    """
    stock_init = experts.SequentialMLP.__init__
    signature = inspect.signature(stock_init)

    @functools.wraps(stock_init)
    def seeded_init(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        first = arguments["num_local_experts"] * arguments["pg_collection"].ep.rank()
        indices = itertools.count(first)
        layer_seed = int(torch.randint(2**48, (), device="cpu"))
        stock_mlp = experts.MLP

        def build_expert(*mlp_args: Any, **mlp_kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(layer_seed + next(indices))
                return stock_mlp(*mlp_args, **mlp_kwargs)

        with mock.patch.object(experts, "MLP", build_expert):
            stock_init(*args, **kwargs)

    lane.replace(experts.SequentialMLP, "__init__", seeded_init)
    lane.messages.append(
        f"CPU lane: {experts.__name__}.SequentialMLP.__init__ seeds experts by their global index "
        "(stock gives every EP rank the same ones)"
    )


def _keep_the_router_off_transformer_engine(lane: CpuLane, moe_utils: Any) -> None:
    """Where Transformer Engine is installed the fp32 router would call its GEMM, which takes CUDA tensors only."""
    lane.replace(moe_utils, "te_general_gemm", None)
    lane.messages.append(f"CPU lane: {moe_utils.__name__}.te_general_gemm is None (the router multiplies with torch)")
