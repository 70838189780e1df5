"""NAM56R for transformers, in plain PyTorch: latent attention, full or sparse (A), Mamba-3 (M), experts (E) and M²RNN (R).

This file is copied into every exported checkpoint and needs only torch and transformers. Where megacpp-mcore is installed,
its kernels run Mamba-3 and M²RNN on a GPU (``config.kernels``).

Legend: B batch, S rows of this call, T rows so far, D hidden, H heads, C content and R rotary width of queries and keys,
V values, L latent of keys and values, N selected keys, P head width, R rank, N state of Mamba-3, K key width of M²RNN.
Sources: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3.2's report for A, Mamba-3 (arXiv 2603.15569), M²RNN (arXiv 2603.14360),
DeepSeek-V3 (arXiv 2412.19437) for E and multi-token prediction.
"""

from __future__ import annotations

import importlib
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_nam56r import NAM56RConfig

CHUNK_ELEMENTS = 2**25
"""Elements of the largest temporary of sparse attention, which goes through its queries in chunks."""
LONGEST_REPEAT = 12
"""Tokens that speculative decoding repeats at most after wrong drafts; then a call without drafts moves the cache on."""


class NAM56RCache:
    """What every layer keeps of earlier rows: tensors by name, their first axis the batch."""

    is_compileable = False

    def __init__(self, layers: int) -> None:
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(layers)]
        self.rows = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the rows so far."""
        return self.rows

    def extend(self, layer: int, name: str, rows: Tensor) -> Tensor:
        """Append ``rows [B, S, …]`` and return all ``[B, T, …]``."""
        before = self.layers[layer].get(name)
        self.layers[layer][name] = rows if before is None else torch.cat([before, rows], dim=1)
        return self.layers[layer][name]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the batch that a beam search continues."""
        for kept in self.layers:
            kept |= {name: rows.index_select(0, beam_idx.to(rows.device)) for name, rows in kept.items()}


