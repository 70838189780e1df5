"""Plain-PyTorch truth of the steps between MLA's projections and its core attention, in the dtype of the inputs.

Shape legend: S tokens, B batch, H heads (of this rank), D hidden, Q and L ranks of the query's and the key's latent, C width of
a head's content, K its width after the matrix, R width of the rotary part, V width of a value, X width of a head: its content
followed by a rotary part or a value; N heads of the indexer.

Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1.2 (absorption) and 2.1.3 (decoupled rotary embedding); the order of rotated
values is that of megatron-core 0.19 (``rope_utils.py``), with and without ``mla_rotary_interleaved``.
"""

from __future__ import annotations

import torch

from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops.checks import require_float


def rotation_table(angle_SR: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return ``[S, R]``: the cosines, then the sines, of each token's R / 2 rotary angles, times ``scale``.

    Args:
        angle_SR: the angles, concatenated with themselves, as megatron-core's ``RotaryEmbedding`` returns them.
        scale: YaRN's factor on attention.
    """
    angle_SP = angle_SR[:, : angle_SR.shape[1] // 2]
    return torch.cat([angle_SP.cos(), angle_SP.sin()], dim=-1) * scale


def latents(
    hidden_SBD: torch.Tensor,
    q_down_QD: torch.Tensor,
    kv_down_XD: torch.Tensor,
    q_norm_Q: torch.Tensor,
    kv_norm_L: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the normed latents of queries and of keys and values, and the keys' rotary part.

    Args:
        hidden_SBD: the layer's input, normed.
        q_down_QD, kv_down_XD: weights of the down-projections; the second produces the latent followed by the rotary part.
        q_norm_Q, kv_norm_L: weights of the latents' RMSNorms.
        eps: of both norms.

    Returns:
        ``[S, B, Q]``, ``[S, B, L]`` and ``[S, B, R]``, R = X − L.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    check_latents(hidden_SBD, q_down_QD, kv_down_XD, q_norm_Q, kv_norm_L)
    latent = len(kv_norm_L)
    q_SBQ, kv_SBX = (torch.nn.functional.linear(hidden_SBD, weight) for weight in (q_down_QD, kv_down_XD))
    kv_SBL, rotary_SBR = kv_SBX.split([latent, kv_SBX.shape[-1] - latent], dim=-1)
    normed = torch.nn.functional.rms_norm
    return normed(q_SBQ, q_norm_Q.shape, q_norm_Q, eps), normed(kv_SBL, (latent,), kv_norm_L, eps), rotary_SBR


def project(
    x_SBHX: torch.Tensor,
    *,
    weight_HCK: torch.Tensor | None = None,
    rotation_SR: torch.Tensor | None = None,
    interleaved: bool = True,
) -> torch.Tensor:
    """Multiply each head's content by its matrix, and append the head's rotary part, rotated.

    Used to absorb the up-projection of keys into queries, to rotate queries and the indexer's keys, and to apply the
    up-projection of values to the output of attention over latents.

    Args:
        x_SBHX: content and rotary part, C + R values per head.
        weight_HCK: the matrices; None leaves the content unchanged.
        rotation_SR: from :func:`rotation_table`; None: there is no rotary part.
        interleaved: whether rotated pairs are (2i, 2i + 1) instead of (i, i + R / 2). The result has the first values of all
            pairs before the second ones.

    Returns:
        ``[S, B, H, K + R]``, contiguous.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    check_projection(x_SBHX, weight_HCK, rotation_SR)
    rotary = 0 if rotation_SR is None else rotation_SR.shape[1]
    content_SBHC, rotary_SBHR = x_SBHX.split([x_SBHX.shape[-1] - rotary, rotary], dim=-1)
    if weight_HCK is not None:
        content_SBHC = torch.einsum("sbhc,hck->sbhk", content_SBHC, weight_HCK)
    if rotation_SR is None:
        return content_SBHC.contiguous()
    rotated_SBHR = _rotate(rotary_SBHR, rotation_SR, interleaved)
    return torch.cat([content_SBHC, rotated_SBHR], dim=-1) if content_SBHC.shape[-1] else rotated_SBHR


def keys_and_values(
    kv_SBHX: torch.Tensor,
    rotary_SBR: torch.Tensor,
    *,
    rotation_SR: torch.Tensor,
    value_dim: int,
    interleaved: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys, with the rotated shared rotary part at the end of each head, and values.

    Args:
        kv_SBHX: the keys' content and the values, C + V values per head.
        rotary_SBR: the keys' rotary part, shared by all heads.
        rotation_SR, interleaved: as in :func:`project`.
        value_dim: V; 0 if the keys' leading columns are the values, as with absorbed latents.

    Returns:
        Keys ``[S, B, H, C + R]`` and values ``[S, B, H, V]``, both contiguous.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    check_keys(kv_SBHX, rotary_SBR, rotation_SR, value_dim)
    content_SBHC, v_SBHV = kv_SBHX.split([kv_SBHX.shape[-1] - value_dim, value_dim], dim=-1)
    rotated_SB1R = _rotate(rotary_SBR.unsqueeze(2), rotation_SR, interleaved)
    k_SBHK = torch.cat([content_SBHC, rotated_SB1R.expand(-1, -1, kv_SBHX.shape[2], -1)], dim=-1)
    return k_SBHK, v_SBHV.contiguous()


def indexer_inputs(
    hidden_SBD: torch.Tensor,
    latent_SBQ: torch.Tensor,
    q_up_XQ: torch.Tensor,
    k_down_RD: torch.Tensor,
    k_norm_R: torch.Tensor,
    k_bias_R: torch.Tensor,
    w_down_ND: torch.Tensor,
    *,
    rotation_SR: torch.Tensor,
    eps: float,
    scale: float,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute inputs of a DSA indexer's scores, rotated over the full head: queries, keys after LayerNorm, and head weights.

    Args:
        hidden_SBD, latent_SBQ: the layer's input, normed, and the normed latents of its queries. No gradient flows to them.
        q_up_XQ: weight of the queries' projection, N · R rows.
        k_down_RD, k_norm_R, k_bias_R: weight of the keys' projection; weight and bias of their norm.
        w_down_ND: weight of the head weights' projection.
        rotation_SR, interleaved: as in :func:`project`.
        eps: of the norm.
        scale: factor on the weights.

    Returns:
        ``[S, B, N, R]``, ``[S, B, R]`` and ``[S, B, N]``.

    Raises:
        ModelError: shapes or dtypes are not as described.
    """
    check_indexer_inputs(hidden_SBD, latent_SBQ, q_up_XQ, k_down_RD, k_norm_R, k_bias_R, w_down_ND, rotation_SR)
    linear = torch.nn.functional.linear
    hidden_SBD, rotary = hidden_SBD.detach(), k_norm_R.shape
    q_SBNR = linear(latent_SBQ.detach(), q_up_XQ).unflatten(-1, (-1, *rotary))
    k_SBR = torch.nn.functional.layer_norm(linear(hidden_SBD, k_down_RD), rotary, k_norm_R, k_bias_R, eps)
    q_SBNR, k_SBR = _rotate(q_SBNR, rotation_SR, interleaved), _rotate(k_SBR.unsqueeze(2), rotation_SR, interleaved)
    return q_SBNR, k_SBR.squeeze(2), linear(hidden_SBD, w_down_ND) * scale


def _rotate(x_SBHR: torch.Tensor, rotation_SR: torch.Tensor, interleaved: bool) -> torch.Tensor:
    cos, sin = rotation_SR[:, None, None].to(x_SBHR.dtype).chunk(2, dim=-1)
    first, second = (x_SBHR[..., 0::2], x_SBHR[..., 1::2]) if interleaved else x_SBHR.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def check_latents(
    hidden_SBD: torch.Tensor,
    q_down_QD: torch.Tensor,
    kv_down_XD: torch.Tensor,
    q_norm_Q: torch.Tensor,
    kv_norm_L: torch.Tensor,
) -> None:
    """Raise ModelError unless these are valid arguments of :func:`latents`."""
    tensors = (hidden_SBD, q_down_QD, kv_down_XD, q_norm_Q, kv_norm_L)
    require_float(hidden_SBD=hidden_SBD)
    shapes, dtypes = [tuple(tensor.shape) for tensor in tensors], {tensor.dtype for tensor in tensors}
    hidden, q_down, kv_down, q_norm, kv_norm = shapes
    if [len(shape) for shape in shapes] != [3, 2, 2, 1, 1] or not (
        hidden[2] == q_down[1] == kv_down[1] and q_down[0] == q_norm[0] and kv_down[0] > kv_norm[0]
    ):
        raise ModelError(
            f"hidden states, down-projections and norms have shapes {shapes}; expected [S, B, D], [Q, D], [L + R, D], [Q] and "
            "[L] with an R of at least 1"
        )
    if len(dtypes) > 1:
        raise ModelError(f"hidden states, down-projections and norms are of {sorted(map(str, dtypes))}; expected one dtype")


def check_indexer_inputs(
    hidden_SBD: torch.Tensor,
    latent_SBQ: torch.Tensor,
    q_up_XQ: torch.Tensor,
    k_down_RD: torch.Tensor,
    k_norm_R: torch.Tensor,
    k_bias_R: torch.Tensor,
    w_down_ND: torch.Tensor,
    rotation_SR: torch.Tensor,
) -> None:
    """Raise ModelError unless these are valid arguments of :func:`indexer_inputs`."""
    require_float(hidden_SBD=hidden_SBD)
    weights = (q_up_XQ, k_down_RD, k_norm_R, k_bias_R, w_down_ND)
    shapes, dtypes = [tuple(weight.shape) for weight in weights], {t.dtype for t in (hidden_SBD, latent_SBQ, *weights)}
    (S, B, D), (heads, R, Q) = hidden_SBD.shape, (len(w_down_ND), len(k_norm_R), latent_SBQ.shape[-1])
    expected = [(heads * R, Q), (R, D), (R,), (R,), (heads, D)]
    if shapes != expected or tuple(latent_SBQ.shape) != (S, B, Q):
        raise ModelError(
            f"an indexer of {heads} heads on hidden states {(S, B, D)} has latents {tuple(latent_SBQ.shape)} and weights "
            f"{shapes}; expected {(S, B, Q)} and {expected}"
        )
    if len(dtypes) > 1:
        raise ModelError(f"an indexer's inputs and weights are of {sorted(map(str, dtypes))}; expected one dtype")
    if _check_rotation(rotation_SR, S, R) != R:
        raise ModelError(f"an indexer's keys have {R} values and the table {rotation_SR.shape[1]}; expected equally many")


def check_projection(x_SBHX: torch.Tensor, weight_HCK: torch.Tensor | None, rotation_SR: torch.Tensor | None) -> None:
    """Raise ModelError unless these are valid arguments of :func:`project`."""
    require_float(x_SBHX=x_SBHX)
    if x_SBHX.dim() != 4:
        raise ModelError(f"x has shape {tuple(x_SBHX.shape)}, expected [S, B, H, C + R]")
    content = x_SBHX.shape[3] - _check_rotation(rotation_SR, x_SBHX.shape[0], x_SBHX.shape[3])
    if weight_HCK is not None and (
        weight_HCK.dim() != 3 or weight_HCK.shape[:2] != (x_SBHX.shape[2], content) or weight_HCK.dtype != x_SBHX.dtype
    ):
        raise ModelError(
            f"the weight is {weight_HCK.dtype} of shape {tuple(weight_HCK.shape)}; expected [H, C, K] with H and C = "
            f"{x_SBHX.shape[2]}, {content}, and {x_SBHX.dtype}, to match x"
        )


def check_keys(kv_SBHX: torch.Tensor, rotary_SBR: torch.Tensor, rotation_SR: torch.Tensor, value_dim: int) -> None:
    """Raise ModelError unless these are valid arguments of :func:`keys_and_values`."""
    require_float(kv_SBHX=kv_SBHX)
    kv, rotary = tuple(kv_SBHX.shape), tuple(rotary_SBR.shape)
    if len(kv) != 4 or len(rotary) != 3 or rotary[:2] != kv[:2] or rotary_SBR.dtype != kv_SBHX.dtype:
        raise ModelError(
            f"kv and the rotary part are {kv_SBHX.dtype} of shape {kv} and {rotary_SBR.dtype} of shape {rotary}; expected "
            "[S, B, H, C + V] and [S, B, R] with the same S, B and dtype"
        )
    if not 0 <= value_dim < kv[3]:
        raise ModelError(f"value_dim is {value_dim}, expected 0..{kv[3] - 1}: less than the width of a head of kv")
    if _check_rotation(rotation_SR, kv[0], rotary[2]) != rotary[2]:
        raise ModelError(f"the rotary part has {rotary[2]} values and the table {rotation_SR.shape[1]}; expected equally many")


def _check_rotation(rotation_SR: torch.Tensor | None, rows: int, most: int) -> int:
    """Return R; 0 without a table."""
    if rotation_SR is None:
        return 0
    require_float(rotation_SR=rotation_SR)
    shape = tuple(rotation_SR.shape)
    if len(shape) != 2 or shape[0] != rows or shape[1] % 2 or shape[1] > most:
        raise ModelError(
            f"the table of rotations has shape {shape}; expected [S, R] with S = {rows} and an even R up to {most}"
        )
    return shape[1]
