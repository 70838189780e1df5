"""The patch mla-core-attention: the stock local MLA builds, trains and equals stock's own mathematics; TE keeps what it fuses.

Transformer Engine is not here: its answers and its module's attributes are stood in for, its kernels are not (tests/gpu).
Legend: S queries, T keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
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
from megacpp_mcore.ops.packed import documents as documents_of_rows
from megacpp_mcore.ops.packed.documents import seq_idx_from_cu_seqlens
from megacpp_mcore.ops.testing import assert_parity
from megacpp_mcore.patches import mla_core_attention
from megacpp_mcore.patches.machinery.registry import Registry
from megacpp_mcore.patches.mla_core_attention import PATCH
from tests import micro_batch, stock
from tests.distributed.comparing import differing_tensors
from tests.errors import raises
from tests.host_reads import host_reads
from tests.micro_batch import packed
from tests.ops.test_mla import gradients

B, S, H, K, V, VOCABULARY = 2, 37, 4, 12, 6, 128
MATH, ON_A_CPU = SDPBackend.MATH, sdpa.FUSED
THD = types.SimpleNamespace(qkv_format="sbhd")
WORDS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --position-embedding-type rope
--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6
--normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.3 --micro-batch-size 2
--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --transformer-impl local
--no-persist-layer-norm --no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
--no-rope-fusion --distributed-backend gloo --use-cpu-initialization --seq-length 64 --max-position-embeddings 64
"""
CHUNKED = "mla-core-attention: DotProductAttention runs reference: PyTorch's SDPA has no fused kernel here"
Outcome = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> None:
    mla_core_attention._log_once.cache_clear()
    mla_core_attention._te_selection.cache_clear()


@pytest.fixture(scope="module")
def patched(process: Path) -> Iterator[Registry]:
    with stock.patched(PATCH) as registry:
        yield registry


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What the patch logs meanwhile."""
    lines: list[str] = []
    record = {"log": lambda level, line, *_, **__: lines.append(line), "isEnabledFor": lambda level: True}
    with mock.patch.multiple(mla_core_attention.logger, **record):
        yield lines


def draw(queries: int = S, keys: int = S, dtype: torch.dtype = torch.float64, width: int = K) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, B, H, width), (keys, B, H, width), (keys, B, H, V))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def some_mask(*shape: int) -> torch.Tensor:
    masked = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    masked[..., 0] = False
    return masked


def gpt(*extra: str, **changes: Any) -> Any:
    """The GPTModel that stock builds for WORDS."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    stock.restart_random()
    torch.manual_seed(1)
    config = stock.model_config([*WORDS.split(), *extra])
    config.vocab_size = VOCABULARY
    vars(config.transformer).update(changes)
    return GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def losses_of(model: Any, length: int = S, mask: torch.Tensor | None = None) -> torch.Tensor:
    tokens = torch.randint(0, VOCABULARY, (B, length + 1), generator=torch.Generator().manual_seed(3))
    return micro_batch.losses_of(model, tokens, attention_mask=mask)


def outcome(model: Any, length: int = S, mask: torch.Tensor | None = None) -> Outcome:
    model.zero_grad(set_to_none=True)
    losses = losses_of(model, length, mask)
    micro_batch.backward((losses * torch.randn(B, length, generator=torch.Generator().manual_seed(5))).sum())
    return {"losses": losses.detach()} | micro_batch.gradients(model)


def cores(model: Any) -> list[Any]:
    return [layer.self_attention.core_attention for layer in model.decoder.layers]


