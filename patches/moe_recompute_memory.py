"""moe-recompute-memory: under full recompute a layer with experts leaves nothing behind once its backward pass has run.

Activate: ``megacpp_mcore.patches.apply(["moe-recompute-memory"])``.
Scope: every MoELayer with a token dispatcher, in training.

A dispatcher keeps the probabilities of its last call as an attribute, and with them the graph that has computed them. Its
saved tensors are freed by the backward pass; but at the end of a recomputed graph is the copy of the layer's input, with its
gradient. Upstream's change for this (#5197, in main) deletes local variables of ``unpermute`` right before it returns; the
layer keeps as much with it.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, edit


@edit(
    "megatron.core.transformer.moe.moe_layer:MoELayer.postprocess",
    "af955e30825526623d4a1ec550d4483763991f11b53a01d38ba4996f0d4c77c0",
)
def _without_graphs(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``MoELayer.postprocess``, the last use of a dispatcher in a forward pass."""
    output = original(self, *args, **kwargs)
    for holder in (self.token_dispatcher, getattr(self.token_dispatcher, "_comm_manager", None)):
        for name, value in dict(getattr(holder, "__dict__", {})).items():
            if getattr(value, "grad_fn", None) is not None:
                setattr(holder, name, value.detach())
    return output


PATCH = Patch(
    name="moe-recompute-memory",
    fixes=(
        "under full recompute every layer with experts keeps its input and the gradient of it until its next forward pass, "
        "which is what recompute is to save"
    ),
    source="NVIDIA/Megatron-LM#3221; megatron-core 0.19.2, megatron/core/transformer/moe/token_dispatcher.py",
    edits=(_without_graphs,),
    seam="postprocess is the last use of a dispatcher in a forward pass, whichever it is, also where it is recomputed",
    leaves_alone="what a backward pass needs, which its graph holds by itself; values of the attributes",
    cost="microseconds of the host for a layer",
    gain="in fp32 on a CPU, by count: two tensors of the hidden states' size for a layer with experts",
    retire_when="dispatchers keep no graph",
)
