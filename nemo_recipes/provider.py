"""The model providers that Megatron-Bridge builds NAM56R from: HybridModel or GPTModel with our layers, MTP block included.

Import it after :func:`megacpp_mcore.nemo_recipes.bridge.prepare`. Written against megatron-bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.models.transformer_config import MLATransformerConfig
from megatron.bridge.utils.vocab_utils import calculate_padded_vocab_size
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.quantization.utils import load_quantization_recipe

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering
from megacpp_mcore.arguments.read import RUN, model_of
from megacpp_mcore.layer_specs.hybrid_model import nam56r_hybrid
from megacpp_mcore.layer_specs.nam56r import nam56r
from megacpp_mcore.model import Model, flops
from megacpp_mcore.model.run import Run
from megacpp_mcore.model.training import GPT, HYBRID


@dataclass
class _Provider(MLATransformerConfig):
    """Base of both providers: identifies the run's model, and adds what Bridge leaves out.

    Bridge ignores ``use_cpu_initialization`` when it sets up a run (``model_provider.py``, ``get_model``).
    """

    heterogeneous_block_specs: bool = False  # compared with the model, and no field of Bridge's
    # The model's name, by which its definition is found if no file of MEGACPP_CONFIG has it.
    megacpp_preset: str | None = None
    megacpp_optimizer: str = "adam"  # the run's: the choice of experts depends on it
    # Bridge has Megatron's quant_recipe, but no field for the file it comes from.
    te_precision_config_file: str | None = None

    def finalize(self) -> None:
        """As Bridge's method, after reading the precision file."""
        if self.te_precision_config_file is not None:
            self.quant_recipe = load_quantization_recipe(self.te_precision_config_file)
        super().finalize()

    def chunk(self, pre_process: bool | None, post_process: bool | None, vp_stage: int | None) -> dict[str, Any]:
        """Return the arguments of one model chunk that both model classes take; by default those of its pipeline stage."""
        groups, virtual = self._pg_collection, self.virtual_pipeline_model_parallel_size
        if pre_process is None:
            pre_process = is_vp_first_stage(vp_stage=vp_stage, vp_size=virtual) and is_pp_first_stage(groups.pp)
        if post_process is None:
            post_process = is_vp_last_stage(vp_stage=vp_stage, vp_size=virtual) and is_pp_last_stage(groups.pp)
        self._vp_stage = vp_stage
        same = (
            "fp16_lm_cross_entropy", "parallel_output", "share_embeddings_and_output_weights", "position_embedding_type",
            "rotary_percent", "rotary_base", "seq_len_interpolation_factor",
        )  # fmt: skip
        return {name: getattr(self, name) for name in same} | {
            "vocab_size": self.padded_vocab_size(),
            "max_sequence_length": self.seq_length,
            "pre_process": pre_process,
            "post_process": post_process,
            "pg_collection": groups,
            "vp_stage": vp_stage,
        }

    def provide_distributed_model(self, *args: Any, **kwargs: Any) -> Any:
        """As Bridge's method, with initialization on the CPU if the configuration says so."""
        kwargs.setdefault("use_cpu_initialization", self.use_cpu_initialization)
        return super().provide_distributed_model(*args, **kwargs)

    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the output projection."""
        if not self.should_pad_vocab:
            return int(self.vocab_size)
        sizes = (self.vocab_size, self.make_vocab_size_divisible_by, self.tensor_model_parallel_size)
        return int(calculate_padded_vocab_size(*sizes))

    def _get_num_floating_point_operations(self, batch_size: int) -> int:
        """Count the audited FLOPs of training ``batch_size`` sequences, for Bridge's throughput log."""
        run = getattr(self, RUN, None)  # left by the spec
        model_class = HYBRID if self.is_hybrid_model else GPT
        model = model_of((self,), plugin_config.from_environment(), model_class=model_class) if run is None else run.model
        step = flops.step(model, batch_size, seq_length=self.seq_length, vocab_size=self.padded_vocab_size())
        return step.total.training


@dataclass
class NAM56RProvider(_Provider, MLAModelProvider):
    """Bridge's MLA provider, with layers and MTP block from one spec.

    Bridge builds an MTP block of stock layers whatever the spec is (``gpt_provider.py``, ``mtp_block_spec``).
    """

    transformer_layer_spec: Callable[..., Any] = field(default=nam56r)

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> GPTModel:
        """Build the GPTModel of one model chunk.

        Raises:
            ArgumentMismatchError: the configuration contradicts the model; nothing has been allocated.
        """
        spec = self.transformer_layer_spec(self, vp_stage=vp_stage)
        return GPTModel(
            self,
            transformer_layer_spec=spec,
            mtp_block_spec=spec.mtp,
            rope_scaling=self.rope_scaling,
            rope_scaling_factor=self.rope_scaling_factor,
            scatter_embedding_sequence_parallel=self.scatter_embedding_sequence_parallel,
            **self.chunk(pre_process, post_process, vp_stage),
        )


@dataclass
class NAM56RHybridProvider(_Provider, HybridModelProvider):
    """Bridge's provider of HybridModel, which refuses virtual stages (``hybrid_provider.py``, ``provide``)."""

    megacpp_spec: ClassVar = (nam56r_hybrid.__module__, "nam56r_hybrid")

    def provide(
        self, pre_process: bool | None = None, post_process: bool | None = None, vp_stage: int | None = None
    ) -> HybridModel:
        """Build the HybridModel of one model chunk.

        Raises:
            ArgumentMismatchError: the configuration contradicts the model; nothing has been allocated.
        """
        chunk = self.chunk(pre_process, post_process, vp_stage)
        # Newer Megatron copies the configuration for each layer, and process groups cannot be copied.
        self._pg_collection = None
        try:
            return HybridModel(self, nam56r_hybrid, hybrid_layer_pattern=self.hybrid_layer_pattern, **chunk)
        finally:
            self._pg_collection = chunk["pg_collection"]


def provider(run: Run) -> NAM56RProvider | NAM56RHybridProvider:
    """Return the provider of the model of ``run`` under its layout; its vocabulary comes from the run's tokenizer.

    Raises:
        ModelError: the layout does not fit the model.
    """
    model, layout, training = cast("Model", run.model), run.layout, run.training
    model.check_layout(layout)
    fields = {argument.field: argument.expected for argument in lowering.model_arguments(model, run.model_class)}
    fields["activation_func"] = torch.nn.functional.gelu
    return (NAM56RProvider if run.model_class == GPT else NAM56RHybridProvider)(
        **fields,
        megacpp_preset=model.name,
        moe_grouped_gemm=run.has_engine,
        transformer_impl=training.transformer_impl,
        use_cpu_initialization=training.device == "cpu",
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.sequence_parallel,
        # As in the stock command, or its defaults.
        attention_softmax_in_fp32=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=training.transformer_impl != "local",
        cross_entropy_loss_fusion=False,
        deallocate_pipeline_outputs=True,
        pipeline_dtype=torch.float32,  # overwritten by mixed precision
    )
