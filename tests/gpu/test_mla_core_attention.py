"""MLA through cuDNN and flash on a GPU: parity with float64, no copies, no waits, CUDA graphs; at the seam, packed or not.

Shape legend: S queries, T keys, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from megacpp_mcore.ops.mla import sdpa
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
    for name, have, want, other in zip(("o", "dq", "dk", "dv"), found, expected, peer, strict=True):
        have, want, other = (tensor.reshape(have.shape) for tensor in (have, want, other))
        if name in ("dq", "dk"):
            hidden = torch.zeros(1, 1, len(inputs[0]), len(inputs[1]), dtype=torch.bool, device="cuda")
            hidden = hidden if attention_mask is None else hidden | attention_mask
            hidden = hidden | ~torch.ones_like(hidden).tril() if causal else hidden
        if name == "dq":
            few_SB = ((~hidden).sum(-1)[:, 0] <= EARLY).T.expand(have.shape[:2])
            rows = slice(None) if attention_mask is not None else slice(EARLY)
            q, do = inputs[0][rows], inputs[3].reshape(*have.shape[:3], -1)[rows]
            terms = query_gradient_terms(q, inputs[1], inputs[2], do, softmax_scale, hidden[:, :, rows])
            error = (have[rows].double() - want[rows]).norm(dim=-1) / terms
            assert float(error[few_SB[rows]].max() if few_SB.any() else 0.0) <= rms, "dq of queries that see few keys"
            have, want, other = (tensor[~few_SB] for tensor in (have, want, other))
            if not len(have):
                continue
        if name == "dk" and attention_mask is not None:
            # In a short document the terms cancel in a key's gradient, too: there it is small beside other keys'.
            few_TB = ((~hidden).sum(-2)[:, 0] <= EARLY).T.expand(have.shape[:2])
            error = (have.double() - want)[few_TB].norm(dim=-1) / want.norm(dim=-1).max()
            assert float(error.max() if few_TB.any() else 0.0) <= rms, "dk of keys that few queries see"
            have, want, other = (tensor[~few_TB] for tensor in (have, want, other))
        # Which of two float32 sums is off by an ulp more is chance; in 16 bits the rounding is what counts.
        factor = 2.0 if other.dtype != torch.float32 else None
        assert_parity(have, want, rms=rms, dtype_peer=other, max_abs_factor=factor, name=name)


@pytest.mark.parametrize(
    ("S", "H", "K", "V"), [(1024, 3, 128, 64), (2345, 3, 128, 64), (130, 56, 128, 64), (512, 4, 192, 128)]
)
def test_cudnn_parity(S: int, H: int, K: int, V: int) -> None:
    inputs, options = draw(S, 2, H, K, V), {"softmax_scale": K**-0.5, "causal": True}
    assert sdpa.fused_backend(*inputs[:3]) == CUDNN
    found = outcome(sdpa.sdpa_attention, inputs, backend=CUDNN, **options)
    assert found[0].is_contiguous()
    assert_same(inputs, found, truth(inputs, **options), outcome(eager, inputs, **options), 5e-3, **options)


@pytest.mark.parametrize("S", [256, 261, 320])
def test_cudnn_gradients_are_finite_where_scores_are_very_negative(S: int) -> None:
    """Where cuDNN's backward has been NaN with a mask (pytorch/pytorch#196678): log-sum-exps below ln of the least float."""
    inputs = draw(S)
    with torch.no_grad():
        inputs[0].mul_(0.1)[..., 0] = 1.0
        inputs[1].mul_(0.1)[..., 0] = -120 * 128**0.5
    options = {"softmax_scale": 128**-0.5, "causal": True}
    found = outcome(sdpa.sdpa_attention, inputs, backend=CUDNN, **options)
    assert all(torch.isfinite(tensor).all() for tensor in found)


def test_cudnn_without_causality() -> None:
    inputs, options = draw(256, T=384), {"softmax_scale": 0.1, "causal": False}
    assert sdpa.fused_backend(*inputs[:3], causal=False) == CUDNN
    found = outcome(sdpa.sdpa_attention, inputs, **options)
    assert_same(inputs, found, truth(inputs, **options), outcome(eager, inputs, **options), 5e-3, **options)


