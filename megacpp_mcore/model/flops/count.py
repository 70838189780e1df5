"""The audited FLOP count of a training step, by family of work; imports no torch.

Conventions (all counts are exact integers):

- One multiply-add is two FLOPs. Only contractions are counted: matrix products, convolutions, recurrences. Element-wise
  work (norms, activations, softmax, rotary embedding, gates, outer products without a sum, losses) and look-ups are not,
  so the embedding counts 0.
- Backward is twice forward: a contraction has a gradient for each of its two operands. The indexer is the exception, see
  :func:`indexer`. No recompute is counted: these are *model FLOPs*. Adding the run's activation recompute gives *hardware
  FLOPs* (:mod:`megacpp_mcore.model.flops.recompute`). What a kernel recomputes in its own backward pass is in neither.
- Attention counts the unmasked pairs: S(S+1)/2 for causal, the sum over rows of min(i+1, k) for top-k. The indexer has to
  score all causal pairs. Separate documents count only their own pairs (``pairs`` of :func:`step`). Full attention has
  MLA's own widths (qk + rope, and v), sparse attention the absorbed ones (kv latent + rope, and kv latent), because that is
  what each of them computes; their projections cost the same.
- The Mamba-3 scan is counted as ``ops/mamba3/reference.py`` computes it chunk by chunk: every row of a chunk with
  every row (no causal half), the last chunk padded; chunks may span the documents of a row. M²RNN is counted per
  token: ``h W`` and ``qᵀ h``.
- Experts count the tokens routed to them, top-k per token, none dropped. The head is as wide as the padded vocabulary. An
  MTP depth runs over all positions, as in Megatron.

The formulas follow from the shapes in :mod:`megacpp_mcore.model` and the papers cited there. They are checked against
``torch.utils.flop_counter`` on the reference ops and on a model built by stock Megatron (tests/model/test_flops.py).

Legend: S sequence, D hidden, V vocabulary; pairs are (query, key) positions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import MLA, Mamba3, Model
from megacpp_mcore.model import pattern as grammar


@dataclass(frozen=True)
class Work:
    """FLOPs of a forward pass and of the corresponding backward pass."""

    forward: int = 0
    backward: int = 0

    @property
    def training(self) -> int:
        """Forward and backward together."""
        return self.forward + self.backward

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class Families:
    """The work of some layers, with each operation in exactly one family."""

    attention_projections: Work = Work()
    attention_core: Work = Work()
    indexer: Work = Work()
    mamba_projections: Work = Work()
    mamba_scan: Work = Work()
    recurrent_projections: Work = Work()
    convolution: Work = Work()
    recurrence: Work = Work()
    router: Work = Work()
    routed_experts: Work = Work()
    shared_experts: Work = Work()
    dense_ffn: Work = Work()
    mtp_projection: Work = Work()
    embedding: Work = Work()
    head: Work = Work()

    def __add__(self, other: Families) -> Families:
        names = [field.name for field in dataclasses.fields(self)]
        return Families(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def total(self) -> Work:
        """All families together."""
        return reduce(add, (getattr(self, field.name) for field in dataclasses.fields(self)))


@dataclass(frozen=True)
class Step:
    """The work of one pass over a batch.

    Attributes:
        tokens: tokens of the batch.
        layers: one entry per trunk layer.
        head: the main head, and the embedding, which counts 0.
        mtp: one entry per multi-token-prediction depth: its projection, its block and its head.
    """

    tokens: int
    layers: tuple[Families, ...]
    head: Families
    mtp: tuple[Families, ...]

    @cached_property
    def trunk(self) -> Families:
        """All layers and the main head."""
        return reduce(add, self.layers, self.head)

    @cached_property
    def families(self) -> Families:
        """The trunk and all MTP depths, by family."""
        return reduce(add, self.mtp, self.trunk)

    @property
    def total(self) -> Work:
        """Trunk and MTP together."""
        return self.families.total

    @property
    def training_per_token(self) -> float:
        """FLOPs of training, forward and backward, per token."""
        return self.total.training / self.tokens


@dataclass(frozen=True)
class Batch:
    """``rows`` rows of ``length`` tokens, over which scans run, and the pairs of their documents: causal, and kept by top-k."""

    rows: int
    length: int
    causal_pairs: int
    selected_pairs: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.length


def causal_pairs(sequence: int) -> int:
    """Pairs of one causal sequence: S(S+1)/2."""
    return sequence * (sequence + 1) // 2


def selected_pairs(sequence: int, topk: int) -> int:
    """Pairs of one causal sequence if each query keeps ``topk`` keys: the sum over rows of min(i+1, topk)."""
    kept = min(topk, sequence)
    return causal_pairs(kept) + (sequence - kept) * kept


def product(multiply_adds: int) -> Work:
    """A contraction of that many multiply-adds, with gradients for both operands."""
    return Work(2 * multiply_adds, 4 * multiply_adds)


def mla_projections(tokens: int, hidden: int, heads: int, mla: MLA, *, query_latent: bool = True) -> Work:
    """Everything in an MLA layer except its core: down, up and output projections, absorbed or not.

    ``query_latent`` False: queries are projected in one step.
    """
    queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    q = mla.q_lora_rank * (hidden + queries) if query_latent else hidden * queries
    kv = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    kv += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return product(tokens * (q + kv + heads * mla.v_head_dim * hidden))


def mla_up_projections(tokens: int, heads: int, mla: MLA, *, absorbed: bool) -> Work:
    """The part of :func:`mla_projections` from the latents to the core's inputs.

    With absorption, the key up-projection is applied to the queries, and the value up-projection comes after the core.
    """
    queries = mla.q_lora_rank * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    keys_and_values = mla.kv_lora_rank * heads * (mla.qk_head_dim + (0 if absorbed else mla.v_head_dim))
    return product(tokens * (queries + keys_and_values))


def mla_value_up_projection(tokens: int, heads: int, mla: MLA) -> Work:
    """The part of :func:`mla_projections` from an absorbed core's latents to its values."""
    return product(tokens * mla.kv_lora_rank * heads * mla.v_head_dim)


