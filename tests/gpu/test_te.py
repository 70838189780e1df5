"""The Transformer Engine bridge on a GPU: parity of each wrapper with plain PyTorch in fp32, and what FP8 scopes do.

Transformer Engine multiplies fp32 matrices in TF32: an operand is rounded to 11 bits, and is off by 2.1e-4 of its value (rms).
A product of two has 3e-4, whatever its depth; a chain of products adds up in squares. The bounds are for the worst row, and so
about three times that.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import overrides
from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import preset, with_overrides
from megacpp_mcore.ops.grouped_mlp import te as experts
from megacpp_mcore.ops.grouped_mlp.reference import grouped_mlp as grouped_truth
from megacpp_mcore.ops.grouped_mlp.reference import routed_mlp as routed_truth
from megacpp_mcore.ops.testing import worst_row
from megacpp_mcore.te import dot_product, fp8_scopes, linear, quantized
from megacpp_mcore.te.block import Block
from megacpp_mcore.util import te_imports
from tests import stock
from tests.gpu.runs import ROOT, words_of
from tests.gpu.test_fp8_experts import ALONE, MIXED
from tests.ops.grouped_mlp_case import Case, assert_same, draw, outcome, outcome_of_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)

CHAIN, BLOCK = 3e-3, 6e-3
"""Two products in a row, three in a gradient; a block, of seven. Rounded to the nearest, a block's worst row is 1.8e-3 (on a
CPU, six draws); tensor cores may cut operands off instead, which is twice that."""
UNFUSED = 1e-5
"""Attention in fp32 runs unfused, by PyTorch's own products, in fp32 itself."""
WINDOW = 0.1
"""Attention in bf16, the worst row of the output and gradients: 5.5e-2 on an H200, where their rms is 5e-3 (PyTorch's 3e-3)."""
FP8_RMS = (0.015, 0.08)
"""RMS error of FP8 products: a value of E4M3 is off by 2.6 % (rms), of E5M2, in gradients of ``hybrid``, by 5.2 %."""


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    te_imports.configure(te_imports.Features(linear=True), "the test")
    torch.manual_seed(11)
    yield
    te_imports.configure(None)


def native_block(x_SBD: torch.Tensor, weights: dict[str, torch.Tensor], width: int) -> torch.Tensor:
    """The block of :class:`megacpp_mcore.te.block.Block` with GELU (erf), from its state dict, in plain PyTorch."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[name], 1e-5)

    y = norm(x_SBD, "qkv.layer_norm_weight")
    heads = (F.linear(y, weights[f"qkv.{part}_weight"]).unflatten(-1, (-1, width)) for part in ("query", "key", "value"))
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in heads)
    o_SBHK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    x_SBD = x_SBD + F.linear(o_SBHK.flatten(2), weights["output.weight"])
    y = F.linear(norm(x_SBD, "feed_forward.0.layer_norm_weight"), weights["feed_forward.0.weight"])
    return x_SBD + F.linear(F.gelu(y), weights["feed_forward.2.weight"])


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype).requires_grad_()


def both_ways(run: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradient of every leaf under one fixed cotangent."""
    output = run(*leaves)
    generator = torch.Generator("cuda").manual_seed(5)
    cotangent = torch.randn(output.shape, device="cuda", generator=generator, dtype=torch.float32).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bound: float) -> None:
    errors = [worst_row(tensor, other) for tensor, other in zip(found, expected, strict=True)]
    print("worst rows:", *(f"{error:.1e}" for error in errors))
    assert max(errors) < bound


def in_double(run: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> list[torch.Tensor]:
    return both_ways(run, *(leaf.detach().double().requires_grad_() for leaf in leaves))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_with_grouped_queries_in_fp32(causal: bool, heads_first: bool) -> None:
    B, H, G, S, K = 2, 8, 2, 133, 32
    leaves = [normal(B, H, S, K), normal(B, G, S, K), normal(B, G, S, K)]

    def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2, enable_gqa=True)

    def ours(*qkv: torch.Tensor) -> torch.Tensor:
        if heads_first:
            return dot_product.attend_heads_first(*qkv, softmax_scale=0.2, causal=causal)
        q, k, v = (tensor.permute(2, 0, 1, 3) for tensor in qkv)
        return dot_product.attend(q, k, v, softmax_scale=0.2, causal=causal).permute(1, 2, 0, 3)

    compare(both_ways(ours, *leaves), in_double(truth, *leaves), UNFUSED)


