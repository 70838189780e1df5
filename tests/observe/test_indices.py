"""The sampled overlap of what neighbouring Full layers select."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.observe import indices
from megacpp_mcore.observe.indices import SAMPLED, IndexOverlap, overlap
from megacpp_mcore.ops.indexer.cache import IndexCache, Selection
from tests.observe.recorded import a_step


def watched(interval: int = 1, shared: dict[int, int] | None = None) -> tuple[IndexOverlap, IndexCache]:
    """Return a cache sampled every ``interval`` steps, within a sampled step, and its listener."""
    listener, cache = IndexOverlap(interval), IndexCache(shared or {})
    listener.watch(cache)
    listener.on_step_begin(interval)
    return listener, cache


def test_the_overlap_of_two_selections() -> None:
    selection = torch.tensor([[[0, 1, 2], [3, 4, -1]]])
    assert overlap(selection, selection) == 1
    other = torch.tensor([[[2, 3, 4], [4, -1, -1]]])
    assert overlap(selection, other) == pytest.approx(2 / 4)


def test_the_first_selection_of_a_sampled_step_is_compared() -> None:
    listener, cache = watched(2)
    keys = torch.arange(2 * SAMPLED).view(1, -1, 1)
    for number in (1, 2):
        listener.on_step_begin(number)
        cache.publish(5, Selection(keys))
        cache.publish(5, Selection(keys + 1))
        cache.publish(9, Selection(keys.clone()))
        listener.on_step(a_step(number))
        assert listener.by_pair == ({} if number == 1 else {"5-9": 1.0})
    assert listener.latest() == {"index_overlap": 1.0}
    listener.on_end(None)
    assert "publish" not in vars(cache)


def test_a_rank_s_queries_select_keys_of_all_ranks() -> None:
    """Context parallelism: a rank has a part of the queries, and indices count every rank's keys."""
    listener, cache = watched()
    queries = 2 * SAMPLED
    keys = torch.arange(queries, dtype=torch.int32).view(1, -1, 1) + torch.tensor([0, 7 * queries], dtype=torch.int32)
    cache.publish(5, Selection(keys))
    cache.publish(9, Selection(keys + torch.tensor([0, 1], dtype=torch.int32)))
    listener.on_step(a_step(1))
    assert listener.by_pair == {"5-9": 0.5}


def test_queries_are_sampled_evenly_among_those_with_a_choice() -> None:
    listener, cache = watched()
    queries, selected = 4 * SAMPLED + 3, 4
    cache.publish(5, Selection(torch.arange(queries).view(1, -1, 1).expand(2, -1, selected)))
    rows_BRN = listener._rows[5]
    assert rows_BRN.shape == (2, SAMPLED, selected)
    sampled = rows_BRN[0, :, 0]
    assert (int(sampled[0]), int(sampled[-1])) == (selected, queries - 1)
    assert set(sampled.diff().tolist()) <= {4, 5}


def test_what_a_graph_writes_is_compared_in_every_sampled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay calls no Python: it writes to the buffers of the capture."""
    listener, cache = watched(2)
    monkeypatch.setattr(indices, "is_capturing", lambda: True)
    keys = torch.arange(2 * SAMPLED).view(1, -1, 1)
    for layer in (5, 9):
        cache.publish(layer, Selection(keys.clone()))
    monkeypatch.setattr(indices, "is_capturing", lambda: False)
    for number in (1, 2, 3, 4):
        listener.on_step_begin(number)
        if number == 3:
            listener._captured[9][0].add_(1)  # the graph's own memory
        listener.on_step(a_step(number))
        assert listener.by_pair == ({} if number == 1 else {"5-9": 0.0 if number == 4 else 1.0}), number
    listener.on_end(None)
    assert not listener._captured


def test_rows_without_a_choice_are_not_compared() -> None:
    listener, cache = watched()
    for layer in (5, 9):
        cache.publish(layer, Selection(torch.zeros(1, 4, 4, dtype=torch.long)))
    listener.on_step(a_step(1))
    assert (listener.by_pair, listener.latest()) == ({}, {})


def test_an_error_ends_the_sampling_and_no_forward_pass() -> None:
    listener, cache = watched(shared={6: 5})
    published = Selection(torch.arange(8).view(1, 8))  # a dimension too few
    cache.publish(5, published)
    assert cache.read(6) is published
    with pytest.raises(ValueError, match="not enough values"):
        listener.on_step(a_step(1))
    listener.on_step_begin(2)
    cache.publish(5, published)  # is not looked at any more
    listener.on_step(a_step(2))
    listener.on_end(None)
    assert "publish" not in vars(cache)
