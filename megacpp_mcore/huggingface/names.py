"""The tensors of a model: their names in Megatron's checkpoints and in an exported one, and their shapes; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megacpp_mcore.errors import ModelError
from megacpp_mcore.model import Model
from megacpp_mcore.model.pattern import FULL_ATTENTION, FULL_INDEX, WINDOWED

PLAIN: Mapping[str, Any] = MappingProxyType({"rotary_scaling_factor": 1.0, "mtp_attention": FULL_ATTENTION})
"""Values of fields that a configuration leaves out."""


class Tensor(NamedTuple):
    """One tensor: its key in the format torch_dist, its name in an export, its shape there.

    Attributes:
        rows_may_follow: whether Megatron's has further rows, which pad the vocabulary.
        linear: whether it is the weight of one of Megatron's linear layers, which also save an extra state.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    rows_may_follow: bool = False
    linear: bool = False


def tensors(model: Model) -> Iterator[Tensor]:
    """Yield every tensor of ``model``, in the order of its layers.

    Raises:
        ModelError: it has layers that exports do not support.
    """
    if others := sorted(set(model.layers) - _MIXERS.keys()):
        raise ModelError(
            f"{model.name} has layers of {', '.join(others)}, and an export only of {', '.join(_MIXERS)}; add their tensors "
            "and their module to megacpp_mcore/huggingface"
        )
    hidden, head = model.hidden_size, (model.vocab_size, model.hidden_size)
    yield Tensor("embedding.word_embeddings.weight", "model.embed_tokens.weight", head, rows_may_follow=True)
    for number, (letter, role) in enumerate(zip(model.layers, model.roles, strict=True)):
        old, new = f"decoder.layers.{number}.", f"model.layers.{number}."
        norm = "pre_mlp_layernorm" if letter == "E" else "input_layernorm"
        yield Tensor(f"{old}{norm}.weight", f"{new}norm.weight", (hidden,))
        inner = "mlp." if letter == "E" else "self_attention."
        for tensor in _MIXERS[letter](model, role):
            yield tensor._replace(key=f"{old}{inner}{tensor.key}", name=f"{new}mixer.{tensor.name}")
    yield Tensor("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    yield Tensor("output_layer.weight", "lm_head.weight", head, rows_may_follow=True)
    if model.mtp.depth:
        yield from _prediction(model)


def configuration(model: Model) -> dict[str, Any]:
    """Return the sizes as ``NAM56RConfig`` takes them."""
    mla, dsa, ssm, rnn, moe = model.mla, model.dsa, model.mamba3, model.m2rnn, model.moe
    long: dict[str, Any] = dataclasses.asdict(mla.yarn) if mla.yarn else {}
    if WINDOWED in (*model.roles, model.shape.mtp_role):
        long |= {"sliding_window": mla.window_size + 1, "mtp_attention": model.mtp.attention}
    return {
        "model_type": "nam56r",
        "architectures": ["NAM56RForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_nam56r.NAM56RConfig",
            "AutoModel": "modeling_nam56r.NAM56RModel",
            "AutoModelForCausalLM": "modeling_nam56r.NAM56RForCausalLM",
        },
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "pattern": model.layers,
        "attention_roles": "".join(role or "." for role in model.roles),
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_hidden_size,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
        "index_n_heads": dsa.indexer_heads,
        "index_head_dim": dsa.indexer_head_dim,
        "index_topk": dsa.topk,
        "mamba_heads": model.mamba_heads,
        "mamba_head_dim": ssm.head_dim,
        "mamba_groups": ssm.groups,
        "mamba_state": ssm.state,
        "mamba_rank": ssm.mimo_rank,
        "mamba_angles": ssm.angles,
        "mamba_chunk": ssm.chunk,
        "mamba_a_floor": ssm.a_floor,
        "mamba_out_norm": ssm.out_norm,
        "mamba_decay_activation": ssm.decay_activation,
        "rnn_heads": model.recurrent_heads,
        "rnn_key_dim": rnn.key_dim,
        "rnn_value_dim": rnn.value_dim,
        "rnn_conv_kernel": rnn.conv_kernel,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.topk,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "mtp_depth": model.mtp.depth,
        "tie_word_embeddings": False,
    } | long


def _attention(model: Model, role: str | None) -> Iterator[Tensor]:
    mla, dsa, hidden, heads = model.mla, model.dsa, model.hidden_size, model.heads
    query, rotary = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.qk_pos_emb_head_dim
    for old, new, shape in (
        ("linear_q_down_proj", "q_a_proj", (mla.q_lora_rank, hidden)),
        ("linear_q_up_proj", "q_b_proj", (heads * query, mla.q_lora_rank)),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", (mla.kv_lora_rank + rotary, hidden)),
        ("linear_kv_up_proj", "kv_b_proj", (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank)),
        ("linear_proj", "o_proj", (hidden, heads * mla.v_head_dim)),
    ):
        yield Tensor(f"{old}.weight", f"{new}.weight", shape, linear=True)
    yield Tensor("q_layernorm.weight", "q_a_layernorm.weight", (mla.q_lora_rank,))
    yield Tensor("kv_layernorm.weight", "kv_a_layernorm.weight", (mla.kv_lora_rank,))
    if role == FULL_INDEX:
        old, width = "core_attention.indexer.", dsa.indexer_head_dim
        for name, new, shape in (
            ("linear_wq_b", "wq_b", (dsa.indexer_heads * width, mla.q_lora_rank)),
            ("linear_wk", "wk", (width, hidden)),
            ("linear_weights_proj", "weights_proj", (dsa.indexer_heads, hidden)),
        ):
            yield Tensor(f"{old}{name}.weight", f"indexer.{new}.weight", shape, linear=True)
        for name in ("weight", "bias"):
            yield Tensor(f"{old}k_norm.{name}", f"indexer.k_norm.{name}", (width,))


def _experts(model: Model, _: str | None) -> Iterator[Tensor]:
    moe, hidden = model.moe, model.hidden_size
    yield Tensor("router.weight", "gate.weight", (moe.experts, hidden))
    yield Tensor("router.expert_bias", "e_score_correction_bias", (moe.experts,))
    widths = (moe.experts, moe.ffn_hidden_size, hidden), (moe.experts, hidden, moe.ffn_hidden_size)
    shared = (moe.shared_ffn_hidden_size, hidden), (hidden, moe.shared_ffn_hidden_size)
    for old, new, stacked, shared_shape in zip(
        ("linear_fc1", "linear_fc2"), ("up_proj", "down_proj"), widths, shared, strict=True
    ):
        yield Tensor(f"experts.experts.{old}.weight", new, stacked, linear=True)
        yield Tensor(f"shared_experts.{old}.weight", f"shared_experts.{new}.weight", shared_shape, linear=True)


def _mamba(model: Model, _: str | None) -> Iterator[Tensor]:
    ssm, heads, inner = model.mamba3, model.mamba_heads, model.mamba_inner
    columns = ssm.groups * ssm.mimo_rank * ssm.state
    rows = dict.fromkeys("zx", inner) | dict.fromkeys("BC", columns)
    rows |= dict.fromkeys(("dt", "A", "trap"), heads) | {"angles": ssm.angles}
    sizes = dict.fromkeys(("b_norm_weight", "c_norm_weight"), ssm.state) | dict.fromkeys(("dt_bias", "D"), heads)
    sizes |= dict.fromkeys(("b_bias", "c_bias"), heads * ssm.mimo_rank * ssm.state)
    if ssm.out_norm:
        sizes["out_norm_weight"] = inner
    if ssm.mimo_rank > 1:
        sizes |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), ssm.mimo_rank * inner)
    yield from _mixer(model, rows, {name: (size,) for name, size in sizes.items()}, inner)


