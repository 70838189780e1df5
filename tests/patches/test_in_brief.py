"""In the default lane, one case each of the patches whose own files are exhaustive: none of them can become a no-op unseen."""

from __future__ import annotations

from pathlib import Path

from tests.distributed import test_sp_norm_gradients as norms
from tests.patches import test_dsa_graph_safety as graphs
from tests.patches import test_dsa_indexer_memory as indexer


def test_dsa_graph_safety_waits_for_no_host(process: Path) -> None:
    """Its five edits: the indexer loss, an unset scale, lengths of other ranks, packed positions and their rotation."""
    graphs.test_a_captured_layer_never_waits_and_gives_stocks_bytes(process, "sparse loss")
    graphs.test_an_unset_loss_scale_is_one_and_is_not_kept(process)
    graphs.test_lengths_of_other_ranks_are_checked_in_eager_mode_only(process)
    graphs.test_packed_positions_are_stocks(process, [0, 4, 8, 12, 24], cp_size=2, padding=4)
    graphs.test_packed_rotation_is_stocks(process, [0, 4, 8, 12, 24], cp_size=2, interleaved=True, table=24)


def test_dsa_indexer_memory_makes_nothing_of_all_pairs_and_trains_the_same(process: Path) -> None:
    """Its three edits: selection, loss and gradient."""
    indexer.test_nothing_of_all_pairs_is_ever_made(sparse=True, shared_key=True)
    indexer.test_a_stock_layer_trains_the_same(process, sparse=True, masked=False)


def test_sp_norm_gradients_sums_what_every_rank_has_once(tmp_path: Path) -> None:
    """Two ranks, with and without the patch; a loop that finalizes by itself must not sum it twice."""
    stock, *patched = ("stock, bare", "patched, bare", "patched, finalized by the loop")
    found = norms.run(tmp_path / "two", tensor=2, names=[stock, *patched])
    for parameter in norms.NORMS_AND_BIASES:
        parts = found[stock][parameter]
        assert norms.difference(parts[0], parts[1]) > 0.1, parameter
        for name in patched:
            for rank, gradient in enumerate(found[name][parameter]):
                assert norms.difference(gradient, parts.sum(0)) < norms.TOLERANCE, f"{name}: {parameter}, rank {rank}"
