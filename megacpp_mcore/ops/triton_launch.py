"""Launch Triton kernels without its argument look-up, which costs the host more time than most kernels cost the GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from megacpp_mcore.backends.architectures import ARCHITECTURES
from megacpp_mcore.versions import TRITON_DIRECT

DIRECT = triton.__version__.startswith(f"{TRITON_DIRECT}.")
"""Whether to launch compiled kernels directly: the arguments of that call are not a public interface of Triton."""

_NEWER: dict[str, dict[str, Any]] = {
    "angle_totals": {"num_warps": 4},
    "all_rows": {"LEAST": 64},
    "chunk_scan_bwd_keys": {"maxnreg": None},
    "chunk_scan_fwd": {"maxnreg": None},
    "keys": {"W": 64},
    "place": {"num_warps": 8},
    "score_keys": {"maxnreg": None},
    "targets, 576": {"KEYS": 16},
}
"""Changes to the launch options tuned with Triton 3.6, for kernels that spill registers with them under newer versions."""

_compiled: dict[tuple[Any, ...], tuple[CompiledKernel, int, tuple[None, ...]]] = {}
"""Compiled kernels by everything they depend on, each with its device and a placeholder for every compile-time argument."""


def options(kernel: str, tuned: dict[str, Any], arch: str | None = None) -> dict[str, Any]:
    """Return the launch options of ``kernel``, a name or ``name, size``, for this version of Triton and a GPU of ``arch``:
    ``tuned``, those of 3.6 on sm_90, overridden by two tables; an entry without a size applies to all sizes."""
    for table in ({} if DIRECT else _NEWER, ARCHITECTURES[arch].options if arch in ARCHITECTURES else {}):
        tuned = tuned | table.get(kernel.partition(", ")[0], {}) | table.get(kernel, {})
    return tuned


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)``, without Triton's look-up if an equal call came before.

    Calls are equal if they have the same kernel, the same names and values of constants, and, for each argument, everything
    that Triton 3.6 (``runtime/jit.py``, ``python/src/specialize.cc``) specialises a kernel for: of a tensor the dtype and the
    address modulo 16; of an integer whether it is 1, a multiple of 16, and its type (int32, int64 or uint64); of a tensor
    descriptor the dtype and block; otherwise the type. That is at least as fine as Triton's key, which omits some of it
    under ``do_not_specialize``. All tensors must be on the current device; the stream is looked up for each call.

    Triton itself launches what is not a plain ``triton.jit`` (but autotuned or interpreted) or has arguments of other types,
    such as tensor subclasses; and everything with launch hooks, in debug mode, with instrumented kernels, under
    ``torch.compile``, and in versions that are not :data:`DIRECT`. Only those launches check that no global variable of the
    kernel has changed.

    Args:
        kernel: its compile-time arguments are the last ones.
        grid: numbers of programs, one to three axes.
        arguments: the run-time arguments.
        constants: the compile-time arguments, and launch options such as ``num_warps``.

    Raises:
        TypeError: a run-time argument was passed by name, or a compile-time argument by position.
    """
    if torch.compiler.is_compiling():  # which can only trace Triton's own launch
        kernel[grid](*arguments, **constants)
        return
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    watched = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    watched = watched or runtime.debug or triton.knobs.compilation.instrumentation_mode
    if watched or type(kernel) is not JITFunction or kernel.pre_run_hooks or not DIRECT:
        kernel[grid](*arguments, **constants)
        return
    kinds, given = [id(kernel), *constants, *constants.values()], []
    for argument in arguments:
        kind: Any = type(argument)
        if kind is int:
            kind = argument % 16 == 0 if 1 < argument < 2**31 else _integer(argument)
        elif kind is Tensor or kind is Parameter:
            # Launch with plain addresses: for a tensor, the launch would query the driver.
            kind, argument = (argument.dtype, (address := argument.data_ptr()) % 16, argument.get_device()), address
        elif kind is TensorDescriptor:
            kind = argument.base.dtype, argument.base.get_device(), *argument.block_shape
        elif kind is not float and kind is not bool and argument is not None:
            kernel[grid](*arguments, **constants)
            return
        kinds.append(kind)
        given.append(argument)
    key, driver = tuple(kinds), triton.runtime.driver.active
    device = driver.get_current_device()
    cached = _compiled.get(key)
    if cached is not None and cached[1] == device:
        compiled, _, placeholders = cached
        compiled.run(
            *(*grid, 1, 1)[:3], driver.get_current_stream(device), compiled.function, compiled.packed_metadata, None,
            None, None, *given, *placeholders,
        )  # fmt: skip
        return
    names = kernel.arg_names[len(arguments) :]
    if names != [parameter.name for parameter in kernel.params if parameter.is_constexpr]:
        raise TypeError(
            f"{kernel.__name__} was launched with {len(arguments)} arguments by position; pass the run-time arguments by "
            "position and the compile-time ones, which come last in its signature, by name"
        )
    made = kernel[grid](*arguments, **constants)
    given = [getattr(argument, "base", argument) for argument in arguments]
    devices = {tensor.get_device() for tensor in given if isinstance(tensor, Tensor)}
    if isinstance(made, CompiledKernel) and devices == {device}:
        # The compiled kernel keeps the kernel alive, so its id is not reused.
        _compiled[key] = made, device, (None,) * len(names)


def _integer(number: int) -> tuple[str, bool, bool]:
    """Return what a kernel is specialised for in an integer."""
    kind = "int32" if -(2**31) <= number < 2**31 else "int64" if number < 2**63 else "uint64"
    return kind, number % 16 == 0, number == 1
