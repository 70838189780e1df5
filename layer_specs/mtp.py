"""MTP: the ModuleSpec of the shared multi-token-prediction block (full MLA + dense GELU feed-forward)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training import global_vars

from megacpp_mcore.backends import STOCK, Dispatcher
from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.attention import full_attention
from megacpp_mcore.layer_specs.gradients import main_grad_of
from megacpp_mcore.layer_specs.mla import wait_for_parameters
from megacpp_mcore.layer_specs.norm import plain_norm, residual_norm
from megacpp_mcore.layer_specs.parts import Parts, UncutLinear, backend_needs
from megacpp_mcore.patches.embedding_gradient import depth_of_mtp
from megacpp_mcore.te.fp8_scopes import Scopes
from megacpp_mcore.util import te_imports

FUSED_NORM = {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
"""The norm's weight inside TELayerNormColumnParallelLinear, and its name in checkpoints."""


class RepeatedLayer(MultiTokenPredictionLayer):
    """The MTP layer, whose weights get gradients from every depth of a micro-batch.

    Megatron (0.19.2, ``core/extensions/transformer_engine.py``) marks the first call of a linear layer, and Transformer Engine
    overwrites ``main_grad`` with the weight's gradient of a marked call: with several depths the first is marked, and the
    gradients of the others, which run backward earlier, would be lost. The mark serves cached quantised weights; MTP has none.

    Args:
        scopes: the run's FP8 scopes, if the projection is in one.
    """

    def __init__(self, *args: Any, scopes: Scopes | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if scopes is not None:
            scopes.install(self.eh_proj, calls=self.config.mtp_num_layers, name="eh_proj")
        check_gradients(self.config, global_vars._GLOBAL_ARGS)  # get_args() would assert
        for module in self.modules():
            if hasattr(module, "is_first_microbatch"):
                module.disable_parameter_transpose_cache = True  # so that no call is marked

    def _concat_embeddings(self, hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
        """As the stock method, which gathers columns; :class:`UncutLinear` has all columns of this rank's rows."""
        if not self.config.sequence_parallel:
            return super()._concat_embeddings(hidden_states, decoder_input)
        normed = self.enorm(decoder_input), self.hnorm(hidden_states)
        return self.eh_proj(torch.cat(normed, dim=-1))[0]

    def _get_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock method; marks its use of the embedding as one of several."""
        with depth_of_mtp():
            return super()._get_embeddings(*args, **kwargs)


def check_gradients(config: TransformerConfig, arguments: Any) -> None:
    """Refuse Megatron-FSDP where it would overwrite each depth's gradients with those of the next.

    It marks every weight so (0.19.2, ``overwrite_main_grad``); ``arguments``: Megatron's, None where no stock script runs.

    Raises:
        ModelError: several depths are to add to one ``main_grad``.
    """
    is_fused = config.gradient_accumulation_fusion and getattr(arguments, "use_megatron_fsdp", False)
    if is_fused and (config.mtp_num_layers or 0) > 1:
        raise ModelError(
            f"--use-megatron-fsdp keeps the gradient of one of the {config.mtp_num_layers} depths that share the MTP block; "
            "pass --no-gradient-accumulation-fusion"
        )


class FeedForward(MLP):
    """Stock's feed-forward layer by the op ``feed_forward``, on the weights of its modules, which are not called.

    Attributes:
        backend: of the op.
    """

    def forward(self, hidden_SBD: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Run the layer: ``[S, B, D] -> ([S, B, D], no bias)``."""
        modules = self.linear_fc1, self.linear_fc2
        for module in modules:
            wait_for_parameters(module)
        weights = [module.weight for module in modules]
        main_grads = tuple(main_grad_of(weight, self.config) for weight in weights)
        output_SBD: torch.Tensor = self.backend.fn(hidden_SBD, *weights, main_grads)
        return output_SBD, None


def feed_forward(stock: Callable[..., MLP], dispatcher: Dispatcher, fused: bool) -> Callable[..., MLP]:
    """Return a builder of what ``stock`` builds, running the op if one of its backends is requested by name."""

    def build(config: TransformerConfig, **options: Any) -> MLP:
        sizes = {"hidden": config.hidden_size, "ffn": config.ffn_hidden_size}
        backend = dispatcher.resolve_or_stock(
            "feed_forward", why_stock_feed_forward(config, fused), **sizes, **backend_needs(config)
        )
        layer = stock(config=config, **options)
        if backend.observed != STOCK:
            layer.__class__ = FeedForward  # parameters keep their checkpoint keys
        layer.backend = backend
        return layer

    return build


def why_stock_feed_forward(config: TransformerConfig, fused: bool) -> str | None:
    """Name the first requested feature that only stock's feed-forward layer supports, or None."""
    arguments = global_vars._GLOBAL_ARGS  # get_args() would assert
    for requested, feature in (
        (fused, "transformer_engine: {mtp: true}, which fuses its norm"),
        (config.tensor_model_parallel_size > 1, "--tensor-model-parallel-size"),
        (getattr(arguments, "use_torch_fsdp2", False), "--use-torch-fsdp2"),
        (getattr(arguments, "use_megatron_fsdp", False), "--use-megatron-fsdp"),
    ):
        if requested:
            return feature
    return None


def mtp_block(parts: Parts, dispatcher: Dispatcher, window: int | None) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec of the MTP layer of all depths (``mtp_use_repeated_layer``): ``[norm(emb); norm(h)]`` → D → block → norm.

    With ``transformer_engine: {mtp: true}`` the feed-forward's norm is fused into its first linear layer. LayerNormMLP is not
    used: its GELU has only the tanh form, and the model uses erf.

    Raises:
        BackendError: this is requested, and Transformer Engine is not available.
    """
    fused = te_imports.features().mtp and te_imports.entry("TELayerNormColumnParallelLinear")
    norm, plain = residual_norm(parts, dispatcher), plain_norm(parts, dispatcher)
    linears = MLPSubmodules(
        linear_fc1=fused or parts.column_linear,
        linear_fc2=parts.row_linear,
        activation_func=parts.backend.activation_func(),
    )
    block = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=full_attention(parts, dispatcher, window),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused else norm,
            sharded_state_dict_keys_map=FUSED_NORM if fused else {},
            mlp=feed_forward(partial(MLP.as_mlp_submodule, submodules=linears), dispatcher, bool(fused)),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    layer = ModuleSpec(
        module=RepeatedLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=plain,
            hnorm=plain,
            eh_proj=ModuleSpec(module=UncutLinear, params={"whole": parts.whole_linear, "cut": parts.column_linear}),
            mtp_model_layer=block,
            layer_norm=plain,
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
