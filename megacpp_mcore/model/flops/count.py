"""The audited FLOP count of a training step, by family of work; imports no torch.

Conventions (all counts are exact integers):

- One multiply-add is two FLOPs. Only contractions are counted: matrix products, convolutions, recurrences. Element-wise
  work (norms, activations, softmax, rotary embedding, gates, outer products without a sum, losses) and look-ups are not,
  so the embedding counts 0.
- Backward is twice forward: a contraction has a gradient for each of its two operands. The indexer is the exception, see
  :func:`indexer`. No recompute is counted: these are *model FLOPs*. Adding the run's activation recompute gives *hardware
  FLOPs* (:mod:`megacpp_mcore.model.flops.recompute`). What a kernel recomputes in its own backward pass is in neither.
- Attention counts the unmasked pairs: S(S+1)/2 for causal, the sum over rows of min(i+1, k) for top-k, or for a window of k
  keys. The indexer has to score all causal pairs. Separate documents count only their own pairs (``pairs`` of
  :func:`step`). Full attention has MLA's own widths (qk + rope, and v), sparse attention the absorbed ones (kv latent + rope,
  and kv latent), because that is what each of them computes; their projections cost the same.
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
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Self

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Model
from megacpp_mcore.model.families import ATTENTION, FAMILIES, mixers_first
from megacpp_mcore.model.families.attention_family import indexer
from megacpp_mcore.model.families.base import Batch, Work, causal_pairs, feed_forward, product, selected_pairs


class _Sum:
    """Works that add up name by name."""

    if TYPE_CHECKING:

        def __init__(self, **works: Work) -> None: ...

        def __getattr__(self, name: str) -> Work: ...

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in NAMES})

    @property
    def total(self) -> Work:
        """All families together."""
        return reduce(add, (getattr(self, name) for name in NAMES))


NAMES = (
    *(name for family in mixers_first() for name in family.works),
    *("dense_ffn", "mtp_projection", "embedding", "head"),
)
"""Names of work, each operation in exactly one: of the families, of the MTP block, and of the whole model."""
_FIELDS = [(name, Work, dataclasses.field(default=Work())) for name in NAMES]

if TYPE_CHECKING:

    class Families(_Sum):
        """The work of some layers, by :data:`NAMES`."""
else:
    Families = dataclasses.make_dataclass("Families", _FIELDS, bases=(_Sum,), frozen=True, kw_only=True, module=__name__)


@dataclass(frozen=True)
class Step:
    """The work of one pass over a batch.

    Attributes:
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


def indexer_projections(model: Model, tokens: int) -> int:
    """Count forward FLOPs of one indexer's projections."""
    dsa, mla = model.dsa, model.mla
    sizes = {"q_lora_rank": mla.q_lora_rank, "heads": dsa.indexer_heads, "head_dim": dsa.indexer_head_dim}
    return indexer(tokens, 0, None, hidden=model.hidden_size, **sizes).forward


def step(
    model: Model,
    batch: int = 1,
    *,
    seq_length: int | None = None,
    vocab_size: int | None = None,
    pairs: tuple[int, int, int] | None = None,
) -> Step:
    """Count the work of one pass of ``model`` over ``batch`` rows.

    Args:
        seq_length: tokens of a row; None uses the model's.
        vocab_size: the actual padded vocabulary of the head; None uses the model's, padded for one process.
        pairs: the causal pairs of all separate documents, those that top-k keeps, and those in a window; None: each row is one
            document.

    Raises:
        ModelError: a size below 1.
    """
    sequence = model.seq_length if seq_length is None else seq_length
    vocabulary = model.vocab_size_padded(1) if vocab_size is None else vocab_size
    for name, value in (("batch", batch), ("seq_length", sequence), ("vocab_size", vocabulary)):
        if value < 1:
            raise ModelError(f"{name} is {value}; expected at least 1, there is nothing to count otherwise")
    if pairs is None:
        topk, window = (batch * selected_pairs(sequence, keys) for keys in (model.dsa.topk, model.mla.window_size + 1))
        pairs = batch * causal_pairs(sequence), topk, window
    rows = Batch(batch, sequence, *pairs)
    head = Families(head=product(rows.tokens * model.hidden_size * vocabulary))
    kinds = {kind: _layer(model, *kind, rows) for kind in set(zip(model.layers, model.roles, strict=True))}
    layers = tuple(kinds[kind] for kind in zip(model.layers, model.roles, strict=True))
    dense = Families(  # of MTP: ``Linear(2D -> D)``, and the feed-forward part after MLA
        mtp_projection=product(rows.tokens * 2 * model.hidden_size**2),
        dense_ffn=feed_forward(rows.tokens, model.hidden_size, model.ffn_hidden_size),
    )
    depth = head + dense + _layer(model, ATTENTION.letter, model.mtp.attention, rows)
    return Step(rows.tokens, layers, head, (depth,) * model.mtp.depth)


def _layer(model: Model, letter: str, role: str | None, rows: Batch) -> Families:
    """Return the work of one trunk layer of that family and attention role."""
    family = FAMILIES[letter]
    return Families(**family.work(model.shape, role, rows, *model.sizes(family)))
