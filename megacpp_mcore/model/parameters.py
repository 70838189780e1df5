"""Parameter counts of a model: by part, by pipeline stage, and by how a layout shards them. No torch.

Computed from the shapes in the definition, independently of any module; the norm before a block belongs to it. The vocabulary
is Megatron's padded one. The router's balancing biases, which are buffers, and padding rows of projections do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from megacpp_mcore.model import pattern as grammar

if TYPE_CHECKING:
    from megacpp_mcore.model.definition import Layout, Model


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of a part of a model.

    Attributes:
        tensor: those sharded over tensor parallelism.
        expert: those of routed experts, sharded over expert parallelism.
        whole: those replicated on every rank of a stage. They include MLA's down-projections to its latents, as with
            Transformer Engine; ``--transformer-impl local`` shards these as well.
    """

    tensor: int = 0
    expert: int = 0
    whole: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.tensor + self.expert + self.whole

    def __add__(self, other: Count) -> Count:
        return Count(
            tensor=self.tensor + other.tensor, expert=self.expert + other.expert, whole=self.whole + other.whole
        )

    def times(self, number: int) -> Count:
        """The count of ``number`` such parts."""
        return Count(tensor=self.tensor * number, expert=self.expert * number, whole=self.whole * number)


def by_part(model: Model) -> dict[str, Count]:
    """The count of ``A``, ``M``, ``E`` and ``R`` layers, ``mtp`` (one shared block), ``embedding``, ``head``, ``norm``."""
    per_layer = {"M": _mamba(model), "E": _moe(model), "R": _recurrent(model)}
    counts = {letter: count.times(model.layers.count(letter)) for letter, count in per_layer.items()}
    counts["A"] = _mla(model).times(model.layers.count("A")) + _indexer(model).times(
        model.roles.count(grammar.FULL_INDEX)
    )
    counts["mtp"] = _mtp(model) if model.mtp.depth else Count()
    counts["embedding"] = counts["head"] = Count(tensor=model.vocab_size_padded(1) * model.hidden_size)
    counts["norm"] = Count(whole=model.hidden_size)
    return counts


def by_stage(model: Model, layout: Layout) -> tuple[Count, ...]:
    """The count of each pipeline stage, with its virtual stages added up.

    The first has the embedding, the last the final norm, the output layer, and MTP with its own embedding.

    Raises:
        ModelError: the layers cannot be split that way.
    """
    part, chunks = by_part(model), model.chunks(layout)
    kinds = {"A": _mla(model), "M": _mamba(model), "E": _moe(model), "R": _recurrent(model)}
    stages = []
    for stage in range(layout.pipeline):
        numbers = [number for chunk in chunks[stage :: layout.pipeline] for number in chunk]
        count = reduce(add, (kinds[model.layers[number - 1]] for number in numbers), Count())
        full = sum(model.roles[number - 1] == grammar.FULL_INDEX for number in numbers)
        count += _indexer(model).times(full)
        is_last = stage == layout.pipeline - 1
        if is_last:
            count += part["norm"] + part["head"] + part["mtp"]
        if stage == 0 or (is_last and model.mtp.depth):
            count += part["embedding"]
        stages.append(count)
    return tuple(stages)


def _mla(model: Model) -> Count:
    mla, hidden, heads = model.mla, model.hidden_size, model.heads
    down = hidden * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    up = mla.q_lora_rank * heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    up += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    return Count(tensor=up + heads * mla.v_head_dim * hidden, whole=hidden + down + mla.q_lora_rank + mla.kv_lora_rank)


def _indexer(model: Model) -> Count:
    dsa = model.dsa
    queries = model.mla.q_lora_rank * dsa.indexer_heads * dsa.indexer_head_dim
    keys_and_weights = model.hidden_size * (dsa.indexer_head_dim + dsa.indexer_heads)
    return Count(whole=queries + keys_and_weights + 2 * dsa.indexer_head_dim)


def _mamba(model: Model) -> Count:
    ssm, hidden, heads = model.mamba3, model.hidden_size, model.mamba_heads
    width = 2 * model.mamba_inner + 2 * ssm.mimo_rank * ssm.groups * ssm.state + 3 * heads
    per_head = 2 * heads * ssm.mimo_rank * ssm.state + 2 * heads
    per_head += model.mamba_inner if ssm.out_norm else 0
    mimo = 3 * heads * ssm.mimo_rank * ssm.head_dim if ssm.mimo_rank > 1 else 0
    return Count(
        tensor=hidden * width + per_head + mimo + model.mamba_inner * hidden,
        whole=hidden + hidden * ssm.angles + 2 * ssm.state,
    )


def _recurrent(model: Model) -> Count:
    rnn, hidden, heads = model.m2rnn, model.hidden_size, model.recurrent_heads
    values, shared = heads * rnn.value_dim, 2 * rnn.key_dim
    per_head = heads * (rnn.value_dim**2 + rnn.value_dim + 2)
    return Count(
        tensor=hidden * (2 * values + heads) + values * (rnn.conv_kernel + 1) + per_head + values * (1 + hidden),
        whole=hidden + shared * (hidden + rnn.conv_kernel + 1),
    )


def _moe(model: Model) -> Count:
    moe, hidden = model.moe, model.hidden_size
    return Count(
        tensor=2 * hidden * moe.shared_ffn_hidden_size,
        expert=2 * hidden * moe.experts * moe.ffn_hidden_size,
        whole=hidden + hidden * moe.experts,
    )


def _mtp(model: Model) -> Count:
    hidden = model.hidden_size
    dense = Count(tensor=2 * hidden * model.ffn_hidden_size, whole=hidden)
    return _mla(model) + dense + Count(tensor=2 * hidden * hidden, whole=3 * hidden)
