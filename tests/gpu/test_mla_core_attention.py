"""MLA by cuDNN, flash and Triton on a GPU: parity with float64, no copies, no waits, CUDA graphs; at the seam, packed or not.

Shape legend: S queries, T keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from megacpp_mcore.ops.mla import sdpa
from megacpp_mcore.ops.mla import triton as mla_kernels
from megacpp_mcore.ops.mla.reference import mla_attention
from megacpp_mcore.ops.packed.documents import other_documents, seq_idx_from_cu_seqlens
from megacpp_mcore.ops.testing import EARLY, assert_parity, query_gradient_terms
from tests.gpu.device import peak, replayed, without_waiting

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
CUDNN, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
Op = Callable[..., torch.Tensor]
Inputs = list[torch.Tensor]


def draw(
    S: int, B: int = 2, H: int = 3, K: int = 128, V: int = 64, dtype: torch.dtype = torch.bfloat16, T: int | None = None
) -> Inputs:
    """Queries, keys, values, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(7)
    shapes = ((S, B, H, K), (T or S, B, H, K), (T or S, B, H, V), (S, B, H, V))
    tensors = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, attention_mask: Any = None, causal: bool
) -> torch.Tensor:
    """Plain PyTorch in the dtype of its inputs."""
    score = torch.einsum("sbhk,tbhk->bhst", q, k) * softmax_scale
    hidden = torch.zeros_like(score, dtype=torch.bool) if attention_mask is None else attention_mask.expand_as(score)
    if causal:
        hidden = hidden | ~torch.ones_like(score[0, 0], dtype=torch.bool).tril()
    return torch.einsum("bhst,tbhv->sbhv", score.masked_fill(hidden, -1e4).softmax(-1), v)


def outcome(op: Op, inputs: Inputs, **options: Any) -> list[torch.Tensor]:
    output = op(*inputs[:3], **options)
    return [output.detach(), *torch.autograd.grad(output, inputs[:3], inputs[3].reshape(output.shape))]


def truth(inputs: Inputs, **options: Any) -> list[torch.Tensor]:
    double = [tensor.detach().double() for tensor in inputs]
    return outcome(mla_attention, [*(tensor.requires_grad_() for tensor in double[:3]), double[3]], **options)


def assert_same(
    inputs: Inputs,
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
    peer: list[torch.Tensor],
    rms: float,
    softmax_scale: float,
    attention_mask: torch.Tensor | None = None,
    causal: bool = True,
) -> None:
    for name, actual, exact, other in zip(("o", "dq", "dk", "dv"), found, expected, peer, strict=True):
        actual, exact, other = (tensor.reshape(actual.shape) for tensor in (actual, exact, other))
        if name in ("dq", "dk"):
            hidden = torch.zeros(1, 1, len(inputs[0]), len(inputs[1]), dtype=torch.bool, device="cuda")
            hidden = hidden if attention_mask is None else hidden | attention_mask
            hidden = hidden | ~torch.ones_like(hidden).tril() if causal else hidden
        if name == "dq":
            few_SB = ((~hidden).sum(-1)[:, 0] <= EARLY).T.expand(actual.shape[:2])
            rows = slice(None) if attention_mask is not None else slice(EARLY)
            q, do = inputs[0][rows], inputs[3].reshape(*actual.shape[:3], -1)[rows]
            terms = query_gradient_terms(q, inputs[1], inputs[2], do, softmax_scale, hidden[:, :, rows])
            error = (actual[rows].double() - exact[rows]).norm(dim=-1) / terms
            assert float(error[few_SB[rows]].max() if few_SB.any() else 0.0) <= rms, "dq of queries that see few keys"
            actual, exact, other = (tensor[~few_SB] for tensor in (actual, exact, other))
        if name == "dk" and attention_mask is not None:
            # In a short document the terms cancel in a key's gradient, too: there it is small next to other keys'.
            few_TB = ((~hidden).sum(-2)[:, 0] <= EARLY).T.expand(actual.shape[:2])
            error = (actual.double() - exact)[few_TB].norm(dim=-1) / exact.norm(dim=-1).max()
            assert float(error.max() if few_TB.any() else 0.0) <= rms, "dk of keys that few queries see"
            actual, exact, other = (tensor[~few_TB] for tensor in (actual, exact, other))
        if not len(actual):
            continue
        # Which of two float32 sums is off by an ulp more is chance; in 16 bits the rounding is what counts.
        factor = 2.0 if other.dtype != torch.float32 else None
        assert_parity(actual, exact, rms=rms, dtype_peer=other, max_abs_factor=factor, name=name)


