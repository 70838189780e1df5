"""What becomes of every Triton kernel on other GPUs, compiled for them without one: the table of docs/compile.md.

    python -m tests.ops.architectures [ARCHITECTURE …]

compiles for those (default: all), ten minutes on two cores and seconds once Triton has kept it, and writes their columns.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from triton.backends.compiler import GPUTarget

from megacpp_mcore.backends import probes
from megacpp_mcore.backends.architectures import ARCHITECTURES
from tests.ops import test_compiled as kernels
from tests.ops.sm90 import build, stack_bytes

PAGE = Path(__file__).parents[2] / "docs" / "compile.md"
BLOCK = re.compile(r"(?<=<!-- architectures -->\n).*?(?=<!-- end of architectures -->)", re.DOTALL)

NEGLIGIBLE = 8
"""Bytes of a thread's own memory, one instruction in and out, that do not count as a spill."""
COMPILES, RAN, FAST = "compiles", "ran", "fast"
MOST_THREADS = 1024
"""In one program, on any of them."""

ROWS: Mapping[str, tuple[str, ...]] = {
    "mamba3": ("mamba3.",),
    "m2rnn": ("m2rnn.",),
    "indexer": ("indexer.kernels.score_keys", "indexer.kernels.take_best"),
    "indexer_grad": ("indexer.kernels.learn",),
    "dense warm-up of the indexer": ("indexer.dense.",),
    "mla, 128/64": ("mla.",),
    "sparse_mla, 128/64": ("sparse_mla.kernels.",),
    "sparse_mla, 576/512": ("sparse_mla.wide.",),
    "grouped_mlp, routed_mlp": ("grouped_mlp.kernels.",),
    "the same in FP8": ("grouped_mlp.fp8.", "fp8."),
    "mamba3_projection, feed_forward, in FP8": ("mamba3_projection.", "feed_forward."),
    "mla_latents, mla_projection, mla_keys, indexer_inputs": ("mla_projection.",),
    "router": ("router.",),
    "rms_norm": ("rms_norm.",),
    "loss, optimizer, embedding, sums": ("linear_cross_entropy.", "adam.", "embedding.", "add."),
}
"""The table's rows, and how the names of their kernels begin."""
NOT_TIMED = ("dense warm-up of the indexer",)
"""Rows of which no benchmark on an H200 is committed."""


def target(architecture: str) -> GPUTarget:
    """What Triton compiles for."""
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def variants(architecture: str) -> Iterator[tuple[str, kernels.Variant]]:
    """Every variant that ``make kernels`` compiles, with its row, as it is launched on ``architecture``."""
    every = [*kernels.VARIANTS]
    with mock.patch.object(probes, "arch", return_value=architecture):
        for even, name, rank, state in kernels.MAMBA3:
            every += kernels.mamba3_variants(name, kernels._plan(rank, state, even))
    for variant in every:
        kernel = f"{variant[1].__module__}.{variant[1].__name__}".removeprefix("megacpp_mcore.ops.")
        (row,) = (row for row, starts in ROWS.items() if kernel.startswith(starts))
        yield row, variant


def outcome(variant: kernels.Variant, architecture: str) -> tuple[int, int]:
    """How bad it is, 0 (compiles) to 4, and the bytes, or threads, that are too many."""
    made_for, (_, kernel, signature, constants) = target(architecture), variant
    try:
        made = build(kernel, signature, constants, made_for, multiples=kernels.multiples(variant))
    except Exception:
        return 4, 0
    if made.metadata.shared > ARCHITECTURES[architecture].shared:
        return 3, made.metadata.shared
    if (threads := made.metadata.num_warps * made_for.warp_size) > MOST_THREADS:
        return 2, threads
    spilled = stack_bytes(made)
    return int(spilled > NEGLIGIBLE), spilled


def column(architecture: str) -> dict[str, str]:
    """Compile everything for ``architecture``, each in a fork, as some abort the compiler; the worst of each row, in words."""
    worst: dict[str, tuple[int, int]] = dict.fromkeys(ROWS, (0, 0))
    running: dict[int, tuple[str, Path]] = {}

    def ended() -> None:
        row, file = running.pop(os.wait()[0])
        worst[row] = max(worst[row], tuple(json.loads(file.read_text() or "[4, 0]")))

    with tempfile.TemporaryDirectory() as folder:
        for number, (row, variant) in enumerate(variants(architecture)):
            if len(running) == len(os.sched_getaffinity(0)):
                ended()
            file = Path(folder, str(number))
            file.touch()
            if not (child := os.fork()):
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where MLIR writes whole modules
                    file.write_text(json.dumps(outcome(variant, architecture)))
                finally:
                    os._exit(0)
            running[child] = row, file
        while running:
            ended()
    return {row: _words(architecture, row, *worst_outcome) for row, worst_outcome in worst.items()}


def _words(architecture: str, row: str, badness: int, number: int) -> str:
    if badness == 0:
        if architecture != "sm_90":
            return COMPILES
        return RAN if row in NOT_TIMED else FAST
    return (
        f"spills {number} bytes", f"{number} threads", f"{number / 1024:.0f} KB shared", "does not compile",
    )[badness - 1]  # fmt: skip


def committed() -> dict[str, dict[str, str]]:
    """The page's table: by architecture, its cell of each row."""
    table = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (table[0] if table else "").splitlines()]
    (head, _, *body) = lines or [[""], []]
    return {name: {line[0].replace("`", ""): line[place] for line in body} for place, name in enumerate(head) if place}


def written(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Format the table."""
    head = ["kernels of", *columns]
    body = [[row, *(columns[name].get(row, "") for name in columns)] for row in ROWS]
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(names: Sequence[str]) -> None:
    """Write the columns ``names``, or all."""
    columns = committed()
    for name in names or ARCHITECTURES:
        columns[name] = column(name)
    columns = {name: columns[name] for name in ARCHITECTURES if name in columns}
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: written(columns), page), encoding="utf-8")
    print(written(columns), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
