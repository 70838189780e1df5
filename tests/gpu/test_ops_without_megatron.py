"""The ops by their names, and the layers, on a GPU: kernels run, and agree with plain PyTorch.

Shape legend: S sequence, B batch, D hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_mcore import ops
from megacpp_mcore.ops import layers, linear_cross_entropy, rms_norm
from megacpp_mcore.ops.testing import assert_parity

S, B, D = 192, 2, 256
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba3": (layers.Mamba3, {"groups": 2}),
    "m2rnn": (layers.M2RNN, {"heads": 4}),
    "sparse_mla": (layers.SparseMLA, {"heads": 4, "topk": S, "index_heads": 8}),  # all keys: rounding selects no others
}


def outcome(name: str, dtype: torch.dtype, backend: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output, and the gradients of input and weights, of a layer with ``weights``."""
    kind, sizes = LAYERS[name]
    layer = kind(D, **sizes, backend=backend).cuda().to(dtype)
    layer.load_state_dict(weights)
    generator = torch.Generator().manual_seed(2)
    hidden, upstream = (torch.randn(B, S, D, generator=generator).bfloat16().cuda().to(dtype) for _ in range(2))
    out, more = layer(hidden.requires_grad_())
    loss = (out * upstream).sum()
    (loss + more if name == "sparse_mla" else loss).backward()
    tensors = {"out": out.detach(), "hidden": hidden.grad}
    return tensors | {name: weight.grad for name, weight in layer.named_parameters()}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_runs_kernels_that_agree(name: str) -> None:
    torch.manual_seed(1)
    kind, sizes = LAYERS[name]
    weights = kind(D, **sizes).bfloat16().state_dict()
    actual = outcome(name, torch.bfloat16, "triton", weights)
    peer = outcome(name, torch.bfloat16, "reference", weights)
    expected = outcome(name, torch.float64, "reference", weights)
    for key, value in expected.items():
        if not key.startswith("indexer."):  # a divergence of nearly equal distributions: all of it is rounding
            assert_parity(actual[key], value, rms=3e-2, dtype_peer=peer[key], name=key)


def test_automatic_calls_take_kernels() -> None:
    x = torch.randn(S, B, D, device="cuda", dtype=torch.bfloat16)
    needs: dict[str, dict[str, Any]] = {
        "mamba3": {"head_dim": 64, "mimo_rank": 4, "state": 64},
        "m2rnn": {"key_dim": 64, "value_dim": 16},
        "sparse_mla": {"qk_dim": 128, "v_dim": 64},
        "indexer": {"dim": 64, "heads": 8},
        "rms_norm": {"hidden": D},
    }
    for op, sizes in needs.items():
        assert ops.backend_of(op, "auto", x, **sizes).__module__.endswith(".triton"), op


def test_the_loss_ignores_labels_on_a_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    hidden, weight = (torch.randn(n, 128, device="cuda", generator=generator) for n in (500, 1000))
    hidden, weight = hidden.bfloat16(), (weight / 128**0.5).bfloat16()  # logits of 1 are kept to 2^-9 of that
    label = torch.randint(1000, (500,), device="cuda", generator=generator)
    label[::3] = -100
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight)]
    loss = linear_cross_entropy(*leaves, label)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), label)
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)
    for grad, expected_grad in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, wide), strict=True):
        assert_parity(grad, expected_grad, rms=2e-2)
    assert not torch.autograd.grad(linear_cross_entropy(*leaves, label, reduction="none").sum(), leaves)[0][::3].any()


def test_the_norm_adds_both_gradients() -> None:
    x = torch.randn(64, D, device="cuda", requires_grad=True)
    weight = torch.randn(D, device="cuda", requires_grad=True)
    normed, residual = rms_norm(x, weight)
    (normed.square().sum() + residual.sum()).backward()
    wide = x.detach().double().requires_grad_()
    (torch.nn.functional.rms_norm(wide, (D,), weight.detach().double(), 1e-5).square().sum() + wide.sum()).backward()
    assert_parity(x.grad, wide.grad, rms=1e-5)
