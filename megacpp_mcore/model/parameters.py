"""Parameter counts of a model: by part, by pipeline stage, and by how a layout shards them. No torch.

Computed from the shapes in the definition, independently of any module; the norm before a block belongs to it. The vocabulary
is Megatron's padded one. The router's balancing biases, which are buffers, and padding rows of projections do not count.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from megacpp_mcore.model.families import ATTENTION, FAMILIES
from megacpp_mcore.model.families.attention_family import FULL_ATTENTION
from megacpp_mcore.model.families.base import Count

if TYPE_CHECKING:
    from megacpp_mcore.model.definition import Layout, Model


def of_layer(model: Model, letter: str, role: str | None) -> Count:
    """Return the count of a layer of family ``letter`` with an attention role."""
    family = FAMILIES[letter]
    return family.parameters(model.shape, role, *model.sizes(family))


def by_part(model: Model) -> dict[str, Count]:
    """Return the count of the layers of each letter, ``mtp`` (one shared block), ``embedding``, ``head``, ``norm``."""
    counts = dict.fromkeys(FAMILIES, Count())
    for letter, role in zip(model.layers, model.roles, strict=True):
        counts[letter] += of_layer(model, letter, role)
    hidden = model.hidden_size
    counts["mtp"] = Count()
    if model.mtp.depth:
        dense = Count(tensor=2 * hidden * model.ffn_hidden_size, whole=hidden)
        projection = Count(whole=2 * hidden * hidden + 3 * hidden)
        counts["mtp"] = of_layer(model, ATTENTION.letter, FULL_ATTENTION) + dense + projection
    counts["embedding"] = counts["head"] = Count(tensor=model.vocab_size_padded(1) * hidden)
    counts["norm"] = Count(whole=hidden)
    return counts


def by_stage(model: Model, layout: Layout) -> tuple[Count, ...]:
    """Count each pipeline stage, with its virtual stages added up.

    The first has the embedding, the last the final norm, the output layer, and MTP with its own embedding.

    Raises:
        ModelError: the layers cannot be split that way.
    """
    part, chunks = by_part(model), model.chunks(layout)
    stages = []
    for stage in range(layout.pipeline):
        numbers = [number for chunk in chunks[stage :: layout.pipeline] for number in chunk]
        layers = (of_layer(model, model.layers[number - 1], model.roles[number - 1]) for number in numbers)
        count = reduce(add, layers, Count())
        is_last = stage == layout.pipeline - 1
        if is_last:
            count += part["norm"] + part["head"] + part["mtp"]
        if stage == 0 or (is_last and model.mtp.depth):
            count += part["embedding"]
        stages.append(count)
    return tuple(stages)
