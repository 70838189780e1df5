"""``recipe list --markdown``: the page docs/model-card.md, every figure of it computed from the models themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megacpp_mcore.model import OWN, PRESETS, SERVED, Model, flops, hybrid
from megacpp_mcore.model.pattern import ROLES

_PARTS = {
    "A": "A attention",
    "M": "M Mamba-3",
    "E": "E experts",
    "R": "R M²RNN",
    "mtp": "MTP block (one, shared)",
    "embedding": "embedding",
    "head": "output head",
    "norm": "final norm",
}
_DISTILL = {
    SERVED: "the mean attention of the layers it serves",
    OWN: "its own layer's attention",
}

_HEAD = """# Model card

Written by `megacpp-mcore recipe list --markdown` from the models in `megacpp_mcore/model/definition.py`; do not edit it
by hand. Parameters are counted from the definition's shapes, with the vocabulary padded as Megatron pads it; FLOPs by
`megacpp_mcore/model/flops/count.py`, a multiply-add as two, nothing recomputed.

What has been trained with this package so far are tests, demos and benchmarks: there are no released weights, and no claim
about the quality of a trained model."""
_SOURCES = (
    ("A", "multi-head latent attention", "DeepSeek-V2", "2405.04434"),
    (
        "A, `F` and `S`",
        "DeepSeek sparse attention: an indexer chooses each query's keys",
        "DeepSeek-V3.2",
        "2512.02556",
    ),
    ("A, `S`", "a layer attends to the indices of an earlier one", "IndexCache", "2603.12201"),
    ("M", "state-space mixer with several inputs and outputs (MIMO)", "Mamba-3", "2603.15569"),
    ("E", "routed and shared experts, balanced by a bias of each", "DeepSeek-V3", "2412.19437"),
    ("R", "recurrence with a matrix state, not linear in it", "M²RNN", "2603.14360"),
    ("MTP", "one block, trained to predict further tokens at every depth", "FastMTP", "2509.18362"),
)
"""Of each kind of layer: what it is, the paper's name, its number on arXiv."""


def page() -> str:
    """The whole page."""
    models = list(PRESETS.values())
    papers = ((kind, what, f"{name}, arXiv {number}") for kind, what, name, number in _SOURCES)
    sources = _table(("layers", "what they are", "paper"), papers)
    return (
        "\n".join([_HEAD, *sources, *_overview(models), *(line for model in models for line in _section(model))]) + "\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["", *("| " + " | ".join(map(str, line)) + " |" for line in lines)]


def _overview(models: Sequence[Model]) -> list[str]:
    rows = [
        (
            f"`{model.name}`",
            model.depth,
            model.hidden_size,
            f"{model.vocab_size:,}",
            f"{model.seq_length:,}",
            model.mtp.depth,
            f"{sum(model.parameters().values()):,}",
            f"{_active(model):,}",
            f"{flops.step(model).training_per_token / 1e9:.4g}",
        )
        for model in models
    ]
    head = ("model", "layers", "hidden", "vocabulary", "sequence", "MTP", "parameters", "active", "GFLOP a token")
    note = (
        "Active: the parameters that one token meets, with the experts that it is routed to in place of all. GFLOP a token: of "
        "training, forward and backward, at the model's own sequence length."
    )
    return [*_table(head, rows), "", note]


def _active(model: Model) -> int:
    """Parameters without the routed experts that a token does not visit."""
    idle = model.moe.experts - model.moe.topk
    unused = 2 * model.hidden_size * model.moe.ffn_hidden_size * idle * model.layers.count("E")
    return sum(model.parameters().values()) - unused


def _section(model: Model) -> list[str]:
    counts = model.parameters()
    total = sum(counts.values())
    parameters = [(_PARTS[part], f"{count:,}", f"{count / total:.1%}") for part, count in counts.items() if count]
    step = flops.step(model)
    work = step.families.total.training
    families = [
        (name.replace("_", " "), f"{getattr(step.families, name).training / step.tokens / 1e6:,.2f}", f"{share:.1%}")
        for name in flops.Families.__dataclass_fields__
        if (share := getattr(step.families, name).training / work)
    ]
    return [
        "",
        f"## {model.name}",
        "",
        f"- Layers: `{model.layers}`",
        f"- Attention layers, in order: `{''.join(role for role in model.roles if role)}` ({_roles()})",
        f"- On HybridModel: `{hybrid.plan(model).text}`",
        f"- MLA: {model.heads} heads, latents {model.mla.q_lora_rank} and {model.mla.kv_lora_rank}, head widths "
        f"{model.mla.qk_head_dim} + {model.mla.qk_pos_emb_head_dim} rotary and {model.mla.v_head_dim}",
        f"- Sparse attention: top {model.dsa.topk}, indexer {model.dsa.indexer_heads} × {model.dsa.indexer_head_dim}, trained "
        f"against {_DISTILL[model.dsa.distill]}",
        f"- Mamba-3: {model.mamba_heads} heads of {model.mamba3.head_dim}, {model.mamba3.groups} groups, state "
        f"{model.mamba3.state}, MIMO rank {model.mamba3.mimo_rank}",
        *(
            [f"- M²RNN: {model.recurrent_heads} heads, keys {model.m2rnn.key_dim}, values {model.m2rnn.value_dim}"]
            if "R" in model.layers
            else []
        ),
        f"- Experts: {model.moe.experts}, {model.moe.topk} a token, width {model.moe.ffn_hidden_size}; shared "
        f"{model.moe.shared_ffn_hidden_size}",
        *_table(("part", "parameters", "share"), parameters),
        *_table(("work", "training MFLOP a token", "share"), families),
    ]


def _roles() -> str:
    return ", ".join(f"`{role}` {meaning}" for role, meaning in ROLES.items())
