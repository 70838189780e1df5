"""The router of an E layer: stock's, with top-k, probabilities and the sums of its losses computed by one op of ours.

Shape legend: S sequence, B batch, T tokens (S × B), D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, RouterGatingLinearFunction
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megacpp_mcore.ops.router.reference import Routed

_LOSS = "seq_aux_loss"


def why_stock_router(config: TransformerConfig) -> str | None:
    """Name the first requested feature that only stock's router supports, or None."""
    for requested, feature in (
        (config.moe_router_topk == 1, "--moe-router-topk 1"),
        (config.moe_enable_routing_replay, "--moe-enable-routing-replay"),
        (config.moe_router_fusion, "--moe-router-fusion"),
    ):
        if requested:
            return feature
    return None


class Router(TopKRouter):
    """Stock's router on the op ``router``; parameters, losses, logging and the expert bias stay stock's.

    Args:
        route: a backend of the op (:func:`megacpp_mcore.ops.router.reference.route`).
    """

    follows_transformer_impl = False  # read for receipts: the dispatcher chooses its function

    def __init__(self, config: TransformerConfig, *args: Any, route: Callable[..., Routed], **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.route = route

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return logits ``[S, B, E]`` in fp32, bit-identical to stock's."""
        on_gpu = input.is_cuda and self.weight.is_cuda  # stock moves a CPU weight to the GPU
        if on_gpu and input.dtype == self.weight.dtype == torch.bfloat16 and self.bias is None:
            return Gating.apply(input, self.weight, None, torch.float32)
        return super().gating(input)

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and routing map, both ``[T, E]``, of logits ``[S, B, E]``; by stock with a padding mask."""
        if padding_mask is not None:
            return super().routing(logits, padding_mask)
        batch, grad = logits.shape[1], torch.is_grad_enabled()
        routed = self.route(logits.flatten(0, 1), self.expert_bias, topk=self.topk, batch=batch)
        probs_TE = routed.probs_TE
        if self.training and grad:
            if self.config.moe_z_loss_coeff is not None:
                probs_TE = self._with_z_loss(probs_TE, routed.squared)
            if (coefficient := self.get_aux_loss_coeff(_LOSS)) > 0:
                probs_TE = self._with_sequence_loss(probs_TE, routed, batch, coefficient)
        if self.enable_expert_bias and grad:
            self.local_tokens_per_expert += routed.load_E
        return probs_TE, routed.routing_TE

    def _with_z_loss(self, probs_TE: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        """Return ``probs_TE`` with the z-loss attached to its backward pass (stock's ``apply_z_loss``)."""
        config, tokens, ranks = self.config, probs_TE.shape[0], self.tp_cp_group.size()
        mean = squared / tokens
        weight = config.moe_z_loss_coeff / ranks * (tokens * ranks if self.calculate_per_token_loss else 1)
        depths, number = config.mtp_num_layers or 0, self.layer_number
        if self.is_mtp_layer:
            number += config.num_layers
        logged = mean / depths if self.is_mtp_layer and config.mtp_use_repeated_layer and depths else mean
        get_moe_metrics_tracker().record("z_loss", logged, number, config.num_layers + depths, avg_group=self.tp_dp_cp_group)
        return MoEAuxLossAutoScaler.apply(probs_TE, mean * weight)

    def _with_sequence_loss(self, probs_TE: torch.Tensor, routed: Routed, batch: int, coefficient: float) -> torch.Tensor:
        """Return ``probs_TE`` with the sequence-level auxiliary loss attached (stock's ``_apply_seq_aux_loss``)."""
        tokens = probs_TE.shape[0]
        best_BE = reduce_from_tensor_model_parallel_region(routed.best_BE, self.tp_cp_group)
        rows = tokens // batch * self.tp_cp_group.size()
        scale = self.config.num_moe_experts * coefficient / (self.topk * rows * rows) / batch
        aux_loss = (routed.score_BE * best_BE).sum() * scale
        return self.attach_and_log_load_balancing_loss(
            probs_TE, coefficient, aux_loss, "seq_load_balancing_loss", self.tp_cp_group, valid_token_count=tokens
        )


class Gating(RouterGatingLinearFunction):
    """Stock's router GEMM with fp32 output; here the gradient GEMMs also have bf16 operands.

    The fp32 gradient of the logits is split into a sum of two bf16 numbers, accurate to 2^-17; concatenated they are one
    operand, and no fp32 copy of the rows is needed.
    """

    @staticmethod
    def backward(ctx: Any, dlogits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Return gradients w.r.t. the rows ``[S, B, D]`` and the router weight ``[E, D]``."""
        rows_SBD, weight_ED, _ = ctx.saved_tensors
        rows_TD, dlogits_TE = rows_SBD.flatten(0, -2), dlogits.flatten(0, -2)
        high_TE = dlogits_TE.to(rows_TD.dtype)
        parts_TE2 = torch.cat([high_TE, (dlogits_TE - high_TE).to(rows_TD.dtype)], dim=1)
        drows_TD = parts_TE2 @ weight_ED.repeat(2, 1)
        dweight_2ED = torch.mm(parts_TE2.t(), rows_TD, out_dtype=torch.float32).unflatten(0, (2, -1))
        return drows_TD.view_as(rows_SBD), dweight_2ED.sum(0).to(weight_ED.dtype), None, None
