"""The table of kernels by GPU architecture in docs/compile.md: ``auto`` takes what it says, and compiling says so again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")

from megacpp_mcore.backends import Dispatcher, markdown, own_candidates, probes
from megacpp_mcore.backends.architectures import ARCHITECTURES, archs
from megacpp_mcore.backends.probes import TRITON, ProbeResult, triton_release
from megacpp_mcore.errors import BackendError
from megacpp_mcore.ops.indexer.chunked import Attention, Indexer, KeyRule, unfit
from megacpp_mcore.versions import TRITON_DIRECT
from tests.errors import raises
from tests.ops import architectures, test_compiled
from tests.ops.architectures import COMPILES, FAST, RAN, ROWS

DENSE = "indexer_dense"
"""The dense warm-up of the indexer, which has no candidate."""


def test_auto_takes_what_compiles_for_nvidias_gpus() -> None:
    table = architectures.committed()
    assert "sm_90" in table
    assert table.keys() <= ARCHITECTURES.keys()
    assert all(list(cells) == list(ROWS) for cells in table.values())
    gated = {own.op: own.support.archs for own in own_candidates() if own.name == TRITON and own.support.archs}
    assert len(gated) == 14
    assert all(own.auto for own in own_candidates() if own.op in gated and own.name == TRITON)
    assert {op for gpu in ARCHITECTURES.values() for op in gpu.unfit} < {*gated, DENSE}
    for op, outcomes in (gated | {DENSE: archs(DENSE)}).items():
        rows = [row for row in ROWS if op in row.split(", ") or (op == DENSE and row.startswith("dense"))]
        for name, cells in table.items():
            worst = {cells[row] for row in rows} - {COMPILES, RAN, FAST}
            assert outcomes[name] in (worst or {""}) or ARCHITECTURES[name].untried, (op, name)


@pytest.mark.parametrize("state", [64, 128])
@pytest.mark.parametrize("arch", [None, *ARCHITECTURES])
def test_a_gpu_has_launch_options_of_its_own(monkeypatch: pytest.MonkeyPatch, arch: str | None, state: int) -> None:
    """Those of an H200 are the tuned ones."""
    tuned = test_compiled._plan(4, state, False).constants
    monkeypatch.setattr(probes, "arch", lambda: arch)
    consts = test_compiled._plan(4, state, False).constants
    changed = {name: dict(consts[name].items() - tuned[name].items()) for name in consts if consts[name] != tuned[name]}
    uncapped, wide = {"maxnreg": None}, {"num_warps": 8}
    own = {"chunk_scan_fwd": uncapped, "chunk_scan_bwd_queries": uncapped, "rotate_bwd": {"num_warps": 2}}
    own |= {"chunk_scan_fwd": uncapped | wide, "chunk_scan_bwd_keys": wide} if state == 128 else {}
    own = {name: dict(how.items() - tuned[name].items()) for name, how in own.items()}  # newer Tritons have some already
    assert changed == ({name: how for name, how in own.items() if how} if arch == "sm_100" else {})


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm_86"])
def test_the_indexers_losses_take_no_kernel_that_is_unfit(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Which have no candidate: a patch's, and the dense warm-up's. Tensors are without data."""
    monkeypatch.setattr(probes, "arch", lambda: arch)
    monkeypatch.setattr(probes, "REQUIREMENTS", dict.fromkeys(probes.REQUIREMENTS, lambda: ProbeResult(True)))
    shapes = (8, 1, 4, 64), (8, 1, 64), (8, 1, 4), (8, 1, 4, 128), (8, 1, 1, 128)
    with FakeTensorMode():
        q, k, w, query, key = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        indexer, attention = Indexer(q, k, w), Attention(query, key, 1.0)
        taken = indexer.by_kernel, indexer.learns_by_kernel, attention.by_kernel(KeyRule())
    assert taken == {"sm_90": (True, True, True), "sm_100": (True, False, False)}.get(arch, (False, False, False))
    why = unfit("indexer_grad") or ""
    assert (why == "") == (arch == "sm_90")
    assert {"sm_100": "does not compile", "sm_86": "none was compiled for it"}.get(arch, "") in why


@pytest.mark.parametrize("arch", [name for name, why in archs("mamba3").items() if why])
def test_a_gpu_without_a_kernel_is_named_when_a_layer_asks(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Before the first step: layers ask as they are built. In CUDA graphs no slower backend can take its place."""
    monkeypatch.setattr(probes, "arch", lambda: arch)
    monkeypatch.setattr(probes, "REQUIREMENTS", dict.fromkeys(probes.REQUIREMENTS, lambda: ProbeResult(True)))
    needs = {"device": "cuda", "dtype": "bfloat16", "state": 64, "mimo_rank": 4, "head_dim": 64}
    made = Dispatcher().request("mamba3", **needs)
    assert (made.observed, made.slower_than_best) == ("reference", True)
    assert f"its kernels are for sm_90, sm_100, and this GPU is {arch}: {archs('mamba3')[arch]}" in made.reason
    (row,) = (row for row in markdown.rows(own_candidates()) if (row["op"], row["name"]) == ("mamba3", TRITON))
    assert row["reason"] in made.reason
    with raises(BackendError, "mamba3", f"this GPU is {arch}", "--cuda-graph-impl", code="none-runs"):
        Dispatcher().request("mamba3", capturable=True, **needs)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", architectures.committed())
def test_the_table_is_what_the_compiler_says(name: str) -> None:
    if triton_release() != TRITON_DIRECT:
        pytest.skip(f"the table is of Triton {TRITON_DIRECT}, and {triton_release()} is installed")
    assert architectures.column(name) == architectures.committed()[name]


def test_a_gpu_of_amd_is_none_of_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capability of 9.4 would be sm_94."""
    amd = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: amd)
    assert probes.arch.__wrapped__() == "gfx942"
    assert all(candidate.support.foreign("gfx942") for candidate in own_candidates() if candidate.support.archs)
