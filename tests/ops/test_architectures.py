"""The table of kernels by GPU architecture in docs/compile.md: ``auto`` takes what it says, and compiling says so again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore.backends import Dispatcher, own_candidates, probes
from megacpp_mcore.backends.probes import TRITON, ProbeResult, triton_release
from megacpp_mcore.errors import BackendError
from megacpp_mcore.versions import TRITON_DIRECT
from tests.errors import raises
from tests.ops import architectures
from tests.ops.architectures import ARCHITECTURES, COMPILES, FAST, RAN, ROWS


def test_auto_takes_what_compiles_for_nvidias_gpus() -> None:
    table = architectures.committed()
    assert "sm_90" in table
    assert table.keys() <= ARCHITECTURES.keys()
    assert all(list(cells) == list(ROWS) for cells in table.values())
    gated = {one.op: set(one.support.archs) for one in own_candidates() if one.name == TRITON and one.support.archs}
    assert len(gated) == 13
    for op, archs in gated.items():
        rows = [row for row in ROWS if op in row.split(", ")]
        fits = {name for name, cells in table.items() if {cells[row] for row in rows} <= {COMPILES, RAN, FAST}}
        assert archs & table.keys() == {name for name in fits if name.startswith("sm_")}, op


@pytest.mark.parametrize("arch", [name for name in ARCHITECTURES if name != "sm_90"])
def test_a_gpu_without_a_kernel_is_named_when_a_layer_asks(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Before the first step: layers ask as they are built. In CUDA graphs no slower backend can take its place."""
    monkeypatch.setattr(probes, "arch", lambda: arch)
    monkeypatch.setattr(probes, "REQUIREMENTS", dict.fromkeys(probes.REQUIREMENTS, lambda: ProbeResult(True)))
    needs = {"device": "cuda", "dtype": "bfloat16", "state": 64, "mimo_rank": 4, "head_dim": 64}
    made = Dispatcher().request("mamba3", **needs)
    assert (made.observed, made.slower_than_best) == ("reference", True)
    assert f"its kernels are for sm_90, and this GPU is {arch}" in made.reason
    with raises(BackendError, "mamba3", f"this GPU is {arch}", "--cuda-graph-impl", code="none-runs"):
        Dispatcher().request("mamba3", capturable=True, **needs)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", architectures.committed())
def test_the_table_is_what_the_compiler_says(name: str) -> None:
    if triton_release() != TRITON_DIRECT:
        pytest.skip(f"the table is of Triton {TRITON_DIRECT}, and {triton_release()} is installed")
    assert architectures.column(name) == architectures.committed()[name]


def test_the_table_is_read_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    columns = {"sm_80": dict.fromkeys(ROWS, "spills 16 bytes"), "sm_90": dict.fromkeys(ROWS, FAST)}
    page.write_text(f"<!-- architectures -->\n{architectures.written(columns)}<!-- end of architectures -->\n")
    monkeypatch.setattr(architectures, "PAGE", page)
    assert architectures.committed() == columns


def test_a_gpu_of_amd_is_none_of_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capability of 9.4 would be sm_94."""
    amd = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: amd)
    assert probes.arch.__wrapped__() == "gfx942"
    assert all(one.support.foreign("gfx942") for one in own_candidates() if one.support.archs)
