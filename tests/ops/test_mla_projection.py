"""Between MLA's projections and its core attention: the references against stock's rotary embedding, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd as stock_rope

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.mla_projection import reference
from megacpp_mcore.ops.mla_projection.reference import keys_and_values, latents, project, rotation_table
from tests.errors import raises
from tests.ops.mla_projection_case import Case, cases, outcome

S, B, H, C, R, V = 7, 2, 3, 4, 6, 5


@pytest.fixture
def angle_SR() -> torch.Tensor:
    return torch.rand(S, R // 2).mul(6).repeat(1, 2)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_rotations_are_stocks(angle_SR: torch.Tensor, interleaved: bool, scale: float) -> None:
    rotation_SR = rotation_table(angle_SR, scale)
    x_SBHX, weight_HCK = torch.randn(S, B, H, C + R), torch.randn(H, C, V)

    def stock(x: torch.Tensor) -> torch.Tensor:
        return stock_rope(x, angle_SR[:, None, None], mla_rotary_interleaved=interleaved, mscale=scale)

    made_SBHX = project(x_SBHX, weight_HCK=weight_HCK, rotation_SR=rotation_SR, interleaved=interleaved)
    for b, h in ((0, 0), (1, 2)):
        torch.testing.assert_close(made_SBHX[:, b, h, :V], x_SBHX[:, b, h, :C] @ weight_HCK[h])
    assert torch.equal(made_SBHX[..., V:], stock(x_SBHX[..., C:]))
    kv_SBHX, rotary_SBR = torch.randn(S, B, H, C + V), torch.randn(S, B, R)
    k, v = keys_and_values(kv_SBHX, rotary_SBR, rotation_SR=rotation_SR, value_dim=V, interleaved=interleaved)
    assert torch.equal(k, torch.cat([kv_SBHX[..., :C], stock(rotary_SBR.unsqueeze(2)).expand(-1, -1, H, -1)], -1))
    assert torch.equal(v, kv_SBHX[..., C:])


@pytest.mark.parametrize(
    "case",
    list(cases(S=5, B=2, H=3, width=4, hidden=6, indexer_heads=3, dtype=torch.float64)),
    ids=lambda case: case.name,
)
def test_gradients(case: Case) -> None:
    names = list(case.leaves)

    def call(*leaves: torch.Tensor) -> list[torch.Tensor]:
        returned = getattr(reference, case.op)(**dict(zip(names, leaves, strict=True)), **case.others)
        return [output for output in (returned if isinstance(returned, tuple) else (returned,)) if output.numel()]

    assert torch.autograd.gradcheck(call, [leaf.detach().requires_grad_() for leaf in case.leaves.values()])
    assert all(gradient.count_nonzero() for gradient in outcome(getattr(reference, case.op), case).values())


def test_refusals(angle_SR: torch.Tensor) -> None:
    x_SBHX, rotation_SR = torch.zeros(S, B, H, C + R), rotation_table(angle_SR)
    kv_SBHX, rotary_SBR = torch.zeros(S, B, H, C + V), torch.zeros(S, B, R)
    with pytest.raises(ModelError, match=r"x has shape \(7, 2, 30\)"):
        project(x_SBHX.flatten(2))
    with raises(ModelError, "[H, C, K]", "3, 4"):
        project(x_SBHX, weight_HCK=torch.zeros(H, C + 1, V), rotation_SR=rotation_SR)
    with pytest.raises(ModelError, match=r"torch\.float64 .*torch\.float32"):
        project(x_SBHX, weight_HCK=torch.zeros(H, C, V).double(), rotation_SR=rotation_SR)
    with raises(ModelError, (6, 6), "S = 7", "up to 10"):
        project(x_SBHX, rotation_SR=rotation_SR[1:])
    with raises(ModelError, (7, 2, 3, 9), (7, 1, 6)):
        keys_and_values(kv_SBHX, rotary_SBR[:, :1], rotation_SR=rotation_SR, value_dim=V)
    with pytest.raises(ModelError, match=r"value_dim is 9, expected 0\.\.8"):
        keys_and_values(kv_SBHX, rotary_SBR, rotation_SR=rotation_SR, value_dim=C + V)
    with raises(ModelError, "6 values", 4):
        keys_and_values(kv_SBHX, rotary_SBR, rotation_SR=rotation_SR[:, :4], value_dim=V)
    hidden, downs = torch.zeros(S, B, 8), [torch.zeros(4, 8), torch.zeros(4 + R, 8), torch.ones(4), torch.ones(4)]
    with raises(ModelError, (7, 2, 8), (4, 8), "R of at least 1"):
        latents(hidden, downs[0], downs[1][:4], *downs[2:], 1e-5)
    with pytest.raises(ModelError, match=r"'torch\.bfloat16', 'torch\.float32'"):
        latents(hidden.bfloat16(), *downs, 1e-5)
    weights = [torch.zeros(2 * R, 4), torch.zeros(R, 8), torch.ones(R), torch.zeros(R), torch.zeros(3, 8)]
    how = {"rotation_SR": rotation_SR, "eps": 1e-5, "scale": 1.0}
    with raises(ModelError, "3 heads", (7, 2, 4), (18, 4)):
        reference.indexer_inputs(hidden, torch.zeros(S, B, 4), *weights, **how)


def test_refusals_of_the_kernels(angle_SR: torch.Tensor) -> None:
    pytest.importorskip("triton")
    from megacpp_mcore.ops.mla_projection import triton

    x_SBHX, rotation_SR = torch.zeros(S, B, H, 128).bfloat16(), rotation_table(torch.zeros(S, 64))
    with pytest.raises(ModelError, match=r"torch\.float32 and widths \(64, 64, 0\)"):
        triton.project(x_SBHX.float(), rotation_SR=rotation_SR)
    with raises(ModelError, (122, 6, 0), "(64,)"):
        triton.project(x_SBHX, rotation_SR=rotation_table(angle_SR))
    with raises(ModelError, "0 tokens"):
        triton.keys_and_values(x_SBHX[:0], x_SBHX[:0, :, 0, 64:], rotation_SR=rotation_SR[:0], value_dim=64)
