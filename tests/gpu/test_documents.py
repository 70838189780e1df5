"""Documents on a GPU: nothing waits for them, and what only the device can see wrong ends the process.

Legend: B batch, S rows.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from megacpp_mcore.ops.mla.sdpa import sdpa_attention
from megacpp_mcore.ops.packed.documents import (
    additive_mask,
    cu_seqlens_of,
    other_documents,
    roll_left,
    seq_idx_from_cu_seqlens,
    seq_idx_from_mask,
)
from tests.gpu.device import without_waiting

S = 256


def mask_of(seq_idx_BS: torch.Tensor) -> torch.Tensor:
    return other_documents(seq_idx_BS) | ~torch.ones(S, S, dtype=torch.bool, device="cuda").tril()


def test_nothing_waits() -> None:
    cu_seqlens = torch.tensor([0, 5, 100, S, S, S], dtype=torch.int32, device="cuda")
    tokens = torch.arange(S, device="cuda")[None]
    q, k, v = (torch.randn(S, 1, 2, width, device="cuda", dtype=torch.bfloat16) for width in (128, 128, 64))
    with without_waiting():
        packed = seq_idx_from_cu_seqlens(cu_seqlens, S)
        masked = seq_idx_from_mask(mask_of(packed))
        rolled = roll_left(tokens, cu_seqlens)
        again = cu_seqlens_of(packed, 5)
        sdpa_attention(q, k, v, softmax_scale=0.1, seq_idx=packed)
        sdpa_attention(q, k, v, softmax_scale=0.1, seq_idx=packed)
        shared = additive_mask(packed, torch.bfloat16)
    assert shared is additive_mask(packed.detach(), torch.bfloat16)
    assert torch.equal(packed, masked)
    assert torch.equal(cu_seqlens, again)
    assert rolled[0, [3, 4, 99, 254, 255]].tolist() == [4, 0, 0, 255, 0]


# What is done, and the words of the assertion.
WRONG = {
    "mask": (
        "m = ~torch.ones(8, 8, dtype=torch.bool).tril()[None, None]; m[0, 0, 5, 2] = True; d.seq_idx_from_mask(m.cuda())",
        "the mask is causal",
    ),
    "lengths": ("d.seq_idx_from_cu_seqlens(torch.tensor([0, 4, 2, 8]).cuda(), 8)", "cu_seqlens begins with 0"),
    "count": (
        "d.cu_seqlens_of(torch.arange(8, dtype=torch.int32)[None].cuda(), 7)",
        "at most 7 documents in 1 rows of 8: join short documents in the data, or raise max_documents",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_nobody_waits_for_ends_the_process(what: str) -> None:
    wrong, words = WRONG[what]
    code = f"import torch; from megacpp_mcore.ops.packed import documents as d; {wrong}; torch.cuda.synchronize()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "device-side assert" in done.stderr
    assert words in done.stderr


ENDS = ("mask", "mask without Transformer Engine", "lengths")
"""How a stock model is told where a document ends."""


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("told_by", ENDS)
def test_what_a_stock_models_document_learns_of_the_one_before(
    process: None, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    """NVIDIA/Megatron-LM#2357: of a mask, unless Transformer Engine is unfused. ``launch`` refuses it and names the others."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from transformer_engine.pytorch.attention import dot_product_attention

    monkeypatch.setenv("NVTE_FLASH_ATTN_V4", "0")  # which 2.20.2 calls in a way that makes the output zero
    second = 100  # its first token
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        bf16=True, params_dtype=torch.bfloat16, masked_softmax_fusion=False,
    )  # fmt: skip
    is_local = told_by == "mask without Transformer Engine"
    spec = specs.get_gpt_layer_local_spec() if is_local else specs.get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=S, position_embedding_type="rope").cuda().bfloat16()
    cu_seqlens = torch.tensor([0, second, S], dtype=torch.int32, device="cuda")
    lengths = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=S - second, max_seqlen_kv=S - second)

    def losses(tokens_S: torch.Tensor) -> torch.Tensor:
        mask, _, positions_S = _get_ltor_masks_and_position_ids(tokens_S, 0, True, True, True, told_by != "lengths")
        labels_BS = tokens_S.roll(-1)[None]
        options = {"packed_seq_params": lengths} if mask is None else {}
        of_all_BS = model(tokens_S[None], positions_S[None], None if mask is None else mask[None], labels=labels_BS, **options)
        return of_all_BS[0, second:-1].detach()  # the last label is the first token

    tokens_S = torch.randint(1, 128, (S,), device="cuda")
    tokens_S[second - 1] = 0  # the token that ends a document
    other_S = tokens_S.clone()
    other_S[: second - 1] = 1 + tokens_S[: second - 1] % 127
    assert torch.equal(losses(tokens_S), losses(tokens_S))
    leaks = told_by == "mask" and not dot_product_attention._attention_backends["use_unfused_attention"]
    assert torch.equal(losses(tokens_S), losses(other_S)) is not leaks
