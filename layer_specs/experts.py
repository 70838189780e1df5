"""E: the ModuleSpec of a mixture-of-experts layer, hosted by stock MoELayer; ``MoESubmodules.experts`` is the swap point.

Shape legend: T rows routed to this rank's experts, expert by expert; N experts of this rank; D hidden.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import Fp8Padding, Fp8Unpadding
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megacpp_mcore.errors import ModelError
from megacpp_mcore.layer_specs.initial import drawn_by_input_size
from megacpp_mcore.layer_specs.parts import Parts
from megacpp_mcore.model.precision import ALIGNMENT, in_bf16_zone


def expert_layer_spec(config: TransformerConfig, parts: Parts) -> ModuleSpec:
    """One E layer: norm, router + grouped experts + shared expert, residual; no sequence mixer.

    With a file of per-module precision in ``config`` (:data:`megacpp_mcore.model.precision.EXPERTS_FILE`), the routed experts
    run in FP8, but for the model's first and last layer. The shared expert, which every token passes, stays in BF16.
    """
    mlp: Any = get_moe_module_spec_for_backend(
        backend=parts.backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.norm,
            mlp=_drawn_by_input_size(mlp if config.quant_recipe is None else _with_fp8_experts(mlp)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _drawn_by_input_size(mlp: partial[Any]) -> partial[Any]:
    """``mlp``, a builder of a MoELayer, with output matrices initialized by the fan-in of the unsharded input."""
    stock = mlp.keywords["submodules"]

    def drawn(experts: partial[Any]) -> partial[Any]:
        linears = experts.keywords["submodules"]
        ours = dataclasses.replace(linears, linear_fc2=drawn_by_input_size(linears.linear_fc2))
        return partial(experts, submodules=ours)

    submodules = dataclasses.replace(stock, experts=drawn(stock.experts), shared_experts=drawn(stock.shared_experts))
    return partial(mlp, submodules=submodules)


def _with_fp8_experts(mlp: partial[Any]) -> partial[Any]:
    """``mlp``, stock's builder of a MoELayer, with :class:`FP8Experts` in place of stock's grouped experts."""
    stock = mlp.keywords["submodules"]
    linears: GroupedMLPSubmodules = stock.experts.keywords["submodules"]
    ours = dataclasses.replace(
        linears, linear_fc1=fp8_linear(linears.linear_fc1), linear_fc2=fp8_linear(linears.linear_fc2)
    )
    return partial(
        NumberedMoELayer, submodules=dataclasses.replace(stock, experts=partial(FP8Experts, submodules=ours))
    )


def fp8_linear(stock: Any) -> Any:
    """Subclass of ``stock``, a grouped linear layer of Megatron's, that follows the precision file only if ``in_fp8``.

    GPTModel and HybridModel hand every module the precision of its name when they have been built, and a name has the number
    that its layer has on its pipeline stage, not in the model: the first and last layer cannot be told by it.
    """

    def finish_init(self: Any, quantization_config: Any) -> None:
        """Apply the file's precision, if the layer may run in it."""
        stock.finish_init(self, quantization_config if self.in_fp8 else None)

    return type(f"FP8{stock.__name__}", (stock,), {"in_fp8": True, "finish_init": finish_init})


class NumberedMoELayer(MoELayer):
    """Stock MoELayer that also passes the layer number to the experts; stock passes it to the router alone."""

    def set_layer_number(self, layer_number: int) -> None:
        """Set the 1-based layer number over all pipeline stages, as TransformerLayer does."""
        super().set_layer_number(layer_number)
        self.experts.set_layer_number(layer_number)


class FP8Experts(TEGroupedMLP):
    """Stock's grouped experts with their GEMMs in FP8, each expert's rows padded to what such a GEMM takes.

    Stock pads when ``config.fp8`` is set, which wraps every layer, and not for a file of per-module precision (megatron-core
    0.19.2, ``transformer/moe/experts.py``). Parameters, their names and checkpoints are stock's.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_local_experts, config, *args, **kwargs)
        self.in_fp8 = True
        self.layer_number: int | None = None
        self.quantization_padding = Fp8Padding(num_local_experts, align_size=ALIGNMENT)
        self.quantization_unpadding = Fp8Unpadding(num_local_experts, align_size=ALIGNMENT)

    def set_layer_number(self, layer_number: int) -> None:
        """Stay in BF16 if ``layer_number`` (from 1, over all pipeline stages) is the model's first or last."""
        self.layer_number = layer_number
        self.in_fp8 = not in_bf16_zone(layer_number, self.config.num_layers)
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.in_fp8 = self.in_fp8
            if not self.in_fp8:
                linear.finish_init(None)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
        output_buffer: torch.Tensor | None = None,
        grad_input_buffer: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``[T, D]``, rows of each expert ``[N]``, probabilities ``[T]`` → ``([T, D], no bias)``.

        Raises:
            ModelError: a linear layer was not given FP8.
        """
        if not self.in_fp8:
            return super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs, output_buffer, grad_input_buffer
            )
        self._check()
        rows = tokens_per_expert.tolist()
        hidden_TD, padded = self.quantization_padding(permuted_local_hidden_states, rows)
        probs_T1, _ = self.quantization_padding(permuted_probs.unsqueeze(-1), rows)
        output_TD, bias = super().forward(
            hidden_TD, torch.tensor(padded), probs_T1.squeeze(-1), output_buffer, grad_input_buffer
        )
        return self.quantization_unpadding(output_TD, rows), bias

    def _check(self) -> None:
        """Raise if experts that the file names for FP8 would run in BF16; known only at the first forward pass."""
        for name in ("linear_fc1", "linear_fc2"):
            if not getattr(self, name).will_execute_quantized(False):
                raise ModelError(
                    f"layer {self.layer_number}: {name} of the experts was given no FP8 by the run's precision file, and "
                    "would run in BF16; build the model with Megatron's GPTModel or HybridModel, which hand it out, or "
                    "leave --te-precision-config-file out"
                )
