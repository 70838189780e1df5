"""Each fall-back forced in a real run on the CPU lane, and seen in its receipt and on its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.backends import probes
from megacpp_mcore.errors import ModelError
from megacpp_mcore.observe import page, receipts
from tests import browser
from tests.observe.test_page import Reader, Row, backend_rows, check_self_contained
from tests.observe.test_receipts import report, start
from tests.tiny_run import make_data, model

TE = ("--transformer-impl", "transformer_engine", "--no-persist-layer-norm")
NUMBERED = set(range(1, len(model().layers) + 1))
CONTAINERS = {"router", "shared_experts"}
"""Parts that stock has one class of, whoever computes the linear layers in them."""
PAINTED = """(e => (e.style.color = '{}', document.body.append(e), getComputedStyle(e).color))
  (document.createElement('i'))"""
OBSERVED = """[...document.querySelectorAll('[data-part=backends] td[data-label=observed]')].map(
  e => getComputedStyle(e).color)"""
"""The colour of the observed backend, row by row."""
AS_ASKED = "Everything runs as it was asked for, and nothing slower than what is there."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("backends"))


@pytest.fixture(scope="module")
def disabled(data: Path) -> Path:
    """A run that asks for Transformer Engine, which is disabled."""
    environment: dict[str, Any] = {probes.DISABLE_TE: "1"}
    start(data, data / "disabled", *TE, fate="patched", **environment).finish()
    return data / "disabled"


@pytest.fixture(scope="module")
def native(data: Path) -> Path:
    """The same run on the classes that it asks for."""
    start(data, data / "native", fate="patched").finish()
    return data / "native"


@pytest.fixture(scope="module")
def untritoned(data: Path) -> tuple[Path, str]:
    """A run with a better backend that requires Triton, which has no driver; and what the run printed.

    Triton that is not even installed ends in Megatron's own import (``transformer/moe/ops/paged_stash.py``).
    """
    said = start(data, data / "no-triton", fate="no-triton", CUDA_VISIBLE_DEVICES="").finish()
    return data / "no-triton", said


def of_op(receipt: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [one for one in receipt["backends"] if one["op"] == op]


def fall_back(receipt: dict[str, Any]) -> str:
    (evidence,) = (one["evidence"] for one in receipt["disqualifiers"] if one["name"] == "fall-back")
    return str(evidence)


def page_of(run: Path) -> Reader:
    """The page that the command writes about ``run``, read."""
    output = run.with_suffix(".html")
    assert report("html", str(run), "--output", str(output)) == 0
    return check_self_contained(output.read_text(encoding="utf-8"))


def layers_in(cell: str) -> set[int | None]:
    """The layers that a cell such as ``1–3, 5, mtp`` names; None: MTP."""
    found: set[int | None] = set()
    for word in cell.split(", "):
        first, _, last = word.partition("–")
        found |= {None} if word == "mtp" else set(range(int(first), int(last or first) + 1))
    return found


def check_off(found: Reader) -> list[Row]:
    """The rows in red, which the page counts and puts first, and which its alert goes with."""
    rows = backend_rows(found)
    off = [row for row in rows if row.off]
    assert rows[: len(off)] == off
    assert f"{len(off)} not as requested, or slower than what is there." in found.text
    assert AS_ASKED not in found.text
    assert "disqualifiers" in found.parts()
    assert "Do not use this run's speed" in found.text
    assert not [row for row in rows if not row.off and row.cells[3].startswith(("≠", "slower"))]
    return off


@pytest.mark.slow
def test_transformer_engine_that_is_disabled(disabled: Path, native: Path) -> None:
    """The run was asked for Transformer Engine and trains on native classes; receipt and page say both, and why."""
    found, other = receipts.read(disabled), receipts.read(native)
    assert (found["status"], found["environment"][probes.DISABLE_TE]) == ("finished", "1")
    assert (other["loss"], other["disqualifiers"]) == (found["loss"], [])
    assert "asked for transformer_engine and runs on local" in fall_back(found)
    (loss,) = of_op(found, "loss")
    assert (loss["requested"], loss["observed"]) == ("linear_cross_entropy", "linear_cross_entropy")
    assert "op loss" not in fall_back(found)
    shown = page_of(disabled)
    off = check_off(shown)
    assert {row.cells[2] for row in off} == {"transformer_engine"}
    why = "MEGACPP_DISABLE_TE=1 disables Transformer Engine"
    ops = {"linear": NUMBERED | {None}, "norm": NUMBERED | {None}}
    for op, layers in ops.items():
        records = [one for one in of_op(found, op) if one["requested"] != "auto"]
        rows = [row for row in off if row.cells[0] == op]
        assert {(one["requested"], one["observed"]) for one in records} == {("transformer_engine", "local")}
        assert {one["layer"] for one in records} == layers == set().union(*(layers_in(row.cells[1]) for row in rows))
        assert {row.cells[3] for row in rows} == {"≠ local"}
        assert all(text.endswith(why) for text in [one["reason"] for one in records] + [row.cells[4] for row in rows])
    own = {one["layer"] for one in of_op(found, "linear") if one["requested"] == "auto"}
    assert own == set(model().layer_numbers("M")) | set(model().layer_numbers("R"))  # their input projections
    parts = {
        one["part"]: f"≠ {one['observed']}"
        for one in found["parts"]
        if one["part"] not in CONTAINERS and one["requested"] != "auto"
    }
    assert {row.cells[0]: row.cells[3] for row in off if row.cells[0] not in ops} == parts
    assert {"linear_q_down_proj", "linear_fc1", "out_proj", "input_layernorm"} <= parts.keys()
    asked = [row for row in backend_rows(shown) if row.cells[2] == "transformer_engine" and not row.off]
    assert {row.cells[0] for row in asked} == CONTAINERS
    assert f"fall-back: {fall_back(found)}" in shown.text


@pytest.mark.slow
def test_the_page_of_a_run_without_a_fall_back(native: Path) -> None:
    found = page_of(native)
    rows = backend_rows(found)
    assert not [row for row in rows if row.off]
    assert not [row for row in rows if row.cells[3].startswith(("≠", "slower"))]
    assert AS_ASKED in found.text
    assert "disqualifiers" not in found.parts()
    assert "fall-back" not in found.text
    assert [row.cells[1:] for row in rows if row.cells[0] == "mamba3"] == [
        ["3, 7, 11", "auto", "reference", "triton is for cuda"]
    ]
    assert {row.cells[1] for row in rows if row.cells[0] in ("loss", "optimizer")} == {"run"}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_transformer_engine_that_cannot_run_here_is_an_error(data: Path, tmp_path: Path) -> None:
    said = start(data, tmp_path / "run", *TE).finish(1)
    assert "'transformer_engine' was asked for by name for op transformer_impl and cannot run:" in said


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quant_recipe", object(), "FP8 experts, which Megatron .* leave --te-precision-config-file out"),
        ("moe_permute_fusion", True, "fused permutation of tokens, .* leave --moe-permute-fusion out"),
        ("moe_router_fusion", True, "a fused router, .* leave --moe-router-fusion out"),
        ("tp_comm_overlap", True, "overlapped tensor-parallel communication, .* leave --tp-comm-overlap out"),
        ("cpu_offloading", True, "activations on the host, .* leave --cpu-offloading-num-layers out"),
        ("use_transformer_engine_op_fuser", True, "fused operations, .* --use-transformer-engine-op-fuser out"),
    ],
)
def test_what_stock_has_in_transformer_engine_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, message: str
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megacpp_mcore.layer_specs.parts import TorchNorm, parts_for

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, transformer_impl="transformer_engine"
    )
    monkeypatch.setenv(probes.DISABLE_TE, "1")
    assert parts_for(config).norm is TorchNorm
    assert config.transformer_impl == "transformer_engine"
    setattr(config, field, value)
    with pytest.raises(ModelError, match=f"the run asks for {message}, or unset the variable"):
        parts_for(config)
    config.transformer_impl = "local"
    monkeypatch.delenv(probes.DISABLE_TE)
    assert parts_for(config).norm is TorchNorm


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_triton(untritoned: tuple[Path, str]) -> None:
    """Dimensions that are odd for a kernel have their run in test_receipts; here Triton does not work for it."""
    run, said = untritoned
    assert said.count("op mamba3 runs on reference, slower than the best for this device") == 1
    found = receipts.read(run)
    rows = of_op(found, "mamba3")
    assert {row["layer"] for row in rows} == set(model().layer_numbers("M"))
    assert {(row["requested"], row["observed"], row["slower_than_best"]) for row in rows} == {
        ("auto", "reference", True)
    }
    (reason,) = {row["reason"] for row in rows}
    assert reason.startswith("triton is for cuda; kernel is not there: triton has no driver for this machine: ")
    assert f"slower than the best for this device: {reason}" in fall_back(found)
    shown = page_of(run)
    assert [row.cells for row in check_off(shown)] == [["mamba3", "3, 7, 11", "auto", "slower: reference", reason]]
    assert "fall-back: op mamba3 in layers 3, 7, 11 runs on reference" in shown.text


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_falls_back_is_red_in_a_browser(
    disabled: Path, native: Path, untritoned: tuple[Path, str], tmp_path: Path
) -> None:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is on PATH; {browser.VARIABLE} may name one")
    with browser.running(program) as chromium:
        for run, any_off in ((disabled, True), (untritoned[0], True), (native, False)):
            file = tmp_path / f"{run.name}.html"
            file.write_text(page.html([run]), encoding="utf-8")
            chromium.show(file, 1280)
            red, text = chromium.ask(PAINTED.format("var(--bad)")), chromium.ask(PAINTED.format("inherit"))
            assert red != text
            rows = backend_rows(Reader(file.read_text(encoding="utf-8")))
            colours = chromium.ask(OBSERVED)
            assert [colour == red for colour in colours] == [row.off for row in rows]
            assert (red in colours) == any_off
