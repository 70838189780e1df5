"""Mamba-3, M²RNN and sparse MLA as layers of plain PyTorch, from hidden states to hidden states, over the ops.

They are initialised like the layers of a Megatron run with this package (docs/model.md, "The start"). Their parameters have the
names and shapes of an exported model's mixers, so ``load_state_dict`` accepts those. The caller adds the norm before them and
the residual around them. Parameters that must stay in float32 do so when the module is cast to 16 bits.

Legend: B batch, S sequence, D model width, H heads; for others see :mod:`megacpp_mcore.ops`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megacpp_mcore import ops
from megacpp_mcore.backends import AUTO
from megacpp_mcore.errors import ModelError
from megacpp_mcore.ops import initializers
from megacpp_mcore.ops.m2rnn.reference import M2RNNState
from megacpp_mcore.ops.mamba3.reference import Mamba3State
from megacpp_mcore.ops.mla_projection.reference import rotation_table


class _Mixer(nn.Module):
    """Base of the mixers: linear layers initialised by fan-in, and parameters in :attr:`in_fp32` never cast to 16 bits."""

    in_fp32: ClassVar[tuple[str, ...]] = ()

    def __init__(self, depth: int, backend: str) -> None:
        super().__init__()
        self.depth, self.backend = depth, backend

    def _linear(self, inputs: int, outputs: int, *, to_residual: bool = False) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=False)
        initializers.by_fan_in(linear.weight, gain=1 / math.sqrt(2 * self.depth) if to_residual else 1.0)
        return linear

    def _add(self, init: Callable[[Tensor], Any], **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
            with torch.no_grad():
                init(self.get_parameter(name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Mixer:
        kept = [self._parameters[name] for name in self.in_fp32 if name in self._parameters]
        wide = {id(tensor) for param in kept if param is not None for tensor in (param, param.grad)}

        def careful(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            is_cut = id(tensor) in wide and made.element_size() < tensor.element_size()
            return tensor.to(made.device) if is_cut else made

        super()._apply(careful, recurse)
        return self


class Mamba3(_Mixer):
    """A Mamba-3 mixer.

    Args:
        hidden_size: D.
        head_dim, groups, state, mimo_rank, expand, rope_fraction, a_floor, out_norm, decay_activation: as in
            :class:`megacpp_mcore.model.Mamba3`.
        eps: of the norms.
        depth: layers of the model, for the scale of the output projection.
        backend: of the op.

    Raises:
        ModelError: the sizes do not divide each other.
    """

    in_fp32 = ("dt_bias", "D", "b_bias", "c_bias", "mimo_x", "mimo_z", "mimo_o")

    def __init__(
        self, hidden_size: int, *, head_dim: int = 64, groups: int = 8, state: int = 64, mimo_rank: int = 4, expand: int = 2,
        rope_fraction: float = 0.5, a_floor: float = 1e-4, out_norm: bool = True, decay_activation: str = "softplus",
        eps: float = 1e-5, depth: int = 1, backend: str = AUTO,
    ) -> None:  # fmt: skip
        super().__init__(depth, backend)
        inner = expand * hidden_size
        heads = inner // head_dim
        if inner % head_dim or heads % groups:
            raise ModelError(
                f"expand · hidden_size is {inner}; expected a multiple of head_dim {head_dim}, with a number of heads that "
                f"is a multiple of groups, {groups}"
            )
        self.heads, self.head_dim, self.by_group = heads, head_dim, (groups, mimo_rank, state)
        self.options: dict[str, Any] = {
            "A_floor": a_floor,
            "eps": eps,
            "activation": decay_activation,
            "backend": backend,
        }
        sizes = dict.fromkeys("zx", inner) | dict.fromkeys("BC", math.prod(self.by_group))
        sizes |= dict.fromkeys(("dt", "A", "trap"), heads) | {"angles": int(state * rope_fraction) // 2}
        self.in_proj = nn.ModuleDict({name: self._linear(hidden_size, size) for name, size in sizes.items()})
        self.out_proj = self._linear(inner, hidden_size, to_residual=True)
        by_rank, of_state = (mimo_rank * inner,), (heads * mimo_rank * state,)
        self._add(
            initializers.ones,
            b_norm_weight=(state,),
            c_norm_weight=(state,),
            D=(heads,),
            b_bias=of_state,
            c_bias=of_state,
        )
        self._add(initializers.inverse_softplus_of_step, dt_bias=(heads,))
        if out_norm:
            self._add(initializers.ones, out_norm_weight=(inner,))
        if mimo_rank > 1:
            self._add(initializers.constant(1 / mimo_rank), mimo_x=by_rank, mimo_o=by_rank)
            self._add(initializers.ones, mimo_z=by_rank)

    def forward(
        self, hidden_BSD: Tensor, seq_idx: Tensor | None = None, state: Mamba3State | None = None, return_state: bool = False
    ) -> tuple[Tensor, Mamba3State | None]:  # fmt: skip
        """``[B, S, D] -> ([B, S, D], state)``; the other arguments as in :func:`megacpp_mcore.ops.mamba3`."""
        parts = {name: linear(hidden_BSD).transpose(0, 1) for name, linear in self.in_proj.items()}
        x, z = (parts[name].unflatten(-1, (self.heads, self.head_dim)) for name in "xz")
        b, c = (parts[name].unflatten(-1, self.by_group) for name in "BC")
        by_rank = (self.heads, *self.by_group[1:2], -1)
        weights: dict[str, Any] = {name: param for name, param in self.named_parameters() if "." not in name}
        weights |= {name: weights[name].view(by_rank) for name in self.in_fp32[2:] if name in weights}
        out_SBHP, state = ops.mamba3(
            x, z, b, c, parts["dt"], parts["A"], parts["trap"], parts["angles"], **weights, **self.options,
            seq_idx=seq_idx, initial_state=state, return_final_state=return_state,
        )  # fmt: skip
        return self.out_proj(out_SBHP.flatten(2).transpose(0, 1)), state


class M2RNN(_Mixer):
    """An M²RNN mixer.

    Args:
        hidden_size: D.
        heads, key_dim, value_dim: H, K and V.
        conv_kernel: taps of the convolutions.
        eps, depth, backend: as for :class:`Mamba3`.
    """

    in_fp32 = ("W", "A_log", "dt_bias", "D")

    def __init__(
        self, hidden_size: int, *, heads: int, key_dim: int = 64, value_dim: int = 16, conv_kernel: int = 4,
        eps: float = 1e-5, depth: int = 1, backend: str = AUTO,
    ) -> None:  # fmt: skip
        super().__init__(depth, backend)
        values, self.by_head, self.eps = heads * value_dim, (heads, value_dim), eps
        sizes = dict.fromkeys("qk", key_dim) | dict.fromkeys("vg", values) | {"f": heads}
        self.in_proj = nn.ModuleDict({name: self._linear(hidden_size, size) for name, size in sizes.items()})
        self.out_proj = self._linear(values, hidden_size, to_residual=True)
        self._add(initializers.convolution, qk_conv_weight=(2 * key_dim, conv_kernel), v_conv_weight=(values, conv_kernel))
        self._add(nn.init.zeros_, qk_conv_bias=(2 * key_dim,), v_conv_bias=(values,))
        self._add(initializers.ones, norm_weight=(values,), D=(values,))
        self._add(partial(initializers.identities, width=value_dim), W=(values * value_dim,))
        self._add(initializers.log_of_decay, A_log=(heads,))
        self._add(initializers.inverse_softplus_of_step, dt_bias=(heads,))

    def forward(
        self, hidden_BSD: Tensor, seq_idx: Tensor | None = None, state: M2RNNState | None = None, return_state: bool = False
    ) -> tuple[Tensor, M2RNNState | None]:  # fmt: skip
        """``[B, S, D] -> ([B, S, D], state)``; the other arguments as in :func:`megacpp_mcore.ops.m2rnn`."""
        parts = {name: linear(hidden_BSD).transpose(0, 1) for name, linear in self.in_proj.items()}
        v, g = (parts[name].unflatten(-1, self.by_head) for name in "vg")
        weights: dict[str, Any] = {name: param for name, param in self.named_parameters() if "." not in name}
        weights["W"] = weights["W"].view(*self.by_head, self.by_head[1])
        out_SBC, state = ops.m2rnn(
            parts["q"], parts["k"], v, g, parts["f"], **weights, eps=self.eps, backend=self.backend,
            seq_idx=seq_idx, initial_state=state, return_final_state=return_state,
        )  # fmt: skip
        return self.out_proj(out_SBC.transpose(0, 1)), state


class SparseMLA(_Mixer):
    """Multi-head latent attention over the keys that an indexer selects (DeepSeek-V3.2), without a cache.

    Args:
        hidden_size: D.
        heads: H.
        q_lora_rank, kv_lora_rank: ranks of the latents.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: widths of a head's content, rotary part and value.
        topk: keys of each query.
        index_heads, index_head_dim: of the indexer.
        rope_theta: base of the rotary angles.
        eps, depth, backend: as for :class:`Mamba3`; the backend is that of attention.
    """

    def __init__(
        self, hidden_size: int, *, heads: int, q_lora_rank: int = 64, kv_lora_rank: int = 64, qk_nope_head_dim: int = 64,
        qk_rope_head_dim: int = 64, v_head_dim: int = 64, topk: int = 256, index_heads: int = 32, index_head_dim: int = 64,
        rope_theta: float = 500_000.0, eps: float = 1e-5, depth: int = 1, backend: str = AUTO,
    ) -> None:  # fmt: skip
        super().__init__(depth, backend)
        self.heads, self.topk, self.index_head_dim, self.theta = heads, topk, index_head_dim, rope_theta
        self.content, self.rotary, self.value, self.latent = (
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
            kv_lora_rank,
        )
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        self.q_a_proj = self._linear(hidden_size, q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps)
        self.q_b_proj = self._linear(q_lora_rank, heads * (qk_nope_head_dim + qk_rope_head_dim))
        self.kv_a_proj_with_mqa = self._linear(hidden_size, kv_lora_rank + qk_rope_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps)
        self.kv_b_proj = self._linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim))
        self.o_proj = self._linear(heads * v_head_dim, hidden_size, to_residual=True)
        self.indexer = nn.ModuleDict(
            {
                "wq_b": self._linear(q_lora_rank, index_heads * index_head_dim),
                "wk": self._linear(hidden_size, index_head_dim),
                "k_norm": nn.LayerNorm(index_head_dim, eps),
                "weights_proj": self._linear(hidden_size, index_heads),
            }
        )

    def forward(self, hidden_BSD: Tensor, seq_idx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[B, S, D] -> ([B, S, D], loss)``; add the second, a scalar, times a coefficient to the loss: it trains the indexer.

        It is the divergence of the indexer's scores from the attention over the selected keys; only the indexer gets a gradient
        from it. 0 where gradients are disabled. ``seq_idx`` is int32.
        """
        hidden_SBD = hidden_BSD.transpose(0, 1)
        rotation_SR = self._rotation(hidden_SBD)
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_SBD))
        latent, rotary = self.kv_a_proj_with_mqa(hidden_SBD).split([self.latent, self.rotary], dim=-1)
        k_up_HCL, v_up_HVL = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split([self.content, self.value], 1)
        query = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1))
        needs: dict[str, Any] = {
            "content_dim": self.content,
            "latent_dim": self.latent,
            "rope_dim": self.rotary,
            "v_dim": self.value,
        }
        project = ops.backend_of("mla_projection", AUTO, query, **needs)
        query = project(query, weight_HCK=k_up_HCL.to(query.dtype), rotation_SR=rotation_SR)
        keys = ops.backend_of("mla_keys", AUTO, query, **needs)
        key, _ = keys(self.kv_a_layernorm(latent).unsqueeze(2).to(query.dtype), rotary, rotation_SR=rotation_SR, value_dim=0)
        key = key.squeeze(2)
        selected = self._selected(hidden_SBD.detach(), q_latent.detach(), rotation_SR)
        q, k, w = (tensor.detach() for tensor in selected)
        index_BSN = ops.index_select(q, k, w, self.topk, seq_idx)
        sizes = {"softmax_scale": self.scale, "value_dim": self.latent}
        out_SBHL = ops.sparse_mla(query, key, index_BSN, **sizes, backend=self.backend)
        out = project(out_SBHL, weight_HCK=v_up_HVL.mT.to(out_SBHL.dtype)).flatten(2)
        loss = hidden_BSD.new_zeros((), dtype=torch.float32)
        if torch.is_grad_enabled():
            attend = ops.backend_of("sparse_mla", self.backend, query, qk_dim=query.shape[-1], v_dim=self.latent)
            with torch.no_grad():  # summed_probabilities is in the backend's module
                target_BSN = import_module(attend.__module__).summed_probabilities(query, key, index_BSN, **sizes)
            loss = _IndexerLoss.apply(*selected, index_BSN, target_BSN)
        return self.o_proj(out.transpose(0, 1)), loss

    def _selected(self, hidden_SBD: Tensor, q_latent: Tensor, rotation_SR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indexer's queries, keys and head weights."""
        indexer, width = self.indexer, self.index_head_dim
        q = self._turned(indexer["wq_b"](q_latent).unflatten(-1, (-1, width)), rotation_SR)
        k = self._turned(indexer["k_norm"](indexer["wk"](hidden_SBD)).to(q.dtype).unsqueeze(2), rotation_SR)
        w = indexer["weights_proj"](hidden_SBD) * (q.shape[2] * width) ** -0.5
        return q, k.squeeze(2), w

    def _turned(self, x_SBHX: Tensor, rotation_SR: Tensor) -> Tensor:
        rotary, plain = x_SBHX.split([self.rotary, x_SBHX.shape[-1] - self.rotary], dim=-1)
        project = ops.backend_of("mla_projection", AUTO, rotary, rope_dim=self.rotary)
        return torch.cat([project(rotary, rotation_SR=rotation_SR, interleaved=False), plain], dim=-1)

    def _rotation(self, hidden_SBD: Tensor) -> Tensor:
        exponent = torch.arange(0, self.rotary, 2, device=hidden_SBD.device).float() / self.rotary
        angle = torch.outer(torch.arange(len(hidden_SBD), device=hidden_SBD.device).float(), self.theta**-exponent)
        return rotation_table(torch.cat([angle, angle], dim=-1))


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, w: Tensor, index_BSN: Tensor, target_BSN: Tensor) -> Tensor:
        learn = ops.backend_of("indexer_grad", AUTO, q, dim=q.shape[-1], heads=q.shape[-2])
        loss, *gradients = learn(q, k, w, index_BSN, target_BSN, 1.0)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return *((gradient * scale).to(gradient.dtype) for gradient in ctx.saved_tensors), None, None
