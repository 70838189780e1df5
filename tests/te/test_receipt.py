"""What a receipt says of FP8 scopes and of dequantised tensors; quantised tensors are known by their type, and counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.layer_plan import layer_plan
from megacpp_mcore.model import preset
from megacpp_mcore.observe.receipts import assemble, claims
from megacpp_mcore.observe.receipts import facts as of_run
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.settings import load
from megacpp_mcore.te import quantized
from megacpp_mcore.te.fp8_scopes import FP8
from tests import stock
from tests.errors import raises

CONFIG = SimpleNamespace(params_dtype="torch.bfloat16", fp8=None, fp8_recipe=None, quant_recipe=None)


def precision_of(folder: Path, text: str) -> dict[str, Any]:
    file = folder / "megacpp.yaml"
    file.write_text(f"model: nam56r_tiny\n{text}\n")
    facts = of_run.Facts()
    of_run._precision(facts, [], CONFIG, load(file))
    return {path.partition(".")[2]: value for path, value in facts.values.items()}


@pytest.mark.parametrize(
    ("text", "kernel_fp8", "dispatch", "owner"),
    [
        ("fp8: {}", "none", "none", "megatron"),
        ("fp8: {recipe: current, shared_experts: false}\nrecompute: [a]", "current: attention output projections", "refuse",
         "transformer_engine"),
        ("backends: {feed_forward: triton_fp8}", "MTP feed-forward by triton_fp8", "refuse", "megatron"),
        ("fp8: {recipe: block, blanket: true}", FP8(recipe="block", blanket=True).label, "refuse", "megatron"),
    ],
)  # fmt: skip
def test_the_plan_of_a_run_with_scopes(tmp_path: Path, text: str, kernel_fp8: str, dispatch: str, owner: str) -> None:
    plan = precision_of(tmp_path, text)
    assert (plan["kernel_fp8"], plan["dispatch"], plan["checkpoint_owner"]) == (kernel_fp8, dispatch, owner)


def test_experts_in_fp8_by_name_are_not_bf16() -> None:
    by_op = [("routed_mlp", "triton_fp8"), ("mamba3_projection", "triton_fp8_gradient_bf16"), ("mamba3", "triton")]
    by_op += [("feed_forward", "triton_fp8")]
    modules = [SimpleNamespace(backend=SimpleNamespace(op=op, observed=name)) for op, name in by_op]
    facts = of_run.Facts()
    of_run._precision(facts, [SimpleNamespace(modules=lambda: modules)], CONFIG, None)
    assert facts.values["precision.kernel_fp8"] == (
        "experts by triton_fp8; Mamba input projections by triton_fp8_gradient_bf16; MTP feed-forward by triton_fp8"
    )


def test_ranks_are_summed_and_one_that_did_not_count_is_left_out() -> None:
    def of_ranks(*scopes_and_times: tuple[dict[str, int], int | None]) -> assemble.Facts:
        ranks = ({"precision.fp8_scopes": scopes, "precision.dequantised": times} for scopes, times in scopes_and_times)
        return assemble._merged([SimpleNamespace(facts=facts) for facts in ranks])

    counted, uncounted = ({"entered": 3, "bf16": 2, "captured": 0}, 0), ({"entered": 4, "bf16": 0, "captured": 1}, None)
    merged = of_ranks(counted, uncounted)
    assert merged.values["precision.fp8_scopes"] == {"bf16": 2, "captured": 1, "entered": 7}
    assert merged.values["precision.dequantised"] == 0
    assert of_ranks(uncounted).unknown["precision.dequantised"] == "nothing of the run is quantised"


def test_experts_in_fp8_are_watched_without_a_file_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_DISABLE_TE", "1")  # also where Megatron has imported it
    quantized.watch()
    assert of_run.fp8()["precision.dequantised"] is None
    watched: list[None] = []
    monkeypatch.setattr(quantized, "watch", lambda: watched.append(None))
    for recipe in (None, object()):
        layer_plan(None, SimpleNamespace(quant_recipe=recipe))  # type: ignore[arg-type]
    assert len(watched) == 1


def test_layers_without_the_engine_that_was_asked_for_say_so(process: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole model, as tests/gpu/test_backends.py has it of a run."""
    monkeypatch.setenv("MEGACPP_DISABLE_TE", "1")
    model = stock.build({"seq_length": 32}, preset("nam56r_tiny"), process)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.transformer_impl = "transformer_engine"
    facts = of_run.Facts()
    of_run.of_objects(facts, [model], None)
    for op in ("linear", "norm"):
        rows = [row for row in facts.values["backends"] if row["op"] == op and row["requested"] != "auto"]
        assert {(row["requested"], row["observed"]) for row in rows} == {("transformer_engine", "local")}
        assert {row["layer"] for row in rows} == {None, *range(1, preset("nam56r_tiny").depth + 1)}
        assert all(row["reason"].endswith("MEGACPP_DISABLE_TE=1 disables Transformer Engine") for row in rows)


class QuantizedTensorStorage(torch.Tensor):
    """Like a quantised tensor of Transformer Engine: a payload whose dtype reads as bfloat16."""

    @quantized.counting
    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Float8Tensor(QuantizedTensorStorage):
    @quantized.counting
    def dequantize(self) -> torch.Tensor:
        return super().dequantize()


def payload() -> torch.Tensor:
    return torch.ones(4, 1, 2, 16, dtype=torch.bfloat16).as_subclass(Float8Tensor)


def test_the_type_tells_and_the_dtype_does_not() -> None:
    assert payload().dtype == torch.bfloat16
    assert quantized.is_quantized(payload())
    assert quantized.is_quantized(torch.ones(2).to(torch.float8_e4m3fn))
    assert not quantized.is_quantized(torch.nn.Parameter(torch.ones(2)))
    kind = type("Float8TrainingTensor", (torch.Tensor,), {"__module__": "torchao.float8.float8_training_tensor"})
    assert quantized.is_quantized(torch.ones(2).as_subclass(kind))
    assert not quantized.is_quantized(torch.ones(2).as_subclass(type("Plain", (torch.Tensor,), {})))


def test_an_op_refuses_it() -> None:
    plain = torch.ones(4, 1, 2, 16)
    with raises(ModelError, "k_TBHK", "Float8Tensor of torch.bfloat16"):
        mla_attention(plain, payload(), plain, softmax_scale=1.0)


def test_a_seeded_dequantisation_is_counted_once_and_disqualifies() -> None:
    before = quantized._counted["calls"]
    payload().dequantize()  # which calls its base's
    assert quantized._counted["calls"] == before + 1
    assert quantized.count() is None  # nobody watches where there is no Transformer Engine
    for times, evidence in ((None, ""), (0, ""), (3, "a quantised tensor was dequantised 3 times")):
        norm = {
            "op": "norm",
            "layers": "1",
            "requested": "auto",
            "observed": "x",
            "slower_than_best": False,
            "reason": "",
        }
        values = {"backends": [norm], "precision.dequantised": times}
        assert claims._fallen_back(claims.Case(values, (), {}, {}, {})) == evidence
