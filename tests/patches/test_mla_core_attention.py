"""The patch mla-core-attention: the stock local MLA builds, trains and equals stock's own mathematics; TE keeps what it fuses.

Transformer Engine is not here: its answers and its module's attributes are stood in for, its kernels are not (tests/gpu).
Legend: S queries, T keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.mla import sdpa
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.patches import mla_core_attention
from megacpp_mcore.patches.machinery.registry import Registry
from megacpp_mcore.patches.mla_core_attention import PATCH
from tests import stock
from tests.distributed.comparing import differing_tensors

B, S, H, K, V, VOCABULARY = 2, 37, 4, 12, 6, 128
MATH = SDPBackend.MATH
THD = types.SimpleNamespace(qkv_format="sbhd")
WORDS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --position-embedding-type rope
--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6
--normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.3 --micro-batch-size 2
--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
--no-rope-fusion --distributed-backend gloo --use-cpu-initialization --seq-length 64 --max-position-embeddings 64
"""
CHUNKED = (
    "mla-core-attention: DotProductAttention runs the chunked reference in float32: "
    "PyTorch's SDPA has no fused kernel here"
)
Outcome = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    mla_core_attention._say_once.cache_clear()
    mla_core_attention._te_selection.cache_clear()


@pytest.fixture(scope="module")
def patched(process: Path) -> Iterator[Registry]:
    with stock.patched(PATCH) as registry:
        yield registry


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What the patch logs meanwhile."""
    lines: list[str] = []
    with mock.patch.object(mla_core_attention.logger, "log", lambda level, line, *_, **__: lines.append(line)):
        yield lines


# --- inputs ------------------------------------------------------------------------------------------------------------


def draw(queries: int = S, keys: int = S, dtype: torch.dtype = torch.float64, width: int = K) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, B, H, width), (keys, B, H, width), (keys, B, H, V))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, cotangent.to(output.dtype))


def some_mask(*shape: int) -> torch.Tensor:
    masked = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    masked[..., 0] = False
    return masked


# --- the local implementation ------------------------------------------------------------------------------------------


def gpt(*extra: str, **changes: Any) -> Any:
    """The GPTModel that stock builds for WORDS."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.models.gpt import GPTModelBuilder

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    config = stock.model_config([*WORDS.split(), *extra])
    config.vocab_size = VOCABULARY
    for name, value in changes.items():
        setattr(config.transformer, name, value)
    return GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def losses_of(model: Any, length: int = S, mask: torch.Tensor | None = None) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (B, length + 1), generator=torch.Generator().manual_seed(3))
    return model(tokens[:, :-1], torch.arange(length).expand(B, length), mask, labels=tokens[:, 1:])


def outcome(model: Any, length: int = S, mask: torch.Tensor | None = None) -> Outcome:
    from megatron.core.pipeline_parallel.schedules import custom_backward

    model.zero_grad(set_to_none=True)
    losses = losses_of(model, length, mask)
    # As stock's schedules do it: inside of Tensor.backward the CPU lane's mode is off, and recompute asks for the GPU.
    custom_backward((losses * torch.randn(B, length, generator=torch.Generator().manual_seed(5))).sum(), None)
    return {"losses": losses.detach()} | {name: value.grad.clone() for name, value in model.named_parameters()}


def cores(model: Any) -> list[Any]:
    return [layer.self_attention.core_attention for layer in model.decoder.layers]