@contextlib.contextmanager
def stocks_own_forward(model: Any) -> Iterator[None]:
    """Hooks keep the core attention modules with stock's own forward method."""
    seen: list[Any] = []
    with contextlib.ExitStack() as hooks:
        for module in cores(model):
            hooks.enter_context(module.register_forward_hook(lambda core, *_: seen.append(core)))
        yield
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
def test_losses_and_all_gradients_are_stocks(patched: None, run: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected_line = CHUNKED
    if path == "SDPA":
        monkeypatch.setattr(sdpa, "FUSED", (MATH,))
        expected_line = (
            "mla-core-attention: DotProductAttention runs sdpa MATH: Megatron's local core attention holds every score"
        )
    extra, length, mask_of = RUNS[run]
    model, mask = gpt(*extra).train(), mask_of(length)
    with stocks_own_forward(model):
        expected = outcome(model, length, mask)
    with said() as lines, mock.patch.object(type(cores(model)[0]), "__call__", mock.Mock()) as stocks:
        actual = outcome(model, length, mask)
    assert not stocks.called
    assert lines == [expected_line]
    assert differing_tensors(expected, actual, 3e-6) == []


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
    output = run(layer, inputs, mask)
    assert output.shape == (S, B, H * V)
    assert output.is_contiguous()
    assert_parity(output, expected, rms=2e-6)
    for grad, expected_grad in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        assert_parity(grad, expected_grad, rms=1e-5)
    truth = mla_attention(*inputs, softmax_scale=K**-0.5, attention_mask=mask, causal=False)
    assert_parity(output, truth.flatten(2), rms=2e-6)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (("--attention-dropout", "0.5"), "attention dropout is 0.5"),
        (("--window-size", "3,0"), "attention has a window"),
        (("--softmax-type", "off-by-one"), "the softmax is off-by-one"),
    ],
)
def test_stock_runs_what_is_out_of_scope_and_says_so_once(patched: None, extra: tuple[str, ...], reason: str) -> None:
    layer, inputs = attention(*extra).train(), draw(dtype=torch.float32)
    outputs = []
    with said() as lines:
        for compute in (run, run, lambda layer, inputs: layer.core_attention(*inputs, None)):
            stock.restart_random()
            outputs.append(compute(layer, inputs))
        assert all(torch.equal(output, outputs[-1]) for output in outputs)
        if "dropout" in reason:
            run(layer.eval(), inputs)
    assert lines == [f"mla-core-attention: DotProductAttention runs as stock: {reason}"] + [CHUNKED] * ("dropout" in reason)


def test_stock_refuses_what_it_refuses(patched: None) -> None:
    layer, inputs = attention(), draw(dtype=torch.float32)
    for qkv, options, says, reason in (
        (inputs, {"packed_seq_params": THD}, "Packed sequence is not", "the sequences are packed as sbhd, or also have a mask"),
        (inputs, {"attention_bias": torch.zeros(1)}, "Attention bias is not", "it is called with attention_bias"),
        (draw(5, 9, torch.float32), {}, "only for self", "causal attention has different numbers of queries and keys"),
    ):  # fmt: skip
        with said() as lines, pytest.raises(AssertionError, match=says):
            run(layer, qkv, **options)
        assert lines[0].startswith(f"mla-core-attention: DotProductAttention runs as stock: {reason}")
    step = draw(1, 9, torch.float32)  # a decoding step sees all keys
    assert_parity(run(layer, step), mla_attention(*step, softmax_scale=K**-0.5, causal=False).flatten(2), rms=2e-6)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_run_asks_for_no_kernel_that_is_not(patched: None, deterministic: bool) -> None:
    layer = attention()
    layer.config.deterministic_mode = deterministic
    with mock.patch.object(sdpa, "fused_backend", return_value=None) as fused_backend:
        run(layer, draw(dtype=torch.float32))
    assert fused_backend.call_args.kwargs["deterministic"] is deterministic


def test_widths_of_dot_product_attention(patched: None) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = attention().config
    words = (config, 1, AttnMaskType.causal, "self")
    plain, wide = DotProductAttention(*words), DotProductAttention(*words, k_channels=12, v_channels=6)
    assert (plain.softmax_scale, plain.hidden_size_per_partition) == (pytest.approx(config.kv_channels**-0.5), 32)
    assert (wide.softmax_scale, wide.hidden_size_per_partition) == (12**-0.5, 24)
    assert DotProductAttention(*words, softmax_scale=0.5, k_channels=12, v_channels=6).softmax_scale == 0.5
    with raises(ModelError, "k_channels=12", "v_channels=None"):
        DotProductAttention(*words, k_channels=12)


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
    batch_size: int = 1
    num_tokens_q: int = 0