class Step(NamedTuple):
    """What all layers of one call share.

    Attributes:
        rotation: cosines and sines of the rows' rotary angles, each ``[S, R / 2]``, float32.
        visible: which keys a row may attend to, bool ``[B or 1, S, T]``.
        real: which rows of this call are no padding, bool ``[B, S, 1]``; None: all.
        cache: of earlier rows; None: there are none, and nothing is kept.
    """

    rotation: tuple[Tensor, Tensor]
    visible: Tensor
    real: Tensor | None
    cache: NAM56RCache | None


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Apply the rotary embedding to ``x [B, S, H, R]``: pairs (2i, 2i + 1), or (i, i + R / 2)."""
    cos, sin = (table[:, None].to(x.dtype) for table in rotation)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _mscale(config: NAM56RConfig, factor: float) -> float:
    return 0.1 * factor * math.log(config.rotary_scaling_factor) + 1.0 if config.rotary_scaling_factor > 1 else 1.0


def rotary_rates(config: NAM56RConfig, width: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the angle a position of each pair ``[R / 2]``, and the factor of cosines and sines, by YaRN (arXiv 2309.00071)."""
    rates = 1.0 / config.rope_theta ** (torch.arange(0, width, 2, device=device).float() / width)
    if config.rotary_scaling_factor == 1:
        return rates, 1.0

    def pair_of(rotations: float) -> float:
        """Return the (fractional) pair that turns so often in the original length."""
        turns = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(config.rope_theta))

    first, last = max(math.floor(pair_of(config.beta_fast)), 0), min(math.ceil(pair_of(config.beta_slow)), width - 1)
    if first == last:
        last += 0.001
    scaled = ((torch.arange(width // 2, device=device).float() - first) / (last - first)).clamp(0, 1)
    rates = rates / config.rotary_scaling_factor * scaled + rates * (1 - scaled)
    return rates, _mscale(config, config.mscale) / _mscale(config, config.mscale_all_dim)


class NAM56RNorm(nn.RMSNorm):
    """RMSNorm in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [..., D]`` normed, in its dtype."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class NAM56RGate(nn.Linear):
    """The router's linear layer, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., N]``."""
        return F.linear(x.float(), self.weight.float())


class NAM56RMLP(nn.Module):
    """Two matrices with GELU (erf) between them."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, width, bias=False), nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D] -> [..., D]``."""
        return self.down_proj(F.gelu(self.up_proj(x)))


class NAM56RIndexer(nn.Module):
    """Selects the keys that each query of its layer, and of the ``S`` layers after it, attends to."""

    def __init__(self, config: NAM56RConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.topk, self.rotary = layer, config.index_topk, config.qk_rope_head_dim
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.width, bias=False)
        self.k_norm = nn.LayerNorm(self.width, eps=config.rms_norm_eps)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def _rotated(self, x_BSHX: Tensor, step: Step) -> Tensor:
        rotary, plain = x_BSHX.split([self.rotary, self.width - self.rotary], dim=-1)
        return torch.cat([rotate(rotary, step.rotation, interleaved=False), plain], dim=-1)

    @torch.no_grad()
    def forward(self, hidden: Tensor, latent: Tensor, step: Step) -> Tensor:
        """Return the best keys of each row, ``[B, S, N]``, -1 where fewer are visible; N = min(top-k, T)."""
        q = self._rotated(self.wq_b(latent).unflatten(-1, (self.heads, self.width)), step)
        k = self._rotated(self.k_norm(self.wk(hidden)).unsqueeze(2), step).squeeze(2)
        w = self.weights_proj(hidden) * (self.heads * self.width) ** -0.5
        if step.cache is not None:
            k = step.cache.extend(self.layer, "indexer", k)
        best, keys = [], min(self.topk, k.shape[1])
        rows = max(1, CHUNK_ELEMENTS // (q.shape[0] * self.heads * k.shape[1]))
        for q_BRHX, w_BRH, visible in zip(q.split(rows, 1), w.split(rows, 1), step.visible.split(rows, 1), strict=True):
            logits = torch.einsum("brhx,btx->brht", q_BRHX.float(), k.float()).relu()
            score = (logits * w_BRH.float().unsqueeze(-1)).sum(2)
            score = score.masked_fill(~visible, -math.inf)
            index = score.argsort(dim=-1, descending=True, stable=True)[..., :keys]  # equal scores: the lower key first
            best.append(index.masked_fill(~visible.expand_as(score).gather(-1, index), -1))
        return torch.cat(best, dim=1)


class NAM56RAttention(nn.Module):
    """Multi-head latent attention to every key (``-``) or a window (``W``), or over latents to selected ones (``F``, ``S``)."""

    def __init__(self, config: NAM56RConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, config.num_attention_heads
        # The block for multi-token prediction comes after the layers.
        self.role = (config.attention_roles + config.mtp_attention)[layer]
        self.content, self.rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.latent, eps = config.v_head_dim, config.kv_lora_rank, config.rms_norm_eps
        query = self.content + self.rotary
        self.scale = query**-0.5 * _mscale(config, config.mscale_all_dim) ** 2
        self.window = config.sliding_window if self.role == "W" else None
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = NAM56RNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.latent + self.rotary, bias=False)
        self.kv_a_layernorm = NAM56RNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.content + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, config.hidden_size, bias=False)
        if self.role == "F":
            self.indexer = NAM56RIndexer(config, layer)

    def forward(self, hidden: Tensor, step: Step, index: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``[B, S, D] -> [B, S, D]``, and the selected keys, which an ``F`` layer computes and an ``S`` layer takes."""
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden))
        latent, rotary = self.kv_a_proj_with_mqa(hidden).split([self.latent, self.rotary], dim=-1)
        latent = self.kv_a_layernorm(latent)
        queries = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1))
        content, q_rotary = queries.split([self.content, self.rotary], dim=-1)
        q_rotary = rotate(q_rotary, step.rotation, interleaved=True)
        k_rotary = rotate(rotary.unsqueeze(2), step.rotation, interleaved=True)
        if self.role == "F":
            index = self.indexer(hidden, q_latent, step)
        attend = self._to_selected if self.role in "FS" else self._to_all
        return self.o_proj(attend(content, q_rotary, latent, k_rotary, step, index).flatten(2)), index

    def _to_all(self, content: Tensor, q_rotary: Tensor, latent: Tensor, k_rotary: Tensor, step: Step, _: Any) -> Tensor:
        k_content, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).split([self.content, self.value], dim=-1)
        k = torch.cat([k_content, k_rotary.expand(-1, -1, self.heads, -1)], dim=-1)
        if step.cache is not None:
            k, v = step.cache.extend(self.layer, "key", k), step.cache.extend(self.layer, "value", v)
        q = torch.cat([content, q_rotary], dim=-1)
        heads_first, visible = (tensor.transpose(1, 2) for tensor in (q, k, v)), step.visible
        if self.window is not None:
            visible = visible & torch.ones_like(visible).triu(visible.shape[2] - visible.shape[1] - self.window + 1)
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible.unsqueeze(1), scale=self.scale)
        return out.transpose(1, 2)

    def _to_selected(
        self, content: Tensor, q_rotary: Tensor, latent: Tensor, k_rotary: Tensor, step: Step, index: Tensor | None
    ) -> Tensor:
        if index is None:
            raise ValueError(f"layer {self.layer} attends to another layer's keys, and no layer before it selects any")
        # By a call, within which offloaded or divided weights are there; adapters take part in it.
        up_XL = self.kv_b_proj(torch.eye(self.latent, dtype=latent.dtype, device=latent.device)).mT
        k_up_HCL, v_up_HVL = up_XL.unflatten(0, (self.heads, -1)).split([self.content, self.value], 1)
        q = torch.cat([torch.einsum("bshc,hcl->bshl", content, k_up_HCL), q_rotary], dim=-1)
        kv = torch.cat([latent, k_rotary.squeeze(2)], dim=-1)
        if step.cache is not None:
            kv = step.cache.extend(self.layer, "latent", kv)
        batch = torch.arange(len(kv), device=kv.device)[:, None, None]
        rows = max(1, CHUNK_ELEMENTS // (index.shape[0] * index.shape[2] * (kv.shape[2] + self.heads)))
        out = []
        for q_BRHX, index_BRN in zip(q.split(rows, 1), index.split(rows, 1), strict=True):
            kv_BRNX = kv[batch, index_BRN.clamp_min(0)].float()
            score = (q_BRHX.float() @ kv_BRNX.mT) * self.scale
            score = score.masked_fill(index_BRN.unsqueeze(2) < 0, -math.inf)
            out.append((score.softmax(-1) @ kv_BRNX[..., : self.latent]).to(kv.dtype))
        return torch.einsum("bshl,hvl->bshv", torch.cat(out, dim=1), v_up_HVL)


class NAM56RExperts(nn.Module):
    """Routed experts, their matrices stacked, and one shared expert."""

    def __init__(self, config: NAM56RConfig, _: int) -> None:
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.topk = config.num_experts_per_tok
        self.gate = NAM56RGate(hidden, experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.shared_experts = NAM56RMLP(hidden, config.shared_expert_intermediate_size)

    def forward(self, hidden: Tensor, _: Step) -> Tensor:
        """``[B, S, D] -> [B, S, D]``: top-k experts by biased score, weighted by their scores, and the shared one."""
        x = hidden.flatten(0, 1)
        score = torch.sigmoid(self.gate(x))
        biased = score.detach() + self.e_score_correction_bias.float()
        chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, : self.topk]
        weight = score.gather(1, chosen)
        weight = weight / (weight.sum(1, keepdim=True) + 1e-20)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(self.up_proj)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            inner = F.gelu(F.linear(x[token], self.up_proj[expert]).float()) * weight[token, place].unsqueeze(1)
            out = out.index_add(0, token, F.linear(inner.to(x.dtype), self.down_proj[expert]).float())
        return out.to(x.dtype).view_as(hidden) + self.shared_experts(hidden)


def mamba3(
    x_SBHP: Tensor, z_SBHP: Tensor, b_SBGRN: Tensor, c_SBGRN: Tensor,
    dt_SBH: Tensor, a_SBH: Tensor, trap_SBH: Tensor, angles_SBA: Tensor,
    *, chunk_size: int, A_floor: float, eps: float, activation: str,
    initial_state: Any = None, return_final_state: bool = False, **weights: Tensor | None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Compute a Mamba-3 mixer between its projections, in float32, chunk by chunk; the signature is megacpp-mcore's.

    With ``V_t = x_t ⊙ mimo_x``, ``γ_t = λ_t Δ_t`` and ``w_s = γ_s + (1 − λ_{s+1}) Δ_{s+1}``, for every rank r::

        y_{t,r} = Σ_q γ_t (C_{t,r}·B_{t,q}) V_{t,q} + Σ_{s<t} exp(Σ_{k=s+1..t} A_k Δ_k) w_s Σ_q (C_{t,r}·B_{s,q}) V_{s,q}
    """
    x, z, dt, a, trap, angles = (t.transpose(0, 1).float() for t in (x_SBHP, z_SBHP, dt_SBH, a_SBH, trap_SBH, angles_SBA))
    rows, heads = x.shape[1:3]
    rate = F.softplus(a) if activation == "softplus" else torch.where(a < 0, 1 / (1 - a.clamp(max=0)), 1 + a)
    step = F.softplus(dt + weights["dt_bias"].float())
    decay, own, pending = -rate.clamp_min(A_floor) * step, torch.sigmoid(trap) * step, torch.sigmoid(-trap) * step
    turn = step.double().unsqueeze(-1) * (math.pi * torch.tanh(angles.double())).unsqueeze(2)
    if initial_state is not None:
        turn = torch.cat([turn[:, :1] + initial_state[3].double().unsqueeze(1), turn[:, 1:]], dim=1)
    theta = torch.remainder(turn.cumsum(1), 2 * math.pi).float()

    mimo_x, mimo_z, mimo_o = (weights[f"mimo_{name}"] for name in "xzo")

    def by_head(t_SBGRN: Tensor, name: str) -> Tensor:
        weight, bias_HRN = weights[f"{name}_norm_weight"], weights[f"{name}_bias"]
        t = t_SBGRN.permute(1, 0, 3, 2, 4).float()
        t = F.rms_norm(t, weight.shape, weight.float(), eps).repeat_interleave(heads // t.shape[3], dim=3)
        return _turned(t + bias_HRN.float().transpose(0, 1), theta, mimo_x is not None)

    b, c = by_head(b_SBGRN, "b"), by_head(c_SBGRN, "c")

    def by_rank(t: Tensor, mix_HRP: Tensor | None) -> Tensor:
        return t.unsqueeze(2) if mix_HRP is None else t.unsqueeze(2) * mix_HRP.float().transpose(0, 1)

    v, state = by_rank(x, mimo_x), None
    if initial_state is not None:
        before = by_rank(initial_state[2].float().unsqueeze(1), mimo_x)[:, 0]
        joins = torch.einsum("brhp,brhn->bhpn", before, initial_state[1].float())
        state = initial_state[0].float() + pending[:, 0, :, None, None] * joins
    later = own + F.pad(pending[:, 1:], (0, 0, 0, 1))
    y, state = _scan(v, b, c, decay, own, later, state, min(chunk_size, rows))
    out = torch.addcmul(y, weights["D"].float().unsqueeze(-1), v) * F.silu(by_rank(z, mimo_z))
    out = out.squeeze(2) if mimo_o is None else torch.einsum("bsrhp,hrp->bshp", out, mimo_o.float())
    if (weight := weights["out_norm_weight"]) is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight.float().view(out.shape[2:])
    kept = (state, b[:, -1], x[:, -1], theta[:, -1]) if return_final_state else None
    return out.to(x_SBHP.dtype).transpose(0, 1), kept


def _turned(x_BSRHN: Tensor, theta_BSHA: Tensor, half: bool) -> Tensor:
    """Rotate A planes of the state, of the pairs (i, i + N / 2) or (2i, 2i + 1); the rest, by angles of 0, stays."""
    theta = F.pad(theta_BSHA, (0, x_BSRHN.shape[-1] // 2 - theta_BSHA.shape[-1])).unsqueeze(2)
    cos, sin = torch.cos(theta), torch.sin(theta)
    axis = -2 if half else -1
    first, second = x_BSRHN.unflatten(-1, (2, -1) if half else (-1, 2)).unbind(axis)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=axis).flatten(-2)


def _scan(
    v_BSRHP: Tensor, b_BSRHN: Tensor, c_BSRHN: Tensor, decay_BSH: Tensor, own_BSH: Tensor, later_BSH: Tensor,
    state_BHPN: Tensor | None, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``y [B, S, R, H, P]`` and the state after the last row."""
    (batch, rows, _, heads, width), states = v_BSRHP.shape, b_BSRHN.shape[-1]
    padding = -rows % chunk

    def cut(t: Tensor) -> Tensor:
        """Cut ``[B, S, …] -> [chunks, B, L, …]``."""
        padded = F.pad(t, (0, 0) * (t.dim() - 2) + (0, padding))
        return padded.unflatten(1, (-1, chunk)).transpose(0, 1)

    state = v_BSRHP.new_zeros(batch, heads, width, states) if state_BHPN is None else state_BHPN
    outputs = []
    strictly = torch.ones(chunk, chunk, dtype=torch.bool, device=v_BSRHP.device).tril(-1)
    chunks = map(cut, (v_BSRHP, b_BSRHN, c_BSRHN, decay_BSH, own_BSH, later_BSH))
    for v, b, c, decay, own, later in zip(*chunks, strict=True):
        decay_BHL = decay.transpose(1, 2)
        # Sums of each column by itself: the difference of two running sums would lose small decays after a large one.
        sums_BHLM = decay_BHL.unsqueeze(-1).expand(-1, -1, -1, chunk).masked_fill(~strictly, 0).cumsum(-2)
        weight = torch.exp(sums_BHLM).masked_fill(~strictly, 0) * later.transpose(1, 2).unsqueeze(-2)
        weight = weight + torch.diag_embed(own.transpose(1, 2))
        score = torch.einsum("blrhn,bmqhn->bhlrmq", c, b) * weight[:, :, :, None, :, None]
        y = torch.einsum("bhlrmq,bmqhp->blrhp", score, v)
        since = torch.exp(decay_BHL.cumsum(-1)).transpose(1, 2)
        outputs.append(y + torch.einsum("blrhn,bhpn->blrhp", c, state) * since[:, :, None, :, None])
        to_end = (torch.exp(sums_BHLM[:, :, -1]) * later.transpose(1, 2)).transpose(1, 2)
        added = torch.einsum("blrhp,blrhn->bhpn", v * to_end[:, :, None, :, None], b)
        state = state * torch.exp(decay_BHL.sum(-1))[..., None, None] + added
    return torch.cat(outputs, dim=1)[:, :rows], state


class NAM56RMamba3(nn.Module):
    """Mamba-3 between its projections."""

    def __init__(self, config: NAM56RConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.heads, self.width, self.rank = config.mamba_heads, config.mamba_head_dim, config.mamba_rank
        state = config.mamba_state
        self.by_group = (config.mamba_groups, self.rank, state)
        inner, columns = self.heads * self.width, math.prod(self.by_group)
        sizes = dict.fromkeys("zx", inner) | dict.fromkeys("BC", columns)
        sizes |= dict.fromkeys(("dt", "A", "trap"), self.heads) | {"angles": config.mamba_angles}
        self.in_proj = nn.ModuleDict({name: nn.Linear(config.hidden_size, n, bias=False) for name, n in sizes.items()})
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        one_dimensional = {"b_norm_weight": state, "c_norm_weight": state, "dt_bias": self.heads, "D": self.heads}
        one_dimensional |= dict.fromkeys(("b_bias", "c_bias"), self.heads * self.rank * state)
        if config.mamba_out_norm:
            one_dimensional["out_norm_weight"] = inner
        if self.rank > 1:
            one_dimensional |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), self.rank * inner)
        self.weights = tuple(one_dimensional)
        for name, size in one_dimensional.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """``[B, S, D] -> [B, S, D]``."""
        parts = {name: linear(hidden) for name, linear in self.in_proj.items()}
        if step.real is not None:  # a row of padding then adds nothing to the state
            parts["x"] = parts["x"] * step.real
        parts = {name: part.transpose(0, 1) for name, part in parts.items()}
        z, x = (parts[name].unflatten(-1, (self.heads, self.width)) for name in "zx")
        b, c = (parts[name].unflatten(-1, self.by_group) for name in "BC")
        kept = None if step.cache is None else step.cache.layers[self.layer]
        names = ("h", "b", "x", "theta")
        by_head = ("b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o")
        weights = dict.fromkeys((*by_head[2:], "out_norm_weight")) | {key: getattr(self, key) for key in self.weights}
        weights |= {key: weights[key].view(self.heads, self.rank, -1) for key in by_head if weights[key] is not None}
        run, as_state = kernel("mamba3", mamba3, hidden, self.config)
        out, left = run(
            x, z, b, c, parts["dt"], parts["A"], parts["trap"], parts["angles"],
            **weights, chunk_size=self.config.mamba_chunk, A_floor=self.config.mamba_a_floor, eps=self.config.rms_norm_eps,
            activation=self.config.mamba_decay_activation, return_final_state=kept is not None,
            initial_state=as_state(kept[name] for name in names) if kept else None,
        )  # fmt: skip
        if kept is not None:
            kept |= zip(names, left, strict=True)
        return self.out_proj(out.transpose(0, 1).flatten(2))


def m2rnn(
    q_SBK: Tensor, k_SBK: Tensor, v_SBHV: Tensor, g_SBHV: Tensor, f_SBH: Tensor,
    *, eps: float, norm_width: int, real: Tensor | None = None,
    initial_state: Any = None, return_final_state: bool = False, **weights: Tensor,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Compute an M²RNN mixer between its projections, token by token; the signature is megacpp-mcore's, with ``real``.

    ``c_t = tanh(h_{t−1} W + k_t v_tᵀ)``, ``h_t = f_t h_{t−1} + (1 − f_t) c_t``, ``y_t = h_tᵀ q_t`` for every head.
    """
    heads, width = v_SBHV.shape[2:]
    rows_BSC = torch.cat([q_SBK, k_SBK, v_SBHV.flatten(2)], dim=-1).transpose(0, 1)
    taps = weights["qk_conv_weight"].shape[1]
    before = initial_state[1] if initial_state else rows_BSC.new_zeros(len(rows_BSC), taps - 1, rows_BSC.shape[2])
    window = torch.cat([before.to(rows_BSC.dtype), rows_BSC], dim=1)
    weight, bias = (torch.cat([weights[f"{part}_conv_{name}"] for part in ("qk", "v")]) for name in ("weight", "bias"))
    convolved = F.silu(F.conv1d(window.mT, weight.unsqueeze(1), bias, groups=len(weight)).mT)
    q, k, v = convolved.split([q_SBK.shape[-1], k_SBK.shape[-1], heads * width], dim=-1)
    if real is not None:  # so that a row of padding leaves a state of zeros as it is
        v = v * real
    v = v.unflatten(-1, (heads, width))
    step = F.softplus(f_SBH.transpose(0, 1).float() + weights["dt_bias"].float())
    f = torch.exp(-torch.exp(weights["A_log"].float()) * step)
    h = v.new_zeros(len(v), heads, q.shape[-1], width).float() if initial_state is None else initial_state[0].float()
    outer = torch.einsum("bsk,bshv->bshkv", k.float(), v.float())
    y = []
    for t in range(v.shape[1]):
        forget = f[:, t, :, None, None]
        h = forget * h + (1 - forget) * torch.tanh(h @ weights["W"].float() + outer[:, t])
        y.append(torch.einsum("bk,bhkv->bhv", q[:, t].float(), h))
    y = torch.stack(y, dim=1).to(v.dtype).float()
    y = y + weights["D"].float().view(heads, width) * v.float()
    gated = (y * F.silu(g_SBHV.transpose(0, 1).float())).flatten(2)
    out = gated * torch.rsqrt(gated.square().sum(-1, keepdim=True) / norm_width + eps) * weights["norm_weight"]
    kept = (h, window[:, window.shape[1] - taps + 1 :]) if return_final_state else None
    return out.to(v_SBHV.dtype).transpose(0, 1), kept


class NAM56RRecurrent(nn.Module):
    """M²RNN between its projections."""

    def __init__(self, config: NAM56RConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.heads, self.width, key = config.rnn_heads, config.rnn_value_dim, config.rnn_key_dim
        self.values = self.heads * self.width
        sizes = {"q": key, "k": key, "v": self.values, "g": self.values, "f": self.heads}
        self.in_proj = nn.ModuleDict({name: nn.Linear(config.hidden_size, n, bias=False) for name, n in sizes.items()})
        self.out_proj = nn.Linear(self.values, config.hidden_size, bias=False)
        shapes = {
            "qk_conv_weight": (2 * key, config.rnn_conv_kernel), "qk_conv_bias": (2 * key,),
            "v_conv_weight": (self.values, config.rnn_conv_kernel), "v_conv_bias": (self.values,),
            "norm_weight": (self.values,), "W": (self.heads * self.width**2,), "A_log": (self.heads,),
            "dt_bias": (self.heads,), "D": (self.values,),
        }  # fmt: skip
        self.weights = tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """``[B, S, D] -> [B, S, D]``."""
        parts = {name: linear(hidden) for name, linear in self.in_proj.items()}
        if step.real is not None:  # the convolution's window of padding is of zeros, as before the first row
            parts |= {name: parts[name] * step.real for name in "qkv"}
        parts = {name: part.transpose(0, 1) for name, part in parts.items()}
        v, g = (parts[name].unflatten(-1, (self.heads, self.width)) for name in "vg")
        weights = {key: getattr(self, key) for key in self.weights}
        weights["W"] = self.W.view(self.heads, self.width, self.width)
        kept = None if step.cache is None else step.cache.layers[self.layer]
        run, as_state = kernel("m2rnn", m2rnn, hidden, self.config) if step.real is None else (m2rnn, tuple)
        padding = {} if step.real is None else {"real": step.real}
        out, left = run(
            parts["q"], parts["k"], v, g, parts["f"], **weights, **padding,
            eps=self.config.rms_norm_eps, norm_width=self.values, return_final_state=kept is not None,
            initial_state=as_state((kept["h"], kept["window"])) if kept else None,
        )  # fmt: skip
        if kept is not None:
            kept |= zip(("h", "window"), left, strict=True)
        return self.out_proj(out.transpose(0, 1))


def kernel(op: str, plain: Any, like: Tensor, config: NAM56RConfig) -> tuple[Any, Any]:
    """Return megacpp-mcore's kernels of ``op`` or ``plain``, as ``config.kernels`` says, and what makes tensors their state.

    None takes the kernels for bfloat16 on a GPU at the widths that they are made for.
    """
    widths = {
        "mamba3": config.mamba_head_dim == 64 and config.mamba_state in (64, 128) and config.mamba_rank in (1, 2, 4),
        "m2rnn": config.rnn_key_dim == 64 and config.rnn_value_dim == 16,
    }
    fits = like.is_cuda and like.dtype == torch.bfloat16 and widths[op]
    if config.kernels or (config.kernels is None and fits):
        try:
            module = importlib.import_module(f"megacpp_mcore.ops.{op}.triton")
            return getattr(module, op), getattr(module, {"mamba3": "Mamba3State", "m2rnn": "M2RNNState"}[op])._make
        except ImportError:
            if config.kernels:
                raise
    return plain, tuple


class NAM56RLayer(GradientCheckpointingLayer):
    """A norm, one mixer, and the residual."""

    def __init__(self, config: NAM56RConfig, layer: int) -> None:
        super().__init__()
        self.letter = config.pattern[layer]
        self.norm = NAM56RNorm(config.hidden_size, config.rms_norm_eps)
        mixers = {"A": NAM56RAttention, "E": NAM56RExperts, "M": NAM56RMamba3, "R": NAM56RRecurrent}
        self.mixer = mixers[self.letter](config, layer)

    def forward(self, hidden: Tensor, step: Step, index: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """``[B, S, D] -> [B, S, D]``, and the keys that the last ``F`` layer selected."""
        normed = self.norm(hidden)
        if self.letter == "A":
            out, index = self.mixer(normed, step, index)
        else:
            out = self.mixer(normed, step)
        return hidden + out, index


class NAM56RPrediction(nn.Module):
    """Multi-token prediction: one block that every depth applies to the hidden states of the depth before."""

    def __init__(self, config: NAM56RConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (NAM56RNorm(hidden, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_norm, self.mlp_norm = NAM56RNorm(hidden, eps), NAM56RNorm(hidden, eps)
        self.attention = NAM56RAttention(config, config.num_hidden_layers)
        self.mlp = NAM56RMLP(hidden, config.intermediate_size)

    def forward(self, hidden: Tensor, embedded: Tensor, step: Step) -> Tensor:
        """Return the hidden states that predict one token further; ``embedded``: of each row's next known token."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        x = x + self.attention(self.input_norm(x), step, None)[0]
        return self.norm(x + self.mlp(self.mlp_norm(x)))


class NAM56RPreTrainedModel(PreTrainedModel):
    """What transformers asks of a model."""

    config_class = NAM56RConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NAM56RLayer"]  # noqa: RUF012
    _is_stateful = True  # states of M and R cannot be cut back, as assisted generation would
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "dt_bias", "mixer.D", "b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o", "mixer.W", "A_log", "e_score_correction_bias",
    ]  # fmt: skip

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, NAM56RExperts):
            for weight in (module.up_proj, module.down_proj):
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes a NAM56RCache


class NAM56RModel(NAM56RPreTrainedModel):
    """The embedding, the layers and the final norm."""

    def __init__(self, config: NAM56RConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(NAM56RLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = NAM56RNorm(config.hidden_size, config.rms_norm_eps)
        if config.mtp_depth:
            self.mtp = NAM56RPrediction(config)
        self.gradient_checkpointing = False
        self.post_init()

    def step(self, hidden: Tensor, attention_mask: Tensor | None, cache: NAM56RCache | None) -> Step:
        """Return what the layers share in a call with ``hidden [B, S, D]``; refuse a mask that is not ``[B, T]``."""
        first, rows, width = 0 if cache is None else cache.rows, hidden.shape[1], self.config.qk_rope_head_dim
        rates, mscale = rotary_rates(self.config, width, hidden.device)
        keys = torch.arange(first + rows, device=hidden.device)
        angle, place = torch.outer(keys[first:].float(), rates), keys[first:, None]
        visible, real = (keys <= place).unsqueeze(0), None
        if attention_mask is not None and attention_mask.shape != (expected := (len(hidden), first + rows)):
            raise ValueError(
                f"attention_mask has the shape {list(attention_mask.shape)}; expected {list(expected)}, 1 for tokens and 0 for "
                "padding on the left"
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.bool()
            if (real[:, 1:] & ~real[:, :-1] & real.cumsum(1)[:, :-1].bool()).any():
                raise ValueError("attention_mask has zeros between its ones; expected zeros only for padding on the left")
            # A row of padding sees itself: a softmax over nothing is NaN.
            visible = visible & real.unsqueeze(1) | (keys == place)
            real = None if bool(real[:, first:].all()) else real[:, first:].unsqueeze(2)
        return Step((angle.cos() * mscale, angle.sin() * mscale), visible, real, cache)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, past_key_values: NAM56RCache | None = None,
        inputs_embeds: Tensor | None = None, use_cache: bool | None = None, position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None, output_attentions: bool | None = None, return_dict: bool | None = None,
        cache: NAM56RCache | None = None, **_: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:  # fmt: skip
        """``input_ids [B, S] -> last_hidden_state [B, S, D]``, after the final norm; positions are those of the rows.

        Args:
            attention_mask: ``[B, T]``, 0 for padding, which stands on the left.
            past_key_values: of an earlier call, which this one continues and extends; ``cache`` since transformers 5.24.
            position_ids: ``[B, S]``; must not restart in a row, as those of packed documents do.
            output_hidden_states: whether to return what enters each layer, and what leaves the final norm.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected input_ids or inputs_embeds, one of the two")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: most layers have none, and none are kept; leave it out")
        if position_ids is not None and attention_mask is None and bool((position_ids.diff(dim=-1) <= 0).any()):
            raise ValueError(
                "position_ids restart in a row, as those of packed documents, which these layers would not keep apart; give "
                "each document a row of its own, with padding on the left"
            )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if hidden.dim() != 3 or not hidden.numel():
            raise ValueError(
                f"the input has the shape {list(hidden.shape[:-1])}; expected [B, S] with at least one token, such as bos_token"
            )
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        runs_again = self.training and self.gradient_checkpointing  # which would extend a cache again
        cache = past_key_values if cache is None else cache
        if not isinstance(cache, NAM56RCache | None):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; expected an earlier call's NAM56RCache")
        if cache is None and use_cache and not runs_again:
            cache = NAM56RCache(len(self.layers))
        shared, index, entered = self.step(hidden, attention_mask, cache), None, []
        for layer in self.layers:
            entered.append(hidden)
            hidden, index = layer(hidden, shared, index)
        if cache is not None:
            cache.rows += hidden.shape[1]
        hidden = self.norm(hidden)
        keeps = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden, past_key_values=cache, hidden_states=(*entered, hidden) if keeps else None
        )
        return output.to_tuple() if return_dict is False else output


class NAM56RForCausalLM(NAM56RPreTrainedModel, GenerationMixin):
    """NAM56R with its output head."""

    def __init__(self, config: NAM56RConfig) -> None:
        super().__init__(config)
        self.model = NAM56RModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        past_key_values: NAM56RCache | None = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None, output_attentions: bool | None = None, return_dict: bool | None = None,
        cache: NAM56RCache | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:  # fmt: skip
        """Return logits ``[B, S, vocabulary]``, of the last ``logits_to_keep`` rows if that is not 0, and with labels the loss.

        Args:
            labels: ``[B, S]``, the tokens themselves, -100 where no loss is wanted; the loss is of the next token.
        """
        if unknown := [name for name, value in kwargs.items() if isinstance(value, NAM56RCache)]:
            raise ValueError(f"the cache was passed as {unknown[0]}; expected cache or past_key_values")
        outputs = self.model(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, position_ids, output_hidden_states,
            output_attentions, cache=cache,
        )  # fmt: skip
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, rows])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )
        return result.to_tuple() if return_dict is False else result

    def speculate(
        self, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        drafts: int | None = None, counts: dict[str, int] | None = None, **inputs: Any,
    ) -> Tensor:  # fmt: skip
        """Decode greedily with drafts of multi-token prediction: ``generate(…, custom_generate=type(model).speculate)``.

        One call of the layers checks all drafts. States of M and R cannot be cut back: after a wrong draft the cache is that of
        before the call, and the tokens since then go through the layers again, together with the next drafts.

        Args:
            drafts: how many a call; None: ``mtp_depth``.
            counts: is given the ``calls`` of the layers, and the ``drafted`` and ``accepted`` tokens.
        """
        drafts = self.config.mtp_depth if drafts is None else drafts
        wrong = {name: getattr(generation_config, name) for name in ("do_sample", "return_dict_in_generate")}
        wrong |= {"num_beams": (generation_config.num_beams or 1) > 1, "an empty prompt": not input_ids.numel()}
        mask = inputs.get("attention_mask")
        wrong |= {"a batch": len(input_ids) > 1, "padding": mask is not None and not mask.all()}
        wrong[f"drafts={drafts} of {self.config.mtp_depth} depths"] = drafts < 1 or not self.config.mtp_depth
        if any(wrong.values()):
            names = ", ".join(name for name, is_wrong in wrong.items() if is_wrong)
            raise ValueError(f"speculate does not support {names}; expected one sequence, decoded greedily")
        counts = {} if counts is None else counts
        counts |= {"calls": 0, "drafted": 0, "accepted": 0}
        ids, guess, layers = input_ids, input_ids[:, :0], len(self.model.layers)
        cache, depths = NAM56RCache(layers), [NAM56RCache(layers + 1) for _ in range(drafts)]
        hidden = self.model.embed_tokens(guess)  # of rows that the depths have not, or have of drafts
        while True:
            start, length, before = cache.rows, ids.shape[1], [dict(kept) for kept in cache.layers]
            states = self.model(torch.cat([ids, guess], dim=1)[:, start:], past_key_values=cache).last_hidden_state
            counts["calls"] += 1
            counts["drafted"] += guess.shape[1]
            for place, score in enumerate(self.lm_head(states[:, length - 1 - start :]).unbind(1)):
                token = logits_processor(ids, score.float()).argmax(-1, keepdim=True)
                ids, is_right = torch.cat([ids, token], dim=1), token.equal(guess[:, place : place + 1])
                counts["accepted"] += is_right
                if bool(stopping_criteria(ids, None).all()):
                    return ids
                if not is_right:
                    break
            if place < guess.shape[1]:
                cache.layers, cache.rows = before, start
            first, guess = depths[0].rows, ids[:, :0]
            hidden = torch.cat([hidden, states[:, first + hidden.shape[1] - start : ids.shape[1] - 1 - start]], dim=1)
            if ids.shape[1] - cache.rows > LONGEST_REPEAT:
                continue
            rows, tokens = hidden, ids
            for depth, own in enumerate(depths, 1):
                embedded = self.model.embed_tokens(tokens[:, first + depth :])
                rows = self.model.mtp(rows, embedded, self.model.step(rows, None, own))
                tokens = torch.cat([tokens, self.lm_head(rows[:, -1:]).argmax(-1)], dim=1)
                own.rows = max(first, ids.shape[1] - drafts)  # the last ones depend on drafts
                own.layers[-1] = {name: kept[:, : own.rows] for name, kept in own.layers[-1].items()}
            hidden, guess = hidden[:, own.rows - first :], tokens[:, ids.shape[1] :]

    def predict_ahead(self, input_ids: Tensor) -> list[Tensor]:
        """Return the logits ``[B, S, vocabulary]`` of every depth of multi-token prediction: depth k is of the token k further.

        Row i of depth k knows the tokens up to i + k; the last k rows, whose next tokens are not given, take token 0 for them.
        """
        hidden, logits = self.model(input_ids, use_cache=False).last_hidden_state, []
        shared = self.model.step(hidden, None, None)
        for _ in range(self.config.mtp_depth):
            input_ids = F.pad(input_ids[:, 1:], (0, 1))
            hidden = self.model.mtp(hidden, self.model.embed_tokens(input_ids), shared)
            logits.append(self.lm_head(hidden))
        return logits
