"""Kernels of other packages where these are not installed: the messages, and which of ours are available instead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.backends import Dispatcher, own_candidates
from megacpp_mcore.backends import vendor_switches as switches
from megacpp_mcore.backends.candidates import linear_cross_entropy_candidates
from megacpp_mcore.commands import doctor
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops import vendors
from megacpp_mcore.ops.grouped_mlp import quack
from megacpp_mcore.ops.linear_cross_entropy import reduced
from megacpp_mcore.ops.mla import flash4
from tests.errors import raises

QKV = tuple(torch.randn(8, 1, 2, width) for width in (128, 128, 64))


def test_what_is_missing_is_named_with_its_extra() -> None:
    with raises(BackendError, "flash_attn.cute", "extra flash4"):
        flash4.attend(*QKV, softmax_scale=1.0)
    with raises(BackendError, "FlashAttention-4", "mask"):
        flash4.attend(*QKV, softmax_scale=1.0, attention_mask=torch.zeros(1, 1, 8, 8, dtype=torch.bool))
    probes = {"flash4": flash4.probe(), **{name: reduced.probe(name) for name in ("liger", "quack")}}
    for name, probe in probes.items():
        assert not probe.ok
        assert f"the extra {name} of megacpp-mcore" in probe.reason
    with raises(BackendError, "'flash4'", "op mla", code="cannot-run"):
        Dispatcher({"mla": "flash4"}).request("mla", device="cpu", qk_dim=128, v_dim=64)
    with raises(BackendError, "'quack'", "op routed_mlp", code="cannot-run"):
        Dispatcher({"routed_mlp": "quack"}).request("routed_mlp", hidden=128, ffn=128, experts=4)
    with raises(BackendError, "quack.gemm_config", "extra quack"):
        vendors.entry("quack_tile")
    assert "the extra quack of megacpp-mcore" in quack.probe().reason


@pytest.fixture
def disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Every vendor is disabled by a file; the reasons by name."""
    file = tmp_path / "run.yaml"
    file.write_text("model: nam56r_tiny\nvendors: {flash4: false, quack: false, liger: false}\n")
    monkeypatch.setenv(plugin_config.VARIABLE, str(file))
    switches.configure(plugin_config.load(file).vendors, str(file))
    yield {name: f"disabled by the settings file (vendors: {{{name}: false}} in {file})" for name in switches.NAMES}
    switches.configure(None)


def test_the_switches_are_those_of_the_entry_points(tmp_path: Path) -> None:
    assert set(switches.NAMES) == {vendors._extra(name) for name in vendors.ENTRIES}
    assert all(switches.allowed(name).ok for name in switches.NAMES)
    (tmp_path / "run.yaml").write_text("model: nam56r_tiny\n")
    assert plugin_config.load(tmp_path / "run.yaml").vendors == switches.Vendors()


def test_a_disabled_vendor_is_absent(disabled: dict[str, str]) -> None:
    candidates = {candidate.name: candidate for candidate in (*own_candidates(), *linear_cross_entropy_candidates())}
    assert {name: candidates[name].present().reason for name in switches.NAMES} == disabled
    for op, name in (("mla", "flash4"), ("routed_mlp", "quack")):
        for request in (lambda dispatcher: dispatcher.request(op, device="cuda"), Dispatcher.check_named):  # noqa: B023
            with raises(BackendError, repr(name), f"op {op}", disabled[name], code="cannot-run"):
                request(Dispatcher({op: name}))


def test_doctor_names_the_switch(disabled: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    switches.configure(None)
    assert doctor.run(argparse.Namespace(backends=True, json=False)) == 0  # reads the file
    output = capsys.readouterr().out
    assert all(f"no: {reason}" in output for reason in disabled.values())
    absent = doctor.Component(name="liger-kernel", module="no_such_module", vendor="liger")
    works = doctor.Component(name="flash-attn-4", module="json", probe="version = '4'", vendor="flash4")
    _, *checks = doctor.examine([absent, works])
    states = [(check.state, check.reason) for check in checks]
    assert states == [(doctor.ABSENT, disabled["liger"]), (doctor.OFF, disabled["flash4"])]


def test_a_vendor_that_computes_something_else_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe compares: here with a package of this name that is off by a tenth."""
    impostor = ModuleType("quack")
    impostor.__path__ = []
    module = ModuleType("quack.linear_cross_entropy")
    module.chunked_linear_cross_entropy = lambda h, w, label, **_: (
        1.1 * torch.nn.functional.cross_entropy(h.float() @ w.float().t(), label)
    )
    monkeypatch.setitem(sys.modules, "quack", impostor)
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def leaves() -> list[torch.Tensor]:
        return [torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (32, 48)]

    label = torch.arange(32)

    def truth(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), label)

    def run(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return vendors.entry("quack")(hidden, weight, label)

    probe = vendors.tried("a call", run, truth, leaves)
    assert not probe.ok
    assert probe.reason == "a call differs from plain PyTorch by 0.21"
    assert vendors.tried("a call", lambda h, w: run(h, w) / 1.1, truth, leaves).ok


def test_bad_arguments() -> None:
    hidden, weight, label = torch.randn(4, 8).double(), torch.randn(16, 8).double(), torch.zeros(4, dtype=torch.int64)
    for reduction in reduced.REDUCTIONS:
        want = torch.nn.functional.cross_entropy(hidden @ weight.t(), label, reduction=reduction)
        torch.testing.assert_close(reduced.chunked(hidden, weight, label, reduction=reduction), want)
    with raises(ModelError, "reduction is 'none'", "mean, sum"):
        reduced.liger(hidden, weight, label, reduction="none")
    for candidate in linear_cross_entropy_candidates()[1:]:
        with pytest.raises(ModelError, match=r"expected \[N, H\] and \[N\]"):
            candidate.load()(hidden[None], weight, label[None])