class Engine:
    """Stands for Transformer Engine: answers with ``choice``, remembers what it was asked, counts what it ran."""

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
    stub = Engine()

    class TEDotProductAttention(torch.nn.Module):
        def forward(self, *tensors: Any, packed_seq_params: Any = None, **_: Any) -> Any:
            stub.ran += 1
            if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
                return "stock"
            assert all(tensor.dim() == 3 for tensor in tensors[:3]), "tensors must be 3D"
            return by_sequence(*tensors[:3], packed_seq_params.cu_seqlens_q, self.softmax_scale).flatten(1)

    graph = types.SimpleNamespace(is_graph_capturing=lambda: False)
    utils = types.SimpleNamespace(AttentionParams=AttentionParams, get_attention_backend=stub.get_attention_backend)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.graph", graph)
    monkeypatch.setitem(sys.modules, mla_core_attention._TE_UTILS, utils)
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(extension, "TEDotProductAttention", TEDotProductAttention)
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    monkeypatch.setattr(sdpa, "FUSED", (MATH,))
    stub.kind = TEDotProductAttention
    return stub


def te_attention(engine: Engine, *extra: str) -> Any:
    """A stock MLA whose core attention has the attributes of TEDotProductAttention that matter."""
    layer = attention(*extra)
    core = engine.kind()
    core.config, core.qkv_format, core.te_forward_mask_type = layer.config, "sbhd", True
    core.cp_group, core.num_splits, core.deterministic = None, None, False
    core.attention_dropout, core.softmax_scale = 0.0, 0.37
    layer.core_attention = core
    return layer.train()


FLASH_4 = "selects FlashAttention 4, which takes its causal window for an empty one"


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
@pytest.mark.parametrize(("choice", "why"), [("unfused", "is unfused"), ("flash 4", FLASH_4)])
def test_unfused_goes_to_sdpa(engine: Engine, choice: str, why: str, mask_type: str) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    engine.choice = choice
    layer, inputs = te_attention(engine), draw(dtype=torch.float32)
    with said() as lines:
        # Transformer Engine ignores a mask under these two types.
        for _ in range(2):
            output = run(layer, inputs, some_mask(B, 1, S, S), attn_mask_type=AttnMaskType[mask_type])
    expected = mla_attention(*inputs, softmax_scale=0.37, causal=mask_type == "causal").flatten(2)
    assert_parity(output, expected, rms=2e-6)
    for grad, expected_grad in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        assert_parity(grad[1:], expected_grad[1:], rms=1e-5)
    assert engine.ran == 0
    assert len(engine.asked) == 1
    assert engine.asked[0] == AttentionParams(
        torch.float32, "sbhd_sbhd_sbhd", S, K, V, mask_type, (-1, 0 if mask_type == "causal" else -1), True, False, B
    )
    assert lines == [f"mla-core-attention: TEDotProductAttention runs sdpa MATH: at widths 12/6 Transformer Engine {why}"]


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
    engine: Engine, choice: str, level: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "FUSED", ON_A_CPU)
    engine.choice = choice
    layer = te_attention(engine)
    with mock.patch.object(mla_core_attention, "_log_once") as say:
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
    (config_with(attention_backend=None), "the run requests a backend"),
    (config_with(context_parallel_size=2), "context parallelism is on"),
    (core_with(cp_group=object()), "context parallelism is on"),
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
CALLS: list[tuple[Callable[..., list[Any]], dict[str, Any], str]] = [
    (lambda q, k, v: [q, k, k], {}, "the widths 12/12 are equal, which Transformer Engine fuses"),
    (lambda q, k, v: [q, k.bfloat16(), v], {}, "query, key and value have several dtypes, or autocast is on"),
    (lambda q, k, v: [q, k[:, :, :2], v[:, :, :2]], {}, "query, key and value do not have the same batch, heads and"),
    (lambda q, k, v: [q, k, None], {}, "query, key and value are not plain tensors of 4 axes"),
    (lambda q, k, v: [q[:5], k[:9], v[:9]], {}, "causal attention has different numbers of queries and keys"),
    (lambda *qkv: [*qkv], {"attn_mask_type": "padding"}, "the mask is of type padding"),
    (lambda *qkv: [*qkv], {"packed_seq_params": THD}, "the sequences are packed as sbhd, or also have a mask"),
]
STARTS = torch.tensor([0, 5, S], dtype=torch.int32)
PACKS_OUT_OF_SCOPE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"cu_seqlens_kv": STARTS.clone()}, {}, "cu_seqlens_kv differs"),
    ({"cu_seqlens_q_padded": STARTS, "cu_seqlens_kv_padded": STARTS}, {}, "there is padding between packed sequences"),
    ({"pad_between_seqs": True}, {}, "there is padding between packed sequences"),
    ({"local_cp_size": 1}, {}, "context parallelism is on"),
    ({"cp_group": object()}, {}, "context parallelism is on"),
    ({}, {"mask": torch.zeros(1, 1, S, S, dtype=torch.bool)}, "the sequences are packed as thd, or also have a mask"),
    ({}, {"attn_mask_type": "no_mask"}, "packed sequences have a mask of type no_mask"),
    ({}, {"attn_mask_type": "padding"}, "packed sequences have a mask of type padding"),
]


