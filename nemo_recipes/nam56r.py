"""The recipes as Megatron-Bridge configurations: functions without parameters that return a ``ConfigContainer``.

``pretrain(nam56r_…_config(), forward_step)`` is Bridge's own entry; ``python -m megacpp_mcore.nemo_recipes.run`` only chooses.
Data is named by the user: ``dataset.data_path`` is empty, and a run without it stops before anything is built.
Import it after :func:`megacpp_mcore.nemo_recipes.bridge.prepare`. Written against megatron-bridge 0.6.2.
"""

from __future__ import annotations

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

from megacpp_mcore.lowering import Training
from megacpp_mcore.nemo_recipes.provider import provider
from megacpp_mcore.recipe_command import tokenizer_words
from megacpp_mcore.recipes import Recipe, recipe


def nam56r_pretrain_1gpu_h200_bf16_config() -> ConfigContainer:
    """``nam56r``, 52 layers and 4.5 B parameters, on one H200."""
    return container(recipe("nam56r_pretrain_1gpu_h200_bf16"))


def nam56r_pretrain_8gpu_h200_bf16_config() -> ConfigContainer:
    """``nam56r`` on eight H200, experts divided over all of them."""
    return container(recipe("nam56r_pretrain_8gpu_h200_bf16"))


def nam56r_quarter_pretrain_1gpu_h200_bf16_config() -> ConfigContainer:
    """``nam56r_quarter``, the first 13 layers at full width, on one H200."""
    return container(recipe("nam56r_quarter_pretrain_1gpu_h200_bf16"))


def nam56r_tiny_pretrain_1cpu_fp32_config() -> ConfigContainer:
    """``nam56r_tiny``, all four families in miniature, on the CPU lane."""
    return container(recipe("nam56r_tiny_pretrain_1cpu_fp32"))


def container(chosen: Recipe) -> ConfigContainer:
    """``chosen`` as Bridge's configuration: what :func:`megacpp_mcore.lowering.lower` tells a stock script."""
    training = chosen.training
    model = provider(chosen.model, chosen.layout, device=training.device, transformer_impl=training.transformer_impl)
    is_bf16 = training.precision == "bf16"
    return ConfigContainer(
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
            lr_warmup_iters=training.train_iters // 10,
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
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=_tokenizer(chosen),
        checkpoint=CheckpointConfig(),
        rng=RNGConfig(seed=training.seed),
        dist=DistributedInitConfig(distributed_backend=_backend(training)),
        mixed_precision=bf16_mixed() if is_bf16 else None,
    )


def _backend(training: Training) -> str:
    return "gloo" if training.device == "cpu" else "nccl"


def _tokenizer(chosen: Recipe) -> TokenizerConfig:
    """The built-in bytes for a model of their vocabulary, and ids as they are for any other."""
    words = tokenizer_words(chosen.model)
    named = {word[2:].replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    ids = {name: int(value) for name, value in named.items() if name.endswith(("_id", "vocab_size"))}
    return TokenizerConfig(tokenizer_type=named["tokenizer_type"], use_tokenizer_vocab_size=True, **ids)
