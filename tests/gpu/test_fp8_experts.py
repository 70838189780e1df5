"""FP8 experts on a Hopper GPU: whose GEMMs had FP8 operands and whose had not, errors against float64, padding, training.

Shape legend: T rows routed to this rank's experts, N experts, D hidden, F width of an expert.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.model import Model, preset, with_overrides
from megacpp_mcore.model.training import GPT, HYBRID
from megacpp_mcore.observe.steps import read_steps
from tests import stock
from tests.gpu import runs
from tests.gpu.runs import words_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)

FP8 = "bf16_te_fp8_experts"
ROWS = (0, 1, 15, 16, 17, 31, 128, 129, 333, 512, 700, 1100, 0, 900, 1000, 362)
"""Rows of the 16 experts of nam56r: none, one, and around the tiles of 16 and of 128; the last of a whole batch."""
QUANTIZED = (0.015, 0.1)
"""RMS error that FP8 products have. A value of E4M3 is off by 2.6 % (rms); three to five operands meet in each result."""
ROUNDED = 0.01
"""RMS error that BF16 products stay below."""
ALONE = "--no-gradient-accumulation-fusion"
"""Without DistributedDataParallel there is no buffer for a product to add its weight gradient to."""


@dataclass
class Products:
    """The GEMMs that Transformer Engine's modules ran, by layout (TN forward, NN input gradient, NT weight gradient)."""

    grouped_fp8: Counter[str] = field(default_factory=Counter)
    grouped_bf16: Counter[str] = field(default_factory=Counter)
    dense: Counter[str] = field(default_factory=Counter)
    strange: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watched() -> Iterator[Products]:
    """Inside, every GEMM of TE's linear modules is counted by what its operands are."""
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    products = Products()
    modules = [
        importlib.import_module(f"transformer_engine.pytorch.module.{name}")
        for name in ("grouped_linear", "linear", "layernorm_linear", "layernorm_mlp")
    ]

    def is_fp8(operand: Any) -> bool:
        blockwise = type(operand).__name__ in ("Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage")
        return blockwise and "E4M3" in repr(operand._fp8_dtype)

    def count_grouped(A: Sequence[Any], B: Sequence[Any], layout: str) -> None:
        kinds = {
            "fp8" if is_fp8(factor) else "strange" if isinstance(factor, QuantizedTensorStorage) else str(factor.dtype)
            for factor in (*A, *B)
        }
        if kinds == {"fp8"}:
            products.grouped_fp8[layout] += 1
        elif kinds == {"torch.bfloat16"}:
            products.grouped_bf16[layout] += 1
        else:
            products.strange.append(f"grouped {layout}: {sorted(kinds)}")

    def count_dense(A: Any, B: Any, layout: str) -> None:
        if isinstance(A, QuantizedTensorStorage) or isinstance(B, QuantizedTensorStorage):
            products.strange.append(f"dense {layout}: {type(A).__name__}, {type(B).__name__}")
        products.dense[layout] += 1

    def watching(stock_gemm: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
        def gemm(A: Any, B: Any, *args: Any, **kwargs: Any) -> Any:
            count(A, B, kwargs.get("layout", "TN"))
            return stock_gemm(A, B, *args, **kwargs)

        return gemm

    with pytest.MonkeyPatch.context() as patch:
        grouped, *dense = modules
        patch.setattr(grouped, "general_grouped_gemm", watching(grouped.general_grouped_gemm, count_grouped))
        for module in dense:
            patch.setattr(module, "general_gemm", watching(module.general_gemm, count_dense))
        yield products


def build(model: Model, precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The GPTModel that stock builds on the GPU, in BF16 as stock trains it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.training.models.gpt import GPTModelBuilder

    from megacpp_mcore.arguments import overrides

    base = preset("nam56r_tiny")
    file = folder / "megacpp.yaml"
    chosen = {"experts": STOCK}  # which has products to count in BF16, too
    file.write_text(yaml.safe_dump({"model": base.name, "overrides": overrides.differences(model, base), "backends": chosen}))
    monkeypatch.setenv(plugin_config.VARIABLE, str(file))
    destroy_moe_metrics_tracker()
    config = stock.model_config(words_of(model, ALONE, precision=precision))
    built = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return Float16Module(config.transformer, built.cuda()).train()


# All four families; E at 2, 6, 8, and at 12, the last layer, which stays in BF16.
MIXED = {"pattern": "AEMRAEMEARME", "depth": 12, "seq_length": 128}


@pytest.mark.parametrize("precision", ["bf16", FP8])
def test_the_products_of_the_experts_alone_have_fp8_operands(
    process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    model = with_overrides(preset("nam56r_tiny"), MIXED)
    wrapped = build(model, precision, tmp_path, monkeypatch)
    wrapped.set_is_first_microbatch()
    tokens = torch.randint(0, 256, (2, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(5))
    positions = torch.arange(128, device="cuda").expand(2, -1)
    with watched() as products:
        loss = wrapped(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=torch.ones_like(tokens[:, 1:]).float())
        loss.float().mean().backward()
    layers = 3 if precision == FP8 else 0
    each_layer = 2  # linear_fc1, linear_fc2
    assert products.strange == []
    assert products.grouped_fp8 == Counter({layout: each_layer * layers for layout in ("TN", "NN", "NT") if layers})
    assert products.grouped_bf16 == dict.fromkeys(("TN", "NN", "NT"), each_layer * (4 - layers))
    assert min(products.dense[layout] for layout in ("TN", "NN", "NT")) > 20

    engine = {name: m for name, m in wrapped.module.named_modules() if isinstance(m, TransformerEngineBaseModule)}
    in_fp8 = {name for name, m in engine.items() if m.fp8}
    expected = {f"decoder.layers.{index}.mlp.experts.linear_fc{half}" for index in (1, 5, 7) for half in (1, 2)}
    assert in_fp8 == (expected if layers else set())
    assert len(engine) > len(expected) + 20
    for name, module in engine.items():
        quantizers = [quantizer for group in module.quantizers.values() for quantizer in group]
        kinds = {type(quantizer) for quantizer in quantizers if quantizer is not None}
        assert kinds == ({Float8BlockQuantizer} if name in in_fp8 else set()), name
    gradients = {name: parameter.grad for name, parameter in wrapped.named_parameters() if "experts.linear" in name}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())


@pytest.fixture(scope="module")
def pair(process: None) -> tuple[Any, Any]:
    """The experts of layer 2 of nam56r_quarter in FP8, and in BF16 with the same weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megacpp_mcore.layer_specs.experts import expert_layer_spec
    from megacpp_mcore.layer_specs.parts import parts_for

    config = stock.model_config(words_of(preset("nam56r_quarter"), ALONE, precision=FP8)).transformer
    without = copy.copy(config)
    without.quant_recipe = None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    built = []
    for variant in (config, without):
        spec = expert_layer_spec(variant, parts_for(variant), Dispatcher({"experts": STOCK}))
        submodules = spec.submodules.mlp.keywords["submodules"]
        built.append(submodules.experts(16, variant, pg_collection=groups, name="decoder.layers.1.mlp.experts"))
    ours, plain = built
    ours.set_layer_number(2)
    with torch.no_grad():
        for parameter, other in zip(ours.parameters(), plain.parameters(), strict=True):
            other.copy_(parameter)
    assert (type(ours).__name__, type(plain).__name__) == ("FP8Experts", "TEGroupedMLP")
    return ours, plain


def draw(rows: Sequence[int], hidden: int = 3584) -> list[torch.Tensor]:
    """Input ``[T, D]``, probabilities ``[T]``, and a gradient of the output ``[T, D]``."""
    generator = torch.Generator("cuda").manual_seed(11)
    total = sum(rows)
    hidden_TD, gradient_TD = (torch.randn(total, hidden, device="cuda", generator=generator) for _ in range(2))
    probs_T = torch.rand(total, device="cuda", generator=generator)
    return [hidden_TD.bfloat16(), probs_T, gradient_TD.bfloat16()]


def outcome(experts: Any, rows: Sequence[int], inputs: Sequence[torch.Tensor], forward: Any = None) -> list[torch.Tensor]:
    """Output, and gradients of input, probabilities, and weights (fc1, then fc2, ``[N, out, in]``)."""
    experts.set_is_first_microbatch()  # or the FP8 copies of the weights are those of an earlier call
    hidden_TD, probs_T = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    output_TD, bias = (forward or experts)(hidden_TD, torch.tensor(rows), probs_T)
    assert bias is None
    output_TD.backward(inputs[2])  # and no autograd.grad, which Megatron's checkpoint function refuses
    by_layer = []
    for linear in (experts.linear_fc1, experts.linear_fc2):
        weights = [getattr(linear, f"weight{index}") for index in range(len(rows))]
        by_layer.append(torch.stack([weight.grad for weight in weights]))
        for weight in weights:
            weight.grad = None
    return [output_TD.detach(), hidden_TD.grad, probs_T.grad, *by_layer]


def truth(experts: Any, rows: Sequence[int], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same in float64, expert by expert."""
    hidden_TD, probs_T = (tensor.double().requires_grad_() for tensor in inputs[:2])
    first, second = (
        [getattr(linear, f"weight{index}").detach().double().requires_grad_() for index in range(len(rows))]
        for linear in (experts.linear_fc1, experts.linear_fc2)
    )
    gelu = torch.nn.functional.gelu
    parts = zip(hidden_TD.split(rows), probs_T.split(rows), first, second, strict=True)
    output_TD = torch.cat([(gelu(x @ fc1.T) * p[:, None]) @ fc2.T for x, p, fc1, fc2 in parts])
    grads = torch.autograd.grad(output_TD, [hidden_TD, probs_T, *first, *second], inputs[2].double())
    half = len(rows) + 2
    return [output_TD.detach(), *grads[:2], torch.stack(grads[2:half]), torch.stack(grads[half:])]


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_errors_are_those_of_fp8_and_of_no_more(pair: tuple[Any, Any]) -> None:
    ours, plain = pair
    inputs = draw(ROWS)
    expected = truth(ours, ROWS, inputs)
    with watched() as products:
        quantized = outcome(ours, ROWS, inputs)
    rounded = outcome(plain, ROWS, inputs)
    assert products.grouped_fp8 == {"TN": 2, "NN": 2, "NT": 2}

    def of_experts(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Each expert's parts; the probabilities' gradient as a whole, as one of them is but a few numbers."""
        yield tensors[2]
        used = [expert for expert, count in enumerate(ROWS) if count]
        for parts in (tensors[0].split(ROWS), tensors[1].split(ROWS), tensors[3], tensors[4]):
            yield from (parts[expert] for expert in used)

    for number, (fp8, bf16, exact) in enumerate(zip(*map(of_experts, (quantized, rounded, expected)), strict=True)):
        assert QUANTIZED[0] < rms(fp8, exact) < QUANTIZED[1], number
        assert rms(bf16, exact) < ROUNDED, number


def test_padding_changes_no_row_and_an_expert_without_rows_has_no_gradient(pair: tuple[Any, Any]) -> None:
    """The rows of each expert followed by zeros up to 16 are what is padded: the same products, bit for bit."""
    ours, _ = pair
    inputs = draw(ROWS)
    actual = outcome(ours, ROWS, inputs)
    aligned = [-(-rows // 16) * 16 for rows in ROWS]
    filled = [
        torch.cat([torch.cat([part, part.new_zeros(more - len(part), *part.shape[1:])]) for part, more in parts])
        for parts in (zip(tensor.split(ROWS), aligned, strict=True) for tensor in inputs)
    ]
    expected = outcome(ours, aligned, filled)
    kept = torch.cat([torch.arange(more) < rows for rows, more in zip(ROWS, aligned, strict=True)]).cuda()
    for tensor, other in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(tensor, other[kept])
    for tensor, other in zip(actual[3:], expected[3:], strict=True):
        assert torch.equal(tensor, other)
        for index, rows in enumerate(ROWS):
            assert bool(tensor[index].any()) is (rows > 0), index


def test_recompute_repeats_what_the_forward_pass_did(pair: tuple[Any, Any]) -> None:
    from megacpp_mcore.layer_specs.layer_plan import recomputed

    ours, _ = pair
    inputs = draw(ROWS)
    expected = outcome(ours, ROWS, inputs)
    with watched() as products:
        actual = outcome(ours, ROWS, inputs, recomputed(ours.forward))
    assert products.grouped_fp8 == {"TN": 4, "NN": 2, "NT": 2}
    assert [torch.equal(tensor, other) for tensor, other in zip(actual, expected, strict=True)] == [True] * 5


STEPS, SAVED = 20, 10


@pytest.fixture(scope="module")
def train(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """Trains nam56r_tiny through the stock loop, two micro-batches a step; the loss of every step, in full precision."""

    def run(precision: str, *extra: str, model_class: str = GPT) -> list[float]:
        record = tmp_path_factory.mktemp("run") / "steps"
        words = words_of(
            preset("nam56r_tiny"), *extra,
            corpus=corpus, precision=precision, model_class=model_class, micro_batch_size=4, train_iters=STEPS,
            learning_rate=1e-3,
        )  # fmt: skip
        runs.train(words, record)
        return [step.losses["lm loss"] for step in read_steps(record)]

    return run


@pytest.fixture(scope="module")
def saved(train: Callable[..., list[float]], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """A checkpoint folder of a run with FP8 experts, and its losses."""
    folder = str(tmp_path_factory.mktemp("saved"))
    words = ("--save", folder, "--save-interval", str(SAVED), "--ckpt-format", "torch_dist")
    return folder, train(FP8, *words)


def worst(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of a step's losses, as a share of the loss."""
    return max(abs(loss - other) / other for loss, other in zip(found, expected, strict=True))


def test_losses_stay_beside_those_of_bf16(train: Callable[..., list[float]], saved: tuple[str, list[float]]) -> None:
    bf16, (_, fp8) = train("bf16"), saved
    assert len(fp8) == STEPS
    assert 0 < worst(fp8[:1], bf16[:1]) < 2e-3
    assert worst(fp8, bf16) < 2e-2
    assert abs(sum(fp8[-5:]) / sum(bf16[-5:]) - 1) < 1e-2
    assert fp8[-1] < 0.9 * fp8[0]


def test_the_hybrid_model_trains_the_same(train: Callable[..., list[float]], saved: tuple[str, list[float]]) -> None:
    _, fp8 = saved
    hybrid = train(FP8, model_class=HYBRID)
    assert hybrid[0] == pytest.approx(fp8[0], rel=1e-4)
    assert worst(hybrid, fp8) < 1e-2


@pytest.mark.parametrize("precision", [FP8, "bf16"])
def test_a_checkpoint_is_the_same_with_and_without_fp8(
    train: Callable[..., list[float]], saved: tuple[str, list[float]], precision: str
) -> None:
    folder, fp8 = saved
    resumed = train(precision, "--load", folder, "--ckpt-step", str(SAVED), "--ckpt-format", "torch_dist")
    assert len(resumed) == STEPS - SAVED
    assert resumed[0] == pytest.approx(fp8[SAVED], rel=1e-4 if precision == FP8 else 5e-3)
    assert worst(resumed, fp8[SAVED:]) < (1e-2 if precision == FP8 else 2e-2)
