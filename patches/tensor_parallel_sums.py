"""tensor-parallel-sums: gradients, their norm and smoothed losses do not depend on the number of tensor-parallel ranks.

Activate: ``megacpp_mcore.patches.apply(["tensor-parallel-sums"])`` before the model is built.
Scope: learned attention sinks (``--softmax-type learnable``); gated delta nets without sequence parallelism; label smoothing in
    ``vocab_parallel_cross_entropy``; each on several tensor-parallel ranks.

Shape legend: S sequence, B batch.
"""

from __future__ import annotations

from typing import Any

from megacpp_mcore.patches.machinery.record import Edit, Function, Patch, edit


@edit(
    "megatron.core.transformer.attention:Attention.__init__",
    "e92961c44464124f352cb0895e03902f8015b92535d9b5d23bd0d815503527ff",
    "2f932e1177b758e562298fa7107ca60f9e7bd4ccda025ca8b175851bd8987701",
)
def _marked_sinks(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace an attention's ``__init__``: sinks of a rank's heads are sharded, not copies of which the first rank's counts.

    MLA's builds a second core attention, after the one of the class that it extends.
    """
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from torch.nn import Parameter

    original(self, *args, **kwargs)
    sinks = getattr(self.core_attention, "softmax_offset", None)
    if isinstance(sinks, Parameter) and not hasattr(sinks, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(sinks, True, 0, 1)


@edit(
    "megatron.core.ssm.gated_delta_net.common:_GDNBase.__init__",
    "5673a9138ea11f9da4b06878ac3b16ea719c5999c17bdbb50ab748c5587f1ef7",
    "a8d36ad4c2901033c5e962cf4d34017ccd552559f9a2e5caa428cbbd5a1008ad",
)
def _summed_norm(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace a gated delta net's ``__init__``: ranks sum the gradients of the norm that all their heads share.

    Stock does so under sequence parallelism only. Among the gradients that it reduces otherwise are those to be averaged.
    """
    original(self, *args, **kwargs)
    if self.tp_size > 1 and not self.config.sequence_parallel:
        for parameter in self.out_norm.parameters():
            parameter.average_gradients_across_tp_domain = True
            parameter.register_hook(lambda gradient: gradient * self.tp_size)


@edit(
    "megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy",
    "a4c29cc0ff1b8d20ee5f10414b193c3a9789f7a21ccc76ed25686e659fb8a85f",
)
def _smoothed_over_all(
    original: Function, vocab_parallel_logits: Any, target: Any, label_smoothing: float = 0.0, tp_group: Any = None
) -> Any:
    """Replace ``vocab_parallel_cross_entropy``: labels are smoothed over the vocabulary of all ranks.

    With K entries, a smoothing ε gives each but the label ε / (K − 1): the loss −log p_y + ε K / (K − 1) · (x_y − mean x).
    """
    import torch
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

    group = tp_group or get_tensor_model_parallel_group()
    if not 0 < label_smoothing < 1 or group.size() == 1:
        return original(vocab_parallel_logits, target, label_smoothing, tp_group)
    own = vocab_parallel_logits.shape[-1]
    total = own * group.size()
    column_SB = target - own * group.rank()
    is_own_SB = (column_SB >= 0) & (column_SB < own)
    # Before stock, which subtracts the largest logit in place: neither keeps the logits for its gradient, as gather would.
    first_SB = torch.arange(column_SB.numel(), device=column_SB.device).view_as(column_SB) * own
    label_SB = vocab_parallel_logits.flatten()[first_SB + column_SB.clamp(0, own - 1)].float() * is_own_SB
    mean_SB = vocab_parallel_logits.sum(-1, dtype=torch.float32) / total
    above_mean_SB = reduce_from_tensor_model_parallel_region(label_SB - mean_SB, group)
    loss_SB = original(vocab_parallel_logits, target, tp_group=tp_group)
    return loss_SB + label_smoothing * total / (total - 1) * above_mean_SB


PATCH = Patch(
    name="tensor-parallel-sums",
    fixes=(
        "on several tensor-parallel ranks the norm of gradients leaves out the learned attention sinks of all but the first; a "
        "gated delta net without sequence parallelism trains its output norm with each rank's part of the gradient, and the "
        "copies drift apart; labels are smoothed over each rank's part of the vocabulary"
    ),
    source=(
        "NVIDIA/Megatron-LM#7452, findings 1, 8 and 11; megatron-core 0.19.2, megatron/core/transformer/attention.py and "
        "multi_latent_attention.py, megatron/core/ssm/gated_delta_net/common.py and "
        "megatron/core/tensor_parallel/cross_entropy.py"
    ),
    edits=(
        _marked_sinks,
        Edit(
            "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__",
            ("015b80c06519a01c9fe9def71a06b48ffa23c6da07b6da0e22657d16dd399989",),
            _marked_sinks.make,
        ),
        _summed_norm,
        _smoothed_over_all,
    ),
    seam=(
        "the __init__ of Attention and of MLA makes the core attention, Megatron's or Transformer Engine's; marks of "
        "parameters are all that the norm and the reduction of gradients read"
    ),
    leaves_alone=(
        "one tensor-parallel rank; the gradients of sinks, which are right; Megatron-FSDP; other findings: gathered "
        "logits (linear-cross-entropy), 3 (mtp-shared-block), 5 to 7 (own-groups), 9 and 10 (masked-losses)"
    ),
    cost="an all-reduce of a number a token where labels are smoothed",
    retire_when="upstream marks both parameters, and smooths over the whole vocabulary",
    upstream=(7530,),
)