def full_core(pairs: int, heads: int, mla: MLA) -> Work:
    """Softmax attention of full MLA: scores and weighted values."""
    return product(pairs * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim))


def sparse_core(pairs: int, heads: int, mla: MLA) -> Work:
    """Softmax attention over latents, in the absorbed form, where all heads read the same latent."""
    return product(pairs * heads * (2 * mla.kv_lora_rank + mla.qk_pos_emb_head_dim))


def indexer(
    tokens: int, scored: int, trained: int | None, *, hidden: int, q_lora_rank: int, heads: int, head_dim: int
) -> Work:
    """A DSA indexer: its three projections, the scores of ``scored`` pairs, and their sum over heads.

    Its input is detached, so a projection has a gradient only for its weight. Its loss reaches the scores of only ``trained``
    pairs (the selected ones with the sparse loss); None means that it is not trained and has no backward. The attention
    probabilities that it is trained against are by-products of the core or, with the dense loss, not counted.
    """
    projections = tokens * (q_lora_rank * heads * head_dim + hidden * (head_dim + heads))
    per_pair = heads * (head_dim + 1)
    backward = 0 if trained is None else 2 * projections + 4 * trained * per_pair
    return Work(2 * (projections + scored * per_pair), backward)


def indexer_projections(model: Model, tokens: int) -> int:
    """Forward FLOPs of one indexer's projections."""
    dsa, mla = model.dsa, model.mla
    sizes = {"q_lora_rank": mla.q_lora_rank, "heads": dsa.indexer_heads, "head_dim": dsa.indexer_head_dim}
    return indexer(tokens, 0, None, hidden=model.hidden_size, **sizes).forward


def mamba_projections(tokens: int, hidden: int, heads: int, ssm: Mamba3) -> Work:
    """Mamba-3's input projections (z, x, B, C, step, decay, trapezoid, angles) and its output projection."""
    inner = heads * ssm.head_dim
    width = 2 * inner + 2 * ssm.mimo_rank * ssm.groups * ssm.state + 3 * heads + ssm.angles
    return product(tokens * hidden * (width + inner))


def mamba_scan(batch: int, sequence: int, heads: int, ssm: Mamba3) -> Work:
    """Mamba-3's chunked scan, and MIMO's sum over ranks at its end.

    A chunk of L tokens has M = L·R rows. Per head: ``C Bᵀ`` [M, M] over the state, its product with the values, the chunk's
    own contribution to the state, and the incoming state's contribution to each row.
    """
    rows, width = ssm.chunk * ssm.mimo_rank, ssm.head_dim
    chunks = batch * math.ceil(sequence / ssm.chunk)
    per_chunk = rows * rows * (ssm.state + width) + 2 * rows * ssm.state * width
    mixed = batch * sequence * ssm.mimo_rank * width if ssm.mimo_rank > 1 else 0
    return product(heads * (chunks * per_chunk + mixed))


def m2rnn_projections(tokens: int, hidden: int, heads: int, key_dim: int, value_dim: int) -> Work:
    """M²RNN's input projections (one q and k, per head v, forget and output gate) and its output projection."""
    return product(tokens * hidden * (2 * key_dim + heads * (2 * value_dim + 1) + heads * value_dim))


def m2rnn_recurrence(tokens: int, heads: int, key_dim: int, value_dim: int) -> Work:
    """M²RNN's recurrence: ``h W`` and ``qᵀ h`` of each token; ``k vᵀ`` is an outer product without a sum."""
    return product(tokens * heads * key_dim * value_dim * (value_dim + 1))


