"""The recipes as Megatron-Bridge configurations: functions without parameters that return a ``ConfigContainer``.

``pretrain(nam56r_…_config(), forward_step)`` is Bridge's own entry; ``python -m megacpp_mcore.nemo_recipes.run`` selects one.
The user names the data: ``dataset.data_path`` is empty, and a run without it stops before anything is built.
Import it after :func:`megacpp_mcore.nemo_recipes.bridge.prepare`. Written against megatron-bridge 0.6.2.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

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

from megacpp_mcore import settings as plugin_config
from megacpp_mcore.arguments import lowering
from megacpp_mcore.data.tokenizer import tokenizer_words
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.launch import refusals
from megacpp_mcore.model import Model, hybrid
from megacpp_mcore.model.recipes import RECIPES, Recipe
from megacpp_mcore.model.run import GC_INTERVAL, Run
from megacpp_mcore.model.training import BY_MUON, HYBRID, MUON_SCALE, OF_MEGATRON, check_optimizer, named_as
from megacpp_mcore.nemo_recipes.provider import provider
from megacpp_mcore.nemo_recipes.read_bridge import DTYPES
from megacpp_mcore.util.nearest import nearest

_OF_THE_PROCESS = {
    "dataset": ("tokenizer",),
    "model": (
        "timers", "finalize_model_grads_func", "grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func", "no_sync_func",
        "grad_sync_func", "param_sync_func", "experimental_attention_variant_loss_scale_func",
    ),
    "optimizer": ("timers",),
}  # fmt: skip
"""Section to the fields in which a run stores objects of its process; saved as None, as they are in a recipe."""


_CUT = (
    "ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer", "ddp.overlap_param_gather",
    "optimizer.overlap_param_gather", "dist.use_megatron_fsdp", "dist.use_torch_fsdp2",
)  # fmt: skip
"""Keys that shard gradients or weights over the replicas."""


@dataclass(kw_only=True)
class NAM56RConfig(ConfigContainer):
    """Bridge's configuration, with a ``run_config.yaml`` that can be read back, and checks of checkpoint and optimizer.

    Bridge writes ``run_config.yaml`` from the configuration of the running process, including tokenizer, timers and bound
    methods, each as a class to be called without arguments or as an unbound method; ``ConfigContainer.from_yaml`` fails on
    the tokenizer. And if there is no checkpoint to load, it silently starts from random weights (``training/setup.py``,
    ``_should_load_checkpoint``, before ``exit_on_missing_checkpoint`` is checked).
    """

    def to_dict(self) -> dict[str, Any]:
        """Return only the configuration, without objects of the running process."""
        content: dict[str, Any] = super().to_dict()
        for section, fields in _OF_THE_PROCESS.items():
            content[section].update((field, None) for field in fields if field in content[section])
        return content

    def validate(self) -> None:
        """As Bridge's method, after checking checkpoint and optimizer; Bridge calls it before anything is built.

        Raises:
            LaunchError, ModelError: a checkpoint is to be loaded, and there is none; or as :meth:`check_optimizer`.
        """
        self.check_checkpoint()
        self.check_optimizer()
        super().validate()

    def check_optimizer(self) -> None:
        """Refuse an optimizer that would train wrongly or not at all, and record it in the model, whose experts depend on it.

        With the distributed optimizer, stock's command line shards optimizers other than Adam and SGD layer by layer; Bridge
        does not (``training/optim.py``): gradients would be sharded, and whole weights updated by them.

        Raises:
            LaunchError: it is sharded over the replicas, its scale is not set, or its package is not installed.
            ModelError: it does not exist, or has no moments of their dtype.
        """
        name, scale = self.optimizer.optimizer, self.optimizer.muon_extra_scale_factor
        with named_as({"optimizer": "optimizer.optimizer"}):
            check_optimizer(name, precision_aware=self.optimizer.use_precision_aware_optimizer)
        sharding = [key for key in _CUT if operator.attrgetter(key)(self)]
        if sharding and name not in OF_MEGATRON:
            raise LaunchError(
                f"{', '.join(sharding)}: true, which shards gradients or weights over the replicas, but Bridge's {name} "
                "updates whole weights; set to false"
            )
        if name in BY_MUON and scale is None:
            raise LaunchError(
                f"optimizer.muon_extra_scale_factor is not set; set {MUON_SCALE} with AdamW's learning rate, as recipes ending "
                "in _muon have it, or 1.0, which is Megatron's default"
            )
        refusals.check_installed(name)
        self.model.megacpp_optimizer = name

    def check_checkpoint(self) -> None:
        """Refuse to load a missing checkpoint, unless ``checkpoint.exit_on_missing_checkpoint`` is False.

        Either ``load`` or ``pretrained_checkpoint`` suffices, as Bridge falls back from the first to the other.
        Non-persistent checkpoints are stored elsewhere and are left to Bridge.

        Raises:
            LaunchError: it does not exist.
        """
        checkpoint = self.checkpoint
        named = {
            f"checkpoint.{name}": getattr(checkpoint, name)
            for name in ("load", "pretrained_checkpoint")
            if getattr(checkpoint, name) is not None
        }
        if not named or not checkpoint.exit_on_missing_checkpoint or checkpoint.non_persistent_ckpt_type is not None:
            return
        if not any(checkpoint_exists(path) for path in named.values()):
            paths = ", ".join(f"{key}={path}" for key, path in named.items())
            raise LaunchError(
                f"there is no checkpoint to load in {paths}; name the folder that holds latest_checkpointed_iteration.txt (or "
                "one of its iter_… folders), leave it out to begin with random weights, or, for a run that resumes where it "
                "can and begins where it cannot, add checkpoint.exit_on_missing_checkpoint=false"
            )


@functools.cache
def _factory(name: str) -> Callable[[], ConfigContainer]:
    def config() -> ConfigContainer:
        return container(RECIPES[name])

    config.__name__ = config.__qualname__ = f"{name}_config"
    config.__doc__ = f"The recipe {name}."
    return config


def __dir__() -> list[str]:
    return [*globals(), *(f"{name}_config" for name in RECIPES)]


def __getattr__(name: str) -> Callable[[], ConfigContainer]:
    """Return ``<recipe>_config`` of a recipe, to be imported by name as the functions of Bridge's own recipe modules are."""
    if name.endswith("_config") and name.removesuffix("_config") in RECIPES:
        return _factory(name.removesuffix("_config"))
    raise AttributeError(
        f"module {__name__} has no attribute {name!r}; {nearest(name, [f'{recipe_name}_config' for recipe_name in RECIPES])}"
    )


