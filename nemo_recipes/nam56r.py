"""The recipes as Megatron-Bridge configurations: functions without parameters that return a ``ConfigContainer``.

``pretrain(nam56r_…_config(), forward_step)`` is Bridge's own entry; ``python -m megacpp_mcore.nemo_recipes.run`` only chooses.
Data is named by the user: ``dataset.data_path`` is empty, and a run without it stops before anything is built.
Import it after :func:`megacpp_mcore.nemo_recipes.bridge.prepare`. Written against megatron-bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.mixed_precision import bf16_mixed
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists

from megacpp_mcore.arguments import launch_flags, lowering
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.model.recipes import Recipe, recipe
from megacpp_mcore.nemo_recipes.provider import provider

_OF_THE_PROCESS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dataset": ("tokenizer",),
        "model": (
            "timers",
            "finalize_model_grads_func",
            "grad_scale_func",
            "moe_grad_scale_func",
            "mtp_grad_scale_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "experimental_attention_variant_loss_scale_func",
        ),
        "optimizer": ("timers",),
    }
)
"""Section to the fields that a run puts objects of its process in; what is read back finds them empty, as a recipe does."""


@dataclass(kw_only=True)
class NAM56RConfig(ConfigContainer):
    """Bridge's configuration, whose checkpoints' ``run_config.yaml`` reads back, and that trains what it was told to load.

    Bridge writes ``run_config.yaml`` from the configuration of the running process, tokenizer, timers and bound methods
    included, each as a class to be called without arguments or as an unbound method; ``ConfigContainer.from_yaml`` fails on
    the tokenizer. And where there is no checkpoint to load, it begins with random weights, without a word
    (``training/setup.py``, ``_should_load_checkpoint``, before ``exit_on_missing_checkpoint`` is looked at).
    """

    def to_dict(self) -> dict[str, Any]:
        """The configuration alone, without objects of the process that runs it."""
        content: dict[str, Any] = super().to_dict()
        for section, fields in _OF_THE_PROCESS.items():
            content[section].update((field, None) for field in fields if field in content[section])
        return content

    def validate(self) -> None:
        """As Bridge's, which calls it before anything is built.

        Raises:
            LaunchError: a checkpoint is to be loaded, and there is none.
        """
        self.check_checkpoint()
        super().validate()

    def check_checkpoint(self) -> None:
        """Refuse to load a checkpoint that is not there, unless ``checkpoint.exit_on_missing_checkpoint`` is False.

        Of ``load`` and ``pretrained_checkpoint`` one is enough, as Bridge takes the other only where the first is missing.
        Non-persistent checkpoints lie elsewhere; with them Bridge is left to look.

        Raises:
            LaunchError: it is not there.
        """
        wanted = self.checkpoint
        named = {
            f"checkpoint.{name}": getattr(wanted, name)
            for name in ("load", "pretrained_checkpoint")
            if getattr(wanted, name) is not None
        }
        if not named or not wanted.exit_on_missing_checkpoint or wanted.non_persistent_ckpt_type is not None:
            return
        if not any(checkpoint_exists(path) for path in named.values()):
            asked = ", ".join(f"{key}={path}" for key, path in named.items())
            raise LaunchError(
                f"there is no checkpoint to load in {asked}; name the folder that holds latest_checkpointed_iteration.txt (or "
                "one of its iter_… folders), leave it out to begin with random weights, or, for a run that resumes where it "
                "can and begins where it cannot, add checkpoint.exit_on_missing_checkpoint=false"
            )


def nam56r_pretrain_1gpu_h200_bf16_config() -> ConfigContainer:
    """``nam56r``, 52 layers and 4.5 B parameters, on one H200."""
    return container(recipe("nam56r_pretrain_1gpu_h200_bf16"))


def nam56r_pretrain_8gpu_h200_bf16_config() -> ConfigContainer:
    """``nam56r`` on eight H200, experts divided over all of them."""
    return container(recipe("nam56r_pretrain_8gpu_h200_bf16"))


def nam56r_pretrain_8gpu_h200_fp8_experts_config() -> ConfigContainer:
    """``nam56r`` on eight H200, the matrix products of the routed experts in FP8."""
    return container(recipe("nam56r_pretrain_8gpu_h200_fp8_experts"))


def nam56r_quarter_pretrain_1gpu_h200_bf16_config() -> ConfigContainer:
    """``nam56r_quarter``, the first 13 layers at full width, on one H200."""
    return container(recipe("nam56r_quarter_pretrain_1gpu_h200_bf16"))


def nam56r_quarter_pretrain_1gpu_h200_fp8_experts_config() -> ConfigContainer:
    """``nam56r_quarter`` on one H200, the matrix products of the routed experts in FP8."""
    return container(recipe("nam56r_quarter_pretrain_1gpu_h200_fp8_experts"))


def nam56r_tiny_pretrain_1cpu_fp32_config() -> ConfigContainer:
    """``nam56r_tiny``, all four families in miniature, on the CPU lane."""
    return container(recipe("nam56r_tiny_pretrain_1cpu_fp32"))


def container(chosen: Recipe) -> ConfigContainer:
    """``chosen`` as Bridge's configuration: what :func:`megacpp_mcore.arguments.lowering.lower` tells a stock script."""
    training = chosen.training
    model = provider(chosen.model, chosen.layout, device=training.device, transformer_impl=training.transformer_impl)
    if training.plan.file is not None:
        model.te_precision_config_file = str(training.plan.file)
    is_bf16 = training.plan.model_dtype == "bf16"
    config = NAM56RConfig(
        model=model,
        train=TrainingConfig(
            train_iters=training.train_iters,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
        ),
        validation=ValidationConfig(eval_iters=0, eval_interval=training.train_iters),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=training.learning_rate,
            min_lr=float(f"{training.learning_rate / 10:g}"),  # as the command line has it
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=is_bf16,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=lowering.warm_up_steps(training.train_iters),
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(check_for_nan_in_grad=True, grad_reduce_in_fp32=is_bf16),
        dataset=GPTDatasetConfig(
            seq_length=chosen.model.seq_length,
            split="100,0,0",
            random_seed=training.seed,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            dataloader_type="single",
            num_workers=0 if training.device == "cpu" else 2,
        ),
        logger=LoggerConfig(tensorboard_dir=None),
        tokenizer=_tokenizer(chosen),
        checkpoint=CheckpointConfig(exit_on_missing_checkpoint=True),
        rng=RNGConfig(seed=training.seed),
        dist=DistributedInitConfig(distributed_backend="gloo" if training.device == "cpu" else "nccl"),
        mixed_precision=bf16_mixed() if is_bf16 else None,
    )
    for key, value in flag_fields(lowering.machine_of(chosen.model, chosen.layout, training)).items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    return config


