"""Each fall-back forced in a real run on the CPU lane, and seen in its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_mcore.backends import probes
from megacpp_mcore.data.corpus import find_stdlib_sources
from megacpp_mcore.data.prepare import prepare
from megacpp_mcore.errors import ModelError
from megacpp_mcore.observe import receipts
from tests.unit.test_receipts import finish, model, start

TE = ("--transformer-impl", "transformer_engine", "--no-persist-layer-norm")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backends")
    prepare([str(source.path) for source in find_stdlib_sources()[:16]], str(folder / "text"))
    (folder / "config.yaml").write_text("model: nam56r_tiny\noverrides: {dsa: {schedule: '-FF'}}\n")
    return folder


def of_op(receipt: dict[str, Any], op: str) -> list[dict[str, Any]]:
    return [one for one in receipt["backends"] if one["op"] == op]


def fall_back(receipt: dict[str, Any]) -> str:
    (evidence,) = (one["evidence"] for one in receipt["disqualifiers"] if one["name"] == "fall-back")
    return str(evidence)


@pytest.mark.slow
def test_transformer_engine_that_is_disabled(data: Path, tmp_path: Path) -> None:
    """The run was asked for Transformer Engine, trains on native classes, and its receipt says both and why."""
    disabled: dict[str, Any] = {probes.DISABLE_TE: "1"}
    finish(start(data, tmp_path / "run", *TE, fate="patched", **disabled))
    found = receipts.read(tmp_path / "run")
    assert found["status"] == "finished"
    assert found["environment"][probes.DISABLE_TE] == "1"
    for op, layers in (
        ("linear", set(range(1, len(model().layers) + 1)) | {None}),
        ("norm", set(range(1, len(model().layers) + 1)) | {None}),
        ("experts", set(model().layer_numbers("E"))),
    ):
        rows = of_op(found, op)
        assert {row["layer"] for row in rows} == layers
        assert {(row["requested"], row["observed"]) for row in rows} == {("transformer_engine", "local")}
        assert all(row["reason"].endswith("MEGACPP_DISABLE_TE=1 disables Transformer Engine") for row in rows)
    assert "asked for transformer_engine and runs on local" in fall_back(found)
    (loss,) = of_op(found, "loss")
    assert (loss["requested"], loss["observed"]) == ("linear_cross_entropy", "linear_cross_entropy")
    assert "op loss" not in fall_back(found)

    native = start(data, tmp_path / "native", fate="patched")
    finish(native)
    other = receipts.read(tmp_path / "native")
    assert (other["loss"], other["disqualifiers"]) == (found["loss"], [])


@pytest.mark.slow
def test_transformer_engine_that_cannot_run_here_is_an_error(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path / "run", *TE)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 1
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
def test_no_triton(data: Path, tmp_path: Path) -> None:
    """Dimensions that are odd for a kernel have their run in test_receipts; here Triton does not work for it.

    Triton that is not even installed ends in Megatron's own import (``transformer/moe/ops/paged_stash.py``).
    """
    process = start(data, tmp_path / "run", fate="no-triton", CUDA_VISIBLE_DEVICES="")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said[-3000:]
    assert said.count("op mamba3 runs on reference, slower than the best for this device") == 1
    found = receipts.read(tmp_path / "run")
    rows = of_op(found, "mamba3")
    assert {row["layer"] for row in rows} == set(model().layer_numbers("M"))
    assert {(row["requested"], row["observed"], row["slower_than_best"]) for row in rows} == {
        ("auto", "reference", True)
    }
    (reason,) = {row["reason"] for row in rows}
    assert reason.startswith("kernel is not there: triton has no driver for this machine: ")
    assert f"slower than the best for this device: {reason}" in fall_back(found)