@contextlib.contextmanager
def stocks_own_forward(model: Any) -> Iterator[None]:
    """Hooks keep the core attention modules with stock's own forward method."""
    seen: list[Any] = []
    hooks = [module.register_forward_hook(lambda core, *_: seen.append(core)) for module in cores(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert set(seen) == set(cores(model))


def documents(length: int) -> torch.Tensor:
    """The causal mask of two documents in each row, as the dataset makes it with --reset-attention-mask."""
    document = (torch.arange(length) >= torch.tensor([[length // 3], [length // 2]])).long()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ~(causal & (document[:, :, None] == document[:, None, :]))[:, None]


def test_stock_cannot_build_it(patched: Registry) -> None:
    patched.revert()
    with pytest.raises(TypeError, match="unexpected keyword argument 'k_channels'"):
        gpt()
    patched.apply([PATCH.name])


RUNS: dict[str, tuple[tuple[str, ...], int, Callable[[int], Any]]] = {
    "no mask": ((), S, lambda length: None),
    "documents": ((), S, documents),
    "one token": ((), 1, lambda length: None),
    "equal widths": (("--v-head-dim", "12"), S, lambda length: None),
    "recompute": (("--recompute-granularity", "selective", "--recompute-modules", "core_attn"), S, documents),
    "scaling by layer": (("--apply-query-key-layer-scaling", "--attention-softmax-in-fp32"), S, lambda length: None),
    "YaRN's scale": (("--rotary-scaling-factor", "40"), S, lambda length: None),
}


@pytest.mark.parametrize("path", ["chunked", "SDPA"])
@pytest.mark.parametrize("run", RUNS)
def test_losses_and_all_gradients_are_stocks(
    patched: None, run: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected_line = CHUNKED
    if path == "SDPA":
        monkeypatch.setattr(sdpa, "FUSED", (MATH,))
        expected_line = "mla-core-attention: DotProductAttention runs MATH of PyTorch's SDPA"
    extra, length, mask_of = RUNS[run]
    model, mask = gpt(*extra).train(), mask_of(length)
    with stocks_own_forward(model):
        expected = outcome(model, length, mask)
    with said() as lines, mock.patch.object(type(cores(model)[0]), "__call__", mock.Mock()) as stocks:
        found = outcome(model, length, mask)
    assert not stocks.called
    assert lines == [expected_line]
    assert differing_tensors(expected, found, 3e-6) == []


def attention(*extra: str, **changes: Any) -> Any:
    return gpt("--num-layers", "1", *extra, **changes).decoder.layers[0].self_attention


def run(self_attention: Any, inputs: list[Any], mask: torch.Tensor | None = None, **options: Any) -> Any:
    return self_attention._run_core_attention(*inputs, mask, **options)


@pytest.mark.parametrize("path", ["chunked", "SDPA"])
@pytest.mark.parametrize("shape", [(B, 1, S, S), (1, 1, S, S), (1, 1, 1, S), (1, 1, S, 50)])
def test_a_mask_is_the_whole_mask_as_in_stock(
    patched: None, shape: tuple[int, ...], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "SDPA":
        monkeypatch.setattr(sdpa, "FUSED", (MATH,))
    layer, mask, inputs = attention(), some_mask(*shape), draw(S, shape[-1], dtype=torch.float32)
    expected = layer.core_attention(*inputs, mask)
    found = run(layer, inputs, mask)
    assert found.shape == (S, B, H * V)
    assert found.is_contiguous()
    assert_parity(found, expected, rms=2e-6)
    for have, want in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert_parity(have, want, rms=1e-5)
    truth = mla_attention(*inputs, softmax_scale=K**-0.5, attention_mask=mask, causal=False)
    assert_parity(found, truth.flatten(2), rms=2e-6)


def test_a_query_that_sees_nothing_gets_zero_and_in_stock_the_mean(patched: None) -> None:
    layer, mask, inputs = attention(), torch.zeros(1, 1, S, S, dtype=torch.bool), draw(dtype=torch.float32)
    mask[:, :, 5] = True
    assert torch.equal(run(layer, inputs, mask)[5], torch.zeros(B, H * V))
    assert_parity(layer.core_attention(*inputs, mask)[5], inputs[2].mean(0).flatten(1), rms=1e-5)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (("--attention-dropout", "0.5"), "attention dropout is 0.5"),
        (("--window-size", "3,0"), "attention has a window"),
        (("--softmax-type", "off-by-one"), "the softmax is off-by-one"),
    ],
)
def test_stock_runs_what_is_out_of_scope_and_says_so_once(patched: None, extra: tuple[str, ...], reason: str) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    layer, inputs = attention(*extra).train(), draw(dtype=torch.float32)
    found = []
    with said() as lines:
        for compute in (run, run, lambda layer, inputs: layer.core_attention(*inputs, None)):
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            found.append(compute(layer, inputs))
        assert all(torch.equal(one, found[-1]) for one in found)
        if "dropout" in reason:
            run(layer.eval(), inputs)
    assert lines == [f"mla-core-attention: DotProductAttention runs as stock: {reason}"] + [CHUNKED] * (
        "dropout" in reason
    )


def test_stock_refuses_what_it_refuses(patched: None) -> None:
    layer, inputs = attention(), draw(dtype=torch.float32)
    for given, options, says, reason in (
        (inputs, {"packed_seq_params": THD}, "Packed sequence is not", "the sequences are packed"),
        (inputs, {"attention_bias": torch.zeros(1)}, "Attention bias is not", "it is called with attention_bias"),
        (draw(5, 9, torch.float32), {}, "causal mask is only for", "causal attention has not as many queries as keys"),
    ):  # fmt: skip
        with said() as lines, pytest.raises(AssertionError, match=says):
            run(layer, given, **options)
        assert lines[0].startswith(f"mla-core-attention: DotProductAttention runs as stock: {reason}")
    step = draw(1, 9, torch.float32)  # a decoding step sees all keys
    assert_parity(run(layer, step), mla_attention(*step, softmax_scale=K**-0.5, causal=False).flatten(2), rms=2e-6)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_asks_for_no_kernel_that_is_not(patched: None, deterministic: bool) -> None:
    layer = attention()
    layer.config.deterministic_mode = deterministic
    with mock.patch.object(sdpa, "fused_backend", return_value=None) as asked:
        run(layer, draw(dtype=torch.float32))
    assert asked.call_args.kwargs["deterministic"] is deterministic


def test_widths_of_dot_product_attention(patched: None) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = attention().config
    words = (config, 1, AttnMaskType.causal, "self")
    plain, wide = DotProductAttention(*words), DotProductAttention(*words, k_channels=12, v_channels=6)
    assert (plain.softmax_scale, plain.hidden_size_per_partition) == (pytest.approx(config.kv_channels**-0.5), 32)
    assert (wide.softmax_scale, wide.hidden_size_per_partition) == (12**-0.5, 24)
    assert DotProductAttention(*words, softmax_scale=0.5, k_channels=12, v_channels=6).softmax_scale == 0.5
    with pytest.raises(ModelError, match="k_channels=12 and v_channels=None, expected both or neither"):
        DotProductAttention(*words, k_channels=12)


# --- Transformer Engine ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class AttentionParams:
    """A part of Transformer Engine's, as another version might have it."""

    qkv_dtype: Any = None
    qkv_layout: str = ""
    max_seqlen_q: int = 0
    head_dim_qk: int = 0
    head_dim_v: int = 0
    attn_mask_type: str = ""
    window_size: Any = None
    is_training: bool = True
    cuda_graph: bool = False


class Engine:
    """Stands for Transformer Engine: answers with ``choice``, and remembers what it was asked and what ran."""

    def __init__(self) -> None:
        self.choice, self.ran = "unfused", 0
        self.asked: list[AttentionParams] = []
        self.kind: Any = None

    def get_attention_backend(self, params: AttentionParams) -> tuple[Any, ...]:
        self.asked.append(params)
        version = "4.0.0b36" if self.choice == "flash 4" else "2.8.3"
        return (self.choice.startswith("flash"), version, self.choice == "fused", None, self.choice == "unfused", [])


@pytest.fixture
def engine(patched: None, monkeypatch: pytest.MonkeyPatch) -> Engine:
    found = Engine()

    class TEDotProductAttention(torch.nn.Module):
        def forward(self, *_: Any, **__: Any) -> str:
            found.ran += 1
            return "stock"

    graph = types.SimpleNamespace(is_graph_capturing=lambda: False)
    utils = types.SimpleNamespace(AttentionParams=AttentionParams, get_attention_backend=found.get_attention_backend)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.graph", graph)
    monkeypatch.setitem(sys.modules, mla_core_attention._TE_UTILS, utils)
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(extension, "TEDotProductAttention", TEDotProductAttention)
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    found.kind = TEDotProductAttention
    return found


def te_attention(engine: Engine) -> Any:
    """A stock MLA whose core attention has the attributes of TEDotProductAttention that matter."""
    layer = attention()
    core = engine.kind()
    core.config, core.qkv_format, core.te_forward_mask_type = layer.config, "sbhd", True
    core.cp_group, core.num_splits, core.deterministic = None, None, False
    core.attention_dropout, core.softmax_scale = 0.0, 0.37
    layer.core_attention = core
    return layer.train()


FLASH_4 = "selects FlashAttention 4, which takes its causal window for an empty one"


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
@pytest.mark.parametrize(("choice", "why"), [("unfused", "is unfused"), ("flash 4", FLASH_4)])
def test_unfused_goes_to_sdpa(
    engine: Engine, choice: str, why: str, mask_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    engine.choice = choice
    monkeypatch.setattr(sdpa, "FUSED", (MATH,))
    layer, inputs = te_attention(engine), draw(dtype=torch.float32)
    with said() as lines:
        # Transformer Engine ignores a mask under these two types.
        for _ in range(2):
            found = run(layer, inputs, some_mask(B, 1, S, S), attn_mask_type=AttnMaskType[mask_type])
    expected = mla_attention(*inputs, softmax_scale=0.37, causal=mask_type == "causal").flatten(2)
    assert_parity(found, expected, rms=2e-6)
    for have, want in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert_parity(have[1:], want[1:], rms=1e-5)
    assert engine.ran == 0
    assert len(engine.asked) == 1
    assert engine.asked[0] == AttentionParams(
        torch.float32, "sbhd_sbhd_sbhd", S, K, V, mask_type, (-1, 0 if mask_type == "causal" else -1), True, False
    )
    assert lines == [
        f"mla-core-attention: TEDotProductAttention runs MATH of PyTorch's SDPA: at widths 12/6 Transformer Engine {why}"
    ]


@pytest.mark.parametrize(
    ("choice", "level", "reason"),
    [
        ("fused", logging.INFO, "at widths 12/6 Transformer Engine selects its fused backend"),
        ("flash", logging.INFO, "at widths 12/6 Transformer Engine selects its flash backend"),
        ("none", logging.INFO, "at widths 12/6 Transformer Engine selects its no backend"),
        ("unfused", logging.WARNING, "neither Transformer Engine nor PyTorch's cuDNN or flash has a fused kernel"),
    ],
)
def test_stock_stays_where_it_is_fused_and_where_sdpa_has_nothing(
    engine: Engine, choice: str, level: int, reason: str
) -> None:
    engine.choice = choice
    layer = te_attention(engine)
    with mock.patch.object(mla_core_attention, "_say_once") as say:
        assert run(layer, draw(dtype=torch.float32)) == "stock"
    ((found_level, line),) = [call.args for call in say.call_args_list]
    assert found_level == level
    assert line.startswith("TEDotProductAttention runs as stock: ")
    assert reason in line


def config_with(**values: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.core_attention.config = layer.core_attention.config.__class__.__new__(layer.config.__class__)
        layer.core_attention.config.__dict__.update(vars(layer.config) | values)

    return change


def core_with(**values: Any) -> Callable[[Any], None]:
    return lambda layer: vars(layer.core_attention).update(values)


LAYERS: list[tuple[Callable[[Any], Any], str]] = [
    (config_with(window_size=(3, 0)), "attention has a window"),
    (config_with(softmax_type="learnable"), "the softmax is learnable"),
    (config_with(attention_backend=None), "the run asks for a backend"),
    (config_with(context_parallel_size=2), "context is parallel"),
    (core_with(cp_group=object()), "context is parallel"),
    (config_with(fp8_dot_product_attention=True), "attention is in FP8"),
    (config_with(fp8_multi_head_attention=True), "attention is in FP8"),
    (config_with(fp8="hybrid", fp8_recipe="custom"), "the FP8 recipe is the user's own"),
    (config_with(qk_clip=True), "the largest logit is wanted"),
    (config_with(log_max_attention_logit=True), "the largest logit is wanted"),
    (config_with(deterministic_mode=True), "the run is deterministic"),
    (core_with(deterministic=True), "the run is deterministic"),
    (core_with(attention_dropout=0.1), "attention dropout is 0.1"),
    (core_with(num_splits=1), "num_splits is 1"),
    (core_with(qkv_format="bshd"), "the layout is bshd"),
    (core_with(te_forward_mask_type=False), "the layout is sbhd, or Transformer Engine older"),
    (core_with(softmax_scale=None), "this Transformer Engine does not tell its softmax scale"),
    (lambda layer: layer.core_attention.register_forward_pre_hook(lambda *_: None), "it has hooks"),
]
CALLS: list[tuple[Callable[..., list[Any]], str]] = [
    (lambda q, k, v: [q, k, k], "the widths 12/12 are equal, which Transformer Engine fuses"),
    (lambda q, k, v: [q, k.bfloat16(), v], "query, key and value have several dtypes, or autocast is on"),
    (
        lambda q, k, v: [q, k[:, :, :2], v[:, :, :2]],
        "query, key and value do not have the same batch, heads and widths",
    ),
    (lambda q, k, v: [q, k, None], "query, key and value are not plain tensors of four axes"),
    (lambda q, k, v: [q[:5], k[:9], v[:9]], "causal attention has not as many queries as keys"),
]


@pytest.mark.parametrize(
    ("change", "call", "reason"),
    [(change, lambda *qkv: [*qkv], reason) for change, reason in LAYERS]
    + [(lambda _: None, call, reason) for call, reason in CALLS],
)
def test_transformer_engine_runs_what_is_out_of_scope(
    engine: Engine, change: Callable[[Any], Any], call: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "FUSED", (MATH,))
    layer = te_attention(engine)
    change(layer)
    with said() as lines:
        assert run(layer, call(*draw(dtype=torch.float32))) == "stock"
    assert len(lines) == 1
    assert lines[0].startswith(f"mla-core-attention: TEDotProductAttention runs as stock: {reason}")
    assert engine.asked == []


def test_calls_out_of_scope(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    monkeypatch.setattr(sdpa, "FUSED", (MATH,))
    layer, inputs = te_attention(engine), draw(dtype=torch.float32)
    with said() as lines:
        assert run(layer, inputs, attn_mask_type=AttnMaskType.padding) == "stock"
        assert run(layer, inputs, packed_seq_params=THD) == "stock"
        with torch.autocast("cpu"):
            assert run(layer, inputs) == "stock"
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
        assert run(layer, inputs) == "stock"
    assert engine.asked == []
    assert [line.partition("as stock: ")[2] for line in lines] == [
        "the mask is of type padding",
        "the sequences are packed",
        "query, key and value have several dtypes, or autocast is on",
        "the run asks for a backend (--attention-backend, NVTE_FUSED_ATTN)",
    ]


def test_a_transformer_engine_that_cannot_be_asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = te_attention(engine), draw(dtype=torch.float32)
    monkeypatch.setattr(sys.modules[mla_core_attention._TE_UTILS], "get_attention_backend", lambda _: (1, 2, 3))
    with said() as lines:
        assert run(layer, inputs) == "stock"
    assert "answers with 3 values when asked for its backend; 6 are expected" in lines[0]
    mla_core_attention._te_selection.cache_clear()
    monkeypatch.setitem(sys.modules, mla_core_attention._TE_UTILS, None)
    with said() as lines:
        assert run(layer, inputs) == "stock"
    assert "this Transformer Engine cannot be asked for its backend" in lines[0]
