"""What a model's live modules and gradient buffers say of themselves: buckets, memory, routing; for a receipt.

A module knows which function it calls, a bucket which dtype it has. Only ``overlap_grad_reduce`` is read from a configuration,
the one that the live DistributedDataParallel goes by. Written against megatron-core 0.19.2. No torch at import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megacpp_mcore.observe.receipts import backends as receipt_backends
from megacpp_mcore.observe.receipts.backends import bare


def local(chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """What the modules, the optimizer and the gradient buffers of this rank say."""
    return {
        "backends": receipt_backends.rows(chunks, optimizer),
        "parts": receipt_backends.parts(chunks),
        **_ddp(chunks),
    }


def memory(chunks: Sequence[Any]) -> dict[str, Any]:
    """Peaks of this rank so far, in bytes; the CPU lane answers with the resident set.

    The allocator counts on the host: this waits for no device, and holds also after an error.
    """
    import torch

    on_gpu = next(bare(chunks[0]).parameters()).device.type == "cuda"
    return {
        "kind": "CUDA allocator" if on_gpu else "resident set",
        "allocated_peak_bytes": int(torch.cuda.max_memory_allocated()),
        "reserved_peak_bytes": int(torch.cuda.max_memory_reserved()),
    }


def modules(chunks: Sequence[Any]) -> Iterator[Any]:
    """Every module of every chunk."""
    for chunk in chunks:
        yield from chunk.modules()


def _ddp(chunks: Sequence[Any]) -> dict[str, Any]:
    """The gradient buckets as they are in memory, and whether their DDP is configured to overlap; None where something else
    than Megatron's DDP reduces."""
    if not all(hasattr(chunk, "buffers") and hasattr(chunk, "expert_parallel_buffers") for chunk in chunks):
        return {"buckets": None, "overlap_grad_reduce": None}
    found = []
    for chunk in chunks:
        for group, buffers in (("dense", chunk.buffers), ("expert", chunk.expert_parallel_buffers)):
            for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                gradients = bucket.grad_data
                found.append(
                    {
                        "group": group,
                        "dtype": str(gradients.dtype).removeprefix("torch."),
                        "elements": gradients.numel(),
                        "bytes": gradients.numel() * gradients.element_size(),
                    }
                )
    overlaps = all(bool(chunk.ddp_config.overlap_grad_reduce) for chunk in chunks)
    return {"buckets": found, "overlap_grad_reduce": overlaps}


def moe(chunks: Sequence[Any]) -> dict[str, Any]:
    """How the MoE layers of this rank are wired: who runs the shared expert, and which dispatchers there are."""
    found: Mapping[str, set[Any]] = {"dispatchers": set(), "shared_expert_overlap": set(), "top_k": set()}
    for module in modules(chunks):
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            found["dispatchers"].add(type(dispatcher).__name__)
            found["shared_expert_overlap"].add(getattr(dispatcher, "shared_experts", None) is not None)
            found["top_k"].add(module.router.topk)
    return {name: sorted(values) for name, values in found.items()}
