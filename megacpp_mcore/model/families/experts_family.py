"""E: a mixture of routed experts, and a shared one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model.families.base import (
    Argument,
    Batch,
    Count,
    Family,
    Shape,
    Slot,
    Work,
    absent,
    divides,
    feed_forward,
    not_negative,
    option,
    positive,
    product,
    switch,
)


@dataclass(frozen=True, kw_only=True)
class MoE:
    """Mixture of experts: sigmoid scores, renormalised top-k weights, expert-bias balancing, dropless, GELU.

    Attributes:
        bias_update_rate: change of an expert's bias per step. DeepSeek-V3's 1e-3 needs some hundred steps to overcome the
            differences between scores, and leaves experts in deep layers idle meanwhile (docs/model.md).
    """

    experts: int = 16
    topk: int = 4
    ffn_hidden_size: int = 896
    shared_ffn_hidden_size: int = 1024
    bias_update_rate: float = 1e-2
    sequence_aux_loss_coeff: float = 1e-4
    z_loss_coeff: float = 1e-3

    def __post_init__(self) -> None:
        positive(self, "experts", "topk", "ffn_hidden_size", "shared_ffn_hidden_size")
        not_negative(self, "bias_update_rate", "sequence_aux_loss_coeff", "z_loss_coeff")
        if self.topk > self.experts:
            raise ModelError(f"MoE.topk is {self.topk} but there are {self.experts} experts; lower topk")


def _parameters(shape: Shape, _: str | None, moe: MoE) -> Count:
    hidden = shape.hidden_size
    return Count(
        expert=2 * hidden * moe.experts * moe.ffn_hidden_size,
        whole=hidden + hidden * moe.experts + 2 * hidden * moe.shared_ffn_hidden_size,
    )


def _work(shape: Shape, _: str | None, rows: Batch, moe: MoE) -> dict[str, Work]:
    tokens, hidden = rows.tokens, shape.hidden_size
    return {
        "router": product(tokens * hidden * moe.experts),
        "routed_experts": feed_forward(tokens * moe.topk, hidden, moe.ffn_hidden_size),
        "shared_experts": feed_forward(tokens, hidden, moe.shared_ffn_hidden_size),
    }


def _kept(_: Shape, __: str | None, moe: MoE) -> tuple[int, int]:
    """Count the inner rows of routed experts, in 16 bits before GELU; and those of the shared one before and after."""
    return 2 * moe.topk * moe.ffn_hidden_size, 4 * moe.shared_ffn_hidden_size


def _check_layout(shape: Shape, tensor: int, expert: int, moe: MoE) -> None:
    divides(f"{shape.name}: experts", moe.experts, "expert parallelism", expert)
    divides(f"{shape.name}: shared expert width", moe.shared_ffn_hidden_size, "tensor parallelism", tensor)


def _arguments(shape: Shape, moe: MoE) -> Sequence[Argument]:
    moe_layers = [int(letter == "E") for letter in shape.layers]
    frequency = "[" + ",".join(map(str, moe_layers)) + "]"
    return [
        option("--num-experts", moe.experts, "num_moe_experts"),
        Argument(("--moe-layer-freq", frequency), "moe_layer_freq", moe_layers, f"--moe-layer-freq {frequency}"),
        option("--moe-router-topk", moe.topk),
        option("--moe-ffn-hidden-size", moe.ffn_hidden_size),
        option("--moe-shared-expert-intermediate-size", moe.shared_ffn_hidden_size),
        option("--moe-router-score-function", "sigmoid"),
        option("--moe-router-dtype", "fp32"),
        switch("--moe-router-enable-expert-bias", "moe_router_enable_expert_bias", True),
        option("--moe-router-bias-update-rate", moe.bias_update_rate),
        option("--moe-router-load-balancing-type", "seq_aux_loss"),
        option("--moe-aux-loss-coeff", moe.sequence_aux_loss_coeff),
        option("--moe-z-loss-coeff", moe.z_loss_coeff),
        absent("--moe-expert-capacity-factor", "moe_expert_capacity_factor", None),
        absent("--moe-expert-rank-capacity-factor", "moe_expert_rank_capacity_factor", None),
        absent("--moe-pad-expert-input-to-capacity", "moe_pad_expert_input_to_capacity", False),
        absent("--moe-router-force-load-balancing", "moe_router_force_load_balancing", False),
        absent("--moe-router-force-biased", "moe_router_force_biased", None),
        absent("--moe-router-num-groups", "moe_router_num_groups", None),
        absent("--moe-router-topk-scaling-factor", "moe_router_topk_scaling_factor", None),
        absent("--moe-shared-expert-gate", "moe_shared_expert_gate", False),
        absent("--moe-latent-size", "moe_latent_size", None),
        absent("--moe-apply-probs-on-input", "moe_apply_probs_on_input", False),
        absent("--moe-input-jitter-eps", "moe_input_jitter_eps", None),
        # Each chunk would add the routers' losses whole.
        absent("--mlp-chunks-for-training", "mlp_chunks_for_training", 1),
    ]


def _card(_: Shape, moe: MoE) -> dict[str, str]:
    return {
        "experts, top-k": f"{moe.experts}, {moe.topk}",
        "expert width, routed, shared": f"{moe.ffn_hidden_size}, {moe.shared_ffn_hidden_size}",
    }


_WHY = "stock MoELayer; its router and its routed experts are ours"
EXPERTS = Family(
    letter="E",
    name="mixture of experts",
    part="E experts",
    group="expert",
    fields=("moe",),
    is_mixer=False,
    slots=(Slot("E", "moe_layer", "mixture of experts", True, _WHY),),
    parameters=_parameters,
    works=("router", "routed_experts", "shared_experts"),
    work=_work,
    check_layout=_check_layout,
    no_context=lambda *_: "",
    arguments=_arguments,
    without=(absent("--num-experts", "num_moe_experts", None),),
    in_fp32="router",
    kept=_kept,
    recompute="experts",  # the expert GEMMs and their activation, not routing, communication or the shared expert
    recomputed=("routed_experts",),
    repeated_by=frozenset({"moe", "moe_act"}),
    fp8="shared_experts",
    scoped=lambda *_: ("shared_experts", Work()),
    card=_card,
    papers=(("E", "routed and shared experts, balanced by a bias of each", "DeepSeek-V3", "2412.19437"),),
)