def check(op: Op, inputs: Inputs, rms: float = 5e-3, peer: list[torch.Tensor] | None = None, **options: Any) -> None:
    """Fail unless ``op`` gives what the reference does in float64 with ``options``, as near as ``peer`` (or plain PyTorch)."""
    options = {"softmax_scale": 128**-0.5, "causal": True} | options
    peer = outcome(eager, inputs, **options) if peer is None else peer
    assert_same(inputs, outcome(op, inputs), truth(inputs, **options), peer, rms, **options)


@pytest.mark.parametrize(
    ("S", "T", "H", "K", "V"),
    [(2345, None, 3, 128, 64), (130, None, 56, 128, 64), (512, None, 4, 192, 128), (256, 384, 3, 128, 64)],
)
def test_cudnn_parity(S: int, T: int | None, H: int, K: int, V: int) -> None:
    inputs, options = draw(S, 2, H, K, V, T=T), {"softmax_scale": K**-0.5, "causal": T is None}
    assert sdpa.fused_backend(*inputs[:3], causal=T is None) == CUDNN
    assert sdpa.sdpa_attention(*inputs[:3], **options).is_contiguous()
    check(partial(sdpa.sdpa_attention, **options), inputs, **options)


@pytest.mark.parametrize(("dtype", "rms"), [(torch.bfloat16, 5e-3), (torch.float32, 4e-6)])
@pytest.mark.parametrize(("S", "causal", "shape"), [(2345, True, (2, 1, 1, 2345)), (300, False, (2, 1, 300, 300))])
def test_masks(S: int, causal: bool, shape: tuple[int, ...], dtype: torch.dtype, rms: float) -> None:
    mask = torch.rand(shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda") < 0.4
    mask[..., 0] = False
    options = {"softmax_scale": 0.1, "causal": causal, "attention_mask": mask}
    check(partial(sdpa.sdpa_attention, **options), draw(S, dtype=dtype), rms, **options)


@pytest.mark.parametrize("max_documents", [5, None])
def test_documents(max_documents: int | None) -> None:
    inputs, lengths = draw(700, 2), torch.tensor([1, 130, 3, 566, 700], device="cuda")
    seq_idx = torch.arange(5, device="cuda", dtype=torch.int32).repeat_interleave(lengths).view(2, 700)
    assert sdpa.fused_backend(*inputs[:3], seq_idx=seq_idx) == SDPBackend.FLASH_ATTENTION
    assert sdpa.fused_backend(*draw(700, 2, dtype=torch.float32)[:3], seq_idx=seq_idx) == EFFICIENT
    op = partial(sdpa.sdpa_attention, softmax_scale=0.1, seq_idx=seq_idx, max_documents=max_documents)
    check(op, inputs, softmax_scale=0.1, attention_mask=other_documents(seq_idx))


RUNS: dict[str, tuple[list[int] | None, int | None]] = {
    "one document": (None, None),
    "documents": ([1, 130, 3, 566, 640, 1, 59], None),
    "short documents": ([*[1] * 30, *[8] * 40, 350, 700], None),
    "a window": (None, 200),
    "a narrow window": (None, 3),
    "documents, a window": ([1, 130, 3, 566, 640, 1, 59], 100),
}
"""The lengths of the documents in two rows of 700, and the window."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_keys_by_triton(name: str, dtype: torch.dtype) -> None:
    """Parity with float64; the same bits in deterministic mode and of strided tensors."""
    lengths, window = RUNS[name]
    inputs, row = draw(700, 2, H=5, dtype=dtype), torch.arange(700, device="cuda")
    seq_idx, hidden = None, torch.zeros(2, 1, 700, 700, dtype=torch.bool, device="cuda")
    if lengths is not None:
        documents = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
        seq_idx = documents.repeat_interleave(torch.tensor(lengths, device="cuda")).view(2, 700)
        hidden = other_documents(seq_idx)
    if window is not None:
        hidden = hidden | (row < row[:, None] - window)
    op = partial(mla_kernels.attend, softmax_scale=0.1, seq_idx=seq_idx, window=window)
    check(op, inputs, softmax_scale=0.1, attention_mask=hidden)
    outputs = outcome(op, inputs)
    wide = [torch.cat([tensor.detach(), tensor.detach()], -1)[..., : tensor.shape[-1]] for tensor in inputs]
    torch.use_deterministic_algorithms(True)  # until the test ends
    again = outcome(op, [*(tensor.requires_grad_() for tensor in wide[:3]), wide[3]])
    assert all(torch.equal(output, other) for output, other in zip(outputs, again, strict=True))


def test_triton_waits_for_nothing_and_a_graph_replays() -> None:
    inputs, starts = draw(1024, 2), torch.rand(2, 1024, device="cuda") < 0.01
    op = partial(mla_kernels.attend, softmax_scale=0.1, seq_idx=starts.cumsum(1, dtype=torch.int32), window=300)
    assert_replays(op, inputs)


@pytest.mark.parametrize("S", [256, 261, 320])
def test_cudnn_gradients_are_finite_where_scores_are_very_negative(S: int) -> None:
    """Where cuDNN's backward has been NaN with a mask (pytorch/pytorch#196678): log-sum-exps below ln of the least float."""
    inputs = draw(S)
    with torch.no_grad():
        inputs[0].mul_(0.1)[..., 0] = 1.0
        inputs[1].mul_(0.1)[..., 0] = -120 * 128**0.5
    options = {"softmax_scale": 128**-0.5, "causal": True}
    outputs = outcome(sdpa.sdpa_attention, inputs, backend=CUDNN, **options)
    assert all(torch.isfinite(tensor).all() for tensor in outputs)


def test_what_cudnn_is_not_given() -> None:
    odd, mask = draw(261)[:3], torch.zeros(1, 1, 261, 261, dtype=torch.bool, device="cuda")
    assert sdpa.fused_backend(*odd, causal=False) == EFFICIENT
    assert sdpa.fused_backend(*odd, attention_mask=mask) == EFFICIENT
    assert sdpa.fused_backend(*draw(261, dtype=torch.float32)[:3]) == EFFICIENT
    assert sdpa.fused_backend(*odd, deterministic=True) is None
    assert sdpa.fused_backend(*odd, backends=sdpa.FUSED[1:2]) is None  # flash, whose two widths are one
    assert sdpa.fused_backend(*draw(261, K=64)[:3], backends=sdpa.FUSED[1:2]) == SDPBackend.FLASH_ATTENTION
    assert sdpa.fused_backend(*draw(261, dtype=torch.float64)[:3]) is None


def test_a_query_that_sees_nothing_gets_zero() -> None:
    inputs, mask = draw(300), torch.zeros(1, 1, 300, 300, dtype=torch.bool, device="cuda")
    mask[:, :, 5] = True
    outputs = outcome(sdpa.sdpa_attention, inputs, softmax_scale=0.1, causal=False, attention_mask=mask)
    assert float(outputs[0][5].abs().max()) == 0.0
    assert float(outputs[1][5].abs().max()) == 0.0
    assert all(torch.isfinite(tensor).all() for tensor in outputs)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa.sdpa_attention(q, k, v, softmax_scale=128**-0.5, backend=CUDNN)


def test_nothing_is_copied() -> None:
    inputs = draw(4096, 2, 56)
    outcome(ours, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        outcome(ours, inputs)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in kernels if "copy" in name.lower()] == []
    assert any("sdpa" in name or "flash" in name or "cudnn" in name for name in kernels), kernels
    output = inputs[3].numel() * 2
    with torch.no_grad():
        assert peak(lambda: ours(*inputs[:3])) < 1.25 * output  # the output and one number a row
    gradients = sum(tensor.numel() * 2 for tensor in inputs[:3])
    # Backward sums the gradient of q in float32.
    assert peak(lambda: outcome(ours, inputs)) < 1.25 * (output + gradients + inputs[0].numel() * 4)


def assert_replays(op: Op, inputs: Inputs) -> None:
    """Fail unless ``op`` never synchronizes and its CUDA graph replays other inputs with equal results."""
    outcome(op, inputs)
    with without_waiting():
        outcome(op, inputs)
    captured = replayed(lambda: outcome(op, inputs), inputs, [tensor.detach().flip(0) for tensor in inputs])
    for actual, expected in zip(captured, outcome(op, inputs), strict=True):
        assert_parity(actual[EARLY:], expected[EARLY:], rms=5e-3)  # sums over keys in no fixed order


def test_nothing_waits_and_a_graph_replays() -> None:
    assert_replays(ours, draw(640))


@pytest.fixture
def patched(process: None) -> Iterator[list[str]]:
    """The patch, and what it logs."""
    from megacpp_mcore.patches import mla_core_attention
    from megacpp_mcore.patches.machinery.registry import Registry

    registry = Registry([mla_core_attention.PATCH])
    registry.apply([mla_core_attention.PATCH.name])
    mla_core_attention._log_once.cache_clear()
    mla_core_attention._te_selection.cache_clear()
    lines: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(mla_core_attention, "_flash4", lambda *_: None)  # test_vendors has it
    patch.setattr(mla_core_attention.logger, "log", lambda level, line, *_, **__: lines.append(line))
    patch.setattr(mla_core_attention.logger, "isEnabledFor", lambda level: True)  # which Megatron's main asks first
    try:
        yield lines
    finally:
        patch.undo()
        registry.revert()


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformer Engine as on a host where it cannot load cuDNN, as when it finds another version than torch's."""
    module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    select = module.dpa_utils.get_attention_backend
    monkeypatch.setattr(
        module.dpa_utils, "get_attention_backend", lambda asked: (False, None, False, None, True, select(asked)[5])
    )
    module._attention_backends["attention_params"] = None
    yield
    module._attention_backends["attention_params"] = None


def attention(kind: str, H: int, K: int, V: int) -> Any:
    """What ``MultiLatentAttention._run_core_attention`` reads of its module."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        num_layers=1, hidden_size=H * V, num_attention_heads=H, qk_head_dim=K // 2, qk_pos_emb_head_dim=K // 2, v_head_dim=V,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, masked_softmax_fusion=False,
    )  # fmt: skip
    module = importlib.import_module(
        "megatron.core.extensions.transformer_engine"
        if kind == "TEDotProductAttention"
        else "megatron.core.transformer.dot_product_attention"
    )
    core = getattr(module, kind)(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        softmax_scale=K**-0.5, k_channels=K, v_channels=V, pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    return SimpleNamespace(core_attention=core.train(), attn_mask_type=AttnMaskType.causal, config=config)


def seam(layer: Any, mask: torch.Tensor | None = None) -> Op:
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    run: Any = MultiLatentAttention._run_core_attention
    return lambda q, k, v: run(layer, q, k, v, mask)


def stocks(layer: Any) -> Op:
    return lambda q, k, v: layer.core_attention(q, k, v, None, attn_mask_type=layer.attn_mask_type)


def packed_as(lengths: list[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, **longest)


def packed_seam(layer: Any, parameters: Any, stock: bool = False) -> Op:
    """Of a batch of one, as stock's layer calls it: packed tensors have no axis of batches."""
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    run: Any = MultiLatentAttention._run_core_attention
    run = run.__wrapped__ if stock else run
    return lambda *tensors: run(layer, *(tensor.squeeze(1) for tensor in tensors), None, packed_seq_params=parameters)


@needs_engine
def test_transformer_engine_at_128_64(patched: list[str], unfused: None) -> None:
    layer, inputs = attention("TEDotProductAttention", 56, 128, 64), draw(4096, 2, 56)
    outputs, peer = outcome(seam(layer), inputs), outcome(stocks(layer), inputs)
    assert patched == [
        "mla-core-attention: TEDotProductAttention runs sdpa CUDNN_ATTENTION: at widths 128/64 Transformer Engine is unfused"
    ]
    assert outputs[0].shape == peer[0].shape == (4096, 2, 56 * 64)
    assert_same(inputs, outputs, truth(inputs, softmax_scale=128**-0.5), peer, 5e-3, 128**-0.5)
    del outputs, peer
    assert peak(lambda: outcome(seam(layer), inputs)) < peak(lambda: outcome(stocks(layer), inputs)) / 8


ASKED = [
    (K, V, *how, None) for K, V in ((128, 64), (192, 128)) for how in ((True, "causal"), (False, "causal"), (True, "no_mask"))
]


@needs_engine
@pytest.mark.parametrize(("K", "V", "training", "mask", "lengths"), [*ASKED, (128, 64, True, "causal", [128] * 8)])
def test_transformer_engine_is_asked_what_it_asks_itself(
    patched: list[str], K: int, V: int, training: bool, mask: str, lengths: list[int] | None
) -> None:
    """The question holds what Transformer Engine's own forward pass puts to its selector, and the path follows the answer.

    Packed at numbers of sequences and rows that are powers of two, to which the question rounds.
    """
    from megatron.core.transformer.enums import AttnMaskType

    from megacpp_mcore.patches import mla_core_attention

    module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    layer = attention("TEDotProductAttention", 4, K, V)
    layer.attn_mask_type = AttnMaskType[mask]
    layer.core_attention.train(training)
    if lengths is None:
        inputs, packed = draw(256, 2, 4, K, V), []
        stock, patched_call, qkv = stocks(layer), seam(layer), inputs[:3]
    else:
        inputs, packed = draw(1024, 1, 4), [packed_as(lengths)]
        stock, patched_call = (packed_seam(layer, *packed, stock=stock) for stock in (True, False))
        qkv = [tensor.squeeze(1) for tensor in inputs[:3]]
    outcome(stock, inputs)
    own, answer = module._attention_backends["attention_params"], dict(module._attention_backends)
    question = mla_core_attention._question(mla_core_attention.Call(layer.core_attention, *qkv, None, mask, *packed))
    assert [(name, value, getattr(own, name)) for name, value in question if getattr(own, name) != value] == []
    rest = {field: value for field, value in vars(own).items() if field not in dict(question)}
    default = vars(type(own)())
    assert {field: value for field, value in rest.items() if value != default[field] and field != "fp8_meta"} == {}
    outcome(patched_call, inputs)
    flash4 = answer["use_flash_attention"] and str(answer["flash_attention_backend"]).startswith("4.")
    if packed:
        assert ("runs as stock" in patched[0]) == (not answer["use_unfused_attention"] and not flash4)
    else:
        assert ("runs sdpa" in patched[0]) == bool(answer["use_unfused_attention"])


@needs_engine
def test_transformer_engine_in_a_cuda_graph(patched: list[str], unfused: None) -> None:
    assert_replays(seam(attention("TEDotProductAttention", 4, 128, 64)), draw(640, 2, 4))
    assert "CUDNN_ATTENTION" in patched[0]


@pytest.mark.parametrize(("masked", "kernel"), [(False, "CUDNN_ATTENTION"), (True, "EFFICIENT_ATTENTION")])
def test_local(patched: list[str], masked: bool, kernel: str) -> None:
    layer, inputs = attention("DotProductAttention", 4, 128, 64), draw(300, 2, 4)
    mask = ~torch.ones(1, 1, 300, 300, dtype=torch.bool, device="cuda").tril() if masked else None
    check(seam(layer, mask), inputs, peer=outcome(stocks(layer), inputs))
    assert len(patched) == 1
    assert patched[0].startswith(f"mla-core-attention: DotProductAttention runs sdpa {kernel}: ")


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        *(
            pytest.param("TEDotProductAttention", lengths, marks=needs_engine)
            for lengths in ([1024], [1, 700, 323], [64] * 16, [1] * 24 + [1000], [0, 300, 0, 261])
        ),
        ("DotProductAttention", [1, 700, 323]),
    ],
)
def test_packed_sequences(patched: list[str], kind: str, lengths: list[int]) -> None:
    """With empty ones there are rows behind all of them."""
    is_whole = sum(lengths) == 1024
    layer, inputs, parameters = attention(kind, 4, 128, 64), draw(1024 if is_whole else 700, 1, 4), packed_as(lengths)
    documents = other_documents(seq_idx_from_cu_seqlens(parameters.cu_seqlens_q, len(inputs[0])))
    run = packed_seam(layer, parameters)
    outcome(run, inputs)
    as_stock = "runs as stock" in patched[0]
    if is_whole or not as_stock:
        check(run, inputs, attention_mask=documents)
    if not as_stock:
        others = packed_seam(layer, packed_as(lengths[::-1]))
        with without_waiting():
            outcome(others, inputs)
    if kind == "DotProductAttention":
        assert patched[0].startswith("mla-core-attention: DotProductAttention runs sdpa FLASH_ATTENTION: ")
    elif is_whole and "FlashAttention 4" not in patched[0]:  # whose output is zero there
        peer = outcome(packed_seam(layer, parameters, stock=True), inputs)
        expected = truth(inputs, softmax_scale=128**-0.5, causal=True, attention_mask=documents)
        for name, actual, exact in (("o", peer[0], expected[0]), ("dv", peer[3], expected[3])):
            assert_parity(actual.reshape(exact.shape), exact, rms=5e-2, name=f"{name} of Transformer Engine")
