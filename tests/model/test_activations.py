"""The estimate of a step's memory: against receipts, by part, and the recompute that is chosen from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore import settings
from megacpp_mcore.commands import cli
from megacpp_mcore.model import Layout, memory, preset, with_overrides
from megacpp_mcore.model.flops.recompute import Recomputation
from megacpp_mcore.model.recipes import RECIPES
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import RECOMPUTED, Recompute, Training

RECEIPTS = sorted((Path(__file__).parents[2] / "examples" / "receipts").glob("nam56r_pretrain_*.json"))
ROOMY = 137_000_000_000
"""Of an H200's 150 GB: more room than is reserved, since no row has been trained yet."""


def total(run: Run, how: Recomputation) -> int:
    held, parts = memory.states(run), memory.activations(run, how)
    assert held is not None
    assert parts is not None
    return held.total + sum(parts.values())


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: path.stem)
def test_it_is_what_the_allocator_reserved(path: Path) -> None:
    """With CUDA graphs, whose pools count only as reserved, plus what the receipt's Mamba-3 backend keeps."""
    receipt = json.loads(path.read_text())
    backends = {row["observed"] for row in receipt["backends"] if row["op"] == "mamba3"}
    kept = {"triton": 0, "triton_keep_scan": 74e3, "triton_keep_all": 190e3}[backends.pop()]  # docs/model.md
    tokens = receipt["batch"]["micro_batch_size"] * receipt["batch"]["sequence_length"]
    expected = receipt["memory"]["reserved_peak_bytes"]
    assert total(RECIPES[path.stem].run, Recomputation()) + 13 * kept * tokens == pytest.approx(expected, rel=0.02)


def test_there_are_receipts() -> None:
    assert len(RECEIPTS) >= 5


def run_of(tokens: int = 4096, layout: Layout | None = None, **training: Any) -> Run:
    model = with_overrides(preset("nam56r"), {"seq_length": tokens})
    return Run(model, layout or Layout(), Training(**training))


LESS = {
    "a": {"A attention", "MTP"}, "m": {"M Mamba-3"}, "r": {"R M²RNN"}, "experts": {"E experts"}, "mtp": {"MTP"},
    "full": {"A attention", "E experts", "M Mamba-3", "R M²RNN", "MTP"},
}  # fmt: skip
"""What gets smaller by each recompute."""


def test_every_recompute_needs_less_and_grows_with_the_tokens() -> None:
    for name in (*RECOMPUTED, "full"):
        full = {"granularity": "full", "method": "uniform", "num_layers": 1}
        how = Recomputation(**full) if name == "full" else Recomputation(own=Recompute(**{name: True}))
        before, after = (memory.activations(run_of(32_768), plan) for plan in (Recomputation(), how))
        assert before is not None
        assert after is not None
        less = {part for part in before if after[part] < before[part]} - {"workspace"}
        assert less == LESS[name]
        shared = memory.activations(run_of(32_768, Layout(context=4), processes=4), how)
        assert shared is not None
        assert all(shared[part] == pytest.approx(after[part] / 4, rel=1e-3) for part in less)
    assert memory.activations(run_of(layout=Layout(pipeline=2)), Recomputation()) is None
    assert memory.choices(run_of(layout=Layout(pipeline=2), processes=2)) == []


def test_choices_get_slower_as_they_get_smaller() -> None:
    ways = memory.choices(run_of(32_768))
    assert str(ways[0].how) == "none"
    assert ways[0].seconds == 0
    assert [way.seconds for way in ways] == sorted(way.seconds for way in ways)
    assert [way.total for way in ways] == sorted((way.total for way in ways), reverse=True)
    assert [str(way.how) for way in ways[-2:]] == ["full, uniform 1", "full, uniform 1; ours mtp"]


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("nam56r_long")])
def test_the_recipes_of_long_rows_recompute_what_is_chosen(name: str) -> None:
    chosen = RECIPES[name]
    assert chosen.settings is not None
    file = settings.load(chosen.settings)
    assert file.model == chosen.model
    best = next(way for way in memory.choices(chosen.run) if way.total <= ROOMY)
    assert best.how == Recomputation(own=file.recompute)
    assert not chosen.run.is_captured


def test_the_block_of_time_is_the_kernels() -> None:
    triton = pytest.importorskip("megacpp_mcore.ops.mamba3.triton")
    assert memory._BLOCK_BYTES == triton.BLOCK_BYTES


def test_the_command_names_the_quickest_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe", "memory", "nam56r_long", "--set", "seq_length=65536", "mla.yarn.rotary_scaling_factor=16"]
    assert cli.main(words) == 0
    output = capsys.readouterr().out
    assert "65536 tokens a GPU and micro-batch, 1 GPU, estimated" in output
    assert "recompute: [mtp]" in output.splitlines()[-1]
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in output.splitlines()[-1]
    assert cli.main([*words, "--gpus", "4", "--context", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the quickest that fits 150.1 GB: recompute nothing"
    assert cli.main([*words, "--gpu-gb", "80"]) == 0
    assert "no way fits 80.0 GB" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main(["recipe", "memory", "nam56r_long", "--context", "3"]) == 2
    assert "the nearest that fits every layer is 4" in capsys.readouterr().err
    assert cli.main(["recipe", "memory", "nam56r_pretrain_1gpu_h200_bf16_muon"]) == 2
    assert "its optimizer is muon" in capsys.readouterr().err
    run = dataclasses.replace(RECIPES["nam56r_long_pretrain_4gpu_h200_bf16"].run)
    assert cli.main(["recipe", "memory", "nam56r_long_pretrain_4gpu_h200_bf16"]) == 0
    assert f"{total(run, Recomputation(own=Recompute(a=True))) / 1e9:.1f}" in capsys.readouterr().out


def test_what_the_page_says_of_offload() -> None:
    """Bytes that a recompute drops, a token, are what an offload would move instead."""
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text(encoding="utf-8")
    single, shared = run_of_long(32_768, 1), run_of_long(131_072, 4)
    by_way = {str(way.how): way for way in memory.choices(single)}
    less, more = by_way["ours a, m, mtp"], by_way["ours a, mtp"]
    dropped, seconds = (more.total - less.total) / 32_768, less.seconds - more.seconds
    assert f"| `[a, m, mtp]`, {less.seconds * 1e6:.1f} µs a token | M layers: {dropped / 1e3:.0f} kB a token, " in page
    assert f"{dropped * 32_768 / 1e9:.0f} GB of the host | {seconds * 1e6:.1f} µs, " in page
    by_way = {str(way.how): way for way in memory.choices(shared)}
    dropped = (by_way["none"].total - by_way["ours a"].total) / 32_768
    assert f"| `[a]`, {by_way['ours a'].seconds * 1e6:.1f} µs | A layers: {dropped / 1e3:.0f} kB a token" in page
    long = run_of_long(131_072, 1)
    how = Recomputation(granularity="full", method="uniform", num_layers=1, own=Recompute(mtp=True))
    parts = memory.activations(long, how) or {}
    inputs = sum(size for part, size in parts.items() if part not in ("losses", "workspace"))
    assert f"their inputs offloaded: {inputs / 131_072 / 1e3:.0f} kB a token" in page
    assert f"{inputs / 1e9:.0f} GB of the host | makes it fit, {(total(long, how) - inputs) / 1e9:.0f} GB" in page


def run_of_long(tokens: int, context: int) -> Run:
    changes = {"seq_length": tokens, "mla": {"yarn": {"rotary_scaling_factor": tokens / 4096}}}
    return Run(with_overrides(preset("nam56r_long"), changes), Layout(context=context), Training(processes=context))
