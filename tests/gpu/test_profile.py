"""Profiles of nam56r_tiny on one GPU: the time of its kernels belongs to families, and a family that is slow is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.observe import test_profile_training as profiled

WINDOW = "10-14"
FAMILIES = ("A", "M", "E", "R", "MTP", "head", "embedding", "norm")


def _profile(folder: Path, impl: str, *extra: str) -> dict[str, Any]:
    words = profiled.words(
        *extra,
        iterations=15,
        device="cuda",
        precision="bf16",
        transformer_impl=impl,
        micro_batch_size=2,
        global_batch_size=4,
    )
    profiled.train(folder, words, window=WINDOW, device="cuda")
    found = profiled.table(folder, WINDOW)
    print(f"{impl} {extra}: {found['events']} events read in {found['read_s']} s")
    print((folder / "profile" / WINDOW / "table.txt").read_text())
    return found


def _check(found: dict[str, Any]) -> None:
    assert found["problem"] is None
    assert found["unit"] == "device time of kernels"
    assert found["steps"] == [10, 14]
    assert found["attributed_share"] >= 0.95
    assert 0 < found["busy_ns"] <= found["window_ns"]
    assert 0 <= found["host_bound_share"] < 1
    assert found["busy_ns"] <= found["total_ns"]  # kernels that ran at the same time are counted once in it
    for name in FAMILIES:
        row = found["families"][name]
        assert row["forward_ns"] > 0, name
        assert row["backward_ns"] > 0, name
        assert row["host_ns"] > 0, name
        assert row["optimizer_ns"] == 0, name
    assert found["families"]["optimizer"]["optimizer_ns"] > 0
    assert found["families"]["gradients"]["kernels"] > 0


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_the_time_of_kernels_belongs_to_families(tmp_path: Path, impl: str) -> None:
    found = _profile(tmp_path / "run", impl)
    _check(found)
    # Transformer Engine's Triton kernels may compile at any step: they are specialised to the tokens that experts get.
    if impl == "local":
        assert found["phase"] == "steady", found["phase_why"]


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_what_is_recomputed_belongs_where_it_was(tmp_path: Path, impl: str) -> None:
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    found = _profile(tmp_path / "run", impl, *full)
    _check(found)
    for name in ("A", "M", "E", "R", "MTP"):
        row = found["families"][name]
        assert row["recompute_ns"] > 0.5 * row["forward_ns"], name
    assert found["families"]["block"]["share"] < 0.05
