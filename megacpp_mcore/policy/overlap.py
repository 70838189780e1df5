"""The overlap contract: which communication of a run can be hidden behind computation, and what prevents the rest.

It is derived from streams, hardware queues, bucket sizes and what Megatron accepts; nothing is measured. Source of the
conditions: megatron-core 0.19.2, ``transformer/transformer_config.py``, ``distributed/distributed_data_parallel.py`` and
``training.py`` (``resolve_ddp_bucket_size``). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megacpp_mcore.model import memory
from megacpp_mcore.model.run import Run

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

MIN_BUCKET_BYTES = 32 * 2**20
"""A gradient bucket below this spends more on its launch than on its transfer: cost is multiplied rather than hidden."""

MOE_OVERLAP, SHARED_OVERLAP = "--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap"
_DISPATCHERS = ("alltoall", "flex")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Whether one kind of communication can be hidden behind computation, and what makes it possible or prevents it.

    Attributes:
        asked: whether the run requests it.
        possible: whether streams, connections and bucket sizes allow it, and Megatron accepts it.
    """

    name: str
    asked: bool
    possible: bool
    reason: str


def overlap_contract(run: Run, connections: str | None) -> Iterator[Overlap]:
    """Decide which overlaps ``run`` can have; ``connections`` is what CUDA_DEVICE_MAX_CONNECTIONS will be (None: unset)."""
    bucket, how = _bucket_obstacle(run), run.execution
    sharded = "" if how.distributed_optimizer or how.fsdp else "it needs --use-distributed-optimizer"
    reduced = "" if how.overlap_grad_reduce else "it needs --overlap-grad-reduce"
    replicas = "" if run.replicas > 1 else "there is one data-parallel replica"
    experts = (
        "" if run.layout.expert > 1 else "experts are not sharded over processes",
        f"{CONNECTIONS}=1 gives both streams one queue" if connections == "1" else "",
        "" if how.moe_dispatcher in _DISPATCHERS else "it needs --moe-token-dispatcher-type alltoall or flex",
        f"Megatron refuses {MOE_OVERLAP} with {SHARED_OVERLAP}" if how.overlap_moe_a2a and how.overlap_shared_expert else "",
    )
    repeated = how.recompute_granularity == "full" or "moe" in how.recompute_modules
    depths = 0 if run.model is None else run.model.mtp.depth
    all_to_all = (
        *experts,
        "" if run.precision in ("bf16", "fp16") else f"Megatron refuses it in {run.precision}",
        "Megatron refuses it with recomputed experts" if repeated else "",
        f"Megatron refuses it with more than one MTP depth, got {depths}" if depths > 1 else "",
    )
    in_order = f"it needs {CONNECTIONS}=1, which keeps a transfer ahead of the GEMM it hides behind"
    tensor = (
        "" if run.layout.tensor > 1 else "tensor parallelism is 1",
        "" if run.layout.sequence_parallel else "it needs --sequence-parallel",
        "" if run.has_engine else "it is Transformer Engine's",
        "" if connections == "1" else in_order,
    )
    rows: tuple[tuple[str, str, bool, tuple[str, ...]], ...] = (
        ("gradient reduce", "--overlap-grad-reduce", how.overlap_grad_reduce, (replicas, bucket)),
        ("parameter gather", "--overlap-param-gather", how.overlap_param_gather, (replicas, sharded, reduced, bucket)),
        ("MoE all-to-all", MOE_OVERLAP, how.overlap_moe_a2a, all_to_all),
        ("shared expert", SHARED_OVERLAP, how.overlap_shared_expert, experts),
        ("tensor-parallel", "--tp-comm-overlap", how.tp_comm_overlap, tensor),
    )
    for name, flag, requested, obstacles in rows:
        against = [f"it is not asked for ({flag})"] if not requested else [why for why in obstacles if why]
        against = ["a CPU has no streams"] if run.device != "cuda" else against
        reason = "; ".join(against) or "possible"
        yield Overlap(name=name, asked=requested, possible=not against, reason=reason)


def _bucket_obstacle(run: Run) -> str:
    """Return why the gradient buckets leave nothing to overlap; empty when they leave something."""
    parameters, how = memory.process_parameters(run), run.execution
    if parameters is None:
        return "the number of buckets is not known: the arguments describe no model of this package"
    elements = sum(parameters)
    if how.num_buckets:
        bucket = elements // how.num_buckets
    else:  # Megatron's own default, resolve_ddp_bucket_size
        bucket = how.bucket_elements or max(40_000_000, 1_000_000 * run.replicas)
    if bucket * how.grad_bytes < MIN_BUCKET_BYTES:
        return f"a bucket of {bucket * how.grad_bytes / 2**20:.1f} MiB is below {MIN_BUCKET_BYTES // 2**20} MiB"
    if elements <= bucket:
        return f"one bucket of {bucket} elements holds all {elements} of a process, and is reduced after the backward"
    return ""
