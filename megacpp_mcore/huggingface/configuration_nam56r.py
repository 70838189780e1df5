"""The configuration of NAM56R for transformers; this file is copied into every exported checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class NAM56RConfig(PretrainedConfig):
    """Sizes of a hybrid model of A, E, M and R layers.

    Args:
        pattern: the letter of every layer: A attention, E experts, M Mamba-3, R M²RNN.
        attention_roles: one character a layer: ``-`` full attention, ``W`` in a sliding window, ``F`` selects keys, ``S``
            attends to those of the ``F`` layer before it, ``.`` a layer of another family.
        intermediate_size: of the multi-token-prediction block, which all ``mtp_depth`` depths share.
        mtp_attention: the role of that block, ``-`` or ``W``.
        sliding_window: keys that a query of a ``W`` layer attends to, its own included.
        rotary_scaling_factor: of YaRN, and what else it has; 1: plain rotary embedding.
        index_topk: keys that a query of an ``F`` or ``S`` layer attends to.
        mamba_rank: R of the MIMO recurrence; 1 is SISO.
        mamba_decay_activation: ``softplus`` or ``heavy_tail``.
        kernels: whether megacpp-mcore's kernels run Mamba-3 and M²RNN on a GPU: True needs them, None takes them where that
            package is installed, False never does.
    """

    model_type = "nam56r"

    def __init__(
        self,
        vocab_size: int = 65536,
        hidden_size: int = 3584,
        pattern: str = "",
        attention_roles: str = "",
        num_attention_heads: int = 56,
        intermediate_size: int = 18944,
        max_position_embeddings: int = 4096,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 500000.0,
        rotary_scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 1.0,
        sliding_window: int = 4096,
        q_lora_rank: int = 64,
        kv_lora_rank: int = 64,
        qk_nope_head_dim: int = 64,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 64,
        index_n_heads: int = 32,
        index_head_dim: int = 64,
        index_topk: int = 256,
        mamba_heads: int = 112,
        mamba_head_dim: int = 64,
        mamba_groups: int = 8,
        mamba_state: int = 64,
        mamba_rank: int = 4,
        mamba_angles: int = 16,
        mamba_chunk: int = 16,
        mamba_a_floor: float = 1e-4,
        mamba_out_norm: bool = True,
        mamba_decay_activation: str = "softplus",
        rnn_heads: int = 44,
        rnn_key_dim: int = 64,
        rnn_value_dim: int = 16,
        rnn_conv_kernel: int = 4,
        n_routed_experts: int = 16,
        num_experts_per_tok: int = 4,
        moe_intermediate_size: int = 896,
        shared_expert_intermediate_size: int = 1024,
        mtp_depth: int = 0,
        mtp_attention: str = "-",
        kernels: bool | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        if (
            [letter == "A" for letter in pattern] != [role != "." for role in attention_roles]
            or set(pattern) - set("AEMR")
            or set(attention_roles + mtp_attention) - set("-WFS.")
        ):
            raise ValueError(
                f"pattern is {pattern!r} and attention_roles {attention_roles!r}; expected one of A E M R for "
                "every layer, and one of - W F S for every A, . for others"
            )
        fields = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        for name, value in fields.items():
            setattr(self, name, value)
        self.num_hidden_layers = len(pattern)
        kwargs.setdefault("tie_word_embeddings", False)
        kwargs.pop("num_hidden_layers", None)
        super().__init__(**kwargs)
