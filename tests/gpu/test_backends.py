"""Transformer Engine on and off in real runs on a GPU: the classes that are observed, and the fall-back in the receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_mcore.backends import Dispatcher, probes
from megacpp_mcore.model import preset
from megacpp_mcore.observe import receipts
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.mla.sdpa import FUSED
from tests.gpu import runs

STEPS = 4


def train(run: Path, *extra: str, **environment: str) -> dict[str, Any]:
    """The receipt of a run of the tiny model on mock data."""
    words = runs.words_of(preset("nam56r_tiny"), *extra, global_batch_size=2, train_iters=STEPS)
    if probes.DISABLE_TE in environment:
        words.remove("--moe-permute-fusion")  # Transformer Engine's kernel, which no other can stand in for
    runs.train(words, run, **environment)
    return receipts.read(run)


def observed(receipt: dict[str, Any], op: str) -> set[tuple[str, str]]:
    return {(record["requested"], record["observed"]) for record in receipt["backends"] if record["op"] == op}


def fall_back(receipt: dict[str, Any]) -> str:
    return "".join(entry["evidence"] for entry in receipt["disqualifiers"] if entry["name"] == "fall-back")


@pytest.fixture(scope="module")
def with_te(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("on"))


@pytest.fixture(scope="module")
def without_te(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("off"), **{probes.DISABLE_TE: "1"})


def test_transformer_engine_on_and_off(with_te: dict[str, Any], without_te: dict[str, Any]) -> None:
    for op, ours in (("linear", {("auto", "local")}), ("norm", set())):  # the input projections of M and R
        assert observed(with_te, op) == {("transformer_engine", "transformer_engine")} | ours
        assert observed(without_te, op) == {("transformer_engine", "local")} | ours
        rows = [row for row in without_te["backends"] if (row["op"], row["requested"]) == (op, "transformer_engine")]
        assert all("MEGACPP_DISABLE_TE=1 disables Transformer Engine" in row["reason"] for row in rows)
    for run in (with_te, without_te):
        assert observed(run, "experts") == {("auto", "megacpp_mcore")}
        assert observed(run, "routed_mlp") == observed(run, "router") == {("auto", "triton")}
        assert observed(run, "optimizer") == {("auto", "transformer_engine")}
    assert "transformer_engine" not in fall_back(with_te)  # M and R do fall back: their kernels are for wider models
    assert "requested on transformer_engine, runs on local" in fall_back(without_te)
    assert without_te["loss"]["first"] == pytest.approx(with_te["loss"]["first"], rel=0.02)


def test_attention_is_fused_and_deterministic_mode_is_a_marked_fall_back(with_te: dict[str, Any], tmp_path: Path) -> None:
    assert observed(with_te, "mla") == {("auto", "sdpa")}
    ((requested, kernel),) = observed(with_te, "sdpa")
    assert requested == "auto"
    assert kernel in {backend.name for backend in FUSED}
    deterministic = train(tmp_path, "--deterministic-mode")
    assert observed(deterministic, "mla") == {("auto", "reference")}
    evidence = fall_back(deterministic)
    assert " runs on reference, slower than the best for this device: " in evidence
    assert "sdpa does not support this call" in evidence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("documents", ["", "masked", "numbered"])
@pytest.mark.parametrize("length", [1, 129, 512])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(24, 16), (128, 64), (192, 128), (40, 8)])
def test_whatever_sdpa_says_that_it_covers_it_runs(
    dtype: torch.dtype, documents: str, length: int, qk_dim: int, v_dim: int
) -> None:
    """Forward and backward, as near to the reference in float32 as the reference in this dtype, roughly."""
    needs = {"device": "cuda", "dtype": dtype, "qk_dim": qk_dim, "v_dim": v_dim, "deterministic": False}
    chosen = Dispatcher({"mla": "sdpa"}).request("mla", **needs)
    assert chosen.observed == "sdpa"
    torch.manual_seed(7)
    shapes = ((length, 2, 4, qk_dim), (length, 2, 4, qk_dim), (length, 2, 4, v_dim))
    ours = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    truth = [tensor.detach().double().requires_grad_() for tensor in ours]
    of = torch.arange(length, device="cuda") // max(1, length // 2)  # two documents
    boundaries = {
        "": {},
        "masked": {"attention_mask": (of[:, None] != of[None, :])[None, None]},
        "numbered": {"seq_idx": of.int().expand(2, length).contiguous()},
    }[documents]
    grad = torch.randn(length, 2, 4, v_dim, device="cuda", dtype=dtype)
    for inputs, fn, seed in ((ours, chosen.fn, grad), (truth, mla_attention, grad.double())):
        fn(*inputs, softmax_scale=qk_dim**-0.5, **boundaries).backward(seed)
    for leaf, exact in zip(ours, truth, strict=True):
        assert leaf.grad is not None
        assert exact.grad is not None
        # A lone key has all the weight: its query's gradient is 0, and rounding is compared with the other gradients.
        error = (leaf.grad.double() - exact.grad).norm() / torch.maximum(exact.grad.norm(), 1e-2 * grad.double().norm())
        assert error < 1e-2, (tuple(leaf.shape), float(error))
