"""What a GPU's architecture decides about Triton kernels: memory, launch options, and which ``auto`` takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What is known about the kernels on GPUs of one architecture, compiled for it by Triton 3.6.

    Attributes:
        shared: bytes of shared memory that one program may have.
        options: by kernel, changes of the launch options tuned on ``sm_90`` (:func:`megacpp_mcore.ops.triton_launch.options`).
        unfit: by op, the worst compile result of any of its kernels with those options: ``auto`` takes another backend.
        untried: why ``auto`` takes no kernel at all; empty: it takes those of all other ops.
    """

    shared: int
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    untried: str = ""


ARCHITECTURES = {
    "sm_80": Architecture(shared=163 << 10, unfit={
        "mamba3": "spills 7352 bytes", "sparse_mla": "200 KB shared", "grouped_mlp": "spills 888 bytes",
        "mla": "spills 40 bytes", "indexer": "spills 208 bytes", "indexer_grad": "spills 144 bytes",
        "indexer_dense": "spills 88 bytes"}),
    "sm_89": Architecture(shared=99 << 10, unfit={
        "mamba3": "spills 6152 bytes", "sparse_mla": "200 KB shared", "grouped_mlp": "spills 576 bytes",
        "mla": "spills 16 bytes", "indexer": "spills 232 bytes", "indexer_grad": "spills 112 bytes",
        "indexer_dense": "144 KB shared"}),
    "sm_90": Architecture(shared=227 << 10),
    "sm_100": Architecture(shared=227 << 10, options={
        "chunk_scan_fwd": {"maxnreg": None}, "chunk_scan_fwd, 128": {"num_warps": 8}, "rotate_bwd": {"num_warps": 2},
        "chunk_scan_bwd_queries": {"maxnreg": None}, "chunk_scan_bwd_keys, 128": {"num_warps": 8},
    }, unfit={"m2rnn": "spills 32 bytes", "indexer_grad": "does not compile", "indexer_dense": "spills 104 bytes"}),
    "sm_120": Architecture(shared=99 << 10, unfit={
        "mamba3": "spills 3376 bytes", "sparse_mla": "200 KB shared", "grouped_mlp": "144 KB shared",
        "mla": "spills 24 bytes", "indexer": "spills 168 bytes", "indexer_grad": "spills 112 bytes",
        "indexer_dense": "144 KB shared"}),
    "gfx942": Architecture(shared=64 << 10, untried="none has run on an AMD GPU"),
}  # fmt: skip
"""By name. ``indexer_dense`` is the dense warm-up of the indexer; ``routed_mlp`` has the kernels of ``grouped_mlp``. A test
compares this with docs/compile.md, whose table the compiler writes; only on ``sm_90`` have kernels run and been compared."""


def archs(op: str) -> dict[str, str]:
    """Return, by architecture, why ``auto`` does not take the Triton kernels of ``op`` there; empty where it does."""
    kernels = "grouped_mlp" if op == "routed_mlp" else op
    return {name: arch.untried or arch.unfit.get(kernels, "") for name, arch in ARCHITECTURES.items()}
