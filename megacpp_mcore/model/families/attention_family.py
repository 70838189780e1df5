"""A: multi-head latent attention, full or sparse (DeepSeek sparse attention with an index cache)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    not_negative,
    not_shared,
    option,
    positive,
    product,
    switch,
)

FULL_ATTENTION, WINDOWED, FULL_INDEX, SHARED_INDEX = "-", "W", "F", "S"
ROLES = {
    FULL_ATTENTION: "full MLA, no sparse attention",
    WINDOWED: "full MLA over a sliding window",
    FULL_INDEX: "sparse attention that runs the indexer and publishes its indices",
    SHARED_INDEX: "sparse attention over the indices of the nearest Full layer below",
}
"""The role of an A layer: one character per layer in a DSA schedule."""
SPARSE = (FULL_INDEX, SHARED_INDEX)
"""The roles of sparse layers; all others are computed without absorption into latents, and have the same parameters."""

FULL_MLA, SPARSE_MLA = "+", "D"
MTP_BLOCK = "+-"
"""The hybrid pattern of one MTP depth: full MLA, then a dense feed-forward layer."""


@dataclass(frozen=True, kw_only=True)
class YaRN:
    """Rotary embedding beyond the length of earlier training (YaRN, arXiv 2309.00071), as Megatron's MLA names and computes it.

    Attributes:
        rotary_scaling_factor: by which low frequencies are slowed down; 1: plain rotary embedding.
        original_max_position_embeddings: the length of earlier training.
        beta_fast, beta_slow: rotations in that length above which a frequency stays, and below which it is fully scaled.
        mscale, mscale_all_dim: their ratio scales cosines and sines, the second also the softmax (1 and 1: DeepSeek-V3).
    """

    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "original_max_position_embeddings", "beta_slow", "mscale")
        not_negative(self, "mscale_all_dim")
        if not 1 <= self.rotary_scaling_factor < math.inf:
            raise ModelError(
                f"YaRN.rotary_scaling_factor is {self.rotary_scaling_factor}; expected 1 (plain rotary embedding) or more: "
                "the new length over original_max_position_embeddings"
            )
        if not self.beta_slow < self.beta_fast < math.inf:
            raise ModelError(f"YaRN.beta_fast is {self.beta_fast}; expected more than beta_slow ({self.beta_slow}), and finite")

    def __bool__(self) -> bool:
        return self.rotary_scaling_factor != 1


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), both latents normed.

    Attributes:
        window_size: keys before its own that a query of a ``W`` layer sees: Megatron's ``--window-size N,0``.
        yarn: scaling of the rotary embedding.
    """

    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_head_dim: int = 64
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 64
    window_size: int = 4095
    yarn: YaRN = field(default_factory=YaRN)

    def __post_init__(self) -> None:
        positive(self, *(f.name for f in dataclasses.fields(self) if f.name != "yarn"))
        divides("MLA.qk_pos_emb_head_dim", self.qk_pos_emb_head_dim, "2, for rotary pairs", 2, fixed=True)


OWN, SERVED = "own", "served"
"""The attention a DSA indexer learns from: that of its own layer, or of all layers that it serves."""


@dataclass(frozen=True, kw_only=True)
class DSA:
    """DeepSeek sparse attention (DeepSeek-V3.2 report) with an index cache (arXiv 2603.12201).

    Attributes:
        schedule: one character per A layer, tiled: ``-`` full MLA, ``W`` over a window, ``F`` runs the indexer, ``S``
            reuses its indices.
        topk: number of keys that a query attends to.
        loss_coeff: weight of the indexer's KL loss.
        distill: the attention an indexer is trained against: ``served``, the mean over its own layer and the Shared layers it
            serves (multi-layer distillation), or ``own``, its own layer only. Without Shared layers these are the same.
        warmup_steps: initial steps in which sparse layers attend to every causal key, and the indexer of a Full layer learns
            that attention (DeepSeek-V3.2 report, dense warm-up); 0: none.
    """

    schedule: str = "-FSS"
    indexer_heads: int = 32
    indexer_head_dim: int = 64
    topk: int = 256
    loss_coeff: float = 1e-3
    distill: str = SERVED
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        positive(self, "indexer_heads", "indexer_head_dim", "topk")
        not_negative(self, "loss_coeff", "warmup_steps")
        if self.distill not in (OWN, SERVED):
            raise ModelError(
                f"DSA.distill is {self.distill!r}; expected {SERVED} (the indexer of an F layer learns from it and its S "
                f"layers) or {OWN} (from the F layer only)"
            )


