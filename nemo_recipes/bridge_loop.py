"""Megatron-Bridge's training loop, observed as :mod:`megacpp_mcore.observe.loop` observes stock Megatron's.

Bridge's own callbacks report when the model is built and when training and each step begin; the rest is wrapped by name.
Written against megatron-bridge 0.6.2. No torch at import.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import Listener
from megacpp_mcore.observe.loop import BATCH, Loop, Notifier, Seam, note_stop, replaced, timed

_BRIDGE = "megatron.bridge.training"
_ALIKE = {
    "train": ("micro_batch_size", "global_batch_size", "rampup_batch_size", "train_iters"),
    "logger": ("log_interval",),
    "model": ("seq_length",),
    "tokenizer": ("tokenizer_type",),
    "optimizer": (
        "optimizer", "use_distributed_optimizer", "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype",
        "exp_avg_dtype", "exp_avg_sq_dtype",
    ),
    "dataset": ("reset_attention_mask", "split"),
}  # fmt: skip
"""Settings by part of the configuration; each has the name of the stock argument."""


def _saves_meanwhile(_: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return bool(inspect.signature(stock).bind(*args, **kwargs).arguments["ckpt_cfg"].async_save)


def _training_log(notifier: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notify of the step; log and clear the indexer's loss, which Bridge only accumulates.

    Stock's ``training_log`` does that after the losses of MTP (megatron-core 0.19.2); every rank must.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper

    log_arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
    model, state = log_arguments["config"].model, log_arguments["global_state"]
    number = state.train_state.step
    notifier.scalars.values = {}
    result = stock(*args, **kwargs)
    if model.dsa_indexer_loss_coeff:
        writers = {"writer": notifier.scalars.tap(state.tensorboard_logger), "wandb_writer": state.wandb_logger}
        scale = 1 / get_num_microbatches()
        DSAIndexerLossLoggingHelper.track_indexer_metrics(loss_scale=scale, iteration=number, **writers)
    notifier.notify_step(log_arguments, number, state.train_state.consumed_train_samples * model.seq_length)
    return result


SEAMS = (
    Seam(f"{_BRIDGE}.checkpointing", "load_checkpoint", timed(Phase.LOAD)),
    Seam(f"{_BRIDGE}.train", "train_step", timed(Phase.STEP)),
    Seam(f"{_BRIDGE}.train", "training_log", _training_log),
    # The writer to which training_log passes auxiliary losses, which are not among its arguments.
    Seam(f"{_BRIDGE}.utils.train_utils", "_build_moe_metric_writer",
         lambda notifier, stock, *args, **kwargs: notifier.scalars.tap(stock(*args, **kwargs))),
    Seam(f"{_BRIDGE}.train", "save_checkpoint_and_time", timed(Phase.SAVE)),
    Seam(f"{_BRIDGE}.checkpointing", "maybe_finalize_async_save", timed(Phase.SAVE, _saves_meanwhile)),
    Seam(f"{_BRIDGE}.train", "evaluate_and_print_results", timed(Phase.EVALUATION)),
    Seam(f"{_BRIDGE}.train", "barrier_and_log", note_stop),
    Seam(f"{_BRIDGE}.pretrain", "evaluate_and_print_results", timed(Phase.EVALUATION)),
    BATCH,
)  # fmt: skip
"""The functions of Bridge's loop for which there is no callback."""


class BridgeLoop(Loop):
    """Megatron-Bridge's loop for a run configured by a ``ConfigContainer``, with the callbacks of its ``pretrain``."""

    def __init__(self, config: Any, callbacks: Any) -> None:
        self._config, self._callbacks = config, callbacks
        self._state: Any = None

    @contextlib.contextmanager
    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> Iterator[None]:
        """See :meth:`megacpp_mcore.observe.loop.Loop.observing`; if a run logs no steps, listeners are notified of none."""
        notifier = Notifier(clock, listeners)

        def on_model(context: Any) -> None:
            self._state = context.state
            notifier.notify(lambda listener: listener.on_model(context.model, context.optimizer))

        with replaced(SEAMS, notifier):
            # Bridge takes no callback for data of whole epochs, whose number of steps it knows only later.
            has_steps = self._config.train.num_epochs is None
            self._callbacks.register("on_data_init_start" if has_steps else "on_train_start", on_model)
            self._callbacks.register("on_train_start", lambda _: clock.become(Phase.IDLE))
            self._callbacks.register(
                "on_train_step_start", lambda context: notifier.notify_begin(context.state.train_state.step + 1)
            )
            yield

    def arguments(self) -> Any:
        """Return the configuration by the names of stock arguments."""
        config = self._config
        model, data = config.model, config.dataset
        spec: Any = getattr(model, "transformer_layer_spec", None)
        ours = getattr(model, "megacpp_spec", None)  # of the provider of HybridModel
        alike = {name: getattr(getattr(config, part), name) for part, names in _ALIKE.items() for name in names}
        return SimpleNamespace(
            **alike,
            spec=(spec.__module__, spec.__qualname__) if inspect.isfunction(spec) else ours,
            world_size=int(os.environ["WORLD_SIZE"]),
            data_parallel_size=config.data_parallel_size,
            padded_vocab_size=model.padded_vocab_size(),
            dataloader_inter_document_masking=data.inter_document_masking,
            fim_data=getattr(data, "fim_data", False),
            mock_data=data.mock,
        )

    def data_words(self) -> list[str]:
        """Return the words of a stock command line that would name the same datasets."""
        from megacpp_mcore.data.arguments import bridge_words  # brings numpy

        return bridge_words(self._config.dataset)

    def writers(self) -> tuple[Any, Any]:
        """Return the writers of Bridge's state, which creates them when it first logs a step."""
        return (None, None) if self._state is None else (self._state.tensorboard_logger, self._state.wandb_logger)
