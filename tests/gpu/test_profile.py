"""Profiles of nam56r_tiny on one GPU: the time of its kernels belongs to families, and a family that is slow is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe import test_profile_training as profiled

WINDOW = "10-14"
FAMILIES = ("A", "M", "E", "R", "MTP", "head", "embedding", "norm")


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_the_time_of_kernels_belongs_to_families(tmp_path: Path, impl: str, recomputes: bool) -> None:
    """And what is recomputed to where it was."""
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    words = profiled.words(
        *(full if recomputes else ()), iterations=15, device="cuda", precision="bf16", transformer_impl=impl,
        micro_batch_size=2, global_batch_size=4,
    )  # fmt: skip
    profiled.train(tmp_path / "run", words, window=WINDOW, device="cuda")
    table = profiled.table(tmp_path / "run", WINDOW)
    print((tmp_path / "run" / "profile" / WINDOW / "table.txt").read_text())
    assert table["problem"] is None
    assert table["unit"] == "device time of kernels"
    assert table["steps"] == [10, 14]
    assert table["attributed_share"] >= 0.95
    assert 0 < table["busy_ns"] <= min(table["window_ns"], table["total_ns"])  # kernels at the same time count once in it
    assert 0 <= table["host_bound_share"] < 1
    for name in FAMILIES:
        row = table["families"][name]
        assert min(row["forward_ns"], row["backward_ns"], row["host_ns"]) > 0, name
        assert row["optimizer_ns"] == 0, name
        if recomputes and name in ("A", "M", "E", "R", "MTP"):
            assert row["recompute_ns"] > 0.5 * row["forward_ns"], name
    assert table["families"]["optimizer"]["optimizer_ns"] > 0
    assert table["families"]["gradients"]["kernels"] > 0
    assert not recomputes or table["families"]["block"]["share"] < 0.05
    # Transformer Engine's Triton kernels may compile at any step: they are specialised to the tokens that experts get.
    assert recomputes or impl != "local" or table["phase"] == "steady", table["phase_why"]