def mla_projections(tokens: int, hidden: int, heads: int, mla: MLA, *, query_latent: bool = True) -> Work:
    """Count everything in an MLA layer except its core: down, up and output projections, absorbed or not.

    ``query_latent`` False: queries are projected in one step.
    """
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    q = mla.q_lora_rank * (hidden + queries) if query_latent else hidden * queries
    kv = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    kv += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return product(tokens * (q + kv + heads * mla.v_head_dim * hidden))


def mla_up_projections(tokens: int, heads: int, mla: MLA, *, absorbed: bool) -> Work:
    """Count the part of :func:`mla_projections` from the latents to the core's inputs.

    With absorption, the key up-projection is applied to the queries, and the value up-projection comes after the core.
    """
    queries = mla.q_lora_rank * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    keys_and_values = mla.kv_lora_rank * heads * (mla.qk_head_dim + (0 if absorbed else mla.v_head_dim))
    return product(tokens * (queries + keys_and_values))


def mla_value_up_projection(tokens: int, heads: int, mla: MLA) -> Work:
    """Count the part of :func:`mla_projections` from an absorbed core's latents to its values."""
    return product(tokens * mla.kv_lora_rank * heads * mla.v_head_dim)


def full_core(pairs: int, heads: int, mla: MLA) -> Work:
    """Count the softmax attention of full MLA: scores and weighted values."""
    return product(pairs * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim))


def sparse_core(pairs: int, heads: int, mla: MLA) -> Work:
    """Count softmax attention over latents, in the absorbed form, where all heads read the same latent."""
    return product(pairs * heads * (2 * mla.kv_lora_rank + mla.qk_pos_emb_head_dim))


def indexer(tokens: int, scored: int, trained: int | None, *, hidden: int, q_lora_rank: int, heads: int, head_dim: int) -> Work:
    """Count a DSA indexer: its three projections, the scores of ``scored`` pairs, and their sum over heads.

    Its input is detached, so a projection has a gradient only for its weight. Its loss reaches the scores of only ``trained``
    pairs (the selected ones with the sparse loss); None means that it is not trained and has no backward. The attention
    probabilities that it is trained against are by-products of the core or, with the dense loss, not counted.
    """
    projections = tokens * (q_lora_rank * heads * head_dim + hidden * (head_dim + heads))
    per_pair = heads * (head_dim + 1)
    backward = 0 if trained is None else 2 * projections + 4 * trained * per_pair
    return Work(2 * (projections + scored * per_pair), backward)


def _parameters(shape: Shape, role: str | None, mla: MLA, dsa: DSA) -> Count:
    hidden, heads = shape.hidden_size, shape.heads
    down = hidden * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    up = mla.q_lora_rank * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    up += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    whole = hidden + down + mla.q_lora_rank + mla.kv_lora_rank
    if role == FULL_INDEX:  # the indexer's
        whole += mla.q_lora_rank * dsa.indexer_heads * dsa.indexer_head_dim
        whole += hidden * (dsa.indexer_head_dim + dsa.indexer_heads) + 2 * dsa.indexer_head_dim
    return Count(tensor=up + heads * mla.v_head_dim * hidden, whole=whole)


def _work(shape: Shape, role: str | None, rows: Batch, mla: MLA, dsa: DSA) -> dict[str, Work]:
    hidden, heads = shape.hidden_size, shape.heads
    projections = {"attention_projections": mla_projections(rows.tokens, hidden, heads, mla)}
    if role not in SPARSE:
        pairs = rows.windowed_pairs if role == WINDOWED else rows.causal_pairs
        return projections | {"attention_core": full_core(pairs, heads, mla)}
    works = projections | {"attention_core": sparse_core(rows.selected_pairs, heads, mla)}
    if role == FULL_INDEX:
        trained = rows.selected_pairs if dsa.loss_coeff else None
        sizes = {"q_lora_rank": mla.q_lora_rank, "heads": dsa.indexer_heads, "head_dim": dsa.indexer_head_dim}
        works["indexer"] = indexer(rows.tokens, rows.causal_pairs, trained, hidden=hidden, **sizes)
    return works


