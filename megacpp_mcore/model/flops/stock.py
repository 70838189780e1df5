"""Megatron's own count for the same model and batch, as the sum of ours and of named differences; no torch, no Megatron.

Source: megatron-core 0.19.2 ``megatron/training/training.py``, ``num_floating_point_operations``, which counts the model
that a run's arguments describe and not the one that its spec builds. Checked against that function itself
(tests/model/test_flops_stock.py). Legend: S sequence, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Model
from megacpp_mcore.model import pattern as grammar
from megacpp_mcore.model.flops import count as flops
from megacpp_mcore.model.flops.count import Families, Step
from megacpp_mcore.model.training import GPT, HYBRID


@dataclass(frozen=True)
class Difference:
    """One reason why Megatron's count of training differs, and by how much.

    Attributes:
        reason: in words.
        flops: what Megatron has more (negative: less) than ours, in operations of training.
    """

    reason: str
    flops: int


def differences(
    model: Model, batch: int = 1, *, seq_length: int | None = None, vocab_size: int | None = None, host: str = GPT
) -> tuple[Difference, ...]:
    """All differences of a run of ``model`` on stock's ``host``, in training operations of ``batch`` unpacked rows.

    Their sum and ``flops.step(…).total.training`` are Megatron's figure, exactly. Arguments as there; ``host`` is ``gpt`` or
    ``hybrid``.

    Raises:
        ModelError: as there, or another host.
    """
    if host not in (GPT, HYBRID):
        raise ModelError(f"host is {host!r}; expected {GPT} or {HYBRID}")
    sequence = model.seq_length if seq_length is None else seq_length
    ours = flops.step(model, batch, seq_length=sequence, vocab_size=vocab_size)
    found = (_on_gpt if host == GPT else _on_hybrid)(model, batch, sequence, ours)
    return tuple(each for each in found if each.flops)


def _on_gpt(model: Model, batch: int, sequence: int, ours: Step) -> list[Difference]:
    """A GPT of as many layers, each MLA and a feed-forward part, experts by ``--moe-layer-freq``."""
    tokens, mla, depths, hidden = batch * sequence, model.mla, model.mtp.depth, model.hidden_size
    attention = flops.mla_projections(tokens, hidden, model.heads, mla).training
    widths = mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim
    core = 3 * batch * sequence**2 * model.heads * widths
    exact = flops.full_core(batch * flops.causal_pairs(sequence), model.heads, mla).training
    dense = flops.feed_forward(tokens, hidden, model.ffn_hidden_size).training
    experts = flops.feed_forward(tokens * model.moe.topk, hidden, model.moe.ffn_hidden_size).training
    experts += flops.feed_forward(tokens, hidden, model.moe.shared_ffn_hidden_size).training
    sparse = sum(role in (grammar.FULL_INDEX, grammar.SHARED_INDEX) for role in model.roles)
    full = model.roles.count(grammar.FULL_ATTENTION) + depths
    others = model.depth - model.layers.count("A")
    of_sparse = [part for part, role in zip(ours.layers, model.roles, strict=True) if role in ("F", "S")]
    mtp_as_experts = depths * (experts - dense) if model.layers[-1] == "E" else 0
    norms = 6 * tokens * ((mla.q_lora_rank + mla.kv_lora_rank) * (model.depth + depths) + 3 * hidden * depths)
    return [
        Difference(f"{others} M, E and R layers counted as MLA attention", others * (attention + core)),
        Difference(
            f"{model.depth - model.layers.count('E')} A, M and R layers counted with a dense feed-forward part",
            (model.depth - model.layers.count("E")) * dense,
        ),
        Difference("MTP depths counted with experts, as the last layer, not with their dense part", mtp_as_experts),
        Difference(
            f"{sparse} sparse attention cores counted as full ones",
            sparse * core - sum(part.attention_core.training for part in of_sparse),
        ),
        Difference("S²/2 pairs of full attention in place of S(S+1)/2", full * (core - exact)),
        *_not_counted(ours.families, ("indexer", "mamba_projections", "mamba_scan", *_RECURRENT, "router")),
        Difference("weights of the latents' and MTP's norms counted as matrices", norms),
    ]


def _on_hybrid(model: Model, batch: int, sequence: int, ours: Step) -> list[Difference]:
    """A hybrid of Mamba-2, gated delta net, expert and dense layers; Megatron does not count MLA and sparse attention."""
    tokens, families, hidden = batch * sequence, ours.families, model.hidden_size
    mamba, deltas = model.layers.count("M"), model.layers.count("R")
    as_mamba2 = mamba * _mamba2(tokens, hidden) - (families.mamba_projections + families.mamba_scan).training
    recurrent = sum(getattr(families, name).training for name in _RECURRENT)
    return [
        *_not_counted(families, ("attention_projections", "attention_core", "indexer", "router", "mtp_projection")),
        Difference(f"{mamba} Mamba-3 layers counted as Mamba-2 of Megatron's default sizes", as_mamba2),
        Difference(
            f"{deltas} M²RNN layers counted as gated delta nets of Megatron's default sizes",
            deltas * _gated_delta_net(tokens, hidden) - recurrent,
        ),
    ]


_RECURRENT = ("recurrent_projections", "convolution", "recurrence")


def _not_counted(families: Families, names: tuple[str, ...]) -> list[Difference]:
    return [Difference(f"{name.replace('_', ' ')} not counted", -getattr(families, name).training) for name in names]


def _mamba2(tokens: int, hidden: int, *, state: int = 128, head_dim: int = 64, groups: int = 8) -> int:
    """Training of one Mamba-2 layer as Megatron counts it, with its default ``--mamba-*`` sizes; the scan is 7 per state."""
    inner = 2 * hidden
    projections = 2 * hidden * (2 * inner + 2 * groups * state + inner // head_dim + inner)
    return 3 * tokens * (projections + 7 * inner * state)


def _gated_delta_net(tokens: int, hidden: int, *, head: int = 128, keys: int = 16, values: int = 32) -> int:
    """Training of one gated delta net as Megatron counts it, with its default ``--linear-*`` sizes and a kernel of 4."""
    qk, v = head * keys, head * values
    inputs, outputs = hidden * (2 * qk + 2 * v + 2 * values), hidden * v
    return 6 * tokens * (inputs + 4 * (2 * qk + v) + 4 * values * head**2 + outputs)
