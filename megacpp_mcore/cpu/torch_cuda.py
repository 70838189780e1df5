"""The CPU lane's stand-ins for ``torch.cuda``, and for torch functions called with a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.util.stand_in import standing_in

if TYPE_CHECKING:
    from megacpp_mcore.cpu.lane import CpuLane


def install(lane: CpuLane) -> None:
    """Install them, until ``lane`` is removed."""
    generators = _generator_functions()
    lane.replace("", torch.cuda, **_device_functions(), **_memory_functions(), **generators)
    # Megatron uses both torch.cuda.get_rng_state and torch.cuda.random.get_rng_state.
    lane.replace("", torch.cuda.random, **generators)
    lane.replace("", torch.cuda.nvtx, **_without_effect("range_push", "range_pop", "mark"))
    lane.messages.append("CPU lane: torch.cuda, torch.cuda.random and torch.cuda.nvtx are answered by the CPU")
    lane.replace(
        "find none: torch itself, such as its optimizers, knows that this is a CPU",
        torch.accelerator,
        current_accelerator=lambda check_available=False: None,
        is_available=lambda: False,
    )
    _send_devices_to_cpu(lane)
    _accept_any_split_sizes(lane)
    # A resumed run creates its loaders' iterators after restoring the generator, an uninterrupted one before training. On a GPU
    # the draw of each advances only the host's generator; here the two are one, and resumed runs would not be reproducible.
    message, loader = "does not move the generator (resumed runs repeat)", torch.utils.data.DataLoader
    lane.replace(message, loader, __iter__=torch.random.fork_rng(devices=[])(loader.__iter__))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _without_effect(*names: str) -> dict[str, Callable[..., None]]:
    """Return a no-op function for each name: Dynamo has one rule per function object, and refuses two."""
    return {name: lambda *_, **__: None for name in names}


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _Stream:
    """The stand-in's only stream: all work on it has already completed."""

    cuda_stream = priority = 0
    device = torch.device("cpu")
    __init__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event


class _Event:
    """A point in wall-clock time, for callers of ``elapsed_time``."""

    seconds: float | None = None
    __init__ = wait = synchronize = _nothing

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _Event) -> float:
        """Return the milliseconds from this event to ``end_event``; an error, as in torch, unless both were recorded."""
        if self.seconds is None or end_event.seconds is None:
            raise RuntimeError("elapsed_time needs two recorded events; call record() on both first")
        return (end_event.seconds - self.seconds) * 1e3


def _device_functions() -> dict[str, Any]:
    processors = os.cpu_count() or 1
    properties = SimpleNamespace(
        name="CPU stand-in for CUDA", major=0, minor=0, total_memory=_host_memory(), multi_processor_count=processors
    )
    stream = _Stream()
    return _without_effect("init", "synchronize", "ipc_collect", "set_device", "set_stream") | {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _local_world_size,
        "current_device": lambda: int(os.environ.get("LOCAL_RANK", "0")),
        "device": contextlib.nullcontext,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: including_emulation,
        "Stream": _Stream,
        "Event": _Event,
        "stream": contextlib.nullcontext,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
        "default_generators": (torch.default_generator,) * _local_world_size(),
    }