@pytest.mark.parametrize(
    ("change", "call", "pack", "options", "reason"),
    [(change, lambda *qkv: [*qkv], None, {}, reason) for change, reason in LAYERS]
    + [(lambda _: None, call, None, options, reason) for call, options, reason in CALLS]
    + [(lambda _: None, None, *row) for row in PACKS_OUT_OF_SCOPE],
)
def test_transformer_engine_runs_what_is_out_of_scope(
    engine: Engine, change: Callable[[Any], Any], call: Any, pack: Any, options: dict[str, Any], reason: str
) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    layer, arguments = te_attention(engine), dict(options)
    change(layer)
    if "attn_mask_type" in arguments:
        arguments["attn_mask_type"] = AttnMaskType[arguments["attn_mask_type"]]
    if pack is not None:
        arguments["packed_seq_params"] = packed([5, 32], **pack)
    with said() as lines:
        run(layer, draw_packed() if call is None else call(*draw(dtype=torch.float32)), **arguments)
    assert (engine.ran, engine.asked, len(lines)) == (1, [], 1)
    assert lines[0].startswith(f"mla-core-attention: TEDotProductAttention runs as stock: {reason}")


def test_surroundings_out_of_scope(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, inputs = te_attention(engine), draw(dtype=torch.float32)
    with said() as lines:
        with torch.autocast("cpu"):
            assert run(layer, inputs) == "stock"
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
        assert run(layer, inputs) == "stock"
        with pytest.raises(AssertionError, match="tensors must be 3D"):
            run(layer, inputs, packed_seq_params=packed([5, 32]))
    assert engine.asked == []
    assert [line.partition("as stock: ")[2] for line in lines] == [
        "query, key and value have several dtypes, or autocast is on",
        "the run requests a backend (--attention-backend, NVTE_FUSED_ATTN)",
        "query, key and value are not plain tensors of 3 axes",
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


PACKS = {
    "documents": [5, 1, 14, 17],
    "one document": [S],
    "one token each": [1] * S,
    "empty documents": [0, 9, 0, 28, 0],
    "rows behind the last": [5, 20],
}


def by_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> torch.Tensor:
    """Plain causal attention ``[S, H, V]``, one sequence at a time; the rows behind the last are one more."""
    lengths = [*cu_seqlens.diff().tolist(), len(q) - int(cu_seqlens[-1])]
    outputs = []
    for one_q, one_k, one_v in zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True):
        score = torch.einsum("shk,thk->hst", one_q, one_k) * scale
        hidden = torch.ones(score.shape[1:], dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hst,thv->shv", score.masked_fill(hidden, -torch.inf).softmax(-1), one_v))
    return torch.cat(outputs)


def draw_packed(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key and value ``[S, H, ·]``."""
    return [tensor.detach()[:, 0].clone().requires_grad_() for tensor in draw(dtype=dtype)]


@pytest.mark.parametrize("core", ["Transformer Engine", "local"])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_sequences_attend_to_themselves(engine: Engine, pack: str, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, scale = (attention(), K**-0.5) if core == "local" else (te_attention(engine), 0.37)
    if core == "local":
        monkeypatch.setattr(sdpa, "FUSED", ON_A_CPU)
    inputs, parameters = draw_packed(), packed(PACKS[pack])
    output = run(layer, inputs, packed_seq_params=parameters)
    expected = by_sequence(*inputs, parameters.cu_seqlens_q, scale).reshape(output.shape)
    assert engine.ran == 0
    assert_parity(output, expected, rms=1e-12)
    for grad, expected_grad in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        assert float((grad - expected_grad).abs().max()) < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_of_packed_sequences_is_stocks(engine: Engine, recompute: bool) -> None:
    """Around the core attention stock pads values, cuts the output, and gives it another shape."""
    words = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn") if recompute else ()
    layer, hidden = te_attention(engine, *words), torch.randn(S, 1, 32, requires_grad=True)

    def outcome_of_layer() -> Outcome:
        layer.zero_grad(set_to_none=True)
        hidden.grad = None
        output, _ = layer(hidden, None, packed_seq_params=packed(PACKS["documents"]))
        micro_batch.backward((output * torch.arange(32.0)).sum())
        return {"output": output.detach(), "hidden": hidden.grad.clone(), **micro_batch.gradients(layer)}

    hook = layer.core_attention.register_forward_pre_hook(lambda *_: None)
    expected, ran = outcome_of_layer(), engine.ran
    hook.remove()
    actual = outcome_of_layer()
    assert engine.ran == ran > 0
    assert differing_tensors(expected, actual, 3e-6) == []


def test_packed_sequences_are_read_once_a_micro_batch_and_nobody_waits(patched: None) -> None:
    layers, inputs = [attention(), attention()], draw_packed()
    with mock.patch.object(documents_of_rows, "seq_idx_from_cu_seqlens", wraps=seq_idx_from_cu_seqlens) as read:
        for parameters in (packed([5, 32]), packed([20, 17])):
            with host_reads() as counts:
                for layer in layers:
                    run(layer, inputs, packed_seq_params=parameters)
            assert not counts
    assert read.call_count == 2


def test_what_is_no_padding_and_no_other_mask_stays_in_scope(engine: Engine) -> None:
    """Padded numbers that are the same, as pretrain_gpt.py has them; one who packs and says that there is none."""
    from megatron.core.transformer.enums import AttnMaskType

    layer, inputs, parameters = te_attention(engine), draw_packed(), packed([5, 32])
    parameters.cu_seqlens_q_padded = parameters.cu_seqlens_kv_padded = parameters.cu_seqlens_q
    without = packed([5, 32], cu_seqlens_q_padded=STARTS, cu_seqlens_kv_padded=STARTS, pad_between_seqs=False)
    expected = run(layer, inputs, packed_seq_params=packed([5, 32]), attn_mask_type=AttnMaskType.padding_causal)
    for packing in (packed([5, 32]), parameters, without):
        assert torch.equal(run(layer, inputs, packed_seq_params=packing), expected)
    assert engine.ran == 0


def test_what_transformer_engine_is_asked_of_packed_sequences(engine: Engine) -> None:
    """As stock calls it, with values of the width of keys; but the same of batches of about as many sequences."""
    layer, inputs = te_attention(engine), draw_packed(torch.float32)
    with said() as lines:
        for lengths in ([5, 1, 14, 17], [5, 4, 28]):
            run(layer, inputs, packed_seq_params=packed(lengths))
        run(layer, inputs, packed_seq_params=packed([S], max_seqlen_q=None))
    question = AttentionParams(
        torch.float32, "thd_thd_thd", 32, K, K, "padding_causal", (-1, 0), True, False, 4, num_tokens_q=64
    )
    assert engine.asked == [question, dataclasses.replace(question, max_seqlen_q=64, batch_size=1)]
    begin = "mla-core-attention: TEDotProductAttention runs"
    assert lines == [f"{begin} sdpa MATH: at widths 12/6, packed, Transformer Engine is unfused"]
    mla_core_attention._te_selection.cache_clear()
    engine.choice = "fused"
    run(layer, inputs, packed_seq_params=packed([5, 32]))
    assert engine.ran == 1


def test_flash_attention_4_runs_by_the_op_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands for its kernels, which no CPU has."""
    monkeypatch.delenv("NVTE_FLASH_ATTN_V4", raising=False)
    monkeypatch.setattr(sdpa, "FUSED", ON_A_CPU)
    monkeypatch.setattr(mla_core_attention, "_flash4", lambda *sizes: mla_attention if sizes == (K, V, torch.float64) else None)
    layer, inputs, parameters = te_attention(engine), draw_packed(), packed(PACKS["documents"])
    with said() as lines:
        output = run(layer, inputs, packed_seq_params=parameters)
    assert os.environ["NVTE_FLASH_ATTN_V4"] == "0"
    assert_parity(output, by_sequence(*inputs, parameters.cu_seqlens_q, 0.37).reshape(output.shape), rms=1e-12)
    begin = "mla-core-attention: TEDotProductAttention runs"
    assert lines == [f"{begin} flash4: at widths 12/6, packed, Transformer Engine is unfused"]