def test_attention_in_a_window() -> None:
    """At NAM56R's widths, by a fused kernel."""
    S, window = 700, 200
    leaves = [normal(S, 2, 8, width, dtype=torch.bfloat16) for width in (128, 128, 64)]
    seen = torch.ones(S, S, dtype=torch.bool, device="cuda").tril().triu(-window)

    def truth(*qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.1).permute(2, 0, 1, 3)

    actual = both_ways(lambda *qkv: dot_product.attend(*qkv, softmax_scale=0.1, window=window), *leaves)
    compare(actual, in_double(truth, *leaves), WINDOW)


def test_a_plain_model_with_replaced_linear_layers_in_fp32() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.GELU(), torch.nn.Linear(160, 48, bias=False)).cuda()
    x, weights = normal(3, 67, 96), list(model.parameters())
    shapes = [weight.shape for weight in weights]

    def native(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2)

    expected = in_double(native, x, *weights)
    decisions = linear.replace(model)
    assert [decision.swap for decision in decisions] == [True, True]
    assert type(model[0]).__module__.startswith("transformer_engine")
    assert list(model.parameters()) == weights  # the same objects
    compare(both_ways(lambda x, *_: model(x), x, *weights), expected, CHAIN)
    assert [weight.shape for weight in weights] == shapes


@pytest.mark.parametrize("groups", [8, 2])
def test_a_block_in_fp32(groups: int) -> None:
    hidden, heads, S, B = 128, 8, 65, 2
    block = Block(hidden, heads, 320, groups=groups, dtype=torch.float32)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(
                1 + 0.1 * torch.randn_like(parameter) if parameter.dim() == 1 else 0.1 * torch.randn_like(parameter)
            )
    names, weights = zip(*block.named_parameters(), strict=True)
    assert {"qkv.query_weight", "qkv.key_weight", "qkv.value_weight", "output.weight"} < set(names)
    x = normal(S, B, hidden)

    def native(x_SBD: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return native_block(x_SBD, dict(zip(names, values, strict=True)), hidden // heads)

    compare(both_ways(lambda x, *_: block(x), x, *weights), in_double(native, x, *weights), BLOCK)


def test_the_example_of_blocks_learns() -> None:
    words = [sys.executable, str(ROOT / "examples" / "te_block.py"), "--steps", "60"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = (float(line.split()[3]) for line in done.stdout.splitlines())
    assert last < 3.6 < 5 < first < 6.5


def test_experts_in_fp32() -> None:
    """Some without tokens, by GELU's form of tanh."""
    case = Case(T=133, D=64, F=48, topk=3, routing="lone", activation="gelu_tanh", dtype=torch.float32)
    inputs = draw(case, "cuda")
    assert_same(outcome(experts.routed_mlp, case, inputs), outcome(routed_truth, case, inputs, torch.float64), BLOCK)
    outputs = outcome_of_rows(experts.grouped_mlp, case, inputs)
    assert_same(outputs, outcome_of_rows(grouped_truth, case, inputs, torch.float64), BLOCK)


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def dense() -> tuple[torch.nn.Module, torch.Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False), torch.nn.Linear(512, 256, bias=False))
    model = model.cuda().bfloat16()
    linear.replace(model)
    return model, normal(64, 256, dtype=torch.bfloat16)


def gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(x)
    output.backward(torch.ones_like(output))
    tensors = [output.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    x.grad = None
    return tensors


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_scope_has_the_errors_of_fp8_and_evaluation_and_zone_have_none(recipe: str) -> None:
    model, x = dense()
    expected = gradients(model, x)
    scopes = fp8_scopes.Scopes(fp8_scopes.FP8(recipe=recipe), depth=5)
    assert scopes.install(model, 1) == ()  # the zone
    assert all(torch.equal(*pair) for pair in zip(gradients(model, x), expected, strict=True))
    assert scopes.install(model, 3) == ("0", "1")
    before = fp8_scopes.counts()
    for _ in range(2):  # delayed scaling has no maxima before the first
        actual = gradients(model, x)
    after = fp8_scopes.counts()
    assert (after["entered"] - before["entered"], after["captured"]) == (2, 0)
    errors = [rms(tensor, other) for tensor, other in zip(actual, expected, strict=True)]
    print(recipe, *(f"{error:.3f}" for error in errors))
    assert FP8_RMS[0] < min(errors) <= max(errors) < FP8_RMS[1]
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), expected[0])


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_recompute_inside_of_a_scope_repeats_its_scales(process: None, recipe: str) -> None:
    from megacpp_mcore.layer_specs.layer_plan import recompute

    runs = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        model, x = dense()
        if recomputes:
            recompute(model, by_engine=True)
        fp8_scopes.Scopes(fp8_scopes.FP8(recipe=recipe), depth=5).install(model, 3)
        for step in range(3):
            with torch.no_grad():
                x.mul_(1 + step)  # scales change
            last = gradients(model, x)
        runs.append(last)
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_experts_in_a_scope_take_padded_rows() -> None:
    case = Case(T=200, D=256, F=128, topk=3)
    inputs = draw(case, "cuda")
    expected = outcome(routed_truth, case, inputs, torch.float64)
    with fp8_scopes.Scopes(fp8_scopes.FP8(recipe="block"), depth=5).group((3,)) as in_fp8:
        assert in_fp8
        outputs = outcome(experts.routed_mlp, case, inputs)
    errors = [rms(outputs[name], expected[name]) for name in expected]
    print(*(f"{error:.3f}" for error in errors))
    assert FP8_RMS[0] < min(errors) <= max(errors) < 0.1


def test_what_dequantises_itself_is_counted() -> None:
    quantized.watch()
    before = quantized.count()
    from transformer_engine.pytorch import Float8BlockQuantizer
    from transformer_engine.pytorch.constants import DType

    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)
    tensor = quantizer(torch.randn(128, 128, device="cuda", dtype=torch.bfloat16))
    assert tensor.dtype == torch.bfloat16
    assert quantized.is_quantized(tensor)
    assert quantized.count() == before
    with pytest.raises(ModelError, match="a is a Float8Blockwise"):
        quantized.refuse(a=tensor)
    tensor + 1  # seeded: no kernel for that, so it dequantises itself
    assert quantized.count() == before + 1


