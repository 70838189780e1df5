"""The GPU's own rates, clock and power."""

from __future__ import annotations

import pytest
import torch

from megacpp_mcore.observe import card
from megacpp_mcore.observe.receipts.fields import Facts

pytestmark = pytest.mark.gpu


def test_the_rates_are_plausible_and_leave_nothing_behind() -> None:
    torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")  # libraries have their workspaces
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    state = torch.cuda.get_rng_state()
    facts = Facts()
    card.measure(facts)
    assert 50 < facts.values["card.matmul_tflops_per_s"] < 2500
    assert 0.3e12 < facts.values["card.copy_bytes_per_s"] < 8e12
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_reserved() - reserved < 100e6  # cuBLAS's workspace at most
    assert torch.cuda.max_memory_allocated() - allocated < 100e6


def test_clock_and_power_are_read() -> None:
    pytest.importorskip("pynvml", reason="needs pynvml (nvidia-ml-py)")
    samples = card.Samples()
    samples.read = card.reader()
    samples.take()
    found = samples.record()
    assert 100 < found["card.sm_clock_mhz"] < 4000
    assert 10 < found["card.power_w"] < 2000
