"""The index cache by itself; indices are any object. How layers use it: tests/patches/test_dsa_index_cache.py."""

from __future__ import annotations

import threading

import pytest

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.indexer.cache import IndexCache, Recomputed, Selection
from tests.errors import raises


def test_forward_passes_that_interleave_are_found_out() -> None:
    cache = IndexCache({2: 1})
    cache.publish(1, Selection("of one micro-batch"))
    cache.publish(1, Selection("of another"))
    cache.read(2)
    with raises(ModelError, "layer 2", "layer 1", code="not-published"):
        cache.read(2)


def test_recompute_in_a_thread_of_its_own_and_after_a_failure() -> None:
    """As on a GPU, where the backward pass runs in another thread than the forward pass."""
    cache, seen = IndexCache({2: 1}), []

    def fail() -> None:
        cache.read(2)
        raise ValueError("after reading")

    cache.publish(1, Selection("of a run that failed"))
    with pytest.raises(ValueError, match="after reading"):
        Recomputed(fail)()
    run = Recomputed(lambda: cache.read(2).index)
    cache.publish(1, Selection("a"))
    run()

    def forward() -> None:
        cache.publish(1, Selection("b"))
        backward = threading.Thread(target=lambda: seen.append(run()))
        backward.start()
        backward.join()
        seen.append(cache.read(2).index)

    Recomputed(forward)()
    assert seen == ["a", "b"]


def test_a_recompute_of_other_layers_is_refused() -> None:
    cache = IndexCache({2: 1, 3: 1})
    for layers, use in (((2, 3), cache.read), ((1, 3), lambda layer: cache.publish(layer, Selection("a")))):
        order = iter(layers)
        run = Recomputed(lambda order=order, use=use: use(next(order)))  # type: ignore[misc]
        cache.publish(1, Selection("a"))
        run()
        with raises(ModelError, f"layer {layers[1]}", f"layer {layers[0]}"):
            run()
