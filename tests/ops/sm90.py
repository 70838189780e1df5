"""What a Triton kernel becomes on a GPU, compiled without one; on an H200 that it fits, spills nothing, which instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megacpp_mcore.backends.architectures import ARCHITECTURES

_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""How a kernel is launched; the rest of a launch's keywords are the kernel's own."""


def types(**names: str) -> dict[str, str]:
    """The types of pointers, from the names that have each."""
    return {name: f"*{kind}" for kind, some in names.items() for name in some.split()}


def compiled(
    kernel: Any, tensors: dict[str, str], constants: dict[str, Any], folder: Path, *, multiples: tuple[str, ...] = ()
) -> Any:
    """Compile ``kernel`` for an H200 as :func:`build` does; its ``cubin`` is in ``folder``, too.

    Fails where a thread has memory of its own, as all that is spilled needs, or a program more shared memory than there is.
    """
    made = build(kernel, tensors, constants, GPUTarget("cuda", 90, 32), multiples=multiples)
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = _run("cuobjdump", "-res-usage", binary)
    assert re.findall(r"\b(STACK|LOCAL):(\d+)", usage) == [("STACK", "0"), ("LOCAL", "0")], (kernel, constants, usage)
    assert made.metadata.shared <= ARCHITECTURES["sm_90"].shared, (kernel, constants)
    return made


def build(
    kernel: Any,
    tensors: dict[str, str],
    constants: dict[str, Any],
    target: GPUTarget,
    *,
    multiples: tuple[str, ...] = (),
) -> Any:
    """Compile ``kernel`` for ``target`` as it ships, every pointer on 16 bytes; what Triton made.

    Args:
        kernel: a function under ``triton.jit``.
        tensors: the type of each argument that is not constexpr, such as ``*bf16``; all others are i32.
        constants: the constants by name, None for a pointer that is not given; among them those of :data:`OPTIONS`.
        target: the GPU.
        multiples: the integers that are multiples of 16, which Triton looks at in a launch.
    """
    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else tensors.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or (name in multiples and signature[name] != "constexpr")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    return triton.compile(source, target=target, options=options)


def stack_bytes(made: Any) -> int:
    """Return the bytes of memory of its own that a thread of what :func:`build` made has: all that is spilled, and arrays."""
    if "amdgcn" in made.asm:
        return int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", made.asm["amdgcn"])[0])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(made.asm["cubin"])
        binary.flush()
        return sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", _run("cuobjdump", "-res-usage", binary.name))))


def products(made: Any) -> Counter[str]:
    """Count the products on tensor cores that sum in float32: ``wgmma.mma_async`` is Hopper's own, ``mma.sync`` a warp's."""
    return Counter(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.\S+\.f32\.", made.asm["ptx"]))


def instructions(folder: Path) -> Counter[str]:
    """Count the instructions of what :func:`compiled` put into ``folder`` by their names in SASS."""
    listing = _run("nvdisasm", "-c", folder / "kernel.cubin")
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?PT?\d*\s+)?([A-Z0-9]+)", listing, re.MULTILINE)
    assert opcodes, listing[:2000]
    return Counter(opcodes)


def _run(program: str, *words: object) -> str:
    command = [str(_BINARIES / program), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