def depthwise_convolution(tokens: int, channels: int, kernel: int) -> Work:
    """A causal depthwise convolution."""
    return product(tokens * channels * kernel)


def feed_forward(tokens: int, hidden: int, width: int) -> Work:
    """An MLP of two matrices; for experts, ``tokens`` are the routed ones."""
    return product(tokens * hidden * width * 2)


def step(
    model: Model,
    batch: int = 1,
    *,
    seq_length: int | None = None,
    vocab_size: int | None = None,
    pairs: tuple[int, int] | None = None,
) -> Step:
    """The work of one pass of ``model`` over ``batch`` rows.

    Args:
        model: what is trained.
        batch: rows of the batch.
        seq_length: tokens of a row; None uses the model's.
        vocab_size: the actual padded vocabulary of the head; None uses the model's, padded for one process.
        pairs: the causal pairs of all separate documents, and those that top-k keeps; None: each row is one document.

    Raises:
        ModelError: a size below 1.
    """
    sequence = model.seq_length if seq_length is None else seq_length
    vocabulary = model.vocab_size_padded(1) if vocab_size is None else vocab_size
    for name, value in (("batch", batch), ("seq_length", sequence), ("vocab_size", vocabulary)):
        if value < 1:
            raise ModelError(f"{name} is {value}; expected at least 1, there is nothing to count otherwise")
    if pairs is None:
        pairs = batch * causal_pairs(sequence), batch * selected_pairs(sequence, model.dsa.topk)
    rows = Batch(batch, sequence, *pairs)
    head = Families(head=product(rows.tokens * model.hidden_size * vocabulary))
    kinds = {kind: _layer(model, *kind, rows) for kind in set(zip(model.layers, model.roles, strict=True))}
    layers = tuple(kinds[kind] for kind in zip(model.layers, model.roles, strict=True))
    depth = head + _mtp_block(model, rows)
    return Step(rows.tokens, layers, head, (depth,) * model.mtp.depth)


def _layer(model: Model, letter: str, role: str | None, rows: Batch) -> Families:
    """The work of one trunk layer of that family and attention role."""
    tokens, hidden = rows.tokens, model.hidden_size
    if letter == "A":
        if role == grammar.FULL_ATTENTION:
            return _full_attention(model, rows)
        return _sparse_attention(model, rows, owns_indexer=role == grammar.FULL_INDEX)
    if letter == "M":
        return Families(
            mamba_projections=mamba_projections(tokens, hidden, model.mamba_heads, model.mamba3),
            mamba_scan=mamba_scan(rows.rows, rows.length, model.mamba_heads, model.mamba3),
        )
    if letter == "E":
        moe = model.moe
        return Families(
            router=product(tokens * hidden * moe.experts),
            routed_experts=feed_forward(tokens * moe.topk, hidden, moe.ffn_hidden_size),
            shared_experts=feed_forward(tokens, hidden, moe.shared_ffn_hidden_size),
        )
    rnn, heads = model.m2rnn, model.recurrent_heads
    return Families(
        recurrent_projections=m2rnn_projections(tokens, hidden, heads, rnn.key_dim, rnn.value_dim),
        convolution=depthwise_convolution(tokens, 2 * rnn.key_dim + heads * rnn.value_dim, rnn.conv_kernel),
        recurrence=m2rnn_recurrence(tokens, heads, rnn.key_dim, rnn.value_dim),
    )


def _full_attention(model: Model, rows: Batch) -> Families:
    return Families(
        attention_projections=mla_projections(rows.tokens, model.hidden_size, model.heads, model.mla),
        attention_core=full_core(rows.causal_pairs, model.heads, model.mla),
    )


def _sparse_attention(model: Model, rows: Batch, *, owns_indexer: bool) -> Families:
    dsa, kept = model.dsa, rows.selected_pairs
    attention = Families(
        attention_projections=mla_projections(rows.tokens, model.hidden_size, model.heads, model.mla),
        attention_core=sparse_core(kept, model.heads, model.mla),
    )
    if not owns_indexer:
        return attention
    scores = indexer(
        rows.tokens,
        rows.causal_pairs,
        kept if dsa.loss_coeff else None,
        hidden=model.hidden_size,
        q_lora_rank=model.mla.q_lora_rank,
        heads=dsa.indexer_heads,
        head_dim=dsa.indexer_head_dim,
    )
    return attention + Families(indexer=scores)


def _mtp_block(model: Model, rows: Batch) -> Families:
    """One depth without its head: ``Linear(2D -> D)``, full MLA, dense feed-forward."""
    hidden = model.hidden_size
    dense = Families(
        mtp_projection=product(rows.tokens * 2 * hidden * hidden),
        dense_ffn=feed_forward(rows.tokens, hidden, model.ffn_hidden_size),
    )
    return dense + _full_attention(model, rows)
