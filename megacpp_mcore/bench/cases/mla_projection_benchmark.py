"""The ops between MLA's projections and its core attention: latents, absorbed queries, keys and values, indexer inputs.

Legend: S tokens, B batch, H heads, D hidden, Q and L ranks of the query's and the key's latent, C width of a head's content, R
of its rotary part, V of a value, N heads of the indexer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megacpp_mcore.bench.catalog import Options
from megacpp_mcore.bench.problem import Call, Draw, Floor, Inputs, Problem, Variant
from megacpp_mcore.model.flops import Work, product
from megacpp_mcore.ops.mla_projection import reference

LIMITS = {"bfloat16": 5e-3, "float32": 2e-6}
"""The largest error of a row."""

EPS = 1e-5


def mla_latents(options: Options) -> Problem:
    """Apply both down-projections and norms of the latents."""
    (B, S, D), (Q, L, R) = options.sizes("B", "S", "hidden"), options.sizes("query_latent", "latent", "rope")
    draw = Draw(options)
    leaves = {
        "hidden_SBD": draw.normal(S, B, D),
        "q_down_QD": draw.normal(Q, D, scale=D**-0.5),
        "kv_down_XD": draw.normal(L + R, D, scale=D**-0.5),
        "q_norm_Q": 1 + draw.normal(Q, scale=0.1),
        "kv_norm_L": 1 + draw.normal(L, scale=0.1),
    }
    needs = {"query_latent_dim": Q, "latent_dim": L, "rope_dim": R}
    return _problem("mla_latents", "latents", options, leaves, {"eps": EPS}, product(S * B * D * (Q + L + R)), **needs)


def mla_projection(options: Options) -> Problem:
    """Compute queries that absorb the up-projection of keys, rotated."""
    (B, S, H), (K, L, R) = options.sizes("B", "S", "heads"), options.sizes("qk", "latent", "rope")
    draw = Draw(options)
    leaves = {"x_SBHX": draw.normal(S, B, H, K), "weight_HCK": draw.normal(H, K - R, L, scale=L**-0.5)}
    needs = {"content_dim": K - R, "latent_dim": L, "rope_dim": R}
    how = {"rotation_SR": _rotations(S, R, options.device)}
    return _problem("mla_projection", "project", options, leaves, how, product(S * B * H * (K - R) * L), **needs)


def mla_keys(options: Options) -> Problem:
    """Return keys and values of full MLA, from one projection and the rotary part that all heads share."""
    (B, S, H), (K, V, R) = options.sizes("B", "S", "heads"), options.sizes("qk", "v", "rope")
    draw = Draw(options)
    leaves = {"kv_SBHX": draw.normal(S, B, H, K - R + V), "rotary_SBR": draw.normal(S, B, R)}
    needs = {"content_dim": K - R, "v_dim": V, "rope_dim": R}
    how = {"rotation_SR": _rotations(S, R, options.device), "value_dim": V}
    rotation = 4 * S * B * R
    return _problem("mla_keys", "keys_and_values", options, leaves, how, Work(rotation, rotation), **needs)


def indexer_inputs(options: Options) -> Problem:
    """Compare queries, keys and head weights of the indexer; hidden states and latents get no gradient."""
    B, S, D, N, R, Q = options.sizes("B", "S", "hidden", "indexer_heads", "indexer_dim", "query_latent")
    draw = Draw(options)
    leaves = {
        "q_up_XQ": draw.normal(N * R, Q, scale=Q**-0.5),
        "k_down_RD": draw.normal(R, D, scale=D**-0.5),
        "k_norm_R": 1 + draw.normal(R, scale=0.1),
        "k_bias_R": draw.normal(R, scale=0.1),
        "w_down_ND": draw.normal(N, D, scale=D**-0.5),
    }
    how = {
        "hidden_SBD": draw.normal(S, B, D),
        "latent_SBQ": draw.normal(S, B, Q),
        "rotation_SR": _rotations(S, R, options.device),
        "eps": EPS,
        "scale": (N * R) ** -0.5,
    }
    forward = product(S * B * (Q * N * R + D * (R + N))).forward
    work = Work(forward, forward)  # one of the two operands gets a gradient
    return _problem("indexer_inputs", "indexer_inputs", options, leaves, how, work, rope_dim=R)


def _rotations(rows: int, width: int, device: str) -> torch.Tensor:
    half = torch.arange(width // 2, device=device) / (width // 2)
    return reference.rotation_table((torch.arange(rows, device=device)[:, None] * 500_000.0**-half).repeat(1, 2))


def _problem(
    op: str, name: str, options: Options, leaves: dict[str, torch.Tensor], how: dict[str, Any], work: Work, **needs: int
) -> Problem:
    """Compare every backend of ``op`` with the reference ``name``, whose named arguments are leaves and all other inputs."""
    draw = Draw(options, seed=2)

    def call(fn: Call, inputs: Inputs) -> Any:
        dtype = next(iter(inputs.leaves.values())).dtype  # in float64 the other inputs are, too
        others = {key: one.to(dtype) if getattr(one, "dtype", 0) == draw.dtype else one for key, one in how.items()}
        return fn(**inputs.leaves, **others)

    truth, given = partial(call, getattr(reference, name)), draw.leaves(**leaves)
    made = truth(Inputs(leaves=given))
    outputs = made if isinstance(made, tuple) else (made,)
    inputs = Inputs(leaves=given, cotangents={f"output {i}": draw.normal(*one.shape) for i, one in enumerate(outputs)})
    tensors = [*leaves.values(), *(value for value in how.values() if isinstance(value, torch.Tensor))]
    read, written, gradients = (
        sum(one.numel() for one in some) * draw.itemsize for some in (tensors, outputs, leaves.values())
    )
    peer = Variant.missing("stock", "no peer: stock does this in some ten operations of PyTorch's")
    ours = [*Variant.candidates(op, options, call, **needs)]
    return Problem(
        inputs=inputs,
        # The reference is the last backend, and comes first here: its errors are the yardstick.
        variants=[peer, *ours[::-1]],
        works=Floor.pair(work, read + written, read + 2 * written + gradients, options.dtype),
        truth=inputs.truth(truth),
        limit=LIMITS[options.dtype],
        outputs=len(outputs),
        yardstick="reference",
    )
