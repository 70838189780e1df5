"""Peaks, MFU and HFU, the record of a receipt, and what people read."""

from __future__ import annotations

import dataclasses
import json
from functools import reduce
from operator import add

import pytest

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import PRESETS, flops, preset
from megacpp_mcore.model.flops import Families, Work
from megacpp_mcore.model.flops.peaks import DEVICES, PRECISIONS, peak
from megacpp_mcore.model.flops.recompute import Recomputation, recomputed
from megacpp_mcore.model.flops.utilisation import Utilisation, by_precision, page, record
from megacpp_mcore.model.precision import FP8_EXPERTS, PLANS
from megacpp_mcore.model.training import Recompute
from tests.errors import raises

H200 = "NVIDIA H200"
MODEL = preset("nam56r_quarter")
STEP = flops.step(MODEL, 8)
TOTAL = STEP.total.training
FULL = recomputed(MODEL, STEP, Recomputation(granularity="full", method="uniform", num_layers=1))


def test_peaks_are_dense_and_of_known_devices_only() -> None:
    """Half of what the datasheets give with sparsity; fp32 has none."""
    for device in DEVICES:
        rates = [peak(device, precision) for precision in PRECISIONS]
        assert [rate.flops_per_s for rate in rates] == [3958e12 / 2, 1979e12 / 2, 989e12 / 2, 67e12]
        assert {rate.reason for rate in rates} == {None}
    assert peak(H200, "fp8").name == "H200 SXM, fp8 dense"
    for device in ("NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "cpu"):
        rate = peak(device, "bf16")
        assert rate.flops_per_s is None
        assert repr(device) in (rate.reason or "")
        assert "'NVIDIA H200'" in (rate.reason or "")
    with raises(ModelError, "'fp4'", "fp8, bf16, tf32, fp32"):
        peak(H200, "fp4")


@pytest.mark.parametrize(
    ("plan", "tf32", "name"),
    [("bf16", False, "bf16"), ("bf16", True, "bf16"), ("fp32", False, "fp32"), ("fp32", True, "tf32")],
)
def test_one_precision(plan: str, tf32: bool, name: str) -> None:
    assert by_precision(MODEL, STEP, PLANS[plan], tf32=tf32) == {name: STEP.families}


@pytest.mark.parametrize("name", PRESETS)
def test_fp8_experts_are_split_off_and_nothing_is_lost(name: str) -> None:
    """Of nam52 the last layer is an E layer, whose experts stay in BF16."""
    model = preset(name)
    step = flops.step(model)
    work = by_precision(model, step, PLANS[FP8_EXPERTS])
    assert list(work) == ["fp8", "bf16"]
    assert reduce(add, work.values()) == step.families
    layer, moved = step.layers[1].routed_experts, model.layers[:-1].count("E")
    left = model.layers.count("E") - moved
    assert work["fp8"] == Families(routed_experts=Work(moved * layer.forward, moved * layer.backward))
    assert work["bf16"].routed_experts == Work(left * layer.forward, left * layer.backward)


def utilisation(
    plan: str, *, step_time_s: float, device: str = H200, devices: int = 1, again: flops.Step | None = None
) -> Utilisation:
    """As a receipt has it."""
    work = {name: part.total.training for name, part in by_precision(MODEL, STEP, PLANS[plan]).items()}
    more = {} if again is None else by_precision(MODEL, again, PLANS[plan])
    return Utilisation(
        step_time_s=step_time_s, devices=devices, model_flops=work,
        hardware_flops={name: count + (more[name].total.training if more else 0) for name, count in work.items()},
        peaks={name: peak(device, name) for name in work},
    )  # fmt: skip


def test_model_flops_never_contain_recompute_and_hardware_flops_do() -> None:
    used, unknown = (utilisation("bf16", step_time_s=2.0, devices=4, again=FULL, device=name) for name in (H200, "NVIDIA X1"))
    assert used.mfu == pytest.approx(TOTAL / (2.0 * 4 * 989.5e12), rel=1e-12)
    assert used.tflops_per_device == unknown.tflops_per_device == pytest.approx(TOTAL / 8e12, rel=1e-12)
    assert (used.reason, unknown.mfu, unknown.hfu) == (None, None, None)
    assert "'NVIDIA X1'" in (unknown.reason or "")
    assert used.hfu / used.mfu == pytest.approx((TOTAL + FULL.total.forward) / TOTAL, rel=1e-12)
    assert 1.15 < used.hfu / used.mfu < 4 / 3  # the heads are not repeated


def test_fp8_time_is_held_against_the_fp8_peak() -> None:
    """A step that takes exactly the floor has MFU 1; against the BF16 peak it would look better than possible."""
    work = by_precision(MODEL, STEP, PLANS[FP8_EXPERTS])
    fp8, bf16 = (work[name].total.training for name in ("fp8", "bf16"))
    floor = fp8 / 1979e12 + bf16 / 989.5e12
    used = utilisation(FP8_EXPERTS, step_time_s=floor)
    assert used.mfu == pytest.approx(1, rel=1e-12)
    naive = TOTAL / floor / 989.5e12
    assert naive > 1.03
    # The same time earns less of the devices' peak in FP8 than in BF16.
    in_bf16 = utilisation("bf16", step_time_s=floor)
    assert in_bf16.mfu == pytest.approx(naive, rel=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_record_adds_up_and_survives_json(recompute: bool) -> None:
    again = {"again": FULL} if recompute else {}
    counted = record(STEP, **again)
    assert json.loads(json.dumps(counted, allow_nan=False)) == counted
    families = counted["families"]
    assert set(families) == {field.name for field in dataclasses.fields(Families)}
    assert sum(part["forward"] + part["backward"] for part in families.values()) == counted["model_flops"] == TOTAL
    assert sum(part["recomputed"] for part in families.values()) == counted["recomputed_flops"]
    assert counted["hardware_flops"] - counted["model_flops"] == counted["recomputed_flops"]
    assert (counted["recomputed_flops"] > 0) == recompute
    assert sum(part["share"] for part in families.values()) == pytest.approx(1)
    assert families["embedding"] == {"forward": 0, "backward": 0, "recomputed": 0, "share": 0}
    assert counted["tokens"] == 8 * 4096
    assert [part["forward"] for part in counted["mtp_depths"]] == [part.total.forward for part in STEP.mtp]


def test_the_page_tells_model_from_hardware_flops() -> None:
    how = Recomputation(granularity="selective", modules=("core_attn",), own=Recompute(m=True))
    text = page(MODEL, how, seq_length=1024)
    assert text.startswith("nam56r_quarter, one sequence of 1024 tokens, recompute: selective core_attn; ours m\n")
    step = flops.step(MODEL, seq_length=1024)
    again = recomputed(MODEL, step, how).total.forward
    assert f"hardware FLOPs (HFU): {(step.total.training + again) / 1024 / 1e9:.3f}, recompute included" in text
