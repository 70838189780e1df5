"""The one seam to a training loop: listeners are notified of what the loop does as it happens; nothing else changes.

:class:`Loop` wraps the functions of ``megatron.training.training`` that the loop looks up by name, passes their arguments
and results through, and restores them. Written against megatron-core 0.19.2 and Megatron-LM core_v0.19.0; a function that no
longer exists is an error before training starts. For Megatron-Bridge, :mod:`megacpp_mcore.nemo_recipes.bridge_loop` does that.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

from megacpp_mcore.errors import LaunchError
from megacpp_mcore.observe.clock import Clock, Phase
from megacpp_mcore.observe.events import Listener, Step
from megacpp_mcore.util.stand_in import stand_in
from megacpp_mcore.versions import MEGATRON_BRIDGE, MEGATRON_CORE

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
"""Replaces a function of the loop: called with the notifier, the stock function and its arguments; returns the stock
result."""


class Seam(NamedTuple):
    """One function of the loop: the module where the loop looks it up, its name there (dotted for a method), its handler."""

    module: str
    name: str
    handler: Handler


def timed(phase: Phase, when: Callable[..., bool] = lambda *_, **__: True) -> Handler:
    """Return a handler that runs the function in ``phase`` if ``when``, called with the handler's arguments, is true."""

    def run(notifier: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_timed = when(notifier, stock, *args, **kwargs)
        with notifier.clock.within(phase) if is_timed else contextlib.nullcontext():
            return stock(*args, **kwargs)

    return run


@contextlib.contextmanager
def replaced(seams: Sequence[Seam], notifier: Notifier) -> Iterator[None]:
    """Replace the functions of ``seams`` by ones that notify; when the context ends, restore them and notify of the end.

    Raises:
        LaunchError: a function does not exist; then nothing is replaced.
    """
    with contextlib.ExitStack() as stack:
        stack.push(notifier.end)  # first, so that the listeners are notified of a missing function, too
        stack.callback(notifier.scalars.restore)
        for seam in seams:
            owner, _, name = seam.name.rpartition(".")
            try:
                holder = pkgutil.resolve_name(f"{seam.module}:{owner}")
                stack.enter_context(stand_in(holder, name, partial(seam.handler, notifier)))
            except AttributeError as error:
                missing = f"this Megatron's {seam.module} has no {seam.name}, which recording a run needs"
                supported = f"megatron-core {MEGATRON_CORE} (and megatron-bridge {MEGATRON_BRIDGE})"
                todo = f"use {supported}, or switch it off with --no-observe"
                raise LaunchError(f"{missing}; {todo}") from error
        yield


class Notifier:
    """Notifies listeners of what happens in a loop; called by the handlers that replace the loop's functions."""

    def __init__(self, clock: Clock, listeners: Sequence[Listener]) -> None:
        self.clock, self.scalars = clock, ScalarTap()
        self._listeners = list(listeners)
        self._step = 0
        self._resumed_at: int | None = None

    def notify_begin(self, number: int) -> None:
        """Notify that step ``number`` begins."""
        self._step = number
        self.notify(lambda listener: listener.on_step_begin(number))

    def notify_step(self, given: Mapping[str, Any], number: int, tokens: int) -> None:
        """Report the logged step ``number``, 1-based, with the ``tokens`` trained on since step 0.

        ``given``: the arguments of ``training_log``, by name; the losses that it computes itself are in :attr:`scalars`.
        """
        if self._resumed_at is None:
            self._resumed_at = number - 1
        grad_norm, learning_rate = given["grad_norm"], given["learning_rate"]
        step = Step(
            step=number,
            resumed_at=self._resumed_at,
            time_s=time.time(),
            tokens=tokens,
            losses=self.scalars.values | {name: float(value) for name, value in given["loss_dict"].items()},
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=None if learning_rate is None else float(learning_rate),
            skipped=bool(given["skipped_iter"]),
        )
        self.notify(lambda listener: listener.on_step(step))

    def notify(self, call: Callable[[Listener], None]) -> None:
        """Call all listeners; one that raises is removed, as recording must not end training."""
        for listener in tuple(self._listeners):
            try:
                call(listener)
            except Exception as error:
                words = f"{type(error).__name__}: {error}".partition("\n")[0]
                what = f"{type(listener).__name__} failed in step {self._step} and recorded nothing more: {words}"
                logger.exception("%s; training is not affected", what)
                if listener in self._listeners:  # not removed for raising at another's failure
                    self._listeners.remove(listener)
                with contextlib.suppress(Exception):  # whatever broke it may also break its clean-up
                    listener.on_end(error)
                self.notify(lambda other, what=what: other.on_failure(what))  # type: ignore[misc]

    def end(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Notify all listeners of the end; a script's exit with status 0 is not an error."""
        quiet = isinstance(error, SystemExit) and not error.code
        self.notify(lambda listener: listener.on_end(None if quiet else error))


class ScalarTap:
    """Records a step's losses as they are passed to TensorBoard's writer; stands in for the writer where there is none."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._restored = contextlib.ExitStack()
        self._writer: Any = None

    def tap(self, writer: Any) -> Any:
        """Return ``writer``, whose losses are recorded from now on; for None, return this object."""
        if writer is None:
            return self
        if writer is not self._writer:
            self.restore()

            def add_scalar(stock: Callable[..., None], tag: str, scalar_value: Any, *args: Any, **kwargs: Any) -> None:
                self.add_scalar(tag, scalar_value)
                stock(tag, scalar_value, *args, **kwargs)

            self._restored.enter_context(stand_in(writer, "add_scalar", add_scalar))
            self._writer = writer
        return writer

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        """Record a loss."""
        if tag.endswith("loss"):
            with contextlib.suppress(TypeError, ValueError):  # not a number: the writer may know what it is
                self.values[tag] = float(scalar_value)

    def restore(self) -> None:
        """Restore the writer."""
        self._restored.close()
        self._writer = None


# --- Megatron's own loop ----------------------------------------------------------------------------------------------


def _set_up(notifier: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    built = stock(*args, **kwargs)
    notifier.notify(lambda listener: listener.on_model(*built[:2]))
    return built


def _train(notifier: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """End the start-up phase when the loop begins."""
    notifier.clock.become(Phase.IDLE)
    return stock(*args, **kwargs)


def _train_step(notifier: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notify that a step begins: its number is one more than the completed iterations."""
    from megatron.training import get_args

    notifier.notify_begin(get_args().curr_iteration + 1)
    with notifier.clock.within(Phase.STEP):
        return stock(*args, **kwargs)


def _saves_meanwhile(*_: Any, **__: Any) -> bool:
    from megatron.training import get_args

    return bool(get_args().async_save)


def note_stop(notifier: Notifier, stock: Callable[..., Any], line: str, *args: Any, **kwargs: Any) -> Any:
    """Notify of an end before the last step: the loop logs a line about it on every rank."""
    if line.startswith("exiting program"):
        notifier.notify(lambda listener: listener.on_stop(line))
    return stock(line, *args, **kwargs)


def _training_log(notifier: Notifier, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Notify of the step; auxiliary losses are not among the arguments but go to TensorBoard's writer, which is tapped."""
    from megatron.training import get_args, training

    arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
    notifier.scalars.values = {}
    writer = notifier.scalars.tap(training.get_tensorboard_writer())
    with mock.patch.object(training, "get_tensorboard_writer", return_value=writer):
        result = stock(*args, **kwargs)
    options = get_args()
    notifier.notify_step(arguments, arguments["iteration"], options.consumed_train_samples * options.seq_length)
    return result


_TRAINING = "megatron.training.training"
BATCH = Seam(
    "megatron.core.rerun_state_machine",
    "RerunDataIterator.__next__",
    timed(Phase.DATA, lambda notifier, *_, **__: notifier.clock.phase is Phase.STEP),
)
STOCK = (
    Seam(_TRAINING, "setup_model_and_optimizer", _set_up),
    Seam(_TRAINING, "load_checkpoint", timed(Phase.LOAD)),
    Seam(_TRAINING, "train", _train),
    Seam(_TRAINING, "train_step", _train_step),
    Seam(_TRAINING, "training_log", _training_log),
    Seam(_TRAINING, "save_checkpoint", timed(Phase.SAVE)),
    Seam(_TRAINING, "save_checkpoint_and_time", timed(Phase.SAVE)),
    Seam(_TRAINING, "maybe_finalize_async_save", timed(Phase.SAVE, _saves_meanwhile)),  # called every step
    Seam(_TRAINING, "evaluate_and_print_results", timed(Phase.EVALUATION)),
    Seam(_TRAINING, "print_datetime", note_stop),
    BATCH,
)
"""The functions of Megatron's own loop."""


class Loop:
    """A training loop as the recorder of a run sees it. This class is Megatron's own loop; Megatron-Bridge's overrides it."""

    def observing(self, clock: Clock, listeners: Sequence[Listener]) -> AbstractContextManager[None]:
        """Until the context ends, drive the clock's phases by what the loop does in this process, and notify ``listeners``.

        Raises:
            LaunchError: the loop lacks one of the functions; nothing has been replaced.
        """
        return replaced(STOCK, Notifier(clock, listeners))

    def arguments(self) -> Any:
        """Return the run's arguments, by the names of stock Megatron's; known once there is a model."""
        from megatron.training import get_args

        return get_args()

    def data_words(self) -> list[str]:
        """Return the command-line words that name the run's datasets."""
        args = self.arguments()
        words: list[str] = []
        prefixes = ("", "train_", "valid_", "test_")
        for name in (*(f"{prefix}data_path" for prefix in prefixes), "data_args_path", "per_split_data_args_path"):
            if value := getattr(args, name, None):
                words += [f"--{name.replace('_', '-')}", *map(str, [value] if isinstance(value, str) else value)]
        return words

    def writers(self) -> tuple[Any, Any]:
        """Return TensorBoard's writer and W&B's run in this process, each None where there is none."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()