def _memory_functions() -> dict[str, Any]:
    def memory_stats(device: Any = None) -> dict[str, int]:
        stats = {"allocation.all.current": 0, "allocation.all.peak": 0}  # the host allocator does not count blocks
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
            stats |= {f"{kind}.all.current": _resident_bytes(), f"{kind}.all.peak": _peak_resident_bytes()}
        return stats

    def empty_cache() -> None:
        # glibc retains memory freed between blocks in use: after some steps, several times what a step needs.
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
            trim(0)

    now = {
        name: lambda device=None: _resident_bytes() for name in ("memory_allocated", "memory_reserved", "device_memory_used")
    }
    peak = {name: lambda device=None: _peak_resident_bytes() for name in ("max_memory_allocated", "max_memory_reserved")}
    unneeded = _without_effect("reset_peak_memory_stats", "reset_max_memory_allocated")
    free = {"mem_get_info": lambda device=None: (_host_memory() - _resident_bytes(), _host_memory())}
    return {**now, **peak, **unneeded, **free, "empty_cache": empty_cache, "memory_stats": memory_stats}


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _generator_functions() -> dict[str, Any]:
    generator = torch.default_generator

    def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
        generator.set_state(new_states[-1])  # the devices of one host share the generator: all states are equal

    return {
        **{name: lambda seed: generator.manual_seed(int(seed)) for name in ("manual_seed", "manual_seed_all")},
        **{name: lambda: generator.seed() for name in ("seed", "seed_all")},
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(_local_world_size())],
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "set_rng_state_all": set_rng_state_all,
    }


def _cpu_for(device: Any) -> Any:
    """Return the CPU for whatever names a CUDA device, and anything else unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    is_cuda = device.startswith("cuda") if isinstance(device, str) else getattr(device, "type", None) == "cuda"
    return torch.device("cpu") if is_cuda else device


def _tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.Tensor.to(tensor, *(_cpu_for(arg) for arg in args[:1]), *args[1:], **_rewrite(kwargs))


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        return torch.Tensor.type(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return torch.Tensor.type(tensor, dtype, **kwargs)


def _rewrite(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {"pin_memory": False} if "pin_memory" in kwargs else {}
    if "device" in kwargs:
        changed["device"] = _cpu_for(kwargs["device"])
    return kwargs | changed if changed else kwargs


_METHODS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _tensor_to,
    torch.Tensor.cuda: lambda tensor, device=None, non_blocking=False, **more: torch.Tensor.to(tensor, "cpu", **more),
    torch.Tensor.type: _tensor_type,
    torch.Tensor.pin_memory: lambda tensor, *_, **__: tensor,
}


class CpuDeviceMode(TorchFunctionMode):
    """Redirects to the CPU every torch call of this thread that names a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, or its stand-in, with CUDA devices replaced."""
        if func in _METHODS:
            return _METHODS[func](*args, **(kwargs or {}))
        return func(*args, **_rewrite(kwargs)) if kwargs else func(*args)


def _send_devices_to_cpu(lane: CpuLane) -> None:
    mode = CpuDeviceMode()
    mode.__enter__()

    def leave() -> None:
        if torch.overrides._get_current_function_mode() is not mode:
            raise LaunchError(
                "another torch function mode was entered after the CPU lane; leave it before the lane",
                code="nested-mode",
            )
        mode.__exit__(None, None, None)

    lane.callback(leave)
    lane.messages.append(f"CPU lane: {__name__}.CpuDeviceMode sends CUDA devices named in torch calls to the CPU")

    def run_backward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if torch.overrides._get_current_function_mode() is mode else mode:
            return stock(*args, **kwargs)

    # A mode is inactive while it handles a call such as torch.autograd.backward, which a checkpoint's inner backward runs in.
    backward = standing_in(torch.autograd._engine_run_backward, run_backward)
    lane.replace("keeps to that mode, too", torch.autograd, _engine_run_backward=backward)
    # It requires a real stream before any mode is consulted.
    lane.replace("does nothing", torch.Tensor, record_stream=_nothing)


def _accept_any_split_sizes(lane: CpuLane) -> None:
    """Let ``all_to_all_single`` accept split sizes as arrays or tensors: gloo's binding requires lists of ints."""

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    def all_to_all_single(
        stock: Callable[..., Any],
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        return stock(output, input, as_list(output_split_sizes), as_list(input_split_sizes), *more, **options)

    message = "takes split sizes of any kind (gloo wants lists)"
    takes_any = standing_in(torch.distributed.all_to_all_single, all_to_all_single)
    lane.replace(message, torch.distributed, all_to_all_single=takes_any)
