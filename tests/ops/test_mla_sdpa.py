"""Attention by PyTorch's fused kernels: which is chosen, what is noted of it, and what is refused.

Shape legend: S sequence, B batch, H heads, K query-key width, V value width.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from megacpp_mcore.backends import observed
from megacpp_mcore.errors import BackendError, ModelError
from megacpp_mcore.ops.mla import sdpa
from tests.errors import raises

B, S, H, K, V = 2, 37, 4, 12, 6
MATH = SDPBackend.MATH


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(S, B, H, width, generator=generator, dtype=torch.float64) for width in (K, K, V)]


def test_the_kernel_that_was_chosen_is_noted_and_one_that_was_given_is_not() -> None:
    q, k, v = draw()
    observed.forget()
    sdpa.sdpa_attention(q, k, v, softmax_scale=1.0, backend=MATH)
    assert observed.notes() == []
    with mock.patch.object(sdpa, "fused_backend", return_value=MATH):
        for _ in range(2):
            sdpa.sdpa_attention(q, k, v, softmax_scale=1.0)
        sdpa.sdpa_attention(*(tensor.float() for tensor in (q, k, v)), softmax_scale=1.0)
    assert [(note["op"], note["layer"], note["requested"], note["observed"]) for note in observed.notes()] == 2 * [
        ("sdpa", None, "auto", "MATH")
    ]
    assert [note["reason"].rpartition(" takes ")[2] for note in observed.notes()] == [
        f"widths {q.shape[-1]} and {v.shape[-1]} of {dtype}" for dtype in ("float64", "float32")
    ]
    observed.forget()


def test_no_fused_kernel_on_a_cpu() -> None:
    inputs = draw()
    assert sdpa.fused_backend(*inputs) is None
    assert sdpa.fused_backend(*inputs, backends=(*sdpa.FUSED, MATH)) == MATH
    with raises(BackendError, "q (37, 2, 4, 12)", "cpu", "mla_attention"):
        sdpa.sdpa_attention(*inputs, softmax_scale=1.0)
    with pytest.raises(ModelError, match=r"q float.*, k bfloat16, v float"):
        sdpa.sdpa_attention(inputs[0], inputs[1].bfloat16(), inputs[2], softmax_scale=1.0, backend=MATH)


def test_lengths_that_cudnn_is_trusted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = {}
    for version in (None, 91500, 91900):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        lengths = ((256, 256, True), (2345, 2345, True), (256, 384, False), (2345, 2345, False), (1, 128, False))
        trusted[version] = [sdpa._cudnn_is_right(*length) for length in lengths]
    assert trusted[None] == trusted[91500] == [True, False, True, False, False]
    assert trusted[91900] == [True, True, True, False, False]