def _kept(shape: Shape, role: str | None, mla: MLA, dsa: DSA) -> tuple[int, int]:
    """Count projections before and after their rotation; what flash pads to the width of keys; the selection and its target."""
    query, latents = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.q_lora_rank + mla.kv_lora_rank
    if role in SPARSE:
        absorbed = 2 * mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        indexer = dsa.indexer_heads * (dsa.indexer_head_dim + 1) + dsa.indexer_head_dim if role == FULL_INDEX else 0
        return 2 * shape.heads * (query + absorbed + mla.v_head_dim) + 8 * dsa.topk + 2 * indexer + 4 * latents, 0
    values = 2 * query + mla.v_head_dim if role == WINDOWED else 2 * mla.v_head_dim
    return 2 * shape.heads * (2 * query + values) + 4 * latents, 0


def _check(shape: Shape, mla: MLA, dsa: DSA) -> None:
    if dsa.indexer_head_dim < mla.qk_pos_emb_head_dim:
        raise ModelError(
            f"{shape.name}: DSA.indexer_head_dim is {dsa.indexer_head_dim}, less than the rotary "
            f"part MLA.qk_pos_emb_head_dim ({mla.qk_pos_emb_head_dim}) that it has to hold; raise it"
        )


def _positions(yarn: YaRN) -> list[Argument]:
    """Return the arguments of the rotary embedding; the rest of YaRN has no flag, and a spec sets it."""
    if yarn:
        return [
            option("--rope-type", "yarn"),
            option("--rotary-scaling-factor", float(yarn.rotary_scaling_factor)),
            option("--mscale", float(yarn.mscale)),
            option("--mscale-all-dim", float(yarn.mscale_all_dim)),
        ]
    return [
        option("--rope-type", "rope"),
        absent("--rotary-scaling-factor", "rotary_scaling_factor", 1.0),
        absent("--mscale", "mscale", 1.0),
        absent("--mscale-all-dim", "mscale_all_dim", 0.0),  # scales the softmax, whatever the rope type
    ]


def _has_window(shape: Shape) -> bool:
    return WINDOWED in (*shape.roles, shape.mtp_role)


def _windows(shape: Shape, mla: MLA) -> list[Argument]:
    if not _has_window(shape):
        return [
            absent("--window-size", "window_size", None),
            absent("--window-attn-skip-freq", "window_attn_skip_freq", None),
        ]
    windowed = [int(role == WINDOWED) for role in shape.roles]
    words = ("--window-attn-skip-freq", "[" + ",".join(map(str, windowed)) + "]")
    size = f"{mla.window_size},0"
    return [
        Argument(("--window-size", size), "window_size", [mla.window_size, 0], f"--window-size {size}"),
        Argument(words, "window_attn_skip_freq", windowed, " ".join(words)),
    ]


