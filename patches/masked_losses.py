"""masked-losses: losses do not depend on which rank holds the tokens that count.

Activate: applied by ``--spec megacpp_mcore nam56r``; or ``megacpp_mcore.patches.apply(["masked-losses"])``.
Scope: loss functions that return a number of tokens, under context parallelism, where losses are not by token; losses that
    balance experts by token (``--calculate-per-token-loss``) with a padding mask, on several tensor- or context-parallel ranks.
"""

from __future__ import annotations

from inspect import BoundArguments
from typing import Any

from megacpp_mcore.patches.machinery.record import Function, Patch, bound_replacement, edit


@edit(
    "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
    "9990d300271b7dfc071737061e8ff478591140befafc5938967906fe9cd73d67",
    make=bound_replacement,
)
def _by_all_counted(original: Function, bound: BoundArguments) -> Any:
    """Replace ``forward_step_calc_loss``: a micro-batch's loss is a mean over the tokens of all context-parallel ranks.

    Stock divides a rank's sum by the rank's own count, and the ranks are averaged. A loss function that has done this itself
    stays as it is: both of its numbers get the same factor. Without gradients, as in evaluation, nothing reads the quotient,
    and data that is not a loss is collected on one rank only: there nothing is exchanged.
    """
    import torch
    from megatron.core.parallel_state import get_context_parallel_group

    group = get_context_parallel_group(check_initialized=False)
    function, ranks = bound.arguments["loss_func"], bound.arguments.get("cp_group_size")
    is_loss = function is not None and not bound.arguments["collect_non_loss_data"] and torch.is_grad_enabled()
    is_single = ranks == 1 or group is None or group.size() == 1
    if not is_loss or is_single or bound.arguments["config"].calculate_per_token_loss:
        return original(*bound.args, **bound.kwargs)
    size = group.size()

    def of_all_ranks(*inputs: Any, **more: Any) -> Any:
        outputs = function(*inputs, **more)
        if not isinstance(outputs, tuple) or len(outputs) != 3 or ranks not in (None, size):
            return outputs
        loss, tokens, logged = outputs
        total = tokens.to(loss.device, copy=True)
        torch.distributed.all_reduce(total, group=group)
        return loss * size, total, logged

    bound.arguments["loss_func"] = of_all_ranks
    return original(*bound.args, **bound.kwargs)


@edit(
    "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
    "53bdcd7e667279224f635f9b08963c65fc900501976cff9ac6243e1584b11bbe",
)
def _same_count_on_all(
    original: Function, routing_map: Any, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
) -> Any:
    """Replace ``get_tokens_per_expert_and_token_count``: with a mask, a rank's count is the mean over the ranks.

    Each rank has a part of the gradient of one loss, so that all need the same factor. Stock sums the ranks' counts in place,
    and takes the sum for the rank's own.
    """
    per_expert, own, total = original(routing_map, reduce_group, topk, with_padding_mask)
    return per_expert, total / reduce_group.size() if with_padding_mask else own, total


PATCH = Patch(
    name="masked-losses",
    fixes=(
        "under context parallelism, where ranks have unequal numbers of tokens that count, the loss is a mean of their means; "
        "with a padding mask on several tensor- or context-parallel ranks, losses by token balance experts as many times too "
        "strongly"
    ),
    source=(
        "NVIDIA/Megatron-LM#7452, findings 9 and 10; megatron-core 0.19.2, megatron/core/pipeline_parallel/schedules.py and "
        "megatron/core/transformer/moe/moe_utils.py"
    ),
    edits=(_by_all_counted, _same_count_on_all),
    seam="both functions get, or return, the number of tokens by which a loss is divided or multiplied",
    leaves_alone=(
        "logged losses, evaluation; loss functions that return no number of tokens; losses by token of the main head, which "
        "are right; context-parallel groups of another size than the process's; MTP (mtp-shared-block)"
    ),
    cost="under context parallelism an all-reduce of one number a micro-batch; not measured",
    retire_when="upstream counts over the context-parallel ranks, and before it sums",
    upstream=(7513, 7481),
)