def test_what_cudnn_is_not_given() -> None:
    odd, mask = draw(261)[:3], torch.zeros(1, 1, 261, 261, dtype=torch.bool, device="cuda")
    assert sdpa.fused_backend(*odd, causal=False) == EFFICIENT
    assert sdpa.fused_backend(*odd, attention_mask=mask) == EFFICIENT
    assert sdpa.fused_backend(*draw(261, dtype=torch.float32)[:3]) == EFFICIENT
    assert sdpa.fused_backend(*odd, deterministic=True) is None
    assert sdpa.fused_backend(*odd, backends=sdpa.FUSED[1:2]) is None  # flash, whose two widths are one
    assert sdpa.fused_backend(*draw(261, K=64)[:3], backends=sdpa.FUSED[1:2]) == SDPBackend.FLASH_ATTENTION
    assert sdpa.fused_backend(*draw(261, dtype=torch.float64)[:3]) is None


@pytest.mark.parametrize(("dtype", "rms"), [(torch.bfloat16, 5e-3), (torch.float32, 4e-6)])
@pytest.mark.parametrize(("S", "causal", "shape"), [(2345, True, (2, 1, 1, 2345)), (300, False, (2, 1, 300, 300))])
def test_masks(S: int, causal: bool, shape: tuple[int, ...], dtype: torch.dtype, rms: float) -> None:
    inputs = draw(S, dtype=dtype)
    mask = torch.rand(shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda") < 0.4
    mask[..., 0] = False
    options = {"softmax_scale": 0.1, "causal": causal, "attention_mask": mask}
    found = outcome(sdpa.sdpa_attention, inputs, **options)
    assert_same(inputs, found, truth(inputs, **options), outcome(eager, inputs, **options), rms, **options)


@pytest.mark.parametrize("max_documents", [5, None])
def test_documents(max_documents: int | None) -> None:
    inputs, lengths = draw(700, 2), torch.tensor([1, 130, 3, 566, 700], device="cuda")
    seq_idx = torch.arange(5, device="cuda", dtype=torch.int32).repeat_interleave(lengths).view(2, 700)
    assert sdpa.fused_backend(*inputs[:3], seq_idx=seq_idx) == SDPBackend.FLASH_ATTENTION
    assert sdpa.fused_backend(*draw(700, 2, dtype=torch.float32)[:3], seq_idx=seq_idx) == EFFICIENT
    found = outcome(sdpa.sdpa_attention, inputs, softmax_scale=0.1, seq_idx=seq_idx, max_documents=max_documents)
    options = {"softmax_scale": 0.1, "causal": True, "attention_mask": other_documents(seq_idx)}
    assert_same(inputs, found, truth(inputs, **options), outcome(eager, inputs, **options), 5e-3, **options)


def test_a_query_that_sees_nothing_gets_zero() -> None:
    inputs, mask = draw(300), torch.zeros(1, 1, 300, 300, dtype=torch.bool, device="cuda")
    mask[:, :, 5] = True
    found = outcome(sdpa.sdpa_attention, inputs, softmax_scale=0.1, causal=False, attention_mask=mask)
    assert float(found[0][5].abs().max()) == 0.0
    assert float(found[1][5].abs().max()) == 0.0
    assert all(torch.isfinite(tensor).all() for tensor in found)


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


def test_nothing_waits_for_the_device() -> None:
    inputs = draw(512)
    outcome(ours, inputs)
    with without_waiting():
        outcome(ours, inputs)


def replayed_flipped(op: Op, inputs: Inputs) -> Sequence[torch.Tensor]:
    return replayed(lambda: outcome(op, inputs), inputs, [tensor.detach().flip(0) for tensor in inputs])


def test_cuda_graph() -> None:
    inputs = draw(640)
    captured = replayed_flipped(ours, inputs)
    for have, want in zip(captured, outcome(ours, inputs), strict=True):
        assert_parity(have, want, rms=5e-3)


# --- at the seam -------------------------------------------------------------------------------------------------------


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
    try:
        yield lines
    finally:
        patch.undo()
        registry.revert()


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
    return lambda *tensors: run(layer, *(one.squeeze(1) for one in tensors), None, packed_seq_params=parameters)


@needs_engine
def test_transformer_engine_at_128_64(patched: list[str]) -> None:
    layer, inputs = attention("TEDotProductAttention", 56, 128, 64), draw(4096, 2, 56)
    found, peer = outcome(seam(layer), inputs), outcome(stocks(layer), inputs)
    assert patched == [
        "mla-core-attention: TEDotProductAttention runs sdpa CUDNN_ATTENTION: "
        "at widths 128/64 Transformer Engine is unfused"
    ]
    assert found[0].shape == peer[0].shape == (4096, 2, 56 * 64)
    assert_same(inputs, found, truth(inputs, softmax_scale=128**-0.5), peer, 5e-3, 128**-0.5)
    del found, peer
    assert peak(lambda: outcome(seam(layer), inputs)) < peak(lambda: outcome(stocks(layer), inputs)) / 8


@needs_engine
@pytest.mark.parametrize(("training", "mask"), [(True, "causal"), (False, "causal"), (True, "no_mask")])
@pytest.mark.parametrize(("K", "V"), [(128, 64), (192, 128)])
def test_transformer_engine_is_asked_what_it_asks_itself(
    patched: list[str], K: int, V: int, training: bool, mask: str
) -> None:
    """The question holds what Transformer Engine's own forward pass puts to its selector, and the path follows the answer."""
    from megatron.core.transformer.enums import AttnMaskType

    from megacpp_mcore.patches import mla_core_attention

    module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    layer, inputs = attention("TEDotProductAttention", 4, K, V), draw(256, 2, 4, K, V)
    layer.attn_mask_type = AttnMaskType[mask]
    layer.core_attention.train(training)
    outcome(stocks(layer), inputs)
    own, answer = module._attention_backends["attention_params"], module._attention_backends
    q, k, v, _ = inputs
    question = mla_core_attention._question(mla_core_attention.Call(layer.core_attention, q, k, v, None, mask))
    assert [(name, value) for name, value in question if getattr(own, name) != value] == []
    rest = {field: value for field, value in vars(own).items() if field not in dict(question)}
    default = vars(type(own)())
    assert {field: value for field, value in rest.items() if value != default[field] and field != "fp8_meta"} == {}
    outcome(seam(layer), inputs)
    assert ("runs sdpa" in patched[0]) == bool(answer["use_unfused_attention"])


@needs_engine
def test_transformer_engine_in_a_cuda_graph(patched: list[str]) -> None:
    layer, inputs = attention("TEDotProductAttention", 4, 128, 64), draw(640, 2, 4)
    captured = replayed_flipped(seam(layer), inputs)
    assert "CUDNN_ATTENTION" in patched[0]
    for have, want in zip(captured, outcome(seam(layer), inputs), strict=True):
        assert_parity(have[EARLY:], want[EARLY:], rms=5e-3)  # sums over keys in no fixed order


@pytest.mark.parametrize(("masked", "kernel"), [(False, "CUDNN_ATTENTION"), (True, "EFFICIENT_ATTENTION")])
def test_local(patched: list[str], masked: bool, kernel: str) -> None:
    layer, inputs = attention("DotProductAttention", 4, 128, 64), draw(300, 2, 4)
    mask = ~torch.ones(1, 1, 300, 300, dtype=torch.bool, device="cuda").tril() if masked else None
    found, peer = outcome(seam(layer, mask), inputs), outcome(stocks(layer), inputs)
    assert len(patched) == 1
    assert patched[0].startswith(f"mla-core-attention: DotProductAttention runs sdpa {kernel}: ")
    assert found[0].is_contiguous()
    assert_same(inputs, found, truth(inputs, softmax_scale=128**-0.5), peer, 5e-3, 128**-0.5)


# --- packed sequences at the seam ---------------------------------------------------------------------------------------


@needs_engine
@pytest.mark.parametrize("lengths", [[1024], [1, 700, 323], [64] * 16, [1] * 24 + [1000]])
def test_packed_sequences_beside_transformer_engine(patched: list[str], lengths: list[int]) -> None:
    layer, inputs, parameters = attention("TEDotProductAttention", 4, 128, 64), draw(1024, 1, 4), packed_as(lengths)
    peer = outcome(packed_seam(layer, parameters, stock=True), inputs)
    found = outcome(packed_seam(layer, parameters), inputs)
    seq_idx = seq_idx_from_cu_seqlens(parameters.cu_seqlens_q, 1024)
    options = {"softmax_scale": 128**-0.5, "causal": True, "attention_mask": other_documents(seq_idx)}
    expected = truth(inputs, **options)
    assert_same(inputs, found, expected, outcome(eager, inputs, **options), 5e-3, **options)
    if "FlashAttention 4" not in patched[0]:  # whose output is zero there
        for name, have, want in (("o", peer[0], expected[0]), ("dv", peer[3], expected[3])):
            assert_parity(have.reshape(want.shape), want, rms=5e-2, name=f"{name} of Transformer Engine")


@needs_engine
def test_transformer_engine_is_asked_what_it_asks_itself_of_packed_sequences(patched: list[str]) -> None:
    """At numbers of sequences and rows that are powers of two, to which the question rounds."""
    from megacpp_mcore.patches import mla_core_attention

    module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    layer, inputs, parameters = attention("TEDotProductAttention", 4, 128, 64), draw(1024, 1, 4), packed_as([128] * 8)
    outcome(packed_seam(layer, parameters, stock=True), inputs)
    own, answer = module._attention_backends["attention_params"], dict(module._attention_backends)
    q, k, v = (one.squeeze(1) for one in inputs[:3])
    call = mla_core_attention.Call(layer.core_attention, q, k, v, None, "causal", parameters)
    question = mla_core_attention._question(call)
    assert [(name, value, getattr(own, name)) for name, value in question if getattr(own, name) != value] == []
    rest = {field: value for field, value in vars(own).items() if field not in dict(question)}
    default = vars(type(own)())
    assert {field: value for field, value in rest.items() if value != default[field] and field != "fp8_meta"} == {}
    outcome(packed_seam(layer, parameters), inputs)
    flash4 = answer["use_flash_attention"] and str(answer["flash_attention_backend"]).startswith("4.")
    assert ("runs as stock" in patched[0]) == (not answer["use_unfused_attention"] and not flash4)


@needs_engine
def test_rows_behind_packed_sequences_and_empty_ones(patched: list[str]) -> None:
    layer, inputs, parameters = (
        attention("TEDotProductAttention", 4, 128, 64),
        draw(700, 1, 4),
        packed_as([0, 300, 0, 261]),
    )
    found = outcome(packed_seam(layer, parameters), inputs)
    seq_idx = seq_idx_from_cu_seqlens(parameters.cu_seqlens_q, 700)
    options = {"softmax_scale": 128**-0.5, "causal": True, "attention_mask": other_documents(seq_idx)}
    if "runs as stock" not in patched[0]:
        assert_same(inputs, found, truth(inputs, **options), outcome(eager, inputs, **options), 5e-3, **options)


@needs_engine
def test_packed_sequences_make_nobody_wait(patched: list[str]) -> None:
    layer, inputs = attention("TEDotProductAttention", 4, 128, 64), draw(1024, 1, 4)
    first, second = packed_as([500, 524]), packed_as([900, 124])
    outcome(packed_seam(layer, first), inputs)
    if "runs as stock" not in patched[0]:
        with without_waiting():
            outcome(packed_seam(layer, second), inputs)


def test_local_packed(patched: list[str]) -> None:
    layer, inputs, parameters = attention("DotProductAttention", 4, 128, 64), draw(300, 1, 4), packed_as([1, 260, 39])
    found = outcome(packed_seam(layer, parameters), inputs)
    assert len(patched) == 1
    assert patched[0].startswith("mla-core-attention: DotProductAttention runs sdpa FLASH_ATTENTION: ")
    seq_idx = seq_idx_from_cu_seqlens(parameters.cu_seqlens_q, 300)
    options = {"softmax_scale": 128**-0.5, "causal": True, "attention_mask": other_documents(seq_idx)}
    assert_same(inputs, found, truth(inputs, **options), outcome(eager, inputs, **options), 5e-3, **options)
