"""expert-counts: a 16-bit model counts the tokens of its experts in fp32.

Activate: applied by the spec; or ``megacpp_mcore.patches.apply(["expert-counts"])``.
Scope: every router of a run with ``--bf16`` or ``--fp16``, ours too.

A router adds each micro-batch's tokens per expert to a buffer, and every step moves the expert bias by the sign of the
differences; the global auxiliary loss divides such sums by the number of micro-batches. Float16Module turns these buffers into
16 bits, of which bf16 has 8 for a count and fp16 ends at 65,504. Stock already has a method that turns the expert bias back,
called after the wrap, before every forward pass, and around saving and loading.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, edit

_COUNTERS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


@edit(
    "megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias",
    "be11ddf7927d90f7eeed8da065d807e9dfcf88e2d56ddaa1ee3fd15e6718a12e",
)
def _with_counters(original: Function, self: Any) -> None:
    """Replace the router's ``_maintain_float32_expert_bias``: its counters, too."""
    original(self)
    for name in _COUNTERS:
        counter = getattr(self, name, None)
        if counter is not None and counter.dtype.itemsize == 2:
            counter.data = counter.data.float()


PATCH = Patch(
    name="expert-counts",
    fixes=(
        "under --bf16 a router counts the tokens of its experts in bf16: past 256 rounded, after 256 micro-batches not at all; "
        "experts' biases move the wrong way, and the global auxiliary loss is off"
    ),
    source="megatron-core 0.19.2, megatron/core/transformer/moe/router.py",
    edits=(_with_counters,),
    seam="stock calls it wherever a 16-bit bias could come from, and before anything is counted",
    leaves_alone="fp32 models; checkpoints, which hold no counts; the expert bias, which stock keeps in fp32",
    cost="nothing",
    retire_when="upstream keeps the counts in fp32",
    upstream=(7081,),
)