def _arguments(shape: Shape, mla: MLA, dsa: DSA) -> Sequence[Argument]:
    arguments = [
        switch("--multi-latent-attention", "multi_latent_attention", True),
        switch("--qk-layernorm", "qk_layernorm", True),
        *_positions(mla.yarn),
        option("--q-lora-rank", mla.q_lora_rank),
        option("--kv-lora-rank", mla.kv_lora_rank),
        option("--qk-head-dim", mla.qk_head_dim),
        option("--qk-pos-emb-head-dim", mla.qk_pos_emb_head_dim),
        option("--v-head-dim", mla.v_head_dim),
        absent("--rotary-percent", "rotary_percent", 1.0),
        absent("--rotary-interleaved", "rotary_interleaved", False),
        *_windows(shape, mla),
        absent("--softmax-type", "softmax_type", "vanilla"),
        absent("--attention-output-gate", "attention_output_gate", False),
        absent("--group-query-attention", "num_query_groups", shape.heads),
        absent("--no-rope-freq", "no_rope_freq", None),
        absent("--qk-l2-norm", "qk_l2_norm", False),
        absent("--kv-channels", "kv_channels", shape.hidden_size // shape.heads),
        absent("--qk-clip", "qk_clip", False),
        absent("--log-max-attention-logit", "log_max_attention_logit", False),
        absent("--mla-down-proj-fusion", "mla_down_proj_fusion", False),
    ]
    if set(shape.roles) & set(SPARSE):
        arguments += [
            option("--dsa-indexer-n-heads", dsa.indexer_heads),
            option("--dsa-indexer-head-dim", dsa.indexer_head_dim),
            option("--dsa-indexer-topk", dsa.topk),
            option("--dsa-indexer-loss-coeff", dsa.loss_coeff),
            switch("--dsa-indexer-use-sparse-loss", "dsa_indexer_use_sparse_loss", True),
            switch("--no-dsa-indexer-rotate-activation", "dsa_indexer_rotate_activation", False),
            absent("--no-dsa-indexer-scoring-relu", "dsa_indexer_scoring_relu", True),
            absent("--dsa-indexer-rope-interleaved", "dsa_indexer_rope_interleaved", False),
            absent("--dsa-indexer-k-norm-epsilon", "dsa_indexer_k_norm_epsilon", None),
            absent("--dsa-indexer-k-norm-fp32", "dsa_indexer_k_norm_fp32", False),
            # Not upstream's index sharing and kernels: the model sets the schedule, the dispatcher chooses the backend.
            absent("--dsa-indexer-topk-freq", "dsa_indexer_topk_freq", 1),
            absent("--dsa-indexer-skip-topk-offset", "dsa_indexer_skip_topk_offset", 0),
            absent("--dsa-kernel-backend", "dsa_kernel_backend", "none"),
        ]
    return arguments


def _scoped(shape: Shape, _: str | None, tokens: int, mla: MLA, __: DSA) -> tuple[str, Work]:
    """Count what is outside of a scope: all but the output projection."""
    projections = mla_projections(tokens, shape.hidden_size, shape.heads, mla)
    output = product(tokens * shape.heads * mla.v_head_dim * shape.hidden_size)
    return "attention_projections", Work(projections.forward - output.forward, projections.backward - output.backward)


def _card(shape: Shape, mla: MLA, dsa: DSA) -> dict[str, str]:
    return {
        "MLA heads": f"{shape.heads}",
        "MLA latents, q and kv": f"{mla.q_lora_rank}, {mla.kv_lora_rank}",
        "MLA head widths, qk + rotary, v": f"{mla.qk_head_dim} + {mla.qk_pos_emb_head_dim}, {mla.v_head_dim}",
        "MLA window, `W`": f"{mla.window_size + 1}" if _has_window(shape) else "none",
        "YaRN factor": f"{mla.yarn.rotary_scaling_factor:g}" if mla.yarn else "none",
        "DSA top-k": f"{dsa.topk}",
        "DSA indexer": f"{dsa.indexer_heads} × {dsa.indexer_head_dim}",
    }


_SLOTS = (
    Slot(FULL_MLA, "mla_layer", "multi-head latent attention", True,
         "stock MLASelfAttention; the core attention is ours, as stock's takes no unequal head widths without Transformer "
         "Engine"),
    Slot(SPARSE_MLA, "dsa_layer", "DeepSeek sparse attention", True,
         "stock AbsorbedMLASelfAttention and DSAIndexer; the core attention is ours, with the index cache between Full and "
         "Shared layers, which one spec a slot cannot tell apart: they are told apart by layer number"),
    Slot(MTP_BLOCK, None, "multi-head latent attention, then a dense feed-forward layer", True,
         "the shared MTP block, one TransformerLayer of stock MLA and stock MLP: the same computation as two layers, under the "
         "names that GPTModel has"),
)  # fmt: skip

ATTENTION = Family(
    letter="A",
    name="attention (MLA, full or with DeepSeek sparse attention)",
    part="A attention",
    group="attention",
    fields=("mla", "dsa"),
    no_context=lambda shape, tensor, context, *_: not_shared("attention heads", shape.heads, tensor, context),
    slots=_SLOTS,
    parameters=_parameters,
    works=("attention_projections", "attention_core", "indexer"),
    kept=_kept,
    work=_work,
    check=_check,
    arguments=_arguments,
    in_fp32="selection of keys",
    recompute="a",  # the attention of A layers and of the MTP block: projections, latent norms, core attention
    recomputed=("attention_projections", "attention_core", "indexer"),
    repeated_by=frozenset({"core_attn", "mla_up_proj"}),
    fp8="attention",
    scoped=_scoped,
    card=_card,
    papers=(
        ("A", "multi-head latent attention", "DeepSeek-V2", "2405.04434"),
        (
            "A, `F` and `S`",
            "DeepSeek sparse attention: an indexer chooses each query's keys",
            "DeepSeek-V3.2",
            "2512.02556",
        ),
        ("A, `S`", "a layer attends to the indices of an earlier one", "IndexCache", "2603.12201"),
    ),
)