def flag_fields(machine: launch_flags.Machine) -> dict[str, Any]:
    """Bridge's fields of :data:`megacpp_mcore.arguments.launch_flags.FLAGS`, and of the log interval, on ``machine``."""
    on = {flag.name: not flag.obstacle(machine) for flag in launch_flags.FLAGS}
    return {
        "model.gradient_accumulation_fusion": on[launch_flags.FUSED_GRADIENTS],
        "ddp.use_distributed_optimizer": on[launch_flags.DISTRIBUTED_OPTIMIZER],
        "optimizer.use_distributed_optimizer": on[launch_flags.DISTRIBUTED_OPTIMIZER],
        "ddp.overlap_grad_reduce": on[launch_flags.GRAD_REDUCE],
        "ddp.overlap_param_gather": on[launch_flags.PARAM_GATHER],
        "optimizer.overlap_param_gather": on[launch_flags.PARAM_GATHER],
        "model.moe_permute_fusion": on[launch_flags.MOE_PERMUTE],
        "train.manual_gc": on[launch_flags.MANUAL_GC],
        "train.manual_gc_interval": launch_flags.GC_INTERVAL if on[launch_flags.MANUAL_GC] else 0,
        "logger.log_interval": launch_flags.log_interval(machine),
    }


def _tokenizer(chosen: Recipe) -> TokenizerConfig:
    """The built-in bytes for a model of their vocabulary, and ids as they are for any other."""
    words = tokenizer_words(chosen.model)
    named = {word[2:].replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    ids = {name: int(value) for name, value in named.items() if name.endswith(("_id", "vocab_size"))}
    return TokenizerConfig(tokenizer_type=named["tokenizer_type"], use_tokenizer_vocab_size=True, **ids)