def loss_of(wrapped: Any) -> torch.Tensor:
    tokens = torch.randint(0, 256, (2, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    positions = torch.arange(128, device="cuda").expand(2, -1)
    labels = tokens[:, 1:]
    return wrapped(tokens[:, :-1], positions, None, labels=labels, loss_mask=torch.ones_like(labels).float()).float().mean()


@pytest.fixture
def tiny(process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Builds the mixed nam56r_tiny with more keys in its file, from one seed."""

    def make(impl: str = "transformer_engine", mtp_depth: int = 1, fused: bool = False, **keys: Any) -> Any:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
        from megatron.training.models.gpt import GPTModelBuilder

        base = preset("nam56r_tiny")
        model = with_overrides(base, {**MIXED, "mtp": {"depth": mtp_depth}})
        file = tmp_path / "megacpp.yaml"
        file.write_text(yaml.safe_dump({"model": base.name, "overrides": overrides.differences(model, base), **keys}))
        monkeypatch.setenv(plugin_config.VARIABLE, str(file))
        destroy_moe_metrics_tracker()
        MTPLossLoggingHelper.tracker.clear()  # as long as the depth of the first model of the process
        random.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        torch.manual_seed(1234)
        config = stock.model_config(words_of(model, *(() if fused else (ALONE,)), transformer_impl=impl))
        built = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
        return Float16Module(config.transformer, built.cuda()).train()

    return make


def test_a_model_with_fp8_scopes(tiny: Callable[..., Any]) -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    plain = loss_of(tiny())
    wrapped = tiny(fp8={"recipe": "block"}, recompute=["a"])
    wrapped.set_is_first_microbatch()
    before = quantized.count()
    loss = loss_of(wrapped)
    loss.backward()
    in_fp8 = {name for name, m in wrapped.module.named_modules() if isinstance(m, TransformerEngineBaseModule) and m.fp8}
    letters = MIXED["pattern"]
    assert {name.split(".")[2] for name in in_fp8} == {
        str(index) for index, letter in enumerate(letters) if letter in "AE" and 0 < index < len(letters) - 1
    }
    assert not [name for name in in_fp8 if "indexer" in name or "router" in name or ".experts." in name]
    assert any("linear_proj" in name for name in in_fp8)
    assert any("shared_experts.linear_fc1" in name for name in in_fp8)
    print(f"loss {float(loss):.5f}, bf16 {float(plain):.5f}, dequantised {quantized.count()}")
    assert quantized.count() == before
    assert 0 < abs(float(loss / plain) - 1) < 5e-3
    assert all(param.grad is None or bool(param.grad.isfinite().all()) for param in wrapped.parameters())


def test_the_norm_inside_of_the_feed_forward_of_mtp(tiny: Callable[..., Any]) -> None:
    plain, fused = (
        tiny(backends={"rms_norm": "stock"}, **keys).module.mtp.layers[0].mtp_model_layer
        for keys in ({}, {"transformer_engine": {"mtp": True}})
    )
    assert type(fused.mlp.linear_fc1).__name__ == "TELayerNormColumnParallelLinear"
    keys = [
        {t.key: tuple(t.global_shape) for name, t in layer.sharded_state_dict("mtp.").items() if "_extra" not in name}
        for layer in (plain, fused)
    ]  # fmt: skip
    assert keys[0] == keys[1]
    with torch.no_grad():
        plain.pre_mlp_layernorm.weight.uniform_(0.5, 1.5)
        fused.mlp.linear_fc1.layer_norm_weight.copy_(plain.pre_mlp_layernorm.weight)
        fused.mlp.linear_fc1.weight.copy_(plain.mlp.linear_fc1.weight)
        fused.mlp.linear_fc2.weight.copy_(plain.mlp.linear_fc2.weight)
    x = normal(64, 2, 128, dtype=torch.bfloat16)
    expected = both_ways(lambda x: plain.mlp(plain.pre_mlp_layernorm(x))[0], x)
    actual = both_ways(lambda x: fused.mlp(fused.pre_mlp_layernorm(x))[0], x)
    assert all(rms(tensor, other) < 5e-3 for tensor, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("keys", [{}, {"fp8": {"recipe": "current", "mtp": True}}], ids=["bf16", "projection in FP8"])
def test_the_first_micro_batch_has_the_gradients_of_every_depth_of_mtp(tiny: Callable[..., Any], keys: dict[str, Any]) -> None:
    """Transformer Engine writes a gradient over main_grad where Megatron marks a call as the first."""
    wrapped = tiny(mtp_depth=2, fused=True, **keys)
    parameters = dict(wrapped.module.mtp.named_parameters())
    main_grads = []
    for _ in range(2):
        for parameter in wrapped.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        loss_of(wrapped).backward()
        main_grads.append({name: param.main_grad for name, param in parameters.items() if param.main_grad.any()})
    assert wrapped.module.mtp.layers[0].eh_proj.fp8 == bool(keys)
    first, second = main_grads
    assert {"layers.0.eh_proj.weight", "layers.0.mtp_model_layer.mlp.linear_fc2.weight"} <= set(first)
    errors = {name: rms(gradient, second[name]) for name, gradient in first.items()}
    print(errors)
    assert max(errors.values()) < 0.05


def test_replaced_linear_layers_of_a_local_model(tiny: Callable[..., Any]) -> None:
    plain = tiny("local")
    swapped = tiny("local", transformer_engine={"linear": True})
    kinds = {type(module).__name__ for module in swapped.modules()}
    assert {"TEColumnParallelLinear", "TERowParallelLinear"} <= kinds
    names = [set(dict(model.named_parameters())) for model in (plain, swapped)]
    assert names[0] == names[1]
    losses = [loss_of(model) for model in (plain, swapped)]
    print("losses", *map(float, losses))
    for loss in losses:
        loss.backward()
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-3)
    for (name, param), (_, other) in zip(plain.named_parameters(), swapped.named_parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