def _recurrent(model: Model, _: str | None) -> Iterator[Tensor]:
    rnn, heads = model.m2rnn, model.recurrent_heads
    key, values = rnn.key_dim, heads * rnn.value_dim
    rows = {"q": key, "k": key, "v": values, "g": values, "f": heads}
    shapes: dict[str, tuple[int, ...]] = {
        "qk_conv_weight": (2 * key, rnn.conv_kernel),
        "qk_conv_bias": (2 * key,),
        "v_conv_weight": (values, rnn.conv_kernel),
        **dict.fromkeys(("v_conv_bias", "norm_weight", "D"), (values,)),
        "W": (heads * rnn.value_dim**2,),
        **dict.fromkeys(("A_log", "dt_bias"), (heads,)),
    }
    yield from _mixer(model, rows, shapes, values)


def _mixer(model: Model, rows: dict[str, int], shapes: dict[str, tuple[int, ...]], inner: int) -> Iterator[Tensor]:
    for part, count in rows.items():
        yield Tensor(f"in_proj.weight.{part}", f"in_proj.{part}.weight", (count, model.hidden_size))
    for name, shape in shapes.items():
        yield Tensor(name, name, shape)
    yield Tensor("out_proj.weight", "out_proj.weight", (model.hidden_size, inner), linear=True)


def _prediction(model: Model) -> Iterator[Tensor]:
    old, new, hidden, width = "mtp.layers.0.", "model.mtp.", model.hidden_size, model.ffn_hidden_size
    for key, name in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("final_layernorm", "norm"),
        ("transformer_layer.input_layernorm", "input_norm"),
        ("transformer_layer.pre_mlp_layernorm", "mlp_norm"),
    ):
        yield Tensor(f"{old}{key}.weight", f"{new}{name}.weight", (hidden,))
    yield Tensor(f"{old}eh_proj.weight", f"{new}eh_proj.weight", (hidden, 2 * hidden), linear=True)
    mlp = f"{old}transformer_layer.mlp.linear_fc"
    yield Tensor(f"{mlp}1.weight", f"{new}mlp.up_proj.weight", (width, hidden), linear=True)
    yield Tensor(f"{mlp}2.weight", f"{new}mlp.down_proj.weight", (hidden, width), linear=True)
    for tensor in _attention(model, None):
        key = f"{old}transformer_layer.self_attention.{tensor.key}"
        yield tensor._replace(key=key, name=f"{new}attention.{tensor.name}")


_MIXERS = {"A": _attention, "E": _experts, "M": _mamba, "R": _recurrent}
