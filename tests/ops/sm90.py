"""What a Triton kernel becomes on an H200, compiled without one: registers, instructions; that nothing is spilled, and that
registers allow the programs of :data:`PROGRAMS`."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""How a kernel is launched; the rest of a launch's keywords are the kernel's own."""

PROGRAMS = {
    "add_gradients": 4, "angles_bwd": 5, "borders": 10, "gate_bwd": 5, "norm_bwd": 3, "norm_fwd": 6,
    "pass_states": 8, "route": 4, "route_backward": 10, "tables_fwd": 5, "turn": 4, "turn_and_add": 2, "turn_totals": 3,
    "weight_gradient": 2,
}  # fmt: skip
"""By kernel, how many programs' registers a multiprocessor has to hold: as many as of its largest variant today.

Only kernels with more than the least: as no thread has over 255 registers, any two programs of four warps are held, or one of
eight, or eight of one."""


def types(**names: str) -> dict[str, str]:
    """The types of pointers, from the names that have each."""
    return {name: f"*{kind}" for kind, some in names.items() for name in some.split()}


@dataclass(frozen=True)
class Compiled:
    """A kernel for sm_90.

    Attributes:
        registers: of one thread.
        instructions: how many of each, by the name in SASS.
        shared: bytes of shared memory of one program.
        programs: how many a multiprocessor's 65,536 registers hold, which are given out in eights per thread.
    """

    registers: int
    instructions: Counter[str]
    shared: int
    programs: int


def compiled(
    kernel: Any, tensors: dict[str, str], constants: dict[str, Any], folder: Path, *, multiples: tuple[str, ...] = ()
) -> Compiled:
    """Compile ``kernel`` as it ships, every pointer on 16 bytes; fail on a spill, or on fewer :data:`PROGRAMS`.

    Args:
        kernel: a function under ``triton.jit``.
        tensors: the type of each argument that is no constant, such as ``*bf16``; all others are i32.
        constants: the constants by name, None for a pointer that is not given; among them those of :data:`OPTIONS`.
        folder: where the binary is put.
        multiples: the integers that are multiples of 16, which Triton looks at in a launch.
    """
    options = {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name not in OPTIONS}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else tensors.get(name, "i32") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in multiples
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(made.asm["cubin"])
    usage = _run("cuobjdump", "--dump-resource-usage", binary)
    listing = _run("nvdisasm", "-c", binary)
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?PT?\d*\s+)?([A-Z0-9]+)", listing, re.MULTILINE)
    instructions = Counter(found)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    assert instructions, listing[:2000]
    assert not instructions["STL"] + instructions["LDL"], (kernel, constants, usage)
    used = int(registers.group(1))
    programs = 65536 // (-(-used // 8) * 8 * 32 * made.metadata.num_warps)
    assert programs >= PROGRAMS.get(kernel.__name__, 1), (kernel, constants, usage)
    return Compiled(used, instructions, made.metadata.shared, programs)


def _run(program: str, *words: object) -> str:
    command = [str(_BINARIES / program), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