def container(chosen: Recipe) -> ConfigContainer:
    """Return ``chosen`` as Bridge's configuration, equivalent to what :func:`megacpp_mcore.arguments.lowering.lower` returns.

    It has no CUDA graphs: Bridge refuses ``cuda_graph_impl="local"`` in training (``utils/cuda_graph.py``,
    ``validate_cuda_graph_configuration``). Bridge sets ``env_vars`` where the environment has none.

    Raises:
        ConfigFileError: the file of ``MEGACPP_CONFIG`` lacks what the recipe's own switches on.
    """
    training, settings = chosen.run.training, chosen.run.settings or plugin_config.of_recipe(chosen)
    model = provider(chosen.run)
    if training.plan.file is not None:
        model.te_precision_config_file = str(training.plan.file)
    is_bf16 = training.plan.model_dtype == "bf16"
    config = NAM56RConfig(
        env_vars={plugin_config.VARIABLE: str(settings.path)} if settings and chosen.settings else {},
        model=model,
        train=TrainingConfig(
            train_iters=training.train_iters,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            exit_signal_handler=True,
        ),
        validation=ValidationConfig(eval_iters=0),
        optimizer=OptimizerConfig(
            optimizer=training.optimizer,
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=0.9,
            adam_beta2=training.adam_beta2,
            clip_grad=training.clip_grad,
            bf16=is_bf16,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            start_weight_decay=training.weight_decay,
            end_weight_decay=training.weight_decay,
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
    derive(config, chosen.run)
    return config


def derive(config: ConfigContainer, run: Run, given: Sequence[str] = ()) -> None:
    """Set the schedule, the vocabulary's padding and what is usual for ``run``, except the keys ``given`` (section.field)."""
    training, how, moments = run.training, run.execution, ("exp_avg", "exp_avg_sq")
    can_cut = training.optimizer in OF_MEGATRON  # of others see check_optimizer
    is_cut, gathers = can_cut and how.distributed_optimizer, can_cut and how.overlap_param_gather
    fields = {
        "model.make_vocab_size_divisible_by": lowering.padding_of(run.layout.tensor),
        "scheduler.lr_warmup_iters": training.warm_up_steps,
        "validation.eval_interval": training.train_iters,
        # None, not Megatron's 1.0: whoever sets muon afterwards has to choose.
        "optimizer.muon_extra_scale_factor": MUON_SCALE if training.optimizer in BY_MUON else None,
        "optimizer.min_lr": training.min_lr,
        "model.gradient_accumulation_fusion": how.gradient_accumulation_fusion,
        "ddp.use_distributed_optimizer": is_cut,
        "optimizer.use_distributed_optimizer": is_cut,
        "optimizer.use_precision_aware_optimizer": how.precision_aware,
        **{
            f"optimizer.{name}_dtype": dtype
            for dtype, dtype_name in DTYPES.items()
            for name in moments
            if getattr(how, name) == dtype_name
        },
        "checkpoint.dist_ckpt_optim_fully_reshardable": is_cut,
        "ddp.overlap_grad_reduce": how.overlap_grad_reduce,
        "ddp.overlap_param_gather": gathers,
        "optimizer.overlap_param_gather": gathers,
        "ddp.bucket_size": how.bucket_elements,
        "model.moe_token_dispatcher_type": how.moe_dispatcher,
        "model.moe_permute_fusion": how.moe_permute_fusion,
        "train.manual_gc": how.manual_gc,
        "train.manual_gc_interval": GC_INTERVAL if how.manual_gc else 0,
        "logger.log_interval": how.log_interval,
    }
    if run.model_class == HYBRID:
        fields["model.hybrid_layer_pattern"] = hybrid.plan(cast("Model", run.model), run.layout).text
    for key, value in fields.items():
        if key not in given:
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)


def _tokenizer(chosen: Recipe) -> TokenizerConfig:
    """Return the built-in byte tokenizer for a model with its vocabulary, plain token ids for any other."""
    words = tokenizer_words(chosen.model)
    named = {word[2:].replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    ids = {name: int(value) for name, value in named.items() if name.endswith(("_id", "vocab_size"))}
    return TokenizerConfig(tokenizer_type=named["tokenizer_type"], use_tokenizer_vocab_size=True, **ids)
